"""examples/ppo.py in processes that torchrun starts: what they share, and what happens when one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch
from helpers import EXAMPLES, load_example
from processes import Processes
from tensordict import TensorDict

import torchwrap as tw

FLAGS = "--num-envs 16 --num-steps 32 --update-epochs 4 --num-minibatches 2 --save-every 3 --resume"


def start(out, total_timesteps, flags=()):
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 --monitor-interval 0.1 --max-restarts 12"
    command += f" {EXAMPLES}/ppo.py {FLAGS} --total-timesteps {total_timesteps} --out {out}"
    with open(f"{out}.log", "w") as log:
        return subprocess.Popen([sys.executable, *command.split(), *flags], stdout=log, stderr=log)


def finish(process, out):
    try:
        assert process.wait(timeout=300) == 0, Path(f"{out}.log").read_text()[-3000:]
    finally:
        end(process)
    return torch.load(out / "checkpoint.pt", weights_only=True)


def end(process):
    process.terminate()  # upon which torchrun ends the others
    process.wait(60)


def iteration(out):
    path = out / "checkpoint.pt"
    return torch.load(path, weights_only=True)["iteration"] if path.exists() else 0


def workers(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def kill_and_compare(tmp_path, total_timesteps, kills, seed, flags=()):
    """Kills one process at random moments. torchrun starts all again, and they end as those that ran without a break.

    Returns their last checkpoint.
    """
    whole = finish(start(tmp_path / "whole", total_timesteps, flags), tmp_path / "whole")
    out, random, before = tmp_path / "killed", Random(seed), 0
    process = start(out, total_timesteps, flags)
    try:
        for _ in range(kills):
            while process.poll() is None and (iteration(out) <= before or len(workers(process)) != 2):
                time.sleep(0.01)
            before = iteration(out)
            time.sleep(random.uniform(0, 0.3))  # somewhere in a rollout, an update, or in writing
            os.kill(random.choice(workers(process)), signal.SIGKILL)
        killed = finish(process, out)
    finally:
        end(process)
    for name in ("agent", "optimizer", "env", "processes"):
        torch.testing.assert_close(killed[name], whole[name], rtol=0, atol=0)
    assert killed["iteration"] == whole["iteration"] and len(killed["processes"]) == 2
    returns = [[(step, value) for step, value, _ in checkpoint["curve"]] for checkpoint in (killed, whole)]
    assert returns[0] == returns[1]
    assert "exitcode: -9" in Path(f"{out}.log").read_text()
    return killed


@pytest.mark.full
def test_process_killed_at_ten_random_moments(tmp_path):
    kill_and_compare(tmp_path, 65536, kills=10, seed=1)


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
    (whole,), halves = processes.run(1, update_of_half, 1), processes.run(2, update_of_half, 2)
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
    assert not torch.equal(first["rng"], second["rng"])
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
