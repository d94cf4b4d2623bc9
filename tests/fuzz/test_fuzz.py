"""Random stacks of transforms on random envs: they keep the contract, compiled too, and when calls are interrupted."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import random
import sys
from pathlib import Path

import pytest
import torch
from fuzz_operations import Operations, assert_same, leaves_of, numbers, perform, play, repeatable, tensors
from fuzz_stacks import compilable, draw
from gymnasium.envs.registration import EnvSpec
from helpers import AOT, INDUCTOR
from torch.utils._python_dispatch import TorchDispatchMode

import torchwrap as tw
from torchwrap import RowMask
from torchwrap import transforms as T

# Results belong to the caller, and a snapshot continues bit for bit.


def through_file(snapshot):
    file = io.BytesIO()
    torch.save(snapshot.to_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def made_again(stack, env):
    """Another env like this one, from its spec as JSON if it has one."""
    try:
        return tw.make(EnvSpec.from_json(env.spec.to_json())) if env.spec else stack.make()
    except ValueError:  # a function, which JSON cannot hold
        return stack.make()


def overwrite(result):
    for leaf in leaves_of(result).values():
        leaf.copy_(torch.full_like(leaf, 1 if leaf.dtype in (torch.bool, torch.uint8) else 77))


def check_contract(stack, number=24):
    """Plays the same with an env whose results are kept and with one whose results are overwritten.

    What was kept does not change. From a snapshot at a random moment on, a new env does the same.
    """
    rng, env, twin = random.Random(f"contract {stack.seed}"), stack.make(), stack.make()
    operations, steps = Operations(stack.seed, env).several(number), rng.randint(1, 3)
    moment, held, expected = rng.randrange(number), [], []
    collects = [tw.Collector(one, None, steps) for one in (env, twin)]
    td, other = env.reset(seed=0), twin.reset(seed=0)
    for index, operation in enumerate(operations):
        if index == moment:
            snapshot, training = through_file(env.snapshot()), env.training
        root = other
        if operation["kind"] == "write":
            own = {id(leaf) for leaf in leaves_of(td).values()}
            held = [(where, leaf, before) for where, leaf, before in held if id(leaf) not in own]
        result, td = perform(env, operation, td, collects[0])
        expected.append(tensors(result))
        held += [(index, leaf, leaf.clone()) for value in result.values() for leaf in leaves_of(value).values()]
        again, other = perform(twin, operation, other, collects[1])
        assert_same(tensors(again), expected[-1], f"operation {index} {operation}, after writes")
        for value in (*again.values(), root):
            if value is not other:
                overwrite(value)
    for index, leaf, before in held:
        assert leaf.equal(before) or leaf.isnan().any(), f"what the caller holds of operation {index} has changed"
    end = tensors({"snapshot": env.snapshot()})
    assert_same(tensors({"snapshot": twin.snapshot()}), end, "the last snapshot, after writes")
    new = made_again(stack, env).train(training)
    td, collect = new.restore(snapshot), tw.Collector(new, None, steps)
    results, _ = play(new, operations[moment:], td, collect)
    for operation, given, wanted in zip(operations[moment:], results, expected[moment:], strict=True):
        assert_same(given, wanted, f"after the snapshot, {operation}")
    assert_same(tensors({"snapshot": new.snapshot()}), end, "the last snapshot, after a restore")


@numbers(quick=6, full=160)
def test_random_stack_keeps_the_contract(number, first_seed):
    stack = draw(first_seed + number)
    with repeatable(stack):
        check_contract(stack)


@pytest.mark.full
def test_random_stacks_contain_every_transform():
    names = set().union(*(draw(seed).names for seed in range(250)))
    kinds = {kind.__name__ for kind in vars(T).values() if isinstance(kind, type) and issubclass(kind, T.Transform)}
    assert kinds - {"ActionTransform", "ObservationTransform", "RewardTransform", "Transform", "PolicyState"} <= names


# Compiled envs and collectors return what eager ones do.

KINDS = {"step": 16, "masked reset": 4, "reset": 1, "sample": 1, "write": 1, "exchange": 2}
COLLECTS = {"collect": 6, "masked reset": 2, "step": 1, "write": 1, "exchange": 1}


def check_compiled(stack, tolerance, number, kinds, make):
    """Performs operations on an eager and a compiled env of a stack, which sometimes exchange their snapshots.

    `make(compiled)` returns an env, and a collector or None.
    """
    pairs = eager, compiled = make(False), make(True)
    assert any(part is not None and part.is_compiled for part in compiled)
    operations, roots = Operations(stack.seed, eager[0], kinds), [env.reset(seed=0) for env, _ in pairs]
    for index in range(number):
        operation = operations.draw()
        if operation["kind"] == "exchange":
            others = [env.snapshot() for env, _ in reversed(pairs)]
            operations_of = [{"kind": "restore", "snapshot": other} for other in others]
        else:
            operations_of = [operation, operation]
        both = [perform(env, one, td, collect) for (env, collect), one, td in zip(pairs, operations_of, roots, strict=True)]
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
    steps, unroll, keys = rng.randint(1, 5), rng.randint(1, 3), rng.choice([None, None, ["action", ("next", "observation")]])

    def make(compiled):
        collect = tw.Collector(stack.make(), None, steps, keys=keys)
        return collect.env, tw.compile(collect, backend=backend, unroll=unroll) if compiled else collect

    check_compiled(stack, tolerance, 8, COLLECTS, make)


@pytest.mark.parametrize("check", [check_compiled_env, check_compiled_collector])
@numbers(quick=0, full=40)
def test_compiled_random_stack_equals_the_eager_one(number, check, first_seed):
    stack = compilable(f"{check.__name__} {first_seed + number}")
    with repeatable(stack):
        check(stack)


@pytest.mark.parametrize("check", [check_compiled_env, check_compiled_collector])
@numbers(quick=0, full=3)
def test_stack_through_inductor_equals_the_eager_one(number, check, first_seed):
    stack = compilable(f"inductor {first_seed + number}", num_envs=(3,))
    with repeatable(stack):
        check(stack, "inductor", INDUCTOR)


# A call that an exception leaves at a random moment has happened not at all, or the env refuses to go on.

LIBRARY = str(Path(tw.__file__).parent)
CALLS = {"step": 5, "masked reset": 2, "reset": 1, "restore": 1, "collect": 3}
PLAIN = {"step": 6, "masked reset": 2, "sample": 1, "write": 1}


class Stop(KeyboardInterrupt):
    """What a test raises; no code of the library catches it."""


class Interrupt(TorchDispatchMode):
    """Counts the moments of a call, and raises at one of them.

    Args:
        source: "bytecode", before each instruction of the library, or "operators", before each operator of PyTorch.
        at: the moment to raise at. None counts only.
    """

    def __init__(self, source, at=None):
        super().__init__()
        self.source, self.at, self.count = source, at, 0

    def moment(self):
        self.count += 1
        if self.count - 1 == self.at:
            raise Stop

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.moment()
        return self.trace

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.moment()
        return operator(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def active(self):
        before = sys.gettrace()
        try:
            with self if self.source == "operators" else contextlib.nullcontext():
                if self.source == "bytecode":
                    sys.settrace(self.trace)
                yield self
        except Stop:
            pass
        finally:
            sys.settrace(before)
            torch.set_grad_enabled(True)  # `torch.no_grad` of the interrupted call may not have come to its end


def asks_for_reset(call):
    """Whether the call raises the error that asks for a reset."""
    try:
        call()
    except RuntimeError as error:
        if "reset()" not in str(error):
            raise
        return True
    return False


def some_rows(operations):
    """A masked reset of some rows, which an env refuses after an interrupt; a step, if it has one row only."""
    drawn = [operations.draw("masked reset") for _ in range(9)]
    return next((one for one in drawn if not one["mask"].all()), {**operations.draw("step"), "bare": True})


def trial(stack, env, collect, operations, rng, tolerance):
    """Interrupts one call. Returns what came of it: "refused", "had not happened" or "was over"."""
    elsewhere, td = env.snapshot(), env.reset(seed=rng.randrange(9))
    play(env, operations.several(rng.randint(0, 4)), td)
    here = env.snapshot()
    kind = rng.choices(list(CALLS), CALLS.values())[0]
    call = operations.draw(kind) | ({"snapshot": elsewhere} if kind == "restore" else {})
    # The first operation needs no root, because nobody has the one of the interrupted call.
    first = rng.choice([{**operations.draw("step"), "bare": True}, some_rows(operations)])
    tape, source = [first, *operations.several(3)], rng.choice(["bytecode", "bytecode", "operators"])
    variants = {"had not happened": play(env, tape, env.restore(here), collect)[0]}
    td = env.restore(here)
    with Interrupt(source).active() as counted:
        _, td = perform(env, call, td, collect)
    variants["was over"] = play(env, tape, td, collect)[0]
    td = env.restore(here)
    with Interrupt(source, rng.randrange(counted.count)).active() as interrupt:
        perform(env, call, td, collect)
    where = f"{call['kind']}, interrupted at {interrupt.at} of {counted.count} {source}"
    results = []
    if asks_for_reset(lambda: results.extend(play(env, tape, None, collect)[0])):
        outcome = "refused"
        for probe in (operations.draw("step"), some_rows(operations), {"kind": "collect"}, {"kind": "snapshot"}):
            assert asks_for_reset(functools.partial(perform, env, probe, td, collect)), f"{where}: {probe['kind']} goes on"
    else:
        outcome, failures = None, []
        for name, expected in variants.items():
            try:
                for operation, one, other in zip(tape, results, expected, strict=True):
                    assert_same(one, other, f"{where}: {operation}, as if the interrupted call {name}")
                outcome = outcome or name
            except AssertionError as error:
                failures.append(str(error))
        assert outcome, "\n".join(failures)
    fresh = stack.make().eval()
    fresh.load_state_dict(env.state_dict())
    later, training, both = operations.several(4), env.training, []
    for one in (env.eval(), fresh):
        root = one.reset(seed=7)
        both.append([tensors({"td": root}), *play(one, later, root)[0]])
    for given, expected in zip(*both, strict=True):
        assert_same(given, expected, f"{where}: after reset(seed)", tolerance)
    results, _ = play(env.train(training), tape, env.restore(here), collect)
    for given, expected in zip(results, variants["had not happened"], strict=True):
        assert_same(given, expected, f"{where}: after restore()")
    return outcome


def interrupt(stack, trials, backend=None):
    """Interrupts an env again and again. Returns how often each thing came of it."""
    rng, env = random.Random(f"interrupts {stack.seed}"), stack.make()
    env.train(rng.random() < 0.7)
    operations, collect = Operations(stack.seed, env, PLAIN), tw.Collector(env, None, rng.randint(1, 4))
    if backend is not None:
        tw.compile(rng.choice([env, collect]), backend=backend)
    env.reset(seed=0)
    with repeatable(stack):
        tolerance = None if backend is None else AOT
        return collections.Counter(trial(stack, env, collect, operations, rng, tolerance) for _ in range(trials))


@numbers(quick=1, full=24)
def test_interrupted_call_has_not_happened_or_the_env_refuses_to_go_on(number, first_seed):
    stacks = [draw(f"interrupts {first_seed + number} {part}", most=4) for part in range(2)]
    outcomes = sum((interrupt(stack, 5) for stack in stacks), collections.Counter())
    if number % 3 == 1:
        outcomes += interrupt(compilable(f"interrupts {first_seed + number}"), 8, "aot_eager")
    assert outcomes["refused"] > 1


# The fuzzer finds what is wrong.


def returns_buffers(self, td):
    td.set(self.return_key, self.running_return.add_(td["reward"]).float())
    return td.set(self.length_key, self.running_length.add_(1))


def fills_all_but_the_first(mask, buffer, value, whole=RowMask.fill_):
    whole(RowMask(mask.tensor & (torch.arange(mask.tensor.shape[0]) > 0)), buffer, value)


def goes_on(self):
    return None


@pytest.mark.full
@pytest.mark.parametrize(
    ("owner", "name", "planted", "check", "make", "message"),
    [
        (T.RecordEpisodeStatistics, "step", returns_buffers, check_contract, draw, "operation .*, after writes"),
        (RowMask, "fill_", fills_all_but_the_first, check_compiled_env, compilable, "operation .* instead of"),
        (tw.Env, "_check_finished", goes_on, lambda stack: interrupt(stack, 6), draw, "as if the interrupted call"),
    ],
)
def test_fuzzer_finds_a_planted_fault(owner, name, planted, check, make, message, monkeypatch):
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError, match=rf"(?s)seed .*, AssertionError: .*{message}"):
        for seed in range(30):
            stack = make(seed)
            with repeatable(stack):
                check(stack)
