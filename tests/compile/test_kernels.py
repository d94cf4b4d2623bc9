"""Kernels: streaming stores of what nobody reads soon, and functions of a few loops, with the same results."""

from __future__ import annotations

import re

import pytest
import torch
from catalogue import Push, cartpole, stack
from gymnasium.spaces import Box
from helpers import AOT, INDUCTOR, assert_same
from torch._inductor.utils import fresh_cache, run_and_get_cpp_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import collector, graph, host_reset
from torchwrap._compile.inductor import compile_graph
from torchwrap.testing import ScriptedEnv

STEPS = 5


@pytest.fixture
def streamed(monkeypatch):
    """The number of streamed inputs of each graph, where every storage counts as large."""
    numbers = []

    def compile_graph(*arguments, **keywords):
        numbers.append(len(keywords["streamed"]))
        return compile_graph_of_torchwrap(*arguments, **keywords)

    compile_graph_of_torchwrap = graph.compile_graph
    monkeypatch.setattr(graph, "compile_graph", compile_graph)
    monkeypatch.setattr(collector, "_LARGE_STORAGE", 0)
    return numbers


def assert_collects_the_same(eager, compiled, tolerance):
    expected, roots = [], []
    for collect in (eager, compiled):
        td, seen = collect.env.reset(seed=0), []
        for _ in range(3):
            data, td = collect(td)
            seen.append(data)
        expected.append(torch.cat(seen, 1))
        roots.append(td)
    assert_same(*expected, tolerance)
    assert_same(*roots, tolerance)
    return expected[0]["next"]


# Observation, action, and `next`: observation, reward, info, terminated, truncated, done.
@pytest.mark.parametrize(
    ("policy", "per_step"),
    [(None, 8), (lambda td: td["observation"][:, :6].clamp(-1, 1), 7)],
    ids=["random", "reads the observation"],
)
def test_what_no_step_reads_is_streamed(policy, per_step, streamed):
    make = lambda: tw.Collector(ScriptedEnv(4, (17,)), policy, STEPS)  # noqa: E731
    following = assert_collects_the_same(make(), tw.compile(make(), backend="aot_eager", unroll=2), AOT)
    assert following["done"].any() and streamed == [2 * per_step, per_step]  # two steps, and the last one


def test_only_collectors_with_a_large_storage_stream(streamed, monkeypatch):
    monkeypatch.setattr(collector, "_LARGE_STORAGE", 2**20)
    for num_steps in (10, 10_000):
        tw.compile(tw.Collector(ScriptedEnv(4), None, num_steps), backend="aot_eager")
    tw.compile(ScriptedEnv(4), backend="aot_eager")
    assert streamed == [0, 8, 0]


def test_an_observation_that_the_host_resets_is_not_streamed(streamed, monkeypatch):
    monkeypatch.setattr(host_reset, "_MIN_HOST_RESET_ENVS", 1)
    make = lambda: tw.Collector(ScriptedEnv(32, (17,)), None, STEPS)  # noqa: E731
    following = assert_collects_the_same(make(), tw.compile(make(), backend="aot_eager"), AOT)
    assert following["done"].any() and streamed == [7, 0, 0]  # and the two graphs of a reset


@pytest.mark.compiles
@pytest.mark.parametrize("unroll", [1, 2])
def test_random_rollout_of_cartpole_matches_eager(unroll, streamed):
    eager, compiled = (tw.Collector(cartpole(), None, 60) for _ in range(2))
    following = assert_collects_the_same(eager, tw.compile(compiled, unroll=unroll), INDUCTOR)
    assert following["terminated"].any() and max(streamed) == 9 * unroll  # and return and length of the episode


@pytest.mark.compiles
def test_statistics_of_every_second_component_match_eager(streamed):
    def make():  # two columns of a row of four are summed as a tile, by a kernel of its own class
        positions = T.TransformObservation(lambda observation: observation[:, ::2], Box(-10, 10, (2,)))
        return tw.Collector(tw.TransformedEnv(tw.make("CartPole-v1", 64), positions, T.NormalizeObservation()), None, 30)

    assert assert_collects_the_same(make(), tw.compile(make(), unroll=1), INDUCTOR)["done"].any()


@pytest.mark.full
def test_a_function_has_a_few_loops_only_in_graphs_of_torchwrap():
    def sums(*tables):
        return [table.sum() for table in tables]

    def functions(compute):
        with fresh_cache():
            results, code = run_and_get_cpp_code(lambda: compute(*tables))
        assert_close(results, sums(*tables))
        return len(set(re.findall(r"\bvoid\s+(cpp_fused_\w+)\(", code)))

    def compiled(*tables):
        return compile_graph(trace, list(tables), "inductor", {}, device=torch.device("cpu"), num_rows=1)(*tables)

    tables = [torch.rand(size) for size in range(32, 132)]
    trace = make_fx(sums)(*tables)
    ours, theirs = functions(compiled), functions(torch.compile(sums, options={"cpp_wrapper": True}))
    assert 4 < ours < 20 and theirs == 1


@pytest.mark.full
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("name", ["Compose of seven", "Compose of two"])
def test_rollout_of_a_policy_matches_eager(name, unroll, streamed):
    eager, compiled = (tw.Collector(stack(name), Push(), STEPS) for _ in range(2))
    assert assert_collects_the_same(eager, tw.compile(compiled, unroll=unroll), INDUCTOR)["done"].any()
    assert max(streamed) > 0
