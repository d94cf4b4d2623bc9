"""A whole job with rsl_rl: a teacher, its student, and the student as an ONNX file.

pip install -e ".[examples,rsl-rl,onnx]"
python examples/rsl_rl_robot.py teacher                 PPO
python examples/rsl_rl_robot.py student                 distillation; writes policy.onnx
python examples/rsl_rl_robot.py teacher --resume        goes on with new episodes
python examples/rsl_rl_robot.py teacher --logger wandb  WANDB_MODE=offline needs no network
torchrun --nproc-per-node 2 examples/rsl_rl_robot.py teacher

The robot is the arm of robot.py with a curriculum: episodes start the farther from the top, the
higher the level of an env. The teacher sees the true state, and is rewarded for new ones by random
network distillation. Its critic also sees mass, length, friction and motor gain. The student sees
the angle only: noisy, up to two steps late, in a stack of five. Transforms normalize all of them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from gymnasium.spaces import Box, Dict
from ppo import Flags
from robot import Arm, deploy, make_config
from rsl_rl.runners import DistillationRunner, OnPolicyRunner
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.rsl_rl import RslRlPolicy, to_rsl_rl

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args(Flags):
    stage: tyro.conf.Positional[Literal["teacher", "student"]]
    """what learns; the student needs the teacher's checkpoint"""
    num_envs: int = 1024
    """number of parallel robots of a process"""
    iterations: int = 120
    """number of iterations, of 24 steps of each robot"""
    resume: bool = False
    """go on from the last checkpoint"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    device: str = "cpu"
    """device of the environments and of the agent; that of torchrun is cuda:0, cuda:1, ..."""
    logger: Literal["tensorboard", "wandb"] = "tensorboard"
    """where rsl_rl logs"""
    eval_steps: int = 300
    """number of steps of 100 robots that the student plays; an episode has 200"""
    out: Path = Path("runs/rsl_rl_robot")
    """folder of the logs, the checkpoints and the ONNX file"""


class LeveledArm(Arm):
    observation_space = Dict(
        student=Box(-1, 1, (2,)), teacher=Box(-8, 8, (3,)), critic=Box(-20, 20, (7,))
    )

    def initial(self, rng, params):
        state = super().initial(rng)
        return {**state, "angle": params["level"] * state["angle"]}

    def observation(self, state, rng, params):
        groups = super().observation(state, rng)
        critic = groups["critic"]
        return {"student": groups["policy"], "teacher": critic[:, :3], "critic": critic}

    def curriculum(self, state, rng, params):
        change = torch.where(torch.cos(state["angle"]) > 0.95, 0.2, -0.1)
        return {"level": (params["level"] + change).clamp(0.2, 1)}

    def transition_info(self, state, action, next_state, params):  # rsl_rl logs the means
        info = super().transition_info(state, action, next_state)
        return {**info, "level": params["level"]}


def make_arm(num_envs: int, level: float, device: str = "cpu") -> tw.Env:
    return tw.FunctionalEnv(
        LeveledArm(),
        num_envs,
        device=device,
        max_episode_steps=200,
        first_index=RANK * num_envs,
        params={"level": torch.full((num_envs,), level)},
    )


def make_env(num_envs: int, level: float, device: str = "cpu", delay=(0, 2)) -> tw.Env:
    sensor = [
        T.AddNoise(0.01, in_eval=False),
        T.DelayObservation(delay, padding_type="reset"),
        T.NormalizeObservation(),
        T.FrameStackObservation(5, axis=-1),
    ]
    state = {name: [T.NormalizeObservation()] for name in ("teacher", "critic")}
    return tw.TransformedEnv(
        make_arm(num_envs, level, device),
        T.ClipAction(),  # because rsl_rl's actions are unbounded
        T.RecordEpisodeStatistics(metrics={"upright": "mean"}),
        T.ObservationKeys({"student": sensor, **state}),
    )


def configure(args: Args) -> dict[str, Any]:
    config = {**make_config("teacher"), "logger": args.logger}
    if args.logger == "wandb":
        config["logger"] = {"class_name": "WandbLogWriter", "project_name": "rsl_rl_robot"}
    if args.stage == "student":
        config["teacher"] = config.pop("actor")
        gaussian = {"class_name": "GaussianDistribution", "init_std": 0.1}
        config["student"] = {**config.pop("critic"), "distribution_cfg": gaussian}
        config["obs_groups"] = {"student": ["student"], "teacher": ["teacher"]}
        config["algorithm"] = {
            "class_name": "torchwrap.interop.rsl_rl:Distillation",
            "num_learning_epochs": 2,
            "gradient_length": 8,
            "loss_type": "huber",
        }
        return config
    config["obs_groups"]["rnd_state"] = ["teacher"]
    config["algorithm"]["rnd_cfg"] = {
        "num_outputs": 8,
        "predictor_hidden_dims": [32],
        "target_hidden_dims": [32],
        "reward_normalization": True,
        "weight": 0.2,  # of a second
    }
    return config


class OnCpus:
    """Lets rsl_rl's runners share gradients without GPUs."""

    def _configure_multi_gpu(self):
        if self.device != "cpu" or WORLD_SIZE == 1:
            return super()._configure_multi_gpu()
        dist.init_process_group("gloo")
        ranks = {"global_rank": RANK, "local_rank": RANK, "world_size": WORLD_SIZE}
        self.cfg["multi_gpu"] = ranks
        self.is_distributed = True
        self.gpu_world_size = WORLD_SIZE
        self.gpu_global_rank = self.gpu_local_rank = RANK


class TeacherRunner(OnCpus, OnPolicyRunner): ...


class StudentRunner(OnCpus, DistillationRunner): ...


def latest(folder: Path) -> str:
    """The path of the newest checkpoint in a folder."""
    paths = sorted(folder.glob("model_*.pt"), key=lambda path: int(path.stem[6:]))
    if not paths:
        raise SystemExit(f"{folder} has no checkpoint. Train without --resume, the teacher first.")
    return str(paths[-1])


def train(args: Args, env: tw.Env) -> nn.Module:
    folder = args.out / args.stage
    make_runner = TeacherRunner if args.stage == "teacher" else StudentRunner
    rsl_env = to_rsl_rl(env, {"step_dt": Arm.dt}, seed=args.seed)
    runner = make_runner(rsl_env, configure(args), log_dir=str(folder), device=args.device)
    if args.stage == "student":
        runner.load(latest(args.out / "teacher"))
    if args.resume:
        runner.load(latest(folder))
        runner.current_learning_iteration += 1  # rsl_rl would repeat the last number
    # Otherwise all episodes of a run that goes on would end at the same steps
    runner.learn(args.iterations, init_at_random_ep_len=True)
    return RslRlPolicy(runner.get_inference_policy("cpu"))


def main(args: Args) -> dict[str, float]:
    if WORLD_SIZE > 1 and args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.manual_seed(args.seed + RANK)
    env = make_env(args.num_envs, level=0.2, device=args.device)
    policy = train(args, env)
    if dist.is_initialized():
        dist.destroy_process_group()
    if args.stage == "teacher" or RANK > 0:
        return {}
    test_env = make_env(100, level=1.0, delay=1)
    test_env.load_state_dict(env.state_dict())
    arm = make_arm(100, level=1.0).eval()  # without the curriculum
    path = args.out / "policy.onnx"
    results = deploy(path, policy, test_env.eval(), arm, "student", args.eval_steps)
    print(json.dumps(results, indent=2))
    return results


if __name__ == "__main__":
    main(tyro.cli(Args))
