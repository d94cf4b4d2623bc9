"""tests/benchmarks: every side steps the same env, figures are computed as README.md says, and tables come from the file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from torchwrap import RowMask
from torchwrap import transforms as T

ROOT = Path(__file__).parents[1]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"tests.benchmarks.{name}")


# Sides.


def ends(name, answer):
    if name == "torchwrap_side":
        return int(answer["next", "done"].sum())
    return int((answer[2] | answer[3]).sum() if name == "gymnasium_peer" else answer[2].sum())


@pytest.mark.parametrize("side", ["torchwrap_side", "gymnasium_peer", "sb3_peer"])
@pytest.mark.parametrize("whole", [False, True])
def test_ends_of_episodes_are_spread_evenly(load, side, whole):
    if side == "sb3_peer":
        pytest.importorskip("stable_baselines3")
    transforms = (whole if side == "sb3_peer" else load("glue").THREE) if whole or side == "sb3_peer" else None
    timed = load(side).scripted(40, transforms)
    found = [ends(side, timed.call()) for _ in range(200)]
    first = found.index(1)  # torchwrap's side has taken some steps, to measure what it returns
    assert found == [int(step % 5 == first) for step in range(200)]


def test_torch_and_numpy_scripts_are_equal(load):
    script = load("script")
    env, array = script.scripted(3), script.NumpyScript(3)
    env.reset(seed=0)
    array.reset(np.ones(3, bool))
    env.elapsed.copy_(script.elapsed(3))
    array.elapsed[:] = script.elapsed(3).numpy()
    for _ in range(200):
        successor = env._step(script.actions(3))
        for key, value in zip(("observation", "reward", "terminated", "truncated"), array.step(), strict=True):
            np.testing.assert_array_equal(successor[key].reshape(value.shape).numpy(), value)
        ended = successor["terminated"] | successor["truncated"]
        env._reset(RowMask(ended))
        array.reset(ended.squeeze(-1).numpy())
    peer = load("gymnasium_peer").Script(1)
    peer.reset()
    assert [peer.step(None)[1].item() for _ in range(203)] == [*range(1, 201), 0, 1, 2]  # the step after an end is a reset


def test_compiled_rows_compile_as_declared(load, monkeypatch):
    side, found = load("torchwrap_side"), []
    monkeypatch.setattr(side.torch, "compile", lambda step, **options: found.append(options) or step)
    monkeypatch.setattr(side.tw, "compile", lambda target, **options: found.append(options) or target)
    side.scripted(3, [], way="torch.compile").call()
    side.scripted(3, [], way="compiled").call()
    for num_envs in (256, 257, 1025):
        side.cartpole(num_envs, None, "compiled", num_steps=2).call()
    assert found == [{"fullgraph": True}, {}, *({"unroll": steps} for steps in (4, 2, 1))]


def test_every_transform_steps(load):
    bases = {"ActionTransform", "Compose", "ObservationTransform", "RewardTransform", "RunningMeanStd", "Transform"}
    others = {
        "PassiveEnvChecker",
        "ObservationGroups",
        "PolicyState",
        "atari",
    }  # these do not change what an agent learns from
    each = load("each")
    assert set(each.TRANSFORMS) == set(T.__all__) - bases - others and set(each.EIGHT) <= set(each.TRANSFORMS)
    for name in each.TRANSFORMS:
        load("torchwrap_side").scripted(3, [name], space=each.SPACES.get(name, "numbers")).call()
    load("torchwrap_side").atari(2).call()


def test_gymnax_side_counts_every_observation_once_and_stacks_it(load):
    pytest.importorskip("gymnax")
    jax, peer, n = importlib.import_module("jax"), load("jax_peer"), 8
    envs = [peer.CartPole(n, stack) for stack in (True, False)]
    ours, raw = (jax.jit(env.reset)(jax.random.key(0)) for env in envs)
    steps = [jax.jit(env.step) for env in envs]
    observations, ended, close = [np.asarray(raw.observation)], 0, dict(rtol=1e-3, atol=1e-3)

    def normal(value):
        every = np.concatenate(observations)
        return np.clip((value - every.mean(0)) / np.sqrt(every.var(0) + 1e-8), -10, 10)

    for step in range(60):
        action, frames = jax.numpy.full(n, step % 2), ours.observation
        (ours, got), (raw, real) = steps[0](ours, action), steps[1](raw, action)
        done, initial = np.asarray(real["done"]), np.asarray(raw.observation)
        ended += done.sum()
        observations += [np.asarray(real["next_observation"]), initial[done]]
        assert int(ours.statistics.count) == sum(map(len, observations))
        np.testing.assert_allclose(got["next_observation"][:, -1], normal(real["next_observation"]), **close)
        np.testing.assert_array_equal(got["next_observation"][:, :-1], frames[:, 1:])
        stacked = np.asarray(ours.observation)
        np.testing.assert_allclose(stacked[done], normal(initial[done])[:, None].repeat(4, 1), **close)
        np.testing.assert_array_equal(stacked[~done], np.asarray(got["next_observation"])[~done])
    assert ended > n


@pytest.mark.full
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_worker_answers_in_the_instruction_set_of_the_options(load, monkeypatch, isa):
    measure = load("measure")
    if isa not in measure.instruction_sets():
        pytest.skip(f"needs a processor with {isa}")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # a value from outside does not count
    found = measure.ask(measure.Case("torchwrap", "capabilities", {}), measure.Options(isa=isa))
    assert found["torch"] == isa.upper() and found["inductor"].split()[0] == isa
    assert any(name in found["numpy"] for name in (("X86_V4", "AVX512") if isa == "avx512" else ("X86_V3", "AVX2")))
    case = measure.Case("torchwrap", "scripted", {"num_envs": 3, "transforms": ["FrameStackObservation"]})
    rows = {"here": measure.Row(case), "there": measure.Row(measure.Case("missing", "step", {}))}
    figures = measure.compare(rows, measure.Options(isa=isa, seconds=0.001, repeats=1), ["there"])
    assert figures["here"]["us"] > 0 and figures["here"]["bytes"] > 2 * 3 * 4 * 17 * 4  # four frames go out twice
    assert figures["there"]["skipped"].startswith("ModuleNotFoundError")


# Measurement.


def test_turn_counts_every_step_and_waits_for_the_device(load, monkeypatch):
    worker, clock, queued = load("worker"), [0.0], []

    def call():
        queued.append(0.002)
        clock[0] += 0.001

    def wait():
        clock[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(worker.time, "perf_counter", lambda: clock[0])
    assert worker.turn(worker.Timed(call, steps=4, wait=wait), 0.1) == pytest.approx((1000 + 2000) / 4)
    assert clock[0] == pytest.approx(40 * 0.003)  # it waits in between, so that not a second of queued work is left at the end


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
        return measure.Row(*(measure.Case("side", f"{name}{i}", {"times": one, **more}) for i, one in enumerate(times)))

    rows = {
        "ours": row("ours", [0, 30, 35, 50], [0, 10, 25, 20]),  # whole, bare: 20, 10, 30 added
        "theirs": row("theirs", [0, 70, 75, 60], [0, 10, 15, 20]),  # 60, 60, 40
        "noise": row("noise", [0, 9, 9, 9], [0, 10, 10, 10]),  # nothing is divided by a negative time
    }
    figures = measure.compare(rows, measure.Options(repeats=3), ["ours", "noise"])
    assert figures["ours"] == {
        **{"us": 20, "us_median": 20, "whole_us": 30, "bare_us": 10, "build_seconds": 1},
        **{"bytes": 3000, "gigabytes_per_second": 0.1},
    }
    assert figures["theirs"]["us"] == 50 and figures["theirs"]["us_median"] == 60
    assert figures["theirs"]["ratio"] == {"ours": 2.5} and figures["theirs"]["ratio_median"] == {"ours": 3}
    assert Fake.turns == ["ours0", "ours1", "theirs0", "theirs1", "noise0", "noise1"] * 4
    rows = {"ours": row("ours", [0, 3], device="cuda"), "peer": row("peer", [0, 3])}
    figures = measure.compare(rows, measure.Options(repeats=1, device="cuda"))
    assert figures["ours"]["us"] == 3 and figures["peer"] == {"skipped": "runs on the CPU only"}


def test_settings_and_environment_follow_the_options(load, monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 8)
    for flags, isas in (("sse avx2", ["avx2"]), ("avx2 avx512vl", ["avx2", "avx512"]), ("asimd", ["native"])):
        monkeypatch.setattr(measure.Path, "read_text", lambda path, flags=flags: f"flags : {flags}\n")
        assert measure.settings(None, None) == [(isa, threads) for isa in isas for threads in (1, 2)]
    assert measure.settings(["avx512"], [4, 8]) == [("avx512", 4), ("avx512", 8)]
    options = measure.Options(isa="avx2", threads=3, pythons={"jax": "/there/python"})
    found = measure.environment(options)
    assert found["OMP_NUM_THREADS"] == found["NPROC"] == "3" and found["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "ATEN_CPU_CAPABILITY" not in measure.environment(measure.Options(isa="avx512"))
    assert measure.Case("jax", "cartpole", {}).command(options, "time")[0] == "/there/python"


def test_command_line_measures_the_settings_and_continues_its_file(load, monkeypatch, tmp_path, capsys):
    command, path, calls = load("__main__"), tmp_path / "figures.json", []
    monkeypatch.setattr(load("measure").os, "cpu_count", lambda: 2)
    for module in (load("measure"), command):
        monkeypatch.setattr(module, "instruction_sets", lambda: ("avx2", "avx512"))
    here = {"processor": "P", "cores": 2, "device": "cpu", "num_steps": 16, "versions": {}}
    monkeypatch.setattr(command, "machine", lambda options: here)

    def suite(name):
        return lambda options: calls.append((name, options.setting)) or {f"{name}/envpool/8": {"steps_per_second": 5.0}}

    for name in ("glue", "scaling"):
        monkeypatch.setitem(command.SUITES, name, suite(name))
    command.main(["--suite", "glue", "--json", str(path)])
    command.main(["--suite", "scaling", "--json", str(path), "--plot", str(tmp_path / "all.png")])
    command.main(["--suite", "scaling", "--isa", "avx2", "--threads", "1", "--json", str(path)])
    every = ("avx2-1", "avx2-2", "avx512-1", "avx512-2")
    assert calls == [*(("glue", setting) for setting in every), ("scaling", "avx512-2"), ("scaling", "avx2-1")]
    keys = ["machine", "commits", *(f"{name}/envpool/8/{setting}" for name, setting in calls)]
    assert sorted(json.loads(path.read_text())) == sorted(keys) and "5.00" in capsys.readouterr().out
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("all.png", "scaling.png"))
    here["processor"] = "another"
    with pytest.raises(SystemExit):
        command.main(["--suite", "glue", "--json", str(path)])


# Figures, tables and plots.


def test_claims_are_the_worst_of_all_settings_and_never_rounded_up(load):
    report, comparisons = load("report"), {("this", "that"): ("glue/theirs", "ours")}
    figures = {"machine": {}, "each/theirs/64/avx2-2": {}}
    for setting, (ratio, median) in {"avx2-1": (4.0, 2.397), "avx512-1": (2.5, 30.0)}.items():
        figures[f"glue/theirs/64/{setting}"] = {"ratio": {"ours": ratio}, "ratio_median": {"ours": median}}
    assert report.claims(figures, comparisons, [64]) == ["| this | that | 2.3 |"]
    figures["glue/theirs/64/avx512-1"]["ratio"]["ours"] = 0.0999
    assert report.claims(figures, comparisons, [64]) == ["| this | that | 0.099 |"]
    figures["glue/other/64/avx512-2"] = {}  # a setting in which the row is missing
    assert report.claims(figures, comparisons, [64]) == ["| this | that | ? |"]


def test_median_counts_seeds_that_are_never_solved(load):
    names = ("env_steps_to_target", "seconds_to_target", "wall_seconds_to_target", "steps_per_second")
    seeds = {f"ppo/sb3/{seed}": dict.fromkeys(names, value) for seed, value in enumerate((3, None, 1))}
    assert load("ppo").medians(seeds)["ppo/sb3/median"] == dict.fromkeys(names, 3)


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


def test_scores_train_what_is_named_or_missing_and_keep_it(load, monkeypatch, tmp_path):
    scores, trained = load("scores"), []
    monkeypatch.setattr(scores, "FILE", tmp_path / "scores.json")
    monkeypatch.setattr(scores, "machine", lambda options: {"processor": "one"})
    monkeypatch.setattr(scores, "train", lambda *key: trained.append("/".join(map(str, key))) or run(100.0 * key[-1]))
    scores.main(["--env-id", "Ant-v5", "--seed", "2"])
    scores.main([])
    runs = json.loads((tmp_path / "scores.json").read_text())["runs"]
    assert trained[0] == "torchwrap/Ant-v5/2" and list(runs) == trained and len(runs) == 3 * (6 + 2)
    assert runs["sb3/Hopper-v5/3"] == run(300.0) and (tmp_path / "scores.png").exists()


def test_project_readme_has_the_scores(load):
    scores, text = load("scores"), " ".join((ROOT / "README.md").read_text().split())
    runs = json.loads(scores.FILE.read_text())["runs"]
    for name in ("Hopper", "Walker2d", "HalfCheetah", "InvertedPendulum", "Humanoid"):
        found = [run["final_mean_return"] for key, run in runs.items() if key.startswith(f"torchwrap/{name}-v5/")]
        peer, published = "CleanRL " * (name == "Hopper"), scores.PUBLISHED[f"{name}-v5"].mean
        assert f"{np.mean(found):,.0f} on {name} ({peer}{published:,.0f})" in text
