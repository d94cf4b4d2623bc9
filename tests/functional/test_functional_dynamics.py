import gymnasium
import pytest
import torch
from func_envs import (
    PAIRS,
    BroadcastWalk,
    both_aliasing,
    both_walks,
    equal,
    odd,
    play,
    some_actions,
)

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap import transforms as T
from torchwrap.envs.cartpole import CartPole


@both_walks
def test_episode_matches_values_computed_by_hand(func_env):
    env = FunctionalEnv(func_env, 2, max_episode_steps=3)
    td = env.reset(seed=0)
    assert td["observation"].tolist() == [[0, 0], [0, 0]]
    # Env 0 is at 2, then at 3, where its episode ends; then a new episode starts.
    actions = [[2, 0.5], [1, 0.5], [-1, 2], [4, 1]]
    expected = [
        # next observation, reward, terminated, truncated, observation of the root
        ([[20, 0], [5, 0]], [2, 0.5], [False, False], [False, False], [[20, 0], [5, 0]]),
        ([[30, 20], [10, 5]], [-1, 0], [True, False], [False, False], [[0, 0], [10, 5]]),
        ([[-10, 0], [30, 10]], [-1, 1], [False, True], [False, True], [[-10, 0], [0, 0]]),
        ([[30, -10], [10, 0]], [5, 1], [True, False], [False, False], [[0, 0], [10, 0]]),
    ]
    for action, (successor, reward, terminated, truncated, now) in zip(
        actions, expected, strict=True
    ):
        transition, td = env.step(
            td.set("action", torch.tensor(action, dtype=torch.float32).unsqueeze(-1))
        )
        following = transition["next"]
        assert following["observation"].tolist() == successor
        assert following["reward"].squeeze(-1).tolist() == reward
        assert following["terminated"].squeeze(-1).tolist() == terminated
        assert following["truncated"].squeeze(-1).tolist() == truncated
        assert torch.equal(following["done"], following["terminated"] | following["truncated"])
        assert td["observation"].tolist() == now


def test_vmap_and_broadcasting_are_bit_identical():
    for pair in PAIRS:
        envs = [FunctionalEnv(func_env(), 5, max_episode_steps=7) for func_env in pair]
        actions = some_actions(envs[0], 30)
        first, second = (play(env, env.reset(seed=4), actions)[0] for env in envs)
        assert equal(first, second) and first["done"].any()


@both_walks
def test_truncation_occurs_exactly_at_the_limit(func_env):
    for limit in (1, 4, None):
        env = FunctionalEnv(func_env, 3, max_episode_steps=limit)
        out, _ = play(env, env.reset(seed=0), torch.zeros(12, 3, 1))
        expected = [limit is not None and step % limit == 0 for step in range(1, 13)]
        assert out[:, 0]["truncated"].squeeze(-1).tolist() == [[each] * 3 for each in expected]


@both_walks
def test_reset_options_are_passed_to_initial(func_env):
    env = FunctionalEnv(func_env, 2)
    assert env.reset(options={"start": 1.5})["observation"].tolist() == [[15, 15]] * 2
    assert env.reset(mask=torch.tensor([True, False]))["observation"].tolist() == [[0, 0], [15, 15]]


class Counted(BroadcastWalk):
    def initial(self, rng, params=None, start=0.0):
        self.rows = rng.env.tolist()
        return super().initial(rng, start=start)


def test_initial_in_broadcasting_style_gets_only_the_reset_rows():
    func_env = Counted()
    env = FunctionalEnv(func_env, 4)
    td = env.reset()
    assert func_env.rows == [0, 1, 2, 3]
    env.step(td.set("action", torch.tensor([[0.0], [3], [0], [3]])))
    assert func_env.rows == [1, 3]
    func_env.rows = None
    assert equal(env.reset(mask=torch.zeros(4, dtype=torch.bool)), td.select("observation"))
    assert func_env.rows is None
    observation = env.reset(mask=torch.tensor([False, False, True, False]), options={"start": 7.0})[
        "observation"
    ]
    assert observation.tolist() == [[0, 0], [0, 0], [70, 70], [0, 0]]


# Fields that functions return as they are.


@both_aliasing
def test_functions_may_return_fields_of_the_state(func_env):
    # The transition moves a field to another, and the reward is a field of the previous state.
    env = FunctionalEnv(
        odd(type(func_env), reward=lambda state, action, next_state, rng: state["now"]), 2
    )
    td = env.reset(seed=0)
    for now in (2, 4, 6):
        transition, td = env.step(td.set("action", torch.full((2, 1), 2.0)))
        assert (
            transition["next", "observation"].tolist()
            == transition["next", "reward"].tolist()
            == [[now - 2]] * 2
        )
        assert (
            env.state["now"].tolist() == [now] * 2 and env.state["before"].tolist() == [now - 2] * 2
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_episodes_from_given_states_equal_gymnasiums_from_them(compiled):
    transforms = T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.FrameStackObservation(2)
    env = tw.TransformedEnv(tw.make("CartPole-v1", 3), *transforms)
    env = tw.compile(env, backend="eager") if compiled else env
    raw = tw.make("CartPole-v1", 3)
    for one in (env, raw):
        one.reset(seed=0)
        for _ in range(4):
            one.step(torch.ones(3, dtype=torch.int64))
    rows, counted = torch.tensor([True, False, True]), env.transforms[1].statistics.count.clone()
    given = dict(
        zip(
            raw.unwrapped.state,
            torch.tensor([[0.5, 0, 2.3], [1, 0, 0], [0.1, 0, 0], [0, 0, 2]]),
            strict=True,
        )
    )
    td, start = (one.reset(mask=rows, options={"state": given}) for one in (env, raw))
    assert (
        td["observation"][rows][:, 0] == td["observation"][rows][:, 1]
    ).all()  # a new episode's stack
    assert (
        env.transforms[1].statistics.count - counted == 2
    ).all() and env.elapsed_steps.tolist() == [0, 4, 0]
    assert start["observation"][rows].tolist() == torch.stack([*given.values()], 1)[rows].tolist()
    for row in (0, 2):
        oracle, number, done = gymnasium.make("CartPole-v1").unwrapped, 0, False
        oracle.reset()
        oracle.state = start["observation"][row].double().numpy()
        one = FunctionalEnv(CartPole(), 1, max_episode_steps=500)
        one.reset(options={"state": {name: value[row : row + 1] for name, value in given.items()}})
        while not done:
            observation, _, done, *_ = oracle.step(number % 3 % 2)
            successor = one.step(torch.tensor([number % 3 % 2]))[0]["next"]
            assert (
                successor["observation"][0].numpy() == pytest.approx(observation, abs=1e-4)
                and successor["done"].item() == done
            )
            number += 1
    written = raw.unwrapped.state
    written["theta"].fill_(0.05)
    assert (raw.reset(options={"state": written})["observation"][:, 2] == 0.05).all()


def test_states_in_part_are_completed_by_initial():
    env, twin = (FunctionalEnv(CartPole(), 2) for _ in range(2))
    mixed, drawn = (
        env.reset(seed=3, options={"state": {"x": torch.tensor([1.0, 2.0])}}),
        twin.reset(seed=3),
    )
    assert mixed["observation"][:, 0].tolist() == [1, 2]
    assert torch.equal(mixed["observation"][:, 1:], drawn["observation"][:, 1:])
