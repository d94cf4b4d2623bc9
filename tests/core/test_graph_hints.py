from __future__ import annotations

import pytest
import torch

from torchwrap._core import graph_hints
from torchwrap._core.rows import tracing


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA, because a machine without a GPU traces no graph for one."""

    is_cuda = True


@pytest.mark.parametrize("number", [1, 64, 65536, 65536 + 64, 65537])
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (17,)], ids=str)
def test_sum_rows_in_a_graph_on_cuda_is_the_sum(number, shape):
    rows = torch.arange(number * torch.Size(shape).numel(), dtype=torch.float64).view(number, *shape)  # exact in any order
    with tracing():
        total = graph_hints.sum_rows(rows.as_subclass(OnCuda), rows.shape[1:])
        assert torch.equal(total.as_subclass(torch.Tensor), rows.sum(0))


@pytest.mark.parametrize("number", [1, 1024, 1025, 65536])
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (17,), (64,)], ids=str)
def test_sum_of_rows_side_by_side_is_the_sum(number, shape):
    rows = torch.arange(number * torch.Size(shape).numel(), dtype=torch.float64).view(number, *shape)
    assert graph_hints.side_by_side(rows) is rows
    with tracing():
        assert torch.equal(graph_hints.sum_rows(graph_hints.side_by_side(rows), rows.shape[1:]), rows.sum(0))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1024, 17), (64, 272)),
        ((4096, 4), (1024, 16)),
        ((16384, 1), (1024, 16)),
        ((8192, 2, 3), (1024, 48)),
        ((1024, 4), (1024, 4)),  # few numbers
        ((16385, 17), (16385, 17)),  # not a multiple of 16
        ((1024, 84, 84), (1024, 84, 84)),  # wide
        ((4096, 16), (4096, 16)),  # as wide as a vector
    ],
    ids=str,
)
def test_many_narrow_rows_lie_side_by_side_in_whole_vectors(shape, expected):
    with tracing():
        assert graph_hints.side_by_side(torch.zeros(shape)).shape == expected
        on_cuda = torch.zeros(shape).as_subclass(OnCuda)
        assert graph_hints.side_by_side(on_cuda) is on_cuda


def test_sum_rows_keeps_the_dtype():
    assert graph_hints.sum_rows(torch.ones(3, 4, dtype=torch.int32), torch.Size([4])).dtype == torch.int32


@pytest.mark.parametrize(("number", "steps"), [(1024, 1), (65536, 2)])
def test_sum_rows_in_a_graph_on_cuda_sums_many_rows_in_two_steps(number, steps, monkeypatch):
    sums = []
    monkeypatch.setattr(OnCuda, "sum", lambda rows, *_, **__: sums.append(rows.shape) or torch.Tensor.sum(rows, 0))
    with tracing():
        graph_hints.sum_rows(torch.zeros(number, 4).as_subclass(OnCuda), torch.Size([4]))
    assert len(sums) == steps


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
@pytest.mark.parametrize("hint", ["realize", "realize_on_cpu", "realize_on_cuda"])
@pytest.mark.parametrize("kind", [torch.Tensor, OnCuda])
def test_hints_change_no_value_and_views_only_where_they_say(hint, dtype, kind):
    values = torch.tensor([[0, 1], [1, 0]]).to(dtype).as_subclass(kind)
    assert getattr(graph_hints, hint)(values) is values
    with tracing():
        hinted = getattr(graph_hints, hint)(values)
    applies = hint == "realize" or (hint == "realize_on_cuda") == (kind is OnCuda)
    assert (hinted is not values) == applies and hinted.dtype == dtype and bool((hinted == values).all())
