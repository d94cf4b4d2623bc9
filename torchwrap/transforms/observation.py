"""Transforms of each observation by itself."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike
from tensordict import TensorDict
from torch import Tensor

from torchwrap import random, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import ConstantBuffer
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import ObservationTransform, Transform


class TransformObservation(ObservationTransform):
    """Applies a function to the batch of observations.

    Args:
        func: takes observations `(num_envs, *shape)` (a TensorDict for `Dict` and `Tuple` spaces) and returns new ones.
        observation_space: the space of a single env's new observation. None keeps the space below.

    Raises:
        TypeError, ValueError: from `setup`, if `func` fails on zeros or returns what does not fit the space.

    >>> import torch; from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(2,)), TransformObservation(lambda obs: obs / 2))
    >>> env.reset()["observation"]
    tensor([[0., 5.]])
    """

    def __init__(
        self, func: Callable[[Value], Value], observation_space: gymnasium.Space[Any] | None = None
    ) -> None:
        super().__init__()
        self.func = validation.function("TransformObservation", "func", func)
        self.observation_space = spaces.optional_space(
            "TransformObservation", "observation_space", observation_space
        )

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        above = below if self.observation_space is None else self.observation_space
        spaces.check_function(
            "TransformObservation", "observations", self.func, below, above, signature
        )
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Value) -> Value:
        return self.func(observation)


class AddNoise(ObservationTransform):
    """Adds random numbers to observations, as sensors do: each component, env and step has its own.

    Args:
        scale: standard deviation of normal noise, or the largest size of uniform noise; at least 0, a number or an array that
            broadcasts to the observation.
        distribution: "normal" or "uniform".
        in_eval: whether `env.eval()` keeps the noise.

    Shape: a Box of floats. The space above has the same shape and dtype, but no bounds.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(2,)), AddNoise([0.0, 0.1], "uniform"))
    >>> env.reset(seed=0)["observation"]
    tensor([[ 0.0000, 10.0841]])
    """

    factors = ConstantBuffer()

    def __init__(
        self,
        scale: ArrayLike,
        distribution: Literal["normal", "uniform"] = "normal",
        *,
        in_eval: bool = True,
    ) -> None:
        super().__init__()
        numbers = np.asarray(scale)
        if numbers.dtype.kind not in "iuf" or not (np.isfinite(numbers) & (numbers >= 0)).all():
            raise ValueError(
                f"AddNoise needs a scale of finite numbers of at least 0, but got {scale!r}."
            )
        if distribution not in ("normal", "uniform"):
            raise ValueError(
                f'AddNoise needs distribution="normal" or "uniform", but got {distribution!r}.'
            )
        self.scale, self.distribution, self.in_eval = (
            numbers,
            distribution,
            validation.flag("AddNoise", "in_eval", in_eval),
        )

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("AddNoise", "observation", signature.single_observation_space, of="floats")
        try:
            np.broadcast_to(self.scale, box.shape)
        except ValueError:
            raise ValueError(
                f"AddNoise needs a scale that broadcasts to {box.shape}, but got {self.scale.shape}."
            ) from None
        factors = torch.as_tensor(self.scale, dtype=spaces.dtype(box), device=signature.device)
        self.register_buffer("factors", factors, persistent=False)
        self.stream, signature = signature.stream()
        return signature.replace(
            single_observation_space=gymnasium.spaces.Box(-np.inf, np.inf, box.shape, box.dtype)
        )

    def deployed(self) -> Transform:
        return self if self.in_eval else Transform()

    def observation(self, observation: Tensor) -> Tensor:
        if not (self.training or self.in_eval):
            return observation
        key, shape = self.stream.key(), observation.shape[1:]
        noise = (
            random.normal(key, shape=shape)
            if self.distribution == "normal"
            else random.uniform(key, -1, 1, shape)
        )
        return observation + self.factors * noise.to(observation.dtype)


class ClipObservation(ObservationTransform):
    """Clips every component of the observation, as Stable-Baselines3's `VecNormalize` does at -10 and 10.

    Args:
        min_obs, max_obs: the bounds.

    Shape: a Box of numbers; the new one has the same shape and dtype, and clipped bounds.

    >>> import torch; from tensordict import TensorDict
    >>> ClipObservation(-1, 1)(TensorDict({"observation": torch.tensor([-3.0, 0.5])}, [2]))["observation"]
    tensor([-1.0000,  0.5000])
    """

    def __init__(self, min_obs: float, max_obs: float) -> None:
        super().__init__()
        self.min_obs = self.low = validation.number("ClipObservation", "min_obs", min_obs)
        self.max_obs = self.high = validation.number(
            "ClipObservation", "max_obs", max_obs, low=self.min_obs
        )

    def setup(self, signature: Signature) -> Signature:
        space = spaces.box(
            "ClipObservation", "observation", signature.single_observation_space, of="numbers"
        )
        dtype = spaces.dtype(space)
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        fits = self.min_obs <= limits.max and self.max_obs >= limits.min
        if dtype.is_floating_point:
            self.low, self.high = (
                spaces.bound(self.min_obs, dtype),
                spaces.bound(self.max_obs, dtype),
            )
        elif fits:
            self.low, self.high = (
                math.ceil(max(self.min_obs, limits.min)),
                math.floor(min(self.max_obs, limits.max)),
            )
        if not fits or self.low > self.high:
            raise ValueError(
                f"ClipObservation needs bounds with a {space.dtype} value between them, but got {self!r}."
            )
        low, high = (
            np.clip(bound, self.low, self.high).astype(space.dtype)
            for bound in (space.low, space.high)
        )
        return signature.replace(
            single_observation_space=gymnasium.spaces.Box(low, high, space.shape, space.dtype)
        )

    def observation(self, observation: Tensor) -> Tensor:
        return observation.clamp(self.low, self.high)


class FlattenObservation(ObservationTransform):
    """Flattens the observation into a vector, as `gymnasium.spaces.flatten` does: discrete components become one-hot.

    Shape: any space to `(num_envs, gymnasium.spaces.flatdim(space))`. As in Gymnasium, the dtype is one that holds all parts,
    float64 for integers and floats. `DtypeObservation(np.float32)` above it casts.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, observation_space=gymnasium.spaces.Discrete(3)), FlattenObservation())
    >>> env.reset()["observation"]
    tensor([[1, 0, 0],
            [0, 1, 0]])
    """

    def setup(self, signature: Signature) -> Signature:
        self.space = signature.single_observation_space
        flat = gymnasium.spaces.utils.flatten_space(self.space)
        self.dtype = spaces.dtype(flat)
        return signature.replace(single_observation_space=flat)

    def observation(self, observation: Value) -> Tensor:
        return spaces.flatten(self.space, observation, self.dtype)


class DtypeObservation(ObservationTransform):
    """Casts observations to another dtype.

    Args:
        dtype: a dtype of NumPy or PyTorch, or the name of one.

    Shape: unchanged. The space becomes a Box with the same bounds; `MultiDiscrete` stays `MultiDiscrete`.

    Raises:
        TypeError: for a dtype that NumPy and PyTorch do not share, and from `setup` for bounds that it cannot represent.

    >>> import torch; from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> images = gymnasium.spaces.Box(0, 255, (2,), np.uint8)
    >>> TransformedEnv(ScriptedEnv(1, observation_space=images), DtypeObservation("float32")).reset()["observation"]
    tensor([[ 0., 10.]])
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype
        found = [
            np.dtype(name)
            for name, torch_dtype in spaces.TORCH_DTYPES.items()
            if dtype is torch_dtype
        ]
        named = isinstance(dtype, np.dtype | str) or (
            isinstance(dtype, type) and issubclass(dtype, np.generic | int | float)
        )
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            found += (
                [np.dtype(dtype)] if named and np.dtype(dtype).str in spaces.TORCH_DTYPES else []
            )
        if not found:
            needed = "a dtype of NumPy or PyTorch with which both compute real numbers"
            raise TypeError(f"DtypeObservation needs {needed}, but got {validation.shown(dtype)}.")
        self.numpy_dtype = found[0]

    def setup(self, signature: Signature) -> Signature:
        space, dtype = signature.single_observation_space, self.numpy_dtype
        try:
            if isinstance(space, gymnasium.spaces.Box):
                if dtype.kind == "i" and not np.isfinite([space.low, space.high]).all():
                    raise ValueError(
                        "it has infinite bounds"
                    )  # which Gymnasium would replace by finite ones
                with (
                    warnings.catch_warnings()
                ):  # Gymnasium warns about bounds that are infinite or rounded
                    warnings.simplefilter("ignore")
                    new: gymnasium.Space[Any] = gymnasium.spaces.Box(
                        space.low, space.high, space.shape, dtype
                    )
            elif isinstance(space, gymnasium.spaces.MultiDiscrete):
                new = gymnasium.spaces.MultiDiscrete(space.nvec, dtype, start=space.start)
            elif isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiBinary):
                count, start = spaces.counts(space)
                new = gymnasium.spaces.Box(start, start + count - 1, space.shape or (), dtype)
            else:
                raise TypeError("it is not a single array")
            self.torch_dtype = spaces.dtype(new)
        except (TypeError, ValueError, AssertionError, OverflowError) as error:
            raise TypeError(
                f"DtypeObservation needs a space whose values fit {dtype}, but got {space}: {error}."
            ) from error
        return signature.replace(single_observation_space=new)

    def observation(self, observation: Tensor) -> Tensor:
        return observation.to(self.torch_dtype)


class FilterObservation(ObservationTransform):
    """Keeps selected parts of a `Dict` or `Tuple` observation.

    Args:
        filter_keys: the keys to keep, or the indices for a `Tuple`.

    Shape: a `Dict` or `Tuple` to the same kind of space with these parts; for a `Tuple` in the order of `filter_keys`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> parts = gymnasium.spaces.Dict(left=gymnasium.spaces.Discrete(5), right=gymnasium.spaces.Discrete(5))
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=parts), FilterObservation(["left"]))
    >>> list(env.reset()["observation"].keys())
    ['left']
    """

    def __init__(self, filter_keys: Sequence[str | int]) -> None:
        super().__init__()
        if not isinstance(filter_keys, list | tuple) or not all(
            type(key) in (str, int) for key in filter_keys
        ):
            raise TypeError(
                f"FilterObservation needs filter_keys as a list of strings or integers, but got {filter_keys!r}."
            )
        if not filter_keys or len(set(filter_keys)) != len(filter_keys):
            raise ValueError(
                f"FilterObservation needs filter_keys with one or more distinct keys, but got {filter_keys!r}."
            )
        self.filter_keys = filter_keys

    def setup(self, signature: Signature) -> Signature:
        space, keys = signature.single_observation_space, self.filter_keys
        if not isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
            raise TypeError(
                f"FilterObservation needs a Dict or Tuple observation space, but got {space}."
            )
        parts: dict[Any, Any] = (
            {**space.spaces}
            if isinstance(space, gymnasium.spaces.Dict)
            else dict(enumerate(space.spaces))
        )
        if not set(keys) <= set(parts):
            raise ValueError(
                f"FilterObservation needs filter_keys among {sorted(parts)}, but got {keys!r}."
            )
        new: gymnasium.Space[Any] = gymnasium.spaces.Tuple([parts[key] for key in keys])
        self.source_of = {str(index): str(key) for index, key in enumerate(keys)}
        if isinstance(space, gymnasium.spaces.Dict):
            new = spaces.dict_like(space, {str(key): parts[key] for key in keys})
            self.source_of = {key: key for key in new.spaces}
        return signature.replace(single_observation_space=new)

    def observation(self, observation: Value) -> Value:
        parts = {key: spaces.at(observation, (source,)) for key, source in self.source_of.items()}
        return TensorDict(parts, batch_size=observation.batch_size)  # type: ignore[union-attr]


class ReshapeObservation(ObservationTransform):
    """Reshapes observations.

    Args:
        shape: the new shape of a single env's observation, with as many elements as the old one.

    Shape: a Box `(num_envs, *old_shape)` to `(num_envs, *shape)`, with the bounds reshaped.

    >>> import torch; from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> TransformedEnv(ScriptedEnv(3, observation_shape=(4,)), ReshapeObservation((2, 2))).reset()["observation"].shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = validation.sizes("ReshapeObservation", "shape", shape, at_least=1)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("ReshapeObservation", "observation", signature.single_observation_space)
        if math.prod(self.shape) != math.prod(box.shape):
            raise ValueError(
                f"ReshapeObservation needs a shape with {math.prod(box.shape)} elements, but got {self.shape}."
            )
        self.num_dims = len(box.shape)
        low, high = box.low.reshape(self.shape), box.high.reshape(self.shape)
        return signature.replace(
            single_observation_space=gymnasium.spaces.Box(low, high, self.shape, box.dtype)
        )

    def observation(self, observation: Tensor) -> Tensor:
        return observation.reshape(
            *observation.shape[: observation.dim() - self.num_dims], *self.shape
        )
