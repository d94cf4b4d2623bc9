"""Custom transforms, one of each kind: defined, checked, stacked on CartPole-v1 and run."""

import functools

from gymnasium.spaces import Box, Discrete

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import check_transform


class HideSpeeds(T.ObservationTransform):
    def setup(self, signature):  # the space changes together with the value: (x, x_dot, theta, theta_dot) to (x, theta)
        space = signature.single_observation_space
        return signature.replace(single_observation_space=Box(space.low[::2], space.high[::2]))

    def observation(self, observation):  # a batch, (num_envs, 4)
        return observation[..., ::2]


class ContinuousAction(T.ActionTransform):
    def setup(self, signature):
        if signature.single_action_space != Discrete(2):
            raise ValueError(f"ContinuousAction needs the actions Discrete(2), but got {signature.single_action_space}.")
        return signature.replace(single_action_space=Box(-1, 1, (1,)))

    def action(self, action):  # the agent's action (num_envs, 1) to the env's (num_envs,): 0 or 1
        return (action[..., 0] > 0).long()


class LogReward(T.RewardTransform):
    def reward(self, reward):  # (num_envs, 1)
        return reward.log1p()


class StreakReward(T.Transform):  # stateful: adds the number of consecutive steps with an upright pole to the reward
    streak = tw.EnvBuffer((1,))  # one row per env; snapshots hold it, state_dict does not

    def step(self, td):  # the successor, final observations included: write buffers in place, return new tensors
        self.streak.add_(1).mul_(td["observation"][:, 2:3].abs() < 0.1)
        return td.set("reward", td["reward"] + self.streak)

    def reset(self, td, mask):  # initial observations: only rows of the mask start an episode
        mask.fill_(self.streak, 0)
        return td


def main():
    stack = [StreakReward, LogReward, HideSpeeds, ContinuousAction]  # innermost first: StreakReward reads theta at index 2
    for transform in stack:  # an error names the broken promise: masks, aliasing, torch.compile, ...
        check_transform(transform, functools.partial(tw.make, "CartPole-v1"))
    env = tw.TransformedEnv(tw.make("CartPole-v1", num_envs=64), *(transform() for transform in stack))
    data, _ = tw.rollout(env, lambda td: td["observation"][:, 1:].sign(), num_steps=60, td=env.reset(seed=0))
    print(f"{env}\n1 + streak, in one env: {data['next', 'reward'][0, :, 0].expm1().round().int().tolist()}")


if __name__ == "__main__":
    main()
