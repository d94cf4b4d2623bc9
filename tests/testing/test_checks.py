import functools
import random
import traceback

import numpy as np
import pytest
import torch
from catalogue import DICT, TRANSFORMS, UNCAPTURED, WRAPPERS
from gymnasium import spaces
from helpers import AT_RELEASES, mostly_full

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.envs.cartpole import CartPole
from torchwrap.testing import ScriptedEnv, check_env, check_transform

partial = functools.partial
UNEVEN = spaces.Box(np.float32([-1, 0, -8]), np.float32([1, 0.5, 8]))
INTEGERS = spaces.MultiDiscrete([2, 5], start=[1, -3])
ONE_OF_FOUR = spaces.Discrete(4, start=-1)
BRIDGED = partial(tw.make, "CartPole-v1", backend="gymnasium")
CHEETAH = partial(tw.make, "HalfCheetah-v5", max_episode_steps=7, info_keys=["x_position"])
ENVS = {
    "ScriptedEnv": ScriptedEnv,
    "ScriptedEnv of a Dict": partial(ScriptedEnv, observation_space=DICT, action_space=ONE_OF_FOUR),
    "ScriptedEnv without ends": partial(ScriptedEnv, episode_lengths=None),
    "ScriptedEnv of uneven bounds": partial(ScriptedEnv, observation_space=UNEVEN),
    "ScriptedEnv of uneven integers": partial(ScriptedEnv, observation_space=INTEGERS),
    "CartPole-v1 in float64": partial(tw.make, "CartPole-v1", dtype=torch.float64),
    "Gymnasium's CartPole-v1": BRIDGED,
    "InvertedPendulum-v5": partial(tw.make, "InvertedPendulum-v5"),
    "HalfCheetah-v5": CHEETAH,
}
# CI checks these. The others are checked before a release, and in the stacks of the fuzz tests.
SOME = (
    "RecordEpisodeStatistics",
    "NormalizeObservation",
    "StickyAction",
    "FrameStackObservation",
    "PolicyState",
    "Compose of seven",
)
LONG = {*TRANSFORMS} - {*SOME}
# Wrappers and envs that are checked before a release.
VARIANTS = (
    "RepeatAction",
    "RepeatAction of CartPole",
    "MaxAndSkipObservation of images",
    "AddRenderObservation",
    "ScriptedEnv without ends",
    "ScriptedEnv of uneven bounds",
    "ScriptedEnv of uneven integers",
    "InvertedPendulum-v5",
)


@pytest.mark.parametrize("name", mostly_full(TRANSFORMS, "ClipReward", long=LONG))
def test_transform_keeps_the_contract(name):
    check_transform(*TRANSFORMS[name])


@pytest.mark.full
@pytest.mark.compiles
@pytest.mark.parametrize("name", UNCAPTURED)
def test_transform_that_cannot_be_compiled_keeps_the_rest_of_the_contract(name):
    with pytest.raises(AssertionError, match=rf"^{name}\(\): .*{name}.action.* host"):
        check_transform(*UNCAPTURED[name])


@pytest.mark.parametrize("name", mostly_full(WRAPPERS, long=VARIANTS))
def test_wrapper_keeps_the_contract_of_an_env(name):
    check_env(WRAPPERS[name])


def test_catalogue_has_every_transform_and_wrapper():
    bases = {"ActionTransform", "ObservationTransform", "RewardTransform", "Transform"}
    others = {"Compose", "RunningMeanStd", "atari"}
    assert set(T.__all__) - bases - others <= set(TRANSFORMS | UNCAPTURED)
    assert set(W.__all__) - {"Wrapper"} <= set(WRAPPERS)


@pytest.mark.parametrize("name", mostly_full(ENVS, "Gymnasium's CartPole-v1", long=VARIANTS))
def test_env_keeps_the_contract(name):
    check_env(ENVS[name])


@pytest.mark.cuda
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_on_cuda_keeps_the_contract(name):
    make, make_env = TRANSFORMS[name]
    check_transform(make, partial(make_env, device="cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ENVS)
def test_env_on_cuda_keeps_the_contract(name):
    if name.endswith("-v5"):
        pytest.importorskip("mujoco")
    check_env(partial(ENVS[name], device="cuda"))


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


class ReturnsABufferAsAction(T.Transform):
    def setup(self, signature):
        average = torch.zeros(signature.num_envs, *signature.single_action_space.shape)
        self.register_env_buffer("average", average)
        return signature

    def action(self, action):
        return self.average.mul_(0.5).add_(action)

    def reset(self, td, mask):
        mask.fill_(self.average, 0)
        return td


class LeavesItsSpace(T.ObservationTransform):
    def setup(self, signature):
        space = spaces.Box(0, 1, signature.single_observation_space.shape)
        return signature.replace(single_observation_space=space)

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
        if self.late:
            return reward + random.random()
        self.late = True
        return reward


class CastsLater(T.RewardTransform):
    calls = 0

    def reward(self, reward):
        self.calls += 1
        return reward.double() if self.calls == 9 else reward


def cast_back():
    return T.Compose([CastsLater(), T.TransformReward(torch.Tensor.float)])


class AddsAKeySometimes(T.Transform):
    def step(self, td):
        return td.set("last", td["reward"]) if td["terminated"].any() else td


class AirTime(T.Transform):
    """Rewards the time between two contacts. Its clock goes on in the next episode."""

    air = tw.EnvBuffer((1,))

    def step(self, td):
        contact = td["observation"][:, :1] < 0
        td.set("reward", torch.where(contact, self.air, 0.0))
        self.air.copy_(torch.where(contact, 0, self.air + 1))
        return td


class Tires(T.Transform):
    """Gives no reward after ten steps, and none in later episodes: `reset` forgets a buffer."""

    elapsed = tw.EnvBuffer((1,), torch.int64)
    is_tired = tw.EnvBuffer((1,), torch.bool)

    def step(self, td):
        self.is_tired.logical_or_(self.elapsed.add_(1) > 10)
        return td.set("reward", torch.where(self.is_tired, 0.0, td["reward"]))

    def reset(self, td, mask):
        mask.fill_(self.elapsed, 0)
        return td


class RenamesItsArgument(T.RewardTransform):
    def __init__(self, scale=2):
        super().__init__()
        self.factor = scale

    def reward(self, reward):
        return reward * self.factor


def within_a_stack(base, hook, function):
    """Makes a stack with a transform of this hook among others."""

    def make():
        foreign = type("Foreign", (base,), {hook: lambda self, value: function(value)})
        return T.Compose(
            [
                T.Compose([T.ClipReward(-9, 9), foreign()]),
                T.TimeLimit(99),
            ]
        )

    return make


rewarding = partial(within_a_stack, T.RewardTransform, "reward")
acting = partial(within_a_stack, T.ActionTransform, "action")


def minus_mean(value):
    return value - value.mean(0)


BROKEN = {  # a transform and a pattern: the layer, and the fault
    "space": (LeavesItsSpace, r"reset\(\).* observation"),
    "spec": (RenamesItsArgument, "spec: RenamesItsArgument"),
    "masked reset": (CountsEveryRow, "^CountsEveryRow.*mask"),
    "eval": (KeepsLearning, r"eval\(\)"),
    "written action": (WritesIntoTheAction, r"^WritesIntoTheAction\(\): action\(\) writes"),
    "action is a buffer": (ReturnsABufferAsAction, r"^ReturnsABufferAsAction\(\).*buffer"),
    "late dtype": (cast_back, r"^CastsLater\(\): .*CastsLater\)\.step.*float64"),
    "keys": (AddsAKeySometimes, r"^AddsAKeySometimes\(\): step\(\).* keys"),
}
SLOWLY_BROKEN = {
    "outputs": (ReturnsItsBuffer, "outputs"),
    "Python state": (HidesItsState, r"^HidesItsState\(\): .*self\.steps"),
    "host read": (rewarding(lambda r: r * r.max().item()), r"^Foreign\(\): .*host.*item"),
    "no reset": (AirTime, r"^AirTime\(\): after reset\(seed\)"),
}
MORE_BROKEN = {
    "no reset after long episodes": (Tires, r"^Tires\(\): after reset\(seed\)"),
    "kept tensor": (KeepsATensor, r"^KeepsATensor\(\): .*KeepsATensor.reward.*tensor"),
    "late draw": (DrawsLater, r"^DrawsLater\(\): .*random"),
    "NumPy draw": (
        rewarding(lambda r: r + np.random.default_rng().random()),
        r"^Foreign\(\): .*torchwrap.random",
    ),
    "num_envs": (rewarding(lambda r: r / len(r)), r"^Foreign\(\): it mixes rows.*env 0 of 5"),
    "mean action": (acting(minus_mean), r"^Foreign\(\): it mixes rows"),
}


def cases(quick, slow, more):
    marked = [(quick, ()), (slow, pytest.mark.full), (more, AT_RELEASES)]
    return [
        pytest.param(*case, id=name, marks=marks)
        for broken, marks in marked
        for name, case in broken.items()
    ]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("make", "message"), cases(BROKEN, SLOWLY_BROKEN, MORE_BROKEN))
def test_broken_transform_is_told_what_it_breaks(make, message):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_transform(make)


class DependsOnNumEnvs(ScriptedEnv):
    def _step(self, action):
        td = super()._step(action)
        return td.set("reward", torch.full_like(td["reward"], self.num_envs))


class NeedsFiveEnvs(ScriptedEnv):
    def _step(self, action):
        td = super()._step(action)
        return td.set("reward", td["reward"] + torch.zeros(5, 1))


class SqueezesLater(ScriptedEnv):
    calls = 0

    def _step(self, action):
        self.calls += 1
        td = super()._step(action)
        return td.set("reward", td["reward"].view(-1)) if self.calls == 9 else td


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


class Drawn(ScriptedEnv):
    def __init__(self, num_envs, **given):
        super().__init__(num_envs, **given)
        self.register_buffer("shift", torch.rand(1), persistent=False)

    def _step(self, action):
        td = super()._step(action)
        return td.set("reward", td["reward"] + self.shift)


def unsqueezing_above(**given):
    above = T.TransformReward(lambda reward: reward.view(-1, 1))
    return tw.TransformedEnv(SqueezesLater(**given), above)


def drawing_below(**given):
    return W.RepeatAction(Drawing(BRIDGED(**given)), 1)


def reading_above(**given):
    transform = T.TransformReward(lambda reward: reward * reward.max().item())
    return tw.TransformedEnv(BRIDGED(**given), transform)


def leaving_its_space(num_envs):
    space = spaces.Dict(near=spaces.Box(0, 1, (2,)), far=spaces.Box(-9, 9, (2,)))
    env = ScriptedEnv(num_envs, observation_space=space)
    return tw.TransformedEnv(env, T.TransformObservation(lambda td: td.apply(lambda x: x + 2)))


BROKEN_ENVS = {
    "values": (leaving_its_space, r"reset\(\).* observation\['near'\]"),
    "num_envs": (DependsOnNumEnvs, "^DependsOnNumEnvs: it mixes rows.*env 0 of 5"),
    "PyTorch's error": (NeedsFiveEnvs, r"^NeedsFiveEnvs: .*batch dimension"),
    "late shape": (unsqueezing_above, r"^SqueezesLater: SqueezesLater\._step.*reward"),
    "observation": (WrongObservation, r"WrongObservation\._reset.*observation"),
    "draws when made": (lambda n: Drawn(n), "^Drawn: .*constructors"),
}
SLOWLY_BROKEN_ENVS = {
    "functions": (partial(tw.FunctionalEnv, Mixing()), "^Mixing: it mixes rows"),
    "host read": (ReadsValuesWithoutSnapshots, r"^ReadsValuesWithoutSnapshots: .*_step.*item"),
}
MORE_BROKEN_ENVS = {
    "shards that draw when made": (Drawn, "^Drawn: .*constructors"),
    "draw": (drawing_below, "^Drawing: .*numpy.random"),
    "layer above": (reading_above, r"^TransformReward\(.*TransformReward.reward.*item"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "message"), cases(BROKEN_ENVS, SLOWLY_BROKEN_ENVS, MORE_BROKEN_ENVS)
)
def test_broken_env_is_told_what_it_breaks(make, message):
    with pytest.raises(AssertionError, match=message):
        check_env(make)


# Arguments.


@pytest.mark.full
def test_check_env_takes_an_env_with_a_spec():
    check_env(tw.make("CartPole-v1", 3, max_episode_steps=9))


@pytest.mark.full
def test_check_env_takes_a_function_of_the_number_of_envs():
    numbers = []

    def make(n):
        numbers.append(n)
        return tw.make("CartPole-v1", n, max_episode_steps=9)

    check_env(make)
    assert set(numbers) == {5}


NO_MAKERS = {
    "env without a spec": ScriptedEnv(2),
    "class of functions": CartPole,
    "functions": CartPole(),
    "function without a number": lambda: ScriptedEnv(2),
}


@pytest.mark.parametrize("make", NO_MAKERS.values(), ids=NO_MAKERS)
def test_check_env_of_something_else_raises(make):
    with pytest.raises(TypeError, match="check_env: make"):
        check_env(make)


@pytest.mark.full
@pytest.mark.parametrize("make_env", [DependsOnNumEnvs, lambda n: DependsOnNumEnvs(n)])
def test_check_transform_compares_no_numbers_of_envs_that_differ_by_themselves(make_env):
    check_transform(T.NormalizeReward, make_env)


GLOBAL = torch.ones(1)


class ReadsAGlobalTensor(ScriptedEnv):
    def _step(self, action):
        td = super()._step(action)
        return td.set("reward", td["reward"] * GLOBAL)


@pytest.mark.full
def test_traceback_of_a_broken_env_is_shorter_than_a_screen():
    with pytest.raises(AssertionError, match=r"^ReadsAGlobalTensor: .*tensor") as raised:
        check_env(ReadsAGlobalTensor)
    printed = "".join(traceback.format_exception(raised.value))
    assert len(printed.splitlines()) < 25
