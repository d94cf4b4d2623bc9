"""Code that a graph cannot follow is refused by name, and the env is left as it was."""

import time

import numpy as np
import pytest
import torch
from catalogue import NUM_ENVS, gymnasium_cartpole
from helpers import after, assert_same, buffers, from_reset, mostly_full, params, play
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import ScriptedEnv

HOST = "host"
GENERATOR = "PyTorch's global generator"
TWICE = "second call"
TENSOR = r"a tensor.*, held by none of its modules\. Register"


def compiled(target, **arguments):
    return tw.compile(target, backend="eager", **arguments)


# Transforms.


class Refused(T.RewardTransform):
    """Has state of several kinds. `change`, a function of it and the reward, is its method."""

    def setup(self, signature):
        steps = torch.zeros(signature.num_envs, 1)
        self.register_buffer("steps", steps, persistent=False)
        self.number = 0
        self.seen = []
        return signature

    def reward(self, reward):
        return type(self).change(self, reward)


def replaces_a_buffer(self, reward):
    self.steps = self.steps + 1
    return reward + self.steps


def counts(self, reward):
    self.number += 1
    return reward + self.number


READS = {
    "Branches": lambda self, reward: reward * 2 if reward.sum() > 5 else reward,
    "UsesNumpy": lambda self, reward: torch.from_numpy(reward.numpy() * 2),
    "CountsRows": lambda self, reward: reward + len((reward > 2).nonzero()),
}
DRAWS = {
    "Draws": lambda self, reward: reward + torch.rand_like(reward),
    "DrawsInPlace": lambda self, reward: reward + torch.empty_like(reward).normal_(),
}
VARIES = {
    "Counts": counts,
    "ReadsTheClock": lambda self, reward: reward + time.perf_counter(),
    "DrawsFromNumpy": lambda self, reward: reward + np.random.rand(),
}
TRANSFORMS = {
    **{name: (change, f"{name}.*{HOST}") for name, change in READS.items()},
    **{name: (change, f"{name}.*{GENERATOR}") for name, change in DRAWS.items()},
    **{name: (change, TWICE) for name, change in VARIES.items()},
    "PicksRows": (
        lambda self, reward: reward + reward[reward > 2].sum(),
        "PicksRows.*shape depends on values",
    ),
    "ReplacesABuffer": (replaces_a_buffer, "replaces the tensor .*steps"),
}


def refused(name):
    return type(name, (Refused,), {"change": TRANSFORMS[name][0]})()


def with_refused(name, env=None):
    return tw.TransformedEnv(env or ScriptedEnv(NUM_ENVS), T.TimeLimit(9), refused(name))


SOME = "Branches", "Draws", "Counts", "PicksRows", "ReplacesABuffer"


def bare():
    return ScriptedEnv(2)


def bridged():
    return tw.make("CartPole-v1", 2, backend="gymnasium")


@pytest.mark.parametrize("below", [bare, bridged])
@pytest.mark.parametrize("name", mostly_full(TRANSFORMS, *SOME))
def test_transform_that_no_graph_can_follow_is_refused(name, below):
    env = with_refused(name, below())
    with pytest.raises(ValueError, match=TRANSFORMS[name][1]):
        compiled(env)
    assert not env.is_compiled


@pytest.mark.parametrize("name", ["Branches", "ReplacesABuffer"])
def test_env_after_a_refusal_steps_as_before(name):
    env = with_refused(name)
    eager = with_refused(name)
    roots = [after(each, 4) for each in (env, eager)]
    before = env.snapshot()
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match="compile"):
        compiled(env)
    assert_same(env.snapshot(), before)
    assert (torch.get_rng_state() == generator).all()
    assert_same(play(env, 20, roots[0])[0], play(eager, 20, roots[1])[0])


def test_refusal_of_code_that_varies_shows_its_line():
    with pytest.raises(ValueError, match=r"test_refusal\.py:\d+: return reward \+ self\.number"):
        compiled(with_refused("Counts"))


class DrawsInReset(T.Transform):
    def reset(self, td, mask):
        return td.set("observation", td["observation"] + torch.rand_like(td["observation"]))


def test_draw_in_a_reset_is_refused():
    env = tw.make("CartPole-v1", 2, backend="gymnasium")
    with pytest.raises(ValueError, match=r"DrawsInReset.*generator"):
        compiled(tw.TransformedEnv(env, DrawsInReset()))


# Envs and wrappers.


class HalfReward(tw.Wrapper):
    def _step(self, action):
        successor = self.env._step(action)
        factor = 0.5 if successor["reward"].sum() > 0 else 1
        return successor.set("reward", successor["reward"] * factor)


class ReadsMask(ScriptedEnv):
    def _reset(self, mask, options=None):
        if mask.tensor.any():
            return super()._reset(mask)
        return TensorDict({"observation": self._observation_now()}, [NUM_ENVS])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HalfReward(ScriptedEnv(2)), "HalfReward._step"),
        (lambda: ReadsMask(NUM_ENVS), "ReadsMask._reset"),
    ],
    ids=["wrapper", "env"],
)
def test_layer_that_reads_values_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        compiled(make())


# What is compiled already.


def doubled(x):
    return 2 * x


def fast(function):
    return torch.compile(function, backend="eager")


class FastReward(Pendulum):
    reward = fast(Pendulum.reward)


def collector(function):
    return tw.Collector(tw.make("Pendulum-v1", 2), lambda td: function(td["observation"]), 3)


def linear():
    return nn.Linear(3, 1)


ALREADY = {
    "module": lambda: collector(fast(linear())),
    "TorchScript": lambda: collector(torch.jit.script(linear())),
    "CUDA graph": lambda: collector(CudaGraphModule(linear())),
    "transform": lambda: tw.TransformedEnv(ScriptedEnv(2), T.TransformReward(fast(doubled))),
    "over a simulator": lambda: tw.TransformedEnv(bridged(), T.TransformReward(fast(doubled))),
    "functions": lambda: tw.FunctionalEnv(FastReward(), 2),
}


@pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without CUDA")
@pytest.mark.parametrize("name", ALREADY)
def test_what_is_compiled_already_is_refused(name):
    target = ALREADY[name]()
    with pytest.raises(ValueError, match=r"compile: .*(compiled already|Script|CudaGraphModule)"):
        compiled(target)
    assert not target.is_compiled


# Policies.


class Agent:
    """A plain object with state. It is no module."""

    def __init__(self):
        self.calls = 0
        self.hidden = torch.zeros(NUM_ENVS, 6)
        self.shift = None


def answer(td, number):
    return torch.tanh(td["observation"][:, :6] * 0 + number)


COUNT = 0
TABLE = torch.full((6,), 0.25)


def increments(agent, td):
    agent.calls += 1
    return answer(td, agent.calls)


def counts_in_global(agent, td):
    global COUNT
    COUNT += 1
    return answer(td, COUNT)


def keeps_first_tensor(agent, td):
    if agent.shift is None:
        agent.shift = td["observation"][:, :6].clone()
    return torch.tanh(agent.shift)


def branches(agent, td):
    return answer(td, 1 if td["observation"].sum() > 0 else 2)


POLICIES = {
    "increments": (increments, TWICE),
    "counts in a global": (counts_in_global, TWICE),
    "keeps the first tensor": (keeps_first_tensor, TENSOR),
    "reads a global tensor": (lambda agent, td: answer(td, TABLE), TENSOR),
    "reads its tensor": (lambda agent, td: torch.tanh(agent.hidden), TENSOR),
    "branches": (branches, f"the policy.*{HOST}"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policy_that_no_graph_can_follow_is_refused(name):
    function, words = POLICIES[name]
    collect = tw.Collector(ScriptedEnv(NUM_ENVS), function.__get__(Agent()), 3)
    with pytest.raises(ValueError, match=words):
        compiled(collect)
    assert not collect.is_compiled


SCALE = 0.25


def test_python_values_are_constants_until_another_policy_is_assigned():
    def policy(td):
        return answer(td, SCALE)

    global SCALE
    collect = compiled(tw.Collector(ScriptedEnv(NUM_ENVS), policy, 3))
    before = collect()
    SCALE = 0.75
    after = from_reset(collect)
    assert torch.equal(after["action"], before["action"])
    collect.policy = lambda td: policy(td)
    again = from_reset(collect)
    torch.testing.assert_close(again["action"], torch.full((NUM_ENVS, 3, 6), 0.75).tanh())


# Arguments.


BAD = {
    "no transforms": (bridged, ValueError, "transforms"),
    "simulator": (lambda: tw.Collector(gymnasium_cartpole(), None, 3), ValueError, "simulator"),
    "env twice": (lambda: compiled(bare()), ValueError, "already"),
    "collector twice": (lambda: compiled(tw.Collector(bare(), None, 3)), ValueError, "already"),
    "compiled env": (lambda: tw.Collector(compiled(bare()), None, 3), ValueError, "already"),
    "module": (lambda: nn.Linear(2, 2), TypeError, "target"),
    "function": (lambda: bare, TypeError, "target"),
    "keys": (lambda: tw.Collector(bare(), None, 3, keys=["value"]), ValueError, "keys"),
}


@pytest.mark.parametrize("case", params(BAD, quick={*BAD} - {"collector twice"}))
def test_bad_target_is_refused(case):
    make, kind, words = case
    target = make()
    with pytest.raises(kind, match=words):
        compiled(target)


@pytest.mark.parametrize("arguments", [{"backend": "nope"}, {"options": {"cpp_wrapper": False}}])
def test_bad_argument_is_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        tw.compile(bare(), **{"backend": "eager", **arguments})


def test_layer_around_a_compiled_env_is_refused():
    with pytest.raises(ValueError, match="compile"):
        tw.Wrapper(compiled(bare()))


# Code that a graph can follow.


def test_compile_before_the_first_reset_changes_nothing():
    env = ScriptedEnv(NUM_ENVS)
    before = buffers(env)
    compiled(env)
    assert_same(buffers(env), before)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(TensorDict({"action": env.sample_action()}, [NUM_ENVS]))
