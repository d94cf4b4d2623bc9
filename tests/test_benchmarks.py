"""tests/benchmarks: sides step the same env, and figures and tables are as README.md says."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from torchwrap import RowMask

ROOT = Path(__file__).parents[1]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"tests.benchmarks.{name}")


# Sides.


def test_torch_and_numpy_scripts_are_equal(load):
    script = load("script")
    env = script.scripted(3)
    array = script.NumpyScript(3)
    env.reset(seed=0)
    array.reset(np.ones(3, bool))
    env.elapsed.copy_(script.elapsed(3))
    array.elapsed[:] = script.elapsed(3).numpy()
    for _ in range(200):
        successor = env._step(script.actions(3))
        keys = ("observation", "reward", "terminated", "truncated")
        for key, value in zip(keys, array.step(), strict=True):
            np.testing.assert_array_equal(successor[key].reshape(value.shape).numpy(), value)
        ended = successor["terminated"] | successor["truncated"]
        env._reset(RowMask(ended))
        array.reset(ended.squeeze(-1).numpy())


def test_gymnasium_script_resets_in_the_step_after_an_end(load):
    peer = load("gymnasium_peer").Script(1)
    peer.reset()
    rewards = [peer.step(None)[1].item() for _ in range(203)]
    assert rewards == [*range(1, 201), 0, 1, 2]


# Measurement.


class Fake:
    """A worker that answers from a list, and records its turns."""

    def __init__(self, case, options, what="time", **variables):
        self.name = case.function
        self.times = list(case.arguments["times"])

    def answer(self):
        return {"build_seconds": 1.0, "bytes": 3000}

    def turn(self, seconds):
        self.turns.append(self.name)
        return self.times.pop(0)

    def close(self):
        assert not self.times


@pytest.fixture
def measure(load, monkeypatch):
    module = load("measure")
    monkeypatch.setattr(Fake, "turns", [], raising=False)
    monkeypatch.setattr(module, "Worker", Fake)
    return module


def cases(measure, name, *times, **arguments):
    """A row whose workers take these times, the first of them in the discarded round."""
    row = []
    for index, turns in enumerate(times):
        row.append(measure.Case("side", f"{name}{index}", {"times": turns, **arguments}))
    return measure.Row(*row)


def test_figures_are_minima_and_medians_without_the_first_round(measure):
    rows = {
        "ours": cases(measure, "ours", [0, 30, 35, 50], [0, 10, 25, 20]),  # adds 20, 10, 30
        "theirs": cases(measure, "theirs", [0, 70, 75, 60], [0, 10, 15, 20]),  # 60, 60, 40
        "noise": cases(measure, "noise", [0, 9, 9, 9], [0, 10, 10, 10]),  # no divisor
    }
    figures = measure.compare(rows, measure.Options(repeats=3), ["ours", "noise"])
    assert figures["ours"] == {
        "us": 20,
        "us_median": 20,
        "whole_us": 30,
        "bare_us": 10,
        "build_seconds": 1,
        "bytes": 3000,
        "gigabytes_per_second": 0.1,
    }
    theirs = figures["theirs"]
    assert (theirs["us"], theirs["us_median"]) == (50, 60)
    assert theirs["ratio"] == {"ours": 2.5}
    assert theirs["ratio_median"] == {"ours": 3}
    assert Fake.turns == ["ours0", "ours1", "theirs0", "theirs1", "noise0", "noise1"] * 4


def test_peers_without_a_device_are_skipped_on_a_gpu(measure):
    rows = {
        "ours": cases(measure, "ours", [0, 3], device="cuda"),
        "peer": cases(measure, "peer", [0, 3]),
    }
    figures = measure.compare(rows, measure.Options(repeats=1, device="cuda"))
    assert figures["ours"]["us"] == 3
    assert figures["peer"] == {"skipped": "runs on the CPU only"}


# Figures, tables and plots.


@pytest.mark.parametrize(("ratio", "text"), [(2.5, "2.3"), (0.0999, "0.099"), (None, "?")], ids=str)
def test_claim_is_the_worst_ratio_and_never_rounded_up(load, ratio, text):
    row = "glue/theirs/64"
    figures = {
        f"{row}/avx2-1": {"ratio": {"ours": 4.0}, "ratio_median": {"ours": 2.397}},
        f"{row}/avx512-1": {"ratio": {"ours": ratio}, "ratio_median": {"ours": 30.0}},
        "cartpole/theirs/64/avx2-2": {},
    }
    comparisons = {("this", "that"): ("glue/theirs", "ours")}
    assert load("report").claims(figures, comparisons, [64]) == [f"| this | that | {text} |"]


def test_readme_has_the_tables_of_the_file(load, capsys):
    readme = (ROOT / "tests" / "benchmarks" / "README.md").read_text().splitlines()
    load("__main__").main(["--tables"])
    missing = [line for line in capsys.readouterr().out.splitlines() if line not in readme]
    assert not missing, "\n".join(missing)


def run(score, **figures):
    return {"final_mean_return": score, "curve": [[1000, score]], **figures}


def test_scores_are_of_all_seeds_of_each_trainer(load):
    runs = {"torchwrap/Ant-v5/201": run(1.0)}
    for seed in (3, 1, 2):
        runs[f"cleanrl/Hopper-v5/{seed}"] = run(2000.0 + 100 * seed)
        runs[f"sb3/Hopper-v5/{seed}"] = run(3000.0, cpu_seconds=1000.0 * seed)
    _, _, *rows = load("scores").show(runs).splitlines()
    seeds = "2,100 / 2,200 / 2,300"
    assert [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows] == [
        ["Hopper-v5", "cleanrl", "2,200 ± 82", seeds, "2,383 ± 272", ""],
        ["Hopper-v5", "sb3", "3,000 ± 0", "3,000 / 3,000 / 3,000", "2,383 ± 272", "2,000"],
        ["Ant-v5", "torchwrap", "1", "1", "", ""],
    ]


def test_runs_of_several_processes_are_all_in_the_file(load, monkeypatch, tmp_path):
    scores = load("scores")
    monkeypatch.setattr(scores, "FILE", tmp_path / "scores.json")
    scores.FILE.write_text('{"runs": {}}')
    monkeypatch.setattr(scores, "machine", lambda options: {})
    keys = [f"sb3/Ant-v5/{seed}" for seed in range(100)]
    with ThreadPoolExecutor(4) as pool:  # a lock of a file holds among its openings
        list(pool.map(lambda key: scores.add(key, run(1.0)), keys))
    assert sorted(scores.read()["runs"]) == sorted(keys)
