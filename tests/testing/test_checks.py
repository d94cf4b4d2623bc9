from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from catalogue import DICT, TRANSFORMS, UNCAPTURED, WRAPPERS
from gymnasium import spaces
from helpers import mostly_full

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.envs.cartpole import CartPole
from torchwrap.testing import ScriptedEnv, check_env, check_transform

UNEVEN = spaces.Box(np.float32([-1, 0, -8]), np.float32([1, 0.5, 8]))
ENVS = {
    "ScriptedEnv": ScriptedEnv,
    "ScriptedEnv of a Dict": functools.partial(
        ScriptedEnv, observation_space=DICT, action_space=spaces.Discrete(4, start=-1)
    ),
    "ScriptedEnv without ends": functools.partial(ScriptedEnv, episode_lengths=None),
    "ScriptedEnv of uneven bounds": functools.partial(ScriptedEnv, observation_space=UNEVEN),
    "ScriptedEnv of uneven integers": functools.partial(
        ScriptedEnv, observation_space=spaces.MultiDiscrete([2, 5], start=[1, -3])
    ),
    "CartPole-v1 in float64": functools.partial(tw.make, "CartPole-v1", dtype=torch.float64),
    "Gymnasium's CartPole-v1": functools.partial(tw.make, "CartPole-v1", backend="gymnasium"),
    "InvertedPendulum-v5": functools.partial(tw.make, "InvertedPendulum-v5"),
    "HalfCheetah-v5": functools.partial(
        tw.make, "HalfCheetah-v5", max_episode_steps=7, info_keys=["x_position"]
    ),
}


# These run before a release: other entries have their transforms, and the captured graphs of compile/test_cuda.py all of them.
VARIANTS = (
    "FrameStackObservation of images",
    "FrameStackObservation of numbers",
    "FrameStackObservation of channels",
)
VARIANTS += (
    "NormalizeObservation of images",
    "DelayObservation of a Dict",
    "ObservationGroups of a Dict",
    "Compose of none",
)
VARIANTS += (
    "TimeAwareObservation unflattened",
    "GrayscaleObservation of OpenCV",
    "ResizeObservation to half",
    "AddNoise",
)


@pytest.mark.parametrize("name", mostly_full(TRANSFORMS, "RecordEpisodeStatistics", long=VARIANTS))
def test_transform_keeps_the_contract(name):
    check_transform(*TRANSFORMS[name])


@pytest.mark.compiles
@pytest.mark.parametrize("name", UNCAPTURED)
def test_transform_that_cannot_be_compiled_keeps_the_rest_of_the_contract(name):
    with pytest.raises(
        AssertionError, match=rf"^{name}\(\): .* {name}.action: it reads values on the host"
    ) as raised:
        check_transform(*UNCAPTURED[name])
    assert "compile cannot trace" in str(raised.value.__cause__)


@pytest.mark.parametrize("name", mostly_full(WRAPPERS, long=["RepeatAction of CartPole"]))
def test_wrapper_keeps_the_contract_of_an_env(name):
    check_env(WRAPPERS[name])


def test_catalogue_has_every_transform_and_wrapper():
    bases = {
        "ActionTransform",
        "Compose",
        "ObservationTransform",
        "RewardTransform",
        "RunningMeanStd",
        "Transform",
        "atari",
    }
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
        return super().reset(td, tw.RowMask.full(mask.num_rows))


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
        return signature.replace(
            single_observation_space=spaces.Box(0, 1, signature.single_observation_space.shape)
        )

    def observation(self, observation):
        return observation * 2


class KeepsATensor(T.RewardTransform):
    def setup(self, signature):
        self.kept = torch.zeros(signature.num_envs, 1)
        return signature

    def reward(self, reward):
        return self.kept.add_(reward).clone()


class DrawsLater(T.RewardTransform):
    late = False

    def reward(self, reward):
        late, self.late = self.late, True
        return reward + random.random() if late else reward


def hooked(function, base=T.RewardTransform, hook="reward"):
    """Makes a stack with a transform of this hook among others."""
    return lambda: T.Compose(
        [
            T.Compose([T.ClipReward(-9, 9), type("Foreign", (base,), {hook: function})()]),
            T.TimeLimit(99),
        ]
    )


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
    (lambda: RenamesItsArgument(2), "spec: RenamesItsArgument has no spec: keep its arguments"),
    (CountsEveryRow, r"^CountsEveryRow.*outside the mask must not"),
    (KeepsLearning, r"eval\(\) must freeze"),
    (ReturnsItsBuffer, "later steps must not change earlier outputs|changing outputs in place"),
    (
        HidesItsState,
        r"^HidesItsState\(\): compile cannot trace this code: it changes HidesItsState.steps\. Register a buffer",
    ),
    (WritesIntoTheAction, r"^WritesIntoTheAction\(\): action\(\) writes to the agent's action"),
    (LeavesItsSpace, r"reset\(\) needs to return observations in"),
    (
        hooked(lambda self, r: r * r.max().item()),
        r"^Foreign\(\): .* Foreign.<lambda>: it reads .* host \(item\)\. Use",
    ),
    (AddsAKeySometimes, r"^AddsAKeySometimes\(\): step\(\) needs to return the same keys"),
]
MORE_BROKEN = [
    (
        KeepsATensor,
        r"^KeepsATensor\(\): .* KeepsATensor.reward: it uses a tensor that none of its modules holds\. Register",
    ),
    (DrawsLater, r"^DrawsLater\(\): .* it draws from Python's random\. Draw with torchwrap.random"),
    (
        hooked(lambda self, r, seen=[]: seen.append(r) or r + len(seen)),
        r"^Foreign\(\): .* computes different .* in a buffer",
    ),
    (
        hooked(lambda self, r: r + np.random.default_rng().random()),
        r"^Foreign\(\): .* different .* torchwrap.random",
    ),
    (
        hooked(lambda self, r: r if (r > 2).any() else r * 2),
        r"^Foreign\(\): .*<lambda>: it reads .* \(__bool__\)",
    ),
    (
        hooked(lambda self, r: torch.as_tensor(r.numpy() * 2)),
        r"^Foreign\(\): .*<lambda>: it reads .* \(numpy\)",
    ),
    (hooked(lambda self, r: r - r[0]), r"^Foreign\(\): it mixes rows"),
    (
        hooked(lambda self, r: r / len(r)),
        r"^Foreign\(\): it mixes rows, or depends on num_envs: env 0 of 5",
    ),
    (
        hooked(lambda self, a: a - a.mean(0), T.ActionTransform, "action"),
        r"^Foreign\(\): it mixes rows",
    ),
    (
        hooked(lambda self, o: o - o.mean(0), T.ObservationTransform, "observation"),
        r"^Foreign\(\): it mixes rows",
    ),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [*BROKEN, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_BROKEN)],
)
def test_broken_transform_is_told_what_it_breaks(make, message):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_transform(make)


class StepsWithoutReward(ScriptedEnv):
    def _step(self, action):
        return super()._step(action).exclude("reward")


class DependsOnNumEnvs(ScriptedEnv):
    def _step(self, action):
        return (
            super()
            ._step(action)
            .update({"reward": torch.full((self.num_envs, 1), float(self.num_envs))})
        )


class RewardsWithoutColumn(ScriptedEnv):
    def _step(self, action):
        td = super()._step(action)
        return td.set("reward", td["reward"].squeeze(-1))


class ReadsValuesWithoutSnapshots(ScriptedEnv):
    can_snapshot = False  # and yet it is stepped in PyTorch, so it has to compile

    def _step(self, action):
        assert action.isfinite().all().item()
        return super()._step(action)


class Drawing(W.Wrapper):
    def _step(self, action):
        td = super()._step(action)
        return td.set("reward", td["reward"] + np.random.rand())


class Mixing(CartPole):
    def reward(self, state, action, next_state, rng):
        return next_state["x"] - next_state["x"].mean()


class WrongObservation(ScriptedEnv):
    def _reset(self, mask, options=None):
        td = super()._reset(mask)
        return td.set("observation", td["observation"].double())


BROKEN_ENVS = [
    (StepsWithoutReward, r"StepsWithoutReward\._step needs to return \['reward'\] too"),
    (DependsOnNumEnvs, "^DependsOnNumEnvs: it mixes rows, or depends on num_envs: env 0 of 5"),
    pytest.param(
        lambda **given: tw.TransformedEnv(DependsOnNumEnvs(**given), T.TimeLimit(9)),
        "^DependsOnNumEnvs: it mixes rows, or depends on num_envs",
        marks=pytest.mark.full,
    ),
    pytest.param(
        lambda **given: W.RepeatAction(Drawing(ENVS["Gymnasium's CartPole-v1"](**given)), 1),
        "^Drawing: a step drew from numpy.random: draw with torchwrap.random, from a stream",
        marks=pytest.mark.full,
    ),
    pytest.param(
        lambda **given: tw.TransformedEnv(
            ENVS["Gymnasium's CartPole-v1"](**given),
            T.TransformReward(lambda r: r * r.max().item()),
        ),
        r"^TransformReward\(.* TransformReward.reward: it reads values on the host \(item\)",
        marks=pytest.mark.full,
    ),
    (lambda **given: tw.FunctionalEnv(Mixing(), **given), "^Mixing: it mixes rows"),
    (RewardsWithoutColumn, r"RewardsWithoutColumn\._step needs to return reward of shape \(5, 1\)"),
    (
        WrongObservation,
        r"WrongObservation\._reset needs to return observations of dtype torch.float32",
    ),
    pytest.param(
        ReadsValuesWithoutSnapshots,
        r"^ReadsValuesWithoutSnapshots: .*._step: it reads .*\(item\)",
        marks=pytest.mark.compiles,
    ),
]


@pytest.mark.parametrize(("make", "message"), BROKEN_ENVS)
def test_broken_env_is_told_what_it_breaks(make, message):
    with pytest.raises(AssertionError, match=message):
        check_env(make)


@pytest.mark.full
def test_check_env_takes_an_env_with_a_spec_and_a_function_of_the_number_alone():
    made = []
    check_env(lambda n: made.append(n) or tw.make("CartPole-v1", n, max_episode_steps=9))
    assert set(made) >= {5}
    check_env(tw.make("CartPole-v1", 3, max_episode_steps=9))
    with pytest.raises(
        TypeError, match=r"check_env cannot make more envs like <ScriptedEnv.* `lambda n: ...`"
    ):
        check_env(ScriptedEnv(2))
    for wrong in (CartPole, CartPole(), lambda: ScriptedEnv(2)):
        with pytest.raises(
            TypeError, match=r"needs a torchwrap env, or a function .*`lambda n: FunctionalEnv\("
        ):
            check_env(wrong)
    with pytest.raises(
        TypeError,
        match=r"check_transform needs a class or .*, but got TimeLimit.*: write `lambda:` before",
    ):
        check_transform(T.TimeLimit(3))


def test_check_transform_takes_a_function_of_the_number_of_envs():
    check_transform(lambda: T.ScaleReward(2.0), lambda num_envs: tw.make("CartPole-v1", num_envs))
    check_env(lambda n, device="cpu": tw.make("CartPole-v1", n, device=device))


def test_check_transform_finds_an_action_that_is_a_buffer():
    class Smooth(T.Transform):
        def setup(self, signature):
            self.register_env_buffer(
                "average", torch.zeros(signature.num_envs, *signature.single_action_space.shape)
            )
            return signature

        def action(self, action):
            return self.average.mul_(0.5).add_(action)

        def reset(self, td, mask):
            mask.fill_(self.average, 0)
            return td

    with pytest.raises(
        AssertionError,
        match=r"Smooth.*action\(\) returns a buffer, which later steps change: return a new tensor",
    ):
        check_transform(Smooth)
