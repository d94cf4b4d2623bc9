"""TransformedEnv: an env with transforms on it."""

import pytest

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

# How transforms are given, and the classes of what `env.transforms` then holds.
GIVEN = {
    "none": (lambda: [], []),
    "one": (lambda: [T.TimeLimit(4)], [T.TimeLimit]),
    "several": (
        lambda: [T.NormalizeObservation(), T.TimeLimit(4)],
        [T.NormalizeObservation, T.TimeLimit],
    ),
    "one Compose": (
        lambda: [T.Compose([T.TimeLimit(4), T.ScaleReward(2), T.ClipReward(-5, 5)])],
        [T.TimeLimit, T.ScaleReward, T.ClipReward],
    ),
    "a nested Compose": (
        lambda: [T.Compose([T.Compose([T.TimeLimit(4)]), T.ScaleReward(2)])],
        [T.Compose, T.ScaleReward],
    ),
    "a Compose and more": (
        lambda: [T.Compose([T.TimeLimit(4)]), T.ScaleReward(2)],
        [T.Compose, T.ScaleReward],
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_transformed_env_transforms_are_a_compose_whatever_was_given(name):
    make, kinds = GIVEN[name]
    transforms = tw.TransformedEnv(ScriptedEnv(2), *make()).transforms
    assert type(transforms) is T.Compose and len(transforms) == len(kinds)
    assert [type(part) for part in transforms] == kinds
    for index, kind in enumerate(kinds):
        assert (
            type(transforms[index]) is kind and transforms[index - len(kinds)] is transforms[index]
        )
    assert [type(part) for part in transforms[1:]] == kinds[1:] and transforms[:] == list(
        transforms
    )
    assert (
        name != "one Compose"
        or tw.TransformedEnv(ScriptedEnv(2), compose := make()[0]).transforms is compose
    )
    for index in (len(kinds), -len(kinds) - 1):
        with pytest.raises(IndexError):
            transforms[index]


def test_transformed_env_of_wrong_parts_raises():
    normalize = T.NormalizeObservation()
    tw.TransformedEnv(ScriptedEnv(2), normalize)
    for make, error, message in (
        (
            lambda: tw.TransformedEnv(T.TimeLimit(3)),
            TypeError,
            "needs an Env as its first argument, but got TimeLimit",
        ),
        (
            lambda: tw.TransformedEnv(ScriptedEnv(), T.TimeLimit(3), None),
            TypeError,
            r"got NoneType at transforms\[1\]",
        ),
        (
            lambda: tw.TransformedEnv(ScriptedEnv(3), normalize),
            ValueError,
            "belong to no other env, but got NormalizeObserva",
        ),
    ):
        with pytest.raises(error, match=message):
            make()
