"""examples/ppo_graph.py: an iteration of PPO as one graph, for one or many seeds."""

import ppo_graph as example
import pytest
import torch
from helpers import mostly_full

import torchwrap as tw

SIZES = dict(
    num_envs=4, num_steps=8, total_timesteps=64, num_minibatches=2, update_epochs=2, eval_episodes=4
)


def run(tmp_path, make=tw.make, **arguments):
    args = example.Args(out=tmp_path, **{"backend": "none", **SIZES, **arguments})
    return example.main(args, make), torch.load(tmp_path / "checkpoint.pt", weights_only=True)


@pytest.mark.full
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_run_writes_results_and_a_checkpoint_that_restores(env_id, tmp_path):
    metrics, checkpoint = run(tmp_path, env_id=env_id, normalize_reward=True, eval_episodes=4)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    args = example.Args(env_id, num_envs=4, normalize_reward=True, eval_episodes=4)
    env = example.make_env(args, tw.make)
    agent = example.Agent(env)
    params = checkpoint["adam"]["params"]
    result = example.evaluate(env, agent, checkpoint["env"], params, args)
    assert [result] == metrics["eval_mean_return"]
    assert checkpoint["adam"]["count"] == 2 * 2 * 2  # iterations, epochs, minibatches


# eager: the ops of the graph one by one, so that the scans are operators whose bodies are mapped
@pytest.mark.full
@pytest.mark.parametrize("backend", mostly_full(["none", "eager"], "none", long=["eager"]))
def test_first_iteration_of_seeds_equals_single_runs(backend, tmp_path):
    arguments = dict(backend=backend, total_timesteps=32, normalize_reward=True)
    rates = (1e-3, 2e-3)
    gammas = (0.5, 0.99)
    _, together = run(tmp_path, seed=5, num_seeds=2, learning_rate=rates, gamma=gammas, **arguments)
    for i, rate in enumerate(rates):
        _, alone = run(tmp_path, seed=5 + i, learning_rate=rate, gamma=gammas[i], **arguments)
        for name, value in alone["adam"].items():
            torch.testing.assert_close(together["adam"][name][i], value, atol=1e-5, rtol=1e-5)
        for name, value in alone["env"]["buffers"].items():
            found = together["env"]["buffers"][name][i]
            torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.long
def test_example_solves_cartpole(tmp_path):
    metrics = example.main(example.Args(out=tmp_path))
    assert metrics["eval_mean_return"][0] >= 475
