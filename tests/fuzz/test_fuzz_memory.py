"""Random stacks: what a caller holds never changes, and what a caller writes to never reaches the env."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fuzz_operations import Operations, assert_same, chunks, leaves_of, perform, repeatable, tensors
from fuzz_stacks import compilable, draw
from tensordict import TensorDict

import torchwrap as tw
from torchwrap._core.buffer_pool import BufferPool

KINDS = {"step": 8, "collect": 4, "masked reset": 2, "reset": 1}


def arrays(held):
    """What is held, as arrays that share its memory."""
    if isinstance(held, TensorDict):
        return [array for leaf in leaves_of(held).values() for array in arrays(leaf)]
    if isinstance(held, torch.UntypedStorage):
        return [np.frombuffer(torch.empty(0, dtype=torch.uint8).set_(held).numpy(), np.uint8)]
    return [held.numpy() if isinstance(held, torch.Tensor) else np.asarray(held)]


def part_of(rng, value):
    """Something that a caller may keep of a result, and nothing else of it."""
    leaf = rng.choice(list(leaves_of(value).values()))
    row = rng.randrange(len(leaf))
    parts = [lambda: leaf, lambda: leaf[row:], lambda: leaf[row], lambda: leaf.transpose(0, -1), leaf.detach]
    parts += [leaf.numpy, lambda: leaf.numpy()[row:], leaf.untyped_storage, lambda: memoryview(leaf.numpy())]
    if isinstance(value, TensorDict):
        parts += [value.copy, lambda: value.clone(False), lambda: value[row : row + 2], lambda: value.select("observation")]
    return rng.choice(parts)()


class Held:
    """What a caller holds, and its content."""

    def __init__(self, rng):
        self.rng, self.items = rng, []

    def add(self, owner, value):
        """Holds random parts of a value. The owner tells later which call it came from."""
        for _ in range(2):
            part = part_of(self.rng, value)
            self.items.append((owner, part, [array.copy() for array in arrays(part)]))

    def forget(self):
        self.items = [item for item in self.items if self.rng.random() < 0.7]

    def assert_unchanged(self, where):
        for owner, part, before in self.items:
            for array, content in zip(arrays(part), before, strict=True):
                same = array.tobytes() == content.tobytes()
                assert same, f"{where}: what the caller holds of the {owner}, a {type(part).__name__}, has changed"

    def overwrite(self, spared):
        """Writes into everything, but for what belongs to one owner."""
        for owner, part, _ in self.items:
            for array in arrays(part) if owner != spared else ():
                array[...] = 1 if array.dtype in (bool, np.uint8) else 77
        self.items = [(owner, part, [array.copy() for array in arrays(part)]) for owner, part, _ in self.items]


def check(stack, make, number=20):
    """Performs the same operations twice from the same state on. The second time, everything returned is written to.

    `make()` returns an env, a collector, and a list to which its policy appends what it was given.
    """
    with repeatable(stack):
        env, collect, inputs = make()
        operations, expected = Operations(stack.seed, env, KINDS).several(number), []
        env.reset(seed=0)
        snapshot = env.snapshot()
        for writes in (False, True):
            rng = random.Random(f"memory {stack.seed}")
            td, held = env.restore(snapshot), Held(rng)

            def hold(index, operation, td, held=held, writes=writes):
                # A function, so that nothing but `held` keeps a result.
                where = f"operation {index}, {operation['kind']}" + ", after writes" * writes
                result, td = perform(env, operation, td, collect)
                held.assert_unchanged(where)
                if writes:
                    assert_same(tensors(result), expected[index], where)
                else:
                    expected.append(tensors(result))
                for name, value in [*result.items(), *(("input", value) for value in inputs)]:
                    held.add(f"{name} of operation {index}", value)
                inputs.clear()
                if writes:
                    held.overwrite(spared=f"td of operation {index}")  # the caller may change the last root, and means to
                held.forget()
                return td

            for index, operation in enumerate(operations):
                td = hold(index, operation, td)


def make_of(stack, backend=None):
    """An env of the stack and a collector. One of the two is compiled by the backend, if there is one."""
    rng = random.Random(f"memory {stack.seed}")

    def make():
        env, inputs = stack.make(), []
        action = env.sample_action()

        def policy(td):
            return action.clone()

        def keeps(td):
            inputs.append(td)
            return action.clone()

        collect = tw.Collector(env, policy if backend else keeps, rng.randint(1, 4))
        if backend:
            target = rng.choice([env, collect])
            tw.compile(target, backend=backend, **({"unroll": rng.randint(1, 3)} if target is collect else {}))
        return env, collect, inputs

    return make


@pytest.mark.parametrize("numbers", chunks(40, 18, quick=4))
def test_what_a_caller_holds_of_a_random_stack_is_the_callers(numbers, first_seed):
    for number in numbers:
        stack = draw(f"memory {first_seed + number}")
        check(stack, make_of(stack))


def large_env(rng, _):
    """An env whose observation takes more than 1 MB, the size from which collectors pool their storage."""
    num_envs, size = rng.choice([(64, 4200), (700, 400), (4099, 70)])
    lengths = [rng.randint(1, 60) for _ in range(9)]
    return f"ScriptedEnv({num_envs}, ({size},), {lengths})"


@pytest.mark.full
@pytest.mark.parametrize("number", range(4))
def test_what_a_caller_holds_of_a_large_stack_is_the_callers(number, first_seed):
    stack = draw(f"memory {first_seed + number}", kinds=[large_env], most=3)
    check(stack, make_of(stack), 12)


@pytest.mark.full
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "backend, number", [*(("aot_eager", number) for number in range(4)), ("inductor", 4), ("inductor", 5)]
)
def test_what_a_caller_holds_of_a_compiled_stack_is_the_callers(backend, number, large, first_seed):
    some = {"kinds": [large_env]} if large else {}
    stack = compilable(f"memory {first_seed + number}", most=3, operators=90, **some)
    check(stack, make_of(stack, backend), 12 if large else 20)


def test_memory_fuzzer_finds_storage_that_is_reused_too_early(monkeypatch):
    def first_piece(pool, whole=BufferPool.empty):
        return pool._tensor(pool.pieces[0].memory) if pool.pieces else whole(pool)

    monkeypatch.setattr(BufferPool, "empty", first_piece)
    with pytest.raises(
        AssertionError, match=r"(?s)seed .* what the caller holds of the data of .* has changed.*TransformedEnv"
    ):
        for seed in range(20):
            stack = draw(f"memory {seed}")
            check(stack, make_of(stack))


def test_memory_fuzzer_finds_a_buffer_that_is_returned(monkeypatch):
    def step(self, td):
        td.set(self.return_key, self.running_return.add_(td["reward"]).float())
        return td.set(self.length_key, self.running_length.add_(1))

    monkeypatch.setattr(tw.transforms.RecordEpisodeStatistics, "step", step)
    with pytest.raises(AssertionError, match=r"(?s)seed .* what the caller holds .* has changed.*TransformedEnv"):
        for seed in range(20):
            stack = draw(f"memory {seed}")
            check(stack, make_of(stack))
