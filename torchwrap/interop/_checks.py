"""Checks and logs that the adapters to other libraries share. The checks run at construction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Discrete, MultiDiscrete
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap.env import Env
from torchwrap.spaces import Signature


class SimulatorEnv(Env):
    """Base of envs over a simulator outside of PyTorch: a new attribute is meant for it, and here would have no effect."""

    host_stepped = True

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        is_set = not hasattr(self, name) and self._set_in_simulator(name, value)
        return is_set or super().set_wrapper_attr(name, value, force=force)

    def __getstate__(self) -> dict[str, Any]:
        # copy.deepcopy and pickle come here. Many simulators give a fresh env as their copy.
        if not self.can_snapshot:
            reason = "because a simulator outside of PyTorch holds some of its state"
            remedy = "make a new env; load_state_dict(env.state_dict()) copies what transforms have learned"
            raise TypeError(f"{self._name()} cannot be copied or pickled, {reason}: {remedy}.")
        return super().__getstate__()

    def _set_in_simulator(self, name: str, value: Any) -> bool:
        """Sets an attribute of the simulator's envs, if they have it. Raises if they cannot be reached."""
        reason = "because it does not hold the simulator's envs"
        raise AttributeError(
            f"{self._name()} cannot set {name!r}, {reason}: set it on the simulator itself."
        )


STEP = ("observation", "reward", "terminated", "truncated", "info")


def env(owner: str, value: Any) -> Env:
    """`value`, if it is an env without the state of a policy."""
    if not isinstance(value, Env):
        remedy = "make one with torchwrap.make or torchwrap.from_gymnasium"
        raise TypeError(f"{owner} needs a torchwrap.Env, but got {type(value).__name__}: {remedy}.")
    if value.signature.policy_state:
        needed = (
            "an env without PolicyState, because trainers carry the state of policies themselves"
        )
        raise ValueError(f"{owner} needs {needed}, but got {value!r}.")
    return value


def starts_at_zero(owner: str, what: str, space: Space[Any]) -> None:
    """Raises a ValueError for discrete observations or actions that count from another number."""
    if isinstance(space, Discrete | MultiDiscrete) and np.any(space.start):
        remedy = f"put transforms.Transform{what.title()}(func, {what}_space) on the env"
        raise ValueError(f"{owner} needs {what}s that start at 0, but got {space}: {remedy}.")


def logs(successor: TensorDict) -> dict[str, Tensor]:
    """For a trainer's logs: the entries of info that are one number per env, float32 `(num_envs,)`; "a/b" if nested."""
    entries = successor["info"].flatten_keys("/").items() if "info" in successor.keys() else ()
    return {name: value.flatten().float() for name, value in entries if value.numel() == len(value)}


def signature(
    owner: str,
    num_envs: int,
    observation_space: Space[Any],
    action_space: Space[Any],
    max_episode_steps: int | None,
    first_index: int,
    device: torch.device | str,
    info_keys: Sequence[str],
) -> Signature:
    """The description of an env that functions make, from arguments that are checked."""
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if spaces.optional_space(owner, name, space) is None:
            raise TypeError(f"{owner} needs a gymnasium Space as {name}, but got None.")
    if max_episode_steps is not None:
        max_episode_steps = validation.integer(
            owner, "max_episode_steps", max_episode_steps, at_least=1
        )
    if isinstance(info_keys, str):
        raise TypeError(f"{owner} needs info_keys as a list, but got the string {info_keys!r}.")
    device = validation.device(owner, device)
    return Signature(
        num_envs, observation_space, action_space, device, max_episode_steps, first_index
    )


def as_numbers(
    owner: str, call: str, name: str, values: Any, num_envs: int
) -> np.ndarray[Any, Any]:
    """Rewards or flags as an array. Raises a ValueError unless they are one number per env: NumPy would make NaN of None."""
    with contextlib.suppress(ValueError):  # of different lengths
        array = np.asarray(values)
        if array.dtype.kind in "biuf" and array.size == num_envs:
            return array
    raise ValueError(
        f"{owner} needs {call} to return a {name} that is one number per env, but got {values!r}."
    )


def result(owner: str, call: str, space: Space[Any], value: Any, num_envs: int = 1) -> bool:
    """Raises a TypeError or ValueError unless Gymnasium's `step` or `reset`, the `call`, has returned what it needs to.

    Returns whether the observation consists of arrays of the space's dtypes, so that no cast can change a value.
    """
    names = STEP if call.startswith("step") else ("observation", "info")
    if (
        not isinstance(value, tuple | list)
        or len(value) != len(names)
        or not isinstance(value[-1], dict)
    ):
        raise TypeError(
            f"{owner} needs {call} to return ({', '.join(names)}) with a dict as info, but got {value!r}."
        )
    for name, number in zip(names[1:-1], value[1:-1], strict=True):
        as_numbers(owner, call, name, number, num_envs)
    return _observation(owner, call, space, value[0])


def _observation(owner: str, call: str, space: Space[Any], value: Any) -> bool:
    # As in `SyncVectorEnv`, other dtypes of the same kind fit. Workers would cast anything, and NumPy lets integers overflow.
    is_exact = True
    for path, leaf in spaces.leaves(space):
        part, fits, dtype = value, False, np.dtype(leaf.dtype)
        if (
            not path
            and isinstance(part, np.ndarray)
            and part.dtype == dtype
            and part.shape == leaf.shape
        ):
            continue
        with contextlib.suppress(LookupError, TypeError, ValueError):
            part = spaces.at(value, path)
            array = np.asarray(part)
            is_exact &= array is part and array.dtype == dtype
            fits = array.shape == (leaf.shape or ()) and np.can_cast(
                array.dtype, dtype, "same_kind"
            )
            if fits and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
                fits = bool((array.astype(dtype) == array).all())
        if not fits:
            what = "".join([f"[{key!r}]" for key in path])
            got = f"{part!r}{f' of {part.dtype}' if isinstance(part, np.ndarray) else ''}"
            remedy = f"return {dtype} values of shape {leaf.shape}, or change observation_space"
            raise ValueError(
                f"{owner} needs {call} to return observation{what} in {leaf}, but got {got}: {remedy}."
            )
    return is_exact


def numbers(
    owner: str,
    result: Any,
    names: tuple[str, ...],
    info_keys: Collection[str],
    describe: Callable[[Any], str],
) -> dict[str, Any]:
    """By name, the reward, the flags and the info that a simulator's `step` returned, whose result ends as `STEP` does."""
    if (
        not isinstance(result, tuple | list)
        or len(result) != len(names)
        or not isinstance(result[-1], dict)
    ):
        raise TypeError(
            f"{owner} needs step to return ({', '.join(names)}) with a dict as info, but got {describe(result)}."
        )
    *_, reward, terminated, truncated, info = result
    if unknown := sorted(set(info_keys) - set(info)):
        raise ValueError(
            f"{owner} needs info_keys that the info contains, but got {unknown}. It contains {sorted(info)}."
        )
    return {
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        **{name: info[name] for name in info_keys},
    }
