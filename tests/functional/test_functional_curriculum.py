"""`curriculum` of functions: a level per env that episodes change and resets keep."""

import pytest
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import check_env


class Walk(FuncEnv):
    """The agent goes 0 or 1 steps. Like legged_gym's terrain: far moves up a level, near down."""

    observation_space, action_space = Box(-9, 9, (1,)), Discrete(2)

    def initial(self, rng, params=None):
        return {"x": 0 * tw.random.uniform(rng), "level": params["level"]}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + action, "level": state["level"]}

    def observation(self, state, rng, params=None):
        return state["level"].float().unsqueeze(0)

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["x"]

    def terminal(self, state, rng, params=None):
        return state["x"] > 99

    def curriculum(self, state, rng, params=None):
        change = torch.where(state["x"] >= 2, 1, -1)
        return {"level": (params["level"] + change).clamp(0, 2)}


def make(num_envs, first_index=0):
    params = {"level": torch.zeros(num_envs, dtype=torch.int64)}
    return tw.FunctionalEnv(
        Walk(), num_envs, max_episode_steps=2, params=params, first_index=first_index
    )


def levels(env, actions):
    """The observed level after each step."""
    td = env.reset(seed=0)
    observed = [td["observation"][:, 0].tolist()]
    for action in actions:
        _, td = env.step(td.set("action", torch.tensor(action)))
        observed.append(td["observation"][:, 0].tolist())
    return observed


COMPILED = [False, pytest.param(True, marks=pytest.mark.full)]
BOTH, FIRST, NONE = [1, 1], [1, 0], [0, 0]
ACTIONS = [BOTH, FIRST, BOTH, BOTH, BOTH, BOTH, NONE, NONE]
BY_HAND = [[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 1], [2, 2], [2, 2], [1, 1]]


@pytest.mark.parametrize("compiled", COMPILED)
def test_level_follows_episodes_and_stays_in_the_bounds(compiled):
    env = make(2)
    if compiled:
        tw.compile(env, backend="aot_eager")
    assert levels(env, ACTIONS) == BY_HAND


def test_level_stays_in_eval_mode():
    env = make(2)
    env.params["level"].zero_()
    assert levels(env.eval(), ACTIONS) == [[0, 0]] * 9


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("repeats", [1, 3])
def test_level_of_repeated_actions_follows_the_last_state_of_the_episode(repeats, compiled):
    class Last(Walk):
        def curriculum(self, state, rng, params=None):
            return {"level": state["x"].long()}

    params = {"level": torch.zeros(2, dtype=torch.int64)}
    env = W.RepeatAction(tw.FunctionalEnv(Last(), 2, max_episode_steps=2, params=params), repeats)
    if compiled:
        tw.compile(env, backend="aot_eager")
    assert levels(env, [FIRST] * 2)[-1] == [2, 0]


def test_partial_reset_changes_the_levels_of_its_rows_that_have_played():
    env = make(3)
    td = env.reset(seed=0)
    env.params["level"].fill_(2)
    td = env.reset(mask=torch.tensor([True, False, False]))  # has not played
    assert env.params["level"].tolist() == [2, 2, 2]
    env.step(td.set("action", torch.ones(3, dtype=torch.int64)))
    env.reset(mask=torch.tensor([True, False, True]))
    assert env.params["level"].tolist() == [1, 2, 1]


RESULTS = {
    "another name": (lambda level: {"lvel": level}, ValueError, r"curriculum: .*\['level'\]"),
    "another dtype": (lambda level: {"level": level.float()}, TypeError, "level.*dtype"),
}


@pytest.mark.parametrize("change, kind, words", RESULTS.values(), ids=RESULTS)
def test_result_that_does_not_fit_the_params_is_refused(change, kind, words):
    class Wrong(Walk):
        def curriculum(self, state, rng, params=None):
            return change(params["level"])

    with pytest.raises(kind, match=words):
        tw.FunctionalEnv(Wrong(), 2, params={"level": torch.zeros(2, dtype=torch.int64)})


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
def test_level_follows_the_episode_that_has_ended_if_the_next_one_has_a_seed(seed, wrapped):
    env = make(2)
    if wrapped:
        env = tw.TransformedEnv(env, T.TimeLimit(2))
    td = env.reset(seed=0)
    for _ in range(2):
        _, td = env.step_without_reset(td.set("action", torch.tensor(FIRST)))
        td = td.select("observation")
    env.reset(seed=seed, mask=torch.ones(2, dtype=torch.bool))
    assert env.unwrapped.params["level"].tolist() == [1, 0]


@pytest.mark.full
def test_env_with_a_curriculum_keeps_the_contract():
    check_env(make)
