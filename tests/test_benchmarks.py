from __future__ import annotations

import ast
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "tests" / "benchmarks"
HOMES = {
    "torchrl": ["torchrl_peer"],
    "stable_baselines3": ["sb3_peer"],
    "envpool": ["envpool_peer"],
    "gymnax": ["jax_peer", "jax_ppo_peer"],
    "jax": ["jax_peer", "jax_ppo_peer"],
    "optax": ["jax_ppo_peer"],
    "matplotlib": ["plot"],
    "torch": ["script", "torchrl_peer", "torchwrap_side"],
}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"tests.benchmarks.{name}")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module.split(".")[0]


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_at_home_alone(library):
    assert sorted(path.stem for path in BENCHMARKS.glob("*.py") if library in imports(path)) == HOMES[library]


def test_the_worker_runs_on_an_interpreter_with_nothing_installed():
    import sys

    assert set(imports(BENCHMARKS / "worker.py")) <= sys.stdlib_module_names


# What runs in a process of its own


def test_a_worker_says_what_a_step_takes(load):
    measure = load("measure")
    case = measure.Case("torchwrap", "scripted", {"num_envs": 3, "transforms": ["FrameStackObservation"]})
    worker = measure.Worker(case, measure.Options(threads=1))
    first, figure = worker.answer(), worker.turn(0.001)
    worker.close()
    assert first["build_seconds"] > 0
    assert first["bytes"] > 2 * 3 * 4 * 17 * 4  # four frames of three envs go out twice
    assert 0 < figure < 1e6
    assert worker.process.returncode == 0


def test_a_side_that_is_not_there_is_skipped_and_the_others_are_not(load, monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(measure, "LIBRARIES", ())
    here = measure.Row(measure.Case("torchwrap", "copy", {"num_bytes": 1000}))
    there = measure.Row(measure.Case("missing", "step", {}))
    figures = measure.compare({"here": here, "there": there}, measure.Options(seconds=0.001, repeats=1), ["there"])
    assert figures["here"]["us"] > 0
    assert figures["there"]["skipped"].startswith("ModuleNotFoundError")


def test_a_turn_counts_every_step_and_waits_for_all(load, monkeypatch):
    worker, clock, queued = load("worker"), [0.0], []

    def call():
        queued.append(0.002)
        clock[0] += 0.001

    def wait():
        clock[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(worker.time, "perf_counter", lambda: clock[0])
    timed = worker.Timed(call, steps=4, wait=wait)
    assert worker.turn(timed, 0.0195) == pytest.approx((1000 + 2000) / 4)
    assert clock[0] == pytest.approx(20 * 0.003)


MEMORY = """
import json
import numpy as np
from tests.benchmarks import worker

def function(num_envs):
    np.ones((num_envs, 4000), np.uint8)  # as a compiler, gone before the first step
    kept = np.ones((num_envs, 1000), np.uint8)
    return worker.Timed(lambda: np.ones((num_envs, 500), np.uint8).sum() + kept[0, 0])

print(json.dumps(worker.memory(function, {"num_envs": 100_000})))
"""


def test_memory_is_what_an_env_keeps():
    """In a process of its own, as a worker is: what other tests freed would be taken instead of new memory."""
    run = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(run.stdout)
    assert figures["bytes_per_env"] == pytest.approx(1000, rel=0.1)
    assert figures["peak_bytes_per_env"] == pytest.approx(1500, rel=0.1)


# What is made of the answers


class Fake:
    """A worker that answers from a list, and notes when."""

    turns: list[str]

    def __init__(self, case, options, what="time", **variables):
        self.name, self.times = case.function, list(case.arguments["times"])

    def answer(self):
        return {"build_seconds": 1.0, "bytes": 3000}

    def turn(self, seconds):
        self.turns.append(self.name)
        return self.times.pop(0)

    def close(self):
        assert not self.times


@pytest.fixture
def compare(load, monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(Fake, "turns", [], raising=False)
    monkeypatch.setattr(measure, "Worker", Fake)

    def compare(references=(), repeats=3, **rows):
        rows = {
            name: measure.Row(*(measure.Case("side", f"{name}{place}", {"times": times}) for place, times in enumerate(row)))
            for name, row in rows.items()
        }
        return measure.compare(rows, measure.Options(repeats=repeats), references)

    return compare


def test_figures_are_lowest_and_medians_of_rounds_without_the_first(compare):
    figures = compare(
        ["ours"],
        ours=([0, 30, 35, 50], [0, 10, 25, 20]),  # whole, bare: 20, 10, 30 added
        theirs=([0, 70, 75, 60], [0, 10, 15, 20]),  # 60, 60, 40
    )
    assert figures["ours"] == {
        **{"us": 20, "us_median": 20, "whole_us": 30, "bare_us": 10, "build_seconds": 1},
        **{"bytes": 3000, "gigabytes_per_second": 0.1},
    }
    assert figures["theirs"]["us"] == 50 and figures["theirs"]["us_median"] == 60
    assert figures["theirs"]["ratio"] == {"ours": 2.5}
    assert figures["theirs"]["ratio_median"] == {"ours": 3}


def test_everybody_takes_turns_within_a_round(compare):
    compare(repeats=1, a=([1, 1], [1, 1]), b=([1, 1],))
    assert Fake.turns == ["a0", "a1", "b0"] * 2


def test_no_ratio_to_less_than_nothing(compare):
    figures = compare(["ours"], ours=([0, 9, 9, 9], [0, 10, 10, 10]), theirs=([0, 3, 3, 3],))
    assert "ratio" not in figures["theirs"]


def test_threads_and_interpreters_reach_the_process(load):
    measure = load("measure")
    options = measure.Options(threads=3, pythons={"jax": "/there/python"})
    assert measure.environment(options)["OMP_NUM_THREADS"] == measure.environment(options)["NPROC"] == "3"
    assert measure.Case("jax_ppo", "solve_cartpole", {}).command(options, "call")[0] == "/there/python"
    assert measure.Case("torchrl", "scripted", {}).command(options, "time")[0] != "/there/python"


def test_a_table_has_a_line_for_each_row(load):
    figures = {
        "glue/ours/64": {"us": 12.34, "ratio_median": {}},
        "glue/theirs/64": {"us": 1234.5, "ratio_median": {"ours": 100.04}},
        "glue/nobody/64": {"skipped": "ImportError: no"},
    }
    report = load("report")
    lines = report.table("title", figures, {"added": "us", **report.ratios(["ours"])}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["added", "x", "ours"],
        ["ours", "64", "12.3"],
        ["theirs", "64", "1,234", "100"],
        ["nobody", "64", "skipped:", "ImportError:", "no"],
    ]


def test_a_seed_that_never_solves_counts_in_the_median(load):
    names = ("env_steps_to_target", "seconds_to_target", "wall_seconds_to_target", "steps_per_second")
    seeds = {f"ppo/sb3/{seed}": dict.fromkeys(names, value) for seed, value in enumerate((3, None, 1))}
    assert load("ppo")._medians(seeds)["ppo/sb3/median"] == dict.fromkeys(names, 3)
    seeds["ppo/sb3/0"] = dict.fromkeys(names)
    assert load("ppo")._medians(seeds)["ppo/sb3/median"] == dict.fromkeys(names)


def test_command_line_writes_figures_and_a_picture(load, monkeypatch, tmp_path, capsys):
    seen = []

    def run(options):
        seen.append(options)
        return {"memory/ours/8": {"bytes_per_env": 5.0}}

    monkeypatch.setattr(load("memory"), "run", run)
    path, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--suite", "memory", "--num-envs", "8", "--no-compile", "--json", str(path), "--plot", str(picture)]
    load("__main__").main(arguments)
    figures = json.loads(path.read_text())
    assert set(figures) == {"machine", "memory/ours/8"}
    assert figures["machine"]["versions"]["torchwrap"]["torch"]
    assert seen[0].num_envs == [8] and not seen[0].compile
    assert "5.00" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_what_was_measured(load):
    plot = load("plot")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    figures = {f"cartpole/gymnax-scan-{k}/{n}": {"steps_per_second": n * k} for k in (16, 128) for n in (1024, 64)}
    figures["cartpole/torchrl/64"] = {"skipped": "ImportError"}
    plot._lines(axes, figures, "cartpole", plot.CARTPOLE, "steps_per_second")
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[64, 1024], [1024, 16384]]


# The sides


def ends(name, answer):
    if name == "torchwrap_side":
        return int(answer["next", "done"].sum())
    return int((answer[2] | answer[3]).sum() if name == "gymnasium_peer" else answer[2].sum())


@pytest.mark.parametrize("side", ["torchwrap_side", "gymnasium_peer", "sb3_peer"])
@pytest.mark.parametrize("whole", [False, True])
def test_ends_are_spread_evenly(load, side, whole):
    if side == "sb3_peer":
        pytest.importorskip("stable_baselines3")
    transforms = (whole if side == "sb3_peer" else load("glue").THREE) if whole or side == "sb3_peer" else None
    timed = load(side).scripted(40, transforms)
    found = [ends(side, timed.call()) for _ in range(200)]
    first = found.index(1)  # ours has taken some steps, to see what it hands out
    assert found == [int(step % 5 == first) for step in range(200)]


def test_gymnasium_sits_out_the_step_after_an_end(load):
    env = load("gymnasium_peer").Script(1)
    env.reset()
    rewards = [env.step(None)[1].item() for _ in range(203)]
    assert rewards == [*range(1, 201), 0, 1, 2]


def test_what_changes_moves_twice(load):
    side, env = load("torchwrap_side"), load("script").scripted(5)
    td = env.reset(seed=0)
    actions = load("script").actions(5)
    buffers = sum(buffer.nbytes for buffer in env.buffers())
    assert side._state(env, lambda: env.step(td.set("action", actions))) == buffers + env.elapsed.nbytes


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


def test_every_transform_is_measured(load):
    from torchwrap import transforms as T

    bases = {"ActionTransform", "Compose", "ObservationTransform", "RewardTransform", "RunningMeanStd", "Transform"}
    bases.add("PassiveEnvChecker")  # for what is not in a hurry
    assert set(load("each").TRANSFORMS) == set(load("torchwrap_side").TRANSFORMS) == set(T.__all__) - bases
    with_peer = {name for name, known in load("each").TRANSFORMS.items() if known}
    assert with_peer == set(load("gymnasium_peer").WRAPPERS)
    assert set(load("number").EIGHT) <= set(T.__all__)


@pytest.mark.parametrize("side", ["torchwrap_side", "gymnasium_peer"])
def test_every_transform_steps(load, side):
    theirs, see = side == "gymnasium_peer", load("each").SEE
    for name in load("gymnasium_peer").WRAPPERS if theirs else load("torchwrap_side").TRANSFORMS:
        load(side).scripted(3, [name], **({} if theirs else {"see": see.get(name, "numbers")})).call()


def test_images_are_the_same_on_both_sides(load):
    ours = load("torchwrap_side").atari(3).call()[0]["next", "observation"]
    theirs = load("opencv_peer").atari(3, "formula")
    for _ in range(4):
        stacked = theirs.call()
    np.testing.assert_array_equal(ours.numpy(), stacked)


def test_gymnax_side_counts_every_observation_once_and_stacks(load):
    pytest.importorskip("gymnax")
    jax, peer, n = importlib.import_module("jax"), load("jax_peer"), 8
    stacked, bare = peer.CartPole(n, stack=True), peer.CartPole(n, stack=False)
    ours, raw = (jax.jit(env.reset)(jax.random.key(0)) for env in (stacked, bare))
    step_ours, step_raw = jax.jit(stacked.step), jax.jit(bare.step)
    seen, ended = [np.asarray(raw.observation)], 0
    for step in range(60):
        action = jax.numpy.full(n, step % 2)
        frames = ours.observation
        (ours, got), (raw, real) = step_ours(ours, action), step_raw(raw, action)
        done = np.asarray(real["done"])
        ended += done.sum()
        seen += [np.asarray(real["next_observation"]), np.asarray(raw.observation)[done]]
        every = np.concatenate(seen)
        assert int(ours.statistics.count) == len(every)

        def normal(value, every=every):
            return np.clip((value - every.mean(0)) / np.sqrt(every.var(0) + 1e-8), -10, 10)

        close = dict(rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(got["next_observation"][:, -1], normal(real["next_observation"]), **close)
        np.testing.assert_array_equal(got["next_observation"][:, :-1], frames[:, 1:])
        begun = np.asarray(ours.observation)[done]
        np.testing.assert_allclose(begun, normal(np.asarray(raw.observation)[done])[:, None].repeat(4, 1), **close)
        np.testing.assert_array_equal(np.asarray(ours.observation)[~done], np.asarray(got["next_observation"])[~done])
    assert ended > n and math.isfinite(float(ours.observation.sum()))


def test_two_samples_of_one_kind_and_of_two(load):
    two_samples, random = load("soak").two_samples, np.random.default_rng(0)
    one, same, shifted = random.normal(size=2000), random.normal(size=3000), random.normal(0.2, size=3000)
    assert two_samples(one, same) > 0.01 and two_samples(one, one) == 1 and two_samples(one, shifted) < 1e-6
    # By hand: half of the one is below all of the other, n m / (n + m) = 50, distance 0.5: 2 exp(-2 * 50 * 0.25), and less.
    halves = np.concatenate([np.zeros(50), np.ones(50)])
    assert two_samples(halves, np.ones(100)) == pytest.approx(2 * np.exp(-25), rel=1e-6)


def test_soak_steps_and_sums_on_both_sides(load):
    ours = load("torchwrap_side").soak("Pendulum-v1", num_envs=4, steps=1000, episodes=6)
    assert ours["steps"] == 1000 and ours["finite"] == 1 and len(ours["returns"]) == 6
    theirs = load("gymnasium_peer").returns("Pendulum-v1", 3)["returns"]
    assert all(-2000 < total < -500 for total in ours["returns"] + theirs)


@pytest.mark.parametrize("pool", [None, 0, 8])
def test_expensive_first_states_step(load, pool):
    settling = load("torchwrap_side").settling(3, pool)
    settling.call()


def test_curves_are_drawn(load, tmp_path):
    row = {"goal": 1, "curve": [[0, 0.0], [10, 2.0]]}
    load("plot").draw_learning({"learn/A/1": row, "learn/A/2": row, "learn/B/1": row}, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
