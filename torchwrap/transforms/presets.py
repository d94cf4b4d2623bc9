"""Presets: the stacks of transforms that published results were made with."""

from __future__ import annotations

from typing import Literal

from torchwrap.transforms.history import FrameStackObservation
from torchwrap.transforms.image import GrayscaleObservation, ResizeObservation
from torchwrap.transforms.reward import ClipReward
from torchwrap.transforms.transform import Compose, Transform

AtariPreset = Literal["cleanrl", "gymnasium", "sb3"]


def atari(preset: AtariPreset) -> Compose:
    """The transforms of raw Atari frames in CleanRL's `ppo_atari.py`, Gymnasium's or Stable-Baselines3's stack, bit for bit.

    What starts and ends the episodes drives the game, so it is in the env: `make_atari(id, num_envs, preset)` of
    `examples/atari_game.py` makes it.

    Args:
        preset: "cleanrl", "gymnasium" or "sb3": whose results to compare with. They differ in the order of resizing and gray,
            in what a stack begins with, and in whether rewards are replaced by their sign.

    Shape: `(height, width, 3)` uint8, or `(height, width)` for "gymnasium", to `(4, 84, 84)` uint8.

    >>> [type(transform).__name__ for transform in atari("gymnasium")]
    ['ResizeObservation', 'FrameStackObservation']
    """
    if preset not in ("cleanrl", "gymnasium", "sb3"):
        raise ValueError(f'atari needs preset="cleanrl", "gymnasium" or "sb3", but got {preset!r}.')
    pixels: list[Transform] = [ResizeObservation((84, 84))]
    if preset != "gymnasium":
        gray = GrayscaleObservation(formula="opencv")
        pixels = [gray, *pixels] if preset == "sb3" else [*pixels, gray]
        pixels.append(ClipReward(-1, 1))  # the sign, because a game's rewards are integers
    return Compose(
        [*pixels, FrameStackObservation(4, padding_type="zero" if preset == "sb3" else "reset")]
    )
