"""Saves what users save, by `python tests/contract/saved/write.py` with the version of a release.

tests/contract/test_saved_files.py loads the files of each version, which are never made again.
"""

import json
import pickle
from pathlib import Path

import torch

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W

FOLDER = Path(__file__).parent / tw.__version__
PolicyState = getattr(tw, "PolicyState", None) or T.PolicyState  # in 0.2.0, a transform


def pendulum():
    env = tw.make("Pendulum-v1", num_envs=3, max_episode_steps=7)
    recorder = T.RecordEpisodeStatistics(buffer_length=4)
    rewards = T.NormalizeReward(gamma=0.9)
    return tw.TransformedEnv(env, T.ClipAction(), recorder, T.NormalizeObservation(), rewards)


def cartpole():
    env = W.RepeatAction(tw.make("CartPole-v1", num_envs=3), 2)
    env = tw.TransformedEnv(env, T.FrameStackObservation(2), T.NormalizeObservation())
    return tw.TransformedEnv(env, T.DelayObservation((1, 2)), T.TimeLimit(9))


def sticky():  # JSON cannot hold the spec of 0.2.0
    env = tw.make("Pendulum-v1", num_envs=3)
    return tw.TransformedEnv(env, T.StickyAction(0.5), PolicyState({"hidden": (4,)}))


def saved(env):
    """A state_dict, a snapshot, and what follows the snapshot."""
    td = env.reset(seed=0)
    for _ in range(9):
        _, td = env.step(td.set("action", env.sample_action()))
    learned = {name: value.clone() for name, value in env.state_dict().items()}
    snapshot = env.snapshot().to_dict()
    actions = torch.stack([env.sample_action() for _ in range(5)])
    observations, rewards = [], []
    for action in actions:
        transition, td = env.step(td.set("action", action))
        observations.append(td["observation"].clone())
        rewards.append(transition["next", "reward"])
    return {
        "state_dict": learned,
        "snapshot": snapshot,
        "actions": actions,
        "observations": torch.stack(observations),
        "rewards": torch.stack(rewards),
    }


if __name__ == "__main__":
    FOLDER.mkdir()
    envs = {"pendulum": pendulum(), "cartpole": cartpole()}
    specs = {name: json.loads(env.spec.to_json()) for name, env in envs.items()}
    (FOLDER / "specs.json").write_text(json.dumps(specs, indent=1))
    (FOLDER / "sticky.pickle").write_bytes(pickle.dumps(sticky().spec))
    torch.save({name: saved(env) for name, env in envs.items()}, FOLDER / "saved.pt")
