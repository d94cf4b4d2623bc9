"""examples/replay.py, dqn.py and sac.py: transitions of the buffers, and training."""

import json
import re
from types import SimpleNamespace

import dqn
import numpy as np
import ppo_output
import pytest
import sac
import torch
import world_model
from gymnasium.spaces import Box, Dict, Discrete
from helpers import EXAMPLES, from_reset, load_example
from replay import (
    FrameReplayBuffer,
    HindsightReplayBuffer,
    ReplayBuffer,
    episodes,
    sequences,
)
from stable_baselines3.common.buffers import NStepReplayBuffer
from tensordict import TensorDict

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
    env.reset(seed=0)
    for size in sizes:
        data = tw.rollout(env, None, max(size, 1))
        yield data if size else data[:, 0]


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


# 12 steps of each env fit.
@pytest.mark.parametrize(
    ("n_step", "sizes"),
    [
        pytest.param(1, [3, 5, 1, 0, 7], id="wraps around"),
        pytest.param(1, [5, 14], id="longer than the ring"),
        pytest.param(3, [5, 5], id="not full"),
        pytest.param(4, [8, 8, 8], id="several steps"),
    ],
)
def test_transitions_equal_stable_baselines3(n_step, sizes):
    ours = ReplayBuffer(2 * 12, 0.9, n_step)
    spaces = Box(-9, 9, (1,)), Box(-1, 1, (6,))
    theirs = [NStepReplayBuffer(12, *spaces, "cpu", n_steps=n_step, gamma=0.9) for _ in range(2)]
    for data in collections(ScriptedEnv(2, (1,), (1, 5, 2, 7)), sizes):
        ours.extend(data)
        for row, buffer in zip(data.view(2, -1), theirs, strict=True):
            for transition in row.unbind(0):
                add_to_sb3(buffer, transition)
        data.apply_(torch.Tensor.zero_)  # the buffer has copied them
    for found, buffer in zip(samples(ours), theirs, strict=True):
        oldest = buffer.pos if buffer.full else 0
        expected = buffer._get_samples((np.arange(ours.num_steps) + oldest) % 12)
        discounts = expected.discounts * (1 - expected.dones)
        assert found["observation"].equal(expected.observations)
        assert found["action"].equal(expected.actions)
        assert found["next_observation"].equal(expected.next_observations)
        torch.testing.assert_close(found["reward"], expected.rewards.flatten())
        torch.testing.assert_close(found["discount"], discounts.flatten())
    assert (found["discount"] == 0).any()
    assert len(found["discount"].unique()) > min(n_step, 2)


# Windows of three steps from the three steps of one env, whose rewards are 1, 2, 3 up to the gap
GAPS = {
    "reset": lambda env: env.reset(seed=0),
    "no gap": lambda env: env.restore(env.snapshot()),
}


@pytest.mark.parametrize(
    ("gap", "returns", "discounts"),
    [
        pytest.param("reset", [2.75, 3.5, 3], [0.125, 0.25, 0.5], id="reset"),
        pytest.param("no gap", [2.75, 4.5, 6.25], [0.125] * 3, id="no gap"),
    ],
)
def test_no_window_crosses_to_data_that_does_not_continue(tmp_path, gap, returns, discounts):
    env = ScriptedEnv(1, (1,), None)
    buffer = ReplayBuffer(20, 0.5, n_step=3)
    data = from_reset(tw.Collector(env, None, 3))
    buffer.extend(data)
    buffer = saved_and_loaded(buffer, ReplayBuffer(20, 0.5, n_step=3), tmp_path)
    GAPS[gap](env)
    data = tw.rollout(env, None, 3)
    buffer.extend(data)
    found = buffer.get(torch.arange(3), torch.zeros(3).long())
    assert found["reward"].tolist() == returns
    assert found["discount"].tolist() == discounts


def test_data_of_another_number_of_envs_is_refused():
    buffer = ReplayBuffer(20, 0.5)
    buffer.extend(from_reset(tw.Collector(ScriptedEnv(2), None, 1)))
    with pytest.raises(ValueError, match="2 envs"):
        buffer.extend(from_reset(tw.Collector(ScriptedEnv(3), None, 1)))


@pytest.mark.parametrize("length", [4, 25], ids=["short", "longer than a column"])
def test_single_episode_fits_into_a_buffer_of_many_envs(tmp_path, length):
    buffer = ReplayBuffer(3 * 10, 0.5)
    (data,) = collections(ScriptedEnv(3, (1,), 6), [6])
    buffer.extend(data)
    (episode,) = collections(ScriptedEnv(1, (1,), length), [length])
    episode["observation"] += 500
    episode["next", "observation"] += 500
    buffer.extend(episode)
    buffer = saved_and_loaded(buffer, ReplayBuffer(3 * 10, 0.5), tmp_path)
    data["observation"] += 0.5
    buffer.extend(data[:, :1])  # of all envs again
    torch.manual_seed(0)
    values, counts = buffer.sample(4_000)["observation"].unique(return_counts=True)
    assert set(episode["observation"].flatten().tolist()) - set(values.tolist()) <= {500.0, 510.0}
    assert (counts - 4_000 / len(values)).abs().max() < 90


# Hindsight. Env i achieves 100 * i + its step; episodes of 5 steps; the goal changes in step 3


def reach(num_steps=7, done_at=4):
    steps = torch.arange(num_steps + 1.0).expand(2, -1).unsqueeze(-1)
    achieved = steps + 100 * torch.arange(2).view(2, 1, 1)
    desired = -1 - (steps > 2).float()
    rows = TensorDict({"achieved_goal": achieved, "desired_goal": desired}, [2, num_steps + 1])
    data = TensorDict({"observation": rows[:, :-1].clone()}, [2, num_steps])
    data["action"] = torch.zeros(2, num_steps, 1)
    done = torch.arange(num_steps).expand(2, -1).unsqueeze(-1) == done_at
    data["next"] = {"observation": rows[:, 1:].clone(), "reward": torch.full_like(steps[:, 1:], 9)}
    data["next", "done"] = done
    data["next", "terminated"] = done.clone()
    return data


def is_reached(achieved, desired):
    assert achieved.shape == desired.shape
    return (achieved == desired).flatten(1).all(1).float()


@pytest.mark.parametrize("n_step", [1, 3])
def test_new_goals_are_achieved_later_in_the_episode_and_reward_whole_windows(n_step):
    buffer = HindsightReplayBuffer(is_reached, 100, 0.5, n_step, ratio=1.0)
    buffer.extend(reach())
    torch.manual_seed(0)
    steps, envs = torch.randint(7, (500,)), torch.randint(2, (500,))
    batch = buffer.get(steps, envs)
    goals = batch["observation", "desired_goal"].flatten()
    last = torch.where(steps <= 4, 4, 6)  # of the episode, or of the data
    assert ((goals - 100 * envs > steps) & (goals - 100 * envs <= last + 1)).all()
    assert len(goals.unique()) == 2 * 7
    assert batch["next_observation", "desired_goal"].flatten().equal(goals)
    ahead = goals - 100 * envs - steps - 1  # steps until the reward
    expected = torch.where(ahead < n_step, 0.5**ahead, 0)
    torch.testing.assert_close(batch["reward"], expected)
    end = torch.minimum(steps + n_step - 1, last)
    assert batch["next_observation", "achieved_goal"].flatten().equal(100.0 * envs + end + 1)
    assert batch["discount"].equal(torch.where(end == 4, 0, 0.5 ** (end - steps + 1)))


def test_windows_of_the_envs_own_goals_end_where_the_goal_changes():
    buffer = HindsightReplayBuffer(is_reached, 100, 0.5, 3, ratio=0.0)
    buffer.extend(reach())
    batch = buffer.get(torch.arange(4), torch.zeros(4).long())
    assert batch["reward"].tolist() == [9 + 4.5 + 2.25, 9 + 4.5, 9, 9 + 4.5]
    assert batch["next_observation", "desired_goal"].flatten().tolist() == [-1, -1, -1, -2]


def saved_and_loaded(buffer, other, tmp_path):
    torch.save(buffer.state_dict(), tmp_path / "buffer.pt")
    other.load_state_dict(torch.load(tmp_path / "buffer.pt", weights_only=True))
    return other


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


def test_single_frames_make_the_same_stacks():
    pixels = Box(0, 255, (8, 8), np.uint8)
    inner = ScriptedEnv(5, observation_space=pixels, episode_lengths=(1, 2, 9, 3, 1, 6))
    env = tw.TransformedEnv(inner, T.FrameStackObservation(4))
    stacks = ReplayBuffer(5 * 20, 0.9, 3)
    frames = FrameReplayBuffer(4, 5 * 20, 0.9, 3)
    _, *later = collections(env, [2, 7, 0, 1, 8])  # the buffers start in mid-episode
    for data in (*later, *collections(env, [11, 33])):  # a reset in mid-episode
        stacks.extend(data)
        frames.extend(data)
        found = samples(frames)
        expected = samples(stacks)[:, frames.history :]
        assert found.shape == expected.shape
        assert (found == expected).all()
    for key in ("observation", ("next", "observation")):
        assert 4 * frames.storage[key].nbytes == stacks.storage[key].nbytes


def test_sequences_hold_the_rows_of_the_guide():
    page = (EXAMPLES / "guides" / "sequences.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", page, re.MULTILINE))
    # Episodes of 3, 1 and 2 steps: terminated, truncated, and both; then one that the data cuts.
    env = ScriptedEnv(2, (1,), (3, 1, 2), action_space=Discrete(2))
    env = tw.TransformedEnv(env, tw.PolicyState({"latent": ()}))
    actions = iter([0, 1, 0, 0, 0, 1, 0])

    def policy(td):
        td["action"] = torch.full((2,), next(actions))
        td["next", "latent"] = td["latent"] + 1
        return td

    data = tw.rollout(env, policy, 7)
    data["action"] = 1 + data["action"]
    rows = sequences(data)[0]
    assert len(table) == 7
    for name, cells in table.items():
        digits = "-01" if name == "action" else "0123"
        found = [digits[int(value)] for value in rows[name].flatten()]
        assert "".join(found) == cells.replace(" | ", "")


# Episodes of one step with reward 1, gamma 0.5, and observations 1 and 1001 as values. After a
# termination, the final observation is NaN, as of a simulator that blew up.
TARGETS = [
    pytest.param("truncated", [1 + 0.5 * 1, 1 + 0.5 * 1001], id="truncated"),
    pytest.param("terminated", [1.0, 1.0], id="terminated"),
    pytest.param("both", [1.0, 1.0], id="both"),
]


def one_step_batch(ending):
    env = ScriptedEnv(2, (1,), 1, ending=ending, action_space=Discrete(2))
    buffer = ReplayBuffer(100, gamma=0.5)
    buffer.extend(next(collections(env, [1])))
    batch = buffer.get(torch.tensor([0, 0]), torch.tensor([0, 1])).to_dict()
    if ending != "truncated":
        batch["next_observation"].fill_(torch.nan)
    return batch


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


@pytest.mark.parametrize(
    ("script", "gradient_steps"), [(dqn, 40), pytest.param(sac, 80, marks=pytest.mark.full)]
)
def test_resumed_script_writes_its_results_and_ends_in_the_same_state(
    tmp_path, train_and_kill, script, gradient_steps
):
    metrics = script.main(script.Args(out=tmp_path / "whole", **RESUMED_STEPS))
    assert metrics["env_steps"] == 128
    assert metrics["gradient_steps"] == gradient_steps
    written = json.loads((tmp_path / "whole" / "metrics.json").read_text())
    assert written | metrics == written
    train_and_kill(script, out=tmp_path / "killed", **RESUMED_STEPS)
    script.main(script.Args(out=tmp_path / "killed", resume=True, **RESUMED_STEPS))
    found, expected = (read_checkpoint(tmp_path / name) for name in ("killed", "whole"))
    for state in (found, expected):
        del state["run"]
        state["log"]["curve"] = [point[:2] for point in state["log"]["curve"]]
        del state["log"]["seconds"]
    assert expected["log"]["updates"] == gradient_steps
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_dqn_whose_checkpoint_lacks_the_buffer_fills_it_before_it_learns(
    tmp_path, train_and_kill, monkeypatch
):
    monkeypatch.setattr(ReplayBuffer, "state_dict", lambda buffer: {})
    train_and_kill(dqn, out=tmp_path, **RESUMED_STEPS)  # after 8 gradient steps
    metrics = dqn.main(dqn.Args(out=tmp_path, resume=True, **RESUMED_STEPS))
    assert metrics["gradient_steps"] == 8 + (128 - 64 - 48) // 2


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(("script", "goal"), [(dqn, 400), (sac, -250)], ids=["dqn", "sac"])
def test_script_learns(tmp_path, script, goal):
    metrics = script.main(script.Args(seed=7, out=tmp_path))
    assert metrics["eval_mean_return"] > goal


SHORT = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "updates": 2, "batch_size": 4}


@pytest.mark.full
def test_world_model_learns_from_pixels(capsys):
    world_model.main(world_model.Args(**SHORT))
    losses = re.findall(r"pixels ([\d.]+)", capsys.readouterr().out)
    assert float(losses[1]) < float(losses[0])


@pytest.mark.full
@pytest.mark.long
def test_world_model_remembers_what_it_cannot_see():
    assert world_model.main(world_model.Args(seed=7)) > 0.8


def test_world_model_starts_from_the_state_of_the_policy():
    args = world_model.Args(num_envs=3, latent_size=8)
    env = world_model.make_env(args)
    model = world_model.WorldModel(env, args)
    data = from_reset(tw.Collector(env, model.act, 12))
    for rows in sequences(data):
        whole = model.predict(rows.unsqueeze(0))["reward"][0]
        part = model.predict(rows[4:].unsqueeze(0))["reward"][0]
        torch.testing.assert_close(part, whole[4:])


@pytest.fixture
def dataset_of(tmp_path, monkeypatch):
    """The module of the example, which writes to a folder of the test."""
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return load_example("minari_dataset")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of missing metadata
def test_minari_dataset_holds_the_whole_episodes(dataset_of):
    space = Dict(a=Box(0, 9, ()), b=Discrete(9))
    env = ScriptedEnv(2, episode_lengths=(3, 1, 2), observation_space=space)
    data = from_reset(tw.Collector(env, None, 7))
    data["action"].requires_grad_()  # as of a loop without no_grad
    dataset_of.write("scripted/test-v0", data, env)
    dataset = dataset_of.minari.load_dataset("scripted/test-v0")
    found = list(dataset.iterate_episodes())
    # Of both envs, without the one of env 0 that the data cuts
    assert [len(episode) for episode in found] == [3, 1, 2, 1, 2, 3, 1]
    assert [episode.rewards.tolist() for episode in found[:3]] == [[1, 2, 3], [1], [1, 2]]
    assert [bool(episode.terminations[-1]) for episode in found[:3]] == [True, False, True]
    assert [bool(episode.truncations[-1]) for episode in found[:3]] == [False, True, True]
    assert found[0].observations["a"].tolist() == [0, 1, 2, 3]
    whole = [episode for episode in episodes(data) if episode["next", "done"][-1]]
    for episode, expected in zip(found, whole, strict=True):
        transitions = dataset_of.from_minari(episode)
        assert (transitions == expected.select(*transitions.keys(True, True))).all()
    assert dataset_of.read(dataset).num_steps == 13


@pytest.mark.filterwarnings("ignore::UserWarning")  # of missing metadata
def test_minari_dataset_holds_actions_and_rewards_of_the_env_itself(dataset_of):
    env = tw.make("Pendulum-v1", 2, max_episode_steps=9)
    env = tw.TransformedEnv(env, T.ClipAction(), T.RecordEpisodeStatistics(), T.NormalizeReward())
    env.reset(seed=0)
    with pytest.raises(ValueError, match="with_own_steps"):
        dataset_of.write("own/test-v0", tw.rollout(env, None, 9), env)
    env = dataset_of.with_own_steps(env)
    env.reset(seed=0)
    data = tw.rollout(env, lambda td: torch.full((2, 1), 5.0), 9)
    dataset = dataset_of.write("own/test-v0", data, env)
    returns = [episode.rewards.sum() for episode in dataset.iterate_episodes()]
    assert returns == pytest.approx(data["next", "episode_return"][:, -1, 0].tolist())
    assert all((episode.actions == 2).all() for episode in dataset.iterate_episodes())
    assert dataset.spec.env_spec.id == "Pendulum-v1"
    assert dataset.spec.action_space == Box(-2, 2, (1,))
