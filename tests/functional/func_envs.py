"""Envs as pure functions, for a single env and in broadcasting style, and functions to play them."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from helpers import params
from tensordict import TensorDict

from torchwrap import random


class Walk(FuncEnv):
    """Written for a single env: its index [0] would be wrong with a batch dimension."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def initial(self, rng, params=None, start=0.0):
        return {"position": torch.zeros(2) + start, "count": torch.zeros((), dtype=torch.int64)}

    def transition(self, state, action, rng, params=None):
        moved = torch.stack([state["position"][0] + action[0], state["position"][0]])
        return {"position": moved, "count": state["count"] + 1}

    def observation(self, state, rng, params=None):
        return state["position"] * 10

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["position"][0] - 2 * state["position"][0]

    def terminal(self, state, rng, params=None):
        return state["position"][0] >= 3


class BroadcastWalk(Walk):
    """The same walk with a leading batch dimension."""

    broadcasts = True

    def initial(self, rng, params=None, start=0.0):
        batch = rng.env.shape
        return {
            "position": torch.zeros(*batch, 2) + start,
            "count": torch.zeros(batch, dtype=torch.int64),
        }

    def transition(self, state, action, rng, params=None):
        moved = torch.stack(
            [state["position"][..., 0] + action[..., 0], state["position"][..., 0]], -1
        )
        return {"position": moved, "count": state["count"] + 1}

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["position"][..., 0] - 2 * state["position"][..., 0]

    def terminal(self, state, rng, params=None):
        return state["position"][..., 0] >= 3


class Noisy(FuncEnv):
    """Every function draws."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def initial(self, rng, params=None):
        return {"position": random.uniform(rng, shape=(3,))}

    def transition(self, state, action, rng, params=None):
        return {"position": state["position"] + action + random.normal(rng, shape=(3,))}

    def observation(self, state, rng, params=None):
        return state["position"] + 1e-3 * random.normal(rng, shape=(3,))

    def reward(self, state, action, next_state, rng, params=None):
        return random.uniform(rng)

    def terminal(self, state, rng, params=None):
        return random.uniform(rng) < 0.2


class BroadcastNoisy(Noisy):
    broadcasts = True


class Nested(Walk):
    """Observations of a nested space."""

    observation_space = spaces.Dict(
        at=spaces.Box(-np.inf, np.inf, (2,), np.float32), of=spaces.Tuple([spaces.Discrete(99)])
    )

    def observation(self, state, rng, params=None):
        shape = state["count"].shape
        return TensorDict(
            {"at": state["position"], "of": TensorDict({"0": state["count"]}, shape)}, shape
        )


class Plain(Nested):
    """Returns plain dicts instead of TensorDicts."""

    def observation(self, state, rng, params=None):
        return {"at": state["position"], "of": {"0": state["count"]}}


class BroadcastNested(BroadcastWalk):
    observation_space, observation = Nested.observation_space, Nested.observation


class Itself(Walk):
    """The observation is a field of the state."""

    def observation(self, state, rng, params=None):
        return state["position"]


class BroadcastItself(BroadcastWalk):
    observation = Itself.observation


class Aliasing(FuncEnv):
    """Returns fields of the state without copying them."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def initial(self, rng, params=None):
        draw = random.uniform(rng)
        return {"now": draw * 0, "before": draw * 0 - 1, "prize": 1 + draw, "over": draw < 0}

    def transition(self, state, action, rng, params=None):
        return {
            "now": state["now"] + action[..., 0],
            "before": state["now"],
            "prize": state["prize"],
            "over": state["over"],
        }

    def observation(self, state, rng, params=None):
        return state["before"][..., None]

    def reward(self, state, action, next_state, rng, params=None):
        return state["prize"]

    def terminal(self, state, rng, params=None):
        return state["over"]


class BroadcastAliasing(Aliasing):
    broadcasts = True


PAIRS = (
    (Walk, BroadcastWalk),
    (Noisy, BroadcastNoisy),
    (Nested, BroadcastNested),
    (Itself, BroadcastItself),
)
both_walks = pytest.mark.parametrize(
    "func_env", [Walk(), BroadcastWalk()], ids=["vmap", "broadcast"]
)
both_noisy = pytest.mark.parametrize(
    "func_env", params({"vmap": Noisy(), "broadcast": BroadcastNoisy()}, quick=["broadcast"])
)
both_aliasing = pytest.mark.parametrize(
    "func_env", [Aliasing(), BroadcastAliasing()], ids=["vmap", "broadcast"]
)
every_env = pytest.mark.parametrize(
    "func_env",
    [Walk(), Itself(), BroadcastItself(), Nested(), Plain(), BroadcastNested()],
    ids=lambda f: type(f).__name__,
)


def odd(base=Walk, **functions):
    """A walk with some other functions."""
    return type(
        "Odd", (base,), {name: staticmethod(function) for name, function in functions.items()}
    )()


def play(env, td, actions):
    """Copies of the successors and roots: `(num_actions, 2, num_envs)`; and the last root."""
    out = []
    for action in actions:
        transition, td = env.step(td.set("action", action))
        out.append(
            torch.stack(
                [
                    transition["next"].clone(),
                    TensorDict({**transition["next"], **td}, td.batch_size).clone(),
                ]
            )
        )
    return torch.stack(out), td


def some_actions(env, steps, seed=0):
    """Random actions `(steps, num_envs, ...)` in [-1, 1]."""
    return torch.empty(steps, *env.action_space.shape).uniform_(
        -1, 1, generator=torch.Generator().manual_seed(seed)
    )


def equal(one, other):
    return bool((one == other).all())


def changed(env, before):
    """Names of the buffers that differ from `before`."""
    return [name for name, buffer in env.named_buffers() if not torch.equal(buffer, before[name])]
