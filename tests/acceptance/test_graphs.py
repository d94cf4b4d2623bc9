"""examples/*_graph.py: iterations as one graph, for one training or a grid."""

import csv
import functools

import dqn
import dqn_graph
import graph_parts
import ppo
import ppo_graph as example
import ppo_recurrent
import ppo_recurrent_graph
import pytest
import torch
from helpers import mostly_full, params
from replay import ReplayBuffer

import torchwrap as tw
from torchwrap.envs.cartpole import CartPole

SIZES = dict(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=2)
SCRIPTS = {
    example: SIZES,
    dqn_graph: dict(num_envs=4, num_steps=8, buffer_size=80, batch_size=8, learning_starts=64),
    ppo_recurrent_graph: SIZES,
}


def make_args(tmp_path, script=example, **arguments):
    sizes = {"backend": "none", "total_timesteps": 64, "eval_episodes": 4, **SCRIPTS[script]}
    return script.Args(out=tmp_path, **{**sizes, **arguments})


def run(tmp_path, script=example, **arguments):
    metrics = script.main(make_args(tmp_path, script, **arguments))
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


CASES = {
    f"{env_id}, {number} minibatches": (env_id, number)
    for env_id in ("CartPole-v1", "Pendulum-v1")
    for number in (2, 3)
}


@pytest.mark.parametrize("case", params(CASES, [*CASES][1:3]))
def test_iteration_equals_that_of_ppo(case, tmp_path):
    env_id, num_minibatches = case
    arguments = dict(env_id=env_id, num_minibatches=num_minibatches, ent_coef=0.01)
    args = make_args(tmp_path, **arguments)
    run, env, agent, iterate = example.start(args)
    noise, rows = run.random()
    hyper = run.grid.hyper(args)
    after, _ = iterate(run.state, hyper, torch.tensor(0.0), noise, rows)
    env.restore(run.state["env"])
    expected = by_ppo(args, env, agent, noise, rows)
    torch.testing.assert_close(after["adam"]["params"], expected, atol=1e-5, rtol=1e-4)


# Episodes end, and are truncated, in a few steps


@pytest.fixture
def short(registry):
    tw.register("Short-v0", CartPole, max_episode_steps=15)
    return "Short-v0"


def ends(data):
    successor = data["next"]
    return successor["terminated"].any() and successor["truncated"].any()


def test_iterations_equal_dqn(short, tmp_path):
    """With dqn.py's loss and exploration, replay.py's buffer and PyTorch's Adam."""
    arguments = dict(total_timesteps=256, env_id=short, exploration_fraction=0.5)
    args = make_args(tmp_path, dqn_graph, **arguments)
    run, env, agent, iterate = dqn_graph.start(args)
    hyper = run.grid.hyper(args)
    target = dqn.QNetwork(env)
    target.load_state_dict(agent.state_dict())
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    buffer = ReplayBuffer(args.buffer_size, args.gamma[0], args.n_step)
    actions = []
    collect = tw.Collector(env, lambda td: td.set("action", actions.pop(0)(td)), args.num_steps)
    state = run.state
    env.restore(state["env"])
    seen = []
    for iteration in range(4):
        progress = iteration / 8
        noise, draws = run.random()
        state, _ = iterate(state, hyper, torch.tensor(progress), noise, draws)
        epsilon = max(0.04, 1 - 0.96 * max(0, 256 * progress - 64) / 128)

        def act(td, explore, other, epsilon=epsilon):
            return torch.where(explore < epsilon, other, agent.greedy(td))

        for explore, other in zip(noise["explore"], noise["action"], strict=True):
            actions.append(functools.partial(act, explore=explore, other=other))
        seen.append(collect())
        buffer.extend(seen[-1])
        optimizer.param_groups[0]["lr"] = args.learning_rate[0] * (1 - progress)
        steps = (draws["age"] * (buffer.num_steps - args.n_step + 1)).long()
        for step, column in zip(steps, draws["env"], strict=True):
            if iteration == 0:
                continue  # `learning_starts`
            optimizer.zero_grad()
            dqn.td_loss(agent, target, buffer.get(step, column)).backward()
            optimizer.step()
            dqn.update_target(target, agent, args.tau[0])
        found = [state["adam"]["params"], state["adam"]["target"]]
        expected = [torch.cat([*map(torch.flatten, each.parameters())]) for each in (agent, target)]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert ends(torch.cat(seen, 1))


def test_iteration_equals_that_of_ppo_recurrent(short, tmp_path):
    """The second one, whose first states are not zero."""
    arguments = dict(env_id=short, num_envs=3, num_steps=20, update_epochs=1)
    args = make_args(tmp_path, ppo_recurrent_graph, **arguments)
    run, env, agent, iterate = ppo_recurrent_graph.start(args)
    hyper = run.grid.hyper(args)
    peer = ppo_recurrent.Agent(args, env)
    peer.load_state_dict(agent.state_dict())
    before, _ = iterate(run.state, hyper, torch.tensor(0.0), *run.random())
    noise, rows = run.random()
    state = {"env": before["env"], "adam": run.state["adam"]}
    after, _ = iterate(state, hyper, torch.tensor(0.0), noise, rows)
    noises = iter(noise)

    def act(td):
        hidden = td["next", "hidden"] = peer.remember(td["observation"], td["hidden"])
        scores = peer.get_distribution(hidden).probs / next(noises)
        return td.set("action", scores.argmax(-1))

    env.restore(before["env"])
    data = tw.Collector(env, act, args.num_steps)()
    assert ends(data) and data["hidden"][:, 0].any()
    flags = ppo_recurrent.Args(gamma=args.gamma[0])
    batch = ppo_recurrent.make_batch(peer, data, flags)
    optimizer = torch.optim.Adam(peer.parameters(), args.learning_rate[0], eps=1e-5)
    for each in rows:
        minibatch = {name: value[each[each >= 0]] for name, value in batch.items()}
        optimizer.zero_grad()
        ppo_recurrent.ppo_loss(peer, minibatch, flags).backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 0.5)
        optimizer.step()
    expected = torch.cat([*map(torch.flatten, peer.parameters())])
    torch.testing.assert_close(after["adam"]["params"], expected, atol=1e-5, rtol=1e-4)


# Grids


PPO_VALUES = {
    "learning_rate": (1e-3, 2e-3),
    "gamma": (0.5, 0.99),
    "gae_lambda": (0.5, 0.95),
    "clip_coef": (1e-3, 0.2),
    "ent_coef": (0.0, 0.5),
    "vf_coef": (0.1, 0.5),
    "max_grad_norm": (0.01, 0.5),
}
DQN_VALUES = {
    "learning_rate": (1e-3, 2e-3),
    "gamma": (0.5, 0.99),
    "tau": (0.01, 0.5),
    "start_e": (0.5, 1.0),
    "end_e": (0.1, 0.4),
    "exploration_fraction": (0.1, 0.9),
}
VALUES = {example: PPO_VALUES, dqn_graph: DQN_VALUES, ppo_recurrent_graph: PPO_VALUES}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_hyperparameter_may_have_several_values(script, tmp_path):
    assert set(graph_parts.hyperparameters(make_args(tmp_path, script))) == set(VALUES[script])


# eager: the ops of the graph one by one, so that the scans are operators whose bodies are mapped
CASES = {}
for script, values in VALUES.items():
    for name in values:
        CASES[f"{script.__name__}-none-{name}"] = script, "none", name
    CASES[f"{script.__name__}-eager-gamma"] = script, "eager", "gamma"
# The recurrent one's hyperparameters are those of PPO.
LONG = [name for name in CASES if "eager" in name or "recurrent" in name]
LONG.remove("ppo_recurrent_graph-none-gamma")


@pytest.mark.full
@pytest.mark.parametrize("case", mostly_full(CASES, long=LONG))
def test_training_of_a_grid_equals_its_single_run(case, tmp_path):
    script, backend, name = CASES[case]
    arguments = dict(script=script, backend=backend, total_timesteps=96)
    if script is not dqn_graph:
        arguments["normalize_reward"] = True
    low, high = VALUES[script][name]
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


@pytest.mark.parametrize("given", [{"buffer_size": 28}, {"train_frequency": 33}], ids=str)
def test_dqn_refuses_sizes_that_do_not_fit(given, tmp_path):
    with pytest.raises(ValueError, match=next(iter(given))):
        dqn_graph.start(make_args(tmp_path, dqn_graph, **given))


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
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_resumed_run_equals_one_that_was_not_stopped(script, monkeypatch, tmp_path):
    arguments = dict(script=script, seeds=(1, 2), total_timesteps=128, save_every=1)
    metrics, expected = run(tmp_path / "whole", **arguments)
    make_iteration = script.make_iteration

    def killed(*given):
        iterate = make_iteration(*given)
        calls = iter(range(3))

        def call(*values):
            if next(calls) == 2:
                raise Killed
            return iterate(*values)

        return call

    monkeypatch.setattr(script, "make_iteration", killed)
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


# By the default seed, which training was tried with
LEVELS = {example: 475, dqn_graph: 475, ppo_recurrent_graph: 450}


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("script", LEVELS, ids=lambda script: script.__name__)
def test_example_solves_cartpole(script, tmp_path):
    metrics = script.main(script.Args(out=tmp_path))
    assert metrics["eval_mean_return"]["seed=1"] >= LEVELS[script]
