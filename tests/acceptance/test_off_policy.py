"""examples/replay.py, dqn.py and sac.py: what a buffer returns is what the env has done, and both scripts learn from it."""

import json
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from helpers import load_example
from stable_baselines3.common.buffers import NStepReplayBuffer

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


@pytest.fixture(scope="module")
def replay():
    return load_example("replay")  # the scripts import it from their own folder


@pytest.fixture(scope="module")
def scripts(replay):
    threads = torch.get_num_threads()
    load_example("ppo")
    yield SimpleNamespace(dqn=load_example("dqn"), sac=load_example("sac"))
    torch.set_num_threads(threads)


def everything(buffer):
    """Each transition that may be sampled, step after step, `(num_envs, num_steps)`."""
    steps, envs = torch.arange(buffer.history, buffer.num_steps), torch.arange(buffer.num_envs)
    steps, envs = (each.flatten() for each in torch.meshgrid(steps, envs, indexing="ij"))
    return buffer.get(steps, envs).view(-1, buffer.num_envs).transpose(0, 1)


def chunks(env, sizes):
    """Collections of these numbers of steps; 0 is a single step without a dimension of time."""
    td = env.reset(seed=0)
    for size in sizes:
        data, td = tw.rollout(env, None, max(size, 1), td)
        yield data if size else data[:, 0]


def test_ring_holds_what_a_deque_holds(replay):
    for size, sizes in (
        (21, [3, 0, 5, 1, 7]),
        (21, [9, 4]),
        (100, [0, 3]),
        (3, [0, 0, 2]),
    ):  # 7 steps of each of 3 envs, ...
        buffer, expected = (
            replay.ReplayBuffer(size, gamma=0.5),
            [deque(maxlen=size // 3) for _ in range(3)],
        )
        for data in chunks(ScriptedEnv(3, (2,), (1, 3, 2)), sizes):
            buffer.extend(data)
            for env, row in enumerate(data.clone()):
                expected[env].extend([row] if row.dim() == 0 else row.unbind(0))
            for value in data.values(True, True):
                value.zero_()  # the caller's tensors are not those of the buffer
            found, originals = (
                everything(buffer),
                torch.stack([torch.stack(list(row)) for row in expected]),
            )
            following = originals["next"]
            assert found.shape == originals.shape and buffer.storage.shape == (size // 3, 3)
            assert found["observation"].equal(originals["observation"]) and found["action"].equal(
                originals["action"]
            )
            assert found["next_observation"].equal(following["observation"])
            assert found["reward"].equal(following["reward"].squeeze(-1))
            assert found["discount"].equal(0.5 * ~following["terminated"].squeeze(-1))


def test_samples_are_uniform_over_what_is_stored(replay):
    buffer = replay.ReplayBuffer(40, gamma=1.0)
    for data in chunks(ScriptedEnv(4, (1,), 100), [7, 7]):
        buffer.extend(data)
    torch.manual_seed(0)
    values, counts = buffer.sample(40_000)["observation"].flatten().unique(return_counts=True)
    assert values.tolist() == [
        1000 * env + step for env in range(4) for step in range(4, 14)
    ]  # the latest 10 of each
    assert (counts - 1000).abs().max() < 150


# One row a case: rewards, terminated, done, and what is expected for gamma 0.5: return, discount, last step.
WINDOWS = [
    ([1, 2, 4], [0, 0, 0], [0, 0, 0], (1 + 1 + 1, 0.125, 2)),
    ([1, 2, 4], [0, 1, 0], [0, 1, 0], (1 + 1, 0.0, 1)),
    ([1, 2, 4], [0, 0, 0], [0, 1, 0], (1 + 1, 0.25, 1)),  # truncated
    ([1, 2, 4], [1, 0, 0], [1, 0, 0], (1, 0.0, 0)),  # an episode of one step
    (
        [1, 2, 4],
        [0, 0, 1],
        [0, 1, 1],
        (1 + 1, 0.25, 1),
    ),  # truncated, then another episode that terminates at once
    (
        [1, np.nan, np.inf],
        [0, 0, 0],
        [1, 0, 0],
        (1, 0.5, 0),
    ),  # what does not belong to the episode is not computed with
    ([1, 2, 4], [0, 0, 1], [0, 0, 1], (1 + 1 + 1, 0.0, 2)),
]


def test_n_step_returns_by_hand(replay):
    rewards, terminated, done, expected = (list(column) for column in zip(*WINDOWS, strict=True))
    found = replay.n_step_returns(
        torch.tensor(rewards).float(), torch.tensor(terminated) > 0, torch.tensor(done) > 0, 0.5
    )
    for values, column in zip(found, zip(*expected, strict=True), strict=True):
        assert values.tolist() == list(column)


def test_n_step_transitions_equal_those_of_stable_baselines3(replay):
    for n_step, sizes in ((1, [9]), (3, [5, 5]), (4, [8, 8, 8])):  # 12 steps fit
        ours, settings = replay.ReplayBuffer(2 * 12, 0.9, n_step), {"n_steps": n_step, "gamma": 0.9}
        theirs = [
            NStepReplayBuffer(12, Box(-9, 9, (1,)), Box(-1, 1, (6,)), "cpu", **settings)
            for _ in range(2)
        ]
        for data in chunks(ScriptedEnv(2, (1,), (1, 5, 2, 7)), sizes):
            ours.extend(data)
            for env, step in ((env, step) for step in range(data.shape[1]) for env in range(2)):
                one, following = data[env, step], data["next"][env, step]
                info = {
                    "TimeLimit.truncated": bool(following["truncated"] & ~following["terminated"])
                }
                arrays = (
                    one["observation"],
                    following["observation"],
                    one["action"],
                    following["reward"],
                    following["done"],
                )
                theirs[env].add(*(array.numpy()[None] for array in arrays), [info])
        for found, buffer in zip(everything(ours), theirs, strict=True):
            expected = buffer._get_samples(
                (np.arange(ours.num_steps) + (buffer.pos if buffer.full else 0)) % 12
            )
            assert found["observation"].equal(expected.observations)
            assert found["next_observation"].equal(expected.next_observations)
            torch.testing.assert_close(found["reward"], expected.rewards.flatten())
            torch.testing.assert_close(
                found["discount"], (expected.discounts * (1 - expected.dones)).flatten()
            )
        assert (found["discount"] == 0).any() and found["discount"].unique().numel() > min(
            n_step, 2
        )


def test_frames_that_are_stored_one_by_one_make_the_same_stacks(replay):
    for padding, n_step in (("reset", 1), ("zero", 1), ("reset", 3)):
        inner = ScriptedEnv(
            5, observation_space=Box(0, 255, (8, 8), np.uint8), episode_lengths=(1, 2, 9, 3, 1, 6)
        )
        env = tw.TransformedEnv(inner, T.FrameStackObservation(4, padding_type=padding))
        stacks = replay.ReplayBuffer(5 * 20, 0.9, n_step)
        frames = replay.FrameReplayBuffer(4, 5 * 20, 0.9, n_step, padding_type=padding)
        for data in list(chunks(env, [2, 7, 0, 1, 8, 11, 33]))[
            1:
        ]:  # the buffers begin in mid-episode
            stacks.extend(data)
            frames.extend(data)
            found, expected = everything(frames), everything(stacks)[:, frames.history :]
            assert found.shape == expected.shape and (found == expected).all()
        for key in ("observation", ("next", "observation")):
            assert 4 * frames.storage[key].nbytes == stacks.storage[key].nbytes


def test_buffers_name_what_they_cannot_do(replay):
    (data,) = chunks(tw.TransformedEnv(ScriptedEnv(2, (3,)), T.FrameStackObservation(2)), [1])
    buffer = replay.FrameReplayBuffer(2, 100, 0.9)
    buffer.extend(data)
    with pytest.raises(
        ValueError, match="sample needs more than 1 steps of each env, but got 1 so far"
    ):
        buffer.sample(1)
    with pytest.raises(ValueError, match=r"needs observations of 4 frames, but got \(2, 3\)"):
        replay.FrameReplayBuffer(4, 100, 0.9).extend(data)


def test_torchrl_buffer_holds_the_same_transitions(replay):
    pytest.importorskip("torchrl")
    for n_step in (1, 3, 6):
        ring, theirs = (
            kind(2 * 60, 0.9, n_step) for kind in (replay.ReplayBuffer, replay.TorchRLReplayBuffer)
        )
        for data in chunks(ScriptedEnv(2, (1,), (1, 5, 2, 7)), [4] * 9):
            ring.extend(data)
            theirs.extend(data)
        expected = (
            everything(ring).transpose(0, 1)[: 36 - n_step + 1].flatten()
        )  # the last windows are not complete
        found = theirs.buffer[:]
        assert (
            found.shape == expected.shape
            and (found == expected).all()
            and theirs.sample(3).shape == (3,)
        )


def test_targets_bootstrap_after_a_truncation_and_not_after_a_termination(replay, scripts):
    # By hand: episodes of one step with reward 1; the value of an observation is its number, gamma 0.5.
    for ending, targets in (
        ("truncated", [1 + 0.5 * 1, 1 + 0.5 * 1001]),
        ("terminated", [1.0, 1.0]),
        ("both", [1.0, 1.0]),
    ):
        buffer = replay.ReplayBuffer(100, gamma=0.5)
        buffer.extend(
            next(chunks(ScriptedEnv(2, (1,), 1, ending=ending, action_space=Discrete(2)), [1]))
        )
        batch = buffer.get(torch.tensor([0, 0]), torch.tensor([0, 1])).to_dict()
        identity = lambda observation, *action: observation.expand(-1, 2)  # noqa: E731
        loss = scripts.dqn.td_loss(lambda observation: torch.zeros(2, 2), identity, batch)
        assert loss == torch.tensor(targets).square().mean()
        agent = SimpleNamespace(
            actor=lambda observation: (torch.zeros(2, 1), torch.full((2,), 2.0)),
            target_critic=lambda observation, action: torch.stack(
                [observation[:, 0], observation[:, 0] + 9]
            ),
            critic=lambda observation, action: torch.zeros(2, 2),
            log_alpha=torch.tensor(0.0),
        )
        soft = torch.tensor(
            [target - (0.5 * 2 if ending == "truncated" else 0) for target in targets]
        )
        assert scripts.sac.critic_loss(agent, batch) == 2 * soft.square().mean()


def test_log_probability_of_sac_is_that_of_a_squashed_normal(scripts):
    torch.manual_seed(0)
    actor, observation = (
        scripts.sac.Actor(scripts.sac.make_env(scripts.sac.Args(), 1), scripts.sac.Args()),
        torch.randn(64, 3),
    )
    action, log_prob = actor(observation)
    mean, log_std = actor.network(observation).chunk(2, -1)
    normal = torch.distributions.Normal(mean, (-5 + 3.5 * (log_std.tanh() + 1)).exp())
    squashed = torch.distributions.TransformedDistribution(
        normal, torch.distributions.TanhTransform()
    )
    torch.testing.assert_close(log_prob, squashed.log_prob(action).sum(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=[pytest.mark.full, pytest.mark.long])]
)
@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_scripts_run_and_write_their_results(scripts, tmp_path, name, compiled):
    script, short = (
        getattr(scripts, name),
        {"dqn": dict(train_frequency=16), "sac": dict(learning_starts=1024)}[name],
    )
    metrics = script.main(
        script.Args(total_timesteps=1088, compile=compiled, out=tmp_path, **short)
    )
    assert metrics["env_steps"] == {"dqn": 1152, "sac": 1088}[name]
    assert metrics["gradient_steps"] == {"dqn": (1152 - 1024) // 16, "sac": 1088 - 1024}[name]
    assert (
        json.loads((tmp_path / "metrics.json").read_text())["eval_mean_return"]
        == metrics["eval_mean_return"]
    )
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    with pytest.raises(
        ValueError,
        match=f"{name}.py needs an env with .*: {'sac' if name == 'dqn' else 'dqn'}.py takes",
    ):
        script.main(
            script.Args(env_id={"dqn": "Pendulum-v1", "sac": "CartPole-v1"}[name], out=tmp_path)
        )


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(("name", "goal"), [("dqn", 400), ("sac", -250)])
def test_scripts_learn(scripts, tmp_path, name, goal):
    script = getattr(scripts, name)
    assert script.main(script.Args(seed=7, out=tmp_path))["eval_mean_return"] > goal
