"""The declared entries of the infos of Gymnasium's envs: their spaces, and their latest values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal

InfoKeys = Sequence[str] | Mapping[str, Space[Any]]

Info = dict[str, Any]

Mask = NDArray[np.bool_]

Infos = list[tuple[Info, Mask]]
"""Batched infos, each with the mask of the rows that it belongs to."""


def info_spaces(info_keys: InfoKeys) -> dict[str, Space[Any]]:
    """The declared spaces of infos by name."""
    owner = "from_gymnasium"
    if not isinstance(info_keys, Mapping):
        names = validation.names(owner, "info_keys", info_keys)
        return dict.fromkeys(names, spaces.REWARD)
    for name, space in info_keys.items():
        if spaces.children(space) is not None:
            must = f"info_keys[{name!r}] must be the space of a single array"
            raise TypeError(refusal(owner, must, space))
    return dict(info_keys)


class InfoReader:
    """The declared entries of the infos that came with the latest observations.

    Args:
        owner: the env, in error messages.
        info_keys: as for `from_gymnasium`.
        num_envs: number of rows.
    """

    def __init__(self, owner: str, info_keys: InfoKeys, num_envs: int) -> None:
        self.owner = owner
        self.spaces = info_spaces(info_keys)
        self._arrays: dict[str, Any] = {}
        for name, space in sorted(self.spaces.items()):
            self._arrays[name] = create_empty_array(space, num_envs)
        # Names without a space that no info has held yet: perhaps typos.
        self._unseen = set() if isinstance(info_keys, Mapping) else set(info_keys)

    def read(self, infos: Infos, has_end: bool = False) -> None:
        """Copies the entries. Rows whose info lacks one get zeros.

        Raises a ValueError for an entry that does not fit, and for a name that no info has held by
        the end of an episode.
        """
        for info, rows in infos:
            for name, values in self._arrays.items():
                values[rows] = 0
                if name not in info:
                    continue
                self._unseen.discard(name)
                # Gymnasium writes the mask of the rows with this entry under "_name".
                has_entry = rows & info.get(f"_{name}", True)
                try:
                    entries = np.asarray(info[name])[has_entry]
                    shape = (-1, *values.shape[1:])
                    values[has_entry] = cast_info(entries, shape, values.dtype)
                except (IndexError, OverflowError, TypeError, ValueError):
                    must = f"info[{name!r}] must fit {self.spaces[name]}"
                    raise ValueError(refusal(self.owner, must, repr(info[name]))) from None
        if has_end and self._unseen:
            must = "info_keys must be entries of the info of a step or a reset"
            raise ValueError(refusal(self.owner, must, sorted(self._unseen)))

    def copies(self) -> list[NDArray[Any]]:
        """The entries in the order of their names, in new memory."""
        return [array.copy() for array in self._arrays.values()]


def cast_info(
    value: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Numbers of an info in a shape and dtype. Raises a ValueError if one of them would change."""
    given = np.asarray(value)
    if given.dtype == object:  # Gymnasium's, for all but a few types
        given = np.asarray(given.tolist())
    return spaces.cast(given.reshape(shape), dtype)
