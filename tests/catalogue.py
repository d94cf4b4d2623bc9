"""Every transform and wrapper once: what contracts, compilers and recipes are tested with.

Transforms are `name: (transform, env it serves)`, wrappers `name: env with it`, both as functions that make them.
"""

from __future__ import annotations

import functools

import torch
from gymnasium import spaces

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv

DICT = spaces.Dict(
    position=spaces.Discrete(3, start=1),
    image=spaces.Box(0, 255, (2, 2), "uint8"),
    rest=spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])]),
)
BOXES = spaces.Dict(
    speed=spaces.Box(-9, 9, (2,)), more=spaces.Tuple([spaces.Box(0, 255, (2, 2), "uint8"), spaces.Box(-1, 1, (), "float64")])
)
IMAGE = spaces.Box(0, 255, (4, 4, 3), "uint8")
FINITE = spaces.Box(0, 40, (3,))


class AddNoise(T.ObservationTransform):
    """What someone outside might write: a transform that draws."""

    def setup(self, signature):
        self.stream, signature = signature.stream()
        return signature

    def observation(self, observation):
        return observation + random.normal(self.stream.key(), observation.shape[1:])


def seven():
    return T.Compose(
        [
            T.ClipAction(),
            T.RecordEpisodeStatistics(),
            T.NormalizeObservation(),
            T.ClipObservation(-10, 10),
            T.FrameStackObservation(4),
            T.NormalizeReward(),
            T.ClipReward(-10, 10),
        ]
    )


# What cannot be in a graph; it keeps the rest of the contract.
UNCAPTURED = {"PassiveEnvChecker": (T.PassiveEnvChecker, ScriptedEnv)}
TRANSFORMS = {
    "RecordEpisodeStatistics": (lambda: T.RecordEpisodeStatistics(3), ScriptedEnv),
    "NormalizeObservation": (T.NormalizeObservation, ScriptedEnv),
    "NormalizeObservation of images": (T.NormalizeObservation, functools.partial(ScriptedEnv, observation_space=IMAGE)),
    "ClipObservation": (lambda: T.ClipObservation(-5, 5), ScriptedEnv),
    "FrameStackObservation": (lambda: T.FrameStackObservation(3), ScriptedEnv),
    "FrameStackObservation of images": (
        lambda: T.FrameStackObservation(3, padding_type="zero"),
        functools.partial(ScriptedEnv, observation_space=IMAGE),
    ),
    "FrameStackObservation of numbers": (
        lambda: T.FrameStackObservation(2, padding_type=2),
        functools.partial(ScriptedEnv, observation_space=spaces.Discrete(3)),
    ),
    "FrameStackObservation of a Dict": (
        lambda: T.FrameStackObservation(2),
        functools.partial(ScriptedEnv, observation_space=DICT),
    ),
    "DelayObservation": (lambda: T.DelayObservation(2), ScriptedEnv),
    "DelayObservation of a Dict": (lambda: T.DelayObservation(3), functools.partial(ScriptedEnv, observation_space=DICT)),
    "TimeAwareObservation": (
        lambda: T.Compose([T.TimeLimit(9), T.TimeAwareObservation()]),
        functools.partial(ScriptedEnv, observation_space=DICT),
    ),
    "TimeAwareObservation beside": (
        lambda: T.Compose([T.TimeLimit(3), T.TimeAwareObservation(False, True)]),
        functools.partial(ScriptedEnv, observation_space=IMAGE),
    ),
    "DtypeObservation": (lambda: T.DtypeObservation("float64"), functools.partial(ScriptedEnv, observation_space=IMAGE)),
    "FilterObservation": (
        lambda: T.FilterObservation(["image", "rest"]),
        functools.partial(ScriptedEnv, observation_space=DICT),
    ),
    "ReshapeObservation": (lambda: T.ReshapeObservation((3, 16)), functools.partial(ScriptedEnv, observation_space=IMAGE)),
    "RescaleObservation": (lambda: T.RescaleObservation(0, 1), functools.partial(ScriptedEnv, observation_space=FINITE)),
    "DiscretizeObservation": (lambda: T.DiscretizeObservation(4), functools.partial(ScriptedEnv, observation_space=FINITE)),
    "GrayscaleObservation": (T.GrayscaleObservation, functools.partial(ScriptedEnv, observation_space=IMAGE)),
    "ResizeObservation": (lambda: T.ResizeObservation((3, 3)), functools.partial(ScriptedEnv, observation_space=IMAGE)),
    "ResizeObservation to half": (
        lambda: T.ResizeObservation((2, 2)),
        functools.partial(ScriptedEnv, observation_space=IMAGE),
    ),
    "AddWhiteNoise": (lambda: T.AddWhiteNoise(0.3, True), functools.partial(ScriptedEnv, observation_space=IMAGE)),
    "ObstructView": (lambda: T.ObstructView(0.5, 2), functools.partial(ScriptedEnv, observation_space=IMAGE)),
    "NormalizeObservation of a Dict": (T.NormalizeObservation, functools.partial(ScriptedEnv, observation_space=BOXES)),
    "TransformAction": (lambda: T.TransformAction(torch.tanh), ScriptedEnv),
    "StickyAction": (lambda: T.StickyAction(0.5, (1, 3)), ScriptedEnv),
    "EvalWrapper": (T.EvalWrapper, ScriptedEnv),
    "DiscretizeAction": (lambda: T.DiscretizeAction(3), ScriptedEnv),
    "ScaleReward": (lambda: T.ScaleReward(0.1), ScriptedEnv),
    "FlattenObservation": (T.FlattenObservation, functools.partial(ScriptedEnv, observation_space=DICT)),
    "TransformObservation": (lambda: T.TransformObservation(torch.tanh), ScriptedEnv),
    "NormalizeReward": (T.NormalizeReward, ScriptedEnv),
    "ClipReward": (lambda: T.ClipReward(-1, 1), ScriptedEnv),
    "TransformReward": (lambda: T.TransformReward(torch.tanh), ScriptedEnv),
    "ClipAction": (T.ClipAction, ScriptedEnv),
    "RescaleAction": (lambda: T.RescaleAction(-2, 2), ScriptedEnv),
    "TimeLimit": (lambda: T.TimeLimit(3), ScriptedEnv),
    "AddNoise": (AddNoise, ScriptedEnv),
    "Compose of none": (lambda: T.Compose([]), ScriptedEnv),
    "Compose of seven": (seven, ScriptedEnv),
    "on CartPole": (
        lambda: T.Compose([T.RecordEpisodeStatistics(), T.TimeLimit(9)]),
        functools.partial(tw.make, "CartPole-v1"),
    ),
}


def seen(wrapper, **arguments):
    """A wrapper on what can be looked at; Gymnasium's, for no graph holds a picture."""

    def make(num_envs, **more):
        env = tw.make("CartPole-v1", num_envs, backend="gymnasium", render_mode="rgb_array", max_episode_steps=9, **more)
        return wrapper(env, **arguments)

    return make


WRAPPERS = {
    "TransformedEnv": lambda num_envs, **more: tw.TransformedEnv(ScriptedEnv(num_envs, **more)),
    "RepeatAction": lambda num_envs, **more: W.RepeatAction(ScriptedEnv(num_envs, **more), 3),
    "RepeatAction of CartPole": lambda num_envs, **more: W.RepeatAction(tw.make("CartPole-v1", num_envs, **more), 3),
    "RepeatAction of Gymnasium's": lambda num_envs, **more: W.RepeatAction(
        tw.make("CartPole-v1", num_envs, backend="gymnasium", max_episode_steps=10, **more), 4
    ),
    "MaxAndSkipObservation": lambda num_envs, **more: W.MaxAndSkipObservation(ScriptedEnv(num_envs, **more), 3),
    "MaxAndSkipObservation of images": lambda num_envs, **more: W.MaxAndSkipObservation(
        ScriptedEnv(num_envs, observation_space=IMAGE, **more), 2
    ),
    "AddRenderObservation": seen(W.AddRenderObservation, render_only=False),
    "RenderCollection": seen(W.RenderCollection),
    "RecordVideo": seen(W.RecordVideo, video_folder=".", episode_trigger=lambda _: False),
    "HumanRendering": seen(W.HumanRendering),
}
