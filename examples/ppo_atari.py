"""PPO on Atari games, after CleanRL's ppo_atari.py.

pip install -e ".[examples,atari]"
python examples/ppo_atari.py                            Pong: one million steps on a CPU
python examples/ppo_atari.py --env-id Breakout --device cuda --network nature --resume
python examples/ppo_atari.py --backend cleanrl          CleanRL's frames and starts, bit for bit
python examples/ppo_atari.py --resume --eval-games 100  evaluates a finished run again

Writes metrics.json, learning_curve.png and checkpoint.pt into --out. Episodes end with a life, and
rewards are clipped; the returns shown are scores: sums of a whole game's own rewards.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from atari_game import Backend, WholeGames, make_training
from ppo import Curve, Flags, estimate_advantages, layer_init
from ppo_output import Checkpoint
from ppo_parts import cnn, train_epochs
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args(Flags):
    """Flags have CleanRL's names."""

    env_id: str = "Pong"  # the game
    backend: Backend = "ale"  # what plays it: C++ with threads, or Python
    seed: int = 1  # of the games and of PyTorch
    device: str = "cpu"  # of the agent, to which frames are copied
    compile: bool = False  # the transforms; in Python, they make the frames
    num_threads: int = 1  # PyTorch's on the CPU
    network: Literal["small", "nature"] = "small"  # Mnih et al. (2013), or (2015) as CleanRL
    bfloat16: bool | None = None  # autocast; None: if the processor has instructions for it
    out: Path | None = None  # folder of the results; None: runs/ppo-atari-<env_id>
    resume: bool = False  # continue from the checkpoint in --out, if any
    save_every: int = 50  # iterations between two checkpoints
    target_return: float | None = None  # metrics.json tells when it was reached
    total_timesteps: int = 1_000_000  # env steps, of four frames each
    learning_rate: float = 5e-4
    anneal_lr: bool = False  # linearly to zero
    num_envs: int = 8
    num_steps: int | None = None  # per env and rollout; None: a batch of 1,024, with 16 or more
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 8
    update_epochs: int = 4
    clip_coef: float = 0.1
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    eval_games: int = 20  # whole games that the trained agent plays

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is None:
            self.num_steps = max(16, 1024 // self.num_envs)


def has_bfloat16(device: str) -> bool:
    """Whether a processor has instructions for bfloat16. To emulate them is slower than float32."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = Path("/proc/cpuinfo")  # avx512_bf16 and amx_bf16, or bf16 on Arm
    return flags.exists() and "bf16" in flags.read_text()


class FrameNetwork(nn.Module):
    """Features `(n, size)` of frames `(n, 4, 84, 84)`."""

    def __init__(self, env: tw.Env, args: Any) -> None:
        super().__init__()
        network, self.size = cnn(env.single_observation_space.shape, args.network)
        self.network = network.to(memory_format=torch.channels_last)
        self.bfloat16 = has_bfloat16(args.device) if args.bfloat16 is None else args.bfloat16

    def forward(self, frames: Tensor) -> Tensor:
        frames = frames.to(memory_format=torch.channels_last)
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.network(frames / 255).float()


class Agent(nn.Module):
    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        self.network = FrameNetwork(env, args)
        size = self.network.size
        self.actor = layer_init(nn.Linear(size, int(env.single_action_space.n)), std=0.01)
        self.critic = layer_init(nn.Linear(size, 1), std=1.0)

    def forward(self, observation: Tensor) -> tuple[Categorical, Tensor]:
        """The distribution of actions, and the value."""
        features = self.network(observation)
        distribution = Categorical(logits=self.actor(features), validate_args=False)
        return distribution, self.critic(features).squeeze(-1)

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        distribution, td["value"] = self(td["observation"])
        td["action"] = distribution.sample()
        td["logprob"] = distribution.log_prob(td["action"])
        return td


@torch.no_grad()
def make_batch(agent: Agent, data: TensorDict, td: TensorDict, args: Args) -> dict[str, Tensor]:
    """Flatten a rollout `(num_envs, num_steps)`, with advantages and returns."""
    successor = data["next"]
    truncated = (successor["done"] & ~successor["terminated"]).squeeze(-1)
    _, last_value = agent(td["observation"])
    next_value = torch.cat([data["value"][:, 1:], last_value.unsqueeze(1)], 1)
    if truncated.any():  # take the final observation's value, not that of the next episode
        _, next_value[truncated] = agent(successor["observation"][truncated])
    advantages = estimate_advantages(data, data["value"], next_value, args)
    batch = {name: data[name] for name in ("observation", "action", "logprob")}
    batch["advantage"] = advantages
    batch["ret"] = advantages + data["value"]
    return {name: value.flatten(0, 1) for name, value in batch.items()}


def ppo_loss(agent: Agent, mb: dict[str, Tensor], args: Args) -> Tensor:
    distribution, value = agent(mb["observation"])
    ratio = (distribution.log_prob(mb["action"]) - mb["logprob"]).exp()
    advantage = mb["advantage"] - mb["advantage"].mean()
    advantage = advantage / (mb["advantage"].std() + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -torch.min(advantage * ratio, advantage * clipped).mean()
    v_loss = 0.5 * (value - mb["ret"]).square().mean()
    return pg_loss - args.ent_coef * distribution.entropy().mean() + args.vf_coef * v_loss


def main(args: Args) -> dict[str, object]:
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.num_threads)
    args.out = args.out or Path("runs") / f"ppo-atari-{args.env_id}"
    args.out.mkdir(parents=True, exist_ok=True)
    env = make_training(args, args.num_envs, args.seed)
    scores = T.RecordEpisodeStatistics.of(env)[0]
    if args.compile:
        tw.compile(env)
    env.reset(seed=args.seed)
    agent = Agent(env, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    successor = [("next", key) for key in ("observation", "reward", "terminated", "done")]
    keys = ["observation", "action", "logprob", "value", *successor]
    collect = tw.Collector(env, agent.act, args.num_steps, keys=keys)
    curve = Curve()
    parts = {"agent": agent, "optimizer": optimizer, "curve": curve}
    checkpoint = Checkpoint(args, env, args.out, parts)
    if args.resume:
        checkpoint.load()
    start -= curve[-1][-1] if curve else 0

    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    progress = tqdm(range(len(curve), num_iterations), initial=len(curve), total=num_iterations)
    for iteration in progress:
        if args.anneal_lr:
            remaining = 1 - iteration / num_iterations
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        data = collect()
        batch = make_batch(agent, data, env.root, args)
        train_epochs(agent, optimizer, batch, args, ppo_loss)
        returns = scores.return_queue
        mean = returns.mean().item()  # NaN before the first game ends
        deviation = (returns - mean).square().mean().sqrt().item()
        seconds = time.perf_counter() - start
        curve.append(((iteration + 1) * batch_size, mean, deviation, seconds))
        progress.set_postfix({"return": f"{mean:.1f}"}, refresh=False)
        if len(curve) % args.save_every == 0 or len(curve) == num_iterations:
            checkpoint.save([checkpoint.process_state()])
    env.close()

    seed = args.seed + 1_000_000
    test_env = WholeGames(make_training(args, args.eval_games, seed))
    games = tw.evaluate(test_env, agent.act, args.eval_games, seed=seed)["episode_return"]
    metrics = vars(args) | curve.metrics(args)
    metrics |= {"eval_mean_return": games.mean().item(), "eval_returns": games.tolist()}
    print(json.dumps(metrics, indent=2, default=str))
    known = [point for point in curve if point[1] == point[1]]  # JSON has no NaN
    metrics["curve"] = known[:: max(1, len(known) // 200)]
    (args.out / "metrics.json").write_text(json.dumps(metrics, default=str) + "\n")
    curve.plot(args.out / "learning_curve.png", f"PPO on {args.env_id}, seed {args.seed}")
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
