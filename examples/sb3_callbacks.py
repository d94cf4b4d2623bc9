"""Stable-Baselines3's PPO on a stack of torchwrap's transforms, with SB3's callbacks and log.

python examples/sb3_callbacks.py                trains on Reacher-v5
python examples/sb3_callbacks.py --resume       continues from the last checkpoint in --out

Needs the extras `examples`, `mujoco` and `sb3`. --out gets SB3's files: checkpoints of the model
and of the env's statistics, the best model in evaluations, and the log for TensorBoard.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from ppo import Flags
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.utils import safe_mean
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict
from torch import Tensor

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.sb3 import to_sb3


@dataclass
class Args(Flags):
    seed: int = 1
    """seed of the environments and of PyTorch"""
    total_timesteps: int = 150_000
    """total number of env steps, those before a checkpoint included"""
    num_envs: int = 32
    """number of parallel environments"""
    num_steps: int = 64
    """number of steps of each environment per rollout"""
    save_every: int = 25_000
    """number of env steps between two checkpoints, and between two evaluations"""
    resume: bool = False
    """continue from the last checkpoint in --out"""
    out: Path = Path("runs/sb3-Reacher-v5")
    """folder of the checkpoints, of the best model and of the log"""


def make_env(num_envs: int) -> tw.Env:
    # By episode: the distance at its end, and the sum of the control costs
    metrics = {"distance": ("reward_dist", "last"), "effort": ("reward_ctrl", "sum")}
    return tw.TransformedEnv(
        tw.make("Reacher-v5", num_envs, info_keys=["reward_dist", "reward_ctrl"]),
        T.RecordEpisodeStatistics(metrics=metrics),  # innermost: returns are those of the env
        T.NormalizeObservation(),
        T.ClipObservation(-10, 10),
        T.NormalizeReward(gamma=0.95),
        T.ClipReward(-10, 10),
    )


class LogMetrics(BaseCallback):
    """Logs the mean metrics. to_sb3 puts them next to `r`, `l` and `t` into `info["episode"]`."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        for name in ("distance", "effort"):
            values = [info[name] for info in self.model.ep_info_buffer]
            self.logger.record(f"rollout/{name}", safe_mean(values))


def main(args: Args) -> dict[str, float]:
    torch.set_num_threads(1)  # the networks are small
    # A VecNormalize to SB3, because the env has running statistics
    venv = to_sb3(make_env(args.num_envs))
    # SB3 writes the statistics after the model: a killed run may lack the last ones.
    saved = args.out.glob("rl_model_vecnormalize_*_steps.pkl")
    steps = max((int(path.stem.split("_")[3]) for path in saved), default=0)
    if args.resume and steps > 0:
        statistics = args.out / f"rl_model_vecnormalize_{steps}_steps.pkl"
        venv = VecNormalize.load(str(statistics), venv)
        model = PPO.load(args.out / f"rl_model_{steps}_steps", venv, device="cpu")
        print(f"continues from {steps} steps")
    else:
        model = PPO(
            "MlpPolicy",
            venv,
            n_steps=args.num_steps,
            batch_size=256,
            n_epochs=10,
            gamma=0.95,
            learning_rate=1e-3,
            seed=args.seed,
            device="cpu",
            verbose=1,
            tensorboard_log=str(args.out),
        )

    every = max(args.save_every // args.num_envs, 1)  # steps of all envs count as one
    # EvalCallback copies the statistics into it. Eval mode freezes them.
    eval_venv = to_sb3(make_env(8).eval())
    callbacks = [
        CheckpointCallback(every, str(args.out), save_vecnormalize=True),
        EvalCallback(
            eval_venv,
            n_eval_episodes=24,
            eval_freq=every,
            best_model_save_path=str(args.out),
            verbose=0,
        ),
        LogMetrics(),
    ]
    model.learn(args.total_timesteps - model.num_timesteps, callbacks, reset_num_timesteps=False)

    # 64 other envs with the same statistics. `predict` clips actions to the bounds, as in training.
    test_env = make_env(64)
    test_env.load_state_dict(venv.unwrapped.env.state_dict())

    def policy(td: TensorDict) -> Tensor:
        action, _ = model.predict(td["observation"].numpy(), deterministic=True)
        return torch.as_tensor(action)

    episodes = tw.evaluate(test_env, policy, num_episodes=128, seed=args.seed + 1000)
    result = {name: value.mean().item() for name, value in episodes.float().items()}
    print(f"after {model.num_timesteps} steps: {result}")
    return {**result, "env_steps": model.num_timesteps}


if __name__ == "__main__":
    main(tyro.cli(Args))
