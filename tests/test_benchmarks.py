from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

FIGURES = {"num_envs", "repeats", "bare_us", "whole_us", "glue_us", "bare_median_us", "whole_median_us", "glue_median_us"}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    return lambda name: importlib.import_module(f"tests.benchmarks.{name}")


def test_command_line_writes_figures_of_our_side(load, monkeypatch, tmp_path, capsys):
    command = load("__main__")
    run = load("glue").run
    monkeypatch.setattr(load("glue"), "run", lambda *arguments: run(*arguments, peers=["missing"]))
    path = tmp_path / "figures.json"
    command.main(["--json", str(path), "--suite", "glue", "--num-envs", "3", "8", "--seconds", "0.001", "--repeats", "2"])
    figures = json.loads(path.read_text())
    assert set(figures) == {"machine", *(f"glue/{side}/{n}" for side in ("torchwrap", "missing") for n in (3, 8))}
    assert figures["machine"]["threads"] >= 1
    assert figures["machine"]["versions"]["torch"]
    ours = figures["glue/torchwrap/8"]
    assert set(ours) == FIGURES
    assert ours["num_envs"] == 8 and ours["repeats"] == 2
    assert ours["glue_us"] == pytest.approx(ours["whole_us"] - ours["bare_us"])
    assert 0 < ours["bare_us"] <= ours["bare_median_us"]
    assert set(figures["glue/missing/8"]) == {"skipped"}
    assert "skipped: ModuleNotFoundError" in capsys.readouterr().out


def test_ratio_is_the_peers_glue_in_ours(load):
    figures = load("glue").run([4], seconds=0.001, repeats=2, peers=["gymnasium"])
    theirs, ours = figures["glue/gymnasium/4"], figures["glue/torchwrap/4"]
    assert set(theirs) == {*FIGURES, "ratio", "ratio_median"}
    assert theirs["ratio"] == pytest.approx(theirs["glue_us"] / ours["glue_us"])
    assert "Gymnasium" in load("glue").table(figures)


@pytest.mark.parametrize("side", ["torchwrap_side", "gymnasium_peer"])
@pytest.mark.parametrize("which", ["bare", "whole"])
def test_ends_are_spread_evenly(load, side, which):
    step = getattr(load(side), which)(40)
    assert [int(step().sum()) for _ in range(200)] == [0, 0, 0, 0, 1] * 40


def test_sides_step_the_same_script(load):
    script = load("script")
    env, array = script.scripted(3), script.NumpyScript(3)
    env.reset(seed=0)
    array.reset(np.ones(3, bool))
    env.elapsed.copy_(script.elapsed(3))
    array.elapsed[:] = script.elapsed(3)
    for _ in range(200):
        successor = env._step(env._reset(env.elapsed < 0).set("action", script.actions(3)))
        for key, value in zip(("observation", "reward", "terminated", "truncated"), array.step(), strict=True):
            np.testing.assert_array_equal(successor[key].reshape(value.shape).numpy(), value)
        ended = successor["terminated"] | successor["truncated"]
        env._reset(ended.squeeze(-1))
        array.reset(ended.squeeze(-1).numpy())
