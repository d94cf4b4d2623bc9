"""The streams of transforms are distinguished by their names, not by their positions."""

import zlib

import pytest
import torch
from test_stream import python_philox

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def words_of(*transforms, layers=False):
    """The first words of each stream after a reset with a seed, by name."""
    env = ScriptedEnv(3)
    for stack in transforms if layers else [transforms]:
        parts = stack if isinstance(stack, tuple) else (stack,)
        env = tw.TransformedEnv(env, *parts)
    env.reset(seed=7)
    found = {}
    for name, module in env.named_modules():
        if isinstance(module, tw.random.Stream) and module.tag > 1:
            found[name] = tw.random.bits(module.key(), 4)
    return found


OTHERS = {
    "below": lambda: (T.AddNoise(0.0), T.DelayAction((0, 2))),
    "above": lambda: (T.DelayAction((0, 2)), T.AddNoise(0.0)),
    "around": lambda: (T.AddNoise(0.0), T.DelayAction((0, 2)), T.StickyAction(0.0)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_transforms_that_draw_do_not_change_a_transforms_words(make):
    alone = words_of(T.DelayAction((0, 2)))
    name = "transforms.DelayAction.stream"
    assert torch.equal(words_of(*make())[name], alone[name])


def test_names_of_a_dict_carry_their_words_to_other_positions():
    first = words_of(T.Compose({"camera": T.AddNoise(1.0), "motor": T.AddNoise(1.0)}))
    second = words_of(T.Compose({"motor": T.AddNoise(1.0), "camera": T.AddNoise(1.0)}))
    assert all(torch.equal(first[name], second[name]) for name in first)


SAME_CLASS = {
    "one layer": lambda: words_of(T.AddNoise(1.0), T.AddNoise(1.0)),
    "two layers": lambda: words_of(T.AddNoise(1.0), T.AddNoise(1.0), layers=True),
    "groups": lambda: words_of(
        T.ObservationGroups({"a": [T.AddNoise(1.0)], "b": [T.AddNoise(1.0)]})
    ),
}


@pytest.mark.parametrize("make", SAME_CLASS.values(), ids=SAME_CLASS)
def test_two_transforms_of_a_class_draw_other_words(make):
    first, second = make().values()
    assert (first != second).all()


def test_words_of_a_transform_are_philox_of_the_seed_and_the_checksum_of_its_name():
    (found,) = words_of(T.AddNoise(1.0)).values()
    checksum = zlib.crc32(b"transforms.AddNoise.stream 1")
    rows = [python_philox(7, checksum, 0, 16 << 24, row, 0) for row in range(3)]
    assert found.tolist() == rows
