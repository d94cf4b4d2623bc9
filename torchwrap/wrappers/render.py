"""Wrappers that render: pixel observations, and video files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.wrappers.wrapper import Wrapper


class RenderWrapper(Wrapper):
    """Base for wrappers that show the env after each step and each reset.

    The frame of a step shows the successor: finished rows are reset afterwards.
    """

    def __init__(self, env: Env, from_observation: bool = False) -> None:
        super().__init__(env)
        owner = type(self).__name__
        self.from_observation = validation.flag(owner, "from_observation", from_observation)
        if from_observation:
            box = spaces.box(owner, "observation", env.single_observation_space)
            if not _is_image(box.shape, (1, 3)):
                must = "observations must be images (h, w), (h, w, 1) or (h, w, 3)"
                raise ValueError(refusal(owner, must, box.shape))
        elif env.render_mode != "rgb_array":
            must = 'env must have render_mode="rgb_array"'
            raise ValueError(refusal(owner, must, repr(env.render_mode)))
        elif getattr(env.unwrapped, "same_step", False):
            fault = "env must not reset finished rows in its step, before their final frames"
            remedy = "Make the vector env in AutoresetMode.DISABLED"
            raise ValueError(refusal(owner, fault, "AutoresetMode.SAME_STEP", remedy))


class AddRenderObservation(RenderWrapper):
    """Replaces the observation by the rendered frame, or adds the frame to it.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`. It is reset once, to find the
            size of its frames.
        render_only: whether the frame replaces the observation, or is added to it.
        render_key: key of the frame, if it is added.
        obs_key: key of an observation that is not a `Dict`, if the frame is added.

    Shape: the frame is `(num_envs, height, width, 3)` uint8. Added, it is part of a `Dict`.

    >>> import torchwrap as tw
    >>> env = AddRenderObservation(tw.make("CartPole-v1", 2, render_mode="rgb_array"))
    >>> env.reset()["observation"].shape
    torch.Size([2, 400, 600, 3])
    """

    def __init__(
        self,
        env: Env,
        render_only: bool = True,
        render_key: str = "pixels",
        obs_key: str = "state",
    ) -> None:
        super().__init__(env)
        owner = "AddRenderObservation"
        self.render_only = validation.flag(owner, "render_only", render_only)
        self.render_key = validation.text(owner, "render_key", render_key)
        self.obs_key = validation.text(owner, "obs_key", obs_key)
        below = env.single_observation_space
        self._adds_to_dict = isinstance(below, Dict)
        if not isinstance(below, Dict):
            below = Dict({obs_key: below})
        if not render_only and render_key in below.spaces:
            must = f"render_key must not be among {list(below)}"
            raise ValueError(refusal(owner, must, repr(render_key)))
        env.unwrapped.reset()  # no layer counts this episode
        shape = np.shape(env.render([0])[0])
        space: Space[Any] = Box(0, 255, shape, np.uint8)
        if not render_only:
            space = spaces.dict_like(below, {render_key: space, **below.spaces})
        self.signature = env.signature.replace(single_observation_space=space)

    def _step(self, action: spaces.Value) -> TensorDict:
        return self._render(super()._step(action))

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        return self._render(super()._reset(mask, options))

    def _render(self, td: TensorDict) -> TensorDict:
        frames = np.stack(self.env.render())
        (pixels,) = spaces.to_tensors([frames], self.device)
        if self.render_only:
            return td.set("observation", pixels)
        observation: Any = td["observation"]
        parts = {self.obs_key: observation}
        if self._adds_to_dict:
            parts = dict(observation.items())
        parts = {self.render_key: pixels, **parts}
        return td.set("observation", TensorDict(parts, batch_size=td.batch_size))


class RecordVideo(RenderWrapper):
    """Records mp4 videos of one env.

    A video shows an episode, or a fixed number of frames. Without a trigger, Gymnasium's schedule
    applies: episodes 0, 1, 8, 27, ... and every 1000th. An episode in which no step was taken
    leaves no file. `close()` completes the last file, and so does the end of the program. It needs
    imageio with ffmpeg: `pip install "torchwrap[render]"`.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`, unless observations are recorded.
        video_folder: folder of the files. It is created.
        episode_trigger, step_trigger: return whether to start a video at the episode or step with
            the given number, from 0.
        video_length: number of frames. 0 records whole episodes.
        name_prefix: files are named `{name_prefix}-episode-{number}.mp4` and
            `{name_prefix}-step-{number}.mp4`. It holds no folder.
        fps: frames per second. None takes the env's own rate, or 30.
        envs: the index of the env, `[index]`.
        from_observation: whether to record observations, which are images, instead of `render()`.

    >>> import tempfile; import torchwrap as tw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     env = RecordVideo(tw.make("CartPole-v1", 2, render_mode="rgb_array"), folder)
    ...     _, _ = env.reset(), env.step(env.sample_action())
    ...     env.close()
    ...     [path.name for path in Path(folder).iterdir()]
    ['rl-video-episode-0.mp4']
    """

    _not_copied = (
        "_compiled",
        "_path",
        "_writer",
        "_complete",
    )  # a copy starts with its next video

    def __init__(
        self,
        env: Env,
        video_folder: str | Path,
        episode_trigger: Callable[[int], bool] | None = None,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 0,
        name_prefix: str = "rl-video",
        fps: float | None = None,
        *,
        envs: Sequence[int] = (0,),
        from_observation: bool = False,
    ) -> None:
        super().__init__(env, from_observation)
        owner = "RecordVideo"
        validation.function(owner, "episode_trigger", episode_trigger or capped_cubic)
        validation.function(owner, "step_trigger", step_trigger or capped_cubic)
        for name, text in (("video_folder", video_folder), ("name_prefix", name_prefix)):
            if not isinstance(text, str | Path):
                raise TypeError(refusal(owner, f"{name} must be a string", repr(text)))
        if Path(name_prefix).name != str(name_prefix):
            must = "name_prefix must be the beginning of a file's name"
            raise ValueError(refusal(owner, must, repr(name_prefix), "Give the folder before it"))
        if len(envs) != 1:
            raise ValueError(refusal(owner, "envs must hold one index", repr(envs)))
        self.envs = list(envs)
        validation.integer(owner, "the index in envs", envs[0], 0, self.num_envs - 1)
        if fps is None:
            fps = env.metadata.get("render_fps") or 30
        self.fps = validation.positive(owner, 'fps or metadata["render_fps"]', fps)
        self.video_length = validation.integer(owner, "video_length", video_length, at_least=0)
        self.episode_trigger = episode_trigger
        self.step_trigger = step_trigger
        self.video_folder = str(video_folder)
        self.name_prefix = str(name_prefix)
        import imageio.v2  # noqa: F401  # fails here, and not in the middle of a run

        self._path: Path | None = None
        self._writer: Any = None
        self._frames: list[NDArray[np.uint8]] = []  # that wait for the first step of an episode
        self._is_left_out = False  # of the next step, by repeated actions
        self._num_frames = 0
        self._step_id = -1
        self._episode_id = -1

    def deployed(self) -> None:
        return None

    def _leave_out(self, rows: RowMask) -> None:
        super()._leave_out(rows)
        self._is_left_out = bool(rows.numpy()[self.envs[0]])

    def _step(self, action: spaces.Value) -> TensorDict:
        successor = super()._step(action)
        if not self._is_left_out:
            self._step_id += 1
            if self.step_trigger is not None and self.step_trigger(self._step_id):
                self._start_video(f"step-{self._step_id}")
            self._add_frame(successor)
        self._is_left_out = False
        return successor

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        td = super()._reset(mask, options)
        self._is_left_out = False
        if mask.numpy()[self.envs[0]]:
            self._episode_id += 1
            if not self.video_length:
                self._close_video()
            trigger = self.episode_trigger
            if trigger is self.step_trigger is None:
                trigger = capped_cubic
            if trigger is not None and trigger(self._episode_id):
                self._start_video(f"episode-{self._episode_id}")
            self._add_frame(td, waits=not self.video_length)
        return td

    def _start_video(self, name: str) -> None:
        self._close_video()
        self._num_frames = 0
        self._path = Path(self.video_folder).absolute() / f"{self.name_prefix}-{name}.mp4"

    def _add_frame(
        self,
        td: TensorDict,
        waits: bool = False,
    ) -> None:
        if self._path is None:
            return
        if self.from_observation:
            frame = td["observation"][self.envs[0]].numpy(force=True)
        else:
            frame = np.asarray(self.env.render(self.envs)[0])
        frame = _to_rgb(frame)
        height, width, _ = frame.shape
        # Padded with black if they are odd, because the codec needs even ones.
        odd = (height % 2, width % 2, 0)
        padding = [(0, number) for number in odd]
        self._frames.append(np.pad(frame, padding))
        if waits:
            return
        if self._writer is None:
            self._open_file(self._path)
        for frame in self._frames:
            self._writer.append_data(frame)
        self._num_frames += len(self._frames)
        self._frames.clear()
        if self._num_frames == self.video_length:
            self._close_video()

    def _open_file(self, path: Path) -> None:
        import imageio.v2

        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a temporary name until it is closed, so that a named file is always complete.
        temporary: Any = path.with_name(f".{path.name}")
        self._writer = imageio.v2.get_writer(
            temporary, format="FFMPEG", fps=self.fps, codec="libx264", macro_block_size=2
        )
        # Completes the file without close(), too.
        arguments = (self._writer, temporary, path)
        self._complete = Finalize(self, _complete, arguments, exitpriority=10)

    def _close_video(self) -> None:
        self._path = None
        self._frames.clear()
        if self._writer is not None:
            self._writer = None
            self._complete()

    def close(self) -> None:
        self._close_video()
        super().close()


def _complete(writer: Any, temporary: Path, path: Path) -> None:
    writer.close()
    if temporary.exists():  # it does not before the first frame
        temporary.rename(path)


def _is_image(shape: tuple[int, ...], channels: tuple[int, ...]) -> bool:
    has_channels = len(shape) == 3 and shape[2] in channels
    return len(shape) == 2 or has_channels


def _to_rgb(frame: NDArray[Any]) -> NDArray[np.uint8]:
    if frame.dtype != np.uint8 or not _is_image(frame.shape, (1, 3, 4)):
        must = "a frame must be (height, width, 3) of uint8, or gray: (height, width)"
        raise ValueError(refusal("RecordVideo", must, f"{frame.shape} {frame.dtype}"))
    channels = frame.reshape(*frame.shape[:2], -1)
    if channels.shape[2] == 1:
        channels = np.repeat(channels, 3, 2)
    return channels[..., :3]


def capped_cubic(episode: int) -> bool:
    """Gymnasium's schedule: record cube numbers up to 1000, then every 1000th episode."""
    if episode < 1000:
        return round(episode ** (1 / 3)) ** 3 == episode
    return episode % 1000 == 0
