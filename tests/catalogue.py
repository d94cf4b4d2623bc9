"""Every transform and wrapper once, and the stacks and policies that several test files share.

Transforms are `name: (transform, env below it)`, wrappers `name: env`, as functions that make them.
"""

import functools

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap._core.rows import leaves
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import ScriptedEnv

DICT = spaces.Dict(
    position=spaces.Discrete(3, start=1),
    image=spaces.Box(0, 255, (2, 2), "uint8"),
    rest=spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])]),
)
BOXES = spaces.Dict(
    speed=spaces.Box(-9, 9, (2,)),
    more=spaces.Tuple([spaces.Box(0, 255, (2, 2), "uint8"), spaces.Box(-1, 1, (), "float64")]),
)
IMAGE = spaces.Box(0, 255, (4, 4, 3), "uint8")
FINITE = spaces.Box(0, 40, (3,))
ACTIONS = spaces.Dict(push=spaces.Box(-1, 1, (2,)), gear=spaces.Discrete(4, start=-1))
HALF = np.full(6, 0.5, np.float32)
NUM_ENVS = 5


def observing(space):
    """Makes a `ScriptedEnv` with this observation space."""
    return functools.partial(ScriptedEnv, observation_space=space)


class AddNoise(T.ObservationTransform):
    """A user's transform with an RNG stream."""

    def setup(self, signature):
        self.stream, signature = signature.stream()
        return signature

    def observation(self, observation):
        noise = random.normal(self.stream.key(), shape=observation.shape[1:])
        return (observation + noise).to(observation.dtype)


class SwitchCost(T.ActionRewardTransform):
    """A user's cost of each tensor of the action that changes, over any space."""

    def reward(self, reward, action, last_action):
        pairs = zip(leaves(action), leaves(last_action), strict=True)
        changes = [(now != before).view(len(now), -1).any(1) for now, before in pairs]
        return reward - torch.stack(changes, -1).sum(-1, keepdim=True)


class StatefulRnn(nn.Module):
    """A policy that keeps its hidden state itself, which no episode resets."""

    hidden = None

    def __init__(self, inputs, outputs, cell=nn.LSTM):
        super().__init__()
        self.cell = cell(inputs, outputs)

    def forward(self, td):
        output, self.hidden = self.cell(td["observation"].unsqueeze(0), self.hidden)
        return output.squeeze(0)


class VmappedPendulum(Pendulum):
    broadcasts = False


def vmapped():
    return tw.FunctionalEnv(VmappedPendulum(), NUM_ENVS, max_episode_steps=5)


def seven():
    transforms = [
        T.ClipAction(),
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.ClipObservation(-10, 10),
        T.FrameStackObservation(4),
        T.NormalizeReward(),
        T.ClipReward(-10, 10),
    ]
    return T.Compose(transforms)


# Cannot be compiled, but keeps the rest of the contract.
UNCAPTURED = {"PassiveEnvChecker": (T.PassiveEnvChecker, ScriptedEnv)}
TRANSFORMS = {
    "RecordEpisodeStatistics": (lambda: T.RecordEpisodeStatistics(3), ScriptedEnv),
    "NormalizeObservation": (T.NormalizeObservation, ScriptedEnv),
    "NormalizeObservation of images": (T.NormalizeObservation, observing(IMAGE)),
    "ClipObservation": (lambda: T.ClipObservation(-5, 5), ScriptedEnv),
    "FrameStackObservation": (lambda: T.FrameStackObservation(3), ScriptedEnv),
    "FrameStackObservation of images": (
        lambda: T.FrameStackObservation(3, padding_type="zero"),
        observing(IMAGE),
    ),
    "FrameStackObservation of numbers": (
        lambda: T.FrameStackObservation(2, padding_type=2),
        observing(spaces.Discrete(3)),
    ),
    "FrameStackObservation of a Dict": (lambda: T.FrameStackObservation(2), observing(DICT)),
    "FrameStackObservation of channels": (
        lambda: T.FrameStackObservation(3, axis=-1),
        observing(IMAGE),
    ),
    "DelayObservation": (lambda: T.DelayObservation(2), ScriptedEnv),
    "DelayObservation, drawn": (
        lambda: T.DelayObservation((1, 3), padding_type="reset"),
        ScriptedEnv,
    ),
    "DelayAction": (lambda: T.DelayAction((0, 2)), ScriptedEnv),
    "LastActionObservation": (T.LastActionObservation, ScriptedEnv),
    "LastActionObservation of Dicts": (
        lambda: T.LastActionObservation(False, key="action"),
        functools.partial(ScriptedEnv, observation_space=DICT, action_space=ACTIONS),
    ),
    "ActionRewardTransform": (
        SwitchCost,
        functools.partial(ScriptedEnv, observation_space=DICT, action_space=ACTIONS),
    ),
    "LowPassAction": (lambda: T.LowPassAction(0.4, padding_type=HALF), ScriptedEnv),
    "RateLimitAction": (lambda: T.RateLimitAction(0.3), ScriptedEnv),
    "AffineAction": (lambda: T.AffineAction(0.5, [1, 0, 0, 0, 2, -1]), ScriptedEnv),
    "DelayObservation of a Dict": (lambda: T.DelayObservation(3), observing(DICT)),
    "TimeAwareObservation": (
        lambda: T.Compose([T.TimeLimit(9), T.TimeAwareObservation()]),
        observing(DICT),
    ),
    "TimeAwareObservation unflattened": (
        lambda: T.Compose([T.TimeLimit(3), T.TimeAwareObservation(False, True)]),
        observing(IMAGE),
    ),
    "DtypeObservation": (lambda: T.DtypeObservation("float64"), observing(IMAGE)),
    "FilterObservation": (lambda: T.FilterObservation(["image", "rest"]), observing(DICT)),
    "ReshapeObservation": (lambda: T.ReshapeObservation((3, 16)), observing(IMAGE)),
    "RescaleObservation": (lambda: T.RescaleObservation(0, 1), observing(FINITE)),
    "DiscretizeObservation": (lambda: T.DiscretizeObservation(4), observing(FINITE)),
    "GrayscaleObservation": (T.GrayscaleObservation, observing(IMAGE)),
    "GrayscaleObservation of OpenCV": (
        lambda: T.GrayscaleObservation(formula="opencv"),
        observing(IMAGE),
    ),
    "ResizeObservation": (lambda: T.ResizeObservation((3, 3)), observing(IMAGE)),
    "ResizeObservation to half": (lambda: T.ResizeObservation((2, 2)), observing(IMAGE)),
    "AddWhiteNoise": (lambda: T.AddWhiteNoise(0.3, True), observing(IMAGE)),
    "ObstructView": (lambda: T.ObstructView(0.5, 2), observing(IMAGE)),
    "NormalizeObservation of a Dict": (T.NormalizeObservation, observing(BOXES)),
    "TransformAction": (lambda: T.TransformAction(torch.tanh), ScriptedEnv),
    "StickyAction": (lambda: T.StickyAction(0.5, (1, 3)), ScriptedEnv),
    "DiscretizeAction": (lambda: T.DiscretizeAction(3), ScriptedEnv),
    "ScaleReward": (lambda: T.ScaleReward(0.1), ScriptedEnv),
    "FlattenObservation": (T.FlattenObservation, observing(DICT)),
    "TransformObservation": (lambda: T.TransformObservation(torch.tanh), ScriptedEnv),
    "NormalizeReward": (T.NormalizeReward, ScriptedEnv),
    "ClipReward": (lambda: T.ClipReward(-1, 1), ScriptedEnv),
    "TransformReward": (lambda: T.TransformReward(torch.tanh), ScriptedEnv),
    "ClipAction": (T.ClipAction, ScriptedEnv),
    "RescaleAction": (lambda: T.RescaleAction(-2, 2), ScriptedEnv),
    "TimeLimit": (lambda: T.TimeLimit(3), ScriptedEnv),
    "AddNoise": (AddNoise, ScriptedEnv),
    "AddNoise of torchwrap": (lambda: T.AddNoise(0.1, "uniform"), ScriptedEnv),
    "AddNoise for an episode": (lambda: T.AddNoise(0.1, period=None), ScriptedEnv),
    "AddNoise for two steps": (lambda: T.AddNoise(0.1, period=2), ScriptedEnv),
    "CommandObservation": (lambda: T.CommandObservation([-1, 0], [1, 2], 2), ScriptedEnv),
    "ObservationGroups": (
        lambda: T.ObservationGroups(
            {
                "policy": [T.NormalizeObservation()],
                "noisy": [AddNoise()],
                "again": [AddNoise()],
                "raw": [],
            }
        ),
        ScriptedEnv,
    ),
    "ObservationGroups of a Dict": (
        lambda: T.ObservationGroups(
            {"flat": [T.FlattenObservation()], "image": [T.FilterObservation(["image"])], "raw": []}
        ),
        observing(DICT),
    ),
    "ObservationKeys": (
        lambda: T.ObservationKeys(
            {"image": [T.NormalizeObservation(), AddNoise()], "position": [T.DelayObservation(1)]}
        ),
        observing(DICT),
    ),
    "PolicyState": (
        lambda: T.Compose(
            [tw.PolicyState({"hidden": (3,)}), tw.PolicyState({"count": ()}, torch.int64, -1)]
        ),
        ScriptedEnv,
    ),
    "Compose of none": (lambda: T.Compose([]), ScriptedEnv),
    "Compose of seven": (seven, ScriptedEnv),
    "on CartPole": (
        lambda: T.Compose([T.RecordEpisodeStatistics(), T.TimeLimit(9)]),
        functools.partial(tw.make, "CartPole-v1"),
    ),
}


# Edge cases that only compilation distinguishes.
COMPILED = {
    **TRANSFORMS,
    "RecordEpisodeStatistics of 50 episodes": (
        lambda: T.RecordEpisodeStatistics(50, stats_key="whole"),
        ScriptedEnv,
    ),
    "FrameStackObservation of one": (lambda: T.FrameStackObservation(1), ScriptedEnv),
    "Compose of two": (
        lambda: T.Compose([T.NormalizeReward(), T.FrameStackObservation(2)]),
        ScriptedEnv,
    ),
    "Compose of none, Dict spaces": (
        lambda: T.Compose([]),
        functools.partial(ScriptedEnv, observation_space=DICT, action_space=ACTIONS),
    ),
}
# Cheap ones for runs without --full, with every hook, a Dict space, images, a stream, statistics.
REPRESENTATIVE = (
    "RecordEpisodeStatistics",
    "NormalizeObservation of images",
    "FrameStackObservation",
    "DelayObservation of a Dict",
    "StickyAction",
    "NormalizeReward",
    "TimeLimit",
    "ClipAction",
)
# How episodes end, as arguments of ScriptedEnv.
ENDINGS = {
    "never": {"episode_lengths": None},
    "all at once": {"episode_lengths": 4},
    "at every step": {"episode_lengths": 1},
    "by termination": {"ending": "terminated"},
    "by truncation": {"ending": "truncated"},
    "by both": {"ending": "both"},
}


def stack(name, num_envs=NUM_ENVS, **arguments):
    """A transform of the catalogue on its env."""
    make, make_env = COMPILED[name]
    return tw.TransformedEnv(make_env(num_envs, **arguments), make())


def cartpole(num_envs=NUM_ENVS, **arguments):
    transforms = (
        T.TimeLimit(30),
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.FrameStackObservation(2),
    )
    return tw.TransformedEnv(tw.make("CartPole-v1", num_envs, **arguments), *transforms)


def gymnasium_cartpole(num_envs=4, vectorization_mode="sync", **arguments):
    """Gymnasium's CartPole with the seven but ClipAction, because its actions are discrete."""
    arguments = {"vectorization_mode": vectorization_mode, "max_episode_steps": 25, **arguments}
    env = tw.make("CartPole-v1", num_envs, backend="gymnasium", **arguments)
    return tw.TransformedEnv(env, *seven()[1:])


# Policies.


class ActorCritic(nn.Module):
    """Writes logits and a value next to the action, for CartPole with two stacked frames.

    Its last layers have few parameters, which a compiler may keep as constants.
    """

    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout))
        self.logits = nn.Linear(16, 2)
        self.value = nn.Linear(16, 1)

    def act(self, td):
        hidden = self.body(td["observation"].flatten(1))
        td["logits"] = self.logits(hidden)
        td["value"] = self.value(hidden)
        td["action"] = td["logits"].argmax(-1)
        return td

    forward = act


# Wrappers.


def rendered(wrapper, **arguments):
    """A wrapper that renders, on Gymnasium's CartPole."""

    def make(num_envs, **more):
        env = tw.make(
            "CartPole-v1",
            num_envs,
            backend="gymnasium",
            render_mode="rgb_array",
            max_episode_steps=9,
            **more,
        )
        return wrapper(env, **arguments)

    return make


WRAPPERS = {
    "TransformedEnv": lambda num_envs, **more: tw.TransformedEnv(ScriptedEnv(num_envs, **more)),
    "RepeatAction": lambda num_envs, **more: W.RepeatAction(ScriptedEnv(num_envs, **more), 3),
    "RepeatAction of delayed actions": lambda num_envs, **more: W.RepeatAction(
        tw.TransformedEnv(ScriptedEnv(num_envs, **more), T.DelayAction((0, 4))), 3
    ),
    "RepeatAction of CartPole": lambda num_envs, **more: W.RepeatAction(
        tw.make("CartPole-v1", num_envs, **more), 3
    ),
    "RepeatAction of Gymnasium's CartPole": lambda num_envs, **more: W.RepeatAction(
        tw.make("CartPole-v1", num_envs, backend="gymnasium", max_episode_steps=10, **more), 4
    ),
    "MaxAndSkipObservation": lambda num_envs, **more: W.MaxAndSkipObservation(
        ScriptedEnv(num_envs, **more), 3
    ),
    "MaxAndSkipObservation of images": lambda num_envs, **more: W.MaxAndSkipObservation(
        ScriptedEnv(num_envs, observation_space=IMAGE, **more), 2
    ),
    "AddRenderObservation": rendered(W.AddRenderObservation, render_only=False),
    "RecordVideo": rendered(W.RecordVideo, video_folder=".", episode_trigger=lambda _: False),
}
