"""to_skrl: a torchwrap env as an skrl env; true_successors: agents that learn from final observations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from skrl import config
from skrl.agents.torch import Agent
from skrl.envs.wrappers.torch import Wrapper
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.interop import _checks
from torchwrap.transforms import RecordEpisodeStatistics


def to_skrl(env: Env) -> SkrlEnv:
    """Makes a torchwrap env an skrl env. Pass it to the trainer as it is, without `wrap_env`.

    Observations are `(num_envs, D)`: float32 for a `Box`, members of a `Dict` in alphabetical order, as skrl's models expect
    them. Actions are `(num_envs, A)`; Discrete ones `(num_envs, 1)`. Rewards are `(num_envs, 1)` float32, `terminated` and
    `truncated` `(num_envs, 1)` bool. All tensors stay on the env's device, are not copied, and are the caller's.

    `infos` holds the true successors, `(num_envs, D)`, under "final_observations" (see `true_successors`), and the env's own
    info. "episode", which skrl's trainers log, holds the means over envs of the numbers in that info, and, if the env has
    `RecordEpisodeStatistics`, the mean "return" and "length" of the episodes that ended in this step.

    An agent saves and loads what the transforms have learned if it knows the env: `agent.checkpoint_modules["env"] = env`.

    With several envs, `step` returns the initial observations of finished envs. With a single one, skrl's trainers call
    `reset` at the end of an episode: `step` returns the final observation, and that `reset` the initial one of the next. The
    first `reset` of an env takes the seed of `skrl.utils.set_seed`.

    Args:
        env: its observations are Box, Discrete, one-dimensional MultiDiscrete, or Dict or Tuple of them; its actions are Box,
            or Discrete or MultiDiscrete from 0 on. The result owns it from now on.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = to_skrl(ScriptedEnv(2, (1,), episode_lengths=(1, 2)))
    >>> observations, _ = env.reset()
    >>> observations, rewards, terminated, truncated, infos = env.step(torch.zeros(2, 6))
    >>> observations.tolist(), infos["final_observations"].tolist()
    ([[0.0], [1001.0]], [[1.0], [1001.0]])
    """
    return SkrlEnv(env)


AnAgent = TypeVar("AnAgent", bound=Agent)


def true_successors(agent: AnAgent) -> AnAgent:
    """Lets an skrl agent record the true successors of `to_skrl`'s env as its next observations, and returns it.

    skrl's trainers record the observation that they act on next: where an episode ended, the initial one of another episode.
    An episode that is both terminated and truncated is recorded as terminated: PPO bootstraps wherever `truncated` is set.

    Args:
        agent: an skrl agent, alone in its trainer. Its `record_transition` is replaced, once.
    """
    record = getattr(agent, "record_transition", None)
    if not callable(record):
        raise TypeError(
            f"true_successors needs an skrl agent with record_transition, but got {type(agent).__name__}."
        )
    if getattr(record, "func", None) is not _record:
        agent.record_transition = functools.partial(_record, record)
    return agent


def _record(
    record: Callable[..., None],
    *,
    next_observations: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    infos: Any,
    **others: Any,
) -> None:
    finals = infos.get("final_observations")
    if finals is None or finals.shape != next_observations.shape:
        got = (
            "none"
            if finals is None
            else f"{len(finals)} for an agent with {len(next_observations)}"
        )
        remedy = "make the env with to_skrl" if finals is None else "use one agent for all envs"
        raise ValueError(
            f'true_successors needs infos["final_observations"] of each env, but got {got}: {remedy}.'
        )
    record(
        next_observations=finals,
        terminated=terminated,
        truncated=truncated & ~terminated,
        infos=infos,
        **others,
    )


class SkrlEnv(Wrapper):
    """A torchwrap env as an skrl env; made by `to_skrl`."""

    def __init__(self, env: Env) -> None:
        super().__init__(_checks.env("to_skrl", env))
        _check_spaces(env.single_observation_space, env.single_action_space)
        self._recorder = next(iter(RecordEpisodeStatistics.of(env)), None)
        self._pending: Tensor | None = (
            None  # the initial observation of a single env whose episode ended
        )

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        pending, self._pending = self._pending, None
        if pending is not None:  # the env has already reset itself
            return pending, {}
        seed = config.torch.key if self._env.np_random_seed is None else None
        return self._flat(self._env.reset(seed=seed)["observation"]), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        space = self.action_space
        transition, td = self._env.step(
            actions.reshape(-1, *(space.shape or ())).to(spaces.dtype(space))
        )
        successor, following = transition["next"], self._flat(td["observation"])
        final, done = self._flat(successor["observation"]), successor["done"]
        infos: dict[str, Any] = {**successor.get("info", {}), "final_observations": final}
        episode = {name: value.mean() for name, value in _checks.logs(successor).items()}
        if self._recorder is not None and done.any():
            episode |= {
                name: successor[key][done].float().mean()
                for name, key in self._recorder.keys.items()
            }
        if episode:
            infos["episode"] = episode
        if self.num_envs == 1:
            self._pending = following if done else None
            following = final
        return (
            following,
            successor["reward"],
            successor["terminated"],
            successor["truncated"],
            infos,
        )

    def _flat(self, observation: spaces.Value) -> Tensor:
        return _flatten(self.observation_space, observation, self.num_envs)

    def state(self) -> None:
        return None

    def render(self, *args: Any, **kwargs: Any) -> Any:
        # skrl's trainers render each step unless they are headless. As in Gymnasium, no mode means no frames.
        return None if self._env.render_mode is None else self._env.render(*args, **kwargs)

    def close(self) -> None:
        self._env.close()

    @property
    def observation_space(self) -> Space[Any]:
        return self._env.single_observation_space

    @property
    def action_space(self) -> Space[Any]:
        return self._env.single_action_space


def _flatten(space: Space[Any], value: spaces.Value, num_envs: int) -> Tensor:
    # As skrl's flatten_tensorized_space of tensorize_space: Box as float32, integers as they are, no one-hot vectors.
    parts = spaces.children(space)
    if parts is None:
        flat: Tensor = value.reshape(num_envs, -1)
        return flat.float() if isinstance(space, Box) else flat
    keys = sorted(parts) if isinstance(space, Dict) else parts
    return torch.cat([_flatten(parts[key], spaces.at(value, (key,)), num_envs) for key in keys], -1)


def _check_spaces(observation_space: Space[Any], action_space: Space[Any]) -> None:
    remedy = ": put transforms.FlattenObservation on the env"
    held = [("observations", leaf, remedy) for _, leaf in spaces.leaves(observation_space)]
    for what, space, remedy in (*held, ("actions", action_space, "")):
        is_flat = not isinstance(space, MultiDiscrete) or len(space.shape) == 1
        if not is_flat or not isinstance(space, Box | Discrete | MultiDiscrete):
            needed = f"{what} in Box, Discrete and one-dimensional MultiDiscrete spaces"
            raise ValueError(f"to_skrl needs {needed}, but got {space}{remedy}.")
    _checks.starts_at_zero("to_skrl", "action", action_space)
