"""Kernels for AVX2 and AVX-512, which use `vectors.h`, compute what PyTorch's operators compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_cpp_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from torchwrap._compile.inductor import compile_graph

pytestmark = pytest.mark.compiles

CAPABILITIES = {256: ("AVX2", "AVX512"), 512: ("AVX512",)}  # of processors whose vectors have so many bits
BATCH, WIDTHS = 6, (1, 2, 3, 4, 5, 7, 8, 9, 12, 17)
INT64 = torch.tensor([0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**32) - 1, 2**62 + 12345, -(2**63), 2**63 - 1, 0x123456789ABCDEF])


@pytest.fixture(params=CAPABILITIES)
def compiled(request, monkeypatch):
    """Compiles a function, where a header that is missing or code that does not fit is an error."""
    if torch.backends.cpu.get_cpu_capability() not in CAPABILITIES[request.param]:
        pytest.skip(f"needs a processor with vectors of {request.param} bits")
    from torchwrap._compile import toolchain

    options = {"cpp.simdlen": request.param, "cpp.enable_loop_tail_vec": True}
    monkeypatch.setattr(toolchain._Entry, "wait", lambda entry: entry.slim())

    def compile(function, *example, **keywords):
        graph, keywords = make_fx(function)(*example), {"device": torch.device("cpu"), "num_rows": BATCH, **keywords}
        return compile_graph(graph, list(example), "inductor", options, **keywords)

    with fresh_cache():
        yield compile


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(1, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_rows_of_any_width_are_read_and_written_whole(dtype, compiled):
    def function(mask: Tensor, *tables: Tensor) -> list[Tensor]:
        results = []
        for rows, shared in zip(tables[::2], tables[1::2], strict=True):
            kept = torch.where(mask, rows, shared)
            results += [kept, kept.sum(0), kept.float() * 2 + shared.double(), (kept > 40).to(torch.uint8)]
            results.append(kept & shared if dtype == torch.bool else torch.div(shared, rows, rounding_mode="floor"))
        return results

    tables = [table for width in WIDTHS for table in (numbers((BATCH, width), dtype), numbers((width,), dtype))]
    mask = torch.arange(BATCH).unsqueeze(1) % 3 == 0
    kernels = compiled(function, mask, *tables)
    for result, expected in zip(kernels(mask, *tables), function(mask, *tables), strict=True):
        assert_close(result, expected, rtol=0, atol=0)


def test_neighbours_of_a_row_are_not_written(compiled):
    def function(table: Tensor, rows: Tensor) -> list[Tensor]:
        table[:, 3:8].copy_(rows * 2)
        return []

    table, rows = torch.full((BATCH, 11), -1.0), torch.arange(5.0 * BATCH).view(BATCH, 5)
    compiled(function, table, rows)(table, rows)
    assert (table[:, 3:8] == rows * 2).all() and (table[:, :3] == -1).all() and (table[:, 8:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8], ids=str)
def test_streaming_stores_write_rows_of_any_width_at_any_address(dtype, compiled):
    from torchwrap._compile import kernels, toolchain

    def function(*tables: Tensor) -> list[Tensor]:
        for target, rows in zip(tables[::2], tables[1::2], strict=True):
            target.copy_(rows + 1)
        return []

    shapes = [(BATCH, width) for width in (*WIDTHS, 16, 64)] + [(BATCH * 16,)]
    memories, tables = [], []
    for offset in (0, 1, 4, 7):
        for shape in shapes:
            memories.append(torch.zeros(offset + 2048, dtype=dtype))
            rows = numbers(shape, dtype)
            tables += [memories[-1][offset : offset + rows.numel()].view(shape), rows]
    compute, code = run_and_get_cpp_code(lambda: compiled(function, *tables, streamed=range(0, len(tables), 2)))
    compute(*tables)
    for memory, target, rows in zip(memories, tables[::2], tables[1::2], strict=True):
        assert_close(target, rows + 1, rtol=0, atol=0)
        assert memory.count_nonzero() == rows.numel()
    calls = toolchain._STORE.findall(code)
    assert calls and all(mark == kernels.MARK for _, mark in calls)


def test_products_and_shifts_of_int64_have_all_64_bits(compiled):
    def function(x: Tensor, y: Tensor, by: Tensor, number: Tensor) -> list[Tensor]:
        low, z = x & 0xFFFFFFFF, number.float()  # next to floats, a vector of int64 is two of them
        products = [x * y, x * 0xD2511F53, low * 0xD2511F53, low * (y & 0xFFFFFFFF), y * -3, (low * 0xCD9E8D57) >> 32]
        # A round of Philox, of whose numbers the lower halves alone are multiplied; here the others are results as well.
        mixed = ((low * 0xD2511F53) >> 32) ^ x ^ y
        kept = mixed & 0xFFFFFFFF
        products += [mixed, kept, kept * 0xCD9E8D57, kept * y, mixed * kept, mixed & y, (mixed & y) * low, kept ^ y]
        products += [mixed >> 32, kept >> 3, (kept ^ x) & 0xFFFFFFFF, (x & 0xFF00000000) * 3, x & y & 0xFFFFFFFF]
        return [*products, x >> 32, x >> by, x >> 0, x >> 63, y >> 5, (x * y) >> 31, (x * y).float() + z]

    x, y = (table.flatten() for table in torch.meshgrid(INT64, INT64, indexing="ij"))
    by, number = torch.arange(len(x)) % 64, torch.arange(len(x))
    for result, expected in zip(
        compiled(function, x, y, by, number)(x, y, by, number), function(x, y, by, number), strict=True
    ):
        assert_close(result, expected, rtol=0, atol=0)


def test_kernels_call_the_header(compiled):
    from torchwrap._compile import toolchain

    x, y = torch.rand(BATCH), torch.arange(BATCH)
    _, code = run_and_get_cpp_code(lambda: compiled(lambda x, y: [x * 2, (y * 3) >> 32], x, y)(x, y))
    for pattern in (toolchain._LOAD, toolchain._STORE, toolchain._CONSTANT):
        assert pattern.search(code), "Inductor calls them by other names"
