"""Whole jobs, written from the README, the guides and the docstrings alone.

Comments compare the numbers of lines. Those of Isaac Lab are written from memory and were not run.
"""

from __future__ import annotations

import json
import logging
import re

import numpy as np
import pytest
import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete
from helpers import EXAMPLES, assert_same, buffers, load_example
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecFrameStack
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.sb3 import to_sb3
from torchwrap.testing import ScriptedEnv


class Drift(FuncEnv):
    """The README's, with a mass of each episode, a level of each env, a reset option, and infos."""

    observation_space, action_space = Box(-9, 9, (1,)), Box(-1, 1, (1,))

    def initial(self, rng, params=None, low=0.0):
        level = 1.0 if params is None else params["level"]
        return {
            "x": low + level * tw.random.uniform(rng, 0, 1, (1,)),
            "mass": tw.random.uniform(rng.fold_in(1), 1, 2),
        }

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + action / state["mass"], "mass": state["mass"]}

    def observation(self, state, rng, params=None):
        return state["x"]

    def reward(self, state, action, next_state, rng, params=None):
        return -next_state["x"].abs().sum()

    def terminal(self, state, rng, params=None):
        return (state["x"].abs() > 3).all()

    def state_info(self, state, params=None):
        return {"is_success": (state["x"].abs() < 0.5).all(), "distance": state["x"].abs().sum()}


@pytest.fixture(autouse=True)
def registered(registry):
    tw.register("Drift-v0", Drift, max_episode_steps=5)


# 12 lines, as far as `fresh`. Gymnasium: 18, with a wrapper of one's own, and statistics of each env by itself.
def test_start_from_given_states():
    stack = T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.FrameStackObservation(3)
    env = tw.compile(tw.TransformedEnv(tw.make("Drift-v0", 4), *stack), backend="eager")
    env.reset(seed=0)
    half, given = torch.arange(4) < 2, torch.tensor([[1.0], [1.5], [0.0], [0.0]])
    td = env.reset(mask=half, options={"state": {"x": given}})
    snapshot = env.snapshot()
    for _ in range(3):
        transition, _ = env.step(torch.zeros(4, 1))
    restored = env.restore(snapshot, mask=half)
    state = env.unwrapped.state
    state["x"][2:] = 0.7
    fresh = env.reset(mask=~half, options={"state": state})

    assert transition["next", "episode_return"][:2].flatten().tolist() == [-3, -4.5]
    root, restored, fresh = (each["observation"] for each in (td, restored, fresh))
    assert (
        (root == root[:, :1]).all()
        and (restored[:2] == root[:2]).all()
        and (fresh[:2] == root[:2]).all()
    )
    assert (
        state["x"].flatten().tolist() == pytest.approx([1, 1.5, 0.7, 0.7])
        and fresh[2:].unique().numel() == 1
    )
    assert stack[1].statistics.count.tolist() == [4 + 2 + 3 * 4 + 2]  # each observation once
    before = buffers(env)
    for options in (
        {"state": {"x": given[:2]}},
        {"low": "a"},
        {"low": torch.zeros(4)},
        {"lower": 1},
    ):
        with pytest.raises(ValueError, match=r"Drift-v0\.reset needs"):
            env.reset(options=options)
    assert_same(buffers(env), before)


def test_reset_options_through_gymnasium():
    envs = tw.to_gymnasium(tw.make("Drift-v0", 4), autoreset_mode="Disabled")
    before, _ = envs.reset(seed=0)
    after, _ = envs.reset(
        options={"reset_mask": np.arange(4) < 2, "state": {"x": np.full((4, 1), 1.5, np.float32)}}
    )
    assert after.tolist() == [[1.5], [1.5], *before[2:].tolist()]
    for mode in ("sync", "async"):
        with tw.make("CartPole-v1", 2, backend="gymnasium", vectorization_mode=mode) as env:
            env.reset(seed=0)
            for row, low in enumerate((0.01, 0.02)):
                td = env.reset(mask=torch.arange(2) == row, options={"low": low, "high": low})
            assert td["observation"].numpy() == pytest.approx(np.tile([[0.01], [0.02]], 4))


# 1 line each. Gymnasium: 1 each. Isaac Lab: an EventTerm of about 8, a CurriculumTerm of 4 and its function.
def test_parameters_and_curricula():
    levels = torch.linspace(1, 2, 3)
    env = tw.compile(tw.make("Drift-v0", 3, params={"level": levels}), backend="eager")
    first, mass = env.reset(seed=0)["observation"], env.state["mass"].clone()
    env.set_wrapper_attr("level", 2.5)
    second = env.reset(seed=0)["observation"]
    again = tw.make(env.spec).reset(seed=0)["observation"]
    fewer = tw.make(env.spec, num_envs=2, params={"level": levels[:2]}).reset(seed=0)["observation"]

    torch.testing.assert_close(second, first / levels[:, None] * 2.5)
    assert (
        (again == first).all() and (fewer == first[:2]).all() and (env.state["mass"] == mass).all()
    )
    assert (
        env.reset() is not None
        and (env.state["mass"] != mass).all()
        and mass.clamp(1, 2).equal(mass)
    )


# 1 line. Stable-Baselines3: `info_keywords` of Monitor for the end, and a callback of 6 lines for the rest.
def test_metrics_by_episode(tmp_path):
    metrics = {"once": ("is_success", "max"), "at_end": ("is_success", "last"), "distance": "mean"}
    envs = [
        tw.TransformedEnv(tw.make("Drift-v0", 4), T.RecordEpisodeStatistics(metrics=metrics))
        for _ in range(3)
    ]
    results = tw.evaluate(envs[0], None, 8, seed=0)
    data, _ = tw.Collector(envs[1], None, 20)(envs[1].reset(seed=0))
    model = PPO("MlpPolicy", to_sb3(envs[2]), n_steps=16, n_epochs=1, batch_size=64, device="cpu")
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(64).logger.close()

    positions, running, ended = (
        data["next", "observation"].abs()[..., 0],
        [[] for _ in range(4)],
        [],
    )
    for step, row in np.ndindex(20, 4):
        running[row].append(positions[row, step].item())
        if data["next", "done"][row, step]:
            ended.append((min(running[row]) < 0.5, running[row][-1] < 0.5, np.mean(running[row])))
            running[row] = []
    for name, expected in zip(metrics, np.float64(ended).T, strict=True):
        assert (
            envs[1].transforms[0].metric_queues[name].tolist() == pytest.approx(expected)
            and len(ended) >= 16
        )
        assert results[f"episode_{name}"].shape == (8,) and name in model.ep_info_buffer[0]
    assert "rollout/success_rate" in (tmp_path / "progress.csv").read_text()


# 2 lines. Stable-Baselines3: 1 for `VecNormalize(venv, norm_obs_keys=["stock"])`, and a VecEnvWrapper of 8 that clips.
def test_keys_of_a_dict():
    def make():
        space = Dict(day=Discrete(7), joints=Box(-np.inf, np.inf, (2,)), stock=Box(0, 2000, (2,)))
        return ScriptedEnv(
            4, episode_lengths=None, observation_space=space, action_space=Discrete(2)
        )

    keys = {"stock": [T.NormalizeObservation()], "joints": [T.ClipObservation(-1010, 1010)]}
    env, raw = tw.TransformedEnv(make(), T.ObservationKeys(keys)), make()
    flat = tw.TransformedEnv(make(), T.FlattenObservation(), T.DtypeObservation(np.float32))
    seen, action = [], torch.zeros(4, dtype=torch.int64)
    found, vector, other = (one.reset(seed=0)["observation"] for one in (env, flat, raw))
    for _ in range(4):
        seen.append(other["stock"])
        stock = torch.cat(seen).double().numpy()
        expected = (stock[-4:] - stock.mean(0)) / np.sqrt(stock.var(0) + 1e-8)
        assert (
            found["stock"].numpy() == pytest.approx(expected, abs=1e-4)
            and (found["day"] == other["day"]).all()
        )
        assert (
            found["joints"] == other["joints"].clamp(-1010, 1010)
        ).all() and vector.dtype == torch.float32
        assert (
            vector == torch.cat([torch.eye(7)[other["day"]], other["joints"], other["stock"]], 1)
        ).all()
        found, vector, other = (one.step(action)[1]["observation"] for one in (env, flat, raw))


# 1 line each, 6 of histories. Isaac Lab: DelayedPDActuatorCfg is 1, the ObsGroups are 11. Gymnasium has few.
def test_delays_noise_and_histories():
    pushes = torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    for delay, padding in ((2, 0.0), (torch.arange(4), 0.5), ((0, 3), 0.5)):
        delayed = T.DelayAction(delay, padding_type=np.float32([padding]))
        env = tw.TransformedEnv(
            tw.make("Drift-v0", 4), delayed, T.AddNoise(0.1, in_eval=False)
        ).eval()
        positions, mass = [env.reset(seed=0)["observation"]], env.unwrapped.state["mass"][:, None]
        positions += [env.step(push.expand(4, 1))[0]["next", "observation"] for push in pushes]
        for row, steps in enumerate(delayed.delays.tolist()):
            expected = ([padding] * steps + pushes.flatten().tolist())[:4]
            assert (mass * torch.cat(positions, 1).diff())[row].tolist() == pytest.approx(
                expected, abs=1e-5
            )
        assert (env.train().reset(seed=0)["observation"] != positions[0]).all()

    names = {"T": T, "tw": tw, "np": np, "Box": Box}
    exec(
        re.search(
            r"```python\n(def term.*?)```",
            (EXAMPLES / "guides" / "transforms.md").read_text(),
            re.DOTALL,
        )[1],
        names,
    )  # it is ours
    env, raw = names["env"].eval(), tw.make("Pendulum-v1", 64)
    found, frames = env.reset(seed=0)["observation"], [raw.reset(seed=0)["observation"]] * 5
    for _ in range(6):
        parts = [frame[:, :2] for frame in frames] + [frame[:, 2:] for frame in frames[-2:]]
        assert (found["policy"] == torch.cat(parts, 1)).all() and (
            found["critic"] == frames[-1]
        ).all()
        action = raw.sample_action()
        found, frames = (
            env.step(action)[1]["observation"],
            [*frames[1:], raw.step(action)[1]["observation"]],
        )


# 1 line; Stable-Baselines3: 1, `VecFrameStack(venv, 4)`, whose frames `test_history.py` compares.
def test_images_for_a_cnn():
    env = ScriptedEnv(
        2, observation_space=Box(0, 255, (36, 36, 1), np.uint8), action_space=Discrete(2)
    )
    venv = to_sb3(tw.TransformedEnv(env, T.FrameStackObservation(4, padding_type="zero", axis=-1)))
    assert venv.observation_space == VecFrameStack(to_sb3(env), 4).observation_space
    PPO("CnnPolicy", venv, n_steps=4, batch_size=8, n_epochs=1, device="cpu").learn(8)


# 1 line, `python examples/ppo.py --env-id own:Own-v0 --metrics is_success max`; Stable-Baselines3: 1.
def test_ppo_of_an_own_env(tmp_path, monkeypatch):
    code = "import torchwrap, test_jobs\ntorchwrap.register('Own-v0', test_jobs.Drift, max_episode_steps=8)"
    (tmp_path / "own.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    ppo, threads = load_example("ppo"), torch.get_num_threads()
    small = ppo.Args(
        num_envs=4,
        num_steps=16,
        total_timesteps=128,
        out=tmp_path,
        tensorboard=True,
        num_threads=threads,
    )
    ppo.main(
        tyro.cli(
            ppo.Args,
            args=["--env-id", "own:Own-v0", "--metrics", "is_success", "max"],
            default=small,
        )
    )
    assert 0 <= json.loads((tmp_path / "metrics.json").read_text())["final_mean_is_success"] <= 1
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("charts/is_success")
    assert [event.step for event in events] == [64, 128] and all(
        0 <= event.value <= 1 for event in events
    )


# 1 line, `logging.basicConfig(level=logging.INFO)`; PyTorch: 1, TORCH_LOGS="inductor", which names no env.
def test_progress_of_compilation(caplog):
    env = tw.TransformedEnv(ScriptedEnv(2), T.ClipObservation(-1, 1))
    with caplog.at_level(logging.INFO, "torchwrap"):
        tw.compile(env, backend="eager").eval().reset(seed=0)
        env.step(env.sample_action())  # in another mode, by another graph
    first, second, *later = [
        record.getMessage() for record in caplog.records if record.name == "torchwrap"
    ]
    assert (
        re.fullmatch(r"compiling the step of <ClipObservation.*<ScriptedEnv.*>>", first)
        and len(later) == 2
    )
    assert re.fullmatch(r"compiled the step in \d+\.\d s", second)
