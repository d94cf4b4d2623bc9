"""Stream: the RNG streams of a batch of envs."""

from __future__ import annotations

import secrets

import torch

from torchwrap._core.env_buffers import BatchedModule, EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.random.generator import WORD
from torchwrap.random.key import ENV_BITS, Key


def fresh_seed() -> int:
    """Draws a seed in [0, 2**31) from the operating system; every simulator accepts a seed of that size."""
    return secrets.randbits(31)


class Stream(BatchedModule):
    """The RNG streams of a batch of envs, one per env, independent of each other and of `num_envs`.

    A stream is a clock: the env's seed, index, episode and step determine the numbers, so no draw shifts another. An env
    advances its own streams, and `TransformedEnv` those of its transforms. A transform that draws only reads `key()`.

    Args:
        num_envs: number of streams.
        first_index: global index of the first env. The shards of a run differ only in this.
        tag: distinguishes the streams of one env (resets, actions, each transform that draws), 0 to 31.
        device: of the buffers.
        seed: a seed in [0, 2**64). None draws one from the operating system.

    Raises:
        ValueError: for a tag or an index that does not fit the counter.

    >>> from torchwrap.random import uniform
    >>> whole, shard = Stream(4, seed=7), Stream(2, first_index=2, seed=7)
    >>> bool((uniform(whole.key())[2:] == uniform(shard.key())).all())
    True
    """

    seed_low = EnvBuffer((), torch.int64)
    seed_high = EnvBuffer((), torch.int64)
    env = EnvBuffer((), torch.int64)
    episode = EnvBuffer((), torch.int64)
    draw = EnvBuffer((), torch.int64)

    def __init__(
        self,
        num_envs: int,
        first_index: int = 0,
        tag: int = 0,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= tag < 32:
            raise ValueError(f"Stream needs a tag from 0 to 31, one per stream of an env, but got {tag}.")
        if first_index + num_envs > 1 << ENV_BITS:
            raise ValueError(f"Stream needs env indices below 2**{ENV_BITS}, but got {first_index} + {num_envs}.")
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
        """Returns the key of the current step, which is valid until the stream advances.

        Args:
            function: 0 to 7, to draw independent numbers in up to 8 functions of one step.
        """
        return Key(self.seed_low, self.seed_high, self.env, self.episode, self.draw, (self.tag << 3) + function)
