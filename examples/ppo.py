"""PPO in one file, after CleanRL's ppo.py: (multi-)discrete and continuous actions, torchwrap's own envs and Gymnasium's.

python examples/ppo.py                                      solves CartPole-v1
python examples/ppo.py --env-id HalfCheetah-v5              trains on a Gymnasium env
python examples/ppo.py --env-id module:Id                   trains on your own env, of torchwrap.register or of Gymnasium
python examples/ppo.py --tensorboard                        also writes TensorBoard scalars, under CleanRL's names
python examples/ppo.py --resume                             continues from the checkpoint of a run that was killed
torchrun --nproc-per-node 2 examples/ppo.py                 divides the envs among processes, which average their gradients

Writes metrics.json, learning_curve.png and checkpoint.pt into --out.

The algorithm is that of Schulman et al. (2017) with the details of Huang et al., "The 37 Implementation Details of Proximal
Policy Optimization" (2022), with one difference: a truncated episode is bootstrapped from its final observation.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import gymnasium
import torch
import torch.distributed as dist
import tyro
from tensordict import TensorDict
from torch import Tensor, nn, optim
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.optim.adam import adam
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args:
    """Flags are CleanRL's where it has the same. Hyperparameters that are None take the value of the env's row in PRESETS."""

    env_id: str = "CartPole-v1"
    """the id of the environment"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    backend: Literal["torch", "gymnasium"] | None = None
    """torch for torchwrap's own env, gymnasium for Gymnasium's; None takes the first one that has the id"""
    device: str = "cpu"
    """device of the environments and of the agent"""
    compile: bool = False
    """compile the rollout (the transforms if Gymnasium steps the env) and the whole update"""
    num_threads: int = 1
    """PyTorch's threads on the CPU; minibatches of a few hundred rows lose more by sharing work than they gain"""
    out: Path | None = None
    """folder of the results; None is runs/ppo-<env_id>"""
    tensorboard: bool = False
    """write TensorBoard scalars into the folder of the results"""
    metrics: dict[str, str] | None = None
    """infos to record by episode, such as `--metrics success max energy sum`; TensorBoard has their means as charts/<name>"""
    resume: bool = False
    """continue from the checkpoint in the folder of the results, if there is one; the figures are those of an unbroken run"""
    save_every: int = 10
    """number of iterations between two checkpoints"""
    target_return: float | None = None
    """mean return of 100 episodes that counts as solved; None is the env's registered reward threshold"""

    total_timesteps: int | None = None
    """total number of env steps"""
    learning_rate: float | None = None
    """learning rate of the optimizer"""
    num_envs: int | None = None
    """number of parallel environments"""
    num_steps: int | None = None
    """number of steps of each environment per rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to zero"""
    gamma: float | None = None
    """discount factor"""
    gae_lambda: float | None = None
    """lambda of generalized advantage estimation"""
    num_minibatches: int | None = None
    """number of minibatches per epoch"""
    update_epochs: int | None = None
    """number of epochs per iteration"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """clipping coefficient of the surrogate objective"""
    clip_vloss: bool | None = None
    """clip the change of the value function as well, to the same coefficient"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""
    target_kl: float | None = None
    """end an iteration early if the approximate KL divergence exceeds this; None disables it"""
    normalize: bool | None = None
    """normalize observations and rewards by running statistics, and clip them to [-10, 10]"""


PRESETS = {
    "CartPole-v1": dict(
        total_timesteps=150_000,
        learning_rate=3e-3,
        num_envs=64,
        num_steps=32,
        gamma=0.98,
        gae_lambda=0.95,
        num_minibatches=4,
        update_epochs=8,
        clip_vloss=False,
        normalize=False,
    ),
    "Acrobot-v1": dict(
        total_timesteps=400_000,
        learning_rate=3e-3,
        num_envs=32,
        num_steps=128,
        gamma=0.99,
        gae_lambda=0.9,
        num_minibatches=4,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    "MountainCar-v0": dict(
        total_timesteps=1_000_000,
        learning_rate=3e-3,
        num_envs=64,
        num_steps=128,
        gamma=0.99,
        gae_lambda=0.98,
        num_minibatches=16,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    "MountainCarContinuous-v0": dict(
        total_timesteps=1_000_000,
        learning_rate=1e-3,
        num_envs=64,
        num_steps=256,
        gamma=0.9999,
        gae_lambda=0.9,
        num_minibatches=16,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    "Pendulum-v1": dict(
        total_timesteps=400_000,
        learning_rate=1e-3,
        num_envs=32,
        num_steps=128,
        gamma=0.9,
        gae_lambda=0.95,
        num_minibatches=16,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    "any other env with discrete actions": dict(  # as CleanRL's ppo.py, but without an entropy bonus
        total_timesteps=500_000,
        learning_rate=2.5e-4,
        num_envs=4,
        num_steps=128,
        gamma=0.99,
        gae_lambda=0.95,
        num_minibatches=4,
        update_epochs=4,
        clip_vloss=True,
        normalize=False,
    ),
    "any other env with continuous actions": dict(  # as CleanRL's ppo_continuous_action.py
        total_timesteps=1_000_000,
        learning_rate=3e-4,
        num_envs=1,
        num_steps=2048,
        gamma=0.99,
        gae_lambda=0.95,
        num_minibatches=32,
        update_epochs=10,
        clip_vloss=True,
        normalize=True,
    ),
}


DISCRETE = gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete

# Options of torch.compile: tanh in terms of exp takes a third of the time of Inductor's own, and was a third of the update.
INDUCTOR = {"cpp.use_decompose_tanh": True}


def make_env(
    args: Args,
    num_envs: int,
    make: Callable[..., tw.Env] = tw.make,
    rank: int = 0,
    world_size: int = 1,
) -> tw.Env:
    infos = (
        {"info_keys": list(args.metrics)} if args.metrics and args.backend == "gymnasium" else {}
    )
    env = make(
        args.env_id,
        num_envs,
        backend=args.backend,
        device=args.device,
        first_index=rank * num_envs,
        **infos,
    )
    discrete = isinstance(env.single_action_space, DISCRETE)
    # 100 episodes of all processes
    statistics = T.RecordEpisodeStatistics(
        buffer_length=-(-100 // world_size), metrics=args.metrics
    )
    transforms = [*([] if discrete else [T.ClipAction()]), statistics, T.FlattenObservation()]
    if args.normalize:
        transforms += [T.NormalizeObservation(), T.ClipObservation(-10, 10)]
        transforms += [T.NormalizeReward(gamma=args.gamma), T.ClipReward(-10, 10)]
    return tw.TransformedEnv(env, *transforms)


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = 2**0.5) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, outputs), std),
    )


class Choices:
    """The distribution of a MultiDiscrete action, whose components are independent."""

    def __init__(self, logits: Sequence[Tensor]) -> None:
        self.parts = [Categorical(logits=each, validate_args=False) for each in logits]

    def sample(self) -> Tensor:
        return torch.stack([part.sample() for part in self.parts], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        pairs = zip(self.parts, actions.unbind(-1), strict=True)
        return torch.stack([part.log_prob(action) for part, action in pairs]).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)


class Agent(nn.Module):
    def __init__(self, env: tw.Env) -> None:
        super().__init__()
        inputs, action_space = env.single_observation_space.shape[0], env.single_action_space
        self.discrete = isinstance(action_space, DISCRETE)
        self.sizes = (
            action_space.nvec.tolist()
            if isinstance(action_space, gymnasium.spaces.MultiDiscrete)
            else None
        )
        outputs = gymnasium.spaces.flatdim(
            action_space
        )  # one for each choice, or for each dimension of a Box
        self.critic = mlp(inputs, 1, std=1.0)
        self.actor = mlp(inputs, outputs, std=0.01)
        self.actor_logstd = None if self.discrete else nn.Parameter(torch.zeros(outputs))

    def get_value(self, observation: Tensor) -> Tensor:
        return self.critic(observation.float()).squeeze(-1)

    def get_distribution(self, observation: Tensor) -> Distribution | Choices:
        out = self.actor(observation.float())
        if self.sizes is not None:
            return Choices(out.split(self.sizes, -1))
        if self.discrete:
            return Categorical(logits=out, validate_args=False)
        # Independent sums log probability and entropy over the dimensions of an action.
        return Independent(
            Normal(out, self.actor_logstd.exp(), validate_args=False), 1, validate_args=False
        )

    def act(self, td: TensorDict) -> TensorDict:
        return td.set("action", self.get_distribution(td["observation"]).sample())


def gae(delta: Tensor, decay: Tensor) -> Tensor:
    """Generalized advantage estimation `(num_envs, num_steps)`: `advantage[t] = delta[t] + decay[t] * advantage[t + 1]`.

    Each pass doubles the number of steps that an advantage looks ahead, so 128 steps take 7 passes.
    """
    ahead = 1
    while ahead < delta.shape[1]:
        delta = delta + decay * nn.functional.pad(delta[:, ahead:], (0, ahead))
        decay = decay * nn.functional.pad(decay[:, ahead:], (0, ahead))
        ahead *= 2
    return delta


@torch.no_grad()
def make_batch(agent: Agent, data: dict[str, Any], args: Args) -> dict[str, Tensor]:
    """Flatten a rollout `(num_envs, num_steps)`, with log probabilities, values, advantages and returns."""
    reward, terminated, done = (
        data["next"][key].squeeze(-1) for key in ("reward", "terminated", "done")
    )
    values = agent.get_value(data["observation"])
    # ["next"]["observation"] is the final observation where an episode ended, so a truncated episode is bootstrapped from it.
    delta = (
        reward + args.gamma * agent.get_value(data["next"]["observation"]) * ~terminated - values
    )
    advantages = gae(delta, args.gamma * args.gae_lambda * ~done)
    logprobs = agent.get_distribution(data["observation"]).log_prob(data["action"])
    batch = dict(observation=data["observation"], action=data["action"], logprob=logprobs)
    batch |= dict(advantage=advantages, value=values, ret=advantages + values)
    return {name: value.flatten(0, 1) for name, value in batch.items()}


def ppo_loss(agent: Agent, mb: dict[str, Tensor], args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    distribution = agent.get_distribution(mb["observation"])
    logratio = distribution.log_prob(mb["action"]) - mb["logprob"]
    ratio = logratio.exp()

    advantages = mb["advantage"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    values = agent.get_value(mb["observation"])
    squares = (values - mb["ret"]) ** 2
    if args.clip_vloss:
        clipped = mb["value"] + torch.clamp(values - mb["value"], -args.clip_coef, args.clip_coef)
        squares = torch.max(squares, (clipped - mb["ret"]) ** 2)
    v_loss = 0.5 * squares.mean()
    entropy_loss = distribution.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef

    with torch.no_grad():
        stats = {"value_loss": v_loss, "policy_loss": pg_loss, "entropy": entropy_loss}
        stats["old_approx_kl"] = -logratio.mean()
        stats["approx_kl"] = (
            (ratio - 1) - logratio
        ).mean()  # http://joschu.net/blog/kl-approx.html
        stats["clipfrac"] = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
    return loss, {name: value.detach() for name, value in stats.items()}


def adam_tensors(optimizer: optim.Adam) -> dict[str, Any]:
    """The parameters and the state of an optimizer, as the arguments of the function `adam`."""
    group, state = optimizer.param_groups[0], optimizer.state
    for parameter in group["params"]:
        if parameter not in state:  # optimizer.step() would make it at the first call
            state[parameter] = {"step": torch.zeros((), device=parameter.device)}
            state[parameter] |= {
                name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
            }
    steps, averages, squares = (
        [state[p][name] for p in group["params"]] for name in ("step", "exp_avg", "exp_avg_sq")
    )
    tensors = dict(
        params=group["params"],
        lr=group["lr"],
        state_steps=steps,
        exp_avgs=averages,
        exp_avg_sqs=squares,
    )
    return {**tensors, "max_exp_avg_sqs": []}


def average(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors by their means over all processes of `torchrun`."""
    if dist.is_available() and dist.is_initialized():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, total in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(total.view_as(tensor) / dist.get_world_size())


def update(
    agent: Agent, tensors: dict[str, Any], batch: dict[str, Tensor], mb_inds: Tensor, args: Args
) -> dict[str, Tensor]:
    """One step of Adam on a minibatch. No optimizer object and no backward(), so that one graph can hold all of it."""
    loss, stats = ppo_loss(agent, {name: value[mb_inds] for name, value in batch.items()}, args)
    grads = torch.autograd.grad(loss, tensors["params"])
    with torch.no_grad():
        average(grads)
        scale = (args.max_grad_norm / (nn.utils.get_total_norm(grads) + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad *= scale
        # The fused kernel is the fastest one for eager mode; Inductor makes its own from PyTorch's operators.
        implementation = dict(foreach=True, capturable=True) if args.compile else dict(fused=True)
        settings = dict(
            beta1=0.9, beta2=0.999, eps=1e-5, weight_decay=0, amsgrad=False, maximize=False
        )
        # By position: with `state_steps` as a keyword on a GPU, PyTorch would not compile it, whatever `capturable` says.
        state = [
            tensors[name] for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
        ]
        adam(tensors["params"], list(grads), *state, lr=tensors["lr"], **settings, **implementation)
    return stats


def plot(
    path: Path, args: Any, curve: list[tuple[int, float, float, float]], window: int = 100
) -> None:
    from matplotlib.figure import Figure  # imported here so that training does not wait for it

    steps, returns, seconds, deviations = zip(*curve)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        steps, returns, label=f"return of the latest {window} episodes, mean and standard deviation"
    )
    bounds = [
        [mean + sign * deviation for mean, deviation in zip(returns, deviations)]
        for sign in (-1, 1)
    ]
    axes.fill_between(steps, *bounds, alpha=0.2)
    low, high = min(returns), max(returns)
    if (
        args.target_return is not None and args.target_return <= 2 * high - low
    ):  # a distant target would flatten the curve
        axes.axhline(
            args.target_return, color="gray", linestyle="--", label=f"target {args.target_return:g}"
        )
    axes.set(
        title=f"PPO on {args.env_id}, seed {args.seed}, {seconds[-1]:.0f} s",
        xlabel="env steps",
        ylabel="return",
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def save(path: Path, checkpoint: dict[str, object]) -> None:
    # Write to another file and rename it, so that checkpoint.pt is complete even if the process is killed.
    part = path.with_suffix(".part")
    torch.save(checkpoint, part)
    part.replace(path)


def load(path: Path, run: dict[str, str]) -> dict[str, object] | None:
    if not path.exists():
        return None
    checkpoint = torch.load(path, weights_only=True)
    if checkpoint["run"] != run:
        other = {
            name: checkpoint["run"].get(name)
            for name, value in run.items()
            if checkpoint["run"].get(name) != value
        }
        raise ValueError(
            f"ppo.py --resume needs the arguments of the run in {path.parent}, which had {other}."
        )
    return checkpoint


def main(args: Args, make: Callable[..., tw.Env] = tw.make) -> dict[str, object]:
    """Train in this process, or in this one of those that torchrun has started. The one of rank 0 writes and evaluates."""
    if "LOCAL_RANK" not in os.environ:
        return train(args, make, rank=0, world_size=1)
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    timeout = timedelta(minutes=5)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun's store outlives a restart: without a prefix, a process may look for another one where it was before.
    store = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return train(args, make, rank, world_size)
    finally:
        dist.destroy_process_group()


def gather(value: object, rank: int, world_size: int) -> list[Any]:
    """The values of all processes, on rank 0."""
    if world_size == 1:
        return [value]
    values = [None] * world_size if rank == 0 else None
    dist.gather_object(value, values)
    return values or []


def train(args: Args, make: Callable[..., tw.Env], rank: int, world_size: int) -> dict[str, object]:
    if args.tensorboard and rank == 0:
        from torch.utils.tensorboard import SummaryWriter
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)

    probe = make(args.env_id, 1, backend=args.backend)
    kind = "discrete" if isinstance(probe.single_action_space, DISCRETE) else "continuous"
    args.backend = "torch" if isinstance(probe.unwrapped, tw.FunctionalEnv) else "gymnasium"
    probe.close()
    for name, value in PRESETS.get(
        args.env_id, PRESETS[f"any other env with {kind} actions"]
    ).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    num_envs = args.num_envs // world_size
    if num_envs * world_size != args.num_envs:
        raise ValueError(
            f"ppo.py needs --num-envs that {world_size} processes can share, but got {args.num_envs}."
        )

    env = make_env(args, num_envs, make, rank, world_size)
    native = isinstance(env.unwrapped, tw.FunctionalEnv)
    if args.target_return is None:
        args.target_return = getattr(env.spec, "reward_threshold", None)
    out = args.out or Path("runs") / f"ppo-{args.env_id.rpartition(':')[2].replace('/', '-')}"
    out.mkdir(parents=True, exist_ok=True)

    agent = Agent(env).to(args.device)
    if rank > 0:  # the same network everywhere, but other actions
        torch.manual_seed(args.seed + 1_000_003 * rank)
    # The learning rate is a tensor because a graph would keep the value of a number.
    optimizer = optim.Adam(
        agent.parameters(), lr=torch.tensor(args.learning_rate, device=args.device), eps=1e-5
    )
    statistics = next(
        module for module in env.modules() if isinstance(module, T.RecordEpisodeStatistics)
    )

    successor = ["observation", "reward", "terminated", "done", *statistics.keys.values()]
    collect = tw.Collector(
        env,
        agent.act,
        args.num_steps,
        keys=["observation", "action", *(("next", key) for key in successor)],
    )
    to_batch, step, compile_seconds = make_batch, update, 0.0
    if args.compile:
        tqdm.write("compiling the rollout; the first iteration compiles the update")
        start = time.perf_counter()
        tw.compile(collect if native else env, options=INDUCTOR)
        compile_seconds = time.perf_counter() - start
        torch._dynamo.config.trace_autograd_ops = True  # else autograd.grad would end a graph
        # Sizes are constants of a graph. A last minibatch of another size gets graphs of its own.
        to_batch, step = (
            torch.compile(function, fullgraph=True, dynamic=False, options=INDUCTOR)
            for function in (make_batch, update)
        )
    td = env.reset(seed=args.seed)

    # A checkpoint holds all that a run depends on: its arguments, the states of the envs, and PyTorch's random numbers.
    generators, device = [torch.default_generator], torch.device(args.device)
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    run = {
        name: str(value)
        for name, value in vars(args).items()
        if name not in ("out", "resume", "save_every", "tensorboard")
    }
    run |= {"device": torch.device(args.device).type, "world_size": str(world_size)}
    curve, reached, seconds_before, first_iteration = [], None, 0.0, 0
    if args.resume and not env.can_snapshot:
        raise ValueError(f"ppo.py --resume needs an env of torchwrap's own, but got {env!r}.")
    checkpoint = load(out / "checkpoint.pt", run) if args.resume else None
    if checkpoint is not None:
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        part = checkpoint["processes"][rank]
        td = env.restore(part["snapshot"])
        for generator, state in zip(generators, part["rng"]):
            generator.set_state(state)
        curve, reached, seconds_before, first_iteration = (
            checkpoint[name] for name in ("curve", "reached", "seconds", "iteration")
        )
    tensors = adam_tensors(optimizer)
    start_time -= seconds_before

    writer = None
    if args.tensorboard and rank == 0:
        # What a killed run wrote after its last checkpoint is purged.
        writer = SummaryWriter(out, purge_step=first_iteration * batch_size + 1)

    progress = tqdm(
        total=num_iterations * batch_size,
        initial=first_iteration * batch_size,
        unit=" steps",
        unit_scale=True,
        disable=rank > 0,
    )
    progress.set_description("compiling the update" if args.compile else None)
    loop_start = steady_start = time.perf_counter()
    for iteration in range(first_iteration, num_iterations):
        if args.anneal_lr:
            tensors["lr"].fill_((1.0 - iteration / num_iterations) * args.learning_rate)

        data, td = collect(td)
        tw.sync_statistics(env)
        batch = to_batch(agent, data.to_dict(), args)
        clipfracs = []
        for _ in range(args.update_epochs):
            for mb_inds in torch.randperm(num_envs * args.num_steps, device=args.device).chunk(
                args.num_minibatches
            ):
                stats = step(agent, tensors, batch, mb_inds, args)
                clipfracs.append(stats["clipfrac"])
            if args.target_kl is not None:
                average([stats["approx_kl"]])
                if stats["approx_kl"] > args.target_kl:
                    break

        global_step = (iteration + 1) * batch_size
        seconds = time.perf_counter() - start_time
        progress.update(batch_size)
        if iteration == first_iteration:
            steady_start = time.perf_counter()
            progress.set_description(None)
        returns = statistics.return_queue
        sums = torch.stack([torch.ones_like(returns), returns, returns**2]).double().sum(1)
        average([sums])
        if sums[0] > 0:
            mean_return, mean_square = (sums[1:] / sums[0]).tolist()
            curve.append(
                (global_step, mean_return, seconds, max(0.0, mean_square - mean_return**2) ** 0.5)
            )
            progress.set_postfix({"return": f"{mean_return:.1f}"}, refresh=False)
            full = sums[0] == statistics.buffer_length
            if (
                reached is None
                and args.target_return is not None
                and full
                and mean_return >= args.target_return
            ):
                reached = (global_step, seconds)
        if writer is not None:
            done = data["next", "done"]
            if done.any():
                # Means over the episodes that ended in this rollout. CleanRL has two of the names.
                names = {"return": "episodic_return", "length": "episodic_length"}
                for name, key in statistics.keys.items():
                    writer.add_scalar(
                        f"charts/{names.get(name, name)}",
                        data["next", key][done].float().mean(),
                        global_step,
                    )
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
            stats["clipfrac"] = torch.stack(
                clipfracs
            ).mean()  # the other losses are those of the last minibatch
            for name, value in stats.items():
                writer.add_scalar(f"losses/{name}", value, global_step)
            explained_var = 1 - (batch["ret"] - batch["value"]).var(correction=0) / batch[
                "ret"
            ].var(correction=0)
            writer.add_scalar("losses/explained_variance", explained_var, global_step)
            writer.add_scalar("charts/SPS", int(global_step / seconds), global_step)
        if (iteration + 1) % args.save_every == 0 or iteration + 1 == num_iterations:
            state = {
                "agent": agent.state_dict(),
                "env": env.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            if env.can_snapshot:
                part = {
                    "snapshot": env.snapshot().to_dict(),
                    "rng": [generator.get_state() for generator in generators],
                }
                state |= {"processes": gather(part, rank, world_size), "iteration": iteration + 1}
            seconds = time.perf_counter() - start_time
            if rank == 0:
                save(
                    out / "checkpoint.pt",
                    {**state, "run": run, "curve": curve, "reached": reached, "seconds": seconds},
                )
            if writer is not None:
                writer.flush()
    progress.close()
    if writer is not None:
        writer.close()
    if rank > 0:
        env.close()
        return {}
    end = time.perf_counter()
    wall_seconds = end - start_time
    # Steady state is what follows the first iteration, which compiles the update.
    steady_iterations = num_iterations - first_iteration - 1
    steady = (
        steady_iterations * batch_size / (end - steady_start) if steady_iterations > 0 else None
    )
    if args.compile:
        compile_seconds += steady_start - loop_start - (batch_size / steady if steady else 0.0)

    # Evaluate fresh episodes in fresh envs with the statistics learned by the transforms. Actions are sampled as in training,
    # because early in training the mode of the policy can be far worse than the policy that was optimized.
    eval_env = make_env(args, 20, make, world_size=world_size)
    eval_env.load_state_dict(env.state_dict())
    eval_returns = tw.evaluate(eval_env, agent.act, 20, seed=args.seed + 1_000_000)[
        "episode_return"
    ]

    metrics = {
        "env": args.env_id,
        "backend": "torch" if native else "gymnasium",
        "num_envs": args.num_envs,
        "processes": world_size,
        "device": args.device,
        "seed": args.seed,
        "env_steps": num_iterations * batch_size,
        "wall_seconds": wall_seconds,
        "steps_per_second": num_iterations * batch_size / wall_seconds,
        "steps_per_second_steady": steady,
        "compile_seconds": compile_seconds,
        "target_return": args.target_return,
        "env_steps_to_target": reached and reached[0],
        "seconds_to_target": reached and reached[1],
        "final_mean_return": curve[-1][1] if curve else None,
        **{
            f"final_mean_{name}": queue.mean().item()
            for name, queue in statistics.metric_queues.items()
            if len(queue)
        },
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
