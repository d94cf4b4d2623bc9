"""scan does what `jax.lax.scan` documents: in a Python loop, as an operator, and without one."""

import functools
import sys

import pytest
import torch
from catalogue import stack
from helpers import AOT, AT_RELEASES, assert_same, mostly_full
from tensordict import TensorDict

import torchwrap as tw
from torchwrap._compile.scan import scan
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full
XS = torch.arange(1.0, 5.0)
ZERO = torch.zeros(())


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def loop(function, carry, xs, reverse=False):
    """The Python code that JAX documents as the meaning of `scan`, without its structures."""
    outputs = []
    steps = range(len(xs))
    for index in reversed(steps) if reverse else steps:
        carry, output = function(carry, xs[index])
        outputs.append(output)
    return carry, torch.stack(outputs[::-1] if reverse else outputs)


def compiled(*arguments, backend="aot_eager", **keywords):
    run = torch.compile(functools.partial(scan, **keywords), fullgraph=True, backend=backend)
    return run(*arguments)


def through_inductor(*arguments, **keywords):
    return compiled(*arguments, backend="inductor", **keywords)


each = pytest.mark.parametrize(
    "run",
    [
        pytest.param(scan, id="eager"),
        pytest.param(compiled, id="compiled"),
        pytest.param(through_inductor, id="inductor", marks=AT_RELEASES),
    ],
)


@each
@pytest.mark.parametrize("reverse", [True, pytest.param(False, marks=full)])
def test_scan_is_the_documented_loop(run, reverse):
    def decay(carry, x):
        following = 0.5 * carry + x
        return following, following - x

    result = run(decay, ZERO, XS, reverse=reverse)
    torch.testing.assert_close(result, loop(decay, ZERO, XS, reverse))


@pytest.mark.newest  # 2.7 compiles no nested TensorDicts
@each
def test_carry_xs_and_outputs_are_nested(run):
    def step(carry, x):
        total = carry["total"] + x[0]["a"]
        td = TensorDict({"inner": TensorDict({"row": x[1]["row"] * total}, [2])}, [2])
        following = {"td": TensorDict({"last": total}), "total": total}
        return following, ({"total": total, "empty": {}}, td)

    carry = {"total": ZERO, "td": TensorDict({"last": ZERO})}
    xs = ({"a": XS}, TensorDict({"row": torch.ones(4, 2, 3)}, [4]))
    last, (outputs, td) = run(step, carry, xs)
    assert last["total"] == last["td"]["last"] == 10
    assert outputs["total"].tolist() == [1, 3, 6, 10]
    assert outputs["empty"] == {}
    assert td.batch_size == td["inner"].batch_size == (4, 2)
    assert (td["inner", "row"] == outputs["total"].view(4, 1, 1)).all()


def writes_carry(carry, x):
    carry += x
    return carry, carry


def writes_x(carry, x):
    x += 1
    return carry + x, x


SHARED = {
    "carry as output": (lambda carry, x: (carry + x, carry), [0, 1, 3, 6]),
    "unchanged carry": (lambda carry, x: (carry, x), [1, 2, 3, 4]),
    "carry and output are one": (lambda carry, x: (carry + x,) * 2, [1, 3, 6, 10]),
    "write to carry": (writes_carry, [1, 3, 6, 10]),
    "write to x": (writes_x, [2, 3, 4, 5]),
}


@each
@pytest.mark.parametrize("name", mostly_full(SHARED, "write to carry"))
def test_function_may_share_memory_and_write(run, name):
    function, expected = SHARED[name]
    carry, xs = ZERO.clone(), XS.clone()
    _, outputs = run(function, carry, xs)
    assert outputs.tolist() == expected
    assert carry == 0 and (xs == XS).all()


@each
def test_carry_may_change_its_strides(run):
    last, _ = run(lambda carry, x: (carry.T + x, x), torch.zeros(2, 2), XS)
    assert (last == 10).all()


@full
@each
def test_gradient_is_that_of_the_loop(run):
    weight = torch.tensor(0.9, requires_grad=True)

    def step(carry, x):
        return carry * weight + x, carry * x

    gradients = []
    for each_run in (run, loop):
        last, outputs = each_run(step, ZERO, XS)
        gradients.append(torch.autograd.grad(last + outputs.sum(), weight)[0])
    torch.testing.assert_close(*gradients)


def test_without_the_operator_a_loop_is_compiled(monkeypatch, graphs):
    module = sys.modules["torchwrap._compile.scan"]
    monkeypatch.setattr(module, "scan_operator", None)
    last, outputs = compiled(writes_carry, ZERO, XS, backend="counting")
    assert outputs.tolist() == [1, 3, 6, 10] and last == 10
    (graph,) = graphs
    assert "scan" not in graph.code


@pytest.mark.newest
def test_with_the_operator_the_graph_does_not_grow(graphs):
    for number in (3, 30):
        compiled(writes_carry, ZERO, torch.ones(number), backend="counting")
        torch._dynamo.reset()
    assert len(graphs[0].graph.nodes) == len(graphs[1].graph.nodes)
    assert "scan" in graphs[0].code


# With envs.


SAMPLING = ("action_stream.draw",)


@full
@each
def test_rollout_is_the_loop_over_steps(run):
    env = stack("Compose of two")
    env.reset(seed=0)
    actions = torch.stack([env.sample_action() for _ in range(7)])
    pure = tw.pure(stack("Compose of two"))

    def step(state, action):
        state, transition, _ = pure.step(state, action)
        return state, transition

    state, transitions = run(step, pure.init(0)[0], actions)
    env.reset(seed=0)
    expected = torch.stack([env.step(action)[0] for action in actions])
    tolerance = 1e-4 if run is through_inductor else AOT
    assert transitions.batch_size == expected.batch_size
    assert_same(transitions, expected, tolerance)
    assert_same(state["buffers"].exclude(*SAMPLING), env.snapshot()["buffers"].exclude(*SAMPLING))


def test_rollouts_of_seeds_are_single_rollouts():
    pure = tw.pure(ScriptedEnv(5))
    actions = torch.rand(4, 5, 6, generator=torch.Generator().manual_seed(0))

    def step(state, action):
        state, transition, _ = pure.step(state, action)
        return state, transition["next", "reward"]

    def rollout(seed):
        return scan(step, pure.init(seed)[0], actions)[1]

    rewards = torch.vmap(rollout)(torch.arange(2))
    assert rewards.equal(torch.stack([rollout(0), rollout(1)]))


MAPPED = {
    "a closure": lambda w: scan(lambda carry, x: (carry + w * x, ()), ZERO, XS),
    "the carry": lambda w: scan(pair, w, XS),
    "xs": lambda w: scan(pair, ZERO, w * XS),
}


@pytest.mark.newest
@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
def test_scan_in_a_compiled_vmap_is_refused_by_name(mapped):
    run = torch.compile(torch.vmap(mapped), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"scan must not be called in torch\.vmap"):
        run(torch.ones(2))


COMPLEX = {"carry": (ZERO * 1j, XS), "xs": (ZERO, XS * 1j)}


@pytest.mark.newest
@pytest.mark.parametrize("arguments", COMPLEX.values(), ids=COMPLEX)
def test_complex_tensors_are_refused_by_name_when_compiled(arguments):
    def add(carry, x):
        return (carry + x).imag.clone() if x.is_complex() else carry + x, ()

    scan(add, *arguments)
    with pytest.raises(Exception, match="carry and xs must be real"):
        compiled(add, *arguments)


# Refusals.


def pair(carry, x):
    return carry + x, x


REFUSED = {
    "function": ((3, ZERO, XS), "function must be callable"),
    "one result": ((lambda carry, x: carry, ZERO, XS), "function must return a tuple"),
    "empty xs": ((pair, ZERO, ()), "xs must hold"),
    "no steps": ((pair, ZERO, XS[:0]), "xs must hold"),
    "other length": ((pair, ZERO, {"a": XS, "b": (XS[:2],)}), "xs must hold"),
    "shape": ((lambda carry, x: (carry.expand(2), x), ZERO, XS), r"carry must have.*\(2,\)"),
    "structure": ((lambda c, x: ((x,), x), {"a": ZERO}, XS), "carry must have"),
    "no output": ((lambda carry, x: (carry, None), ZERO, XS), "output must"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_argument_is_refused_by_name(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        scan(*arguments)


@pytest.mark.newest  # whose errors quote the first one
@pytest.mark.parametrize("name", mostly_full(["one result", "shape", "no output"], "shape"))
def test_refusal_in_a_compiled_body_says_the_same(name):
    arguments, _ = REFUSED[name]
    with pytest.raises(Exception, match=r"scan: (function|carry|output) must"):
        compiled(*arguments)
