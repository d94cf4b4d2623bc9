"""torchwrap's side: stacks of transforms by name on each env, eager, compiled, or in compiled rollouts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from numpy.lib import introspect
from tensordict import TensorDict
from torch import Tensor
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.envs.cartpole import CartPole, State
from torchwrap.random import Key

from . import script
from .worker import Timed, resident

TRANSFORMS: dict[str, Callable[[], T.Transform]] = {
    "ClipAction": T.ClipAction,
    "RescaleAction": lambda: T.RescaleAction(-2, 2),
    "RecordEpisodeStatistics": T.RecordEpisodeStatistics,
    "TimeLimit": lambda: T.TimeLimit(1000),
    "NormalizeObservation": T.NormalizeObservation,
    "ClipObservation": lambda: T.ClipObservation(-10, 10),
    "AddWhiteNoise": lambda: T.AddWhiteNoise(0.1),
    "EvalWrapper": T.EvalWrapper,
    "ObstructView": lambda: T.ObstructView(0.1, 4),
    "StickyAction": lambda: T.StickyAction(0.25),
    "FrameStackObservation": lambda: T.FrameStackObservation(4),
    "FlattenObservation": T.FlattenObservation,
    "TransformObservation": lambda: T.TransformObservation(lambda observation: observation * 0.5),
    "DelayObservation": lambda: T.DelayObservation(4),
    "DiscretizeObservation": lambda: T.DiscretizeObservation(10, multidiscrete=True),
    "DtypeObservation": lambda: T.DtypeObservation("float64"),
    "FilterObservation": lambda: T.FilterObservation(["numbers"]),
    "GrayscaleObservation": T.GrayscaleObservation,
    "RescaleObservation": lambda: T.RescaleObservation(-1, 1),
    "ReshapeObservation": lambda: T.ReshapeObservation((1, script.OBSERVATION)),
    "ResizeObservation": lambda: T.ResizeObservation((18, 18)),
    "TimeAwareObservation": lambda: T.Compose([T.TimeLimit(1000), T.TimeAwareObservation()]),
    "DiscretizeAction": lambda: T.DiscretizeAction(3),
    "TransformAction": lambda: T.TransformAction(lambda action: action * 0.5),
    "ScaleReward": lambda: T.ScaleReward(0.1),
    "NormalizeReward": T.NormalizeReward,
    "ClipReward": lambda: T.ClipReward(-10, 10),
    "TransformReward": lambda: T.TransformReward(lambda reward: reward * 0.1),
}


def scripted(
    num_envs: int,
    transforms: Sequence[str] | None = None,
    compiled: bool = False,
    device: str = "cpu",
    see: str = "numbers",
) -> Timed:
    """A step of a ScriptedEnv; `transforms` is None for the bare env, and [] for an empty TransformedEnv."""
    env = _build(script.scripted(num_envs, device, see), transforms, compiled)
    td = env.reset(seed=0)
    env.unwrapped.elapsed.copy_(script.elapsed(num_envs))
    floats = isinstance(env.single_action_space, gymnasium.spaces.Box)
    return _stepper(env, td, [script.actions(num_envs).to(device) if floats else env.sample_action()])


def cartpole(
    num_envs: int,
    transforms: Sequence[str] | None,
    compiled: bool = False,
    num_steps: int | None = None,
    device: str = "cpu",
) -> Timed:
    """A step with precomputed actions, or a rollout of `num_steps` with random ones."""
    env = tw.make("CartPole-v1", num_envs, device=device)
    if num_steps is None:
        env = _build(env, transforms, compiled)
        generator = torch.Generator().manual_seed(0)
        actions = [torch.randint(2, (num_envs,), generator=generator).to(device) for _ in range(16)]
        return _stepper(env, env.reset(seed=0), actions)
    env = _build(env, transforms, compiled=False)
    collect = tw.Collector(env, None, num_steps)
    unroll = 4 if num_envs <= 256 else 2 if num_envs <= 1024 else 1  # see tw.compile
    if compiled:
        collect = tw.compile(collect, unroll=unroll)
    data, td = collect(env.reset(seed=0))

    def call() -> None:
        nonlocal data, td
        data, td = collect(td)

    return Timed(call, num_steps, _wait(device), (_state(env, call) + _bytes(data)) // num_steps)


def half_cheetah(mode: str, transforms: Sequence[str] | None, compiled: bool = False, num_envs: int = 8) -> Timed:
    """A step of Gymnasium's HalfCheetah-v5, "sync" or "async"."""
    env = tw.make("HalfCheetah-v5", num_envs, backend="gymnasium", vectorization_mode=mode)
    env = _build(env, transforms, compiled)
    generator = torch.Generator().manual_seed(0)
    actions = [torch.rand(num_envs, 6, generator=generator) * 3 - 1.5 for _ in range(16)]
    return _stepper(env, env.reset(seed=0), actions)


def pong(num_envs: int, compiled: bool = False, vector: bool = False) -> Timed:
    """A step of ALE's Pong through the Atari stack: of each env, with a transform for the frames, or of ALE's vector env."""
    import ale_py

    from .gymnasium_peer import RAW, atari_stack, vector_pong

    gymnasium.register_envs(ale_py)
    if vector:
        env: tw.Env = tw.from_gymnasium(vector_pong(num_envs, AutoresetMode.SAME_STEP))
    else:
        env = tw.make("ALE/Pong-v5", num_envs, backend="gymnasium", wrappers=[atari_stack], **RAW)
        env = tw.TransformedEnv(env, T.FrameStackObservation(4))
    env = tw.compile(env) if compiled else env
    generator = torch.Generator().manual_seed(0)
    return _stepper(env, env.reset(seed=0), [torch.randint(6, (num_envs,), generator=generator) for _ in range(16)])


class Film(tw.Env):
    """Returns the same frames at each step, in place of an external simulator."""

    can_snapshot = False
    host_stepped = True

    def __init__(self, num_envs: int, device: str) -> None:
        space = gymnasium.spaces.Box(0, 255, (210, 160, 3), "uint8")
        super().__init__(tw.Signature(num_envs, space, gymnasium.spaces.Discrete(4), torch.device(device)))
        self.frames = torch.from_numpy(script.frames(num_envs)).to(device)

    def _step(self, action: Tensor) -> TensorDict:
        flags = torch.zeros(2, self.num_envs, 1, dtype=torch.bool, device=self.frames.device).unbind(0)
        given = {"observation": self.frames, "reward": flags[0].float(), "terminated": flags[0], "truncated": flags[1]}
        return TensorDict(given, batch_size=[self.num_envs])

    def _reset(self, mask: tw.RowMask, options: Any = None) -> TensorDict:
        return TensorDict({"observation": self.frames}, batch_size=[self.num_envs])


def atari(num_envs: int, compiled: bool = False, device: str = "cpu") -> Timed:
    """Atari preprocessing: grayscale, resize and a stack of four."""
    transforms = [T.GrayscaleObservation(), T.ResizeObservation((84, 84)), T.FrameStackObservation(4)]
    env: tw.Env = tw.TransformedEnv(Film(num_envs, device), *transforms)
    env = tw.compile(env) if compiled else env
    env.reset(seed=0)
    action = env.sample_action()
    return Timed(lambda: env.step(action), 1, _wait(device))


class Settling(CartPole):
    """CartPole whose initial states take fifty simulated steps, clamped to the bounds."""

    def initial(self, rng: Key, params: Any = None) -> State:
        state = super().initial(rng)
        for number in range(50):
            moved = self.transition(state, torch.full_like(state["x"], number % 2), rng)
            state = {name: value.clamp(-0.2, 0.2) for name, value in moved.items()}
        return state


def settling(num_envs: int, pool: int | None, compiled: bool = False, device: str = "cpu") -> Timed:
    """A step of CartPole with expensive initial states; `pool` is the pool size, and None makes initial states cheap."""
    func_env = CartPole() if pool is None else Settling()
    env = tw.FunctionalEnv(func_env, num_envs, max_episode_steps=500, reset_pool=pool or 0, device=device)
    env = tw.compile(env) if compiled else env
    generator = torch.Generator().manual_seed(0)
    return _stepper(env, env.reset(seed=0), [torch.randint(2, (num_envs,), generator=generator).to(device) for _ in range(16)])


def soak(id: str, num_envs: int, steps: int, episodes: int) -> dict[str, Any]:
    """Steps with random actions and a stack of transforms: growth of resident memory after the first fifth, and returns."""
    transforms = [T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.ClipObservation(-10, 10)]
    transforms += [T.FrameStackObservation(4), T.NormalizeReward(), T.ClipReward(-10, 10)]
    env = tw.TransformedEnv(tw.make(id, num_envs), *transforms)
    td, finite, memory, start = env.reset(seed=0), True, [], time.perf_counter()
    for step in range(-(-steps // num_envs)):
        transition, td = env.step(td.set("action", env.sample_action()))
        if step % 100 == 0:
            finite &= all(bool(leaf.isfinite().all()) for leaf in transition["next"].values(True, True))
            memory.append(resident("VmRSS"))
    seconds = time.perf_counter() - start
    early, late = memory[len(memory) // 5], max(memory[len(memory) // 5 :])
    returns = tw.evaluate(tw.make(id, min(num_envs, episodes)), None, episodes)["episode_return"]
    return {
        **{"steps": (step + 1) * num_envs, "seconds": seconds, "drift": late / early - 1, "finite": float(finite)},
        "returns": returns[:episodes].tolist(),
    }


def learn(id: str, seed: int, device: str) -> dict[str, Any]:
    """The metrics of a run of examples/ppo.py, and a hundred points of its learning curve."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--env-id", id, "--seed", str(seed), "--device", device, "--out", folder]
        subprocess.run([sys.executable, "examples/ppo.py", *arguments], check=True, capture_output=True)
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
        curve = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)["curve"]
    kept = {name: metrics[name] for name in ("env_steps", "wall_seconds", "final_mean_return", "eval_mean_return")}
    return {**kept, "curve": [[steps, round(mean, 2)] for steps, mean, _ in curve[:: max(1, len(curve) // 100)]]}


def copy(num_bytes: int = 2**28, device: str = "cpu") -> Timed:
    """Memory bandwidth: a copy of a large tensor."""
    source, target = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)
    return Timed(lambda: target.copy_(source), 1, _wait(device), 2 * num_bytes)


def capabilities() -> dict[str, str]:
    """The instruction sets that PyTorch, Inductor, its C++ compiler and NumPy use in this process."""
    (numpy,) = introspect.opt_func_info(func_name="^exp$", signature="float32")["exp"].values()
    return {
        **{"torch": torch.backends.cpu.get_cpu_capability(), "inductor": str(pick_vec_isa())},
        **{"compiler": config.cpp.march or "native", "numpy": numpy["current"]},
    }


def _build(env: tw.Env, transforms: Sequence[str] | None, compiled: bool) -> tw.Env:
    if transforms is not None:
        env = tw.TransformedEnv(env, T.Compose([TRANSFORMS[name]() for name in transforms]))
    return tw.compile(env) if compiled else env


def _stepper(env: tw.Env, td: TensorDict, actions: Sequence[Tensor]) -> Timed:
    turns = itertools.cycle(actions)
    transition = None

    def call() -> TensorDict:
        nonlocal transition, td
        transition, td = env.step(td.set("action", next(turns)))
        return transition

    # The minimum: the action is read, and the results are written.
    moved = _state(env, call) + _bytes(actions[0]) + _bytes(call()["next"]) + _bytes(td)
    return Timed(call, 1, _wait(env.device), moved)


def _state(env: tw.Env, call: Callable[[], Any]) -> int:
    """Bytes of the env's state: read at each call, and written if it changes."""
    before = {name: buffer.clone() for name, buffer in env.named_buffers()}
    for _ in range(10):
        call()
    return sum(_bytes(buffer) * (1 if buffer.equal(before[name]) else 2) for name, buffer in env.named_buffers())


def _bytes(value: Tensor | TensorDict) -> int:
    leaves: Any = [value] if isinstance(value, Tensor) else value.values(True, True)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _wait(device: Any) -> Callable[[], None]:
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
