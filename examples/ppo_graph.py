"""PPO whose iterations are one graph each, for one training or a grid of them.

python examples/ppo_graph.py                                      solves CartPole-v1
python examples/ppo_graph.py --env-id Pendulum-v1                 continuous actions
python examples/ppo_graph.py --seeds 1 2 3 4 5 6 7 8              eight trainings at once
python examples/ppo_graph.py --seeds 1 2 3 4 --learning-rate 1e-3 3e-3     also eight

In the structure of PureJaxRL's ppo.py: `tw.pure` makes functions of an env, `tw.scan` loops over
them, and `torch.vmap` maps the bodies of the loops over trainings, each with its own envs,
statistics, parameters, hyperparameters and random numbers. The env must be native, or a
`FunctionalEnv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from graph_parts import (
    GraphFlags,
    Grid,
    Run,
    Tensors,
    VectorModule,
    adam_step,
    mean_return,
    new_trainings,
    recorded_step,
)
from gymnasium.spaces import Box, flatdim
from ppo import Make
from ppo_parts import (
    ImageNetwork,
    NormalizeReward,
    distribution,
    image_shape,
    largest,
    mlp,
    plain,
    to_vector,
)
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import grad_and_value

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args(GraphFlags):
    """Flags have CleanRL's names."""

    out: Path = Path("runs/ppo_graph")
    learning_rate: tuple[float, ...] = (3e-3,)  # annealed linearly to zero
    gamma: tuple[float, ...] = (0.98,)
    gae_lambda: tuple[float, ...] = (0.95,)
    num_minibatches: int = 4
    update_epochs: int = 8
    clip_coef: tuple[float, ...] = (0.2,)
    ent_coef: tuple[float, ...] = (0.0,)
    vf_coef: tuple[float, ...] = (0.5,)
    max_grad_norm: tuple[float, ...] = (0.5,)
    normalize_reward: bool = False  # by running statistics


def make_env(args: Args, make: Make = tw.make) -> tw.Env:
    env = plain(make(args.env_id, args.num_envs, device=args.device))
    transforms = [] if T.RecordEpisodeStatistics.of(env) else [T.RecordEpisodeStatistics()]
    if image_shape(env.single_observation_space) is None:
        transforms += [*to_vector(env.single_observation_space), T.NormalizeObservation()]
    transforms += [T.ClipAction()] if isinstance(env.single_action_space, Box) else []
    if args.normalize_reward:
        transforms += [NormalizeReward(gamma=args.gamma[0]), T.ClipReward(-10, 10)]
    return tw.TransformedEnv(env, *transforms)


class Agent(VectorModule):
    """A policy and a value."""

    def __init__(self, env: tw.Env) -> None:
        super().__init__()
        self.space = env.single_action_space
        self.width = flatdim(self.space)
        space = env.single_observation_space
        network = ImageNetwork if image_shape(space) else mlp
        inputs = space if image_shape(space) else space.shape[0]
        self.actor = network(inputs, self.width, std=0.01)
        self.critic = network(inputs, 1, std=1.0)
        self.logstd = nn.Parameter(torch.zeros(self.width))

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        value = self.critic(observation).squeeze(-1)
        return distribution(self.space, self.actor(observation), self.logstd), value

    def act(self, vector: Tensor, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        policy, _ = self.apply_vector(vector, observation)
        return choose(self.space, policy, noise)


def choose(space: Any, policy: Distribution, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A random action and its log-probability."""
    if isinstance(space, Box):
        action = policy.mean + policy.stddev * noise
    else:
        action = largest(space, policy.probs / noise)
    return action, policy.log_prob(action)


def make_deltas(rollout: Tensors, value: Tensor, next_value: Tensor, hyper: Tensors) -> Tensors:
    # Where an episode ended, it is of the final observation: a truncated one is bootstrapped from
    # it. A terminated one may be NaN, and NaN * 0 is NaN.
    next_value = torch.where(rollout["terminated"], 0, next_value)
    return {
        "delta": rollout["reward"] + hyper["gamma"] * next_value - value,
        "decay": hyper["gamma"] * hyper["gae_lambda"] * ~rollout["done"],
        "value": value,
    }


def estimate_advantages(deltas: Tensors) -> Tensor:
    def step(ahead: Tensor, x: Tensors) -> tuple[Tensor, Tensor]:
        advantage = x["delta"] + torch.where(x["decay"] > 0, x["decay"] * ahead, 0)
        return advantage, advantage

    last = torch.zeros_like(deltas["delta"][0])
    return tw.scan(step, last, deltas, reverse=True)[1]


def roll_out(
    grid: Grid, step: Callable, evaluate: Callable, state: Tensors, hyper: Tensors, noise: Tensor
) -> tuple[TensorDict, Tensors, Tensors]:
    """The state of the envs after a rollout, the rollout, and what updates read of it."""
    params = state["adam"]["params"]
    act = grid.vmap(step)
    env, rollout = tw.scan(lambda carry, x: act(carry, params, x), state["env"], noise)
    deltas = grid.vmap(evaluate, (0, 1, 0), 1)(params, rollout, hyper)
    batch = {name: rollout[name] for name in ("observation", "action", "logprob")}
    batch |= {"advantage": estimate_advantages(deltas), "value": deltas["value"]}
    return env, rollout, batch


def ppo_loss(policy: Distribution, value: Tensor, mb: Tensors, hyper: Tensors) -> Tensor:
    mean = lambda values: (mb["weight"] * values).sum()  # noqa: E731
    ratio = (policy.log_prob(mb["action"]) - mb["logprob"]).exp()
    advantage = mb["advantage"] - mean(mb["advantage"])
    advantage = advantage / (mean(advantage.square()).sqrt() + 1e-8)
    clipped = ratio.clamp(1 - hyper["clip_coef"], 1 + hyper["clip_coef"])
    pg_loss = -mean(torch.minimum(advantage * ratio, advantage * clipped))
    v_loss = 0.5 * mean((value - mb["value"] - mb["advantage"]).square())
    return pg_loss + hyper["vf_coef"] * v_loss - hyper["ent_coef"] * mean(policy.entropy())


def make_iteration(grid: Grid, pure: Any, agent: Agent) -> Callable:
    """A pure function of the state of the trainings. The functions in it are those of one."""
    step = recorded_step(pure)

    def env_step(state: TensorDict, params: Tensor, noise: Tensor) -> tuple[TensorDict, Tensors]:
        action, logprob = agent.act(params, state["observation"], noise)
        state, kept = step(state, action)
        return state, {**kept, "logprob": logprob}

    def evaluate(params: Tensor, rollout: Tensors, hyper: Tensors) -> Tensors:
        both = torch.stack([rollout["observation"], rollout["successor"]])
        _, values = agent.apply_vector(params, both)
        return make_deltas(rollout, *values, hyper)

    def loss(params: Tensor, mb: Tensors, hyper: Tensors) -> Tensor:
        return ppo_loss(*agent.apply_vector(params, mb["observation"]), mb, hyper)

    def update_step(adam: Tensors, rows: Tensor, batch: Tensors, hyper: Tensors) -> Any:
        minibatch = {name: value[rows] for name, value in batch.items()}
        is_row = rows >= 0  # the last minibatch may be smaller
        minibatch["weight"] = is_row / is_row.sum()
        grad, value = grad_and_value(loss)(adam["params"], minibatch, hyper)
        return adam_step(adam, grad, hyper["learning_rate"], hyper["max_grad_norm"]), value

    def iteration(state: Tensors, hyper: Tensors, progress: Tensor, noise: Tensor, rows: Tensor):
        """Several trainings are the first dimension, or the one after the steps."""
        hyper = {**hyper, "learning_rate": hyper["learning_rate"] * (1 - progress)}
        env, rollout, batch = roll_out(grid, env_step, evaluate, state, hyper, noise)
        flatten = lambda batch: {k: x.flatten(0, 1) for k, x in batch.items()}  # noqa: E731
        batch = grid.vmap(flatten, 1)(batch)
        update = grid.vmap(update_step)
        adam, losses = tw.scan(lambda carry, x: update(carry, x, batch, hyper), state["adam"], rows)
        figures = {"loss": losses.mean(0), "return": mean_return(rollout)}
        return {"env": env, "adam": adam}, figures

    return iteration


def draw_noise(args: Args, agent: Any, generator: torch.Generator) -> Tensor:
    """The random numbers of the actions."""
    noise = torch.empty(args.num_steps, args.num_envs, agent.width, device=generator.device)
    is_box = isinstance(agent.space, Box)
    return (noise.normal_ if is_box else noise.exponential_)(generator=generator)


def draw_rows(args: Args, count: int, generator: torch.Generator) -> Tensor:
    """Indices below `count` of the minibatches of all epochs; -1 fills the last ones up."""
    given = dict(generator=generator, device=generator.device)
    order = torch.stack([torch.randperm(count, **given) for _ in range(args.update_epochs)])
    size = -(-count // args.num_minibatches)
    return nn.functional.pad(order, (0, -count % size), value=-1).view(-1, size)


def start(args: Args, make: Make = tw.make) -> tuple[Run, tw.Env, Agent, Callable]:
    """The run, an env and an agent for all trainings, and the function of an iteration."""
    grid = Grid(args)
    env = make_env(args, make)
    pure = tw.pure(env)
    agent, state = new_trainings(grid, pure, lambda: Agent(env))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = draw_noise(args, agent, generator)
        return noise, draw_rows(args, args.num_steps * args.num_envs, generator)

    return Run(args, grid, state, draw), env, agent, make_iteration(grid, pure, agent)


def main(args: Args, make: Make = tw.make) -> dict[str, Any]:
    torch.set_num_threads(1)  # small minibatches are faster on one thread
    run, env, agent, iteration = start(args, make)
    return run.learn(iteration, env, agent, lambda td: agent(td["observation"])[0].sample())


if __name__ == "__main__":
    main(tyro.cli(Args))
