"""An env that can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gymnasium_spaces
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, spaces
from torchwrap.buffer import Buffer
from torchwrap.env import Env
from torchwrap.spaces import Signature


class ScriptedEnv(Env):
    """An env whose every value can be computed by hand.

    At step t of an episode (0 at its start), the observation of env i (its global index) has at flat position j the value
    1000 * i + 10 * j + t, wrapped around into the bounds where the space has any. The reward of step t is t. Episode e of
    env i is `episode_lengths[(i + e) % len(episode_lengths)]` steps long. `("next", "info", "action")` is the action that
    arrived.

    Args:
        num_envs: number of envs.
        observation_shape: of a float32 observation without bounds.
        episode_lengths: one length, or several to take in turn; None for episodes that never end.
        ending: "terminated", "truncated", "both", or "in turn" for each of them in turn, by (i + e) % 3.
        observation_space: another space than the shape says.
        action_space: six numbers in [-1, 1] where None.
        first_index: global index of the first env.
        device: where it lives.

    >>> env = ScriptedEnv(2, observation_shape=(3,), episode_lengths=(5, 2))
    >>> env.reset()["observation"]
    tensor([[   0.,   10.,   20.],
            [1000., 1010., 1020.]])
    """

    lengths: Tensor | None
    index = Buffer()
    elapsed = Buffer()
    episode = Buffer()

    def __init__(
        self,
        num_envs: int = 1,
        observation_shape: tuple[int, ...] = (17,),
        episode_lengths: int | Sequence[int] | None = (5, 3, 1, 4),
        *,
        ending: Literal["terminated", "truncated", "both", "in turn"] = "in turn",
        observation_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        first_index: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        device = arguments.device("ScriptedEnv", device)
        lengths = list(episode_lengths) if isinstance(episode_lengths, Sequence) else [episode_lengths]
        if episode_lengths is not None:
            lengths = [arguments.integer("ScriptedEnv", "episode_lengths", length, at_least=1) for length in lengths]
        if not lengths:
            raise ValueError(f"ScriptedEnv needs episode_lengths of at least 1, but got {episode_lengths}.")
        if ending not in ("terminated", "truncated", "both", "in turn"):
            raise ValueError(f'ScriptedEnv needs ending "terminated", "truncated", "both" or "in turn", but got {ending!r}.')
        if observation_space is None:
            observation_space = gymnasium_spaces.Box(-np.inf, np.inf, observation_shape, np.float32)
        if action_space is None:
            action_space = gymnasium_spaces.Box(-1, 1, (6,), np.float32)
        super().__init__(
            Signature(num_envs, observation_space, action_space, device, None, first_index),
            metadata={"render_modes": []},
        )
        self.ending = ending
        for name, value in (
            ("index", torch.arange(first_index, first_index + num_envs, device=device)),
            ("elapsed", torch.zeros(num_envs, dtype=torch.int64, device=device)),
            ("episode", torch.full((num_envs,), -1, device=device)),
        ):
            self.register_rows(name, value)
        self.register_buffer(
            "lengths", None if episode_lengths is None else torch.tensor(lengths, device=device), persistent=False
        )
        # For each leaf: 10 * j, and the bounds to wrap around in.
        self.bounds: dict[tuple[str, ...], tuple[Any, Any] | None] = {}
        for path, leaf in spaces.leaves(observation_space):
            places = 10 * torch.arange(math.prod(leaf.shape or ()), device=device).view(leaf.shape or ())
            self.register_buffer("_".join(("places", *path)), places, persistent=False)
            self.bounds[path] = self._bounds(leaf)

    def _bounds(self, leaf: Space[Any]) -> tuple[Any, Any] | None:
        if not isinstance(leaf, gymnasium_spaces.Box):
            count, start = spaces.counts(leaf, self.device)
            return start, count
        if not leaf.is_bounded():
            return None
        whole = np.issubdtype(leaf.dtype, np.integer)
        low, high = (bound.astype(np.int64 if whole else np.float64) for bound in (leaf.low, leaf.high))
        width = np.where(high > low, high - low + whole, 1)  # and 1 to stay where low and high are one
        if (low == low.flat[0]).all() and (high == high.flat[0]).all():
            return low.flat[0].item(), width.flat[0].item()
        return torch.as_tensor(low, device=self.device), torch.as_tensor(width, device=self.device)

    def _step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        turn = self.index + self.episode
        if self.lengths is None:
            ended = torch.zeros_like(self.elapsed, dtype=torch.bool)
        else:
            ended = self.elapsed >= self.lengths[turn % len(self.lengths)]
        which = {"terminated": 0, "truncated": 1, "both": 2}.get(self.ending)
        way = turn % 3 if which is None else torch.full_like(turn, which)
        return TensorDict(
            {
                "observation": self._observation_now(),
                "reward": self.elapsed.to(torch.float32).unsqueeze(-1),
                "terminated": (ended & (way != 1)).unsqueeze(-1),
                "truncated": (ended & (way != 0)).unsqueeze(-1),
                "info": TensorDict({"action": td["action"].clone()}, batch_size=[self.num_envs]),
            },
            batch_size=[self.num_envs],
        )

    def _reset(self, mask: Tensor) -> TensorDict:
        self.elapsed.masked_fill_(mask, 0)
        self.episode.add_(mask)
        return TensorDict({"observation": self._observation_now()}, batch_size=[self.num_envs])

    def _seed(self, seed: int, mask: Tensor) -> None:
        super()._seed(seed, mask)
        self.episode.masked_fill_(mask, -1)

    def _observation_now(self) -> spaces.Value:
        base = 1000 * self.index + self.elapsed

        def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
            places = getattr(self, "_".join(("places", *path)))
            value = base.view(-1, *(1,) * places.dim()) + places
            bounds = self.bounds[path]
            return (value if bounds is None else bounds[0] + value % bounds[1]).to(spaces.dtype(leaf))

        return spaces.build(self.single_observation_space, make, self.num_envs)
