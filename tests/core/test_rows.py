"""RowMask: one path for masks that the host reads and for masks in a graph."""

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchwrap import RowMask
from torchwrap._core import rows

MASKS = {
    "even": [1, 0, 1, 0],
    "odd": [0, 1, 0, 1],
    "none": [0] * 4,
    "all": [1] * 4,
}
VALUE = torch.arange(1.0, 9).view(4, 2)


@pytest.fixture(params=MASKS)
def tensor(request):
    return torch.tensor(MASKS[request.param], dtype=torch.bool)


@pytest.fixture(params=["host", "graph"])
def path(request, monkeypatch):
    """Masks that the host reads, and masks that it cannot read, as in a graph."""
    if request.param == "graph":
        monkeypatch.setattr(rows, "is_host_readable", lambda _: False)
    return request.param


@pytest.mark.parametrize(
    "shape",
    [(4,), (4, 1)],
    ids=str,
)
def test_mask_is_known_in_every_form(tensor, path, shape):
    mask = RowMask(tensor.view(shape))
    assert torch.equal(mask.tensor, tensor)
    assert torch.equal(mask.column, tensor.unsqueeze(1))
    assert mask.numpy().tolist() == tensor.tolist()


def test_indices_and_any_are_known_to_the_host_only(tensor, path):
    mask = RowMask(tensor)
    if path == "graph":
        assert mask.indices is None and mask.any()
    else:
        assert torch.equal(
            mask.indices,
            tensor.nonzero().flatten(),
        )
        assert mask.any() == bool(tensor.any())
    assert RowMask(tensor, synchronize=True).any() == bool(tensor.any())


def test_traced_mask_is_not_read():
    def function(flags, buffer):
        mask = RowMask(flags)
        assert mask.indices is None and mask.any()
        mask.fill_(buffer, 7)
        return buffer.clone()

    flags = torch.tensor([True, False])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = make_fx(function)(
            mode.from_tensor(flags),
            mode.from_tensor(torch.zeros(2)),
        )
    assert graph(~flags, torch.zeros(2)).tolist() == [0, 7]


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (2, 3)],
    ids=str,
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.int64, torch.bool],
    ids=str,
)
def test_writes_reach_set_rows_only(tensor, path, shape, dtype):
    mask = RowMask(tensor)
    value = torch.ones(4, *shape, dtype=dtype)
    before = torch.zeros_like(value)
    filled = before.clone()
    mask.fill_(filled, 1)
    assigned = before.clone()
    mask.assign_(assigned, value)
    scattered = before.clone()
    mask.scatter_(scattered, mask.gather(value))
    chosen = [value[row] if tensor[row] else before[row] for row in range(4)]
    for result in (
        filled,
        assigned,
        scattered,
        mask.where(value, before),
    ):
        assert torch.equal(result, torch.stack(chosen)) and result.dtype == dtype


def test_apply_computes_set_rows_only_if_the_host_knows_them(tensor, path):
    mask = RowMask(tensor)
    seen = []

    def total(rows):
        seen.append(rows)
        return rows.sum(1, keepdim=True)

    result = mask.apply(total, VALUE)
    assert torch.equal(
        seen[0],
        VALUE if path == "graph" else VALUE[tensor],
    )
    assert result.shape == (4, 1)
    assert torch.equal(
        result[tensor],
        VALUE[tensor].sum(1, keepdim=True),
    )
    kept = seen[0] if mask.mask_of_gathered is None else seen[0][mask.mask_of_gathered]
    assert torch.equal(kept, VALUE[tensor])


@pytest.mark.parametrize(
    "value",
    [VALUE, VALUE[:, 0]],
    ids=["2-dim", "1-dim"],
)
def test_spread_returns_gathered_rows_to_their_rows(tensor, path, value):
    mask = RowMask(tensor)
    spread = mask.spread(mask.gather(value))
    assert torch.equal(spread[tensor], value[tensor]) and spread.shape == value.shape
    if path == "host" and tensor.any():
        assert (spread[~tensor] == value[tensor][0]).all()  # in the space, where 0 may not be


def test_spread_returns_nested_rows_to_their_rows(tensor, path):
    nested = TensorDict(
        {
            "a": VALUE,
            "b": {"c": VALUE[:, 0]},
        },
        [4],
    )
    spread = RowMask(tensor).spread(nested if path == "graph" else nested[tensor])
    assert spread.shape == spread["b"].shape == (4,)
    assert (spread[tensor] == nested[tensor]).all()
