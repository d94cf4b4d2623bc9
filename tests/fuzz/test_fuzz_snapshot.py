"""Random stacks: a snapshot, taken at a random moment, continues bit for bit in a fresh process."""

from __future__ import annotations

import random
import subprocess
import sys

import fuzz_fresh_process
import pytest
import torch
from fuzz_operations import Operations, assert_same, chunks, play, repeatable, tensors
from fuzz_stacks import ARGUMENTS, draw
from helpers import mostly_full

from torchwrap._env import snapshot as snapshots

BEFORE, AFTER = 12, 10  # operations


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory):
    """Continues tasks in another process, which has been started by this interpreter. One serves all tests."""
    command, folder = [sys.executable, fuzz_fresh_process.__file__], tmp_path_factory.mktemp("snapshots")

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def continued(tasks):
            path = folder / "tasks.pt"
            torch.save(tasks, path)
            print(path, file=process.stdin, flush=True)
            assert process.stdout.readline().strip() == str(path), "the fresh process has ended"
            return torch.load(path, weights_only=True)

        yield continued


def serialized(env):
    # The spec as JSON, if the env has one, and all of it can be written so.
    try:
        return env.spec and env.spec.to_json()
    except ValueError:  # a function
        return None


def interrupted_run(stack):
    """The task of a fresh process, and what it has to return."""
    rng, env = random.Random(f"snapshot {stack.seed}"), stack.make()
    operations = Operations(stack.seed, env)
    _, td = play(env, operations.several(rng.randint(0, BEFORE)), env.reset(seed=rng.choice([0, 1, 2**50])))
    task = {"spec": serialized(env) if rng.random() < 0.7 else None, "seed": stack.seed, "training": env.training}
    task |= {"snapshot": env.snapshot().to_dict(), "operations": operations.several(AFTER)}
    root = tensors({"root": td})
    results, _ = play(env, task["operations"], td)
    return task, [root, *results, tensors({"snapshot": env.snapshot()})]


def check(stack, task, answer, expected):
    names = ["the root", *(f"after the snapshot, operation {i} {one}" for i, one in enumerate(task["operations"]))]
    with repeatable(stack):
        assert isinstance(answer, list), f"in the fresh process: {answer}"
        for name, given, wanted in zip([*names, "the last snapshot"], answer, expected, strict=True):
            assert_same(given, wanted, name)


@pytest.mark.parametrize("numbers", chunks(200, 20, quick=6))
def test_snapshot_of_a_random_stack_continues_bit_for_bit_in_a_fresh_process(numbers, first_seed, fresh_process):
    runs = []
    for number in numbers:
        stack = draw(first_seed + number)
        with repeatable(stack):
            runs.append((stack, *interrupted_run(stack)))
    answers = fresh_process([task for _, task, _ in runs])
    for (stack, task, expected), answer in zip(runs, answers, strict=True):
        check(stack, task, answer, expected)


def test_random_stacks_contain_every_transform_and_every_kind_of_env():
    stacks = [draw(seed) for seed in range(200)]
    names, codes = [name for stack in stacks for name in stack.names], [stack.code for stack in stacks]
    assert all(names.count(name) >= 3 for name in ARGUMENTS)
    parts = ["tw.make", "FunctionalEnv(Chase", "reset_pool=3", "params=", "action_repeat=2", "RepeatAction", "MaxAndSkip"]
    parts += ["episode_lengths=1,", "episode_lengths=None", "Dict(", "Tuple(", "np.uint8", "np.float64", "Compose([T.Compose("]
    for part in [*parts, "TransformedEnv(tw.TransformedEnv(", "action_space=spaces.Discrete", "action_space=spaces.Dict"]:
        assert sum(part in code for code in codes) >= 3, part
    assert [draw(seed).code for seed in range(9)] == codes[:9]


@pytest.mark.parametrize("name", mostly_full(["elapsed", "discounted_return", "order", "draw"], "elapsed"))
def test_snapshot_fuzzer_finds_a_buffer_that_is_left_out(name, monkeypatch):
    whole = snapshots.state_of
    monkeypatch.setattr(
        snapshots, "state_of", lambda module: {key: one for key, one in whole(module).items() if not key.endswith(name)}
    )
    with pytest.raises(AssertionError, match=r"(?s)seed \d+, AssertionError: .* instead of .*TransformedEnv"):
        for seed in range(100):
            stack = draw(seed)
            task, expected = interrupted_run(stack)
            check(stack, task, fuzz_fresh_process.continued(task), expected)
