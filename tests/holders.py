"""Policies that hold a network in different ways. `HOLDERS[name](network)` makes one."""

import functools
import threading

import torch


class Holder:
    """A plain object that holds a network, as Stable-Baselines3's models do."""

    def __init__(self, part):
        self.part = part
        self.parts = (part, part)

    def act(self, td):
        return self.part(td["observation"])


def computed(part, observation):
    return part(observation)


def in_a_decorated_function(net):
    @torch.no_grad()
    def act(td):
        return net(td["observation"])

    return act


def in_another_function(net):
    def features(observation, scale=2):
        return net(observation) * scale

    return lambda td: features(td["observation"])


def in_a_partial(net):
    return functools.partial(lambda scale, td, net: net(td["observation"]) * scale, 2, net=net)


def in_defaults(net):
    return lambda td, net=net, *, other=net: net(td["observation"]) + other(td["observation"])


def in_an_object(net):
    model = Holder(net)
    model.lock = threading.Lock()  # cannot be copied
    return lambda td: model.part(td["observation"])


def in_an_object_in_an_object(net):
    agent = Holder(Holder(net))
    return lambda td: agent.parts[0].parts[1](td["observation"])


def in_a_dict(net):
    parts = {"actor": [net]}
    return lambda td: computed(parts["actor"][0], td["observation"])


HOLDERS = {
    "variable": lambda net: lambda td: net(td["observation"]),
    "method": lambda net: Holder(net).act,
    "partial": in_a_partial,
    "defaults": in_defaults,
    "decorated": in_a_decorated_function,
    "compiled": lambda net: torch.compile(HOLDERS["variable"](net), backend="eager"),
    "other function": in_another_function,
    "generator": lambda net: lambda td: sum(net(td["observation"]) * scale for scale in (1, 2)),
    "object": in_an_object,
    "object in an object": in_an_object_in_an_object,
    "dict": in_a_dict,
}
