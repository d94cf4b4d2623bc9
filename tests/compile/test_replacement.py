"""What is replaced after compile takes effect: a policy, its modules, their modes, hooks, dtypes and memory layout."""

import functools

import pytest
import torch
from catalogue import NUM_ENVS
from helpers import AOT, assert_same, mostly_full
from torch import nn
from torch.nn.utils import parametrizations

import torchwrap as tw
from torchwrap.testing import ScriptedEnv


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(17, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
        self.head, self.tail = nn.Linear(8, 6), nn.Linear(8, 6)
        self.tail.weight = self.head.weight  # tied
        self.eval()

    def forward(self, td):
        value = self.body(td["observation"].to(self.head.weight.dtype) / 1000)
        return torch.tanh(self.head(value) + 0.5 * self.tail(value)).float()


def parametrize(network):
    parametrizations.weight_norm(network.body[0])
    network.body[0].parametrizations.weight.original0.mul_(3)


def write(network, change):
    network.body[0].weight.data = change(network.body[0].weight.data)


CHANGES = {
    "a hook": lambda network: network.head.register_forward_hook(
        lambda module, inputs, output: output * 3
    ),
    "a layer": lambda network: setattr(network.body, "0", Network(1).body[0]),
    "another dtype": lambda network: network.double().head.bias.add_(1),
    "bfloat16": lambda network: network.bfloat16(),
    "untied weights": lambda network: setattr(
        network.tail, "weight", nn.Parameter(network.head.weight * -1)
    ),
    "another layout": lambda network: write(
        network, lambda weight: (weight * 2).t().contiguous().t()
    ),
    "memory with gaps": lambda network: write(
        network, lambda weight: torch.stack([weight * 2, weight * 0 + 9], -1)[..., 0]
    ),
    "an expanded buffer": lambda network: setattr(
        network.body[1], "running_mean", torch.full((1,), 0.7).expand(8)
    ),
    "a step of batch norm": lambda network: network.body[1].running_mean.add_(1),
    "an attribute": lambda network: setattr(network, "head", Network(1).head),
    "a parametrization": parametrize,
    "an assigned state_dict": lambda network: network.load_state_dict(
        Network(1).state_dict(), assign=True
    ),
}


def assert_followed(policy, change, backend, tolerance=AOT):
    compiled, eager = (tw.Collector(ScriptedEnv(NUM_ENVS), policy, 3) for _ in range(2))
    tw.compile(compiled, backend=backend)
    both = lambda: [collect(collect.env.reset(seed=0))[0] for collect in (compiled, eager)]  # noqa: E731
    before, expected = both()
    assert_same(before, expected, tolerance)
    with torch.no_grad():
        change()
    after, expected = both()
    assert_same(after, expected, tolerance)
    assert ((after["action"] - before["action"]).abs() > 1e-4).float().mean() > 0.9


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.full)])
def test_change_of_a_network_is_followed(quick):
    for name in (
        [*CHANGES][:1] if quick else [*CHANGES][1:]
    ):  # replaced layers are in the tests of holders too
        network = Network()
        assert_followed(
            network,
            functools.partial(CHANGES[name], network),
            "eager",
            1e-2 if name == "bfloat16" else AOT,
        )


@pytest.mark.full
@pytest.mark.parametrize("name", ["another dtype", *[*CHANGES][4:8]])
def test_change_of_a_network_through_inductor_is_followed(name):
    network = Network()
    assert_followed(network, functools.partial(CHANGES[name], network), "inductor", 1e-5)


class Agent:
    """A plain Python object around a network."""

    def __init__(self):
        self.network = Network()

    def act(self, td):
        return self.network(td)

    __call__ = act


NETWORK = Network()

HOLDERS = {
    "a method of a plain object": lambda agent: agent.act,
    "an object that can be called": lambda agent: agent,
    "a lambda": lambda agent: (lambda network: lambda td: network(td))(agent.network),
    "a partial": lambda agent: functools.partial(lambda network, td: network(td), agent.network),
    "a method of the module": lambda agent: agent.network.forward,
}


@pytest.mark.parametrize("name", mostly_full(HOLDERS, "a lambda"))
def test_module_is_found_through_any_holder(name):
    agent = Agent()
    assert_followed(
        HOLDERS[name](agent), functools.partial(CHANGES["a layer"], agent.network), "eager"
    )


def test_variables_of_a_function_can_be_rebound():
    network = Network()

    def rebind():
        nonlocal network
        global NETWORK
        network, NETWORK = Network(2), Network(3)

    assert_followed(lambda td: torch.tanh(network(td) + NETWORK(td)), rebind, "eager")


def test_train_and_eval_are_followed():
    agent = Agent()
    collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), agent.act, 3), backend="eager")
    action = lambda: collect(collect.env.reset(seed=0))[0]["action"]  # noqa: E731
    for _ in range(2):
        agent.network.train()
        count = int(agent.network.body[1].num_batches_tracked)
        assert (action() != action()).any(-1).float().mean() > 0.9  # dropout
        assert agent.network.body[1].num_batches_tracked == count + 6
        agent.network.eval()
        torch.testing.assert_close(action(), action(), rtol=0, atol=0)


@pytest.mark.full
def test_what_changes_back_takes_no_further_graph(graphs):
    network = Network()
    collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), network, 3), backend="counting")
    expected, weight = collect(collect.env.reset(seed=0))[0], network.body[0].weight
    for change in (
        torch.Tensor.double,
        torch.Tensor.float,
        torch.Tensor.double,
        torch.Tensor.float,
    ):
        network.to(change(torch.zeros(1)).dtype)
        assert_same(collect(collect.env.reset(seed=0))[0], expected, AOT)
    assert len(graphs) == 2 and network.body[0].weight is weight


def test_policy_of_a_collector_can_be_replaced_by_one_with_other_keys():
    first, second = Network(0), Network(1)
    compiled, eager = (tw.Collector(ScriptedEnv(NUM_ENVS), first, 3) for _ in range(2))
    tw.compile(compiled, backend="eager")

    def act_and_keep(td):
        return td.update(
            {
                "action": second(td),
                "value": td["observation"].sum(1),
                "log_prob": torch.zeros(NUM_ENVS, 2),
            }
        )

    for policy in (act_and_keep, None, first):
        compiled.policy = eager.policy = policy
        data, expected = (collect(collect.env.reset(seed=0))[0] for collect in (compiled, eager))
        assert_same(data, expected, AOT)
        assert ("value" in data.keys()) == (policy is act_and_keep)
    assert len(compiled._compiled.steps.programs) == 1  # that of the first policy is gone


@pytest.mark.full
@pytest.mark.parametrize(
    "where", mostly_full(["in the policy", "around the call"], "around the call")
)
def test_autocast_matches_eager(where):
    network = Network()

    def policy(td):
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "in the policy"):
            value = network.body(td["observation"] / 1000)
        return torch.tanh(network.head(value.float())).float()

    compiled, eager = (tw.Collector(ScriptedEnv(NUM_ENVS), policy, 3) for _ in range(2))
    tw.compile(compiled, backend="eager")
    for dtype, tolerance in (
        (None, AOT),
        (torch.bfloat16, 1e-2),
        (torch.float16, 1e-3),
        (None, AOT),
    ):
        with torch.autocast("cpu", dtype, enabled=dtype is not None and where == "around the call"):
            data, expected = (
                collect(collect.env.reset(seed=0))[0] for collect in (compiled, eager)
            )
        assert_same(data, expected, 1e-2 if where == "in the policy" else tolerance)


class Steers(nn.Module):
    """A policy that takes an action out of bounds at one step."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, td):
        self.calls.add_(1)
        return torch.where((self.calls == self.at) & (torch.arange(8) == 3), 7, 1)


@pytest.mark.parametrize(("at", "unroll"), [(4, 2), pytest.param(6, 1, marks=pytest.mark.full)])
def test_action_out_of_bounds_is_refused_as_in_eager_mode(at, unroll):
    compiled, eager = (tw.Collector(tw.make("CartPole-v1", 8), Steers(at), 3) for _ in range(2))
    tw.compile(compiled, backend="eager", unroll=unroll)
    for collect in (compiled, eager):
        td = collect.env.reset(seed=0)
        if at > 3:
            _, td = collect(td)
        with pytest.raises(
            ValueError, match=r"CartPole-v1 needs an action in Discrete\(2\), but (got|the policy)"
        ):
            collect(td)
        with pytest.raises(
            RuntimeError, match=r"CartPole-v1 may hold .* call reset\(\), or restore\(\)"
        ):
            collect(td)
        collect(collect.env.reset(seed=0))
