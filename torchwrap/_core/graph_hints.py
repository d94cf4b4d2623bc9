"""Hints to Inductor, which change how a traced graph computes a value, and nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchwrap._core.tracing import is_tracing

# PyTorch 2.11's Inductor cannot view bytes as bools.
_STORES_BYTES = torch.__version__ >= "2.13"
_GROUP, _MIN_ROWS, _NARROW = 64, 65536, range(2, 16)
_LANES, _WIDE, _MANY = 16, 64, 16384  # floats in the widest vector; components; numbers


def realize(tensor: Tensor) -> Tensor:
    """Forces Inductor to compute a tensor once, instead of again for each element that it is combined with.

    Inductor realizes the input of a view by strides. Bools pass through floats, because on CPUs it loads and stores a vector
    of bools element by element. Outside a trace the tensor is returned as it is, and in an export, which other compilers read.
    """
    if not is_tracing(tensor) or torch.compiler.is_exporting():
        return tensor
    if tensor.dtype == torch.bool and not tensor.is_cuda:
        return realize(tensor.float()) != 0
    return tensor.as_strided(tensor.shape, tensor.stride())


def realize_on_cpu(rows: Tensor) -> Tensor:
    """As `realize`, but only on the CPU. On CUDA, to compute a few operators twice costs less than another kernel."""
    return rows if rows.is_cuda else realize(rows)


def realize_on_cuda(rows: Tensor) -> Tensor:
    """As `realize`, but only on CUDA, for long computations: Inductor's own choice would be the middle of one."""
    return realize(rows) if rows.is_cuda else rows


def side_by_side(rows: Tensor) -> Tensor:
    """Rows to be summed. In a graph on the CPU, many narrow ones lie next to each other, so that they fill whole vectors."""
    width = rows.shape[1:].numel()
    group = _LANES // math.gcd(width, _LANES)
    many = width < _WIDE and rows.numel() >= _MANY  # to write fewer costs more than it saves
    if rows.is_cuda or group == 1 or not (many and is_tracing(rows) and len(rows) % group == 0):
        return rows
    return realize(rows).reshape(-1, group * width)


def sum_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """The sum of at least one row of this shape, in the dtype of the rows, which can lie `side_by_side`.

    In a graph on CUDA, many narrow rows are first summed side by side. Of a few columns, Inductor makes thousands of partial
    sums, which a single block adds in a hundred rounds.
    """
    number, width = len(rows), rows[0].numel()
    if rows.is_cuda and is_tracing(rows) and number % _GROUP == 0 and number >= _MIN_ROWS and width in _NARROW:
        rows = rows.view(-1, _GROUP, *rows.shape[1:]).sum(0, dtype=rows.dtype)
    total = rows.sum(0, dtype=rows.dtype)
    return total if total.shape == shape else total.view(-1, *shape).sum(0, dtype=rows.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """Bools as uint8 0 and 1, in a graph through floats (see `realize`). Other tensors are returned as they are."""
    if tensor.dtype != torch.bool:
        return tensor
    return tensor.float().to(torch.uint8) if is_tracing(tensor) else tensor.view(torch.uint8)


def stored(tensor: Tensor) -> Tensor:
    """A result of a graph. Bools are stored as bytes, if Inductor can."""
    if tensor.dtype == torch.bool and not _STORES_BYTES:
        return tensor.float() != 0
    return as_bytes(tensor).view(tensor.dtype)
