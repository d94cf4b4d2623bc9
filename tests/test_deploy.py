"""`tw.deploy`: the actions of `evaluate` from raw observations, in eager mode and exported; and what it refuses, by name."""

import functools
import importlib.util
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from catalogue import COMPILED, DICT, IMAGE, UNCAPTURED, AddNoise
from gymnasium import spaces
from helpers import load_example
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv

NUM_ENVS = 5


class Recorder(tw.Wrapper):
    """Keeps what a deployed policy would be given at each step, and the action that the env received."""

    is_passive = True

    def __init__(self, env):
        super().__init__(env)
        self.raw, self.first, self.log = None, torch.zeros(env.num_envs, 1, dtype=torch.bool), []

    def _step(self, action):
        self.log.append((self.raw, self.first, action.clone()))
        successor = self.env._step(action)
        self.raw, self.first = successor["observation"].clone(), torch.zeros_like(self.first)
        return successor

    def _reset(self, mask, options=None):
        td = self.env._reset(mask, options)
        initial = td["observation"].clone()
        self.raw = initial if self.raw is None else mask.where(initial, self.raw)
        self.first = self.first | mask.column
        return td


class Network(nn.Module):
    """A deterministic policy for any spaces, whose actions differ from row to row and from step to step."""

    def __init__(self, env):
        super().__init__()
        self.space, self.recurrent = env.single_action_space, env.signature.policy_state
        size = spaces.flatdim(self.space) if isinstance(self.space, spaces.Box) else 1
        inputs = self.features(env.reset().exclude("action")["observation"]).shape[1]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(inputs, size)

    def features(self, observation):
        leaves = observation.values(True, True) if isinstance(observation, TensorDict) else [observation]
        return torch.cat([leaf.reshape(leaf.shape[0], -1).float() for leaf in leaves], 1)

    def forward(self, td):
        features = self.features(td["observation"])
        features = features.sign() * features.abs().log1p()  # of similar size, whatever the transforms are
        for name in self.recurrent:
            features = features + td[name].reshape(features.shape[0], -1)[:, :1].float()
            td["next", name] = td[name] + 1
        push = torch.sin(self.layer(features))
        if isinstance(self.space, spaces.Box):
            scale = 1.0 if self.space.is_bounded() else 1.5  # what ClipAction is for
            return td.set("action", scale * push.view(-1, *self.space.shape))
        return td.set("action", (push[:, 0].abs() * 1e4).long() % int(self.space.n) + int(self.space.start))


def stack(make_env, *transforms, num_envs=NUM_ENVS):
    env = tw.TransformedEnv(Recorder(make_env(num_envs)), *transforms)
    tw.rollout(env, None, 7)  # so that statistics have something to freeze
    return env


def recorder_of(env):
    return [module for module in env.modules() if isinstance(module, Recorder)][-1]  # the innermost


def evaluated(env, policy, episodes=20):
    """What the env and the policy did in whole episodes: raw observations, first steps, actions."""
    recorder = recorder_of(env)
    recorder.raw, recorder.log = None, []
    recorder.first.zero_()
    tw.evaluate(env, policy, episodes, seed=3)
    return recorder.log


def plain(value):
    return value if isinstance(value, torch.Tensor) else value.to_dict()


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return set(first) == set(second) and all(equal(first[key], second[key]) for key in first)


def actions_of(module, log, state):
    """The actions of a module, or of a program made from it, for what was recorded."""
    actions = []
    for raw, first, _ in log:
        if state:
            action, state = module(plain(raw), {**state, "is_first": first})
        else:
            action = module(plain(raw))
        actions.append(action)
    return actions


def assert_parity(module, log, exactly=True):
    state = module.initial_state(NUM_ENVS)
    assert len(log) > 8 and any(bool(first.any()) for _, first, _ in log[1:])
    for action, (_, _, expected) in zip(actions_of(module, log, state), log, strict=True):
        if exactly:
            assert equal(action, plain(expected))
        else:
            torch.testing.assert_close(action, plain(expected))


REFUSED = {
    "AddWhiteNoise": "AddWhiteNoise",
    "ObstructView": "ObstructView",
    "StickyAction": "StickyAction",
    "AddNoise": "AddNoise",
    "ObservationGroups": "AddNoise",
}
CATALOGUE = {**COMPILED, **UNCAPTURED}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_transform_is_deployed_with_the_actions_of_evaluate_or_refused_by_name(name):
    make, make_env = CATALOGUE[name]
    env = stack(make_env, make())
    if isinstance(env.single_action_space, spaces.Dict):
        policy = lambda td: TensorDict(  # noqa: E731
            {"push": torch.sin(td["observation"]["image"][:, 0].float()), "gear": td["observation"]["position"] - 2},
            td.batch_size,
        )
    else:
        policy = Network(env)
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^deploy needs .* but got {REFUSED[name]}\(.*draws random numbers"):
            tw.deploy(env, policy)
        return
    module = tw.deploy(env, policy)
    assert_parity(module, evaluated(env, policy))
    json.dumps(module.metadata, allow_nan=False)


def box(low, high):
    return spaces.Box(*(np.broadcast_to(np.float32(bound), 2) for bound in (low, high)))


def continuous(num_envs):
    return ScriptedEnv(num_envs, (3,), action_space=box(-3, (1, 2)))


class Smooth(T.Transform):
    """A user's transform with state, which changes observations and actions."""

    average = tw.EnvBuffer((3,), fill=5)
    previous = tw.EnvBuffer((2,))

    def step(self, td):
        self.average.lerp_(td["observation"], 0.5)
        return td.set("observation", torch.stack([self.average, td["observation"]], 1))

    def reset(self, td, mask):
        mask.assign_(self.average, td["observation"])
        mask.fill_(self.previous, 0)
        return td.set("observation", td["observation"].unsqueeze(1).expand(-1, 2, -1))

    def setup(self, signature):
        return signature.replace(single_observation_space=spaces.Box(-torch.inf, torch.inf, (2, 3)))

    def action(self, action):
        self.previous.copy_(0.5 * self.previous + 0.5 * action)
        return self.previous.clone()


class MarkInitial(T.Transform):
    """Stateless, but a reset computes another thing than a step."""

    def step(self, td):
        return td.set("observation", td["observation"] * 0.5)

    def reset(self, td, mask):
        return td.set("observation", torch.ones_like(td["observation"]))


def control():
    normal = [T.NormalizeObservation(), T.ClipObservation(-1, 1), T.FrameStackObservation(3)]
    return [T.RescaleAction(-2, 2), T.ClipAction(), T.RecordEpisodeStatistics(), *normal, T.NormalizeReward()]


STACKS = {
    "control": (continuous, control),
    "several layers": (
        lambda n: tw.TransformedEnv(W.Wrapper(tw.TransformedEnv(Recorder(continuous(n)), T.ClipAction(), T.DelayObservation(1)))),
        lambda: [T.NormalizeObservation(), T.FrameStackObservation(2)],
    ),
    "images": (
        lambda n: ScriptedEnv(n, observation_space=spaces.Box(0, 255, (90, 100, 3), "uint8"), action_space=spaces.Discrete(9)),
        lambda: [T.atari("cleanrl"), T.TimeLimit(30)],
    ),
    "a user's state": (continuous, lambda: [T.ClipAction(), Smooth(), T.FrameStackObservation(2), T.FrameStackObservation(2)]),
    "no state": (continuous, lambda: [T.ClipAction(), T.NormalizeObservation(), T.TimeLimit(3), T.ClipReward(-1, 1)]),
    "initial observations": (continuous, lambda: [T.NormalizeObservation(), MarkInitial()]),
    "a recurrent policy": (
        functools.partial(ScriptedEnv, observation_space=DICT),
        lambda: [
            T.PolicyState({"hidden": (3,)}),
            T.TimeLimit(4),
            T.TimeAwareObservation(),
            T.PolicyState({"count": ()}, torch.int64, -1),
            T.DiscretizeAction(3),
        ],
    ),
    "numbers": (
        lambda n: ScriptedEnv(n, observation_space=box(0, (0.3, 7)), action_space=box(-1, 2)),
        lambda: [T.DiscretizeAction((3, 7), multidiscrete=False), T.DiscretizeObservation((10, 7), multidiscrete=True)],
    ),
}


@functools.cache
def deployed(name):
    """A module, and what was recorded of its env."""
    make_env, transforms = STACKS[name]
    env = stack(make_env, *transforms())
    policy = Network(env)
    return tw.deploy(env, policy), evaluated(env, policy)


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_deployed_with_the_actions_of_evaluate(name):
    module, log = deployed(name)
    assert len({repr(action) for _, _, action in log}) > 5
    assert_parity(module, log)


def exported(module):
    return torch.export.export(module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes())


def assert_equal_for_batches(module, run):
    """`run(inputs)` gives what the module gives, for several batch sizes, over a few steps with initial ones in between."""
    for batch_size in (1, 2, 7):
        generator = torch.Generator().manual_seed(batch_size)
        inputs = module.example_inputs(batch_size)
        for step in range(4):
            observation = torch.utils._pytree.tree_map(lambda leaf: noise_like(leaf, generator), inputs[0])
            inputs = (observation, *inputs[1:])
            expected, found = module(*inputs), run(inputs)
            torch.testing.assert_close(found, expected)
            if len(inputs) == 2:
                first = torch.rand(batch_size, 1, generator=generator) < 0.3
                inputs = (observation, {**expected[1], "is_first": first})


def noise_like(leaf, generator):
    if leaf.dtype.is_floating_point:
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
    return torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.dtype) + (leaf > 0).to(leaf.dtype)


EXPORTED = [
    "control",
    "a recurrent policy",
    *(pytest.param(name, marks=pytest.mark.full) for name in STACKS if name not in ("control", "a recurrent policy")),
]


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_take_any_batch_size(name):
    module, log = deployed(name)
    program = exported(module)
    assert_equal_for_batches(module, lambda inputs: program.module()(*inputs))
    state = module.initial_state(NUM_ENVS)
    for action, (_, _, expected) in zip(actions_of(program.module(), log, state), log, strict=True):
        torch.testing.assert_close(action, plain(expected))
    wide = [leaf for leaf in module.example_inputs()[:1] if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64]
    if not wide and name in ("control", "several layers", "a user's state", "no state", "initial observations", "numbers"):
        values = [node.meta.get("val") for node in program.graph.nodes]
        assert [value for value in values if isinstance(value, torch.Tensor) and value.dtype == torch.float64] == []
