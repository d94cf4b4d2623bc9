"""The output of the PPO scripts: curve, metrics, TensorBoard; checkpoints of all scripts."""

from __future__ import annotations

import json
import time
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

Point = tuple[int, float, float, float]  # env steps, mean return, seconds, standard deviation


def find_statistics(env: tw.Env) -> T.RecordEpisodeStatistics:
    return next(part for part in env.modules() if isinstance(part, T.RecordEpisodeStatistics))


def results_folder(args: Any) -> Path:
    name = args.env_id.rpartition(":")[2].replace("/", "-")
    return args.out or Path("runs") / f"ppo-{name}"


class Log:
    def __init__(self, args: Any, env: tw.Env, start_time: float) -> None:
        self.args = args
        self.out = results_folder(args)
        self.out.mkdir(parents=True, exist_ok=True)
        self.statistics = find_statistics(env)
        limit = env.signature.max_episode_steps
        self.num_biased = 0 if limit is None else limit * args.num_envs
        self.start_time = start_time
        self.batch_size = args.num_envs * args.num_steps
        self.num_iterations = -(-args.total_timesteps // self.batch_size)
        self.first_iteration = 0
        self.curve: list[Point] = []
        self.reached: tuple[int, float] | None = None
        self.compile_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "curve": self.curve,
            "reached": self.reached,
            "seconds": self.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first_iteration = state["iteration"]
        self.curve = state["curve"]
        self.reached = state["reached"]
        self.start_time -= state["seconds"]

    def start(self) -> None:
        first_step = self.first_iteration * self.batch_size
        total = self.num_iterations * self.batch_size
        self.progress = tqdm(total=total, initial=first_step, unit=" steps", unit_scale=True)
        self.writer = None
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Purge the scalars that a killed run wrote after its last checkpoint.
            self.writer = SummaryWriter(self.out, purge_step=first_step + 1)
        self.loop_start = time.perf_counter()
        self.steady_start = self.loop_start

    def seconds(self) -> float:
        return time.perf_counter() - self.start_time

    def is_save(self, iteration: int) -> bool:
        number = iteration + 1
        return number % self.args.save_every == 0 or number == self.num_iterations

    def record(self, iteration: int, returns: Tensor) -> None:
        """Adds the mean return of the latest episodes to the curve."""
        if iteration == self.first_iteration:
            self.steady_start = time.perf_counter()
        self.iteration = iteration + 1
        self.progress.update(self.batch_size)
        if len(returns) == 0:
            return
        step = (iteration + 1) * self.batch_size
        mean = returns.double().mean().item()
        deviation = returns.double().std(correction=0).item()
        self.curve.append((step, mean, self.seconds(), deviation))
        self.progress.set_postfix({"return": f"{mean:.1f}"}, refresh=False)
        target = self.args.target_return
        if target is not None and self.reached is None and len(returns) >= 100 and mean >= target:
            self.reached = (step, self.seconds())

    def write_scalars(
        self,
        iteration: int,
        data: TensorDict,
        batch: dict[str, Tensor],
        stats: dict[str, Tensor],
        learning_rate: float,
    ) -> None:
        if self.writer is None:
            return
        step = (iteration + 1) * self.batch_size
        scalars = {f"losses/{name}": value for name, value in stats.items()}
        residual = (batch["ret"] - batch["value"]).var(correction=0)
        scalars["losses/explained_variance"] = 1 - residual / batch["ret"].var(correction=0)
        scalars["charts/learning_rate"] = learning_rate
        scalars["charts/SPS"] = int(step / self.seconds())
        done = data["next", "done"]
        if done.any():
            for name, key in self.statistics.keys.items():
                mean = data["next", key][done].float().mean()
                scalars[f"charts/{CHARTS.get(name, name)}"] = mean
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        if self.is_save(iteration):
            self.writer.flush()

    def close(self, processes: int = 1) -> dict[str, Any]:
        """Ends the measurement, and returns the figures of the training."""
        wall_seconds = self.seconds()
        steady_seconds = time.perf_counter() - self.steady_start
        self.progress.close()
        if self.writer is not None:
            self.writer.close()
        args = self.args
        env_steps = self.num_iterations * self.batch_size
        steady_steps = env_steps - (self.first_iteration + 1) * self.batch_size
        steady = steady_steps / steady_seconds if steady_steps > 0 else None
        if args.compile:  # the first iteration compiles the update
            self.compile_seconds += self.steady_start - self.loop_start
            if steady:
                self.compile_seconds -= self.batch_size / steady
        steps_to_target, seconds_to_target = self.reached or (None, None)
        metrics = {
            "env": args.env_id,
            "backend": args.backend,
            "num_envs": args.num_envs,
            "processes": processes,
            "device": args.device,
            "seed": args.seed,
            "env_steps": env_steps,
            "wall_seconds": wall_seconds,
            "steps_per_second": env_steps / wall_seconds,
            "steps_per_second_steady": steady,
            "compile_seconds": self.compile_seconds,
            "target_return": args.target_return,
            "env_steps_to_target": steps_to_target,
            "seconds_to_target": seconds_to_target,
            "final_mean_return": self.curve[-1][1] if self.curve else None,
        }
        for name, queue in self.statistics.metric_queues.items():
            if len(queue) > 0:
                metrics[f"final_mean_{name}"] = queue.mean().item()
        return metrics

    def write(self, metrics: dict[str, Any]) -> None:
        text = json.dumps(metrics, indent=2)
        (self.out / "metrics.json").write_text(text + "\n")
        print(text)
        if self.curve:
            path = self.out / "learning_curve.png"
            plot(path, self.args, self.curve, num_biased=self.num_biased)
        print(f"results in {self.out}")


class Checkpoint:
    """checkpoint.pt holds all that a run needs to continue.

    Args:
        parts: what has a `state_dict()`, by name; the env is added.
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
        for name in ("out", "resume", "save_every", "tensorboard"):
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
        state: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()}
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
        others = dict(state["run"].items() - self.run.items())
        if others:
            raise ValueError(f"Checkpoint: --resume must have the run's arguments, with {others}.")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        process = state["processes"][rank]
        for generator, rng in zip(self.generators, process["rng"]):
            generator.set_state(rng)
        if self.env.can_snapshot:
            self.env.restore(process["snapshot"])
        else:
            # Not the initial states of the first run again.
            self.env.reset(seed=torch.randint(2**31, (1,)).item())


def plot(
    path: Path,
    args: Any,
    curve: list[Point],
    window: int = 100,
    num_biased: int = 0,
) -> None:
    """Draws the curve, and marks the steps in which envs may not have ended an episode yet."""
    from matplotlib.figure import Figure  # imported here so that training does not wait for it

    steps, returns, seconds, deviations = torch.tensor(curve, dtype=torch.float64).unbind(1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    label = f"return of the latest {window} episodes, mean and standard deviation"
    axes.plot(steps, returns, label=label)
    axes.fill_between(steps, returns - deviations, returns + deviations, alpha=0.2)
    if steps[0] < num_biased:
        end = min(num_biased, steps[-1].item())
        label = "biased: long episodes have not ended yet"
        axes.axvspan(0, end, color="gray", alpha=0.15, linewidth=0, label=label)
    target = args.target_return
    # A distant target would flatten the curve.
    if target is not None and target <= 2 * returns.max() - returns.min():
        axes.axhline(target, color="gray", linestyle="--", label=f"target {target:g}")
    title = f"PPO on {args.env_id}, seed {args.seed}, {seconds[-1]:.0f} s"
    axes.set(title=title, xlabel="env steps", ylabel="return")
    axes.legend()
    figure.savefig(path, dpi=120)
