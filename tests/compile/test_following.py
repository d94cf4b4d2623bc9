"""What is changed after compile takes effect: modules, their modes and hooks, the tensors of a policy, the policy itself."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from catalogue import NUM_ENVS
from helpers import AOT, assert_same
from torch import nn
from torch.nn.utils import parametrizations

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(17, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
        self.head, self.tail = nn.Linear(8, 6), nn.Linear(8, 6)
        self.tail.weight = self.head.weight

    def forward(self, td):
        value = self.body(td["observation"].to(self.head.weight.dtype) / 1000)
        return torch.tanh(self.head(value) + 0.5 * self.tail(value)).float()


class Agent:
    """A plain Python object around a network."""

    def __init__(self):
        self.actor, self.scale = Network().eval(), torch.ones(6)

    def act(self, td):
        return self.actor(td) * self.scale


AGENT = None


def act_globally(td):
    return AGENT.act(td)


def globally(agent):
    global AGENT
    AGENT = agent
    return act_globally


class Foreign(types.SimpleNamespace):
    """Stands for an object of a library: its class is none of the user's."""


Foreign.__module__ = "types"

HOLDERS = {
    "a method of a plain object": lambda agent: agent.act,
    "a lambda": lambda agent: lambda td: agent.act(td),
    "a list": lambda agent: (lambda parts: lambda td: parts[0].act(td))([agent]),
    "a partial": lambda agent: functools.partial(Agent.act, agent),
    "a global": globally,
    "an object of a library": lambda agent: Foreign(act=agent.act).act,
}


def replace_actor(agent):
    agent.actor = Network(1).eval()


def replace_layer(agent):
    agent.actor.body[0] = Network(1).body[0]


def replace_attribute(agent):
    agent.actor.head = Network(1).head


def add_hook(agent):
    agent.actor.head.register_forward_hook(lambda module, inputs, output: output * 3)


def add_pre_hook(agent):
    agent.actor.head.register_forward_pre_hook(lambda module, inputs: inputs[0] * 3)


def replace_hook(agent):
    hook = agent.actor.head.register_forward_hook(lambda module, inputs, output: output * 3)
    hook.remove()
    agent.actor.head.register_forward_hook(lambda module, inputs, output: output * 5)


def parametrize(agent):
    parametrizations.weight_norm(agent.actor.body[0])
    with torch.no_grad():
        agent.actor.body[0].parametrizations.weight.original0.mul_(3)


def replace_forward(agent):
    layer = agent.actor.head
    layer.forward = lambda value: nn.Linear.forward(layer, value) * 3


def convert(agent):
    agent.actor.double()
    with torch.no_grad():
        agent.actor.head.bias.add_(1)


def untie(agent):
    agent.actor.tail.weight = nn.Parameter(agent.actor.head.weight.detach() * -1)


def assign(agent):
    agent.actor.load_state_dict(Network(1).state_dict(), assign=True)


def lay_out_otherwise(agent):
    with torch.no_grad():
        weight = agent.actor.body[0].weight
        weight.data = (weight * 2).t().contiguous().t()


def replace_tensor(agent):
    agent.scale = torch.full((1,), 0.5)


def write_tensor(agent):
    agent.scale.mul_(0.5)


def add_batch_norm_step(agent):
    agent.actor.body[1].running_mean.add_(1)


CHANGES = [
    replace_actor,
    replace_layer,
    replace_attribute,
    add_hook,
    add_pre_hook,
    replace_hook,
    parametrize,
    replace_forward,
    convert,
    untie,
    assign,
    lay_out_otherwise,
    replace_tensor,
    write_tensor,
    add_batch_norm_step,
]


def compiled_and_eager(policy, num_steps=3):
    collectors = [tw.Collector(ScriptedEnv(NUM_ENVS), policy, num_steps) for _ in range(2)]
    tw.compile(collectors[0], backend="eager")

    def both():
        return [collect(collect.env.reset(seed=0))[0] for collect in collectors]

    return collectors, both


def assert_followed(both, change):
    before, expected = both()
    assert_same(before, expected, AOT)
    change()
    after, expected = both()
    assert_same(after, expected, AOT)
    assert ((after["action"] - before["action"]).abs() > 1e-4).float().mean() > 0.9


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_of_a_network_in_a_plain_object_is_followed(change):
    agent = Agent()
    _, both = compiled_and_eager(agent.act)
    assert_followed(both, lambda: change(agent))


@pytest.mark.parametrize("name", HOLDERS)
def test_module_is_found_through_any_holder(name):
    agent = Agent()
    _, both = compiled_and_eager(HOLDERS[name](agent))
    assert_followed(both, lambda: replace_layer(agent))
    assert_followed(both, lambda: replace_actor(agent))
    assert_followed(both, lambda: write_tensor(agent))


@pytest.mark.parametrize("name", HOLDERS)
def test_train_and_eval_of_a_network_in_any_holder_are_followed(name):
    agent = Agent()
    collectors, _ = compiled_and_eager(HOLDERS[name](agent))
    collect = collectors[0]

    def action():
        return collect(collect.env.reset(seed=0))[0]["action"]

    for _ in range(2):
        agent.actor.train()
        count = int(agent.actor.body[1].num_batches_tracked)
        assert (action() != action()).any(-1).float().mean() > 0.9  # dropout
        assert agent.actor.body[1].num_batches_tracked == count + 6
        agent.actor.eval()
        torch.testing.assert_close(action(), action(), rtol=0, atol=0)
        assert agent.actor.body[1].num_batches_tracked == count + 6


def test_element_of_a_list_and_variable_of_a_closure_can_be_replaced():
    parts, network = [Network(0).eval()], Network(0).eval()

    def policy(td):
        return parts[0](td) + network(td)

    _, both = compiled_and_eager(policy)

    def replace_element():
        parts[0] = Network(1).eval()

    def replace_variable():
        nonlocal network
        network = Network(2).eval()

    assert_followed(both, replace_element)
    assert_followed(both, replace_variable)


def test_policy_of_a_collector_can_be_replaced_by_one_with_other_keys():
    first, second = Network(0).eval(), Network(1).eval()
    collectors, both = compiled_and_eager(first)

    def act_and_keep(td):
        return td.update({"action": second(td), "value": td["observation"].sum(1), "log_prob": torch.zeros(NUM_ENVS, 2)})

    for policy in (act_and_keep, None, first, act_and_keep):
        for collect in collectors:
            collect.policy = policy
        if policy is None:
            data, expected = both()
            assert_same(data, expected)
        else:
            data, expected = both()
            assert_same(data, expected, AOT)
            assert ("value" in data.keys()) == (policy is act_and_keep)


class Residual(T.ObservationTransform):
    """A transform with a network of the user's."""

    def __init__(self):
        super().__init__()
        self.network = Network(0).body.eval()

    def observation(self, observation):
        return torch.cat([self.network(observation / 1000), observation[:, 8:]], 1)


@pytest.mark.parametrize("change", [replace_layer, add_hook, lay_out_otherwise], ids=lambda change: change.__name__)
def test_change_of_a_network_in_a_transform_is_followed(change):
    envs = [tw.TransformedEnv(ScriptedEnv(NUM_ENVS), Residual()) for _ in range(2)]
    tw.compile(envs[0], backend="eager")
    action, before = torch.zeros(NUM_ENVS, 6), None
    for changes in (False, True):
        if changes:
            for env in envs:
                body = env.transforms[0].network
                change(types.SimpleNamespace(actor=types.SimpleNamespace(body=body, head=body[0])))
        roots = [env.reset(seed=0) for env in envs]
        transitions = [env.step(root.set("action", action))[0] for env, root in zip(envs, roots, strict=True)]
        assert_same(*transitions, AOT)
        found = transitions[0]["next", "observation"]
        assert not changes or not torch.equal(found, before)
        before = found


@pytest.mark.parametrize("where", ["in the policy", "around the call"])
def test_autocast_matches_eager(where):
    network = Network().eval()

    def policy(td):
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "in the policy"):
            value = network.body(td["observation"] / 1000)
        return torch.tanh(network.head(value.float())).float()

    _, both = compiled_and_eager(policy)
    precise = compiled_and_eager(network)[1]()[0]
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled and where == "around the call"):
            assert_same(*both(), 1e-2 if enabled or where == "in the policy" else AOT)
    assert_same(precise, compiled_and_eager(network)[1]()[1], AOT)


class Steers(nn.Module):
    """A policy that takes an action out of bounds at one step."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, td):
        self.calls.add_(1)
        return torch.where((self.calls == self.at) & (torch.arange(8) == 3), 7, 1)


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("unroll", [1, 2])
def test_action_out_of_bounds_is_refused_as_in_eager_mode(at, unroll):
    collectors = [tw.Collector(tw.make("CartPole-v1", 8), Steers(at), 3) for _ in range(2)]
    tw.compile(collectors[0], backend="eager", unroll=unroll)
    for collect in collectors:
        td = collect.env.reset(seed=0)
        if at > 3:
            _, td = collect(td)
        with pytest.raises(ValueError, match=r"CartPole-v1 needs an action in Discrete\(2\), but got"):
            collect(td)
        with pytest.raises(RuntimeError, match=r"CartPole-v1 needs reset\(\), or restore\(\)"):
            collect(td)
        collect(collect.env.reset(seed=0))


def test_actions_that_are_not_numbers_are_not_checked_in_a_box():
    collectors, _ = compiled_and_eager(lambda td: torch.full((NUM_ENVS, 6), torch.nan))
    for collect in collectors:
        assert collect()[0]["next", "info", "action"].isnan().all()
