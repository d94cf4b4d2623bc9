"""Random stacks: compiled envs and collectors return what eager ones do, whatever is called in between."""

from __future__ import annotations

import random

import pytest
import torch
from fuzz_operations import Operations, assert_same, chunks, leaves_of, perform, repeatable, tensors
from fuzz_stacks import compilable, scripted_env
from helpers import AOT, INDUCTOR

import torchwrap as tw
from torchwrap import RowMask, spaces

KINDS = {"step": 16, "masked reset": 4, "reset": 1, "sample": 1, "write": 1, "exchange": 2}
FLIPS = KINDS | {"mode": 2}  # each mode is a graph of its own, which takes as long to compile as the first one
COLLECTS = {"collect": 6, "masked reset": 2, "step": 1, "write": 1, "exchange": 1}
KEYS = [None, None, ["observation", "action", ("next", "reward")], ["action", ("next", "observation"), ("next", "done")]]


def check(stack, tolerance, number, kinds, make):
    """Performs operations on an eager and a compiled env of a stack, which sometimes exchange their snapshots.

    `make(compiled)` returns an env, and a collector or None.
    """
    with repeatable(stack):
        pairs = eager, compiled = make(False), make(True)
        operations = Operations(stack.seed, eager[0], kinds)
        roots = [env.reset(seed=0) for env, _ in pairs]
        for index in range(number):
            operation = operations.draw()
            if operation["kind"] == "exchange":
                others = [env.snapshot() for env, _ in reversed(pairs)]
                both = [({"td": td}, td) for (env, _), other in zip(pairs, others, strict=True) for td in [env.restore(other)]]
            else:
                both = [perform(env, operation, td, collect) for (env, collect), td in zip(pairs, roots, strict=True)]
            (expected, given), roots = zip(*both, strict=True)
            assert_same(tensors(given), tensors(expected), f"operation {index} {operation}", tolerance)
        expected, given = (tensors({"snapshot": env.snapshot()}) for env, _ in pairs)
        assert_same(given, expected, "the last snapshot", tolerance)
        assert any(part is not None and part.is_compiled for part in compiled)


def check_env(stack, backend, tolerance, number=15, kinds=None):
    def make(compiled):
        env = stack.make()
        return (tw.compile(env, backend=backend) if compiled else env), None

    flips = random.Random(f"flips {stack.seed}").random() < 0.2
    check(stack, tolerance, number, kinds or (FLIPS if flips else KINDS), make)


def policy_of(rng, env):
    """None, or a function of the observation that returns actions and a value."""
    if rng.random() < 0.3:
        return None
    action = spaces.sample(env.single_action_space, tw.random.Stream(env.num_envs, seed=rng.randrange(99)))

    def policy(td):
        leaves = [leaf.double().tanh().reshape(len(leaf), -1) for leaf in leaves_of(td["observation"]).values()]
        value = torch.cat(leaves, 1).sum(1, True)
        chosen = action.clone()
        if isinstance(chosen, torch.Tensor) and chosen.is_floating_point():
            chosen = chosen * value.tanh().view(-1, *[1] * (chosen.dim() - 1)).to(chosen.dtype)
        return td.update({"action": chosen, "value": value})

    return policy


def check_collector(stack, backend, tolerance, number=8):
    rng = random.Random(f"collectors {stack.seed}")
    policy, steps, keys, unroll = policy_of(rng, stack.make()), rng.randint(1, 5), rng.choice(KEYS), rng.randint(1, 3)

    def make(compiled):
        collect = tw.Collector(stack.make(), policy, steps, keys=keys)
        return collect.env, tw.compile(collect, backend=backend, unroll=unroll) if compiled else collect

    check(stack, tolerance, number, COLLECTS, make)


@pytest.mark.parametrize("numbers", chunks(100, 14, quick=2))
def test_compiled_env_of_a_random_stack_equals_the_eager_one(numbers, first_seed):
    for number in numbers:
        check_env(compilable(first_seed + number, operators=140), "aot_eager", AOT)


@pytest.mark.parametrize("numbers", chunks(16, 8, quick=1))
def test_compiled_collector_of_a_random_stack_equals_the_eager_one(numbers, first_seed):
    for number in numbers:
        check_collector(compilable(f"collectors {first_seed + number}", most=4, operators=120), "aot_eager", AOT)


def large_env(rng, _):
    """So many envs that the host resets them between graphs: all rows, or the few that are finished."""
    hazard, chased = rng.choice([0.02, 0.02, 0.3]), rng.random() < 0.7
    return f"tw.FunctionalEnv(Chase({hazard}, nested={rng.random() < 0.3}), 4099)" if chased else scripted_env(rng, 4097)


@pytest.mark.full
@pytest.mark.parametrize("number", range(4))
def test_compiled_env_of_many_envs_equals_the_eager_one(number, first_seed):
    check_env(compilable(f"large {first_seed + number}", most=3, operators=200, kinds=[large_env]), "aot_eager", AOT, 10)


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
def test_stack_through_inductor_equals_the_eager_one(number, first_seed):
    stack = compilable(f"inductor {first_seed + number}", most=3, operators=70, num_envs=(3,))
    if number < 4:
        # Often set to the same state again, because rounding differs in each step.
        check_env(stack, "inductor", INDUCTOR, 20, {"step": 8, "masked reset": 2, "reset": 1, "exchange": 4})
    else:
        check_collector(stack, "inductor", INDUCTOR)


@pytest.mark.full
@pytest.mark.parametrize("check", [check_env, check_collector])
def test_compiled_fuzzer_finds_a_row_that_graphs_do_not_reset(check, monkeypatch):
    whole = RowMask.fill_

    def all_but_the_first(mask, buffer, value):
        rows = mask.tensor & (torch.arange(len(mask)) > 0) if mask.indices is None else mask.tensor
        whole(RowMask(rows), buffer, value)

    monkeypatch.setattr(RowMask, "fill_", all_but_the_first)
    with pytest.raises(AssertionError, match=r"(?s)seed .*, AssertionError: operation .* instead of .*tw\."):
        for seed in range(20):
            check(compilable(seed, most=3, operators=80), "aot_eager", AOT)
