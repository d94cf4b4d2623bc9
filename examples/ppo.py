"""PPO after CleanRL's ppo.py, for discrete, multi-discrete and continuous actions.

python examples/ppo.py                                  solves CartPole-v1
python examples/ppo.py --env-id HalfCheetah-v5          trains on a Gymnasium env
python examples/ppo.py --env-id module:Id               trains on your own env, once registered
python examples/ppo.py --tensorboard --resume           logs, and continues a run that was killed

A file to copy: it needs no other. Writes metrics.json, learning_curve.png and agent.pt into --out.
Beside it: ppo_presets.json, hyperparameters; ppo_output.py, TensorBoard, checkpoints, a hint;
ppo_parts.py, images, masks, layered envs, and actions but Discrete(n) and float32 vectors.

Schulman et al. (2017) with the details of Huang et al., "The 37 Implementation Details of Proximal
Policy Optimization" (2022). One difference: truncated episodes are bootstrapped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn, optim
from torch.distributions import Categorical, Distribution, Independent, Normal
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T

Batch = dict[str, Tensor]
Make = Callable[..., tw.Env]  # takes the arguments of tw.make


class Flags:
    """Base of flags. Numbers and paths may be strings, such as YAML's 1e-3. Counts are positive."""

    def __post_init__(self) -> None:
        kinds = {"int": int, "float": float, "Path": Path, "bool": {}.__getitem__}
        for each in fields(self):
            value = getattr(self, each.name)
            kind = kinds.get(each.type.removesuffix(" | None"))
            if isinstance(value, str) and kind is not None:
                try:
                    value = kind(value)
                except (KeyError, ValueError):
                    raise ValueError(f"{each.name} must be {each.type}, got {value!r}.") from None
                setattr(self, each.name, value)
            is_count = kind is int and each.name not in ("seed", "learning_starts")
            if is_count and value is not None and value < 1:
                raise ValueError(f"{each.name} must be at least 1, got {value}.")


@dataclass
class Args(Flags):
    """Flags have CleanRL's names. None takes the env's preset, or else CleanRL's value."""

    env_id: str = "CartPole-v1"
    seed: int = 1  # of the environments and of PyTorch
    backend: Literal["torch", "gymnasium"] | None = None  # None: torchwrap's own env if it has one
    device: str = "cpu"  # of the environments and of the agent
    compile: bool = False  # the rollout (over Gymnasium its transforms) and the whole update
    num_threads: int = 1  # on the CPU; small minibatches are faster on one
    out: Path | None = None  # folder of the results; None: runs/ppo-<env_id>
    tensorboard: bool = False  # write scalars into the folder of the results
    metrics: dict[str, str] | None = None  # infos by episode: `--metrics success max energy sum`
    resume: bool = False  # write checkpoints, and continue from the last one in --out, if any
    save_every: int = 10  # iterations between two checkpoints
    target_return: float | None = None  # "solved": mean of 100 episodes; None: the env's threshold
    total_timesteps: int | None = None  # env steps
    learning_rate: float | None = None
    num_envs: int | None = None
    num_steps: int | None = None  # per env and rollout; None keeps the batch, with 16 or more
    anneal_lr: bool = True  # linearly to zero
    gamma: float | None = None
    gae_lambda: float | None = None
    num_minibatches: int | None = None
    update_epochs: int | None = None
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2
    clip_vloss: bool | None = None  # clip the change of the value function as well
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None  # end an iteration early if the approximate KL exceeds this
    normalize: bool | None = None  # observations and rewards, and clip them to [-10, 10]
    hidden_size: int | None = None  # units of each of the two hidden layers
    log_std: float | None = None  # initial, of continuous actions


# As CleanRL's ppo.py, without its entropy bonus, and its ppo_continuous_action.py.
DISCRETE_ACTIONS = dict(total_timesteps=500_000, learning_rate=2.5e-4, num_envs=4, num_steps=128)
DISCRETE_ACTIONS |= dict(gamma=0.99, gae_lambda=0.95, num_minibatches=4, update_epochs=4)
DISCRETE_ACTIONS |= dict(clip_vloss=True, normalize=False, hidden_size=64, log_std=0.0)
CONTINUOUS_ACTIONS = dict(DISCRETE_ACTIONS, total_timesteps=10**6, learning_rate=3e-4, num_envs=1)
CONTINUOUS_ACTIONS |= dict(num_steps=2048, num_minibatches=32, update_epochs=10, normalize=True)


def fill_in(args: Args, make: Make = tw.make) -> None:
    """Sets the folder, the backend, the target return and the hyperparameters that are None."""
    path = Path(__file__).with_name("ppo_presets.json")
    presets = json.loads(path.read_text()) if path.exists() else {}
    probe = make(args.env_id, 1, backend=args.backend)
    is_continuous = isinstance(probe.single_action_space, spaces.Box)
    values = dict(CONTINUOUS_ACTIONS if is_continuous else DISCRETE_ACTIONS)
    name = args.env_id.rpartition(":")[2]  # without its module
    values |= presets.get(name, {})
    if args.num_envs is not None:
        batch_size = values["num_envs"] * values["num_steps"]
        # PPO does not learn CartPole from rollouts of one step.
        values["num_steps"] = max(16, batch_size // args.num_envs)
    values["target_return"] = getattr(probe.spec, "reward_threshold", None)
    for flag, value in values.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    args.backend = "torch" if isinstance(probe.unwrapped, tw.FunctionalEnv) else "gymnasium"
    args.out = args.out or Path("runs") / f"ppo-{name.replace('/', '-')}"
    args.out.mkdir(parents=True, exist_ok=True)
    probe.close()


def make_env(args: Args, num_envs: int, make: Make = tw.make, **arguments: Any) -> tw.Env:
    if args.metrics and args.backend == "gymnasium":
        arguments["info_keys"] = list(args.metrics)
    env = make(args.env_id, num_envs, backend=args.backend, device=args.device, **arguments)
    vector = [T.FlattenObservation()]
    if args.normalize:
        vector += [T.NormalizeObservation(), T.ClipObservation(-10, 10)]
    if Path(__file__).with_name("ppo_parts.py").exists():
        import ppo_parts

        env, vector = ppo_parts.adapt(env, vector, args.metrics)
    transforms = [T.ClipAction()] if isinstance(env.single_action_space, spaces.Box) else []
    if not T.RecordEpisodeStatistics.of(env):
        transforms += [T.RecordEpisodeStatistics(metrics=args.metrics)]
    if len(env.single_observation_space.shape or ()) < 2:
        transforms += vector
    if args.normalize:
        transforms += [T.NormalizeReward(gamma=args.gamma), T.ClipReward(-10, 10)]
    return tw.TransformedEnv(env, *transforms)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(space: spaces.Box, outputs: int, std: float, hidden_size: int) -> nn.Sequential:
    first = layer_init(nn.Linear(space.shape[0], hidden_size))
    second = layer_init(nn.Linear(hidden_size, hidden_size))
    last = layer_init(nn.Linear(hidden_size, outputs), std)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


class Agent(nn.Module):
    def __init__(self, env: tw.Env, hidden_size: int = 64, log_std: float = 0.0) -> None:
        super().__init__()
        self.action_space = env.single_action_space
        space = env.single_observation_space
        outputs = spaces.flatdim(self.action_space)  # logits, or means of a Box
        self.is_masked = env.has_wrapper_attr("masks_first")
        make_network = mlp
        if len(space.shape) > 1:
            from ppo_parts import ImageNetwork as make_network
        self.critic = make_network(space, 1, 1.0, hidden_size)
        self.actor = make_network(space, outputs, 0.01, hidden_size)
        if isinstance(self.action_space, spaces.Box):
            self.actor_logstd = nn.Parameter(log_std * torch.ones(outputs))

    def get_value(self, observation: Tensor) -> Tensor:
        return self.critic(observation.float()).squeeze(-1)

    def get_distribution(self, observation: Tensor) -> Distribution:
        out = self.actor(observation.float())
        if self.is_masked:
            out = torch.where(observation[..., : out.shape[-1]] > 0, out, -1e8)
        if isinstance(self.action_space, spaces.MultiDiscrete):
            from ppo_parts import Choices, sizes

            return Choices(out.split(sizes(self.action_space), -1))
        if isinstance(self.action_space, spaces.Discrete):
            return Categorical(logits=out, validate_args=False)
        normal = Normal(out, self.actor_logstd.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)  # sums over dimensions of an action

    def act(self, td: TensorDict) -> TensorDict:
        return td.set("action", self.get_distribution(td["observation"]).sample())


def make_collector(env: tw.Env, agent: Agent, args: Args) -> tw.Collector:
    successor = ["observation", "reward", "terminated", "done"]
    for statistics in T.RecordEpisodeStatistics.of(env):
        successor += statistics.keys.values()
    keys = ["observation", "action", *(("next", key) for key in successor)]
    return tw.Collector(env, agent.act, args.num_steps, keys=keys)


def gae(delta: Tensor, decay: Tensor) -> Tensor:
    """`advantage[t] = delta[t] + decay[t] * advantage[t + 1]`, which ends where `decay` is 0."""
    ahead = 1  # Each pass looks ahead twice as far.
    while ahead < delta.shape[1]:
        following = nn.functional.pad(delta[:, ahead:], (0, ahead))
        delta = delta + torch.where(decay > 0, decay * following, 0)
        decay = decay * nn.functional.pad(decay[:, ahead:], (0, ahead))
        ahead *= 2
    return delta


def estimate_advantages(data: Any, values: Tensor, next_values: Tensor, args: Any) -> Tensor:
    """Advantages of a rollout, from the values of observations and of their successors."""
    successor = data["next"]
    done = successor["done"].squeeze(-1)
    # A terminated episode may end in NaN, and NaN * 0 is NaN.
    next_values = torch.where(successor["terminated"].squeeze(-1), 0, next_values)
    delta = successor["reward"].squeeze(-1) + args.gamma * next_values - values
    return gae(delta, args.gamma * args.gae_lambda * ~done)


@torch.no_grad()
def make_batch(agent: Agent, data: dict[str, Any], args: Args) -> Batch:
    """Flatten a rollout `(num_envs, num_steps)`, with log probabilities, advantages and returns."""
    values = agent.get_value(data["observation"])
    # Where an episode ended, from the final observation, so that truncated ones are bootstrapped.
    next_values = agent.get_value(data["next"]["observation"])
    advantages = estimate_advantages(data, values, next_values, args)
    batch = {
        "observation": data["observation"],
        "action": data["action"],
        "logprob": agent.get_distribution(data["observation"]).log_prob(data["action"]),
        "advantage": advantages,
        "value": values,
        "ret": advantages + values,
    }
    return {name: value.flatten(0, 1) for name, value in batch.items()}


def ppo_loss(agent: Agent, mb: Batch, args: Args) -> tuple[Tensor, Batch]:
    """The loss of a minibatch, and the figures that CleanRL logs."""
    distribution = agent.get_distribution(mb["observation"])
    logratio = distribution.log_prob(mb["action"]) - mb["logprob"]
    ratio = logratio.exp()
    advantages = mb["advantage"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()
    values = agent.get_value(mb["observation"])
    squares = (values - mb["ret"]) ** 2
    if args.clip_vloss:
        change = torch.clamp(values - mb["value"], -args.clip_coef, args.clip_coef)
        squares = torch.max(squares, (mb["value"] + change - mb["ret"]) ** 2)
    v_loss = 0.5 * squares.mean()
    entropy = distribution.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    stats = {
        "value_loss": v_loss,
        "policy_loss": pg_loss,
        "entropy": entropy,
        "old_approx_kl": -logratio.mean(),
        "approx_kl": ((ratio - 1) - logratio).mean(),  # http://joschu.net/blog/kl-approx.html
        "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: value.detach() for name, value in stats.items()}


def compute_gradients(agent: Agent, batch: Batch, rows: Tensor, args: Args) -> Batch:
    """Clipped gradients of a minibatch; one graph if compiled. Returns CleanRL's figures."""
    loss, stats = ppo_loss(agent, {name: value[rows] for name, value in batch.items()}, args)
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return stats


def train_minibatch(
    agent: Agent, optimizer: Any, args: Args, gradients: Callable, batch: Batch, rows: Tensor
) -> Batch:
    optimizer.zero_grad()  # in a graph, it would stop PyTorch 2.13 from compiling others
    stats = gradients(agent, batch, rows, args)
    optimizer.step()
    return stats


def update(batch: Batch, args: Args, train: Callable[[Batch, Tensor], Batch]) -> Batch:
    """Epochs over a batch. Returns the last minibatch's figures, and the mean clipfrac."""
    clipfracs = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["ret"]), device=args.device)
        for rows in order.chunk(args.num_minibatches):
            stats = train(batch, rows)
            clipfracs.append(stats["clipfrac"])
        if args.target_kl is not None and stats["approx_kl"] > args.target_kl:
            break
    return {**stats, "clipfrac": torch.stack(clipfracs).mean()}


def compiled(collect: tw.Collector, *functions: Callable) -> list[Callable]:
    """Compiles the rollout (of a simulator its transforms), and functions when first called."""
    options = {"cpp.use_decompose_tanh": True}  # by exp: Inductor's own takes three times as long
    is_native = isinstance(collect.env.unwrapped, tw.FunctionalEnv)
    tw.compile(collect if is_native else collect.env, options=options)
    torch._dynamo.config.trace_autograd_ops = True  # backward() becomes part of a graph
    whole = dict(fullgraph=True, dynamic=False, options=options)
    return [torch.compile(function, **whole) for function in functions]


class Curve(list[tuple[int, float, float, float]]):
    """By iteration: env steps, mean and standard deviation of the latest returns, and seconds."""

    def metrics(self, args: Args) -> dict[str, Any]:
        first_steps, _, _, first_seconds = self[0]  # of the iteration that compiles the update
        steps, mean, _, seconds = self[-1]
        steady = (steps - first_steps) / max(seconds - first_seconds, 1e-9)
        target = math.inf if args.target_return is None else args.target_return
        reached = [point for point in self if point[1] >= target]
        return {
            "env_steps": steps,
            "wall_seconds": seconds,
            "steps_per_second": steps / seconds,
            "steps_per_second_steady": steady,
            "compile_seconds": first_seconds if args.compile else 0.0,
            "target_return": args.target_return,
            "env_steps_to_target": reached[0][0] if reached else None,
            "seconds_to_target": reached[0][3] if reached else None,
            "final_mean_return": None if math.isnan(mean) else mean,
        }

    def plot(self, path: Path, title: str) -> None:
        from matplotlib.figure import Figure  # imported here so that training does not wait for it

        steps, mean, deviation, _ = torch.tensor(self, dtype=torch.float64).unbind(1)
        axes = Figure(figsize=(7, 4), layout="constrained").subplots()
        axes.plot(steps, mean)
        axes.fill_between(steps, mean - deviation, mean + deviation, alpha=0.2)
        axes.set(title=title, xlabel="env steps", ylabel="return of the latest 100 episodes")
        axes.figure.savefig(path, dpi=120)


def finish(args: Args, env: tw.Env, agent: Agent, curve: Curve, make: Make) -> dict[str, Any]:
    """Writes agent.pt, evaluates, writes metrics.json and the curve, and returns the metrics."""
    state = {"agent": agent.state_dict(), "env": env.state_dict(), "curve": list(curve)}
    torch.save(state, args.out / "agent.pt")
    with make_env(args, 20, make) as test_env:
        test_env.load_state_dict(env.state_dict())
        # Of sampled actions: early in training, the mode can be far worse.
        episodes = tw.evaluate(test_env, agent.act, 20, seed=args.seed + 1_000_000)
    names = ("env_id", "backend", "num_envs", "seed", "device")
    metrics = {name: getattr(args, name) for name in names} | curve.metrics(args)
    for statistics in T.RecordEpisodeStatistics.of(env):
        for name, queue in statistics.metric_queues.items():
            metrics[f"final_mean_{name}"] = queue.mean().item()
    metrics["eval_mean_return"] = episodes["episode_return"].mean().item()
    text = json.dumps(metrics, indent=2)
    (args.out / "metrics.json").write_text(text + "\n")
    curve.plot(args.out / "learning_curve.png", f"PPO on {args.env_id}, seed {args.seed}")
    print(f"{text}\nresults in {args.out}")
    env.close()
    return metrics


def main(args: Args, make: Make = tw.make) -> dict[str, Any]:
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.num_threads)
    fill_in(args, make)
    env = make_env(args, args.num_envs, make)
    statistics = T.RecordEpisodeStatistics.of(env)[0]
    agent = Agent(env, args.hidden_size, args.log_std).to(args.device)
    batch_size = args.num_envs * args.num_steps
    is_cuda = torch.device(args.device).type == "cuda"
    is_captured = args.compile and is_cuda and batch_size % args.num_minibatches == 0
    learning_rate = torch.tensor(args.learning_rate, device=args.device)
    adam = dict(eps=1e-5, fused=True, capturable=is_captured)
    optimizer = optim.Adam(agent.parameters(), learning_rate, **adam)
    collect = make_collector(env, agent, args)
    to_batch = make_batch
    gradients = compute_gradients
    if args.compile:
        to_batch, gradients = compiled(collect, make_batch, compute_gradients)
    train = partial(train_minibatch, agent, optimizer, args, gradients)
    if is_captured:
        train = CudaGraphModule(train, warmup=3)  # one launch
    env.reset(seed=args.seed)
    curve = Curve()
    output = None
    if args.resume or args.tensorboard or Path(__file__).with_name("ppo_output.py").exists():
        from ppo_output import Output

        output = Output(args, env, {"agent": agent, "optimizer": optimizer, "curve": curve})
    num_iterations = -(-args.total_timesteps // batch_size)
    start -= curve[-1][3] if curve else 0
    progress = tqdm(range(len(curve), num_iterations), initial=len(curve), total=num_iterations)
    for iteration in progress:
        remaining = 1.0 - iteration / num_iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * remaining)
        data = collect()
        batch = to_batch(agent, data.to_dict(), args)
        stats = update(batch, args, train)
        returns = statistics.return_queue.double()
        mean = returns.mean().item()  # NaN before the first episode ends
        deviation = (returns - mean).square().mean().sqrt().item()
        seconds = time.perf_counter() - start
        curve.append(((iteration + 1) * batch_size, mean, deviation, seconds))
        progress.set_postfix({"return": f"{mean:.1f}"}, refresh=False)
        if output is not None:
            stats["learning_rate"] = optimizer.param_groups[0]["lr"]
            output.write(data, batch, stats, is_last=len(curve) == num_iterations)
    return finish(args, env, agent, curve, make)


if __name__ == "__main__":
    main(tyro.cli(Args))
