"""Transforms: observation, history, normalize, reward, action, episode; one file a family, `base` under all of them."""

from torchwrap.transforms.action import ClipAction, RescaleAction
from torchwrap.transforms.base import ActionTransform, Compose, ObservationTransform, RewardTransform, Transform
from torchwrap.transforms.episode import RecordEpisodeStatistics, TimeLimit
from torchwrap.transforms.history import FrameStackObservation
from torchwrap.transforms.normalize import NormalizeObservation, NormalizeReward, RunningMeanStd
from torchwrap.transforms.observation import ClipObservation, FlattenObservation, TransformObservation
from torchwrap.transforms.reward import ClipReward, TransformReward

__all__ = [
    "ActionTransform",
    "ClipAction",
    "ClipObservation",
    "ClipReward",
    "Compose",
    "FlattenObservation",
    "FrameStackObservation",
    "NormalizeObservation",
    "NormalizeReward",
    "ObservationTransform",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "RewardTransform",
    "RunningMeanStd",
    "TimeLimit",
    "Transform",
    "TransformObservation",
    "TransformReward",
]
