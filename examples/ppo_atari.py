"""PPO on Atari games from raw frames, after CleanRL's ppo_atari.py.

python examples/ppo_atari.py                            Pong: one million steps on a CPU
python examples/ppo_atari.py --device cuda --network nature --total-timesteps 10000000
python examples/ppo_atari.py --env-id ALE/Breakout-v5

Writes metrics.json, learning_curve.png, checkpoint.pt and videos of a game into --out. Starts,
frames and rewards equal CleanRL's bit for bit. Raw frames are copied to --device, and resized,
turned gray and stacked there. Returns are summed over whole games, though episodes end with a life.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

import torch
import tyro
from atari_game import make_atari
from ppo import Curve, Flags, estimate_advantages, layer_init
from ppo_parts import cnn, train_epochs
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.wrappers import RecordVideo


@dataclass
class Args(Flags):
    """Flags have CleanRL's names."""

    env_id: str = "ALE/Pong-v5"
    """the id of the game"""
    preset: Literal["cleanrl", "gymnasium", "sb3"] = "cleanrl"
    """whose preprocessing"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    device: str = "cpu"
    """device of the transforms and of the agent"""
    compile: bool = True
    """compile the transforms"""
    num_threads: int = 1
    """PyTorch's threads on the CPU"""
    network: Literal["small", "nature"] = "small"
    """nature is CleanRL's (Mnih et al., 2015); small has a third of the work (Mnih et al., 2013)"""
    bfloat16: bool | None = None
    """autocast the network to bfloat16; None does so if the processor has instructions for it"""
    out: Path | None = None
    """folder of the results; None is runs/ppo-atari-<game>"""
    target_return: float | None = None
    """shown in the learning curve"""
    total_timesteps: int = 1_000_000
    """total number of env steps, of four frames each"""
    learning_rate: float = 5e-4
    """learning rate of the optimizer"""
    anneal_lr: bool = False
    """reduce the learning rate linearly to zero"""
    num_envs: int = 8
    """number of parallel games"""
    num_steps: int | None = None
    """number of steps of each game per rollout; None makes a batch of 1024, with 16 or more"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 8
    """number of minibatches per epoch"""
    update_epochs: int = 4
    """number of epochs per iteration"""
    clip_coef: float = 0.1
    """clipping coefficient of the surrogate objective"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""

    def __post_init__(self) -> None:
        if self.num_steps is None:
            self.num_steps = max(16, 1024 // self.num_envs)


def has_bfloat16(device: str) -> bool:
    """Whether a processor has instructions for bfloat16. To emulate them is slower than float32."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = Path("/proc/cpuinfo")  # avx512_bf16 and amx_bf16, or bf16 on Arm
    return flags.exists() and "bf16" in flags.read_text()


def make_env(args: Args, num_envs: int, videos: Path | None = None) -> tw.Env:
    mode = "rgb_array" if videos else None
    env = make_atari(args.env_id, num_envs, args.preset, device=args.device, render_mode=mode)
    if videos is not None:
        env = RecordVideo(env, str(videos), episode_trigger=lambda episode: True)
    return tw.TransformedEnv(env, T.atari(args.preset))


class Agent(nn.Module):
    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        network, features = cnn((4, 84, 84), args.network)
        self.network = network.to(memory_format=torch.channels_last)
        self.actor = layer_init(nn.Linear(features, int(env.single_action_space.n)), std=0.01)
        self.critic = layer_init(nn.Linear(features, 1), std=1.0)
        self.bfloat16 = bool(args.bfloat16)

    def forward(self, observation: Tensor) -> tuple[Categorical, Tensor]:
        """The distribution of actions, and the value, of frames `(n, 4, 84, 84)` uint8."""
        with torch.autocast(observation.device.type, torch.bfloat16, enabled=self.bfloat16):
            frames = observation.to(memory_format=torch.channels_last)
            features = self.network(frames / 255)
            logits = self.actor(features).float()
            value = self.critic(features).float()
        return Categorical(logits=logits, validate_args=False), value.squeeze(-1)

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        distribution, value = self(td["observation"])
        td["action"] = distribution.sample()
        td["logprob"] = distribution.log_prob(td["action"])
        td["value"] = value
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
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)
    if args.bfloat16 is None:
        args = replace(args, bfloat16=has_bfloat16(args.device))
    dtype = "bfloat16" if args.bfloat16 else "float32"
    print(f"{args.network} network in {dtype} on {args.device}")
    out = args.out or Path("runs") / f"ppo-atari-{args.env_id.rpartition('/')[2]}"
    out.mkdir(parents=True, exist_ok=True)

    env = make_env(args, args.num_envs)
    if args.compile:
        tw.compile(env)
    env.reset(seed=args.seed)
    agent = Agent(env, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    successor = ["observation", "reward", "terminated", "done", "info"]
    keys = ["observation", "action", "logprob", "value", *(("next", key) for key in successor)]
    collect = tw.Collector(env, agent.act, args.num_steps, keys=keys)

    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    curve = Curve()
    returns = []
    progress = tqdm(total=num_iterations * batch_size, unit=" steps", unit_scale=True)
    for iteration in range(num_iterations):
        if args.anneal_lr:
            remaining = 1 - iteration / num_iterations
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        data = collect()
        batch = make_batch(agent, data, env.root, args)
        train_epochs(agent, optimizer, batch, args, ppo_loss)

        progress.update(batch_size)
        info = data["next", "info"]
        returns += info["game_return"][info["game_over"].bool()].tolist()
        latest = returns[-20:]
        if latest:
            mean = fmean(latest)
            env_steps = (iteration + 1) * batch_size
            seconds = time.perf_counter() - start
            curve.append((env_steps, mean, pstdev(latest), seconds))
            progress.set_postfix({"return": f"{mean:.1f}"}, refresh=False)
        if iteration % 50 == 49 or iteration + 1 == num_iterations:
            checkpoint = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(checkpoint, out / "checkpoint.pt")
    progress.close()
    seconds = time.perf_counter() - start
    env.close()

    # One whole game, which is several episodes where these end with a life.
    env = make_env(args, 1, out / "videos")
    td = env.reset(seed=args.seed + 1_000_000)
    is_over = False
    while not is_over:
        transition, td = env.step(agent.act(td))
        is_over = bool(transition["next", "info", "game_over"])
    evaluation = transition["next", "info", "game_return"].item()
    env.close()

    figures = {
        "env": args.env_id,
        "preset": args.preset,
        "network": args.network,
        "bfloat16": args.bfloat16,
        "seed": args.seed,
        "env_steps": num_iterations * batch_size,
        "wall_seconds": seconds,
        "final_mean_return": curve[-1][1] if curve else None,
        "evaluation_return": evaluation,
    }
    metrics = {**figures, "curve": curve[:: max(1, len(curve) // 200)]}
    (out / "metrics.json").write_text(json.dumps(metrics) + "\n")
    if curve:
        curve.plot(out / "learning_curve.png", f"PPO on {args.env_id}, seed {args.seed}")
    print(json.dumps(figures, indent=2))
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
