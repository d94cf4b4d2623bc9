from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchwrap import tree
from torchwrap.graph import Graph


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("unread", torch.zeros(3))


def make(backend):
    module = Counter()

    def function(td, unused):
        module.total.add_(td["x"])
        return td.copy().set("sum", module.total.clone()).set("negative", td["x"] < 0), td["flag"]

    return Graph(function, [module], backend=backend, options={}, num_rows=3)


def given():
    values = {"x": torch.tensor([1.0, -2.0, 3.0]), "flag": torch.tensor([True, False, True]), "last": torch.ones(3)}
    return TensorDict(values, [3]), torch.ones(7)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_a_function_gives_as_it_got_it_is_the_same_tensor(backend):
    graph = make(backend)
    for number in (1, 2):
        td, unused = given()
        result, flag = graph(td, unused)
        assert all(result[key] is td[key] for key in ("x", "flag", "last")) and flag is td["flag"]
        assert result["sum"].tolist() == [number, -2 * number, 3 * number]
        assert result["negative"].tolist() == [False, True, False]


def test_what_no_operator_reads_is_no_input(monkeypatch):
    seen, lookup = [], torch._dynamo.lookup_backend

    def backend(name):
        return lambda graph, example: seen.append(len(example)) or lookup(name)(graph, example)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", backend)
    graph = make("eager")
    assert [graph(*given())[0]["sum"].tolist() for _ in range(2)] == [[1, -2, 3], [2, -4, 6]]
    assert seen == [2]  # the total and x


def test_it_is_hidden_from_those_who_compile_the_caller_and_from_nobody_else(monkeypatch):
    seen = []

    def backend(name):
        def compile(graph, example):
            def hidden(*tensors):
                seen.append("hidden")
                return graph(*tensors)

            hidden._torchdynamo_orig_callable = lambda *tensors: seen.append("bare") or graph(*tensors)
            return hidden

        return compile

    monkeypatch.setattr(torch._dynamo, "lookup_backend", backend)
    run, tensors = make("eager")._find(given())
    run.run(tensors)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    run.run(tensors)
    assert seen == ["bare", "hidden"]


def test_leaves_come_by_the_names_of_their_keys_and_the_structure_tells_what_can_stand_for_what():
    one, two, three = torch.ones(2), torch.zeros(2), torch.arange(6).view(2, 3).t()
    found = []
    structure = tree.flatten(({"b": one, "a": {("k", "l"): two}}, three), found)
    assert [leaf.tolist() for leaf in found] == [two.tolist(), one.tolist(), three.tolist()] and found[2].is_contiguous()
    assert structure == tree.flatten(({"a": {("k", "l"): one}, "b": two}, one), [])
    assert structure != tree.flatten(({"a": one, "b": two}, one), [])
    built = tree.builder(({"a": {("k", "l"): two}, "b": one}, three))(iter(found))
    assert built[0]["b"] is one and built[0]["a"]["k", "l"] is two
