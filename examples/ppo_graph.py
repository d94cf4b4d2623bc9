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
from graph_parts import GraphFlags, Grid, Run, Tensors, VectorModule, adam_step, compiled, new_adam
from gymnasium.spaces import Box, flatdim
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
    num_steps: int = 32
    gamma: tuple[float, ...] = (0.98,)
    gae_lambda: tuple[float, ...] = (0.95,)
    num_minibatches: int = 4
    update_epochs: int = 8
    clip_coef: tuple[float, ...] = (0.2,)
    ent_coef: tuple[float, ...] = (0.0,)
    vf_coef: tuple[float, ...] = (0.5,)
    max_grad_norm: tuple[float, ...] = (0.5,)
    normalize_reward: bool = False  # by running statistics


def make_env(args: Args, make: Callable[..., tw.Env] = tw.make) -> tw.Env:
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
        """A random action and its log-probability."""
        policy, _ = self.apply_vector(vector, observation)
        if isinstance(self.space, Box):
            action = policy.mean + policy.stddev * noise
        else:
            action = largest(self.space, policy.probs / noise)
        return action, policy.log_prob(action)


def make_iteration(grid: Grid, pure: Any, agent: Agent) -> Callable[..., Any]:
    """A pure function of the state of the trainings. The functions in it are those of one."""
    return_key = T.RecordEpisodeStatistics.of(pure.env)[0].keys["return"]

    def env_step(state: TensorDict, params: Tensor, noise: Tensor) -> tuple[TensorDict, Tensors]:
        kept = {"observation": state["observation"]}
        action, kept["logprob"] = agent.act(params, kept["observation"], noise)
        state, transition, _ = pure.step(state, action)
        successor = transition["next"]
        kept |= {"action": action, "successor": successor["observation"]}
        kept["return"] = successor[return_key].squeeze(-1)
        for key in ("reward", "terminated", "done"):
            kept[key] = successor[key].squeeze(-1)
        return state, kept

    def make_deltas(params: Tensor, rollout: Tensors, hyper: Tensors) -> Tensors:
        both = torch.stack([rollout["observation"], rollout["successor"]])
        _, values = agent.apply_vector(params, both)
        # Where an episode ended, the successor is the final observation: a truncated one is
        # bootstrapped from it. A terminated one may be NaN, and NaN * 0 is NaN.
        value, next_value = values
        next_value = torch.where(rollout["terminated"], 0, next_value)
        return {
            "delta": rollout["reward"] + hyper["gamma"] * next_value - value,
            "decay": hyper["gamma"] * hyper["gae_lambda"] * ~rollout["done"],
            "value": value,
        }

    def gae_step(ahead: Tensor, x: Tensors) -> tuple[Tensor, Tensor]:
        advantage = x["delta"] + torch.where(x["decay"] > 0, x["decay"] * ahead, 0)
        return advantage, advantage

    def ppo_loss(params: Tensor, mb: Tensors, hyper: Tensors) -> Tensor:
        mean = lambda values: (mb["weight"] * values).sum()  # noqa: E731
        policy, value = agent.apply_vector(params, mb["observation"])
        ratio = (policy.log_prob(mb["action"]) - mb["logprob"]).exp()
        advantage = mb["advantage"] - mean(mb["advantage"])
        advantage = advantage / (mean(advantage.square()).sqrt() + 1e-8)
        clipped = ratio.clamp(1 - hyper["clip_coef"], 1 + hyper["clip_coef"])
        pg_loss = -mean(torch.minimum(advantage * ratio, advantage * clipped))
        v_loss = 0.5 * mean((value - mb["value"] - mb["advantage"]).square())
        return pg_loss + hyper["vf_coef"] * v_loss - hyper["ent_coef"] * mean(policy.entropy())

    def update_step(adam: Tensors, rows: Tensor, batch: Tensors, hyper: Tensors) -> Any:
        minibatch = {name: value[rows] for name, value in batch.items()}
        is_row = rows >= 0  # the last minibatch may be smaller
        minibatch["weight"] = is_row / is_row.sum()
        grad, loss = grad_and_value(ppo_loss)(adam["params"], minibatch, hyper)
        return adam_step(adam, grad, hyper["learning_rate"], hyper["max_grad_norm"]), loss

    def iteration(state: Tensors, hyper: Tensors, progress: Tensor, noise: Tensor, rows: Tensor):
        """Several trainings are the first dimension, or the one after the steps."""
        hyper = {**hyper, "learning_rate": hyper["learning_rate"] * (1 - progress)}
        params = state["adam"]["params"]
        step = grid.vmap(env_step)
        env, rollout = tw.scan(lambda carry, x: step(carry, params, x), state["env"], noise)
        deltas = grid.vmap(make_deltas, (0, 1, 0), 1)(params, rollout, hyper)
        ahead = torch.zeros_like(deltas["delta"][0])
        _, advantage = tw.scan(gae_step, ahead, deltas, reverse=True)
        batch = {name: rollout[name] for name in ("observation", "action", "logprob")}
        batch |= {"advantage": advantage, "value": deltas["value"]}
        flatten = lambda batch: {k: x.flatten(0, 1) for k, x in batch.items()}  # noqa: E731
        batch = grid.vmap(flatten, 1)(batch)
        update = grid.vmap(update_step)
        adam, loss = tw.scan(lambda carry, x: update(carry, x, batch, hyper), state["adam"], rows)
        returns = torch.where(rollout["done"], rollout["return"], torch.nan)
        figures = {"loss": loss.mean(0), "return": returns.nanmean((0, -1))}
        return {"env": env, "adam": adam}, figures

    return iteration


def draw(args: Args, agent: Agent, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The random numbers of an iteration: for actions, and rows `(minibatches, size)`."""
    device = generator.device
    noise = torch.empty(args.num_steps, args.num_envs, agent.width, device=device)
    is_box = isinstance(agent.space, Box)
    noise = (noise.normal_ if is_box else noise.exponential_)(generator=generator)
    batch_size = args.num_steps * args.num_envs
    sizes = args.update_epochs, batch_size
    order = torch.rand(sizes, generator=generator, device=device).argsort(1)
    size = -(-batch_size // args.num_minibatches)
    rows = nn.functional.pad(order, (0, -batch_size % size), value=-1)
    return noise, rows.view(-1, size)


def start(args: Args, make: Callable[..., tw.Env] = tw.make) -> tuple[Run, tw.Env, Agent, Callable]:
    """The run, an env and an agent for all trainings, and the function of an iteration."""
    grid = Grid(args)
    env = make_env(args, make)
    pure = tw.pure(env)
    states = []
    for training in grid.trainings.values():
        torch.manual_seed(training["seed"])
        agent = Agent(env).to(args.device)
        if args.normalize_reward:
            env.transforms[-2].gamma.fill_(training["gamma"])
        adam = new_adam(agent.vector())
        states.append({"env": pure.init(training["seed"])[0], "adam": adam})
    run = Run(args, grid, grid.stack(states), lambda generator: draw(args, agent, generator))
    return run, env, agent, make_iteration(grid, pure, agent)


def main(args: Args, make: Callable[..., tw.Env] = tw.make) -> dict[str, Any]:
    torch.set_num_threads(1)  # small minibatches are faster on one thread
    run, env, agent, iteration = start(args, make)
    batch_size = args.num_envs * args.num_steps
    figures = run.train(compiled(iteration, args), batch_size)
    run.write_curves(batch_size, args.num_envs * (env.signature.max_episode_steps or 0))
    return run.finish(figures, env, agent, lambda td: agent(td["observation"])[0].sample())


if __name__ == "__main__":
    main(tyro.cli(Args))
