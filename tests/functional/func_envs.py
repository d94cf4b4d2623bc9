"""Envs as pure functions, for a single env and in broadcasting style."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from helpers import params
from tensordict import TensorDict

from torchwrap import random


def unbounded(size):
    return spaces.Box(
        -np.inf,
        np.inf,
        (size,),
        np.float32,
    )


class Walk(FuncEnv):
    """Written for a single env: its index [0] would be wrong with a batch dimension."""

    observation_space = unbounded(2)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def initial(self, rng, start=0.0, params=None):
        return {"position": torch.zeros(2) + start, "count": torch.zeros((), dtype=torch.int64)}

    def transition(self, state, action, rng, params=None):
        x = state["position"][0]
        return {"position": torch.stack([x + action[0], x]), "count": state["count"] + 1}

    def observation(self, state, rng, params=None):
        return state["position"] * 10

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["position"][0] - 2 * state["position"][0]

    def terminal(self, state, rng, params=None):
        return state["position"][0] >= 3


class BroadcastWalk(Walk):
    """The same walk with a leading batch dimension."""

    broadcasts = True

    def initial(self, rng, start=0.0, params=None):
        batch = rng.env.shape
        count = torch.zeros(batch, dtype=torch.int64)
        return {"position": torch.zeros(*batch, 2) + start, "count": count}

    def transition(self, state, action, rng, params=None):
        x = state["position"][..., 0]
        moved = torch.stack([x + action[..., 0], x], -1)
        return {"position": moved, "count": state["count"] + 1}

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["position"][..., 0] - 2 * state["position"][..., 0]

    def terminal(self, state, rng, params=None):
        return state["position"][..., 0] >= 3


class Noisy(FuncEnv):
    """Every function draws."""

    observation_space = unbounded(3)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def initial(self, rng):
        return {"position": random.uniform(rng, shape=(3,))}

    def transition(self, state, action, rng):
        return {"position": state["position"] + action + random.normal(rng, shape=(3,))}

    def observation(self, state, rng):
        return state["position"] + 1e-3 * random.normal(rng, shape=(3,))

    def reward(self, state, action, next_state, rng):
        return random.uniform(rng)

    def terminal(self, state, rng):
        return random.uniform(rng) < 0.2


class BroadcastNoisy(Noisy):
    broadcasts = True


class Nested(Walk):
    """Observations of a nested space, as plain dicts."""

    observation_space = spaces.Dict(at=unbounded(2), of=spaces.Tuple([spaces.Discrete(99)]))

    def observation(self, state, rng):
        return {"at": state["position"], "of": {"0": state["count"]}}


class BroadcastNested(BroadcastWalk):
    """Observations of a nested space, as TensorDicts."""

    observation_space = Nested.observation_space

    def observation(self, state, rng):
        count = TensorDict({"0": state["count"]}, state["count"].shape)
        return TensorDict({"at": state["position"], "of": count}, count.batch_size)


class NestedTensorDict(Nested):
    observation = BroadcastNested.observation


class Itself(Walk):
    """The observation is a field of the state."""

    def observation(self, state, rng):
        return state["position"]


class BroadcastItself(BroadcastWalk):
    observation = Itself.observation


class Aliasing(FuncEnv):
    """Returns fields of the state without copying them."""

    observation_space = unbounded(1)
    action_space = Walk.action_space

    def initial(self, rng):
        draw = random.uniform(rng)
        return {"now": draw * 0, "before": draw * 0 - 1, "over": draw < 0}

    def transition(self, state, action, rng):
        return {**state, "now": state["now"] + action[..., 0], "before": state["now"]}

    def observation(self, state, rng):
        return state["before"][..., None]

    def reward(self, state, action, next_state, rng):
        return state["now"]

    def terminal(self, state, rng):
        return state["over"]


class BroadcastAliasing(Aliasing):
    broadcasts = True


STYLES = ["vmap", "broadcast"]


def both_styles(*func_envs):
    return pytest.mark.parametrize("func_env", func_envs, ids=STYLES)


both_walks = both_styles(Walk(), BroadcastWalk())
both_aliasing = both_styles(Aliasing(), BroadcastAliasing())
each_base = pytest.mark.parametrize("base", [Walk, BroadcastWalk], ids=STYLES)
both_noisy = pytest.mark.parametrize(
    "func_env",
    params(
        {
            "vmap": Noisy(),
            "broadcast": BroadcastNoisy(),
        },
        quick=["broadcast"],
    ),
)


def variant(base=Walk, **functions):
    """A `base` with some other functions."""
    members = {name: staticmethod(function) for name, function in functions.items()}
    return type("Variant", (base,), members)()


def play(env, td, actions):
    """Successors and roots, `(num_actions, num_envs)`, and the last root."""
    seen = []
    for action in actions:
        transition, td = env.step(td.set("action", action))
        seen.append(TensorDict({"next": transition["next"], "root": td}, td.batch_size).clone())
    return torch.stack(seen), td


def one_step(env, action):
    """The successor of the first step."""
    env.reset(seed=0)
    transition, _ = env.step(action)
    return transition["next"]


def some_actions(env, steps, seed=0):
    """Random actions `(steps, num_envs, ...)` in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(steps, *env.action_space.shape).uniform_(-1, 1, generator=generator)


def equal(one, other):
    return bool((one == other).all())


def changed(env, before):
    """Names of the buffers that differ from `before`."""
    return [name for name, buffer in env.named_buffers() if not torch.equal(buffer, before[name])]
