"""Key: the coordinates of random numbers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ENV_BITS = 24  # of the third counter word; the 8 bits above are the number that was folded in


class Key(NamedTuple):
    """The coordinates of random numbers: the same key always gives the same numbers.

    Use `key.fold_in(1)`, `key.fold_in(2)`, ... for independent draws in the same step. All tensors are int64 and of one shape,
    which the documentation calls `key_shape`: `(num_envs,)`, or `()` under `torch.vmap`.

    Args:
        seed_low: lower 32 bits of the seed.
        seed_high: upper 32 bits of the seed.
        env: global index of the env.
        episode: number of the episode, counted from 0.
        draw: number of the step within the episode.
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
        """Returns the key of an independent draw.

        Args:
            number: 1 to 255. Fold in only one: the numbers of repeated calls add up.

        Raises:
            ValueError: for any other number.
        """
        if not 0 < number < 256:
            raise ValueError(f"Key.fold_in needs a number from 1 to 255, but got {number}.")
        return self._replace(env=self.env + (number << ENV_BITS))

    def select(self, rows: Tensor) -> Key:
        """Returns the keys of some envs only, by their row indices (int64, `(n,)`)."""
        low, high, env, episode, draw = (word.index_select(0, rows) for word in self[:5])
        return Key(low, high, env, episode, draw, self.tag)
