"""Games of the Arcade Learning Environment with the starts and ends of episodes that published results were made with.

`make_atari` makes them for `ppo_atari.py`: Gymnasium's envs, one by one, with raw frames for torchwrap's transforms.
`tw.make(id, num_envs, backend="ale")` is many times as fast, and preprocesses in C++.
"""

from __future__ import annotations

from typing import Any, Literal

import ale_py
import gymnasium
import numpy as np
from numpy.typing import NDArray

import torchwrap as tw

gymnasium.register_envs(ale_py)

_ID = "torchwrap/Atari-v0"
_GAME: dict[str, dict[str, Any]] = {
    "cleanrl": {"episodic_life": True, "fire_reset": True, "repeat_action_probability": 0.0},
    "gymnasium": {"grayscale": True},
    "sb3": {"episodic_life": True, "fire_reset": True, "repeat_action_probability": 0.0},
}
INFO_KEYS = ("game_over", "game_return", "lives")
"""What `make_atari` passes on under `("next", "info", name)`."""


def make_atari(
    id: str,
    num_envs: int,
    preset: Literal["cleanrl", "gymnasium", "sb3"] = "cleanrl",
    **kwargs: Any,
) -> tw.Env:
    """Makes Atari games whose episodes start and end as in CleanRL's, Gymnasium's or Stable-Baselines3's stack.

    Observations are raw frames: `torchwrap.transforms.atari(preset)` does the rest.

    | preset | frames | episode ends | sticky actions |
    |---|---|---|---|
    | "cleanrl", "sb3" | RGB | when a life is lost; the next one goes on with the game. It begins with FIRE | none |
    | "gymnasium" | gray | with the game | as the id says |

    In each of them a game starts with 1 to 30 no-ops, and an action lasts four frames, of which the last two are merged to
    their maximum. The info has `"game_over"`, 1 at the end of a game, `"game_return"`, the sum of its rewards so far, and
    `"lives"` that are left.

    Args:
        id: of the game, "ALE/Pong-v5" or "PongNoFrameskip-v4".
        num_envs: number of games.
        preset: whose results to compare with.
        kwargs: arguments of `torchwrap.make`, such as `first_index` and `vectorization_mode`, of `AtariGame`, and of
            `ale_py.AtariEnv`, such as `repeat_action_probability` and `full_action_space`.

    Raises:
        ValueError: for another preset, and an id that ALE does not have.
    """
    if preset not in _GAME:
        raise ValueError(f"make_atari needs a preset among {sorted(_GAME)}, but got {preset!r}.")
    spec: Any = gymnasium.registry.get(id)
    if spec is None or not str(spec.entry_point).startswith(ale_py.__name__):
        raise ValueError(
            f'make_atari needs the id of a game of ALE, such as "ALE/Pong-v5", but got {id!r}.'
        )
    return tw.make(
        f"{__name__}:{_ID}",
        num_envs,
        game=id,
        **{"info_keys": INFO_KEYS, **_GAME[preset], **kwargs},
    )


class AtariGame(gymnasium.Env[NDArray[np.uint8], int]):
    """A single game, for `make_atari`. The methods are Gymnasium's.

    The rules are those of Stable-Baselines3's `NoopResetEnv`, `MaxAndSkipEnv`, `EpisodicLifeEnv` and `FireResetEnv`, and draw
    the same numbers. Unlike theirs, the final observation of a game that ends within an action is its last frame, and not a
    maximum of frames from the action before.

    Args:
        game: the id.
        noop_max: most no-ops at the start of a game; 0 disables them.
        frame_skip: frames per action.
        episodic_life: whether an episode ends when a life is lost. The next one goes on with the game, after a no-op.
        fire_reset: whether an episode begins with FIRE, if the game has it, and the action after FIRE.
        grayscale: whether frames are ALE's gray ones.
        render_mode, kwargs: of `ale_py.AtariEnv`.
    """

    metadata = ale_py.AtariEnv.metadata

    def __init__(
        self,
        game: str,
        noop_max: int = 30,
        frame_skip: int = 4,
        episodic_life: bool = False,
        fire_reset: bool = False,
        grayscale: bool = False,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.noop_max, self.frame_skip, self.episodic_life = noop_max, frame_skip, episodic_life
        # RAM, because most frames are never looked at.
        kwargs = {**kwargs, "obs_type": "ram", "frameskip": 1, "render_mode": render_mode}
        made: Any = gymnasium.make(game, disable_env_checker=True, **kwargs)
        self.env = made.unwrapped
        self.render_mode, self.action_space = render_mode, self.env.action_space
        self.fire_reset = fire_reset and "FIRE" in self.env.get_action_meanings()
        self._read = self.env.ale.getScreenGrayscale if grayscale else self.env.ale.getScreenRGB
        self._frames = np.stack([self._read(), self._read()])
        self.observation_space = gymnasium.spaces.Box(0, 255, self._frames.shape[1:], np.uint8)
        self._lost_life, self._game_over, self._game_return, self._lives = False, False, 0.0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._begin_episode(seed)
        for action in (1, 2) if self.fire_reset else ():
            self._act(action)
            if self._lost_life or self._game_over:
                self._begin_episode()
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated = self._act(action)
        return self._observation(), reward, terminated or self._lost_life, truncated, self._info()

    def _begin_episode(self, seed: int | None = None) -> None:
        goes_on = self._lost_life and not self._game_over and seed is None
        if goes_on:
            self._act(0)
            goes_on = not self._game_over
        if not goes_on:
            self._begin_game(seed)
        self._lost_life, self._lives = False, self.env.ale.lives()

    def _begin_game(self, seed: int | None) -> None:
        self.env.reset(seed=seed)
        for _ in range(self.env.np_random.integers(1, self.noop_max + 1) if self.noop_max else 0):
            _, _, terminated, truncated, _ = self.env.step(0)
            if terminated or truncated:
                self.env.reset()
        self._game_return, self._game_over = 0.0, False
        self._frames[:] = self._read()

    def _act(self, action: int) -> tuple[float, bool, bool]:
        total = 0.0
        for left in reversed(range(self.frame_skip)):
            _, reward, terminated, truncated, _ = self.env.step(action)
            total += reward
            if terminated or truncated:
                self._frames[:] = self._read()
                break
            if left < 2:
                self._read(self._frames[left])
        lives = self.env.ale.lives()
        # Some games go on for a few frames with no life left.
        self._lost_life = self.episodic_life and 0 < lives < self._lives
        self._game_over, self._lives = terminated or truncated, lives
        self._game_return += total
        return total, terminated, truncated

    def _observation(self) -> NDArray[np.uint8]:
        return np.maximum(*self._frames)

    def _info(self) -> dict[str, Any]:
        return {
            "game_over": self._game_over,
            "game_return": self._game_return,
            "lives": self._lives,
        }

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


if _ID not in gymnasium.registry:
    gymnasium.register(_ID, f"{__name__}:AtariGame")
