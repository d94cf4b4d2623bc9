"""PPO whose iterations are one graph each: rollout, advantages and update, for one or many seeds.

python examples/ppo_graph.py                                      solves CartPole-v1
python examples/ppo_graph.py --env-id Pendulum-v1                 continuous actions
python examples/ppo_graph.py --num-seeds 16 --num-envs 16         16 trainings at once
python examples/ppo_graph.py --num-seeds 2 --ent-coef 0.0 0.01    a hyperparameter by seed

In the structure of PureJaxRL's ppo.py: `tw.pure` makes functions of an env, `tw.scan` loops over
them, and `torch.vmap` maps the bodies of the loops over seeds, each with its own envs, statistics,
parameters and random numbers. The env must be native, or a `FunctionalEnv`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from gymnasium.spaces import Box, flatdim
from matplotlib.figure import Figure
from ppo import Flags
from ppo_parts import NormalizeReward, distribution, largest, mlp, per_seed, plain, to_vector
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call, grad_and_value
from tqdm import trange

import torchwrap as tw
from torchwrap import transforms as T

# A tanh by exp takes a third of the time, and loops over kernels in C++ a tenth less. Those compile
# without optimization, apart from the kernels, and no headers ahead.
CPU = ("cpp.use_decompose_tanh", "cpp_wrapper", "cpp_wrapper_build_separate")
OPTIONS = {
    "cpu": {**dict.fromkeys(CPU, True), "cpp_cache_precompile_headers": False},
    "cuda": {"score_fusion_memory_threshold": 256},  # for Triton before 3.8 (its issue 8257)
}

Tensors = dict[str, Any]


@dataclass
class Args(Flags):
    """Flags have CleanRL's names. Tuples have one number, or one per seed."""

    env_id: str = "CartPole-v1"
    seed: int = 1  # the first one
    num_seeds: int = 1
    out: Path = Path("runs/ppo_graph")  # gets metrics.json, learning_curve.png and checkpoint.pt
    device: str = "cpu"
    backend: str = "inductor"  # of torch.compile; "none" for none
    total_timesteps: int = 250_000
    learning_rate: tuple[float, ...] = (3e-3,)  # annealed linearly to zero
    num_envs: int = 64
    num_steps: int = 32
    gamma: tuple[float, ...] = (0.98,)
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 8
    clip_coef: float = 0.2
    ent_coef: tuple[float, ...] = (0.0,)
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    normalize_reward: bool = False  # by running statistics
    eval_episodes: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "gamma", "ent_coef"):
            setattr(self, name, per_seed(name, getattr(self, name), self.num_seeds))
        if self.num_envs * self.num_steps % self.num_minibatches:
            raise ValueError("num_minibatches must divide num_envs * num_steps.")


def make_env(args: Args, make: Callable[..., tw.Env]) -> tw.Env:
    env = plain(make(args.env_id, args.num_envs, device=args.device))
    transforms = [] if T.RecordEpisodeStatistics.of(env) else [T.RecordEpisodeStatistics()]
    transforms += [*to_vector(env.single_observation_space), T.NormalizeObservation()]
    transforms += [T.ClipAction()] if isinstance(env.single_action_space, Box) else []
    if args.normalize_reward:
        transforms += [NormalizeReward(gamma=args.gamma[0]), T.ClipReward(-10, 10)]
    return tw.TransformedEnv(env, *transforms)


class Agent(nn.Module):
    """A policy and a value, as a module, and as a function of a vector of all its parameters."""

    def __init__(self, env: tw.Env) -> None:
        super().__init__()
        self.space = env.single_action_space
        self.width = flatdim(self.space)
        inputs = env.single_observation_space.shape[0]
        self.actor = mlp(inputs, self.width, std=0.01)
        self.critic = mlp(inputs, 1, std=1.0)
        self.logstd = nn.Parameter(torch.zeros(self.width))
        self.shapes = {name: value.shape for name, value in self.named_parameters()}

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        value = self.critic(observation).squeeze(-1)
        return distribution(self.space, self.actor(observation), self.logstd), value

    def apply_vector(self, vector: Tensor, observation: Tensor) -> tuple[Distribution, Tensor]:
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        params = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts)}
        return functional_call(self, params, (observation,))

    def act(self, vector: Tensor, observation: Tensor, noise: Tensor) -> Tensor:
        policy, _ = self.apply_vector(vector, observation)
        if isinstance(self.space, Box):
            return policy.mean + policy.stddev * noise
        return largest(self.space, policy.probs / noise)


def make_iteration(args: Args, pure: Any, agent: Agent) -> Callable[..., Any]:
    """A pure function of the state of a training. The functions in it are those of one seed."""
    return_key = T.RecordEpisodeStatistics.of(pure.env)[0].keys["return"]

    def env_step(state: TensorDict, params: Tensor, noise: Tensor) -> tuple[TensorDict, Tensors]:
        observation = state["observation"]
        action = agent.act(params, observation, noise)
        state, transition, _ = pure.step(state, action)
        successor = transition["next"]
        kept = {"observation": observation, "action": action, "successor": successor["observation"]}
        kept["return"] = successor[return_key].squeeze(-1)
        for key in ("reward", "terminated", "done"):
            kept[key] = successor[key].squeeze(-1)
        return state, kept

    def make_deltas(params: Tensor, rollout: Tensors, gamma: Tensor) -> Tensors:
        policy, value = agent.apply_vector(params, rollout["observation"])
        # Where an episode ended, this is the final observation: a truncated one is bootstrapped
        # from it. A terminated one may be NaN, and NaN * 0 is NaN.
        _, next_value = agent.apply_vector(params, rollout["successor"])
        next_value = torch.where(rollout["terminated"], 0, next_value)
        return {
            "delta": rollout["reward"] + gamma * next_value - value,
            "decay": gamma * args.gae_lambda * ~rollout["done"],
            "value": value,
            "logprob": policy.log_prob(rollout["action"]),
        }

    def gae_step(ahead: Tensor, x: Tensors) -> tuple[Tensor, Tensor]:
        advantage = x["delta"] + torch.where(x["decay"] > 0, x["decay"] * ahead, 0)
        return advantage, advantage

    def ppo_loss(params: Tensor, mb: Tensors, ent_coef: Tensor) -> Tensor:
        policy, value = agent.apply_vector(params, mb["observation"])
        ratio = (policy.log_prob(mb["action"]) - mb["logprob"]).exp()
        advantage = mb["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.minimum(advantage * ratio, advantage * clipped).mean()
        v_loss = 0.5 * (value - mb["value"] - mb["advantage"]).square().mean()
        return pg_loss + args.vf_coef * v_loss - ent_coef * policy.entropy().mean()

    def update_step(adam: Tensors, rows: Tensor, batch: Tensors, hyper: Tensors) -> Any:
        minibatch = {name: value[rows] for name, value in batch.items()}
        gradient = grad_and_value(ppo_loss)
        grad, loss = gradient(adam["params"], minibatch, hyper["ent_coef"])
        grad = grad * (args.max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1)
        count = adam["count"] + 1
        mean = 0.9 * adam["mean"] + 0.1 * grad
        square = 0.999 * adam["square"] + 0.001 * grad.square()
        direction = mean / (1 - 0.9**count) / ((square / (1 - 0.999**count)).sqrt() + 1e-5)
        params = adam["params"] - hyper["learning_rate"] * direction
        return {"params": params, "mean": mean, "square": square, "count": count}, loss

    def iteration(state: TensorDict, adam: Tensors, hyper: Tensors, noise: Tensor, rows: Tensor):
        params = adam["params"]
        # Several seeds are the first dimension, or the one after the steps.
        vmap = torch.vmap if args.num_seeds > 1 else lambda function, *dims: function
        step = vmap(env_step)
        state, rollout = tw.scan(lambda carry, x: step(carry, params, x), state, noise)
        deltas = vmap(make_deltas, (0, 1, 0), 1)(params, rollout, hyper["gamma"])
        ahead = torch.zeros_like(deltas["delta"][0])
        _, advantage = tw.scan(gae_step, ahead, deltas, reverse=True)
        batch = {"advantage": advantage, "value": deltas["value"], "logprob": deltas["logprob"]}
        batch |= {"observation": rollout["observation"], "action": rollout["action"]}
        batch = vmap(lambda batch: {k: x.flatten(0, 1) for k, x in batch.items()}, 1)(batch)
        update = vmap(update_step)
        adam, loss = tw.scan(lambda carry, x: update(carry, x, batch, hyper), adam, rows)
        returns = torch.where(rollout["done"], rollout["return"], torch.nan)
        return state, adam, {"loss": loss.mean(0), "return": returns.nanmean((0, -1))}

    backend = args.backend
    if backend == "none":
        return iteration
    options = OPTIONS[torch.device(args.device).type] if backend == "inductor" else None
    # Inductor fails on some scans with symbolic sizes, as another number of seeds would be.
    return torch.compile(iteration, fullgraph=True, dynamic=False, backend=backend, options=options)


def draw(args: Args, agent: Agent, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The random numbers of an iteration: for actions, and rows `(minibatches, size)`."""
    device = generator.device
    noise = torch.empty(args.num_steps, args.num_envs, agent.width, device=device)
    is_box = isinstance(agent.space, Box)
    noise = (noise.normal_ if is_box else noise.exponential_)(generator=generator)
    size = args.update_epochs, args.num_steps * args.num_envs
    order = torch.rand(size, generator=generator, device=device).argsort(1)
    return noise, order.view(args.update_epochs * args.num_minibatches, -1)


def main(args: Args, make: Callable[..., tw.Env] = tw.make) -> dict[str, Any]:
    start_time = time.perf_counter()
    torch.set_num_threads(1)  # small minibatches are faster on one thread
    args.out.mkdir(parents=True, exist_ok=True)
    many = args.num_seeds > 1
    stack = torch.stack if many else lambda values, dim=0: values[0]
    env = make_env(args, make)
    pure = tw.pure(env)
    vectors = []
    states = []
    generators = []
    for seed in range(args.seed, args.seed + args.num_seeds):
        torch.manual_seed(seed)
        agent = Agent(env).to(args.device)
        if args.normalize_reward:
            env.transforms[-2].gamma.fill_(args.gamma[(seed - args.seed) % len(args.gamma)])
        vectors.append(nn.utils.parameters_to_vector(agent.parameters()).detach())
        states.append(pure.init(seed)[0])
        generators.append(torch.Generator(args.device).manual_seed(seed))
    state = stack(states)
    params = stack(vectors)
    adam = {"params": params, "mean": torch.zeros_like(params), "square": torch.zeros_like(params)}
    adam["count"] = torch.zeros(params.shape[:-1], device=args.device)
    hyper = {}
    for name in ("learning_rate", "gamma", "ent_coef"):
        values = torch.tensor(getattr(args, name), device=args.device)
        hyper[name] = values.expand(args.num_seeds).clone() if many else values[0]

    iterate = make_iteration(args, pure, agent)
    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    learning_rate = hyper["learning_rate"]
    curve = []
    for iteration in trange(num_iterations, desc="the first one compiles"):
        hyper["learning_rate"] = learning_rate * (1 - iteration / num_iterations)
        noise, rows = zip(*[draw(args, agent, generator) for generator in generators])
        state, adam, figures = iterate(state, adam, hyper, stack(noise, 1), stack(rows, 1))
        curve.append(figures["return"].reshape(-1))
        if iteration == 0:
            first_iteration = time.perf_counter()
    adam["params"].sum().item()  # waits for the device
    seconds = time.perf_counter() - first_iteration
    torch.save({"env": state.to_dict(), "adam": adam}, args.out / "checkpoint.pt")
    seeds = list(zip(state, adam["params"])) if many else [(state, adam["params"])]
    returns = [evaluate(env, agent, *each, args) for each in seeds]
    steps = (num_iterations - 1) * batch_size * args.num_seeds
    metrics = {"eval_mean_return": returns, "steps_per_second": steps / seconds}
    metrics["first_iteration_seconds"] = first_iteration - start_time
    (args.out / "metrics.json").write_text(json.dumps(metrics))
    print(json.dumps(metrics, indent=2))
    plot(args, torch.stack(curve).cpu(), env.signature.max_episode_steps or 0)
    return metrics


@torch.no_grad()
def evaluate(env: tw.Env, agent: Agent, state: Any, params: Tensor, args: Args) -> float:
    """The mean return of fresh episodes, with the statistics of the state, frozen."""
    env.restore(state)
    nn.utils.vector_to_parameters(params, agent.parameters())
    torch.manual_seed(args.seed)
    policy = lambda td: agent(td["observation"])[0].sample()  # noqa: E731
    episodes = tw.evaluate(env, policy, args.eval_episodes, seed=args.seed + 1_000_000)
    return episodes["episode_return"].mean().item()


def plot(args: Args, curve: Tensor, max_episode_steps: int) -> None:
    """Mean returns of the episodes that end in an iteration: mean and range of the seeds."""
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    known = ~curve.isnan().any(1)  # in the other iterations, a seed ended no episode
    steps = args.num_envs * args.num_steps * (1 + known.nonzero().squeeze(1))
    curve = curve[known]
    axes.plot(steps, curve.mean(1))
    axes.fill_between(steps, curve.amin(1), curve.amax(1), alpha=0.2)
    num_biased = min(max_episode_steps * args.num_envs, args.total_timesteps)
    axes.axvspan(0, num_biased, color="gray", alpha=0.15)
    axes.set(title=args.env_id, xlabel="env steps; gray: no long episode has ended yet")
    axes.figure.savefig(args.out / "learning_curve.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
