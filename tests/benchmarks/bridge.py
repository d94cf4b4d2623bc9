"""Four transforms on HalfCheetah-v5, compared with Gymnasium's vector wrappers."""

from typing import Any

from .glue import REFERENCES, ways
from .measure import Case, Figures, Options, Row, compare

FOUR = ("ClipAction", "RecordEpisodeStatistics", "NormalizeObservation", "NormalizeReward")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (8,):
        for mode in ("sync", "async"):
            # Python steps a simulator on the host, so `tw.compile` compiles the transforms alone.
            rows = {
                f"torchwrap-{way}": _pair("torchwrap", n, mode, way=way)
                for way in ways(options, "eager", "compiled")
            }
            rows["gymnasium"] = _pair("gymnasium", n, mode)
            figures |= _compare(rows, options, mode, n)
    return figures


def _compare(rows: dict[str, Row], options: Options, kind: str, num_envs: int) -> Figures:
    """Times the rows. The last one is the peer."""
    found = compare(rows, options, REFERENCES)
    *_, peer_name = rows
    peer = found[peer_name]
    for row in found.values():
        if "whole_us" in row and "whole_us" in peer:
            row["whole_ratio"] = row["whole_us"] / peer["whole_us"]
    return {f"bridge/{kind} {name}/{num_envs}": row for name, row in found.items()}


def _pair(side: str, num_envs: int, mode: str, **whole: Any) -> Row:
    arguments = {"num_envs": num_envs, "mode": mode}
    bare = Case(side, "half_cheetah", {**arguments, "transforms": None})
    return Row(Case(side, "half_cheetah", {**arguments, **whole, "transforms": FOUR}), bare)
