"""Compiled collectors: the policy is in the graph, and its parameters and random numbers are not constants."""

import functools
import itertools

import pytest
import torch
from catalogue import NUM_ENVS, ActorCritic, stack
from helpers import AOT, INDUCTOR, assert_same, buffers, leaves, play
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical, Normal

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full


def optimize(network, other):
    optimizer = torch.optim.Adam(network.parameters(), 0.1)
    for _ in range(2):
        td = network(TensorDict({"observation": torch.ones(NUM_ENVS, 8)}, [NUM_ENVS]))
        (td["logits"].square().sum() + td["value"].sum()).backward()
        optimizer.step()


def load(network, other):
    network.load_state_dict(other.state_dict())


def network_and_collectors(**arguments):
    """The network, and a function that collects with it, compiled and eager, and returns the data of both."""
    torch.manual_seed(0)
    network = ActorCritic(**arguments)
    policy = lambda td: network(td)  # noqa: E731
    make = lambda: tw.TransformedEnv(tw.make("CartPole-v1", NUM_ENVS), T.FrameStackObservation(2))  # noqa: E731
    collect, eager = (
        tw.compile(tw.Collector(make(), policy, 6), backend="eager"),
        tw.Collector(make(), policy, 6),
    )

    def both():
        data, expected = collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0]
        assert not any(leaf.requires_grad for leaf in leaves(data))
        return data, expected

    return network, both


def test_parameters_that_change_are_followed():
    network, both = network_and_collectors()
    seen = []
    for change in (load, optimize, load):
        data, expected = both()
        assert_same(data, expected, AOT)
        seen.append(data)
        change(network, ActorCritic())
    for before, after in itertools.pairwise(seen):
        assert all(
            ((after[key] - before[key]).abs() > 1e-3).float().mean() > 0.9
            for key in ("logits", "value")
        )


class CountsCalls(nn.Module):
    """A stateful policy."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, td):
        self.calls.add_(1)
        return (self.calls / 100).expand(NUM_ENVS, 6) * 1


def test_buffers_of_policy_are_written_by_calls_and_not_by_compile():
    policy = CountsCalls()
    collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), policy, 4), backend="aot_eager")
    assert policy.calls == 0
    first, td = collect()
    second, _ = collect(td)
    assert (torch.cat([first, second], 1)["action"][0, :, 0] * 100).round().tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ]


def normal(td):
    distribution = Normal(td["observation"].flatten(1)[:, :6] * 0 + 0.5, 2.0)
    action = distribution.sample()
    return td.update({"action": action, "log_prob": distribution.log_prob(action).sum(-1)})


def test_normal_policy_samples_at_each_step_and_keeps_log_prob():
    generator = torch.get_rng_state()
    collect = tw.compile(tw.Collector(ScriptedEnv(500), normal, 5), backend="aot_eager")
    assert (torch.get_rng_state() == generator).all()
    data, td = collect()
    data = torch.cat([data, collect(td)[0]], 1)
    action = data["action"]
    torch.testing.assert_close(data["log_prob"], Normal(0.5, 2.0).log_prob(action).sum(-1))
    torch.testing.assert_close(data["next", "info", "action"], action)
    assert (
        abs(action.mean() - 0.5) < 0.06 and abs(action.std() - 2) < 0.04
    )  # of 30,000: five deviations
    assert len(action.unique()) > 29_000


@full
def test_sampling_policy_through_inductor_is_followed_as_it_learns():
    network = ActorCritic()

    def policy(td):
        return td.set(
            "action", Categorical(logits=network(td)["logits"], validate_args=False).sample()
        )

    env = tw.TransformedEnv(tw.make("CartPole-v1", 200), T.FrameStackObservation(2))
    collect = tw.compile(tw.Collector(env, policy, 5))
    td = env.reset(seed=0)
    for _ in range(3):
        data, td = collect(td)
        with torch.no_grad():
            expected = network.logits(network.body(data["observation"].flatten(2)))
        torch.testing.assert_close(data["logits"], expected, rtol=INDUCTOR, atol=INDUCTOR)
        share, expected = data["action"].float().mean(0), expected.softmax(-1)[..., 1].mean(0)
        assert ((share - expected).abs() < 0.16).all()  # of 200: more than four deviations
        assert all(
            (one != other).any()
            for one, other in itertools.combinations(data["action"].unbind(1), 2)
        )
        optimize(network, None)


def assert_collects_the_same(make, num_steps, tolerance, **arguments):
    collect, eager = tw.Collector(make(), None, num_steps), tw.Collector(make(), None, num_steps)
    tw.compile(collect, **arguments)
    td, eager_td = collect.env.reset(seed=0), eager.env.reset(seed=0)
    for _ in range(3):
        (data, td), (expected, eager_td) = collect(td), eager(eager_td)
        assert data.names == expected.names == [None, "time"] and data.batch_size == (
            NUM_ENVS,
            num_steps,
        )
        assert_same(data, expected, tolerance)
        assert_same(td, eager_td, tolerance)
        assert_same(buffers(collect.env), buffers(eager.env), tolerance)


@pytest.mark.parametrize(("num_steps", "unroll"), [pytest.param(1, 2, marks=full), (5, 2)])
def test_unrolled_steps_match_eager(num_steps, unroll):
    assert_collects_the_same(
        functools.partial(ScriptedEnv, NUM_ENVS, (2,)), num_steps, 0, backend="eager", unroll=unroll
    )


@full
def test_modes_and_calls_between_steps_and_resets_of_env_match_eager():
    env, other = stack("Compose of two"), stack("Compose of two")
    collect = tw.compile(tw.Collector(env, None, 4), backend="aot_eager")
    td, other_td = env.reset(seed=0), other.reset(seed=0)
    for mode in (True, False, True):
        env.train(mode)
        other.train(mode)
        (_, td), (_, other_td) = collect(td), tw.rollout(other, None, 4, other_td)
        assert_same(env.snapshot(), other.snapshot(), AOT)
        td, other_td = (one.reset(mask=torch.arange(NUM_ENVS) < 2) for one in (env, other))
        assert_same(td, other_td, AOT)
        (_, td), (_, other_td) = play(env, 3, td), play(other, 3, other_td)
        assert_same(env.snapshot(), other.snapshot(), AOT)
