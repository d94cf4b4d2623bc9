"""check_policy finds each fault of a policy, and none in policies without."""

import numpy as np
import pytest
import torch
from catalogue import StatefulRnn
from torch import nn

import torchwrap as tw
from torchwrap.testing import ScriptedEnv, check_policy


def with_own_generator():
    generator = np.random.default_rng(0)
    return lambda td: torch.as_tensor(generator.random((4, 6), np.float32))


def in_one_tensor():
    action = torch.zeros(4, 6)
    return lambda td: action.copy_(td["observation"].repeat(1, 3))


def with_a_key_sometimes(td):
    if (td["observation"] % 10 == 3).any():
        td["third"] = td["observation"]
    return td["observation"].repeat(1, 3)


def in_a_list():
    parts = [nn.Linear(2, 6)]
    return lambda td: parts[0](td["observation"])


def observed(network):
    return lambda td: network(td["observation"])


def normalized(td):
    td["observation"] = td["observation"] / 1000
    return td["observation"].repeat(1, 3)


def minus_mean(td):
    observation = td["observation"]
    return (observation - observation.mean(0)).repeat(1, 3)


FAULTS = {
    "LSTM": (lambda: StatefulRnn(2, 6), "two calls .* PolicyState"),
    "own generator": (with_own_generator, "two calls"),
    "write to the observation": (lambda: lambda td: td["observation"].mul_(2).repeat(1, 3), "root"),
    "new observation": (lambda: normalized, "root"),
    "one tensor for all results": (in_one_tensor, "earlier results"),
    "keys": (lambda: with_a_key_sometimes, "layout"),
    "BatchNorm": (lambda: observed(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 6))), "env 0"),
    "mean": (lambda: minus_mean, "env 0"),
    "hidden module": (in_a_list, "cannot find .*Linear"),
}


@pytest.mark.parametrize(("make", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_of_a_policy_is_found(make, message):
    with pytest.raises(AssertionError, match=rf"^policy: .*{message}"):
        check_policy(ScriptedEnv(4, (2,)), make())


def test_action_that_does_not_fit_is_refused_as_in_a_step():
    with pytest.raises(ValueError, match="action"):
        check_policy(ScriptedEnv(4, (2,)), lambda td: td["observation"])


def carrying(td):
    td["next", "count"] = td["count"] + 1
    return td.set("action", td["count"].expand(4, 6).clone())


def sampling():
    network = nn.LazyLinear(6)
    return lambda td: torch.normal(network(td["observation"]), 1.0)


SOUND = {
    "sampling": sampling,
    "PolicyState": lambda: carrying,
    "compiled": lambda: observed(torch.compile(nn.Linear(2, 6), backend="eager")),
    "dropout": lambda: observed(nn.Sequential(nn.Dropout(), nn.Linear(2, 6))),
    "BatchNorm in eval mode": lambda: observed(
        nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 6)).eval()
    ),
}


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # with a hook
@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
def test_policy_without_a_fault_passes(make):
    policy = make()
    generator = torch.get_rng_state()
    env = tw.TransformedEnv(ScriptedEnv(4, (2,)), tw.PolicyState({"count": (1,)}))
    if policy is not carrying:
        env = env.env
    check_policy(env, policy)
    assert torch.equal(torch.get_rng_state(), generator)
