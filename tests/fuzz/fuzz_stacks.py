"""Random stacks: from a seed, the code of an env with random spaces and random transforms on it.

The code is what a failing test shows. `from fuzz_stacks import *` in this folder gives it the names that it uses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random

import numpy as np
import torch  # noqa: F401 (the code of a stack uses it)
from catalogue import TRANSFORMS
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: F401
from oracles import RandomEnv  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W  # noqa: F401
from torchwrap.envs.acrobot import Acrobot  # noqa: F401
from torchwrap.envs.cartpole import CartPole  # noqa: F401
from torchwrap.envs.mountain_car_continuous import MountainCarContinuous  # noqa: F401
from torchwrap.envs.pendulum import Pendulum  # noqa: F401
from torchwrap.testing import ScriptedEnv

# What the code of a stack calls.


class Chase(FuncEnv):
    """Every function draws, and `initial` has an option. Episodes end at random, or never if `hazard` is 0."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, hazard=0.2, nested=False):
        self.hazard, self.nested = hazard, nested
        at = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict(at=at, steps=spaces.Box(0, 2**31 - 1, (), np.int64)) if nested else at

    def initial(self, rng, params=None, start=0.0):
        at = tw.random.uniform(rng, (2,)) + start
        return {"at": at, "target": tw.random.normal(rng.fold_in(1), (2,)), "steps": tw.random.integers(rng.fold_in(2), 3)}

    def transition(self, state, action, rng, params=None):
        gain = 0.1 if params is None else params["gain"]
        target = state["target"] + 0.1 * tw.random.normal(rng, (2,))
        return {"at": state["at"] + gain * action, "target": target, "steps": state["steps"] + 1}

    def observation(self, state, rng, params=None):
        at = state["at"] + 1e-3 * tw.random.normal(rng, (2,))
        return {"at": at, "steps": state["steps"]} if self.nested else at

    def reward(self, state, action, next_state, rng, params=None):
        return tw.random.uniform(rng) - (next_state["at"] - next_state["target"]).square().sum()

    def terminal(self, state, rng, params=None):
        return tw.random.uniform(rng) < self.hazard


def copied(value):
    return value.clone()


def halved(value):
    return value / 2


def shifted(value):
    return value + 1


def softened(value):
    return value / (1 + value.abs())


FUNCTIONS = ("copied", "halved", "shifted", "softened", "torch.tanh")


# Spaces.

FLOATS, INTEGERS = ("float32", "float32", "float64", "float16"), ("uint8", "int32", "int64")
SHAPES = ((), (1,), (3,), (4,), (2, 2), (2, 1, 3))


def box(rng, dtypes=FLOATS + INTEGERS, shapes=SHAPES, bounded=0.6):
    dtype, shape = rng.choice(dtypes), rng.choice(shapes)
    if dtype in FLOATS and rng.random() > bounded:
        if rng.random() < 0.6:
            return f"spaces.Box(-np.inf, np.inf, {shape}, np.{dtype})"
        size = range(math.prod(shape))
        low, high = (np.reshape([sign * rng.choice([math.inf, rng.randint(0, 9)]) for _ in size], shape) for sign in (-1, 1))
        bounds = (f"np.array({bound.tolist()}, np.{dtype})".replace("inf", "np.inf") for bound in (low, high))
        return f"spaces.Box({', '.join(bounds)}, dtype=np.{dtype})"
    low = rng.randint(0, 9) if dtype == "uint8" else rng.randint(-20, 20)
    return f"spaces.Box({low}, {low + rng.randint(1, 99)}, {shape}, np.{dtype})"


def image(rng):
    shape = (rng.randint(2, 9), rng.randint(2, 9), *rng.choice([(), (3,), (3,), (1,)]))
    return f"spaces.Box(0, 255, {shape}, np.uint8)"


def finite(rng):
    kind = rng.randrange(3)
    if kind == 0:
        return f"spaces.Discrete({rng.randint(1, 6)}, start={rng.randint(-2, 3)})"
    if kind == 1:
        counts = rng.choice([[3], [2, 4], [[2, 3], [4, 1]]])
        return f"spaces.MultiDiscrete({counts})"
    return f"spaces.MultiBinary({rng.choice([3, [2, 2]])})"


def nested(rng, leaf, depth=2):
    def part():
        return nested(rng, leaf, depth - 1) if depth > 1 and rng.random() < 0.25 else leaf(rng)

    if rng.random() < 0.6:
        return f"spaces.Dict({', '.join(f'{name}={part()}' for name in rng.sample('abc', rng.randint(1, 3)))})"
    return f"spaces.Tuple([{', '.join(part() for _ in range(rng.randint(1, 3)))}])"


def observation_space(rng):
    boxes = functools.partial(nested, leaf=box)
    mixed = functools.partial(nested, leaf=lambda rng: rng.choice([box, image, finite])(rng))
    return rng.choice([box, box, box, image, image, image, image, finite, boxes, mixed])(rng)


def action_space(rng):
    floats = functools.partial(box, dtypes=FLOATS[:3], bounded=0.9)
    mixed = functools.partial(nested, leaf=lambda rng: rng.choice([box, finite])(rng))
    return rng.choice([floats, floats, floats, box, finite, finite, mixed])(rng)


# Envs.


def episode_lengths(rng):
    several = [rng.randint(1, 7) for _ in range(rng.randint(2, 5))]
    return rng.choice([None, 1, 2, rng.randint(3, 9), several, several, several, several])


def scripted_env(rng, num_envs):
    ending = rng.choice(["terminated", "truncated", "both", "in turn"])
    arguments = f"episode_lengths={episode_lengths(rng)}, ending={ending!r}, first_index={rng.choice([0, 0, 0, 3])}"
    both = f"observation_space={observation_space(rng)}, action_space={action_space(rng)}"
    return f"ScriptedEnv({num_envs}, {arguments}, {both})"


def native_env(rng, num_envs):
    limit = f"max_episode_steps={rng.choice([1, 4, 9, 30])}"
    return f"tw.make({rng.choice(sorted(tw.registration.NATIVE))!r}, {num_envs}, {limit}, first_index={rng.choice([0, 0, 5])})"


def functional_env(rng, num_envs):
    func_env = rng.choice(["CartPole()", "Pendulum()", "MountainCarContinuous()", "Acrobot()", "Chase()", "Chase()"])
    arguments = [f"max_episode_steps={rng.choice([None, 1, 3, 8])}", f"action_repeat={rng.choice([1, 1, 2, 3])}"]
    if func_env == "Chase()":
        func_env = f"Chase({rng.choice([0, 0.1, 0.3, 1])}, nested={rng.random() < 0.4})"
    if func_env.startswith("Chase") and rng.random() < 0.4:
        arguments.append(f"params={{'gain': torch.arange({num_envs}) / 8}}")
    elif rng.random() < 0.5:
        arguments.append(f"reset_pool={rng.choice([1, 7, 300])}")
    return f"tw.FunctionalEnv({func_env}, {num_envs}, {', '.join(arguments)})"


def gymnasium_env(rng, num_envs):
    """A simulator on the host, which is not among the `KINDS`, because it has no snapshots and no graph."""
    if rng.random() < 0.4:
        name = rng.choice(["CartPole-v1", "Pendulum-v1", "MountainCar-v0"])
        return f"tw.make({name!r}, {num_envs}, backend='gymnasium', max_episode_steps={rng.choice([1, 3, 9])})"
    arguments = f"{observation_space(rng)}, action_space={action_space(rng)}, max_length={rng.choice([1, 3, 6, None])}"
    mode = f"autoreset_mode=AutoresetMode.{rng.choice(['DISABLED', 'SAME_STEP'])}"
    return f"tw.from_gymnasium(SyncVectorEnv([lambda: RandomEnv({arguments})] * {num_envs}, {mode}))"


def wrapped(rng, env):
    if rng.random() < 0.75:
        return env
    wrapper = rng.choice(["RepeatAction", "MaxAndSkipObservation"])
    return f"W.{wrapper}({env}, {rng.randint(2, 3)})"


# Transforms: code with arguments that often fit a signature.


def _padding(rng, space):
    if isinstance(space, spaces.Discrete) and rng.random() < 0.3:
        return str(space.start)
    if isinstance(space, spaces.Box) and space.is_bounded() and rng.random() < 0.3:
        return f"np.full({space.shape}, {space.low.max().item()}, np.{space.dtype})"
    return repr(rng.choice(["reset", "zero"]))


def _bins(rng, space):
    size = math.prod(space.shape or ()) if isinstance(space, spaces.Box) else 1
    return rng.choice([rng.randint(1, 5), tuple(rng.randint(1, 4) for _ in range(size))])


def _parts(rng, space):
    known = list(getattr(space, "spaces", ()))
    known = known if isinstance(space, spaces.Dict) else list(range(len(known)))
    return rng.sample(known, rng.randint(1, len(known))) if known else ["a"]


def _shapes(space):
    size = math.prod(space.shape or ())
    two = [(first, size // first) for first in range(1, size + 1) if size % first == 0]
    return [(size,), (1, size, 1), (space.shape or ())[::-1], *two]


def _smaller(rng, space):
    return tuple(rng.randint(1, side) for side in (*(space.shape or ()), 4, 4)[:2])


def _bounds(rng):
    low = rng.choice([-5, -1, 0, 0.5])
    return f"{low}, {low + rng.choice([0.5, 1, 20])}"


def _metrics(rng, base):
    action = base.signature.single_action_space
    has_number = isinstance(base.unwrapped, ScriptedEnv) and isinstance(action, spaces.Box) and action.shape == (1,)
    return ["action"] if has_number and action.dtype == np.float32 and rng.random() < 0.5 else []


def _function(rng, space):
    # Numbers of a finite space have to stay in it, because layers take them for indices.
    return rng.choice(FUNCTIONS) if isinstance(space, spaces.Box) else "copied"


def _gray(rng):
    return rng.random() < 0.3


ARGUMENTS = {  # name: (rng, signature, base env) -> the code of its arguments
    "AddWhiteNoise": lambda rng, s, base: f"{rng.choice([0, 0.2, 0.9])}, {_gray(rng)}",
    "ClipAction": lambda rng, s, base: "",
    "ClipObservation": lambda rng, s, base: _bounds(rng),
    "ClipReward": lambda rng, s, base: rng.choice(["-1, 1", "None, 2.5", "0.5", "-10, 10"]),
    "Compose": lambda rng, s, base: "[]",
    "DelayObservation": lambda rng, s, base: f"{rng.randint(0, 4)}",
    "DiscretizeAction": lambda rng, s, base: f"{_bins(rng, s.single_action_space)}, {rng.random() < 0.5}",
    "DiscretizeObservation": lambda rng, s, base: f"{_bins(rng, s.single_observation_space)}, {rng.random() < 0.5}",
    "DtypeObservation": lambda rng, s, base: repr(rng.choice(FLOATS + INTEGERS)),
    "EvalWrapper": lambda rng, s, base: f"{_metrics(rng, base)}",
    "FilterObservation": lambda rng, s, base: f"{_parts(rng, s.single_observation_space)}",
    "FlattenObservation": lambda rng, s, base: "",
    "FrameStackObservation": lambda rng, s, base: (
        f"{rng.randint(1, 4)}, padding_type={_padding(rng, s.single_observation_space)}"
    ),
    "GrayscaleObservation": lambda rng, s, base: f"{rng.random() < 0.5}",
    "NormalizeObservation": lambda rng, s, base: rng.choice(["", "1e-4"]),
    "NormalizeReward": lambda rng, s, base: f"{rng.choice([0, 0.5, 0.99, 1])}, {rng.choice([1e-8, 1e-2])}",
    "ObstructView": lambda rng, s, base: f"{rng.choice([0, 0.3, 0.8])}, {rng.randint(1, 3)}, {_gray(rng)}",
    "PassiveEnvChecker": lambda rng, s, base: "",
    "RecordEpisodeStatistics": lambda rng, s, base: f"{rng.choice([1, 3, 40])}, {rng.choice(['episode', 'whole'])!r}",
    "RescaleAction": lambda rng, s, base: _bounds(rng),
    "RescaleObservation": lambda rng, s, base: _bounds(rng),
    "ReshapeObservation": lambda rng, s, base: f"{rng.choice(_shapes(s.single_observation_space))}",
    "ResizeObservation": lambda rng, s, base: f"{_smaller(rng, s.single_observation_space)}",
    "ScaleReward": lambda rng, s, base: f"{rng.choice([-2, 0.1, 3])}",
    "StickyAction": lambda rng, s, base: f"{rng.choice([0, 0.3, 0.9])}, {rng.choice([1, 2, (1, 3)])}",
    "TimeAwareObservation": lambda rng, s, base: (
        f"{rng.random() < 0.5}, {rng.random() < 0.5}, dict_time_key={rng.choice(['time', 'clock'])!r}"
    ),
    "TimeLimit": lambda rng, s, base: f"{rng.choice([1, 2, 3, 5, 9, 100])}",
    "TransformAction": lambda rng, s, base: _function(rng, s.single_action_space),
    "TransformObservation": lambda rng, s, base: _function(rng, s.single_observation_space),
    "TransformReward": lambda rng, s, base: rng.choice(FUNCTIONS),
}
# These may leave the bounds of their spaces, by rounding or on purpose, which a PassiveEnvChecker would report.
LEAVES_BOUNDS = {"RescaleAction", "RescaleObservation", "TransformAction", "TransformObservation"}
# Above statistics, which a graph sums up in another order, the rounding to these values could turn an ulp into a unit.
ROUNDS = {"DiscretizeObservation", "DtypeObservation"}
MAX_SIZE = 600  # elements of an observation
# Gymnasium warns about the number that one of them takes as padding, if the space is no Discrete.
SELECTIVE = (  # which fit few spaces, and are drawn more often
    *("AddWhiteNoise", "GrayscaleObservation", "ObstructView", "ResizeObservation", "FilterObservation", "ClipAction"),
    *("RescaleObservation", "RescaleAction", "DiscretizeObservation", "DiscretizeAction"),
)
# The state of a policy needs one that sets it.
CATALOGUE = sorted(set(TRANSFORMS) - {"FrameStackObservation of numbers", "PolicyState"})


def _transform(rng, signature, base):
    # The code of a transform that may fit.
    if rng.random() < 0.15:
        return f"TRANSFORMS[{rng.choice(CATALOGUE)!r}][0]()"
    name = rng.choice(SELECTIVE if rng.random() < 0.4 else sorted(ARGUMENTS))
    return f"T.{name}({ARGUMENTS[name](rng, signature, base)})"


def _names(part):
    # With those inside of it, as in a Compose or an ObservationGroups.
    return [type(inner).__name__ for inner in part.modules() if isinstance(inner, T.Transform)]


def _is_small(after, before):
    # Numbers count as one-hot, as FlattenObservation makes them.
    return spaces.flatdim(after) <= max(MAX_SIZE, spaces.flatdim(before))


def _grouped(rng, codes):
    # Some neighbors in a Compose of their own.
    if len(codes) > 1 and rng.random() < 0.3:
        start = rng.randrange(len(codes) - 1)
        end = rng.randint(start + 1, len(codes))
        codes = [*codes[:start], f"T.Compose([{', '.join(_grouped(rng, codes[start:end]))}])", *codes[end:]]
    return codes


@dataclasses.dataclass(frozen=True)
class Stack:
    """A random env with transforms."""

    seed: int
    code: str
    names: tuple[str, ...]
    """Of its transforms."""

    def make(self):
        return make(self.code)


def make(code):
    """The env of a stack's code. Its random streams are seeded by its first reset."""
    return eval(code, globals())


KINDS = (scripted_env, scripted_env, scripted_env, native_env, functional_env)


def draw(seed, *, without=(), continuous=False, num_envs=(1, 1, 2, 3, 5, 5, 17), most=7, kinds=KINDS):
    """The stack of a seed.

    Args:
        seed: an int.
        without: names of transforms to leave out.
        continuous: whether small differences of learned statistics have to stay small.
        num_envs: numbers of envs to choose from.
        most: number of transforms.
        kinds: functions that draw an env, to choose from.
    """
    rng = random.Random(seed)
    while True:
        code = wrapped(rng, rng.choice(kinds)(rng, rng.choice(num_envs)))
        try:
            base = make(code)
        except (TypeError, ValueError):  # MaxAndSkipObservation takes a Box only
            continue
        break
    if "np.array(" in code:  # partly bounded: a ScriptedEnv leaves the bounds, and a checker would say so
        without = {*without, "PassiveEnvChecker"}
    signature, names, codes, number = base.signature, [], [], rng.randint(1, most)
    while len(codes) < number:
        part, transform = None, _transform(rng, signature, base)
        try:
            part = make(transform)
            part.allocate(signature.num_envs, signature.device)
            after = part.setup(signature) if _fits(part, names, without, continuous, signature) else None
        except (TypeError, ValueError):
            continue
        if after is not None and _is_small(after.single_observation_space, signature.single_observation_space):
            signature, names, codes = after, [*names, *_names(part)], [*codes, transform]
    cut = rng.choice([0, 0, rng.randrange(number)])
    for layer in filter(None, (codes[:cut], codes[cut:])):
        code = f"tw.TransformedEnv({code}, {', '.join(_grouped(rng, layer))})"
    return Stack(seed, code, tuple(names))


def _fits(part, names, without, continuous, signature):
    # `names` stand below it.
    new, space = set(_names(part)), signature.single_observation_space
    if "AddNoise" in new and space != spaces.Box(-np.inf, np.inf, space.shape):  # a user's, which does not check this
        return False
    rounds = continuous and new & ROUNDS and "NormalizeObservation" in names
    checked = {"PassiveEnvChecker"} & {*names, *new} and LEAVES_BOUNDS & {*names, *new}
    return not new & set(without) and not rounds and not checked


class CountOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def compilable(seed, operators, most=7, **arguments):
    """The first stack from this seed on whose step is not too large to be compiled a hundred times."""
    for attempt in range(100):
        name = f"compiled {seed}" + f".{attempt}" * bool(attempt)
        stack = draw(name, without=["PassiveEnvChecker"], continuous=True, most=most, **arguments)
        env = stack.make()
        td = env.reset(seed=0)
        with CountOperators() as counted:
            env.step(td.set("action", env.sample_action()))
            env.reset()
        if counted.count <= operators:
            return stack
    raise ValueError(f"compilable needs more than {operators} operators for a stack of {seed}.")
