"""Validation of every value that passes, for debugging."""

from __future__ import annotations

from typing import Any

from gymnasium import Space
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Value
from torchwrap.transforms.transform import Transform


class PassiveEnvChecker(Transform):
    """Checks that actions, observations and rewards are finite and lie in the spaces below.

    For debugging: it changes nothing, but reads all values on the host at every step, and cannot be
    compiled. Put it first to check the env, or further out to check the transforms below it.
    `torchwrap.testing.check_env` checks the whole contract.

    >>> import torch; from torchwrap.testing import ScriptedEnv
    >>> from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2), PassiveEnvChecker())
    >>> _ = env.step(env.reset().set("action", torch.full((2, 6), torch.nan)))
    Traceback (most recent call last):
    ValueError: PassiveEnvChecker: action must be in Box(-1.0, 1.0, (6,), ...), got nan in env 0.
    """

    def deployed(self) -> None:
        return None

    def action(self, action: Value) -> Value:
        _check("action", self._below.single_action_space, action)
        return action.clone()

    def step(self, td: TensorDict) -> TensorDict:
        _check("observation", self._below.single_observation_space, td["observation"])
        _check("reward", spaces.REWARD, td["reward"])
        return td

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        _check("observation", self._below.single_observation_space, td["observation"], mask)
        return td


def _check(
    name: str,
    space: Space[Any],
    value: Value,
    mask: RowMask | None = None,
) -> None:
    for path, leaf in spaces.leaves(space):
        part = spaces.entry(value, path)
        is_wrong = spaces.outside(leaf, part) | ~part.isfinite()
        if mask is not None:
            is_wrong &= mask.like(is_wrong)
        if is_wrong.any():
            index = tuple(is_wrong.nonzero()[0].tolist())
            must = f"{name}{list(path) or ''} must be in {leaf}"
            got = f"{part[index].item()} in env {index[0]}"
            raise ValueError(refusal("PassiveEnvChecker", must, got))
