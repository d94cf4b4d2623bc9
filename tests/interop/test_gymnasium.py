from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.gymnasium import from_gymnasium

DISABLED, SAME_STEP, NEXT_STEP = AutoresetMode.DISABLED, AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
BOX = spaces.Box(-1, 1, (3,), np.float32)
NEVER = (10**9,)


class Scripted(gymnasium.Env[Any, Any]):
    # Everything it gives is drawn from its own generator, so a reset too many or too few shows in all that follows.

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, space=BOX, lengths=(5,), ending="terminated", action_space=None, render_mode=None):
        self.observation_space, self.action_space = space, action_space or spaces.Box(-1, 1, (2,), np.float32)
        self.lengths, self.ending, self.render_mode = lengths, ending, render_mode
        self.episode = self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = self.lengths[self.episode % len(self.lengths)]
        self.episode, self.elapsed, self.options = self.episode + 1, 0, options
        return self._observe(), {"elapsed": -1.0, "place": np.full(2, -1.0), "reset only": 1}

    def step(self, action):
        self.elapsed, self.steps, self.action = self.elapsed + 1, self.steps + 1, action
        ended = self.elapsed == self.length
        info = {"elapsed": self.elapsed, "place": self.np_random.normal(size=2), "even": self.elapsed % 2 == 0, "name": "a"}
        if self.elapsed > 1:
            info["late"] = 10.0 * self.elapsed
        if ended:
            info["final"] = np.float64(self.length)
        reward = float(self.np_random.normal() + sum(np.sum(part) for part in parts(action)))
        return self._observe(), reward, ended and self.ending != "truncated", ended and self.ending != "terminated", info

    def render(self):
        return np.full((2, 2, 3), self.elapsed, np.uint8)

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()


class Overwriting(Scripted):
    def step(self, action):
        result = super().step(action)
        action[...] = 7  # what an env does with its action is no business of the caller's
        return result


class Failing(Scripted):
    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError("no such option")
        return super().reset(seed=seed)


gymnasium.register("TorchwrapTest/Scripted-v0", entry_point=Scripted)
gymnasium.register("TorchwrapTest/Overwriting-v0", entry_point=Overwriting)
gymnasium.register("TorchwrapTest/Text-v0", entry_point=Scripted, kwargs={"space": spaces.Text(5)})


def parts(value):
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, tuple) else [value]


KINDS = [
    pytest.param(kind, mode, id=f"{kind.__name__[:-9].lower()}-{mode.value}")
    for kind in (SyncVectorEnv, AsyncVectorEnv)
    for mode in (DISABLED, SAME_STEP)
]
every_kind = pytest.mark.parametrize("kind, mode", KINDS)
every_mode = pytest.mark.parametrize("mode", [DISABLED, SAME_STEP], ids=lambda mode: mode.value)


@pytest.fixture
def bridge() -> Iterator[Any]:
    opened: list[VectorEnv[Any, Any, Any]] = []

    def build(makers, kind=SyncVectorEnv, mode=DISABLED, info_keys=(), first_index=0, device="cpu", **kwargs):
        opened.append(kind(makers, autoreset_mode=mode, **kwargs))
        return from_gymnasium(opened[-1], info_keys=info_keys, first_index=first_index, device=device)

    yield build
    for vector_env in opened:
        if not vector_env.closed:
            vector_env.close()


def scripted(num_envs, **kwargs):
    lengths = kwargs.pop("lengths", (5,))
    each = lengths if isinstance(lengths, list) else [lengths] * num_envs
    return [functools.partial(Scripted, lengths=one, **kwargs) for one in each]


def to_tree(value):
    if isinstance(value, TensorDict):
        return {key: to_tree(part) for key, part in value.items()}
    return value.cpu().numpy()


def stack(values):
    if isinstance(values[0], dict):
        return {key: stack([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return {str(key): stack([value[key] for value in values]) for key in range(len(values[0]))}
    return np.stack(values)


def rows(tree, row):
    if isinstance(tree, dict):
        return {key: rows(value, row) for key, value in tree.items()}
    return tree[row]


def assert_same(actual, expected, where=""):
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    else:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        np.testing.assert_array_equal(actual, expected, err_msg=where)


class Singles:
    # The oracle: single Gymnasium envs, driven by hand.

    def __init__(self, makers, seed, first_index=0):
        self.envs = [maker() for maker in makers]
        self.now = [env.reset(seed=seed + first_index + i)[0] for i, env in enumerate(self.envs)]

    def act(self, td):
        for i, env in enumerate(self.envs):
            env.action_space.seed(int(env.unwrapped.np_random.bit_generator.state["state"]["state"]) % 2**31 + i)
        actions = [env.action_space.sample() for env in self.envs]
        return td.set("action", to_tensors(stack(actions), len(actions))), actions

    def step(self, actions):
        results = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        successor, reward, terminated, truncated, self.infos = zip(*results, strict=True)
        done = [a or b for a, b in zip(terminated, truncated, strict=True)]
        self.now = [env.reset()[0] if over else new for env, over, new in zip(self.envs, done, successor, strict=True)]
        columns = {"reward": (reward, np.float32), "terminated": (terminated, bool), "truncated": (truncated, bool)}
        columns["done"] = (done, bool)
        flat = {name: np.array(value).astype(dtype)[:, None] for name, (value, dtype) in columns.items()}
        return {"observation": stack(successor), **flat}


def to_tensors(tree, num_envs):
    if isinstance(tree, dict):
        return TensorDict({key: to_tensors(value, num_envs) for key, value in tree.items()}, batch_size=[num_envs])
    return torch.from_numpy(tree.copy())


def follow(env, singles, td, steps):
    ends = 0
    for step in range(steps):
        td, actions = singles.act(td)
        transition, td = env.step(td)
        expected = singles.step(actions)
        actual = to_tree(transition["next"])
        actual.pop("info", None)
        assert_same(actual, expected, f"step {step}")
        assert_same(to_tree(td["observation"]), stack(singles.now), f"where to act after step {step}")
        ends += int(expected["done"].sum())
    return td, ends


def check(env, makers, steps=20, seed=3):
    singles = Singles(makers, seed)
    td = env.reset(seed=seed)
    assert_same(to_tree(td["observation"]), stack(singles.now), "first observation")
    return follow(env, singles, td, steps)[1]


def act(env, td):
    return env.step(td.set("action", env.sample_action()))


# Transitions.


@pytest.mark.parametrize(
    "id, kwargs",
    [("HalfCheetah-v5", {"max_episode_steps": 7}), ("CartPole-v1", {}), ("CartPole-v1", {"max_episode_steps": 9})],
)
@every_kind
def test_every_vector_env_gives_the_transitions_of_single_envs(bridge, kind, mode, id, kwargs):
    makers = [functools.partial(gymnasium.make, id, **kwargs)] * 3
    assert check(bridge(makers, kind, mode), makers, steps=40) >= 3


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
@pytest.mark.parametrize("id, kwargs", [("HalfCheetah-v5", {"max_episode_steps": 7}), ("CartPole-v1", {})])
def test_make_gives_the_transitions_of_single_envs(id, kwargs, vectorization_mode):
    env = tw.make(id, 3, backend="gymnasium", vectorization_mode=vectorization_mode, **kwargs)
    try:
        assert check(env, [functools.partial(gymnasium.make, id, **kwargs)] * 3, steps=40) >= 3
    finally:
        env.close()


SPACES = {
    "Dict": spaces.Dict({"b": BOX, "a": spaces.Discrete(5), "image": spaces.Box(0, 255, (4, 4, 3), np.uint8)}),
    "Tuple": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(4)]),
    "nested": spaces.Dict({"in": spaces.Tuple([spaces.Dict({"x": BOX}), spaces.Discrete(3, start=-1)])}),
    "long Tuple": spaces.Tuple([spaces.Discrete(100 + i) for i in range(12)]),
    "Discrete": spaces.Discrete(7, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "scalar": spaces.Box(-1, 1, (), np.float32),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@every_kind
def test_every_observation_space_comes_through(bridge, kind, mode, space):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)], space=space)
    assert check(bridge(makers, kind, mode), makers, steps=12) > 12


@pytest.mark.parametrize("space", [SPACES["Dict"], SPACES["Tuple"], SPACES["Discrete"], SPACES["image"]], ids=repr)
@every_mode
def test_async_without_shared_memory_gives_the_same(bridge, mode, space):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)], space=space)
    assert check(bridge(makers, AsyncVectorEnv, mode, shared_memory=False), makers, steps=12) > 12


LENGTHS = {
    "staggered": [(5, 2), (3,), (1, 4), NEVER],
    "one step": [(1,)] * 4,
    "all at once": [(4,)] * 4,
    "one of them": [NEVER, NEVER, (3,), NEVER],
    "never": [NEVER] * 4,
}


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@every_kind
def test_every_way_of_ending_comes_through(bridge, kind, mode, lengths, ending):
    makers = scripted(4, lengths=lengths, ending=ending)
    ends = check(bridge(makers, kind, mode), makers, steps=13)
    assert ends == sum(int(np.searchsorted(np.cumsum(list(each) * 13), 13, side="right")) for each in lengths)


@pytest.mark.parametrize("copy", [True, False])
@every_kind
def test_whether_the_vector_env_copies_makes_no_difference(bridge, kind, mode, copy):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)])
    assert check(bridge(makers, kind, mode, copy=copy), makers) > 12


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(4, start=3),
        spaces.MultiDiscrete([3, 5]),
        spaces.MultiBinary(3),
        spaces.Box(0, 9, (2, 2), np.int64),
        spaces.Tuple([BOX, spaces.Discrete(3)]),
        spaces.Dict({"b": BOX, "a": spaces.Discrete(3)}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_every_action_space_comes_through(bridge, kind, action_space):
    makers = scripted(2, lengths=(3,), action_space=action_space)
    check(bridge(makers, kind), makers, steps=5)


@every_kind
def test_images_stay_uint8(bridge, kind, mode):
    env = bridge(scripted(2, lengths=(1,), space=SPACES["image"]), kind, mode)
    transition, td = act(env, env.reset(seed=0))
    assert transition["next", "observation"].dtype == td["observation"].dtype == torch.uint8


@pytest.mark.parametrize("space", [BOX, SPACES["nested"], SPACES["image"]], ids=["Box", "nested", "image"])
@pytest.mark.parametrize("copy", [True, False])
@every_kind
def test_what_was_handed_out_is_never_changed(bridge, kind, mode, copy, space):
    env = bridge(scripted(3, lengths=[(2,), (3,), NEVER], space=space), kind, mode, copy=copy, info_keys=("elapsed",))
    td, kept = env.reset(seed=0), []
    for _ in range(6):
        kept.append((td["observation"], td["observation"].clone()))
        transition, td = act(env, td)
        kept.append((transition["next"], transition["next"].clone()))
    env.reset()
    for handed_out, copied in kept:
        assert_same(to_tree(handed_out), to_tree(copied))


@every_kind
def test_writing_into_what_was_handed_out_does_not_reach_the_env(bridge, kind, mode):
    makers = scripted(3, lengths=[(2,), (3,), NEVER])
    env, untouched = bridge(makers, kind, mode, copy=False), bridge(makers, kind, mode, copy=False)
    mask = torch.tensor([False, True, False])
    td, expected = env.reset(seed=0), untouched.reset(seed=0)
    for step in range(8):
        td.apply_(lambda leaf: leaf.fill_(9))
        if step in (0, 3):
            td, expected = env.reset(mask=mask), untouched.reset(mask=mask)
            assert torch.equal(td["observation"][mask], expected["observation"][mask])
            assert (td["observation"][~mask] == 9).all()  # as the caller left them
            td.apply_(lambda leaf: leaf.fill_(9))
        transition, td = act(env, td)
        reference, expected = act(untouched, expected)
        assert_same(to_tree(transition), {**to_tree(reference), "observation": np.full((3, 3), 9, np.float32)})
        assert torch.equal(td["observation"], expected["observation"])
        transition.apply_(lambda leaf: leaf.fill_(1))
    ours, theirs = dict(env.named_buffers()), dict(untouched.named_buffers())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_an_env_that_writes_into_its_action_does_not_reach_the_caller(vectorization_mode):
    env = tw.make("TorchwrapTest/Overwriting-v0", 2, backend="gymnasium", vectorization_mode=vectorization_mode)
    try:
        transition, _ = env.step(env.reset(seed=0).set("action", torch.zeros(2, 2)))
        assert torch.equal(transition["action"], torch.zeros(2, 2))
    finally:
        env.close()


def test_an_env_that_keeps_its_action_does_not_see_the_caller_write(bridge):
    env = bridge(scripted(2, lengths=NEVER))
    action = torch.zeros(2, 2)
    env.step(env.reset(seed=0).set("action", action))
    action.fill_(1)
    assert all((kept == 0).all() for kept in env.vector_env.get_attr("action"))


def test_an_action_that_requires_grad_is_taken(bridge):
    makers = scripted(2, lengths=(3,))
    env, same = bridge(makers), bridge(makers)
    action = torch.rand(2, 2)
    first, _ = env.step(env.reset(seed=0).set("action", action.clone().requires_grad_()))
    second, _ = same.step(same.reset(seed=0).set("action", action))
    assert torch.equal(first["next", "reward"], second["next", "reward"])


# Seeds, shards, resets.


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_shards_by_first_index_are_the_whole(bridge, kind):
    makers = scripted(4, lengths=(3,))
    env = bridge(makers, kind)
    shards = [bridge(makers[:2], kind, first_index=first) for first in (0, 2)]
    td, halves = env.reset(seed=5), [shard.reset(seed=5) for shard in shards]
    for _ in range(8):
        assert torch.equal(td["observation"], torch.cat([half["observation"] for half in halves]))
        transition, td = act(env, td)
        actions = transition["action"].split(2)
        stepped = [s.step(h.set("action", a)) for s, h, a in zip(shards, halves, actions, strict=True)]
        halves = [half for _, half in stepped]
        assert torch.equal(transition["next", "reward"], torch.cat([each["next", "reward"] for each, _ in stepped]))


@pytest.mark.parametrize("first_index", [0, 3])
def test_first_index_seeds_env_i_with_seed_plus_its_global_index(first_index):
    env = tw.make("CartPole-v1", 2, backend="gymnasium", first_index=first_index)
    expected = [gymnasium.make("CartPole-v1").reset(seed=40 + first_index + i)[0] for i in range(2)]
    assert_same(to_tree(env.reset(seed=40)["observation"]), np.stack(expected))


@pytest.mark.parametrize("seed", [None, 77])
@every_kind
def test_a_partial_reset_begins_new_episodes_in_its_rows_alone(bridge, kind, mode, seed):
    makers = scripted(4, lengths=[(3, 9), (9,), (2, 9), NEVER])
    env, singles = bridge(makers, kind, mode), Singles(makers, 3)
    td, _ = follow(env, singles, env.reset(seed=3), 2)
    for i in (1, 2):  # env 2 has just been reset by itself
        singles.now[i] = singles.envs[i].reset(seed=None if seed is None else seed + i)[0]
    td = env.reset(seed=seed, mask=torch.tensor([False, True, True, False]))
    assert_same(to_tree(td["observation"]), stack(singles.now))
    follow(env, singles, td, 12)


@every_kind
def test_a_full_reset_in_mid_episode_begins_new_episodes_everywhere(bridge, kind, mode):
    makers = scripted(3, lengths=[(3, 9), (9,), (2, 9)])
    env, singles = bridge(makers, kind, mode), Singles(makers, 3)
    follow(env, singles, env.reset(seed=3), 2)
    singles.now = [single.reset()[0] for single in singles.envs]
    td = env.reset()
    assert_same(to_tree(td["observation"]), stack(singles.now))
    follow(env, singles, td, 10)


@every_kind
def test_a_mask_without_any_row_changes_nothing(bridge, kind, mode):
    makers = scripted(2, lengths=[(3,), (1,)])
    env, singles = bridge(makers, kind, mode), Singles(makers, 3)
    td, _ = follow(env, singles, env.reset(seed=3), 2)
    again = env.reset(seed=9, mask=torch.zeros(2, dtype=torch.bool), options={"low": 0.0})
    assert torch.equal(again["observation"], td["observation"])
    follow(env, singles, again, 5)


@every_kind
def test_options_reach_the_envs(bridge, kind, mode):
    env = bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 3, kind, mode)
    options = {"low": 0.03, "high": 0.04}
    observation = env.reset(seed=0, options=options)["observation"]
    assert ((observation >= 0.03) & (observation <= 0.04)).all()
    assert options == {"low": 0.03, "high": 0.04}


@every_kind
def test_options_reach_only_the_masked_envs(bridge, kind, mode):
    env, options = bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 3, kind, mode), {"low": 0.06, "high": 0.07}
    first = env.reset(seed=0)["observation"]
    observation = env.reset(mask=torch.tensor([True, False, True]), options=options)["observation"]
    assert torch.equal(observation[1], first[1])
    assert ((observation[[0, 2]] >= 0.06) & (observation[[0, 2]] <= 0.07)).all()
    assert options == {"low": 0.06, "high": 0.07}


@every_mode
def test_options_are_for_one_reset_and_not_for_those_after_it(bridge, mode):
    env = bridge(scripted(2, lengths=[(1,), NEVER]), mode=mode)
    _, _ = act(env, env.reset(options={"difficulty": 3}))
    assert not env.vector_env.get_attr("options")[0]
    assert env.vector_env.get_attr("options")[1] == {"difficulty": 3}


@every_mode
def test_each_episode_is_begun_by_one_reset(bridge, mode):
    env = bridge(scripted(3, lengths=[(1,), (2,), NEVER]), mode=mode)
    td = env.reset(seed=0)
    for _ in range(4):
        _, td = act(env, td)
    assert env.vector_env.get_attr("episode") == (5, 3, 1)


@pytest.mark.parametrize("seed", [-1, 1.0, True, "a", 2**64])
def test_a_bad_seed_is_refused_and_nothing_has_changed(bridge, seed):
    makers = scripted(2, lengths=(3,))
    env, singles = bridge(makers), Singles(makers, 3)
    td = env.reset(seed=3)
    with pytest.raises(ValueError, match=r"reset needs a seed that is an integer in \[0, 2\*\*64\), but got"):
        env.reset(seed=seed)
    follow(env, singles, td, 5)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, np.int64(5)])
def test_a_large_or_numpy_seed_is_taken(bridge, seed):
    env, expected = bridge(scripted(2)), [Scripted().reset(seed=int(seed) + i)[0] for i in range(2)]
    assert_same(to_tree(env.reset(seed=seed)["observation"]), np.stack(expected))


def test_a_reset_that_an_env_refuses_leaves_no_seed_behind(bridge):
    makers = [functools.partial(Failing, lengths=(3,))] * 2
    env, singles = bridge(makers), Singles(makers, 3)
    td = env.reset(seed=3)
    with pytest.raises(ValueError, match="no such option"):
        env.reset(seed=9, options={"a": 1})
    follow(env, singles, td, 7)


# Info.


@every_kind
def test_asked_for_info_is_there_at_every_step(bridge, kind, mode):
    keys = ("elapsed", "even", "late", "final")
    makers = scripted(3, lengths=[(3,), (2,), (4, 1)])
    env, singles = bridge(makers, kind, mode, info_keys=keys), Singles(makers, 3)
    td = env.reset(seed=3)
    for _ in range(7):
        td, actions = singles.act(td)
        transition, td = env.step(td)
        singles.step(actions)
        expected = {key: np.array([[info.get(key, 0)] for info in singles.infos]).astype(np.float32) for key in keys}
        assert_same(to_tree(transition["next", "info"]), expected)


@every_kind
def test_arrays_in_info_take_the_space_that_is_given(bridge, kind, mode):
    keys = {"place": spaces.Box(-np.inf, np.inf, (2,), np.float64), "elapsed": spaces.Box(0, 99, (), np.int64)}
    makers = scripted(3, lengths=[(3,), (2,), (1,)])
    env, singles = bridge(makers, kind, mode, info_keys=keys), Singles(makers, 3)
    td = env.reset(seed=3)
    for _ in range(7):
        td, actions = singles.act(td)
        transition, td = env.step(td)
        singles.step(actions)
        place = np.stack([info["place"] for info in singles.infos])
        elapsed = np.array([info["elapsed"] for info in singles.infos], np.int64)
        assert_same(to_tree(transition["next", "info"]), {"place": place, "elapsed": elapsed})


@every_kind
def test_rewards_of_halfcheetah_are_in_its_info(bridge, kind, mode):
    makers = [functools.partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=3)] * 2
    env = bridge(makers, kind, mode, info_keys=("reward_forward", "reward_ctrl"))
    td = env.reset(seed=0)
    for _ in range(7):
        transition, td = act(env, td)
        following = transition["next"]
        assert torch.allclose(following["info", "reward_forward"] + following["info", "reward_ctrl"], following["reward"])


def test_no_info_is_passed_on_that_was_not_asked_for(bridge):
    env = bridge(scripted(2))
    transition, _ = act(env, env.reset())
    assert "info" not in transition["next"]


@pytest.mark.parametrize("info_keys", [("elapsd",), ("elapsed", "elapsd"), ("reset only",)])
@every_mode
def test_a_misspelt_info_key_raises_at_the_first_episode_end(bridge, mode, info_keys):
    env = bridge(scripted(2, lengths=[(2,), (3,)]), mode=mode, info_keys=info_keys)
    _, td = act(env, env.reset())
    wrong = sorted(set(info_keys) - {"elapsed"})[0]
    with pytest.raises(ValueError, match=rf"needs info_keys that its info has, but got \['{wrong}'\] beside .*'elapsed'"):
        act(env, td)


@every_mode
def test_a_misspelt_name_with_a_space_is_zero_and_raises_nothing(bridge, mode):
    env = bridge(scripted(2, lengths=[(2,), (3,)]), mode=mode, info_keys={"elapsd": BOX})
    td = env.reset(seed=0)
    for _ in range(7):
        transition, td = act(env, td)
        assert_same(to_tree(transition["next", "info"]), {"elapsd": np.zeros((2, 3), np.float32)})


@pytest.mark.parametrize("info_keys", [("name",), {"place": spaces.Box(0, 1, (3,))}, ("place",)])
def test_info_that_is_not_what_was_declared_is_a_clear_error(bridge, info_keys):
    env = bridge(scripted(2), info_keys=info_keys)
    with pytest.raises((ValueError, TypeError), match=sorted(info_keys)[0]):
        act(env, env.reset())


# With transforms on it.


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("shared_memory", [True, False])
@every_mode
def test_a_time_limit_on_top_is_the_same_over_every_autoreset_mode(bridge, kind, mode, shared_memory):
    if kind is SyncVectorEnv and not shared_memory:
        pytest.skip("SyncVectorEnv has no shared memory")
    memory = {} if kind is SyncVectorEnv else {"shared_memory": shared_memory}
    makers = scripted(4, lengths=[(3, 9), NEVER, (4, 1, 9), (1,)])
    limited = [lambda maker=maker: gymnasium.wrappers.TimeLimit(maker(), 4) for maker in makers]
    env = tw.TransformedEnv(bridge(makers, kind, mode, **memory), T.TimeLimit(4))
    assert check(env, limited, steps=17) > 17


@every_mode
def test_episode_statistics_on_top_equal_gymnasiums(bridge, mode):
    makers = scripted(3, lengths=[(3, 5), (4,), (1,)])
    env = tw.TransformedEnv(bridge(makers, mode=mode), T.RecordEpisodeStatistics())
    singles = Singles([lambda m=m: gymnasium.wrappers.RecordEpisodeStatistics(m()) for m in makers], 3)
    td = env.reset(seed=3)
    for _ in range(12):
        td, actions = singles.act(td)
        transition, td = env.step(td)
        done = singles.step(actions)["done"][:, 0]
        for i in np.flatnonzero(done):
            assert transition["next", "episode_return"][i].item() == pytest.approx(singles.infos[i]["episode"]["r"], abs=1e-5)
            assert transition["next", "episode_length"][i].item() == singles.infos[i]["episode"]["l"]


# What is refused.


class NoMode(SyncVectorEnv):
    def __init__(self, makers):
        super().__init__(makers)
        self.metadata = {"render_modes": []}


@pytest.mark.parametrize(
    "make_one, error, match",
    [
        (lambda: SyncVectorEnv(scripted(2)), ValueError, "DISABLED or SAME_STEP, but got .*NEXT_STEP.*vector_kwargs="),
        (lambda: gymnasium.make_vec("CartPole-v1", 2), ValueError, "NEXT_STEP.*or with torchwrap.make"),
        (lambda: NoMode(scripted(2)), ValueError, "DISABLED or SAME_STEP, but got None"),
        (lambda: gymnasium.make("CartPole-v1"), TypeError, r"needs a gymnasium.vector.VectorEnv, but got .*make_vec"),
        (lambda: None, TypeError, "VectorEnv, but got NoneType"),
        (lambda: "CartPole-v1", TypeError, "VectorEnv, but got str"),
        (
            lambda: SyncVectorEnv(scripted(2, space=spaces.Text(5)), autoreset_mode=DISABLED),
            TypeError,
            "Dict or Tuple, but got Text",
        ),
        (lambda: SyncVectorEnv(scripted(2, space=BOX), autoreset_mode=DISABLED), None, ""),
        (lambda: SyncVectorEnv(scripted(2, space=BOX), autoreset_mode=SAME_STEP), None, ""),
    ],
)
def test_what_cannot_be_bridged_is_refused_with_what_to_do(make_one, error, match):
    given = make_one()
    if error is None:
        assert from_gymnasium(given).reset().batch_size == (2,)
    else:
        with pytest.raises(error, match=match):
            from_gymnasium(given)


@pytest.mark.parametrize(
    "action, error, match",
    [
        (torch.zeros(2, 3), ValueError, r"an action of shape \(2, 2\) \(num_envs first\), but got \(2, 3\)"),
        (torch.zeros(2), ValueError, r"of shape \(2, 2\)"),
        (torch.zeros(3, 2), ValueError, r"of shape \(2, 2\)"),
        (torch.zeros(2, 2, dtype=torch.float64), TypeError, "dtype torch.float32 .* but got torch.float64"),
        (None, ValueError, r'needs td\["action"\]'),
    ],
)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_a_bad_action_is_refused_before_the_simulator_moves(bridge, kind, action, error, match):
    env = bridge(scripted(2), kind)
    env.reset(seed=0)
    given = {} if action is None else {"action": action}
    with pytest.raises(error, match=match):
        env.step(TensorDict(given, batch_size=[]))
    assert env.vector_env.get_attr("steps") == (0, 0)


@pytest.mark.parametrize(
    "action, error, match",
    [
        (torch.zeros(2, 3), TypeError, r"an action as a TensorDict with keys \['a', 'b'\], but got Tensor"),
        (TensorDict({"a": torch.zeros(2, dtype=torch.int64)}, [2]), TypeError, r"keys \['a', 'b'\], but got \['a'\]"),
        (TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, 3)}, [2]), TypeError, r"an action\['a'\] of dtype torch.int64"),
        (TensorDict({"a": torch.full((2,), 3), "b": torch.zeros(2, 3)}, [2]), ValueError, r"an action\['a'\] in Discrete"),
    ],
)
def test_a_bad_nested_action_is_refused_before_the_simulator_moves(bridge, action, error, match):
    env = bridge(scripted(2, action_space=spaces.Dict({"a": spaces.Discrete(3), "b": BOX})))
    td = env.reset(seed=0)
    with pytest.raises(error, match=match):
        env.step(td.set("action", action))
    assert env.vector_env.get_attr("steps") == (0, 0)


@pytest.mark.parametrize(
    "space, bad, good",
    [
        (spaces.Discrete(3), [0, 3], [0, 2]),
        (spaces.Discrete(3), [-1, 0], [1, 0]),
        (spaces.Discrete(3, start=5), [5, 0], [5, 7]),
        (spaces.MultiDiscrete([2, 4]), [[1, 3], [2, 3]], [[1, 3], [0, 0]]),
    ],
)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_a_discrete_action_out_of_range_is_refused_before_the_simulator_moves(bridge, kind, space, bad, good):
    env = bridge(scripted(2, action_space=space), kind)
    td = env.reset(seed=0)
    with pytest.raises(ValueError, match=r"needs an action in .*, but got values from"):
        env.step(td.set("action", torch.tensor(bad)))
    assert env.vector_env.get_attr("steps") == (0, 0)
    env.step(td.set("action", torch.tensor(good)))
    assert env.vector_env.get_attr("steps") == (1, 1)


@pytest.mark.parametrize(
    "mask",
    [[True, False], torch.ones(2), torch.ones(3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool), np.ones(2, bool)],
    ids=["list", "float", "three", "column", "numpy"],
)
def test_a_bad_mask_is_refused(bridge, mask):
    env = bridge(scripted(2))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"reset needs a mask of shape \(2,\) torch.bool on cpu, but got"):
        env.reset(mask=mask)
    assert env.vector_env.get_attr("episode") == (1, 1)


def test_step_and_a_partial_reset_need_a_reset_first(bridge):
    env = bridge(scripted(2))
    with pytest.raises(RuntimeError, match=r"needs reset\(\) first, but got step"):
        env.step(TensorDict({"action": torch.zeros(2, 2)}, batch_size=[2]))
    with pytest.raises(RuntimeError, match="needs a first reset of every env"):
        env.reset(mask=torch.tensor([True, False]))


def test_snapshot_and_restore_say_that_a_foreign_simulator_keeps_its_state(bridge):
    env, native = bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 2), tw.make("CartPole-v1", 2)
    env.reset(seed=0)
    native.reset(seed=0)
    with pytest.raises(RuntimeError, match="needs its state in tensors for snapshot and restore, but got a foreign simulator"):
        env.snapshot()
    with pytest.raises(RuntimeError, match="foreign simulator"):
        env.restore(native.snapshot())
    with pytest.raises(RuntimeError, match="foreign simulator"):
        tw.TransformedEnv(env, T.TimeLimit(4)).restore(native.snapshot())


@pytest.mark.parametrize(
    "id, kwargs",
    [
        ("TorchwrapTest/Text-v0", {}),
        ("TorchwrapTest/Scripted-v0", {"first_index": -1}),
        ("TorchwrapTest/Scripted-v0", {"info_keys": 3}),
    ],
)
def test_a_failing_make_leaves_no_process_behind(id, kwargs):
    before = set(multiprocessing.active_children())
    with pytest.raises((TypeError, ValueError)):
        tw.make(id, 2, backend="gymnasium", vectorization_mode="async", **kwargs)
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.terminate()
        process.join()
    assert not left


# What it says of itself.


def test_the_description_is_the_vector_envs():
    vector_env = gymnasium.make_vec("HalfCheetah-v5", 3, "sync", vector_kwargs={"autoreset_mode": SAME_STEP})
    env = from_gymnasium(vector_env)
    assert env.num_envs == 3
    assert env.single_observation_space == vector_env.single_observation_space
    assert env.observation_space == vector_env.observation_space
    assert env.action_space == vector_env.action_space
    assert env.metadata["autoreset_mode"] is SAME_STEP
    assert env.spec.id == "HalfCheetah-v5"
    assert env.signature.max_episode_steps == 1000
    env.close()


@pytest.mark.parametrize("id, kwargs, limit", [("CartPole-v1", {}, 500), ("CartPole-v1", {"max_episode_steps": 7}, 7)])
def test_the_signature_knows_the_time_limit_that_holds(id, kwargs, limit):
    assert tw.make(id, 2, backend="gymnasium", **kwargs).signature.max_episode_steps == limit


def test_close_closes_the_vector_env():
    env = tw.make("TorchwrapTest/Scripted-v0", 2, vectorization_mode="async")
    env.close()
    assert env.vector_env.closed
    assert not [process for process in env.vector_env.processes if process.is_alive()]


def test_render_is_the_vector_envs():
    env = tw.make("TorchwrapTest/Scripted-v0", 2, lengths=(9,), render_mode="rgb_array")
    act(env, env.reset())
    assert env.render_mode == "rgb_array"
    assert np.array_equal(env.render(), np.ones((2, 2, 2, 3)))


def test_make_takes_the_constructors_arguments_and_gymnasiums_vector_arguments():
    env = tw.make("TorchwrapTest/Scripted-v0", 2, lengths=(2,), ending="both", vector_kwargs={"observation_mode": "same"})
    _, td = act(env, env.reset(seed=0))
    transition, _ = act(env, td)
    assert transition["next", "terminated"].all() and transition["next", "truncated"].all()


def test_the_global_random_state_of_torch_and_numpy_is_not_touched(bridge):
    env = bridge(scripted(2, lengths=(2,)))
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    _, td = act(env, env.reset(seed=0))
    act(env, td)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


# On a GPU.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@every_mode
def test_on_cuda_every_observation_space_comes_through(bridge, mode, space):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)], space=space)
    env, same = bridge(makers, mode=mode, device="cuda"), bridge(makers, mode=mode)
    td, expected = env.reset(seed=3), same.reset(seed=3)
    for _ in range(12):
        action = same.sample_action()
        transition, td = env.step(td.set("action", action.cuda()))
        reference, expected = same.step(expected.set("action", action))
        assert transition["next", "reward"].device.type == "cuda"
        assert_same(to_tree(transition["next"]), to_tree(reference["next"]))
        assert_same(to_tree(td["observation"]), to_tree(expected["observation"]))


@needs_cuda
@every_kind
def test_on_cuda_pinned_copies_never_change_earlier_outputs(bridge, kind, mode):
    large = spaces.Box(0, 255, (256, 256, 3), np.uint8)
    makers = scripted(4, lengths=[(2,), (3,), NEVER, (1,)], space=large)
    env, same = bridge(makers, kind, mode, copy=False, device="cuda"), bridge(makers, kind, mode)
    td, expected, kept = env.reset(seed=0), same.reset(seed=0), []
    for _ in range(10):
        action = same.sample_action()
        transition, td = env.step(td.set("action", action.cuda()))
        reference, expected = same.step(expected.set("action", action))
        kept.append((transition, td["observation"], reference, expected["observation"]))
    torch.cuda.synchronize()
    for transition, now, reference, reference_now in kept:
        assert_same(to_tree(transition["next"]), to_tree(reference["next"]))
        assert_same(to_tree(now), to_tree(reference_now))


@needs_cuda
def test_on_cuda_masks_and_actions_of_the_cpu_are_refused(bridge):
    env = bridge(scripted(2), device="cuda")
    td = env.reset(seed=0)
    with pytest.raises(ValueError, match="an action on device cuda"):
        env.step(TensorDict({"action": torch.zeros(2, 2)}, batch_size=[2]))
    with pytest.raises(ValueError, match=r"torch\.bool on cuda"):
        env.reset(mask=torch.ones(2, dtype=torch.bool))
    assert td["observation"].device.type == "cuda"
