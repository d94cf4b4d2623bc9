"""Wrappers that look at an env: pictures as observations, collections, videos, a window. The env needs a `render_mode`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, spaces
from torchwrap.env import Env
from torchwrap.wrappers.base import Wrapper


class _Rendered(Wrapper):
    """Base for wrappers that look at the env after each step, before anything is reset."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        name = type(self).__name__
        if env.render_mode != "rgb_array":
            raise ValueError(f'{name} needs an env made with render_mode="rgb_array", but got {env.render_mode!r}.')
        if getattr(env.unwrapped, "same_step", False):
            mode = "a vector env in AutoresetMode.DISABLED, which shows how an episode ended"
            raise ValueError(f"{name} needs {mode}, but got one in SAME_STEP.")

    def _shown(self, envs: Sequence[int]) -> list[int]:
        name = type(self).__name__
        rows = [arguments.integer(name, "envs", row, at_least=0) for row in envs]
        if not rows or max(rows) >= self.num_envs:
            raise ValueError(f"{name} needs envs among the {self.num_envs} there are, but got {list(envs)}.")
        return rows


class AddRenderObservation(_Rendered):
    """Makes observations of pictures of the env.

    Args:
        env: the env below, with `render_mode="rgb_array"`; it is reset, to see how large its pictures are.
        render_only: whether the picture takes the place of the observation, or goes beside it.
        render_key: where it goes, if beside.
        obs_key: where an observation goes that is not a `Dict`, if beside.

    Shape: Box(0, 255, (height, width, 3), uint8), or a `Dict` with it.

    >>> import torchwrap as tw
    >>> env = AddRenderObservation(tw.make("CartPole-v1", 2, render_mode="rgb_array"))
    >>> env.reset()["observation"].shape
    torch.Size([2, 400, 600, 3])
    """

    def __init__(self, env: Env, render_only: bool = True, render_key: str = "pixels", obs_key: str = "state") -> None:
        super().__init__(env)
        self.render_only = arguments.flag("AddRenderObservation", "render_only", render_only)
        for name, key in (("render_key", render_key), ("obs_key", obs_key)):
            if not isinstance(key, str) or not key:
                raise TypeError(f"AddRenderObservation needs {name} as text, but got {key!r}.")
        below = env.single_observation_space
        self.alone = not isinstance(below, gymnasium.spaces.Dict)
        taken = [obs_key] if self.alone else list(below.spaces)  # type: ignore[attr-defined]
        if not render_only and render_key in taken:
            raise ValueError(f"AddRenderObservation needs a render_key that is free, but got {render_key!r} beside {taken}.")
        self.render_key, self.obs_key = render_key, obs_key
        env.reset()
        space: Any = gymnasium.spaces.Box(0, 255, np.shape(env.render([0])[0]), np.uint8)
        if not render_only:
            space = gymnasium.spaces.Dict({render_key: space, **({obs_key: below} if self.alone else below.spaces)})  # type: ignore[attr-defined]
        self.signature = env.signature.replace(single_observation_space=space)

    def _step(self, td: TensorDict) -> TensorDict:
        return self._look(self.env._step(td))

    def _reset(self, mask: Tensor, **keywords: Any) -> TensorDict:
        return self._look(self.env._reset(mask, **keywords))

    def _look(self, td: TensorDict) -> TensorDict:
        pixels = spaces.tensor(np.stack(self.env.render()), self.device)
        if self.render_only:
            return td.set("observation", pixels)
        observation = td["observation"]
        beside = {self.obs_key: observation} if self.alone else dict(observation.items())
        return td.set("observation", TensorDict({self.render_key: pixels, **beside}, batch_size=td.batch_size))


class RenderCollection(_Rendered):
    """Collects pictures of each env's episode; `render()` gives a list of them for each env.

    Args:
        env: the env below, with `render_mode="rgb_array"`.
        pop_frames: whether `render()` empties the lists.
        reset_clean: whether a new episode begins with an empty list. The one that ended can be had until the next step.

    >>> import torchwrap as tw
    >>> env = RenderCollection(tw.make("CartPole-v1", 2, render_mode="rgb_array"))
    >>> _ = env.step(env.reset().set("action", env.sample_action()))
    >>> [len(frames) for frames in env.render()]
    [2, 2]
    """

    def __init__(self, env: Env, pop_frames: bool = True, reset_clean: bool = True) -> None:
        super().__init__(env)
        self.pop_frames = arguments.flag("RenderCollection", "pop_frames", pop_frames)
        self.reset_clean = arguments.flag("RenderCollection", "reset_clean", reset_clean)
        self.render_mode = "rgb_array_list"
        self._frames: list[list[Any]] = [[] for _ in range(env.num_envs)]
        self._ended: dict[int, list[Any]] = {}

    def _step(self, td: TensorDict) -> TensorDict:
        successor = self.env._step(td)
        self._ended.clear()
        for frames, frame in zip(self._frames, self.env.render(), strict=True):
            frames.append(frame)
        return successor

    def _reset(self, mask: Tensor, **keywords: Any) -> TensorDict:
        first = self.env._reset(mask, **keywords)
        rows = mask.nonzero().flatten().tolist()
        for row, frame in zip(rows, self.env.render(rows), strict=True):
            if self.reset_clean:
                self._ended[row], self._frames[row] = self._frames[row], []
            self._frames[row].append(frame)
        return first

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        collected = []
        for row in range(self.num_envs) if envs is None else envs:
            ended = self._ended.get(row)
            frames = ended or self._frames[row]
            collected.append(list(frames))
            if self.pop_frames:
                frames.clear()
        return tuple(collected)


class RecordVideo(_Rendered):
    """Writes videos, as mp4, of one env or of several side by side.

    A video is of an episode of the first of `envs`, from its first observation to its final one, or of `video_length`
    frames from where it begins. Where no trigger is given, episodes 0, 1, 8, 27, ... and each 1000th are recorded.

    Args:
        env: the env below, with `render_mode="rgb_array"`.
        video_folder: where files go; it is made.
        episode_trigger: says of an episode's number, from 0, whether to record it.
        step_trigger: says of a step's number, from 0, whether to begin there.
        video_length: how many frames; whole episodes where 0.
        name_prefix: files are `{name_prefix}-episode-{number}.mp4` and `{name_prefix}-step-{number}.mp4`.
        fps: frames a second; the env's own where None, or 30.
        envs: whom to show; more than one are tiles of a picture.

    It needs imageio with ffmpeg: `pip install "torchwrap[render]"`.
    """

    def __init__(
        self,
        env: Env,
        video_folder: str | Path,
        episode_trigger: Callable[[int], bool] | None = None,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 0,
        name_prefix: str = "rl-video",
        fps: int | None = None,
        *,
        envs: Sequence[int] = (0,),
    ) -> None:
        super().__init__(env)
        for name, trigger in (("episode_trigger", episode_trigger), ("step_trigger", step_trigger)):
            if trigger is not None and not callable(trigger):
                raise TypeError(f"RecordVideo needs {name} as a function of a number, but got {trigger!r}.")
        if not isinstance(video_folder, str | Path) or not isinstance(name_prefix, str):
            got = f"{video_folder!r} and {name_prefix!r}"
            raise TypeError(f"RecordVideo needs video_folder and name_prefix as text, but got {got}.")
        self.envs = self._shown(envs)
        if fps is None:
            fps = int(env.metadata.get("render_fps") or 30)
        self.fps = arguments.integer("RecordVideo", "fps", fps, at_least=1)
        self.video_length = arguments.integer("RecordVideo", "video_length", video_length, at_least=0)
        self._default = capped_cubic if episode_trigger is None and step_trigger is None else None
        self.episode_trigger, self.step_trigger = episode_trigger, step_trigger
        self.video_folder, self.name_prefix = str(video_folder), name_prefix
        self._library = importlib.import_module("torchwrap.interop.imageio")
        self._video: Any = None
        self._step_id = self._episode_id = -1

    def _step(self, td: TensorDict) -> TensorDict:
        successor = self.env._step(td)
        self._step_id += 1
        if self.step_trigger is not None and self.step_trigger(self._step_id):
            self._begin(f"step-{self._step_id}")
        self._capture()
        return successor

    def _reset(self, mask: Tensor, **keywords: Any) -> TensorDict:
        first = self.env._reset(mask, **keywords)
        if mask[self.envs[0]]:
            self._episode_id += 1
            if not self.video_length:
                self._finish()
            trigger = self.episode_trigger or self._default
            if trigger is not None and trigger(self._episode_id):
                self._begin(f"episode-{self._episode_id}")
            self._capture()
        return first

    def _begin(self, name: str) -> None:
        self._finish()
        self._video = self._library.Video(Path(self.video_folder) / f"{self.name_prefix}-{name}.mp4", self.fps)

    def _capture(self) -> None:
        if self._video is not None:
            self._video.append(tiled(self.env.render(self.envs)))
            if self._video.length == self.video_length:
                self._finish()

    def _finish(self) -> None:
        if self._video is not None:
            self._video.close()
            self._video = None

    def close(self) -> None:
        self._finish()
        super().close()


class HumanRendering(_Rendered):
    """Shows the env in a window while it runs, at the env's own frame rate.

    Args:
        env: the env below, with `render_mode="rgb_array"`.
        screen_size: width and height of the window; as large as the picture where None.
        envs: whom to show; more than one are tiles of a picture.

    It needs pygame: `pip install "torchwrap[render]"`.
    """

    def __init__(self, env: Env, screen_size: tuple[int, int] | None = None, *, envs: Sequence[int] = (0,)) -> None:
        super().__init__(env)
        self.envs = self._shown(envs)
        if screen_size is not None:
            if not isinstance(screen_size, tuple | list) or len(screen_size) != 2:
                raise TypeError(f"HumanRendering needs screen_size as (width, height), but got {screen_size!r}.")
            for size in screen_size:
                arguments.integer("HumanRendering", "screen_size", size, at_least=1)
        self.screen_size = screen_size
        self.render_mode = "human"
        fps = int(env.metadata.get("render_fps") or 30)
        self._window = importlib.import_module("torchwrap.interop.pygame").Window(screen_size, fps)

    def _step(self, td: TensorDict) -> TensorDict:
        successor = self.env._step(td)
        self._show()
        return successor

    def _reset(self, mask: Tensor, **keywords: Any) -> TensorDict:
        first = self.env._reset(mask, **keywords)
        self._show()
        return first

    def _show(self) -> None:
        self._window.show(tiled(self.env.render(self.envs)))

    def close(self) -> None:
        self._window.close()
        super().close()


def capped_cubic(episode: int) -> bool:
    """Gymnasium's schedule of episodes to record: cubes of whole numbers, and from 1000 on each 1000th.

    >>> [episode for episode in range(30) if capped_cubic(episode)]
    [0, 1, 8, 27]
    """
    return round(episode ** (1 / 3)) ** 3 == episode if episode < 1000 else episode % 1000 == 0


def tiled(frames: Sequence[Any]) -> Any:
    """Pictures `(height, width, 3)` of one size as one, in rows as near to a square as can be; black where there is none."""
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    padded = [*frames, *[np.zeros_like(frames[0])] * (rows * columns - len(frames))]
    return np.concatenate([np.concatenate(padded[row * columns :][:columns], 1) for row in range(rows)])
