"""What a graph cannot follow is refused by name, and everything is left as it was."""

import collections
import itertools
import random
import time

import numpy as np
import pytest
import torch
from catalogue import NUM_ENVS, gymnasium_cartpole
from helpers import after, assert_same, buffers, play
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Refused(T.RewardTransform):
    """Has state of many kinds, and `change`, a function of it and a reward, as its method."""

    def setup(self, signature):
        self.register_buffer("steps", torch.zeros(signature.num_envs, 1), persistent=False)
        self.last, self.number, self.seen = torch.zeros(signature.num_envs, 1), 0, []
        return signature

    def reward(self, reward):
        return type(self).change(self, reward)


def replaces_a_buffer(self, reward):
    self.steps = self.steps + 1
    return reward + self.steps


def counts_in_python(self, reward):
    self.number += 1
    return reward + self.number


def keeps_a_tensor(self, reward):
    last, self.last = self.last, reward * 1
    return reward + last


HOST, GLOBAL = (
    r"\.<lambda>: it reads values on the host",
    r"\.<lambda>: it draws from PyTorch's global generator",
)
TRANSFORMS = {  # what `reward` does, and the message
    "Branches": (
        lambda self, reward: reward * 2 if reward.sum() > 5 else reward,
        "Branches" + HOST,
    ),
    "TakesAnItem": (lambda self, reward: reward * reward.max().item(), "TakesAnItem" + HOST),
    "TakesAList": (
        lambda self, reward: reward + sum(reward.flatten().tolist()),
        "TakesAList" + HOST,
    ),
    "GoesThroughNumpy": (
        lambda self, reward: torch.from_numpy(reward.numpy() * 2),
        "GoesThroughNumpy" + HOST,
    ),
    "PicksRows": (
        lambda self, reward: reward + reward[reward > 2].sum(),
        "it makes a tensor whose shape depends on values",
    ),
    "CountsRows": (lambda self, reward: reward + len((reward > 2).nonzero()), "CountsRows" + HOST),
    "ReplacesABuffer": (replaces_a_buffer, r"replaces the tensor .*steps\. Write to it in place"),
    r"CountsInPython": (counts_in_python, r"changes CountsInPython.number\. Register a buffer"),
    "KeepsATensor": (
        keeps_a_tensor,
        "KeepsATensor.*: it uses a tensor that none of its modules holds",
    ),
    "KeepsAList": (
        lambda self, reward: self.seen.append(reward * 1) or reward + len(self.seen),
        "changes KeepsAList.seen",
    ),
    "DrawsFromNumpy": (lambda self, reward: reward + np.random.rand(), "draws from numpy.random"),
    "DrawsFromPython": (
        lambda self, reward: reward + random.random(),
        "draws from Python's random",
    ),
    "DrawsFromTorch": (
        lambda self, reward: reward + torch.rand_like(reward),
        "DrawsFromTorch" + GLOBAL,
    ),
    "DrawsInPlace": (
        lambda self, reward: reward + torch.empty_like(reward).normal_(),
        "DrawsInPlace" + GLOBAL,
    ),
    "ReadsTheClock": (
        lambda self, reward: reward + time.perf_counter(),
        "computes different things in two calls, first `",
    ),
}


def refused(name):
    return type(name, (Refused,), {"change": TRANSFORMS[name][0]})()


def state():
    """Everything that compile has to leave as it was, outside of the env."""
    return repr((random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_is_named_and_env_left_unchanged(name):
    env, eager = (
        tw.TransformedEnv(ScriptedEnv(NUM_ENVS), T.TimeLimit(9), refused(name)) for _ in range(2)
    )
    draws = name.startswith("Draws")  # its first eager step is refused as well
    td, eager_td = after(env, 0 if draws else 4), after(eager, 0 if draws else 4)
    before, around, attributes = env.snapshot(), state(), dict(vars(env.transforms[1]))
    seen = list(env.transforms[1].seen)
    for target in (
        (env, tw.Collector(env, None, 3)) if name in ("Branches", "CountsInPython") else (env,)
    ):
        with pytest.raises(ValueError, match=f"^compile cannot trace .*{TRANSFORMS[name][1]}"):
            tw.compile(target, backend="aot_eager")
        assert not target.is_compiled
    assert_same(env.snapshot(), before)
    assert state() == around and env.transforms[1].seen == seen
    assert all(vars(env.transforms[1])[key] is value for key, value in attributes.items())
    if draws:
        with pytest.raises(
            TypeError, match=r"^transforms\[1\] .* drew from .*: draw from a stream"
        ):
            after(eager, 1)
    elif name != "ReadsTheClock":
        assert_same(play(env, 20, td)[0], play(eager, 20, eager_td)[0])


class DrawsInReset(T.Transform):
    def reset(self, td, mask):
        return td.set("observation", td["observation"] + torch.rand_like(td["observation"]))


def test_transform_over_host_stepped_env_is_named():
    with pytest.raises(
        ValueError, match=r"DrawsInReset\.reset: it draws from PyTorch's global generator"
    ):
        tw.compile(
            tw.TransformedEnv(tw.make("CartPole-v1", 2, backend="gymnasium"), DrawsInReset()),
            backend="aot_eager",
        )
    for name in ("Branches", "DrawsFromTorch", "CountsInPython"):
        env = tw.TransformedEnv(tw.make("CartPole-v1", 2, backend="gymnasium"), refused(name))
        with pytest.raises(ValueError, match=f"^compile cannot trace .*{TRANSFORMS[name][1]}"):
            tw.compile(env, backend="aot_eager")
        assert not env.is_compiled


class Agent:
    """A plain Python object with state of many kinds. It is no module."""

    def __init__(self):
        self.calls, self.recent, self.seen, self.names = (
            0,
            collections.deque([1], maxlen=2),
            [],
            {"a"},
        )
        self.sums, self.table, self.numbers = np.zeros(3), {"calls": 0}, itertools.count()
        self.hidden, self.shift = torch.zeros(NUM_ENVS, 6), None


def act(td, number):
    return torch.tanh(td["observation"][:, :6] * 0 + number)


COUNT, TABLE = 0, torch.full((6,), 0.25)


def increments(agent, td):
    agent.calls += 1
    return act(td, agent.calls)


def sets_item(agent, td):
    agent.table["calls"] += 1
    return act(td, 1)


def adds_to_array(agent, td):
    agent.sums += 1
    return act(td, float(agent.sums[0]))


def counts_in_global(agent, td):
    global COUNT
    COUNT += 1
    return act(td, COUNT)


def keeps_first_tensor(agent, td):
    if agent.shift is None:
        agent.shift = td["observation"][:, :6].clone()
    return torch.tanh(agent.shift)


NO_MODULE = "the policy: it uses a tensor that none of its modules holds"
POLICIES = {
    "increments": (increments, r"changes Agent.calls\. Register a buffer"),
    "appends to a deque": (
        lambda agent, td: agent.recent.append(2) or act(td, sum(agent.recent)),
        "changes Agent.recent",
    ),
    "appends to a list": (
        lambda agent, td: agent.seen.append(1) or act(td, len(agent.seen)),
        "changes Agent.seen",
    ),
    "adds to a set": (
        lambda agent, td: agent.names.add("b") or act(td, len(agent.names)),
        "changes Agent.names",
    ),
    "sets an item": (sets_item, "changes Agent.table"),
    "adds to an array": (adds_to_array, "changes Agent.sums"),
    "counts in a global": (counts_in_global, "changes the global COUNT"),
    "keeps the first tensor": (keeps_first_tensor, "changes Agent.shift"),
    "iterates": (
        lambda agent, td: act(td, next(agent.numbers)),
        "computes different things in two calls",
    ),
    "reads a global tensor": (lambda agent, td: act(td, TABLE), NO_MODULE),
    "reads its tensor": (
        lambda agent, td: torch.tanh(agent.hidden + td["observation"][:, :6]),
        NO_MODULE,
    ),
    "branches": (
        lambda agent, td: act(td, 1 if td["observation"].sum() > 0 else 2),
        "the policy: it reads values on the host",
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policy_is_refused_and_its_state_left_as_it_was(name):
    agent, (function, message) = Agent(), POLICIES[name]
    agent.act = function.__get__(agent)
    before = {name: (value, repr(value)) for name, value in vars(agent).items()}
    policy = agent.act
    if name == "counts in a global":
        policy = lambda td: (counts_in_global(agent, td), COUNT)[0]  # noqa: E731
    collect = tw.Collector(ScriptedEnv(NUM_ENVS), policy, 3)
    with pytest.raises(ValueError, match=f"^compile cannot trace .*{message}"):
        tw.compile(collect, backend="aot_eager")
    assert not collect.is_compiled and COUNT == 0
    if name != "iterates":
        assert all(
            vars(agent)[key] is value and repr(value) == text
            for key, (value, text) in before.items()
        )


def test_variable_of_a_closure_is_named_and_left_as_it_was():
    calls = 0

    def policy(td):
        nonlocal calls
        calls += 1
        return act(td, calls)

    with pytest.raises(ValueError, match=r"changes calls of .*policy"):
        tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), policy, 3), backend="aot_eager")
    assert calls == 0


class HalfReward(tw.Wrapper):
    def _step(self, action):
        successor = self.env._step(action)
        return successor.set(
            "reward", successor["reward"] * (0.5 if successor["reward"].sum() > 0 else 1)
        )


class ReadsMask(ScriptedEnv):
    def _reset(self, mask, options=None):
        return (
            super()._reset(mask)
            if mask.tensor.any()
            else TensorDict({"observation": self._observation_now()}, [NUM_ENVS])
        )


def twice(target):
    return tw.compile(tw.compile(target, backend="eager"), backend="eager")


def eager(target, **arguments):
    return tw.compile(target, backend="eager", **arguments)


def bare():
    return ScriptedEnv(2)


@pytest.mark.full
def test_bad_target_or_argument_is_refused():
    for call, error, message in [
        (lambda: eager(HalfReward(bare())), ValueError, "HalfReward._step: it reads values"),
        (lambda: eager(ReadsMask(NUM_ENVS)), ValueError, "ReadsMask._reset: it reads values"),
        (
            lambda: eager(tw.make("CartPole-v1", 2, backend="gymnasium")),
            ValueError,
            "nothing to compile: a simulator",
        ),
        (
            lambda: eager(tw.Collector(gymnasium_cartpole(), None, 3)),
            ValueError,
            "CartPole-v1.*: compile the env",
        ),
        (lambda: twice(bare()), ValueError, "<ScriptedEnv.* is already compiled"),
        (lambda: twice(gymnasium_cartpole()), ValueError, "is already compiled"),
        (
            lambda: twice(tw.Collector(bare(), None, 3)),
            ValueError,
            "Collector.* is already compiled",
        ),
        (
            lambda: eager(tw.Collector(eager(bare()), None, 3)),
            ValueError,
            "^<ScriptedEnv.* is already compiled",
        ),
        (
            lambda: tw.Wrapper(eager(bare())),
            ValueError,
            "needs an env that is not compiled, but got .*: compile it last",
        ),
        (
            lambda: tw.TransformedEnv(eager(gymnasium_cartpole()), T.TimeLimit(3)),
            ValueError,
            "an env that is not compiled",
        ),
        (
            lambda: eager(tw.Collector(bare(), None, 3), unroll=0),
            ValueError,
            "unroll as an integer of at least 1, but got 0",
        ),
        (
            lambda: tw.compile(bare(), backend="nope"),
            ValueError,
            "a backend of torch.compile, but got 'nope'",
        ),
        (
            lambda: eager(bare(), options={"cpp_wrapper": False}),
            ValueError,
            'backend="inductor" for options, but got .eager.',
        ),
        (lambda: eager(nn.Linear(2, 2)), TypeError, "an Env or a Collector, but got Linear"),
        (lambda: eager(bare), TypeError, "an Env or a Collector, but got function"),
        (
            lambda: eager(tw.Collector(bare(), None, 3, keys=["value"])),
            ValueError,
            r"keys among .*, but got \['value'\]",
        ),
    ]:
        with pytest.raises(error, match=message):
            call()


class Shared(nn.Module):
    """Two buffers in one memory, one of which is written to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(NUM_ENVS, 6))
        self.register_buffer("row", self.table[0])

    def forward(self, td):
        self.table.add_(0.1)
        return act(td, self.row)


def test_buffers_that_share_memory_match_eager():
    found = []
    for compiles in (True, False):
        collect = tw.Collector(ScriptedEnv(NUM_ENVS), Shared(), 3)
        first, td = eager(collect)() if compiles else collect()
        found.append(torch.cat([first, collect(td)[0]], 1)["action"])
    torch.testing.assert_close(*found)


def test_compile_before_the_first_reset_changes_nothing():
    env = tw.make("CartPole-v1", NUM_ENVS)
    before = buffers(env)
    tw.compile(env, backend="eager")
    assert_same(buffers(env), before)
    with pytest.raises(
        RuntimeError, match=r"CartPole-v1 has not been reset yet: call reset\(\) before step\(\)"
    ):
        env.step(TensorDict({"action": env.sample_action()}, [NUM_ENVS]))
