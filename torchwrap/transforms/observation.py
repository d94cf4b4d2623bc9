"""Transforms of each observation by itself."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.spaces.utils import flatten_space
from numpy.typing import ArrayLike
from tensordict import TensorDict
from torch import Tensor

from torchwrap import random, spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import (
    AugmentedObservation,
    ObservationTransform,
    Transform,
)


class TransformObservation(ObservationTransform):
    """Applies a function to the batch of observations.

    Args:
        func: takes observations `(num_envs, *shape)` (a TensorDict for `Dict` and `Tuple` spaces)
            and returns new ones.
        observation_space: the space of a single env's new observation. None keeps the space below.

    Raises:
        TypeError, ValueError: from `setup`, if `func` fails on zeros or its result does not fit
            the space.

    >>> import torch; from torchwrap.testing import ScriptedEnv
    >>> from torchwrap.wrappers import TransformedEnv
    >>> halve = TransformObservation(lambda observation: observation / 2)
    >>> TransformedEnv(ScriptedEnv(1, observation_shape=(2,)), halve).reset()["observation"]
    tensor([[0., 5.]])
    """

    def __init__(
        self, func: Callable[[Value], Value], observation_space: Space[Any] | None = None
    ) -> None:
        super().__init__()
        owner = "TransformObservation"
        self.func = validation.function(owner, "func", func)
        self.observation_space = spaces.optional_space(
            owner, "observation_space", observation_space
        )

    def setup(self, signature: Signature) -> Signature:
        owner = "TransformObservation"
        below = signature.single_observation_space
        above = self.observation_space or below
        spaces.check_function(owner, "observations", self.func, below, above, signature)
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Value) -> Value:
        return self.func(observation)


class AddNoise(ObservationTransform):
    """Adds random numbers to observations, as sensors do: each component, env and step has its own.

    `AddNoise(0.1, period=None)` is a bias of the sensors, drawn for each episode, as Isaac Lab's
    `NoiseModelWithAdditiveBias`.

    Args:
        scale: standard deviation of normal noise, or the largest size of uniform noise; at least 0,
            a number or an array that broadcasts to the observation.
        distribution: "normal" or "uniform".
        in_eval: whether `env.eval()` keeps the noise.
        period: number of steps of an episode for which the noise stays the same. None is the whole
            episode.

    Shape: a Box of floats. The space above has the same shape and dtype, but no bounds.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> noise = AddNoise([0.0, 0.1], "uniform")
    >>> TransformedEnv(ScriptedEnv(1, observation_shape=(2,)), noise).reset(seed=0)["observation"]
    tensor([[ 0.0000, 10.0799]])
    """

    factors: Tensor

    def __init__(
        self,
        scale: ArrayLike,
        distribution: Literal["normal", "uniform"] = "normal",
        *,
        in_eval: bool = True,
        period: int | None = 1,
    ) -> None:
        super().__init__()
        self.scale = validation.numbers("AddNoise", "scale", scale, low=0)
        self.distribution = validation.choice(
            "AddNoise", "distribution", distribution, "normal", "uniform"
        )
        self.in_eval = validation.flag("AddNoise", "in_eval", in_eval)
        self.period = validation.period("AddNoise", period)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("AddNoise", "observation", signature.single_observation_space, of="floats")
        self._register_coefficients(box, signature.device, factors="scale")
        self.stream, signature = signature.stream()
        above = Box(-np.inf, np.inf, box.shape, box.dtype)
        return signature.replace(single_observation_space=above)

    def deployed(self) -> Transform:
        return self if self.in_eval else Transform()

    def observation(self, observation: Tensor) -> Tensor:
        if not (self.training or self.in_eval):
            return observation
        key = self.stream.key().hold(self.period)
        shape = observation.shape[1:]
        if self.distribution == "normal":
            noise = random.normal(key, shape=shape)
        else:
            noise = random.uniform(key, -1, 1, shape)
        return observation + self.factors * noise.to(observation.dtype)


class CommandObservation(AugmentedObservation):
    """Adds a random command to the observation, such as a velocity, which holds for some steps.

    It is uniform, and drawn at the start of an episode and every `period` steps, as Isaac Lab's
    `CommandTerm` does. `("next", "info", key)` is the command that the agent saw before the step,
    for rewards. To deploy a policy that takes the command from its caller, put the layers above on
    an env whose observation holds it.

    Args:
        low, high: bounds of the command, arrays of its shape.
        period: number of steps for which a command holds. None is the whole episode.
        flatten: whether to flatten the result into one vector, as Gymnasium's `flatten` does.
        key: key of the command in a `Dict` observation, and of the info.

    Shape: as for `LastActionObservation`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, (2,)), CommandObservation([-1.0], [1.0], period=500))
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([1, 3])
    """

    lowest: Tensor
    highest: Tensor

    def __init__(
        self,
        low: ArrayLike,
        high: ArrayLike,
        period: int | None,
        *,
        flatten: bool = True,
        key: str = "command",
    ) -> None:
        super().__init__()
        owner = "CommandObservation"
        self.low = validation.numbers(owner, "low", low, -1e38)  # float32 holds differences
        self.high = validation.numbers(owner, "high", high, np.min(self.low), 1e38)
        self.period = validation.period(owner, period)
        self.flatten = validation.flag(owner, "flatten", flatten)
        self.key = validation.text(owner, "key", key)

    def setup(self, signature: Signature) -> Signature:
        box = Box(np.float32(self.low), np.float32(self.high))
        self._register_constants(signature.device, lowest=box.low, highest=box.high)
        self.stream, signature = signature.stream()
        return self._add_space(signature, self.key, box)

    def _command(self, key: random.Key) -> Tensor:
        shape = tuple(self.lowest.shape)
        held = key.hold(self.period)
        return random.uniform(held, self.lowest, self.highest, shape)

    def step(self, td: TensorDict) -> TensorDict:
        key = self.stream.key()
        before = key._replace(draw=key.draw - 1)
        info = td.get("info", {})
        if self.key in info.keys():
            must = "key must differ from the infos of the layers below"
            raise ValueError(refusal("CommandObservation", must, repr(self.key)))
        td.set(("info", self.key), self._command(before))
        return self._add_entry(td, self._command(key))

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        return self._add_entry(td, self._command(self.stream.key()))


class ClipObservation(ObservationTransform):
    """Clips every component of the observation, as Stable-Baselines3's `VecNormalize` does.

    Args:
        min_obs, max_obs: the bounds; -10 and 10 in `VecNormalize`.

    Shape: a Box of numbers; the new one has the same shape and dtype, and clipped bounds.

    >>> import torch; from tensordict import TensorDict
    >>> td = TensorDict({"observation": torch.tensor([-3.0, 0.5])}, [2])
    >>> ClipObservation(-1, 1)(td)["observation"]
    tensor([-1.0000,  0.5000])
    """

    def __init__(
        self,
        min_obs: float,
        max_obs: float,
    ) -> None:
        super().__init__()
        owner = "ClipObservation"
        largest = sys.float_info.max
        self.min_obs = validation.number(owner, "min_obs", min_obs, high=largest)
        lowest = max(self.min_obs, -largest)
        self.max_obs = validation.number(owner, "max_obs", max_obs, lowest)
        self.low = self.min_obs
        self.high = self.max_obs

    def setup(self, signature: Signature) -> Signature:
        space = signature.single_observation_space
        box = spaces.box("ClipObservation", "observation", space, of="numbers")
        dtype = spaces.dtype(box)
        if dtype.is_floating_point:
            self.low = spaces.bound(self.min_obs, dtype)
            self.high = spaces.bound(self.max_obs, dtype)
        else:
            limits = torch.iinfo(dtype)
            self.low = math.ceil(max(self.min_obs, limits.min))
            self.high = math.floor(min(self.max_obs, limits.max))
        fits = -math.inf < self.high and self.low < math.inf
        if not fits or self.low > self.high:
            must = f"a {box.dtype} value must lie between min_obs and max_obs"
            raise ValueError(refusal("ClipObservation", must, repr(self)))
        clipped = np.clip([box.low, box.high], self.low, self.high)
        low, high = clipped.astype(box.dtype)
        above = Box(low, high, box.shape, box.dtype)
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Tensor) -> Tensor:
        return observation.clamp(self.low, self.high)


class FlattenObservation(ObservationTransform):
    """Flattens the observation into a vector, as `gymnasium.spaces.flatten` does.

    Discrete components become one-hot.

    Shape: any space to `(num_envs, gymnasium.spaces.flatdim(space))`. As in Gymnasium, the dtype
    holds all parts, such as float64 for integers and floats. `DtypeObservation(np.float32)` above
    it casts.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(2, observation_space=Discrete(3))
    >>> TransformedEnv(env, FlattenObservation()).reset()["observation"]
    tensor([[1, 0, 0],
            [0, 1, 0]])
    """

    def setup(self, signature: Signature) -> Signature:
        self.space = signature.single_observation_space
        flat = flatten_space(self.space)
        self.dtype = spaces.dtype(flat)
        return signature.replace(single_observation_space=flat)

    def observation(self, observation: Value) -> Tensor:
        return spaces.flatten(self.space, observation, self.dtype)


class DtypeObservation(ObservationTransform):
    """Casts observations to another dtype.

    Args:
        dtype: a dtype of NumPy or PyTorch, or its name.

    Shape: unchanged. The space becomes a Box with the same bounds; `MultiDiscrete` stays
    `MultiDiscrete`.

    Raises:
        TypeError: for a dtype that NumPy and PyTorch do not share, and from `setup` for bounds that
            it cannot represent.

    >>> import torch; from torchwrap.testing import ScriptedEnv
    >>> from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, observation_space=Box(0, 255, (2,), np.uint8))
    >>> TransformedEnv(env, DtypeObservation("float32")).reset()["observation"]
    tensor([[ 0., 10.]])
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.numpy_dtype = _numpy_dtype(dtype)
        self.dtype = self.numpy_dtype.name

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        try:
            above = _cast(below, self.numpy_dtype)
            self.torch_dtype = spaces.dtype(above)
        except (TypeError, ValueError, AssertionError, OverflowError) as error:
            must = f"the values of the space must fit dtype {self.numpy_dtype}"
            got = f"{below} ({error})"
            raise TypeError(refusal("DtypeObservation", must, got)) from error
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Tensor) -> Tensor:
        return observation.to(self.torch_dtype)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        numpy_dtype = np.dtype(name)
        if numpy_dtype.str in spaces.TORCH_DTYPES:
            return numpy_dtype
    must = "dtype must be a real dtype that NumPy and PyTorch share"
    raise TypeError(refusal("DtypeObservation", must, validation.shown(dtype)))


def _cast(space: Space[Any], dtype: np.dtype[Any]) -> Space[Any]:
    if isinstance(space, Box):
        # Gymnasium would replace infinite bounds by finite ones.
        if dtype.kind == "i" and not space.is_bounded():
            raise ValueError("it has infinite bounds")
        with warnings.catch_warnings():  # about bounds that are infinite or rounded
            warnings.simplefilter("ignore")
            return Box(space.low, space.high, space.shape, dtype)
    if isinstance(space, MultiDiscrete):
        return MultiDiscrete(space.nvec, dtype, start=space.start)
    if isinstance(space, Discrete | MultiBinary):
        count, start = spaces.counts(space)
        return Box(start, start + count - 1, space.shape or (), dtype)
    raise TypeError("it is not a single array")


class FilterObservation(ObservationTransform):
    """Keeps selected parts of a `Dict` or `Tuple` observation.

    Args:
        filter_keys: the keys to keep, or the indices for a `Tuple`.

    Shape: a `Dict` or `Tuple` to the same kind of space with these parts; for a `Tuple` in the
    order of `filter_keys`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, observation_space=Dict(left=Discrete(5), right=Discrete(5)))
    >>> env = TransformedEnv(env, FilterObservation(["left"]))
    >>> list(env.reset()["observation"].keys())
    ['left']
    """

    def __init__(self, filter_keys: Sequence[str | int]) -> None:
        super().__init__()
        must = "filter_keys must be a list of distinct strings or integers"
        fault = refusal("FilterObservation", must, repr(filter_keys))
        is_list = isinstance(filter_keys, list | tuple)
        if not is_list or not set(map(type, filter_keys)) <= {str, int}:
            raise TypeError(fault)
        if not filter_keys or len(set(filter_keys)) != len(filter_keys):
            raise ValueError(fault)
        self.filter_keys = filter_keys

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        parts = spaces.children(below)
        if parts is None:
            must = "the observation space must be a Dict or Tuple"
            raise TypeError(refusal("FilterObservation", must, below))
        keys = [str(key) for key in self.filter_keys]
        if not set(keys) <= set(parts):
            must = f"filter_keys must be among {list(parts)}"
            raise ValueError(refusal("FilterObservation", must, repr(self.filter_keys)))
        kept = {key: parts[key] for key in keys}
        above: Space[Any]
        if isinstance(below, Dict):
            above = spaces.dict_like(below, kept)
            keys = list(above.spaces)
        else:
            above = Tuple(list(kept.values()))
        self.source_of = dict(zip(spaces.children(above) or {}, keys, strict=True))
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Value) -> Value:
        parts = {}
        for key, source in self.source_of.items():
            parts[key] = spaces.entry(observation, (source,))
        return TensorDict(parts, batch_size=observation.batch_size)  # type: ignore[union-attr]


class ReshapeObservation(ObservationTransform):
    """Reshapes observations.

    Args:
        shape: the new shape of a single env's observation, with as many elements as the old one.

    Shape: a Box `(num_envs, *old_shape)` to `(num_envs, *shape)`, with the bounds reshaped.

    >>> import torch; from torchwrap.testing import ScriptedEnv
    >>> from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(3, observation_shape=(4,))
    >>> TransformedEnv(env, ReshapeObservation((2, 2))).reset()["observation"].shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = validation.sizes("ReshapeObservation", "shape", shape, at_least=1)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("ReshapeObservation", "observation", signature.single_observation_space)
        if math.prod(self.shape) != box.low.size:
            must = f"shape must have {box.low.size} elements"
            raise ValueError(refusal("ReshapeObservation", must, self.shape))
        self.num_dims = len(box.shape)
        low = box.low.reshape(self.shape)
        high = box.high.reshape(self.shape)
        above = Box(low, high, self.shape, box.dtype)
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Tensor) -> Tensor:
        batch = observation.shape[: observation.dim() - self.num_dims]
        return observation.reshape(*batch, *self.shape)
