"""TorchRL: torchwrap envs under its collectors, losses and transforms, and its envs under torchwrap's transforms."""

import functools
import warnings

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torchrl")
with warnings.catch_warnings():  # a class of TorchRL's own is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import Collector, MultiCollector

import torch
from gymnasium import spaces as S
from helpers import Held, assert_same, buffers, load_example
from tensordict import TensorDict
from torch import nn
from torchrl.data.replay_buffers import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import ParallelEnv, PendulumEnv, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.transforms import InitTracker, RewardSum, StepCounter
from torchrl.modules import ValueOperator
from torchrl.objectives.value import GAE

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

NESTED = S.Dict(
    vector=S.Box(-1, 1, (2,)),
    parts=S.Tuple(
        (S.Discrete(3), S.Dict(image=S.Box(0, 255, (3, 3), np.uint8), pair=S.MultiDiscrete([2, 3])))
    ),
    bits=S.MultiBinary(4),
    late=S.Discrete(3, start=5),
)


def make_cartpole(num_envs=5, **kwargs):
    env = tw.make("CartPole-v1", num_envs, **kwargs)
    return tw.TransformedEnv(
        env,
        T.TimeLimit(13),
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )


MAKERS = {
    "in turn, staggered": lambda: ScriptedEnv(5),
    "one-step episodes": lambda: ScriptedEnv(3, episode_lengths=1, ending="both"),
    "nested": lambda: ScriptedEnv(
        3, observation_space=NESTED, action_space=S.MultiDiscrete([2, 3])
    ),
    "Tuple actions": lambda: ScriptedEnv(
        3, action_space=S.Tuple((S.Discrete(2, start=-1), S.Dict(b=S.MultiBinary(2))))
    ),
    "native": make_cartpole,
    "compiled over sync": lambda: tw.compile(
        make_cartpole(backend="gymnasium"), backend="aot_eager"
    ),
}
each_env = pytest.mark.parametrize("name", MAKERS)


def replay(actions):
    """A policy that takes these actions in turn."""
    remaining = iter(actions)
    return lambda td: td.set("action", next(remaining))


def steps_of(env, actions, seed):
    """Transitions and roots of torchwrap, `(num_envs, time)`."""
    td, seen = env.reset(seed=seed), []
    for action in actions:
        root = td["observation"].clone()
        transition, td = env.step(td.set("action", action))
        seen.append(
            TensorDict({"observation": root, "next": transition["next"]}, [env.num_envs]).clone()
        )
    return torch.stack(seen, 1)


def assert_same_steps(data, expected):
    """TorchRL's data hold torchwrap's transitions, and roots that hold zeros or the last values of other keys."""
    assert_same(data["next"], expected["next"])
    assert_same(data.select("observation"), expected.select("observation"))
    done = expected["next", "done"].squeeze(-1)
    extras = expected["next"].exclude("observation", "reward", "terminated", "truncated", "done")
    for leaf in extras.keys(True, True):
        last, root = extras[leaf][:, :-1], data[leaf]
        assert not root[:, 0].any() and not root[:, 1:][done[:, :-1]].any()
        assert (root[:, 1:] == last)[~done[:, :-1]].all()
    assert not data["done"].any() and not data["terminated"].any() and not data["truncated"].any()


# to_torchrl: steps.


@each_env
def test_rollouts_and_manual_steps_equal_torchwrap_step_by_step(name):
    env, manual, other = to_torchrl(MAKERS[name]()), to_torchrl(MAKERS[name]()), MAKERS[name]()
    actions = [other.sample_action() for _ in range(30)]
    expected = steps_of(other, actions, seed=7)
    assert expected["next", "done"].any()
    env.set_seed(7)
    assert_same_steps(env.rollout(30, replay(actions), break_when_any_done=False), expected)
    check_env_specs(env, seed=0, break_when_any_done="both")
    manual.set_seed(7)
    td, seen = manual.reset(), []
    for action in actions:
        td = manual.step(td.set("action", action))
        seen.append(td.clone())
        td = manual.maybe_reset(manual.step_mdp(td))
    assert_same_steps(torch.stack(seen, 1), expected)
    for each in (env, manual, other):
        each.close()


def test_rollout_until_all_have_ended_holds_ended_rows_still():
    env = to_torchrl(
        tw.TransformedEnv(
            ScriptedEnv(3, (1,), episode_lengths=(5, 2, 3)), T.RecordEpisodeStatistics()
        )
    )
    data = env.rollout(20, break_when_any_done=False, break_when_all_done=True)
    assert data.shape == (3, 5)
    assert data["next", "observation"][:, -1].flatten().tolist() == [5, 1002, 2003]
    assert data["next", "episode_return"][:, -1].flatten().tolist() == [15, 3, 6]
    env.reset()
    assert (
        env.env.transforms[0].length_queue == 5
    ).sum() == 1  # no env was stepped beyond the end of its episode


def test_returned_data_are_not_changed_by_later_steps():
    for name in ("nested", "native"):
        env, held = to_torchrl(MAKERS[name]()), Held()
        td = env.reset()
        for _ in range(20):
            transition, td = env.step_and_maybe_reset(td.set("action", env.env.sample_action()))
            held.add(transition["next"].clone(False), td.clone(False))
        held.assert_unchanged()


def test_what_a_policy_writes_to_next_is_kept():
    env = to_torchrl(ScriptedEnv(2, (1,), episode_lengths=2))
    td = env.reset().set("action", env.env.sample_action())
    td["next"] = TensorDict({"hidden": torch.ones(2, 3), "observation": torch.zeros(2, 1)}, [2])
    transition, _ = env.step_and_maybe_reset(td)
    assert (transition["next", "hidden"] == 1).all()
    assert transition["next", "observation"].flatten().tolist() == [1, 1001]


# to_torchrl: the collector, losses and transforms of TorchRL.


def by_position(td):
    """A policy that looks at the observation only."""
    return td.set("action", (td["observation"][:, 0] > 0).long())


def test_collector_of_torchrl_equals_that_of_torchwrap():
    env, other = to_torchrl(make_cartpole()), make_cartpole()
    env.set_seed(3)
    collector = Collector(env, by_position, frames_per_batch=5 * 20, total_frames=5 * 60)
    collect, td = tw.Collector(other, by_position, num_steps=20), other.reset(seed=3)
    batches, trajectories, ends = 0, set(), 0
    for data in collector:
        expected, td = collect(td)
        assert_same(data["next"], expected["next"])
        assert_same(data.select("observation", "action"), expected.select("observation", "action"))
        trajectories |= set(data["collector", "traj_ids"].flatten().tolist())
        ends += int(data["next", "done"][:, : 20 if batches < 2 else 19].sum())
        batches += 1
    assert batches == 3 and ends > 5
    assert len(trajectories) == 5 + ends  # each end starts a trajectory
    collector.shutdown()


def test_gae_evaluates_the_critic_at_the_final_observation_of_a_truncation():
    env = to_torchrl(ScriptedEnv(3, (2,), episode_lengths=(4, 2, 3)))
    data = env.rollout(12, break_when_any_done=False)
    critic = ValueOperator(nn.Linear(2, 1), in_keys=["observation"])
    gamma = 0.9
    GAE(gamma=gamma, lmbda=0.0, value_network=critic)(data)
    value, next_value = (
        critic.module(data["observation"]),
        critic.module(data["next", "observation"]),
    )
    terminated, truncated = data["next", "terminated"], data["next", "truncated"]
    only_truncated = truncated & ~terminated
    assert (
        only_truncated.any() and (terminated & ~truncated).any() and (terminated & truncated).any()
    )
    torch.testing.assert_close(
        data["next", "state_value"][only_truncated], next_value[only_truncated]
    )
    torch.testing.assert_close(
        data["advantage"], data["next", "reward"] + gamma * next_value * ~terminated - value
    )
    # The step after a truncation starts from another observation, with another value.
    after = value[:, 1:][only_truncated[:, :-1]]
    assert ((after - next_value[:, :-1][only_truncated[:, :-1]]).abs() > 1e-3).all()


def test_transformed_env_of_torchrl_on_top_with_staggered_ends():
    base = ScriptedEnv(3, (1,), episode_lengths=(5, 2, 4), ending="terminated")
    env = TransformedEnv(
        to_torchrl(tw.TransformedEnv(base, T.RecordEpisodeStatistics()))
    ).append_transform(InitTracker())
    env = env.append_transform(RewardSum()).append_transform(StepCounter(max_steps=4))
    check_env_specs(env, break_when_any_done="both")
    env.set_seed(0)
    data = env.rollout(10, break_when_any_done=False)
    t = torch.tensor(
        [
            [1, 2, 3, 4, 1, 2, 1, 2, 3, 4],
            [1, 2, 1, 2, 3, 4, 1, 2, 3, 4],
            [1, 2, 3, 4, 1, 2, 3, 4, 1, 2],
        ]
    )
    t = t.unsqueeze(-1)  # 4 in place of 5, which StepCounter truncates
    rows = torch.tensor([0, 1000, 2000]).view(3, 1, 1)
    assert (data["next", "observation"] == rows + t).all()
    assert (data["observation"] == rows + t - 1).all()
    assert (data["next", "step_count"] == t).all()
    for name in ("episode_reward", "episode_return"):  # TorchRL's, and torchwrap's
        assert (data["next", name] == t * (t + 1) / 2).all() and (
            data[name] == t * (t - 1) / 2
        ).all()
    assert (data["is_init"] == (t == 1)).all()
    assert (data["next", "truncated"] == (t == 4)).all()
    assert data["next", "terminated"].sum((1, 2)).tolist() == [2, 2, 2]


# to_torchrl: the machinery of TorchRL around two envs, whose steps are counted by hand.

LENGTHS = (4, 2, 3)
COUNTS = [[1, 2, 3, 4, 1, 2, 1, 2, 3, 1, 2, 3], [1, 2, 1, 2, 3, 1, 2, 3, 4, 1, 2, 1]]
COUNTS += [[1, 2, 3, 1, 2, 3, 4, 1, 2, 1, 2, 3], COUNTS[0]]


def counting(first_index=0):
    env = ScriptedEnv(2, (1,), LENGTHS, first_index=first_index)
    return to_torchrl(
        tw.TransformedEnv(
            env, T.RecordEpisodeStatistics(), T.TransformObservation(lambda o: o % 1000)
        )
    )


def assert_counts(data, counts):
    """Transitions, (envs, time), whose observations are these numbers of steps, and whose returns are their sums."""
    t = torch.tensor(counts, dtype=torch.float32).unsqueeze(-1)
    assert torch.equal(data["next", "observation"], t) and torch.equal(data["observation"], t - 1)
    assert torch.equal(data["next", "reward"], t) and torch.equal(
        data["next", "episode_return"], t * (t + 1) / 2
    )


@pytest.mark.full
def test_processes_of_torchrl_step_shards_like_one_env():
    shards = [functools.partial(counting, first_index) for first_index in (0, 2)]
    for kind in (SerialEnv, ParallelEnv):
        env = kind(2, shards)
        assert_counts(env.rollout(12, break_when_any_done=False).flatten(0, 1), COUNTS)
        env.close()
    collector = MultiCollector(shards, None, frames_per_batch=48, total_frames=48, sync=True)
    for data in collector:
        assert_counts(data.flatten(0, 1), COUNTS)
    collector.shutdown()
    collector = MultiCollector(shards, None, frames_per_batch=24, total_frames=24, sync=False)
    for data in collector:  # of whichever process is the first
        assert_counts(data, COUNTS[:2] if data["next", "done"][0, 3] else COUNTS[2:])
    collector.shutdown()


@pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning")
def test_options_of_the_collector_and_slices_of_a_buffer_keep_episodes_apart():
    collect = functools.partial(Collector, frames_per_batch=10)
    for data in collect(counting(), None, total_frames=10, set_truncated=True):
        assert_counts(data, [row[:5] for row in COUNTS[:2]])
        assert data["next", "truncated"][:, -1].all() and data["next", "done"][:, -1].all()
    starts = []
    for data in collect(counting(), None, total_frames=20, reset_at_each_iter=True):
        starts.append(data["observation"][:, 0].flatten().tolist())
        assert (data["next", "observation"] == data["observation"] + 1).all()
    assert starts == [[0, 0], [0, 0]]
    (data,) = collect(counting(), None, total_frames=10, split_trajs=True)
    mask, lengths = data["collector", "mask"], [4, 1, 2, 3]
    assert mask.sum(-1).tolist() == lengths
    assert torch.equal(
        data["next", "observation"][..., 0], torch.arange(1.0, 5).expand(4, 4) * mask
    )
    sampler = SliceSampler(slice_len=2, traj_key=("collector", "traj_ids"), strict_length=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=16)
    for data in collect(counting(), None, total_frames=20):
        buffer.extend(data.reshape(-1))
    slices = buffer.sample().view(8, 2)
    assert torch.equal(slices["next", "observation"], slices["observation"] + 1)
    assert torch.equal(slices["observation"][:, 1], slices["next", "observation"][:, 0])


def test_checkpoint_of_a_collector_needs_the_statistics_of_the_env_besides():
    def make():
        return to_torchrl(tw.TransformedEnv(ScriptedEnv(2, (1,)), T.NormalizeObservation()))

    envs = make(), make()
    first, second = (Collector(env, None, frames_per_batch=10, total_frames=30) for env in envs)
    next(iter(first))
    saved = first.state_dict()
    assert not saved["env_state_dict"]  # what TorchRL leaves out
    saved["env_state_dict"] = envs[0].state_dict()
    second.load_state_dict(saved, strict=False)  # there is no policy
    statistics = [env.env.transforms[0].statistics for env in envs]
    assert statistics[0].count > 10 and torch.equal(statistics[0].mean, statistics[1].mean)


# to_torchrl: seeds, state, and what construction touches.


def test_set_seed_repeats_and_another_seed_differs():
    env = to_torchrl(tw.make("CartPole-v1", 3))
    runs = []
    for seed in (0, 0, 1):
        env.set_seed(seed)
        runs.append(env.rollout(5, by_position, break_when_any_done=False)["observation"])
    assert (runs[0] == runs[1]).all() and (runs[0] != runs[2]).any()
    assert (
        env.rollout(5, by_position, break_when_any_done=False)["observation"] != runs[2]
    ).any()  # it is taken once


def test_train_and_eval_and_state_dict_reach_the_statistics():
    env = to_torchrl(tw.TransformedEnv(ScriptedEnv(2, (1,)), T.NormalizeObservation()))
    statistics = env.env.transforms[0].statistics
    assert env.rollout(5, break_when_any_done=False).shape == (2, 5) and statistics.count > 0
    env.eval()
    before = statistics.count.clone()
    env.rollout(5, break_when_any_done=False)
    assert statistics.count == before
    other = to_torchrl(tw.TransformedEnv(ScriptedEnv(7, (1,)), T.NormalizeObservation()))
    other.load_state_dict(env.state_dict())
    assert (
        other.env.transforms[0].statistics.mean == statistics.mean
    ).all() and statistics.mean != 0
    env.train()
    outer = TransformedEnv(env, RewardSum())
    Collector(outer, None, frames_per_batch=8, total_frames=8)
    outer.eval()  # TorchRL's own stops at its transforms
    assert env.env.transforms.training


def test_construction_leaves_a_running_env_as_it_was():
    env, other = make_cartpole(backend="gymnasium"), make_cartpole(backend="gymnasium")
    for each in (env, other):
        td = each.reset(seed=1)
        for _ in range(5):
            _, td = each.step(td.set("action", each.sample_action()))
    before, state = buffers(env), torch.get_rng_state()
    base = to_torchrl(env)
    assert_same(buffers(env), before)
    assert (torch.get_rng_state() == state).all()
    td_base = base.reset(TensorDict({"_reset": torch.zeros(5, 1, dtype=torch.bool)}, [5]))
    for _ in range(20):
        action = other.sample_action()
        transition, td = other.step(td.set("action", action))
        given, td_base = base.step_and_maybe_reset(td_base.set("action", action))
        assert_same(given["next"], transition["next"])
    base.close()
    other.close()


def test_info_of_a_foreign_simulator_is_declared():
    class Speedy(gymnasium.Wrapper):
        def step(self, action):
            observation, reward, terminated, truncated, _ = self.env.step(action)
            return observation, reward, terminated, truncated, {"speed": observation[1]}

        def reset(self, **kwargs):
            observation, _ = self.env.reset(**kwargs)
            return observation, {"speed": observation[1]}

    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    vector_env = gymnasium.vector.SyncVectorEnv(
        [lambda: Speedy(gymnasium.make("CartPole-v1"))] * 2, **mode
    )
    env = to_torchrl(
        tw.TransformedEnv(
            tw.from_gymnasium(vector_env, info_keys=["speed"]), T.RecordEpisodeStatistics()
        )
    )
    check_env_specs(env, break_when_any_done="both")
    data = env.rollout(30, break_when_any_done=False)
    for td in (data, data["next"]):  # roots of new episodes have that of the reset
        assert (td["info", "speed"].squeeze(-1) == td["observation"][..., 1]).all()
    assert data["next", "done"].any()
    env.close()


# Spaces and specs.

SPACES = [
    S.Box(-1, 1, (2,)),
    S.Box(0, 255, (2, 3), np.uint8),
    S.Box(-np.inf, np.inf, (3,)),
    S.Discrete(4),
]
SPACES += [
    S.Box(np.array([0.0, -2.0]), np.array([1.0, 3.0]), dtype=np.float64),
    S.MultiDiscrete([[2, 5], [3, 3]]),
]
SPACES += [
    S.MultiBinary(3),
    S.MultiBinary((2, 2)),
    S.Dict(a=S.Box(-1, 1, (2,)), b=S.Dict(c=S.Discrete(2))),
]
SPACES += [
    S.Discrete(3, start=2),
    S.MultiDiscrete([2, 3], start=[1, -1]),
    S.Tuple((S.Discrete(2), S.Discrete(3))),
]


def test_specs_draw_members_of_their_spaces_and_hold_them():
    for space in SPACES:
        spec = to_spec(space, 200, torch.device("cpu"))
        drawn, stream = spec.rand(), tw.random.Stream(200, seed=0)
        assert tw.spaces.contains(space, drawn) and spec.is_in(tw.spaces.sample(space, stream)), (
            space
        )
        for path, leaf in tw.spaces.leaves(space):
            if not isinstance(leaf, S.Box):
                assert (
                    tw.spaces.at(drawn, path).unique().numel() == np.max(tw.spaces.counts(leaf)[0])
                    or leaf.shape
                )


# The recipe for envs of TorchRL.


def test_pendulum_of_torchrl_equals_its_own_rollout():
    space = S.Dict({name: S.Box(-np.inf, np.inf, (), np.float32) for name in ("th", "thdot")})
    base = SerialEnv(3, lambda: TransformedEnv(PendulumEnv(), StepCounter(7)))
    env = load_example("simulators").from_torchrl(base, space, S.Box(-2, 2, (1,)))
    other = SerialEnv(3, lambda: TransformedEnv(PendulumEnv(), StepCounter(7)))
    other.set_seed(3)
    td, root = env.reset(seed=3), other.reset()
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


def test_to_torchrl_refuses_what_is_no_env():
    with pytest.raises(TypeError, match=r"to_torchrl needs a torchwrap\.Env, but got"):
        to_torchrl(PendulumEnv())
