"""torchwrap's side: stacks of transforms by name on each env, eager, compiled, or in compiled rollouts."""

import importlib.util
import itertools
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa

import torchwrap as tw
from torchwrap import transforms as T

from . import script
from .measure import ROOT
from .worker import Timed, nothing, turn

# Steps of a rollout in one graph, up to a number of envs; one step with more envs than all of these. See `tw.compile`.
UNROLL = {256: 4, 1024: 2}
# Transforms that are measured with arguments.
ARGUMENTS: dict[str, Callable[[], T.Transform]] = {
    "ClipObservation": lambda: T.ClipObservation(-10, 10),
    "ClipReward": lambda: T.ClipReward(-10, 10),
    "FrameStackObservation": lambda: T.FrameStackObservation(4),
}


def scripted(
    num_envs: int, transforms: Sequence[str] | None = None, way: str = "eager", device: str = "cpu"
) -> Timed:
    """A step of a ScriptedEnv; `transforms` is None for the bare env, and [] for an empty TransformedEnv."""
    env = _build(script.scripted(num_envs, device), transforms, way)
    td = env.reset(seed=0)
    env.unwrapped.elapsed.copy_(script.elapsed(num_envs))
    return _stepper(env, td, [script.actions(num_envs).to(device)], way)


def cartpole(
    num_envs: int,
    transforms: Sequence[str] | None,
    way: str = "eager",
    num_steps: int | None = None,
    device: str = "cpu",
) -> Timed:
    """A step with precomputed actions, or a rollout of `num_steps` with random ones."""
    env = tw.make("CartPole-v1", num_envs, device=device)
    if num_steps is None:
        env = _build(env, transforms, way)
        return _stepper(
            env, env.reset(seed=0), [action.to(device) for action in _integers(2, num_envs)], way
        )
    env = _build(env, transforms, "eager")
    collect = tw.Collector(env, None, num_steps)
    if way == "compiled":
        collect = tw.compile(
            collect, unroll=next((steps for most, steps in UNROLL.items() if num_envs <= most), 1)
        )
    data, td = collect(env.reset(seed=0))

    def call() -> None:
        nonlocal data, td
        data, td = collect(td)

    return Timed(call, num_steps, wait(device), (_state(env, call) + _bytes(data)) // num_steps)


def half_cheetah(
    mode: str, transforms: Sequence[str] | None, way: str = "eager", num_envs: int = 8
) -> Timed:
    """A step of Gymnasium's HalfCheetah-v5, "sync" or "async"."""
    env = tw.make("HalfCheetah-v5", num_envs, backend="gymnasium", vectorization_mode=mode)
    env = _build(env, transforms, way)
    generator = torch.Generator().manual_seed(0)
    actions = [torch.rand(num_envs, 6, generator=generator) * 3 - 1.5 for _ in range(16)]
    return _stepper(env, env.reset(seed=0), actions, way)


def _integers(high: int, num_envs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(high, (num_envs,), generator=generator) for _ in range(16)]


def learn(id: str, seed: int, compiled: bool = False) -> dict[str, Any]:
    """The metrics of a run of examples/ppo.py, and its learning curve: env steps, mean return and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "--env-id",
            id,
            "--seed",
            str(seed),
            "--out",
            folder,
            *["--compile"] * compiled,
        ]
        subprocess.run(
            [sys.executable, "examples/ppo.py", *arguments], check=True, capture_output=True
        )
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
        curve = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)["curve"]
    kept = {
        name: metrics[name]
        for name in ("env_steps", "wall_seconds", "final_mean_return", "eval_mean_return")
    }
    return {**kept, "curve": curve}


def ppo(device: str, compiled: bool, num_envs: int, total_timesteps: int) -> dict[str, Any]:
    """The metrics of examples/ppo.py on CartPole-v1. It runs where its command line's parser, tyro, is not installed too."""
    if importlib.util.find_spec("tyro") is None:
        sys.modules["tyro"] = types.ModuleType("tyro")
    sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module("ppo")
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_envs": num_envs, "total_timesteps": total_timesteps}
        return module.main(module.Args(device=device, compile=compiled, out=Path(folder), **sizes))


class Actor(torch.nn.Module):
    """The policy of rollouts on every side: the actor of examples/ppo.py, which samples."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        linear, tanh = torch.nn.Linear, torch.nn.Tanh
        self.layers = torch.nn.Sequential(
            linear(inputs, 64), tanh(), linear(64, 64), tanh(), linear(64, outputs)
        )

    def forward(self, observation: Tensor) -> Tensor:
        return torch.distributions.Categorical(
            logits=self.layers(observation), validate_args=False
        ).sample()


def collector(num_envs: int, num_steps: int, way: str = "eager", device: str = "cpu") -> Timed:
    """A rollout of CartPole-v1 with episode statistics and `Actor`, as in examples/ppo.py."""
    torch.manual_seed(0)
    env = _build(
        tw.make("CartPole-v1", num_envs, device=device), ["RecordEpisodeStatistics"], "eager"
    )
    actor = Actor(4, 2).to(device)
    collect = tw.Collector(env, lambda td: td.set("action", actor(td["observation"])), num_steps)
    if way == "compiled":
        collect = tw.compile(collect)
    _, td = collect(env.reset(seed=0))

    def call() -> None:
        nonlocal td
        _, td = collect(td)

    return Timed(call, num_steps, wait(device))


def floor(device: str = "cpu", seconds: float = 0.2, num_bytes: int = 2**30) -> dict[str, Any]:
    """What the device is, the bandwidth of a big copy, and the time of a tiny kernel: launched, and replayed in a graph."""
    facts = {
        "name": platform.processor() or "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    timed, one = copy(num_bytes, device), torch.zeros(1, device=device)
    launches = {"launch_us": Timed(lambda: one.add_(1), 1, wait(device))}
    if torch.device(device).type == "cuda":
        properties, graph = torch.cuda.get_device_properties(device), torch.cuda.CUDAGraph()
        facts |= {
            "name": properties.name,
            "cuda": torch.version.cuda,
            "memory": properties.total_memory,
        }
        if smi := shutil.which("nvidia-smi"):
            command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
            facts["driver"] = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout.strip()
        one.add_(1)  # loads the kernel before the capture
        with torch.cuda.graph(graph):
            one.add_(1)
        launches["replay_us"] = Timed(graph.replay, 1, wait(device))
    measured = {
        name: min(turn(each, seconds) for _ in range(5))
        for name, each in {"copy_us": timed, **launches}.items()
    }
    return {
        **facts,
        **measured,
        "copy_gigabytes_per_second": timed.bytes / measured["copy_us"] / 1e3,
    }


def copy(num_bytes: int = 2**28, device: str = "cpu") -> Timed:
    """Memory bandwidth: a copy of a large tensor."""
    source, target = (
        torch.arange(num_bytes // 4, device=device).view(torch.uint8).view(2, num_bytes)
    )
    return Timed(lambda: target.copy_(source), 1, wait(device), 2 * num_bytes)


def capabilities() -> dict[str, str]:
    """The instruction sets that PyTorch, Inductor, its C++ compiler and NumPy use in this process."""
    march = getattr(
        config.cpp, "march", None
    )  # PyTorch 2.11 has none, and takes the processor's own
    return {
        **{"torch": torch.backends.cpu.get_cpu_capability(), "inductor": str(pick_vec_isa())},
        **{"compiler": march or "native", "numpy": _numpy_isa()},
    }


def _numpy_isa() -> str:
    """The instruction set of NumPy's exp of float32."""
    try:
        from numpy.lib import introspect
    except ImportError:  # NumPy 1, where exp has versions for these
        from numpy.core._multiarray_umath import __cpu_features__ as features

        return next(
            (name for name in ("AVX512_SKX", "AVX512F", "AVX2") if features.get(name)), "baseline"
        )
    (found,) = introspect.opt_func_info(func_name="^exp$", signature="float32")["exp"].values()
    return found["current"]


def _build(env: tw.Env, transforms: Sequence[str] | None, way: str) -> tw.Env:
    if transforms is not None:
        made = [
            ARGUMENTS[name]() if name in ARGUMENTS else getattr(T, name)() for name in transforms
        ]
        env = tw.TransformedEnv(env, T.Compose(made))
    return tw.compile(env) if way == "compiled" else env


def _stepper(env: tw.Env, td: TensorDict, actions: Sequence[Tensor], way: str) -> Timed:
    """Steps with the actions in turns. With "torch.compile", a function of an action and a step is compiled, as users do."""
    turns = itertools.cycle(actions)
    transition = None

    def step(td: TensorDict, action: Tensor) -> tuple[TensorDict, TensorDict]:
        return env.step(td.set("action", action))

    if way == "torch.compile":
        step = torch.compile(step, fullgraph=True)

    def call() -> TensorDict:
        nonlocal transition, td
        transition, td = step(td, next(turns))
        return transition

    # The minimum: the action is read, and the results are written.
    moved = _state(env, call) + _bytes(actions[0]) + _bytes(call()["next"]) + _bytes(td)
    return Timed(call, 1, wait(env.device), moved)


def _state(env: tw.Env, call: Callable[[], Any]) -> int:
    """Bytes of the env's state: read at each call, and written if it changes."""
    before = {name: buffer.clone() for name, buffer in env.named_buffers()}
    for _ in range(10):
        call()
    return sum(
        _bytes(buffer) * (1 if buffer.equal(before[name]) else 2)
        for name, buffer in env.named_buffers()
    )


def _bytes(value: Tensor | TensorDict) -> int:
    leaves: Any = [value] if isinstance(value, Tensor) else value.values(True, True)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def wait(device: Any) -> Callable[[], None]:
    """The `wait` of work on a device."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else nothing
