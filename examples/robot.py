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

import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict
from ppo import Flags
from torch import nn

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T


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
    dt = 0.05
    gravity = 10.0
    max_torque = 2.0

    def initial(self, rng, params=None):
        # Mass, length, friction and motor gain, new in each episode
        low = torch.tensor([0.8, 0.9, 0.0, 0.9], device=rng.env.device)
        high = torch.tensor([1.2, 1.1, 0.1, 1.2], device=rng.env.device)
        return {
            "angle": random.uniform(rng, -torch.pi, torch.pi),
            "speed": random.uniform(rng.fold_in(1), -1, 1),
            "robot": random.uniform(rng.fold_in(2), low, high),
        }

    def transition(self, state, action, rng, params=None):
        mass, length, friction, gain = state["robot"]
        torque = gain * self.max_torque * action[0] - friction * state["speed"]
        acceleration = 1.5 * self.gravity / length * torch.sin(state["angle"])
        acceleration = acceleration + 3 * torque / (mass * length**2)
        speed = (state["speed"] + self.dt * acceleration).clamp(-8, 8)
        angle = state["angle"] + self.dt * speed
        return {"angle": angle, "speed": speed, "robot": state["robot"]}

    def observation(self, state, rng, params=None):
        sensor = torch.stack([torch.cos(state["angle"]), torch.sin(state["angle"])])
        critic = torch.cat([sensor, state["speed"].unsqueeze(0), state["robot"]])
        return {"policy": sensor, "critic": critic}

    def reward(self, state, action, next_state, rng, params=None):
        angle = torch.remainder(next_state["angle"] + torch.pi, 2 * torch.pi) - torch.pi
        speed = next_state["speed"]
        return -0.1 * (angle**2 + 0.1 * speed**2 + 0.01 * action[0] ** 2)

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


def train(env: tw.Env, args: Args) -> nn.Module:
    from rsl_rl.runners import OnPolicyRunner

    from torchwrap.interop.rsl_rl import RslRlPolicy, to_rsl_rl

    network = {
        "class_name": "MLPModel",
        "hidden_dims": [64, 64],
        "activation": "elu",
        "obs_normalization": True,
    }
    distribution = {"class_name": "GaussianDistribution", "init_std": 1.0}
    train_cfg = {
        "num_steps_per_env": 24,
        "save_interval": 50,
        "obs_groups": {"actor": ["policy"], "critic": ["critic"]},
        "actor": {**network, "distribution_cfg": distribution},
        "critic": network,
        "algorithm": {
            "class_name": "torchwrap.interop.rsl_rl:PPO",
            "gamma": 0.97,
            "entropy_coef": 0.002,
            "learning_rate": 1e-3,
            "schedule": "adaptive",
            "desired_kl": 0.01,
        },
    }
    rsl_env = to_rsl_rl(env, seed=args.seed)
    runner = OnPolicyRunner(rsl_env, train_cfg, log_dir=str(args.out), device=args.device)
    runner.learn(args.iterations, init_at_random_ep_len=True)
    return RslRlPolicy(runner.get_inference_policy())


def deploy(env: tw.Env, policy, path: Path):
    """Writes the ONNX file: the stack, the normalization and the actor."""
    deployed = tw.deploy(env, policy)
    names = deployed.onnx_names()
    torch.onnx.export(deployed.program, dynamo=True, verbose=False, **names).save(path)
    metadata = json.dumps(deployed.metadata, indent=2)  # shapes, bounds, and entries of the state
    path.with_suffix(".json").write_text(metadata)
    return deployed


def play(path: Path, deployed, seed: int) -> tuple[float, float]:
    """Plays an episode with the ONNX file.

    Returns the fraction of steps upright, and the largest difference from PyTorch's actions.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = deployed.onnx_names()["input_names"]
    env = tw.FunctionalEnv(Arm(), 1, max_episode_steps=200)
    td = env.reset(seed=seed)
    state = deployed.initial_state(1)
    upright = 0.0
    error = 0.0
    for _ in range(200):
        observation = {"policy": td["observation", "policy"]}
        expected, _ = deployed(observation, state)
        arrays = [value.numpy() for value in (*observation.values(), *state.values())]
        outputs = session.run(None, dict(zip(names, arrays)))
        action, *next_state = map(torch.from_numpy, outputs)
        state = dict(zip(state, next_state))
        error = max(error, (action - expected).abs().max().item())
        transition, td = env.step(action)
        upright += transition["next", "info", "upright"].item() / 200
    return upright, error


def main(args: Args) -> dict[str, float]:
    torch.manual_seed(args.seed)
    env = make_env(args.num_envs, args.device)
    if args.compile:
        tw.compile(env)
    policy = train(env, args)
    test_env = make_env(args.num_eval_envs, args.device)
    episodes = tw.evaluate(test_env, policy, args.num_eval_envs, seed=args.seed + 1000)
    policy.cpu()
    path = args.out / "policy.onnx"
    deployed = deploy(make_env(1, noisy=False), policy, path)
    onnx_upright, onnx_error = play(path, deployed, args.seed)
    results = {
        "episode_return": episodes["episode_return"].mean().item(),
        "episode_upright": episodes["episode_upright"].mean().item(),
        "onnx_upright": onnx_upright,
        "onnx_error": onnx_error,
    }
    print(json.dumps(results, indent=2))
    return results


if __name__ == "__main__":
    main(tyro.cli(Args))
