"""The wrappers that the pages of Gym and Gymnasium teach with, written for torchwrap: the same names, all envs at once.

python examples/gym_pages.py

What a page's class does to one env in `action`, `observation`, `reward` or `step`, the one here does to all envs at once, in
the hook of the same name. The spaces that a page's constructor sets are set in `setup`.
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
from torchwrap.interop.gymnasium import from_gymnasium


class DiscreteActions(T.ActionTransform):
    """`DiscreteActions`, an ActionWrapper of the page "Implementing Custom Wrappers": some actions of a Box, by number.

    Args:
        disc_to_cont: those actions.
    """

    def __init__(self, disc_to_cont: Sequence[Any]) -> None:
        super().__init__()
        self.disc_to_cont = disc_to_cont

    def setup(self, signature: tw.Signature) -> tw.Signature:
        space = signature.single_action_space
        if not isinstance(space, Box):
            raise TypeError(f"DiscreteActions needs a Box action space, but got {space}.")
        actions = [np.asarray(action, space.dtype) for action in self.disc_to_cont]
        if not actions or not all(space.contains(action) for action in actions):
            raise ValueError(f"DiscreteActions needs disc_to_cont with actions in {space}, but got {self.disc_to_cont}.")
        # A buffer moves with the env; persistent=False, for it is nothing learned.
        self.register_buffer("table", torch.as_tensor(np.stack(actions), device=signature.device), persistent=False)
        return signature.replace(single_action_space=Discrete(len(actions)))

    def action(self, action: Tensor) -> Tensor:
        return self.table[action]


class RelativePosition(T.ObservationTransform):
    """`RelativePosition`, an ObservationWrapper of the page "Implementing Custom Wrappers": from the agent to the target."""

    def setup(self, signature: tw.Signature) -> tw.Signature:
        space = signature.single_observation_space
        if not isinstance(space, Dict) or not {"agent", "target"} <= space.keys():
            raise TypeError(f'RelativePosition needs a Dict observation space with "agent" and "target", but got {space}.')
        agent, target = space["agent"], space["target"]
        boxes = isinstance(agent, Box) and isinstance(target, Box)
        # A difference of unsigned integers wraps around.
        if not boxes or agent.shape != target.shape or agent.dtype != target.dtype or agent.dtype.kind == "u":
            raise TypeError(
                f'RelativePosition needs "agent" and "target" as Boxes of one shape and signed dtype, but got {space}.'
            )
        low, high = target.low - agent.high, target.high - agent.low
        return signature.replace(single_observation_space=Box(low, high, agent.shape, agent.dtype))

    def observation(self, observation: TensorDict) -> Tensor:
        return observation["target"] - observation["agent"]


class ClipReward(T.RewardTransform):
    """`ClipReward`, a RewardWrapper of the page "Implementing Custom Wrappers"; ready-made as `transforms.ClipReward`.

    Args:
        min_reward: lower bound.
        max_reward: upper bound.
    """

    def __init__(self, min_reward: float, max_reward: float) -> None:
        super().__init__()
        if not min_reward <= max_reward:
            raise ValueError(f"ClipReward needs min_reward <= max_reward, but got {min_reward} and {max_reward}.")
        self.min_reward = min_reward
        self.max_reward = max_reward

    def reward(self, reward: Tensor) -> Tensor:
        return reward.clamp(self.min_reward, self.max_reward)


class ReacherRewardWrapper(T.Transform):
    """`ReacherRewardWrapper`, a Wrapper of the page "Implementing Custom Wrappers": the reward anew, from its terms in info.

    Args:
        reward_dist_weight: of the distance's term, `("next", "info", "reward_dist")`.
        reward_ctrl_weight: of the control's term, `("next", "info", "reward_ctrl")`.
    """

    def __init__(self, reward_dist_weight: float, reward_ctrl_weight: float) -> None:
        super().__init__()
        self.reward_dist_weight = reward_dist_weight
        self.reward_ctrl_weight = reward_ctrl_weight

    def step(self, td: TensorDict) -> TensorDict:
        info = td.get("info", {})
        if not {"reward_dist", "reward_ctrl"} <= set(info.keys()):  # not in setup, for a signature tells of spaces alone
            got = f"but got {sorted(info.keys())}"
            raise ValueError(f'ReacherRewardWrapper needs info_keys=["reward_dist", "reward_ctrl"] of its env, {got}.')
        reward = self.reward_dist_weight * info["reward_dist"] + self.reward_ctrl_weight * info["reward_ctrl"]
        return td.set("reward", reward.float())


def auto_reset_step(env: tw.Env, action: Any) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
    """`AutoResetWrapper` of the old Gym pages: `(new_obs, terminal_reward, terminal_done, info)`, all from one `env.step`.

    Every torchwrap env resets itself, so there is nothing to wrap. Here `info` has "terminal_observation" and
    "terminal_info" at every step; in rows that go on, the former is `new_obs`.
    """
    transition, td = env.step(TensorDict({"action": action}, batch_size=[env.num_envs]))
    ended = transition["next"]
    info = {"terminal_observation": ended["observation"], "terminal_info": ended.get("info", {})}
    return td["observation"], ended["reward"], ended["done"], info


class GridWorld(gymnasium.Env):
    """The pages' 2D navigation, for one agent: it walks right, up, left or down, until it is at the target."""

    size = 5
    place = Box(0, size - 1, (2,), np.int64)
    observation_space = Dict(agent=place, target=place)
    action_space = Discrete(4)
    directions = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.agent, self.target = self.np_random.integers(0, self.size, (2, 2))
        return {"agent": self.agent, "target": self.target}, {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.agent = np.clip(self.agent + self.directions[action], 0, self.size - 1)
        found = bool((self.agent == self.target).all())
        return {"agent": self.agent, "target": self.target}, float(found), found, False, {}


def main() -> None:
    env = tw.TransformedEnv(tw.make("Pendulum-v1", num_envs=3), DiscreteActions([[-2.0], [0.0], [2.0]]))
    numbers = torch.tensor([0, 1, 2])
    env.step(env.reset(seed=0).set("action", numbers))
    torques = env.transform.action(numbers).flatten().tolist()
    print(f"{env}\n  actions: {env.single_action_space}, which reach the env as {torques}")

    # Your own gymnasium.Env needs no id; with one, tw.make does this.
    grids = from_gymnasium(SyncVectorEnv([GridWorld] * 3, autoreset_mode=AutoresetMode.DISABLED))
    agent, target = (grids.reset(seed=0)["observation", name].tolist() for name in ("agent", "target"))
    env = tw.TransformedEnv(grids, RelativePosition())
    print(f"{env}\n  {target} from {agent}: {env.reset(seed=0)['observation'].tolist()}")

    env = tw.TransformedEnv(tw.make("Pendulum-v1", num_envs=3), ClipReward(-5, -1))
    data, _ = tw.rollout(env, None, num_steps=100, td=env.reset(seed=0))
    print(f"{env}\n  rewards: from {data['next', 'reward'].min():g} to {data['next', 'reward'].max():g}")

    reacher = tw.make("Reacher-v5", num_envs=3, info_keys=["reward_dist", "reward_ctrl"])
    env = tw.TransformedEnv(reacher, ReacherRewardWrapper(reward_dist_weight=1.0, reward_ctrl_weight=0.1))
    data, _ = tw.rollout(env, None, num_steps=50, td=env.reset(seed=0))
    after = data["next"]
    terms = {name: round(after["info", name].mean().item(), 3) for name in ("reward_dist", "reward_ctrl")}
    print(f"{env}\n  reward: {after['reward'].mean():.3f} of {terms}")

    env = tw.make("InvertedPendulum-v5", num_envs=3, info_keys=["reward_survive"])
    env.reset(seed=0)
    for _ in range(100):
        new_obs, terminal_reward, done, info = auto_reset_step(env, env.sample_action())
        if done.any():
            break
    print(f"{env}, as an episode ends:\n  done: {done.flatten().tolist()}")
    row = done.flatten().nonzero()[0, 0]
    print(f"  new observation: {new_obs[row].tolist()}\n  terminal reward: {terminal_reward[row].item()}")
    print(f"  terminal observation: {info['terminal_observation'][row].tolist()}")
    print(f"  terminal info: {info['terminal_info'][row].to_dict()}")


if __name__ == "__main__":
    main()
