"""tests/benchmarks/scores.py: which runs are trained, and what is kept and shown of them."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scores(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.benchmarks.scores")


def run(score, **figures):
    """One whose return has risen linearly, in ten points."""
    curve = [[100 * i, score * i / 10] for i in range(1, 11)]
    return {"env_steps": 1000, "wall_seconds": 100.0, "final_mean_return": score, "curve": curve, **figures}


@pytest.mark.parametrize("seconds", [[], [0.5]], ids=["", "with seconds"])
def test_thin_curve_has_points_at_equal_distances_up_to_the_last_one(scores, seconds):
    curve = [(2048 * i, i / 3, *seconds) for i in range(1, 490)]
    thinned = scores.thin(curve)
    assert thinned[-1] == [2048 * 489, 163.0]
    assert len(thinned) <= 64
    assert {b[0] - a[0] for a, b in itertools.pairwise(thinned)} == {8 * 2048}


def test_return_at_a_step_is_the_latest_one_that_was_known(scores):
    assert scores.at(run(50.0), 399) == 15.0
    assert scores.at(run(50.0), 400) == 20.0
    assert scores.at(run(50.0), 1e9) == 50.0
    assert scores.at(run(50.0), 1) == 5.0  # before the first point


def test_table_compares_at_equal_steps_and_when_the_fastest_trainer_has_finished(scores):
    runs = {f"torchwrap/Hopper-v5/{seed}": run(2000.0 + 100 * seed) for seed in (3, 1, 2)}
    runs["torchwrap/Hopper-v5/2"]["cpu_seconds"] = 50.0
    runs |= {f"sb3/Hopper-v5/{seed}": run(3000.0, cpu_seconds=100.0 * seed) for seed in (1, 2, 3)}
    runs |= {"torchwrap/HalfCheetah-v5/1": run(2.0, cpu_seconds=10.0), "sb3/HalfCheetah-v5/1": run(3.0)}
    runs["torchwrap/Ant-v5/1"] = run(1.0, cpu_seconds=100.0)
    assert scores.show(runs).splitlines()[2:] == [
        "| Hopper-v5 | torchwrap | 2,200 ± 82 | 2,100 / 2,200 / 2,300 | 2,383 ± 272 | 2,200 ± 82 after 50 s | 20 |",
        "| Hopper-v5 | sb3 | 3,000 ± 0 | 3,000 / 3,000 / 3,000 | 2,383 ± 272 | 600 ± 0 after 50 s | 5 |",
        "| HalfCheetah-v5 | torchwrap | 2 ± 0 | 2 | 1,443 ± 46 |  | 100 |",
        "| HalfCheetah-v5 | sb3 | 3 ± 0 | 3 | 1,443 ± 46 |  |  |",
        "| Ant-v5 | torchwrap | 1 ± 0 | 1 |  |  | 10 |",
    ]


@pytest.mark.parametrize(("trainer", "compiled"), [("torchwrap", {"compiled": True}), ("sb3", {})])
def test_run_has_the_cpu_seconds_of_its_process(scores, monkeypatch, trainer, compiled):
    def ask(case, options):
        assert case.arguments == {"id": "Ant-v5", "seed": 2, **compiled}
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
        return {"final_mean_return": 1.0}

    monkeypatch.setattr(scores, "ask", ask)
    found = scores.train(trainer, "Ant-v5", 2)
    assert found["final_mean_return"] == 1.0
    assert 0.26 <= found["cpu_seconds"] < 5  # of four times in whole hundredths


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
    for name in ("Hopper", "Walker2d", "HalfCheetah", "InvertedPendulum", "Humanoid"):
        found = [run["final_mean_return"] for key, run in runs.items() if key.startswith(f"torchwrap/{name}-v5/")]
        peer, published = "CleanRL " * (name == "Hopper"), scores.PUBLISHED[f"{name}-v5"].mean
        assert f"{statistics.mean(found):,.0f} on {name} ({peer}{published:,.0f})" in " ".join(text.split())
