"""Random stacks: a call that an exception leaves at a random moment has happened not at all, or the env refuses to go on."""

from __future__ import annotations

import collections
import contextlib
import random
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from fuzz_operations import Operations, assert_same, chunks, perform, play, repeatable, tensors
from fuzz_stacks import compilable, draw, gymnasium_env
from helpers import AOT
from torch.utils._python_dispatch import TorchDispatchMode

import torchwrap as tw

LIBRARY, HOST = (tuple(str(Path(one.__file__).parent) for one in some) for some in ([tw], [tw, gymnasium]))
CALLS = {"step": 5, "masked reset": 2, "reset": 1, "restore": 1, "collect": 3}
PROBES_OF_HOST = {"step": 3, "masked reset": 1, "collect": 1}
PROBES = PROBES_OF_HOST | {"snapshot": 1}
PLAIN = {"step": 6, "masked reset": 2, "sample": 1, "write": 1}


class Stop(KeyboardInterrupt):
    """What a test raises; no code of the library catches it."""


class Interrupt:
    """Counts the moments of a call, and raises at one of them.

    Args:
        source: "bytecode", before each instruction of the library, or "operators", before each operator of PyTorch.
        at: the moment to raise at. None counts only.
        within: files whose instructions count.
    """

    def __init__(self, source, at=None, within=LIBRARY):
        self.source, self.at, self.within, self.count = source, at, within, 0

    def moment(self):
        self.count += 1
        if self.count - 1 == self.at:
            raise Stop

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self.within):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.moment()
        return self.trace

    @contextlib.contextmanager
    def __call__(self):
        before = sys.gettrace()
        try:
            if self.source == "operators":
                with Operators(self.moment):
                    yield self
            else:
                sys.settrace(self.trace)
                yield self
        except Stop:
            pass
        finally:
            sys.settrace(before)
            torch.set_grad_enabled(True)  # `torch.no_grad` of the interrupted call may not have come to its end


class Operators(TorchDispatchMode):
    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.moment()
        return operator(*args, **(kwargs or {}))


def is_full(operation):
    """Whether it resets all envs, which an env takes after an interrupt."""
    return operation["kind"] == "masked reset" and bool(operation["mask"].all())


def asks_for_reset(call):
    """Whether the call raises the error that asks for a reset."""
    try:
        call()
    except RuntimeError as error:
        if "reset()" not in str(error):
            raise
        return True
    return False


def after_interrupt(env, tape, collect, variants):
    """Plays the tape on an env whose call was interrupted, unless it asks for a reset. Returns which variant it equals.

    `variants` are what the tape returns if the call had not happened, and if it had come to its end.
    """
    td = env._position.root
    try:
        results, _ = play(env, tape, td, collect)
    except RuntimeError as error:
        if "reset()" not in str(error):
            raise
        return "refused"
    failures = []
    for name, expected in variants.items():
        try:
            for operation, one, other in zip(tape, results, expected, strict=True):
                assert_same(one, other, f"{operation}, as if the interrupted call {name}")
            return name
        except AssertionError as error:
            failures.append(str(error))
    raise AssertionError("\n".join(failures))


class Subject:
    """An env that keeps all state in tensors, and is interrupted again and again.

    Args:
        stack: its stack.
        rng: draws what happens.
        backend: compiles the env and a collector, if not None.
    """

    def __init__(self, stack, rng, backend=None):
        self.stack, self.rng, self.env = stack, rng, stack.make()
        self.tolerance = None if backend is None else AOT
        self.operations = Operations(stack.seed, self.env, PLAIN)
        self.collect = tw.Collector(self.env, None, rng.randint(1, 4))
        if backend is not None:
            target = rng.choice([self.env, self.collect])
            self.env.train(rng.random() < 0.7)
            tw.compile(target, backend=backend)
        self.td = self.env.reset(seed=0)

    def trial(self):
        """Interrupts one call. Returns what came of it: "refused", "had not happened", "was over" or "returned"."""
        env, rng, operations, collect = self.env, self.rng, self.operations, self.collect
        if collect.is_compiled is env.is_compiled and rng.random() < 0.3:  # neither is compiled
            env.train(rng.random() < 0.7)
        elsewhere = env.snapshot()
        _, td = play(env, operations.several(rng.randint(0, 4)), self.td)
        here = env.snapshot()
        kind = rng.choices(list(CALLS), CALLS.values())[0]
        call = operations.draw(kind) | ({"snapshot": elsewhere} if kind == "restore" else {})
        probe = operations.draw(rng.choices(list(PROBES), PROBES.values())[0])
        tape = [operations.draw("step") if is_full(probe) else probe, *operations.several(3)]
        undisturbed, _ = play(env, tape, env.restore(here), collect)
        source = rng.choice(["bytecode", "bytecode", "operators"])
        td = env.restore(here)
        with Interrupt(source)() as counted:
            _, td = perform(env, call, td, collect)
        over, _ = play(env, tape, td, collect)
        td, returned = env.restore(here), False
        with Interrupt(source, rng.randrange(counted.count))() as interrupt:
            perform(env, call, td, collect)
            returned = True
        where = f"{call['kind']}, interrupted at {interrupt.at} of {counted.count} {source}"
        try:
            outcome = after_interrupt(env, tape, collect, {"had not happened": undisturbed, "was over": over})
            if outcome == "refused":
                for kind in ("step", "masked reset", "collect", "snapshot"):
                    probe = operations.draw(kind)
                    goes_on = not is_full(probe) and not asks_for_reset(lambda probe=probe: perform(env, probe, td, collect))
                    assert not goes_on, f"{kind} goes on"
            self.recover(here, tape, undisturbed)
        except Exception as error:
            raise AssertionError(f"{where}: {error}") from error
        return "returned" if returned else outcome

    def recover(self, here, tape, undisturbed):
        env, rng, operations = self.env, self.rng, self.operations
        compiled = env.is_compiled or self.collect.is_compiled  # each mode of which is another graph to compile
        if rng.random() < 0.5 and not (compiled and env.training):
            training, seed = env.training, rng.randrange(2**40)
            fresh = self.stack.make().eval()
            fresh.load_state_dict(env.state_dict())
            later, roots = operations.several(5), [one.reset(seed=seed) for one in (env.eval(), fresh)]
            given, expected = (
                [tensors({"td": root}), *play(one, later, root)[0]] for one, root in zip((env, fresh), roots, strict=True)
            )
            for one, other, operation in zip(given, expected, [{}, *later], strict=True):
                assert_same(one, other, f"{operation} after reset(seed={seed})", self.tolerance)
            env.train(training)
        results, self.td = play(env, tape, env.restore(here), self.collect)
        for one, other, operation in zip(results, undisturbed, tape, strict=True):
            assert_same(one, other, f"{operation} after restore()")


def interrupt(stack, trials, backend=None):
    """Interrupts an env again and again. Returns how often each thing came of it."""
    outcomes = collections.Counter()
    with repeatable(stack):
        subject = Subject(stack, random.Random(f"interrupts {stack.seed}"), backend)
        outcomes.update(subject.trial() for _ in range(trials))
    return outcomes


@pytest.mark.parametrize("numbers", chunks(44, 10, quick=4))
def test_interrupted_call_of_a_random_stack_has_not_happened_or_the_env_refuses_to_go_on(numbers, first_seed):
    outcomes = sum((interrupt(draw(f"interrupts {first_seed + number}"), 6) for number in numbers), collections.Counter())
    assert outcomes["refused"] > 12 and outcomes["had not happened"] + outcomes["refused"] > 20


@pytest.mark.full
@pytest.mark.parametrize("number", range(10))
def test_interrupted_call_of_a_compiled_stack_has_not_happened_or_the_env_refuses_to_go_on(number, first_seed):
    stack = compilable(f"interrupts {first_seed + number}", most=4, operators=150)
    assert interrupt(stack, 10, "aot_eager")["refused"] > 2


# Interrupts of the first reset, and of compilation.


@pytest.mark.parametrize("numbers", chunks(40, 40, quick=4))
def test_interrupted_first_reset_leaves_an_env_that_needs_one(numbers, first_seed):
    for number in numbers:
        stack = draw(f"interrupts {first_seed + number}")
        rng, env, fresh = random.Random(f"first reset {stack.seed}"), stack.make().eval(), stack.make().eval()
        with repeatable(stack):
            with Interrupt("bytecode")() as counted:
                fresh.reset(seed=7)
            with Interrupt("bytecode", rng.randrange(counted.count))():
                env.reset(seed=3)
            if env._position.root is None:
                assert asks_for_reset(lambda env=env: env.step(env.sample_action())) and asks_for_reset(env.snapshot)
            assert_plays_the_same(env, fresh, Operations(stack.seed, env, PLAIN).several(4))


def assert_plays_the_same(env, other, tape, tolerance=None):
    """Two envs return the same from a reset with a seed on."""
    both = [[tensors({"td": root}), *play(one, tape, root)[0]] for one in (env, other) for root in [one.reset(seed=7)]]
    for given, expected, operation in zip(*both, ["the reset", *tape], strict=True):
        assert_same(given, expected, f"{operation}, after reset(seed)", tolerance)


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
def test_interrupted_compilation_leaves_the_env_as_it_was(number, first_seed):
    stack = compilable(f"interrupts {first_seed + number}", most=3, operators=120)
    rng, counting, env = random.Random(f"compilation {stack.seed}"), stack.make(), stack.make()
    tape = Operations(stack.seed, env, PLAIN).several(4)
    with repeatable(stack):
        with Interrupt("bytecode")() as counted:
            tw.compile(counting, backend="eager")
        for _ in range(3):
            with Interrupt("bytecode", rng.randrange(counted.count))():
                tw.compile(env, backend="eager")
            if env.is_compiled:
                break
            assert_plays_the_same(env.eval(), stack.make().eval(), tape)
            env.train()
        env = env if env.is_compiled else tw.compile(env, backend="eager")
        # In another mode, the next step compiles another graph.
        counting.eval().reset(seed=1)
        td = env.eval().reset(seed=1)
        step = Operations(stack.seed, env).draw("step")
        with Interrupt("bytecode")() as counted:
            perform(counting, step, counting._position.root)
        with Interrupt("bytecode", rng.randrange(counted.count))():
            perform(env, step, td)
        if env._position.root is td and env._position.unfinished is not None:
            assert asks_for_reset(lambda: env.step(env.sample_action())) and asks_for_reset(env.snapshot)
        assert_plays_the_same(env, stack.make().eval(), tape, AOT)


# Simulators on the host, which have no snapshots: twins play the same until one of them is interrupted.


def interrupt_host(stack):
    rng, kinds = random.Random(f"interrupts {stack.seed}"), {"step": 4, "masked reset": 2, "reset": 1, "collect": 2}
    envs = env, undisturbed, over = [stack.make() for _ in range(3)]
    operations, number = Operations(stack.seed, env, PLAIN), rng.randint(1, 3)
    before, collects = operations.several(rng.randint(0, 5)), [tw.Collector(one, None, number) for one in envs]
    roots = [play(one, before, one.reset(seed=0))[1] for one in envs]
    call, probe = (operations.draw(rng.choices(list(some), some.values())[0]) for some in (kinds, PROBES_OF_HOST))
    tape = [operations.draw("step") if is_full(probe) else probe, *operations.several(3)]
    expected = play(undisturbed, tape, roots[1], collects[1])[0]
    with Interrupt("bytecode", within=HOST)() as counted:
        _, td = perform(over, call, roots[2], collects[2])
    variants = {"had not happened": expected, "was over": play(over, tape, td, collects[2])[0]}
    with Interrupt("bytecode", rng.randrange(counted.count), HOST)():
        perform(env, call, roots[0], collects[0])
    outcome = after_interrupt(env, tape, collects[0], variants)
    if outcome == "refused":
        for kind in ("step", "masked reset", "collect"):
            probe = operations.draw(kind)
            refused = is_full(probe) or asks_for_reset(lambda probe=probe: perform(env, probe, roots[0], collects[0]))
            assert refused, f"{kind} goes on"
    fresh = stack.make()
    fresh.load_state_dict(env.state_dict())
    assert_plays_the_same(env.eval(), fresh.eval(), operations.several(4))
    return outcome


@pytest.mark.parametrize("numbers", chunks(80, 40, quick=4))
def test_interrupted_call_on_the_host_has_not_happened_or_the_env_refuses_to_go_on(numbers, first_seed):
    outcomes = collections.Counter()
    for number in numbers:
        stack = draw(f"interrupts {first_seed + number}", kinds=[gymnasium_env], num_envs=(1, 2, 3))
        with repeatable(stack):
            outcomes[interrupt_host(stack)] += 1
    assert outcomes["refused"] > len(numbers) / 3


def test_interrupt_fuzzer_finds_an_env_that_goes_on(monkeypatch):
    monkeypatch.setattr(tw.Env, "_check_finished", lambda self: None)
    with pytest.raises(
        AssertionError, match=r"(?s)seed .*, interrupted at .* as if the interrupted call .* instead of .*tw\."
    ):
        for number in range(9):
            interrupt(draw(f"interrupts {number}"), 6)
