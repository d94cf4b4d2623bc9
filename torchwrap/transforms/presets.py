"""Presets: the stacks of transforms that published results were made with."""

from __future__ import annotations

from typing import Literal

from torchwrap._core import validation
from torchwrap.transforms.history import FrameStackObservation
from torchwrap.transforms.image import GrayscaleObservation, ResizeObservation
from torchwrap.transforms.reward import ClipReward
from torchwrap.transforms.transform import Compose

AtariPreset = Literal["cleanrl", "gymnasium", "sb3"]


def atari(preset: AtariPreset) -> Compose:
    """The transforms of raw Atari frames in CleanRL's, Gymnasium's or Stable-Baselines3's stack.

    Results equal theirs bit for bit. The parts that start and end episodes drive the game, so they
    are in the env: `make_games(game, num_envs, preset)` of `examples/atari_game.py` makes both.

    Args:
        preset: "cleanrl" (its `ppo_atari.py`), "gymnasium" or "sb3": whose results to compare with.
            They differ in the order of resizing and gray, in the padding of a stack, and in whether
            rewards are replaced by their sign.

    Shape: `(height, width, 3)` uint8, or `(height, width)` for "gymnasium", to `(4, 84, 84)` uint8.

    >>> [type(transform).__name__ for transform in atari("gymnasium")]
    ['ResizeObservation', 'FrameStackObservation']
    """
    validation.choice("atari", "preset", preset, "cleanrl", "gymnasium", "sb3")
    resize = ResizeObservation((84, 84))
    if preset == "gymnasium":
        return Compose([resize, FrameStackObservation(4)])
    gray = GrayscaleObservation(formula="opencv")
    sign = ClipReward(-1, 1)  # the rewards of games are integers
    if preset == "cleanrl":
        return Compose([resize, gray, sign, FrameStackObservation(4)])
    return Compose([gray, resize, sign, FrameStackObservation(4, padding_type="zero")])
