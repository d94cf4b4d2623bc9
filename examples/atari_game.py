"""Atari games: one set of options for ALE's and EnvPool's C++ and for Python, and whole games.

`make_games` makes them, for `ppo_atari.py` and `dqn_atari.py`. Where a life is an episode,
`GameReturn` records the scores of games, and `WholeGames` evaluates on them.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import ale_py
import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

gymnasium.register_envs(ale_py)

_ID = "torchwrap/Atari-v0"
Backend = Literal["ale", "envpool", "cleanrl", "gymnasium", "sb3"]
INFO_KEYS = ("game_over", "lives")
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
    backend: Backend = "ale",
    seed: int | None = None,
    **kwargs: Any,
) -> tw.Env:
    """Makes Atari games with stacked gray frames of 84 x 84, by one set of options and defaults.

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

    | backend | steps and preprocesses |
    |---|---|
    | "ale" | in C++, with threads |
    | "envpool" | in C++, with threads |
    | "cleanrl", "gymnasium", "sb3" | in Python, with `T.atari`, bit for bit as these libraries |

    They agree frame by frame, but for:

    - the maximum of two frames, which "cleanrl" and "sb3" take of colors and the others of grays,
      and the order of gray and resizing in "cleanrl";
    - the stack of an initial observation: zeros below the first frame in "sb3", copies of it in the
      others;
    - the last frame of a game that ends within an action;
    - what precedes the first frame: other no-ops are drawn, and "ale" plays them after FIRE, the
      others before; those in Python then play another action, each for `frame_skip` frames;
    - what follows a lost life: nothing in "ale"; a no-op or FIRE in the others, where the agent may
      not learn to play it itself, so evaluate it by `WholeGames`.

    Args:
        game: such as "Breakout".
        num_envs: number of games.
        backend: what plays the games.
        seed: that of the first reset, which EnvPool has to know before.
        kwargs: options, and further arguments of `torchwrap.make` and the backend, such as
            `device` and, except for ALE's, `render_mode`.

    Raises:
        ValueError: for an unknown backend or game, and for no no-ops.
    """
    options = {**_DEFAULTS, "info_keys": INFO_KEYS, **kwargs}
    if options["noop_max"] < 1:  # EnvPool divides by it
        raise ValueError(f"make_games: noop_max must be at least 1, got {options['noop_max']}.")
    if f"ALE/{game}-v5" not in gymnasium.registry:
        raise ValueError(f'make_games: game must be one of ALE, such as "Pong", got {game!r}.')
    if backend not in get_args(Backend):
        must = f"backend must be one of {get_args(Backend)}"
        raise ValueError(f"make_games: {must}, got {backend!r}.")
    transforms: list[T.Transform] = []
    stack: dict[str, Any] = {"stack_size": options.pop("stack_num")}
    if backend in _NAMES:
        names = _NAMES[backend]
        arguments = {names.get(name, name): value for name, value in options.items()}
        if backend == "envpool":
            arguments.setdefault("max_episode_steps", 108_000 // options["frame_skip"])
            if seed is not None:
                arguments["seed"] = seed
        id = f"ALE/{game}-v5" if backend == "ale" else f"{game}-v5"
        # Their own stacks go on after a lost life, with frames of the episode before.
        env = tw.make(id, num_envs, backend=backend, stack_num=1, **arguments)
        stack["axis"] = 0
    else:
        kinds = T.GrayscaleObservation, T.ResizeObservation
        transforms += [each for each in T.atari(backend) if isinstance(each, kinds)]
        if options.pop("reward_clip"):
            transforms.append(T.ClipReward(-1, 1))
        options["grayscale"] = backend == "gymnasium"
        env = tw.make(f"{__name__}:{_ID}", num_envs, game=f"ALE/{game}-v5", **options)
        stack["padding_type"] = "zero" if backend == "sb3" else "reset"
    return tw.TransformedEnv(env, *transforms, T.FrameStackObservation(**stack))


class GameReturn(T.RecordEpisodeStatistics):
    """Records games as episodes, also where a life is an episode of the env."""

    lost_life = tw.EnvBuffer((1,), torch.bool)

    def step(self, td: TensorDict) -> TensorDict:
        self.lost_life.copy_(td["terminated"] & (td["info", "game_over"] == 0))
        return super().step(td)

    def reset(self, td: TensorDict, mask: tw.RowMask) -> TensorDict:
        if not mask.is_full:  # which starts games; others go on with the lives that are left
            mask = tw.RowMask(mask.column & ~self.lost_life)
        return super().reset(td, mask)


class WholeGames(tw.Wrapper):
    """Makes games the episodes of an env with `episodic_life`, to evaluate with its starts."""

    def _step(self, action: Any) -> TensorDict:
        successor = super()._step(action)
        is_lost = successor["terminated"] & (successor["info", "game_over"] == 0)
        lost = tw.RowMask(is_lost, synchronize=True)
        if lost.any():
            initial = super()._reset(lost)["observation"]
            successor["observation"] = lost.where(initial, successor["observation"])
            successor["terminated"] = successor["terminated"] & ~is_lost
        return successor


def make_training(args: Any, num_envs: int, seed: int) -> tw.Env:
    """Games whose lives are episodes, with clipped rewards, and scores of whole games recorded."""
    options = dict(device=args.device, episodic_life=True)
    env = make_games(args.env_id, num_envs, args.backend, seed, **options)
    return tw.TransformedEnv(env, GameReturn(), T.ClipReward(-1, 1))


class AtariGame(gymnasium.Env[NDArray[np.uint8], int]):
    """A single game in Python, for `make_games`. The methods are Gymnasium's.

    It draws the same numbers as Stable-Baselines3's `NoopResetEnv`, `MaxAndSkipEnv`,
    `EpisodicLifeEnv` and `FireResetEnv`. If a game ends within an action, the final observation is
    its last frame; theirs is a maximum with frames from the action before.

    Args:
        game: the id.
        noop_max: maximum number of no-ops at the start of a game.
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
        # The last one or two of an action
        self._frames = np.stack([self._screen()] * min(frame_skip, 2))
        self.action_space = self.env.action_space
        self.observation_space = gymnasium.spaces.Box(0, 255, self._frames.shape[1:], np.uint8)
        self._lost_life = False
        self._game_over = False
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
        for _ in range(self.env.np_random.integers(1, self.noop_max + 1)):
            _, _, terminated, truncated, _ = self.env.step(0)
            if terminated or truncated:
                self.env.reset()
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
            if left < len(self._frames):
                self._screen(self._frames[left])
        lives = self.ale.lives()
        # Some games go on for a few frames with no life left.
        self._lost_life = self.episodic_life and 0 < lives < self._lives
        self._lives = lives
        self._game_over = terminated or truncated
        return total, terminated, truncated

    def _observation(self) -> NDArray[np.uint8]:
        return self._frames.max(0)

    def _info(self) -> dict[str, Any]:
        return {"game_over": self._game_over, "lives": self._lives}

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


if _ID not in gymnasium.registry:
    gymnasium.register(_ID, f"{__name__}:AtariGame")
