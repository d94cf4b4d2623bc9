"""PPO on torchwrap in one file, top to bottom: discrete and continuous actions, native envs and Gymnasium's.

python examples/ppo.py                                                        solves CartPole-v1
python examples/ppo.py --env HalfCheetah-v5 --num-envs 8 --total-steps 100000

Writes learning_curve.png, checkpoint.pt and metrics.json into --out; --resume goes on from the checkpoint there.

The algorithm is Schulman et al. (2017) with the details of Huang et al., "The 37 implementation details of PPO" (2022), except
that truncated episodes are bootstrapped from their true final observation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium
import torch
import torch.nn.functional as F
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args:
    """Hyperparameters that are None take the value that suits the env or the kind of action, see DEFAULTS."""

    env: str = "CartPole-v1"
    backend: Literal["torch", "gymnasium"] | None = None
    """torch for torchwrap's own env, gymnasium for Gymnasium's; the first that has it where None"""
    num_envs: int | None = None
    num_steps: int | None = None
    """steps of each env between two updates"""
    total_steps: int | None = None
    """env steps in all"""
    device: str = "cpu"
    seed: int = 1
    target_return: float | None = None
    """what counts as solved; the env's registered reward threshold where None"""
    compile: bool = False
    """graphs for env and policy together (for the transforms alone where Gymnasium steps), and for the loss"""
    out: Path | None = None
    """folder for the results; runs/ppo-<env> where None"""
    resume: bool = False
    """go on from the checkpoint in out, where there is one, to the same end as if nothing had happened"""
    save_every: int = 10
    """updates between two checkpoints"""
    normalize: bool | None = None
    """observations and rewards, by running statistics"""
    learning_rate: float | None = None
    """annealed to zero"""
    gamma: float | None = None
    gae_lambda: float | None = None
    epochs: int | None = None
    minibatch_size: int | None = None
    clip: float = 0.2
    anneal_clip: bool | None = None
    """to zero, as the learning rate: with a constant one, some seeds of CartPole unlearn at the end"""
    entropy_weight: float = 0.0
    value_weight: float = 0.5
    max_grad_norm: float = 0.5


DEFAULTS = {
    "discrete": dict(
        num_envs=48,
        num_steps=20,
        total_steps=100_000,
        learning_rate=3e-3,
        gamma=0.98,
        gae_lambda=0.9,
        epochs=10,
        minibatch_size=480,
        anneal_clip=True,
        normalize=False,
    ),
    "continuous": dict(
        num_envs=8,
        num_steps=256,
        total_steps=1_000_000,
        learning_rate=3e-4,
        gamma=0.99,
        gae_lambda=0.95,
        epochs=10,
        minibatch_size=64,
        anneal_clip=False,
        normalize=True,
    ),
    "Acrobot-v1": dict(num_envs=32, num_steps=128, total_steps=400_000, gamma=0.99, minibatch_size=1024, normalize=True),
    "MountainCar-v0": dict(
        num_envs=64,
        num_steps=128,
        total_steps=1_000_000,
        learning_rate=2e-3,
        gamma=0.99,
        gae_lambda=0.98,
        minibatch_size=1024,
        anneal_clip=False,
        normalize=True,
    ),
    "MountainCarContinuous-v0": dict(
        num_envs=64, num_steps=256, learning_rate=1e-3, gamma=0.9999, gae_lambda=0.9, minibatch_size=1024
    ),
    "Pendulum-v1": dict(num_envs=32, num_steps=128, total_steps=400_000, learning_rate=1e-3, gamma=0.9, minibatch_size=256),
}


def make_env(args: Args, num_envs: int, make: Callable[..., tw.Env] = tw.make) -> tw.Env:
    env = make(args.env, num_envs, backend=args.backend, device=args.device)
    discrete = isinstance(env.single_action_space, gymnasium.spaces.Discrete)
    transforms = [*([] if discrete else [T.ClipAction()]), T.RecordEpisodeStatistics(), T.FlattenObservation()]
    if args.normalize:
        transforms += [T.NormalizeObservation(), T.ClipObservation(-10, 10)]
        transforms += [T.NormalizeReward(gamma=args.gamma), T.ClipReward(-10, 10)]
    return tw.TransformedEnv(env, *transforms)


def mlp(inputs: int, outputs: int, between: type[nn.Module], last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), between(), nn.Linear(64, 64), between(), nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Softmax:
    """PyTorch's Categorical, in fewer operators."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def sample(self) -> Tensor:
        return torch.multinomial(self.logits.softmax(-1), 1).squeeze(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return -F.cross_entropy(self.logits, action, reduction="none")

    def entropy(self) -> Tensor:
        log_probs = self.logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)


class Agent(nn.Module):
    def __init__(self, env: tw.Env) -> None:
        super().__init__()
        inputs, action_space = env.single_observation_space.shape[0], env.single_action_space
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        # Discrete tasks are learned as soon with straight lines, for which a CPU takes a tenth of the time of tanh.
        between = nn.Hardtanh if self.discrete else nn.Tanh
        self.actor = mlp(inputs, outputs, between, last_gain=0.01)
        self.critic = mlp(inputs, 1, between, last_gain=1.0)
        self.log_std = nn.Parameter(torch.zeros(0 if self.discrete else outputs))

    def distribution(self, observation: Tensor) -> Softmax | Distribution:
        out = self.actor(observation.float())
        if self.discrete:
            return Softmax(out)
        return Independent(Normal(out, self.log_std.exp(), validate_args=False), 1, validate_args=False)

    def value(self, observation: Tensor) -> Tensor:
        return self.critic(observation.float()).squeeze(-1)

    def act(self, td: TensorDict) -> TensorDict:
        return td.set("action", self.distribution(td["observation"]).sample())


def flatten(module: nn.Module) -> nn.Parameter:
    """One parameter, in whose memory lie all of the module's, and their gradients: an optimizer has one to go through."""
    parameters = list(module.parameters())
    flat = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    flat.grad = torch.zeros_like(flat)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, data, grad in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes)):
        parameter.data, parameter.grad = data.view_as(parameter), grad.view_as(parameter)
    return flat


@torch.no_grad()
def prepare(agent: Agent, data: TensorDict, args: Args) -> TensorDict:
    """Log probabilities, advantages (Schulman et al., 2016) and returns of a rollout `(num_envs, num_steps)`, flattened."""
    following = data["next"]
    reward, terminated, done = (following[key].squeeze(-1) for key in ("reward", "terminated", "done"))
    value = agent.value(data["observation"])
    # The successor of a step is always the true one: bootstrap from it unless the episode terminated there.
    delta = reward + args.gamma * agent.value(following["observation"]) * ~terminated - value
    decay = args.gamma * args.gae_lambda * ~done
    advantage = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for step in reversed(range(delta.shape[1])):
        running = delta[:, step] + decay[:, step] * running
        advantage[:, step] = running
    learned = dict(observation=data["observation"], action=data["action"], advantage=advantage, returns=advantage + value)
    batch = TensorDict(learned, batch_size=data.batch_size).reshape(-1)
    return batch.set("log_prob", agent.distribution(batch["observation"]).log_prob(batch["action"]))


def ppo_loss(agent: Agent, batch: TensorDict, clip: Tensor, args: Args) -> Tensor:
    distribution = agent.distribution(batch["observation"])
    ratio = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp()
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
    value_loss = F.mse_loss(agent.value(batch["observation"]), batch["returns"])
    loss = policy_loss + args.value_weight * value_loss
    return loss - args.entropy_weight * distribution.entropy().mean() if args.entropy_weight else loss


def plot(path: Path, args: Args, curve: list[tuple[int, float, float]]) -> None:
    from matplotlib.figure import Figure  # for which learning need not wait

    steps, returns, seconds = zip(*curve)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, returns, label="mean return of the latest 100 episodes")
    low, high = min(returns), max(returns)
    if args.target_return is not None and args.target_return <= 2 * high - low:  # not where it would flatten the curve
        axes.axhline(args.target_return, color="gray", linestyle="--", label=f"target {args.target_return:g}")
    axes.set(title=f"PPO on {args.env}, seed {args.seed}, {seconds[-1]:.0f} s", xlabel="env steps", ylabel="return")
    axes.legend()
    figure.savefig(path, dpi=120)


def save(path: Path, checkpoint: dict[str, object]) -> None:
    # A file of that name is always whole, whenever the process dies.
    part = path.with_suffix(".part")
    torch.save(checkpoint, part)
    part.replace(path)


def load(path: Path, run: dict[str, str]) -> dict[str, object] | None:
    if not path.exists():
        return None
    checkpoint = torch.load(path, weights_only=True)
    if checkpoint["run"] != run:
        other = {name: checkpoint["run"].get(name) for name, value in run.items() if checkpoint["run"].get(name) != value}
        raise ValueError(f"ppo.py --resume needs the arguments of the run in {path.parent}, which had {other}.")
    return checkpoint


def main(args: Args, make: Callable[..., tw.Env] = tw.make) -> dict[str, object]:
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(1)  # networks this small lose more by handing work between threads than they gain

    probe = make(args.env, 1, backend=args.backend)
    kind = "discrete" if isinstance(probe.single_action_space, gymnasium.spaces.Discrete) else "continuous"
    probe.close()
    for name, value in {**DEFAULTS[kind], **DEFAULTS.get(args.env, {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    env = make_env(args, args.num_envs, make)
    native = isinstance(env.unwrapped, tw.FunctionalEnv)
    if args.target_return is None:
        args.target_return = getattr(env.spec, "reward_threshold", None)
    out = args.out or Path("runs") / f"ppo-{args.env}"
    out.mkdir(parents=True, exist_ok=True)

    agent = Agent(env).to(args.device)
    weights = flatten(agent)
    optimizer = torch.optim.Adam([weights], lr=args.learning_rate, eps=1e-5, fused=True)
    loss_of = torch.compile(ppo_loss) if args.compile else ppo_loss
    statistics = next(module for module in env.modules() if isinstance(module, T.RecordEpisodeStatistics))

    needed = ["observation", "action", *(("next", key) for key in ("observation", "reward", "terminated", "done"))]
    collect = tw.Collector(env, agent.act, args.num_steps, keys=needed)
    if args.compile:
        tw.compile(collect if native else env)
    steps_per_update = args.num_envs * args.num_steps
    num_updates = -(-args.total_steps // steps_per_update)
    curve, reached, before, first = [], None, 0.0, 0
    td = env.reset(seed=args.seed)
    # What a run depends on; a snapshot holds the envs' lives, and PyTorch's own random numbers are the policy's.
    run = {name: str(value) for name, value in vars(args).items() if name not in ("out", "resume", "save_every")}
    if args.resume and not env.can_snapshot:
        raise ValueError(f"ppo.py --resume needs an env of torchwrap's own, but got {env!r}.")
    checkpoint = load(out / "checkpoint.pt", run) if args.resume else None
    if checkpoint is not None:
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        td = env.restore(checkpoint["snapshot"])
        torch.set_rng_state(checkpoint["rng"])
        curve, reached, before, first = (checkpoint[name] for name in ("curve", "reached", "seconds", "update"))
    started -= before
    with tqdm(total=num_updates * steps_per_update, initial=first * steps_per_update, unit=" steps", unit_scale=True) as bar:
        for update in range(first, num_updates):
            left = 1 - update / num_updates
            optimizer.param_groups[0]["lr"] = args.learning_rate * left
            # A tensor, so that a compiled loss stays one graph.
            clip = torch.tensor(args.clip * (left if args.anneal_clip else 1.0), device=args.device)
            data, td = collect(td)
            batch = prepare(agent, data, args)
            for _ in range(args.epochs):
                shuffled = batch[torch.randperm(len(batch), device=args.device)]
                for minibatch in shuffled.split(args.minibatch_size):
                    loss = loss_of(agent, minibatch, clip, args)
                    weights.grad.zero_()
                    loss.backward()
                    nn.utils.clip_grad_norm_([weights], args.max_grad_norm)
                    optimizer.step()
            bar.update(steps_per_update)
            returns = statistics.return_queue
            if len(returns):
                env_steps, seconds, mean_return = bar.n, time.perf_counter() - started, returns.mean().item()
                curve.append((env_steps, mean_return, seconds))
                bar.set_postfix({"return": f"{mean_return:.1f}"}, refresh=False)
                full = len(returns) == statistics.buffer_length
                if reached is None and args.target_return is not None and full and mean_return >= args.target_return:
                    reached = (env_steps, seconds)
            if (update + 1) % args.save_every == 0 or update + 1 == num_updates:
                state = {"agent": agent.state_dict(), "env": env.state_dict(), "optimizer": optimizer.state_dict()}
                if env.can_snapshot:
                    state |= {"snapshot": env.snapshot().to_dict(), "rng": torch.get_rng_state(), "update": update + 1}
                seconds = time.perf_counter() - started
                save(out / "checkpoint.pt", {**state, "run": run, "curve": curve, "reached": reached, "seconds": seconds})
    wall_seconds = time.perf_counter() - started

    # Fresh episodes in envs of their own, with what the transforms have learned. Actions are drawn as in training: that is
    # the policy that was optimised, and early in training its mode alone can be far worse.
    eval_env = make_env(args, 20, make)
    eval_env.load_state_dict(env.state_dict())
    eval_env.reset(seed=args.seed + 1_000_000)
    eval_returns = tw.evaluate(eval_env, agent.act, 20)["episode_return"]

    metrics = {
        "env": args.env,
        "backend": "torch" if native else "gymnasium",
        "num_envs": args.num_envs,
        "device": args.device,
        "seed": args.seed,
        "env_steps": num_updates * steps_per_update,
        "wall_seconds": wall_seconds,
        "steps_per_second": num_updates * steps_per_update / wall_seconds,
        "target_return": args.target_return,
        "env_steps_to_target": reached and reached[0],
        "seconds_to_target": reached and reached[1],
        "final_mean_return": curve[-1][1] if curve else None,
        "eval_mean_return": eval_returns.mean().item(),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    if curve:
        plot(out / "learning_curve.png", args, curve)
    env.close()
    eval_env.close()
    print(json.dumps(metrics, indent=2))
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
