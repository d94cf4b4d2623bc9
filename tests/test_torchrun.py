"""examples/ppo.py in processes that torchrun starts: what they share, and what happens when one of them ends."""

from __future__ import annotations

import pytest
import torch
from helpers import load_example
from processes import Processes, kill_and_compare
from tensordict import TensorDict

import torchwrap as tw


@pytest.mark.full
def test_process_killed_at_ten_random_moments(tmp_path):
    kill_and_compare(tmp_path, 131_072, kills=10, seed=1)


def update_of_half(rank, group, world_size):
    ppo = load_example("ppo")
    args = ppo.Args(norm_adv=False, max_grad_norm=0.5)
    torch.manual_seed(0)
    agent = ppo.Agent(ppo.make_env(args, 2))
    data = torch.Generator().manual_seed(1)
    batch = dict(observation=torch.randn(64, 4, generator=data), action=torch.randint(2, (64,), generator=data))
    batch |= {name: torch.randn(64, generator=data) for name in ("logprob", "advantage", "value", "ret")}
    tensors = ppo.adam_tensors(torch.optim.Adam(agent.parameters(), lr=torch.tensor(0.01), eps=1e-5))
    for _ in range(3):
        ppo.update(agent, tensors, batch, torch.arange(64)[rank::world_size], args)
    return TensorDict(agent.state_dict(), [])


@pytest.fixture(scope="module")
def processes():
    running = Processes(2)
    yield running
    running.close()


def test_processes_average_their_gradients(processes):
    whole, halves = update_of_half(0, None, 1), processes.run(2, update_of_half, 2)
    for name, value in whole.items():
        torch.testing.assert_close(halves[0][name], halves[1][name], rtol=0, atol=0)
        torch.testing.assert_close(halves[0][name], value, rtol=1e-4, atol=1e-5)


def train(rank, group, folder):
    ppo = load_example("ppo")
    args = ppo.Args(
        num_envs=6, num_steps=16, total_timesteps=192, save_every=1, num_minibatches=2, update_epochs=2, out=folder
    )
    args.normalize, args.target_kl = True, 1.0
    return ppo.train(args, tw.make, rank, 2)


def test_rank_0_writes_what_all_need_to_go_on(processes, tmp_path):
    metrics, nothing = processes.run(2, train, tmp_path)
    assert (metrics["processes"], metrics["num_envs"], metrics["env_steps"], nothing) == (2, 6, 192, {})
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["env"]["transforms.2.statistics.count"] > 6 * 33  # of all ranks
    first, second = checkpoint["processes"]
    assert len(first["snapshot"]["observation"]) == len(second["snapshot"]["observation"]) == 3
    assert not torch.equal(first["rng"][0], second["rng"][0])
    buffers = first["snapshot"]["buffers"], second["snapshot"]["buffers"]
    for key, value in checkpoint["env"].items():
        assert all(torch.equal(part[key], value) for part in buffers)


def test_envs_that_the_processes_cannot_share_are_refused(processes):
    assert processes.run(2, refused) == ["ppo.py needs --num-envs that 2 processes can share, but got 5."] * 2


def refused(rank, group):
    ppo = load_example("ppo")
    with pytest.raises(ValueError) as error:
        ppo.train(ppo.Args(num_envs=5), tw.make, rank, 2)
    return str(error.value)
