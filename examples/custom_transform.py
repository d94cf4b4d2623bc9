"""Custom transforms of three kinds: defined, checked, stacked on CartPole-v1 and compiled."""

import functools

import torch
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import check_transform


class Progress(T.Transform):
    """Needs the previous observation: gamma * potential(s') - potential(s), Ng et al. (1999)."""

    potential = tw.EnvBuffer((1,))  # previous one; a whole observation is stored in the same way

    def compute_potential(self, observation):
        return -observation[:, :1].abs()  # distance of the cart from the center

    def step(self, td):
        potential = self.compute_potential(td["observation"])
        reward = td["reward"] + 0.99 * potential - self.potential
        self.potential.copy_(potential)
        return td.set("reward", reward)

    def reset(self, td, mask):  # the initial observation is the previous one of the first step
        mask.assign_(self.potential, self.compute_potential(td["observation"]))
        return td


class SwitchCost(T.ActionRewardTransform):
    """Needs the action, the last one (0 at first), and a number that changes during training."""

    def __init__(self):
        super().__init__()
        # Constructor arguments are constants. A buffer is read at each step.
        self.register_buffer("cost", torch.tensor(0.1))

    def reward(self, reward, action, last_action):
        return reward - self.cost * (action != last_action).unsqueeze(-1)


class Novelty(T.Transform):
    """Holds a module that trains outside: random network distillation, Burda et al. (2018)."""

    def __init__(self, seed=0):
        super().__init__()
        self.seed = seed
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.target = nn.Linear(4, 16).requires_grad_(False)
            self.predictor = nn.Linear(4, 16)

    def error(self, observation):
        difference = self.predictor(observation) - self.target(observation)
        return difference.square().mean(-1, keepdim=True)

    def step(self, td):  # no gradient is recorded in a step; parameters are in the state_dict
        return td.set("reward", td["reward"] + self.error(td["observation"]))


def train(novelty, observation, steps=50):
    optimizer = torch.optim.Adam(novelty.predictor.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = novelty.error(observation).mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    make = functools.partial(tw.make, "CartPole-v1")
    for transform in (Progress, SwitchCost, Novelty):
        check_transform(transform, make)  # an error names the broken promise: masks, aliasing, ...

    # A compiled step follows modules that train outside.
    novelty = Novelty()
    switch_cost = SwitchCost()
    env = tw.TransformedEnv(make(num_envs=64), novelty, switch_cost)
    tw.compile(env)
    env.reset(seed=0)
    data = tw.rollout(env, None, num_steps=60)
    before = data["next", "reward"].mean()
    error = train(novelty, data["observation"])
    switch_cost.cost.fill_(0.05)  # a schedule
    data = tw.rollout(env, None, num_steps=60)
    after = data["next", "reward"].mean()
    print(f"{env}: mean reward {before:.2f}")
    print(f"after training, with a novelty of {error:.2f}: {after:.2f}")


if __name__ == "__main__":
    main()
