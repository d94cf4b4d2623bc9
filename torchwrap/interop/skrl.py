"""to_skrl: a torchwrap env as an skrl env; true_successors: agents that learn from final states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from skrl import config
from skrl.agents.torch import Agent
from skrl.envs.wrappers.torch import Wrapper
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Env, take
from torchwrap.interop import _trainers
from torchwrap.statistics import sync_statistics


def to_skrl(env: Env) -> SkrlEnv:
    """Makes a torchwrap env an skrl env. Pass it to the trainer as it is, without `wrap_env`.

    Observations are `(num_envs, D)`: float32 for a `Box`, members of a `Dict` in alphabetical
    order, as skrl's models expect them. Actions are `(num_envs, A)`; Discrete ones `(num_envs, 1)`.
    Rewards are `(num_envs, 1)` float32, `terminated` and `truncated` `(num_envs, 1)` bool. All
    tensors stay on the env's device, are not copied, and are the caller's.

    In a Dict with "policy" (or "actor") and "critic", or "obs" and "states", the first is the
    observation and the second skrl's state, for a critic; other entries are left out.

    `infos` holds the true successors, `(num_envs, D)`, under "final_observations" and, with states,
    "final_states" (see `true_successors`), and the env's own info. skrl's trainers log "episode":
    the means over envs of the numbers in that info, those that a simulator of `from_functions`
    logs, and, if the env has `RecordEpisodeStatistics`, its "episode_return", "episode_length" and
    metrics of the episodes that ended in this step.

    An agent saves and loads the transforms' statistics, and the `params` of functions or a
    simulator's levels, if it knows the env, by `true_successors(agent, env)` or
    `agent.checkpoint_modules |= env.checkpoint_modules`. The `params` are set by the next `reset`
    in train mode, if they are of as many envs.

    With several envs, `step` returns the initial observations of finished envs. With a single one,
    skrl's trainers call `reset` at the end of an episode: `step` returns the final observation, and
    that `reset` the initial one of the next. The first `reset` of an env takes the seed of
    `skrl.utils.set_seed`.

    Args:
        env: its observations are Box, Discrete, one-dimensional MultiDiscrete, or Dict or Tuple of
            them; its actions are Box, or Discrete or MultiDiscrete from 0 on. The result owns it
            from now on.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = to_skrl(ScriptedEnv(2, (1,), episode_lengths=(1, 2)))
    >>> observations, _ = env.reset()
    >>> observations, rewards, terminated, truncated, infos = env.step(torch.zeros(2, 6))
    >>> observations.tolist(), infos["final_observations"].tolist()
    ([[0.0], [1001.0]], [[1.0], [1001.0]])
    """
    return SkrlEnv(env)


AnyAgent = TypeVar("AnyAgent", bound=Agent)


def true_successors(agent: AnyAgent, env: SkrlEnv | None = None) -> AnyAgent:
    """Lets an skrl agent record the true successors of `to_skrl`'s env, and returns the agent.

    skrl's trainers record the observation that they act on next as the next observation: where an
    episode ended, the initial one of another episode. An episode that is both terminated and
    truncated is recorded as terminated: PPO bootstraps wherever `truncated` is set. skrl multiplies
    values at terminations by zero: a final observation with a NaN or an infinite number is replaced
    by the observation acted in there. Recurrent agents (`PPO_RNN` and the like) have no use for it
    at a time-out: they bootstrap from the observation acted in.

    Args:
        agent: an skrl agent, alone in its trainer. Its `record_transition` and `update` are
            replaced, once.
        env: its `checkpoint_modules` become the agent's: the agent saves and loads the transforms'
            statistics, and merges those of several ranks before each update. None takes the env of
            the first step, too late for `agent.load` before it.

    >>> from types import SimpleNamespace
    >>> agent = SimpleNamespace(record_transition=print, update=print)  # in place of skrl's
    >>> true_successors(agent) is agent
    True
    """
    record = getattr(agent, "record_transition", None)
    if not callable(record):
        must = "agent must be an skrl agent"
        raise TypeError(refusal("true_successors", must, type(agent).__name__))
    if getattr(record, "func", None) is not _record:
        agent.record_transition = functools.partial(_record, agent, record)
        agent.update = functools.partial(_update, agent, agent.update)
    if env is not None:
        agent.checkpoint_modules |= env.checkpoint_modules
    return agent


def _update(agent: Agent, update: Callable[..., None], **others: Any) -> None:
    if config.torch.is_distributed:
        for module in agent.checkpoint_modules.values():
            env = getattr(module, "_env", module)
            if isinstance(env, Env):
                sync_statistics(env)
    update(**others)


def _record(
    agent: Agent,
    record: Callable[..., None],
    *,
    observations: Tensor,
    states: Tensor | None,
    next_observations: Tensor,
    next_states: Tensor | None,
    terminated: Tensor,
    truncated: Tensor,
    infos: Any,
    **others: Any,
) -> None:
    finals = infos.get("final_observations")
    if finals is None:
        raise ValueError(
            refusal(
                "true_successors",
                "infos must hold final_observations",
                sorted(infos),
                "Make the env with to_skrl",
            )
        )
    if finals.shape != next_observations.shape:
        raise ValueError(
            refusal(
                "true_successors",
                f"agent must act in all {len(finals)} envs",
                len(next_observations),
                "Use one agent for all envs",
            )
        )
    if isinstance(infos, _Infos):  # else a wrapper has replaced them
        agent.checkpoint_modules |= infos.env.checkpoint_modules | agent.checkpoint_modules
    next_states = None
    if states is not None:
        next_states = _usable(infos["final_states"], states, terminated)
    record(
        observations=observations,
        states=states,
        next_observations=_usable(finals, observations, terminated),
        next_states=next_states,
        terminated=terminated,
        truncated=truncated & ~terminated,
        infos=infos,
        **others,
    )


def _usable(final: Tensor, last: Tensor, terminated: Tensor) -> Tensor:
    is_finite = final.isfinite().all(-1, keepdim=True)
    return torch.where(terminated & ~is_finite, last, final)


class _Infos(dict[str, Any]):
    """The infos of a step, which know their env. A copy or a pickle is a plain dict."""

    env: SkrlEnv

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


StepResult: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]


class SkrlEnv(Wrapper):
    """A torchwrap env as an skrl env; made by `to_skrl`."""

    def __init__(self, env: Env) -> None:
        super().__init__(_trainers.require_env("to_skrl", env))
        observations = env.single_observation_space
        parts = _trainers.actor_and_critic(observations)
        self._keys = list(parts)
        self._spaces = list(parts.values()) or [observations]
        for space in self._spaces:
            for _, leaf in spaces.leaves(space):
                _check_space("observations", leaf)
        _check_space("actions", env.single_action_space)
        _trainers.starts_at_zero("to_skrl", env.single_action_space)
        self._metric_keys = _trainers.metric_keys(env)
        self._params = _trainers.Params(env)
        # By name in an agent's `checkpoint_modules`.
        self.checkpoint_modules = {"env": self, "env_params": self._params}
        # The initial observation and state of a single env whose episode ended.
        self._pending: list[Tensor] = []
        self._states: Tensor | None = None

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        root = self._pending
        self._pending = []
        if not root:  # else the env has reset itself
            seed = None
            if self._env.np_random_seed is None:
                seed = self._first_seed()
            else:
                _trainers.warn_untrained("to_skrl", self._env)
            self._params.resume()
            root = self._flat(self._env.reset(seed=seed))
        return self._observation(root), {}

    def _first_seed(self) -> int | None:
        seed: int = config.torch.key
        try:
            return self._env.unwrapped._choose_seed(seed, is_first=True)
        except ValueError:  # of a simulator that takes no seed
            if seed != 0:  # skrl's default
                raise
            return None

    def step(self, actions: Tensor) -> StepResult:
        space = self.action_space
        actions = actions.reshape(-1, *(space.shape or ()))
        to = spaces.dtype(space)
        if actions.dtype == torch.int64 != to:
            actions = spaces.from_numpy(space, actions.numpy(force=True), self._env.device)
        successor, td = take(self._env, actions.to(to))
        done = successor["done"]
        root = self._flat(td)
        final = self._flat(successor)
        names = ("final_observations", "final_states")
        infos = _Infos(successor.get("info", {}).items())
        infos.env = self
        infos |= zip(names, final, strict=False)
        numbers = _trainers.logs(self._env, self._metric_keys, successor)
        if numbers:
            infos["episode"] = {name: value.mean() for name, value in numbers.items()}
        if self.num_envs == 1:
            self._pending = root if done else []
            root = final
        return (
            self._observation(root),
            successor["reward"],
            successor["terminated"],
            successor["truncated"],
            infos,
        )

    def _flat(self, td: Any) -> list[Tensor]:
        """The observations, and the states if there are any."""
        observation = td["observation"]
        parts = [observation[key] for key in self._keys] or [observation]
        pairs = zip(self._spaces, parts, strict=True)
        return [_flatten(*pair, self.num_envs) for pair in pairs]

    def _observation(self, flat: list[Tensor]) -> Tensor:
        observation, *states = flat
        self._states = states[0] if states else None
        return observation

    def state(self) -> Tensor | None:
        """The states of the last observations, `(num_envs, S)`."""
        return self._states

    def render(self, *args: Any, **kwargs: Any) -> Any:
        # skrl's trainers render unless headless. As in Gymnasium, no mode means no frames.
        return None if self._env.render_mode is None else self._env.render(*args, **kwargs)

    def close(self) -> None:
        self._env.close()

    @property
    def observation_space(self) -> Space[Any]:
        return self._spaces[0]

    @property
    def state_space(self) -> Space[Any] | None:
        return self._spaces[1] if self._keys else None

    @property
    def action_space(self) -> Space[Any]:
        return self._env.single_action_space


def _flatten(space: Space[Any], value: Any, num_envs: int) -> Tensor:
    # Like skrl's tensorize_space and flatten_tensorized_space: no one-hot vectors.
    parts = spaces.children(space)
    if parts is None:
        flat: Tensor = value.reshape(num_envs, -1)
        return flat.float() if isinstance(space, Box) else flat
    keys = sorted(parts) if isinstance(space, Dict) else parts
    columns = [_flatten(parts[key], value[key], num_envs) for key in keys]
    return torch.cat(columns, -1)


def _check_space(name: str, space: Space[Any]) -> None:
    is_flat = not isinstance(space, MultiDiscrete) or len(space.shape) == 1
    if not is_flat or not isinstance(space, Box | Discrete | MultiDiscrete):
        raise ValueError(
            refusal(
                "to_skrl",
                f"{name} must be Box, Discrete or one-dimensional MultiDiscrete",
                space,
                "Put transforms.FlattenObservation or transforms.TransformAction on the env",
            )
        )
