from __future__ import annotations

import functools
import types

import numpy as np
import pytest
import torch
from catalogue import DICT, TRANSFORMS, UNCAPTURED, WRAPPERS
from gymnasium import spaces
from helpers import mostly_full

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv, check_env, check_transform

UNEVEN = spaces.Box(np.float32([-1, 0, -8]), np.float32([1, 0.5, 8]))
ENVS = {
    "ScriptedEnv": ScriptedEnv,
    "ScriptedEnv of a Dict": functools.partial(ScriptedEnv, observation_space=DICT, action_space=spaces.Discrete(4, start=-1)),
    "ScriptedEnv without ends": functools.partial(ScriptedEnv, episode_lengths=None),
    "ScriptedEnv of uneven bounds": functools.partial(ScriptedEnv, observation_space=UNEVEN),
    "ScriptedEnv of uneven integers": functools.partial(
        ScriptedEnv, observation_space=spaces.MultiDiscrete([2, 5], start=[1, -3])
    ),
    "CartPole-v1 in float64": functools.partial(tw.make, "CartPole-v1", dtype=torch.float64),
    "Gymnasium's CartPole-v1": functools.partial(tw.make, "CartPole-v1", backend="gymnasium"),
    "InvertedPendulum-v5": functools.partial(tw.make, "InvertedPendulum-v5"),
    "HalfCheetah-v5": functools.partial(tw.make, "HalfCheetah-v5", max_episode_steps=7, info_keys=["x_position"]),
}


@pytest.mark.parametrize("name", mostly_full(TRANSFORMS, "RecordEpisodeStatistics"))
def test_transform_keeps_the_contract(name):
    check_transform(*TRANSFORMS[name])


@pytest.mark.compiles
@pytest.mark.parametrize("name", UNCAPTURED)
def test_transform_that_cannot_be_compiled_keeps_the_rest_of_the_contract(name):
    with pytest.raises(AssertionError, match=f"compile: needs a step that is one graph, but got .*{name}"):
        check_transform(*UNCAPTURED[name])


@pytest.mark.parametrize("name", mostly_full(WRAPPERS))
def test_wrapper_keeps_the_contract_of_an_env(name, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr("pygame.time.Clock", lambda: types.SimpleNamespace(tick=lambda fps: None))  # without waiting
    check_env(WRAPPERS[name])


def test_catalogue_has_every_transform_and_wrapper():
    bases = {"ActionTransform", "Compose", "ObservationTransform", "RewardTransform", "RunningMeanStd", "Transform", "atari"}
    assert set(T.__all__) - bases <= set(TRANSFORMS | UNCAPTURED)
    assert set(W.__all__) - {"Wrapper"} <= set(WRAPPERS)


@pytest.mark.parametrize("name", mostly_full(ENVS, "Gymnasium's CartPole-v1"))
def test_env_keeps_the_contract(name):
    check_env(ENVS[name])


@pytest.mark.cuda
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_on_cuda_keeps_the_contract(name):
    make, make_env = TRANSFORMS[name]
    check_transform(make, functools.partial(make_env, device="cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ENVS)
def test_env_on_cuda_keeps_the_contract(name):
    if name.endswith("-v5"):
        pytest.importorskip("mujoco")
    check_env(functools.partial(ENVS[name], device="cuda"))


# Each of these breaks one rule of the contract, and the check has to name it.


class CountsEveryRow(T.NormalizeObservation):
    def reset(self, td, mask):
        return super().reset(td, tw.RowMask.full(len(mask)))


class KeepsLearning(T.NormalizeObservation):
    def train(self, mode=True):
        return super().train(True)


class ReturnsItsBuffer(T.RecordEpisodeStatistics):
    def step(self, td):
        return super().step(td).set("return_so_far", self.running_return)


class HidesItsState(T.Transform):
    def setup(self, signature):
        self.steps = 0
        return signature

    def step(self, td):
        self.steps += 1
        return td.set("reward", td["reward"] + self.steps % 3)


class WritesIntoTheAction(T.ActionTransform):
    def action(self, action):
        return action.mul_(0.5)


class LeavesItsSpace(T.ObservationTransform):
    def setup(self, signature):
        return signature.replace(single_observation_space=spaces.Box(0, 1, signature.single_observation_space.shape))

    def observation(self, observation):
        return observation * 2


class ReadsValues(T.RewardTransform):
    def reward(self, reward):
        return reward / 2 if reward.max().item() > 2 else reward * 1


class MixesEnvs(T.RewardTransform):
    def reward(self, reward):
        return reward - reward.mean()


class AddsAKeySometimes(T.Transform):
    def step(self, td):
        return td.set("last", td["reward"]) if td["terminated"].any() else td


class RenamesItsArgument(T.RewardTransform):
    def __init__(self, scale):
        super().__init__()
        self.factor = scale

    def reward(self, reward):
        return reward * self.factor


BROKEN = [
    (lambda: RenamesItsArgument(2), "spec: RenamesItsArgument needs its arguments as attributes"),
    (CountsEveryRow, "outside the mask must not"),
    (KeepsLearning, "eval"),
    (ReturnsItsBuffer, "outputs"),
    (HidesItsState, "same transitions|continue as before"),
    (WritesIntoTheAction, "leave the agent's action"),
    (LeavesItsSpace, "needs an observation in its space"),
    (ReadsValues, "one graph|env . of 5"),
    (MixesEnvs, "env . of 5"),
    (AddsAKeySometimes, "same keys"),
]


@pytest.mark.parametrize(("make", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_transform_is_told_what_it_breaks(make, message):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_transform(make)


class StepsWithoutReward(ScriptedEnv):
    def _step(self, action):
        return super()._step(action).exclude("reward")


class DependsOnNumEnvs(ScriptedEnv):
    def _step(self, action):
        return super()._step(action).update({"reward": torch.full((self.num_envs, 1), float(self.num_envs))})


class RewardsWithoutColumn(ScriptedEnv):
    def _step(self, action):
        td = super()._step(action)
        return td.set("reward", td["reward"].squeeze(-1))


class ReadsValuesWithoutSnapshots(ScriptedEnv):
    can_snapshot = False  # and yet it is stepped in PyTorch, so it has to compile

    def _step(self, action):
        assert action.isfinite().all().item()
        return super()._step(action)

    def snapshot(self):
        raise RuntimeError


class WrongObservation(ScriptedEnv):
    def _reset(self, mask, options=None):
        td = super()._reset(mask)
        return td.set("observation", td["observation"].double())


BROKEN_ENVS = [
    (StepsWithoutReward, r"StepsWithoutReward\._step needs to return \['reward'\] too"),
    (DependsOnNumEnvs, "env 0 of 5"),
    (RewardsWithoutColumn, r"RewardsWithoutColumn\._step needs to return reward of shape \(5, 1\)"),
    (WrongObservation, r"WrongObservation\._reset needs to return observations of dtype torch.float32"),
    pytest.param(ReadsValuesWithoutSnapshots, "compile: needs a step that is one graph", marks=pytest.mark.compiles),
]


@pytest.mark.parametrize(("make", "message"), BROKEN_ENVS)
def test_broken_env_is_told_what_it_breaks(make, message):
    with pytest.raises(AssertionError, match=message):
        check_env(make)
