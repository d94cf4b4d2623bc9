"""Transforms of images: `(num_envs, height, width[, channels])`, uint8."""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from torchwrap import random
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import ObservationTransform


def _image_shape(
    owner: str,
    signature: Signature,
    needs_color: bool = False,
) -> tuple[int, ...]:
    """The shape of an image. Raises a TypeError or ValueError for other observations."""
    space = signature.single_observation_space
    shape = space.shape or ()
    image = Box(0, 255, shape, np.uint8)
    if len(shape) not in (2, 3) or space != image:
        must = "observation must be images of Box(0, 255, (height, width[, channels]), uint8)"
        raise TypeError(refusal(owner, must, space))
    if needs_color and shape[2:] != (3,):
        raise ValueError(refusal(owner, "observation must be images with 3 channels", space))
    return shape


class GrayscaleObservation(ObservationTransform):
    """Converts RGB images to grayscale.

    Args:
        keep_dim: whether to keep the channel dimension, with size 1.
        formula: "gymnasium" is 0.2125 red + 0.7154 green + 0.0721 blue in float64, truncated to
            uint8. "opencv" is 0.299 red + 0.587 green + 0.114 blue, rounded as in OpenCV's
            `COLOR_RGB2GRAY`: CleanRL's, Stable-Baselines3's and ALE's.

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
        owner = "GrayscaleObservation"
        self.keep_dim = validation.flag(owner, "keep_dim", keep_dim)
        self.formula = validation.choice(owner, "formula", formula, "gymnasium", "opencv")

    def setup(self, signature: Signature) -> Signature:
        shape = _image_shape("GrayscaleObservation", signature, needs_color=True)
        shape = (*shape[:2], 1) if self.keep_dim else shape[:2]
        return signature.replace(single_observation_space=Box(0, 255, shape, np.uint8))

    def observation(self, observation: Tensor) -> Tensor:
        if self.formula == "opencv":  # in units of 2**-15
            red, green, blue = observation.int().unbind(-1)
            gray = (9798 * red + 19235 * green + 3735 * blue + 16384) >> 15
        else:
            red, green, blue = observation.double().unbind(-1)
            gray = 0.2125 * red + 0.7154 * green + 0.0721 * blue
        gray = gray.to(torch.uint8)
        return gray.unsqueeze(-1) if self.keep_dim else gray


class ResizeObservation(ObservationTransform):
    """Shrinks images. Each new pixel is the mean of the area that it covers.

    Results are bit-identical to OpenCV's `INTER_AREA`. If both ratios are integers, the sums over
    blocks are exact. Otherwise columns and then rows are weighted sums in float32, in OpenCV's
    order. Halves are rounded to even, except at exactly half the size, where they are rounded up as
    in OpenCV.

    Args:
        shape: the new (height, width), at most the old one.

    Shape: `(height, width)` or `(height, width, channels)` uint8 to `shape` or
    `(*shape, channels)`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, observation_space=Box(0, 255, (210, 160, 3), np.uint8))
    >>> TransformedEnv(env, ResizeObservation((84, 84))).reset()["observation"].shape
    torch.Size([1, 84, 84, 3])
    """

    masked_reset = True
    row_indices: Tensor
    row_weights: Tensor
    column_indices: Tensor
    column_weights: Tensor

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = validation.sizes("ResizeObservation", "shape", shape, at_least=1)
        if len(self.shape) != 2:
            must = "shape must be (height, width)"
            raise TypeError(refusal("ResizeObservation", must, self.shape))

    def setup(self, signature: Signature) -> Signature:
        height, width, *channels = _image_shape("ResizeObservation", signature)
        new_height, new_width = self.shape
        if new_height > height or new_width > width:
            must = f"shape must be at most {(height, width)}, because images can only shrink"
            raise ValueError(refusal("ResizeObservation", must, self.shape))
        self.row = -2 - len(channels)
        self.column = -1 - len(channels)
        self.block: tuple[int, int] | None = None  # pixels per new pixel, if both are integers
        if height % new_height == width % new_width == 0:
            self.block = (height // new_height, width // new_width)
        indices, weights = _area_taps(height, new_height)
        self._register_constants(signature.device, row_indices=indices, row_weights=weights)
        indices, weights = _area_taps(width, new_width)
        self._register_constants(signature.device, column_indices=indices, column_weights=weights)
        above = Box(0, 255, (*self.shape, *channels), np.uint8)
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Tensor) -> Tensor:
        if self.block is None:
            mean = self._weighted_mean(observation)
        else:
            height, width = self.block
            total = _sum_blocks(observation.int(), self.row, height)
            total = _sum_blocks(total, self.column, width)
            if self.block == (2, 2):
                return (total + 2 >> 2).to(torch.uint8)
            mean = total.float() * (1 / (height * width))
        return mean.round().to(torch.uint8)  # at most 255: weights sum to 1

    def _weighted_mean(self, observation: Tensor) -> Tensor:
        # Heights move to the end, and back: columns, and then rows, are contiguous.
        image = observation.movedim(self.row, -1)
        image = image.to(torch.float32, memory_format=torch.contiguous_format)
        image = _sum_taps(image, self.row, self.column_indices, self.column_weights)
        image = image.movedim(-1, self.row).contiguous()
        return _sum_taps(image, self.row, self.row_indices, self.row_weights)


class _Noise(ObservationTransform):
    """Base for transforms that replace pixels by noise: integers in [0, 255), as in Gymnasium."""

    gray_limits: Tensor

    def __init__(self, is_noise_grayscale: bool) -> None:
        super().__init__()
        name = "is_noise_grayscale"
        self.is_noise_grayscale = validation.flag(type(self).__name__, name, is_noise_grayscale)

    def setup(self, signature: Signature) -> Signature:
        _image_shape(type(self).__name__, signature, needs_color=self.is_noise_grayscale)
        # Gymnasium's gray noise is a sum of integers below 255 * 0.2989, 255 * 0.5870 and
        # 255 * 0.1140.
        self._register_constants(signature.device, gray_limits=[76, 149, 29])
        self.stream, signature = signature.stream()
        return signature

    def _add_noise(
        self,
        images: Tensor,
        pixels: Tensor,
    ) -> Tensor:
        key = self.stream.key().fold_in(1)
        shape = images.shape[1:]
        if self.is_noise_grayscale:
            noise = random.integers(key, self.gray_limits, shape=shape)
            noise = noise.sum(-1, keepdim=True)
        else:
            noise = random.integers(key, 255, shape=shape)
        if images.dim() == 4:
            pixels = pixels.unsqueeze(-1)
        return torch.where(pixels, noise.to(torch.uint8), images)


class AddWhiteNoise(_Noise):
    """Replaces random pixels by noise.

    Args:
        probability_of_noise_per_pixel: probability with which each pixel is replaced, in [0, 1).
        is_noise_grayscale: whether the noise has the same value in all three channels. The images
            must have three then.

    Shape: unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, observation_space=Box(0, 255, (210, 160, 3), np.uint8))
    >>> TransformedEnv(env, AddWhiteNoise(0.5)).reset()["observation"].shape
    torch.Size([1, 210, 160, 3])
    """

    def __init__(
        self, probability_of_noise_per_pixel: float, is_noise_grayscale: bool = False
    ) -> None:
        super().__init__(is_noise_grayscale)
        self.probability_of_noise_per_pixel = validation.probability(
            "AddWhiteNoise", "probability_of_noise_per_pixel", probability_of_noise_per_pixel
        )

    def observation(self, observation: Tensor) -> Tensor:
        uniform = random.uniform(self.stream.key(), shape=observation.shape[1:3])
        return self._add_noise(observation, uniform < self.probability_of_noise_per_pixel)


class ObstructView(_Noise):
    """Covers squares at random positions with noise.

    Args:
        obstructed_pixels_ratio: area of all squares together as a fraction of the image, in [0, 1).
            They cover less of it if they overlap or cross its border.
        obstruction_width: width of a square, in pixels.
        is_noise_grayscale: whether the noise has the same value in all three channels. The images
            must have three then.

    Shape: unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, observation_space=Box(0, 255, (210, 160, 3), np.uint8))
    >>> TransformedEnv(env, ObstructView(0.3, 20)).reset()["observation"].shape
    torch.Size([1, 210, 160, 3])
    """

    def __init__(
        self,
        obstructed_pixels_ratio: float,
        obstruction_width: int,
        is_noise_grayscale: bool = False,
    ) -> None:
        super().__init__(is_noise_grayscale)
        self.obstructed_pixels_ratio = validation.probability(
            "ObstructView", "obstructed_pixels_ratio", obstructed_pixels_ratio
        )
        self.obstruction_width = validation.integer(
            "ObstructView", "obstruction_width", obstruction_width, at_least=1
        )

    def setup(self, signature: Signature) -> Signature:
        height, width, *_ = _image_shape("ObstructView", signature)
        squares_per_pixel = self.obstructed_pixels_ratio / self.obstruction_width**2
        self.num_squares = int(height * width * squares_per_pixel)
        return super().setup(signature)

    def observation(self, observation: Tensor) -> Tensor:
        num_envs, height, width, *_ = observation.shape
        key = self.stream.key()
        centers = random.integers(key, height * width, shape=(self.num_squares,))
        is_center = torch.zeros(num_envs, height * width, device=observation.device)
        is_center = is_center.scatter(1, centers, 1.0)
        is_center = is_center.view(num_envs, 1, height, width)
        # A pixel is covered if the square around it contains a center.
        size = self.obstruction_width
        before = (size - 1) // 2
        after = size // 2
        covered = pad(is_center, (before, after, before, after))
        covered = max_pool2d(covered, (size, 1), 1)
        covered = max_pool2d(covered, (1, size), 1)
        return self._add_noise(observation, covered[:, 0] > 0)


def _area_taps(old_size: int, new_size: int) -> tuple[Tensor, Tensor]:
    """Indices and weights of the old pixels that each new one covers: `(max_taps, new_size)`.

    They are padded with weight 0. Source: OpenCV's computeResizeAreaTab.
    """
    scale = old_size / new_size
    pixels = np.arange(old_size)
    new_pixels = np.arange(new_size)
    start = new_pixels[:, None] * scale
    covered = np.minimum(start + scale, pixels + 1) - np.maximum(start, pixels)
    covered[covered <= 1e-3] = 0
    is_covered = covered > 0
    taps = np.arange(is_covered.sum(1).max())
    indices = (is_covered.argmax(1) + taps[:, None]) % old_size
    weights = covered[new_pixels, indices] / np.minimum(scale, old_size - start[:, 0])
    return torch.from_numpy(indices), torch.from_numpy(weights.astype(np.float32))


def _sum_blocks(
    image: Tensor,
    dim: int,
    size: int,
) -> Tensor:
    """Sums of `size` neighbors, slice by slice: a reduction over so few elements is slow."""
    slices = image.unflatten(dim, (-1, size)).unbind(dim)
    return functools.reduce(torch.add, slices)


def _sum_taps(
    image: Tensor,
    dim: int,
    indices: Tensor,
    weights: Tensor,
) -> Tensor:
    """Weighted sums, tap by tap, because OpenCV rounds each product before it adds it."""
    weights = weights.view(*weights.shape, *(1,) * (-1 - dim))
    products = []
    for index, weight in zip(indices.unbind(), weights.unbind(), strict=True):
        products.append(image.index_select(dim, index).mul_(weight))
    return functools.reduce(Tensor.add_, products)
