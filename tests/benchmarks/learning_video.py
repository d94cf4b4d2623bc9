"""The moving picture of the README: 64 pendulums while PPO learns, recorded by RecordVideo.

`python tests/benchmarks/learning_video.py` writes examples/media/learning.gif, in some minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import imageio.v2
import numpy as np
from PIL import Image, ImageDraw

import torchwrap as tw
from torchwrap import wrappers as W

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import ppo  # noqa: E402

NUM_ENVS = 64
FRAMES = 48
STARTS = (0, 800, 6_000)  # steps where a video starts; episodes start at multiples of 200
SIZE = 576  # pixels; a tile is an eighth of the width
CAPTION = 20
TARGET = EXAMPLES / "media" / "learning.gif"


class Tiles(tw.Wrapper):
    """Renders all envs as tiles of one picture, between gray lines."""

    def render(self, envs: object = None) -> tuple[np.ndarray]:
        frames = np.stack(self.env.render())
        frames = np.pad(frames, [(0, 0), (0, 2), (0, 2), (0, 0)], constant_values=128)
        _, height, width, channels = frames.shape
        rows = frames.reshape(8, 8, height, width, channels).swapaxes(1, 2)
        return (rows.reshape(8 * height, 8 * width, channels),)


def record(folder: Path) -> None:
    def make(id: str, num_envs: int, **arguments: object) -> tw.Env:
        if num_envs != NUM_ENVS:  # the script also makes a probe and envs for evaluation
            return tw.make(id, num_envs, **arguments)
        env = tw.make(id, num_envs, render_mode="rgb_array", **arguments)
        return W.RecordVideo(
            Tiles(env), folder, step_trigger=lambda step: step in STARTS, video_length=FRAMES
        )

    args = ppo.Args(env_id="Pendulum-v1", num_envs=NUM_ENVS, num_steps=64, out=folder)
    ppo.main(args, make)


def convert(folder: Path) -> None:
    pictures = []
    for start in STARTS:
        for frame in imageio.v2.get_reader(folder / f"rl-video-step-{start}.mp4"):
            tiles = Image.fromarray(frame).resize((SIZE, SIZE), Image.Resampling.BOX)
            picture = Image.new("RGB", (SIZE, SIZE + CAPTION), "white")
            picture.paste(tiles, (0, CAPTION))
            caption = f"PPO on Pendulum-v1, {NUM_ENVS} envs, after {start * NUM_ENVS:,} env steps"
            ImageDraw.Draw(picture).text((6, 4), caption, fill="black", font_size=13)
            pictures.append(picture.quantize(8, dither=Image.Dither.NONE))
    TARGET.parent.mkdir(exist_ok=True)
    durations = [50] * (len(pictures) - 1) + [1_500]  # ms; the last frame stays
    first, *others = pictures
    options = dict(save_all=True, duration=durations, loop=0, optimize=True)
    first.save(TARGET, append_images=others, **options)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        convert(Path(folder))
