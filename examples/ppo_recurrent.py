"""PPO with a recurrent policy, on CartPole-v1 with hidden velocities: it takes a memory to balance.

python examples/ppo_recurrent.py                reaches 500 in half a minute
python examples/ppo_recurrent.py --compile      compiles the rollout, resets of the state included
python examples/ppo_recurrent.py --env-id Pendulum-v1   another env, as it is

`PolicyState` declares the hidden state of the policy. The env carries it from step to step, and
starts it at zero in each episode. The update starts from the stored state of each chunk: truncated
backpropagation through time. A chunk is a quarter of the longest episode, because after some time
all envs are at the same point of their episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import ppo
import torch
import tyro
from gymnasium.spaces import Box, flatdim
from ppo import Flags, estimate_advantages, layer_init
from ppo_parts import distribution, plain, to_vector, train_epochs
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Distribution

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args(Flags):
    env_id: str = "CartPole-v1"
    """the id of the environment; CartPole-v1 hides its velocities"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    compile: bool = False
    """compile the rollout"""
    total_timesteps: int = 250_000
    """total number of env steps"""
    learning_rate: float = 2e-3
    """learning rate of the optimizer, annealed linearly to zero"""
    num_envs: int = 32
    """number of parallel environments"""
    num_steps: int = 128
    """steps of each environment per rollout: how far gradients reach back in time"""
    hidden_size: int = 32
    """size of the policy's memory"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch, each of whole environments"""
    update_epochs: int = 4
    """epochs per iteration"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """clipping coefficient of the surrogate objective"""
    clip_vloss: bool = False
    """clip the change of the value function as well"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""


def positions(observation: Tensor) -> Tensor:
    return observation[:, ::2]  # of the cart and of the pole, without their velocities


def make_env(args: Args, num_envs: int) -> tw.Env:
    env = plain(tw.make(args.env_id, num_envs))
    actions = [T.ClipAction()] if isinstance(env.single_action_space, Box) else []
    observations = to_vector(env.single_observation_space)
    if args.env_id == "CartPole-v1":
        observations = [T.TransformObservation(positions, Box(-10, 10, (2,)))]
    return tw.TransformedEnv(
        env,
        *actions,
        T.RecordEpisodeStatistics(),
        *observations,
        T.NormalizeObservation(),
        T.NormalizeReward(gamma=args.gamma),
        tw.PolicyState({"hidden": (args.hidden_size,)}),
    )


class Agent(nn.Module):
    def __init__(self, args: Args, env: tw.Env | None = None) -> None:
        super().__init__()
        env = make_env(args, 1) if env is None else env
        self.action_space = env.single_action_space
        inputs = env.single_observation_space.shape[0]
        outputs = flatdim(self.action_space)  # logits, or means of a Box
        self.encoder = nn.Sequential(layer_init(nn.Linear(inputs, args.hidden_size)), nn.Tanh())
        self.cell = nn.GRUCell(args.hidden_size, args.hidden_size)
        self.actor = layer_init(nn.Linear(args.hidden_size, outputs), std=0.01)
        self.critic = layer_init(nn.Linear(args.hidden_size, 1), std=1.0)
        if isinstance(self.action_space, Box):
            self.log_std = nn.Parameter(torch.zeros(outputs))

    def remember(self, observation: Tensor, hidden: Tensor) -> Tensor:
        """The state after an observation. All dimensions but the last are batch dimensions."""
        features = self.encoder(observation)
        flat = self.cell(features.flatten(0, -2), hidden.flatten(0, -2))
        return flat.view(*observation.shape[:-1], -1)

    def remember_all(self, observation: Tensor, hidden: Tensor, is_init: Tensor) -> Tensor:
        """The states of a chunk `(num_envs, num_steps, ...)`, with gradients through time."""
        states = []
        for features, first in zip(self.encoder(observation).unbind(1), is_init.unbind(1)):
            hidden = self.cell(features, hidden.masked_fill(first, 0))
            states.append(hidden)
        return torch.stack(states, 1)

    def get_distribution(self, hidden: Tensor) -> Distribution:
        log_std = getattr(self, "log_std", None)
        return distribution(self.action_space, self.actor(hidden), log_std)

    def get_value(self, hidden: Tensor) -> Tensor:
        return self.critic(hidden).squeeze(-1)

    def act(self, td: TensorDict) -> TensorDict:
        hidden = self.remember(td["observation"], td["hidden"])
        td["action"] = self.get_distribution(hidden).sample()
        td["next", "hidden"] = hidden
        return td


@torch.no_grad()
def make_batch(agent: Agent, data: TensorDict, args: Args) -> dict[str, Tensor]:
    successor = data["next"]
    hidden = successor["hidden"]
    values = agent.get_value(hidden)
    # The state after the successor is right at truncations too, where the next root is another
    # episode's.
    next_hidden = agent.remember(successor["observation"], hidden)
    next_values = agent.get_value(next_hidden)
    advantages = estimate_advantages(data, values, next_values, args)
    batch = {name: data[name] for name in ("observation", "action", "is_init")}
    batch["hidden"] = data["hidden"][:, 0]
    batch["logprob"] = agent.get_distribution(hidden).log_prob(data["action"])
    batch["advantage"] = advantages
    batch["value"] = values
    batch["ret"] = advantages + values
    return batch


def ppo_loss(agent: Agent, mb: dict[str, Tensor], args: Args) -> Tensor:
    hidden = agent.remember_all(mb["observation"], mb["hidden"], mb["is_init"])
    loss, _ = ppo.ppo_loss(agent, {**mb, "observation": hidden}, args)
    return loss


def main(args: Args) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    env = make_env(args, args.num_envs)
    statistics = T.RecordEpisodeStatistics.of(env)[0]
    agent = Agent(args, env)
    collect = tw.Collector(env, agent.act, args.num_steps)
    if args.compile:
        tw.compile(collect)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    env.reset(seed=args.seed)
    for iteration in range(num_iterations):
        remaining = 1 - iteration / num_iterations
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        data = collect()
        batch = make_batch(agent, data, args)
        train_epochs(agent, optimizer, batch, args, ppo_loss)  # whole envs keep time in order
        if iteration % 25 == 24:
            mean = statistics.return_queue.mean()
            print(f"{(iteration + 1) * batch_size:>8} env steps: mean return {mean:.0f}")
    test_env = make_env(args, 20)
    test_env.load_state_dict(env.state_dict())
    episodes = tw.evaluate(test_env, agent.act, 20, seed=args.seed + 1000)
    mean = episodes["episode_return"].mean().item()
    print(f"evaluation: mean return {mean:.0f} of 20 episodes")
    return mean


if __name__ == "__main__":
    main(tyro.cli(Args))
