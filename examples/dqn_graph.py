"""DQN whose iterations are one graph each, for one training or a grid of them.

python examples/dqn_graph.py                                      solves CartPole-v1
python examples/dqn_graph.py --seeds 1 2 3 4 --tau 0.005 0.01     eight trainings at once

An iteration collects `--num-steps` steps of each env, writes them into a replay buffer, and makes
as many gradient steps as are due. The algorithm is that of dqn.py, and so are the defaults: n-step
returns, a target network that follows slowly, targets that bootstrap after a truncation. The env
must be native, or a `FunctionalEnv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dqn
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
from ppo import Make
from replay import FLAGS, n_step_returns
from tensordict import TensorDict
from torch import Tensor
from torch.func import grad_and_value

import torchwrap as tw


@dataclass
class Args(GraphFlags):
    """Flags have CleanRL's names. Frequencies count the steps of all envs together."""

    out: Path = Path("runs/dqn_graph")
    total_timesteps: int = 80_000
    learning_rate: tuple[float, ...] = (2.3e-3,)  # annealed linearly to zero
    num_envs: int = 32
    num_steps: int = 4
    buffer_size: int = 50_000
    gamma: tuple[float, ...] = (0.99,)
    n_step: int = 3  # rewards in a return
    tau: tuple[float, ...] = (0.01,)  # of the target network, in each gradient step
    batch_size: int = 128
    start_e: tuple[float, ...] = (1.0,)
    end_e: tuple[float, ...] = (0.04,)
    exploration_fraction: tuple[float, ...] = (0.1,)  # from start_e to end_e
    learning_starts: int = 1_024  # steps before the first gradient step
    train_frequency: int = 2  # steps per gradient step


class QNetwork(dqn.QNetwork, VectorModule):
    """That of dqn.py, as a function of a vector."""


def make_iteration(args: Args, grid: Grid, pure: Any, agent: QNetwork) -> Callable:
    """A pure function of the state of the trainings. The functions in it are those of one."""
    step = recorded_step(pure)

    def env_step(state: TensorDict, params: Tensor, epsilon: Tensor, noise: Tensors) -> Any:
        greedy = agent.apply_vector(params, state["observation"]).argmax(-1)
        action = torch.where(noise["explore"] < epsilon, noise["action"], greedy)
        return step(state, action)

    def make_batch(buffer: Tensors, windows: Tensor, envs: Tensor, hyper: Tensors) -> Tensors:
        """Transitions of windows of steps `(updates, batch_size, n_step)`."""
        flags = [buffer[name][windows, envs.unsqueeze(-1)] for name in FLAGS]
        reward, discount, last = n_step_returns(*flags, hyper["gamma"])
        first = windows[..., 0]
        last = windows.gather(-1, last.unsqueeze(-1)).squeeze(-1)
        return {
            "observation": buffer["observation"][first, envs],
            "action": buffer["action"][first, envs],
            "reward": reward,
            "discount": discount,
            "next_observation": buffer["successor"][last, envs],
        }

    def loss(params: Tensor, target: Tensor, batch: Tensors) -> Tensor:
        networks = [partial(agent.apply_vector, vector) for vector in (params, target)]
        return dqn.td_loss(*networks, batch)

    def update_step(adam: Tensors, batch: Tensors, hyper: Tensors) -> tuple[Tensors, Tensor]:
        target = adam["target"]
        grad, value = grad_and_value(loss)(adam["params"], target, batch)
        adam = adam_step(adam, grad, hyper["learning_rate"], torch.inf)
        return {**adam, "target": target.lerp(adam["params"], hyper["tau"])}, value

    def iteration(state: Tensors, hyper: Tensors, progress: Tensor, noise: Tensors, draws: Tensors):
        """Several trainings are the first dimension, or the one after the steps."""
        adam = state["adam"]
        explored = (progress * args.total_timesteps - args.learning_starts).clamp(min=0)
        exploration_steps = hyper["exploration_fraction"] * args.total_timesteps
        share = (explored / exploration_steps.clamp(min=1)).clamp(max=1)
        epsilon = hyper["start_e"].lerp(hyper["end_e"], share)
        act = grid.vmap(env_step)
        env, rollout = tw.scan(
            lambda carry, x: act(carry, adam["params"], epsilon, x), state["env"], noise
        )
        # Outside of scans, because each step of one would copy the whole buffer.
        capacity = args.buffer_size // args.num_envs
        written = state["written"]
        slots = (written + torch.arange(args.num_steps, device=written.device)) % capacity
        buffer = {}
        for name, stored in state["buffer"].items():
            buffer[name] = stored.index_copy(0, slots, rollout[name])
        written = written + args.num_steps
        count = written.clamp(max=capacity)
        num_starts = count - args.n_step + 1  # of windows that are complete
        first = written - count + (draws["age"] * num_starts.clamp(min=1)).long()
        window = torch.arange(args.n_step, device=written.device)
        windows = (first.unsqueeze(-1) + window) % capacity
        sample = grid.vmap(make_batch, (1, 1, 1, 0), 1)
        batch = sample(buffer, windows, draws["env"], hyper)
        hyper = {**hyper, "learning_rate": hyper["learning_rate"] * (1 - progress)}
        update = grid.vmap(update_step)
        after, losses = tw.scan(lambda carry, x: update(carry, x, hyper), adam, batch)
        is_learning = (written * args.num_envs >= args.learning_starts) & (num_starts > 0)
        for name, value in after.items():
            after[name] = torch.where(is_learning, value, adam[name])
        returns = mean_return(rollout)  # the last one that is known, because few episodes end
        returns = torch.where(returns.isnan(), state["return"], returns)
        figures = {"loss": losses.mean(0), "return": returns}
        state = {"env": env, "adam": after, "buffer": buffer, "written": written, "return": returns}
        return state, figures

    return iteration


def draw(args: Args, agent: QNetwork, generator: torch.Generator) -> tuple[Tensors, Tensors]:
    """The random numbers of an iteration: for actions, and for the batches of updates."""
    given = dict(generator=generator, device=generator.device)
    acting = args.num_steps, args.num_envs
    noise = {"explore": torch.rand(acting, **given)}
    noise["action"] = torch.randint(agent.num_actions, acting, **given)
    batches = args.num_steps * args.num_envs // args.train_frequency, args.batch_size
    draws = {"age": torch.rand(batches, **given)}
    draws["env"] = torch.randint(args.num_envs, batches, **given)
    return noise, draws


def start(args: Args, make: Make = tw.make) -> tuple[Run, tw.Env, Any, Callable]:
    """The run, an env and an agent for all trainings, and the function of an iteration."""
    capacity = args.buffer_size // args.num_envs
    if capacity < max(args.num_steps, args.n_step):
        must = "buffer_size must hold num_steps and n_step of each env"
        raise ValueError(f"dqn_graph.py: {must}, got {args.buffer_size}.")
    if args.train_frequency > args.num_envs * args.num_steps:
        must = "train_frequency must be at most the steps of an iteration"
        raise ValueError(f"dqn_graph.py: {must}, got {args.train_frequency}.")
    grid = Grid(args)
    env = dqn.make_env(args, args.num_envs, make)
    pure = tw.pure(env)
    agent, state = new_trainings(grid, pure, lambda: QNetwork(env))
    state["adam"]["target"] = state["adam"]["params"].clone()
    observation = state["env"]["observation"]
    number = observation[..., 0].float()
    row = {"observation": observation, "successor": observation}
    row |= {"action": number.long(), "reward": number}
    row |= {"terminated": number.bool(), "done": number.bool()}
    state["buffer"] = {key: value.new_zeros(capacity, *value.shape) for key, value in row.items()}
    state["written"] = torch.zeros((), dtype=torch.int64, device=args.device)
    state["return"] = torch.full_like(state["adam"]["count"], torch.nan)
    run = Run(args, grid, state, lambda generator: draw(args, agent, generator))
    return run, env, agent, make_iteration(args, grid, pure, agent)


def main(args: Args, make: Make = tw.make) -> dict[str, Any]:
    torch.set_num_threads(1)
    run, env, agent, iteration = start(args, make)
    return run.learn(iteration, env, agent, agent.greedy)


if __name__ == "__main__":
    main(tyro.cli(Args))
