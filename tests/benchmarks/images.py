"""Atari preprocessing: grayscale, 84x84 and a stack of four, from frames of 210x160x3, compared with NumPy and OpenCV."""

from __future__ import annotations

from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

REFERENCES = ("torchwrap-eager", "torchwrap-compiled")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (64,):
        rows = {"torchwrap-eager": Row(Case("torchwrap", "atari", {"num_envs": n, "device": options.device}))}
        if options.compile:
            rows["torchwrap-compiled"] = Row(
                Case("torchwrap", "atari", {"num_envs": n, "compiled": True, "device": options.device})
            )
        for name, gray in (("gymnasium's gray, opencv", "formula"), ("opencv's gray, opencv", "opencv")):
            rows[name] = Row(Case("opencv", "atari", {"num_envs": n, "gray": gray}))
        found = compare(rows, options, REFERENCES)
        figures.update({f"images/{name}/{n}": row for name, row in found.items()})
    return figures


def show(figures: Figures) -> str:
    title = "images: grayscale, resized to 84x84, four stacked, microseconds per step of all envs; x: times ours"
    return table(title, figures, {"us": "us", "(median)": "us_median", **ratios(REFERENCES)})
