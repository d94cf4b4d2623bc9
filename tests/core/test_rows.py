from __future__ import annotations

import contextlib

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchwrap as tw
from torchwrap import RowMask
from torchwrap import transforms as T
from torchwrap._core import row_mask
from torchwrap._core.rows import tracing
from torchwrap.testing import ScriptedEnv

MASKS = {
    "some": [True, False, True, False],
    "some, not the first": [False, True, False, True],
    "none": [False] * 4,
    "all": [True] * 4,
}


@pytest.fixture(params=["host", "graph"])
def path(request, monkeypatch):
    """Runs a test with masks that the host reads, and with masks that it cannot read, as in a graph."""
    if request.param == "graph":
        monkeypatch.setattr(row_mask, "is_host_readable", lambda _: False)
    return request.param


@pytest.fixture(params=MASKS)
def mask(request):
    return torch.tensor(MASKS[request.param])


def test_indices_are_known_to_the_host_only(path, mask):
    rows = RowMask(mask)
    expected = [index for index, chosen in enumerate(mask.tolist()) if chosen]
    assert rows.indices is None if path == "graph" else rows.indices.tolist() == expected
    assert RowMask(mask.unsqueeze(1)).tensor.tolist() == mask.tolist() == RowMask(mask).column.flatten().tolist()


def test_any_is_false_only_if_the_host_knows(path, mask):
    assert RowMask(mask).any() == (path == "graph" or bool(mask.any()))


def test_synchronize_reads_a_mask_on_any_device(mask, monkeypatch):
    monkeypatch.setattr(row_mask, "is_host_readable", lambda _: False)
    assert RowMask(mask, synchronize=True).any() == bool(mask.any())
    assert RowMask(mask).numpy().tolist() == mask.tolist()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_writes_reach_set_rows_only(path, mask, shape, dtype):
    rows = RowMask(mask)
    value, before = torch.ones(4, *shape, dtype=dtype), torch.zeros(4, *shape, dtype=dtype)
    expected = torch.stack([value[row] if chosen else before[row] for row, chosen in enumerate(mask.tolist())])
    filled, assigned, scattered = before.clone(), before.clone(), before.clone()
    rows.fill_(filled, 1)
    rows.assign_(assigned, value)
    rows.scatter_(scattered, value if rows.indices is None else value[rows.indices])
    for given in (filled, assigned, scattered, rows.where(value, before)):
        assert torch.equal(given, expected) and given.dtype == dtype


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_append_to_ring_replaces_the_oldest(shape, traced):
    ring, order = torch.zeros(4, 3, *shape), torch.arange(3)
    expected = [torch.zeros(4, *shape)] * 3
    for number in range(5):
        value = number + torch.arange(1.0, 5).view(4, *(1,) * len(shape)).expand(4, *shape)
        expected = [*expected[1:], value]
        with tracing() if traced else contextlib.nullcontext():
            row_mask.append_to_ring_(ring, order, value)
        assert torch.equal(ring.index_select(1, order), torch.stack(expected, 1))


def test_writes_reach_every_leaf_of_a_tensordict(path, mask):
    rows = RowMask(mask)
    one, two = (TensorDict({"a": torch.full((4,), fill), "b": {"c": torch.full((4, 2), fill)}}, [4]) for fill in (1.0, 2.0))
    mixed = rows.where(one, two)
    rows.assign_(two, one)
    assert mixed["a"].tolist() == two["a"].tolist() == [1.0 if chosen else 2.0 for chosen in mask.tolist()]
    assert torch.equal(mixed["b", "c"], two["b", "c"])


def test_apply_computes_set_rows_only_if_the_host_knows_them(path, mask):
    value, seen = torch.arange(8.0).view(4, 2), []
    given = RowMask(mask).apply(lambda rows: seen.append(len(rows)) or rows.sum(1, keepdim=True), value)
    assert seen == [4 if path == "graph" else int(mask.sum())] and given.shape == (4, 1)
    assert torch.equal(given[mask], value.sum(1, keepdim=True)[mask])


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_spread_returns_gathered_rows_to_their_places(path, mask, shape):
    value = torch.arange(1.0, 5).view(4, *(1,) * len(shape)).expand(4, *shape)
    rows = RowMask(mask)
    gathered = rows.gather(value)
    assert torch.equal(gathered, value if path == "graph" else value[mask])
    spread = rows.spread(gathered)
    assert torch.equal(spread[mask], value[mask]) and spread.shape == value.shape
    assert path == "graph" or not spread[~mask].any()


def test_and_keeps_rows_that_meet_a_condition(path, mask):
    condition = torch.tensor([True, True, False, False])
    for given in (RowMask(mask) & condition, RowMask(mask) & condition.unsqueeze(1)):
        assert given.tensor.tolist() == (mask & condition).tolist()


def test_append_to_full_ring_wraps_around_in_order_and_leaves_out_what_is_not_kept(path):
    ring, count = torch.zeros(5 + 4), torch.zeros(1, dtype=torch.int64)
    expected: list[float] = []
    for turn, chosen in enumerate([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 1]]):
        value, kept = torch.arange(4.0) + 10 * turn + 1, torch.arange(4) != turn % 4
        mask = torch.tensor(chosen, dtype=torch.bool)
        rows = RowMask(mask)
        rows.append_(ring, 5, count, rows.gather(value), rows.gather(kept.unsqueeze(1)))
        expected += value[mask & kept].tolist()
    latest = torch.arange(len(expected) - 5, len(expected)) % 5
    assert ring[latest].tolist() == expected[-5:] and int(count) == len(expected) == 7


def test_traced_mask_is_not_read():
    def function(flags, buffer):
        rows = RowMask(flags)
        assert rows.indices is None and rows.any()
        rows.fill_(buffer, 7)
        return buffer.clone()

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [mode.from_tensor(torch.tensor([True, False])), mode.from_tensor(torch.zeros(2))]
        graph = make_fx(function)(*inputs)
    assert graph(torch.tensor([False, True]), torch.zeros(2)).tolist() == [0, 7]


def test_mask_of_the_caller_is_read_at_each_reset():
    env = tw.TransformedEnv(ScriptedEnv(3, (1,), None), T.NormalizeObservation(), T.FrameStackObservation(2))
    env.reset()
    mask = torch.tensor([True, False, False])
    for row in range(3):
        env.step(env.reset(mask=mask).set("action", env.sample_action()))
        mask.copy_(torch.arange(3) == row)
        assert env.reset(mask=mask)["observation"].diff(dim=1).flatten().eq(0).tolist() == mask.tolist()


def test_full_and_inverted_masks_are_complements(path, mask):
    assert RowMask.full(4).tensor.tolist() == [True] * 4 and len(RowMask.full(4)) == 4
    inverted = ~RowMask(mask)
    assert inverted.tensor.tolist() == [not chosen for chosen in mask.tolist()]
    assert (inverted.indices is None) == (path == "graph")


def test_gathered_is_the_mask_of_what_apply_computes(path, mask):
    rows, computed = RowMask(mask), []
    rows.apply(lambda values: computed.append(values) or values, torch.arange(4))
    kept = computed[0] if rows.gathered is None else computed[0][rows.gathered]
    assert kept.tolist() == torch.arange(4)[mask].tolist()


@pytest.mark.parametrize("unset", [[True, True], [False, True], [False, False]])
def test_set_first_writes_unset_components_of_the_first_set_row(path, mask, unset):
    rows = torch.arange(8.0).view(4, 2) + 1
    for given, counted in ((None, rows), (mask, rows[mask])):
        buffer = torch.zeros(2)
        row_mask.set_first_(buffer, rows, torch.tensor(unset), given)
        assert buffer.tolist() == [float(counted[0][i]) if len(counted) and unset[i] else 0 for i in range(2)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_set_first_leaves_components_that_are_not_finite(value):
    rows = torch.tensor([[value, 2.0], [3.0, 4.0]])
    buffer = torch.zeros(2)
    row_mask.set_first_(buffer, rows, torch.tensor([True, True]))
    assert buffer.tolist() == [0, 2]
