"""Every transform alone: a step with it minus one without, beside Gymnasium's vector wrapper of that name."""

from __future__ import annotations

from .glue import COLUMNS, REFERENCES, ours
from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

# Whether Gymnasium has a vector wrapper of that name.
TRANSFORMS = {
    "ClipAction": True,
    "RescaleAction": True,
    "RecordEpisodeStatistics": True,
    "TimeLimit": False,
    "NormalizeObservation": True,
    "ClipObservation": False,
    "FrameStackObservation": False,
    "FlattenObservation": True,
    "TransformObservation": True,
    "NormalizeReward": True,
    "ClipReward": True,
    "TransformReward": True,
}


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (1024,):
        for name, known in TRANSFORMS.items():
            rows = ours(n, [name], options)
            if known:
                cases = [Case("gymnasium", "scripted", {"num_envs": n, "transforms": part}) for part in ([name], None)]
                rows["gymnasium"] = Row(*cases)
            found = compare(rows, options, REFERENCES)
            figures.update({f"each/{name} {side}/{n}": row for side, row in found.items()})
    return figures


def show(figures: Figures) -> str:
    title = "each: what one transform adds to a step, microseconds; x: times ours"
    return table(title, figures, {**COLUMNS, **ratios(REFERENCES)})
