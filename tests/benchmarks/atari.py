"""Atari: a step of games, and whole loops of PPO and DQN on them, beside SB3's, in CPU time.

Lives are episodes, rewards are clipped, and the scores of games are recorded. The loops have one
network (Mnih et al., 2015) and one set of hyperparameters. Breakout ends the games of an agent that
has not learned within seconds.
"""

import time
from collections.abc import Callable
from typing import Any

from .measure import Case, Figures, Options, Row, ask, compare

GAME = "Breakout"
SIZES = (8, 32)
STEPS = {
    "make_atari_env": ("sb3", {}),
    "in Python, eager": ("torchwrap", {"backend": "sb3", "way": "eager"}),
    "in Python, compiled": ("torchwrap", {"backend": "sb3", "way": "compiled"}),
    "ALE": ("torchwrap", {"backend": "ale", "way": "eager"}),
    "EnvPool": ("torchwrap", {"backend": "envpool", "way": "eager"}),
}
LOOP_SIZE = 8
LOOPS = {"SB3": ("sb3", {}), "ALE": ("torchwrap", {"backend": "ale"})}
PPO = dict(learning_rate=2.5e-4, num_steps=128, num_minibatches=4, update_epochs=4)
DQN = dict(learning_rate=1e-4, buffer_size=8_000, learning_starts=64, batch_size=32)
NUM_STEPS = {"ppo": LOOP_SIZE * PPO["num_steps"], "dqn": 512}  # to warm up, and then to measure


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or SIZES:
        rows = {}
        for name, (side, arguments) in STEPS.items():
            if options.compile or not name.endswith("compiled"):
                rows[name] = Row(Case(side, "atari", {"num_envs": n, **arguments}))
        for name, row in compare(rows, options, list(rows)[:1]).items():
            figures[f"atari/{name}/{n}"] = row
    for script in NUM_STEPS:
        peer = {}
        for name, (side, arguments) in LOOPS.items():
            row = ask(Case(side, "atari_loop", {"script": script, **arguments}), options)
            peer = peer or row
            if "whole_us" in row and "whole_us" in peer:
                row["whole_ratio"] = row["whole_us"] / peer["whole_us"]
            figures[f"atari/{script} {name}/{LOOP_SIZE}"] = row
    return figures


def per_step(learn: Callable[[int], Any], num_steps: int) -> dict[str, float]:
    """Microseconds of CPU time per step of a game, after as many steps to warm up."""
    learn(num_steps)
    start = time.process_time()
    learn(num_steps)
    return {"whole_us": (time.process_time() - start) * 1e6 / num_steps}


def page(figures: Figures) -> list[str]:
    """The rows of the table in examples/guides/simulators.md: the worst of all settings."""
    games = [[f"{name}/{n}" for n in SIZES] for name in STEPS]
    peer, ours = [[f"{script} {name}/{LOOP_SIZE}" for script in NUM_STEPS] for name in LOOPS]
    lines = []
    for columns in (games, [peer, [], [], ours, []]):
        cells = []
        for names in columns:
            values = []
            for name in names:
                start = f"atari/{name}/"
                times = [row["whole_us"] for key, row in figures.items() if key.startswith(start)]
                values.append(f"{float(f'{max(times):.2g}'):,.0f}" if times else "?")
            cells.append("/".join(values))
        lines.append(f"| {' | '.join(cells)} |")
    return lines
