"""tests/benchmarks: every side steps the same env, figures are computed as README.md says, and tables come from the file."""

import importlib
import json
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
    env, array = script.scripted(3), script.NumpyScript(3)
    env.reset(seed=0)
    array.reset(np.ones(3, bool))
    env.elapsed.copy_(script.elapsed(3))
    array.elapsed[:] = script.elapsed(3).numpy()
    for _ in range(200):
        successor = env._step(script.actions(3))
        for key, value in zip(
            ("observation", "reward", "terminated", "truncated"), array.step(), strict=True
        ):
            np.testing.assert_array_equal(successor[key].reshape(value.shape).numpy(), value)
        ended = successor["terminated"] | successor["truncated"]
        env._reset(RowMask(ended))
        array.reset(ended.squeeze(-1).numpy())
    peer = load("gymnasium_peer").Script(1)
    peer.reset()
    assert [peer.step(None)[1].item() for _ in range(203)] == [
        *range(1, 201),
        0,
        1,
        2,
    ]  # the step after an end is a reset


# Measurement.


class Fake:
    """A worker that answers from a list, and records its turns."""

    def __init__(self, case, options, what="time", **variables):
        self.name, self.times = case.function, list(case.arguments["times"])

    def answer(self):
        return {"build_seconds": 1.0, "bytes": 3000}

    def turn(self, seconds):
        self.turns.append(self.name)
        return self.times.pop(0)

    def close(self):
        assert not self.times


def test_figures_are_minima_and_medians_without_the_first_round(load, monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(Fake, "turns", [], raising=False)
    monkeypatch.setattr(measure, "Worker", Fake)

    def row(name, *times, **more):
        return measure.Row(
            *(
                measure.Case("side", f"{name}{i}", {"times": one, **more})
                for i, one in enumerate(times)
            )
        )

    rows = {
        "ours": row("ours", [0, 30, 35, 50], [0, 10, 25, 20]),  # whole, bare: 20, 10, 30 added
        "theirs": row("theirs", [0, 70, 75, 60], [0, 10, 15, 20]),  # 60, 60, 40
        "noise": row(
            "noise", [0, 9, 9, 9], [0, 10, 10, 10]
        ),  # nothing is divided by a negative time
    }
    figures = measure.compare(rows, measure.Options(repeats=3), ["ours", "noise"])
    assert figures["ours"] == {
        **{"us": 20, "us_median": 20, "whole_us": 30, "bare_us": 10, "build_seconds": 1},
        **{"bytes": 3000, "gigabytes_per_second": 0.1},
    }
    assert figures["theirs"]["us"] == 50 and figures["theirs"]["us_median"] == 60
    assert figures["theirs"]["ratio"] == {"ours": 2.5} and figures["theirs"]["ratio_median"] == {
        "ours": 3
    }
    assert Fake.turns == ["ours0", "ours1", "theirs0", "theirs1", "noise0", "noise1"] * 4
    rows = {"ours": row("ours", [0, 3], device="cuda"), "peer": row("peer", [0, 3])}
    figures = measure.compare(rows, measure.Options(repeats=1, device="cuda"))
    assert figures["ours"]["us"] == 3 and figures["peer"] == {"skipped": "runs on the CPU only"}


# Figures, tables and plots.


def test_claims_are_the_worst_of_all_settings_and_never_rounded_up(load):
    report, comparisons = load("report"), {("this", "that"): ("glue/theirs", "ours")}
    figures = {"machine": {}, "cartpole/theirs/64/avx2-2": {}}
    for setting, (ratio, median) in {"avx2-1": (4.0, 2.397), "avx512-1": (2.5, 30.0)}.items():
        figures[f"glue/theirs/64/{setting}"] = {
            "ratio": {"ours": ratio},
            "ratio_median": {"ours": median},
        }
    assert report.claims(figures, comparisons, [64]) == ["| this | that | 2.3 |"]
    figures["glue/theirs/64/avx512-1"]["ratio"]["ours"] = 0.0999
    assert report.claims(figures, comparisons, [64]) == ["| this | that | 0.099 |"]
    figures["glue/other/64/avx512-2"] = {}  # a setting in which the row is missing
    assert report.claims(figures, comparisons, [64]) == ["| this | that | ? |"]


def test_readme_has_the_tables_of_the_file(load, capsys):
    readme = (ROOT / "tests" / "benchmarks" / "README.md").read_text().splitlines()
    load("__main__").main(["--tables"])
    missing = [line for line in capsys.readouterr().out.splitlines() if line not in readme]
    assert not missing, "\n".join(missing)


def run(score, **figures):
    """A run of PPO whose return rises linearly, in ten points."""
    curve = [[100 * i, score * i / 10] for i in range(1, 11)]
    return {"env_steps": 1000, "final_mean_return": score, "curve": curve, **figures}


def test_scores_compare_at_equal_steps_and_at_equal_cpu_seconds(load):
    runs = {f"torchwrap/Hopper-v5/{seed}": run(2000.0 + 100 * seed) for seed in (3, 1, 2)}
    runs["torchwrap/Hopper-v5/2"]["cpu_seconds"] = 50.0
    runs |= {f"sb3/Hopper-v5/{seed}": run(3000.0, cpu_seconds=100.0 * seed) for seed in (1, 2, 3)}
    runs["torchwrap/Ant-v5/1"] = run(1.0, cpu_seconds=100.0)
    assert load("scores").show(runs).splitlines()[2:] == [
        "| Hopper-v5 | torchwrap | 2,200 ± 82 | 2,100 / 2,200 / 2,300 | 2,383 ± 272 | 2,200 ± 82 after 50 s | 20 |",
        "| Hopper-v5 | sb3 | 3,000 ± 0 | 3,000 / 3,000 / 3,000 | 2,383 ± 272 | 600 ± 0 after 50 s | 5 |",
        "| Ant-v5 | torchwrap | 1 ± 0 | 1 |  |  | 10 |",
    ]


def test_the_guide_of_ppo_has_the_scores(load):
    scores, text = (
        load("scores"),
        " ".join((ROOT / "examples" / "guides" / "ppo.md").read_text().split()),
    )
    runs = json.loads(scores.FILE.read_text())["runs"]
    for name in ("Hopper", "Walker2d", "HalfCheetah", "InvertedPendulum", "Humanoid"):
        found = [
            run["final_mean_return"]
            for key, run in runs.items()
            if key.startswith(f"torchwrap/{name}-v5/")
        ]
        peer, published = "CleanRL " * (name == "Hopper"), scores.PUBLISHED[f"{name}-v5"].mean
        assert f"{np.mean(found):,.0f} on {name} ({peer}{published:,.0f})" in text
