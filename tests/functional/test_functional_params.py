"""Parameters that differ between envs, and tensors that functions hold."""

import pytest
import torch
from func_envs import both_styles, equal, play, unbounded
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from torch import nn

import torchwrap as tw
from torchwrap import FunctionalEnv, random
from torchwrap import transforms as T

LEFT = torch.zeros(2, dtype=torch.int64)


class Falling(FuncEnv):
    """Falls as fast as its own parameter says."""

    observation_space = unbounded(1)
    action_space = spaces.Discrete(2)
    broadcasts = False

    def initial(self, rng, params):
        return {"height": params["from"][..., 0] + random.uniform(rng)}

    def transition(self, state, action, rng, params):
        return {"height": state["height"] - params["gravity"]}

    def observation(self, state, rng, params):
        return state["height"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params):
        return params["gravity"]

    def terminal(self, state, rng, params):
        return state["height"] < 0


class BroadcastFalling(Falling):
    broadcasts = True


def parameters(num_envs, first=0):
    gravity = torch.arange(first, first + num_envs) + 1.0
    return {"gravity": gravity, "from": 10 * torch.ones(num_envs, 1)}


@both_styles(Falling(), BroadcastFalling())
def test_params_differ_between_envs(func_env):
    env = FunctionalEnv(func_env, 4, params=parameters(4))
    actions = torch.zeros(20, 4, dtype=torch.int64)
    together, _ = play(env, env.reset(seed=1), actions)
    assert together[0]["next", "reward"].flatten().tolist() == [1, 2, 3, 4]
    for row in range(4):
        single = FunctionalEnv(func_env, 1, first_index=row, params=parameters(1, row))
        alone, _ = play(single, single.reset(seed=1), actions[:, [row]])
        assert equal(together[:, [row]], alone)


class NativeLevel(Falling):
    def reward(self, state, action, next_state, rng, params):
        return params["level"]


@pytest.fixture
def native_level(registry):
    tw.register("test/Level-v0", NativeLevel, max_episode_steps=50)
    params = {**parameters(2), "level": torch.ones(2)}
    return tw.make("test/Level-v0", 2, params=params)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_params_that_are_written_in_place_count_from_the_next_step(is_compiled, native_level):
    env = tw.TransformedEnv(native_level, T.RecordEpisodeStatistics())
    if is_compiled:
        tw.compile(env, backend="eager")
    env.reset(seed=0)
    for level in (1.0, 3.0, 7.0):
        env.unwrapped.params["level"].copy_(torch.tensor([level, 2.0]))
        transition, _ = env.step(LEFT)
        assert transition["next", "reward"].tolist() == [[level], [2.0]]


@pytest.mark.parametrize("name", ["level", "broadcasts"])
def test_params_and_attributes_of_functions_cannot_be_set_as_attributes(name, native_level):
    with pytest.raises(AttributeError, match=rf"params\['{name}'\].copy_"):
        native_level.set_wrapper_attr(name, 3)


def test_params_at_construction_leave_no_graph_of_autograd():
    params = {**parameters(2), "level": torch.ones(2, requires_grad=True)}
    env = FunctionalEnv(NativeLevel(), 2, params=params)
    assert not env.params["level"].requires_grad


def test_params_are_part_of_the_spec(native_level):
    assert equal(tw.make(native_level.spec).params["level"], torch.ones(2))


def test_make_with_params_for_another_id_raises():
    with pytest.raises(ValueError, match="params"):
        tw.make("CartPole-v1", 2, params={"level": torch.ones(2)})


class Maze(nn.Module, FuncEnv):
    """Functions that are a module: a buffer of prepared initial states, and a parameter."""

    observation_space = spaces.Box(0, 9, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, first=0.0):
        super().__init__()
        self.register_buffer("starts", first + torch.arange(8.0).view(4, 2))
        self.bonus = nn.Parameter(torch.tensor(first))

    def initial(self, rng, params=None):
        return {"at": self.starts.index_select(0, random.integers(rng, 4, shape=(1,)))[0]}

    def transition(self, state, action, rng, params=None):
        return {"at": state["at"] + 0}

    def observation(self, state, rng, params=None):
        return state["at"]

    def reward(self, state, action, next_state, rng, params=None):
        return self.starts.sum() + self.bonus

    def terminal(self, state, rng, params=None):
        return (state["at"] >= 0).all()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_buffers_of_functions_are_read_at_each_step(compiled):
    env = FunctionalEnv(Maze(), 64)
    if compiled:
        tw.compile(env, backend="aot_eager")
    env.reset(seed=0)
    for start in (0.0, 1.0):
        env.func_env.starts.copy_(torch.arange(8.0).view(4, 2) + start)
        transition, td = env.step(torch.zeros(64, dtype=torch.int64))
        assert equal(transition["next", "reward"], torch.tensor(28 + 8 * start))
        assert equal(td["observation"].unique(dim=0), env.func_env.starts)


# The definition of an env in its files.


def defined(value):
    """An env that learns, with a parameter per env, and functions with a buffer and a parameter."""
    params = {**parameters(2), "level": torch.full((2,), value)}
    env = FunctionalEnv(Maze(value), 2, params=params)
    return tw.TransformedEnv(env, T.NormalizeReward())


def definition(env):
    base = env.unwrapped
    functions = base.func_env
    return [base.params["level"], functions.starts[:1, 0], functions.bonus[None]]


def test_state_dict_holds_what_is_learned_and_loads_into_an_env_of_another_definition():
    env, other = defined(0.0), defined(1.0)
    tw.rollout(env, None, 5)
    learned = env.state_dict()
    assert all(name.startswith("transforms.NormalizeReward") for name in learned)
    functions = env.unwrapped.func_env.state_dict()
    old = {f"env.func_env.{name}": value for name, value in functions.items()}  # of 0.2.0
    old["env.params_level"] = env.unwrapped.params["level"]
    other.load_state_dict({**learned, **old})
    assert all((value == 1).all() for value in definition(other))
    assert equal(other.transforms[0].statistics.mean, env.transforms[0].statistics.mean)


def test_snapshot_holds_the_definition():
    env, other = defined(0.0), defined(1.0)
    env.reset(seed=0)
    other.restore(env.snapshot())
    assert not any(value.any() for value in definition(other))


def test_masked_restore_gives_params_back_to_the_masked_envs(native_level):
    env = native_level
    env.reset(seed=0)
    snapshot = env.snapshot()
    env.unwrapped.params["level"].fill_(5)
    env.restore(snapshot, torch.tensor([True, False]))
    assert env.unwrapped.params["level"].tolist() == [1, 5]
