"""Atari games whose episodes start and end as in published results.

`make_atari` makes them for `ppo_atari.py`: Gymnasium's envs, one by one, with raw frames for
torchwrap's transforms. `make_games` makes them in C++, many times as fast, by ALE or EnvPool.
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
"""Entries of `("next", "info", name)`."""
_DEFAULTS: dict[str, Any] = {
    "repeat_action_probability": 0.0,
    "noop_max": 30,
    "fire_reset": True,
    "episodic_life": False,
    "frame_skip": 4,
    "stack_num": 4,
    "full_action_space": False,
    "reward_clip": False,
}
"""The options of `make_games`."""
_NAMES: dict[str, dict[str, str]] = {
    "ale": {
        "fire_reset": "use_fire_reset",
        "episodic_life": "life_loss_info",
        "frame_skip": "frameskip",
        "reward_clip": "reward_clipping",
    },
    "envpool": {"fire_reset": "use_fire_reset"},
}
"""The names of a backend for some of the options."""


def make_games(
    game: str,
    num_envs: int,
    backend: Literal["ale", "envpool"] = "ale",
    **kwargs: Any,
) -> tw.Env:
    """Makes Atari games in C++, with one set of options and defaults for both backends.

    | option | default | meaning |
    |---|---|---|
    | `repeat_action_probability` | 0.0 | sticky actions |
    | `noop_max` | 30 | maximum number of no-ops at the start of a game, at least 1 |
    | `fire_reset` | True | begin a game with FIRE, if it has it |
    | `episodic_life` | False | end an episode with a life; `game_over` in the info tells games |
    | `frame_skip` | 4 | frames per action; the observation is the maximum of the last two |
    | `stack_num` | 4 | frames of an observation |
    | `full_action_space` | False | all 18 actions, instead of those that the game uses |
    | `reward_clip` | False | the sign of rewards |

    The games of both agree frame by frame, but for the stack of an initial observation (zeros
    below the first frame in ALE, copies of it in EnvPool), the last frame of a game that ends
    within an action, what follows a lost life (ALE goes on without an action), and the number of
    no-ops without `fire_reset`.

    Args:
        game: "Breakout", for "ALE/Breakout-v5" and EnvPool's "Breakout-v5".
        num_envs: number of games.
        backend: of `torchwrap.make`.
        kwargs: options, and further arguments of `torchwrap.make` and the backend, such as
            EnvPool's `seed`.
    """
    options = {**_DEFAULTS, "info_keys": ["game_over"], **kwargs}
    if options["noop_max"] < 1:  # EnvPool divides by it
        raise ValueError(f"make_games: noop_max must be at least 1, got {options['noop_max']}.")
    names = _NAMES[backend]
    arguments = {names.get(name, name): value for name, value in options.items()}
    id = f"ALE/{game}-v5" if backend == "ale" else f"{game}-v5"
    return tw.make(id, num_envs, backend=backend, **arguments)


def make_atari(
    id: str,
    num_envs: int,
    preset: Literal["cleanrl", "gymnasium", "sb3"] = "cleanrl",
    **kwargs: Any,
) -> tw.Env:
    """Makes Atari games that start and end as in CleanRL, Gymnasium or Stable-Baselines3.

    Observations are raw frames: `torchwrap.transforms.atari(preset)` does the rest.

    | preset | frames | episode ends | sticky actions |
    |---|---|---|---|
    | "cleanrl", "sb3" | RGB | with a life; the next one continues the game, with FIRE | none |
    | "gymnasium" | gray | with the game | as the id says |

    A game starts with 1 to 30 no-ops. An action lasts four frames; the observation is the maximum
    of the last two. The info has `"game_over"`, 1 at the end of a game, `"game_return"`, the sum of
    its rewards so far, and `"lives"`, the number that is left.

    Args:
        id: id of the game, "ALE/Pong-v5" or "PongNoFrameskip-v4".
        num_envs: number of games.
        preset: the library to compare results with.
        kwargs: arguments of `torchwrap.make`, such as `first_index` and `vectorization_mode`, of
            `AtariGame`, and of `ale_py.AtariEnv`, such as `repeat_action_probability`.

    Raises:
        ValueError: for another preset, and an id that ALE does not have.
    """
    if preset not in _GAME:
        presets = sorted(_GAME)
        raise ValueError(f"make_atari: preset must be among {presets}, got {preset!r}.")
    spec: Any = gymnasium.registry.get(id)
    if spec is None or not str(spec.entry_point).startswith(ale_py.__name__):
        fault = f"id must be a game of ALE, got {id!r}"
        raise ValueError(f'make_atari: {fault}. Use one such as "ALE/Pong-v5".')
    arguments = {"info_keys": INFO_KEYS, **_GAME[preset], **kwargs}
    return tw.make(f"{__name__}:{_ID}", num_envs, game=id, **arguments)


class AtariGame(gymnasium.Env[NDArray[np.uint8], int]):
    """A single game, for `make_atari`. The methods are Gymnasium's.

    It draws the same numbers as Stable-Baselines3's `NoopResetEnv`, `MaxAndSkipEnv`,
    `EpisodicLifeEnv` and `FireResetEnv`. If a game ends within an action, the final observation is
    its last frame; theirs is a maximum with frames from the action before.

    Args:
        game: the id.
        noop_max: maximum number of no-ops at the start of a game; 0 disables them.
        frame_skip: frames per action.
        episodic_life: end an episode with a life. The next one continues the game, after a no-op.
        fire_reset: begin an episode with FIRE, if the game has it, and the action after FIRE.
        grayscale: whether frames are ALE's gray ones.
        render_mode: argument of `ale_py.AtariEnv`.
        kwargs: further arguments of `ale_py.AtariEnv`.
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
        self.noop_max = noop_max
        self.frame_skip = frame_skip
        self.episodic_life = episodic_life
        self.render_mode = render_mode
        # RAM, because most frames are never looked at.
        kwargs = {**kwargs, "obs_type": "ram", "frameskip": 1, "render_mode": render_mode}
        env: Any = gymnasium.make(game, disable_env_checker=True, **kwargs)
        self.env = env.unwrapped
        self.ale = self.env.ale
        self.fire_reset = fire_reset and "FIRE" in self.env.get_action_meanings()
        self._screen = self.ale.getScreenGrayscale if grayscale else self.ale.getScreenRGB
        self._frames = np.stack([self._screen(), self._screen()])
        self.action_space = self.env.action_space
        self.observation_space = gymnasium.spaces.Box(0, 255, self._frames.shape[1:], np.uint8)
        self._lost_life = False
        self._game_over = False
        self._game_return = 0.0
        self._lives = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._begin_episode(seed)
        if self.fire_reset:
            for action in (1, 2):
                self._act(action)
                if self._lost_life or self._game_over:
                    self._begin_episode()
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated = self._act(action)
        terminated = terminated or self._lost_life
        return self._observation(), reward, terminated, truncated, self._info()

    def _begin_episode(self, seed: int | None = None) -> None:
        continues = self._lost_life and not self._game_over and seed is None
        if continues:
            self._act(0)
        if not continues or self._game_over:
            self._begin_game(seed)
        self._lost_life = False
        self._lives = self.ale.lives()

    def _begin_game(self, seed: int | None) -> None:
        self.env.reset(seed=seed)
        num_noops = 0
        if self.noop_max > 0:
            num_noops = self.env.np_random.integers(1, self.noop_max + 1)
        for _ in range(num_noops):
            _, _, terminated, truncated, _ = self.env.step(0)
            if terminated or truncated:
                self.env.reset()
        self._game_return = 0.0
        self._game_over = False
        self._frames[:] = self._screen()

    def _act(self, action: int) -> tuple[float, bool, bool]:
        total = 0.0
        for left in reversed(range(self.frame_skip)):
            _, reward, terminated, truncated, _ = self.env.step(action)
            total += reward
            if terminated or truncated:
                self._frames[:] = self._screen()
                break
            if left < 2:
                self._screen(self._frames[left])
        lives = self.ale.lives()
        # Some games go on for a few frames with no life left.
        self._lost_life = self.episodic_life and 0 < lives < self._lives
        self._lives = lives
        self._game_over = terminated or truncated
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
