"""TransformedEnv: an env with transforms on it."""

import pytest

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def limit():
    return T.TimeLimit(4)


def compose():
    return T.Compose([limit(), T.ScaleReward(2)])


GIVEN = {  # how transforms are given, and the classes that `env.transforms` then holds
    "none": (lambda: [], []),
    "one": (lambda: [limit()], [T.TimeLimit]),
    "several": (
        lambda: [T.NormalizeReward(), limit()],
        [T.NormalizeReward, T.TimeLimit],
    ),
    "one Compose": (
        lambda: [compose()],
        [T.TimeLimit, T.ScaleReward],
    ),
    "a nested Compose": (
        lambda: [T.Compose([compose(), limit()])],
        [T.Compose, T.TimeLimit],
    ),
    "a Compose and more": (
        lambda: [compose(), limit()],
        [T.Compose, T.TimeLimit],
    ),
}


@pytest.mark.parametrize("make, kinds", GIVEN.values(), ids=GIVEN)
def test_transforms_are_a_compose_however_they_are_given(make, kinds):
    transforms = tw.TransformedEnv(ScriptedEnv(2), *make()).transforms
    assert type(transforms) is T.Compose and len(transforms) == len(kinds)
    assert [type(part) for part in transforms] == kinds
    assert [type(part) for part in transforms[1:]] == kinds[1:]
    assert transforms[:] == list(transforms)
    for index in range(len(kinds)):
        assert transforms[index] is transforms[index - len(kinds)] is list(transforms)[index]
    with pytest.raises(IndexError):
        transforms[len(kinds)]
    with pytest.raises(IndexError):
        transforms[-len(kinds) - 1]


def test_single_compose_is_taken_as_it_is():
    given = compose()
    assert tw.TransformedEnv(ScriptedEnv(2), given).transforms is given


def attached():
    transform = T.NormalizeReward()
    tw.TransformedEnv(ScriptedEnv(2), transform)
    return transform


WRONG = {
    "no env": (
        lambda: tw.TransformedEnv(limit()),
        TypeError,
        "env",
    ),
    "no transform": (
        lambda: tw.TransformedEnv(ScriptedEnv(), limit(), None),
        TypeError,
        r"transforms\[1\]",
    ),
    "of another env": (
        lambda: tw.TransformedEnv(ScriptedEnv(3), attached()),
        ValueError,
        "transforms",
    ),
}


@pytest.mark.parametrize("make, error, name", WRONG.values(), ids=WRONG)
def test_transformed_env_of_wrong_parts_raises(make, error, name):
    with pytest.raises(error, match=name):
        make()
