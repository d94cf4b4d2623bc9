"""PPO with a GRU whose iterations are one graph each, for one training or a grid of them.

python examples/ppo_recurrent_graph.py                         CartPole-v1 with hidden velocities
python examples/ppo_recurrent_graph.py --seeds 1 2 3 4         four trainings at once
python examples/ppo_recurrent_graph.py --env-id Pendulum-v1    another env, as it is

The task and the defaults are those of ppo_recurrent.py. `PolicyState` keeps the memory in the state
of the env, where resets clear it. Minibatches are of envs, and gradients go back through all steps
of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ppo_graph
import ppo_recurrent
import torch
import tyro
from graph_parts import (
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
from ppo_graph import choose, draw_noise, draw_rows, make_deltas, ppo_loss, roll_out
from tensordict import TensorDict
from torch import Tensor
from torch.distributions import Distribution
from torch.func import grad_and_value, vjp
from torch.nn.functional import linear

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args(ppo_graph.Args):
    out: Path = Path("runs/ppo_recurrent_graph")
    learning_rate: tuple[float, ...] = (2e-3,)  # annealed linearly to zero
    num_envs: int = 32
    num_steps: int = 128  # how far gradients reach back in time
    hidden_size: int = 32  # of the policy's memory
    gamma: tuple[float, ...] = (0.99,)
    update_epochs: int = 4
    normalize_reward: bool = True


def make_env(args: Args, make: Make = tw.make) -> tw.Env:
    def make_inner(id: str, num_envs: int, **kwargs: Any) -> tw.Env:
        env = make(id, num_envs, **kwargs)
        if id != "CartPole-v1":
            return env
        observe = T.TransformObservation(ppo_recurrent.positions, Box(-10, 10, (2,)))
        return tw.TransformedEnv(env, observe)

    memory = tw.PolicyState({"hidden": (args.hidden_size,)})
    return tw.TransformedEnv(ppo_graph.make_env(args, make_inner), memory)


class Agent(ppo_recurrent.Agent, VectorModule):
    """That of ppo_recurrent.py, as functions of a vector: `apply_vector(vector, name, *inputs)`."""

    def __init__(self, args: Args, env: tw.Env) -> None:
        super().__init__(args, env)
        self.space = self.action_space
        self.width = flatdim(self.space)

    def forward(self, name: str, *inputs: Tensor) -> Any:
        return getattr(self, name)(*inputs)

    def remember(self, observation: Tensor, hidden: Tensor) -> Tensor:
        """As the cell, whose operator for GPUs `torch.vmap` does not know."""
        cell = self.cell
        given = linear(self.encoder(observation), cell.weight_ih, cell.bias_ih).chunk(3, -1)
        kept = linear(hidden, cell.weight_hh, cell.bias_hh).chunk(3, -1)
        reset = (given[0] + kept[0]).sigmoid()
        update = (given[1] + kept[1]).sigmoid()
        new = (given[2] + reset * kept[2]).tanh()
        return new.lerp(hidden, update)

    def heads(self, memory: Tensor) -> tuple[Distribution, Tensor]:
        return self.get_distribution(memory), self.get_value(memory)


def make_iteration(args: Args, grid: Grid, pure: Any, agent: Agent) -> Callable:
    """A pure function of the state of the trainings."""
    step = recorded_step(pure)

    # Functions of one training

    def env_step(state: TensorDict, params: Tensor, noise: Tensor) -> tuple[TensorDict, Tensors]:
        memory = agent.apply_vector(params, "remember", state["observation"], state["hidden"])
        policy, _ = agent.apply_vector(params, "heads", memory)
        root = TensorDict(dict(state.exclude("buffers").items()), [args.num_envs])
        root["action"], logprob = choose(agent.space, policy, noise)
        root["next", "hidden"] = memory
        next_state, kept = step(state, root)
        kept |= {"hidden": state["hidden"], "is_init": state["is_init"]}
        kept |= {"memory": memory, "logprob": logprob}
        return next_state, kept

    def evaluate(params: Tensor, rollout: Tensors, hyper: Tensors) -> Tensors:
        memory = rollout["memory"]
        _, value = agent.apply_vector(params, "heads", memory)
        # Right at truncations, too, where the next root is another episode's.
        memory = agent.apply_vector(params, "remember", rollout["successor"], memory)
        _, next_value = agent.apply_vector(params, "heads", memory)
        return make_deltas(rollout, value, next_value, hyper)

    def take(batch: Tensors, rows: Tensor) -> Tensors:
        minibatch = {name: value[:, rows] for name, value in batch.items()}
        is_row = (rows >= 0).unsqueeze(0)  # the last minibatch may be smaller
        minibatch["weight"] = is_row / (is_row.sum() * args.num_steps)
        return minibatch

    def remember(params: Tensor, hidden: Tensor, x: Tensors) -> Tensor:
        hidden = torch.where(x["is_init"], 0, hidden)
        return agent.apply_vector(params, "remember", x["observation"], hidden)

    def pull_back(params: Tensor, x: Tensors, ahead: Tensor) -> tuple[Tensor, Tensor]:
        _, pull = vjp(lambda *inputs: remember(*inputs, x), params, x["hidden"])
        return pull(ahead)

    def loss(params: Tensor, memory: Tensor, mb: Tensors, hyper: Tensors) -> Tensor:
        return ppo_loss(*agent.apply_vector(params, "heads", memory), mb, hyper)

    # Functions of all trainings: the first dimension, or the one after the steps

    def gradient(params: Tensor, mb: Tensors, hyper: Tensors) -> tuple[Tensor, Tensor]:
        """By a scan in reverse, because PyTorch 2.13 compiles no `torch.func.grad` of a scan."""

        def forward_step(hidden: Tensor, x: Tensors) -> tuple[Tensor, Tensors]:
            memory = grid.vmap(remember)(params, hidden, x)
            return memory, {"hidden": hidden, "memory": memory}

        def backward_step(carry: tuple[Tensor, Tensor], x: Tensors) -> Any:
            grad, ahead = carry
            given, ahead = grid.vmap(pull_back)(params, x, ahead + x["of_loss"])
            return (grad + given, ahead), ()

        steps = {"observation": mb["observation"], "is_init": mb["is_init"]}
        first = mb["hidden"][0]
        _, seen = tw.scan(forward_step, first, steps)
        of_loss = grid.vmap(grad_and_value(loss, (0, 1)), (0, 1, 1, 0), ((0, 1), 0))
        (grad, steps["of_loss"]), value = of_loss(params, seen["memory"], mb, hyper)
        steps["hidden"] = seen["hidden"]
        (grad, _), _ = tw.scan(backward_step, (grad, torch.zeros_like(first)), steps, reverse=True)
        return grad, value

    def iteration(state: Tensors, hyper: Tensors, progress: Tensor, noise: Tensor, rows: Tensor):
        rate = hyper["learning_rate"] * (1 - progress)
        env, rollout, batch = roll_out(grid, env_step, evaluate, state, hyper, noise)
        batch |= {"is_init": rollout["is_init"], "hidden": rollout["hidden"][:1]}

        def update_step(adam: Tensors, rows: Tensor) -> tuple[Tensors, Tensor]:
            minibatch = grid.vmap(take, (1, 0), 1)(batch, rows)
            grad, value = gradient(adam["params"], minibatch, hyper)
            return grid.vmap(adam_step)(adam, grad, rate, hyper["max_grad_norm"]), value

        adam, losses = tw.scan(update_step, state["adam"], rows)
        figures = {"loss": losses.mean(0), "return": mean_return(rollout)}
        return {"env": env, "adam": adam}, figures

    return iteration


def start(args: Args, make: Make = tw.make) -> tuple[Run, tw.Env, Agent, Callable]:
    """The run, an env and an agent for all trainings, and the function of an iteration."""
    grid = Grid(args)
    env = make_env(args, make)
    pure = tw.pure(env)
    agent, state = new_trainings(grid, pure, lambda: Agent(args, env))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = draw_noise(args, agent, generator)
        return noise, draw_rows(args, args.num_envs, generator)

    return Run(args, grid, state, draw), env, agent, make_iteration(args, grid, pure, agent)


def main(args: Args, make: Make = tw.make) -> dict[str, Any]:
    torch.set_num_threads(1)
    run, env, agent, iteration = start(args, make)
    return run.learn(iteration, env, agent, agent.act)


if __name__ == "__main__":
    main(tyro.cli(Args))
