"""Image transforms against Gymnasium's wrappers and OpenCV."""

import cv2
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Box
from numpy.testing import assert_array_equal
from oracles import RandomEnv, assert_equals_wrapper, make

from torchwrap import random
from torchwrap import transforms as T


def images(*shape):
    return Box(0, 255, shape, np.uint8)


def noise(*shape):
    return np.random.default_rng(0).integers(
        0,
        256,
        shape,
        np.uint8,
    )


@pytest.mark.parametrize("keep_dim", [False, True])
def test_grayscale_equals_gymnasiums(keep_dim):
    assert_equals_wrapper(images(6, 5, 3), "GrayscaleObservation", keep_dim)


def test_grayscale_of_every_gray_and_a_million_colors_equals_gymnasiums():
    grays = np.arange(256, dtype=np.uint8)[:, None].repeat(
        3,
        1,
    )
    colors = np.concatenate([grays, noise(1_000_000, 3)])[:, None]
    oracle = wrappers.GrayscaleObservation(RandomEnv(images(len(colors), 1, 3)))
    given = T.GrayscaleObservation().observation(torch.from_numpy(colors)).numpy()
    assert_array_equal(given, oracle.observation(colors))
    # Gymnasium truncates sums just below an integer.
    assert (given[:256, 0] != grays[:, 0]).sum() == 8


@pytest.mark.parametrize(
    "stride",
    [15, pytest.param(1, marks=pytest.mark.full)],
)
def test_grayscale_of_opencv_equals_it_for_every_color(stride):
    values = np.arange(256, dtype=np.uint8)
    transform = T.GrayscaleObservation(formula="opencv")
    for red in range(0, 256, stride):
        colors = np.stack(
            np.broadcast_arrays(np.uint8(red), values[:, None], values),
            -1,
        )
        gray = transform.observation(torch.from_numpy(colors[None]))[0]
        assert_array_equal(gray, cv2.cvtColor(colors, cv2.COLOR_RGB2GRAY))


SIZES = [  # from, to
    ((210, 160), (84, 84)),
    ((480, 640), (84, 84)),
    ((84, 160), (84, 84)),
    ((168, 168), (84, 84)),
    ((64, 48), (32, 32)),
    ((40, 20), (10, 10)),
    ((9, 7), (1, 1)),
    ((7, 5), (7, 5)),
]


@pytest.mark.parametrize(
    "channels",
    [(), (1,), (3,)],
    ids=str,
)
@pytest.mark.parametrize(
    ("before", "after"),
    SIZES,
    ids=str,
)
def test_resize_equals_opencvs_inter_area_bit_for_bit(before, after, channels):
    frames = noise(4, *before, *channels)
    frames[0] = 255
    frames[1] = np.linspace(0, 255, frames[1].size).reshape(frames[1].shape)
    expected = []
    for frame in frames:
        resized = cv2.resize(
            frame,
            after[::-1],
            interpolation=cv2.INTER_AREA,
        )
        expected.append(resized.reshape(*after, *channels))
    transform = make(images(*before, *channels), T.ResizeObservation(after)).transforms[0]
    resized = transform.observation(torch.from_numpy(frames))
    assert_array_equal(resized, np.stack(expected))


class Replayed:
    """A generator of Gymnasium's wrappers that returns the numbers that we draw for env 0."""

    def __init__(self, key, grayscale):
        self.key = key
        self.grayscale = grayscale

    def integers(self, low, high, size, dtype=None):
        if dtype is None:  # centers of squares
            return random.integers(self.key, high, shape=(size,))[0].numpy()
        count = torch.tensor([76, 149, 29]) if self.grayscale else 255
        noise = random.integers(self.key.fold_in(1), count, shape=size)[0].numpy()
        assert noise.max() < np.max(high)
        return noise.astype(dtype)

    def random(self, shape):
        return random.uniform(self.key, shape=shape)[0].numpy()


class Picture(RandomEnv):
    """Renders a picture."""

    render_mode = "rgb_array"

    def render(self):
        return self.picture


@pytest.mark.parametrize(
    "grayscale",
    [False, True],
    ids=["colors", "gray"],
)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AddWhiteNoise", (0.3,)),
        ("ObstructView", (0.0, 5)),
        ("ObstructView", (0.5, 4)),
        ("ObstructView", (0.9, 7)),
    ],
    ids=str,
)
def test_noise_equals_gymnasiums_for_the_same_draws(name, arguments, grayscale):
    space = images(30, 21, 3)
    env = make(
        space,
        getattr(T, name)(*arguments, grayscale),
        num_envs=4,
    )
    env.reset(seed=3)
    transform = env.transforms[0]
    theirs = Picture(space)
    theirs._np_random = Replayed(transform.stream.key(), grayscale)
    frames = torch.from_numpy(noise(4, *space.shape))
    theirs.picture = frames[0].numpy()
    given = transform.observation(frames)
    oracle = getattr(wrappers, name)(theirs, *arguments, grayscale)
    assert_array_equal(given[0], oracle.render())
    changed = (given != frames).any(-1).float().mean()
    if arguments[0] == 0:
        assert changed == 0
    else:
        assert 0.2 < changed < 0.9
        assert (given[0] != given[1]).any()
