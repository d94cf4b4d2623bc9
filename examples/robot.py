"""A randomized robot with noisy, late sensors: 4,096 arms swing up with rsl_rl's PPO, and the policy becomes an ONNX file.

pip install -e ".[examples,rsl-rl,onnx]"
python examples/robot.py                                    trains, evaluates, and writes runs/robot/policy.onnx
python examples/robot.py --num-envs 1024                    with fewer envs
python examples/robot.py --device cuda --compile            on a GPU

A motor that is too weak to lift the arm has to swing it up. The actor sees the angle only: noisy, up to two steps late, in a
stack of five. The critic sees the true state, and the mass, length, friction and motor gain that each episode draws. The file
holds the stack, the normalization and the network. At the end it plays an arm, beside PyTorch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict
from torch import Tensor, nn

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T


@dataclass
class Args:
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
    """An arm with a motor at its joint. Angles count from the top; an episode starts anywhere and lasts 200 steps of 50 ms."""

    observation_space = Dict(policy=Box(-1, 1, (2,)), critic=Box(-20, 20, (7,)))
    action_space = Box(-1, 1, (1,))
    dt, gravity, max_torque = 0.05, 10.0, 2.0

    def initial(self, rng, params=None):
        low, high = (
            torch.tensor(bounds, device=rng.env.device)
            for bounds in ([0.8, 0.9, 0.0, 0.9], [1.2, 1.1, 0.1, 1.2])
        )
        return {
            "angle": random.uniform(rng, -torch.pi, torch.pi),
            "speed": random.uniform(rng.fold_in(1), -1, 1),
            "robot": random.uniform(
                rng.fold_in(2), low, high
            ),  # mass, length, friction, motor gain: new in each episode
        }

    def transition(self, state, action, rng, params=None):
        mass, length, friction, gain = state["robot"]
        torque = gain * self.max_torque * action[0] - friction * state["speed"]
        acceleration = 1.5 * self.gravity / length * torch.sin(state["angle"]) + 3 * torque / (
            mass * length**2
        )
        speed = (state["speed"] + self.dt * acceleration).clamp(-8, 8)
        return {"angle": state["angle"] + self.dt * speed, "speed": speed, "robot": state["robot"]}

    def observation(self, state, rng, params=None):
        sensor = torch.stack([torch.cos(state["angle"]), torch.sin(state["angle"])])
        return {
            "policy": sensor,
            "critic": torch.cat([sensor, state["speed"].unsqueeze(0), state["robot"]]),
        }

    def reward(self, state, action, next_state, rng, params=None):
        angle = torch.remainder(next_state["angle"] + torch.pi, 2 * torch.pi) - torch.pi
        return -0.1 * (angle**2 + 0.1 * next_state["speed"] ** 2 + 0.01 * action[0] ** 2)

    def terminal(self, state, rng, params=None):
        return torch.zeros_like(state["angle"], dtype=torch.bool)

    def transition_info(self, state, action, next_state, params=None):
        return {"upright": (torch.cos(next_state["angle"]) > 0.95).float()}


def make_env(num_envs: int, device: str = "cpu") -> tw.Env:
    sensor = [
        T.AddNoise(0.01),
        T.DelayObservation((0, 2), padding_type="reset"),
        T.FrameStackObservation(5, axis=-1),
    ]
    return tw.TransformedEnv(
        tw.FunctionalEnv(Arm(), num_envs, device=device, max_episode_steps=200),
        T.DelayAction((0, 1)),
        T.ClipAction(),  # because rsl_rl's actions are unbounded
        T.RecordEpisodeStatistics(metrics={"upright": "mean"}),
        T.ObservationKeys({"policy": sensor}),
    )


def train(env: tw.Env, args: Args) -> nn.Module:
    from rsl_rl.runners import OnPolicyRunner

    from torchwrap.interop.rsl_rl import to_rsl_rl

    network = {
        "class_name": "MLPModel",
        "hidden_dims": [64, 64],
        "activation": "elu",
        "obs_normalization": True,
    }
    train_cfg = {
        "num_steps_per_env": 24,
        "save_interval": 50,
        "obs_groups": {"actor": ["policy"], "critic": ["critic"]},
        "actor": {
            **network,
            "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0},
        },
        "critic": network,
        "algorithm": {
            **{"class_name": "torchwrap.interop.rsl_rl:PPO", "gamma": 0.97, "entropy_coef": 0.002},
            **{"learning_rate": 1e-3, "schedule": "adaptive", "desired_kl": 0.01},
        },
    }
    runner = OnPolicyRunner(
        to_rsl_rl(env, seed=args.seed), train_cfg, log_dir=str(args.out), device=args.device
    )
    runner.learn(args.iterations, init_at_random_ep_len=True)
    return (
        runner.get_inference_policy().as_jit()
    )  # the normalization and the network, without the distribution


def deploy(env: tw.Env, policy, path: Path) -> nn.Module:
    """Writes the ONNX file. A robot has noise and delays of its own, so those of the simulation stay out."""
    sensors = ["AddNoise", "DelayObservation", "DelayAction"]  # the robot has its own
    module = tw.deploy(env, policy, observations=["policy"], without=sensors)
    program = torch.export.export(
        module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes()
    )
    torch.onnx.export(program, dynamo=True, verbose=False, **module.onnx_names()).save(path)
    path.with_suffix(".json").write_text(
        json.dumps(module.metadata, indent=2)
    )  # shapes, bounds, and what the state is
    return module


def play(path: Path, module: nn.Module, seed: int) -> tuple[float, float]:
    """Plays an episode of a bare arm with the ONNX file. Returns the fraction of steps upright, and the largest error."""
    import onnxruntime

    session, names = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]),
        module.onnx_names()["input_names"],
    )
    env = tw.FunctionalEnv(Arm(), 1, max_episode_steps=200)
    td, state, upright, error = env.reset(seed=seed), module.initial_state(1), 0.0, 0.0
    for _ in range(200):
        observation = {"policy": td["observation", "policy"]}
        expected, _ = module(observation, state)
        values = [value.numpy() for value in (*observation.values(), *state.values())]
        action, *following = map(torch.from_numpy, session.run(None, dict(zip(names, values))))
        state = dict(zip(state, following))
        error = max(error, (action - expected).abs().max().item())
        transition, td = env.step(action)
        upright += transition["next", "info", "upright"].item() / 200
    return upright, error


def main(args: Args) -> dict[str, float]:
    torch.manual_seed(args.seed)
    env = make_env(args.num_envs, args.device)
    if args.compile:
        tw.compile(env)
    network = train(env, args)

    def policy(td: TensorDict) -> Tensor:
        return network(td["observation", "policy"])

    test_env = make_env(args.num_eval_envs, args.device)
    episodes = tw.evaluate(test_env, policy, args.num_eval_envs, seed=args.seed + 1000)
    results = {name: episodes[name].mean().item() for name in ("episode_return", "episode_upright")}
    network.cpu()
    module = deploy(make_env(1), policy, args.out / "policy.onnx")
    results["onnx_upright"], results["onnx_error"] = play(
        args.out / "policy.onnx", module, args.seed
    )
    print(json.dumps(results, indent=2))
    return results


if __name__ == "__main__":
    main(tyro.cli(Args))
