"""torchwrap's side: stacks of transforms on each env, eager, compiled, or in compiled rollouts."""

import importlib
import importlib.util
import itertools
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

from . import atari as games
from . import loops, script
from .bridge import FOUR
from .measure import ROOT
from .worker import Timed, build, nothing, turn

# Transforms that are measured with arguments.
ARGUMENTS: dict[str, Callable[[], T.Transform]] = {
    "ClipObservation": lambda: T.ClipObservation(-10, 10),
    "ClipReward": lambda: T.ClipReward(-10, 10),
    "FrameStackObservation": lambda: T.FrameStackObservation(4),
    "ResizeObservation": lambda: T.ResizeObservation((84, 84)),
}


def scripted(
    num_envs: int,
    transforms: Sequence[str] | None = None,
    way: str = "eager",
    device: str = "cpu",
) -> Timed:
    """A step of a ScriptedEnv. Without `transforms` it is bare, with [] in a TransformedEnv."""
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
        generator = torch.Generator().manual_seed(0)
        actions = torch.randint(2, (16, num_envs), generator=generator).to(device)
        return _stepper(env, env.reset(seed=0), actions, way)
    env = _build(env, transforms, "eager")
    collect = tw.Collector(env, None, num_steps)
    if way == "compiled":
        collect = tw.compile(collect)
    env.reset(seed=0)
    moved = _bytes(collect())
    moved += _state(env, collect)
    return Timed(collect, num_steps, wait(device), moved // num_steps)


def images(num_envs: int, way: str = "eager", device: str = "cpu") -> Timed:
    """A step of a ScriptedEnv with frames of Atari's size, four of which become an observation."""
    space = Box(0, 255, (210, 160, 3), np.uint8)
    env = ScriptedEnv(num_envs, observation_space=space).to(device)
    env = _build(env, ["GrayscaleObservation", "ResizeObservation", "FrameStackObservation"], way)
    return _stepper(env, env.reset(seed=0), [env.sample_action()], way)


def profile(name: str, arguments: dict[str, Any], calls: int = 20) -> dict[str, Any]:
    """Where the time of a `Timed` goes, per call: the host's, and that of the device by kernel."""
    timed, _ = build(globals()[name], arguments)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    us = turn(timed, 0.2) * timed.steps
    start = time.perf_counter()
    for _ in range(calls):
        timed.call()
    host_us = (time.perf_counter() - start) / calls * 1e6
    timed.wait()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            timed.call()
        timed.wait()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    kernels: Counter[str] = Counter()
    for event in events:
        kernels[event.name] += event.device_time / calls
    return {
        "us": us,
        "host_us": host_us,
        "busy_us": kernels.total(),
        "launches": len(events) / calls,
        "kernels": dict(kernels.most_common()),
    }


def half_cheetah(
    mode: str, transforms: Sequence[str] | None, way: str = "eager", num_envs: int = 8
) -> Timed:
    """A step of Gymnasium's HalfCheetah-v5, "sync" or "async"."""
    env = tw.make("HalfCheetah-v5", num_envs, backend="gymnasium", vectorization_mode=mode)
    env = _build(env, transforms, way)
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(16, num_envs, 6, generator=generator) * 3 - 1.5
    return _stepper(env, env.reset(seed=0), actions, way)


def vec_env(space: str, num_envs: int, way: str) -> Timed:
    """A step of `to_sb3` over envs that do nothing: "plain", or normalized as `VecNormalize`."""
    transforms: list[Any] = [T.RecordEpisodeStatistics()]  # as Monitor
    if way != "plain":
        vector = [T.NormalizeObservation(), T.ClipObservation(-10, 10)]
        normalizers = {"Box": vector, "Dict": [T.ObservationKeys({"a": vector})], "image": []}
        transforms += [*normalizers[space], T.NormalizeReward(), T.ClipReward(-10, 10)]
    env: Any = tw.TransformedEnv(tw.make(script.STILL, num_envs, space=space), *transforms)
    if way == "compiled":
        tw.compile(env)
    venv = importlib.import_module("torchwrap.interop.sb3").to_sb3(env)
    actions = script.actions(num_envs).numpy()
    venv.reset()
    return Timed(lambda: venv.step(actions), clock=time.process_time)


def learn(id: str, seed: int, num_steps: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """The metrics and the learning curve of a run of examples/ppo.py."""
    command = [sys.executable, "examples/ppo.py", "--env-id", id, "--seed", str(seed)]
    command += ["--total-timesteps", str(num_steps), *flags]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "--out", folder], check=True, capture_output=True)
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
        curve = torch.load(Path(folder) / "agent.pt", weights_only=True)["curve"]
    names = ("env_steps", "wall_seconds", "final_mean_return", "eval_mean_return")
    return {**{name: metrics[name] for name in names}, "curve": curve}


def ppo(device: str, compiled: bool, num_envs: int, total_timesteps: int) -> dict[str, Any]:
    """The metrics of examples/ppo.py on CartPole-v1."""
    flags = {"compile": compiled, "num_envs": num_envs, "total_timesteps": total_timesteps}
    return example("ppo", device=device, **flags)


def cleanrl(num_envs: int, way: str) -> dict[str, float]:
    """A step of cleanrl_style.py over `to_gymnasium`."""
    envs = tw.to_gymnasium(_half_cheetah(num_envs, FOUR, way))
    envs.close = lambda: None  # between the warm-up and the rest, which compile once
    return loops.cleanrl(num_envs, lambda args: envs)


def sb3_loop(num_envs: int, way: str) -> dict[str, float]:
    """A step of SB3's PPO over `to_sb3`."""
    to_sb3 = importlib.import_module("torchwrap.interop.sb3").to_sb3
    # SB3 clips actions itself.
    return loops.sb3(num_envs, to_sb3(_half_cheetah(num_envs, FOUR[1:], way)))


def _half_cheetah(num_envs: int, transforms: Sequence[str], way: str) -> tw.Env:
    return _build(tw.make(loops.ENV_ID, num_envs, backend="gymnasium"), transforms, way)


def ppo_loop(num_envs: int, compiled: bool) -> dict[str, float]:
    """A step of examples/ppo.py with CleanRL's networks and loss, without its first iteration."""
    flags = dict(env_id=loops.ENV_ID, num_envs=num_envs, compile=compiled)
    flags |= dict(hidden_size=64, clip_vloss=True)
    flags["total_timesteps"] = (1 + loops.ITERATIONS) * loops.BATCH_SIZE
    with mock.patch("time.perf_counter", time.process_time):
        metrics = example("ppo", **flags)
    return {"whole_us": num_envs * 1e6 / metrics["steps_per_second_steady"]}


def arm_step(num_envs: int, way: str) -> Timed:
    """A step of examples/robot.py over `to_rsl_rl`."""
    return importlib.import_module(".rsl_rl_peer", __package__).timed(_arm(num_envs, way))


def arm_loop(num_envs: int, way: str) -> dict[str, float]:
    """An iteration of examples/robot.py, with our PPO for rsl_rl."""
    peer = importlib.import_module(".rsl_rl_peer", __package__)
    return peer.loop(_arm(num_envs, way), "torchwrap.interop.rsl_rl:PPO")


def _arm(num_envs: int, way: str) -> Any:
    torch.manual_seed(0)
    env = _example("robot").make_env(num_envs)
    if way == "compiled":
        tw.compile(env)
    return importlib.import_module("torchwrap.interop.rsl_rl").to_rsl_rl(env, seed=0)


def atari(num_envs: int, backend: str, way: str) -> Timed:
    """A step of the games of examples/ppo_atari.py, with random actions."""
    args = types.SimpleNamespace(env_id=games.GAME, backend=backend, device="cpu")
    env = _build(_example("atari_game").make_training(args, num_envs, seed=0), None, way)
    actions = np.random.default_rng(0).integers(4, size=(64, num_envs))
    turns = itertools.cycle(torch.from_numpy(actions))
    env.reset(seed=0)
    return Timed(lambda: env.step(next(turns)), clock=time.process_time)


def atari_loop(script: str, backend: str) -> dict[str, float]:
    """A step of a game in examples/ppo_atari.py or dqn_atari.py, with the network of SB3."""
    flags: dict[str, Any] = dict(env_id=games.GAME, backend=backend, num_envs=games.LOOP_SIZE)
    flags |= dict(network="nature", bfloat16=False, eval_games=1)
    flags |= games.PPO if script == "ppo" else games.DQN

    def learn(num_steps: int) -> dict[str, Any]:
        with mock.patch("time.perf_counter", time.process_time):
            return example(f"{script}_atari", total_timesteps=num_steps, **flags)

    num_steps = games.NUM_STEPS[script]
    if script == "ppo":  # without the first iteration
        return {"whole_us": 1e6 / learn(2 * num_steps)["steps_per_second_steady"]}
    learn(num_steps)
    return {"whole_us": learn(num_steps)["wall_seconds"] * 1e6 / num_steps}


def example(script: str, **flags: Any) -> dict[str, Any]:
    """The metrics of a script in examples."""
    module = _example(script)
    with tempfile.TemporaryDirectory() as folder:
        return module.main(module.Args(out=Path(folder), **flags))


def _example(name: str) -> types.ModuleType:
    """The module of an example. It does without tyro, its parser."""
    if "tyro" not in sys.modules and importlib.util.find_spec("tyro") is None:
        sys.modules["tyro"] = types.ModuleType("tyro")
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(name)


class Actor(torch.nn.Module):
    """The policy of rollouts on every side: the actor of examples/ppo.py, which samples."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(inputs, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, outputs),
        )

    def forward(self, observation: Tensor) -> Tensor:
        logits = self.layers(observation)
        return torch.distributions.Categorical(logits=logits, validate_args=False).sample()


def collector(num_envs: int, num_steps: int, way: str = "eager", device: str = "cpu") -> Timed:
    """A rollout of CartPole-v1 with episode statistics and `Actor`, as in examples/ppo.py."""
    torch.manual_seed(0)
    env = tw.make("CartPole-v1", num_envs, device=device)
    env = _build(env, ["RecordEpisodeStatistics"], "eager")
    actor = Actor(4, 2).to(device)

    def policy(td: TensorDict) -> TensorDict:
        return td.set("action", actor(td["observation"]))

    collect = tw.Collector(env, policy, num_steps)
    if way == "compiled":
        collect = tw.compile(collect)
    env.reset(seed=0)
    collect()
    return Timed(collect, num_steps, wait(device))


def floor(device: str = "cpu", seconds: float = 0.2, num_bytes: int = 2**30) -> dict[str, Any]:
    """The device, the bandwidth of a copy, and the time of a tiny kernel: launched, replayed."""
    facts = {
        "name": platform.processor() or "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    big_copy = copy(num_bytes, device)
    scalar = torch.zeros(1, device=device)
    timed = {"copy_us": big_copy, "launch_us": Timed(lambda: scalar.add_(1), 1, wait(device))}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["name"] = properties.name
        facts["cuda"] = torch.version.cuda
        facts["memory"] = properties.total_memory
        smi = shutil.which("nvidia-smi")
        if smi:
            command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            facts["driver"] = run.stdout.strip()
        scalar.add_(1)  # loads the kernel before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scalar.add_(1)
        timed["replay_us"] = Timed(graph.replay, 1, wait(device))
    for name, each in timed.items():
        facts[name] = min(turn(each, seconds) for _ in range(5))
    facts["copy_gigabytes_per_second"] = big_copy.bytes / facts["copy_us"] / 1e3
    return facts


def copy(num_bytes: int = 2**28, device: str = "cpu") -> Timed:
    """Memory bandwidth: a copy of a large tensor."""
    memory = torch.arange(num_bytes // 4, device=device).view(torch.uint8)
    source, target = memory.view(2, num_bytes)
    return Timed(lambda: target.copy_(source), 1, wait(device), 2 * num_bytes)


def capabilities() -> dict[str, str]:
    """The instruction sets of PyTorch, Inductor, its C++ compiler and NumPy in this process."""
    march = getattr(config.cpp, "march", None)  # PyTorch 2.11 takes the processor's own
    return {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "inductor": str(pick_vec_isa()),
        "compiler": march or "native",
        "numpy": _numpy_isa(),
    }


def _numpy_isa() -> str:
    """The instruction set of NumPy's exp of float32."""
    try:
        from numpy.lib import introspect
    except ImportError:  # NumPy 1, where exp has versions for these
        from numpy.core._multiarray_umath import __cpu_features__ as features

        for name in ("AVX512_SKX", "AVX512F", "AVX2"):
            if features.get(name):
                return name
        return "baseline"
    info = introspect.opt_func_info(func_name="^exp$", signature="float32")
    (version,) = info["exp"].values()
    return version["current"]


def _build(env: tw.Env, transforms: Sequence[str] | None, way: str) -> tw.Env:
    if transforms is not None:
        makers = [ARGUMENTS.get(name) or getattr(T, name) for name in transforms]
        env = tw.TransformedEnv(env, T.Compose([make() for make in makers]))
    return tw.compile(env) if way == "compiled" else env


def _stepper(env: tw.Env, td: TensorDict, actions: Sequence[Tensor] | Tensor, way: str) -> Timed:
    """Steps with the actions in turns. "torch.compile" compiles a user's function of a step."""
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

    # At least, the action is read, and the results are written.
    results = _bytes(call()["next"]) + _bytes(td)
    moved = _state(env, call) + _bytes(actions[0]) + results
    return Timed(call, 1, wait(env.device), moved)


def _state(env: tw.Env, call: Callable[[], Any]) -> int:
    """Bytes of the env's state: read at each call, and written if it changes."""
    before = {name: buffer.clone() for name, buffer in env.named_buffers()}
    for _ in range(10):
        call()
    total = 0
    for name, buffer in env.named_buffers():
        accesses = 1 if buffer.equal(before[name]) else 2
        total += accesses * _bytes(buffer)
    return total


def _bytes(value: Tensor | TensorDict) -> int:
    leaves: Any = [value] if isinstance(value, Tensor) else value.values(True, True)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def wait(device: Any) -> Callable[[], None]:
    """The `wait` of work on a device."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else nothing
