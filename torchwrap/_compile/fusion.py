"""Fusion: which loops of a graph become one. It imports Inductor."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V


class _Choices(InductorChoices):
    """PyTorch fuses no loops that are far apart, because what the first one computes would be kept for longer.

    But a graph writes to its inputs at the end, far from where it computes what it writes. With several steps in one graph,
    loops over the same rows were apart.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        shares = shared_data_score >= config.score_fusion_memory_threshold
        return shares or InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)


def at_any_distance() -> AbstractContextManager[Any]:
    """Within this block, loops that read or write the same are fused wherever they are."""
    return V.set_choices_handler(_Choices())  # type: ignore[no-any-return]
