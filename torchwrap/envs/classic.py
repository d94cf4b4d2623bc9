"""ClassicControl: the base of the native classic-control envs, rendered by Gymnasium's own."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor

from torchwrap import random
from torchwrap._core.errors import refusal
from torchwrap.random import Key

State = dict[str, Tensor]


class ClassicControl(FuncEnv[State, Tensor, Tensor, Tensor, Tensor, Any, Any]):
    """Base of the functions of Gymnasium's classic-control envs.

    Each field of the state is a scalar per env. A subclass sets `renderer`, Gymnasium's class of
    the same env, and `fields`, in the order of that env's `state`.

    Args:
        dtype: of the state: torch.float32 or torch.float64.
    """

    broadcasts = True
    renderer: ClassVar[Any]
    fields: ClassVar[tuple[str, ...]]
    parameters: ClassVar[tuple[str, ...]] = ()  # the constants that `params` may replace

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            owner = type(self).__name__
            raise ValueError(refusal(owner, "dtype must be torch.float32 or torch.float64", dtype))
        self.dtype = dtype
        self.metadata = {**self.renderer.metadata, "render_modes": ["rgb_array"]}

    def constant(self, name: str, params: Any) -> Any:
        """A constant of the physics: of each env, if `params` have it."""
        return (params or {}).get(name, getattr(self, name))

    def between(
        self,
        low: float,
        high: float,
        rng: Key,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Draws uniform numbers `(*key_shape, *shape)`, within bounds that are reset options."""
        if not 0 <= high - low < math.inf:
            owner = type(self).__name__
            raise ValueError(
                refusal(owner, "low and high must be finite and in order", [low, high])
            )
        return random.uniform(rng, low, high, shape, self.dtype)

    def uniform_state(
        self,
        low: float,
        high: float,
        rng: Key,
    ) -> State:
        """Draws each field of an initial state uniformly in [low, high)."""
        values = self.between(low, high, rng, (len(self.fields),))
        return dict(zip(self.fields, values.unbind(-1), strict=True))

    def observation(
        self,
        state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        values = tuple(map(state.__getitem__, self.fields))
        return torch.stack(values, -1).to(torch.float32)

    def render_init(
        self,
        params: Any = None,
        **kwargs: Any,
    ) -> Any:
        renderer = self.renderer(render_mode="rgb_array")
        # Pendulum draws an arrow for the last torque, but not after a reset.
        renderer.reset(seed=0)
        return renderer

    def render_image(
        self,
        state: State,
        render_state: Any,
        params: Any = None,
    ) -> tuple[Any, Any]:
        values = [float(state[field]) for field in self.fields]
        render_state.state = np.array(values)
        return render_state, render_state.render()

    def render_close(self, render_state: Any, params: Any = None) -> None:
        render_state.close()
