"""PPO on a native env, compiled by you: `torch.compile(fullgraph=True)` takes the rollout step, the advantages and the loss.

    python examples/ppo_compiled.py --env-id CartPole-v1

torchwrap needs no function of its own for it: a step with its transforms and its auto-reset is plain tensor code. `ppo.py
--compile` is faster with few envs, because `tw.compile` leaves out the guards and several steps share a graph.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """a native env with discrete actions"""
    seed: int = 1
    """of the env, the network and the sampled actions"""
    total_timesteps: int = 150_000
    """env steps, all envs together"""
    num_envs: int = 64
    """number of envs"""
    num_steps: int = 32
    """steps per env and iteration"""
    update_epochs: int = 8
    """passes over the data of an iteration"""
    num_minibatches: int = 4
    """minibatches per pass"""
    gamma: float = 0.98
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    clip_coef: float = 0.2
    """clip coefficient of the policy's ratio"""
    learning_rate: float = 3e-3
    """of Adam, annealed to 0"""
    device: str = "cpu"
    """of the envs and the networks"""
    backend: str = "inductor"
    """of torch.compile"""
    out: Path | None = None
    """folder for metrics.json; defaults to runs/ppo-compiled-<env_id>"""


def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    network = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, gain in zip(network[::2], (2**0.5, 2**0.5, std)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return network


def main(args: Args) -> dict[str, object]:
    torch.manual_seed(args.seed)
    env = tw.make(args.env_id, args.num_envs, device=args.device)
    env = tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.ClipObservation(-10, 10))
    statistics = env.transforms[0]
    inputs, outputs = env.single_observation_space.shape[0], int(env.single_action_space.n)
    actor, critic = mlp(inputs, outputs, 0.01).to(args.device), mlp(inputs, 1, 1.0).to(args.device)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, args.learning_rate, eps=1e-5, fused=True)

    def compiled(function):
        return torch.compile(function, fullgraph=True, dynamic=False, backend=args.backend)

    # The rollout: the policy, the env with its transforms, and the auto-reset are one graph.
    @compiled
    @torch.no_grad()
    def step(td: TensorDict) -> tuple[TensorDict, TensorDict]:
        distribution = Categorical(logits=actor(td["observation"]), validate_args=False)
        td["action"] = distribution.sample()
        td["logprob"] = distribution.log_prob(td["action"])
        return env.step(td)

    @compiled
    @torch.no_grad()
    def estimate(data: TensorDict) -> tuple[Tensor, Tensor]:
        """Advantages and returns, `(num_steps, num_envs)`."""
        values = critic(data["observation"]).squeeze(-1)
        reward, terminated, done = (data["next", key].squeeze(-1) for key in ("reward", "terminated", "done"))
        # ("next", "observation") is the final observation where an episode ended, so truncation is bootstrapped from it.
        delta = reward + args.gamma * critic(data["next", "observation"]).squeeze(-1) * ~terminated - values
        decay, advantage, advantages = args.gamma * args.gae_lambda * ~done, torch.zeros_like(delta[0]), []
        for one, keep in zip(reversed(delta.unbind(0)), reversed(decay.unbind(0))):
            advantage = one + keep * advantage
            advantages.append(advantage)
        stacked = torch.stack(advantages[::-1])
        return stacked, stacked + values

    @compiled
    def loss(observation: Tensor, action: Tensor, logprob: Tensor, advantage: Tensor, ret: Tensor) -> Tensor:
        distribution = Categorical(logits=actor(observation), validate_args=False)
        ratio = (distribution.log_prob(action) - logprob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -torch.min(advantage * ratio, advantage * clipped).mean()
        return policy_loss + 0.25 * (critic(observation).squeeze(-1) - ret).square().mean()

    batch_size = args.num_envs * args.num_steps
    num_iterations = max(1, args.total_timesteps // batch_size)
    td, start, steady_start = env.reset(seed=args.seed), time.perf_counter(), 0.0
    for iteration in range(num_iterations):
        transitions = []
        for _ in range(args.num_steps):
            transition, td = step(td)
            transitions.append(transition)
        data = torch.stack(transitions)
        advantages, returns = estimate(data)
        parts = (data["observation"], data["action"], data["logprob"], advantages, returns)
        flat = [part.flatten(0, 1) for part in parts]
        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size, device=args.device).chunk(args.num_minibatches):
                optimizer.zero_grad()
                loss(*[part[rows] for part in flat]).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration + 1) / num_iterations)
        if iteration == 0:  # which compiles
            steady_start = time.perf_counter()
    seconds, steady = time.perf_counter() - start, time.perf_counter() - steady_start
    episodes = min(statistics.episode_count, 100)
    metrics = {
        "env_id": args.env_id,
        "mean_return": float(statistics.return_queue.mean()) if episodes else None,
        "seconds": seconds,
        "steps_per_second": num_iterations * batch_size / seconds,
        "steps_per_second_steady": (num_iterations - 1) * batch_size / steady if num_iterations > 1 else None,
        "compile_seconds": steady_start - start,
    }
    out = args.out or Path("runs") / f"ppo-compiled-{args.env_id}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(f"{args.env_id}: mean return {metrics['mean_return']} of the latest {episodes} episodes, {seconds:.0f} s")
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
