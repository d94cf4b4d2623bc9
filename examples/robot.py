"""Randomized robots with noisy, late sensors: rsl_rl's PPO swings 4,096 arms up.

pip install -e ".[examples,rsl-rl,onnx]"
python examples/robot.py                            writes runs/robot/policy.onnx
python examples/robot.py --num-envs 1024            with fewer envs
python examples/robot.py --device cuda --compile    on a GPU

The motor is too weak to lift the arm, so it has to swing. The actor sees the angle only: noisy, up
to two steps late, in a stack of five. The critic sees the true state, and the mass, length,
friction and motor gain of the episode. The ONNX file holds the stack, the normalization and the
network. At the end it plays an arm, beside PyTorch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict
from ppo import Flags
from rsl_rl.runners import OnPolicyRunner
from torch import nn

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T
from torchwrap.interop.rsl_rl import RslRlPolicy, to_rsl_rl


@dataclass
class Args(Flags):
    num_envs: int = 4096
    """number of parallel robots"""
    iterations: int = 60
    """number of PPO iterations, of 24 steps of each robot"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    device: str = "cpu"
    """device of the environments and of the agent"""
    compile: bool = False
    """compile the environment with its transforms"""
    num_eval_envs: int = 100
    """number of robots that play the trained policy, for one episode"""
    out: Path = Path("runs/robot")
    """folder of the logs, the checkpoints and the ONNX file"""


class Arm(FuncEnv):
    """An arm with a motor at its joint. Angles count from the top; a step takes 50 ms."""

    observation_space = Dict(policy=Box(-1, 1, (2,)), critic=Box(-20, 20, (7,)))
    action_space = Box(-1, 1, (1,))
    broadcasts = True  # tensors have a first dimension, of robots
    dt = 0.05
    gravity = 10.0
    max_torque = 2.0

    def initial(self, rng, params=None):
        # Angle and speed; mass, length, friction and motor gain, new in each episode
        low = torch.tensor([-torch.pi, -1, 0.8, 0.9, 0.0, 0.9], device=rng.env.device)
        high = torch.tensor([torch.pi, 1, 1.2, 1.1, 0.1, 1.2], device=rng.env.device)
        drawn = random.uniform(rng, low, high, shape=(6,))
        return {"angle": drawn[:, 0], "speed": drawn[:, 1], "robot": drawn[:, 2:]}

    def transition(self, state, action, rng, params=None):
        mass, length, friction, gain = state["robot"].unbind(-1)
        torque = gain * self.max_torque * action[:, 0] - friction * state["speed"]
        acceleration = 1.5 * self.gravity / length * torch.sin(state["angle"])
        acceleration = acceleration + 3 * torque / (mass * length**2)
        speed = (state["speed"] + self.dt * acceleration).clamp(-8, 8)
        angle = state["angle"] + self.dt * speed
        return {"angle": angle, "speed": speed, "robot": state["robot"]}

    def observation(self, state, rng, params=None):
        cosine = torch.cos(state["angle"])
        sine = torch.sin(state["angle"])
        true = torch.stack([cosine, sine, state["speed"]], -1)
        return {"policy": true[:, :2], "critic": torch.cat([true, state["robot"]], -1)}

    def reward(self, state, action, next_state, rng, params=None):
        angle = torch.remainder(next_state["angle"] + torch.pi, 2 * torch.pi) - torch.pi
        speed = next_state["speed"]
        return -0.1 * (angle**2 + 0.1 * speed**2 + 0.01 * action[:, 0] ** 2)

    def terminal(self, state, rng, params=None):
        return torch.zeros_like(state["angle"], dtype=torch.bool)

    def transition_info(self, state, action, next_state, params=None):
        return {"upright": (torch.cos(next_state["angle"]) > 0.95).float()}


def make_env(num_envs: int, device: str = "cpu", noisy: bool = True) -> tw.Env:
    """Without noise and delays it is the stack of a real robot, which has its own."""
    noise = [T.AddNoise(0.01), T.DelayObservation((0, 2), padding_type="reset")] if noisy else []
    late = [T.DelayAction((0, 1))] if noisy else []
    sensor = [*noise, T.FrameStackObservation(5, axis=-1)]
    return tw.TransformedEnv(
        tw.FunctionalEnv(Arm(), num_envs, device=device, max_episode_steps=200),
        *late,
        T.ClipAction(),  # because rsl_rl's actions are unbounded
        T.RecordEpisodeStatistics(metrics={"upright": "mean"}),
        T.ObservationKeys({"policy": sensor}),
    )


def make_config(actor: str, **settings: Any) -> dict[str, Any]:
    """The configuration of a runner, whose actor reads this group of observations."""
    network = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "elu", **settings}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    return {
        "num_steps_per_env": 24,
        "save_interval": 20,
        "obs_groups": {"actor": [actor], "critic": ["critic"]},
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": network,
        "algorithm": {
            "class_name": "torchwrap.interop.rsl_rl:PPO",  # bootstraps from final observations
            "gamma": 0.97,
            "entropy_coef": 0.002,
        },
    }


def train(env: tw.Env, args: Args) -> nn.Module:
    config = make_config("policy", obs_normalization=True)
    rsl_env = to_rsl_rl(env, seed=args.seed)
    runner = OnPolicyRunner(rsl_env, config, log_dir=str(args.out), device=args.device)
    runner.learn(args.iterations, init_at_random_ep_len=True)
    return RslRlPolicy(runner.get_inference_policy("cpu"))


@torch.no_grad()
def deploy(path: Path, policy, env: tw.Env, bare: tw.Env, group: str, num_steps: int = 200):
    """Writes the ONNX file: the transforms of this group, the normalization and the actor.

    The policy plays, and the file beside it on the bare env. Returns the fraction of steps upright,
    and the largest difference of an action.
    """
    deployed = tw.deploy(env, policy)
    names = deployed.onnx_names()
    torch.onnx.export(deployed.program, dynamo=True, verbose=False, **names).save(path)
    metadata = json.dumps(deployed.metadata, indent=2)  # shapes, bounds, and entries of the state
    path.with_suffix(".json").write_text(metadata)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    td = env.reset(seed=0)
    raw = bare.reset(seed=0)
    state = deployed.initial_state(env.num_envs)
    upright = []
    errors = []
    for _ in range(num_steps):
        expected = policy(td)["action"].clamp(-1, 1)  # as ClipAction does
        arrays = [value.numpy() for value in (raw["observation", group], *state.values())]
        outputs = session.run(None, dict(zip(names["input_names"], arrays)))
        action, *next_state = map(torch.from_numpy, outputs)
        errors.append((action - expected).abs().max().item())
        _, td = env.step(td)
        transition, raw = bare.step(expected)
        upright.append(transition["next", "info", "upright"].mean().item())
        state = dict(zip(state, next_state))
        state["is_first"] = transition["next", "done"]
    return {"onnx_upright": sum(upright) / num_steps, "onnx_error": max(errors)}


def main(args: Args) -> dict[str, float]:
    torch.manual_seed(args.seed)
    env = make_env(args.num_envs, args.device)
    if args.compile:
        tw.compile(env)
    policy = train(env, args)
    test_env = make_env(args.num_eval_envs)
    episodes = tw.evaluate(test_env, policy, args.num_eval_envs, seed=args.seed + 1000)
    names = ("episode_return", "episode_upright")
    results = {name: episodes[name].mean().item() for name in names}
    clean, other = [make_env(args.num_eval_envs, noisy=False) for _ in range(2)]
    results |= deploy(args.out / "policy.onnx", policy, clean, other.unwrapped, "policy")
    print(json.dumps(results, indent=2))
    return results


if __name__ == "__main__":
    main(tyro.cli(Args))
