"""Graphs run on memory as they expect it, whatever tensors they are given.

Inductor computes addresses from the layouts in its example and looks at no tensor again. In most
tests, a stand-in takes its place: it refuses tensors that are unlike its example.
"""

import functools

import pytest
import torch
from gymnasium.spaces import Box
from helpers import AOT, AT_RELEASES, INDUCTOR, assert_same, from_reset
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import graph as graphs
from torchwrap._compile import internals
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full
NUM_ENVS = 4


def layout(tensor):
    is_lazy = tensor.is_neg() or tensor.is_conj()
    return tensor.dtype, tensor.shape, tensor.stride(), is_lazy


def strict(graph, example, options):
    expected = list(map(layout, example))

    def run(*tensors):
        assert list(map(layout, tensors)) == expected
        return graph(*tensors)

    return run


@pytest.fixture
def tolerance(request, monkeypatch):
    """The tolerance of what `tw.compile` makes in this test: by Inductor, or by its stand-in."""
    if getattr(request, "param", None) == "inductor":
        return INDUCTOR
    monkeypatch.setattr(graphs, "inductor", strict)
    return AOT


def cases(names, *through_inductor):
    """Cases by name with the stand-in, the first by default, and some through Inductor too."""
    first, *rest = names
    parameters = [pytest.param(first, "strict", id=first)]
    parameters += [pytest.param(name, "strict", id=name, marks=full) for name in rest]
    marks = [pytest.mark.compiles, *AT_RELEASES]
    for name in through_inductor:
        parameters.append(pytest.param(name, "inductor", id=f"{name}, Inductor", marks=marks))
    return pytest.mark.parametrize("name, tolerance", parameters, indirect=["tolerance"])


def both(make):
    """A compiled env or collector, and an eager one."""
    return tw.compile(make()), make()


# Roots of a collector.


def channels_first(observation):
    return observation.permute(0, 3, 1, 2)


def column_major(observation):
    return observation.t().contiguous().t()


VIEWS = {
    "a permuted": (channels_first, (5, 4, 3), (3, 5, 4)),
    "a column-major": (column_major, (6,), (6,)),
    "a sliced": (lambda observation: observation[:, ::2], (12,), (6,)),
}


@cases(VIEWS, "a permuted", "a column-major")
def test_view_as_observation_matches_eager(name, tolerance):
    function, shape, result = VIEWS[name]
    space = Box(-float("inf"), float("inf"), result)

    def policy(td):
        return torch.tanh(td["observation"].flatten(1)[:, :6] / 1000)

    def make():
        observe = T.TransformObservation(function, space)
        return tw.Collector(tw.TransformedEnv(ScriptedEnv(NUM_ENVS, shape), observe), policy, 3)

    collect, eager = both(make)
    for each in (collect, eager):
        each.env.reset(seed=0)
    for _ in range(3):
        data = collect()
        expected = eager()
        assert_same(data, expected, tolerance)


def recurrent():
    """A collector whose policy adds its actions up."""

    def policy(td):
        hidden = td["hidden"] + td["observation"] / 1000
        td["next", "hidden"] = hidden
        return torch.tanh(hidden[:, :6])

    transforms = tw.PolicyState({"hidden": (8,)})
    return tw.Collector(tw.TransformedEnv(ScriptedEnv(NUM_ENVS, (8,)), transforms), policy, 3)


def negated(value):
    """The same values, negated in memory."""
    return torch._neg_view(-value)


STATES = {
    "an expanded": lambda hidden: hidden[:, :1].expand(-1, 8),
    "a column-major": column_major,
    "a lazily negated": negated,
}


@cases(STATES, "an expanded", "a lazily negated")
def test_policy_state_in_another_layout_matches_eager(name, tolerance):
    found = []
    for collect in both(recurrent):
        from_reset(collect)
        td = collect.env.root
        td["hidden"] = STATES[name](td["hidden"])
        found.append(collect())
    assert_same(*found, tolerance)


WRONG = {
    "shape": ("hidden", lambda hidden: hidden[:, :2]),
    "dtype": ("hidden", torch.Tensor.double),
    "device": ("hidden", lambda hidden: hidden.to("meta")),
    "type": ("hidden", torch.Tensor.tolist),
    "is_init": ("is_init", lambda is_init: is_init[:, 0]),
    "observation": ("observation", lambda observation: observation[:, :2]),
    "sparse": ("observation", torch.Tensor.to_sparse),
}


@functools.cache
def compiled_recurrent():
    return tw.compile(recurrent(), backend="eager")


@pytest.mark.parametrize("make", [recurrent, compiled_recurrent])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_entry_of_the_last_root_is_refused_until_it_is_right(case, make):
    name, change = WRONG[case]
    collect = make()
    expected = from_reset(collect)
    td = collect.env.reset(seed=0)
    right = td[name]
    wrong = change(right)
    if isinstance(wrong, list):
        td.pop(name)
    else:
        td[name] = wrong
    with pytest.raises((TypeError, ValueError), match=name):
        collect()
    td[name] = right
    assert_same(collect(), expected)


def test_full_reset_replaces_a_wrong_root():
    env = recurrent().env
    expected = env.reset(seed=0)
    td = env.reset(seed=0)
    for name in ("hidden", "is_init", "observation"):
        td[name] = td[name][:, :0]
    assert_same(env.reset(seed=0), expected)


# Tensors of modules.


class Scale(T.RewardTransform):
    def setup(self, signature):
        weight = torch.tensor([[1.0 + index] for index in range(NUM_ENVS)])
        self.register_buffer("scale", weight)
        self.shift = nn.Parameter(weight.expand(-1, 3).clone())
        return signature

    def reward(self, reward):
        scaled = reward * self.scale + self.shift.sum(-1, keepdim=True)
        return scaled.to(reward.dtype)


DATA = {
    "an expanded": lambda data: torch.full((1, 1), 0.5).expand(data.shape),
    "a strided": lambda data: torch.stack([data * 2, data * 0 + 9], -1)[..., 0],
    "a float64": torch.Tensor.double,
    "one row": lambda data: data[:1],
}


def scaled():
    return tw.TransformedEnv(ScriptedEnv(NUM_ENVS), Scale())


def last_reward(env):
    env.reset(seed=0)
    env.action_stream.seed(0, graphs.rows.RowMask.full(NUM_ENVS))
    return env.step(env.sample_action())[0]["next", "reward"]


@pytest.mark.parametrize("buffer", ["scale", "shift"])
@cases(DATA, "an expanded", "one row")
def test_data_of_a_transforms_tensor_is_followed(name, buffer, tolerance):
    envs = both(scaled)
    before = [last_reward(env) for env in envs]
    for env in envs:
        tensor = getattr(env.transforms[0], buffer)
        tensor.data = DATA[name](tensor.data)
    after = [last_reward(env) for env in envs]
    torch.testing.assert_close(*before, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*after, rtol=tolerance, atol=tolerance)


@full
def test_data_is_followed_without_the_guard_of_dynamo(tolerance, monkeypatch):
    monkeypatch.setattr(internals, "TensorGuards", None)
    test_data_of_a_transforms_tensor_is_followed("an expanded", "scale", tolerance)


class Lazy(T.RewardTransform):
    def setup(self, signature):
        self.register_buffer("scale", negated(torch.arange(1.0, 1 + NUM_ENVS).unsqueeze(-1)))
        return signature

    def reward(self, reward):
        return reward * self.scale


def test_lazily_negated_buffer_is_refused():
    with pytest.raises(ValueError, match="scale"):
        tw.compile(tw.TransformedEnv(ScriptedEnv(NUM_ENVS), Lazy()))


@pytest.mark.full
def test_collector_of_one_env_matches_eager(tolerance):
    """The only row of a tensor has any stride."""

    def make():
        env = tw.TransformedEnv(tw.make("CartPole-v1", 1), T.DelayAction(1))
        return tw.Collector(env, lambda td: (td["observation"][:, 0] > 0).long(), 4)

    compiled, eager = both(make)
    results = [from_reset(collect) for collect in (compiled, eager)]
    assert_same(*results, tolerance)
