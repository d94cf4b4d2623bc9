"""Random stacks of transforms on random envs: they keep the contract, compiled too."""

import random

import pytest
import torch
from fuzz_operations import (
    Operations,
    assert_same,
    leaves_of,
    numbers,
    perform,
    play,
    repeatable,
    tensors,
)
from fuzz_stacks import compilable, draw
from gymnasium.envs.registration import EnvSpec
from helpers import AOT, INDUCTOR, through_file

import torchwrap as tw

# Results belong to the caller, and a snapshot continues bit for bit.


def made_again(stack, env):
    """Another env like this one, from its spec as JSON if it has one."""
    try:
        return tw.make(EnvSpec.from_json(env.spec.to_json())) if env.spec else stack.make()
    except (TypeError, ValueError):  # a function, which JSON cannot hold
        return stack.make()


def overwrite(result):
    for leaf in leaves_of(result).values():
        leaf.copy_(torch.full_like(leaf, 1 if leaf.dtype in (torch.bool, torch.uint8) else 77))


def check_contract(stack, number=24):
    """Plays the same with an env whose results are kept and with one whose results are overwritten.

    What was kept does not change. From a snapshot at a random moment on, a new env does the same.
    """
    rng = random.Random(f"contract {stack.seed}")
    env = stack.make()
    twin = stack.make()
    operations = Operations(stack.seed, env).several(number)
    steps = rng.randint(1, 3)
    moment = rng.randrange(number)
    held = []
    expected = []
    collects = [tw.Collector(one, None, steps) for one in (env, twin)]
    td = env.reset(seed=0)
    other = twin.reset(seed=0)
    for index, operation in enumerate(operations):
        if index == moment:
            snapshot = through_file(env.snapshot())
            training = env.training
        root = other
        if operation["kind"] == "write":
            own = {id(leaf) for leaf in leaves_of(td).values()}
            held = [(where, leaf, before) for where, leaf, before in held if id(leaf) not in own]
        result, td = perform(env, operation, td, collects[0])
        expected.append(tensors(result))
        held += [
            (index, leaf, leaf.clone())
            for value in result.values()
            for leaf in leaves_of(value).values()
        ]
        again, other = perform(twin, operation, other, collects[1])
        assert_same(tensors(again), expected[-1], f"operation {index} {operation}, after writes")
        for value in (*again.values(), root):
            if value is not other:
                overwrite(value)
    for index, leaf, before in held:
        assert leaf.equal(before) or leaf.isnan().any(), (
            f"what the caller holds of operation {index} has changed"
        )
    end = tensors({"snapshot": env.snapshot()})
    assert_same(tensors({"snapshot": twin.snapshot()}), end, "the last snapshot, after writes")
    new = made_again(stack, env).train(training)
    td = new.restore(snapshot)
    collect = tw.Collector(new, None, steps)
    results, _ = play(new, operations[moment:], td, collect)
    for operation, given, wanted in zip(
        operations[moment:], results, expected[moment:], strict=True
    ):
        assert_same(given, wanted, f"after the snapshot, {operation}")
    assert_same(tensors({"snapshot": new.snapshot()}), end, "the last snapshot, after a restore")


@numbers(quick=6, full=40, long=100)
def test_random_stack_keeps_the_contract(number, first_seed):
    stack = draw(first_seed + number)
    with repeatable(stack):
        check_contract(stack)


# Compiled envs and collectors return what eager ones do.

KINDS = {"step": 16, "masked reset": 4, "reset": 1, "sample": 1, "write": 1, "exchange": 2}
COLLECTS = {"collect": 6, "masked reset": 2, "step": 1, "write": 1, "exchange": 1}


def check_compiled(stack, tolerance, number, kinds, make):
    """Performs operations on an eager and a compiled env, which sometimes exchange snapshots.

    `make(compiled)` returns an env, and a collector or None.
    """
    pairs = eager, compiled = make(False), make(True)
    assert any(part is not None and part.is_compiled for part in compiled)
    operations = Operations(stack.seed, eager[0], kinds)
    roots = [env.reset(seed=0) for env, _ in pairs]
    for index in range(number):
        operation = operations.draw()
        if operation["kind"] == "exchange":
            others = [env.snapshot() for env, _ in reversed(pairs)]
            operations_of = [{"kind": "restore", "snapshot": other} for other in others]
        else:
            operations_of = [operation, operation]
        both = [
            perform(env, one, td, collect)
            for (env, collect), one, td in zip(pairs, operations_of, roots, strict=True)
        ]
        (expected, given), roots = zip(*both, strict=True)
        assert_same(tensors(given), tensors(expected), f"operation {index} {operation}", tolerance)
    expected, given = (tensors({"snapshot": env.snapshot()}) for env, _ in pairs)
    assert_same(given, expected, "the last snapshot", tolerance)


def check_compiled_env(stack, backend="aot_eager", tolerance=AOT):
    def make(compiled):
        env = stack.make()
        return (tw.compile(env, backend=backend) if compiled else env), None

    # Each mode is a graph of its own, which takes as long to compile as the first one.
    flips = {"mode": 2} if random.Random(f"flips {stack.seed}").random() < 0.2 else {}
    check_compiled(stack, tolerance, 15, KINDS | flips, make)


def check_compiled_collector(stack, backend="aot_eager", tolerance=AOT):
    rng = random.Random(f"collectors {stack.seed}")
    steps = rng.randint(1, 5)
    keys = rng.choice([None, None, ["action", ("next", "observation")]])

    def make(compiled):
        collect = tw.Collector(stack.make(), None, steps, keys=keys)
        return collect.env, tw.compile(collect, backend=backend) if compiled else collect

    check_compiled(stack, tolerance, 8, COLLECTS, make)


@pytest.mark.parametrize("check", [check_compiled_env, check_compiled_collector])
@numbers(quick=0, full=1, long=13)
def test_compiled_random_stack_equals_the_eager_one(number, check, first_seed):
    stack = compilable(f"{check.__name__} {first_seed + number}")
    with repeatable(stack):
        check(stack)


@pytest.mark.parametrize("check", [check_compiled_env, check_compiled_collector])
@numbers(quick=0, full=0, long=4)
def test_stack_through_inductor_equals_the_eager_one(number, check, first_seed):
    stack = compilable(f"inductor {first_seed + number}", num_envs=(3,))
    with repeatable(stack):
        check(stack, "inductor", INDUCTOR)
