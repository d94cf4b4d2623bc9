"""Random operations on an env: steps, rollouts, resets, changes of mode, and writes to a root."""

import contextlib
import random

import pytest
import torch
from helpers import AT_RELEASES

import torchwrap as tw
from torchwrap import spaces


def numbers(quick, full, long=0):
    """The parameter `number`: how many stacks by default, with --full, and in long tests."""
    marked = [pytest.param(number, marks=pytest.mark.full) for number in range(quick, full)]
    marked += [pytest.param(number, marks=AT_RELEASES) for number in range(full, long)]
    return pytest.mark.parametrize("number", [*range(quick), *marked])


@contextlib.contextmanager
def repeatable(stack):
    """Adds the seed and the code of a stack to whatever goes wrong."""
    try:
        yield
    except Exception as error:
        raise AssertionError(
            f"seed {stack.seed}, {type(error).__name__}: {error}\n\n{stack.code}\n"
        ) from error


# Drawing.


class Operations:
    """Draws operations for an env, as dicts of tensors and plain values, without the env.

    Args:
        seed: of the operations, any value with a `repr`.
        env: the env.
        kinds: how often each kind is drawn, by name.
    """

    KINDS = {"step": 16, "collect": 2, "masked reset": 3, "reset": 1}
    KINDS |= dict.fromkeys(("mode", "sample", "write"), 1)

    def __init__(self, seed, env, kinds=None):
        self.rng = random.Random(f"operations {seed!r}")
        self.kinds = kinds or self.KINDS
        self.space = env.single_action_space
        self.num_envs = env.num_envs
        self.stream = tw.random.Stream(env.num_envs, seed=self.rng.randrange(2**32))
        functional = getattr(env.unwrapped, "func_env", None)
        self.options = [None]
        if type(functional).__name__ == "Chase":
            self.options = [None, None, {"start": 0.5}]

    def draw(self):
        rng = self.rng
        kind = rng.choices(list(self.kinds), self.kinds.values())[0]
        if kind == "step":
            action = spaces.sample(self.space, self.stream)
            return {"kind": kind, "action": action, "bare": rng.random() < 0.3}
        if kind == "masked reset":
            mask = torch.tensor([rng.random() < 0.4 for _ in range(self.num_envs)])
            mask[rng.randrange(self.num_envs)] = True
            seed = rng.choice([None, None, 3])
            options = rng.choice(self.options)
            return {"kind": kind, "mask": mask, "seed": seed, "options": options}
        if kind == "reset":
            seed = rng.choice([None, 5, 2**40 + 7])
            return {"kind": kind, "seed": seed, "options": rng.choice(self.options)}
        return {"kind": kind, "training": rng.random() < 0.5}

    def several(self, number):
        return [self.draw() for _ in range(number)]


# Performing.


def perform(env, operation, td, collect=None):
    """Performs an operation on an env with the root `td`. Returns its results, and the root."""
    kind = operation["kind"]
    if kind == "step":
        action = operation["action"].clone()
        transition, td = env.step(action if operation["bare"] else td.set("action", action))
        return {"transition": transition, "td": td}, td
    if kind == "collect":
        data = collect()
        return {"data": data, "td": env.root}, env.root
    if kind in ("reset", "masked reset"):
        td = env.reset(operation["seed"], operation.get("mask"), operation["options"])
        return {"td": td}, td
    if kind == "restore":
        td = env.restore(operation["snapshot"])
        return {"td": td}, td
    if kind == "sample":
        return {"action": env.sample_action()}, td
    if kind == "mode":
        env.train(operation["training"])
    else:  # "write": the root is the caller's, so each row takes the first one's observation
        for leaf in leaves_of(td["observation"]).values():
            leaf.copy_(leaf[:1].clone().expand_as(leaf))
    return {}, td


def leaves_of(value):
    """The tensors of an observation, an action or a TensorDict, by path."""
    return {(): value} if isinstance(value, torch.Tensor) else dict(value.items(True, True))


def tensors(result):
    """Copies of all tensors, by path."""
    return {
        "/".join([name, *([path] if isinstance(path, str) else path)]): leaf.clone(
            memory_format=torch.contiguous_format
        )
        for name, value in result.items()
        for path, leaf in leaves_of(value).items()
    }


def play(env, operations, td, collect=None):
    """What each operation returned, as copies; at last the root."""
    results = []
    for operation in operations:
        result, td = perform(env, operation, td, collect)
        results.append(tensors(result))
    return results, td


# Comparing.


def assert_same(given, expected, where, tolerance=None):
    """Two dicts of `tensors` have the same keys, shapes, dtypes and values.

    None as the tolerance compares bits: signs of zeros and NaNs count. A number is the relative and
    absolute tolerance of floats.
    """
    assert given.keys() == expected.keys(), (
        f"{where}: {sorted(given.keys() ^ expected.keys())} in one of the two"
    )
    for key, value in expected.items():
        other = given[key]
        layouts = [(tensor.dtype, tuple(tensor.shape)) for tensor in (other, value)]
        assert layouts[0] == layouts[1], f"{where}, {key}: {layouts[0]} instead of {layouts[1]}"
        if other.numpy().tobytes() == value.numpy().tobytes():
            continue
        within = tolerance if tolerance is not None and value.is_floating_point() else 0
        within *= (
            20 if value.dtype == torch.float16 else 1
        )  # Inductor computes in float32 and rounds once
        wrong = ~torch.isclose(other, value, rtol=within, atol=within, equal_nan=True)
        index = (wrong if wrong.any() else other == other).nonzero()[0].tolist()
        first = f"{other[tuple(index)].item()} instead of {value[tuple(index)].item()} at {index}"
        assert tolerance is not None and not wrong.any(), (
            f"{where}, {key}: {first}, {wrong.sum()} of {wrong.numel()} differ"
        )
