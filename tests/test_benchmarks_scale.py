"""tests/benchmarks/scale.py: bytes, the models of all-reduces and stragglers, and the figures and tables made of them."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import types
from pathlib import Path

import gymnasium
import pytest
import torch
import torch.distributed as dist
from helpers import load_example

import torchwrap as tw
from torchwrap import distributed
from torchwrap.transforms.statistics import RunningMeanStd

ROOT = Path(__file__).parents[1]
FIGURES = json.loads((ROOT / "tests" / "benchmarks" / "scale.json").read_text())


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.benchmarks.scale")


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A group of one process that does what one of two does."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(distributed, "_world_size", lambda group: 2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch):
    """The bytes of every all-reduce."""
    found, reduce = [], distributed._reduce

    def record(owner, values, *args):
        found.append(values.nbytes)
        return reduce(owner, values, *args)

    monkeypatch.setattr(distributed, "_reduce", record)
    return found


# Bytes.


def agents():
    box = gymnasium.spaces.Box
    ppo, atari = load_example("ppo"), load_example("ppo_atari")

    def env(features, action_space):
        space = box(-1, 1, (features,))
        return types.SimpleNamespace(single_observation_space=space, single_action_space=action_space)

    return {
        "CartPole-v1": ppo.Agent(env(4, gymnasium.spaces.Discrete(2))),
        "Humanoid-v5": ppo.Agent(env(348, box(-1, 1, (17,)))),
        "Nature CNN": atari.Agent(env(4, gymnasium.spaces.Discrete(4)), atari.Args(network="nature")),
    }


def test_gradients_of_the_agents_have_the_bytes_of_the_model(scale, alone, sent):
    for name, agent in agents().items():
        distributed.average([parameter.detach() for parameter in agent.parameters()])
        assert sent.pop() == scale.gradient_bytes(scale.PARAMETERS[name]) and not sent


def test_sync_has_the_bytes_of_the_model(scale, alone, sent):
    for components in scale.COMPONENTS.values():
        module = RunningMeanStd((components,))
        for _ in range(2):
            sent.clear()
            module.update(torch.ones(3, components))
            tw.sync_statistics(module)
        assert sent == [scale.sync_bytes(components)]  # from the second call on


def test_iteration_has_the_rows_and_updates_of_the_example(scale):
    presets = load_example("ppo").PRESETS
    for name, row in (("CartPole-v1", "CartPole-v1"), ("Humanoid-v5", "any other env with continuous actions")):
        preset, (num_steps, epochs, minibatches, weak, *_) = presets[row], scale.SETTINGS[name]
        assert [preset[key] for key in ("update_epochs", "num_minibatches")] == [epochs, minibatches]
        assert preset["num_steps"] * preset["num_envs"] == num_steps * weak


# The models.


def test_all_reduce_by_hand(scale):
    slow = scale.Network(1.0, 10.0)
    assert scale.all_reduce(100, 1, slow) == 0
    assert scale.all_reduce(100, 2, slow) == 2 * 0.5 * 10 + 2  # a ring
    assert scale.all_reduce(100, 4, slow) == 2 * 0.75 * 10 + 6
    assert scale.all_reduce(10, 1024, slow) == 20 + 2  # a tree: twice ten messages, and twice the bytes
    assert scale.all_reduce(0, 1024, scale.Network(1.0, 10.0, tree=False)) == 2046
    nodes = scale.Network(1.0, 10.0, node=scale.Network(0.25, 1000.0))
    assert scale.all_reduce(0, 8, nodes) == 2 * 3 * 0.25
    assert scale.all_reduce(0, 64, nodes) == 2 * 3 * 0.25 + 2 * 3
    assert scale.all_reduce(0, 4, nodes) == 2 * 2 * 0.25


@pytest.mark.parametrize("cv", [0.02, 0.1, 0.3])
def test_slowest_rank_is_the_maximum_of_a_lognormal(scale, cv):
    sigma = (math.log1p(cv**2)) ** 0.5
    normal, points = statistics.NormalDist(), 20_000
    for ranks in (1, 2, 64, 1024):
        # The integral of the quantile function of the maximum, which is that of one rank at u ** (1 / ranks).
        quantiles = (normal.inv_cdf(((i + 0.5) / points) ** (1 / ranks)) for i in range(points))
        expected = sum(math.exp(sigma * z - sigma**2 / 2) for z in quantiles) / points
        assert scale.slowest(ranks, cv) == pytest.approx(expected, rel=0.15 * cv)


def test_resets_add_their_mean_and_the_maximum_of_their_number(scale):
    assert scale.slowest(1, 0.0, 0.5, 3.0) == pytest.approx(1 + 0.5 * 3, rel=0.1)
    # P(more than 2 of 64 Poisson numbers with mean 0.1): by hand, E max = sum over k of 1 - F(k) ** 64.
    chances = [math.exp(-0.1) * 0.1**k / math.factorial(k) for k in range(9)]
    expected = sum(1 - sum(chances[: k + 1]) ** 64 for k in range(8))
    assert scale.slowest(64, 0.0, 2.0, 0.1) == pytest.approx(1 + 2 * expected, rel=0.03)


def work(scale, **changes):
    values = dict(components=4, parameters=1000, num_steps=10, updates=8, minibatches=4, weak=8, strong=1024)
    values |= dict(rollout=(0.5, 0.01), update=(0.1, 0.001), sync_seconds=0.0, average_seconds=0.0)
    return scale.Workload(**values | changes)


def test_iteration_without_variation_by_hand(scale):
    network = scale.Network(1e-3, 1e6)
    gradients, sync = scale.all_reduce(4000, 4, network), scale.all_reduce(192, 4, network)
    found = scale.iteration(work(scale, sync_seconds=2.0, average_seconds=3.0), 4, 8, network, 0.0)
    assert found["mean"] == pytest.approx(0.5 + 0.08 + 8 * (0.1 + 0.001 * 20))
    waits = 2 + sync + 8 * (3 + gradients) + scale.all_reduce(16, 4, network)
    assert found["seconds"] - found["mean"] == pytest.approx(waits)
    one = scale.iteration(work(scale), 1, 8, network, 0.3, reset_steps=50, episode=20)
    assert one["seconds"] == one["mean"] == pytest.approx(0.5 + 0.08 + 8 * 0.12 + 4 * 50 * 0.001)  # four resets


def test_more_ranks_stop_paying(scale):
    free = scale.Network(0.0, 1e30)
    even = scale.scaling(work(scale, rollout=(0.0, 1.0), update=(0.0, 1.0)), free, 0.0)
    assert even["strong"]["fastest"] == even["strong"]["half"] == even["weak"]["half"] == 1024
    assert even["strong"]["1024"]["speedup"] == pytest.approx(1024)
    fixed = scale.scaling(work(scale, rollout=(1.0, 1.0 / 1024), update=(0.0, 0.0)), free, 0.0)["strong"]
    assert fixed["1024"]["speedup"] == pytest.approx(2 / (1 + 1 / 1024)) and fixed["half"] == 2
    late = scale.scaling(work(scale, rollout=(0.0, 1.0), update=(0.0, 0.0)), scale.Network(1.0, 1e30, tree=False), 0.0)
    seconds = {ranks: 1024 / ranks + 20 * (ranks - 1) for ranks in (2, 4, 8, 16)}  # ten all-reduces
    assert {ranks: late["strong"][str(ranks)]["seconds"] for ranks in seconds} == pytest.approx(seconds)
    assert late["strong"]["fastest"] == 8 and late["strong"]["half"] == 4
    efficient = [scale.scaling(work(scale), free, cv)["weak"]["64"]["efficiency"] for cv in (0.0, 0.02, 0.1, 0.3)]
    assert efficient[0] == pytest.approx(1) and efficient == sorted(efficient, reverse=True)


def test_line_goes_through_both_points_and_never_below_zero(scale):
    assert scale.line({2: 5.0, 4: 9.0}) == (1.0, 2.0)
    assert scale.line({2: 5.0, 4: 4.0}) == (5.0, 0.0)
    assert scale.line({2: 1.0, 4: 9.0}) == (0.0, 4.0)


def test_loopback_goes_through_the_points_of_two_processes(scale):
    found, measured = scale.loopback(FIGURES["measured"]), FIGURES["measured"]
    for kind, case in (("sync", "4"), ("average", "Nature CNN")):
        assert found[f"{kind}/{case}"]["2"] == pytest.approx(measured[kind][case]["2"]["min_us"], rel=0.01)
        assert found[f"{kind}/{case}"]["4"] > found[f"{kind}/{case}"]["2"]


# Figures and tables.


def leaves(tree, path=()):
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: leaf for name, part in tree.items() for key, leaf in leaves(part, (*path, name)).items()}


def test_figures_are_those_of_the_model(scale):
    computed = leaves(scale.model(FIGURES["measured"]))
    assert computed == pytest.approx({path: leaf for path, leaf in leaves(FIGURES).items() if path[0] in scale.PARTS})


def test_readme_has_the_tables(scale):
    text = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
    assert [row for row in scale.show(FIGURES).splitlines() if row not in text.splitlines()] == []
    loop = [FIGURES["measured"]["loop"][n] for n in ("1", "2", "4")]
    assert f"{', '.join(format(row['median'], '.1f') for row in loop)} iterations per second" in text
    assert f"share {FIGURES['machine']['cores']} cores" in text


def test_command_prints_the_tables_and_computes_the_model_again(scale, tmp_path, capsys):
    path = tmp_path / "scale.json"
    path.write_text(json.dumps(FIGURES | {part: {} for part in scale.PARTS}))
    scale.main(["--json", str(path), "--model"])
    assert capsys.readouterr().out.strip() == scale.show(FIGURES)
    scale.main(["--json", str(path)])
    assert capsys.readouterr().out.strip() == scale.show(FIGURES)
    assert json.loads(path.read_text()) == FIGURES


def test_calls_are_timed_in_a_group(scale, alone, sent):
    side = importlib.import_module("tests.benchmarks.scale_side")
    found = side.time_calls(2)
    assert {kind: list(rows) for kind, rows in found.items()} == {"sync": [*scale.COMPONENTS], "average": [*scale.PARAMETERS]}
    assert all(0 < row["min_us"] <= row["median_us"] for rows in found.values() for row in rows.values())
    assert sent.count(scale.gradient_bytes(scale.PARAMETERS["Nature CNN"])) == 7  # five warm up


@pytest.mark.full
def test_phases_of_the_example_are_timed(scale):
    side = importlib.import_module("tests.benchmarks.scale_side")
    found = side.time_phases("CartPole-v1", 4, 3)
    assert 0 < found["rollout_min_ms"] <= found["rollout_ms"] and 0 < found["update_min_ms"] <= found["update_ms"]
