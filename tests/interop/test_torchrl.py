"""to_torchrl under TorchRL's collectors, losses and transforms; and the recipe for its envs."""

import warnings

import numpy as np
import pytest

pytest.importorskip("torchrl")
with warnings.catch_warnings():  # a class of TorchRL's own is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import Collector

import torch
from gymnasium import spaces as S
from helpers import assert_same, buffers, load_example
from single_envs import scripted
from tensordict import TensorDict
from torchrl.envs import (
    PendulumEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.transforms import RewardSum, StepCounter

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.torchrl import to_spec, to_torchrl
from torchwrap.testing import ScriptedEnv

# TorchRL and tensordict raise deprecations of their own, in `Collector`, `GAE` and losses.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensordict.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torchrl.*"),
]

IMAGE = S.Box(0, 255, (3, 3), np.uint8)
NESTED = S.Dict(
    vector=S.Box(-1, 1, (2,)),
    parts=S.Tuple(
        (
            S.Discrete(3),
            S.Dict(image=IMAGE, pair=S.MultiDiscrete([2, 3])),
        )
    ),
    bits=S.MultiBinary(4),
    late=S.Discrete(3, start=5),
)
TUPLE = S.Tuple((S.Discrete(2, start=-1), S.Dict(b=S.MultiBinary(2))))


def make_cartpole(num_envs=5, **kwargs):
    return tw.TransformedEnv(
        tw.make("CartPole-v1", num_envs, **kwargs),
        T.TimeLimit(13),
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )


def make_nested():
    return ScriptedEnv(
        3,
        observation_space=NESTED,
        action_space=S.MultiDiscrete([2, 3]),
    )


def make_compiled():
    return tw.compile(make_cartpole(backend="gymnasium"), backend="aot_eager")


MAKERS = {
    "nested": make_nested,
    "Tuple actions": lambda: ScriptedEnv(3, action_space=TUPLE),
    "native": make_cartpole,
    "compiled over sync": make_compiled,
}


def replay(actions):
    """A policy that takes these actions."""
    remaining = iter(actions)
    return lambda td: td.set("action", next(remaining))


def steps_of(env, actions, seed):
    """Transitions and roots of torchwrap, `(num_envs, time)`."""
    td = env.reset(seed=seed)
    seen = []
    for action in actions:
        step = TensorDict({"observation": td["observation"].clone()}, [env.num_envs])
        transition, td = env.step(td.set("action", action))
        seen.append(step.set("next", transition["next"]).clone())
    return torch.stack(seen, 1)


def assert_same_steps(data, expected):
    """Transitions and observations are equal; other keys of roots are zero or the last values."""
    assert_same(data.select("observation", "next"), expected)
    goes_on = ~expected["next", "done"].squeeze(-1)[:, :-1]
    extras = expected["next"].exclude("observation", "reward", "terminated", "truncated", "done")
    for leaf in extras.keys(True, True):
        assert not data[leaf][:, 0].any()
        later = data[leaf][:, 1:]
        assert not later[~goes_on].any()
        assert (later == extras[leaf][:, :-1])[goes_on].all()
    for flag in ("done", "terminated", "truncated"):
        assert not data[flag].any()


# Steps.


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_rollouts_and_manual_steps_equal_torchwrap_step_by_step(make):
    env, manual = (to_torchrl(make()) for _ in range(2))
    other = make()
    actions = [other.sample_action() for _ in range(30)]
    expected = steps_of(other, actions, seed=7)
    assert expected["next", "done"].any()
    env.set_seed(7)
    data = env.rollout(30, replay(actions), break_when_any_done=False)
    assert_same_steps(data.exclude("action"), expected)
    check_env_specs(env, seed=0, break_when_any_done="both")
    manual.set_seed(7)
    td = manual.reset()
    seen = []
    for action in actions:
        td = manual.step(td.set("action", action))
        seen.append(td.clone())
        td = manual.maybe_reset(manual.step_mdp(td))
    assert_same_steps(torch.stack(seen, 1), expected)
    for each in (env, manual, other):
        each.close()


def test_rollout_until_all_have_ended_is_refused():
    base = ScriptedEnv(3, (1,), episode_lengths=(5, 2, 3))
    env = to_torchrl(tw.TransformedEnv(base, T.RecordEpisodeStatistics()))
    with pytest.raises(ValueError, match="break_when_all_done"):
        env.rollout(20, break_when_any_done=False, break_when_all_done=True)
    assert env.env.transforms[0].length_queue.tolist() == []  # none of its invented episodes


def test_entries_of_a_policy_under_next_are_kept():
    env = to_torchrl(ScriptedEnv(2, (1,), episode_lengths=2))
    td = env.reset().set("action", env.env.sample_action())
    td["next"] = TensorDict(
        {"hidden": torch.ones(2, 3), "observation": torch.zeros(2, 1)},
        [2],
    )
    transition, _ = env.step_and_maybe_reset(td)
    assert (transition["next", "hidden"] == 1).all()
    assert transition["next", "observation"].flatten().tolist() == [
        1,
        1001,
    ]


# The collector, losses and transforms of TorchRL.


def make_normalized(num_envs=2):
    return tw.TransformedEnv(ScriptedEnv(num_envs, (1,)), T.NormalizeObservation())


# Seeds, state, and construction.


def test_train_eval_and_state_dict_reach_the_statistics():
    env = to_torchrl(make_normalized())
    statistics = env.env.transforms[0].statistics
    env.rollout(5, break_when_any_done=False)
    assert statistics.mean != 0
    env.eval()
    before = statistics.count.clone()
    env.rollout(5, break_when_any_done=False)
    assert statistics.count == before
    other = to_torchrl(make_normalized(7))
    other.load_state_dict(env.state_dict())
    assert other.env.transforms[0].statistics.mean == statistics.mean
    env.train()
    outer = TransformedEnv(env, RewardSum())
    collector = Collector(outer, None, frames_per_batch=8, total_frames=8)
    assert not collector.state_dict()["env_state_dict"]  # TorchRL leaves it out
    outer.eval()  # TorchRL's own stops at its transforms
    assert env.env.transforms.training


def test_construction_leaves_a_running_env_as_it_was():
    env = make_cartpole(backend="gymnasium")
    td = env.reset(seed=1)
    for _ in range(5):
        _, td = env.step(td.set("action", env.sample_action()))
    before = buffers(env)
    state = torch.get_rng_state()
    base = to_torchrl(env)
    assert_same(buffers(env), before)
    assert (torch.get_rng_state() == state).all()
    action = torch.zeros(5, dtype=torch.int64)
    assert (base.env.step(action)[0]["next", "episode_length"] > 5).any()  # of running episodes
    base.close()


def test_info_of_a_foreign_simulator_is_declared(bridge):
    simulator = bridge(scripted(2), info_keys=["elapsed"])
    env = to_torchrl(tw.TransformedEnv(simulator, T.RecordEpisodeStatistics()))
    check_env_specs(env, break_when_any_done="both")
    data = env.rollout(30, break_when_any_done=False)
    taken = data["next", "info", "elapsed"] - data["info", "elapsed"]
    assert (taken[:, 0] == 2).all()  # in new episodes, because resets return -1
    assert taken[:, 1:].unique().tolist() == [1, 2]


# Spaces and specs.

SPACES = [
    S.Box(0, 255, (2, 3), np.uint8),
    S.Box(-np.inf, np.inf, (3,)),
    S.Box(np.array([0.0, -2.0]), np.array([1.0, 3.0]), dtype=np.float64),
    S.Discrete(4),
    S.Discrete(3, start=2),
    S.MultiDiscrete([[2, 5], [3, 3]]),
    S.MultiDiscrete([2, 3], start=[1, -1]),
    S.MultiBinary((2, 2)),
    S.Tuple((S.Discrete(2), S.Discrete(3))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spec_draws_members_of_its_space_and_holds_them(space):
    spec = to_spec(space, 200, torch.device("cpu"))
    drawn = spec.rand()
    assert tw.spaces.contains(space, drawn)
    stream = tw.random.Stream(200, seed=0)
    assert spec.is_in(tw.spaces.sample(space, stream))
    for path, leaf in tw.spaces.leaves(space):
        if isinstance(leaf, S.Discrete):
            assert len(tw.spaces.entry(drawn, path).unique()) == leaf.n


# The recipe for envs of TorchRL.


def test_pendulum_of_torchrl_equals_its_own_rollout():
    def make():
        return SerialEnv(3, lambda: TransformedEnv(PendulumEnv(), StepCounter(7)))

    scalar = S.Box(-np.inf, np.inf, (), np.float32)
    space = S.Dict(th=scalar, thdot=scalar)
    recipe = load_example("simulators").from_torchrl
    env = recipe(make(), space, S.Box(-2, 2, (1,)))
    other = make()
    other.set_seed(3)
    td = env.reset(seed=3)
    root = other.reset()
    for _ in range(20):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        stepped, root = other.step_and_maybe_reset(root.set("action", action))
        for name in ("th", "thdot"):
            assert (transition["next", "observation", name] == stepped["next", name]).all()
            assert (td["observation", name] == root[name]).all()
        for name in ("reward", "terminated", "truncated"):
            assert (transition["next", name] == stepped["next", name]).all()
    env.close()
