"""A custom env: pure functions of a single env, batched by FunctionalEnv and trained with PPO.

python examples/custom_env.py        writes runs/ppo-PointMass/learning_curve.png
"""

import ppo
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box

import torchwrap as tw
from torchwrap import random


class PointMass(FuncEnv):
    """A puck on ice is pushed to a target. The reward is minus the distance to the target."""

    observation_space = Box(-10, 10, (6,))
    action_space = Box(-1, 1, (2,))

    # The state is a dict of tensors. rng is a key, so equal calls draw equal numbers.
    def initial(self, rng):
        position, target = random.uniform(rng, -1, 1, (2, 2))
        return {"position": position, "velocity": torch.zeros_like(position), "target": target}

    def transition(self, state, action, rng):
        wind = random.normal(rng, 0, 0.002, (2,))
        velocity = 0.95 * state["velocity"] + 0.02 * action.clamp(-1, 1) + wind
        position = (state["position"] + velocity).clamp(-2, 2)
        return {"position": position, "velocity": velocity, "target": state["target"]}

    def observation(self, state, rng):
        distance = state["target"] - state["position"]
        return torch.cat([state["position"], state["velocity"] * 10, distance])

    def reward(self, state, action, next_state, rng):
        return -torch.linalg.vector_norm(next_state["target"] - next_state["position"])

    def terminal(self, state, rng):
        return torch.linalg.vector_norm(state["target"] - state["position"]) < 0.1


def make(id, num_envs, *, device="cpu", **_):
    return tw.FunctionalEnv(PointMass(), num_envs, device=device, max_episode_steps=100)


if __name__ == "__main__":
    sizes = dict(num_envs=64, num_steps=64, total_timesteps=150_000, num_minibatches=8)
    ppo.main(ppo.Args(env_id="PointMass", **sizes), make)
