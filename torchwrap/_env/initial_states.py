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
_ROWS_AHEAD, _MOST_EPISODES = 256, 32  # so many keys take little longer than one


class InitialStatePool(nn.Module):
    """A pool of initial states. A few of them are drawn again at every step.

    It has random numbers of its own, so its content does not depend on which envs take from it, or on how many there are.

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
    """The initial states of the next few episodes of each env, drawn together. For a few envs on the CPU.

    They are those that the env would draw at the time, because a key determines its numbers. A copy starts empty.
    """

    def __init__(self) -> None:
        self._version: Any = None
        self._first: Any = None
        self._states: dict[str, Any] = {}
        self._size = 0

    def take(self, key: Key, rows: Tensor, version: Any, draw: Callable[[Key], State]) -> State:
        """The initial states of the episodes that begin in some rows.

        Args:
            key: of all envs, at the start of these episodes.
            rows: indices, at least one.
            version: whatever `draw` depends on besides.
            draw: gives the states for a key.
        """
        low, high, env, episode, found = (tensor.numpy() for tensor in (*key[:4], rows))
        version = version, low.tobytes(), high.tobytes(), env.tobytes()
        index = None
        if version == self._version:
            index = (episode[found] - self._first[found]) * len(episode) + found
        if index is None or index.min() < 0 or index.max() >= self._size:
            self._version, self._first = version, episode + 1
            self._first[found] -= 1
            count = min(max(_ROWS_AHEAD // len(episode), 1), _MOST_EPISODES)
            episodes = torch.from_numpy((self._first + np.arange(count)[:, None]).ravel())
            words = [word.repeat(count) for word in key[:3]]
            states = draw(Key(words[0], words[1], words[2], episodes, torch.zeros_like(episodes), key.tag))
            self._states, self._size, index = {name: value.numpy() for name, value in states.items()}, len(episodes), found
        return {name: torch.from_numpy(states[index]) for name, states in self._states.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return UpcomingStates, ()
