"""What the scripts share whose training is one graph: grids, parameters, compiling and output.

A grid has a training for each seed and each setting, the product of all values of the
hyperparameters. `torch.vmap` maps the functions of a training over the grid.
"""

from __future__ import annotations

import csv
import gc
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from ppo import Flags
from ppo_parts import NormalizeReward
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T

OPTIONS = {
    "cpu": {
        "cpp.use_decompose_tanh": True,  # by exp: takes a third of the time
        "cpp.vec_isa_ok": True,  # saves probes of g++
        # Loops over kernels in C++ take a tenth less, and compile without optimization, apart from
        # the kernels, and no headers ahead.
        "cpp_wrapper": True,
        "cpp_wrapper_build_separate": True,
        "cpp_cache_precompile_headers": False,
        "inplace_buffers": False,  # else a result of a scan may be declared twice
    },
    "cuda": {"score_fusion_memory_threshold": 256},  # for Triton before 3.8 (its issue 8257)
}
# Graphs with a scan are kept on disk, too.
CACHED = {"torch.ops.higher_order.scan": torch.__version__}

Tensors = dict[str, Any]


@dataclass
class GraphFlags(Flags):
    """Base of flags. A tuple of floats is a hyperparameter: each of its values is a setting."""

    env_id: str = "CartPole-v1"
    seeds: tuple[int, ...] = (1,)
    out: Path = Path("runs/graph")  # gets what `Run.learn` writes
    device: str = "cpu"
    backend: str = "inductor"  # of torch.compile; "none" for none
    total_timesteps: int = 250_000  # of each training
    num_envs: int = 64
    num_steps: int = 32  # of each env in an iteration
    resume: bool = False  # from the checkpoint in --out, if there is one
    save_every: int = 100  # iterations between two checkpoints
    eval_episodes: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in {**dict.fromkeys(hyperparameters(self), float), "seeds": int}.items():
            setattr(self, name, numbers(name, getattr(self, name), kind))


def hyperparameters(args: GraphFlags) -> list[str]:
    return [each.name for each in fields(args) if each.type == "tuple[float, ...]"]


def numbers(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """A tuple of numbers, of a number, a string or a list of them."""
    values = values if isinstance(values, list | tuple) else [values]
    try:
        found = tuple(map(kind, values))
    except ValueError:
        found = ()
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{name} must be different numbers, at least one, got {values}.")
    return found


class Grid:
    """The trainings: each setting with each seed. A grid of one training is not mapped."""

    def __init__(self, args: GraphFlags) -> None:
        choices = {name: getattr(args, name) for name in hyperparameters(args)}
        settings = [dict(zip(choices, each)) for each in itertools.product(*choices.values())]
        varied = [name for name, values in choices.items() if len(values) > 1]
        self.settings = []  # their names
        self.trainings: dict[str, dict[str, Any]] = {}  # by name: hyperparameters and seed
        for setting in settings:
            parts = [f"{name}={setting[name]:g}" for name in varied]
            self.settings.append(",".join(parts))
            for seed in args.seeds:
                name = ",".join([*parts, f"seed={seed}"])
                self.trainings[name] = {**setting, "seed": seed}
        self.is_mapped = len(self.trainings) > 1

    def vmap(self, function: Callable, in_dims: Any = 0, out_dims: Any = 0) -> Callable:
        return torch.vmap(function, in_dims, out_dims) if self.is_mapped else function

    def stack(self, values: list[Any], dim: int = 0) -> Any:
        """Values by training as one, of tensors, or TensorDicts, or dicts of them."""
        if isinstance(values[0], dict):
            return {key: self.stack([each[key] for each in values], dim) for key in values[0]}
        return torch.stack(values, dim) if self.is_mapped else values[0]

    def unstack(self, value: Any) -> list[Any]:
        return list(value.unbind(0)) if self.is_mapped else [value]

    def hyper(self, args: GraphFlags) -> Tensors:
        """The hyperparameters of the trainings."""
        values = {}
        for name in hyperparameters(args):
            each = [torch.tensor(training[name]) for training in self.trainings.values()]
            values[name] = self.stack(each).to(args.device)
        return values


class VectorModule(nn.Module):
    """A module that is also a function of a vector of all its parameters."""

    def vector(self) -> Tensor:
        self.shapes = {name: value.shape for name, value in self.named_parameters()}
        return nn.utils.parameters_to_vector(self.parameters()).detach()

    def apply_vector(self, vector: Tensor, *inputs: Tensor) -> Any:
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        params = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts)}
        return functional_call(self, params, inputs, tie_weights=False)


def new_adam(params: Tensor) -> Tensors:
    zeros = torch.zeros_like(params)
    return {"params": params, "mean": zeros, "square": zeros.clone(), "count": zeros.new_zeros(())}


def adam_step(adam: Tensors, grad: Tensor, learning_rate: Tensor, max_grad_norm: Tensor) -> Tensors:
    """Adam with epsilon 1e-5, of clipped gradients."""
    grad = grad * (max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1)
    count = adam["count"] + 1
    mean = 0.9 * adam["mean"] + 0.1 * grad
    square = 0.999 * adam["square"] + 0.001 * grad.square()
    direction = mean / (1 - 0.9**count) / ((square / (1 - 0.999**count)).sqrt() + 1e-5)
    params = adam["params"] - learning_rate * direction
    return {"params": params, "mean": mean, "square": square, "count": count}


def recorded_step(pure: Any) -> Callable[..., tuple[TensorDict, Tensors]]:
    """A function of a state and actions: the next state, and what an update reads of the step."""
    return_key = T.RecordEpisodeStatistics.of(pure.env)[0].keys["return"]

    def step(state: TensorDict, action: Any) -> tuple[TensorDict, Tensors]:
        state, transition, _ = pure.step(state, action)
        successor = transition["next"]
        kept = {key: transition[key] for key in ("observation", "action")}
        kept["successor"] = successor["observation"]
        kept["return"] = successor[return_key].squeeze(-1)
        for key in ("reward", "terminated", "done"):
            kept[key] = successor[key].squeeze(-1)
        return state, kept

    return step


def mean_return(rollout: Tensors) -> Tensor:
    """By training, of the episodes that end in a rollout; NaN if none does."""
    returns = torch.where(rollout["done"], rollout["return"], torch.nan)
    return returns.nanmean((0, -1))


def new_trainings(grid: Grid, pure: Any, make: Callable) -> tuple[Any, Tensors]:
    """An agent that `make` returns, and the states of the trainings, each with its own."""
    states = []
    for training in grid.trainings.values():
        torch.manual_seed(training["seed"])
        agent = make().to(pure.env.device)
        for module in pure.env.modules():
            if isinstance(module, NormalizeReward):
                module.gamma.fill_(training["gamma"])
        adam = new_adam(agent.vector())
        states.append({"env": pure.init(training["seed"])[0], "adam": adam})
    return agent, grid.stack(states)


def compiled(iteration: Callable, args: GraphFlags) -> Callable:
    """An iteration as one graph; on a GPU, also as one launch."""
    device = torch.device(args.device).type
    if args.backend != "none":
        options = None
        if args.backend == "inductor":
            options = {**OPTIONS[device], "unsafe_marked_cacheable_functions": CACHED}
            known = torch._inductor.list_options()
            options = {name: value for name, value in options.items() if name in known}
        # Inductor fails on some scans with symbolic sizes, as those of another grid would be.
        whole = dict(fullgraph=True, dynamic=False, backend=args.backend, options=options)
        gc.set_threshold(100_000)  # else collections are a tenth of compiling
        iteration = torch.compile(iteration, **whole)
    return CudaGraphModule(iteration, warmup=3) if device == "cuda" else iteration


class Run:
    """The loop over iterations, and its files.

    Args:
        state: of all trainings: "env" is the state of `tw.pure`, "adam" that of `adam_step`.
        draw: the random numbers of an iteration of one training, from a generator; the trainings
            are their second dimension.
    """

    def __init__(self, args: GraphFlags, grid: Grid, state: Tensors, draw: Callable) -> None:
        self.args = args
        self.steps_per_iteration = args.num_envs * args.num_steps
        self.grid = grid
        self.state = state
        self.draw = draw
        self.curve: list[Tensor] = []  # by iteration, the mean returns of the trainings
        self.generators = []
        for training in grid.trainings.values():
            generator = torch.Generator(args.device).manual_seed(training["seed"])
            self.generators.append(generator)
        args.out.mkdir(parents=True, exist_ok=True)
        self.path = args.out / "checkpoint.pt"
        self.flags = {name: str(value) for name, value in vars(args).items()}
        for name in ("out", "backend", "resume", "save_every", "eval_episodes"):
            self.flags.pop(name)
        if args.resume and self.path.exists():
            self.load()

    def train(self, iterate: Callable) -> dict[str, float]:
        """Calls `iterate(state, hyper, progress, *random)`, which returns a state and figures."""
        args = self.args
        num_iterations = -(-args.total_timesteps // self.steps_per_iteration)
        hyper = self.grid.hyper(args)
        todo = range(len(self.curve), num_iterations)
        start = now = time.perf_counter()
        for index in tqdm(todo, desc="the first one compiles"):
            progress = torch.tensor(index / num_iterations).to(args.device)
            self.state, figures = iterate(self.state, hyper, progress, *self.random())
            self.curve.append(figures["return"].reshape(-1))
            if index == todo[0]:
                now = time.perf_counter()
            if (index + 1) % args.save_every == 0:
                self.save()
        self.save()  # waits for the device
        seconds = time.perf_counter() - now
        steps = len(todo[1:]) * self.steps_per_iteration * len(self.grid.trainings)
        return {"steps_per_second": steps / seconds, "first_iteration_seconds": now - start}

    def random(self) -> list[Tensor]:
        drawn = [self.draw(generator) for generator in self.generators]
        return [self.grid.stack(each, 1) for each in zip(*drawn)]

    def save(self) -> None:
        saved = {"flags": self.flags, "curve": self.curve, **self.state}
        saved["env"] = saved["env"].to_dict()
        saved["generators"] = [generator.get_state() for generator in self.generators]
        part = self.path.with_suffix(".part")
        torch.save(saved, part)
        part.replace(self.path)  # whole even if the process is killed

    def load(self) -> None:
        saved = torch.load(self.path, map_location=self.args.device, weights_only=True)
        others = dict(saved.pop("flags").items() - self.flags.items())
        if others:
            raise ValueError(f"--resume must have the arguments of the run, with {others}.")
        for generator, state in zip(self.generators, saved.pop("generators")):
            generator.set_state(state.cpu())
        self.curve = saved.pop("curve")
        env = self.state["env"].update(saved["env"])
        self.state = {**saved, "env": env}

    def learn(
        self, iteration: Callable, env: tw.Env, agent: VectorModule, policy: Callable
    ) -> dict[str, Any]:
        """Trains, evaluates each training, and writes its agent, metrics.json and the curves."""
        args = self.args
        figures = self.train(compiled(iteration, args))
        self.write_curves(args.num_envs * (env.signature.max_episode_steps or 0))
        (args.out / "agents").mkdir(exist_ok=True)
        states = self.grid.unstack(self.state["env"])
        vectors = self.grid.unstack(self.state["adam"]["params"])
        returns = {}
        for name, state, vector in zip(self.grid.trainings, states, vectors):
            nn.utils.vector_to_parameters(vector, agent.parameters())
            saved = {"agent": agent.state_dict(), "env": state.to_dict()}
            torch.save(saved, args.out / "agents" / f"{name}.pt")
            env.restore(state)
            seed = self.grid.trainings[name]["seed"]
            torch.manual_seed(seed)
            with torch.no_grad():
                episodes = tw.evaluate(env, policy, args.eval_episodes, seed=seed + 1_000_000)
            returns[name] = episodes["episode_return"].mean().item()
        metrics = {"eval_mean_return": returns, **figures}
        text = json.dumps(metrics, indent=2)
        (args.out / "metrics.json").write_text(text + "\n")
        print(f"{text}\nresults in {args.out}")
        return metrics

    def write_curves(self, num_biased: int) -> None:
        """Mean returns of the episodes that end in an iteration: curves.csv, learning_curve.png.

        Args:
            num_biased: the steps before any long episode has ended.
        """
        args = self.args
        returns = torch.stack(self.curve).cpu()
        steps = self.steps_per_iteration * torch.arange(1, len(returns) + 1)
        with open(args.out / "curves.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["env_steps", *self.grid.trainings])
            writer.writerows([step, *row] for step, row in zip(steps.tolist(), returns.tolist()))
        axes = Figure(figsize=(7, 4), layout="constrained").subplots()
        by_setting = returns.view(len(returns), len(self.grid.settings), -1)
        for name, curve in zip(self.grid.settings, by_setting.unbind(1)):
            known = ~curve.isnan().any(1)  # in the other iterations, a seed ended no episode
            curve = curve[known]
            axes.plot(steps[known], curve.mean(1), label=name)
            axes.fill_between(steps[known], curve.amin(1), curve.amax(1), alpha=0.2)
        if len(self.grid.settings) > 1:
            axes.legend()
        axes.axvspan(0, min(num_biased, args.total_timesteps), color="gray", alpha=0.15)
        title = f"{args.env_id}: mean and range of {len(args.seeds)} seeds"
        xlabel = "env steps; gray: no long episode has ended yet"
        axes.set(title=title, xlabel=xlabel, ylabel="return")
        axes.figure.savefig(args.out / "learning_curve.png")
