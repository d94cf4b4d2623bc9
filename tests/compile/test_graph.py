"""Graph: a traced function of tensors, and when it is traced again."""

from __future__ import annotations

import pytest
import torch
from catalogue import NUM_ENVS, stack
from helpers import AOT, after, assert_same, mostly_full, play
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap._compile.graph import Graph
from torchwrap._compile.reads import Reads
from torchwrap._core import nested
from torchwrap.testing import ScriptedEnv


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("unread", torch.zeros(3))


def counting_graph(backend):
    module = Counter()

    def function(td, unused):
        module.total.add_(td["x"])
        return td.copy().set("sum", module.total.clone()).set("negative", td["x"] < 0), td["flag"]

    return Graph(function, Reads(({"module": module}, "module")), backend=backend, options={}, num_rows=3)


def arguments():
    values = {"x": torch.tensor([1.0, -2.0, 3.0]), "flag": torch.tensor([True, False, True]), "last": torch.ones(3)}
    return TensorDict(values, [3]), torch.ones(7)


@pytest.mark.parametrize("backend", mostly_full(["eager", "aot_eager", "inductor"], "eager", "aot_eager"))
def test_tensor_passed_through_is_the_same_object(backend):
    graph = counting_graph(backend)
    for number in (1, 2):
        td, unused = arguments()
        result, flag = graph(td, unused)
        assert all(result[key] is td[key] for key in ("x", "flag", "last")) and flag is td["flag"]
        assert result["sum"].tolist() == [number, -2 * number, 3 * number]
        assert result["negative"].tolist() == [False, True, False]


def test_tensor_that_no_operator_reads_is_no_input(monkeypatch):
    seen, lookup = [], torch._dynamo.lookup_backend

    def backend(name):
        return lambda graph, example: seen.append(len(example)) or lookup(name)(graph, example)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", backend)
    graph = counting_graph("eager")
    assert [graph(*arguments())[0]["sum"].tolist() for _ in range(2)] == [[1, -2, 3], [2, -4, 6]]
    assert seen == [2]  # the total and x


def test_graph_is_hidden_from_dynamo_only_while_the_caller_is_compiled(monkeypatch):
    seen = []

    def backend(name):
        def compile(graph, example):
            def hidden(*tensors):
                seen.append("hidden")
                return graph(*tensors)

            hidden._torchdynamo_orig_callable = lambda *tensors: seen.append("direct") or graph(*tensors)
            return hidden

        return compile

    monkeypatch.setattr(torch._dynamo, "lookup_backend", backend)
    program, tensors = counting_graph("eager")._find(arguments())
    program.run(tensors)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    program.run(tensors)
    assert seen == ["direct", "hidden"]


def test_leaves_are_ordered_by_key_and_structure_tells_what_is_interchangeable():
    one, two, three = torch.ones(2), torch.zeros(2), torch.arange(6).view(2, 3).t()
    found = []
    structure = nested.flatten(({"b": one, "a": {("k", "l"): two}}, three), found)
    assert [leaf.tolist() for leaf in found] == [two.tolist(), one.tolist(), three.tolist()] and found[2].is_contiguous()
    assert structure == nested.flatten(({"a": {("k", "l"): one}, "b": two}, one), [])
    assert structure != nested.flatten(({"a": one, "b": two}, one), [])
    built = nested.builder(({"a": {("k", "l"): two}, "b": one}, three))(iter(found))
    assert built[0]["b"] is one and built[0]["a"]["k", "l"] is two


class Gain(nn.Module):
    """A policy of pointwise operators, with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(NUM_ENVS, 6, generator=generator))
        self.register_buffer("bias", torch.randn(NUM_ENVS, 6, generator=generator))

    def forward(self, td):
        return torch.tanh(td["observation"][:, :6] / 1000 * self.weight + self.bias).float()


def transposed(tensor):
    return tensor.t().contiguous().t()


def with_gaps(tensor):
    return torch.stack([tensor, torch.full_like(tensor, 9)], -1)[..., 0]


def first_row_expanded(tensor):
    return tensor[:1].expand_as(tensor)


def of_parameter_data(change):
    def apply(policy):
        policy.weight.data = change(policy.weight.data)

    return apply


def of_parameter(change):
    def apply(policy):
        policy.weight = nn.Parameter(change(policy.weight.data))

    return apply


def of_buffer(change):
    def apply(policy):
        policy.bias = change(policy.bias)

    return apply


def of_buffer_data(change):
    def apply(policy):
        policy.bias.data = change(policy.bias.data)

    return apply


CHANGES = {
    "transposed data of a parameter": of_parameter_data(transposed),
    "data of a parameter with gaps": of_parameter_data(with_gaps),
    "data of a parameter in float64": of_parameter_data(torch.Tensor.double),
    "a transposed parameter": of_parameter(transposed),
    "a parameter in float64": of_parameter(torch.Tensor.double),
    "a transposed buffer": of_buffer(transposed),
    "a buffer with gaps": of_buffer(with_gaps),
    "a buffer in float64": of_buffer(torch.Tensor.double),
    "an expanded buffer": of_buffer(first_row_expanded),
    "transposed data of a buffer": of_buffer_data(transposed),
    "data of a buffer in float64": of_buffer_data(torch.Tensor.double),
    "a policy in float64": lambda policy: policy.double(),
    "a policy in bfloat16": lambda policy: policy.bfloat16(),
}


class TestLayout:
    """Buffers and parameters that get another dtype or memory layout after `compile`."""

    def assert_follows(self, change, backend):
        policy = Gain()
        eager = tw.Collector(ScriptedEnv(NUM_ENVS), policy, 4)
        collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), policy, 4), backend=backend)
        for apply in (lambda policy: None, CHANGES[change]):
            with torch.no_grad():
                apply(policy)
            assert_same(collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0], 1e-5)

    @pytest.mark.parametrize(
        "change",
        mostly_full(
            CHANGES,
            "transposed data of a parameter",
            "transposed data of a buffer",
            "a buffer in float64",
            "a policy in bfloat16",
        ),
    )
    def test_that_changes_is_traced_again(self, graphs, change):
        self.assert_follows(change, "counting")
        assert len(graphs) == 2

    @pytest.mark.full
    @pytest.mark.parametrize("change", CHANGES)
    def test_that_changes_through_inductor_matches_eager(self, change):
        self.assert_follows(change, "inductor")

    def test_that_changes_back_takes_no_further_graph(self, graphs):
        policy = Gain()
        collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), policy, 4), backend="counting")
        expected = collect(collect.env.reset(seed=0))[0]
        for change in (transposed, torch.Tensor.contiguous, transposed, torch.Tensor.contiguous):
            policy.weight.data = change(policy.weight.data)
            assert_same(collect(collect.env.reset(seed=0))[0], expected, AOT)
            assert len(graphs) == 2

    def test_of_env_buffer_that_changes_is_traced_again(self, graphs):
        env, eager = (stack("FrameStackObservation") for _ in range(2))
        tw.compile(env, backend="counting")
        td, eager_td = after(env, 5), after(eager, 5)
        for module in env.transforms.modules():
            for name in getattr(module, "_env_buffer_names", ()):
                setattr(module, name, with_gaps(module.get_buffer(name)))
        assert_same(play(env, 20, td)[0], play(eager, 20, eager_td)[0], AOT)
        assert len(graphs) == 2
