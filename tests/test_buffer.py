from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from torchwrap.buffer import Buffer, Module, Submodule


class Counter(nn.Module):
    count = Buffer()

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        return x + self.count


def reassigned(module):
    module.count = torch.ones(2)
    return module


def assigned(module):
    module.load_state_dict({"count": torch.ones(2)}, assign=True)
    return module


@pytest.mark.parametrize(
    "change",
    [lambda m: m, lambda m: m.double(), copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), reassigned, assigned],
)
def test_it_is_the_buffer_of_the_module(change):
    module = change(Counter())
    assert module.count is dict(module.named_buffers())["count"] is module._buffers["count"]
    assert list(module.state_dict()) == ["count"]


class Pair(nn.Module):
    first = Submodule()


@pytest.mark.parametrize("change", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_submodule_is_that_of_the_module_and_another_may_take_its_place(change):
    module = Pair()
    assert not hasattr(module, "first")
    module.first = nn.Linear(1, 1)
    module = change(module)
    assert module.first is module._modules["first"] and list(module.state_dict()) == ["first.weight", "first.bias"]
    module.first = nn.Identity()
    assert isinstance(module.first, nn.Identity)


def test_substituted_buffers_are_read():
    given = torch.func.functional_call(Counter(), {"count": torch.ones(2)}, (torch.zeros(2),))
    assert given.tolist() == [1, 1]


def test_it_compiles_and_is_written_in_place():
    module = Counter()
    compiled = torch.compile(lambda: module.count.add_(1).clone(), fullgraph=True, backend="aot_eager")
    assert [compiled().tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert module.count.tolist() == [3, 3]


def test_a_buffer_that_was_not_made_is_missing():
    module = Counter()
    del module.count
    assert not hasattr(module, "count")
    with pytest.raises(AttributeError, match="count"):
        _ = module.count


def test_rows_are_buffers_that_are_not_saved_and_are_known_by_name_once():
    module = Module()
    for number in (1.0, 2.0):  # an env may be set up again
        module.register_rows("elapsed", torch.full((3, 1), number))
    module.register_rows("length", torch.zeros(3))
    assert module._names_of_rows == ("elapsed", "length") and module.elapsed.tolist() == [[2], [2], [2]]
    assert not module.state_dict() and set(dict(module.named_buffers())) == {"elapsed", "length"}
    assert copy.deepcopy(module)._names_of_rows == module._names_of_rows and Module()._names_of_rows == ()
