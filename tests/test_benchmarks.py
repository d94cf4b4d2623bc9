"""tests/benchmarks: sides step the same env, and figures and tables are as README.md says."""

import importlib
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
