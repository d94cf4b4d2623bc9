"""Stable-Baselines3's side: three VecEnv wrappers on the scripted env, and its tuned PPO."""

import importlib
import itertools
import time
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecMonitor, VecNormalize
from torch import nn

from . import atari as games
from . import loops, script
from .worker import Timed


class Script(VecEnv):
    def __init__(self, num_envs: int) -> None:
        self.script = script.NumpyScript(num_envs)
        self.render_mode = None
        super().__init__(num_envs, self.script.observation_space, self.script.action_space)

    def reset(self):
        self.script.reset(np.ones(self.num_envs, bool))
        return self.script.observation()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self):
        final, reward, terminated, truncated = self.script.step()
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in done.nonzero()[0]:
            infos[row] = {
                "terminal_observation": final[row],
                "TimeLimit.truncated": bool(~terminated[row]),
            }
        self.script.reset(done)
        return self.script.observation(), reward, done, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name, indices=None):
        return [getattr(self, attr_name)] * self.num_envs

    def set_attr(self, attr_name, value, indices=None) -> None:
        raise NotImplementedError

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


def scripted(num_envs: int, transforms: bool) -> Timed:
    env: VecEnv = Script(num_envs)
    if transforms:
        env = VecFrameStack(VecNormalize(VecMonitor(env)), 4)
    action = script.actions(num_envs).numpy()
    env.reset()
    env.unwrapped.script.elapsed[:] = script.elapsed(num_envs).numpy()
    return Timed(lambda: env.step(action))


def vec_env(space: str, num_envs: int, normalizes: bool) -> Timed:
    """A step of DummyVecEnv and Monitor over envs that do nothing."""
    venv: VecEnv = make_vec_env(script.STILL, num_envs, env_kwargs={"space": space})
    if normalizes:
        keys = ["a"] if space == "Dict" else None
        venv = VecNormalize(venv, norm_obs=space != "image", norm_obs_keys=keys)
    actions = script.actions(num_envs).numpy()
    venv.reset()
    return Timed(lambda: venv.step(actions), clock=time.process_time)


def ppo_loop(num_envs: int) -> dict[str, float]:
    """A step of SB3's PPO over DummyVecEnv and Monitor, with VecNormalize."""
    return loops.sb3(num_envs, VecNormalize(make_vec_env(loops.ENV_ID, num_envs, seed=0)))


def atari_games(num_envs: int) -> VecEnv:
    gymnasium.register_envs(importlib.import_module("ale_py"))
    id = f"{games.GAME}NoFrameskip-v4"
    return VecFrameStack(make_atari_env(id, num_envs, seed=0), 4)


def atari(num_envs: int) -> Timed:
    """A step of `AtariWrapper`, `VecFrameStack` and `Monitor`, with random actions."""
    venv = atari_games(num_envs)
    turns = itertools.cycle(np.random.default_rng(0).integers(4, size=(64, num_envs)))
    venv.reset()
    return Timed(lambda: venv.step(next(turns)), clock=time.process_time)


def atari_loop(script: str) -> dict[str, float]:
    """A step of a game in SB3's PPO or DQN with its CNN."""
    venv = atari_games(games.LOOP_SIZE)
    if script == "ppo":
        options = {
            "learning_rate": games.PPO["learning_rate"],
            "n_steps": games.PPO["num_steps"],
            "batch_size": games.LOOP_SIZE * games.PPO["num_steps"] // games.PPO["num_minibatches"],
            "n_epochs": games.PPO["update_epochs"],
            "clip_range": 0.1,
            "ent_coef": 0.01,
        }
        model: Any = PPO("CnnPolicy", venv, device="cpu", seed=0, **options)
    else:
        options = {**games.DQN, "train_freq": 4, "gradient_steps": games.LOOP_SIZE}
        options["target_update_interval"] = 1_000
        model = DQN("CnnPolicy", venv, device="cpu", seed=0, **options)
    return games.per_step(model.learn, games.NUM_STEPS[script])


class StopWhenSolved(BaseCallback):
    def _on_step(self) -> bool:
        latest = self.model.ep_info_buffer
        return len(latest) < 100 or np.mean([episode["r"] for episode in latest]) < 475


def linear(value: float):
    """A schedule that falls to zero."""
    return lambda remaining: remaining * value


WIDE_NETWORK = dict(
    log_std_init=-2,
    ortho_init=False,
    activation_fn=nn.ReLU,
    net_arch=dict(pi=[256, 256], vf=[256, 256]),
)
# Hyperparameters of rl-baselines3-zoo (hyperparams/ppo.yml, April 2026), those of MuJoCo for the v4
# or v2 of each env. What it leaves out are SB3's defaults.
ZOO = {
    "CartPole-v1": dict(
        n_envs=8,
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        learning_rate=linear(0.001),
        clip_range=linear(0.2),
    ),
    "Acrobot-v1": dict(normalize=True, n_envs=16, n_steps=256, gae_lambda=0.94, n_epochs=4),
    "MountainCar-v0": dict(normalize=True, n_envs=16, n_steps=16, gae_lambda=0.98, n_epochs=4),
    "MountainCarContinuous-v0": dict(
        normalize=True,
        n_steps=8,
        batch_size=8,  # 256 in the zoo, which SB3 cuts to the 8 steps of a rollout
        gamma=0.9999,
        learning_rate=7.77e-05,
        ent_coef=0.00429,
        clip_range=0.1,
        gae_lambda=0.9,
        max_grad_norm=5,
        vf_coef=0.19,
        use_sde=True,
        policy_kwargs=dict(log_std_init=-3.29, ortho_init=False),
    ),
    "Pendulum-v1": dict(
        n_envs=4,
        n_steps=1024,
        gamma=0.9,
        learning_rate=1e-3,
        use_sde=True,
        sde_sample_freq=4,
    ),
    "Hopper-v5": dict(
        normalize=True,
        n_steps=512,
        batch_size=32,
        gamma=0.999,
        learning_rate=9.80828e-05,
        ent_coef=0.00229519,
        clip_range=0.2,
        n_epochs=5,
        gae_lambda=0.99,
        max_grad_norm=0.7,
        vf_coef=0.835671,
        policy_kwargs=WIDE_NETWORK,
    ),
    "Walker2d-v5": dict(
        normalize=True,
        n_steps=512,
        batch_size=32,
        gamma=0.99,
        learning_rate=5.05041e-05,
        ent_coef=0.000585045,
        clip_range=0.1,
        n_epochs=20,
        gae_lambda=0.95,
        max_grad_norm=1,
        vf_coef=0.871923,
    ),
    "HalfCheetah-v5": dict(
        normalize=True,
        n_steps=512,
        batch_size=64,
        gamma=0.98,
        learning_rate=2.0633e-05,
        ent_coef=0.000401762,
        clip_range=0.1,
        n_epochs=20,
        gae_lambda=0.92,
        max_grad_norm=0.8,
        vf_coef=0.58096,
        policy_kwargs=WIDE_NETWORK,
    ),
    "InvertedPendulum-v5": dict(
        normalize=True,
        n_steps=32,
        batch_size=64,
        gamma=0.999,
        learning_rate=0.000222425,
        ent_coef=1.37976e-07,
        clip_range=0.4,
        n_epochs=5,
        gae_lambda=0.9,
        max_grad_norm=0.3,
        vf_coef=0.19816,
    ),
    "Ant-v5": dict(normalize=True),
    "Humanoid-v5": dict(
        normalize=True,
        n_steps=512,
        batch_size=256,
        gamma=0.95,
        learning_rate=3.56987e-05,
        ent_coef=0.00238306,
        clip_range=0.3,
        n_epochs=5,
        gae_lambda=0.9,
        max_grad_norm=2,
        vf_coef=0.431892,
        policy_kwargs=WIDE_NETWORK,
    ),
}


def zoo_model(id: str, seed: int) -> PPO:
    options = dict(ZOO[id])
    normalize = options.pop("normalize", False)
    env: VecEnv = make_vec_env(id, n_envs=options.pop("n_envs", 1), seed=seed)
    if normalize:
        env = VecNormalize(env, gamma=options.get("gamma", 0.99))
    return PPO("MlpPolicy", env, seed=seed, device="cpu", **options)


def solve_cartpole(seed: int, started: float) -> dict[str, Any]:
    """Trains until it is solved. `started` is the start of the process, in seconds since 1970."""
    model = zoo_model("CartPole-v1", seed)
    start = time.perf_counter()
    model.learn(100_000, callback=StopWhenSolved())
    seconds = time.perf_counter() - start
    result = {
        "env_steps_to_target": model.num_timesteps,
        "seconds_to_target": seconds,
        "wall_seconds_to_target": time.time() - started,
    }
    if model.num_timesteps >= 100_000:
        result = dict.fromkeys(result)
    return {**result, "steps_per_second": model.num_timesteps / seconds}


class Curve(BaseCallback):
    """Env steps and mean return of the latest 100 episodes, after each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        latest = self.model.ep_info_buffer
        if latest:
            mean = float(np.mean([episode["r"] for episode in latest]))
            self.points.append((self.num_timesteps, mean))


def learn(id: str, seed: int, num_steps: int) -> dict[str, Any]:
    curve = Curve()
    model = zoo_model(id, seed)
    start = time.perf_counter()
    model.learn(num_steps, callback=curve)
    seconds = time.perf_counter() - start
    return {
        "env_steps": model.num_timesteps,
        "wall_seconds": seconds,
        "final_mean_return": curve.points[-1][1] if curve.points else None,
        "curve": curve.points,
    }
