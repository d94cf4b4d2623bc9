"""Your own env in a few lines, a thousand times over: functions of one world, written down, batched, trained with PPO.

python examples/custom_env.py        leaves runs/ppo-PointMass/learning_curve.png
"""

import ppo
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box

import torchwrap as tw
from torchwrap import random


class PointMass(FuncEnv):
    """A puck on ice, pushed to a target; the reward is minus the distance, and the episode ends when it is there."""

    observation_space = Box(-10, 10, (6,))
    action_space = Box(-1, 1, (2,))

    def initial(self, rng, params=None):  # a state is a dict of tensors; rng is a key that always gives the same numbers
        place, target = random.uniform(rng, (2, 2)) * 2 - 1
        return {"place": place, "speed": torch.zeros_like(place), "target": target}

    def transition(self, state, action, rng, params=None):
        speed = 0.95 * state["speed"] + 0.02 * action.clamp(-1, 1) + 0.002 * random.normal(rng, (2,))  # and some wind
        place = (state["place"] + speed).clamp(-2, 2)
        return {"place": place, "speed": speed, "target": state["target"]}

    def observation(self, state, rng, params=None):
        return torch.cat([state["place"], state["speed"] * 10, state["target"] - state["place"]])

    def reward(self, state, action, next_state, rng, params=None):
        return -torch.linalg.vector_norm(next_state["target"] - next_state["place"])

    def terminal(self, state, rng, params=None):
        return torch.linalg.vector_norm(state["target"] - state["place"]) < 0.1


def make(id, num_envs, *, device="cpu", **_):
    return tw.FunctionalEnv(PointMass(), num_envs, device=device, max_episode_steps=100)


if __name__ == "__main__":
    ppo.main(ppo.Args(env="PointMass", num_envs=64, num_steps=64, total_steps=150_000, minibatch_size=512), make)
