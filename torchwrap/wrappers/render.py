"""Wrappers that render: pixel observations, collections of frames, a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.spaces import Value
from torchwrap.wrappers.wrapper import Wrapper


class RenderWrapper(Wrapper):
    """Base for wrappers that render the env after each step, before finished rows are reset, and after each reset."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        name = type(self).__name__
        if env.render_mode != "rgb_array":
            raise ValueError(f'{name} needs an env made with render_mode="rgb_array", but got {env.render_mode!r}.')
        if getattr(env.unwrapped, "same_step", False):
            raise ValueError(
                f"{name} cannot render the final frames of a SAME_STEP vector env: make it in AutoresetMode.DISABLED."
            )

        self._env_fps = int(env.metadata.get("render_fps") or 30)

    def _render(self, td: TensorDict) -> TensorDict:
        return td

    def _step(self, action: Value) -> TensorDict:
        return self._render(self.env._step(action))

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        return self._render(self.env._reset(mask, options))

    def _check_envs(self, envs: Sequence[int]) -> list[int]:
        rows = [validation.integer(type(self).__name__, "envs", row, 0, self.num_envs - 1) for row in envs]
        if not rows:
            raise ValueError(f"{type(self).__name__} needs at least one index in envs, but got none.")
        return rows


class AddRenderObservation(RenderWrapper):
    """Replaces the observation by the rendered frame, or adds the frame to it.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`. It is reset once, to find the size of its frames.
        render_only: whether the frame replaces the observation, or is added to it.
        render_key: key of the frame, if it is added.
        obs_key: key of an observation that is not a `Dict`, if the frame is added.

    Shape: the frame is `(num_envs, height, width, 3)` uint8. Added, it is part of a `Dict`.

    >>> import torchwrap as tw
    >>> env = AddRenderObservation(tw.make("CartPole-v1", 2, render_mode="rgb_array"))
    >>> env.reset()["observation"].shape
    torch.Size([2, 400, 600, 3])
    """

    def __init__(self, env: Env, render_only: bool = True, render_key: str = "pixels", obs_key: str = "state") -> None:
        super().__init__(env)
        self.render_only = validation.flag("AddRenderObservation", "render_only", render_only)
        for name, key in (("render_key", render_key), ("obs_key", obs_key)):
            if not isinstance(key, str) or not key:
                raise TypeError(f"AddRenderObservation needs {name} as a string, but got {key!r}.")
        below = env.single_observation_space
        self.is_dict = isinstance(below, gymnasium.spaces.Dict)
        parts = dict(below.spaces) if isinstance(below, gymnasium.spaces.Dict) else {obs_key: below}
        if not render_only and render_key in parts:
            raise ValueError(f"AddRenderObservation needs an unused render_key, but got {render_key!r} next to {list(parts)}.")
        self.render_key, self.obs_key = render_key, obs_key
        env.reset()
        space: Any = gymnasium.spaces.Box(0, 255, np.shape(env.render([0])[0]), np.uint8)
        if not render_only:
            space = gymnasium.spaces.Dict({render_key: space, **parts})
        self.signature = env.signature.replace(single_observation_space=space)

    def _render(self, td: TensorDict) -> TensorDict:
        pixels = spaces.tensor(np.stack(self.env.render()), self.device)
        if self.render_only:
            return td.set("observation", pixels)
        observation = td["observation"]
        parts = dict(observation.items()) if self.is_dict else {self.obs_key: observation}
        return td.set("observation", TensorDict({self.render_key: pixels, **parts}, batch_size=td.batch_size))


class RenderCollection(RenderWrapper):
    """Collects the frames of each env's episode. `render()` returns one list of frames per env.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`.
        pop_frames: whether `render()` clears the lists.
        reset_clean: whether a new episode starts with an empty list. Until the next step, `render()` then returns the finished
            episode.

    >>> import torchwrap as tw
    >>> env = RenderCollection(tw.make("CartPole-v1", 2, render_mode="rgb_array"))
    >>> _ = env.step(env.reset().set("action", env.sample_action()))
    >>> [len(frames) for frames in env.render()]
    [2, 2]
    """

    is_passive = True

    def __init__(self, env: Env, pop_frames: bool = True, reset_clean: bool = True) -> None:
        super().__init__(env)
        self.pop_frames = validation.flag("RenderCollection", "pop_frames", pop_frames)
        self.reset_clean = validation.flag("RenderCollection", "reset_clean", reset_clean)
        self.render_mode = "rgb_array_list"
        self._frames: list[list[Any]] = [[] for _ in range(env.num_envs)]
        self._finished_frames: dict[int, list[Any]] = {}

    def _step(self, action: Value) -> TensorDict:
        successor = self.env._step(action)
        self._finished_frames.clear()
        for frames, frame in zip(self._frames, self.env.render(), strict=True):
            frames.append(frame)
        return successor

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        td = self.env._reset(mask, options)
        rows = mask.numpy().nonzero()[0].tolist()
        for row, frame in zip(rows, self.env.render(rows), strict=True):
            if self.reset_clean:
                self._finished_frames[row], self._frames[row] = self._frames[row], []
            self._frames[row].append(frame)
        return td

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        collected = []
        for row in range(self.num_envs) if envs is None else envs:
            frames = self._finished_frames.get(row) or self._frames[row]
            collected.append(list(frames))
            if self.pop_frames:
                frames.clear()
        return tuple(collected)


class HumanRendering(RenderWrapper):
    """Shows the env in a window while it runs, at the env's own frame rate.

    It needs pygame: `pip install "torchwrap[render]"`.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`.
        screen_size: (width, height) of the window, in pixels. None takes the size of the frame.
        envs: indices of the envs to show, as tiles of one picture.
    """

    is_passive = True

    def __init__(self, env: Env, screen_size: tuple[int, int] | None = None, *, envs: Sequence[int] = (0,)) -> None:
        super().__init__(env)
        self.envs = self._check_envs(envs)
        if screen_size is not None and len(validation.sizes("HumanRendering", "screen_size", screen_size, at_least=1)) != 2:
            raise ValueError(f"HumanRendering needs screen_size as (width, height), but got {screen_size!r}.")
        import pygame  # noqa: F401  # an optional dependency, which is missed here and not in the middle of a run

        self.screen_size = screen_size
        self.render_mode = "human"
        self._screen: Any = None

    def _render(self, td: TensorDict) -> TensorDict:
        import pygame

        surface = pygame.surfarray.make_surface(np.swapaxes(tiled(self.env.render(self.envs)), 0, 1))
        if self._screen is None:
            pygame.display.init()
            self._screen = pygame.display.set_mode(self.screen_size or surface.get_size())
            self._clock = pygame.time.Clock()
        self._screen.blit(pygame.transform.smoothscale(surface, self._screen.get_size()), (0, 0))
        pygame.event.pump()
        pygame.display.flip()
        self._clock.tick(self._env_fps)  # waits, so as not to exceed the frame rate
        return td

    def close(self) -> None:
        if self._screen is not None:
            import pygame

            pygame.display.quit()
            self._screen = None
        super().close()


def tiled(frames: Sequence[Any]) -> Any:
    """Arranges frames `(height, width, 3)` of one size as tiles of one picture, nearly square. Empty tiles are black."""
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    padded = [*frames, *[np.zeros_like(frames[0])] * (rows * columns - len(frames))]
    return np.concatenate([np.concatenate(padded[row * columns :][:columns], 1) for row in range(rows)])
