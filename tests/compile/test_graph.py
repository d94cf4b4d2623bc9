"""Graphs: arguments, memory, and PyTorch without Inductor's entry point."""

import pytest
import torch
from catalogue import stack
from helpers import INDUCTOR, assert_plays_the_same
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import graph as graphs
from torchwrap._compile.graph import Graph, Settings
from torchwrap._compile.inputs import Inputs
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full


def test_argument_of_another_dtype_takes_another_graph():
    inputs = Inputs(lambda: [nn.Linear(1, 1)])
    graph = Graph(lambda value: value + value, inputs, Settings("eager", {}))
    for dtype in (torch.float32, torch.int64, torch.float32):
        assert graph(torch.ones(3, dtype=dtype)).dtype == dtype


@full
def test_torch_compile_takes_the_place_of_inductors_entry_point(monkeypatch):
    monkeypatch.setattr(graphs, "inductor", None)
    monkeypatch.setattr(graphs, "list_options", list)
    env = tw.compile(stack("Compose of two"))
    assert assert_plays_the_same(stack("Compose of two"), env, 40, INDUCTOR)["done"].any()


class TwoShapes(T.Transform):
    """Returns copies of one sum in two shapes."""

    def step(self, td):
        total = td["observation"].sum(-1)
        return td.set("column", total.clone().unsqueeze(-1)).set("row", total.clone())


@pytest.mark.compiles
@full
def test_copies_of_one_value_through_inductor_share_no_memory():
    env = tw.compile(tw.TransformedEnv(ScriptedEnv(64, (3,)), TwoShapes()))
    td = env.reset(seed=0)
    for _ in range(3):
        transition, td = env.step(td.set("action", env.sample_action()))
        successor = transition["next"]
        expected = successor["observation"].sum(-1)
        assert torch.equal(successor["column"][:, 0], expected)
        successor["column"].zero_()
        assert torch.equal(successor["row"], expected)


class Scale(T.RewardTransform):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def reward(self, reward):
        return reward * self.factor


@pytest.mark.compiles
@pytest.mark.newest
@full
def test_cache_on_disk_tells_bodies_of_scans_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for factor in (2.0, 3.0, 3.0):
        env = tw.TransformedEnv(ScriptedEnv(2), Scale(factor))
        torch._dynamo.utils.counters.clear()
        collector = tw.compile(tw.Collector(env, None, num_steps=3))
        assert (collector()["next", "reward"][:, 0] == factor).all()
        hits.append(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
    assert hits == [0, 0, 1]
