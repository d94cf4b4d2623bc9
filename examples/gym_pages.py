"""The example wrappers of Gym's and Gymnasium's documentation, as transforms of the same names.

python examples/gym_pages.py

Each transform overrides the hook of the same name (`action`, `observation`, `reward` or `step`),
for all envs at once. `setup` sets the spaces that the originals set in their constructors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import Tensor

import torchwrap as tw
from torchwrap import transforms as T


class DiscreteActions(T.ActionTransform):
    """Discretizes a Box action space: an ActionWrapper of "Implementing Custom Wrappers".

    Args:
        disc_to_cont: the action of the env for each discrete action.
    """

    def __init__(self, disc_to_cont: Sequence[Any]) -> None:
        super().__init__()
        self.disc_to_cont = disc_to_cont

    def setup(self, signature: tw.Signature) -> tw.Signature:
        space = signature.single_action_space
        if not isinstance(space, Box):
            raise TypeError(f"DiscreteActions: action space must be a Box, got {space}.")
        actions = [np.asarray(action, space.dtype) for action in self.disc_to_cont]
        if not actions or not all(space.contains(action) for action in actions):
            fault = f"disc_to_cont must have actions in {space}, got {self.disc_to_cont}"
            raise ValueError(f"DiscreteActions: {fault}.")
        table = torch.as_tensor(np.stack(actions), device=signature.device)
        # A buffer, so that it moves with the env. Not persistent, because it is not learned.
        self.register_buffer("table", table, persistent=False)
        return signature.replace(single_action_space=Discrete(len(actions)))

    def action(self, action: Tensor) -> Tensor:
        return self.table[action]


def describe(space: gymnasium.Space[Any]) -> tuple[Any, ...]:
    return space.shape, space.dtype


class RelativePosition(T.ObservationTransform):
    """The vector from agent to target: an ObservationWrapper of "Implementing Custom Wrappers"."""

    def setup(self, signature: tw.Signature) -> tw.Signature:
        space = signature.single_observation_space
        if not isinstance(space, Dict) or not {"agent", "target"} <= space.keys():
            fault = f'observation space must be a Dict with "agent" and "target", got {space}'
            raise TypeError(f"RelativePosition: {fault}.")
        agent = space["agent"]
        target = space["target"]
        are_boxes = isinstance(agent, Box) and isinstance(target, Box)
        # A difference of unsigned integers would wrap around.
        is_signed = are_boxes and agent.dtype.kind != "u"
        if not is_signed or describe(agent) != describe(target):
            fault = f'"agent" and "target" must be Boxes of one shape and signed dtype, got {space}'
            raise TypeError(f"RelativePosition: {fault}.")
        difference = Box(target.low - agent.high, target.high - agent.low, dtype=agent.dtype.type)
        return signature.replace(single_observation_space=difference)

    def observation(self, observation: TensorDict) -> Tensor:
        return observation["target"] - observation["agent"]


class ClipReward(T.RewardTransform):
    """Clips rewards, as `transforms.ClipReward`: a RewardWrapper of "Implementing Custom Wrappers".

    Args:
        min_reward: lower bound.
        max_reward: upper bound.
    """

    def __init__(self, min_reward: float, max_reward: float) -> None:
        super().__init__()
        if not min_reward <= max_reward:
            fault = f"min_reward must be at most max_reward, got {min_reward} and {max_reward}"
            raise ValueError(f"ClipReward: {fault}.")
        self.min_reward = min_reward
        self.max_reward = max_reward

    def reward(self, reward: Tensor) -> Tensor:
        return reward.clamp(self.min_reward, self.max_reward)


class ReacherRewardWrapper(T.Transform):
    """Weights the terms of Reacher's reward: a Wrapper of "Implementing Custom Wrappers".

    Args:
        reward_dist_weight: weight of the distance term, `("next", "info", "reward_dist")`.
        reward_ctrl_weight: weight of the control term, `("next", "info", "reward_ctrl")`.
    """

    def __init__(self, reward_dist_weight: float, reward_ctrl_weight: float) -> None:
        super().__init__()
        self.reward_dist_weight = reward_dist_weight
        self.reward_ctrl_weight = reward_ctrl_weight

    def step(self, td: TensorDict) -> TensorDict:
        info = td.get("info", {})
        # Checked here and not in setup, because a signature does not describe info.
        if not {"reward_dist", "reward_ctrl"} <= set(info.keys()):
            keys = ["reward_dist", "reward_ctrl"]
            fault = f"info_keys of the env must be {keys}, got {sorted(info.keys())}"
            raise ValueError(f"ReacherRewardWrapper: {fault}.")
        distance = self.reward_dist_weight * info["reward_dist"]
        control = self.reward_ctrl_weight * info["reward_ctrl"]
        return td.set("reward", (distance + control).float())


def auto_reset_step(env: tw.Env, action: Any) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
    """A step of Gym's old `AutoResetWrapper`: `(new_obs, terminal_reward, terminal_done, info)`.

    Every torchwrap env resets itself, so a function is enough. `info` always holds
    "terminal_observation" and "terminal_info"; in rows whose episode continues, the former equals
    `new_obs`.
    """
    transition, td = env.step(action)
    successor = transition["next"]
    info = {
        "terminal_observation": successor["observation"],
        "terminal_info": successor.get("info", {}),
    }
    return td["observation"], successor["reward"], successor["done"], info


class GridWorld(gymnasium.Env):
    """The grid world of the documentation: the agent moves until it reaches the target."""

    size = 5
    position = Box(0, size - 1, (2,), np.int64)
    observation_space = Dict(agent=position, target=position)
    action_space = Discrete(4)
    directions = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])  # right, up, left, down

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.agent, self.target = self.np_random.integers(0, self.size, (2, 2))
        return {"agent": self.agent, "target": self.target}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.agent = np.clip(self.agent + self.directions[action], 0, self.size - 1)
        found = bool((self.agent == self.target).all())
        return {"agent": self.agent, "target": self.target}, float(found), found, False, {}


def main() -> None:
    discrete_actions = DiscreteActions([[-2.0], [0.0], [2.0]])
    env = tw.TransformedEnv(tw.make("Pendulum-v1", num_envs=3), discrete_actions)
    actions = torch.tensor([0, 1, 2])
    env.step(env.reset(seed=0).set("action", actions))
    torques = discrete_actions.action(actions).flatten().tolist()
    print(f"{env}\n  actions: {env.single_action_space}, which reach the env as {torques}")

    # An env without a registered id goes through from_gymnasium. With an id, tw.make does the same.
    vector_env = SyncVectorEnv([GridWorld] * 3, autoreset_mode=AutoresetMode.DISABLED)
    grids = tw.from_gymnasium(vector_env)
    observation = grids.reset(seed=0)["observation"]
    agent = observation["agent"].tolist()
    target = observation["target"].tolist()
    env = tw.TransformedEnv(grids, RelativePosition())
    print(f"{env}\n  {target} from {agent}: {env.reset(seed=0)['observation'].tolist()}")

    env = tw.TransformedEnv(tw.make("Pendulum-v1", num_envs=3), ClipReward(-5, -1))
    env.reset(seed=0)
    data = tw.rollout(env, None, num_steps=100)
    rewards = data["next", "reward"]
    print(f"{env}\n  rewards: from {rewards.min():g} to {rewards.max():g}")

    reacher = tw.make("Reacher-v5", num_envs=3, info_keys=["reward_dist", "reward_ctrl"])
    weights = ReacherRewardWrapper(reward_dist_weight=1.0, reward_ctrl_weight=0.1)
    env = tw.TransformedEnv(reacher, weights)
    env.reset(seed=0)
    data = tw.rollout(env, None, num_steps=50)
    successor = data["next"]
    means = successor["info"].mean()
    distance = means["reward_dist"]
    control = means["reward_ctrl"]
    print(f"{env}\n  reward: {successor['reward'].mean():.3f} of {distance:.3f} and {control:.3f}")

    env = tw.make("InvertedPendulum-v5", num_envs=3, info_keys=["reward_survive"])
    env.reset(seed=0)
    for _ in range(100):
        new_obs, terminal_reward, done, info = auto_reset_step(env, env.sample_action())
        if done.any():
            break
    print(f"{env}, as an episode ends:\n  done: {done.flatten().tolist()}")
    row = done.flatten().nonzero()[0, 0]
    print(f"  new observation: {new_obs[row].tolist()}")
    print(f"  terminal reward: {terminal_reward[row].item()}")
    print(f"  terminal observation: {info['terminal_observation'][row].tolist()}")
    print(f"  terminal info: {info['terminal_info'][row].to_dict()}")


if __name__ == "__main__":
    main()
