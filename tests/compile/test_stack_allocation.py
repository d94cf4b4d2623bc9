"""Small tensors of a graph lie on the stack, but no result, nor what another operator than a kernel reads or writes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_cpp_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from torchwrap._compile.inductor import compile_graph

WEIGHT = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)


def realized(tensor: Tensor) -> Tensor:
    return tensor.as_strided(tensor.shape, tensor.stride())  # as in graph_hints


def kernels(x: Tensor, state: Tensor) -> list[Tensor]:
    mean = realized(x.mean(0))
    state.copy_(realized(mean.cos()) + state)
    return [realized((x - mean).exp()).sum(1), mean.flip(0) * state]


def a_result_in_the_memory_of_a_dead_tensor(x: Tensor, state: Tensor) -> list[Tensor]:
    first = realized(x.sin())
    total = first.sum()
    return [realized(total + state.expand_as(x)).relu() * 2]


def a_scan(x: Tensor, state: Tensor) -> list[Tensor]:
    ranks = realized(x.gt(0).int()).cumsum(0)
    return [ranks * 2, state + realized(x.abs()).amax(0)]


def products_side_by_side(x: Tensor, state: Tensor) -> list[Tensor]:
    hidden = realized((x + state).tanh())
    both = torch.cat([hidden @ WEIGHT, hidden @ WEIGHT.T], 1)
    return [both.amax(1), realized(both.softmax(1)).sum(0)]


def a_view(x: Tensor, state: Tensor) -> list[Tensor]:
    doubled = x * 2
    return [doubled[1:], doubled.sum(0) + state, (doubled.amax(0) * state).sum()]


def an_operator_through_python(x: Tensor, state: Tensor) -> list[Tensor]:
    weights = realized((x > state).double())
    return [torch.linalg.matrix_rank(weights[:4]), (weights.amax(0) * state).sum()]


def a_scatter(x: Tensor, state: Tensor) -> list[Tensor]:
    table = realized(x.sum(0)).repeat(2)
    table.index_put_((x.gt(0).sum(0) % 16,), state + 1)
    table.index_add_(0, x.argmax(1) % 8, realized(x.cos()).sum(1))
    return [table, table.sum()]


def a_branch(x: Tensor, state: Tensor) -> list[Tensor]:
    means = torch.cond(x.sum() > 0, lambda x: realized(x.mean(0)).exp(), lambda x: realized(x.amax(0)).exp(), (x,))
    return [realized(means * 2).sum(), means - state]


ON_THE_STACK = [kernels, a_scan, products_side_by_side]
FUNCTIONS = [*ON_THE_STACK, a_result_in_the_memory_of_a_dead_tensor, a_view, an_operator_through_python, a_scatter, a_branch]


@pytest.mark.parametrize(
    ("function", "num_rows"),
    [*[(function, 4) for function in FUNCTIONS], pytest.param(kernels, 30_000, marks=pytest.mark.full)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_results_are_right_and_stay_so(function, num_rows, tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(num_rows, 8, dtype=torch.float64, generator=generator) for _ in range(3)]
    state, expected_state = torch.zeros(2, 8, dtype=torch.float64)
    graph = make_fx(function)(inputs[0], state.clone())

    def run() -> list[list[Tensor]]:
        compiled = compile_graph(graph, [inputs[0], state], "inductor", {}, device=state.device, num_rows=num_rows)
        return [list(compiled(x, state)) for x in inputs]

    with fresh_cache(dir=tmp_path):
        given, code = run_and_get_cpp_code(run)
    expected = [function(x, expected_state) for x in inputs]
    assert_close(given, expected, rtol=1e-9, atol=1e-9)  # the later calls, and what they left on the stack, changed nothing
    assert_close(state, expected_state, rtol=1e-9, atol=1e-9)
    assert len({leaf.untyped_storage().data_ptr() for leaves in given for leaf in leaves}) == 3 * len(given[0])
    numbers = [int(number) for number in re.findall(r"_storage\[(\d+)\]", code)]
    assert sum(numbers) <= 100 * 1024 and (numbers or function not in ON_THE_STACK)
