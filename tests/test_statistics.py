"""sync_statistics: processes that each see some rows have the statistics of all rows."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, buffers, load_example, mostly_full
from numpy.testing import assert_allclose
from processes import Processes
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv
from torchwrap.transforms import RunningMeanStd

ROUNDS = 5


@pytest.fixture(scope="module")
def processes():
    running = Processes(4)
    yield running
    running.close()


def batches(rank, world_size, kind):
    """The rows of each round. Their number differs by process, and the last process begins late."""
    empty = [(0, world_size - 1), (1, world_size - 1), (3, 0)]
    found = []
    for index in range(ROUNDS):
        rng = np.random.default_rng([rank, index, len(kind)])
        shape = (rng.integers(1, 40), 3)
        rows = rng.normal([0, 1e6, -3], [1, 1, 1e-3], shape).astype(np.float32)
        if kind == "integers":
            rows = rng.integers(-50, 50, shape).astype(np.float32)
        if kind == "holes":
            rows[rng.random(shape) < 0.3] = rng.choice([np.nan, np.inf, -np.inf])
            if index < 2:
                rows[:, 2] = np.nan  # the first values of this component come late
        if world_size > 1 and (index, rank) in empty:
            rows = rows[:0]
        found.append(torch.from_numpy(rows))
    return found


def count_and_sync(rank, group, kind):
    module = RunningMeanStd((3,))
    for rows in batches(rank, dist.get_world_size(group), kind):
        module.update(rows)
        tw.sync_statistics(module, group)
    before = buffers(module)
    tw.sync_statistics(module, group)
    assert_same(buffers(module), before)
    return buffers(module), module.mean, module.var


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        pytest.param(1, "numbers", marks=pytest.mark.full),
        (4, "integers"),
        pytest.param(4, "holes", marks=pytest.mark.full),
    ],
)
def test_processes_have_the_statistics_of_all_rows(processes, size, kind):
    results = processes.run(size, count_and_sync, kind)
    rows = []
    for rank in range(size):
        rows += batches(rank, size, kind)
    rows = torch.cat(rows).double().numpy()
    finite = np.where(
        np.isfinite(rows),
        rows,
        np.nan,
    )
    # Differences from the reference are rounded to float32.
    tolerance = 0 if kind == "integers" else 1e-7
    for found, mean, var in results:
        assert_same(found, results[0][0])
        assert found["count"].tolist() == np.isfinite(rows).sum(0).tolist()
        assert_allclose(
            mean,
            np.nanmean(finite, 0),
            rtol=1e-12,
            atol=tolerance,
        )
        assert_allclose(
            var,
            np.nanvar(finite, 0),
            rtol=1e-12 + tolerance,
        )


def sync_an_env(rank, group):
    env = tw.make("Pendulum-v1", 3, first_index=3 * rank)
    transforms = T.NormalizeObservation(), T.NormalizeReward(), T.ClipReward(-5, 5)
    env = tw.TransformedEnv(env, *transforms)
    env.reset(seed=0)
    addresses = [buffer.data_ptr() for buffer in env.buffers()]
    for _ in range(3):
        tw.rollout(env, None, 4)
        tw.sync_statistics(env, group)
    assert [buffer.data_ptr() for buffer in env.buffers()] == addresses
    assert not any("synced" in key for key in env.state_dict())
    return TensorDict(env.state_dict(), [])


def test_statistics_of_an_env_are_those_of_all_processes(processes):
    results = processes.run(2, sync_an_env)
    assert_same(results[1], results[0])
    counts = [value.unique().item() for key, value in results[0].items() if key.endswith("count")]
    assert counts == [2 * 3 * 13, 2 * 3 * 12]  # initial observations and 12 steps; rewards


def load_and_sync(rank, group, source):
    """Syncs statistics that were loaded from rank 0's state_dict, or restored from a snapshot."""
    module = RunningMeanStd((2,))
    module.update(torch.arange(6.0).view(3, 2) + rank)
    tw.sync_statistics(module, group)
    module.update(torch.full((2 + rank, 2), 7.0))
    saved = [module.state_dict()]
    dist.broadcast_object_list(saved, src=0, group=group)
    other = RunningMeanStd((2,))
    if source == "nothing":
        other.update(torch.arange(6.0).view(3, 2))
    other.load_state_dict({}, strict=False)  # shares nothing
    if source == "state_dict":
        other.load_state_dict(saved[0])
    elif source == "snapshot":
        for name, buffer in other.named_buffers():
            buffer.copy_(module.get_buffer(name))
    tw.sync_statistics(other, group)
    return other.count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        pytest.param("nothing", 4 * 3, marks=pytest.mark.full),
        ("state_dict", 4 * 3 + 2),
        pytest.param("snapshot", 4 * 3 + 2 + 3 + 4 + 5, marks=pytest.mark.full),
    ],
)
def test_loaded_statistics_count_once_and_a_snapshot_holds_the_shared_part(
    processes, source, count
):
    for found in processes.run(4, load_and_sync, source):
        assert found.tolist() == [count, count]


def refused(env, group):
    """The message of an error that leaves the env as it is."""
    before = buffers(env)
    with pytest.raises(RuntimeError, match="statistics") as error:
        tw.sync_statistics(env, group)
    assert_same(buffers(env), before)
    return (str(error.value),)


def load_different(rank, group, difference):
    env = tw.TransformedEnv(
        ScriptedEnv(2, observation_shape=(2,)),
        T.NormalizeObservation(),
    )
    env.reset()
    if difference == "only one":
        if rank == 0:
            env.load_state_dict(env.state_dict())
    else:
        tw.sync_statistics(env, group)
        saved = env.state_dict()
        saved[f"transforms.NormalizeObservation.statistics.{difference}"] += rank == 2
        env.load_state_dict(saved)
    return refused(env, group)


@pytest.mark.parametrize("difference", mostly_full(["total", "reference", "only one"], "total"))
def test_every_process_refuses_different_loaded_statistics(processes, difference):
    assert len(processes.run(4, load_different, difference)) == 4


def stack(kind):
    return {
        "same": [T.NormalizeObservation(), T.NormalizeReward()],
        "shape": [T.FrameStackObservation(3), T.NormalizeObservation(), T.NormalizeReward()],
        "number": [T.NormalizeObservation()],
        "order": [T.NormalizeReward(), T.NormalizeObservation()],
        "none": [T.ClipReward(-1, 1)],
    }[kind]


def sync_different(rank, group, kind, other):
    env = tw.make("Pendulum-v1", 3)
    env = tw.TransformedEnv(
        env,
        *stack(kind if rank == other else "same"),
    )
    tw.rollout(env, None, 3)
    return refused(env, group)


@pytest.mark.parametrize("kind", mostly_full(["shape", "number", "order", "none"], "shape"))
def test_every_process_refuses_other_statistics_and_continues(processes, kind):
    messages = processes.run(2, sync_different, kind, 1)
    assert "rank 1" in messages[1][0]
    assert_same(*processes.run(2, sync_an_env))


def test_sync_without_processes_changes_nothing():
    module = RunningMeanStd((1,))
    module.update(torch.ones(2, 1))
    before = buffers(module)
    tw.sync_statistics(module)
    assert_same(buffers(module), before)


def test_sync_of_no_module_raises():
    with pytest.raises(TypeError, match="env"):
        tw.sync_statistics("env")


@pytest.mark.parametrize("number", ["1", "2"])
def test_sync_under_torchrun_without_a_process_group_raises(monkeypatch, number):
    monkeypatch.setenv("WORLD_SIZE", number)
    env = tw.make("CartPole-v1", 1)
    if number == "1":
        tw.sync_statistics(env)
        return
    with pytest.raises(RuntimeError, match="process group"):
        tw.sync_statistics(env)


# examples/ppo_distributed.py.


def train(rank, group, folder):
    ppo = load_example("ppo_distributed")
    args = ppo.Args(
        num_envs=12,
        num_steps=16,
        total_timesteps=384,
        save_every=1,
        num_minibatches=2,
        update_epochs=2,
        resume=True,
        out=folder,
    )
    args.normalize, args.target_kl = True, 1.0
    with pytest.raises(ValueError, match="--num-envs"):
        ppo.train(ppo.Args(num_envs=5), tw.make, rank, 4)
    return ppo.train(args, tw.make, rank, 4)


@pytest.mark.full
def test_rank_0_writes_what_all_need_to_go_on(processes, tmp_path):
    metrics, *others = processes.run(4, train, tmp_path)
    assert (metrics["num_envs"], metrics["env_steps"], others) == (12, 384, [{}] * 3)
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
