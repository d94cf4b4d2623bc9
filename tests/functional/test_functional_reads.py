"""What the user's functions read is read at each call, computed by PyTorch, and by the process that calls them."""

from __future__ import annotations

import dataclasses
import functools
import threading

import numpy as np
import pytest
import torch
from func_envs import equal, play
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete
from torch import nn

from torchwrap import FunctionalEnv, random


@dataclasses.dataclass
class Config:
    gain: float = 0.0


class Reading(FuncEnv):
    """Its initial state and its reward are sums of whatever the functions of an env can read."""

    observation_space, action_space = Box(-np.inf, np.inf, (1,)), Discrete(2)
    broadcasts = True
    shared = 0.0

    def __init__(self):
        self.number, self.tensor, self.array = 0.0, torch.zeros(1), np.zeros(1, np.float32)
        self.items, self.named, self.config, self.module = [0.0], {"a": 0.0}, Config(), nn.BatchNorm1d(1)

    def total(self):
        total = self.number + self.shared + self.items[0] + self.named["a"] + self.config.gain + float(self.array[0])
        return total + self.tensor[0] + self.module.running_mean[0]

    def initial(self, rng, params=None):
        return {"x": 0 * random.uniform(rng) + self.total()}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + 0}

    def observation(self, state, rng, params=None):
        return state["x"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params=None):
        return torch.zeros_like(state["x"]) + self.total()

    def terminal(self, state, rng, params=None):
        return state["x"] < 0


def test_values_that_change_are_followed_by_the_next_step_and_reset():
    class Own(Reading):
        pass

    env = FunctionalEnv(Own(), 2)
    env.reset(seed=0)
    func_env, expected = env.func_env, 0.0
    changes = [
        lambda: setattr(func_env, "number", 1.0),
        lambda: func_env.tensor.add_(1),
        lambda: func_env.tensor.data.add_(1),
        lambda: setattr(func_env, "tensor", func_env.tensor + 1),
        lambda: func_env.array.__iadd__(1),
        lambda: func_env.items.__setitem__(0, 1.0),
        lambda: func_env.named.update(a=1.0),
        lambda: setattr(func_env.config, "gain", 1.0),
        lambda: func_env.module.running_mean.add_(1),
        lambda: setattr(Own, "shared", 1.0),
    ]
    for change in changes:
        change()
        expected += 1
        assert env.step(torch.zeros(2, dtype=torch.int64))[0]["next", "reward"].tolist() == [[expected]] * 2
        assert env.reset()["observation"].tolist() == env.reset(seed=0)["observation"].tolist() == [[expected]] * 2
    env.state["x"].data = torch.tensor([7.0, 8.0])
    env.share_memory()  # moves the memory of each buffer
    assert env.step(torch.zeros(2, dtype=torch.int64))[0]["next", "observation"].tolist() == [[7], [8]]


OPERATORS = {
    torch.float32: lambda x: [
        torch.div(x, 2, rounding_mode="floor"),
        7 % x,
        x.masked_fill(x > 0, 3),
        torch.add(x, x, alpha=2),
    ],
    torch.int64: lambda x: [x.clamp(0.5, 2.5), x // 2, x % 3, x.sigmoid()],
    torch.uint8: lambda x: [x.sigmoid(), x + 1, ~x],
    torch.float16: lambda x: [x.norm(dim=-1), x.sum(-1), x.mean(-1)],
    torch.bfloat16: lambda x: [x + 1, x.exp()],
    torch.complex64: lambda x: [x.abs(), (x * 1j).imag, x.conj(), torch.view_as_real(x)],
}


class Fields(Reading):
    """Fields of the state are what an operator returns for numbers of a dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def initial(self, rng, params=None):
        x = (torch.arange(1, 13).view(3, 4) * 0.7).to(self.dtype)
        results = [result.resolve_conj() for result in OPERATORS[self.dtype](x)]
        return {"x": random.uniform(rng)} | {f"x{index}": result[: len(rng.env)] for index, result in enumerate(results)}

    def transition(self, state, action, rng, params=None):
        return dict(state)


def test_operators_are_pytorchs_for_every_dtype():
    for dtype, operators in OPERATORS.items():
        env = FunctionalEnv(Fields(dtype), 3)
        env.reset(seed=0)
        env.step(torch.zeros(3, dtype=torch.int64))
        for index, result in enumerate(operators((torch.arange(1, 13).view(3, 4) * 0.7).to(dtype))):
            found = env.state[f"x{index}"]
            assert found.dtype == result.dtype and torch.equal(found, result.resolve_conj()), (dtype, index)


class Cached(Reading):
    """Images as states; notes how many rows it draws, and caches a tensor."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    @functools.lru_cache  # noqa: B019
    def grid(self):
        return torch.ones(84, 84)

    def initial(self, rng, params=None):
        self.rows += len(rng.env)
        return {"x": random.uniform(rng), "image": self.grid() * random.uniform(rng, (1, 1))}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + 1, "image": state["image"].clone()}


def test_functions_are_called_with_real_tensors_for_the_rows_that_start_and_nothing_runs_beside_them():
    threads = threading.active_count()
    env = FunctionalEnv(Cached(), 64, max_episode_steps=5)
    built = env.func_env.rows
    env.reset(seed=0)
    play(env, env.reset(), torch.zeros(12, 64, dtype=torch.int64))
    assert env.func_env.rows == built + 64 * 4 and built <= 128  # two resets, and two ends of all episodes
    assert type(env.func_env.grid()) is torch.Tensor and threading.active_count() == threads


def _play_in_child(env, queue):
    torch.set_num_threads(1)
    queue.put(play(env, env.reset(seed=0), torch.zeros(5, 4, dtype=torch.int64))[0]["reward"].tolist())


@pytest.mark.full
def test_env_that_was_sent_to_a_spawned_process_plays_the_same():
    env = FunctionalEnv(Reading(), 4, max_episode_steps=3)
    env.func_env.tensor.fill_(8)
    env.reset(seed=0)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_play_in_child, args=(env, queue))
    process.start()
    rewards = torch.tensor(queue.get())
    process.join()
    assert equal(rewards, torch.full_like(rewards, 8))
    assert equal(play(env, env.reset(seed=0), torch.zeros(5, 4, dtype=torch.int64))[0]["reward"], rewards)
