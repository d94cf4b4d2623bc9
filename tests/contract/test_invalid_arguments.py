"""Every invalid argument of a transform raises an error that names the argument."""

import inspect
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

import torchwrap as tw
from torchwrap import transforms as T

INF = math.inf
NAN = math.nan
CLIP = T.ClipReward(-1, 1)

# Wrong values of each kind of argument, by the error that they raise.
WRONG = {
    "integer": {TypeError: [None, "3"], ValueError: [0, -7]},
    "period": {TypeError: ["3", 2.0], ValueError: [0, -7, True]},
    "delay": {ValueError: [-1, False]},
    "duration": {ValueError: [0, ()]},
    "flag": {TypeError: [None, 1]},
    "choice": {ValueError: ["", "rest"]},
    "padding": {ValueError: ["", "rest", b"zero"]},
    "zero": {ValueError: ["", "reset"]},
    "shape": {TypeError: [84, "84"], ValueError: [(0, 2), (-7, 2)]},
    "no shape": {TypeError: [3, "84", None], ValueError: [(), (-1,)]},
    "number": {TypeError: [None, "0.5"], ValueError: [NAN, 10**309]},
    "float32": {TypeError: [None, "0.5"], ValueError: [NAN, INF, -1e39]},
    "positive": {TypeError: [None, "0.5"], ValueError: [NAN, 0]},
    "fraction": {TypeError: [None, "0.5"], ValueError: [NAN, -0.1]},
    "below one": {TypeError: [None, "0.5"], ValueError: [NAN, -0.1]},
    "lower bound": {TypeError: ["0.5", [0.5], True], ValueError: [NAN, INF, 1e39]},
    "upper bound": {TypeError: ["0.5", [0.5], True], ValueError: [NAN, -1, -INF]},
    "function": {TypeError: [None, 3]},
    "space": {
        TypeError: [(3,), "Box"],
        ValueError: [spaces.Dict({}), spaces.Dict({1: spaces.Discrete(3)})],
    },
    "text": {TypeError: [None, 3, ""]},
    "finite": {ValueError: [NAN, INF]},
    "weight": {ValueError: [-1, NAN]},
    "noise": {ValueError: [-1, NAN]},
    "dtype": {
        TypeError: ["float31", ""],
    },
    "statistics dtype": {TypeError: [None, "float32"]},
    "device": {ValueError: ["nope", ""], TypeError: [None, 1.5]},
    "keys": {
        TypeError: ["kind", None],
        ValueError: [[], ["a", "a"], [1, 0, 1]],
    },
    "bound": {ValueError: [None, "a"]},
    "groups": {TypeError: [None, [CLIP]]},
    "transforms": {TypeError: [None, 3]},
    "state shapes": {TypeError: [None, {}]},
    "torch dtype": {TypeError: ["float33", "nn"]},
    "fill": {TypeError: ["0", None, [0.0]]},
    "metrics": {ValueError: [{"speed": "median"}, {"return": "sum"}, {"speed": ("a", "b", "c")}]},
}
# The kinds of wrong values of each argument.
ARGUMENTS = {
    "AddNoise.scale": "noise",
    "AddNoise.distribution": "choice",
    "AddNoise.in_eval": "flag",
    "AddNoise.period": "period",
    "AddWhiteNoise.probability_of_noise_per_pixel": "below one",
    "AddWhiteNoise.is_noise_grayscale": "flag",
    "ClipObservation.min_obs": "number",
    "ClipObservation.max_obs": "upper bound",
    "ClipReward.min_reward": "lower bound",
    "ClipReward.max_reward": "upper bound",
    "Compose.transforms": "transforms",
    "DelayAction.delay": "delay",
    "DelayAction.padding_type": "zero",
    "DelayObservation.delay": "delay",
    "DelayObservation.padding_type": "padding",
    "DiscretizeAction.bins": "integer",
    "DiscretizeObservation.bins": "integer",
    "DiscretizeObservation.multidiscrete": "flag",
    "DtypeObservation.dtype": "dtype",
    "FilterObservation.filter_keys": "keys",
    "FrameStackObservation.stack_size": "integer",
    "FrameStackObservation.padding_type": "padding",
    "GrayscaleObservation.keep_dim": "flag",
    "GrayscaleObservation.formula": "choice",
    "AffineAction.scale": "finite",
    "AffineAction.offset": "finite",
    "CommandObservation.low": "finite",
    "CommandObservation.high": "finite",
    "CommandObservation.period": "period",
    "CommandObservation.flatten": "flag",
    "CommandObservation.key": "text",
    "ActionRewardTransform.padding_type": "zero",
    "LastActionObservation.flatten": "flag",
    "LastActionObservation.padding_type": "zero",
    "LastActionObservation.key": "text",
    "LowPassAction.alpha": "weight",
    "LowPassAction.padding_type": "zero",
    "RateLimitAction.max_change": "noise",
    "NormalizeObservation.epsilon": "positive",
    "NormalizeReward.gamma": "fraction",
    "NormalizeReward.epsilon": "positive",
    "ObservationGroups.groups": "groups",
    "ObservationKeys.groups": "groups",
    "ObstructView.obstructed_pixels_ratio": "below one",
    "ObstructView.obstruction_width": "integer",
    "ObstructView.is_noise_grayscale": "flag",
    "PolicyState.shapes": "state shapes",
    "PolicyState.dtype": "torch dtype",
    "PolicyState.fill": "fill",
    "RecordEpisodeStatistics.buffer_length": "integer",
    "RecordEpisodeStatistics.stats_key": "text",
    "RecordEpisodeStatistics.metrics": "metrics",
    "RescaleAction.min_action": "bound",
    "RescaleObservation.min_obs": "bound",
    "ReshapeObservation.shape": "shape",
    "ResizeObservation.shape": "shape",
    "RunningMeanStd.shape": "no shape",
    "RunningMeanStd.device": "device",
    "RunningMeanStd.dtype": "statistics dtype",
    "ScaleReward.scale": "float32",
    "StickyAction.repeat_action_probability": "below one",
    "StickyAction.repeat_action_duration": "duration",
    "TimeAwareObservation.flatten": "flag",
    "TimeAwareObservation.normalize_time": "flag",
    "TimeAwareObservation.dict_time_key": "text",
    "TimeLimit.max_episode_steps": "integer",
    "TransformAction.func": "function",
    "TransformAction.action_space": "space",
    "TransformObservation.func": "function",
    "TransformObservation.observation_space": "space",
    "TransformReward.func": "function",
    "atari.preset": "choice",
}
# Right values of arguments that have no default.
REQUIRED = {
    "AddNoise": {"scale": 1},
    "AddWhiteNoise": {"probability_of_noise_per_pixel": 0.5},
    "AffineAction": {"scale": 1},
    "CommandObservation": {"low": [0], "high": [1], "period": 2},
    "ClipObservation": {"min_obs": 0, "max_obs": 1},
    "ClipReward": {"min_reward": 0},
    "DelayAction": {"delay": 1},
    "DelayObservation": {"delay": 1},
    "DiscretizeObservation": {"bins": 3},
    "FrameStackObservation": {"stack_size": 2},
    "LowPassAction": {"alpha": 0.5},
    "ObstructView": {"obstructed_pixels_ratio": 0.5, "obstruction_width": 2},
    "PolicyState": {"shapes": {"hidden": ()}},
    "RescaleAction": {"max_action": 1},
    "RescaleObservation": {"max_obs": 1},
    "RunningMeanStd": {"shape": (3,)},
    "StickyAction": {"repeat_action_probability": 0.5},
    "TransformAction": {"func": torch.tanh},
    "TransformObservation": {"func": torch.tanh},
}


def wrong_values():
    cases = []
    for argument, kind in ARGUMENTS.items():
        for error, values in WRONG[kind].items():
            for value in values:
                label = " ".join(repr(value).split())
                cases.append(pytest.param(argument, value, error, id=f"{argument}={label}"))
    return cases


def call(owner, **arguments):
    arguments = {**REQUIRED.get(owner, {}), **arguments}
    return getattr(T, owner, tw.PolicyState)(**arguments)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    wrong_values(),
)
def test_wrong_value_raises_an_error_that_names_the_argument(argument, value, error):
    owner, name = argument.split(".")
    with pytest.raises((TypeError, ValueError), match=name) as raised:
        call(owner, **{name: value})
    assert raised.type is error
    assert str(raised.value).startswith(owner)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("min_reward", lambda: T.ClipReward(), id="ClipReward without bounds"),
        pytest.param("min_action", lambda: T.RescaleAction(-INF, 1), id="RescaleAction unbounded"),
        pytest.param("shape", lambda: tw.PolicyState({"h": (3, 0)}), id="PolicyState of no size"),
        pytest.param("names", lambda: T.Compose({"a.b": CLIP}), id="Compose with a dot"),
        pytest.param("once", lambda: T.Compose([CLIP, CLIP]), id="Compose of a twin"),
    ],
)
def test_wrong_combination_raises_an_error_that_names_the_argument(name, make):
    with pytest.raises(ValueError, match=name):
        make()


def test_every_transform_with_arguments_has_wrong_values():
    with_arguments = set()
    for name in [*T.__all__, "PolicyState"]:
        parameters = inspect.signature(getattr(T, name, tw.PolicyState)).parameters
        if set(parameters) - {"args", "kwargs"}:
            with_arguments.add(name)
    assert with_arguments == {argument.split(".")[0] for argument in ARGUMENTS}


@pytest.mark.parametrize(
    "value",
    [1, np.int64(7), np.array(7), 2**63 - 1],
)
def test_integer_of_another_library_becomes_an_int(value):
    limit = T.TimeLimit(value).max_episode_steps
    assert type(limit) is int
    assert limit == value
    env = tw.make("Pendulum-v1", np.int64(2), max_episode_steps=value)
    numbers = env.num_envs, env.signature.max_episode_steps, env.spec.max_episode_steps
    assert [*map(type, numbers)] == [int] * 3
