"""Position: where an env stands between two calls."""

from __future__ import annotations

from tensordict import TensorDict


class Position:
    """Where an env stands between two calls."""

    __slots__ = ("root", "unfinished")

    def __init__(self) -> None:
        self.root: TensorDict | None = None
        """The last root. None before the first reset."""
        self.unfinished: str | None = None
        """The call that has begun to change the env, and has not come to its root."""
