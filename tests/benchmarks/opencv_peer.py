"""OpenCV's and NumPy's side of Atari preprocessing, frame by frame."""

from __future__ import annotations

import cv2
import numpy as np

from . import script
from .worker import Timed

WEIGHTS = np.array([0.2125, 0.7154, 0.0721])


def atari(num_envs: int, gray: str) -> Timed:
    """`gray`: Gymnasium's "formula", in float64 and for all frames at once, or "opencv", whose values differ slightly."""
    frames = script.frames(num_envs)
    stacked = np.zeros((num_envs, 4, 84, 84), np.uint8)

    def call() -> np.ndarray:
        nonlocal stacked
        if gray == "formula":
            grays = (frames @ WEIGHTS).astype(np.uint8)
        else:
            grays = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames]
        small = np.stack([cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA) for frame in grays])
        stacked = np.concatenate([stacked[:, 1:], small[:, None]], 1)
        return stacked

    return Timed(call)
