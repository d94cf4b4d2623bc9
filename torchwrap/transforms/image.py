"""Transforms of images: `(num_envs, height, width)` or `(num_envs, height, width, channels)`, uint8."""

from __future__ import annotations

import functools
import math
from typing import Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from torchwrap import random
from torchwrap._core import validation
from torchwrap._core.buffers import ConstantBuffer
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import ObservationTransform


def _require_images(owner: str, signature: Signature, channels: str = "") -> gymnasium.spaces.Box:
    space = signature.single_observation_space
    is_image = (
        isinstance(space, gymnasium.spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) in (2, 3)
    )
    if not is_image or (space.low != 0).any() or (space.high != 255).any():  # type: ignore[attr-defined]
        raise TypeError(
            f"{owner} needs images as Box(0, 255, (height, width[, channels]), uint8), but got {space}."
        )
    if channels and space.shape[2:] != (3,):  # type: ignore[index]
        raise ValueError(f"{owner} needs images {channels}, but got {space}.")
    return space  # type: ignore[return-value]


class GrayscaleObservation(ObservationTransform):
    """Converts RGB images to grayscale.

    Args:
        keep_dim: whether to keep the channel dimension, with size 1.
        formula: "gymnasium" is 0.2125 red + 0.7154 green + 0.0721 blue in float64, truncated to uint8. "opencv" is 0.299 red
            + 0.587 green + 0.114 blue, rounded as in OpenCV's `COLOR_RGB2GRAY`: CleanRL's, Stable-Baselines3's and ALE's.

    Shape: `(height, width, 3)` uint8 to `(height, width)` or `(height, width, 1)`.

    >>> from tensordict import TensorDict
    >>> white = torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)
    >>> GrayscaleObservation()(TensorDict({"observation": white}, [1]))["observation"]
    tensor([[[255]]], dtype=torch.uint8)
    """

    masked_reset = True

    def __init__(
        self, keep_dim: bool = False, *, formula: Literal["gymnasium", "opencv"] = "gymnasium"
    ) -> None:
        super().__init__()
        self.keep_dim = validation.flag("GrayscaleObservation", "keep_dim", keep_dim)
        if formula not in ("gymnasium", "opencv"):
            raise ValueError(
                f'GrayscaleObservation needs formula="gymnasium" or "opencv", but got {formula!r}.'
            )
        self.formula = formula

    def setup(self, signature: Signature) -> Signature:
        height, width, _ = _require_images(
            "GrayscaleObservation", signature, "with 3 channels"
        ).shape
        shape = (height, width, *(1,) * self.keep_dim)
        return signature.replace(
            single_observation_space=gymnasium.spaces.Box(0, 255, shape, np.uint8)
        )

    def observation(self, observation: Tensor) -> Tensor:
        if self.formula == "opencv":  # in units of 2**-15
            red, green, blue = (channel.int() for channel in observation.unbind(-1))
            gray = (9798 * red + 19235 * green + 3735 * blue + 16384) >> 15
        else:
            red, green, blue = (channel.double() for channel in observation.unbind(-1))
            gray = 0.2125 * red + 0.7154 * green + 0.0721 * blue
        return (gray.unsqueeze(-1) if self.keep_dim else gray).to(torch.uint8)


class ResizeObservation(ObservationTransform):
    """Shrinks images. Each new pixel is the mean of the area that it covers, bit-identical to OpenCV's `INTER_AREA`.

    If both ratios are integers, the sums over blocks are exact. Otherwise columns and then rows are weighted sums in float32,
    in OpenCV's order. Halves are rounded to even, except at exactly half the size, where they are rounded up as in OpenCV.

    Args:
        shape: the new (height, width), at most the old one.

    Shape: `(height, width)` or `(height, width, channels)` uint8 to `shape` or `(*shape, channels)`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> images = gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    >>> TransformedEnv(ScriptedEnv(1, observation_space=images), ResizeObservation((84, 84))).reset()["observation"].shape
    torch.Size([1, 84, 84, 3])
    """

    masked_reset = True
    row_indices, row_weights, column_indices, column_weights = (ConstantBuffer() for _ in range(4))

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        if not isinstance(shape, tuple | list) or len(shape) != 2:
            raise TypeError(f"ResizeObservation needs shape as (height, width), but got {shape!r}.")
        self.shape = validation.sizes("ResizeObservation", "shape", shape, at_least=1)

    def setup(self, signature: Signature) -> Signature:
        space = _require_images("ResizeObservation", signature)
        old, new = space.shape[:2], self.shape
        if new[0] > old[0] or new[1] > old[1]:
            raise ValueError(
                f"ResizeObservation only shrinks images and needs a shape of at most {old}, but got {new}."
            )
        self.row, self.column = (-3, -2) if len(space.shape) == 3 else (-2, -1)
        # The pixels (height, width) per new pixel, if both are integers.
        self.block = (
            (old[0] // new[0], old[1] // new[1])
            if old[0] % new[0] == old[1] % new[1] == 0
            else None
        )
        for name, old_size, new_size in (("row", old[0], new[0]), ("column", old[1], new[1])):
            indices, weights = _area_taps(old_size, new_size)
            self.register_buffer(f"{name}_indices", indices.to(signature.device), persistent=False)
            self.register_buffer(f"{name}_weights", weights.to(signature.device), persistent=False)
        return signature.replace(
            single_observation_space=gymnasium.spaces.Box(
                0, 255, (*new, *space.shape[2:]), np.uint8
            )
        )

    def observation(self, observation: Tensor) -> Tensor:
        row, column = self.row, self.column
        if self.block is not None:
            total = _sum_blocks(
                _sum_blocks(observation.int(), row, self.block[0]), column, self.block[1]
            )
            if self.block == (2, 2):
                return (total + 2 >> 2).to(torch.uint8)
            mean = total.float() * (1 / math.prod(self.block))
        else:
            # Columns are transposed to rows first, because the pixels of a row are contiguous in memory.
            image = observation.transpose(row, column).to(
                torch.float32, memory_format=torch.contiguous_format
            )
            mean = (
                _sum_taps(image, row, self.column_indices, self.column_weights)
                .transpose(row, column)
                .contiguous()
            )
            mean = _sum_taps(mean, row, self.row_indices, self.row_weights)
        return mean.round().clamp(0, 255).to(torch.uint8)


class _Noise(ObservationTransform):
    """Base for transforms that replace pixels by noise: integers in [0, 255), as in Gymnasium."""

    gray_limits = ConstantBuffer()

    def __init__(self, is_noise_grayscale: bool) -> None:
        super().__init__()
        self.is_noise_grayscale = validation.flag(
            type(self).__name__, "is_noise_grayscale", is_noise_grayscale
        )

    def setup(self, signature: Signature) -> Signature:
        channels = "with 3 channels for is_noise_grayscale" if self.is_noise_grayscale else ""
        _require_images(type(self).__name__, signature, channels)
        # Gymnasium's gray noise is a sum of three integers, below 255 * 0.2989, 255 * 0.5870 and 255 * 0.1140, rounded down.
        self.register_buffer(
            "gray_limits", torch.tensor([76, 149, 29], device=signature.device), persistent=False
        )
        self.stream, signature = signature.stream()
        return signature

    def _add_noise(self, images: Tensor, pixels: Tensor) -> Tensor:
        key, gray = self.stream.key().fold_in(1), self.is_noise_grayscale
        noise = random.integers(key, self.gray_limits if gray else 255, shape=images.shape[1:])
        noise = (noise.sum(-1, keepdim=True) if gray else noise).to(torch.uint8)
        return torch.where(pixels if images.dim() == 3 else pixels.unsqueeze(-1), noise, images)


class AddWhiteNoise(_Noise):
    """Replaces random pixels by noise.

    Args:
        probability_of_noise_per_pixel: probability with which each pixel is replaced, in [0, 1).
        is_noise_grayscale: whether the noise has the same value in all three channels, which the images then need.

    Shape: unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> images = gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    >>> TransformedEnv(ScriptedEnv(1, observation_space=images), AddWhiteNoise(0.5)).reset()["observation"].shape
    torch.Size([1, 210, 160, 3])
    """

    def __init__(
        self, probability_of_noise_per_pixel: float, is_noise_grayscale: bool = False
    ) -> None:
        super().__init__(is_noise_grayscale)
        name, probability = "probability_of_noise_per_pixel", probability_of_noise_per_pixel
        self.probability_of_noise_per_pixel = validation.probability(
            "AddWhiteNoise", name, probability
        )

    def observation(self, observation: Tensor) -> Tensor:
        noisy = (
            random.uniform(self.stream.key(), shape=observation.shape[1:3])
            < self.probability_of_noise_per_pixel
        )
        return self._add_noise(observation, noisy)


class ObstructView(_Noise):
    """Covers squares at random positions with noise.

    Args:
        obstructed_pixels_ratio: area of all squares together as a fraction of the image, in [0, 1). They cover less of it if
            they overlap or cross its border.
        obstruction_width: width of a square, in pixels.
        is_noise_grayscale: whether the noise has the same value in all three channels, which the images then need.

    Shape: unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> images = gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    >>> TransformedEnv(ScriptedEnv(1, observation_space=images), ObstructView(0.3, 20)).reset()["observation"].shape
    torch.Size([1, 210, 160, 3])
    """

    def __init__(
        self,
        obstructed_pixels_ratio: float,
        obstruction_width: int,
        is_noise_grayscale: bool = False,
    ) -> None:
        super().__init__(is_noise_grayscale)
        name, ratio = "obstructed_pixels_ratio", obstructed_pixels_ratio
        self.obstructed_pixels_ratio = validation.probability("ObstructView", name, ratio)
        self.obstruction_width = validation.integer(
            "ObstructView", "obstruction_width", obstruction_width, at_least=1
        )

    def setup(self, signature: Signature) -> Signature:
        height, width = _require_images("ObstructView", signature).shape[:2]
        self.num_squares = int(
            height * width * (self.obstructed_pixels_ratio / self.obstruction_width**2)
        )
        return super().setup(signature)

    def observation(self, observation: Tensor) -> Tensor:
        num_envs, height, width = observation.shape[:3]
        centers = random.integers(self.stream.key(), height * width, shape=(self.num_squares,))
        covered = centers.new_zeros(num_envs, height * width, dtype=torch.float32).scatter(
            1, centers, 1.0
        )
        # A pixel is covered if the square around it contains a center: a maximum over rows, then over columns.
        size = self.obstruction_width
        before, after = (size - 1) // 2, size // 2
        covered = nn.functional.pad(
            covered.view(num_envs, 1, height, width), (before, after, before, after)
        )
        covered = nn.functional.max_pool2d(
            nn.functional.max_pool2d(covered, (size, 1), 1), (1, size), 1
        )
        return self._add_noise(observation, covered[:, 0] > 0)


def _area_taps(old_size: int, new_size: int) -> tuple[Tensor, Tensor]:
    # Indices and weights of the old pixels that each new one covers: `(max_taps, new_size)`, padded with weight 0. Source:
    # OpenCV's computeResizeAreaTab.
    scale, pixels = old_size / new_size, np.arange(old_size)
    first = np.arange(new_size)[:, None] * scale
    covered = np.minimum(first + scale, pixels + 1) - np.maximum(first, pixels)
    covered[covered <= 1e-3] = 0
    max_taps = (covered > 0).sum(1).max()
    indices = ((covered > 0).argmax(1) + np.arange(max_taps)[:, None]) % old_size
    weights = covered[np.arange(new_size), indices] / np.minimum(scale, old_size - first[:, 0])
    return torch.from_numpy(indices), torch.from_numpy(weights.astype(np.float32))


def _sum_blocks(image: Tensor, dim: int, size: int) -> Tensor:
    # Sums of `size` neighbors, slice by slice, because a reduction over so few elements is slow, compiled or not.
    return functools.reduce(torch.add, image.unflatten(dim, (-1, size)).unbind(dim))


def _sum_taps(image: Tensor, dim: int, indices: Tensor, weights: Tensor) -> Tensor:
    # Weighted sums, tap by tap, because OpenCV rounds each product before it adds it.
    weights = weights.view(*weights.shape, *(1,) * (-1 - dim))
    products = [
        image.index_select(dim, tap) * weight for tap, weight in zip(indices, weights, strict=True)
    ]
    return functools.reduce(torch.add, products)
