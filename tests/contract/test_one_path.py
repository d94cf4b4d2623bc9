"""Env i is its own world: eager mode computes the same bits whatever the number of envs, the shard and the threads."""

import functools

import pytest
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box

import torchwrap as tw
from torchwrap import random

WEIGHTS = torch.tensor([[0.9, -0.3, 0.1], [0.2, 0.8, -0.1], [0.05, 0.25, 0.7]])


class Oscillator(FuncEnv):
    """A user's env for `torch.vmap`: a product with a matrix, sines and exponentials, and random numbers.

    The product is a sum, because the last bit of `@` depends on the number of rows: BLAS has a kernel for each.
    """

    observation_space, action_space = Box(-99, 99, (5,)), Box(-1, 1, (3,))

    def initial(self, rng, params=None):
        numbers = random.uniform(rng, shape=(4,))
        return {"x": 2 * numbers[:3] - 1, "phase": numbers[3]}

    def transition(self, state, action, rng, params=None):
        x = (
            (WEIGHTS * state["x"]).sum(-1)
            + 0.3 * action.sin()
            + 0.1 * random.normal(rng, shape=(3,))
        )
        return {"x": x, "phase": state["phase"] + 0.1 * torch.exp(-x.square().sum())}

    def observation(self, state, rng, params=None):
        return torch.cat([state["x"], torch.stack([state["phase"].sin(), state["phase"].cos()])])

    def reward(self, state, action, next_state, rng, params=None):
        return torch.exp(-next_state["x"].abs().mean()) - 0.1 * action.square().sum()

    def terminal(self, state, rng, params=None):
        return state["x"].norm() > 1.2


NATIVE = ["Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
MAKERS = {id: functools.partial(tw.make, id) for id in NATIVE} | {
    "vmapped": functools.partial(tw.FunctionalEnv, Oscillator())
}
STEPS = 200


def play(name, num_envs, num_steps, rows=(0,), first_index=0):
    """Bits of observations, rewards, flags and roots `(num_steps, len(rows), ...)` of some rows, with actions by global index.

    Episodes last at most 60 steps, so that most of what is played follows an auto-reset.
    """
    env, rows = (
        MAKERS[name](num_envs, max_episode_steps=60, first_index=first_index),
        torch.tensor(rows),
    )
    space, played = env.single_action_space, []
    td = env.reset(seed=0)
    index = torch.arange(first_index, first_index + num_envs)
    for step in range(num_steps):
        number = (index * 7919 + step * 104729) * 2654435761 % 2**32  # a hash of both
        if isinstance(space, Box):
            action = (
                number.unsqueeze(-1) * torch.arange(1, 1 + space.shape[0]) % 9973 / 9973 * 3 - 1.5
            ).float()
        else:
            action = number % space.n
        transition, td = env.step(td.set("action", action))
        values = (
            *[
                transition["next"][key]
                for key in ("observation", "reward", "terminated", "truncated")
            ],
            td["observation"],
        )
        played.append(torch.cat([value.index_select(0, rows).float() for value in values], 1))
    return torch.stack(played).view(torch.int32)  # so that -0.0 differs from 0.0


@functools.cache
def reference(name):
    """Env 0, alone."""
    played = play(name, 1, STEPS)
    assert played.unique(dim=0).shape[0] > STEPS // 2  # it moves
    return played


def require_equal(found, expected, *case):
    assert torch.equal(found, expected), (
        f"{case}: step {int((found != expected).flatten(1).any(1).nonzero()[0])}"
    )


@pytest.mark.parametrize("name", MAKERS)
def test_env_0_has_the_same_bits_for_every_number_of_envs(name):
    for num_envs, num_steps in ((4, STEPS), (64, STEPS), (8_193, 10), (100_000, 2)):
        require_equal(play(name, num_envs, num_steps), reference(name)[:num_steps], name, num_envs)


@pytest.mark.parametrize("name", MAKERS)
def test_shard_has_the_same_bits_as_its_rows_of_the_whole(name):
    rows = [0, 1, 6, 7, 8, 70, 131, 132]
    whole = play(name, 133, 70, rows)
    for first, size in ((0, 2), (6, 3), (70, 63), (132, 1)):
        own = [row for row in rows if first <= row < first + size]
        found = play(name, size, 70, [row - first for row in own], first)
        require_equal(found, whole[:, [rows.index(row) for row in own]], name, first)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_two_threads_compute_the_same_bits_as_one(threads):
    for name in ("CartPole-v1", "Pendulum-v1"):
        played = []
        for number in (1, 2):
            threads(number)
            played.append(play(name, 40_001, 1, [0, 1, 19_999, 20_000, 20_001, 40_000]))
        require_equal(played[1], played[0], name)


@pytest.mark.full
@pytest.mark.parametrize("name", MAKERS)
def test_env_0_of_many_envs_has_the_same_bits(name):
    for num_envs, num_steps in ((8_193, STEPS), (100_000, 130)):  # more than two episodes
        require_equal(play(name, num_envs, num_steps), reference(name)[:num_steps], name, num_envs)


def test_random_words_are_the_same_for_one_key_and_for_many():
    whole = random.Stream(1_000, seed=5)
    for first, size in ((0, 1), (17, 3), (990, 10)):
        shard = random.Stream(size, first, seed=5)
        for draw in (random.bits, random.uniform, random.normal, random.exponential):
            count = {"count": 5} if draw is random.bits else {"shape": (5,)}
            expected, found = (
                draw(whole.key(), **count)[first : first + size],
                draw(shard.key(), **count),
            )
            assert torch.equal(found, expected), draw.__name__
