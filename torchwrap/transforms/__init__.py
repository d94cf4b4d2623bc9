"""Transforms, one file per family."""

from torchwrap.statistics import RunningMeanStd
from torchwrap.transforms.action import AffineAction, ClipAction, TransformAction
from torchwrap.transforms.checker import PassiveEnvChecker
from torchwrap.transforms.discretize import DiscretizeAction, DiscretizeObservation
from torchwrap.transforms.episode import RecordEpisodeStatistics, TimeAwareObservation, TimeLimit
from torchwrap.transforms.groups import ObservationGroups, ObservationKeys
from torchwrap.transforms.history import (
    ActionRewardTransform,
    DelayAction,
    DelayObservation,
    FrameStackObservation,
    LastActionObservation,
    LowPassAction,
    RateLimitAction,
    StickyAction,
)
from torchwrap.transforms.image import (
    AddWhiteNoise,
    GrayscaleObservation,
    ObstructView,
    ResizeObservation,
)
from torchwrap.transforms.normalize import NormalizeObservation, NormalizeReward
from torchwrap.transforms.observation import (
    AddNoise,
    ClipObservation,
    CommandObservation,
    DtypeObservation,
    FilterObservation,
    FlattenObservation,
    ReshapeObservation,
    TransformObservation,
)
from torchwrap.transforms.presets import atari
from torchwrap.transforms.rescale import RescaleAction, RescaleObservation
from torchwrap.transforms.reward import ClipReward, ScaleReward, TransformReward
from torchwrap.transforms.transform import (
    ActionTransform,
    Compose,
    ObservationTransform,
    RewardTransform,
    Transform,
)

__all__ = [
    "ActionRewardTransform",
    "ActionTransform",
    "AddNoise",
    "AddWhiteNoise",
    "AffineAction",
    "ClipAction",
    "ClipObservation",
    "ClipReward",
    "CommandObservation",
    "Compose",
    "DelayAction",
    "DelayObservation",
    "DiscretizeAction",
    "DiscretizeObservation",
    "DtypeObservation",
    "FilterObservation",
    "FlattenObservation",
    "FrameStackObservation",
    "GrayscaleObservation",
    "LastActionObservation",
    "LowPassAction",
    "NormalizeObservation",
    "NormalizeReward",
    "ObservationGroups",
    "ObservationKeys",
    "ObservationTransform",
    "ObstructView",
    "PassiveEnvChecker",
    "RateLimitAction",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "RescaleObservation",
    "ReshapeObservation",
    "ResizeObservation",
    "RewardTransform",
    "RunningMeanStd",
    "ScaleReward",
    "StickyAction",
    "TimeAwareObservation",
    "TimeLimit",
    "Transform",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
    "atari",
]
