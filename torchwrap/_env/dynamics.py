"""Dynamics: the functions of a step, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap._core import nested
from torchwrap._core.repeat import repeat

State: TypeAlias = dict[str, Tensor]
_SUCCESSOR = ("observation", "reward", "terminated", "truncated", "done")
_FLAGS = 4  # results before the info


class Dynamics:
    """A step of all envs, as a function of tensors: it reads and writes no buffer.

    Args:
        fields: names of the fields of the state.
        info_names: names of the info, in the order in which they are returned.
        optional: those of `truncated`, `transition_info` and `state_info` that the env has.
        max_episode_steps: truncates episodes at this length. None disables it.
    """

    def __init__(
        self, fields: list[str], info_names: list[str], optional: frozenset[str], max_episode_steps: int | None
    ) -> None:
        self.fields, self.info_names, self.optional = fields, info_names, optional
        self.max_episode_steps = max_episode_steps

    def advance(self, call: Callable[..., Any], *arguments: Any) -> tuple[list[Tensor], list[Any]]:
        """Takes a step.

        Args:
            call: calls a function of the env by its name.
            arguments: the fields of the state; the limits of the envs, if they differ; the clock; and the action.

        Returns:
            The fields of the next state, and what the step returns: observation, reward, flags, and the info.
        """
        *values, draw, action = arguments
        state = dict(zip(self.fields, values, strict=False))
        limit = values[-1] if len(values) > len(self.fields) else self.max_episode_steps
        next_state = call("transition", state, action)
        reward = call("reward", state, action, next_state)
        terminated = call("terminal", next_state)
        observation = call("observation", next_state)
        truncated = torch.zeros_like(terminated) if limit is None else draw >= limit
        if "truncated" in self.optional:
            truncated = truncated | call("truncated", next_state)
        info: dict[str, Tensor] = {}
        if "transition_info" in self.optional:
            info.update(call("transition_info", state, action, next_state))
        if "state_info" in self.optional:
            info.update(call("state_info", next_state))
        results = [observation, reward.to(torch.float32), terminated, truncated, *[info[name] for name in self.info_names]]
        results[1:] = [result.unsqueeze(-1) if result.dim() == 1 else result for result in results[1:]]
        return [next_state[field] for field in self.fields], results

    def advance_and_finish(self, call: Callable[..., Any], *arguments: Any) -> tuple[list[Tensor], list[Any]]:
        """As `advance`. It returns `done` and, once more, the observation as well."""
        state, results = self.advance(call, *arguments)
        observation, _, terminated, truncated = results[:_FLAGS]
        return state, [*results, terminated | truncated, observation]

    def successor(self, results: list[Tensor], num_envs: int) -> TensorDict:
        """The results of `advance`, and `done` if it is the last of them, as a TensorDict."""
        if not self.info_names:
            return nested.tensordict(dict(zip(_SUCCESSOR, results, strict=False)), num_envs)
        end = _FLAGS + len(self.info_names)
        successor: dict[str, Any] = dict(zip(_SUCCESSOR, [*results[:_FLAGS], *results[end:]], strict=False))
        info = dict(zip(self.info_names, results[_FLAGS:end], strict=True))
        return nested.tensordict({**successor, "info": nested.tensordict(info, num_envs)}, num_envs)

    def simulate(
        self,
        call: Callable[..., Any],
        inputs: list[Tensor],
        draw: Tensor,
        action: Any,
        times: int,
        num_envs: int,
    ) -> tuple[TensorDict, State]:
        """Takes an action several times, in each env until its episode ends.

        Args:
            call: calls a function by the clock and its name.
            inputs: the fields of the state, and the limits of the envs if they differ.
            draw: the clock before the first step.
            action: of all envs.
            times: number of steps.
            num_envs: number of rows.

        Returns:
            The successor and the next state.
        """
        fields, clock = inputs, draw

        def step(action: Any) -> TensorDict:
            nonlocal fields, clock
            clock = clock + 1
            updates, results = self.advance(functools.partial(call, clock), *fields, clock, action)
            fields = [*updates, *inputs[len(updates) :]]
            state = nested.tensordict(dict(zip(self.fields, updates, strict=True)), num_envs)
            return self.successor(results, num_envs).set("state", state)

        successor = repeat(step, action, times)
        state: Any = successor.pop("state")
        successor.set("done", successor["terminated"] | successor["truncated"])
        return successor, {field: state[field] for field in self.fields}
