"""to_torchrl: a torchwrap env as a TorchRL `EnvBase`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from tensordict import TensorDict, TensorDictBase
from torchrl import data as specs
from torchrl.envs import EnvBase
from torchrl.envs.utils import make_composite_from_td

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.interop import _trainers
from torchwrap.wrappers import RecordVideo
from torchwrap.wrappers.wrapper import layers

_FLAGS = ("done", "terminated", "truncated")


def to_torchrl(env: Env) -> TorchRLEnvBase:
    """Makes a TorchRL env of a torchwrap env: for its collectors, losses, and transforms.

    `step_and_maybe_reset`, called by `rollout` and `Collector`, is one step of `env`, auto-reset
    included: without a device synchronization, and with true final observations. Put torchwrap's
    transforms on `env`, and this adapter last.

    Observations are under "observation"; `Dict` and `Tuple` spaces are nested. Actions of
    `Discrete` and `MultiDiscrete` are categorical, not one-hot. `info` and other keys that
    transforms add, such as "episode_return", are observation keys too; roots of new episodes hold
    infos of the reset, if there are any, or zeros. A step of a copy of `env` finds the keys.

    `set_seed` takes effect at the next reset: call it before a `Collector` is made, which resets.
    `train`, `eval`, `state_dict`, `to` and `close` reach `env`. `Collector.state_dict()` leaves out
    the `state_dict` of `env`.

    Args:
        env: any env, compiled or not. The result owns it from now on.

    Returns:
        The `EnvBase`, with batch size `(num_envs,)`. It shares the tensors of `env`: nothing is
        copied. `env` is its `.env`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = to_torchrl(ScriptedEnv(2, (1,), episode_lengths=(2, 3)))
    >>> data = env.rollout(3, break_when_any_done=False)
    >>> data["next", "observation"][0].flatten(), data["observation"][0].flatten()
    (tensor([1., 2., 1.]), tensor([0., 1., 0.]))
    """
    return TorchRLEnvBase(_trainers.require_env("to_torchrl", env))


class TorchRLEnvBase(EnvBase):
    """A torchwrap env as a TorchRL env; made by `to_torchrl`."""

    def __init__(self, env: Env) -> None:
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.env = env
        self._next_seed: int | None = None
        extras = _extra_values(env)
        self._extra_keys: list[Any] = list(extras.keys())
        observation = to_spec(env.single_observation_space, env.num_envs, env.device)
        action = to_spec(env.single_action_space, env.num_envs, env.device)
        batch: Any = {"shape": self.batch_size, "device": self.device}
        column: Any = {"shape": (env.num_envs, 1), "device": self.device}
        flag = specs.Categorical(2, dtype=torch.bool, **column)
        self.observation_spec = make_composite_from_td(extras)
        self.observation_spec["observation"] = observation
        self.full_action_spec = specs.Composite(action=action, **batch)
        self.reward_spec = specs.Unbounded(dtype=torch.float32, **column)
        self.full_done_spec = specs.Composite(dict.fromkeys(_FLAGS, flag), **batch)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        running = tensordict.get("_step", None)
        if running is not None:
            fault = "cannot step some envs alone, as rollout(break_when_all_done=True) asks for"
            remedy = (
                "Pass break_when_any_done=False alone, which resets finished envs, or call "
                "torchwrap.evaluate"
            )
            raise ValueError(refusal("to_torchrl", fault, remedy=remedy))
        transition, _ = self.env.step_without_reset(tensordict["action"])
        return self._tensordict(transition["next"])

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None:
            kwargs["mask"] = mask.view(-1)
        root = self.env.reset(**{"seed": self._next_seed, **kwargs})
        self._next_seed = None
        td = self.full_done_spec.zero()
        for key in self._extra_keys:
            td.set(key, self.observation_spec[key].zero())
        return td.update(root.select("observation", "info", strict=False))

    def _step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        transition, root = self.env.step(tensordict["action"])
        successor = self._tensordict(transition["next"])
        preset = tensordict.get("next", None)
        if preset is not None:
            # As in EnvBase.step: entries of the policy, such as a recurrent state.
            successor.update(preset.exclude(*successor.keys(True, True)))
        following = self.step_mdp(tensordict.set("next", successor))
        finished = RowMask(successor["done"])
        for key in _FLAGS:
            following.set(key, torch.zeros_like(successor[key]))
        for key in self._extra_keys:
            value = spaces.apply(
                lambda _, leaf: leaf.masked_fill(finished.like(leaf), 0),
                successor.get(key),
            )
            following.set(key, value)
        infos = following.get("info", {})
        for name, value in root.get("info", {}).items():
            if name in infos.keys():
                infos[name] = finished.where(value, infos[name])
        return tensordict, following.set("observation", root["observation"])

    def _tensordict(self, values: TensorDictBase) -> TensorDict:
        return TensorDict(dict(values.items()), batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        super().close(raise_if_closed=raise_if_closed)
        self.env.close()


def _extra_values(env: Env) -> TensorDict:
    """The extra keys of a successor, from a step of a copy: `env` and its streams do not move."""
    memo: dict[int, Any] = {}
    if not env.can_snapshot:
        memo[id(env.unwrapped)] = _ZeroEnv(env.unwrapped)
    for layer in reversed(layers(env)):
        if isinstance(layer, RecordVideo):  # it would write frames
            memo[id(layer)] = copy.deepcopy(layer.env, memo)
    probe = copy.deepcopy(env, memo).train()
    probe.reset(seed=0)
    transition, _ = probe.step_without_reset(probe.sample_action())
    return transition["next"].exclude("observation", "reward", *_FLAGS)


class _ZeroEnv(Env):
    """Stands in for a simulator, which cannot be copied: every value is zero."""

    def __init__(self, env: Env) -> None:
        super().__init__(env.signature)
        self.zeros = spaces.zero_successor(env.signature, env.info_spaces)

    def _step(self, action: spaces.Value) -> Any:
        return self.zeros.clone()

    def _reset(self, mask: RowMask, options: Options | None = None) -> Any:
        return self._step(mask.tensor).select("observation")


def to_spec(space: Space[Any], num_envs: int, device: torch.device) -> Any:
    """The spec of a batch of values of a space. A `Box` with an infinite bound is unbounded.

    TorchRL cannot draw from a bounded spec whose bounds differ by more than the dtype holds.
    """
    parts = spaces.children(space)
    if parts is not None:
        nested = {key: to_spec(part, num_envs, device) for key, part in parts.items()}
        return specs.Composite(nested, shape=(num_envs,), device=device)
    form: dict[str, Any] = {
        "shape": (num_envs, *(space.shape or ())),
        "dtype": spaces.dtype(space),
        "device": device,
    }
    if isinstance(space, MultiBinary):
        return specs.Binary(**form)
    if isinstance(space, Box):
        low: Any = space.low
        high: Any = space.high
        extent = high.astype(float) - low
        largest = np.finfo(low.dtype).max if low.dtype.kind == "f" else 2**62
        if not (extent <= largest).all():
            return specs.Unbounded(**form)
    else:
        count, low = spaces.counts(space)
        high = low + count - 1
        if not np.any(low):
            kind = specs.MultiCategorical if isinstance(space, MultiDiscrete) else specs.Categorical
            return kind(count, **form)
    bounds = []
    for bound in (low, high):
        bound = torch.as_tensor(bound, dtype=form["dtype"], device=device)
        bounds.append(bound.expand(form["shape"]).clone())
    return specs.Bounded(*bounds, **form)
