"""tests/benchmarks/scores.py: which runs are trained, and what is kept and shown of them."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scores(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.benchmarks.scores")


def run(score, seconds=100.0):
    """One whose return has risen linearly, in ten points."""
    return {
        "env_steps": 1000,
        "wall_seconds": seconds,
        "final_mean_return": score,
        "curve": [[100 * i, score * i / 10, seconds * i / 10] for i in range(1, 11)],
    }


def test_thin_curve_has_points_at_equal_distances_up_to_the_last_one(scores):
    curve = [(2048 * i, i / 3, i * 1.25) for i in range(1, 490)]
    thinned = scores.thin(curve)
    assert thinned[-1] == [2048 * 489, 163.0, 611.2]
    assert len(thinned) <= 64
    assert {b[0] - a[0] for a, b in itertools.pairwise(thinned)} == {8 * 2048}


def test_return_at_a_second_is_the_latest_one_that_was_known(scores):
    assert scores.at(run(50.0), 39.9) == 15.0
    assert scores.at(run(50.0), 40.0) == 20.0
    assert scores.at(run(50.0), 1e9) == 50.0
    assert scores.at(run(50.0), 1.0) == 5.0  # before the first point


def test_table_compares_at_equal_steps_and_when_the_fastest_run_has_finished(scores):
    runs = {f"torchwrap/Hopper-v5/{seed}": run(2000.0 + 100 * seed) for seed in (3, 1, 2)}
    runs |= {f"sb3/Hopper-v5/{seed}": run(3000.0, seconds=200.0) for seed in (1, 2)}
    runs["torchwrap/Ant-v5/1"] = run(1.0)
    assert scores.show(runs).splitlines()[2:] == [
        "| Hopper-v5 | torchwrap | 2,200 ± 82 | 2,100 / 2,200 / 2,300 | 2,383 ± 272 | 2,200 ± 82 after 100 s | 10 |",
        "| Hopper-v5 | sb3 | 3,000 ± 0 | 3,000 / 3,000 | 2,383 ± 272 | 1,500 ± 0 after 100 s | 5 |",
        "| Ant-v5 | torchwrap | 1 ± 0 | 1 |  |  | 10 |",
    ]


def test_runs_that_are_trained_are_the_named_ones_or_those_that_are_missing(scores):
    def wanted(runs=(), trainer=None, env_id=None, seed=None):
        return scores.wanted(argparse.Namespace(trainer=trainer, env_id=env_id, seed=seed), dict.fromkeys(runs))

    every = wanted()
    assert len(every) == len(set(every)) == 3 * (6 + 2)
    assert wanted(every[:-1]) == every[-1:]
    assert wanted(every, trainer="sb3", env_id="Hopper-v5") == [f"sb3/Hopper-v5/{seed}" for seed in (1, 2, 3)]
    assert wanted(env_id="HalfCheetah-v5", seed=2) == ["torchwrap/HalfCheetah-v5/2", "sb3/HalfCheetah-v5/2"]
    assert wanted(trainer="sb3", env_id="Ant-v5") == []


def test_runs_are_written_one_by_one_and_drawn(scores, monkeypatch, tmp_path):
    monkeypatch.setattr(scores, "FILE", tmp_path / "scores.json")
    monkeypatch.setattr(scores, "machine", lambda options: {"processor": "one"})
    monkeypatch.setattr(scores, "train", lambda trainer, env, seed: run(100.0 * seed))
    scores.main(["--env-id", "Ant-v5", "--seed", "2"])
    scores.main(["--env-id", "Hopper-v5"])
    file = json.loads((tmp_path / "scores.json").read_text())
    assert next(iter(file["runs"])) == "torchwrap/Ant-v5/2"
    assert len(file["runs"]) == 7
    assert file["machine"] == {"processor": "one"}
    assert file["runs"]["sb3/Hopper-v5/3"] == run(300.0)
    assert (tmp_path / "scores.png").stat().st_size > 10_000

    monkeypatch.setattr(scores, "train", lambda trainer, env, seed: {"skipped": "no MuJoCo"})
    with pytest.raises(SystemExit, match="torchwrap/Walker2d-v5/1 could not be run: no MuJoCo"):
        scores.main(["--env-id", "Walker2d-v5"])
    assert json.loads((tmp_path / "scores.json").read_text()) == file


@pytest.mark.full
def test_run_of_the_example_gives_its_figures_and_its_curve(scores, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = importlib.import_module("tests.benchmarks.torchwrap_side").learn("CartPole-v1", seed=1)
    steps, returns, seconds = zip(*found["curve"], strict=True)
    assert found["env_steps"] == steps[-1] == 151_552  # 74 iterations of 64 envs and 32 steps
    assert found["final_mean_return"] == returns[-1] > 400
    assert found["eval_mean_return"] > 400
    assert list(seconds) == sorted(seconds)
    assert found["wall_seconds"] > seconds[-1]


@pytest.mark.parametrize("env", ["Hopper-v5", "HalfCheetah-v5"])
def test_stable_baselines3_runs_with_tuned_hyperparameters(scores, env):
    peer = pytest.importorskip("stable_baselines3") and importlib.import_module("tests.benchmarks.sb3_peer")
    found = peer.learn(env, seed=1, num_steps=1024)
    assert found["env_steps"] == 1024
    if env == "Hopper-v5":  # no episode of the other one has ended by then
        assert [point[0] for point in found["curve"]] == [512, 1024]
        assert found["final_mean_return"] == found["curve"][-1][1] > 0


def test_documentation_has_the_scores(scores):
    runs, text = json.loads(scores.FILE.read_text())["runs"], (ROOT / "README.md").read_text()
    benchmarks = (ROOT / "tests" / "benchmarks" / "README.md").read_text().splitlines()
    assert [row for row in scores.show(runs).splitlines() if row not in benchmarks] == []
    for name, peer in (("Hopper", "CleanRL "), ("Walker2d", ""), ("HalfCheetah", ""), ("InvertedPendulum", "")):
        found = [run["final_mean_return"] for key, run in runs.items() if key.startswith(f"torchwrap/{name}-v5/")]
        expected = f"{statistics.mean(found):,.0f} on {name} ({peer}{scores.PUBLISHED[f'{name}-v5'].mean:,.0f})"
        assert expected in " ".join(text.split())
