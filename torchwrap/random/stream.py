"""Key: the coordinates of random numbers. Stream: the keys of a batch of envs, as its episodes and steps pass."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch
from torch import Tensor

from torchwrap._core.env_buffers import BatchedModule, EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.random.generator import WORD

_ENV_BITS = 24  # of the third counter word; the 8 bits above are the number that was folded in


class Key(NamedTuple):
    """The coordinates of random numbers: the same key always gives the same numbers.

    All tensors are int64 and of one shape, `key_shape`: `(num_envs,)`, or `()` under `torch.vmap`.

    Args:
        seed_low, seed_high: lower and upper 32 bits of the seed.
        env, episode, draw: global index of the env, number of its episode, and number of the step within the episode.
        tag: distinguishes the streams of an env, and the functions that draw in one step.

    >>> from torchwrap.random import Stream, uniform
    >>> key = Stream(2, seed=0).key()
    >>> bool((uniform(key) == uniform(key)).all()), bool((uniform(key) == uniform(key.fold_in(1))).any())
    (True, False)
    """

    seed_low: Tensor
    seed_high: Tensor
    env: Tensor
    episode: Tensor
    draw: Tensor
    tag: int = 0

    def fold_in(self, number: int) -> Key:
        """Returns the key of an independent draw in the same step. Fold in one number, 1 to 255; repeated calls add up."""
        if not 0 < number < 256:
            raise ValueError(f"Key.fold_in needs a number from 1 to 255, but got {number}.")
        return self._replace(env=self.env + (number << _ENV_BITS))

    def select(self, rows: Tensor) -> Key:
        """Returns the keys of some envs only, by their row indices (int64, `(n,)`)."""
        low, high, env, episode, draw = (word.index_select(0, rows) for word in self[:5])
        return Key(low, high, env, episode, draw, self.tag)


class Stream(BatchedModule):
    """The RNG streams of a batch of envs, one per env, independent of each other and of `num_envs`.

    A stream is a clock: the env's seed, index, episode and step determine the numbers, so no draw shifts another. An env
    advances its own streams, and `TransformedEnv` those of its transforms. A transform that draws only reads `key()`.

    Args:
        num_envs: number of streams.
        first_index: global index of the first env. The shards of a run differ only in this. The last index is below 2**24.
        tag: distinguishes the streams of one env (resets, actions, each transform that draws), 0 to 31.
        device: of the buffers.
        seed: a seed in [0, 2**64). None draws one from the operating system.

    >>> from torchwrap.random import uniform
    >>> whole, shard = Stream(4, seed=7), Stream(2, first_index=2, seed=7)
    >>> bool((uniform(whole.key())[2:] == uniform(shard.key())).all())
    True
    """

    seed_low, seed_high, env, episode, draw = (EnvBuffer((), torch.int64) for _ in range(5))

    def __init__(
        self, num_envs: int, first_index: int = 0, tag: int = 0, device: torch.device | str = "cpu", seed: int | None = None
    ) -> None:
        super().__init__()
        if not 0 <= tag < 32:
            raise ValueError(f"Stream needs a tag from 0 to 31, one per stream of an env, but got {tag}.")
        if first_index + num_envs > 1 << _ENV_BITS:
            raise ValueError(f"Stream needs env indices below 2**{_ENV_BITS}, but got {first_index} + {num_envs}.")
        self.tag = tag
        self.allocate(num_envs, device)
        self.env.copy_(torch.arange(first_index, first_index + num_envs, device=device))
        self.seed(secrets.randbits(64) if seed is None else seed, RowMask.full(num_envs, device))

    def seed(self, seed: int, mask: RowMask) -> None:
        """Sets the streams in the rows of `mask` to before the first episode of `seed`, an int in [0, 2**64)."""
        mask.fill_(self.seed_low, seed & WORD)
        mask.fill_(self.seed_high, seed >> 32)
        mask.fill_(self.episode, -1)
        mask.fill_(self.draw, 0)

    def next_episode(self, mask: RowMask) -> None:
        """Advances the streams in the rows of `mask` to the start of their next episode."""
        self.episode.add_(mask.tensor)
        mask.fill_(self.draw, 0)

    def next_draw(self) -> None:
        """Advances every stream to its next step."""
        self.draw.add_(1)

    def key(self, function: int = 0) -> Key:
        """Returns the key of the current step, valid until the stream advances, for one of 8 functions that draw (0 to 7)."""
        return Key(self.seed_low, self.seed_high, self.env, self.episode, self.draw, (self.tag << 3) + function)


def fresh_seed() -> int:
    """Draws a seed in [0, 2**31) from the operating system; every simulator accepts a seed of that size."""
    return secrets.randbits(31)
