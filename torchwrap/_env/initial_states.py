"""Initial states that are drawn before they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchwrap import random
from torchwrap._core.env_buffers import BufferAttribute, ConstantBuffer
from torchwrap.random import Key

State = dict[str, Tensor]
_REFRESH_STEPS = 256  # the whole pool is drawn again within so many steps
_TAG = 255  # an env's streams have at most 31 << 3
_ROWS_AHEAD, _MOST_EPISODES = 8192, 128  # so many keys take two to three times as long as one


class InitialStatePool(nn.Module):
    """A pool of initial states. A few of them are drawn again at every step.

    It has its own random numbers, so its content does not depend on which envs take from it, or on how many there are.

    Args:
        size: number of states.
        example: initial states by field, for their shapes and dtypes.
    """

    seed_low, seed_high, generation, cursor = BufferAttribute(), BufferAttribute(), BufferAttribute(), BufferAttribute()
    slots = ConstantBuffer()

    def __init__(self, size: int, example: State) -> None:
        super().__init__()
        device = next(iter(example.values())).device
        self.size, self.refresh_per_step = size, -(-size // _REFRESH_STEPS)
        self.fields = list(example)
        for name in ("seed_low", "seed_high", "generation"):
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("slots", torch.arange(size, device=device), persistent=False)
        self.register_buffer("cursor", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)
        for name, value in example.items():
            self.register_buffer(f"initial_{name}", value.new_zeros(size, *value.shape[1:]), persistent=False)

    def seed(self, seed: int) -> Key:
        """Starts again from a seed. Returns the keys of all states, which `fill` then needs."""
        self.seed_low.fill_(seed & 0xFFFFFFFF)
        self.seed_high.fill_(seed >> 32)
        self.generation.zero_()
        self.cursor.zero_()
        return self._key()

    def _key(self) -> Key:
        return Key(self.seed_low, self.seed_high, self.slots, self.generation, torch.zeros_like(self.generation), _TAG)

    def next(self) -> tuple[Tensor, Key]:
        """The slots to draw again at this step, and their keys."""
        slots = (self.cursor + self.slots[: self.refresh_per_step]) % self.size
        self.cursor.add_(self.refresh_per_step).remainder_(self.size)
        self.generation.index_add_(0, slots, torch.ones_like(slots))
        return slots, self._key().select(slots)

    def fill(self, slots: Tensor, states: State) -> None:
        """Writes states into slots."""
        for name in self.fields:
            self.get_buffer(f"initial_{name}").index_copy_(0, slots, states[name])

    def take(self, key: Key) -> State:
        """A random state for each env of the key."""
        slots = random.integers(key, self.size)
        return {name: self.get_buffer(f"initial_{name}").index_select(0, slots) for name in self.fields}


class UpcomingStates:
    """What the next few episodes of each env start with, drawn together. For a few envs on the CPU.

    It is what the env would draw at the time, because a key determines its numbers. A copy starts empty.
    """

    def __init__(self) -> None:
        self._version: Any = None
        self._start: Any = None  # of each env, whose index in what is drawn is `episode * num_envs - start`
        self._drawn: list[Any] = []
        self._count = 0

    def take(self, clock: list[Any], rows: Any, version: Any, draw: Callable[[Key], list[Tensor]]) -> list[Any]:
        """What the episodes start with that begin in some rows.

        Args:
            clock: arrays of all envs: the two words of the seed, the index, and the number of the episode that begins.
            rows: an array of indices, at least one.
            version: whatever `draw` depends on besides.
            draw: returns tensors with one row for each row of a key, whose tag is not set.

        Returns:
            The rows of each of these tensors, as arrays.
        """
        *words, episode = clock
        version = version, *[word.tobytes() for word in words]
        num_envs = np.array(len(episode))  # as an operand, a number takes twice as long as an array
        index = episode[rows] * num_envs - self._start[rows] if version == self._version else None
        if index is None or not 0 <= min(indices := index.tolist()) <= max(indices) < self._count * len(episode):
            self._version, first = None, episode + 1  # no version until all is drawn
            first[rows] -= 1
            self._count = min(max(_ROWS_AHEAD // len(episode), 1), _MOST_EPISODES)
            self._drawn = [tensor.numpy() for tensor in draw(self._keys(words, first))]
            self._start = first * num_envs - np.arange(len(episode))
            self._version = version
            index = episode[rows] * num_envs - self._start[rows]
        return [array[index] for array in self._drawn]

    def _keys(self, words: list[Any], first: Any) -> Key:
        low, high, env = [torch.from_numpy(np.tile(word, self._count)) for word in words]
        episodes = torch.from_numpy((first + np.arange(self._count)[:, None]).ravel())
        return Key(low, high, env, episodes, torch.zeros_like(episodes))

    def __reduce__(self) -> tuple[Any, ...]:
        return UpcomingStates, ()
