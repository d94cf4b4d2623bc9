"""from_jax and from_brax under auto-reset, against the same functions in JAX, stepped by hand."""

import functools
import warnings

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import torch
from gymnasium import spaces as S
from helpers import (
    Held,
    assert_no_overlap,
    assert_same,
    assert_transition_and_masked_reset_are_a_step,
    load_example,
    play,
)
from single_envs import (
    assert_elapsed_steps_move_the_limit,
)
from tensordict import TensorDict

import torchwrap as tw
from torchwrap.interop.jax import from_brax, from_jax
from torchwrap.random import Stream, bits
from torchwrap.testing import check_env

BOX = S.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = S.Box(-1, 1, (3,), np.float32)
ENDINGS = {
    "terminated": (True, False),
    "truncated": (False, True),
    "both": (True, True),
}


def functions(ending="in turn", length=None):
    """A random walk, with episodes of random or given length and one ending, or all in turn."""

    def reset(key):
        key, first, second = jax.random.split(key, 3)
        position = jax.random.uniform(first, (3,))
        end = jax.random.randint(second, (), 1, 9) if length is None else length
        return {
            "position": position,
            "steps": 0,
            "end": end,
            "key": key,
        }, position

    def step(state, action):
        key, draw = jax.random.split(state["key"])
        noise = 0.01 * jax.random.normal(draw, (3,))
        position = state["position"] + 0.1 * jnp.sin(action) + noise
        steps = state["steps"] + 1
        flags = jnp.array([*ENDINGS.values()])[state["end"] % 3]
        if ending != "in turn":
            flags = jnp.array(ENDINGS[ending])
        terminated, truncated = (steps >= state["end"]) & flags
        info = {
            "steps": steps,
            "is_far": position[0] > 1,
            "vector": position,
        }
        state = {
            **state,
            "position": position,
            "steps": steps,
            "key": key,
        }
        return (
            state,
            position,
            position.sum(),
            terminated,
            truncated,
            info,
        )

    return reset, step


def make(num_envs=5, ending="in turn", length=None, **kwargs):
    return from_jax(*functions(ending, length), num_envs, BOX, ACTIONS, **kwargs)


def keys(seed, rows, episodes):
    """The keys of these episodes of some envs."""
    stream = Stream(len(rows), seed=seed)
    stream.env.copy_(torch.tensor(rows))
    stream.episode.copy_(torch.tensor(episodes))
    words = bits(stream.key(), 2).numpy().astype(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words))


def by_hand(reset, step, actions, seed, limit, first_index):
    """Steps with JAX alone: yields the successor and the next root."""
    reset = jax.jit(jax.vmap(reset))
    step = jax.jit(jax.vmap(step))
    rows = first_index + np.arange(len(actions[0]))
    episodes = np.zeros(len(rows), int)
    elapsed = np.zeros(len(rows), int)
    state, _ = reset(keys(seed, rows, episodes))
    for action in actions:
        state, observation, *numbers, _ = step(state, jnp.asarray(action.numpy()))
        reward, terminated, truncated = (np.asarray(number) for number in numbers)
        elapsed += 1
        truncated = truncated | (elapsed == limit)
        done = terminated | truncated
        flags = {
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
        }
        successor = {name: to_torch(flag)[:, None] for name, flag in flags.items()}
        successor["observation"] = to_torch(observation)
        episodes = episodes + done
        elapsed = np.where(done, 0, elapsed)
        fresh = reset(keys(seed, rows, episodes))  # of all rows, to take some
        select = functools.partial(where, done)
        state, root = jax.tree.map(select, fresh, (state, observation))
        yield TensorDict(successor, [len(rows)]), to_torch(root)


def to_torch(values):
    if isinstance(values, dict):
        return TensorDict({key: to_torch(value) for key, value in values.items()})
    tensor = torch.from_numpy(np.array(values))
    return tensor.long() if tensor.dtype == torch.int32 else tensor  # JAX's Discrete has 32 bits


def where(rows, first, second):
    shape = (-1, *(1,) * (first.ndim - 1))
    return jnp.where(rows.reshape(shape), first, second)


def assert_equals_by_hand(env, reset, step, num_steps, limit=None, seed=3, first_index=0):
    """Every transition and root is bit-identical. Returns the successors."""
    actions = [env.sample_action() for _ in range(num_steps)]
    td = env.reset(seed=seed)
    successors = []
    expected = by_hand(reset, step, actions, seed, limit, first_index)
    for action, (successor, root) in zip(actions, expected, strict=True):
        transition, td = env.step(td.set("action", action))
        successors.append(transition["next"])
        assert_same(transition["next"].exclude("info"), successor)
        wrapped = TensorDict({"observation": root}, td.batch_size)
        assert_same(td.select("observation"), wrapped)
    return torch.stack(successors)


# Steps and resets.


def test_staggered_ends_equal_the_functions_by_hand():
    seen = assert_equals_by_hand(make(20), *functions(), num_steps=30)
    assert seen["done"].sum() > 50


def test_ends_in_one_step_equal_the_functions_by_hand():
    seen = assert_equals_by_hand(make(20, "both", 4), *functions("both", 4), num_steps=13)
    assert seen["done"].sum() == 60


def test_steps_with_a_limit_equal_the_functions_by_hand():
    env = make(7, max_episode_steps=4)
    assert env.signature.max_episode_steps == 4
    seen = assert_equals_by_hand(env, *functions(), num_steps=30, limit=4)
    assert seen["done"].sum() > 50


def test_more_rows_than_one_call_of_reset_takes_equal_the_functions_by_hand():
    seen = assert_equals_by_hand(make(40), *functions(), num_steps=9)
    assert seen["done"].sum() > 40


def test_shard_equals_the_functions_by_hand():
    env = make(3, first_index=5)
    seen = assert_equals_by_hand(env, *functions(), num_steps=9, first_index=5)
    assert seen["done"].sum() > 3


def batched_functions():
    reset, step = functions()
    return jax.vmap(reset), jax.vmap(step)


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.full)])
def test_env_keeps_the_contract(batched):
    given = {
        "observation_space": BOX,
        "action_space": ACTIONS,
        "batched": batched,
        "info_keys": ("steps",),
    }
    reset, step = batched_functions() if batched else functions()
    check_env(functools.partial(from_jax, reset, step, **given))


def test_step_without_reset_resets_nothing_and_a_masked_reset_does():
    assert_transition_and_masked_reset_are_a_step(make(), make())


def test_functions_are_traced_once_for_checks_and_any_number_of_finished_rows():
    calls = []

    def counted(function):
        return lambda *arguments: calls.append(function.__name__) or function(*arguments)

    env = from_jax(*map(counted, functions()), 40, BOX, ACTIONS)
    play(env, 20, env.reset(seed=0))
    env.reset(mask=torch.arange(40) == 3)
    assert sorted(calls) == ["reset", "step"]


def test_elapsed_steps_move_the_limit():
    assert_elapsed_steps_move_the_limit(make(3, "terminated", 100, max_episode_steps=10))


def test_info_keys_are_columns_of_numbers():
    env = make(4, info_keys=["steps", "is_far"])
    env.reset(seed=0)
    for _ in range(6):
        elapsed = env.elapsed_steps
        successor = env.step(env.sample_action())[0]["next"]
        steps = successor["info", "steps"]
        assert steps.dtype == torch.float32
        assert (steps == 1.0 + elapsed.unsqueeze(-1)).all()
        is_far = successor["observation"][:, :1] > 1
        assert (successor["info", "is_far"] == is_far.float()).all()


# Memory.


def test_results_own_their_memory():
    # Functions that return their arguments, and a constant.
    part = S.Box(-20, 20, (16,))

    def observe(state, action):
        repeated = jnp.broadcast_to(jnp.arange(16, dtype=jnp.float32), state.shape)
        return {"action": action, "state": state, "constant": repeated}

    def reset(keys):
        rows = jnp.zeros((len(keys), 16))
        return rows, observe(rows, rows)

    def step(state, action):
        no = jnp.zeros(len(state), bool)
        return state, observe(state, action), state[:, 0], no, no, {}

    space = S.Dict(action=part, state=part, constant=part)
    env = from_jax(reset, step, 16, space, S.Box(-1, 1, (16,)), batched=True)
    held = Held()
    td = env.reset(seed=0)
    for _ in range(4):
        transition, td = env.step(td.set("action", env.sample_action()))
        held.add(transition.clone(False), td)
        held.assert_unchanged()
    assert_no_overlap(transition, td)  # and overwrites them
    successor = env.step(torch.zeros(16, 16))[0]["next"]
    assert (successor["observation", "constant"] == torch.arange(16)).all()
    assert (successor["observation", "state"] == 0).all()


# Spaces.


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_nested_values_reach_the_functions_and_come_back(wide):
    space = S.Dict(b=S.Tuple((S.Box(-9, 9, (2,), np.float64), S.Discrete(5))), a=ACTIONS)

    def reset(key):
        pair = jnp.ones(2, jax.dtypes.canonicalize_dtype(float))
        return 0, {"b": {"0": pair, "1": 1}, "a": jnp.zeros(3, "float32")}

    def step(state, action):
        no = jnp.array(False)
        return state, action, action["a"].sum(), no, no, {}

    with jax.enable_x64(wide):
        env = from_jax(reset, step, 4, space, space)
        assert tw.spaces.contains(space, env.reset()["observation"])
        action = env.sample_action()
        td = env.step(action)[1]
    exact = action if wide else action.float().double()
    assert tw.spaces.contains(space, td["observation"])
    assert (td["observation", "b", "0"] == exact["b", "0"]).all()
    assert (td["observation", "b", "1"] == action["b", "1"]).all()


# Errors.


def other_state(state, *values):
    return {**state, "steps": 1.0 + state["steps"]}, *values


# By the message: a change of the results of reset or step, and other arguments.
UNFIT_RESULTS = {
    "nope": (None, {"info_keys": ["nope"]}),
    "vector": (None, {"info_keys": ["vector"]}),
    "reset.*uint8": (
        None,
        {"observation_space": S.Box(0, 9, (3,), np.uint8)},
    ),
    "reset.*observation": (
        {"reset": lambda state, observation: (state, observation[:2])},
        {},
    ),
    "step.*info": ({"step": lambda *values: values[:5]}, {}),
    "step.*state": ({"step": other_state}, {}),
    "step.*observation": (
        {"step": lambda state, o, *values: (state, {"a": o}, *values)},
        {},
    ),
    "reward": (
        {"step": lambda state, o, r, *values: (state, o, o, *values)},
        {},
    ),
}


@pytest.mark.parametrize("message", UNFIT_RESULTS)
def test_unfit_results_are_refused_in_the_first_reset_and_step(message):
    changes, kwargs = UNFIT_RESULTS[message]
    changed = dict(zip(("reset", "step"), functions(), strict=True))
    for name, change in (changes or {}).items():
        function = changed[name]
        changed[name] = lambda *arguments: change(*function(*arguments))  # noqa: B023
    spaces = {"observation_space": BOX, "action_space": ACTIONS}
    env = from_jax(**changed, num_envs=2, **{**spaces, **kwargs})
    with pytest.raises((TypeError, ValueError), match=f"from_jax.*{message}"):
        env.reset()
        env.step(env.sample_action())


# Brax.


@pytest.fixture
def brax():
    brax = pytest.importorskip("brax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax warns that it is not maintained
        import brax.envs
        import brax.envs.wrappers.training

        yield brax.envs


def functions_of_brax(env):
    def reset(key):
        state = env.reset(key)
        return state, state.obs

    def step(state, action):
        state = env.step(state, action)
        done = state.done.astype(bool)
        return (
            state,
            state.obs,
            state.reward,
            done,
            jnp.array(False),
            {},
        )

    return reset, step


def test_brax_equals_its_functions_by_hand(brax):
    base = brax.get_environment("inverted_pendulum", backend="spring")
    env = from_brax(base, 6, max_episode_steps=20, info_keys=["time_out"])
    assert env.single_action_space == S.Box(-1, 1, (1,))
    successor = assert_equals_by_hand(env, *functions_of_brax(base), 40, limit=20)
    fallen = successor["observation"][..., 1:2].abs() > 0.2
    assert fallen.any()
    assert (successor["terminated"] == fallen).all()
    assert (successor["info", "time_out"] == fallen).all()
    assert (successor["truncated"] & ~fallen).any()
    positions = env.reset(seed=3)["observation"][:, 0]
    assert len(positions.unique()) == 6


def test_brax_by_name(brax):
    env = from_brax("fast", 3)
    assert env.num_envs == 3
    assert env.signature.max_episode_steps == 1000


@pytest.mark.parametrize("name", ["EpisodeWrapper", "AutoResetWrapper", "VmapWrapper"])
def test_training_wrappers_of_brax_are_refused(brax, name):
    arguments = (10, 1) if name == "EpisodeWrapper" else ()
    wrapper = getattr(brax.wrappers.training, name)
    with pytest.raises(ValueError, match=f"from_brax.*{name}"):
        from_brax(wrapper(brax.get_environment("fast"), *arguments), 2)


# gymnax.


@pytest.fixture
def gymnax():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("gymnax")


GYMNAX = {  # a limit, and whether episodes terminate and are truncated
    "CartPole-v1": (15, [True, True]),
    "MountainCar-v0": (6, [False, True]),
    "FrozenLake-misc": (None, [True, False]),
}


@pytest.mark.parametrize("name", GYMNAX)
def test_gymnax_equals_its_functions_by_hand(gymnax, name):
    limit, ends = GYMNAX[name]
    base, params = gymnax.make(name)
    if limit is not None:
        params = params.replace(max_steps_in_episode=limit)

    def reset(key):
        first, second = jax.random.split(key)
        observation, state = base.reset_env(first, params)
        return (state, second), observation

    def step(state, action):
        inner, key = state
        key_of_step = jax.random.fold_in(key, inner.time)
        results = base.step_env(key_of_step, inner, action, params)
        observation, inner, reward, terminated, _ = results
        truncated = inner.time >= params.max_steps_in_episode
        return (
            (inner, key),
            observation,
            reward,
            terminated,
            truncated,
            {},
        )

    env = load_example("simulators").from_gymnax(base, 20, params)
    assert env.signature.max_episode_steps == params.max_steps_in_episode
    seen = assert_equals_by_hand(env, reset, step, 40)
    assert [
        seen["terminated"].any().item(),
        seen["truncated"].any().item(),
    ] == ends
