"""TorchRL: a torchwrap env as an `EnvBase`, and a batched `EnvBase` as a torchwrap env."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec, Unbounded
from torchrl.envs import EnvBase, GymEnv, GymWrapper, TransformedEnv
from torchrl.envs.transforms import AutoResetEnv

from torchwrap import spaces
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Env, Options
from torchwrap.interop import _checks
from torchwrap.spaces import Signature
from torchwrap.wrappers import HumanRendering, RecordVideo
from torchwrap.wrappers.wrapper import layers

_FLAGS = ("done", "terminated", "truncated")


def to_torchrl(env: Env) -> TorchRLEnvBase:
    """Makes a TorchRL env of a torchwrap env: for its collectors, losses, and transforms.

    `step_and_maybe_reset`, which `rollout` and `Collector` call, is one step of `env`, auto-reset included: without a device
    synchronization, and with true final observations. A TorchRL `TransformedEnv` on it synchronizes in every step: put
    torchwrap's transforms on `env` instead where there is a choice.

    Observations are under "observation"; `Dict` and `Tuple` spaces are nested. Actions of `Discrete` and `MultiDiscrete` are
    categorical, not one-hot. `info` and other keys that transforms add, such as "episode_return", are observation keys too,
    because TorchRL wants to know all keys; roots of new episodes hold infos of the reset, if there are any, or zeros. A step
    of a copy of `env` finds the keys.

    `set_seed` takes effect at the next reset: call it before a `Collector` is made, which resets. TorchRL's global seeds have
    no effect. `train`, `eval`, `state_dict`, `to` and `close` reach `env`; a TorchRL `TransformedEnv` passes on the last two.
    `Collector.state_dict()` leaves out what `env` has learned: `saved["env_state_dict"] = env.state_dict()` adds it.

    Args:
        env: any env, compiled or not. The result owns it from now on.

    Returns:
        The `EnvBase`, of batch size `(num_envs,)`. Its tensors are those of `env`: nothing is copied. `env` is its `.env`.

    Raises:
        TypeError: if `env` is no torchwrap env.

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
        self.full_action_spec = Composite(action=to_spec(env.single_action_space, env.num_envs, env.device), **batch)
        self.reward_spec = Unbounded(dtype=torch.float32, **column)
        self.full_done_spec = Composite({key: Categorical(2, dtype=torch.bool, **column) for key in _FLAGS}, **batch)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        running = tensordict.get("_step", None)
        if running is not None:  # rollout(break_when_all_done=True) ignores the other rows, whose episodes have ended
            self.env.reset(mask=~running.reshape(self.env.num_envs))
        return self._tensordict(self.env.transition(tensordict["action"])[0]["next"])

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = None if mask is None else mask.view(-1)
        root = self.env.reset(**{"seed": self._next_seed, "mask": mask, **kwargs})
        self._next_seed = None
        extras = {key: self.observation_spec[key].zero() for key in self._extra_keys}
        return self.full_done_spec.zero().update(extras).update(root.select("observation", "info", strict=False))

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        transition, root = self.env.step(tensordict["action"])
        successor, preset = self._tensordict(transition["next"]), tensordict.get("next", None)
        if preset is not None:  # as in EnvBase.step: what the policy wrote, such as a recurrent state
            successor.update(preset.exclude(*successor.keys(True, True)))
        following, done = self.step_mdp(tensordict.set("next", successor)), successor["done"]

        at_start = RowMask(done)
        for key in self._extra_keys:
            following.set(key, spaces.apply(lambda _, value: value.masked_fill(at_start.like(value), 0), successor.get(key)))
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
    """The keys of a successor besides those that every env has, from a step of a copy: `env` and its streams do not move."""
    memo: dict[int, Any] = {} if env.can_snapshot else {id(env.unwrapped): _StandIn(env.unwrapped)}
    for layer in reversed(layers(env)):
        if isinstance(layer, HumanRendering | RecordVideo):  # they would show or write frames
            memo[id(layer)] = copy.deepcopy(layer.env, memo)
    probe = copy.deepcopy(env, memo).train()
    probe.reset(seed=0)
    return probe.transition(probe.sample_action())[0]["next"].exclude("observation", "reward", *_FLAGS)


class _StandIn(Env):
    """An env of zeros with the description of another one, whose simulator cannot be copied."""

    can_snapshot = False
    host_stepped = True

    def __init__(self, env: Env) -> None:
        super().__init__(env.signature, spec=env.spec, metadata=env.metadata, render_mode=env.render_mode)
        self.info_spaces: dict[str, Space[Any]] = getattr(env, "info_spaces", {})
        self.extra_specs = env.extra_specs if isinstance(env, TorchRLEnv) else {}

    def _step(self, action: spaces.Value) -> TensorDict:
        flag = torch.zeros(self.num_envs, 1, dtype=torch.bool, device=self.device)
        values: dict[str, spaces.Value] = {"reward": flag.float(), "terminated": flag, "truncated": flag.clone()}
        if self.info_spaces:
            values["info"] = spaces.zeros(gym_spaces.Dict(self.info_spaces), self.num_envs, self.device)
        values |= {key: spec.zero() for key, spec in self.extra_specs.items()}
        return self._reset().update(values)

    def _reset(self, mask: RowMask | None = None, options: Options | None = None) -> TensorDict:
        observation = spaces.zeros(self.single_observation_space, self.num_envs, self.device)
        return TensorDict({"observation": observation}, [self.num_envs])


def from_torchrl(env_base: EnvBase) -> TorchRLEnv:
    """Makes a torchwrap env of a batched TorchRL env: for torchwrap's transforms, collectors and statistics.

    If the env has an observation under "observation", that is the observation, and its other observation keys, such as
    "step_count", are passed on in "next" under their names. Otherwise all observation keys together are a `Dict` observation.
    One-hot actions become `Discrete`. The seed of `reset` goes to the env's `set_seed`.

    Args:
        env_base: of batch size `(num_envs,)`, with the keys "action", "reward" and "done". The result owns it from now on.

    Raises:
        TypeError: if `env_base` is no `EnvBase`, or has a spec that no Gymnasium space of tensors can represent.
        ValueError: for another batch size, other keys, envs that reset themselves, and Gymnasium envs (`from_gymnasium`).

    >>> from torchrl.envs import PendulumEnv, SerialEnv
    >>> env = from_torchrl(SerialEnv(2, PendulumEnv))
    >>> env.single_action_space, sorted(env.single_observation_space)
    (Box(-2.0, 2.0, (1,), float32), ['params', 'th', 'thdot'])
    """
    if not isinstance(env_base, EnvBase):
        raise TypeError(f"from_torchrl needs a torchrl.envs.EnvBase, but got {type(env_base).__name__}: to_torchrl makes one.")
    return TorchRLEnv(env_base)


class TorchRLEnv(Env):
    """A batched TorchRL env as a torchwrap env; made by `from_torchrl`.

    Observations and extra keys are copies. It has no snapshots.
    """

    can_snapshot = False
    host_stepped = True

    def __init__(self, env_base: EnvBase) -> None:
        _check(env_base)
        observation = env_base.observation_spec
        self._has_observation = "observation" in observation.keys()
        observation_space = to_space(observation["observation"] if self._has_observation else observation)
        action_space = to_space(env_base.full_action_spec["action"], is_action=True)
        device = env_base.device or torch.device("cpu")
        super().__init__(Signature(env_base.batch_size[0], observation_space, action_space, device))
        self.env_base = env_base
        self._root_base: TensorDictBase | None = None  # what TorchRL acts on: it keeps more than observations

    @property
    def extra_specs(self) -> dict[str, TensorSpec]:
        specs = self.env_base.observation_spec
        return {key: spec for key, spec in specs.items() if self._has_observation and key != "observation"}

    def _step(self, action: spaces.Value) -> TensorDict:
        assert self._root_base is not None
        encoded = encode(self.env_base.full_action_spec["action"], action)
        root = self._root_base.set("action", encoded)
        stepped = self.env_base.step(root if self._live is None else root.set("_step", self._live.tensor))
        self._root_base, successor = self.env_base.step_mdp(stepped), stepped["next"].to_tensordict()  # a copy
        observation, reward = self._observation(successor), successor["reward"].float()
        terminated, extras = successor["terminated"], {key: successor[key] for key in self.extra_specs}
        # An env without the key "truncated" truncates where it is done and has not terminated.
        truncated = successor.get("truncated", successor["done"] & ~terminated)
        result = {"observation": observation, "reward": reward, "terminated": terminated, "truncated": truncated, **extras}
        return tensordict(result, self.num_envs)

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        if self._root_base is None or mask.numpy().all():
            self._root_base = self.env_base.reset()
        else:  # without the state in the root, which would be the initial one
            self._root_base.set("_reset", mask.column)
            self._root_base = self.env_base.reset(self._root_base, select_reset_only=True)
        return tensordict({"observation": self._observation(self._root_base.to_tensordict())}, self.num_envs)

    def _observation(self, td: TensorDict) -> spaces.Value:
        value, space = td["observation"] if self._has_observation else td, self.single_observation_space
        return spaces.build(space, lambda path, leaf: spaces.at(value, path).to(spaces.dtype(leaf)), self.num_envs)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        self.env_base.set_seed(seed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TorchRLEnv:
        super()._apply(fn, recurse)
        self.env_base.to(self.device)
        self._root_base = None if self._root_base is None else self._root_base.to(self.device)
        return self

    def close(self) -> None:
        self.env_base.close(raise_if_closed=False)


def _check(env_base: EnvBase) -> None:
    """Raises for envs that do not reset where they are told to, or have no rows."""
    name, layer = type(env_base).__name__, env_base
    while isinstance(layer, TransformedEnv) and not isinstance(layer, AutoResetEnv):
        layer = layer.base_env
    if isinstance(layer, AutoResetEnv) or vars(layer).get("_torchrl_native_autoreset", False):
        got = f"{name} with auto-reset, whose final observations are NaN: make it without auto_reset or native_autoreset"
        raise ValueError(f"from_torchrl needs an env that does not reset itself, but got {got}.")
    if type(layer) in (GymWrapper, GymEnv):  # others derive from them, such as the wrapper of Isaac Lab
        remedy = "torchwrap.from_gymnasium takes a Gymnasium vector env, and torchwrap.make an id"
        raise ValueError(f"from_torchrl needs an env of TorchRL's own, but got {type(layer).__name__}: {remedy}.")
    batch_size = tuple(env_base.batch_size)
    if len(batch_size) != 1:
        got = f"{name} of batch size {batch_size}: torchrl.envs.SerialEnv(num_envs, make) and ParallelEnv batch single envs"
        raise ValueError(f"from_torchrl needs an env of batch size (num_envs,), but got {got}.")
    for what, keys in (("action", env_base.full_action_spec), ("reward", env_base.full_reward_spec)):
        if set(keys.keys()) != {what}:
            got = f"{sorted(keys.keys())} in {name}: RenameTransform changes keys"
            raise ValueError(f'from_torchrl needs "{what}" as the only {what} key, but got {got}.')
    for key, spec in (("reward", env_base.full_reward_spec["reward"]), *env_base.full_done_spec.items()):
        if isinstance(spec, Composite) or spec.shape != (*batch_size, 1):
            raise ValueError(f'from_torchrl needs "{key}" of shape {(*batch_size, 1)}, but got {tuple(spec.shape)} in {name}.')


def to_spec(space: Space[Any], num_envs: int, device: torch.device) -> TensorSpec:
    """The spec of a batch of values of a space.

    A `Box` with an infinite bound is unbounded, because TorchRL cannot draw from one. `Discrete` and `MultiDiscrete` are
    categorical. Those that do not start at 0 are bounded integers.
    """
    parts = spaces.children(space)
    if parts is not None:
        specs = {key: to_spec(part, num_envs, device) for key, part in parts.items()}
        return Composite(specs, shape=(num_envs,), device=device)
    form: dict[str, Any] = {"shape": (num_envs, *(space.shape or ())), "dtype": spaces.dtype(space), "device": device}
    if isinstance(space, gym_spaces.MultiBinary):
        return Binary(**form)
    if isinstance(space, gym_spaces.Box):
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        largest = torch.finfo(low.dtype).max if low.is_floating_point() else 2**62
        if not (high.double() - low.double() <= largest).all():
            return Unbounded(**form)
    else:
        count = torch.as_tensor(space.nvec if isinstance(space, gym_spaces.MultiDiscrete) else space.n)  # type: ignore[attr-defined]
        low = torch.as_tensor(space.start)  # type: ignore[attr-defined]
        high = low + count - 1
        if not low.any():
            return MultiCategorical(count, **form) if low.dim() else Categorical(int(count), **form)
    low, high = (bound.to(device, form["dtype"]).expand(form["shape"]).clone() for bound in (low, high))
    return Bounded(low, high, **form)


def spec_like(value: spaces.Value) -> TensorSpec:
    """An unbounded spec of a value, a Tensor or a TensorDict."""
    if not isinstance(value, Tensor):
        return Composite({key: spec_like(value[key]) for key in value.keys()}, shape=value.batch_size, device=value.device)
    kind = Binary if value.dtype == torch.bool else Unbounded
    return kind(shape=value.shape, dtype=value.dtype, device=value.device)


def to_space(spec: TensorSpec, *, is_action: bool = False) -> Space[Any]:
    """The space of a single env, from the spec of a batch of them. Raises for specs that no space can represent.

    A one-hot action is `Discrete` or `MultiDiscrete`, any other one-hot or boolean value `MultiBinary`.

    >>> to_space(OneHot(3, shape=(2, 3)), is_action=True), to_space(OneHot(3, shape=(2, 3)))
    (Discrete(3), MultiBinary(3))
    """
    if isinstance(spec, Composite):
        return gym_spaces.Dict({key: to_space(part, is_action=is_action) for key, part in spec.items()})
    shape = tuple(spec.shape[1:])
    if is_action and isinstance(spec, OneHot) and len(shape) == 1:
        counts = [box.n for box in spec.space] if isinstance(spec, MultiOneHot) else []
        return gym_spaces.MultiDiscrete(counts) if counts else gym_spaces.Discrete(shape[0])
    if isinstance(spec, OneHot | Binary) or spec.dtype == torch.bool:
        if not shape:
            return gym_spaces.Discrete(2)
        return gym_spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if isinstance(spec, MultiCategorical):
        return gym_spaces.MultiDiscrete(spec.nvec[0].cpu().numpy())
    if isinstance(spec, Categorical):
        return gym_spaces.MultiDiscrete(np.full(shape, spec.space.n)) if shape else gym_spaces.Discrete(spec.space.n)
    if not isinstance(spec, Bounded | Unbounded):
        raise TypeError(f"from_torchrl needs specs of tensors, but got {type(spec).__name__}: ExcludeTransform drops keys.")
    dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
    if isinstance(spec, Bounded):
        low, high = spec.space.low, spec.space.high
        if (low != low[0]).any() or (high != high[0]).any():
            raise ValueError(f"from_torchrl needs the same bounds in all envs, but got {spec}.")
        return gym_spaces.Box(low[0].cpu().numpy(), high[0].cpu().numpy(), shape, dtype)
    if spec.dtype.is_floating_point:
        return gym_spaces.Box(-np.inf, np.inf, shape, dtype)
    limits = torch.iinfo(spec.dtype)
    return gym_spaces.Box(limits.min, limits.max, shape, dtype)


def encode(spec: TensorSpec, action: spaces.Value) -> spaces.Value:
    """An action of `to_space(spec, is_action=True)` as the spec wants it."""
    if isinstance(spec, Composite):
        return TensorDict({key: encode(part, action[key]) for key, part in spec.items()}, batch_size=spec.shape[:1])
    return (spec.encode(action) if isinstance(spec, OneHot) else action).to(spec.dtype)
