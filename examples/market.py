"""An env of your own with a Dict observation and MultiDiscrete actions: a market stall.

python examples/market.py                       checks the env, trains with PPO, and evaluates
python examples/ppo.py --env-id market:Market-v0 --metrics sold sum missed sum

Each morning the stall orders up to 9 units of three goods and sets one of three prices. The units
arrive before the customers do. The demand for each good differs by episode, so the agent has to
find out.
"""

from __future__ import annotations

import functools
from pathlib import Path

import ppo
import ppo_output
import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

import torchwrap as tw
from torchwrap import random
from torchwrap.testing import check_env


class Market(FuncEnv):
    """The reward is the profit of a day, in tens. The episode ends if the money is spent.

    Its time limit is eight weeks.
    """

    goods = 3
    shelf = 20  # units of a good that fit
    visitors = 20  # customers on a day of the weekend
    cost = 1.0  # of a unit
    storage = 0.5  # of a unit, per night
    action_space = MultiDiscrete([10] * goods + [3])  # units of each good, and the price
    observation_space = Dict(
        stock=Box(0, 1, (goods,)),
        demand=Box(0, 1, (goods,)),
        money=Box(-torch.inf, torch.inf, (1,)),
        weekday=Discrete(7),
    )

    def initial(self, rng):
        zeros = torch.zeros(self.goods, dtype=torch.int64, device=rng.env.device)
        appeal = random.uniform(rng, 0.2, 0.9, (self.goods,))  # hidden
        state = {"stock": zeros, "sold": zeros, "missed": zeros, "appeal": appeal}
        return {**state, "money": torch.full_like(appeal[0], 30), "day": zeros[0]}

    def transition(self, state, action, rng):
        stock = (state["stock"] + action[:-1]).clamp(max=self.shelf)
        ordered = stock - state["stock"]  # units that do not fit are not bought
        price = action[-1]
        # Half of the customers come on weekends only, and a higher price keeps customers away.
        visitors = torch.where(state["day"] % 7 >= 5, self.visitors, self.visitors // 2)
        comes = torch.arange(self.visitors, device=visitors.device) < visitors
        draws = random.uniform(rng, shape=(self.goods, self.visitors))
        wants = draws < state["appeal"].unsqueeze(-1) * (1 - 0.3 * price)
        demand = (wants & comes).sum(-1)
        sold = torch.minimum(demand, stock)
        left = stock - sold
        revenue = (1.5 + 0.5 * price) * sold.sum()
        expenses = self.cost * ordered.sum() + self.storage * left.sum()
        return {
            "stock": left,
            "sold": sold,
            "missed": demand - sold,
            "appeal": state["appeal"],
            "money": state["money"] + revenue - expenses,
            "day": state["day"] + 1,
        }

    def observation(self, state, rng):
        return {
            "stock": state["stock"] / self.shelf,
            "demand": (state["sold"] + state["missed"]) / self.visitors,
            "money": state["money"].unsqueeze(-1) / 100,
            "weekday": state["day"] % 7,
        }

    def reward(self, state, action, next_state, rng):
        return (next_state["money"] - state["money"]) / 10

    def terminal(self, state, rng):
        return state["money"] < 0

    def state_info(self, state):
        return {"sold": state["sold"].sum(), "missed": state["missed"].sum()}


tw.register("Market-v0", Market, max_episode_steps=56)


PPO = dict(num_envs=64, num_steps=64, learning_rate=3e-3, num_minibatches=4, update_epochs=4)
ARGS = ppo.Args(
    env_id="Market-v0",
    out=Path("runs/market"),
    metrics={"sold": "sum", "missed": "sum"},
    total_timesteps=150_000,
    normalize=True,
    **PPO,
)


def main(args: ppo.Args, num_episodes: int = 256) -> dict[str, dict[str, float]]:
    check_env(functools.partial(tw.make, "Market-v0", max_episode_steps=20))
    ppo.main(args)
    env, agent = ppo_output.load(args, num_envs=64)
    results = {}
    for name, policy in {"random": None, "trained": agent.act}.items():
        episodes = tw.evaluate(env, policy, num_episodes, seed=args.seed + 1_000)
        episodes = episodes.exclude("env_index")
        results[name] = {key: value.float().mean().item() for key, value in episodes.items()}
        means = [f"{key[8:]} {value:.1f}" for key, value in results[name].items()]
        print(name, *means)  # without "episode_"
    return results


if __name__ == "__main__":
    main(tyro.cli(ppo.Args, default=ARGS))
