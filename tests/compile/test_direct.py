"""Direct calls of compiled graphs: the kernels without PyTorch's wrappers, with the same results and side effects."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from torchwrap._compile.direct import Compiled
from torchwrap._compile.inductor import compile_graph

TABLE = torch.arange(4.0)


def function(x, state):  # without annotations, whose names no cache can pickle
    state.add_(x.sum())
    return [x @ TABLE + state, x * 2]


def compiled_function() -> Compiled:
    graph = make_fx(function)(torch.zeros(3, 4), torch.zeros(3))
    example = [torch.zeros(3, 4), torch.zeros(3)]
    return compile_graph(graph, example, "inductor", {}, device=torch.device("cpu"), num_rows=3)


def call(compiled: Compiled, x: Tensor, state: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return list(compiled(x, state))


def forbid(*tensors):
    raise AssertionError("the wrappers were called")


@pytest.mark.parametrize("is_cached", [False, True])
def test_kernels_are_called_directly_from_the_second_call_on(is_cached, tmp_path):
    with fresh_cache(dir=tmp_path):
        compiled = [compiled_function() for _ in range(1 + is_cached)][-1]
        state, expected_state = torch.zeros(3), torch.zeros(3)
        for number in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            results = call(compiled, x, state)
            torch.testing.assert_close(results, function(x, expected_state))
            torch.testing.assert_close(state, expected_state)
            assert state._version == number + 1  # as autograd counts it, and as the wrappers do
            assert x._version == 0
            compiled.wrapped = forbid


KEEPS_CACHED = pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch before 2.13 keeps graphs that its cache had")


@pytest.mark.parametrize("is_cached", [False, pytest.param(True, marks=KEEPS_CACHED)])
def test_the_graph_that_was_compiled_is_not_kept(is_cached, tmp_path):
    with fresh_cache(dir=tmp_path):
        before = large_graphs()
        kept = [compiled_function() for _ in range(1 + is_cached)]
        call(kept[-1], torch.zeros(3, 4), torch.zeros(3))
        assert large_graphs() == before


def large_graphs():
    gc.collect()
    return sum(type(value) is torch.fx.Graph and len(value.nodes) > 2 for value in gc.get_objects())


@pytest.mark.parametrize(
    "context",
    [torch.enable_grad, lambda: torch.autocast("cpu"), lambda: torch.profiler.profile(acc_events=True)],
    ids=["gradients", "autocast", "profile"],
)
def test_wrappers_are_called_where_they_do_something(context, tmp_path):
    with fresh_cache(dir=tmp_path):
        compiled, state, calls = compiled_function(), torch.zeros(3), []
        call(compiled, torch.ones(3, 4), state)
        assert compiled.passes_on
        wrapped = compiled.wrapped
        compiled.wrapped = lambda *tensors: calls.append(1) or wrapped(*tensors)
        with torch.no_grad(), context():
            weight = torch.ones(3, 4, requires_grad=True)
            results = list(compiled(weight, state))
        assert calls == [1] and state.tolist() == [24.0] * 3
        assert not any(result.requires_grad for result in results)
        assert results[0].dtype == torch.float32 and results[0].tolist() == [30.0] * 3


class Inner:
    """Stands for Inductor's graph, in which `run` computes."""

    def __init__(self, run) -> None:
        self.current_callable = run


def double(given):
    results = [tensor * 2 for tensor in given]
    given.clear()  # as Inductor's do
    return results


WRAPPERS = {
    "passes on": lambda inner, *tensors: inner.current_callable(list(tensors)),
    "adds a constant": lambda inner, *tensors: inner.current_callable([TABLE, *tensors]),
    "swaps inputs": lambda inner, *tensors: inner.current_callable(list(tensors[::-1])),
    "copies an input": lambda inner, *tensors: inner.current_callable([tensors[0].clone(), *tensors[1:]]),
    "views a result": lambda inner, *tensors: [result.view(2) for result in inner.current_callable(list(tensors))],
    "leaves out a result": lambda inner, *tensors: inner.current_callable(list(tensors))[1:],
    "calls twice": lambda inner, *tensors: [inner.current_callable(list(tensors)) for _ in range(2)][1],
    "never calls": lambda inner, *tensors: [tensor * 2 for tensor in tensors],
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_direct_only_if_the_wrappers_pass_on_what_they_get(kind):
    inner = Inner(double)
    compiled = Compiled(lambda *tensors: WRAPPERS[kind](inner, *tensors), [inner], ())
    given = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    expected = WRAPPERS[kind](Inner(double), *given)
    for _ in range(3):
        torch.testing.assert_close(call(compiled, *given), list(expected), rtol=0, atol=0)
        assert inner.current_callable is double
    assert compiled.passes_on == (kind in ("passes on", "adds a constant"))


def test_an_error_in_the_first_call_leaves_the_graph_as_it_was():
    inner = Inner(double)
    compiled = Compiled(lambda *tensors: WRAPPERS["passes on"](inner, *tensors), [inner], ())
    with pytest.raises(TypeError):
        call(compiled, None, None)
    assert inner.current_callable is double and not compiled.passes_on
    assert [result.tolist() for result in call(compiled, torch.ones(1), torch.ones(1))] == [[2.0], [2.0]]


@pytest.mark.parametrize("number", [0, 2])
def test_other_backends_and_unknown_graphs_keep_their_wrappers(number):
    compiled = Compiled(lambda *tensors: [tensor + 1 for tensor in tensors], [Inner(double)] * number, ())
    for _ in range(2):
        assert [result.item() for result in call(compiled, torch.ones(()), torch.zeros(()))] == [2.0, 1.0]
    assert Compiled(torch.add)(torch.ones(()), torch.ones(())) == 2  # a function without attributes
