"""PPO on Atari games from raw frames, after CleanRL's ppo_atari.py: the same starts, frames and rewards, bit for bit.

python examples/ppo_atari.py                                Pong: one million steps on a CPU
python examples/ppo_atari.py --device cuda --network nature --total-timesteps 10000000
python examples/ppo_atari.py --env-id ALE/Breakout-v5

Writes metrics.json, learning_curve.png, checkpoint.pt and videos of a game into --out. Frames are resized, turned gray and
stacked on --device, so that only raw ones are copied there. Returns are those of whole games, though episodes end with a life.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import pstdev
from typing import Literal

import torch
import tyro
from atari_game import make_atari
from ppo import gae, layer_init, plot
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.wrappers import RecordVideo


@dataclass
class Args:
    """Flags are CleanRL's where it has the same."""

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
    """nature is CleanRL's, of Mnih et al. (2015); small is that of Mnih et al. (2013), with a third of the work"""
    bfloat16: bool | None = None
    """compute the network in bfloat16, where its parameters stay in float32; None does so if the processor can"""
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
    num_steps: int = 128
    """number of steps of each game per rollout"""
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


def has_bfloat16(device: str) -> bool:
    """Whether a processor has instructions for bfloat16. Other CPUs emulate them, and are slower than in float32."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = Path(
        "/proc/cpuinfo"
    )  # avx512_bf16 and amx_bf16, or bf16 on Arm; without the file, in float32
    return flags.exists() and "bf16" in flags.read_text()


def make_env(args: Args, num_envs: int, videos: Path | None = None) -> tw.Env:
    env = make_atari(
        args.env_id,
        num_envs,
        args.preset,
        device=args.device,
        render_mode="rgb_array" if videos else None,
    )
    if videos is not None:
        env = RecordVideo(env, str(videos), episode_trigger=lambda episode: True)
    return tw.TransformedEnv(env, T.atari(args.preset))


class Agent(nn.Module):
    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        if args.network == "nature":
            convolutions, pixels, features = (
                [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)],
                64 * 7 * 7,
                512,
            )
        else:
            convolutions, pixels, features = [(4, 16, 8, 4), (16, 32, 4, 2)], 32 * 9 * 9, 256
        layers = [
            layer for sizes in convolutions for layer in (layer_init(nn.Conv2d(*sizes)), nn.ReLU())
        ]
        layers = [*layers, nn.Flatten(), layer_init(nn.Linear(pixels, features)), nn.ReLU()]
        self.network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.actor = layer_init(nn.Linear(features, int(env.single_action_space.n)), std=0.01)
        self.critic = layer_init(nn.Linear(features, 1), std=1.0)
        self.bfloat16 = bool(args.bfloat16)

    def forward(self, observation: Tensor) -> tuple[Categorical, Tensor]:
        """The distribution of actions, and the value, of frames `(n, 4, 84, 84)` uint8."""
        with torch.autocast(observation.device.type, torch.bfloat16, enabled=self.bfloat16):
            features = self.network(observation.to(memory_format=torch.channels_last) / 255)
            logits, value = self.actor(features).float(), self.critic(features).float()
        return Categorical(logits=logits, validate_args=False), value.squeeze(-1)

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        distribution, value = self(td["observation"])
        action = distribution.sample()
        return td.update(
            {"action": action, "logprob": distribution.log_prob(action), "value": value}
        )


@torch.no_grad()
def make_batch(agent: Agent, data: TensorDict, td: TensorDict, args: Args) -> dict[str, Tensor]:
    """Flatten a rollout `(num_envs, num_steps)`, with advantages and returns."""
    reward, terminated, done = (
        data["next", key].squeeze(-1) for key in ("reward", "terminated", "done")
    )
    following = torch.cat([data["value"][:, 1:], agent(td["observation"])[1].unsqueeze(1)], 1)
    truncated = done & ~terminated  # there, the next value is that of another episode
    if truncated.any():
        following[truncated] = agent(data["next", "observation"][truncated])[1]
    delta = reward + args.gamma * following * ~terminated - data["value"]
    advantages = gae(delta, args.gamma * args.gae_lambda * ~done)
    batch = {name: data[name] for name in ("observation", "action", "logprob")}
    batch |= dict(advantage=advantages, ret=advantages + data["value"])
    return {name: value.flatten(0, 1) for name, value in batch.items()}


def ppo_loss(agent: Agent, mb: dict[str, Tensor], args: Args) -> Tensor:
    distribution, value = agent(mb["observation"])
    ratio = (distribution.log_prob(mb["action"]) - mb["logprob"]).exp()
    advantage = (mb["advantage"] - mb["advantage"].mean()) / (mb["advantage"].std() + 1e-8)
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
    print(
        f"{args.network} network in {'bfloat16' if args.bfloat16 else 'float32'} on {args.device}"
    )
    out = args.out or Path("runs") / f"ppo-atari-{args.env_id.rpartition('/')[2]}"
    out.mkdir(parents=True, exist_ok=True)

    env = make_env(args, args.num_envs)
    if args.compile:
        tw.compile(env)
    td = env.reset(seed=args.seed)
    agent = Agent(env, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    successor = ["observation", "reward", "terminated", "done", "info"]
    keys = ["observation", "action", "logprob", "value", *(("next", key) for key in successor)]
    collect = tw.Collector(env, agent.act, args.num_steps, keys=keys)

    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    curve, returns = [], []
    progress = tqdm(total=num_iterations * batch_size, unit=" steps", unit_scale=True)
    for iteration in range(num_iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)
        data, td = collect(td)
        batch = make_batch(agent, data, td, args)
        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size, device=args.device).chunk(args.num_minibatches):
                loss = ppo_loss(agent, {name: value[rows] for name, value in batch.items()}, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        progress.update(batch_size)
        info = data["next", "info"]
        returns = [*returns, *info["game_return"][info["game_over"].bool()].tolist()][-20:]
        if returns:
            mean = sum(returns) / len(returns)
            curve.append(
                ((iteration + 1) * batch_size, mean, time.perf_counter() - start, pstdev(returns))
            )
            progress.set_postfix({"return": f"{mean:.1f}"}, refresh=False)
        if iteration % 50 == 49 or iteration + 1 == num_iterations:
            torch.save(
                {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()},
                out / "checkpoint.pt",
            )
    progress.close()
    seconds = time.perf_counter() - start
    env.close()

    # One whole game, which is several episodes where these end with a life.
    env = make_env(args, 1, out / "videos")
    td, over = env.reset(seed=args.seed + 1_000_000), False
    while not over:
        transition, td = env.step(agent.act(td))
        over = bool(transition["next", "info", "game_over"])
    evaluation = transition["next", "info", "game_return"].item()
    env.close()

    metrics = {
        "env": args.env_id,
        "preset": args.preset,
        "network": args.network,
        "bfloat16": args.bfloat16,
        "seed": args.seed,
        "env_steps": num_iterations * batch_size,
        "wall_seconds": seconds,
        "final_mean_return": curve[-1][1] if curve else None,
        "evaluation_return": evaluation,
        "curve": curve[:: max(1, len(curve) // 200)],
    }
    (out / "metrics.json").write_text(json.dumps(metrics) + "\n")
    if curve:
        plot(out / "learning_curve.png", args, curve, window=20)
    print(json.dumps({name: value for name, value in metrics.items() if name != "curve"}, indent=2))
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
