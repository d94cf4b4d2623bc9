import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchwrap as tw
from torchwrap import RowMask
from torchwrap import transforms as T
from torchwrap._core import rows
from torchwrap.testing import ScriptedEnv

MASKS = [
    torch.tensor(mask, dtype=torch.bool) for mask in ([1, 0, 1, 0], [0, 1, 0, 1], [0] * 4, [1] * 4)
]


@pytest.fixture(params=["host", "graph"])
def path(request, monkeypatch):
    """Runs a test with masks that the host reads, and with masks that it cannot read, as in a graph."""
    if request.param == "graph":
        monkeypatch.setattr(rows, "is_host_readable", lambda _: False)
    return request.param


def test_indices_and_any_are_known_to_the_host_only(path):
    for tensor in MASKS:
        for mask in (RowMask(tensor), RowMask(tensor.unsqueeze(1))):
            assert (
                mask.tensor.tolist()
                == mask.column.flatten().tolist()
                == mask.numpy().tolist()
                == tensor.tolist()
            )
            assert mask.column.shape == (4, 1)
            assert (
                mask.indices is None
                if path == "graph"
                else mask.indices.tolist() == tensor.nonzero().flatten().tolist()
            )
            assert mask.any() == (path == "graph" or bool(tensor.any()))
            assert RowMask(tensor, synchronize=True).any() == bool(tensor.any())


def test_traced_mask_is_not_read():
    def function(flags, buffer):
        mask = RowMask(flags)
        assert mask.indices is None and mask.any()
        mask.fill_(buffer, 7)
        return buffer.clone()

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = make_fx(function)(
            *map(mode.from_tensor, (torch.tensor([True, False]), torch.zeros(2)))
        )
    assert graph(torch.tensor([False, True]), torch.zeros(2)).tolist() == [0, 7]


def test_writes_reach_set_rows_only(path):
    for tensor in MASKS:
        for shape in ((), (1,), (2, 3)):
            for dtype in (torch.float32, torch.int64, torch.bool):
                mask = RowMask(tensor)
                value, before = (
                    torch.ones(4, *shape, dtype=dtype),
                    torch.zeros(4, *shape, dtype=dtype),
                )
                filled, assigned, scattered = before.clone(), before.clone(), before.clone()
                mask.fill_(filled, 1)
                mask.assign_(assigned, value)
                mask.scatter_(scattered, mask.gather(value))
                expected = torch.stack(
                    [
                        value[row] if chosen else before[row]
                        for row, chosen in enumerate(tensor.tolist())
                    ]
                )
                for given in (filled, assigned, scattered, mask.where(value, before)):
                    assert torch.equal(given, expected) and given.dtype == dtype


def test_writes_reach_every_leaf_of_a_tensordict(path):
    for tensor in MASKS:
        one, two = (
            TensorDict({"a": torch.full((4,), n), "b": {"c": torch.full((4, 2), n)}}, [4])
            for n in (1.0, 2.0)
        )
        mixed = RowMask(tensor).where(one, two)
        RowMask(tensor).assign_(two, one)
        assert (
            mixed["a"].tolist()
            == two["a"].tolist()
            == [1.0 if chosen else 2.0 for chosen in tensor.tolist()]
        )
        assert torch.equal(mixed["b", "c"], two["b", "c"])


def test_apply_computes_set_rows_only_if_the_host_knows_them(path):
    for tensor in MASKS:
        mask, value, seen = RowMask(tensor), torch.arange(8.0).view(4, 2), []
        given = mask.apply(
            lambda rows, seen=seen: seen.append(rows) or rows.sum(1, keepdim=True), value
        )
        assert torch.equal(
            seen[0], value if path == "graph" else value[tensor]
        ) and given.shape == (4, 1)
        assert torch.equal(given[tensor], value.sum(1, keepdim=True)[tensor])
        kept = seen[0] if mask.gathered is None else seen[0][mask.gathered]
        assert torch.equal(kept, value[tensor])


def test_spread_returns_gathered_rows_to_their_rows(path):
    for tensor in MASKS:
        mask, value = RowMask(tensor), torch.arange(1.0, 9).view(4, 2)
        for each in (value, value[:, 0]):
            spread = mask.spread(mask.gather(each))
            assert torch.equal(spread[tensor], each[tensor]) and spread.shape == each.shape
            assert path == "graph" or not spread[~tensor].any()
        nested = TensorDict({"a": value, "b": {"c": value[:, 0]}}, [4])
        spread = mask.spread(nested if path == "graph" else nested[tensor])
        assert (
            spread.shape == spread["b"].shape == (4,) and (spread[tensor] == nested[tensor]).all()
        )


def test_full_mask_has_every_row(path):
    assert RowMask.full(4).tensor.tolist() == [True] * 4


def test_mask_of_the_caller_is_read_at_each_reset():
    env = tw.TransformedEnv(
        ScriptedEnv(3, (1,), None), T.NormalizeObservation(), T.FrameStackObservation(2)
    )
    env.reset()
    mask = torch.tensor([True, False, False])
    for row in range(3):
        env.step(env.reset(mask=mask).set("action", env.sample_action()))
        mask.copy_(torch.arange(3) == row)
        assert (
            env.reset(mask=mask)["observation"].diff(dim=1).flatten().eq(0).tolist()
            == mask.tolist()
        )
