"""Image transforms against Gymnasium's wrappers and OpenCV."""

import itertools

import cv2
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make, quick
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T


def images(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


def resized(frames, shape):
    """A batch of frames, resized by the transform."""
    env = make(images(*frames.shape[1:]), T.ResizeObservation(shape))
    return env.transforms[0].observation(torch.from_numpy(frames)).numpy()


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_grayscale_observation_equals_gymnasiums():
    for keep_dim in (False, True):
        oracles = [
            wrappers.GrayscaleObservation(RandomEnv(images(6, 5, 3)), keep_dim) for _ in range(3)
        ]
        assert_agrees(make(images(6, 5, 3), T.GrayscaleObservation(keep_dim)), oracles)


def test_grayscale_observation_of_every_gray_and_a_million_colours_equals_gymnasiums():
    grays = np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)
    colours = np.concatenate([grays, noise(1_000_000, 3)])[:, None]
    oracle = wrappers.GrayscaleObservation(RandomEnv(images(len(colours), 1, 3)))
    given = T.GrayscaleObservation().observation(torch.from_numpy(colours))
    np.testing.assert_array_equal(given.numpy(), oracle.observation(colours))
    assert (
        given[:256, 0].numpy() != grays[:, 0]
    ).sum() == 8  # Gymnasium truncates sums just below an integer


@pytest.mark.parametrize("stride", [15, pytest.param(1, marks=pytest.mark.full)])
def test_grayscale_of_opencv_equals_it_for_every_colour(stride):
    values = np.arange(256, dtype=np.uint8)
    transform = T.GrayscaleObservation(formula="opencv")
    for red in range(0, 256, stride):
        colours = np.stack(np.broadcast_arrays(np.uint8(red), values[:, None], values), -1)
        gray = transform.observation(torch.from_numpy(colours[None]))[0]
        np.testing.assert_array_equal(gray, cv2.cvtColor(colours, cv2.COLOR_RGB2GRAY))


SIZES = {  # to: from
    (84, 84): (
        (210, 160),
        (250, 160),
        (480, 640),
        (96, 96),
        (168, 126),
        (84, 160),
        (160, 84),
        (168, 168),
    ),  # the last is half
    (32, 32): ((96, 96), (64, 48), (96, 64), (64, 96), (128, 32)),  # (96, 96) in whole blocks
    (64, 64): ((210, 160),),
    (96, 96): ((210, 160),),
    (48, 48): ((64, 48),),
    (10, 10): ((40, 20),),
    (1, 1): ((9, 7),),
    (7, 5): ((7, 5),),
}


@pytest.mark.parametrize("channels", quick([(), (1,), (3,)], (), (3,)), ids=str)
def test_resize_observation_equals_opencvs_inter_area_bit_for_bit(channels):
    for before, after in ((before, after) for after, sizes in SIZES.items() for before in sizes):
        frames = noise(4, *before, *channels)
        frames[0], frames[1] = 255, np.linspace(0, 255, frames[1].size).reshape(frames[1].shape)
        oracle = [
            cv2.resize(frame, after[::-1], interpolation=cv2.INTER_AREA).reshape(*after, *channels)
            for frame in frames
        ]
        np.testing.assert_array_equal(
            resized(frames, after), np.stack(oracle), f"{before} to {after}"
        )


def test_resize_observation_equals_gymnasiums_in_episodes_and_spaces():
    for channels, shape in itertools.product(((), (1,), (3,)), ((4, 3), (6, 5), (3, 4))):
        space = images(12, 8, *channels)
        oracles = [wrappers.ResizeObservation(RandomEnv(space), shape) for _ in range(2)]
        assert_agrees(make(space, T.ResizeObservation(shape), num_envs=2), oracles, num_steps=8)


def test_image_transforms_masked_reset_computes_the_rows_of_the_mask():
    for part in (T.GrayscaleObservation(), T.ResizeObservation((5, 5))):
        transform, frames = (
            make(images(12, 8, 3), part).transforms[0],
            torch.from_numpy(noise(3, 12, 8, 3)),
        )
        mask, expected = (
            tw.RowMask(torch.tensor([False, True, False])),
            transform.observation(frames),
        )
        given = transform.reset(TensorDict({"observation": frames}, [3]), mask)["observation"]
        assert given.dtype == torch.uint8 and torch.equal(given[1], expected[1]), part
        none = tw.RowMask(torch.zeros(3, dtype=torch.bool))
        assert (
            transform.reset(TensorDict({"observation": frames}, [3]), none)["observation"].shape
            == expected.shape
        ), part


class Replayed:
    # A NumPy generator for Gymnasium that returns the numbers that our transform draws for env 0.
    def __init__(self, key, grayscale):
        self.key, self.grayscale = key, grayscale

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
    render_mode = "rgb_array"

    def render(self):
        return self.picture


def test_noise_equals_gymnasiums_for_the_same_draws():
    white, squares = (
        [("AddWhiteNoise", 0), ("AddWhiteNoise", 0.3)],
        [(0.0, 5), (0.5, 1), (0.5, 4), (0.9, 7)],
    )
    every, shape = [*white, *(("ObstructView", *square) for square in squares)], (30, 21, 3)
    for (kind, *arguments), grayscale in itertools.product(every, (False, True)):
        env = make(images(*shape), getattr(T, kind)(*arguments, grayscale), num_envs=4)
        env.reset(seed=3)
        key, frames = env.transforms[0].stream.key(), torch.from_numpy(noise(4, *shape))
        given = env.transforms[0].observation(frames)
        theirs = Picture(images(*shape))
        theirs.picture = frames[0].numpy()
        theirs._np_random = Replayed(key, grayscale)
        oracle, name = (
            getattr(wrappers, kind)(theirs, *arguments, grayscale),
            f"{kind}{arguments} {grayscale}",
        )
        np.testing.assert_array_equal(given[0].numpy(), oracle.render(), name)
        changed = (given != frames).any(-1).float().mean().item()
        assert changed == 0 if arguments[0] == 0 else 0.2 < changed < 0.9, name
        assert (given[0] != given[1]).any() or arguments[0] == 0, name


def test_noise_differs_at_every_step_and_in_every_episode():
    env = make(images(20, 20), T.AddWhiteNoise(0.5), num_envs=2)
    td, noisy = env.reset(seed=3), []
    zeros = torch.zeros(2, 20, 20, dtype=torch.uint8)
    for _ in range(12):
        noisy.append(env.transforms[0].observation(zeros))
        _, td = env.step(td.set("action", env.sample_action()))
    assert all((one != two).any() for index, one in enumerate(noisy) for two in noisy[:index])
