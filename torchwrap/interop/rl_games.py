"""rl_games: a torchwrap env as an `IVecEnv`, and its registration for rl_games' `Runner`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from tensordict import TensorDict
from torch import Tensor

from torchwrap._core.errors import refusal
from torchwrap.env import Env, take
from torchwrap.interop import _trainers
from torchwrap.statistics import sync_statistics


def register(name: str, make_env: Callable[..., Env]) -> None:
    """Registers an env for rl_games' `Runner`, as `env_name` of its config.

    Checkpoints contain `env.state_dict()`, running statistics of transforms, and under "params" the
    `params` of functions or a simulator's levels. Restoring a checkpoint loads the statistics; the
    next reset in train mode sets the `params`, if they are of as many envs. Those of rl_games' SAC
    have no place for it: save it yourself. With `multi_gpu`, statistics are merged at the start of
    each epoch.

    Args:
        name: replaces an earlier registration under this name.
        make_env: called with the number of envs, and with the config's `env_config` as keyword
            arguments, except for the "seed", which seeds the first reset. Players take one env, in
            eval mode. With `player: {use_vecenv: True}` in the config, they take several, in train
            mode: the player's own `env_config` can tell `make_env` to call `eval()`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> register("scripted", ScriptedEnv)
    >>> env = vecenv.create_vec_env("scripted", num_actors=2, seed=0, observation_shape=(1,))
    >>> env.reset().tolist()
    [[0.0], [1000.0]]
    """
    if isinstance(make_env, Env) or not callable(make_env):
        must = "make_env must be a function that makes an env"
        raise TypeError(refusal("register", must, repr(make_env)))

    def create(
        config_name: str, num_actors: int, seed: int | None = None, **env_config: Any
    ) -> RlGamesVecEnv:
        venv = to_rl_games(make_env(num_actors, **env_config), seed=seed)
        if venv.env.num_envs != num_actors:
            must = f"make_env({num_actors}) must make {num_actors} envs"
            raise ValueError(refusal("register", must, venv.env))
        return venv

    vecenv.register(name, create)

    def create_for_player(**env_config: Any) -> RlGamesVecEnv:
        venv = create(name, 1, **env_config)
        venv.env.eval()
        return venv

    configuration = {"vecenv_type": name, "env_creator": create_for_player}
    env_configurations.register(name, configuration)


def to_rl_games(env: Env, *, seed: int | None = None) -> RlGamesVecEnv:
    """Wraps an env for rl_games. To train with its `Runner`, call `register` instead.

    Tensors are passed on without copies. The config's `device` has to be the env's. At a time-out,
    rl_games bootstraps from the observation acted in: it does not read
    `infos["final_observation"]`.

    Args:
        env: its actions are Discrete from 0 on, or a bounded float32 Box with one dimension, to
            which rl_games rescales them. Its observations are a Box of float32, or of uint8, which
            rl_games divides by 255; or a Dict with two such Boxes, "policy" (or "actor") and
            "critic", or "obs" and "states". The second is for a central value network; others are
            left out.
        seed: for the first reset. None draws one from the operating system.

    Returns:
        The `IVecEnv`. Its `step(actions)`, `(num_envs,)` int64 or `(num_envs, n)` float32, returns
        the observations to act on next, rewards `(num_envs,)` float32, dones `(num_envs,)` bool,
        and `infos` with "time_outs", `(num_envs,)` bool: truncated and not terminated;
        "final_observation", the true successor; and, if there are any, "episode" with the numbers
        `(num_envs,)` of the env's info, those that a simulator of `from_functions` logs, and those
        of `transforms.RecordEpisodeStatistics` for the episodes that ended. rl_games'
        `IsaacAlgoObserver` logs their means.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = to_rl_games(ScriptedEnv(2, (1,), episode_lengths=1, ending="truncated"))
    >>> obs = env.reset()
    >>> obs, rewards, dones, infos = env.step(env.env.sample_action())
    >>> obs[0], infos["final_observation"][0], dones, infos["time_outs"]
    (tensor([0.]), tensor([1.]), tensor([True, True]), tensor([True, True]))
    """
    return RlGamesVecEnv(env, seed)


Observations: TypeAlias = Tensor | dict[str, Tensor]
StepResult: TypeAlias = tuple[Observations, Tensor, Tensor, dict[str, Any]]


class RlGamesVecEnv(IVecEnv):
    """A torchwrap env, the attribute `env`, as an `IVecEnv`; made by `to_rl_games`."""

    def __init__(self, env: Env, seed: int | None) -> None:
        self.env = _trainers.require_env("to_rl_games", env)
        observations = env.single_observation_space
        parts: dict[str, Any] = _trainers.actor_and_critic(observations)
        self._keys = list(parts)
        self.observation_space, self.state_space = [*parts.values()] or [observations, None]
        for part in parts.values() or [observations]:
            _check_observation(part)
        self.action_space = env.single_action_space
        _check_action(self.action_space)
        self._next_seed = seed
        self._params = _trainers.Params(env)
        self._metric_keys = _trainers.metric_keys(env)
        nothing = torch.zeros(0, device=env.device)
        self._absent: dict[str, Tensor] = dict.fromkeys(self._metric_keys, nothing)

    def reset(self) -> Observations:
        self._params.resume()
        td = self.env.reset(seed=self._next_seed)
        self._next_seed = None
        return self._observations(td)

    def step(self, actions: Tensor) -> StepResult:
        # rl_games' player passes the action of a single env without its dimension.
        batch_shape = (self.env.num_envs, *(self.action_space.shape or ()))
        successor, td = take(self.env, actions.reshape(batch_shape))
        time_outs = successor["truncated"] & ~successor["terminated"]
        infos = {
            "time_outs": time_outs.squeeze(-1),
            "final_observation": self._observations(successor),
        }
        numbers = _trainers.logs(self.env, self._metric_keys, successor)
        if numbers:
            # rl_games needs each name in every step; empty tensors do not change its means.
            infos["episode"] = {**self._absent, **numbers}
            self._absent |= {name: numbers[name][:0] for name in numbers}
        rewards = successor["reward"].squeeze(-1)
        dones = successor["done"].squeeze(-1)
        return self._observations(td), rewards, dones, infos

    def _observations(self, td: TensorDict) -> Observations:
        observation: Any = td["observation"]
        if self._keys:
            parts = [observation[key] for key in self._keys]
            observation = dict(zip(("obs", "states"), parts, strict=True))
        return observation  # type: ignore[no-any-return]

    def seed(self, seed: int) -> None:
        """Seeds the next reset."""
        self._next_seed = seed

    def get_env_info(self) -> dict[str, Space[Any]]:
        info = {"observation_space": self.observation_space, "action_space": self.action_space}
        if self.state_space is not None:
            info["state_space"] = self.state_space
        return info

    def get_env_state(self) -> dict[str, Any]:
        return {**self.env.state_dict(), "params": self._params.state_dict()}

    def set_env_state(self, env_state: dict[str, Any] | None) -> None:
        if env_state is not None:
            env_state = dict(env_state)
            self._params.load_state_dict(env_state.pop("params", {}))
        _trainers.load_statistics("to_rl_games", self.env, "env_state", env_state)

    def set_train_info(self, env_frames: int, agent: Any) -> None:
        """Merges the statistics of several ranks. Agents call it at the start of each epoch."""
        if agent.multi_gpu:
            sync_statistics(self.env)


def _check_observation(space: Space[Any]) -> None:
    if not isinstance(space, Box) or not space.shape:
        raise ValueError(
            refusal(
                "to_rl_games",
                "observations must be a Box with a dimension, or a Dict of actor and critic",
                space,
                'Name them "policy" and "critic", or put transforms.FlattenObservation on the env',
            )
        )
    if space.dtype not in (np.float32, np.uint8):
        raise ValueError(
            refusal(
                "to_rl_games",
                "observations must be float32 or uint8",
                space,
                'Put transforms.DtypeObservation("float32") on the env',
            )
        )


def _check_action(space: Space[Any]) -> None:
    _trainers.starts_at_zero("to_rl_games", space)
    if isinstance(space, Discrete):
        return
    is_bounded = isinstance(space, Box) and space.is_bounded()
    if not is_bounded or not _trainers.is_float_box(space, 1):
        raise ValueError(
            refusal(
                "to_rl_games",
                "actions must be Discrete or a bounded float32 Box with one dimension",
                space,
                "Leave out transforms.ClipAction, or put transforms.TransformAction on the env",
            )
        )
