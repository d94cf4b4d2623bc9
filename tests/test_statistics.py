"""sync_statistics: processes that each see some rows have the statistics of one that has seen all of them."""

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import assert_same, buffers, load_example
from processes import Processes, init
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv
from torchwrap.transforms import RunningMeanStd


@pytest.fixture(scope="module")
def processes():
    running = Processes(4)
    yield running
    running.close()


def batches(rank, world_size, rounds, kind):
    """The rows that each process sees, round by round: their numbers differ, and the last process begins late."""
    found = []
    for index in range(rounds):
        rng = np.random.default_rng([rank, index, len(kind)])
        rows = rng.normal([0, 1e6, -3], [1, 1, 1e-3], (rng.integers(1, 40), 3)).astype(np.float32)
        if kind == "integers":
            rows = rng.integers(-50, 50, rows.shape).astype(np.float32)
        if kind == "holes":
            rows[rng.random(rows.shape) < 0.3] = rng.choice([np.nan, np.inf, -np.inf])
            rows[:, 2] = np.nan if index < 2 else rows[:, 2]  # whose first values come late
        nothing = world_size > 1 and (index, rank) in [
            (0, world_size - 1),
            (1, world_size - 1),
            (3, 0),
        ]
        found.append(torch.from_numpy(rows[: 0 if nothing else None]))
    return found


def count_and_sync(rank, group, kind, rounds):
    module, size = RunningMeanStd((3,)), dist.get_world_size(group)
    for rows in batches(rank, size, rounds, kind):
        if len(rows):
            module.update(rows)
        tw.sync_statistics(module, group)
    before = buffers(module)
    tw.sync_statistics(module, group)
    assert_same(buffers(module), before)  # bit for bit
    return buffers(module), module.mean, module.var


@pytest.mark.parametrize(
    ("size", "kind"),
    [pytest.param(1, "numbers", marks=pytest.mark.full), (4, "integers"), (4, "holes")],
)
def test_processes_have_the_statistics_of_all_rows(processes, size, kind):
    results = processes.run(size, count_and_sync, kind, 5)
    rows = torch.cat(
        [rows for rank in range(size) for rows in batches(rank, size, 5, kind)]
    ).numpy()
    kept = np.where(np.isfinite(rows), rows, np.nan).astype(np.float64)
    for found, mean, var in results:
        assert_same(found, results[0][0])
        assert found["count"].tolist() == np.isfinite(kept).sum(0).tolist()
        tolerance = (
            0 if kind == "integers" else 1e-7
        )  # differences from the reference are rounded to float32
        np.testing.assert_allclose(mean, np.nanmean(kept, 0), rtol=1e-12, atol=tolerance)
        np.testing.assert_allclose(var, np.nanvar(kept, 0), rtol=1e-12 + tolerance)


def sync_an_env(rank, group, backend):
    env = tw.TransformedEnv(
        tw.make("Pendulum-v1", 3, first_index=3 * rank),
        T.NormalizeObservation(),
        T.NormalizeReward(),
        T.ClipReward(-5, 5),
    )
    if backend:
        tw.compile(env, backend=backend)
    td, addresses = env.reset(seed=0), [buffer.data_ptr() for buffer in env.buffers()]
    for _ in range(3):
        _, td = tw.Collector(env, None, 4)(td)
        tw.sync_statistics(env, group)
    assert [buffer.data_ptr() for buffer in env.buffers()] == addresses
    assert not any("synced" in key for key in env.state_dict())
    return TensorDict(env.state_dict(), [])


@pytest.mark.parametrize(
    "backend", [None, pytest.param("eager", marks=[pytest.mark.compiles, pytest.mark.full])]
)
def test_statistics_of_an_env(processes, backend):
    results = processes.run(2, sync_an_env, backend)
    assert_same(results[1], results[0])
    counts = [value.unique().item() for key, value in results[0].items() if key.endswith("count")]
    assert counts == [2 * 3 * 13, 2 * 3 * 12]  # initial observations and 12 steps; rewards


def load_and_sync(rank, group, loaded, restored):
    module = RunningMeanStd((2,))
    module.update(torch.arange(6.0).view(3, 2) + rank)
    tw.sync_statistics(module, group)
    module.update(torch.full((2 + rank, 2), 7.0))
    saved, held = [module.state_dict() if rank == 0 else None], buffers(module)
    dist.broadcast_object_list(saved, src=0, group=group)
    other = RunningMeanStd((2,))
    other.load_state_dict({}, strict=False)  # which shares nothing
    if loaded:
        other.load_state_dict(saved[0])
    if restored:
        for name, buffer in other.named_buffers():
            buffer.copy_(held[name])
    tw.sync_statistics(other, group)
    return buffers(other)


def test_loaded_statistics_count_once_and_a_snapshot_remembers_what_was_shared(processes):
    for found in processes.run(4, load_and_sync, True, False):
        assert (found["count"] == 4 * 3 + 2).all()  # what rank 0 had
    for found in processes.run(4, load_and_sync, False, True):
        assert (found["count"] == 4 * 3 + 2 + 3 + 4 + 5).all()


def refused(env, group, message):
    """The whole message of an error that leaves the env as it is."""
    before = buffers(env)
    with pytest.raises(RuntimeError, match=message) as error:
        tw.sync_statistics(env, group)
    assert_same(buffers(env), before)
    return str(error.value)


def load_different(rank, group, kind):
    env = tw.TransformedEnv(ScriptedEnv(2, observation_shape=(2,)), T.NormalizeObservation())
    env.reset()
    if kind in ("total", "reference"):
        tw.sync_statistics(env, group)
        saved = env.state_dict()
        saved[f"transforms.NormalizeObservation.statistics.{kind}"] += rank == 2
        env.load_state_dict(saved)
    elif kind == "only one":
        saved = env.state_dict()
        if rank == 0:
            env.load_state_dict(saved)
    return refused(env, group, "load the same state_dict on each, or on none")


def test_every_process_refuses_different_statistics(processes):
    for kind in ("total", "reference", "only one"):
        assert len(processes.run(4, load_different, kind)) == 4


STACKS = {
    "size": lambda: [T.FrameStackObservation(3), T.NormalizeObservation(), T.NormalizeReward()],
    "number": lambda: [T.NormalizeObservation()],
    "order": lambda: [T.NormalizeReward(), T.NormalizeObservation()],
    "none": lambda: [T.ClipReward(-1, 1)],
}


def sync_different(rank, group, kind, other):
    parts = STACKS[kind]() if rank == other else [T.NormalizeObservation(), T.NormalizeReward()]
    env = tw.TransformedEnv(tw.make("Pendulum-v1", 3), *parts)
    tw.rollout(env, None, 3)
    return refused(
        env,
        group,
        "the same names, shapes, order and loaded values on all 2 processes, but others differ",
    )


def test_every_process_refuses_other_statistics_and_goes_on(processes):
    for kind in STACKS:
        for other in range(2):
            messages = processes.run(2, sync_different, kind, other)
            assert f"of rank {other}, {{}} on cpu" in messages[other] or kind != "none"
    assert_same(*processes.run(2, sync_an_env, None))


def play(rank, group, env_id, backend, num_envs):
    shard = num_envs // dist.get_world_size(group)
    env = tw.make(env_id, shard, backend=backend, first_index=rank * shard, max_episode_steps=9)
    data, td = tw.Collector(env, None, 25)(env.reset(seed=3))
    return TensorDict({"data": data, "td": td}, [shard])


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_processes_see_the_data_of_one(processes, backend):
    (whole,) = processes.run(1, play, "CartPole-v1", backend, 8)
    assert_same(torch.cat(processes.run(4, play, "CartPole-v1", backend, 8)), whole)


def test_without_processes_nothing_happens():
    module = RunningMeanStd((1,))
    module.update(torch.ones(2, 1))
    before = buffers(module)
    tw.sync_statistics(module)
    assert_same(buffers(module), before)
    with pytest.raises(
        TypeError, match=r"sync_statistics needs an Env or another nn\.Module, but got str"
    ):
        tw.sync_statistics("env")


def one_dies(rank, folder, queue):
    init(rank, 2, folder)
    module = RunningMeanStd((1,))
    module.update(torch.ones(2, 1))
    tw.sync_statistics(module)
    if rank == 0:
        os._exit(
            0
        )  # at once: PyTorch 2.13 can abort while it ends the threads of a group that is still in use
    start = time.monotonic()
    try:
        tw.sync_statistics(module)
    except RuntimeError as error:
        queue.put((str(error), module.count.item(), time.monotonic() - start))


@pytest.mark.full
def test_a_process_that_ends_is_an_error_on_the_others(tmp_path):
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(one_dies, (str(tmp_path), queue), 2)
    message, count, seconds = queue.get()
    assert "sync_statistics needs all 2 processes of the group" in message and "rank 1" in message
    assert count == 4 and seconds < 30


# examples/ppo_distributed.py. test_life.py kills processes.


def update(rank, group, world_size):
    ppo = load_example("ppo")
    args = ppo.Args(
        learning_rate=0.01, num_minibatches=1, update_epochs=3, norm_adv=False, max_grad_norm=0.5
    )
    torch.manual_seed(0)
    agent = ppo.Agent(ppo.make_env(args, 2))
    data = torch.Generator().manual_seed(1)
    batch = {
        "observation": torch.randn(64, 4, generator=data),
        "action": torch.randint(2, (64,), generator=data),
    }
    for name in ("logprob", "advantage", "value", "ret"):
        batch[name] = torch.randn(64, generator=data)
    part = {name: value[rank::world_size] for name, value in batch.items()}
    script = ppo if world_size == 1 else load_example("ppo_distributed")
    optimizer = ppo.make_optimizer(agent, args)
    ppo.update(agent, optimizer, part, args, script.compute_gradients)
    return TensorDict(agent.state_dict(), [])


def test_processes_average_their_gradients(processes):
    whole = update(0, None, 1)
    parts = processes.run(4, update, 4)
    for name, value in whole.items():
        assert all(part[name].equal(parts[0][name]) for part in parts)
        torch.testing.assert_close(parts[0][name], value, rtol=1e-4, atol=1e-5)


def train(rank, group, folder):
    ppo = load_example("ppo_distributed")
    args = ppo.Args(
        num_envs=12,
        num_steps=16,
        total_timesteps=384,
        save_every=1,
        num_minibatches=2,
        update_epochs=2,
        out=folder,
    )
    args.normalize, args.target_kl = True, 1.0
    with pytest.raises(ValueError, match="--num-envs"):
        ppo.train(ppo.Args(num_envs=5), tw.make, rank, 4)
    return ppo.train(args, tw.make, rank, 4)


def test_rank_0_writes_what_all_need_to_go_on(processes, tmp_path):
    metrics, *others = processes.run(4, train, tmp_path)
    assert (metrics["processes"], metrics["num_envs"], metrics["env_steps"], others) == (
        4,
        12,
        384,
        [{}] * 3,
    )
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (
        checkpoint["env"]["transforms.NormalizeObservation.statistics.count"] > 12 * 33
    ).all()  # of all ranks
    first, second, *_ = checkpoint["processes"]
    assert len(first["snapshot"]["observation"]) == len(second["snapshot"]["observation"]) == 3
    assert not torch.equal(first["rng"][0], second["rng"][0])
    parts = first["snapshot"]["buffers"], second["snapshot"]["buffers"]
    for key, value in checkpoint["env"].items():
        assert all(torch.equal(part[key], value) for part in parts)


def test_processes_of_torchrun_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError,
        match=r"one of 2 processes.*: call torch\.distributed\.init_process_group\(\) first\.$",
    ):
        tw.sync_statistics(tw.make("CartPole-v1", 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    tw.sync_statistics(tw.make("CartPole-v1", 1))
