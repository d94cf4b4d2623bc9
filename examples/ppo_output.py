"""Beside ppo.py and its variants: checkpoints, TensorBoard's scalars, and finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T

# CleanRL's names for episode statistics in TensorBoard
CHARTS = {"return": "episodic_return", "length": "episodic_length"}


def load(args: Any, num_envs: int = 1, make: Any = tw.make) -> tuple[tw.Env, Any]:
    """A new env and the agent of a finished run of ppo.py, with all that they learned."""
    import ppo

    ppo.fill_in(args, make)
    env = ppo.make_env(args, num_envs, make)
    agent = ppo.Agent(env, args.hidden_size, args.log_std).to(args.device)
    state = torch.load(args.out / "agent.pt", map_location=args.device, weights_only=True)
    env.load_state_dict(state["env"])
    agent.load_state_dict(state["agent"])
    return env, agent


class Checkpoint:
    """checkpoint.pt holds all that a run needs to continue.

    Args:
        parts: lists, and what has a `state_dict()`, by name; the env is added.
    """

    def __init__(
        self,
        args: Any,
        env: tw.Env,
        out: Path,
        parts: dict[str, Any],
        world_size: int = 1,
    ) -> None:
        self.env = env
        self.parts = {"env": env, **parts}
        self.path = out / "checkpoint.pt"
        device = torch.device(args.device)
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index or 0])
        # The arguments that a run and the one that resumes it must share.
        self.run = {name: str(value) for name, value in vars(args).items()}
        for name in ("out", "resume", "save_every", "tensorboard", "eval_games"):
            self.run.pop(name, None)
        self.run["device"] = device.type
        self.run["world_size"] = str(world_size)

    def process_state(self) -> dict[str, Any]:
        """The random numbers of this process and, if they are tensors, its running episodes."""
        state: dict[str, Any] = {"rng": [each.get_state() for each in self.generators]}
        if self.env.can_snapshot:
            state["snapshot"] = self.env.snapshot().to_dict()
        return state

    def save(self, processes: list[dict[str, Any]]) -> None:
        state: dict[str, Any] = {}
        for name, part in self.parts.items():
            state[name] = list(part) if isinstance(part, list) else part.state_dict()
        state["processes"] = processes
        state["run"] = self.run
        # Rename a complete file: checkpoint.pt is whole even if the process is killed.
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.path)

    def read(self) -> dict[str, Any]:
        try:
            state = torch.load(self.path, weights_only=True)
            return {name: state[name] for name in (*self.parts, "processes", "run")}
        except Exception as error:  # of many types, by what the file is
            fault = f"--resume must have a checkpoint that this script wrote, got {self.path}"
            raise ValueError(f"Checkpoint: {fault}. Remove it to start a new run.") from error

    def load(self, rank: int = 0) -> None:
        """Continues from the checkpoint, if there is one.

        The episodes of a simulator outside of PyTorch are not in the file, and new ones begin.
        """
        if not self.path.exists():
            return
        state = self.read()
        run = {name: value for name, value in state["run"].items() if name in self.run}
        others = dict(run.items() - self.run.items())
        if others:
            raise ValueError(f"Checkpoint: --resume must have the run's arguments, with {others}.")
        for name, part in self.parts.items():
            if isinstance(part, list):
                part[:] = state[name]
            else:
                part.load_state_dict(state[name])
        process = state["processes"][rank]
        for generator, rng in zip(self.generators, process["rng"]):
            generator.set_state(rng)
        if self.env.can_snapshot:
            self.env.restore(process["snapshot"])
        else:
            # Not the initial states of the first run again. EnvPool's seeds stay.
            seed = torch.randint(2**31, (1,)).item()
            self.env.reset(seed=None if self.run.get("backend") == "envpool" else seed)


class Scalars:
    """CleanRL's scalars in TensorBoard, from the iteration `first` on."""

    def __init__(self, args: Any, env: tw.Env, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.batch_size = args.num_envs * args.num_steps
        self.keys: dict[str, str] = {}
        for recorder in reversed(T.RecordEpisodeStatistics.of(env)):  # the innermost has the return
            self.keys |= recorder.keys
        # Purge the scalars that a killed run wrote after its last checkpoint.
        self.writer = SummaryWriter(args.out, purge_step=first * self.batch_size + 1)

    def write(
        self, point: Any, data: TensorDict, batch: dict[str, Tensor], stats: dict[str, Any]
    ) -> None:
        """Writes the figures of an iteration. `point` is that of the curve."""
        step, _, _, seconds = point
        scalars = {f"losses/{name}": value for name, value in stats.items()}
        scalars["charts/learning_rate"] = scalars.pop("losses/learning_rate")
        residual = (batch["ret"] - batch["value"]).var(correction=0)
        scalars["losses/explained_variance"] = 1 - residual / batch["ret"].var(correction=0)
        scalars["charts/SPS"] = int(step / seconds)
        done = data["next", "done"]
        if done.any():
            for name, key in self.keys.items():
                mean = data["next", key][done].float().mean()
                scalars[f"charts/{CHARTS.get(name, name)}"] = mean
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


# Of an MLP on HalfCheetah-v5, as in examples/guides/compiling.md.
COMPILED_SHARE = 0.6  # of the eager time of a run, which --compile leaves
COMPILATION = {"the first time": 50.0, "with Inductor's cache": 8.0}  # seconds


def compile_hint(seconds_left: float) -> str:
    """Whether --compile pays for the rest of an eager run over a simulator."""
    saved = (1 - COMPILED_SHARE) * seconds_left
    costs = ", ".join([f"{seconds:.0f} s {when}" for when, seconds in COMPILATION.items()])
    times = [when for when, seconds in COMPILATION.items() if saved > seconds]
    advice = f"pays {times[0]}" if times else "does not pay"
    return (
        f"{seconds_left:.0f} s are left, of which --compile saves up to {saved:.0f} s (less where "
        f"the envs take most). It takes {costs}: it {advice}."
    )


class Output:
    """The checkpoints, scalars and hint of ppo.py in one process, as its flags ask for them."""

    def __init__(self, args: Any, env: tw.Env, parts: dict[str, Any]) -> None:
        self.args = args
        self.curve = parts["curve"]
        is_flat = len(env.single_observation_space.shape or ()) < 2
        on_cpu = env.host_stepped and args.device == "cpu"
        self.gives_hint = on_cpu and is_flat and not args.compile
        self.checkpoint = Checkpoint(args, env, args.out, parts)
        if args.resume:
            self.checkpoint.load()
        self.scalars = Scalars(args, env, len(self.curve)) if args.tensorboard else None

    def write(
        self, data: TensorDict, batch: dict[str, Tensor], stats: dict[str, Any], is_last: bool
    ) -> None:
        if self.gives_hint and len(self.curve) == 2:  # the first one may have imported
            first, second = self.curve
            seconds_per_step = (second[-1] - first[-1]) / (second[0] - first[0])
            tqdm.write(compile_hint(seconds_per_step * (self.args.total_timesteps - second[0])))
        if self.scalars is not None:
            self.scalars.write(self.curve[-1], data, batch, stats)
        if self.args.resume and (is_last or len(self.curve) % self.args.save_every == 0):
            self.checkpoint.save([self.checkpoint.process_state()])
