from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch
from tensordict import TensorDict

import torchwrap as tw
from torchwrap.testing import check_env

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ppo():
    threads = torch.get_num_threads()
    yield load("ppo")
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
    torch.optim.Adam([ppo.flatten(agent)]).load_state_dict(checkpoint["optimizer"])
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


def test_a_softmax_is_pytorchs_categorical(ppo):
    logits, action = torch.randn(200, 3, dtype=torch.float64), torch.randint(0, 3, (200,))
    own, pytorchs = ppo.Softmax(logits), torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(own.log_prob(action), pytorchs.log_prob(action))
    torch.testing.assert_close(own.entropy(), pytorchs.entropy())
    drawn = ppo.Softmax(torch.tensor([0.1, 0.2, 0.7]).log().expand(100_000, 3)).sample()
    torch.testing.assert_close(drawn.bincount() / 100_000, torch.tensor([0.1, 0.2, 0.7]), atol=0.006, rtol=0)  # 4 deviations


def test_one_flat_parameter_learns_what_all_of_a_module_do(ppo):
    own, pytorchs = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)) for _ in range(2))
    pytorchs.load_state_dict(own.state_dict())
    flat, separate = ppo.flatten(own), list(pytorchs.parameters())
    optimizers = [torch.optim.Adam(parameters, 0.1) for parameters in ([flat], separate)]
    for _ in range(3):
        inputs = 3 * torch.randn(8, 3)
        flat.grad.zero_()
        optimizers[1].zero_grad()
        for module, parameters, optimizer in zip((own, pytorchs), ([flat], separate), optimizers, strict=True):
            module(inputs).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
    for parameter, expected in zip(own.parameters(), separate, strict=True):
        torch.testing.assert_close(parameter, expected)
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_ppo_learns_with_few_steps(ppo, tmp_path):
    metrics = ppo.main(ppo.Args(total_steps=20_000, out=tmp_path))
    assert metrics["eval_mean_return"] > 100  # a random policy's is 22


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path):
    arguments = [
        "--total-steps",
        "32768",
        "--num-envs",
        "16",
        "--num-steps",
        "32",
        "--epochs",
        "4",
        "--save-every",
        "3",
        "--resume",
    ]

    def start(out):
        command = [sys.executable, str(EXAMPLES / "ppo.py"), *arguments, "--out", str(out)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def figures(out):
        metrics = json.loads((out / "metrics.json").read_text())
        timed = {"wall_seconds", "steps_per_second", "seconds_to_target"}
        return {name: value for name, value in metrics.items() if name not in timed}

    whole, killed, random, updates = start(tmp_path / "whole"), tmp_path / "killed", Random(0), [0]
    for _ in range(3):
        process = start(killed)
        while process.poll() is None and reached(killed) <= updates[-1]:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.1))  # somewhere in an update, or in writing
        process.send_signal(signal.SIGKILL)
        process.wait()
        updates.append(reached(killed))
        assert not (killed / "metrics.json").exists()
    assert start(killed).wait() == whole.wait() == 0
    assert updates == sorted(set(updates)) and figures(killed) == figures(tmp_path / "whole")
    assert figures(killed)["env_steps"] == 32768


def reached(out):
    path = out / "checkpoint.pt"
    return torch.load(path, weights_only=True)["update"] if path.exists() else 0


def test_a_run_goes_on_with_its_own_arguments_alone(ppo, tmp_path):
    small = dict(num_envs=4, num_steps=8, total_steps=64, epochs=1, out=tmp_path)
    ppo.main(ppo.Args(**small))
    with pytest.raises(ValueError, match=r"--resume needs the arguments of the run in .*, which had \{'gamma': '0.98'\}"):
        ppo.main(ppo.Args(**small, gamma=0.9, resume=True))
    with pytest.raises(ValueError, match="--resume needs an env of torchwrap's own, but got <FlattenObservation"):
        ppo.main(ppo.Args(**small, backend="gymnasium", resume=True))


def test_an_env_of_ones_own_is_trained_as_any_other(ppo, tmp_path):
    custom = load("custom_env")
    assert len((EXAMPLES / "custom_env.py").read_text().splitlines()) < 50
    check_env(lambda num_envs, **more: tw.FunctionalEnv(custom.PointMass(), num_envs, max_episode_steps=9, **more))
    ppo.main(ppo.Args(env="PointMass", num_envs=4, num_steps=32, total_steps=512, out=tmp_path), custom.make)
    assert json.loads((tmp_path / "metrics.json").read_text())["target_return"] is None
    assert (tmp_path / "learning_curve.png").exists()


def test_a_grid_world_seen_as_pictures(capsys):
    grid = load("grid_world")
    check_env(lambda num_envs, **more: tw.FunctionalEnv(grid.KeyAndDoor(), num_envs, max_episode_steps=9, **more))
    env = tw.FunctionalEnv(grid.KeyAndDoor(), 2)
    td = env.reset(seed=0)
    walls = torch.ones(8, 8, dtype=torch.bool)
    walls[1, 1:-1] = False  # one corridor: agent, key, nothing, door in the first world; door next to the agent in the second
    for name, places in {"agent": (9, 10), "key": (10, 13), "door": (12, 9)}.items():
        env.state[name].copy_(torch.tensor(places))
    env.state["walls"].copy_(walls.flatten().expand(2, -1))
    seen = []
    for action in (0, 3, 3, 3):  # up, against the wall; then right
        transition, td = env.step(td.set("action", torch.tensor([action, 2])))
        seen.append(transition["next"])
    assert torch.stack([step["reward"][:, 0] for step in seen]).tolist() == [
        pytest.approx([-0.01, -0.01]),
        pytest.approx([0.49, -0.01]),  # the key; the second stands at the door without it
        pytest.approx([-0.01, -0.01]),
        pytest.approx([0.99, -0.01]),
    ]
    assert [step["terminated"].flatten().tolist() for step in seen] == [[False, False]] * 3 + [[True, False]]
    final = seen[-1]["observation"]
    assert final["has_key"].tolist() == [1, 0] and final["pixels"].shape == (2, 48, 48, 3)
    assert final["pixels"][0, 6, 24].tolist() == [220, 30, 30] and final["pixels"][0, 6, 12].tolist() == [0, 0, 0]
    assert final["pixels"][1, 6, 30].tolist() == [255, 220, 0] and final["pixels"][1, 0, 0].tolist() == [90, 90, 90]
    grid.main()
    assert "episodes found the door" in capsys.readouterr().out
