"""State that a graph would not keep is named by compile, which leaves it as it was."""

from __future__ import annotations

import collections
import copy
import itertools
import os
import random
import threading
import time

import numpy as np
import pytest
import torch
from catalogue import NUM_ENVS
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

COUNT, SEEN, TABLE = 0, [], torch.full((6,), 0.25)


class Agent:
    """A plain Python object with state of many kinds. It is no module."""

    count = 0

    def __init__(self):
        self._calls = 0
        self.recent, self.seen, self.names = collections.deque([1], maxlen=2), [], {"a"}
        self.sums, self.table = np.zeros(3), {"calls": 0}
        self.numpy_generator, self.generator = np.random.default_rng(0), random.Random(0)
        self.numbers = itertools.count()
        self.hidden, self.memory = torch.zeros(NUM_ENVS, 6), TensorDict({"hidden": torch.zeros(NUM_ENVS, 6)}, [NUM_ENVS])
        self.shift, self.size = None, None


def act(td, number):
    return torch.tanh(td["observation"][:, :6] * 0 + number)


def increments(agent, td):
    agent._calls += 1
    return act(td, agent._calls)


def appends_to_deque(agent, td):
    agent.recent.append(len(agent.seen))
    return act(td, sum(agent.recent))


def appends_to_list(agent, td):
    agent.seen.append(td["observation"].mean(1))
    return act(td, len(agent.seen))


def adds_to_set(agent, td):
    agent.names.add(str(len(agent.names)))
    return act(td, len(agent.names))


def sets_item(agent, td):
    agent.table["calls"] += 1
    return act(td, agent.table["calls"])


def adds_to_array(agent, td):
    agent.sums += 1
    return act(td, float(agent.sums[0]))


def counts_in_class(agent, td):
    Agent.count += 1
    return act(td, Agent.count)


def counts_in_global(agent, td):
    global COUNT
    COUNT += 1
    return act(td, COUNT)


def calls_one_that_appends_to_global(agent, td):
    return remembers(td)


def remembers(td):
    SEEN.append(1)
    return act(td, len(SEEN))


def replaces_tensor(agent, td):
    agent.hidden = agent.hidden * 0.5 + td["observation"][:, :6]
    return torch.tanh(agent.hidden)


def replaces_tensor_in_tensordict(agent, td):
    agent.memory["hidden"] = agent.memory["hidden"] * 0.5 + 1
    return torch.tanh(agent.memory["hidden"])


def keeps_first_tensor(agent, td):
    if agent.shift is None:
        agent.shift = td["observation"][:, :6].clone()
    return torch.tanh(agent.shift)


def keeps_first_array(agent, td):
    if agent.shift is None:
        agent.shift = time.perf_counter()
    return act(td, agent.shift % 1)


def draws_from_python(agent, td):
    return act(td, random.random())


def draws_from_numpy(agent, td):
    return act(td, np.random.rand())


def draws_from_own_numpy_generator(agent, td):
    return act(td, agent.numpy_generator.random())


def draws_from_own_generator(agent, td):
    return act(td, agent.generator.random())


def draws_from_space(agent, td):
    return act(td, float(SPACE.sample()[0]))


def reads_clock(agent, td):
    return act(td, time.perf_counter())


def reads_system(agent, td):
    return act(td, int.from_bytes(os.urandom(4)))


def iterates(agent, td):
    return act(td, next(agent.numbers))


def makes_another_tensor_from_the_clock(agent, td):
    return torch.tanh(td["observation"][:, :6] * 0 + torch.from_numpy(np.full(6, time.perf_counter(), np.float32)))


def reads_array_of_tensor(agent, td):
    return act(td, torch.from_numpy(agent.hidden.numpy() * 2))


def reads_list_of_tensor(agent, td):
    return act(td, agent.hidden.tolist()[0][0])


def reads_number_of_tensor(agent, td):
    return act(td, float(agent.hidden[0, 0]))


def branches_on_tensor(agent, td):
    return act(td, 1 if agent.hidden[0, 0] > 0 else 2)


def copies_tensor(agent, td):
    return act(td, copy.deepcopy(agent.hidden))


SPACE = tw.make("Pendulum-v1", 1).single_action_space

REFUSED = {
    increments: "a change of Agent._calls",
    appends_to_deque: r"a change of Agent.recent\[0\]",
    appends_to_list: r"a change of Agent.seen\[0\]",
    adds_to_set: "a change of Agent.names",
    sets_item: r"a change of Agent.table\['calls'\]",
    adds_to_array: "a change of Agent.sums",
    counts_in_class: "a change of Agent.count",
    counts_in_global: "a change of the global COUNT",
    calls_one_that_appends_to_global: r"a change of the global SEEN\[1\]",
    replaces_tensor: "a change of Agent.hidden: register a buffer",
    replaces_tensor_in_tensordict: r"a change of Agent.memory\['hidden'\]",
    keeps_first_tensor: "a change of Agent.shift.* a cache can be filled by a call before",
    draws_from_python: "a change of the state of Python's random",
    draws_from_numpy: "a change of the state of numpy.random",
    draws_from_own_numpy_generator: "a change of the state of Agent.numpy_generator",
    draws_from_own_generator: "a change of the state of Agent.generator",
    reads_clock: "computes another thing each time: first `add = .*, then `add = ",
    reads_system: "computes another thing each time",
    iterates: r"computes another thing each time: first `.*mul, 1\)`, then `.*mul, 2\)`",
    makes_another_tensor_from_the_clock: "another constant each time: first tensor",
    reads_array_of_tensor: "Tensor.numpy reads values",
    reads_list_of_tensor: "Tensor.tolist reads values",
    reads_number_of_tensor: "_local_scalar_dense",
    branches_on_tensor: "the policy: DataDependentOutputException",
    copies_tensor: "Tensor.__deepcopy__ reads values",
}


def state(agent):
    """What compile has to leave as it was; iterators cannot be read."""
    tensors = [agent.hidden.clone(), agent.memory["hidden"].clone()]
    generators = [agent.numpy_generator.bit_generator.state, agent.generator.getstate()]
    python = [agent._calls, *agent.recent, *agent.seen, sorted(agent.names), *agent.sums, dict(agent.table), agent.shift]
    shared = [Agent.count, COUNT, list(SEEN), random.getstate(), np.random.get_state(legacy=False)]
    return tensors, repr([*generators, *python, *shared])


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_state_that_a_graph_would_not_keep_is_named_and_left_as_it_was(function):
    agent = Agent()
    tensors, python = state(agent)
    collect = tw.Collector(ScriptedEnv(NUM_ENVS), lambda td: function(agent, td), 3)
    with pytest.raises(ValueError, match=f"(?s)^compile needs .*{REFUSED[function]}"):
        tw.compile(collect, backend="aot_eager")
    after, python_after = state(agent)
    assert python == python_after and not collect.is_compiled
    assert all(
        type(tensor) is torch.Tensor and torch.equal(tensor, before) for tensor, before in zip(after, tensors, strict=True)
    )


def test_variable_of_a_closure_is_named_and_left_as_it_was():
    calls = 0

    def policy(td):
        nonlocal calls
        calls += 1
        return act(td, calls)

    with pytest.raises(ValueError, match=r"a change of calls of .*policy"):
        tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), policy, 3), backend="aot_eager")
    assert calls == 0


def test_global_that_is_made_is_removed_again():
    def policy(td):
        global MADE
        MADE = td["observation"] * 2
        return act(td, MADE[:, :6])

    with pytest.raises(ValueError, match="a change of the global MADE"):
        tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), policy, 3), backend="aot_eager")
    assert "MADE" not in globals()


class CountsPrivately(T.RewardTransform):
    def __init__(self):
        super().__init__()
        self._steps = 0

    def reward(self, reward):
        self._steps += 1
        return reward + self._steps


class DrawsFromNumPy(T.RewardTransform):
    def reward(self, reward):
        return reward + np.random.rand()


@pytest.mark.parametrize(
    ("transform", "name"), [(CountsPrivately, "CountsPrivately._steps"), (DrawsFromNumPy, "numpy.random")]
)
def test_state_of_transform_is_named_and_left_as_it_was(transform, name):
    env, generator = tw.TransformedEnv(ScriptedEnv(NUM_ENVS), transform()), repr(np.random.get_state())
    with pytest.raises(ValueError, match=name):
        tw.compile(env, backend="aot_eager")
    assert not env.is_compiled and repr(np.random.get_state()) == generator
    assert getattr(env.transforms[0], "_steps", 0) == 0


def actions(policy):
    """The first component of the actions in two calls of a compiled collector, and of an eager one."""
    found = []
    for compiles in (True, False):
        collect = tw.Collector(ScriptedEnv(NUM_ENVS), policy(), 3)
        if compiles:
            tw.compile(collect, backend="aot_eager")
        first, td = collect()
        found.append(torch.cat([first, collect(td)[0]], 1)["action"][0, :, 0])
    return found


class InPlace(Agent):
    def act(self, td):
        self.hidden.mul_(0.5).add_(0.1)
        self.memory["hidden"].add_(self.hidden)
        return torch.tanh(self.memory["hidden"] + torch.as_tensor(self.sums[0]).float())


class CachesNumber(Agent):
    def act(self, td):
        if self.size is None:
            self.size = td["observation"].shape[1]
        return act(td, self.size / 100)


class CachesTensor(Agent):
    def act(self, td):
        if self.shift is None:
            self.shift = torch.full((6,), 0.3)
        return act(td, self.shift)

    def filled(self):
        self.act(TensorDict({"observation": torch.zeros(NUM_ENVS, 17)}, [NUM_ENVS]))
        return self


KEPT = {
    "tensors written in place": lambda: InPlace().act,
    "a number that is cached": lambda: CachesNumber().act,
    "a tensor that was cached before": lambda: CachesTensor().filled().act,
    "a global tensor": lambda: lambda td: act(td, TABLE),
}


@pytest.mark.parametrize("name", KEPT)
def test_state_that_a_graph_keeps_matches_eager(name):
    compiled, eager = actions(KEPT[name])
    torch.testing.assert_close(compiled, eager)


class Views(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.register_buffer("table", torch.zeros(NUM_ENVS, 6))
        self.writes, self.row = writes, self.table[0]

    def forward(self, td):
        if self.writes:
            self.table.add_(1)
        return act(td, self.row)


def test_view_of_a_tensor_that_is_written_to_is_refused():
    with pytest.raises(
        ValueError, match=r"share no memory if one of them is written to, but got two of \(5, 6\) .* and \(6,\)"
    ):
        tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), Views(True), 3), backend="aot_eager")
    tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), Views(False), 3), backend="aot_eager")


@pytest.mark.full
def test_policy_that_replaces_a_tensor_does_not_crash_through_inductor():
    agent = Agent()
    collect = tw.Collector(ScriptedEnv(NUM_ENVS), lambda td: replaces_tensor(agent, td), 3)
    with pytest.raises(ValueError, match=r"a change of Agent\.hidden"):
        tw.compile(collect)
    collect()


def test_other_threads_see_tensors_with_values_while_a_policy_is_compiled():
    network, done, seen = nn.Sequential(*[nn.Linear(17, 17) for _ in range(20)], nn.Linear(17, 6)), threading.Event(), set()
    observation = torch.ones(NUM_ENVS, 17)

    def use():
        while not done.is_set():
            with torch.no_grad():
                seen.add(type(network(observation)))
            seen.update(map(type, network.parameters()))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    try:
        for _ in range(3):
            tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), lambda td: network(td["observation"]), 3), backend="eager")
    finally:
        done.set()
        thread.join()
    assert seen == {torch.Tensor, nn.Parameter}


class ReadsArrays(Agent):
    """A policy whose arrays are constants, whatever happens to them later."""

    def act(self, td):
        fresh = torch.as_tensor(np.full(6, 0.1, np.float32)).mul_(2)
        return act(td, torch.from_numpy(self.sums).float().sum() + fresh + torch.tensor([0.1]).mul_(2))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_arrays_keep_the_value_that_they_have_at_compile(backend):
    agent = ReadsArrays()
    collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), agent.act, 3), backend=backend)
    for _ in range(2):
        torch.testing.assert_close(collect()[0]["action"], torch.full((NUM_ENVS, 3, 6), 0.4).tanh())
        agent.sums += 1
