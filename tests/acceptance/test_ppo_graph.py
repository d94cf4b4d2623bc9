"""examples/ppo_graph.py: iterations of PPO as one graph, for one training or a grid."""

import csv

import graph_parts
import ppo
import ppo_graph as example
import pytest
import torch
from helpers import mostly_full

import torchwrap as tw

SIZES = dict(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=2, eval_episodes=4)


def make_args(tmp_path, **arguments):
    sizes = {"backend": "none", "total_timesteps": 64, **SIZES}
    return example.Args(out=tmp_path, **{**sizes, **arguments})


def run(tmp_path, **arguments):
    metrics = example.main(make_args(tmp_path, **arguments))
    return metrics, torch.load(tmp_path / "checkpoint.pt", weights_only=True)


# An iteration


class Peer(torch.nn.Module):
    """An agent for the functions of ppo.py."""

    def __init__(self, agent):
        super().__init__()
        self.agent = agent

    def get_value(self, observation):
        return self.agent(observation)[1]

    def get_distribution(self, observation):
        return self.agent(observation)[0]


def by_ppo(args, env, agent, noise, rows):
    """The parameters after an iteration, with the functions of ppo.py and PyTorch's Adam."""
    noises = iter(noise)
    vector = agent.vector()
    policy = lambda td: agent.act(vector, td["observation"], next(noises))[0]  # noqa: E731
    data = tw.Collector(env, policy, args.num_steps)()
    flags = ppo.Args(gamma=args.gamma[0], gae_lambda=args.gae_lambda[0], clip_vloss=False)
    flags.ent_coef = args.ent_coef[0]
    peer = Peer(agent)
    batch = ppo.make_batch(peer, data.to_dict(), flags)
    by_step = {}
    for name, value in batch.items():
        value = value.unflatten(0, (args.num_envs, args.num_steps))
        by_step[name] = value.transpose(0, 1).flatten(0, 1)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate[0], eps=1e-5)
    for order in rows.view(args.update_epochs, -1):
        for each in order[order >= 0].chunk(args.num_minibatches):
            minibatch = {name: value[each] for name, value in by_step.items()}
            loss, _ = ppo.ppo_loss(peer, minibatch, flags)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    return agent.vector()


@pytest.mark.parametrize("num_minibatches", [2, 3], ids="{} minibatches".format)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_iteration_equals_that_of_ppo(env_id, num_minibatches, tmp_path):
    arguments = dict(env_id=env_id, num_minibatches=num_minibatches, ent_coef=0.01)
    args = make_args(tmp_path, **arguments)
    run, env, agent, iterate = example.start(args)
    noise, rows = run.random()
    hyper = run.grid.hyper(args)
    after, _ = iterate(run.state, hyper, torch.tensor(0.0), noise, rows)
    env.restore(run.state["env"])
    expected = by_ppo(args, env, agent, noise, rows)
    torch.testing.assert_close(after["adam"]["params"], expected, atol=1e-5, rtol=1e-4)


# Grids


VALUES = {
    "learning_rate": (1e-3, 2e-3),
    "gamma": (0.5, 0.99),
    "gae_lambda": (0.5, 0.95),
    "clip_coef": (1e-3, 0.2),
    "ent_coef": (0.0, 0.5),
    "vf_coef": (0.1, 0.5),
    "max_grad_norm": (0.01, 0.5),
}


def test_every_hyperparameter_may_have_several_values(tmp_path):
    assert set(graph_parts.hyperparameters(make_args(tmp_path))) == set(VALUES)


# eager: the ops of the graph one by one, so that the scans are operators whose bodies are mapped
CASES = {f"none-{name}": ("none", name) for name in VALUES} | {"eager-gamma": ("eager", "gamma")}


@pytest.mark.full
@pytest.mark.parametrize("case", mostly_full(CASES, "none-gamma", long=["eager-gamma"]))
def test_training_of_a_grid_equals_its_single_run(case, tmp_path):
    backend, name = CASES[case]
    arguments = dict(backend=backend, total_timesteps=96, normalize_reward=True)
    low, high = VALUES[name]
    metrics, together = run(tmp_path, seeds=(5, 6), **{name: (low, high)}, **arguments)
    trainings = [(low, 5), (low, 6), (high, 5), (high, 6)]
    for i in (1, 2):
        value, seed = trainings[i]
        _, alone = run(tmp_path, seeds=(seed,), **{name: (value,)}, **arguments)
        for part in ("adam", "env"):
            expected = leaves(alone[part])
            found = leaves(together[part])
            assert found.keys() == expected.keys()
            for key in expected:
                torch.testing.assert_close(found[key][i], expected[key], atol=1e-5, rtol=1e-5)
    names = [f"{name}={value:g},seed={seed}" for value, seed in trainings]
    assert list(metrics["eval_mean_return"]) == names


def leaves(part, path=()):
    if isinstance(part, torch.Tensor):
        return {path: part}
    found = {}
    for name, value in part.items():
        found |= leaves(value, (*path, name))
    return found


# Files


@pytest.mark.full
def test_run_writes_results_that_restore(tmp_path):
    arguments = dict(seeds=(1, 2), normalize_reward=True, gamma=(0.9, 0.99))
    metrics, checkpoint = run(tmp_path, **arguments)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert torch.equal(checkpoint["adam"]["count"], torch.full((4,), 2.0 * 2 * 2))
    names = list(metrics["eval_mean_return"])
    with open(tmp_path / "curves.csv") as file:
        header, *lines = csv.reader(file)
    assert header == ["env_steps", *names]
    assert [line[0] for line in lines] == ["32", "64"]
    args = make_args(tmp_path, **arguments)
    env = example.make_env(args)
    agent = example.Agent(env)
    for name in names:
        saved = torch.load(tmp_path / "agents" / f"{name}.pt", weights_only=True)
        agent.load_state_dict(saved["agent"])
        env.restore(saved["env"])
        seed = int(name.rpartition("=")[2])
        torch.manual_seed(seed)
        policy = lambda td: agent(td["observation"])[0].sample()  # noqa: E731
        with torch.no_grad():
            episodes = tw.evaluate(env, policy, args.eval_episodes, seed=seed + 1_000_000)
        assert episodes["episode_return"].mean().item() == metrics["eval_mean_return"][name]


class Killed(Exception):
    pass


@pytest.mark.full
def test_resumed_run_equals_one_that_was_not_stopped(monkeypatch, tmp_path):
    arguments = dict(seeds=(1, 2), total_timesteps=128, save_every=1)
    metrics, expected = run(tmp_path / "whole", **arguments)
    make_iteration = example.make_iteration

    def killed(*given):
        iterate = make_iteration(*given)
        calls = iter(range(3))

        def call(*values):
            if next(calls) == 2:
                raise Killed
            return iterate(*values)

        return call

    monkeypatch.setattr(example, "make_iteration", killed)
    with pytest.raises(Killed):
        run(tmp_path / "killed", **arguments)
    monkeypatch.undo()
    resumed, found = run(tmp_path / "killed", resume=True, **arguments)
    assert resumed["eval_mean_return"] == metrics["eval_mean_return"]
    found = leaves(found["adam"] | found["env"])
    for key, value in leaves(expected["adam"] | expected["env"]).items():
        assert torch.equal(found[key], value), key
    with pytest.raises(ValueError, match="--resume"):
        run(tmp_path / "killed", resume=True, **{**arguments, "seeds": (1, 3)})


@pytest.mark.full
@pytest.mark.long
def test_example_solves_cartpole(tmp_path):
    metrics = example.main(example.Args(out=tmp_path))
    assert metrics["eval_mean_return"]["seed=1"] >= 475
