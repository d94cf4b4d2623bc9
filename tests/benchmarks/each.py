"""Every transform alone: a step with it minus a step without, compared with Gymnasium's vector wrapper of that name."""

from __future__ import annotations

from .glue import COLUMNS, REFERENCES, ours
from .measure import Case, Figures, Options, Row, compare_groups
from .report import ratios, table

# Whether Gymnasium has a vector wrapper of that name that fits the observations of `script.NumpyScript`.
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
    "DelayObservation": False,
    "DiscretizeObservation": False,
    "DtypeObservation": True,
    "FilterObservation": False,
    "GrayscaleObservation": False,
    "RescaleObservation": False,
    "ReshapeObservation": True,
    "ResizeObservation": False,
    "TimeAwareObservation": False,
    "DiscretizeAction": False,
    "TransformAction": True,
    "ScaleReward": False,
    "AddWhiteNoise": False,
    "EvalWrapper": False,
    "ObstructView": False,
    "StickyAction": False,
    "NormalizeReward": True,
    "ClipReward": True,
    "TransformReward": True,
}
# The observation space in `script.SPACES`; defaults to "numbers".
SEE = {
    "DiscretizeObservation": "bounded numbers",
    "RescaleObservation": "bounded numbers",
    "FilterObservation": "parts",
    "GrayscaleObservation": "images",
    "ResizeObservation": "images",
    "AddWhiteNoise": "images",
    "ObstructView": "images",
}


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (1024,):
        groups = {}
        for name in options.only or TRANSFORMS:
            groups[name] = ours(n, [name], options, see=SEE.get(name, "numbers"))
            if TRANSFORMS[name]:
                cases = [Case("gymnasium", "scripted", {"num_envs": n, "transforms": part}) for part in ([name], None)]
                groups[name]["gymnasium"] = Row(*cases)
        figures |= {f"each/{name}/{n}": row for name, row in compare_groups(groups, options, REFERENCES).items()}
    return figures


def show(figures: Figures) -> str:
    title = "each: microseconds that one transform adds to a step; x: times ours"
    return table(title, figures, {**COLUMNS, **ratios(REFERENCES)})
