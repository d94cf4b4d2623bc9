from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import torchwrap as tw

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def ppo():
    spec = importlib.util.spec_from_file_location("ppo", EXAMPLES / "ppo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ppo"] = module  # dataclasses look their module up
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)


METRICS = {
    *("env", "backend", "num_envs", "device", "seed", "env_steps", "wall_seconds", "steps_per_second", "target_return"),
    *("env_steps_to_target", "seconds_to_target", "final_mean_return", "eval_mean_return"),
}


@pytest.mark.parametrize(
    ("env", "backend", "used"),
    [
        ("CartPole-v1", None, "torch"),
        ("CartPole-v1", "gymnasium", "gymnasium"),
        ("InvertedPendulum-v5", None, "gymnasium"),
    ],
)
def test_ppo_runs_and_writes_its_results(ppo, tmp_path, env, backend, used):
    args = ppo.Args(env=env, backend=backend, num_envs=4, num_steps=64, total_steps=512, epochs=1, out=tmp_path, seed=3)
    ppo.main(args)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics) >= METRICS
    assert (metrics["backend"], metrics["env_steps"], metrics["seed"]) == (used, 512, 3)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    fresh = ppo.make_env(args, 3)
    fresh.load_state_dict(checkpoint["env"])
    agent = ppo.Agent(fresh)
    agent.load_state_dict(checkpoint["agent"])
    torch.optim.Adam(agent.parameters()).load_state_dict(checkpoint["optimizer"])
    tw.rollout(fresh.eval(), agent.act, 2)


def test_ppo_bootstraps_truncated_episodes_from_their_final_observation_and_terminated_ones_not_at_all(ppo):
    # By hand: values are the observation, rewards 1, gamma 0.5, lambda 1. Row 0 is truncated, row 1 terminated.
    class Agent:
        def value(self, observation):
            return observation.squeeze(-1)

        def distribution(self, observation):
            return torch.distributions.Categorical(logits=torch.zeros(*observation.shape[:-1], 2))

    flags = torch.tensor([[[False], [False]], [[True], [False]]])
    following = dict(
        observation=torch.tensor([[[40.0], [2.0]], [[80.0], [4.0]]]),
        reward=torch.ones(2, 2, 1),
        terminated=flags,
        done=torch.tensor([[[True], [False]], [[True], [False]]]),
    )
    data = TensorDict(
        dict(observation=torch.tensor([[[10.0], [20.0]], [[30.0], [6.0]]]), action=torch.zeros(2, 2).long(), next=following),
        [2, 2],
    )
    batch = ppo.prepare(Agent(), data, ppo.Args(gamma=0.5, gae_lambda=1.0))
    assert batch["advantage"].tolist() == [1 + 20 - 10, 1 + 1 - 20, 1 - 30, 1 + 2 - 6]


def test_ppo_learns_with_few_steps(ppo, tmp_path):
    metrics = ppo.main(ppo.Args(total_steps=20_000, out=tmp_path))
    assert metrics["eval_mean_return"] > 100  # a random policy's is 22
