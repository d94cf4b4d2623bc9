"""What the envs of classic control have in common: how they begin, and pictures, which Gymnasium's own envs draw."""

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
    """A world of Gymnasium's classic control. Its state is a number a field, and its observation the same in float32.

    A subclass names Gymnasium's env, the `painter`, and the `fields` of the state in the order that this one has them.

    Args:
        dtype: of the state.
    """

    broadcasts = True
    painter: ClassVar[Any]
    fields: ClassVar[tuple[str, ...]]

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{type(self).__name__} needs a dtype of torch.float32 or torch.float64, but got {dtype!r}.")
        self.dtype = dtype
        self.metadata = {**self.painter.metadata, "render_modes": ["rgb_array"]}

    def between(self, low: float, high: float, rng: Key, shape: tuple[int, ...] = ()) -> Tensor:
        """Uniform numbers for a first state, between two reset options."""
        if not 0 <= high - low < math.inf:
            needed = f"{type(self).__name__} needs finite reset options with low <= high"
            raise ValueError(f"{needed}, but got low={low} and high={high}.")
        return low + (high - low) * random.uniform(rng, shape, self.dtype)

    def observation(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return torch.stack([state[field] for field in self.fields], -1).to(torch.float32)

    def render_init(self, params: Any = None, **kwargs: Any) -> Any:
        painter = self.painter(render_mode="rgb_array")
        painter.reset(seed=0)  # Pendulum's last torque, an arrow, is of no state: it is not drawn
        return painter

    def render_image(self, state: State, render_state: Any, params: Any = None) -> tuple[Any, Any]:
        render_state.state = np.array([float(state[field]) for field in self.fields])
        return render_state, render_state.render()

    def render_close(self, render_state: Any, params: Any = None) -> None:
        render_state.close()
