"""Gymnasium in: any `gymnasium.vector.VectorEnv` as a torchwrap env."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, spaces
from torchwrap.env import Env
from torchwrap.spaces import Signature

InfoKeys = Sequence[str] | Mapping[str, Space[Any]]
_SCALAR: gymnasium.spaces.Box = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)


def from_gymnasium(
    vector_env: VectorEnv[Any, Any, Any],
    *,
    device: torch.device | str = "cpu",
    info_keys: InfoKeys = (),
    first_index: int = 0,
) -> GymnasiumEnv:
    """A Gymnasium vector env as a torchwrap env: the same transitions on tensors, whatever its autoreset mode.

    Args:
        vector_env: in `AutoresetMode.DISABLED` (best) or `SAME_STEP`. It belongs to the result from here on.
        device: where tensors go.
        info_keys: what of `info` to pass on under `("next", "info", name)`: names of numbers, which become `(num_envs, 1)`
            float32, or a mapping from names to spaces. Where an env's info lacks one, it is zero; but a bare name has to turn
            up by the end of the first episode, or it is taken for a slip.
        first_index: global index of the first env; env *i* of a shard is seeded with `seed + first_index + i`.

    Raises:
        ValueError: where the vector env resets in the step after an episode's last (`NEXT_STEP`).

    >>> import gymnasium
    >>> mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    >>> vector_env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=mode)
    >>> from_gymnasium(vector_env)
    <CartPole-v1(num_envs=2, device=cpu)>
    """
    return GymnasiumEnv(vector_env, device=device, info_keys=info_keys, first_index=first_index)


def make(
    id: str,
    num_envs: int,
    vectorization_mode: str,
    *,
    device: torch.device | str,
    first_index: int,
    info_keys: InfoKeys,
    spec: Any,
    vector_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> GymnasiumEnv:
    """What `torchwrap.make(..., backend="gymnasium")` gives: a vector env that never resets by itself, and copies once."""
    ours = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
    vector_env = gymnasium.make_vec(
        id, num_envs, vectorization_mode=vectorization_mode, vector_kwargs={**(vector_kwargs or {}), **ours}, **kwargs
    )
    return GymnasiumEnv(vector_env, device=device, info_keys=info_keys, first_index=first_index, spec=spec)


class GymnasiumEnv(Env):
    """What `from_gymnasium` gives. Its simulator keeps its own state: there is no snapshot of it."""

    can_snapshot = False

    def __init__(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        *,
        device: torch.device | str,
        info_keys: InfoKeys,
        first_index: int,
        spec: Any = None,
    ) -> None:
        if not isinstance(vector_env, VectorEnv):
            raise TypeError(
                f"from_gymnasium needs a gymnasium.vector.VectorEnv, but got {type(vector_env).__name__}: "
                "gymnasium.make_vec makes one."
            )
        mode = (vector_env.metadata or {}).get("autoreset_mode")
        if mode not in (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP):
            raise ValueError(
                f"from_gymnasium needs a vector env in AutoresetMode.DISABLED or SAME_STEP, but got {mode}: "
                "its step after an episode's last is no transition. Build it with gymnasium.make_vec(id, num_envs, "
                'vectorization_mode="sync", vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}), '
                'or with torchwrap.make(id, num_envs, backend="gymnasium").'
            )
        if spec is None and vector_env.spec is not None:
            spec = copy.deepcopy(vector_env.spec)
            # make_vec leaves a limit of its caller's among the arguments; Gymnasium's -1 is none.
            limit = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
            spec.max_episode_steps = None if limit == -1 else limit
        signature = Signature(
            vector_env.num_envs,
            vector_env.single_observation_space,
            vector_env.single_action_space,
            arguments.device("from_gymnasium", device),
            spec.max_episode_steps if spec is not None else None,
            first_index,
        )
        super().__init__(signature, spec=spec, metadata=vector_env.metadata, render_mode=vector_env.render_mode)
        if isinstance(info_keys, str):
            raise TypeError(f"from_gymnasium needs info_keys as a list or a mapping, but got the text {info_keys!r}.")
        self.vector_env = vector_env
        self.same_step = mode is AutoresetMode.SAME_STEP
        self.info_spaces = dict(info_keys) if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys, _SCALAR)
        for space in self.info_spaces.values():
            spaces.dtype(space)
        self._unseen = set() if isinstance(info_keys, Mapping) else set(self.info_spaces)
        self._seeds: list[int | None] | None = None  # for the next _reset
        # A same-step env resets before anybody asks: which rows it has reset, and what was seen last.
        self._early = np.zeros(self.num_envs, bool)
        self._latest: Any = None

    def _seed(self, seed: int, mask: Tensor) -> None:
        super()._seed(seed, mask)
        first = seed + self.signature.first_index
        self._seeds = [first + row if chosen else None for row, chosen in enumerate(mask.tolist())]

    def _step(self, td: TensorDict) -> TensorDict:
        actions = spaces.to_numpy(self.single_action_space, td["action"])
        self._latest, reward, terminated, truncated, info = self.vector_env.step(actions)
        successor = self._to_tensors(self._latest)
        if self.same_step:
            self._early = terminated | truncated
            if self._early.any():
                rows, space = np.flatnonzero(self._early), self.single_observation_space
                empty: Any = create_empty_array(space, len(rows))
                final = concatenate(space, tuple(info["final_obs"][rows]), empty)
                successor[torch.as_tensor(rows, device=self.device)] = self._to_tensors(final)
        result = {
            "observation": successor,
            "reward": self._column(reward, np.float32),
            "terminated": self._column(terminated, np.bool_),
            "truncated": self._column(truncated, np.bool_),
        }
        if self.info_spaces:
            result["info"] = self._info(info, terminated | truncated)
        return TensorDict(result, batch_size=[self.num_envs])

    def _reset(self, mask: Tensor, options: dict[str, Any] | None = None) -> TensorDict:
        wanted = mask.cpu().numpy()
        seeds, self._seeds = self._seeds, None
        afresh = seeds is not None or options is not None
        missing = wanted if afresh else wanted & ~self._early
        if missing.any():
            chosen = {} if missing.all() else {"reset_mask": missing}  # a dict of its own: Gymnasium empties it
            self._latest, _ = self.vector_env.reset(
                seed=seeds,  # type: ignore[arg-type]  # a list is taken too
                options={**(options or {}), **chosen} or None,
            )
        self._early = self._early & ~wanted
        return TensorDict({"observation": self._to_tensors(self._latest)}, batch_size=[self.num_envs])

    def _info(self, info: dict[str, Any], done: Any) -> TensorDict:
        # Of a row that is reset already, what belongs to the transition is in final_info.
        sources = ((info, ~self._early), (info.get("final_info", {}), self._early))
        values = {}
        for name, space in self.info_spaces.items():
            shape = space.shape or ()
            value = np.zeros((self.num_envs, *shape), space.dtype)
            for source, rows in sources:
                rows = rows & source.get(f"_{name}", name in source)
                if not rows.any():
                    continue
                self._unseen.discard(name)
                try:
                    value[rows] = np.asarray(source[name])[rows].reshape(-1, *shape)
                except (IndexError, TypeError, ValueError):
                    got = f"{self._name()} needs info {name!r} that fits {space}, but got {source[name]!r}."
                    raise ValueError(f"{got} Give info_keys its space: {{{name!r}: Box(...)}}.") from None
            values[name] = spaces.from_numpy(space, value, self.device)
        if self._unseen and done.any():
            known = sorted({key for source, _ in sources for key in source if not key.startswith("_")})
            raise ValueError(
                f"{self._name()} needs info_keys that its info has, but got {sorted(self._unseen)} beside {known}."
            )
        return TensorDict(values, batch_size=[self.num_envs])

    def _to_tensors(self, observation: Any) -> spaces.Value:
        return spaces.from_numpy(self.single_observation_space, observation, self.device)

    def _column(self, values: Any, dtype: Any) -> Tensor:
        return spaces.tensor(np.array(values, dtype)[:, None], self.device)

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        if self.render_mode is None:
            raise RuntimeError(f'{self._name()} needs render_mode="rgb_array" at construction for render, but got None.')
        frames: Any = self.vector_env.render()
        return tuple(frames if envs is None else [frames[row] for row in envs])

    def close(self) -> None:
        self.vector_env.close()
