"""Transforms of images: frames `(num_envs, height, width)` or `(num_envs, height, width, channels)`, uint8."""

from __future__ import annotations

import functools
import math

import gymnasium
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchwrap import arguments, masks, random
from torchwrap.buffer import Buffer
from torchwrap.spaces import Signature
from torchwrap.transforms.base import ObservationTransform


def _image(signature: Signature, name: str) -> gymnasium.spaces.Box:
    space = signature.single_observation_space
    fits = isinstance(space, gymnasium.spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
    if not fits or (space.low != 0).any() or (space.high != 255).any():  # type: ignore[attr-defined]
        raise TypeError(f"{name} needs images as Box(0, 255, (height, width[, channels]), uint8), but got {space}.")
    return space  # type: ignore[return-value]


def _image_space(*shape: int) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(0, 255, shape, np.uint8)


class GrayscaleObservation(ObservationTransform):
    """Makes one channel of three: 0.2125 red + 0.7154 green + 0.0721 blue in float64, and cut off, as Gymnasium has it.

    Args:
        keep_dim: whether the channel's dimension stays.

    Shape: `(height, width, 3)` uint8 to `(height, width)` or `(height, width, 1)`.

    >>> from tensordict import TensorDict
    >>> white = torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)
    >>> GrayscaleObservation()(TensorDict({"observation": white}, [1]))["observation"]
    tensor([[[255]]], dtype=torch.uint8)
    """

    costly = True

    def __init__(self, keep_dim: bool = False) -> None:
        super().__init__()
        self.keep_dim = arguments.flag("GrayscaleObservation", "keep_dim", keep_dim)

    def setup(self, signature: Signature) -> Signature:
        space = _image(signature, "GrayscaleObservation")
        if space.shape[2:] != (3,):
            raise ValueError(f"GrayscaleObservation needs images with 3 channels, but got {space}.")
        height, width, _ = space.shape
        return signature.replace(single_observation_space=_image_space(height, width, *(1,) * self.keep_dim))

    def observation(self, observation: Tensor) -> Tensor:
        red, green, blue = (channel.double() for channel in observation.unbind(-1))
        gray = red.mul_(0.2125).add_(green.mul_(0.7154)).add_(blue.mul_(0.0721)).to(torch.uint8)
        return gray.unsqueeze(-1) if self.keep_dim else gray


class ResizeObservation(ObservationTransform):
    """Makes images smaller: each new pixel is the mean of the area it covers, bit for bit as OpenCV's `INTER_AREA`.

    Where both ratios are whole numbers, sums of blocks are exact; else rows and then columns are weighted sums in float32, in
    OpenCV's order. Halves are rounded to even; OpenCV has a path of its own for exactly half the size, which rounds them up.

    Args:
        shape: the new height and width, at most the old ones.

    Shape: `(height, width)` or `(height, width, channels)` uint8 to `(*shape)` or `(*shape, channels)`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> images = gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=images), ResizeObservation((84, 84)))
    >>> env.reset()["observation"].shape
    torch.Size([1, 84, 84, 3])
    """

    costly = True
    row_places, row_weights, column_places, column_weights = Buffer(), Buffer(), Buffer(), Buffer()

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        if not isinstance(shape, tuple | list) or len(shape) != 2:
            raise TypeError(f"ResizeObservation needs shape as (height, width), but got {shape!r}.")
        height, width = (arguments.integer("ResizeObservation", "shape", size, at_least=1) for size in shape)
        self.shape = height, width

    def setup(self, signature: Signature) -> Signature:
        space = _image(signature, "ResizeObservation")
        old, new = space.shape[:2], self.shape
        if new[0] > old[0] or new[1] > old[1]:
            raise ValueError(f"ResizeObservation needs a shape of at most {old}, but got {new}: it makes images smaller.")
        self.channels = len(space.shape) - 2
        # Sizes of whole blocks, where both are.
        self.block = (old[0] // new[0], old[1] // new[1]) if old[0] % new[0] == old[1] % new[1] == 0 else None
        for name, before, after in (("row", old[0], new[0]), ("column", old[1], new[1])):
            places, weights = _taps(before, after)
            self.register_buffer(f"{name}_places", places.to(signature.device), persistent=False)
            self.register_buffer(f"{name}_weights", weights.to(signature.device), persistent=False)
        return signature.replace(single_observation_space=_image_space(*new, *space.shape[2:]))

    def observation(self, observation: Tensor) -> Tensor:
        row, column = -2 - self.channels, -1 - self.channels
        image = masks.once(observation)  # for each pixel is read several times
        if self.block is not None:
            total = _add(_add(image.int(), row, self.block[0]), column, self.block[1])
            if self.block == (2, 2):
                return (total + 2 >> 2).to(torch.uint8)
            mean = total.float() * (1 / math.prod(self.block))
        else:
            # Columns and then rows, each as rows, which lie together in memory.
            image = image.transpose(row, column).to(torch.float32, memory_format=torch.contiguous_format)
            mean = _weigh(image, row, self.column_places, self.column_weights).transpose(row, column).contiguous()
            mean = _weigh(mean, row, self.row_places, self.row_weights)
        return mean.round().clamp(0, 255).to(torch.uint8)


class _Noise(ObservationTransform):
    """Base for noise in the place of pixels, whose numbers are those below 255, as Gymnasium has them."""

    shares = Buffer()
    is_noise_grayscale: bool

    def setup(self, signature: Signature) -> Signature:
        name, space = type(self).__name__, _image(signature, type(self).__name__)
        if self.is_noise_grayscale and space.shape[2:] != (3,):
            raise ValueError(f"{name} needs images with 3 channels for is_noise_grayscale, but got {space}.")
        # Gray noise is a sum over channels, each below its share of 255.
        self.register_buffer("shares", torch.tensor([76, 149, 29], device=signature.device), persistent=False)
        self.stream, signature = signature.stream()
        return signature

    def _put(self, where: Tensor, images: Tensor) -> Tensor:
        key, gray = self.stream.key().part(1), self.is_noise_grayscale
        noise = random.integers(key, self.shares if gray else 255, images.shape[1:])
        noise = (noise.sum(-1, keepdim=True) if gray else noise).to(torch.uint8)
        return torch.where(where if images.dim() == 3 else where.unsqueeze(-1), noise, images)


class AddWhiteNoise(_Noise):
    """Puts noise in the place of some pixels, each with the same probability.

    Args:
        probability_of_noise_per_pixel: that probability, below 1.
        is_noise_grayscale: whether noise has the same value in all three channels.

    Shape: images `(height, width[, channels])` uint8, and unchanged; of three channels, where noise is gray.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> images = gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=images), AddWhiteNoise(0.5))
    >>> env.reset()["observation"].shape
    torch.Size([1, 210, 160, 3])
    """

    def __init__(self, probability_of_noise_per_pixel: float, is_noise_grayscale: bool = False) -> None:
        super().__init__()
        self.probability_of_noise_per_pixel = arguments.probability(
            "AddWhiteNoise", "probability_of_noise_per_pixel", probability_of_noise_per_pixel
        )
        self.is_noise_grayscale = arguments.flag("AddWhiteNoise", "is_noise_grayscale", is_noise_grayscale)

    def observation(self, observation: Tensor) -> Tensor:
        noisy = random.uniform(self.stream.key(), observation.shape[1:3]) < self.probability_of_noise_per_pixel
        return self._put(noisy, observation)


class ObstructView(_Noise):
    """Puts squares of noise at random places.

    Args:
        obstructed_pixels_ratio: how much of the picture they cover, below 1; less where they overlap, or reach over the edge.
        obstruction_width: of a square, in pixels.
        is_noise_grayscale: whether noise has the same value in all three channels.

    Shape: images `(height, width[, channels])` uint8, and unchanged; of three channels, where noise is gray.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> images = gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=images), ObstructView(0.3, 20))
    >>> env.reset()["observation"].shape
    torch.Size([1, 210, 160, 3])
    """

    def __init__(self, obstructed_pixels_ratio: float, obstruction_width: int, is_noise_grayscale: bool = False) -> None:
        super().__init__()
        self.obstructed_pixels_ratio = arguments.probability(
            "ObstructView", "obstructed_pixels_ratio", obstructed_pixels_ratio
        )
        self.obstruction_width = arguments.integer("ObstructView", "obstruction_width", obstruction_width, at_least=1)
        self.is_noise_grayscale = arguments.flag("ObstructView", "is_noise_grayscale", is_noise_grayscale)

    def setup(self, signature: Signature) -> Signature:
        height, width = _image(signature, "ObstructView").shape[:2]
        self.number = int(height * width * (self.obstructed_pixels_ratio / self.obstruction_width**2))
        return super().setup(signature)

    def observation(self, observation: Tensor) -> Tensor:
        num_envs, height, width = observation.shape[:3]
        centers = random.integers(self.stream.key(), height * width, (self.number,))
        hidden = torch.zeros(num_envs, height * width, device=observation.device).scatter(1, centers, 1.0)
        # A pixel is hidden where there is a centre among those around it: a maximum over columns, and over rows.
        size = self.obstruction_width
        low, high = (size - 1) // 2, size // 2
        hidden = functional.pad(hidden.view(num_envs, 1, height, width), (low, high, low, high))
        hidden = functional.max_pool2d(functional.max_pool2d(hidden, (size, 1), 1), (1, size), 1)
        return self._put(hidden[:, 0] > 0, observation)


def _taps(before: int, after: int) -> tuple[Tensor, Tensor]:
    # For each of `after` cells on a line of `before` pixels: which pixels it covers, and their shares of it, as OpenCV's
    # computeResizeAreaTab has them. `(most, after)` both; where there are fewer, the weight is 0.
    scale, taps = before / after, []
    for cell in range(after):
        first, last = cell * scale, cell * scale + scale
        width = min(scale, before - first)
        end = min(math.floor(last), before - 1)
        start = min(math.ceil(first), end)
        covered = [(start - 1, (start - first) / width)] if start - first > 1e-3 else []
        covered += [(pixel, 1 / width) for pixel in range(start, end)]
        covered += [(end, min(last - end, 1, width) / width)] if last - end > 1e-3 else []
        taps.append(covered)
    most = max(map(len, taps))
    padded = torch.tensor([covered + [(0, 0.0)] * (most - len(covered)) for covered in taps], dtype=torch.float64)
    return padded[..., 0].long().t().contiguous(), padded[..., 1].float().t().contiguous()


def _add(image: Tensor, dim: int, size: int) -> Tensor:
    # Sums of `size` neighbours. Slice after slice, for a reduction over so few is slow, compiled or not.
    return functools.reduce(torch.add, image.unflatten(dim, (-1, size)).unbind(dim))


def _weigh(image: Tensor, dim: int, places: Tensor, weights: Tensor) -> Tensor:
    # One tap after the other, each product rounded before it is added.
    weights = weights.view(*weights.shape, *(1,) * (-1 - dim))
    total = image.index_select(dim, places[0]) * weights[0]
    for pixel, weight in zip(places[1:], weights[1:], strict=True):
        total = total + image.index_select(dim, pixel) * weight
    return total
