"""The arm of examples/robot.py beside a hand-written `VecEnv` of the same arm, in CPU time.

A step of all envs, while episodes end at all times, and an iteration of rsl_rl's PPO. Ours takes
one more value per step, of the true final observations.
"""

from .measure import Case, Figures, Options, Row, ask, compare

ROUNDS = 3
ROWS = {
    "by hand": ("rsl_rl", "eager"),
    "by hand, compiled": ("rsl_rl", "compiled"),
    "torchwrap": ("torchwrap", "eager"),
    "torchwrap, compiled": ("torchwrap", "compiled"),
}


def run(options: Options) -> Figures:
    """The least time of some rounds, and its ratio to that of the env by hand."""
    figures: Figures = {}
    for n in options.num_envs or (1024, 4096):
        sides = {
            name: (side, {"num_envs": n, "way": way})
            for name, (side, way) in ROWS.items()
            if options.compile or way == "eager"
        }
        steps = {
            name: Row(Case(side, "arm_step", arguments))
            for name, (side, arguments) in sides.items()
        }
        for name, row in compare(steps, options, ["by hand"]).items():
            figures[f"robot/step, {name}/{n}"] = row
        loops: Figures = {}
        for _ in range(ROUNDS):
            for name, (side, arguments) in sides.items():
                found = ask(Case(side, "arm_loop", arguments), options)
                row = loops.setdefault(name, found)
                if "whole_us" in found:
                    row["whole_us"] = min(row["whole_us"], found["whole_us"])
        for name, row in loops.items():
            if "whole_us" in row and "whole_us" in loops["by hand"]:
                row["whole_ratio"] = row["whole_us"] / loops["by hand"]["whole_us"]
            figures[f"robot/iteration, {name}/{n}"] = row
    return figures
