"""PPO with an LSTM on an Atari game, after CleanRL's ppo_atari_lstm.py: no stack of frames.

python examples/atari_lstm.py                           Pong, ten million steps as in CleanRL
python examples/atari_lstm.py --env-id ALE/Breakout-v5 --device cuda

ALE's vector env plays all games in C++ and shrinks their frames to 84 x 84 in gray. `PolicyState`
carries the hidden and the cell state of the LSTM from step to step, and sets both to zero where an
episode starts. An episode is a life, and in the evaluation a game. Each minibatch holds whole
rollouts of some envs, because the LSTM runs through their steps in order. A truncated game is
bootstrapped from its final frame; CleanRL treats it as terminated.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch
import tyro
from ppo import Flags, estimate_advantages, layer_init
from ppo_parts import cnn, train_epochs
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args(Flags):
    """Flags and defaults are CleanRL's, except for the game."""

    env_id: str = "ALE/Pong-v5"
    """the id of the game"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    device: str = "cpu"
    """device of the agent, to which frames are copied as uint8"""
    total_timesteps: int = 10_000_000
    """total number of env steps, of four frames each"""
    learning_rate: float = 2.5e-4
    """learning rate of the optimizer, annealed linearly to zero"""
    num_envs: int = 8
    """number of parallel games"""
    num_steps: int = 128
    """steps of each game per rollout: how far gradients reach back in time"""
    hidden_size: int = 128
    """size of the LSTM"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch, each of whole environments"""
    update_epochs: int = 4
    """epochs per iteration"""
    clip_coef: float = 0.1
    """clipping coefficient of the surrogate objective and of the value loss"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""
    eval_games: int = 8
    """number of games that the trained policy plays at the end"""


class GameReturn(T.Transform):
    """Adds the sum of the rewards of a game, whose lives are episodes, to the info."""

    total = tw.EnvBuffer((1,))

    def step(self, td: TensorDict) -> TensorDict:
        td["info", "game_return"] = self.total.add_(td["reward"]).clone()
        self.total.masked_fill_(td["info", "game_over"].bool(), 0)
        return td

    def reset(self, td: TensorDict, mask: tw.RowMask) -> TensorDict:
        if mask.is_full:  # which starts games; a masked reset goes on with the lives that are left
            self.total.zero_()
        return td


def make_env(args: Args, num_envs: int, life_loss_info: bool = True) -> tw.Env:
    """Games whose episodes end with a life; or with the game, if not `life_loss_info`."""
    env = tw.make(
        args.env_id,
        num_envs,
        backend="ale",
        device=args.device,
        stack_num=1,
        life_loss_info=life_loss_info,
        reward_clipping=False,  # ClipReward clips for the agent
        info_keys=["game_over"],
    )
    shape = (args.hidden_size,)
    state = tw.PolicyState({"hidden": shape, "cell": shape})
    recorders = GameReturn(), T.RecordEpisodeStatistics()
    return tw.TransformedEnv(env, *recorders, T.ClipReward(-1, 1), state)


class Agent(nn.Module):
    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        self.network, features = cnn((1, 84, 84), "nature")
        self.lstm = nn.LSTMCell(features, args.hidden_size)
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter)
        num_actions = int(env.single_action_space.n)
        self.actor = layer_init(nn.Linear(args.hidden_size, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(args.hidden_size, 1), std=1.0)

    def get_distribution_and_value(self, hidden: Tensor) -> tuple[Categorical, Tensor]:
        distribution = Categorical(logits=self.actor(hidden), validate_args=False)
        return distribution, self.critic(hidden).squeeze(-1)

    def remember(self, td: TensorDict) -> tuple[Tensor, Tensor]:
        """The hidden and the cell state after the frames `(n, 1, 84, 84)` of `td`."""
        features = self.network(td["observation"] / 255)
        return self.lstm(features, (td["hidden"], td["cell"]))

    def remember_all(
        self, observation: Tensor, is_init: Tensor, hidden: Tensor, cell: Tensor
    ) -> Tensor:
        """The hidden states `(num_envs, num_steps, hidden_size)` of a rollout.

        `hidden` and `cell` are the state before its first step.
        """
        features = self.network(observation.flatten(0, 1) / 255)
        features = features.unflatten(0, observation.shape[:2])
        states = []
        for feature, first in zip(features.unbind(1), is_init.unbind(1)):
            hidden = hidden.masked_fill(first, 0)
            cell = cell.masked_fill(first, 0)
            hidden, cell = self.lstm(feature, (hidden, cell))
            states.append(hidden)
        return torch.stack(states, 1)

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        hidden, cell = self.remember(td)
        td["next", "hidden"] = hidden
        td["next", "cell"] = cell
        distribution, td["value"] = self.get_distribution_and_value(hidden)
        td["action"] = distribution.sample()
        td["logprob"] = distribution.log_prob(td["action"])
        return td

    @torch.no_grad()
    def get_value(self, td: TensorDict) -> Tensor:
        hidden, _ = self.remember(td)
        return self.critic(hidden).squeeze(-1)


def make_batch(agent: Agent, data: TensorDict, td: TensorDict, args: Args) -> dict[str, Tensor]:
    """Tensors with one row per env, so that a minibatch is a choice of rows."""
    successor = data["next"]
    truncated = (successor["done"] & ~successor["terminated"]).squeeze(-1)
    last_value = agent.get_value(td).unsqueeze(1)
    next_value = torch.cat([data["value"][:, 1:], last_value], 1)
    if truncated.any():  # take the final frame's value, not that of the next game
        next_value[truncated] = agent.get_value(successor[truncated])
    advantage = estimate_advantages(data, data["value"], next_value, args)
    batch = {name: data[name] for name in ("observation", "is_init", "action", "logprob", "value")}
    batch["hidden"] = data["hidden"][:, 0]
    batch["cell"] = data["cell"][:, 0]
    batch["advantage"] = advantage
    batch["ret"] = advantage + data["value"]
    return batch


def ppo_loss(agent: Agent, mb: dict[str, Tensor], args: Args) -> Tensor:
    hidden = agent.remember_all(mb["observation"], mb["is_init"], mb["hidden"], mb["cell"])
    distribution, value = agent.get_distribution_and_value(hidden)
    ratio = (distribution.log_prob(mb["action"]) - mb["logprob"]).exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    advantage = mb["advantage"] - mb["advantage"].mean()
    advantage = advantage / (mb["advantage"].std() + 1e-8)
    pg_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()
    change = (value - mb["value"]).clamp(-args.clip_coef, args.clip_coef)
    error = (value - mb["ret"]).square()
    clipped_error = (mb["value"] + change - mb["ret"]).square()
    v_loss = 0.5 * torch.max(error, clipped_error).mean()
    return pg_loss - args.ent_coef * distribution.entropy().mean() + args.vf_coef * v_loss


def main(args: Args) -> dict[str, list[float]]:
    """Returns the mean loss of each iteration, and the returns in training and in evaluation."""
    torch.manual_seed(args.seed)
    env = make_env(args, args.num_envs)
    agent = Agent(env, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    collect = tw.Collector(env, agent.act, args.num_steps)
    env.reset(seed=args.seed)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    losses = []
    returns = []
    progress = tqdm(total=num_iterations * batch_size, unit=" steps", unit_scale=True)
    for iteration in range(num_iterations):
        remaining = 1 - iteration / num_iterations
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        data = collect()
        batch = make_batch(agent, data, env.root, args)
        loss = train_epochs(agent, optimizer, batch, args, ppo_loss)
        losses.append(loss.item())
        info = data["next", "info"]
        returns += info["game_return"][info["game_over"].bool()].tolist()
        progress.update(batch_size)
        shown = {"loss": f"{losses[-1]:.3f}"}
        if returns:
            shown["return"] = f"{fmean(returns[-20:]):.1f}"
        progress.set_postfix(shown, refresh=False)
    progress.close()
    env.close()

    test_env = make_env(args, args.eval_games, life_loss_info=False)
    seed = args.seed + 1_000_000
    episodes = tw.evaluate(test_env, agent.act, args.eval_games, seed=seed)
    test_env.close()
    games = episodes["episode_return"].tolist()
    print(f"evaluation: mean return {fmean(games):.1f} of {len(games)} games")
    return {"losses": losses, "returns": returns, "evaluation": games}


if __name__ == "__main__":
    main(tyro.cli(Args))
