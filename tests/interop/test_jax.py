"""JAX simulators: their functions under torchwrap's auto-reset, against the same functions in JAX, stepped by hand."""

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
    assert_transforms_compile,
    assert_transition_and_masked_reset_are_a_step,
    load_example,
    play,
)
from single_envs import (
    NESTED,
    NESTED_ACTIONS,
    assert_elapsed_steps_move_the_limit,
    assert_nested_values_pass,
)
from tensordict import TensorDict

import torchwrap as tw
from torchwrap.interop.jax import from_brax, from_jax
from torchwrap.random import Stream, bits
from torchwrap.testing import check_env

BOX, ACTIONS = S.Box(-np.inf, np.inf, (3,), np.float32), S.Box(-1, 1, (3,), np.float32)
PART = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}


def functions(ending="in turn", length=None):
    """A random walk. Its episodes end after a random number of steps, or all after `length`, in one of the ways or in turn."""

    def reset(key):
        key, first, second = jax.random.split(key, 3)
        position = jax.random.uniform(first, (3,))
        end = jax.random.randint(second, (), 1, 9) if length is None else length
        return {"position": position, "steps": 0, "end": end, "key": key}, position

    def step(state, action):
        key, draw = jax.random.split(state["key"])
        position = state["position"] + 0.1 * jnp.sin(action) + 0.01 * jax.random.normal(draw, (3,))
        steps, end = state["steps"] + 1, state["end"]
        part = (
            jnp.array([*PART.values()])[end % 3] if ending == "in turn" else jnp.array(PART[ending])
        )
        terminated, truncated = (steps >= end) & part
        info = {"steps": steps, "is_far": position[0] > 1, "vector": position}
        state = {"position": position, "steps": steps, "end": end, "key": key}
        return state, position, position.sum(), terminated, truncated, info

    return reset, step


def make(num_envs=5, ending="in turn", length=None, **kwargs):
    return from_jax(*functions(ending, length), num_envs, BOX, ACTIONS, **kwargs)


def keys(seed, rows, episodes):
    """The keys of these episodes of some envs."""
    stream = Stream(len(rows), seed=seed)
    stream.env.copy_(torch.tensor(rows))
    stream.episode.copy_(torch.tensor(episodes))
    return jax.random.wrap_key_data(jnp.asarray(bits(stream.key(), 2).numpy().astype(np.uint32)))


def by_hand(reset, step, actions, seed, limit=None, first_index=0):
    """Steps with JAX alone: yields the successor and the next root."""
    num_envs = len(actions[0])
    reset, step = jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step))
    rows, episodes, elapsed = (
        first_index + np.arange(num_envs),
        np.zeros(num_envs, int),
        np.zeros(num_envs, int),
    )
    state, _ = reset(keys(seed, rows, episodes))
    for action in actions:
        state, observation, reward, terminated, truncated, _ = step(
            state, jnp.asarray(action.numpy())
        )
        elapsed += 1
        truncated = np.asarray(truncated) | (elapsed == limit)
        done = np.asarray(terminated) | truncated
        flags = {"reward": reward, "terminated": terminated, "truncated": truncated, "done": done}
        successor = {
            "observation": to_torch(observation),
            **{name: to_torch(flag)[:, None] for name, flag in flags.items()},
        }
        episodes, elapsed = episodes + done, np.where(done, 0, elapsed)
        fresh = reset(keys(seed, rows, episodes))  # of all rows, to take some
        state, root = jax.tree.map(functools.partial(where, done), fresh, (state, observation))
        yield (
            TensorDict(successor, [num_envs]),
            TensorDict({"observation": to_torch(root)}, [num_envs]),
        )


def to_torch(values):
    if isinstance(values, dict):
        return TensorDict({key: to_torch(value) for key, value in values.items()})
    tensor = torch.from_numpy(np.array(values))
    return (
        tensor.long() if tensor.dtype == torch.int32 else tensor
    )  # Discrete, with which JAX computes in 32 bits


def where(rows, first, second):
    return jnp.where(rows.reshape(-1, *(1,) * (first.ndim - 1)), first, second)


def assert_equals_by_hand(env, reset, step, num_steps, limit=None, seed=3, first_index=0):
    """Every transition and root is bit-identical. Returns the successors."""
    actions = [env.sample_action() for _ in range(num_steps)]
    td, successors = env.reset(seed=seed), []
    for action, (successor, root) in zip(
        actions, by_hand(reset, step, actions, seed, limit, first_index), strict=True
    ):
        transition, td = env.step(td.set("action", action))
        successors.append(transition["next"])
        assert_same(transition["next"].exclude("info"), successor)
        assert_same(td, root)
    return torch.stack(successors)


def count_ends(*arguments, **kwargs):
    return assert_equals_by_hand(*arguments, **kwargs)["done"].sum()


# Steps and resets.


def test_steps_equal_the_functions_by_hand():
    assert count_ends(make(20), *functions(), num_steps=30) > 50  # staggered, by all three causes
    assert (
        count_ends(make(20, "both", 4), *functions("both", 4), num_steps=13) == 60
    )  # all in one step
    env = make(7, max_episode_steps=4)
    assert env.signature.max_episode_steps == 4
    assert count_ends(env, *functions(), num_steps=30, limit=4) > 50


def test_env_is_the_same_among_others_and_in_a_shard():
    assert count_ends(make(40), *functions(), num_steps=9) > 40  # resets of 16 rows
    assert count_ends(make(3, first_index=5), *functions(), num_steps=9, first_index=5) > 3


def batched_functions():
    reset, step = functions()
    return jax.vmap(reset), jax.vmap(step)


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.full)])
def test_env_keeps_the_contract(batched):
    reset, step = batched_functions() if batched else functions()
    given = {
        "observation_space": BOX,
        "action_space": ACTIONS,
        "batched": batched,
        "info_keys": ("steps",),
    }
    check_env(functools.partial(from_jax, reset, step, **given))


def test_transition_resets_nothing_and_a_masked_reset_does():
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
    td = env.reset(seed=0)
    for _ in range(6):
        elapsed = env.elapsed_steps
        transition, td = env.step(td.set("action", env.sample_action()))
        info = transition["next", "info"]
        assert (info["steps"] == 1.0 + elapsed.unsqueeze(-1)).all() and info[
            "steps"
        ].dtype == torch.float32
        assert (info["is_far"] == (transition["next", "observation"][:, :1] > 1).float()).all()


# Memory.


def echo():
    """Functions that return what they get, and constants."""
    constant = jnp.arange(16, dtype=jnp.float32)
    space = S.Dict(
        action=S.Box(-1, 1, (16,)), state=S.Box(-1, 1, (16,)), constant=S.Box(0, 20, (16,))
    )

    def reset(keys):
        rows = jnp.zeros((len(keys), 16))
        return rows, {
            "action": rows,
            "state": rows,
            "constant": jnp.broadcast_to(constant, rows.shape),
        }

    def step(state, action):
        no = jnp.zeros(len(state), bool)
        observation = {
            "action": action,
            "state": state,
            "constant": jnp.broadcast_to(constant, state.shape),
        }
        return state, observation, state[:, 0], no, no, {}

    return reset, step, space, S.Box(-1, 1, (16,))


def test_results_own_their_memory():
    reset, step, space, actions = echo()
    env, held = from_jax(reset, step, 16, space, actions, batched=True), Held()
    td = env.reset(seed=0)
    for _ in range(4):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        values = transition["next"].select("observation", "reward", "terminated", "truncated")
        pointers = [leaf.data_ptr() for leaf in values.values(True, True)]
        pointers += [action.data_ptr(), env.state.unsafe_buffer_pointer()]
        assert len(set(pointers)) == len(pointers) == 8
        held.add(transition.clone(False), td)
        held.assert_unchanged()
    assert_no_overlap(transition, td)
    assert (
        env.step(torch.zeros(16, 16))[0]["next", "observation", "constant"] == torch.arange(16)
    ).all()


# State.


def numbers(wide=False):
    """Functions whose state has a leaf of every kind."""
    names = [
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "float16",
        "bfloat16",
        "float32",
        "bool",
    ]
    names += ["int64", "uint64", "float64"] if wide else []

    def reset(key):
        number = jax.random.uniform(key, (2,), minval=0, maxval=100)
        leaves = {name: number.astype(name) for name in names}
        rbg = jax.random.wrap_key_data(jnp.arange(4, dtype=jnp.uint32), impl="rbg")
        nan = jax.lax.bitcast_convert_type(jnp.uint32(0x7FA12345), jnp.float32)
        return (leaves, [jax.random.split(key), rbg], nan, None), number[:1]

    def step(state, action):
        leaves, (keys, rbg), nan, _ = state
        drawn = jax.vmap(jax.random.uniform)(keys).sum() + jax.random.uniform(rbg)
        leaves = {
            name: ~leaf if name == "bool" else leaf + jnp.asarray(1, leaf.dtype)
            for name, leaf in leaves.items()
        }
        total = sum(leaf.astype("float32").sum() for leaf in leaves.values())
        nothing = jnp.array(False)
        after = (leaves, [jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys), rbg], nan, None)
        return after, (drawn + total)[None], total, nothing, nothing, {}

    return reset, step


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_state_of_every_dtype_steps_as_by_hand(wide):
    with jax.enable_x64(wide):
        space = S.Box(-np.inf, np.inf, (1,), np.float64)
        env = from_jax(*numbers(wide), 4, space, ACTIONS, max_episode_steps=7)
        initial = jax.vmap(numbers(wide)[0])(keys(0, range(4), [0] * 4))[0]
        env.reset(seed=0)
        stepped, observation, *_ = jax.jit(jax.vmap(numbers(wide)[1]))(initial, jnp.zeros((4, 3)))
        got = env.step(torch.zeros(4, 3))[0]["next", "observation"]
        assert got.dtype == torch.float64
        np.testing.assert_array_equal(got.numpy(), observation)
        for name, leaf in stepped[0].items():
            assert str(leaf.dtype) == name and (env.state[0][name] == leaf).all()


# Above it.


def test_compile_compiles_the_transforms():
    assert_transforms_compile(lambda: make(20))


# Spaces.


def test_nested_values_reach_the_functions_and_come_back():
    def observe(state):
        return {
            "a": jnp.full((2, 2), state[0], jnp.uint8),
            "b": (state.astype(jnp.float32)[:2], state[2]),
        }

    def step(state, action):
        many, push = action["push"]
        state = jnp.array([action["turn"], many[0], many[1]])
        return state, observe(state), push, state[0] < 0, state[0] < 0, {}

    env = from_jax(
        lambda key: (jnp.zeros(3, int), observe(jnp.zeros(3, int))), step, 4, NESTED, NESTED_ACTIONS
    )
    assert_nested_values_pass(env)


# Errors.


def replaced(reset=None, step=None, vmapped=False, **kwargs):
    def changed(function, change):
        return function if change is None else lambda *arguments: change(*function(*arguments))

    good_reset, good_step = batched_functions() if vmapped else functions()
    given = {"observation_space": BOX, "action_space": ACTIONS, "batched": vmapped, **kwargs}
    return lambda: from_jax(changed(good_reset, reset), changed(good_step, step), 2, **given)


def test_functions_that_do_not_fit_are_refused_at_construction():
    other_state = replaced(step=lambda state, *values: ({**state, "steps": 1.0}, *values))
    like_that = (
        r"a state like reset's, .*'steps': 'int32\[2\]'.*, but got .*'steps': 'float32\[2\]'"
    )
    for build, error, message in (
        (
            lambda: from_jax(3, functions()[1], 2, BOX, ACTIONS),
            TypeError,
            "from_jax needs a function as reset, but got 3",
        ),
        (
            replaced(observation_space=None),
            TypeError,
            "gymnasium Space as observation_space, but got None",
        ),
        (
            replaced(device="cuda:0"),
            ValueError,
            "needs a device that JAX computes on, but got 'cuda:0'",
        ),
        (replaced(info_keys="steps"), TypeError, "info_keys as a list, but got the string 'steps'"),
        (
            replaced(info_keys=["nope"]),
            ValueError,
            r"but got \['nope'\]. It contains \['is_far', 'steps', 'vector'\]",
        ),
        (
            replaced(info_keys=["vector"]),
            ValueError,
            r"needs vector as one number per env, but got float32\[2, 3\]",
        ),
        (
            replaced(reset=lambda state, observation: state),
            TypeError,
            r"reset to return \(state, observation\), but got",
        ),
        (
            replaced(reset=lambda state, observation: (state, observation[:2])),
            ValueError,
            r"reset to .* got float32\[2, 2\]",
        ),
        (
            replaced(step=lambda *values: values[:5]),
            TypeError,
            r"step to return \(state, .*, info\) with a dict as info",
        ),
        (other_state, ValueError, like_that),
        (
            replaced(step=lambda state, o, *values: (state, {"a": o}, *values)),
            ValueError,
            r"step to .* got {'a': 'float32",
        ),
        (
            replaced(step=lambda state, o, r, *values: (state, o, o, *values)),
            ValueError,
            "reward as one number per env",
        ),
        (
            replaced(observation_space=S.Box(0, 9, (3,), np.uint8)),
            ValueError,
            r"uint8\), but got float32\[2, 3\]",
        ),
        (
            replaced(reset=lambda state, o: ((state["end"][0], o), o), vmapped=True),
            ValueError,
            "one row per key",
        ),
    ):
        with pytest.raises(error, match=message):
            build()


# Brax.


@pytest.fixture
def brax():
    brax = pytest.importorskip("brax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Brax is not maintained
        import brax.envs
        from brax.envs.wrappers import training

        yield {
            "pendulum": lambda: brax.envs.get_environment("inverted_pendulum", backend="spring"),
            "fast": lambda **kwargs: brax.envs.get_environment("fast", **kwargs),
            "wrapped": lambda name: getattr(training, name),
        }


def functions_of_brax(env):
    def reset(key):
        state = env.reset(key)
        return state, state.obs

    def step(state, action):
        state = env.step(state, action)
        return state, state.obs, state.reward, state.done.astype(bool), jnp.array(False), {}

    return reset, step


def test_brax_equals_its_functions_by_hand(brax):
    env = from_brax(brax["pendulum"](), 6, max_episode_steps=20, info_keys=["time_out"])
    assert repr(
        env
    ) == "<InvertedPendulum(num_envs=6, device=cpu)>" and env.single_action_space == S.Box(
        -1, 1, (1,)
    )
    successor = assert_equals_by_hand(env, *functions_of_brax(brax["pendulum"]()), 40, limit=20)
    fallen = successor["observation"][..., 1:2].abs() > 0.2
    assert (
        fallen.any()
        and (successor["terminated"] == fallen).all()
        and (successor["info", "time_out"] == fallen).all()
    )
    assert (successor["truncated"] & ~fallen).any()
    assert len({*env.reset(seed=3)["observation"][:, 0].tolist()}) == 6


def test_brax_by_name_and_with_nested_observations(brax):
    env = from_brax("fast", 3)
    assert repr(env) == "<fast(num_envs=3, device=cpu)>" and env.signature.max_episode_steps == 1000
    env = from_brax(
        brax["fast"](obs_mode="dict_state", asymmetric_obs=True), 3, max_episode_steps=None
    )
    assert (
        env.single_observation_space["privileged_state"].shape == (4,)
        and env.signature.max_episode_steps is None
    )
    env.reset(seed=0)
    assert env.step(env.sample_action())[0]["next", "observation", "state"].shape == (3, 2)


def test_action_repeat_ends_with_the_episode_where_that_of_brax_goes_on(brax):
    from brax.envs.base import State

    class Three:  # the reward of step t is t, and the third step is the last one
        def reset(self, rng):
            return State(None, jnp.zeros(1), jnp.zeros(()), jnp.zeros(()))

        def step(self, state, action):
            obs = state.obs + 1
            return state.replace(obs=obs, reward=obs[0], done=(obs[0] >= 3).astype(float))

    theirs = brax["wrapped"]("EpisodeWrapper")(Three(), episode_length=100, action_repeat=2)
    first = theirs.step(theirs.reset(jax.random.PRNGKey(0)), jnp.zeros(1))
    rewards = [first.reward.item(), theirs.step(first, jnp.zeros(1)).reward.item()]
    data, _ = tw.rollout(
        tw.wrappers.RepeatAction(tw.testing.ScriptedEnv(1, episode_lengths=3), 2), None, 2
    )
    assert (rewards, data["next", "reward"].flatten().tolist()) == ([3, 7], [3, 3])


def test_from_brax_refuses_wrappers_and_names_what_it_needs(brax):
    for name, arguments in (
        ("EpisodeWrapper", (10, 1)),
        ("AutoResetWrapper", ()),
        ("VmapWrapper", ()),
    ):
        with pytest.raises(
            ValueError,
            match=f"without training wrappers, but got {name}: make it with brax.envs.get_env",
        ):
            from_brax(brax["wrapped"](name)(brax["fast"](), *arguments), 2)
    for env, kwargs, message in (
        ("bee", {}, "from_brax needs the name of one of Brax's envs, such as 'ant', but got 'bee'"),
        (3, {}, "from_brax needs an env of Brax or its name, but got 3"),
        (
            brax["fast"](),
            {"info_keys": ["nope"]},
            r"from_brax needs info_keys that the info contains, but got \['nope'\]",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            from_brax(env, 2, **kwargs)


# gymnax.


@pytest.fixture
def gymnax():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("gymnax")


@pytest.mark.parametrize(
    ("name", "limit"), [("CartPole-v1", 15), ("MountainCar-v0", 6), ("FrozenLake-misc", None)]
)
def test_gymnax_equals_its_functions_by_hand(gymnax, name, limit):
    base, params = gymnax.make(name)
    params = params if limit is None else params.replace(max_steps_in_episode=limit)

    def reset(key):
        first, second = jax.random.split(key)
        observation, state = base.reset_env(first, params)
        return (state, second), observation

    def step(state, action):
        inner, key = state
        observation, inner, reward, terminated, _ = base.step_env(
            jax.random.fold_in(key, inner.time), inner, action, params
        )
        return (
            (inner, key),
            observation,
            reward,
            terminated,
            inner.time >= params.max_steps_in_episode,
            {},
        )

    env = load_example("simulators").from_gymnax(base, 20, params)
    assert env.signature.max_episode_steps == params.max_steps_in_episode
    seen = assert_equals_by_hand(env, reset, step, 40)
    ends = [seen[name].any().item() for name in ("terminated", "truncated")]
    assert (
        ends
        == {
            "CartPole-v1": [True, True],
            "MountainCar-v0": [False, True],
            "FrozenLake-misc": [True, False],
        }[name]
    )
