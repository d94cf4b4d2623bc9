import copy
import json

import pytest
import torch
import tyro
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from helpers import EXAMPLES, load_example
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import TensorDict

import torchwrap as tw
from torchwrap.testing import ScriptedEnv, check_env


@pytest.fixture(scope="module")
def ppo():
    threads = torch.get_num_threads()
    yield load_example("ppo")
    torch.set_num_threads(threads)


METRICS = """
    env backend num_envs processes device seed env_steps wall_seconds steps_per_second steps_per_second_steady compile_seconds
    target_return env_steps_to_target seconds_to_target final_mean_return eval_mean_return
"""
CHARTS = {
    f"charts/{name}" for name in ("episodic_return", "episodic_length", "learning_rate", "SPS")
}
LOSSES = {
    "value_loss",
    "policy_loss",
    "entropy",
    "old_approx_kl",
    "approx_kl",
    "clipfrac",
    "explained_variance",
}


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def test_ppo_learns_and_writes_its_results_and_the_scalars_of_cleanrl(ppo, tmp_path):
    args = ppo.Args(total_timesteps=20_480, seed=3, out=tmp_path, tensorboard=True)
    ppo.main(args)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics) >= set(METRICS.split())
    assert (metrics["backend"], metrics["env_steps"], metrics["seed"]) == ("torch", 20_480, 3)
    assert metrics["eval_mean_return"] > 100  # a random policy's is 22
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    fresh = ppo.make_env(args, 3)
    fresh.load_state_dict(checkpoint["env"])
    agent = ppo.Agent(fresh)
    agent.load_state_dict(checkpoint["agent"])
    torch.optim.Adam(agent.parameters()).load_state_dict(checkpoint["optimizer"])
    tw.rollout(fresh.eval(), agent.act, 2)
    found, steps = scalars(tmp_path), list(range(2048, 20_481, 2048))
    assert found.keys() == CHARTS | {f"losses/{name}" for name in LOSSES}
    assert all(list(values) == steps for values in found.values())
    rate = list(found["charts/learning_rate"].values())
    assert rate == pytest.approx([0.003 * (10 - number) / 10 for number in range(10)])
    assert (
        found["charts/episodic_return"] == found["charts/episodic_length"]
    )  # CartPole's reward is 1 a step
    assert all(8 < value <= 500 for value in found["charts/episodic_return"].values())
    assert all(value > 0 and value == int(value) for value in found["charts/SPS"].values())
    assert all(0 < value <= 0.6932 for value in found["losses/entropy"].values())  # log 2
    assert all(0 <= value <= 1 for value in found["losses/clipfrac"].values()) and any(
        found["losses/clipfrac"].values()
    )
    assert all(value > -1e-6 for value in found["losses/approx_kl"].values())
    assert all(value <= 1 for value in found["losses/explained_variance"].values())


def test_truncated_episodes_are_bootstrapped_from_their_final_observation_and_terminated_ones_not_at_all(
    ppo,
):
    # By hand: values are the observation, rewards 1, gamma 0.5, lambda 1. Row 0 is truncated and runs on, row 1 is terminated.
    class Agent:
        def get_value(self, observation):
            return observation

        def get_distribution(self, observation):
            return torch.distributions.Categorical(logits=torch.zeros(*observation.shape, 2))

    done, terminated = (
        torch.tensor(flags).unsqueeze(-1)
        for flags in ([[True, False]] * 2, [[False, False], [True, False]])
    )
    following = dict(
        observation=torch.tensor([[40.0, 2.0], [80.0, 4.0]]), reward=torch.ones(2, 2, 1)
    )
    value = torch.tensor([[10.0, 20.0], [30.0, 6.0]])
    data = dict(
        observation=value, action=torch.zeros(2, 2).long(), logprob=torch.zeros(2, 2), value=value
    )
    data["next"] = following | dict(terminated=terminated, done=done)
    root = TensorDict(dict(observation=torch.tensor([2.0, 4.0])), [2])
    atari, args = load_example("ppo_atari"), dict(gamma=0.5, gae_lambda=1.0)
    for batch in (
        ppo.make_batch(Agent(), data, ppo.Args(**args)),
        atari.make_batch(
            lambda frames: (None, frames), TensorDict(data, [2, 2]), root, atari.Args(**args)
        ),
    ):
        assert batch["advantage"].tolist() == [1 + 20 - 10, 1 + 1 - 20, 1 - 30, 1 + 2 - 6]
        assert batch["ret"].tolist() == [21, 2, 1, 3]


@pytest.mark.full
def test_ppo_atari_runs_and_writes_its_results(ppo, tmp_path, capsys):
    script = load_example("ppo_atari")
    short = dict(num_envs=2, num_steps=16, total_timesteps=64, num_minibatches=2, compile=False)
    metrics = script.main(script.Args(env_id="ALE/Breakout-v5", out=tmp_path, **short))
    dtype = "bfloat16" if metrics["bfloat16"] else "float32"
    assert f"small network in {dtype} on cpu" in capsys.readouterr().out
    assert metrics["env_steps"] == 64 and metrics["evaluation_return"] >= 0
    assert json.loads((tmp_path / "metrics.json").read_text())["network"] == "small"
    assert len(list((tmp_path / "videos").glob("*.mp4"))) > 0
    assert set(torch.load(tmp_path / "checkpoint.pt", weights_only=True)) == {"agent", "optimizer"}


def test_ppo_gae_equals_the_loop_from_the_last_step_to_the_first(ppo):
    for num_steps in (1, 2, 5, 32, 33):
        generator = torch.Generator().manual_seed(num_steps)
        delta = torch.randn(6, num_steps, generator=generator, dtype=torch.float64)
        decay = (
            0.95 * (torch.rand(6, num_steps, generator=generator) < 0.8).double()
        )  # 0 where an episode ends
        expected, following = torch.zeros_like(delta), 0
        for t in reversed(range(num_steps)):
            expected[:, t] = following = delta[:, t] + decay[:, t] * following
        torch.testing.assert_close(ppo.gae(delta, decay), expected)


def minibatches(agent, sizes=(12, 12, 8)):
    """A batch of the agent's own actions, and the rows of a few minibatches."""
    generator = torch.Generator().manual_seed(0)
    batch = dict(observation=torch.randn(32, agent.actor[0].in_features, generator=generator))
    with torch.no_grad():
        distribution = agent.get_distribution(batch["observation"])
        batch["action"] = distribution.sample()
        batch["logprob"] = distribution.log_prob(batch["action"])
    batch |= {
        name: 5 * torch.randn(32, generator=generator) for name in ("advantage", "value", "ret")
    }
    return batch, torch.randperm(32, generator=generator).split(sizes)


@pytest.mark.parametrize(("env", "max_grad_norm"), [("CartPole-v1", 1e9), ("Pendulum-v1", 0.5)])
def test_ppo_update_is_a_step_of_adam_on_clipped_gradients(ppo, env, max_grad_norm):
    args = ppo.Args(env_id=env, ent_coef=0.01, max_grad_norm=max_grad_norm)
    ours = ppo.Agent(ppo.make_env(args, 2))
    theirs = copy.deepcopy(ours)
    optimizers = [
        torch.optim.Adam(agent.parameters(), lr=torch.tensor(0.01), eps=1e-5)
        for agent in (ours, theirs)
    ]
    tensors, (batch, rows) = ppo.adam_tensors(optimizers[0]), minibatches(ours)
    for learning_rate in (0.01, 0.003):
        tensors["lr"].fill_(learning_rate)
        optimizers[1].param_groups[0]["lr"] = learning_rate
        for mb_inds in rows:
            stats = ppo.update(ours, tensors, batch, mb_inds, args)
            loss, expected = ppo.ppo_loss(
                theirs, {name: value[mb_inds] for name, value in batch.items()}, args
            )
            optimizers[1].zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm)
            assert (norm > max_grad_norm) == (max_grad_norm < 1)
            optimizers[1].step()
            torch.testing.assert_close(stats, expected)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(
        optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"]
    )


@pytest.mark.long
@pytest.mark.full
def test_ppo_compiled_learns_what_eager_mode_learns_with_minibatches_of_two_sizes(ppo, tmp_path):
    found = []
    for compiled in (False, True):
        small = dict(
            env_id="Pendulum-v1",
            backend="gymnasium",
            num_envs=4,
            num_steps=16,
            num_minibatches=3,
            update_epochs=2,
        )
        metrics = ppo.main(ppo.Args(**small, total_timesteps=192, compile=compiled, out=tmp_path))
        found.append(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["agent"])
        assert (
            metrics["steps_per_second_steady"] > 0 and (metrics["compile_seconds"] > 0) == compiled
        )
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_ppo_resumed_from_a_checkpoint_ends_in_the_same_state_with_each_step_once(
    ppo, tmp_path, monkeypatch
):
    args = dict(num_envs=4, num_steps=32, total_timesteps=640, save_every=2, tensorboard=True)
    ppo.main(ppo.Args(**args, out=tmp_path / "whole"))
    with (
        monkeypatch.context() as patch
    ):  # it leaves the checkpoint of its second iteration, as if killed later
        save = ppo.save
        patch.setattr(
            ppo, "save", lambda path, state: save(path, state) if state["iteration"] == 2 else None
        )
        ppo.main(ppo.Args(**args, out=tmp_path / "killed"))
    ppo.main(ppo.Args(**args, out=tmp_path / "killed", resume=True))
    ends = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("killed", "whole")
    ]
    for name in ("agent", "optimizer", "processes"):
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=0)
    assert len(list((tmp_path / "killed").glob("events.out.tfevents.*"))) == 2
    found, expected = (scalars(tmp_path / name) for name in ("killed", "whole"))
    events = EventAccumulator(str(tmp_path / "killed")).Reload().Scalars("losses/value_loss")
    assert [event.step for event in events] == [128, 256, 384, 512, 640]
    assert {**found, "charts/SPS": None} == {**expected, "charts/SPS": None}


class Says:
    """An agent with these values and equal logits for two actions."""

    def __init__(self, *values):
        self.values = torch.tensor(values)

    def get_value(self, observation):
        return self.values

    def get_distribution(self, observation):
        return torch.distributions.Categorical(logits=torch.zeros(len(self.values), 2))


def test_ppo_loss_by_hand_clips_ratios_and_reports_cleanrl_losses(ppo):
    # Two actions of probability 1/2 whose old probabilities make the ratios 1.5 and 0.5; values 1, returns 3.
    batch = dict(
        observation=torch.zeros(2, 1),
        action=torch.tensor([0, 1]),
        logprob=torch.tensor([1 / 3, 1.0]).log(),
    )
    batch |= dict(advantage=torch.tensor([1.0, -1.0]), ret=torch.full((2,), 3.0))
    args = ppo.Args(clip_coef=0.2, ent_coef=0.1, vf_coef=0.25, norm_adv=False)
    loss, stats = ppo.ppo_loss(Says(1.0, 1.0), TensorDict(batch, [2]), args)
    ratio, entropy = torch.tensor([1.5, 0.5]), torch.tensor(2.0).log()
    expected = {
        "policy_loss": torch.tensor(
            (-1.2 + 0.8) / 2
        ),  # the clipped objective, the worse one in both rows
        "value_loss": torch.tensor(2.0),
        "entropy": entropy,
        "old_approx_kl": -ratio.log().mean(),
        "approx_kl": (ratio - 1 - ratio.log()).mean(),
        "clipfrac": torch.tensor(1.0),
    }
    torch.testing.assert_close(stats, expected)
    torch.testing.assert_close(loss, expected["policy_loss"] + 0.25 * 2 - 0.1 * entropy)


def test_ppo_loss_of_values_that_move_further_than_clip_coef_is_the_worse_one_of_both_if_clip_vloss(
    ppo,
):
    batch = dict(
        observation=torch.zeros(3, 1),
        action=torch.tensor([0, 1, 0]),
        logprob=torch.full((3,), 0.5).log(),
    )
    batch |= dict(
        advantage=torch.tensor([1.0, -1.0, 0.0]),
        value=torch.full((3,), 0.5),
        ret=torch.tensor([3.0, 0.5, 3.0]),
    )
    # Away from 0.5 by 0.2 at most: 0.7, 0.7 and 0.6. In the second row the value itself is further away from the return.
    for clip, squares in ((True, [2.3**2, 0.5**2, 2.4**2]), (False, [2.0**2, 0.5**2, 2.4**2])):
        args = ppo.Args(clip_coef=0.2, clip_vloss=clip, norm_adv=False)
        stats = ppo.ppo_loss(Says(1.0, 1.0, 0.6), TensorDict(batch, [3]), args)[1]
        torch.testing.assert_close(stats["value_loss"], 0.5 * torch.tensor(squares).mean())


CLEANRL = {
    **{
        "--env-id": "Acrobot-v1",
        "--seed": 7,
        "--total-timesteps": 11,
        "--learning-rate": 0.25,
        "--num-envs": 3,
    },
    **{
        "--num-steps": 5,
        "--gamma": 0.5,
        "--gae-lambda": 0.75,
        "--num-minibatches": 6,
        "--update-epochs": 8,
    },
    **{
        "--clip-coef": 0.1,
        "--ent-coef": 0.01,
        "--vf-coef": 0.3,
        "--max-grad-norm": 0.4,
        "--target-kl": 0.02,
    },
}


def test_ppo_flags_have_cleanrl_names_and_presets_its_defaults(ppo):
    args = tyro.cli(
        ppo.Args, args=[word for flag, value in CLEANRL.items() for word in (flag, str(value))]
    )
    assert {flag: getattr(args, flag[2:].replace("-", "_")) for flag in CLEANRL} == CLEANRL
    args = tyro.cli(ppo.Args, args=["--no-anneal-lr", "--no-norm-adv", "--tensorboard"])
    assert (args.anneal_lr, args.norm_adv, args.tensorboard) == (False, False, True)
    assert (ppo.Args().anneal_lr, ppo.Args().norm_adv, ppo.Args().tensorboard) == (
        True,
        True,
        False,
    )
    rows = list(ppo.PRESETS.values())
    assert all(row.keys() == rows[0].keys() for row in rows) and all(
        getattr(ppo.Args(), name) is None for name in rows[0]
    )
    assert set(tw.registration.NATIVE) - {"CartPole-v0"} < set(ppo.PRESETS)
    # The defaults of ppo_continuous_action.py, as its documentation lists them.
    args = {**vars(ppo.Args()), **ppo.PRESETS["any other env with continuous actions"]}
    cleanrl = dict(
        total_timesteps=1_000_000,
        learning_rate=3e-4,
        num_envs=1,
        num_steps=2048,
        anneal_lr=True,
        gamma=0.99,
    )
    cleanrl |= dict(
        gae_lambda=0.95,
        num_minibatches=32,
        update_epochs=10,
        norm_adv=True,
        clip_coef=0.2,
        clip_vloss=True,
    )
    cleanrl |= dict(ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, target_kl=None)
    assert {name: args[name] for name in cleanrl} == cleanrl


def test_ppo_resume_with_other_arguments_or_a_simulator_on_the_host_is_refused(ppo, tmp_path):
    small = dict(num_envs=4, num_steps=8, total_timesteps=64, update_epochs=1, out=tmp_path)
    ppo.main(ppo.Args(**small))
    with pytest.raises(
        ValueError,
        match=r"--resume needs the arguments of the run in .*, which had \{'gamma': '0.98'\}",
    ):
        ppo.main(ppo.Args(**small, gamma=0.9, resume=True))
    with pytest.raises(
        ValueError, match="--resume needs an env of torchwrap's own, but got <FlattenObservation"
    ):
        ppo.main(ppo.Args(**small, backend="gymnasium", resume=True))


class Matching(FuncEnv):
    """A Dict observation says which of 3 and which of 2 parts of an action are rewarded."""

    observation_space = spaces.Dict(first=spaces.Discrete(3), second=spaces.Box(0, 1, (1,)))
    action_space = spaces.MultiDiscrete([3, 2])

    def initial(self, rng, params=None):
        return {
            "first": tw.random.integers(rng, 3),
            "second": tw.random.integers(rng.fold_in(1), 2),
        }

    def transition(self, state, action, rng, params=None):
        return self.initial(rng)

    def observation(self, state, rng, params=None):
        return {"first": state["first"], "second": state["second"].float().unsqueeze(0)}

    def reward(self, state, action, next_state, rng, params=None):
        return ((action[0] == state["first"]) & (action[1] == state["second"])).float()

    def terminal(self, state, rng, params=None):
        return state["first"] < 0


def test_ppo_actions_of_one_choice_in_a_multidiscrete_space_have_its_shape(ppo):
    for space, shape in (
        (spaces.MultiDiscrete([3]), (4, 1)),
        (spaces.MultiDiscrete([3, 2]), (4, 2)),
        (spaces.Discrete(3), (4,)),
    ):
        env = ScriptedEnv(4, (2,), action_space=space)
        assert env.step(ppo.Agent(env).act(env.reset(seed=0)))[0]["action"].shape == shape


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ppo_learns_multidiscrete_actions_from_a_dict(ppo, registry, tmp_path, compiled):
    tw.register("test/Matching-v0", Matching, max_episode_steps=16)
    sizes = dict(
        num_envs=32, num_steps=64, total_timesteps=20_480, learning_rate=3e-3, num_minibatches=4
    )
    metrics = ppo.main(
        ppo.Args(env_id="test/Matching-v0", seed=1, compile=compiled, out=tmp_path, **sizes)
    )
    assert metrics["final_mean_return"] > 10  # of 16; at random 2.7


@pytest.mark.full
def test_custom_env_is_short_and_trained_by_ppo(ppo, tmp_path):
    custom = load_example("custom_env")
    assert len((EXAMPLES / "custom_env.py").read_text().splitlines()) < 50
    small = dict(num_envs=4, num_steps=32, total_timesteps=512, num_minibatches=2)
    ppo.main(ppo.Args(env_id="PointMass", **small, out=tmp_path), custom.make)
    assert json.loads((tmp_path / "metrics.json").read_text())["target_return"] is None
    assert (tmp_path / "learning_curve.png").exists()


@pytest.mark.full
def test_grid_world_keeps_the_contract():
    func_env = load_example("grid_world").KeyAndDoor()
    check_env(
        lambda num_envs, **more: tw.FunctionalEnv(func_env, num_envs, max_episode_steps=9, **more)
    )


def test_grid_world_moves_and_renders_its_state():
    env = tw.FunctionalEnv(load_example("grid_world").KeyAndDoor(), 2)
    td = env.reset(seed=0)
    walls = torch.ones(8, 8, dtype=torch.bool)
    walls[1, 1:-1] = (
        False  # one corridor: agent, key, nothing, door in the first world; door next to the agent in the second
    )
    for name, cells in {"agent": (9, 10), "key": (10, 13), "door": (12, 9)}.items():
        env.state[name].copy_(torch.tensor(cells))
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
    assert [step["terminated"].flatten().tolist() for step in seen] == [[False, False]] * 3 + [
        [True, False]
    ]
    final = seen[-1]["observation"]
    assert final["has_key"].tolist() == [1, 0] and final["pixels"].shape == (2, 48, 48, 3)
    assert final["pixels"][0, 6, 24].tolist() == [220, 30, 30] and final["pixels"][
        0, 6, 12
    ].tolist() == [0, 0, 0]
    assert final["pixels"][1, 6, 30].tolist() == [255, 220, 0] and final["pixels"][
        1, 0, 0
    ].tolist() == [90, 90, 90]
