"""Env i is its own world: the same bits for any number of envs, shard and threads."""

import functools

import pytest
import torch
from functional.func_envs import Noisy
from gymnasium.spaces import Box

import torchwrap as tw

NATIVE = ["Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
MAKERS = {id: functools.partial(tw.make, id) for id in NATIVE}
MAKERS["vmapped"] = functools.partial(tw.FunctionalEnv, Noisy())
STEPS = 100
KEYS = ("observation", "reward", "terminated", "truncated")
each_env = pytest.mark.parametrize("name", MAKERS)


def action_of(space, index, step):
    """An action for each global index of an env, which differs by index and step."""
    number = (index * 7919 + step * 104729) * 2654435761 % 2**32  # a hash of both
    if not isinstance(space, Box):
        return number % space.n
    components = number.unsqueeze(-1) * torch.arange(1, 1 + space.shape[0])
    return (components % 9973 / 9973 * 3 - 1.5).float()


def play(
    name,
    num_envs,
    num_steps,
    rows=(0,),
    first_index=0,
):
    """Bits of all results `(num_steps, len(rows), ...)` in some rows.

    Episodes last at most 60 steps, so that most of them follow an auto-reset.
    """
    env = MAKERS[name](num_envs, max_episode_steps=60, first_index=first_index)
    rows = torch.tensor(rows)
    index = torch.arange(first_index, first_index + num_envs)
    td = env.reset(seed=0)
    played = []
    for step in range(num_steps):
        action = action_of(env.single_action_space, index, step)
        transition, td = env.step(td.set("action", action))
        values = [transition["next"][key] for key in KEYS]
        columns = [value[rows].float() for value in (*values, td["observation"])]
        played.append(torch.cat(columns, 1))
    return torch.stack(played).view(torch.int32)  # so that -0.0 differs from 0.0


@functools.cache
def reference(name):
    """Env 0, alone."""
    played = play(name, 1, STEPS)
    assert played.unique(dim=0).shape[0] > STEPS // 2  # it moves
    return played


SIZES = [(64, STEPS), (8_193, 10)]
SIZES += [pytest.param(100_000, STEPS, marks=pytest.mark.full)]


@each_env
@pytest.mark.parametrize("num_envs, num_steps", SIZES)
def test_env_0_has_the_same_bits_for_every_number_of_envs(name, num_envs, num_steps):
    assert torch.equal(
        play(name, num_envs, num_steps),
        reference(name)[:num_steps],
    )


ROWS = (0, 1, 6, 7, 8, 70, 131, 132)


@pytest.mark.full
@each_env
@pytest.mark.parametrize("first, size", [(6, 3), (70, 63)])
def test_shard_has_the_same_bits_as_its_rows_of_the_whole(name, first, size):
    rows = [row for row in ROWS if first <= row < first + size]
    found = play(name, size, 70, [row - first for row in rows], first)
    assert torch.equal(found, play(name, 133, 70, rows))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.full
def test_two_threads_compute_the_same_bits_as_one(threads):
    name = "Pendulum-v1"
    rows = [0, 1, 19_999, 20_000, 20_001, 40_000]
    threads(1)
    expected = play(name, 40_001, 1, rows)
    threads(2)
    assert torch.equal(play(name, 40_001, 1, rows), expected)
