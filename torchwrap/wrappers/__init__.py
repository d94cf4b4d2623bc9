"""Wrappers: envs around an env, for what drives the env below. Transforms, which see data alone, go through TransformedEnv."""

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
