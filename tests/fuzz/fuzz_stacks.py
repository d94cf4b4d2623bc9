"""Random stacks: from a seed, the code of an env with random spaces and random transforms on it.

The code is what a failing test shows. This module has the names that it uses.
"""

import dataclasses
import functools
import random

import numpy as np
import torch  # noqa: F401 (the code of a stack uses it)
from catalogue import TRANSFORMS, UNCAPTURED
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W  # noqa: F401
from torchwrap.envs.cartpole import CartPole  # noqa: F401
from torchwrap.envs.pendulum import Pendulum  # noqa: F401
from torchwrap.testing import ScriptedEnv  # noqa: F401


class Chase(FuncEnv):
    """Every function draws, and `initial` has an option. Episodes end at random, by `hazard`."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)
    observation_space = spaces.Dict(
        at=spaces.Box(-np.inf, np.inf, (2,), np.float32),
        steps=spaces.Box(0, 2**31 - 1, (), np.int64),
    )

    def __init__(self, hazard):
        self.hazard = hazard

    def initial(self, rng, params=None, start=0.0):
        at = tw.random.uniform(rng, shape=(2,)) + start
        return {
            "at": at,
            "target": tw.random.normal(rng.fold_in(1), shape=(2,)),
            "steps": tw.random.integers(rng.fold_in(2), 3),
        }

    def transition(self, state, action, rng, params=None):
        gain = 0.1 if params is None else params["gain"]
        target = state["target"] + 0.1 * tw.random.normal(rng, shape=(2,))
        return {"at": state["at"] + gain * action, "target": target, "steps": state["steps"] + 1}

    def observation(self, state, rng, params=None):
        return {
            "at": state["at"] + 1e-3 * tw.random.normal(rng, shape=(2,)),
            "steps": state["steps"],
        }

    def reward(self, state, action, next_state, rng, params=None):
        return tw.random.uniform(rng) - (next_state["at"] - next_state["target"]).square().sum()

    def terminal(self, state, rng, params=None):
        return tw.random.uniform(rng) < self.hazard


# Spaces.

FLOATS = ("float32", "float32", "float64", "float16")
INTEGERS = ("uint8", "int32", "int64")


def box(rng, dtypes=FLOATS + INTEGERS):
    dtype = rng.choice(dtypes)
    shape = rng.choice([(), (1,), (3,), (2, 2), (2, 1, 3)])
    if dtype in FLOATS and rng.random() < 0.3:
        return f"spaces.Box(-np.inf, np.inf, {shape}, np.{dtype})"
    low = rng.randint(0, 9) if dtype == "uint8" else rng.randint(-20, 20)
    return f"spaces.Box({low}, {low + rng.randint(1, 99)}, {shape}, np.{dtype})"


def image(rng):
    channels = rng.choice([(), (3,), (3,)])
    shape = (rng.randint(3, 9), rng.randint(3, 9), *channels)
    return f"spaces.Box(0, 255, {shape}, np.uint8)"


def finite(rng):
    discrete = f"spaces.Discrete({rng.randint(1, 6)}, start={rng.randint(-2, 3)})"
    return rng.choice(
        [discrete, "spaces.MultiDiscrete([[2, 3], [4, 1]])", "spaces.MultiBinary([2, 2])"]
    )


def nested(rng):
    parts = [rng.choice([box, image, finite])(rng) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.6:
        named = [f"{name}={part}" for name, part in zip("abc", parts, strict=False)]
        return f"spaces.Dict({', '.join(named)})"
    return f"spaces.Tuple([{', '.join(parts)}])"


def observation_space(rng):
    return rng.choice([box, box, image, image, finite, nested])(rng)


def action_space(rng):
    floats = box(rng, FLOATS[:3])
    return rng.choice(
        [floats, floats, finite(rng), f"spaces.Dict(push={floats}, gear={finite(rng)})"]
    )


# Envs.


def scripted_env(rng, num_envs):
    lengths = rng.choice(
        [None, 1, 2, *([rng.randint(1, 7) for _ in range(rng.randint(2, 5))] for _ in range(5))]
    )
    ending = rng.choice(["terminated", "truncated", "both", "in turn"])
    arguments = (
        f"episode_lengths={lengths}, ending={ending!r}, first_index={rng.choice([0, 0, 0, 3])}"
    )
    members = f"observation_space={observation_space(rng)}, action_space={action_space(rng)}"
    return f"ScriptedEnv({num_envs}, {arguments}, {members})"


def native_env(rng, num_envs):
    limit = f"max_episode_steps={rng.choice([1, 4, 9, 30])}"
    id = rng.choice(sorted(tw.registration.NATIVE))
    return f"tw.make({id!r}, {num_envs}, {limit}, first_index={rng.choice([0, 0, 5])})"


def functional_env(rng, num_envs):
    func_env = rng.choice(["CartPole()", "Pendulum()", "Chase(0)", "Chase(0.2)", "Chase(1)"])
    arguments = f"max_episode_steps={rng.choice([None, 1, 3, 8])}"
    more = ""
    if func_env.startswith("Chase") and rng.random() < 0.4:
        more = f", params={{'gain': torch.arange({num_envs}) / 8}}"
    return f"tw.FunctionalEnv({func_env}, {num_envs}, {arguments}{more})"


def wrapped(rng, env):
    wrapper = rng.choice(["RepeatAction", "MaxAndSkipObservation"])
    return f"W.{wrapper}({env}, {rng.randint(2, 3)})" if rng.random() < 0.25 else env


# Transforms.

ARGUMENTS = {  # code of random arguments; the transforms of the catalogue have theirs
    "AddWhiteNoise": lambda rng: f"{rng.choice([0, 0.2, 0.9])}, {rng.random() < 0.3}",
    "ClipReward": lambda rng: rng.choice(["-1, 1", "None, 2.5", "-10, 10"]),
    "DelayObservation": lambda rng: f"{rng.randint(0, 4)}",
    "DiscretizeAction": lambda rng: f"{rng.randint(1, 5)}, {rng.random() < 0.5}",
    "DiscretizeObservation": lambda rng: f"{rng.randint(1, 5)}, {rng.random() < 0.5}",
    "DtypeObservation": lambda rng: repr(rng.choice(FLOATS + INTEGERS)),
    "FrameStackObservation": lambda rng: (
        f"{rng.randint(1, 4)}, padding_type={rng.choice(['reset', 'zero'])!r}"
    ),
    "NormalizeReward": lambda rng: f"{rng.choice([0, 0.5, 0.99, 1])}, {rng.choice([1e-8, 1e-2])}",
    "ObstructView": lambda rng: (
        f"{rng.choice([0, 0.3, 0.8])}, {rng.randint(1, 3)}, {rng.random() < 0.3}"
    ),
    "RecordEpisodeStatistics": lambda rng: (
        f"{rng.choice([1, 3, 40])}, {rng.choice(['episode', 'whole'])!r}"
    ),
    "StickyAction": lambda rng: f"{rng.choice([0, 0.3, 0.9])}, {rng.choice([1, 2, (1, 3)])}",
    "TimeLimit": lambda rng: f"{rng.choice([1, 2, 3, 5, 9, 100])}",
}
# One has a number as padding, for a Discrete space only; a PolicyState needs a policy.
CATALOGUED = "{**TRANSFORMS, **UNCAPTURED}"
CATALOGUE = sorted(
    {**TRANSFORMS, **UNCAPTURED}.keys() - {"FrameStackObservation of numbers", "PolicyState"}
)
# These may leave the bounds of their spaces. A PassiveEnvChecker would report it.
LEAVES_BOUNDS = {"AffineAction", "RescaleAction", "RescaleObservation"}
LEAVES_BOUNDS |= {"TransformAction", "TransformObservation"}
# A graph sums statistics in another order. Rounding above them could turn an ulp into a unit.
ROUNDS = {"DiscretizeObservation", "DtypeObservation"}
MAX_SIZE = 600  # elements of an observation


def _transform(rng):
    if rng.random() < 0.7:
        return f"{CATALOGUED}[{rng.choice(CATALOGUE)!r}][0]()"
    name = rng.choice(sorted(ARGUMENTS))
    return f"T.{name}({ARGUMENTS[name](rng)})"


def _fits(transform, names, without, continuous, space):
    # `names` stand below it.
    new = {type(inner).__name__ for inner in transform.modules() if isinstance(inner, T.Transform)}
    if "AddNoise" in new and space != spaces.Box(
        -np.inf, np.inf, space.shape
    ):  # a user's, which does not check this
        return set()
    if "TransformObservation" in new and not isinstance(
        space, spaces.Box
    ):  # layers take its numbers for indices
        return set()
    twice = {"CommandObservation", "RecordEpisodeStatistics"} & new & names  # of one key
    rounds = continuous and new & ROUNDS and "NormalizeObservation" in names
    checked = {"PassiveEnvChecker"} & {*names, *new} and LEAVES_BOUNDS & {*names, *new}
    return set() if new & set(without) or twice or rounds or checked else new


@dataclasses.dataclass(frozen=True)
class Stack:
    """A random env with transforms, whose classes are the names."""

    seed: int | str
    code: str
    names: frozenset[str]

    def make(self):
        """The env. Its random streams are seeded by its first reset."""
        return eval(self.code, globals())


def draw(seed, *, without=(), continuous=False, num_envs=(1, 1, 2, 3, 5, 5, 17), most=6):
    """The stack of a seed, without some transforms. If `continuous`, differences stay small."""
    rng = random.Random(seed)
    own = []
    while True:
        kind = rng.choice([scripted_env, scripted_env, native_env, functional_env, None, None])
        if kind is None:  # a transform of the catalogue on the env that it serves
            name = rng.choice(CATALOGUE)
            code = f"{CATALOGUED}[{name!r}][1]({rng.choice(num_envs)})"
            own = [f"{CATALOGUED}[{name!r}][0]()"]
        else:
            code = wrapped(rng, kind(rng, rng.choice(num_envs)))
        try:
            signature = eval(code, globals()).signature
        except (TypeError, ValueError):  # MaxAndSkipObservation takes a Box only
            continue
        break
    names = set()
    codes = []
    number = rng.randint(1, most)
    while len(codes) < number:
        transform = own.pop() if own else _transform(rng)
        space = signature.single_observation_space
        part = eval(transform, globals())
        new = _fits(part, names, without, continuous, space)
        try:
            part.allocate(signature.num_envs, signature.device)
            after = part.setup(signature) if new else None
        except (TypeError, ValueError):
            continue
        # Numbers count as one-hot, as FlattenObservation makes them.
        if new and spaces.flatdim(after.single_observation_space) <= max(
            MAX_SIZE, spaces.flatdim(space)
        ):
            signature = after
            names = names | new
            codes = [*codes, transform]
    cut = rng.choice([0, 0, rng.randrange(number)])
    for layer in filter(None, (codes[:cut], codes[cut:])):
        part = (
            f"T.Compose([T.Compose([{layer[0]}]), {', '.join(layer[1:])}])"
            if rng.random() < 0.2
            else ", ".join(layer)
        )
        code = f"tw.TransformedEnv({code}, {part})"
    return Stack(seed, code, frozenset(names))


compilable = functools.partial(draw, without=["PassiveEnvChecker"], continuous=True, most=3)
