"""Frames: pictures of states, drawn by the functions of an env."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Frames:
    """Draws single states with `render_init` and `render_image`, and closes with `render_close` what these have opened.

    Args:
        func_env: the functions of the env.
    """

    def __init__(self, func_env: Any) -> None:
        self.func_env = func_env
        self._render_state: Any = None  # as FuncEnv.render_init returns it

    def draw(self, state: dict[str, Tensor], rows: Iterable[int]) -> tuple[Any, ...]:
        """A frame of each of these rows of a batch of states."""
        if self._render_state is None:
            self._render_state = self.func_env.render_init()
        states, frames = {name: value.cpu() for name, value in state.items()}, []
        for row in rows:
            single = {name: value[row] for name, value in states.items()}
            self._render_state, frame = self.func_env.render_image(single, self._render_state)
            frames.append(frame)
        return tuple(frames)

    def close(self) -> None:
        """Releases what is open. A later `draw` opens it again."""
        if self._render_state is not None:
            self.func_env.render_close(self._render_state)
            self._render_state = None
