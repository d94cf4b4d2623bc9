"""Compiled collectors: parameters and random numbers of the policy are no constants of a graph."""

import functools
import itertools

import pytest
import torch
from catalogue import NUM_ENVS, ActorCritic
from helpers import AOT, INDUCTOR, assert_same, buffers, from_reset, leaves
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical, Normal

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import graph
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full


def stacked_cartpole(num_envs=NUM_ENVS):
    return tw.TransformedEnv(tw.make("CartPole-v1", num_envs), T.FrameStackObservation(2))


def optimize(network):
    optimizer = torch.optim.Adam(network.parameters(), 0.1)
    observation = torch.ones(NUM_ENVS, 8)
    for _ in range(2):
        td = network(TensorDict({"observation": observation}, [NUM_ENVS]))
        (td["logits"].square().sum() + td["value"].sum()).backward()
        optimizer.step()


def test_parameters_that_an_optimizer_changes_are_followed():
    torch.manual_seed(0)
    network = ActorCritic()
    collect, eager = (tw.Collector(stacked_cartpole(), network, 6) for _ in range(2))
    tw.compile(collect, backend="eager")
    seen = []
    for _ in range(2):
        data = from_reset(collect)
        expected = from_reset(eager)
        assert_same(data, expected, AOT)
        assert not any(leaf.requires_grad for leaf in leaves(data))
        seen.append(data)
        optimize(network)
    for key in ("logits", "value"):
        moved = (seen[1][key] - seen[0][key]).abs() > 1e-3
        assert moved.float().mean() > 0.9


class ReturnsCalls(nn.Module):
    """Counts its calls in a buffer, and returns it, to which the next call writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, td):
        self.calls.add_(1)
        td["action"] = (self.calls / 100).expand(NUM_ENVS, 6) * 1
        return td.set("calls", self.calls.expand(NUM_ENVS))


def normal(td):
    distribution = Normal(td["observation"].flatten(1)[:, :6] * 0 + 0.5, 2.0)
    action = distribution.sample()
    return td.update({"action": action, "log_prob": distribution.log_prob(action).sum(-1)})


@pytest.mark.full
def test_normal_policy_samples_at_each_step_and_keeps_its_log_prob():
    generator = torch.get_rng_state()
    collect = tw.compile(tw.Collector(ScriptedEnv(500), normal, 5), backend="aot_eager")
    assert (torch.get_rng_state() == generator).all()
    first = collect()
    data = torch.cat([first, collect()], 1)
    action = data["action"]
    torch.testing.assert_close(data["log_prob"], Normal(0.5, 2.0).log_prob(action).sum(-1))
    torch.testing.assert_close(data["next", "info", "action"], action)
    assert abs(action.mean() - 0.5) < 0.06  # 30,000 numbers: five deviations
    assert abs(action.std() - 2) < 0.04
    assert len(action.unique()) > 29_000


@full
def test_sampling_policy_through_inductor_is_followed_as_it_learns():
    network = ActorCritic()

    def policy(td):
        logits = network(td)["logits"]
        return td.set("action", Categorical(logits=logits, validate_args=False).sample())

    collect = tw.compile(tw.Collector(stacked_cartpole(200), policy, 5))
    collect.env.reset(seed=0)
    for _ in range(3):
        data = collect()
        with torch.no_grad():
            expected = network.logits(network.body(data["observation"].flatten(2)))
        torch.testing.assert_close(data["logits"], expected, rtol=INDUCTOR, atol=INDUCTOR)
        share = data["action"].float().mean(0)
        probability = expected.softmax(-1)[..., 1].mean(0)
        assert ((share - probability).abs() < 0.16).all()  # 200 envs: four deviations
        for one, other in itertools.combinations(data["action"].unbind(1), 2):
            assert (one != other).any()
        optimize(network)


@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=full), 5])
@pytest.mark.parametrize("has_scan", [True, False], ids=["scan", "loop"])
def test_rollout_matches_eager(num_steps, has_scan, monkeypatch):
    if not has_scan:  # as in a version of PyTorch without the operator
        monkeypatch.setattr(graph, "flat_scan_operator", None)
    make = functools.partial(ScriptedEnv, NUM_ENVS, (2,))
    collect, eager = (tw.Collector(make(), ReturnsCalls(), num_steps) for _ in range(2))
    tw.compile(collect, backend="eager")
    for each in (collect, eager):
        each.env.reset(seed=0)
    for _ in range(3):
        data = collect()
        expected = eager()
        assert data.names == expected.names == [None, "time"]
        assert data.batch_size == (NUM_ENVS, num_steps)
        assert_same(data, expected)
        assert_same(collect.env.root, eager.env.root)
        assert_same(buffers(collect.env), buffers(eager.env))
