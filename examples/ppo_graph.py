"""PPO whose iterations are one graph each: rollout, advantages and update, for one or many seeds.

python examples/ppo_graph.py                                   solves CartPole-v1
python examples/ppo_graph.py --env-id Pendulum-v1              continuous actions
python examples/ppo_graph.py --num-seeds 16 --num-envs 16      16 trainings at once
python examples/ppo_graph.py --num-seeds 2 --ent-coef 0 0.01   a hyperparameter by seed

It has the structure of PureJaxRL's ppo.py: `tw.pure` makes functions of the env, `tw.scan` loops
over them, and `torch.vmap` maps the bodies of the loops over seeds. Each seed has its own envs,
statistics, parameters and random numbers. Envs must be native, or a `FunctionalEnv`.

Writes metrics.json, learning_curve.png and checkpoint.pt into --out.
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
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.func import functional_call, grad_and_value
from tqdm import trange

import torchwrap as tw
from torchwrap import transforms as T

# Inductor's own tanh takes three times as long as this one.
INDUCTOR = {"cpp.use_decompose_tanh": True}

Tensors = dict[str, Any]


@dataclass
class Args:
    """Hyperparameters that are None take a value in DEFAULTS."""

    env_id: str = "CartPole-v1"
    """the id of the environment"""
    seed: int = 1
    """the first seed"""
    num_seeds: int = 1
    """number of seeds, which train at once"""
    backend: str = "inductor"
    """the compiler, or `none` for a slow run without one"""
    device: str = "cpu"
    """device of the environments and of the networks"""
    num_threads: int = 1
    """PyTorch's threads on the CPU"""
    out: Path | None = None
    """folder of the results; None is runs/ppo_graph-<env_id>"""
    total_timesteps: int | None = None
    """number of env steps per seed"""
    learning_rate: tuple[float, ...] = ()
    """learning rate of Adam, annealed linearly to zero; one, or one per seed"""
    num_envs: int = 64
    """number of parallel environments per seed"""
    num_steps: int | None = None
    """number of steps of each environment per rollout"""
    gamma: tuple[float, ...] = ()
    """discount factor; one, or one per seed"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int | None = None
    """number of minibatches per epoch"""
    update_epochs: int | None = None
    """number of epochs per iteration"""
    clip_coef: float = 0.2
    """clipping coefficient of the surrogate objective"""
    ent_coef: tuple[float, ...] = (0.0,)
    """coefficient of the entropy bonus; one, or one per seed"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""


DISCRETE = dict(
    total_timesteps=250_000,
    learning_rate=(3e-3,),
    num_steps=32,
    gamma=(0.98,),
    num_minibatches=4,
    update_epochs=4,
)
CONTINUOUS = dict(
    total_timesteps=400_000,
    learning_rate=(1e-3,),
    num_steps=64,
    gamma=(0.9,),
    num_minibatches=16,
    update_epochs=10,
)


def make_env(args: Args, make: Callable[..., tw.Env]) -> tw.Env:
    env = make(args.env_id, args.num_envs, device=args.device)
    transforms = [T.RecordEpisodeStatistics(), T.FlattenObservation()]
    transforms += [T.NormalizeObservation(), T.ClipObservation(-10, 10)]
    if isinstance(env.single_action_space, Box):
        transforms += [T.ClipAction(), T.NormalizeReward(gamma=args.gamma[0])]
    return tw.TransformedEnv(env, *transforms)


def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    layers = [*hidden, nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, std)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """Networks as functions of one vector, which holds all of their parameters."""

    def __init__(self, env: tw.Env) -> None:
        super().__init__()
        space = env.single_action_space
        self.discrete = not isinstance(space, Box)
        self.num_outputs = space.shape[0] if isinstance(space, Box) else int(space.n)
        inputs = env.single_observation_space.shape[0]
        self.actor = mlp(inputs, self.num_outputs, std=0.01)
        self.critic = mlp(inputs, 1, std=1.0)
        self.logstd = nn.Parameter(torch.zeros(self.num_outputs))
        self.shapes = {name: value.shape for name, value in self.named_parameters()}

    def part(self, name: str, vector: Tensor) -> Tensors:
        """The parameters of a network, by their names in it."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        values = zip(self.shapes.items(), vector.split(sizes))
        named = {key: value.view(shape) for (key, shape), value in values}
        return {key.removeprefix(name): named[key] for key in named if key.startswith(name)}

    def value(self, vector: Tensor, observation: Tensor) -> Tensor:
        return functional_call(self.critic, self.part("critic.", vector), observation).squeeze(-1)

    def policy(self, vector: Tensor, observation: Tensor) -> Distribution:
        out = functional_call(self.actor, self.part("actor.", vector), observation)
        if self.discrete:
            return Categorical(logits=out, validate_args=False)
        std = self.part("logstd", vector)[""].exp()
        return Independent(Normal(out, std, validate_args=False), 1, validate_args=False)

    def act(self, vector: Tensor, observation: Tensor, noise: Tensor) -> Tensor:
        """Actions of the policy from noise, which is exponential or normal."""
        policy = self.policy(vector, observation)
        if self.discrete:
            return (policy.probs / noise).argmax(-1)
        return policy.mean + policy.base_dist.stddev * noise

    def noise(self, *size: int, generator: torch.Generator) -> Tensor:
        noise = torch.empty(*size, self.num_outputs, device=generator.device)
        return (
            noise.exponential_(generator=generator)
            if self.discrete
            else noise.normal_(generator=generator)
        )


def make_iteration(args: Args, env: tw.Env, agent: Agent) -> Callable[..., tuple[Tensors, Tensors]]:
    """A pure function of the state of a training. With several seeds, all tensors begin with one
    dimension more; in a rollout, it comes after the steps."""
    pure = tw.pure(env)
    # The bodies of the loops are those of one seed.
    vmap = torch.vmap if args.num_seeds > 1 else lambda function, in_dims=0, out_dims=0: function

    def env_step(
        env_state: TensorDict, params: Tensor, noise: Tensor
    ) -> tuple[TensorDict, Tensors]:
        observation = env_state["observation"]
        action = agent.act(params, observation, noise)
        env_state, transition, _ = pure.step(env_state, action)
        successor = transition["next"]
        kept = {"observation": observation, "action": action}
        kept["next_observation"] = successor["observation"]
        for key in ("reward", "terminated", "done", "episode_return"):
            kept[key] = successor[key].squeeze(-1)
        return env_state, kept

    def make_deltas(params: Tensor, rollout: Tensors, gamma: Tensor) -> tuple[Tensor, ...]:
        values = agent.value(params, rollout["observation"])
        # The successor is the true one, also where an episode ended. So a truncated episode is
        # bootstrapped from it. A terminated one may end in NaN, and NaN * 0 is NaN.
        next_values = agent.value(params, rollout["next_observation"])
        next_values = torch.where(rollout["terminated"], 0, next_values)
        delta = rollout["reward"] + gamma * next_values - values
        return values, delta, gamma * args.gae_lambda * ~rollout["done"]

    def gae_step(ahead: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        delta, decay = x
        advantage = delta + torch.where(decay > 0, decay * ahead, 0)
        return advantage, advantage

    def make_batch(params: Tensor, rollout: Tensors, values: Tensor, advantages: Tensor) -> Tensors:
        batch = {"observation": rollout["observation"], "action": rollout["action"]}
        batch["logprob"] = agent.policy(params, batch["observation"]).log_prob(batch["action"])
        batch["advantage"] = advantages
        batch["target"] = advantages + values
        return {name: value.flatten(0, 1) for name, value in batch.items()}

    def ppo_loss(params: Tensor, mb: Tensors, ent_coef: Tensor) -> Tensor:
        policy = agent.policy(params, mb["observation"])
        ratio = (policy.log_prob(mb["action"]) - mb["logprob"]).exp()
        advantages = mb["advantage"]
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.minimum(advantages * ratio, advantages * clipped).mean()
        v_loss = 0.5 * (agent.value(params, mb["observation"]) - mb["target"]).square().mean()
        return pg_loss + args.vf_coef * v_loss - ent_coef * policy.entropy().mean()

    def update_step(
        learner: Tensors, rows: Tensor, batch: Tensors, lr: Tensor, ent_coef: Tensor
    ) -> Any:
        """A step of Adam on a minibatch."""
        params, mean, square = learner["params"], learner["mean"], learner["square"]
        minibatch = {name: value[rows] for name, value in batch.items()}
        grad, loss = grad_and_value(ppo_loss)(params, minibatch, ent_coef)
        grad = grad * (args.max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1)
        count = learner["count"] + 1
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad.square()
        direction = (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-5)
        params = params - lr * direction
        return {"params": params, "mean": mean, "square": square, "count": count}, loss

    def iteration(state: Tensors, hyper: Tensors, noise: Tensor, rows: Tensor) -> Any:
        learner = state["learner"]
        params = learner["params"]
        step = vmap(env_step)
        env_state, rollout = tw.scan(lambda env, x: step(env, params, x), state["env"], noise)
        deltas = vmap(make_deltas, in_dims=(0, 1, 0), out_dims=1)
        values, delta, decay = deltas(params, rollout, hyper["gamma"])
        _, advantages = tw.scan(gae_step, torch.zeros_like(delta[0]), (delta, decay), reverse=True)
        batch = vmap(make_batch, in_dims=(0, 1, 1, 1))(params, rollout, values, advantages)
        update = vmap(update_step)
        others = batch, hyper["learning_rate"], hyper["ent_coef"]
        learner, losses = tw.scan(lambda learner, x: update(learner, x, *others), learner, rows)
        returns = torch.where(rollout["done"], rollout["episode_return"], torch.nan)
        figures = {"loss": losses.mean(0), "return": returns.nanmean((0, -1))}
        return {"env": env_state, "learner": learner}, figures

    if args.backend == "none":
        return iteration
    options = INDUCTOR if args.backend == "inductor" else None
    return torch.compile(
        iteration, fullgraph=True, dynamic=False, backend=args.backend, options=options
    )


def init(args: Args, env: tw.Env, agents: list[Agent], seeds: list[int]) -> Tensors:
    """The state of a training."""
    states, learners = [], []
    pure = tw.pure(env)
    for agent, seed in zip(agents, seeds):
        states.append(pure.init(seed)[0])
        params = nn.utils.parameters_to_vector(agent.parameters()).detach()
        zeros = torch.zeros_like(params)
        count = torch.zeros((), device=args.device)
        learners.append({"params": params, "mean": zeros, "square": zeros.clone(), "count": count})
    return {"env": stack(states), "learner": stack(learners)}


def stack(values: list[Any]) -> Any:
    """The values of seeds in a new first dimension, or the only one."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], dict):
        return {key: stack([value[key] for value in values]) for key in values[0]}
    return torch.stack(values)


def draw(
    args: Args, agents: list[Agent], generators: list[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """The random numbers of an iteration: noise of the actions, and rows of the minibatches."""
    batch_size = args.num_steps * args.num_envs
    noises, rows = [], []
    for agent, generator in zip(agents, generators):
        noises.append(agent.noise(args.num_steps, args.num_envs, generator=generator))
        orders = []
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, generator=generator, device=args.device)
            orders.append(order.view(args.num_minibatches, -1))
        rows.append(torch.cat(orders))
    if len(noises) == 1:
        return noises[0], rows[0]
    return torch.stack(noises, 1), torch.stack(rows, 1)


def make_hyper(args: Args) -> Tensors:
    hyper = {}
    for name in ("learning_rate", "gamma", "ent_coef"):
        values = getattr(args, name)
        if len(values) not in (1, args.num_seeds):
            raise ValueError(f"ppo_graph.py: {name} must have 1 or num_seeds values, got {values}.")
        values = torch.tensor(values, device=args.device)
        hyper[name] = values.expand(args.num_seeds).clone() if args.num_seeds > 1 else values[0]
    return hyper


def main(args: Args, make: Callable[..., tw.Env] = tw.make) -> dict[str, Any]:
    start_time = time.perf_counter()
    torch.set_num_threads(args.num_threads)
    args.out = args.out or Path("runs") / f"ppo_graph-{args.env_id.rpartition(':')[2]}"
    args.out.mkdir(parents=True, exist_ok=True)
    is_box = isinstance(make(args.env_id, 1).single_action_space, Box)
    for name, value in (CONTINUOUS if is_box else DISCRETE).items():
        setattr(args, name, getattr(args, name) or value)
    env = make_env(args, make)
    seeds = range(args.seed, args.seed + args.num_seeds)
    agents, generators = [], []
    for seed in seeds:
        torch.manual_seed(seed)
        agents.append(Agent(env).to(args.device))
        generators.append(torch.Generator(args.device).manual_seed(seed))
    agent = agents[0]
    state = init(args, env, agents, seeds)
    hyper = make_hyper(args)
    iterate = make_iteration(args, env, agent)

    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    curve = []
    initial_rate = hyper["learning_rate"]
    for iteration in trange(num_iterations):
        hyper["learning_rate"] = initial_rate * (1 - iteration / num_iterations)
        state, figures = iterate(state, hyper, *draw(args, agents, generators))
        curve.append(figures["return"].reshape(-1))
        if iteration == 0:
            compile_seconds, cpu_start = time.perf_counter() - start_time, time.process_time()
    cpu_seconds = time.process_time() - cpu_start
    steps = (num_iterations - 1) * batch_size * args.num_seeds

    plain = {"env": state["env"].to_dict(), "learner": state["learner"]}
    torch.save(plain, args.out / "checkpoint.pt")
    evaluations = evaluate(env, agent, state, args)
    metrics = {
        "env": args.env_id,
        "seeds": list(seeds),
        "env_steps": num_iterations * batch_size,
        "wall_seconds": time.perf_counter() - start_time,
        "first_iteration_seconds": compile_seconds,
        "steps_per_cpu_second": steps / cpu_seconds,
        "eval_mean_return": evaluations,
    }
    text = json.dumps(metrics, indent=2)
    (args.out / "metrics.json").write_text(text + "\n")
    print(text)
    plot(args, torch.stack(curve).cpu(), batch_size)
    return metrics


def evaluate(env: tw.Env, agent: Agent, state: Tensors, args: Args) -> list[float]:
    """The mean return of 128 fresh episodes by seed, with the statistics that it has learned."""
    returns = []
    for i in range(args.num_seeds):
        env_state, params = state["env"], state["learner"]["params"]
        if args.num_seeds > 1:
            env_state, params = env_state[i], params[i]
        env.restore(env_state)
        generator = torch.Generator(args.device).manual_seed(args.seed + i)

        def policy(td: TensorDict) -> Tensor:
            noise = agent.noise(args.num_envs, generator=generator)
            return agent.act(params, td["observation"], noise)

        with torch.no_grad():
            episodes = tw.evaluate(env, policy, 128, seed=args.seed + i + 1_000_000)
        returns.append(episodes["episode_return"].mean().item())
    return returns


def plot(args: Args, curve: Tensor, batch_size: int) -> None:
    """Mean returns of the episodes that end in an iteration: mean, and range, over the seeds."""
    from matplotlib.figure import Figure  # imported here so that training does not wait for it

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = batch_size * torch.arange(1, len(curve) + 1)
    axes.plot(steps, curve.nanmean(1))
    low, high = curve.nan_to_num(torch.inf).amin(1), curve.nan_to_num(-torch.inf).amax(1)
    axes.fill_between(steps, low, high, alpha=0.2)
    axes.set(title=f"PPO on {args.env_id}", xlabel="env steps", ylabel="mean episode return")
    figure.savefig(args.out / "learning_curve.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
