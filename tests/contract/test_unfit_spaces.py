"""A transform on a space that does not fit raises, and leaves the env and the transform as they were."""

import copy
import functools
import math
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

INF, NAN = math.inf, math.nan


def images(*shape, low=0, high=255, dtype=np.uint8):
    return spaces.Box(low, high, shape, dtype)


FREE, FINITE, HALF = spaces.Box(-INF, INF, (3,)), spaces.Box(0, 40, (3,)), spaces.Box(0, INF, (3,))
FLAT, SCALAR = spaces.Box(np.float32([0, 1, 0]), np.float32([1, 1, 1])), spaces.Box(-9, 9, ())
WHOLE, BYTES = images(3, low=-5, high=5, dtype=int), images(3)
BOOLS, WIDE = images(3, high=1, dtype=bool), images(3, low=-3e38, high=3e38, dtype=np.float32)
WIDER, HALVES = images(3, high=40, dtype=np.float64), images(3, high=1, dtype=np.float16)
GRAY, COLOR, FLOATS = images(4, 4), images(4, 4, 3), images(4, 4, 3, high=1, dtype=np.float32)
COUNT, BITS, GRID = spaces.Discrete(3), spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])
DICT, PAIR = spaces.Dict(kind=COUNT, position=FINITE), spaces.Tuple([COUNT, FINITE])
NO_BOX = (COUNT, BITS, GRID, DICT, PAIR)
NO_FLOATS = (*NO_BOX, WHOLE, BYTES)

# A case is what is constructed, the spaces that it does not fit (None: an env without a time limit), the error, a pattern of
# how its message starts, and a space that fits, if there is one. For transforms of actions these are action spaces.

NUMBERS = [
    (
        lambda: T.ClipObservation(0, 1),
        NO_BOX,
        TypeError,
        "ClipObservation needs a Box observation space",
        FREE,
    ),
    (
        lambda: T.ClipObservation(300, 400),
        (BYTES,),
        ValueError,
        "ClipObservation needs .* uint8 .*, but got .*=300",
        WHOLE,
    ),
    (
        lambda: T.ClipObservation(1.2, 1.8),
        (WHOLE,),
        ValueError,
        "ClipObservation needs .* int64 .*, but got .*=1.2",
        FREE,
    ),
    (
        lambda: T.ClipObservation(0, 1),
        (BOOLS,),
        TypeError,
        "ClipObservation needs a Box observation space of numbers",
        FREE,
    ),
    (
        lambda: T.ClipObservation(1e39, 1e40),
        (FREE, HALVES),
        ValueError,
        "ClipObservation .* float.*, but got .*=1e.39",
        WIDER,
    ),
    (
        lambda: T.ClipObservation(INF, INF),
        (FREE, BYTES, WHOLE),
        ValueError,
        "ClipObservation needs .*, but got .*=inf",
    ),
    (
        T.NormalizeObservation,
        (BOOLS, spaces.Dict(a=BOOLS)),
        TypeError,
        "NormalizeObservation .* of numbers, but got",
        BYTES,
    ),
    (
        T.NormalizeObservation,
        (COUNT, BITS, GRID),
        TypeError,
        "NormalizeObservation needs a Box observation space",
        SCALAR,
    ),
    (
        T.NormalizeObservation,
        (DICT, PAIR),
        TypeError,
        "NormalizeObservation needs .*, but got .* with ObservationKeys",
        COLOR,
    ),
    (
        lambda: T.ClipObservation(0, 1),
        (DICT,),
        TypeError,
        "ClipObservation needs .*: transform .* with ObservationKeys",
        FREE,
    ),
    (
        lambda: T.AddNoise([1, 2]),
        (FREE,),
        ValueError,
        r"AddNoise needs .* broadcasts to \(3,\), but got \(2,\)",
    ),
    (
        lambda: T.ReshapeObservation((3, 1)),
        NO_BOX,
        TypeError,
        "ReshapeObservation needs a Box observation space",
        FINITE,
    ),
    (
        lambda: T.ReshapeObservation([16]),
        (COLOR,),
        ValueError,
        r"ReshapeObservation needs .* 48 .*, but got \(16,\)",
        GRAY,
    ),
    (
        lambda: T.RescaleObservation(0, 1),
        NO_FLOATS,
        TypeError,
        "RescaleObservation needs a Box .* space of floats",
        FLOATS,
    ),
    (
        lambda: T.RescaleObservation(0, 1),
        (FREE, HALF),
        ValueError,
        "RescaleObservation needs .*, but got 0 and 1",
        FINITE,
    ),
    (
        lambda: T.RescaleObservation(0, INF),
        (FREE, FINITE),
        ValueError,
        "RescaleObservation .*, but got 0 and inf",
        HALF,
    ),
    (
        lambda: T.RescaleObservation(0, 1),
        (FLAT,),
        ValueError,
        "RescaleObservation needs .* with low < high",
        SCALAR,
    ),
    (
        lambda: T.RescaleObservation([0, 0], 1),
        (FINITE,),
        ValueError,
        r"RescaleObservation needs .*, but got \(2,\)",
    ),
    (
        lambda: T.RescaleObservation(-1e300, 1e300),
        (FINITE, WIDE),
        ValueError,
        "RescaleObservation .* float32.*but got",
        WIDER,
    ),
    (
        lambda: T.RescaleObservation(0, 1e-46),
        (FINITE,),
        ValueError,
        "RescaleObservation .* float32 .*, but got",
        WIDER,
    ),
    (
        lambda: T.RescaleObservation(1, 1 + 1e-9),
        (FINITE,),
        ValueError,
        "RescaleObservation .* float32 .*, but got",
        WIDER,
    ),
    (
        lambda: T.RescaleObservation(-1, 1),
        (spaces.Box(0, 1e-45, (2,)),),
        ValueError,
        "RescaleObservation .*, but got",
        WIDE,
    ),
    (
        lambda: T.RescaleAction(-1e300, 1e300),
        (FINITE,),
        ValueError,
        "RescaleAction needs .* float32 .*, but got",
        WIDER,
    ),
    (
        lambda: T.RescaleAction(0, 1),
        NO_FLOATS,
        TypeError,
        "RescaleAction needs a Box action space of floats",
        FLOATS,
    ),
    (
        lambda: T.RescaleAction(0, 1),
        (FREE, HALF),
        ValueError,
        "RescaleAction needs .* with finite bounds",
        FINITE,
    ),
    (
        lambda: T.RescaleAction(0, 1),
        (FLAT,),
        ValueError,
        "RescaleAction needs an action space with low < high",
        SCALAR,
    ),
    (
        lambda: T.RescaleAction([0, 0], 1),
        (FINITE,),
        ValueError,
        r"RescaleAction needs bounds .*, but got \(2,\)",
    ),
    (T.ClipAction, NO_FLOATS, TypeError, "ClipAction needs a Box action space of floats", HALF),
]

DISCRETIZED = [
    (
        lambda: T.DiscretizeObservation(3),
        NO_BOX,
        TypeError,
        "DiscretizeObservation needs a Box observation space",
        FINITE,
    ),
    (
        lambda: T.DiscretizeObservation(3),
        (FREE, HALF),
        ValueError,
        "DiscretizeObservation needs .* finite bounds",
        SCALAR,
    ),
    (
        lambda: T.DiscretizeObservation([3]),
        (FINITE,),
        ValueError,
        r"DiscretizeObservation .*, but got \(3,\)",
        SCALAR,
    ),
    (
        lambda: T.DiscretizeObservation(2**21),
        (FINITE,),
        ValueError,
        "DiscretizeObservation needs at most .*, but got 2097152",
    ),
    (
        lambda: T.DiscretizeObservation(3),
        (WIDE,),
        ValueError,
        "DiscretizeObservation needs a box .* finite width",
        FINITE,
    ),
    (
        lambda: T.DiscretizeObservation(3),
        (BOOLS,),
        TypeError,
        "DiscretizeObservation needs a Box .* of numbers",
        BYTES,
    ),
    (
        lambda: T.DiscretizeAction(3),
        NO_BOX,
        TypeError,
        "DiscretizeAction needs a Box action space",
        WHOLE,
    ),
    (
        lambda: T.DiscretizeAction(3),
        (FREE, HALF),
        ValueError,
        "DiscretizeAction needs a box with finite bounds",
        FINITE,
    ),
    (
        lambda: T.DiscretizeAction(1291),
        (FINITE,),
        ValueError,
        "DiscretizeAction .* 2147483648 .*but got 1291",
        SCALAR,
    ),
]

NO_IMAGE = (
    *NO_FLOATS,
    FREE,
    FLOATS,
    images(1, 4, 4, 3),
    images(4, 4, low=1),
    images(4, 4, high=9),
    images(4, 4, dtype=int),
)
IMAGES = [
    (
        T.GrayscaleObservation,
        NO_IMAGE,
        TypeError,
        "GrayscaleObservation needs images as Box",
        COLOR,
    ),
    (
        T.GrayscaleObservation,
        (GRAY, images(3, 4, 4)),
        ValueError,
        "GrayscaleObservation needs images with 3",
        COLOR,
    ),
    (lambda: T.AddWhiteNoise(0.5), NO_IMAGE, TypeError, "AddWhiteNoise needs images as Box", GRAY),
    (
        lambda: T.AddWhiteNoise(0.5, True),
        (GRAY, images(3, 4, 4)),
        ValueError,
        "AddWhiteNoise needs images with 3",
        COLOR,
    ),
    (lambda: T.ObstructView(0.5, 2), NO_IMAGE, TypeError, "ObstructView needs images as Box", GRAY),
    (
        lambda: T.ObstructView(0.5, 2, True),
        (GRAY, images(3, 4, 4)),
        ValueError,
        "ObstructView needs images with 3",
        COLOR,
    ),
    (
        lambda: T.ResizeObservation((2, 2)),
        NO_IMAGE,
        TypeError,
        "ResizeObservation needs images as Box",
        GRAY,
    ),
    (
        lambda: T.ResizeObservation((5, 4)),
        (COLOR,),
        ValueError,
        r"ResizeObservation .*, but got \(5, 4\)",
        images(5, 4),
    ),
]

DTYPES_AND_KEYS = [
    (
        lambda: T.DtypeObservation("float32"),
        (GRID, DICT, PAIR),
        TypeError,
        "DtypeObservation needs .* fit float32",
        BITS,
    ),
    (
        lambda: T.DtypeObservation("uint8"),
        (WHOLE, FREE, HALF),
        TypeError,
        "DtypeObservation needs .* fit uint8",
        COLOR,
    ),
    (
        lambda: T.DtypeObservation("int32"),
        (FREE, HALF),
        TypeError,
        "DtypeObservation needs .* fit int32",
        FINITE,
    ),
    (
        lambda: T.DtypeObservation(torch.int8),
        (BYTES, COLOR),
        TypeError,
        "DtypeObservation needs .* fit int8",
        WHOLE,
    ),
    (
        lambda: T.DtypeObservation(bool),
        (FINITE, COUNT),
        TypeError,
        "DtypeObservation needs .* values fit bool",
        BITS,
    ),
    (
        lambda: T.FilterObservation(["kind"]),
        (FREE, COUNT),
        TypeError,
        "FilterObservation needs a Dict or Tuple",
        DICT,
    ),
    (
        lambda: T.FilterObservation(["kind", "a"]),
        (DICT,),
        ValueError,
        r"FilterObservation .*, but got \['kind', 'a'\]",
    ),
    (
        lambda: T.FilterObservation([0]),
        (DICT,),
        ValueError,
        r"FilterObservation needs .*, but got \[0\]",
        PAIR,
    ),
    (
        lambda: T.FilterObservation(["kind"]),
        (PAIR,),
        ValueError,
        r"FilterObservation needs .*, but got \['kind'\]",
        DICT,
    ),
]


def stack(padding):
    return T.FrameStackObservation(2, padding_type=padding)


HISTORY = [
    (
        lambda: stack(None),
        (FREE, *NO_BOX),
        ValueError,
        "FrameStackObservation needs a padding_type in .*, but got None",
    ),
    (
        lambda: stack(3),
        (FREE, COUNT, DICT),
        ValueError,
        "FrameStackObservation needs .*, but got 3",
        SCALAR,
    ),
    (
        lambda: stack(np.float32([50, 0, 0])),
        (FINITE,),
        ValueError,
        r"FrameStackObservation .*, but got array\(\[50",
        FREE,
    ),
    (
        lambda: stack(np.full(3, NAN)),
        (FREE,),
        ValueError,
        r"FrameStackObservation needs .*, but got array\(\[nan",
    ),
    (
        lambda: stack({"kind": 1}),
        (DICT, COUNT),
        ValueError,
        "FrameStackObservation needs .*, but got {'kind': 1}",
    ),
    (
        T.TimeAwareObservation,
        (None,),
        ValueError,
        "TimeAwareObservation needs a step limit, but got an env without one",
        FREE,
    ),
    (
        lambda: T.TimeAwareObservation(dict_time_key="kind"),
        (DICT,),
        ValueError,
        "TimeAware.*, but got 'kind'",
        PAIR,
    ),
]

observe, act, same = T.TransformObservation, T.TransformAction, torch.clone
FUNCTIONS = [
    (
        lambda: observe(lambda x: x + 7),
        (COUNT,),
        ValueError,
        "TransformObservation needs .*, but got values from 7",
        FREE,
    ),
    (
        lambda: observe(lambda x: x["kind"]),
        (DICT,),
        TypeError,
        "TransformObservation needs .* keys .*, but got Tensor",
    ),
    (
        lambda: observe(same, COLOR),
        (FREE, COUNT, GRAY),
        ValueError,
        r"TransformObservation needs .*, but got \(2",
        COLOR,
    ),
    (
        lambda: observe(same, BYTES),
        (FREE, WHOLE),
        TypeError,
        "TransformObservation needs .*, but got torch",
        BYTES,
    ),
    (
        lambda: observe(lambda x: x @ x),
        (FINITE,),
        ValueError,
        "TransformObservation needs a func .* it raised Runtime",
        GRAY,
    ),
    (
        lambda: observe(lambda x, y: x),
        (FREE, DICT),
        TypeError,
        "TransformObservation needs a func .* it raised TypeError",
    ),
    (
        lambda: act(lambda x: x["kind"]),
        (FREE,),
        ValueError,
        "TransformAction needs a func .* it raised IndexError",
    ),
    (
        lambda: T.TransformReward(lambda x, y: x),
        (FREE,),
        TypeError,
        "TransformReward needs a func .* it raised TypeError",
    ),
    (
        lambda: act(lambda x: x - 1),
        (COUNT,),
        ValueError,
        "TransformAction needs .*, but got values from -1 to -1",
        FREE,
    ),
]

# What a function returns instead of numbers (2, 3), or rewards (2, 1); the error, and a pattern of its message.
RESULTS = [
    (lambda x: x[:1], ValueError, r"of shape \(2, \d\) .*, but got \(1, \d\)"),
    (lambda x: x.double(), TypeError, "of dtype torch.float32 .*, but got torch.float64"),
    (lambda x: x.argsort(), TypeError, "of dtype torch.float32 .*, but got torch.int64"),
    (lambda x: x.to("meta"), ValueError, "on device cpu, but got meta"),
    (lambda x: x.numpy(), TypeError, "as a torch.Tensor, but got ndarray"),
    (lambda x: TensorDict(a=x), TypeError, "as a torch.Tensor, but got TensorDict"),
    (lambda x: None, TypeError, "as a torch.Tensor, but got NoneType"),
]
FUNCTIONS += [
    (
        functools.partial(make, function),
        (FINITE,),
        error,
        f"{make.__name__} needs func to return .* {words}",
    )
    for make in (T.TransformObservation, T.TransformReward, T.TransformAction)
    for function, error, words in RESULTS
]

CASES = [
    (make, space, error, words, fits)
    for make, unfit, error, words, *fits in [
        *NUMBERS,
        *DISCRETIZED,
        *IMAGES,
        *DTYPES_AND_KEYS,
        *HISTORY,
        *FUNCTIONS,
    ]
    for space in unfit
]
FIRST = list(
    {words.split()[0]: case for case in reversed(CASES) for words in [case[3]]}.values()
)  # of each class


def outermost(transform):
    return [*transform.flat()][-1]


def env_with(space, transform):
    """A new env with this space: of actions for a transform of actions, or else of observations."""
    if space is None:
        return ScriptedEnv(2)
    which = (
        "action_space"
        if isinstance(outermost(transform), T.ActionTransform)
        else "observation_space"
    )
    return tw.TransformedEnv(ScriptedEnv(2, **{which: copy.deepcopy(space)}), T.TimeLimit(3))


def trajectory(env, td):
    return dict(tw.rollout(env, None, 3, td)[0].items(True, True))


def assert_same(one, other, name):
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), (
        name
    )


@pytest.mark.filterwarnings(
    "ignore:.*Casting input x to numpy array"
)  # Gymnasium's, from Box.contains
def test_transform_on_an_unfit_space_raises_with_its_position_and_is_not_attached():
    for make, space, error, words, _ in CASES:
        transform, env = make(), env_with(space, make())
        name, index, signature = (
            type(outermost(transform)).__name__,
            len([*transform.flat()]) - 1,
            env.signature,
        )
        with pytest.raises((TypeError, ValueError)) as raised:
            tw.TransformedEnv(env, transform)
            pytest.fail(f"{name} accepts {space}")
        message = str(raised.value)
        position = rf"transforms\[{index}\] \({name}\): "
        assert type(raised.value) is error and re.match(position + words, message), message
        assert re.search(rf"\b{name} .*needs .*, but (got|it raised) ", message), message
        assert re.search("but got|it raised", words) or f", but got {space}" in message, message
        assert not any(part.attached for part in transform.flat()), name
        assert env.signature == signature, name


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize(
    "cases", [FIRST, pytest.param(CASES, marks=pytest.mark.full)], ids=["first", "all"]
)
def test_transform_that_was_refused_changes_nothing_and_works_on_a_space_that_fits(cases):
    for make, space, error, words, fits in cases:
        transform, env, untouched = make(), env_with(space, make()), env_with(space, make())
        td = env.reset(seed=0)
        with pytest.raises(error):
            tw.TransformedEnv(env, transform)
        assert_same(trajectory(env, td), trajectory(untouched, untouched.reset(seed=0)), words)
        for fit in fits:
            one, other = (
                tw.TransformedEnv(env_with(fit, transform), part) for part in (transform, make())
            )
            assert_same(
                trajectory(one, one.reset(seed=0)), trajectory(other, other.reset(seed=0)), words
            )
