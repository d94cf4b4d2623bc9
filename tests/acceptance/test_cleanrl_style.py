"""examples/cleanrl_style.py: PPO on the vector env that `to_gymnasium` returns."""

import ast
import dataclasses
import itertools

import cleanrl_style as example
import gymnasium
import numpy as np
import pytest
import torch
import tyro
from helpers import EXAMPLES

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

SOURCE = (EXAMPLES / "cleanrl_style.py").read_text()
SMALL = dict(num_envs=4, num_steps=16, total_timesteps=512, num_minibatches=2, update_epochs=2)


def test_example_repeats_itself():
    runs = [example.main(example.Args(seed=seed, **SMALL)) for seed in (1, 1, 2)]
    first, second, other = [run["mean_return"] for run in runs]
    assert first == second != other
    assert runs[0]["env_steps"] == SMALL["total_timesteps"]


@pytest.mark.parametrize(("num_envs", "num_steps"), [(128, 16), (256, 16)], ids=["kept", "more"])
def test_another_number_of_envs_keeps_the_batch_from_16_steps_up(num_envs, num_steps):
    sizes = dict(total_timesteps=1, update_epochs=1)  # one iteration
    run = example.main(example.Args(num_envs=num_envs, **sizes))
    assert run["env_steps"] == num_envs * num_steps


def test_example_parses_flags():
    command = "--env-id Pendulum-v1 --num-envs 3 --seed 7 --total-timesteps 11"
    args = tyro.cli(example.Args, args=command.split())
    expected = example.Args(env_id="Pendulum-v1", num_envs=3, seed=7, total_timesteps=11)
    assert args == expected


def test_example_documents_each_flag():
    (body,) = [node.body for node in ast.parse(SOURCE).body if getattr(node, "name", "") == "Args"]
    documented = []
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            documented.append(field.target.id)
    assert documented == [field.name for field in dataclasses.fields(example.Args)]


def test_example_is_short():
    assert len(SOURCE.splitlines()) <= 240


# Episodes of one step have reward 1, initial observation 0 and final observation 1, of value 18.
@pytest.mark.parametrize("ending, value", [("terminated", 1.0), ("truncated", 10.0), ("both", 1.0)])
def test_example_bootstraps_truncated_episodes_alone(monkeypatch, ending, value):
    class Agent(example.Agent):
        def value(self, obs):
            return 18.0 * obs[..., 0] + 0 * super().value(obs)

    actions = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    env = ScriptedEnv(1, (1,), episode_lengths=1, ending=ending, action_space=actions)
    env = tw.TransformedEnv(env, T.RecordEpisodeStatistics())
    targets = []  # minus values, which are 0 at initial observations

    def square(error):
        targets.append(-error.detach())
        return error * error

    monkeypatch.setattr(example, "make_envs", lambda args: tw.to_gymnasium(env))
    monkeypatch.setattr(example, "Agent", Agent)
    monkeypatch.setattr(torch.Tensor, "square", square)
    sizes = {**SMALL, "num_envs": 1, "total_timesteps": 16}
    args = example.Args(env_id="Pendulum-v1", gamma=0.5, **sizes)
    assert example.main(args)["mean_return"] == 1.0
    assert torch.cat(targets).tolist() == [value] * 32


@pytest.mark.long
@pytest.mark.full
def test_example_solves_cartpole():
    assert example.main(example.Args(seed=1))["mean_return"] >= 450
