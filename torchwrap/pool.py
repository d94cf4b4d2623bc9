"""First states that are prepared before they are needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchwrap import random
from torchwrap.buffer import Buffer
from torchwrap.random import Key

State = dict[str, Tensor]


class Pool(nn.Module):
    """So many first states, a few of them drawn anew at every step.

    Its random numbers are its own, so that what is in it does not depend on who takes from it, or on how many.

    Args:
        size: how many.
        example: first states, by field: their shapes and dtypes.
    """

    seed_low, seed_high, slots, turns, place = Buffer(), Buffer(), Buffer(), Buffer(), Buffer()

    def __init__(self, size: int, example: State) -> None:
        super().__init__()
        device = next(iter(example.values())).device
        self.size, self.few = size, -(-size // 256)  # all of it within 256 steps
        self.fields = list(example)
        for name in ("seed_low", "seed_high", "turns"):
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("slots", torch.arange(size, device=device), persistent=False)
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)
        for name, value in example.items():
            self.register_buffer(f"first_{name}", value.new_zeros(size, *value.shape[1:]), persistent=False)

    def seed(self, seed: int) -> Key:
        """Begins anew; gives the keys that `fill` needs all states of."""
        self.seed_low.fill_(seed & 0xFFFFFFFF)
        self.seed_high.fill_(seed >> 32)
        self.turns.zero_()
        self.place.zero_()
        return self._key()

    def _key(self) -> Key:
        return Key(self.seed_low, self.seed_high, self.slots, self.turns, torch.zeros_like(self.turns), _TAG)

    def next(self) -> tuple[Tensor, Key]:
        """Which slots are to be drawn anew at this step, and with which keys."""
        slots = (self.place + self.slots[: self.few]) % self.size
        self.place.add_(self.few).remainder_(self.size)
        self.turns.index_add_(0, slots, torch.ones_like(slots))
        return slots, self._key().at(slots)

    def fill(self, slots: Tensor, states: State) -> None:
        """Puts states into slots."""
        for name in self.fields:
            self.get_buffer(f"first_{name}").index_copy_(0, slots, states[name])

    def take(self, key: Key) -> State:
        """A state at random for each env of the key."""
        slots = random.integers(key, self.size)
        return {name: self.get_buffer(f"first_{name}").index_select(0, slots) for name in self.fields}


_TAG = 255  # an env's streams have 31 << 3 at most
