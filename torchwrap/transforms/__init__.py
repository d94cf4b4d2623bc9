"""Transforms: observation, image, history, normalize, rescale, discretize, reward, action, episode; one file a family."""

from torchwrap.transforms.action import ClipAction, TransformAction
from torchwrap.transforms.base import ActionTransform, Compose, ObservationTransform, RewardTransform, Transform
from torchwrap.transforms.discretize import DiscretizeAction, DiscretizeObservation
from torchwrap.transforms.episode import RecordEpisodeStatistics, TimeAwareObservation, TimeLimit
from torchwrap.transforms.history import DelayObservation, FrameStackObservation
from torchwrap.transforms.image import GrayscaleObservation, ResizeObservation
from torchwrap.transforms.normalize import NormalizeObservation, NormalizeReward, RunningMeanStd
from torchwrap.transforms.observation import (
    ClipObservation,
    DtypeObservation,
    FilterObservation,
    FlattenObservation,
    ReshapeObservation,
    TransformObservation,
)
from torchwrap.transforms.rescale import RescaleAction, RescaleObservation
from torchwrap.transforms.reward import ClipReward, ScaleReward, TransformReward

__all__ = [
    "ActionTransform",
    "ClipAction",
    "ClipObservation",
    "ClipReward",
    "Compose",
    "DelayObservation",
    "DiscretizeAction",
    "DiscretizeObservation",
    "DtypeObservation",
    "FilterObservation",
    "FlattenObservation",
    "FrameStackObservation",
    "GrayscaleObservation",
    "NormalizeObservation",
    "NormalizeReward",
    "ObservationTransform",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "RescaleObservation",
    "ReshapeObservation",
    "ResizeObservation",
    "RewardTransform",
    "RunningMeanStd",
    "ScaleReward",
    "TimeAwareObservation",
    "TimeLimit",
    "Transform",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
]
