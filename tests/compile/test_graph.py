"""Graph: a traced function of tensors, from Inductor or, where a PyTorch lacks its entry point, from `torch.compile`."""

import pytest
import torch
from catalogue import stack
from helpers import AOT, INDUCTOR, assert_plays_the_same, mostly_full
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import graph as graphs
from torchwrap._compile.graph import Graph, Settings
from torchwrap._compile.inputs import Inputs
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

    return Graph(function, Inputs(lambda: [module]), Settings(backend, {}))


def arguments():
    values = {
        "x": torch.tensor([1.0, -2.0, 3.0]),
        "flag": torch.tensor([True, False, True]),
        "last": torch.ones(3),
    }
    return TensorDict(values, [3]), torch.ones(7)


@pytest.mark.parametrize(
    "backend", mostly_full(["eager", "aot_eager", "inductor"], "eager", "aot_eager")
)
def test_buffers_are_written_and_arguments_pass_through(backend):
    graph = counting_graph(backend)
    for number in (1, 2):
        td, unused = arguments()
        result, flag = graph(td, unused)
        assert all(
            torch.equal(result[key], td[key]) for key in ("x", "flag", "last")
        ) and torch.equal(flag, td["flag"])
        assert result["sum"].tolist() == [number, -2 * number, 3 * number]
        assert result["negative"].tolist() == [False, True, False]
    program, _ = graph.prepare(*arguments())
    assert program.run.used == [0, 2, 3, 4]  # the total, and the parts of the TensorDict


def test_argument_of_another_dtype_takes_another_graph():
    module = Counter()
    graph = Graph(
        lambda value: value + torch.ones(3, dtype=value.dtype),
        Inputs(lambda: [module]),
        Settings("eager", {}),
    )
    for dtype in (torch.float32, torch.int64, torch.float32):
        assert graph(torch.ones(3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("backend", mostly_full(["aot_eager", "inductor"], "aot_eager"))
def test_without_inductors_entry_point_torch_compile_takes_its_place(backend, monkeypatch):
    monkeypatch.setattr(graphs, "inductor", None)
    monkeypatch.setattr(graphs, "list_options", list)
    tolerance = INDUCTOR if backend == "inductor" else AOT
    env = tw.compile(stack("Compose of two"), backend=backend)
    assert assert_plays_the_same(stack("Compose of two"), env, 40, tolerance)["done"].any()


class TwoShapes(T.Transform):
    """Returns copies of one sum in two shapes."""

    def step(self, td):
        total = td["observation"].sum(-1)
        return td.set("column", total.clone().unsqueeze(-1)).set("row", total.clone())


@pytest.mark.compiles
@pytest.mark.full
def test_copies_of_one_value_through_inductor_share_no_memory():
    env = tw.compile(tw.TransformedEnv(ScriptedEnv(64, (3,)), TwoShapes()))
    td = env.reset(seed=0)
    for _ in range(3):
        transition, td = env.step(td.set("action", env.sample_action()))
        successor = transition["next"]
        assert torch.equal(successor["column"][:, 0], successor["observation"].sum(-1))
        successor["column"].zero_()
        assert torch.equal(successor["row"], successor["observation"].sum(-1))


@pytest.mark.full
def test_env_in_shared_memory_steps_as_before():
    make = lambda: tw.TransformedEnv(tw.make("CartPole-v1", 4), T.NormalizeObservation())  # noqa: E731
    env, eager = tw.compile(make(), backend="aot_eager"), make()
    env.share_memory()
    assert_plays_the_same(eager, env, 12, AOT)
    assert_plays_the_same(eager.eval(), env.eval(), 12, AOT)  # another trace
