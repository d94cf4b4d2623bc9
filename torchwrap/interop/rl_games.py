"""rl_games: a torchwrap env as an `IVecEnv`, and its registration for rl_games' `Runner`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.interop import _checks


def register(name: str, make_env: Callable[..., Env]) -> None:
    """Registers an env for rl_games' `Runner`, as `env_name` of its config.

    Checkpoints contain `env.state_dict()`, what the transforms have learned. Restoring a checkpoint loads it.

    Args:
        name: replaces an earlier registration under this name.
        make_env: called with the number of envs, and with the config's `env_config` as keyword arguments, except for the
            "seed", which seeds the first reset. Players take one env, unless the config has `player: {use_vecenv: True}`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> register("scripted", ScriptedEnv)
    >>> env = vecenv.create_vec_env("scripted", num_actors=2, seed=0, observation_shape=(1,))
    >>> env.reset().tolist()
    [[0.0], [1000.0]]
    """
    if isinstance(make_env, Env) or not callable(make_env):
        raise TypeError(f"register needs a function that makes an env, but got {make_env!r}.")

    def create(
        config_name: str, num_actors: int, seed: int | None = None, **env_config: Any
    ) -> RlGamesVecEnv:
        env = to_rl_games(make_env(num_actors, **env_config), seed=seed)
        if env.env.num_envs != num_actors:
            raise ValueError(
                f"register needs make_env({num_actors}) to make {num_actors} envs, but got {env.env}."
            )
        return env

    vecenv.register(name, create)
    env_configurations.register(
        name,
        {"vecenv_type": name, "env_creator": lambda **env_config: create(name, 1, **env_config)},
    )


def to_rl_games(env: Env, *, seed: int | None = None) -> RlGamesVecEnv:
    """Wraps an env for rl_games. Its `Runner` takes a function that makes one: see `register`.

    Tensors are passed on without copies. The config's `device` has to be the env's. At a time-out, rl_games bootstraps from
    the observation acted in: it does not read `infos["final_observation"]`.

    Args:
        env: its actions are Discrete from 0 on, or a bounded float32 Box with one dimension, to which rl_games rescales them.
            Its observations are a Box of float32, or of uint8, which rl_games divides by 255; or a Dict of two such Boxes,
            "obs" and "states". The states are for a central value network.
        seed: for the first reset. None draws one from the operating system.

    Returns:
        The `IVecEnv`. Its `step(actions)`, `(num_envs,)` int64 or `(num_envs, n)` float32, returns the observations to act on
        next, rewards `(num_envs,)` float32, dones `(num_envs,)` bool, and `infos` with "time_outs", `(num_envs,)` bool:
        truncated and not terminated; "final_observation", the true successor; and, if the env has an info, "episode" with its
        numbers `(num_envs,)`, of which rl_games' `IsaacAlgoObserver` logs the means.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = to_rl_games(ScriptedEnv(2, (1,), episode_lengths=1, ending="truncated"))
    >>> obs = env.reset()
    >>> obs, rewards, dones, infos = env.step(env.env.sample_action())
    >>> obs[0], infos["final_observation"][0], dones, infos["time_outs"]
    (tensor([0.]), tensor([1.]), tensor([True, True]), tensor([True, True]))
    """
    return RlGamesVecEnv(env, seed)


class RlGamesVecEnv(IVecEnv):
    """A torchwrap env as an rl_games `IVecEnv`; made by `to_rl_games`. The torchwrap env is its `env`."""

    def __init__(self, env: Env, seed: int | None) -> None:
        self.env = _checks.env("to_rl_games", env)
        space = env.single_observation_space
        parts = (
            dict(space.spaces)
            if isinstance(space, Dict) and set(space) == {"obs", "states"}
            else {"obs": space}
        )
        for part in parts.values():
            _check_observation(part)
        _check_action(env.single_action_space)
        self.observation_space, self.state_space = parts["obs"], parts.get("states")
        self.action_space = env.single_action_space
        self._next_seed = seed

    def reset(self) -> Tensor | dict[str, Tensor]:
        seed, self._next_seed = self._next_seed, None
        return self._parts(self.env.reset(seed=seed)["observation"])

    def step(
        self, actions: Tensor
    ) -> tuple[Tensor | dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        # rl_games' player passes the action of a single env without its dimension.
        transition, td = self.env.step(
            actions.reshape(self.env.num_envs, *(self.action_space.shape or ()))
        )
        successor = transition["next"]
        time_outs = (successor["truncated"] & ~successor["terminated"]).squeeze(-1)
        infos = {"time_outs": time_outs, "final_observation": self._parts(successor["observation"])}
        if episode := _checks.logs(successor):
            infos["episode"] = episode
        return (
            self._parts(td["observation"]),
            successor["reward"].squeeze(-1),
            successor["done"].squeeze(-1),
            infos,
        )

    def seed(self, seed: int) -> None:
        """Seeds the next reset."""
        self._next_seed = seed

    def get_env_info(self) -> dict[str, Space[Any]]:
        info = {"observation_space": self.observation_space, "action_space": self.action_space}
        return info if self.state_space is None else {**info, "state_space": self.state_space}

    def get_env_state(self) -> dict[str, Tensor]:
        return self.env.state_dict()

    def set_env_state(self, env_state: dict[str, Tensor] | None) -> None:
        if env_state is not None:  # as of a checkpoint of another env
            self.env.load_state_dict(env_state)

    def _parts(self, observation: spaces.Value) -> Tensor | dict[str, Tensor]:
        names = ("obs", "states")
        return (
            observation
            if self.state_space is None
            else {name: spaces.at(observation, (name,)) for name in names}
        )


def _check_observation(space: Space[Any]) -> None:
    if not isinstance(space, Box) or not space.shape:
        needed = 'observations in a Box with a dimension, or in a Dict of two of them, "obs" and "states"'
        raise ValueError(
            f"to_rl_games needs {needed}, but got {space}: put transforms.FlattenObservation on the env."
        )
    if space.dtype not in (np.float32, np.uint8):
        remedy = 'put transforms.DtypeObservation("float32") on the env'
        raise ValueError(
            f"to_rl_games needs observations in float32 or uint8, but got {space}: {remedy}."
        )


def _check_action(space: Space[Any]) -> None:
    _checks.starts_at_zero("to_rl_games", "action", space)
    is_vector = (
        isinstance(space, Box)
        and len(space.shape) == 1
        and space.dtype == np.float32
        and space.is_bounded()
    )
    if not is_vector and not isinstance(space, Discrete):
        needed = "actions in a Discrete space or a bounded float32 Box with one dimension, to which rl_games rescales them"
        remedy = "leave out transforms.ClipAction, or put transforms.TransformAction on the env"
        raise ValueError(f"to_rl_games needs {needed}, but got {space}: {remedy}.")
