"""DQN on Atari games: dqn.py with the recipe of Mnih et al. (2015), after CleanRL's dqn_atari.py.

pip install -e ".[examples,atari]"
python examples/dqn_atari.py                            Pong, ten million steps as in CleanRL
python examples/dqn_atari.py --env-id Breakout --device cuda --compile
python examples/dqn_atari.py --total-timesteps 500000 --buffer-size 100000

Writes metrics.json and checkpoint.pt into --out. Episodes end with a life, and rewards are clipped;
the returns shown are scores: sums of a whole game's own rewards. A transition takes two frames in
the buffer, which is in no checkpoint: with --resume, a run first stores --learning-starts new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import dqn
import torch
import tyro
from atari_game import Backend, WholeGames, make_training
from ppo_atari import FrameNetwork
from replay import FrameReplayBuffer
from torch import Tensor, nn

import torchwrap as tw


@dataclass
class Args(dqn.Args):
    """Flags and defaults are CleanRL's, but for the game and the number of games."""

    env_id: str = "Pong"
    """the game"""
    backend: Backend = "ale"  # what plays it: C++ with threads, or Python
    network: Literal["small", "nature"] = "nature"  # Mnih et al. (2013), or (2015) as CleanRL
    bfloat16: bool | None = None  # autocast; None: if the processor has instructions for it
    save_every: int = 100_000
    """number of env steps between two checkpoints"""
    total_timesteps: int = 10_000_000
    learning_rate: float = 1e-4
    anneal_lr: bool = False
    num_envs: int = 8
    buffer_size: int = 1_000_000
    n_step: int = 1
    tau: float = 1.0
    target_network_frequency: int = 1_000
    batch_size: int = 32
    end_e: float = 0.01
    learning_starts: int = 80_000
    train_frequency: int = 4
    eval_games: int = 20  # whole games that the trained network plays, 5 % of actions at random


class Frames(FrameReplayBuffer):
    def state_dict(self) -> dict[str, Any]:
        return {}  # gigabytes, for each checkpoint


def make_buffer(args: Args) -> Frames:
    padding = "zero" if args.backend == "sb3" else "reset"  # as make_games
    arguments = args.buffer_size, args.gamma, args.n_step, args.device
    return Frames(4, *arguments, padding_type=padding)


def evaluate(args: Args, q_network: dqn.QNetwork) -> Tensor:
    seed = args.seed + 1_000_000
    env = WholeGames(make_training(args, args.eval_games, seed))
    q_network.epsilon.fill_(0.05)
    return tw.evaluate(env, q_network.act, args.eval_games, seed=seed)["episode_return"]


def main(args: Args) -> dict[str, object]:
    torch.manual_seed(args.seed)
    env = make_training(args, args.num_envs, args.seed)
    network = FrameNetwork(env, args)
    head = nn.Linear(network.size, int(env.single_action_space.n))
    q_network = dqn.QNetwork(env, nn.Sequential(network, head))
    gigabytes = args.buffer_size * 2 * 84 * 84 / 1e9
    print(f"replay buffer: {args.buffer_size:,} transitions, {gigabytes:.1f} GB")
    return dqn.train(args, env, q_network, make_buffer(args), evaluate)


if __name__ == "__main__":
    main(tyro.cli(Args))
