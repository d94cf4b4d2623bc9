"""The oracle of the bridge: single Gymnasium envs, scripted or registered, stepped by hand."""

import copy
import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate
from helpers import OtherVectorEnv, numpy_2_promotion
from tensordict import TensorDict

import torchwrap as tw
from torchwrap.interop.tensors import from_functions

DISABLED = AutoresetMode.DISABLED
SAME_STEP = AutoresetMode.SAME_STEP
BOX = spaces.Box(-1, 1, (3,), np.float32)
PUSH = spaces.Box(-1, 1, (2,), np.float32)
NEVER = (10**9,)
LENGTHS = {
    "staggered": [(5, 2), (3,), (1, 4), NEVER],
    "one step": [(1,)] * 4,
    "all at once": [(4,)] * 4,
    "never": [NEVER] * 4,
}


def total(value):
    """The sum of all numbers in a nested value."""
    if isinstance(value, dict):
        value = tuple(value.values())
    return sum(map(total, value)) if isinstance(value, tuple) else np.sum(value)


class Scripted(gymnasium.Env[Any, Any]):
    """Draws all results from its own generator, so that a missing or extra reset changes them.

    Its episodes take the `lengths` in turn, or random ones of up to five steps. Its `ending` is
    "terminated", "truncated" or "both". It overwrites arrays that it gets as actions.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        space=BOX,
        lengths=(),
        ending="terminated",
        action_space=PUSH,
        render_mode=None,
    ):
        self.observation_space = space
        self.action_space = action_space
        self.lengths = lengths
        self.ending = ending
        self.render_mode = render_mode
        self.episode = 0
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.lengths:
            self.length = self.lengths[self.episode % len(self.lengths)]
        else:
            self.length = int(self.np_random.integers(1, 6))
        self.episode += 1
        self.elapsed = 0
        self.options = options
        return self._observe(), {
            "elapsed": -1.0,
            "position": np.full(2, -1.0),
            "reset only": 1,
        }

    def step(self, action):
        self.elapsed += 1
        self.steps += 1
        ended = self.elapsed == self.length
        info = {
            "elapsed": self.elapsed,
            "position": self.np_random.normal(size=2),
            "even": self.elapsed % 2 == 0,
            "name": "a",
        }
        if self.elapsed > 1:
            info["late"] = 10.0 * self.elapsed
        if ended:
            info["final"] = np.float64(self.length)
        with numpy_2_promotion():  # float32 for float32 actions, else float64
            reward = float(self.np_random.normal() + total(action))
        if isinstance(action, np.ndarray):
            action[...] = 0
        terminated = ended and self.ending != "truncated"
        truncated = ended and self.ending != "terminated"
        return self._observe(), reward, terminated, truncated, info

    def render(self):
        return np.full((2, 2, 3), self.elapsed, np.uint8)

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()


gymnasium.register("TorchwrapTest/Scripted-v0", entry_point=Scripted)


class Returning(gymnasium.Env[Any, Any]):
    """Returns the same observation, of a dtype that may not be the space's, in every step."""

    action_space = spaces.Discrete(2)
    flags = np.array([False]), np.False_

    def __init__(self, space, observation):
        self.observation_space = space
        self.observation = observation

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, action):
        return self.observation, 1, *self.flags, {}


SPACES = {
    "Dict": spaces.Dict(
        {
            "b": BOX,
            "a": spaces.Discrete(5),
            "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        }
    ),
    "Tuple": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(4)]),
    "nested": spaces.Dict(
        {"in": spaces.Tuple([spaces.Dict({"x": BOX}), spaces.Discrete(3, start=-1)])}
    ),
    "long Tuple": spaces.Tuple([spaces.Discrete(100 + i) for i in range(12)]),
    "Discrete": spaces.Discrete(7, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "scalar": spaces.Box(-1, 1, (), np.float32),
}

KINDS = [
    pytest.param(
        kind,
        mode,
        id=f"{kind.__name__[:-9].lower()}-{mode.value}",
        marks=marks,
    )
    for kind, marks in (
        (SyncVectorEnv, ()),
        (OtherVectorEnv, ()),
        (AsyncVectorEnv, pytest.mark.full),
    )
    for mode in (DISABLED, SAME_STEP)
]
every_kind = pytest.mark.parametrize("kind, mode", KINDS)
every_mode = pytest.mark.parametrize("mode", [DISABLED, SAME_STEP], ids=lambda mode: mode.value)


def scripted(num_envs, **kwargs):
    """Constructors of scripted envs. A list of `lengths` has one entry per env."""
    lengths = kwargs.pop("lengths", ())
    if not isinstance(lengths, list):
        lengths = [lengths] * num_envs
    return [functools.partial(Scripted, lengths=each, **kwargs) for each in lengths]


def stack_values(values):
    """One value per env as a batch, in the layout of a TensorDict."""
    if isinstance(values[0], dict):
        return {key: stack_values([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return {str(key): stack_values(part) for key, part in enumerate(zip(*values, strict=True))}
    return np.stack(values)


def assert_equal_trees(actual, expected, where=""):
    """A tensor equals an array, or a TensorDict a dict of arrays."""
    if isinstance(expected, dict):
        assert set(actual.keys()) == expected.keys(), where
        for key in expected:
            assert_equal_trees(actual[key], expected[key], f"{where}.{key}")
    else:
        actual = actual.cpu().numpy()
        assert (actual.dtype, actual.shape) == (
            expected.dtype,
            expected.shape,
        ), where
        np.testing.assert_array_equal(actual, expected, err_msg=where)


def flags_of(terminated, truncated):
    terminated = np.array(terminated, bool)
    truncated = np.array(truncated, bool)
    return {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}


class Singles:
    """Single envs next to a batch. Their current observations and infos are `now`, `now_infos`."""

    def __init__(self, makers, seed, first_index=0):
        self.envs = [maker() for maker in makers]
        self.now = [None] * len(makers)
        self.now_infos = [None] * len(makers)
        self.reset(range(len(makers)), seed + first_index)

    def reset(self, rows, seed=None):
        """Starts episodes in some envs by hand. Env *i* gets the seed `seed + i`."""
        for i in rows:
            own_seed = None if seed is None else seed + i
            self.now[i], self.now_infos[i] = self.envs[i].reset(seed=own_seed)

    def act(self, td):
        """The root with random actions, and the actions by env.

        They depend on the state of each env's generator.
        """
        actions = []
        for i, env in enumerate(self.envs):
            state = env.unwrapped.np_random.bit_generator.state["state"]["state"]
            env.action_space.seed(int(state) % 2**31 + i)
            actions.append(env.action_space.sample())
        return td.set("action", to_tensors(stack_values(actions), len(actions))), actions

    def step(self, actions):
        """The successor, as arrays."""
        results = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        successor, reward, terminated, truncated, self.infos = zip(*results, strict=True)
        self.now = list(successor)
        self.now_infos = list(self.infos)
        flags = flags_of(terminated, truncated)
        self.reset(np.flatnonzero(flags["done"]))
        columns = {"reward": np.float32(reward), **flags}
        columns = {name: column[:, None] for name, column in columns.items()}
        return {"observation": stack_values(successor), **columns}


def to_tensors(tree, num_envs):
    if isinstance(tree, dict):
        values = {key: to_tensors(value, num_envs) for key, value in tree.items()}
        return TensorDict(values, [num_envs])
    return torch.from_numpy(tree.copy())


def follow(env, singles, td, steps):
    """Steps both with the same actions, and asserts that all values are equal.

    Returns the root and the number of ends.
    """
    ends = 0
    taken = []  # actions, which no simulator changes
    for step in range(steps):
        td, actions = singles.act(td)
        taken.append((td["action"].clone(), td["action"]))
        transition, td = env.step(td)
        assert all((given == action).all() for given, action in taken)
        taken[-1] = taken[-1][0], transition["action"]
        expected = singles.step(actions)
        assert_equal_trees(transition["next"].exclude("info"), expected, f"step {step}")
        assert_equal_trees(
            td["observation"],
            stack_values(singles.now),
            f"root after step {step}",
        )
        ends += int(expected["done"].sum())
    return td, ends


def check_transitions(env, makers, steps=20, seed=3):
    """Asserts that an env equals single envs from a reset on. Returns the number of ends."""
    singles = Singles(makers, seed)
    td = env.reset(seed=seed)
    assert_equal_trees(td["observation"], stack_values(singles.now), "initial observation")
    return follow(env, singles, td, steps)[1]


class Simulator:
    """Single envs as a simulator on tensors. It erases what it got and returned before."""

    def __init__(self, makers, auto_reset=False):
        self.envs = [maker() for maker in makers]
        self.auto_reset = auto_reset
        self.now = [None] * len(makers)
        self.seeds = [None] * len(makers)
        self.elapsed = torch.zeros(len(makers), dtype=torch.int32)
        self.lent = []
        self.resets = []
        self.is_closed = False

    def seed(self, seed):
        self.seeds = [seed + row for row in range(len(self.envs))]

    def start(self, rows):
        self.elapsed[rows] = 0
        for row in rows:
            self.now[row], _ = self.envs[row].reset(seed=self.seeds[row])
        self.seeds = [None] * len(self.envs)

    def reset(self, rows):
        ids = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        self.resets.append(ids.tolist())
        self.start(self.resets[-1])
        self.lend(rows)
        return self.observe(self.resets[-1])

    def observe(self, rows):
        """Observations, which are noise outside of some rows."""
        values = []
        for row, value in enumerate(self.now):
            values.append(value if row in rows else self.envs[row].observation_space.sample())
        return self.lend(to_tensors(stack_values(values), len(values)))

    def lend(self, value):
        value = value.to_dict() if isinstance(value, TensorDict) else value
        self.lent += torch.utils._pytree.tree_leaves(value)
        return value

    def step(self, action):
        for tensor in self.lent:
            tensor.zero_()
        self.lent = []
        space = self.envs[0].action_space
        actions = iterate(
            batch_space(space, len(self.envs)), copy.deepcopy(tw.spaces.to_numpy(space, action))
        )
        results = [env.step(each) for env, each in zip(self.envs, actions, strict=True)]
        observations, *numbers, _ = zip(*results, strict=True)
        self.lend(action)
        self.now = list(observations)
        self.elapsed += 1
        every = range(len(self.envs))
        numbers = [self.lend(torch.tensor(each)) for each in numbers]
        info = {"elapsed": self.elapsed.clone(), "vector": torch.zeros(len(self.envs), 2)}
        done = torch.logical_or(*numbers[1:]).nonzero().flatten().tolist()
        if self.auto_reset and done:
            info["final_obs"] = self.observe(done)
            self.start(done)
        return self.observe(every), *numbers, info

    def close(self):
        self.is_closed = True

    def make_env(self, step=None, **kwargs):
        """A torchwrap env of this simulator."""
        functions = {"seed": self.seed, "close": self.close}
        if self.auto_reset:
            functions["final_key"] = "final_obs"
        spaces_of_one = self.envs[0].observation_space, self.envs[0].action_space
        given = self.reset, step or self.step, len(self.envs), *spaces_of_one
        return from_functions(*given, **{**functions, **kwargs})


def sample_and_step(env, td):
    return env.step(td.set("action", env.sample_action()))


class ByHand:
    """Vector envs of one env each. At an end, they take their own auto-reset: a step.

    `seeds` are those of the first resets. `continues(info)` tells after an end if the game goes on.
    """

    def __init__(self, envs, space, seeds=None, continues=lambda info: False):
        self.envs = envs
        self.space = space
        self.continues = continues
        self.now = [None] * len(envs)
        self.reset(range(len(envs)), seeds)

    def reset(self, rows, seeds=None):
        for i in rows:
            arguments = {} if seeds is None else {"seed": seeds[i]}
            self.now[i], _ = self.envs[i].reset(**arguments)

    def observation(self):
        return _concatenate(self.now, self.space)

    def step(self, actions):
        results = [env.step(actions[i : i + 1].copy()) for i, env in enumerate(self.envs)]
        observations, reward, terminated, truncated, infos = zip(*results, strict=True)
        self.now = list(observations)
        self.infos = infos
        self.root_infos = list(infos)
        flags = flags_of(terminated, truncated)
        successor = self.observation()
        for i in np.flatnonzero(flags["done"]):
            if not self.continues(infos[i]):
                result = self.envs[i].step(actions[i : i + 1].copy())
                self.now[i], *_, self.root_infos[i] = result
        return {
            "observation": successor,
            "reward": np.float32(reward),
            **flags,
        }


def _concatenate(observations, space):
    if isinstance(space, spaces.Dict):
        values = {}
        for key, part in space.items():
            values[key] = _concatenate([each[key] for each in observations], part)
        return values
    return np.concatenate(observations).astype(space.dtype)


def follow_by_hand(env, others, td, steps):
    """Steps an env and vector envs of one env each, and asserts that all values are equal.

    Returns the root and the numbers of terminations and truncations.
    """
    ends = np.zeros(2, int)
    for step in range(steps):
        transition, td = sample_and_step(env, td)
        expected = others.step(transition["action"].numpy())
        assert_equal_trees(transition["next"].exclude("info"), expected, f"step {step}")
        assert_equal_trees(
            td["observation"],
            others.observation(),
            f"root after step {step}",
        )
        ends += expected["terminated"].sum(), expected["truncated"].sum()
    return td, ends


def check_masked_resets(env, others, td, steps):
    """Resets some rows, then others, and follows. Episodes have to end in the last steps."""
    for rows in ([1, 2], [0], [*range(env.num_envs)], []):
        others.reset(rows)
        mask = torch.tensor([row in rows for row in range(env.num_envs)])
        td = env.reset(mask=mask)
        assert_equal_trees(td["observation"], others.observation())
        td, _ = follow_by_hand(env, others, td, 2)
    assert follow_by_hand(env, others, td, steps)[1].sum() >= env.num_envs


def interrupt_a_call(env, monkeypatch):
    """Interrupts a step of an engine with threads: all later calls ask for a new env."""

    def step(*args):
        raise KeyboardInterrupt

    td = env.reset().set("action", env.sample_action())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(env.vector_env, "step", step)
        env.step(td)
    for call in (env.reset, lambda: env.step(td)):
        with pytest.raises(RuntimeError, match="new env"):
            call()
    env.close()
    assert env.vector_env.closed


def assert_elapsed_steps_move_the_limit(env):
    """Of three envs with a limit of 10."""
    env.reset(seed=0)
    env.elapsed_steps = torch.tensor([0, 9, 8])
    transition, _ = env.step(env.sample_action())
    assert transition["next", "truncated"].flatten().tolist() == [False, True, False]
    assert not transition["next", "terminated"].any()
    assert env.elapsed_steps.tolist() == [1, 0, 9]
