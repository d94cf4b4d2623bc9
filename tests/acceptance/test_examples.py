"""examples/ppo.py, ppo_atari.py and dqn_atari.py."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import dqn_atari
import ppo
import ppo_atari
import ppo_output
import pytest
import torch
import tyro
from helpers import EXAMPLES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import TensorDict
from torch.distributions import Categorical

import torchwrap as tw

METRICS = """
    env_id backend num_envs device seed env_steps wall_seconds
    steps_per_second steps_per_second_steady compile_seconds target_return
    env_steps_to_target seconds_to_target final_mean_return eval_mean_return
"""
SCALARS = """
    charts/episodic_return charts/episodic_length charts/learning_rate charts/SPS
    losses/value_loss losses/policy_loss losses/entropy losses/old_approx_kl
    losses/approx_kl losses/clipfrac losses/explained_variance
"""


def load(folder, name="agent.pt"):
    return torch.load(folder / name, weights_only=True)


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        found[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The arguments and the metrics of a short training with TensorBoard."""
    out = tmp_path_factory.mktemp("ppo")
    args = ppo.Args(total_timesteps=20_480, seed=3, out=out, tensorboard=True)
    return args, ppo.main(args)


def test_ppo_learns(run):
    assert run[1]["eval_mean_return"] > 100  # at random 22


def test_ppo_writes_metrics_and_a_curve(run):
    args, metrics = run
    assert json.loads((args.out / "metrics.json").read_text()) == metrics
    assert metrics.keys() >= set(METRICS.split())
    assert metrics["backend"] == "torch"
    assert metrics["env_steps"] == 20_480
    assert metrics["seed"] == 3
    assert (args.out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_ppo_agent_loads_with_its_env(run):
    args, _ = run
    env, agent = ppo_output.load(args, num_envs=3)
    assert tw.evaluate(env, agent.act, 3)["episode_return"].mean() > 50  # at random 22
    saved = load(args.out)
    assert len(saved["curve"]) == 10
    torch.testing.assert_close(agent.state_dict(), saved["agent"], rtol=0, atol=0)


def test_ppo_writes_scalars_of_cleanrl_in_each_iteration(run):
    found = scalars(run[0].out)
    assert found.keys() == set(SCALARS.split())
    for values in found.values():
        assert list(values) == list(range(2048, 20_481, 2048))
    rates = list(found["charts/learning_rate"].values())
    assert rates == pytest.approx([0.003 * (10 - number) / 10 for number in range(10)])
    assert found["charts/episodic_return"] == found["charts/episodic_length"]


# By hand: values are the observation, rewards 1, gamma 0.5, lambda 1. Row 0 is truncated and runs
# on, row 1 is terminated, with NaN as its final observation, as of a simulator that blew up.
@pytest.fixture
def rollout():
    value = torch.tensor([[10.0, 20.0], [30.0, 6.0]])
    successor = {
        "observation": torch.tensor([[40.0, 2.0], [torch.nan, 4.0]]),
        "reward": torch.ones(2, 2, 1),
        "terminated": torch.tensor([[[False], [False]], [[True], [False]]]),
        "done": torch.tensor([[[True], [False]], [[True], [False]]]),
    }
    return {
        "observation": value,
        "value": value,
        "action": torch.zeros(2, 2, dtype=torch.int64),
        "logprob": torch.zeros(2, 2),
        "next": successor,
    }


def assert_bootstraps(batch):
    assert batch["advantage"].tolist() == [1 + 20 - 10, 1 + 1 - 20, 1 - 30, 1 + 2 - 6]
    assert batch["ret"].tolist() == [21, 2, 1, 3]


def equal_logits(*shape):
    return Categorical(logits=torch.zeros(*shape, 2))


def test_ppo_bootstraps_truncated_episodes_alone(rollout):
    agent = SimpleNamespace(
        get_value=lambda observation: observation,
        get_distribution=lambda observation: equal_logits(*observation.shape),
    )
    args = ppo.Args(gamma=0.5, gae_lambda=1.0)
    assert_bootstraps(ppo.make_batch(agent, rollout, args))


def test_ppo_atari_bootstraps_truncated_episodes_alone(rollout):
    args = ppo_atari.Args(gamma=0.5, gae_lambda=1.0)
    root = {"observation": torch.tensor([2.0, 4.0])}
    data = TensorDict(rollout, [2, 2])
    assert_bootstraps(ppo_atari.make_batch(lambda frames: (None, frames), data, root, args))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ale", "cleanrl", "envpool"])
@pytest.mark.parametrize("script", [ppo_atari, dqn_atari], ids=["ppo", "dqn"])
def test_atari_scripts_train_go_on_and_play_whole_games(tmp_path, script, backend):
    if backend == "envpool":
        pytest.importorskip("envpool")
    args = dict(env_id="Breakout", backend=backend, num_envs=2, num_steps=16, total_timesteps=1024)
    args |= dict(network="small", eval_games=2, resume=True, save_every=1, out=tmp_path)
    if script is dqn_atari:
        args |= dict(learning_starts=512, buffer_size=256, train_frequency=32)
    metrics = script.main(script.Args(**args))
    again = script.main(script.Args(**args | {"eval_games": 1}))
    assert again["env_steps"] == metrics["env_steps"] == 1024
    assert again["final_mean_return"] == metrics["final_mean_return"] >= 0  # of whole games
    assert json.loads((tmp_path / "metrics.json").read_text())["eval_mean_return"] >= 0


@pytest.mark.parametrize("backend", ["ale", "sb3"])
def test_dqn_atari_samples_the_stacks_that_it_saw(backend):
    args = dqn_atari.Args(env_id="Breakout", backend=backend, buffer_size=2_000)
    env = dqn_atari.make_training(args, 1, 0)
    env.reset(seed=0)
    data = tw.rollout(env, None, 60)
    assert data["next", "done"].any()
    buffer = dqn_atari.make_buffer(args)
    buffer.extend(data)
    sample = buffer.get(torch.arange(3, 60), torch.zeros(57, dtype=torch.int64))
    assert sample["observation"].equal(data["observation"][0, 3:])
    assert sample["next_observation"].equal(data["next", "observation"][0, 3:])


@pytest.mark.parametrize("num_steps", [1, 2, 5, 32, 33])
def test_gae_equals_the_loop_over_steps(num_steps):
    generator = torch.Generator().manual_seed(num_steps)
    delta = torch.randn(6, num_steps, generator=generator, dtype=torch.float64)
    continues = torch.rand(6, num_steps, generator=generator) < 0.8
    decay = 0.95 * continues.double()
    expected = torch.zeros_like(delta)
    following = 0
    for step in reversed(range(num_steps)):
        following = delta[:, step] + decay[:, step] * following
        expected[:, step] = following
    torch.testing.assert_close(ppo.gae(delta, decay), expected)


HINTS = {"pays": (3600, "pays the first time"), "with a cache": (100, "pays with Inductor's")}
HINTS["does not pay"] = (10, "does not pay")


@pytest.mark.parametrize(("seconds_left", "advice"), HINTS.values(), ids=HINTS)
def test_hint_says_whether_compiling_pays(seconds_left, advice):
    assert advice in ppo_output.compile_hint(seconds_left)


@pytest.mark.parametrize(("backend", "times"), [("gymnasium", 1), ("torch", 0)])
def test_ppo_hints_once_at_compiling_over_a_simulator(tmp_path, capsys, backend, times):
    args = dict(backend=backend, num_envs=2, num_steps=16, total_timesteps=96, out=tmp_path)
    ppo.main(ppo.Args(**args))
    assert capsys.readouterr().out.count("--compile") == times


@pytest.mark.long
@pytest.mark.full
def test_ppo_compiled_learns_what_eager_mode_learns(tmp_path):
    agents = []
    for compiled in (False, True):
        args = ppo.Args(
            env_id="Pendulum-v1",
            backend="gymnasium",
            num_envs=4,
            num_steps=16,
            num_minibatches=3,  # the last one is smaller
            update_epochs=2,
            total_timesteps=192,
            compile=compiled,
            out=tmp_path,
        )
        metrics = ppo.main(args)
        agents.append(load(tmp_path)["agent"])
        assert metrics["steps_per_second_steady"] > 0
        assert (metrics["compile_seconds"] > 0) == compiled
    torch.testing.assert_close(*agents, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_ppo_resumed_ends_in_the_same_state_with_each_step_once(tmp_path, monkeypatch):
    def train(folder):
        args = ppo.Args(
            num_envs=4,
            num_steps=32,
            total_timesteps=640,
            save_every=2,
            tensorboard=True,
            resume=True,
            out=tmp_path / folder,
        )
        ppo.main(args)

    train("whole")
    save = ppo_output.Checkpoint.save

    def save_first(checkpoint, processes):
        if not checkpoint.path.exists():
            save(checkpoint, processes)

    with monkeypatch.context() as patch:  # as if killed before the second checkpoint
        patch.setattr(ppo_output.Checkpoint, "save", save_first)
        train("killed")
    train("killed")

    killed = load(tmp_path / "killed", "checkpoint.pt")
    whole = load(tmp_path / "whole", "checkpoint.pt")
    for name in ("agent", "optimizer", "processes"):
        torch.testing.assert_close(killed[name], whole[name], rtol=0, atol=0)
    assert len(list((tmp_path / "killed").glob("events.out.tfevents.*"))) == 2
    found = scalars(tmp_path / "killed")
    expected = scalars(tmp_path / "whole")
    assert list(found["losses/value_loss"]) == [128, 256, 384, 512, 640]
    del found["charts/SPS"]
    del expected["charts/SPS"]
    assert found == expected


def constant_agent(*values):
    """An agent with these values, and equal logits for two actions."""
    return SimpleNamespace(
        get_value=lambda observation: torch.tensor(values),
        get_distribution=lambda observation: equal_logits(len(values)),
    )


def test_ppo_loss_equals_values_by_hand():
    # Two actions of probability 1/2 have ratios 1.5 and 0.5. Values are 1, returns 3.
    batch = {
        "observation": torch.zeros(2, 1),
        "action": torch.tensor([0, 1]),
        "logprob": torch.tensor([1 / 3, 1.0]).log(),
        "advantage": torch.tensor([1.0, -1.0]),
        "ret": torch.full((2,), 3.0),
    }
    args = ppo.Args(clip_coef=0.2, ent_coef=0.1, vf_coef=0.25, norm_adv=False)
    loss, stats = ppo.ppo_loss(constant_agent(1.0, 1.0), batch, args)
    ratio = torch.tensor([1.5, 0.5])
    entropy = torch.tensor(2.0).log()
    policy_loss = torch.tensor((-1.2 + 0.8) / 2)  # clipped in both rows
    expected = {
        "policy_loss": policy_loss,
        "value_loss": torch.tensor(2.0),
        "entropy": entropy,
        "old_approx_kl": -ratio.log().mean(),
        "approx_kl": (ratio - 1 - ratio.log()).mean(),
        "clipfrac": torch.tensor(1.0),
    }
    torch.testing.assert_close(stats, expected)
    torch.testing.assert_close(loss, policy_loss + 0.25 * 2 - 0.1 * entropy)


SMALL = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "update_epochs": 1}


def test_ppo_resume_with_other_arguments_is_refused(tmp_path):
    ppo.main(ppo.Args(**SMALL, out=tmp_path, resume=True))
    with pytest.raises(ValueError, match="gamma"):
        ppo.main(ppo.Args(**SMALL, out=tmp_path, resume=True, gamma=0.9))


def test_ppo_resume_from_a_file_of_something_else_is_refused_by_its_name(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=rf"--resume.*{path}"):
        ppo.main(ppo.Args(**SMALL, out=tmp_path, resume=True))


MOST_LINES = {
    "ppo": 420,
    "ppo_graph": 240,
    "dqn_graph": 250,
    "ppo_recurrent_graph": 250,
}


@pytest.mark.parametrize(("name", "most"), MOST_LINES.items())
def test_example_is_short(name, most):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most


@pytest.mark.full
def test_ppo_needs_no_other_file(tmp_path):
    shutil.copy(EXAMPLES / "ppo.py", tmp_path / "copied.py")
    code = (
        "import copied; copied.main(copied.Args('Pendulum-v1', num_envs=128, total_timesteps=99))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


OWN = """
import torchwrap
from torchwrap.envs.cartpole import CartPole

class Own(CartPole):
    def state_info(self, state, params=None):
        return {"is_success": state["theta"].abs() < 0.1}

torchwrap.register("Own-v0", Own, max_episode_steps=8)
"""


@pytest.mark.full
def test_ppo_takes_an_own_env_and_its_metrics(tmp_path, monkeypatch, registry):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = "--num-envs 4 --num-steps 16 --total-timesteps 128 --tensorboard"
    own = "--env-id own:Own-v0 --metrics is_success max --out"
    args = tyro.cli(ppo.Args, args=[*sizes.split(), *own.split(), str(tmp_path)])
    assert 0 <= ppo.main(args)["final_mean_is_success"] <= 1
    assert list(scalars(tmp_path)["charts/is_success"]) == [64, 128]
