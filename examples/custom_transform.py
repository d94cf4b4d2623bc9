"""Your own transforms, one of each kind: written, checked, stacked on CartPole-v1 and run."""

import torch
from gymnasium.spaces import Box, Discrete

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import check_transform


class HideSpeeds(T.ObservationTransform):
    def setup(self, signature):  # (x, x_dot, theta, theta_dot) becomes (x, theta): the space changes with the value
        space = signature.single_observation_space
        return signature.replace(single_observation_space=Box(space.low[::2], space.high[::2]))

    def observation(self, observation):  # of all envs at once: (num_envs, 4)
        return observation[..., ::2]


class ContinuousAction(T.ActionTransform):
    def setup(self, signature):
        if signature.single_action_space != Discrete(2):
            raise ValueError(f"ContinuousAction needs the actions Discrete(2), but got {signature.single_action_space}.")
        return signature.replace(single_action_space=Box(-1, 1, (1,)))

    def action(self, action):  # on its way down: (num_envs, 1) becomes (num_envs,), 0 or 1
        return (action[..., 0] > 0).long()


class LogReward(T.RewardTransform):
    def reward(self, reward):  # (num_envs, 1)
        return reward.log1p()


class StreakReward(T.Transform):  # one that remembers: for how many steps the pole has been upright without a break
    def setup(self, signature):
        self.register_rows("streak", torch.zeros(signature.num_envs, 1, device=signature.device))
        return signature

    def step(self, td):  # after every step, an episode's last too; memory is written in place, results are new
        self.streak.add_(1).mul_(td["observation"][:, 2:3].abs() < 0.1)
        return td.set("reward", td["reward"] + self.streak)

    def reset(self, td, mask):  # where episodes begin, and in no other row
        self.streak.masked_fill_(mask.unsqueeze(-1), 0)
        return td


def main():
    kinds = [StreakReward, LogReward, HideSpeeds, ContinuousAction]  # innermost first: the streak needs theta at place 2
    for kind in kinds:  # each alone; an error says what part of the contract is broken: masks, aliasing, torch.compile, ...
        check_transform(kind, lambda **place: tw.make("CartPole-v1", **place))
    env = tw.TransformedEnv(tw.make("CartPole-v1", num_envs=64), *(kind() for kind in kinds))
    data, _ = tw.rollout(env, lambda td: td["observation"][:, 1:].sign(), num_steps=60, td=env.reset(seed=0))
    print(f"{env}\n1 and the streak, in one env: {data['next', 'reward'][0, :, 0].expm1().round().int().tolist()}")


if __name__ == "__main__":
    main()
