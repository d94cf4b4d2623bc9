"""examples/replay.py, dqn.py and sac.py: transitions of the buffers, and training."""

import json
from collections import deque
from types import SimpleNamespace

import dqn
import gymnasium
import numpy as np
import ppo_output
import pytest
import sac
import torch
from gymnasium.spaces import Box, Discrete
from replay import FrameReplayBuffer, ReplayBuffer, TorchRLReplayBuffer, n_step_returns, sequences
from stable_baselines3.common.buffers import NStepReplayBuffer
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def samples(buffer):
    """All transitions that may be sampled, `(num_envs, num_steps)`."""
    steps = torch.arange(buffer.history, buffer.num_steps)
    rows = torch.cartesian_prod(steps, torch.arange(buffer.num_envs))
    return buffer.get(*rows.unbind(1)).view(-1, buffer.num_envs).transpose(0, 1)


def collections(env, sizes):
    """Collections with these numbers of steps. 0 is a single step without a time dimension."""
    td = env.reset(seed=0)
    for size in sizes:
        data, td = tw.rollout(env, None, max(size, 1), td)
        yield data if size else data[:, 0]


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        pytest.param(21, [3, 0, 5, 1, 7], id="wraps around"),
        pytest.param(21, [9, 4], id="longer than the ring"),
        pytest.param(100, [0, 3], id="not full"),
        pytest.param(3, [0, 0, 2], id="one step per env"),
    ],
)
def test_ring_holds_what_a_deque_holds(size, sizes):
    buffer = ReplayBuffer(size, gamma=0.5)
    deques = [deque(maxlen=size // 3) for _ in range(3)]
    for data in collections(ScriptedEnv(3, (2,), (1, 3, 2)), sizes):
        buffer.extend(data)
        steps = data.clone().view(3, -1)
        for row, each in zip(steps, deques, strict=True):
            each.extend(row.unbind(0))
        data.apply_(torch.Tensor.zero_)  # the buffer has copied them
        found = samples(buffer)
        expected = torch.stack([torch.stack(list(each)) for each in deques])
        successor = expected["next"]
        assert found.shape == expected.shape
        assert buffer.storage.shape == (size // 3, 3)
        assert found["observation"].equal(expected["observation"])
        assert found["action"].equal(expected["action"])
        assert found["next_observation"].equal(successor["observation"])
        assert found["reward"].equal(successor["reward"].squeeze(-1))
        assert found["discount"].equal(0.5 * ~successor["terminated"].squeeze(-1))


def test_samples_are_uniform_over_the_latest_steps():
    buffer = ReplayBuffer(40, gamma=1.0)
    for data in collections(ScriptedEnv(4, (1,), 100), [7, 7]):
        buffer.extend(data)
    torch.manual_seed(0)
    observations = buffer.sample(40_000)["observation"].flatten()
    values, counts = observations.unique(return_counts=True)
    latest = 1000 * torch.arange(4).unsqueeze(1) + torch.arange(4, 14)
    assert values.equal(latest.flatten().float())
    assert (counts - 1000).abs().max() < 150


# For gamma 0.5: the return, the discount, and the last step
@pytest.mark.parametrize(
    ("rewards", "terminated", "done", "expected"),
    [
        pytest.param([1, 2, 4], [0, 0, 0], [0, 0, 0], (3, 0.125, 2), id="no end"),
        pytest.param([1, 2, 4], [0, 1, 0], [0, 1, 0], (2, 0, 1), id="terminated"),
        pytest.param([1, 2, 4], [0, 0, 0], [0, 1, 0], (2, 0.25, 1), id="truncated"),
        pytest.param([1, 2, 4], [1, 0, 0], [1, 0, 0], (1, 0, 0), id="one step"),
        pytest.param([1, 2, 4], [0, 0, 1], [0, 1, 1], (2, 0.25, 1), id="two ends"),
        pytest.param([1, np.nan, np.inf], [0, 0, 0], [1, 0, 0], (1, 0.5, 0), id="not finite"),
        pytest.param([1, 2, 4], [0, 0, 1], [0, 0, 1], (3, 0, 2), id="last step"),
    ],
)
def test_n_step_returns_equal_values_by_hand(rewards, terminated, done, expected):
    flags = torch.tensor([terminated, done]).bool()
    found = n_step_returns(torch.tensor(rewards).float(), *flags, gamma=0.5)
    assert tuple(value.item() for value in found) == expected


# 12 steps of each env fit.
@pytest.mark.parametrize(("n_step", "sizes"), [(1, [9]), (3, [5, 5]), (4, [8, 8, 8])])
def test_n_step_transitions_equal_stable_baselines3(n_step, sizes):
    ours = ReplayBuffer(2 * 12, 0.9, n_step)
    spaces = Box(-9, 9, (1,)), Box(-1, 1, (6,))
    theirs = [NStepReplayBuffer(12, *spaces, "cpu", n_steps=n_step, gamma=0.9) for _ in range(2)]
    for data in collections(ScriptedEnv(2, (1,), (1, 5, 2, 7)), sizes):
        ours.extend(data)
        for row, buffer in zip(data, theirs, strict=True):
            for transition in row.unbind(0):
                add_to_sb3(buffer, transition)
    for found, buffer in zip(samples(ours), theirs, strict=True):
        oldest = buffer.pos if buffer.full else 0
        expected = buffer._get_samples((np.arange(ours.num_steps) + oldest) % 12)
        discounts = expected.discounts * (1 - expected.dones)
        assert found["observation"].equal(expected.observations)
        assert found["next_observation"].equal(expected.next_observations)
        torch.testing.assert_close(found["reward"], expected.rewards.flatten())
        torch.testing.assert_close(found["discount"], discounts.flatten())
    assert (found["discount"] == 0).any()
    assert len(found["discount"].unique()) > min(n_step, 2)


def add_to_sb3(buffer, transition):
    successor = transition["next"]
    is_truncated = successor["truncated"] & ~successor["terminated"]
    leaves = [
        transition["observation"],
        successor["observation"],
        transition["action"],
        successor["reward"],
        successor["done"],
    ]
    info = {"TimeLimit.truncated": bool(is_truncated)}
    buffer.add(*[leaf.numpy()[None] for leaf in leaves], [info])


@pytest.mark.parametrize(("padding", "n_step"), [("reset", 1), ("zero", 1), ("reset", 3)])
def test_single_frames_make_the_same_stacks(padding, n_step):
    pixels = Box(0, 255, (8, 8), np.uint8)
    inner = ScriptedEnv(5, observation_space=pixels, episode_lengths=(1, 2, 9, 3, 1, 6))
    env = tw.TransformedEnv(inner, T.FrameStackObservation(4, padding_type=padding))
    stacks = ReplayBuffer(5 * 20, 0.9, n_step)
    frames = FrameReplayBuffer(4, 5 * 20, 0.9, n_step, padding_type=padding)
    _, *later = collections(env, [2, 7, 0, 1, 8, 11, 33])  # the buffers start in mid-episode
    for data in later:
        stacks.extend(data)
        frames.extend(data)
        found = samples(frames)
        expected = samples(stacks)[:, frames.history :]
        assert found.shape == expected.shape
        assert (found == expected).all()
    for key in ("observation", ("next", "observation")):
        assert 4 * frames.storage[key].nbytes == stacks.storage[key].nbytes


def play_gymnasium(actions):
    """Rows of one CartPole-v1: what a loop over episodes would append, as Dreamer's does."""
    env = gymnasium.make("CartPole-v1")
    rows = []
    observation, _ = env.reset(seed=0)
    rows.append((observation, 0.0, False, True))
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        rows.append((observation, reward, terminated, False))
        if terminated or truncated:
            observation, _ = env.reset()
            rows.append((observation, 0.0, False, True))
    if rows[-1][3]:  # no step was taken from this one
        rows.pop()
    return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("num_steps", [120, 121])
def test_sequences_hold_the_rows_of_a_loop_over_episodes(num_steps):
    env = tw.make("CartPole-v1", 1, backend="gymnasium")
    data, _ = tw.rollout(env, None, num_steps, env.reset(seed=0))
    actions = data["action"][0].numpy()
    names = ("observation", "reward", "is_terminal", "is_first")
    (rows,) = sequences(data)
    assert rows["is_terminal"].sum() >= 2
    for name, expected in zip(names, play_gymnasium(actions), strict=True):
        np.testing.assert_array_equal(rows[name].numpy(), expected)
    assert rows["action"][~rows["is_first"]].tolist() == actions.tolist()


def test_sequences_hold_each_reward_and_each_end():
    env = ScriptedEnv(2, (1,), (3, 2), ending="terminated")
    data, _ = tw.rollout(env, None, 5, env.reset(seed=0))
    first, second = sequences(data)
    assert first["observation"].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert first["reward"].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert first["is_terminal"].nonzero().flatten().tolist() == [3, 6]
    assert second["reward"].tolist() == [0, 1, 2, 0, 1, 2, 3]


BUFFERS = {
    "ring": lambda: ReplayBuffer(40, 0.9),
    "frames": lambda: FrameReplayBuffer(2, 40, 0.9),
    "torchrl": lambda: TorchRLReplayBuffer(40, 0.9),
}


@pytest.mark.parametrize("make_buffer", BUFFERS.values(), ids=BUFFERS)
def test_samples_have_no_graph_of_the_actor_that_played(make_buffer):
    if make_buffer is BUFFERS["torchrl"]:
        pytest.importorskip("torchrl")
    buffer = make_buffer()
    env = tw.TransformedEnv(ScriptedEnv(2, (3,)), T.FrameStackObservation(2))
    actor = nn.Sequential(nn.Flatten(), nn.Linear(6, 6))
    td = env.reset(seed=0)
    for _ in range(4):
        td["action"] = actor(td["observation"])  # without no_grad
        transition, td = env.step(td)
        buffer.extend(transition.unsqueeze(1))
    sample = buffer.sample(8)
    assert sample["action"].any()
    assert not [key for key, value in sample.items() if value.requires_grad]
    assert transition["action"].requires_grad  # the caller's tensors keep theirs


@pytest.fixture
def two_frames():
    env = tw.TransformedEnv(ScriptedEnv(2, (3,)), T.FrameStackObservation(2))
    return next(collections(env, [1]))


def test_sample_of_too_few_frames_is_refused(two_frames):
    buffer = FrameReplayBuffer(2, 100, 0.9)
    buffer.extend(two_frames)
    with pytest.raises(ValueError, match="steps"):
        buffer.sample(1)


def test_stacks_of_another_size_are_refused(two_frames):
    with pytest.raises(ValueError, match="stack_size"):
        FrameReplayBuffer(4, 100, 0.9).extend(two_frames)


@pytest.mark.parametrize("n_step", [1, 3, 6])
def test_torchrl_buffer_holds_the_same_transitions(n_step):
    pytest.importorskip("torchrl")
    ring = ReplayBuffer(2 * 60, 0.9, n_step)
    theirs = TorchRLReplayBuffer(2 * 60, 0.9, n_step)
    for data in collections(ScriptedEnv(2, (1,), (1, 5, 2, 7)), [4] * 9):
        ring.extend(data)
        theirs.extend(data)
    complete = samples(ring)[:, : 36 - n_step + 1]  # the last windows are not complete
    expected = complete.transpose(0, 1).flatten()
    found = theirs.buffer[:]
    assert found.shape == expected.shape
    assert (found == expected).all()
    assert theirs.sample(3).shape == (3,)


# Episodes of one step with reward 1, gamma 0.5, and observations 1 and 1001 as values
TARGETS = [
    pytest.param("truncated", [1 + 0.5 * 1, 1 + 0.5 * 1001], id="truncated"),
    pytest.param("terminated", [1.0, 1.0], id="terminated"),
    pytest.param("both", [1.0, 1.0], id="both"),
]


def one_step_batch(ending):
    env = ScriptedEnv(2, (1,), 1, ending=ending, action_space=Discrete(2))
    buffer = ReplayBuffer(100, gamma=0.5)
    buffer.extend(next(collections(env, [1])))
    return buffer.get(torch.tensor([0, 0]), torch.tensor([0, 1])).to_dict()


@pytest.mark.parametrize(("ending", "targets"), TARGETS)
def test_dqn_targets_bootstrap_after_truncations_alone(ending, targets):
    loss = dqn.td_loss(
        lambda observation: torch.zeros(2, 2),
        lambda observation: observation.expand(-1, 2),
        one_step_batch(ending),
    )
    assert loss == torch.tensor(targets).square().mean()


@pytest.mark.parametrize(("ending", "targets"), TARGETS)
def test_sac_targets_bootstrap_after_truncations_alone(ending, targets):
    log_prob = torch.full((2,), 2.0)
    agent = SimpleNamespace(
        actor=lambda observation: (torch.zeros(2, 1), log_prob),
        target_critic=lambda observation, action: (observation + torch.tensor([0, 9])).T,
        critic=lambda observation, action: torch.zeros(2, 2),
        log_alpha=torch.tensor(0.0),
    )
    soft = torch.tensor(targets)
    if ending == "truncated":
        soft -= 0.5 * log_prob
    assert sac.critic_loss(agent, one_step_batch(ending)) == 2 * soft.square().mean()


def test_sac_log_probability_is_a_squashed_normal_distribution():
    torch.manual_seed(0)
    args = sac.Args()
    actor = sac.Actor(sac.make_env(args, 1), args)
    observation = torch.randn(64, 3)
    action, log_prob = actor(observation)
    mean, log_std = actor.network(observation).chunk(2, -1)
    normal = torch.distributions.Normal(mean, (-5 + 3.5 * (log_std.tanh() + 1)).exp())
    tanh = torch.distributions.TanhTransform()
    squashed = torch.distributions.TransformedDistribution(normal, tanh)
    expected = squashed.log_prob(action).sum(-1)
    torch.testing.assert_close(log_prob, expected, rtol=1e-3, atol=1e-3)


def test_sac_actor_gradients_are_those_of_the_actor_alone():
    args = sac.Args()
    env = sac.make_env(args, 8)
    agent = sac.Agent(env, args)
    gradients = sac.actor_gradients(agent, {"observation": env.reset(seed=0)["observation"]})
    shapes = [parameter.shape for parameter in (*agent.actor.parameters(), agent.log_alpha)]
    assert [gradient.shape for gradient in gradients] == shapes
    assert all(parameter.grad is None for parameter in agent.parameters())


COMPILED = pytest.param(True, marks=[pytest.mark.full, pytest.mark.long], id="compiled")


@pytest.mark.parametrize("compiled", [pytest.param(False, id="eager"), COMPILED])
@pytest.mark.parametrize(
    ("script", "short", "env_steps", "gradient_steps"),
    [
        pytest.param(dqn, {"train_frequency": 16}, 1152, (1152 - 1024) // 16, id="dqn"),
        pytest.param(sac, {"learning_starts": 1024}, 1088, 1088 - 1024, id="sac"),
    ],
)
def test_script_writes_its_results(tmp_path, script, short, env_steps, gradient_steps, compiled):
    args = script.Args(total_timesteps=1088, compile=compiled, out=tmp_path, **short)
    metrics = script.main(args)
    assert metrics["env_steps"] == env_steps
    assert metrics["gradient_steps"] == gradient_steps
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["eval_mean_return"] == metrics["eval_mean_return"]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)


RESUMED = [
    pytest.param(dqn, {}, id="dqn"),
    pytest.param(sac, {}, marks=pytest.mark.full, id="sac"),
    pytest.param(
        sac, {"torchrl_buffer": True, "n_step": 3}, marks=pytest.mark.full, id="sac, TorchRL"
    ),
]
RESUMED_STEPS = {"total_timesteps": 128, "save_every": 64, "learning_starts": 48, "num_envs": 16}


class Killed(Exception):
    pass


@pytest.fixture
def train_and_kill(monkeypatch):
    """Trains up to the first checkpoint."""
    save = ppo_output.Checkpoint.save

    def save_and_die(checkpoint, processes):
        save(checkpoint, processes)
        raise Killed

    def train_and_kill(script, **arguments):
        with monkeypatch.context() as patch:
            patch.setattr(ppo_output.Checkpoint, "save", save_and_die)
            with pytest.raises(Killed):
                script.main(script.Args(**arguments))

    return train_and_kill


def read_checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize(("script", "arguments"), RESUMED)
def test_resumed_script_ends_in_the_same_state(tmp_path, train_and_kill, script, arguments):
    if "torchrl_buffer" in arguments:
        pytest.importorskip("torchrl")
    arguments = {**RESUMED_STEPS, **arguments}
    script.main(script.Args(out=tmp_path / "whole", **arguments))
    train_and_kill(script, out=tmp_path / "killed", **arguments)
    script.main(script.Args(out=tmp_path / "killed", resume=True, **arguments))
    found, expected = (read_checkpoint(tmp_path / name) for name in ("killed", "whole"))
    for state in (found, expected):
        del state["run"]
        state["log"]["curve"] = [point[:2] for point in state["log"]["curve"]]
        del state["log"]["seconds"]
        if "torchrl_buffer" in arguments:  # its storage is not initialized where it is not full
            storage = state["buffer"]["buffer"].pop("_storage")
            state["stored"] = {
                key: value[: storage["_len"]] for key, value in storage["_storage"].items()
            }
    assert expected["log"]["updates"] >= 40
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.full
def test_windows_end_where_a_script_resumes_on_a_host_simulator(tmp_path, train_and_kill):
    arguments = {**RESUMED_STEPS, "env_id": "InvertedPendulum-v5", "out": tmp_path}
    train_and_kill(sac, **arguments)
    steps = read_checkpoint(tmp_path)["buffer"]["next"]["done"]
    sac.main(sac.Args(**arguments, resume=True))
    resumed = read_checkpoint(tmp_path)["buffer"]["next"]["done"]
    assert not steps[-1].all()
    assert resumed[len(steps) - 1].all()
    assert len(resumed) == 2 * len(steps)


@pytest.mark.parametrize(
    ("script", "env_id", "other"),
    [(dqn, "Pendulum-v1", "sac.py"), (sac, "CartPole-v1", "dqn.py")],
    ids=["dqn", "sac"],
)
def test_script_refuses_actions_of_the_other_one(tmp_path, script, env_id, other):
    with pytest.raises(ValueError, match=other):
        script.main(script.Args(env_id=env_id, out=tmp_path))


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(("script", "goal"), [(dqn, 400), (sac, -250)], ids=["dqn", "sac"])
def test_script_learns(tmp_path, script, goal):
    metrics = script.main(script.Args(seed=7, out=tmp_path))
    assert metrics["eval_mean_return"] > goal
