"""examples/cleanrl_style.py: PPO on the vector env that `to_gymnasium` returns."""

import ast
import dataclasses
import itertools

import gymnasium
import numpy as np
import pytest
import torch
import tyro
from helpers import EXAMPLES, load_example

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


@pytest.fixture(scope="module")
def example():
    threads = torch.get_num_threads()
    yield load_example("cleanrl_style")
    torch.set_num_threads(threads)


SMALL = dict(num_envs=4, num_steps=16, total_timesteps=512, num_minibatches=2, update_epochs=2)


def test_example_runs_and_repeats_itself(example):
    first, second, other = (example.main(example.Args(seed=seed, **SMALL)) for seed in (1, 1, 2))
    assert first["env_steps"] == SMALL["total_timesteps"]
    assert first["mean_return"] == second["mean_return"] != other["mean_return"]


def test_example_flags_are_parsed_and_documented(example):
    flags = {"--env-id": "Pendulum-v1", "--num-envs": 3, "--seed": 7, "--total-timesteps": 11}
    args = tyro.cli(example.Args, args=[str(word) for pair in flags.items() for word in pair])
    assert (args.env_id, args.num_envs, args.seed, args.total_timesteps) == (
        "Pendulum-v1",
        3,
        7,
        11,
    )
    source = (EXAMPLES / "cleanrl_style.py").read_text()
    body = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Args"
    ).body
    documented = [
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    ]
    assert documented == [field.name for field in dataclasses.fields(example.Args)]
    assert len(source.splitlines()) <= 240


@pytest.mark.parametrize("ending, value", [("terminated", 1.0), ("truncated", 10.0), ("both", 1.0)])
def test_example_bootstraps_truncated_episodes_from_their_final_observation(
    example, monkeypatch, ending, value
):
    # Episodes of one step with reward 1 whose final observation is 1 (0 is the initial one), and a critic that says 18 there.
    class Agent(example.Agent):
        def value(self, obs):
            return 18.0 * obs[..., 0] + 0 * super().value(obs)

    env = tw.TransformedEnv(
        ScriptedEnv(
            1,
            (1,),
            episode_lengths=1,
            ending=ending,
            action_space=gymnasium.spaces.Box(-1, 1, (1,), np.float32),
        ),
        T.RecordEpisodeStatistics(),
    )
    losses = []
    monkeypatch.setattr(example, "make_envs", lambda args: tw.to_gymnasium(env))
    monkeypatch.setattr(example, "Agent", Agent)
    monkeypatch.setattr(
        torch.Tensor, "square", lambda self: losses.append(-self.detach()) or self * self
    )
    args = example.Args(
        env_id="Pendulum-v1", gamma=0.5, **{**SMALL, "num_envs": 1, "total_timesteps": 16}
    )
    assert example.main(args)["mean_return"] == 1.0
    seen = torch.cat(losses)  # targets minus values, which are 0 at initial observations
    assert len(seen) == 32 and (seen == value).all()


@pytest.mark.long
@pytest.mark.full
def test_example_solves_cartpole(example):
    assert example.main(example.Args(seed=1))["mean_return"] >= 450
