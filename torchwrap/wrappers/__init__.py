"""Wrappers: base, repeat, render; what drives the env under it. Transforms, which see data alone, go on by TransformedEnv."""

from torchwrap.wrappers.base import TransformedEnv, Wrapper
from torchwrap.wrappers.render import AddRenderObservation, HumanRendering, RecordVideo, RenderCollection
from torchwrap.wrappers.repeat import MaxAndSkipObservation, RepeatAction

__all__ = [
    "AddRenderObservation",
    "HumanRendering",
    "MaxAndSkipObservation",
    "RecordVideo",
    "RenderCollection",
    "RepeatAction",
    "TransformedEnv",
    "Wrapper",
]
