"""pure(env) agrees with the env bit for bit, has no side effects, and refuses by name."""

import functools

import pytest
import torch
from catalogue import (
    COMPILED,
    NUM_ENVS,
    WRAPPERS,
    cartpole,
    gymnasium_cartpole,
    stack,
    vmapped,
)
from helpers import AOT, AT_RELEASES, INDUCTOR, assert_same, buffers, leaves, mostly_full
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full
MASK = torch.arange(NUM_ENVS) % 2 == 0
FAST = "Compose of two"
OTHERS = {*COMPILED} - {FAST, "PolicyState"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def with_policy_state(env, td):
    for name in env.signature.policy_state:
        td["next", name] = td[name] + 1
    return td


def act(env, action, *roots):
    for root in roots:
        with_policy_state(env, root.set("action", action.clone()))


def assert_agrees(make, tolerance=0.0, wrap=lambda function: function):
    """The verbs of an env and the functions of another one return the same. Returns the flags."""
    env, sampler = make(), make()
    pure = tw.pure(make())
    step = wrap(pure.step)
    sampler.reset(seed=5)
    actions = [sampler.sample_action() for _ in range(23)]
    expected_td = env.reset(seed=3)
    state, td = pure.init(3)
    assert_same(td, expected_td, tolerance)
    flags = []
    for index in range(60):
        act(env, actions[index % 23], td, expected_td)
        expected, expected_td = env.step(expected_td)
        state, transition, td = step(state, td)
        assert_same(transition, expected, tolerance)
        assert_same(td, expected_td, tolerance)
        if index % 50 == 19:
            expected_td = env.reset(mask=MASK[: env.num_envs])
            state, td = pure.reset(state, MASK[: env.num_envs])
            assert_same(td, expected_td, tolerance)
        if index % 50 in (0, 20):
            snapshot = env.snapshot()
            assert_same(state, snapshot, tolerance)
            state = snapshot if index else state
        flags.append(expected["next"].select("terminated", "truncated", "done").clone())
    assert_same(state, env.snapshot(), tolerance)
    return torch.stack(flags)


# Agreement with the env.


@pytest.mark.parametrize("name", mostly_full(COMPILED, FAST, long=OTHERS))
def test_transform_agrees_bit_for_bit(name):
    flags = assert_agrees(functools.partial(stack, name))
    assert flags["done"].any(0).all()
    assert not flags["done"].all(1).all()


@pytest.mark.parametrize(
    "name", mostly_full(COMPILED, "FrameStackObservation", long=OTHERS - {"FrameStackObservation"})
)
def test_states_roots_and_transitions_are_contiguous(name):
    env = stack(name)
    pure = tw.pure(env)
    td = env.reset(seed=0)
    state, root = pure.init(0)
    found = [td.clone(False), env.snapshot(), state, root.clone(False)]
    for _ in range(2):
        act(env, env.sample_action(), td, root)
        state, transition, root = pure.step(state, root)
        found += [state, transition, root.clone(False)]
        transition, td = env.step(td)
        found += [transition, td.clone(False)]
    found += [env.reset(mask=MASK), *pure.reset(state, MASK)]
    for leaf in leaves(*found):
        assert leaf.stride() == torch.empty(leaf.shape).stride()


def test_root_of_transforms_over_a_simulator_is_contiguous():
    env = tw.compile(gymnasium_cartpole(), backend="eager")
    assert env.reset(seed=0)["observation"].is_contiguous()


ENVS = {
    "CartPole-v1": lambda: tw.make("CartPole-v1", NUM_ENVS),
    "vmapped": vmapped,
    "stacked CartPole": cartpole,
    **{
        name: functools.partial(WRAPPERS[name], NUM_ENVS)
        for name in ("RepeatAction", "RepeatAction of CartPole", "MaxAndSkipObservation")
    },
}


@pytest.mark.parametrize("name", mostly_full(ENVS, long={*ENVS} - {"CartPole-v1", "vmapped"}))
def test_env_agrees_bit_for_bit(name):
    assert assert_agrees(ENVS[name])["done"].any()


@functools.cache
def normalizing():
    """An env, and its functions, which are traced once."""
    env = stack(FAST)
    return env, tw.pure(env)


def of_two():
    return normalizing()[1]


def some_actions(number=1):
    env = stack(FAST)
    env.reset(seed=1)
    return torch.stack([env.sample_action() for _ in range(number)])


def test_compiled_env_is_taken_as_the_eager_one():
    pure = tw.pure(tw.compile(ScriptedEnv(NUM_ENVS), backend="eager"))
    env = ScriptedEnv(NUM_ENVS)
    _, root = pure.init(0)
    assert_same(root, env.reset(seed=0))


@pytest.mark.full
def test_eval_env_takes_the_state_of_the_training_one():
    env = stack("NormalizeObservation")
    training = tw.pure(env)
    frozen = tw.pure(env.eval())
    env.train()
    state, _ = training.init(0)
    for action in some_actions(3):
        state, _, _ = training.step(state, action)
    following, _, _ = frozen.step(state, action)
    names = [key for key in state.keys(True, True) if "count" in key[-1]]
    assert names
    for key in names:
        assert (following[key] == state[key]).all()


# torch.compile.


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=AT_RELEASES)])
def test_compiled_step_agrees(backend):
    tolerance = INDUCTOR if backend == "inductor" else AOT
    make = functools.partial(stack, FAST)
    assert_agrees(make, tolerance, functools.partial(compiled, backend=backend))


@pytest.mark.long
@full
def test_vmap_through_inductor_equals_the_eager_one():
    pure = tw.pure(tw.make("Acrobot-v1", 3))  # its angles are views
    state = torch.stack([pure.init(seed)[0] for seed in (1, 2)])
    step = torch.vmap(lambda state, action: pure.step(state, action)[:2])
    actions = torch.tensor([[0, 1, 2], [2, 0, 0]])
    expected, expected_transition = step(state, actions)
    found, transition = compiled(step, "inductor")(state, actions)
    assert_same(found, expected, INDUCTOR)
    assert_same(transition, expected_transition, INDUCTOR)


@pytest.mark.newest
def test_iterations_of_a_training_are_one_compilation(graphs):
    pure = tw.pure(stack("FrameStackObservation"))
    actions = stack("FrameStackObservation").sample_action().expand(2, -1, -1)

    def iterate(state, weight):
        def step(state, action):
            state, transition, _ = pure.step(state, action)
            return state, transition["next", "reward"]

        state, rewards = tw.scan(step, state, actions)
        return state, weight + rewards.mean()

    run = compiled(iterate, "counting")
    state, weight = pure.init(0)[0], torch.zeros(())
    for _ in range(3):
        state, weight = run(state, weight)
    run(pure.reset(state)[0], weight)
    assert len(graphs) == 1


# No side effects.


def play(pure, state):
    results = []
    for action in some_actions(5):
        state, transition, root = pure.step(state, action)
        results += [state.clone(), transition.clone(), root.clone()]
    state, root = pure.reset(state, MASK)
    return [*results, state.clone(), root.clone()]


DISTURBANCES = {
    "nothing": lambda env: None,
    "step": lambda env: env.step(env.sample_action()),
    "eval": lambda env: env.eval(),
    "to": lambda env: env.to("cpu"),
    "restore": lambda env: env.restore(env.snapshot()),
    "reset": lambda env: env.reset(seed=9),
}


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_functions_and_the_env_do_not_change_each_other(disturb):
    env, pure = normalizing()
    env.train().reset(seed=4)
    before = buffers(env)
    state, _ = pure.init(0)
    held = state.clone()
    expected = play(pure, state)
    assert_same(buffers(env), before)
    disturb(env)
    assert_same(state, held)
    for value, other in zip(play(pure, state), expected, strict=True):
        assert_same(value, other)


class Scale(T.RewardTransform):
    def setup(self, signature):
        self.weight = nn.Parameter(torch.ones(()))
        return signature

    def reward(self, reward):
        return reward * self.weight


def test_no_gradient_flows_through_a_step():
    pure = tw.pure(tw.TransformedEnv(ScriptedEnv(2), Scale()))
    action = torch.zeros(2, 6, requires_grad=True)
    state, transition, _ = pure.step(pure.init(0)[0], action)
    assert not transition["next", "reward"].requires_grad
    assert not any(leaf.requires_grad for leaf in state.values(True, True))


# torch.vmap.


def plain(function):
    return function


@pytest.mark.parametrize("wrap", [plain, pytest.param(compiled, marks=full)])
def test_vmap_over_seeds_equals_single_calls(wrap):
    pure = tw.pure(stack("NormalizeObservation"))
    seeds = torch.tensor([0, 7, -1])
    actions = some_actions(3)
    masks = torch.stack([MASK, ~MASK, MASK | True])
    states, _ = wrap(torch.vmap(pure.init))(seeds)
    states, transitions, _ = wrap(torch.vmap(pure.step))(states, actions)
    states, roots = wrap(torch.vmap(pure.reset))(states, masks)
    for index, seed in enumerate((0, 7, 2**64 - 1)):
        state, _ = pure.init(seed)
        state, transition, _ = pure.step(state, actions[index])
        state, root = pure.reset(state, masks[index])
        assert_same(transitions[index], transition, AOT)
        assert_same(states[index], state, AOT)
        assert_same(roots[index], root, AOT)
    totals = [value for key, value in states.items(True, True) if key[-1].endswith("total")]
    assert totals
    assert all((value[0] != value[1]).any() for value in totals)


@full
def test_vmap_does_not_loop_over_seeds(capfd):
    env = tw.make("CartPole-v1", NUM_ENVS)
    pure = tw.pure(tw.TransformedEnv(env, T.StickyAction(0.5), T.NormalizeObservation()))
    states, _ = torch.vmap(pure.init)(torch.arange(3))
    actions = torch.zeros(3, NUM_ENVS, dtype=torch.int64)
    states, _, _ = torch.vmap(pure.step)(states, actions)
    torch.vmap(pure.reset)(states)
    assert "performance drop" not in capfd.readouterr().err  # PyTorch's warning, from C++


# Refusals.


class HiddenState(T.RewardTransform):
    def setup(self, signature):
        self.register_buffer("steps", torch.zeros(signature.num_envs, 1), persistent=False)
        return signature

    def reward(self, reward):
        self.steps += 1
        return reward + self.steps


class SharesMemory(T.RewardTransform):
    def setup(self, signature):
        self.register_env_buffer("counts", torch.zeros(signature.num_envs, 2))
        self.register_env_buffer("first", self.counts[:, :1])
        return signature

    def reward(self, reward):
        self.counts.add_(1)
        return reward + self.first


class Branches(T.RewardTransform):
    def reward(self, reward):
        return reward if reward.sum() > 0 else -reward


def on_scripted(*transforms):
    return tw.TransformedEnv(ScriptedEnv(2), *transforms)


REFUSED_ENVS = {
    "no env": (lambda: T.TimeLimit(3), TypeError, r"env must be a torchwrap\.Env"),
    "simulator": (gymnasium_cartpole, ValueError, "env must not be"),
    "hidden buffer": (lambda: on_scripted(HiddenState()), ValueError, "HiddenState.steps must"),
    "shared memory": (lambda: on_scripted(SharesMemory()), ValueError, "buffers of env must not"),
    "host": (lambda: on_scripted(Branches()), ValueError, "Branches.reward.* reads values"),
}


@pytest.mark.parametrize(("make", "kind", "words"), REFUSED_ENVS.values(), ids=REFUSED_ENVS)
def test_env_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        tw.pure(make())


def other(name, num_envs=NUM_ENVS):
    env = stack(name, num_envs)
    env.reset(seed=0)
    return env.snapshot()


def state():
    return of_two().init(0)[0]


REFUSED_CALLS = {
    "seed below 0": (lambda: of_two().init(-1), ValueError, r"pure\.init: seed"),
    "seeds": (lambda: of_two().init(torch.arange(3)), ValueError, r"pure\.init: seed"),
    "mask shape": (lambda: of_two().reset(state(), MASK[:2]), ValueError, r"pure\.reset: mask"),
    "action shape": (lambda: of_two().step(state(), torch.zeros(5, 2)), ValueError, "an action"),
    "no state": (lambda: of_two().step(None, some_actions()[0]), TypeError, r"pure\.step: state"),
    "another env": (
        lambda: of_two().step(other("TimeLimit"), some_actions()[0]),
        ValueError,
        r"pure\.step: state.*NormalizeReward",
    ),
    "number of envs": (
        lambda: of_two().reset(other(FAST, 7)),
        ValueError,
        r"pure\.reset: state.*\(5,\).*\(7,\)",
    ),
}


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_argument_is_refused_by_name(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
