"""ClassicControl: the base of the native classic-control envs, rendered by Gymnasium's own."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor

from torchwrap import random
from torchwrap.random import Key

State = dict[str, Tensor]


class ClassicControl(FuncEnv[State, Tensor, Tensor, Tensor, Tensor, Any, Any]):
    """Base of the functions of Gymnasium's classic-control envs.

    Each field of the state is a scalar per env. A subclass sets `renderer`, Gymnasium's class of the same env, and `fields`,
    in the order of that env's `state`.

    Args:
        dtype: of the state: torch.float32 or torch.float64.
    """

    broadcasts = True
    renderer: ClassVar[Any]
    fields: ClassVar[tuple[str, ...]]

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{type(self).__name__} needs a dtype of torch.float32 or torch.float64, but got {dtype!r}."
            )
        self.dtype = dtype
        self.metadata = {**self.renderer.metadata, "render_modes": ["rgb_array"]}

    def between(self, low: float, high: float, rng: Key, shape: tuple[int, ...] = ()) -> Tensor:
        """Draws uniform numbers in [low, high), `(*key_shape, *shape)`, for an initial state. The bounds are reset options."""
        if not 0 <= high - low < math.inf:
            needed = f"{type(self).__name__} needs finite reset options with low <= high"
            raise ValueError(f"{needed}, but got low={low} and high={high}.")
        return random.uniform(rng, low, high, shape, self.dtype)

    def observation(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return torch.stack([state[field] for field in self.fields], -1).to(torch.float32)

    def render_init(self, params: Any = None, **kwargs: Any) -> Any:
        renderer = self.renderer(render_mode="rgb_array")
        renderer.reset(
            seed=0
        )  # Pendulum's arrow shows the last torque, which is not part of the state, so none is drawn
        return renderer

    def render_image(self, state: State, render_state: Any, params: Any = None) -> tuple[Any, Any]:
        render_state.state = np.array([float(state[field]) for field in self.fields])
        return render_state, render_state.render()

    def render_close(self, render_state: Any, params: Any = None) -> None:
        render_state.close()
