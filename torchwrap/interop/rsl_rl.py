"""rsl_rl: a torchwrap env as an `rsl_rl.env.VecEnv`, and a PPO that reads the true final observations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict
from rsl_rl import algorithms
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.interop import _checks
from torchwrap.transforms.episode import RecordEpisodeStatistics


def to_rsl_rl(
    env: Env, cfg: dict[str, Any] | None = None, *, seed: int | None = None
) -> RslRlVecEnv:
    """Wraps an env for the runners of rsl_rl: `OnPolicyRunner(to_rsl_rl(env), train_cfg)`.

    The env is reset here, because the runner does not reset it. Tensors are passed on without copies.

    At a time-out, rsl_rl's PPO adds gamma * V(s_t) to the reward, the value of the observation acted in. With
    "torchwrap.interop.rsl_rl:PPO" as `class_name` of the algorithm in `train_cfg`, it is the value of the final observation,
    and `runner.save` and `runner.load` include `env.state_dict()`, what the transforms have learned.

    Args:
        env: its actions are a float32 Box with one dimension. Its observations are such a Box, which becomes the group
            "policy", or a Dict of them, which become groups of the same names. rsl_rl's actions are unbounded: put
            `transforms.ClipAction` on an env that does not clip them.
        cfg: for the runner's loggers; it is kept, not copied. `{"is_finite_horizon": True}` leaves `extras["time_outs"]` out,
            as in Isaac Lab, so that nothing is added to the reward at a time-out.
        seed: for the reset. None draws one from the operating system.

    Returns:
        The `VecEnv`. Its `step(actions)`, float32 `(num_envs, num_actions)`, returns the groups in a TensorDict, rewards
        `(num_envs,)` float32, dones `(num_envs,)` int64, and `extras` with "time_outs", `(num_envs,)` bool: truncated and not
        terminated; and "final_obs", the groups of the true successor. `extras["log"]`, of which rsl_rl logs the means, holds
        the numbers of the env's info, and those of `transforms.RecordEpisodeStatistics` for the episodes that ended.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = to_rsl_rl(ScriptedEnv(2, (3,), episode_lengths=1, ending="truncated"))
    >>> obs, rewards, dones, extras = env.step(torch.zeros(2, env.num_actions))
    >>> obs["policy"][0], extras["final_obs"]["policy"][0], dones, extras["time_outs"]
    (tensor([ 0., 10., 20.]), tensor([ 1., 11., 21.]), tensor([1, 1]), tensor([True, True]))
    """
    return RslRlVecEnv(env, cfg, seed)


class RslRlVecEnv(VecEnv):
    """A torchwrap env as an `rsl_rl.env.VecEnv`; made by `to_rsl_rl`. The torchwrap env is its `env`."""

    def __init__(self, env: Env, cfg: dict[str, Any] | None, seed: int | None) -> None:
        self.env = _checks.env("to_rsl_rl", env)
        if cfg is not None and not isinstance(cfg, dict):
            raise TypeError(f"to_rsl_rl needs cfg as a dict, but got {type(cfg).__name__}.")
        self.cfg = {} if cfg is None else cfg
        observations, actions = env.single_observation_space, env.single_action_space
        groups = dict(observations.spaces) if isinstance(observations, Dict) else {}
        flatten = ": put transforms.FlattenObservation on the env"
        cast = "TransformObservation" if groups else 'DtypeObservation("float32")'
        for space in groups.values() or [observations]:
            _check_space("observations", space, flatten, f": put transforms.{cast} on it")
        _check_space("actions", actions)
        self.num_envs, self.num_actions, self.device = (
            env.num_envs,
            math.prod(actions.shape or ()),
            env.device,
        )
        self._log_keys = [
            key for record in RecordEpisodeStatistics.of(env) for key in record.keys.values()
        ]
        env.reset(seed=seed)

    @property
    def max_episode_length(self) -> int:
        limit = self.env.signature.max_episode_steps
        if limit is None:
            needed = "init_at_random_ep_len needs an env with a time limit"
            raise RuntimeError(f"{needed}, but got {self.env}: put transforms.TimeLimit on it.")
        return limit

    @property
    def episode_length_buf(self) -> Tensor:
        return self.env.elapsed_steps

    @episode_length_buf.setter
    def episode_length_buf(self, steps: Tensor) -> None:
        self.env.elapsed_steps = steps

    def reset(self) -> tuple[TensorDict, dict[str, Any]]:
        """Starts new episodes in every env. The runner does not call it."""
        self.env.reset()
        return self.get_observations(), {}

    def get_observations(self) -> TensorDict:
        """The observations of the last step, reset or `env.restore`."""
        return self._groups(self.env._check_ready("get_observations()")["observation"])

    # Because the runner steps in inference mode: a tensor made there, and kept, cannot be written to outside.
    @torch.inference_mode(False)
    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        transition, td = self.env.step(actions)
        successor = transition["next"]
        done = successor["done"].squeeze(-1)
        extras: dict[str, Any] = {"final_obs": self._groups(successor["observation"])}
        if not self.cfg.get("is_finite_horizon", False):
            extras["time_outs"] = (successor["truncated"] & ~successor["terminated"]).squeeze(-1)
        log = _checks.logs(successor)
        if (
            self._log_keys and done.any()
        ):  # waits for the device; rsl_rl's mean of no episodes would be NaN
            log |= {key: successor[key][done, 0].float() for key in self._log_keys}
        if log:
            extras["log"] = log
        return self._groups(td["observation"]), successor["reward"].squeeze(-1), done.long(), extras

    def _groups(self, observation: spaces.Value) -> TensorDict:
        groups = (
            {"policy": observation}
            if isinstance(observation, Tensor)
            else dict(observation.items())
        )
        return TensorDict(groups, [self.num_envs])


def _check_space(what: str, space: Space[Any], flatten: str = "", cast: str = "") -> None:
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise ValueError(
            f"to_rsl_rl needs {what} in a Box with one dimension, but got {space}{flatten}."
        )
    if space.dtype != np.float32:  # rsl_rl would cast it silently where it stores it
        raise ValueError(f"to_rsl_rl needs {what} in float32, but got {space}{cast}.")


class PPO(algorithms.PPO):
    """rsl_rl's PPO, which adds the value of the true final observation at a time-out, not of the observation before.

    Its checkpoints contain the `state_dict` of a torchwrap env, under "env_state_dict", which is loaded unless `load_cfg` has
    `"env": False`. The env has to put `extras["final_obs"]` next to `extras["time_outs"]`, as `to_rsl_rl` does.
    """

    env: Env | None = None

    def process_env_step(
        self, obs: TensorDict, rewards: Tensor, dones: Tensor, extras: dict[str, Any]
    ) -> None:
        if "time_outs" in extras:
            if "final_obs" not in extras:
                remedy = "wrap a torchwrap env with to_rsl_rl, or use rsl_rl's own PPO"
                raise ValueError(
                    f'{__name__}:PPO needs extras["final_obs"] from the env, but got {sorted(extras)}: {remedy}.'
                )
            hidden_state = self.critic.get_hidden_state()
            values = self.critic(extras["final_obs"].to(self.device)).detach().squeeze(-1)
            self.critic.reset(hidden_state=hidden_state)
            rewards = rewards + self.gamma * values * extras["time_outs"].to(self.device)
            extras = {key: value for key, value in extras.items() if key != "time_outs"}
        super().process_env_step(obs, rewards, dones, extras)

    @staticmethod
    def construct_algorithm(obs: TensorDict, env: VecEnv, cfg: dict[str, Any], device: str) -> PPO:
        alg: PPO = algorithms.PPO.construct_algorithm(obs, env, cfg, device)
        alg.env = env.env if isinstance(env, RslRlVecEnv) else None
        return alg

    def save(self) -> dict[str, Any]:
        return super().save() | (
            {} if self.env is None else {"env_state_dict": self.env.state_dict()}
        )

    def load(
        self, loaded_dict: dict[str, Any], load_cfg: dict[str, bool] | None, strict: bool
    ) -> bool:
        if (
            self.env is not None
            and "env_state_dict" in loaded_dict
            and (load_cfg or {}).get("env", True)
        ):
            self.env.load_state_dict(loaded_dict["env_state_dict"], strict)
        return super().load(loaded_dict, load_cfg, strict)
