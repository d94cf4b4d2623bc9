"""What a step costs around envs that do nothing: `to_sb3` beside SB3's `make_vec_env`, in CPU time.

Both record returns. With statistics, both normalize the Box, or the key "a" of the Dict, and the
rewards; images stay as they are.
"""

from typing import Any

from .measure import Case, Figures, Options, Row, compare

SIZES = (1, 8, 64)
SPACES = {"Box": "17 numbers", "Dict": "`Dict` of four", "image": "84x84 bytes"}
ROWS = {
    "make_vec_env": ("sb3", {"normalizes": False}),
    "to_sb3": ("torchwrap", {"way": "plain"}),
    "VecNormalize": ("sb3", {"normalizes": True}),
    "eager": ("torchwrap", {"way": "eager"}),
    "compiled": ("torchwrap", {"way": "compiled"}),
}


def run(options: Options) -> Figures:
    figures: Figures = {}
    for space in SPACES:
        for n in options.num_envs or SIZES:
            rows = {}
            for name, (side, arguments) in ROWS.items():
                if name == "compiled" and not options.compile:
                    continue
                shared: dict[str, Any] = {"space": space, "num_envs": n}
                rows[name] = Row(Case(side, "vec_env", shared | arguments))
            for name, row in compare(rows, options).items():
                figures[f"step_costs/{space} {name}/{n}"] = row
    return figures


def page(figures: Figures) -> list[str]:
    """The rows of the table in examples/guides/compiling.md."""
    lines = []
    for space, words in SPACES.items():
        cells = [words]
        for name in ROWS:
            values = []
            for n in SIZES:
                start = f"step_costs/{space} {name}/{n}/"
                times = [row["us"] for key, row in figures.items() if key.startswith(start)]
                values.append(f"{float(f'{max(times):.2g}'):.0f}" if times else "?")
            cells.append("/".join(values))
        lines.append(f"| {' | '.join(cells)} |")
    return lines
