"""A transform on an unfit space raises, and leaves the env and itself as they were."""

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from helpers import assert_same, from_reset
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

INF = math.inf
DISCRETE = Discrete(3)
FINITE = Box(0, 40, (3,))
SPACES = {
    "discrete": DISCRETE,
    "bits": MultiBinary(3),
    "grid": MultiDiscrete([2, 3]),
    "dict": Dict(kind=DISCRETE, position=FINITE),
    "tuple": Tuple([DISCRETE, FINITE]),
    "finite": FINITE,
    "unbounded": Box(-INF, INF, (3,)),
    "bounded-below": Box(0, INF, (3,)),
    "constant": Box(np.float32([0, 1, 0]), np.float32([1, 1, 1])),
    "integers": Box(-5, 5, (3,), int),
    "bytes": Box(0, 255, (3,), np.uint8),
    "bools": Box(0, 1, (3,), bool),
    "halves": Box(0, 1, (3,), np.float16),
    "gray": Box(0, 255, (4, 4), np.uint8),
    "colors": Box(0, 255, (4, 4, 3), np.uint8),
    "channels-first": Box(0, 255, (3, 4, 4), np.uint8),
    "larger": Box(0, 255, (5, 4), np.uint8),
    "float-image": Box(0, 1, (4, 4, 3)),
    "low-image": Box(0, 9, (4, 4), np.uint8),
    "int-image": Box(0, 255, (4, 4), int),
    "video": Box(0, 255, (1, 4, 4, 3), np.uint8),
}
NO_BOX = "discrete bits grid dict tuple"
NO_FLOATS = f"{NO_BOX} integers bytes"
NO_IMAGE = f"{NO_BOX} unbounded bytes float-image low-image int-image video"
NO_COLOR = "gray channels-first"


def stack(padding, **arguments):
    return T.FrameStackObservation(2, padding_type=padding, **arguments)


# A transform, the error, and spaces that do not fit: of actions if the transform changes actions,
# else of observations.
TRANSFORMS = {
    "clip": (T.ClipObservation(0, 1), TypeError, f"{NO_BOX} bools"),
    "clip above bytes": (T.ClipObservation(300, 400), ValueError, "bytes"),
    "clip above floats": (T.ClipObservation(1e39, 1e40), ValueError, "unbounded halves"),
    "normalize": (T.NormalizeObservation(), TypeError, f"{NO_BOX} bools"),
    "noise": (T.AddNoise(1), TypeError, NO_FLOATS),
    "reshape": (T.ReshapeObservation((3, 1)), TypeError, NO_BOX),
    "rescale": (T.RescaleObservation(0, 1), TypeError, NO_FLOATS),
    "rescale finite": (T.RescaleObservation(0, 1), ValueError, "unbounded bounded-below constant"),
    "rescale action": (T.RescaleAction(0, 1), TypeError, NO_FLOATS),
    "rescale finite action": (
        T.RescaleAction(0, 1),
        ValueError,
        "unbounded bounded-below constant",
    ),
    "clip action": (T.ClipAction(), TypeError, NO_FLOATS),
    "bins": (T.DiscretizeObservation(3), TypeError, f"{NO_BOX} bools"),
    "grayscale": (T.GrayscaleObservation(), TypeError, NO_IMAGE),
    "grayscale of gray": (T.GrayscaleObservation(), ValueError, NO_COLOR),
    "white noise": (T.AddWhiteNoise(0.5), TypeError, NO_IMAGE),
    "obstruct": (T.ObstructView(0.5, 2), TypeError, NO_IMAGE),
    "resize": (T.ResizeObservation((2, 2)), TypeError, NO_IMAGE),
    "resize larger": (T.ResizeObservation((5, 4)), ValueError, "colors"),
    "uint8": (T.DtypeObservation("uint8"), TypeError, "integers unbounded"),
    "filter": (T.FilterObservation(["kind"]), TypeError, "finite discrete"),
    "filter by index": (T.FilterObservation([0]), ValueError, "dict"),
    "stack of None": (stack(None), ValueError, f"finite {NO_BOX}"),
    "stack of 3": (stack(3), ValueError, "finite discrete dict"),
    "stack along axis 1": (stack("zero", axis=1), ValueError, "finite"),
    "stack of counts": (stack("zero", axis=0), TypeError, "discrete"),
    "time without limit": (T.TimeAwareObservation(), ValueError, "no-limit"),
    "function adds": (T.TransformObservation(lambda x: x + 7), ValueError, "discrete"),
    "function to colors": (
        T.TransformObservation(torch.clone, SPACES["colors"]),
        ValueError,
        "finite discrete gray",
    ),
    "function subtracts": (T.TransformAction(lambda x: x - 1), ValueError, "discrete"),
    "function of rewards": (T.TransformReward(lambda x, y: x), TypeError, "finite"),
}
# Results of a function instead of float32 numbers of the same shape.
RESULTS = {
    "fewer rows": (lambda x: x[:1], ValueError),
    "float64": (lambda x: x.double(), TypeError),
    "int64": (lambda x: x.argsort(), TypeError),
    "another device": (lambda x: x.to("meta"), ValueError),
    "an array": (lambda x: x.numpy(), TypeError),
    "a TensorDict": (lambda x: TensorDict(a=x), TypeError),
    "nothing": (lambda x: None, TypeError),
}


def env_with(space, transform):
    """A new env with this space: of actions for a transform of actions, or else of observations."""
    if space == "no-limit":
        return ScriptedEnv(2)
    is_action = isinstance(transform, T.ActionTransform)
    name = "action_space" if is_action else "observation_space"
    env = ScriptedEnv(
        2,
        **{name: copy.deepcopy(SPACES[space])},
    )
    return tw.TransformedEnv(env, T.TimeLimit(3))


def trajectory(env):
    return from_reset(tw.Collector(env, None, 3))


def unfit():
    cases = []
    for label, (transform, error, spaces) in TRANSFORMS.items():
        for space in spaces.split():
            cases.append(pytest.param(transform, error, space, id=f"{label}-{space}"))
    return cases


pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")


@pytest.mark.parametrize(
    ("transform", "error", "space"),
    unfit(),
)
def test_transform_on_an_unfit_space_raises_with_its_position(transform, error, space):
    transform = copy.deepcopy(transform)
    env = env_with(space, transform)
    signature = env.signature
    with pytest.raises((TypeError, ValueError)) as raised:
        tw.TransformedEnv(env, transform)
    assert raised.type is error
    assert str(raised.value).startswith(f"transforms[0] ({type(transform).__name__}): ")
    assert not transform.attached
    assert env.signature == signature


def test_refused_transform_changes_nothing_and_works_elsewhere():
    transform = T.RescaleObservation(0, 1)
    env = env_with("unbounded", transform)
    with pytest.raises(ValueError):
        tw.TransformedEnv(env, transform)
    assert_same(trajectory(env), trajectory(env_with("unbounded", transform)))
    refused = tw.TransformedEnv(env_with("finite", transform), transform)
    unused = tw.TransformedEnv(env_with("finite", transform), T.RescaleObservation(0, 1))
    assert_same(trajectory(refused), trajectory(unused))


@pytest.mark.parametrize(
    "kind", [T.TransformObservation, T.TransformReward, T.TransformAction], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("result", RESULTS)
def test_function_with_another_result_raises(kind, result):
    function, error = RESULTS[result]
    transform = kind(function)
    with pytest.raises(error, match=kind.__name__):
        tw.TransformedEnv(env_with("finite", transform), transform)
