"""to_torchrl: a torchwrap env as a TorchRL `EnvBase`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase

from torchwrap import spaces
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.interop import _checks
from torchwrap.wrappers import RecordVideo
from torchwrap.wrappers.wrapper import layers

_FLAGS = ("done", "terminated", "truncated")


def to_torchrl(env: Env) -> TorchRLEnvBase:
    """Makes a TorchRL env of a torchwrap env: for its collectors, losses, and transforms.

    `step_and_maybe_reset`, which `rollout` and `Collector` call, is one step of `env`, auto-reset included: without a device
    synchronization, and with true final observations. Put torchwrap's transforms on `env`, and this adapter last.

    Observations are under "observation"; `Dict` and `Tuple` spaces are nested. Actions of `Discrete` and `MultiDiscrete` are
    categorical, not one-hot. `info` and other keys that transforms add, such as "episode_return", are observation keys too;
    roots of new episodes hold infos of the reset, if there are any, or zeros. A step of a copy of `env` finds the keys.

    `set_seed` takes effect at the next reset: call it before a `Collector` is made, which resets. `train`, `eval`,
    `state_dict`, `to` and `close` reach `env`. `Collector.state_dict()` leaves out what `env` has learned.

    Args:
        env: any env, compiled or not. The result owns it from now on.

    Returns:
        The `EnvBase`, of batch size `(num_envs,)`. It shares the tensors of `env`: nothing is copied. `env` is its `.env`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = to_torchrl(ScriptedEnv(2, (1,), episode_lengths=(2, 3)))
    >>> data = env.rollout(3, break_when_any_done=False)
    >>> data["next", "observation"][0].flatten(), data["observation"][0].flatten()
    (tensor([1., 2., 1.]), tensor([0., 1., 0.]))
    """
    return TorchRLEnvBase(_checks.env("to_torchrl", env))


class TorchRLEnvBase(EnvBase):
    """A torchwrap env as a TorchRL env; made by `to_torchrl`."""

    def __init__(self, env: Env) -> None:
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.env = env
        self._next_seed: int | None = None
        extras = {key: spec_like(value) for key, value in _extra_values(env).items()}  # type: ignore[arg-type]
        self._extra_keys = list(extras)
        batch: dict[str, Any] = {"shape": self.batch_size, "device": self.device}
        column: dict[str, Any] = {"shape": (env.num_envs, 1), "device": self.device}
        observation = to_spec(env.single_observation_space, env.num_envs, env.device)
        self.observation_spec = Composite({"observation": observation, **extras}, **batch)
        self.full_action_spec = Composite(
            action=to_spec(env.single_action_space, env.num_envs, env.device), **batch
        )
        self.reward_spec = Unbounded(dtype=torch.float32, **column)
        self.full_done_spec = Composite(
            {key: Categorical(2, dtype=torch.bool, **column) for key in _FLAGS}, **batch
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        running = tensordict.get("_step", None)
        if (
            running is not None
        ):  # rollout(break_when_all_done=True) ignores the other rows, whose episodes have ended
            self.env.reset(mask=~running.reshape(self.env.num_envs))
        return self._tensordict(self.env.step_without_reset(tensordict["action"])[0]["next"])

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = None if mask is None else mask.view(-1)
        root = self.env.reset(**{"seed": self._next_seed, "mask": mask, **kwargs})
        self._next_seed = None
        extras = {key: self.observation_spec[key].zero() for key in self._extra_keys}
        return (
            self.full_done_spec.zero()
            .update(extras)
            .update(root.select("observation", "info", strict=False))
        )

    def _step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        transition, root = self.env.step(tensordict["action"])
        successor, preset = self._tensordict(transition["next"]), tensordict.get("next", None)
        if (
            preset is not None
        ):  # as in EnvBase.step: what the policy wrote, such as a recurrent state
            successor.update(preset.exclude(*successor.keys(True, True)))
        following, done = self.step_mdp(tensordict.set("next", successor)), successor["done"]

        at_start = RowMask(done)
        for key in self._extra_keys:
            following.set(
                key,
                spaces.apply(
                    lambda _, value: value.masked_fill(at_start.like(value), 0), successor.get(key)
                ),
            )
        for key in _FLAGS:
            following.set(key, torch.zeros_like(done))
        infos, of_root = following.get("info", {}), root.get("info", {})
        for key in set(infos.keys()).intersection(of_root.keys()):
            infos[key] = at_start.where(of_root[key], infos[key])
        return tensordict, following.set("observation", root["observation"])

    def _tensordict(self, values: TensorDictBase) -> TensorDict:
        return TensorDict(dict(values.items()), batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        super().close(raise_if_closed=raise_if_closed)
        self.env.close()


def _extra_values(env: Env) -> TensorDict:
    """The extra keys of a successor, which not every env has, from a step of a copy: `env` and its streams do not move."""
    memo: dict[int, Any] = {} if env.can_snapshot else {id(env.unwrapped): _StandIn(env.unwrapped)}
    for layer in reversed(layers(env)):
        if isinstance(layer, RecordVideo):  # it would write frames
            memo[id(layer)] = copy.deepcopy(layer.env, memo)
    probe = copy.deepcopy(env, memo).train()
    probe.reset(seed=0)
    return probe.step_without_reset(probe.sample_action())[0]["next"].exclude(
        "observation", "reward", *_FLAGS
    )


class _StandIn(Env):
    """An env of zeros with the description of another one, whose simulator cannot be copied."""

    can_snapshot = False
    host_stepped = True

    def __init__(self, env: Env) -> None:
        super().__init__(
            env.signature, spec=env.spec, metadata=env.metadata, render_mode=env.render_mode
        )
        self.info_spaces: dict[str, Space[Any]] = getattr(env, "info_spaces", {})

    def _step(self, action: spaces.Value) -> TensorDict:
        flag = torch.zeros(self.num_envs, 1, dtype=torch.bool, device=self.device)
        values: dict[str, spaces.Value] = {
            "reward": flag.float(),
            "terminated": flag,
            "truncated": flag.clone(),
        }
        if self.info_spaces:
            values["info"] = spaces.zeros(
                gym_spaces.Dict(self.info_spaces), self.num_envs, self.device
            )
        return self._reset().update(values)

    def _reset(self, mask: RowMask | None = None, options: Options | None = None) -> TensorDict:
        observation = spaces.zeros(self.single_observation_space, self.num_envs, self.device)
        return TensorDict({"observation": observation}, [self.num_envs])


def to_spec(space: Space[Any], num_envs: int, device: torch.device) -> TensorSpec:
    """The spec of a batch of values of a space. TorchRL cannot draw from a `Box` with an infinite bound: it is unbounded."""
    parts = spaces.children(space)
    if parts is not None:
        specs = {key: to_spec(part, num_envs, device) for key, part in parts.items()}
        return Composite(specs, shape=(num_envs,), device=device)
    form: dict[str, Any] = {
        "shape": (num_envs, *(space.shape or ())),
        "dtype": spaces.dtype(space),
        "device": device,
    }
    if isinstance(space, gym_spaces.MultiBinary):
        return Binary(**form)
    if isinstance(space, gym_spaces.Box):
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        largest = torch.finfo(low.dtype).max if low.is_floating_point() else 2**62
        if not (high.double() - low.double() <= largest).all():
            return Unbounded(**form)
    else:
        count = torch.as_tensor(
            space.nvec if isinstance(space, gym_spaces.MultiDiscrete) else space.n
        )  # type: ignore[attr-defined]
        low = torch.as_tensor(space.start)  # type: ignore[attr-defined]
        high = low + count - 1
        if not low.any():
            return MultiCategorical(count, **form) if low.dim() else Categorical(int(count), **form)
    low, high = (
        bound.to(device, form["dtype"]).expand(form["shape"]).clone() for bound in (low, high)
    )
    return Bounded(low, high, **form)


def spec_like(value: spaces.Value) -> TensorSpec:
    """An unbounded spec of a value, a Tensor or a TensorDict."""
    if not isinstance(value, Tensor):
        return Composite(
            {key: spec_like(value[key]) for key in value.keys()},
            shape=value.batch_size,
            device=value.device,
        )
    kind = Binary if value.dtype == torch.bool else Unbounded
    return kind(shape=value.shape, dtype=value.dtype, device=value.device)
