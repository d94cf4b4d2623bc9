"""Wrappers: envs that drive the env below them. Transforms see data alone: see TransformedEnv."""

from torchwrap.wrappers.render import AddRenderObservation, RecordVideo
from torchwrap.wrappers.repeat import MaxAndSkipObservation, RepeatAction
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper

__all__ = [
    "AddRenderObservation",
    "MaxAndSkipObservation",
    "RecordVideo",
    "RepeatAction",
    "TransformedEnv",
    "Wrapper",
]
