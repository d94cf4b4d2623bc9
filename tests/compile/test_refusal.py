"""What cannot be compiled is refused by name, before anything has changed."""

from __future__ import annotations

import pytest
import torch
from catalogue import NUM_ENVS, gymnasium_cartpole
from helpers import after, assert_plays_the_same, assert_same, buffers, play
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Branches(T.Transform):
    def step(self, td):
        return td.set("reward", td["reward"] * 2) if td["reward"].sum() > 5 else td


class TakesAnItem(T.RewardTransform):
    def reward(self, reward):
        return reward * reward.max().item()


class TakesAList(T.RewardTransform):
    def reward(self, reward):
        return reward + sum(reward.flatten().tolist())


class GoesThroughNumpy(T.RewardTransform):
    def reward(self, reward):
        return torch.from_numpy(reward.numpy() * 2)


class PicksRows(T.RewardTransform):
    def reward(self, reward):
        return reward + reward[reward > 2].sum()


class CountsRows(T.RewardTransform):
    def reward(self, reward):
        return reward + len((reward > 2).nonzero())


class Rebinds(T.RewardTransform):
    def setup(self, signature):
        self.register_buffer("steps", torch.zeros(signature.num_envs, 1), persistent=False)
        return signature

    def reward(self, reward):
        self.steps = self.steps + 1
        return reward + self.steps


class CountsInPython(T.RewardTransform):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def reward(self, reward):
        self.steps += 1
        return reward + self.steps


class KeepsATensor(T.RewardTransform):
    def setup(self, signature):
        self.last = torch.zeros(signature.num_envs, 1)
        return signature

    def reward(self, reward):
        last, self.last = self.last, reward * 1
        return reward + last


class KeepsAList(T.RewardTransform):
    def setup(self, signature):
        self.seen = [torch.zeros(signature.num_envs, 1)]
        return signature

    def reward(self, reward):
        self.seen.append(reward * 1)
        return reward + self.seen[-2]


REFUSED = [
    Branches,
    TakesAnItem,
    TakesAList,
    GoesThroughNumpy,
    PicksRows,
    CountsRows,
    Rebinds,
    CountsInPython,
    KeepsATensor,
    KeepsAList,
]


@pytest.mark.parametrize("transform", REFUSED)
class TestTransform:
    """A transform that reads values on the host, or keeps state outside of buffers."""

    def test_in_env_is_named_and_leaves_env_unchanged(self, transform):
        env, eager = (
            tw.TransformedEnv(ScriptedEnv(NUM_ENVS), T.NormalizeReward(), transform(), T.TimeLimit(9)) for _ in range(2)
        )
        td, eager_td = after(env, 4), after(eager, 4)
        before = env.snapshot()
        with pytest.raises(ValueError, match=rf"(?s)^compile needs .*, but got .*\b{transform.__name__}\b"):
            tw.compile(env, backend="aot_eager")
        assert not env.is_compiled
        assert_same(env.snapshot(), before)
        assert_same(play(env, 20, td)[0], play(eager, 20, eager_td)[0])

    def test_over_host_stepped_env_is_named_and_leaves_env_unchanged(self, transform):
        make = lambda: tw.TransformedEnv(  # noqa: E731
            tw.make("CartPole-v1", 2, backend="gymnasium"), T.NormalizeReward(), transform()
        )
        env = make()
        with pytest.raises(ValueError, match=rf"(?s)^compile needs .*, but got .*\b{transform.__name__}\b"):
            tw.compile(env, backend="aot_eager")
        assert not env.is_compiled
        assert_plays_the_same(make(), env, 20)

    def test_in_collector_is_named_and_leaves_env_unchanged(self, transform):
        env = tw.TransformedEnv(ScriptedEnv(NUM_ENVS), transform())
        collect = tw.Collector(env, None, 3)
        before = buffers(env)
        with pytest.raises(ValueError, match=rf"(?s)^compile needs .*, but got .*\b{transform.__name__}\b"):
            tw.compile(collect, backend="aot_eager")
        assert not collect.is_compiled
        assert_same(buffers(env), before)
        eager = tw.TransformedEnv(ScriptedEnv(NUM_ENVS), transform())
        assert_same(collect(env.reset(seed=0))[0], tw.rollout(eager, None, 3, eager.reset(seed=0))[0])


def branching_policy(td):
    return torch.full((NUM_ENVS, 6), 0.5 if td["observation"].sum() > 0 else -0.5)


def test_policy_that_reads_values_is_refused():
    collect = tw.Collector(ScriptedEnv(NUM_ENVS), branching_policy, 3)
    with pytest.raises(ValueError, match=r"(?s)^compile needs .*, but got the policy"):
        tw.compile(collect, backend="aot_eager")
    assert (collect()[0]["action"] == 0.5).all()


class HalfReward(tw.Wrapper):
    def _step(self, action):
        successor = self.env._step(action)
        return successor.set("reward", successor["reward"] * (0.5 if successor["reward"].sum() > 0 else 1))


def test_wrapper_that_reads_values_is_named():
    with pytest.raises(ValueError, match=r"(?s)^compile needs .*, but got .*HalfReward"):
        tw.compile(HalfReward(ScriptedEnv(NUM_ENVS)), backend="aot_eager")


class ReadsMask(ScriptedEnv):
    def _reset(self, mask, options=None):
        return super()._reset(mask) if mask.tensor.any() else TensorDict({"observation": self._observation_now()}, [NUM_ENVS])


def test_env_that_reads_values_is_named():
    with pytest.raises(ValueError, match=r"(?s)^compile needs .*, but got ReadsMask\._reset"):
        tw.compile(ReadsMask(NUM_ENVS), backend="aot_eager")


def test_host_stepped_env_without_transforms_is_refused():
    with pytest.raises(ValueError, match=r"compile needs tensor operators, but got .*CartPole-v1.* without transforms"):
        tw.compile(tw.make("CartPole-v1", 2, backend="gymnasium"))


def test_collector_over_host_stepped_env_is_refused_with_remedy():
    message = r"compile needs a collector whose env is stepped in PyTorch, but got .*CartPole-v1.*: compile the env\."
    with pytest.raises(ValueError, match=message):
        tw.compile(tw.Collector(gymnasium_cartpole(), None, 3))


@pytest.mark.parametrize("target", [lambda env: env, lambda env: tw.Collector(env, None, 3)], ids=["env", "collector"])
def test_torch_that_is_too_old_is_refused_with_remedy_and_changes_nothing(target, monkeypatch):
    env, eager = (tw.TransformedEnv(ScriptedEnv(NUM_ENVS), T.NormalizeReward(), T.TimeLimit(9)) for _ in range(2))
    td, eager_td = after(env, 4), after(eager, 4)
    before = env.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0+cu128"))
        message = r"^compile needs torch>=2\.11, but got torch 2\.10\.0\+cu128: leave this call out to stay in eager mode, or"
        with pytest.raises(RuntimeError, match=message):
            tw.compile(target(env), backend="aot_eager")
    assert not env.is_compiled
    assert_same(env.snapshot(), before)
    assert_same(play(env, 20, td)[0], play(eager, 20, eager_td)[0])


def twice(target):
    return tw.compile(tw.compile(target, backend="eager"), backend="eager")


def bare():
    return ScriptedEnv(2)


BAD_TARGETS = {
    "an env twice": (lambda: twice(bare()), ValueError, "compile needs what is not compiled yet, but got <ScriptedEnv"),
    "a host-stepped env twice": (lambda: twice(gymnasium_cartpole()), ValueError, "compile needs what is not compiled yet"),
    "a collector twice": (
        lambda: twice(tw.Collector(bare(), None, 3)),
        ValueError,
        "compile needs what is not compiled yet, but got Collector",
    ),
    "a collector over a compiled env": (
        lambda: tw.compile(tw.Collector(tw.compile(bare(), backend="eager"), None, 3)),
        ValueError,
        "compile needs what is not compiled yet, but got Collector",
    ),
    "a compiled env, wrapped": (
        lambda: tw.Wrapper(tw.compile(bare(), backend="eager")),
        ValueError,
        "Wrapper needs an env that is not compiled, but got <ScriptedEnv.*: compile it last",
    ),
    "a compiled env, transformed": (
        lambda: tw.TransformedEnv(tw.compile(bare(), backend="eager"), T.TimeLimit(3)),
        ValueError,
        "TransformedEnv needs an env that is not compiled, but got <ScriptedEnv.*: compile it last",
    ),
    "a compiled host-stepped env, transformed": (
        lambda: tw.TransformedEnv(tw.compile(gymnasium_cartpole(), backend="eager"), T.TimeLimit(3)),
        ValueError,
        "TransformedEnv needs an env that is not compiled",
    ),
    "an unroll of zero": (
        lambda: tw.compile(tw.Collector(bare(), None, 3), unroll=0),
        ValueError,
        "compile needs unroll of at least 1, but got 0",
    ),
    "an unknown backend": (
        lambda: tw.compile(bare(), backend="nope"),
        ValueError,
        "compile needs a backend of torch.compile, but got 'nope'",
    ),
    "options for another backend": (
        lambda: tw.compile(bare(), backend="eager", options={"cpp_wrapper": False}),
        ValueError,
        "compile needs backend=\"inductor\" for options, but got 'eager'",
    ),
    "a module": (lambda: tw.compile(nn.Linear(2, 2)), TypeError, "compile needs an Env or a Collector, but got Linear"),
    "a transform": (lambda: tw.compile(T.TimeLimit(3)), TypeError, "compile needs an Env or a Collector, but got TimeLimit"),
    "an env in a list": (lambda: tw.compile([bare()]), TypeError, "compile needs an Env or a Collector, but got list"),
    "a function": (lambda: tw.compile(bare), TypeError, "compile needs an Env or a Collector, but got function"),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_bad_target_or_argument_is_refused(name):
    make, error, message = BAD_TARGETS[name]
    with pytest.raises(error, match=message):
        make()
