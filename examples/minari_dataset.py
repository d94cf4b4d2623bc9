"""Collected episodes as a Minari dataset, and a dataset as transitions, in a file to copy.

python examples/minari_dataset.py     writes episodes of CartPole-v1, and reads them back

Datasets are below MINARI_DATASETS_PATH, or ~/.minari/datasets. Needs the extra `minari`.
"""

from __future__ import annotations

import copy

import gymnasium
import minari
import torch
from gymnasium.spaces import Tuple
from minari import EpisodeData
from minari.data_collector import EpisodeBuffer
from ppo_parts import put_below
from replay import ReplayBuffer, episodes
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

# Arguments of tw.make that gymnasium.make does not take
BATCHED = "num_envs backend device first_index vectorization_mode info_keys params worker_timeout"


class OwnSteps(T.Transform):
    """Adds the action that the env gets, and its reward, to the info of each step."""

    def setup(self, signature: tw.Signature) -> tw.Signature:
        action = tw.spaces.zeros(signature.single_action_space, signature.num_envs)
        self.register_env_buffer("own_action", action.to(signature.device))
        return signature

    def action(self, action: torch.Tensor) -> torch.Tensor:
        self.own_action.copy_(action)
        return action

    def step(self, td: TensorDict) -> TensorDict:
        td["info", "own_action"] = self.own_action.clone()
        td["info", "own_reward"] = td["reward"].clone()
        return td


def with_own_steps(env: tw.Env) -> tw.Env:
    """The env for a collection that `write` stores, if its layers change actions or rewards."""
    return put_below(env, OwnSteps())


def changes_steps(env: tw.Env) -> bool:
    """Whether a layer may change actions or rewards."""
    while isinstance(env, tw.TransformedEnv):
        for layer in env.transforms.flat():
            kind = type(layer)
            is_foreign = not kind.__module__.startswith("torchwrap.")
            changes_reward = isinstance(layer, T.RewardTransform)
            changes_reward |= is_foreign and kind.step is not T.Transform.step
            if changes_reward or kind.action is not T.Transform.action:
                return True
        env = env.env
    return isinstance(env, tw.Wrapper)


def env_spec(env: tw.Env) -> gymnasium.envs.registration.EnvSpec | None:
    """The spec by which Gymnasium makes the env, if it can."""
    spec = env.spec
    if spec is None or spec.id not in gymnasium.registry:
        return None
    single = copy.deepcopy(gymnasium.spec(spec.id))
    if not isinstance(single.entry_point, str):
        return None
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in BATCHED.split()}
    single.kwargs |= kwargs
    single.max_episode_steps = spec.max_episode_steps
    return single


def to_minari(episode: TensorDict) -> EpisodeBuffer:
    """Minari's episode, with n + 1 observations, of transitions `(n,)`."""
    successor = episode["next"]
    observations = torch.cat([episode["observation"], successor["observation"][-1:]])
    return EpisodeBuffer(
        observations=observations.numpy(),  # a dict, if they are a TensorDict
        actions=successor.get(("info", "own_action"), episode["action"]).numpy(),
        rewards=successor.get(("info", "own_reward"), successor["reward"]).flatten().numpy(),
        terminations=successor["terminated"].flatten().numpy(),
        truncations=successor["truncated"].flatten().numpy(),
    )


def from_minari(episode: EpisodeData) -> TensorDict:
    """Transitions `(n,)` of Minari's episode."""
    num_steps = len(episode)
    rows = TensorDict({"observation": episode.observations}, [num_steps + 1])
    steps = TensorDict({"action": episode.actions}, [num_steps])
    reward, terminated, truncated = (
        torch.as_tensor(column).unsqueeze(-1)
        for column in (episode.rewards, episode.terminations, episode.truncations)
    )
    steps["observation"] = rows["observation"][:-1]
    steps["next", "observation"] = rows["observation"][1:]
    steps["next", "reward"] = reward.float()
    steps["next", "terminated"] = terminated
    steps["next", "truncated"] = truncated
    steps["next", "done"] = terminated | truncated
    steps["next", "done"][-1] = True  # also of an episode that Minari's collector was closed in
    return steps


def write(
    dataset_id: str, data: TensorDict, env: tw.Env, transformed: bool = False
) -> minari.MinariDataset:
    """Writes the whole episodes of a collection, which ends some and leaves others open.

    The first step of an env counts as that of an episode, unless `is_init` is there and not set: of
    a collection that goes on in mid-episode, leave out the first episodes. Observations are those
    of the collection. Actions and rewards are the env's own, unless `transformed` is set.
    """
    action_space = env.single_action_space
    if transformed:
        data = data.exclude(("next", "info"))
    elif ("next", "info", "own_reward") in data.keys(True):
        action_space = env.unwrapped.single_action_space
    elif changes_steps(env):
        must = "env must be collected from as `with_own_steps(env)`"
        raise ValueError(f"write: {must}, because its layers change actions or rewards: {env}.")
    for space in (env.single_observation_space, env.single_action_space):
        if isinstance(space, Tuple):
            raise ValueError(
                f"write: spaces must not be a Tuple, whose parts Minari names otherwise: {space}."
            )
    whole = []
    for episode in episodes(data.detach()):
        begins = "is_init" not in episode.keys() or episode["is_init"][0]
        if begins and episode["next", "done"][-1]:
            whole.append(episode)
    return minari.create_dataset_from_buffers(
        dataset_id,
        [to_minari(episode) for episode in whole],
        env=env_spec(env),
        observation_space=env.single_observation_space,
        action_space=action_space,
        jpeg_encoding=False,  # images as they are
    )


def read(dataset: minari.MinariDataset, n_step: int = 1) -> ReplayBuffer:
    """A buffer of the whole dataset. Windows of n steps end with their episode."""
    buffer = ReplayBuffer(dataset.total_steps, gamma=0.99, n_step=n_step)
    for episode in dataset.iterate_episodes():
        buffer.extend(from_minari(episode).unsqueeze(0))  # as of one env
    return buffer


def main() -> None:
    env = tw.make("CartPole-v1", num_envs=16)
    env.reset(seed=0)
    data = tw.rollout(env, None, 200)
    dataset_id = "cartpole/random-v0"
    if dataset_id in minari.list_local_datasets():
        minari.delete_dataset(dataset_id)
    write(dataset_id, data, env)
    dataset = minari.load_dataset(dataset_id)
    print(f"{dataset.total_episodes} episodes, {dataset.total_steps} steps")
    print(read(dataset, n_step=3).sample(256))


if __name__ == "__main__":
    main()
