"""Replacements after compile take effect: policies, modules, modes, hooks, dtypes and memory."""

import functools
import gc

import pytest
import torch
from catalogue import NUM_ENVS
from helpers import AOT, assert_same, from_reset, mostly_full
from torch import nn
from torch.nn.utils import parametrizations

import torchwrap as tw
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(17, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(8, 6)
        self.tail = nn.Linear(8, 6)
        self.tail.weight = self.head.weight  # tied
        self.eval()

    def forward(self, td):
        value = self.body(td["observation"].to(self.head.weight.dtype) / 1000)
        return torch.tanh(self.head(value) + 0.5 * self.tail(value)).float()


def collectors(policy, num_steps=2):
    """A compiled and an eager collector."""
    pair = [tw.Collector(ScriptedEnv(NUM_ENVS), policy, num_steps) for _ in range(2)]
    tw.compile(pair[0], backend="eager")
    return pair


def collect_both(pair):
    return [from_reset(collect) for collect in pair]


def assert_followed(pair, change, tolerance=AOT):
    """A change moves the actions, compiled as in eager mode."""
    before, expected = collect_both(pair)
    assert_same(before, expected, tolerance)
    with torch.no_grad():
        change()
    after, expected = collect_both(pair)
    assert_same(after, expected, tolerance)
    moved = (after["action"] - before["action"]).abs() > 1e-4
    assert moved.float().mean() > 0.9


# Changes of a network.


def hook(network):
    network.head.register_forward_hook(lambda module, inputs, output: output * 3)


def replace_layer(network):
    network.body[0] = Network(1).body[0]


def convert(network):
    network.double().head.bias.add_(1)


def untie(network):
    network.tail.weight = nn.Parameter(network.head.weight * -1)


def parametrize(network):
    parametrizations.weight_norm(network.body[0])
    network.body[0].parametrizations.weight.original0.mul_(3)


CHANGES = {
    "a hook": hook,
    "a layer": replace_layer,
    "another dtype": convert,
    "untied weights": untie,
    "a step of batch norm": lambda network: network.body[1].running_mean.add_(1),
    "a parametrization": parametrize,
    "an assigned state_dict": lambda network: network.load_state_dict(
        Network(1).state_dict(), assign=True
    ),
}


@pytest.mark.parametrize("name", mostly_full(CHANGES, "a hook", long=["untied weights"]))
def test_change_of_a_network_is_followed(name):
    network = Network()
    assert_followed(collectors(network), functools.partial(CHANGES[name], network))


@pytest.mark.long
@full
@pytest.mark.parametrize("name", ["another dtype", "untied weights"])
def test_change_of_a_network_through_inductor_is_followed(name):
    network = Network()
    pair = [tw.Collector(ScriptedEnv(NUM_ENVS), network, 3) for _ in range(2)]
    tw.compile(pair[0])
    assert_followed(pair, functools.partial(CHANGES[name], network), 1e-5)


# Modules in plain sight.


class Agent:
    """A plain object around a network."""

    def __init__(self):
        self.network = Network()

    def act(self, td):
        return self.network(td)

    def greedy(self, td):
        return -self.network(td)

    __call__ = act


HOLDERS = {
    "a method of a plain object": lambda agent: agent.act,
    "an object that can be called": lambda agent: agent,
    "a function that names an object": lambda agent: lambda td: agent.network(td),
    "a lambda": lambda agent: (lambda network: lambda td: network(td))(agent.network),
    "a method of the module": lambda agent: agent.network.forward,
}


@pytest.mark.parametrize("name", mostly_full(HOLDERS))
def test_module_in_plain_sight_is_found(name):
    agent = Agent()
    pair = collectors(HOLDERS[name](agent))
    assert_followed(pair, functools.partial(replace_layer, agent.network))


def in_a_class(network):
    hidden = type("Hidden", (), {"part": network})
    return lambda td: hidden.part(td)


LOST = {
    "class": in_a_class,
    "list": lambda network: (lambda parts: lambda td: parts[0](td))([network]),
    "partial": lambda network: functools.partial(lambda network, td: network(td), network),
    "default": lambda network: lambda td, net=network: net(td),
}


@pytest.mark.parametrize("hold", LOST.values(), ids=LOST)
def test_parameter_of_a_module_out_of_sight_is_refused_by_name(hold):
    with pytest.raises(ValueError, match=r"Network\.body\.0\.weight.* name it in the function"):
        collectors(hold(Network()))


NETWORK = Network()


@pytest.mark.full
def test_variables_of_a_function_can_be_rebound():
    network = Network()

    def rebind():
        nonlocal network
        global NETWORK
        network = Network(2)
        NETWORK = Network(3)

    assert_followed(collectors(lambda td: torch.tanh(network(td) + NETWORK(td))), rebind)


# Modes and policies.


@pytest.mark.full
def test_train_and_eval_are_followed():
    agent = Agent()
    collect, _ = collectors(agent.act)

    def actions():
        return [from_reset(collect)["action"] for _ in range(2)]

    norm = agent.network.body[1]
    for _ in range(2):
        agent.network.train()
        count = int(norm.num_batches_tracked)
        first, second = actions()
        assert (first != second).any(-1).float().mean() > 0.9  # dropout
        assert norm.num_batches_tracked == count + 4
        agent.network.eval()
        first, second = actions()
        assert torch.equal(first, second)


@full
def test_conversion_there_and_back_takes_no_further_graph(graphs):
    network = Network()
    collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), network, 3), backend="counting")
    expected = from_reset(collect)
    weight = network.body[0].weight
    for dtype in (torch.float64, torch.float32, torch.float64, torch.float32):
        network.to(dtype)
        assert_same(from_reset(collect), expected, AOT)
    assert len(graphs) == 2
    assert network.body[0].weight is weight


def with_other_keys(network):
    def policy(td):
        value = td["observation"].sum(1)
        log_prob = torch.zeros(NUM_ENVS, 2)
        return td.update({"action": network(td), "value": value, "log_prob": log_prob})

    return policy


@pytest.mark.full
def test_policy_of_a_collector_can_be_replaced_by_one_with_other_keys():
    pair = collectors(None)
    collect_both(pair)
    for collect in pair:
        collect.policy = with_other_keys(Network(1))
    data, expected = collect_both(pair)
    assert_same(data, expected, AOT)
    assert "value" in data.keys()


@pytest.mark.full
def test_policies_that_take_turns_are_compiled_once_each(graphs):
    agent = Agent()
    collect = tw.compile(tw.Collector(ScriptedEnv(NUM_ENVS), agent.act, 3), backend="counting")
    actions = []
    for _ in range(3):
        for policy in (agent.act, agent.greedy):
            collect.policy = policy
            actions.append(from_reset(collect)["action"])
    assert len(graphs) == 2
    assert torch.equal(actions[4], actions[0]) and torch.equal(actions[5], -actions[0])


def num_graphs():
    gc.collect()
    return sum(torch.fx.GraphModule in type(each).__mro__ for each in gc.get_objects())


@full
def test_graphs_of_a_replaced_policy_are_freed():
    collect, _ = collectors(Network(0))
    numbers = [num_graphs()]
    for seed in (1, 2):
        collect.policy = Network(seed)
        from_reset(collect)
        numbers.append(num_graphs())
    # It may fall, because graphs of earlier tests are freed, too.
    assert numbers == sorted(numbers, reverse=True)


@full
@pytest.mark.parametrize("is_inside", [True, False], ids=["in the policy", "around the call"])
def test_autocast_matches_eager(is_inside):
    network = Network()

    def policy(td):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            value = network.body(td["observation"] / 1000)
        return torch.tanh(network.head(value.float())).float()

    pair = collectors(policy)
    collect_both(pair)
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_inside):
        data, expected = collect_both(pair)
    assert_same(data, expected, 1e-2)


# Actions out of bounds.


class Steers(nn.Module):
    """Takes an action out of bounds at one step."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, td):
        self.calls.add_(1)
        return torch.where((self.calls == self.at) & (torch.arange(8) == 3), 7, 1)


@pytest.mark.parametrize("at", [4, pytest.param(6, marks=full)])
def test_action_out_of_bounds_is_refused_until_a_reset(at):
    collect = tw.Collector(tw.make("CartPole-v1", 8), Steers(at), 3)
    tw.compile(collect, backend="eager")
    from_reset(collect)
    with pytest.raises(ValueError, match="action"):
        collect()
    with pytest.raises(RuntimeError, match="reset"):
        collect()
    from_reset(collect)
