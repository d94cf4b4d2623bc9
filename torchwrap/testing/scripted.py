"""ScriptedEnv: an env whose values can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gymnasium_spaces
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.env_buffers import ConstantBuffer, EnvBuffer, EpisodeClock
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.spaces import Signature

_ENDINGS = ("terminated", "truncated", "both")


class ScriptedEnv(Env):
    """An env whose values can be computed by hand, for tests.

    Let i be the global index of the env, e the number of its episode, counted from 0, and t the number of steps taken in it.
    Element j of the flattened observation is 1000 * i + 10 * j + t, wrapped into the bounds of the space if it has any. The
    reward of step t is t. The episode ends after `episode_lengths[(i + e) % len(episode_lengths)]` steps. The action that the
    env received is in `("next", "info", "action")`.

    Args:
        num_envs: number of envs.
        observation_shape: shape of an unbounded float32 observation.
        episode_lengths: one length, or several to take in turn. None for episodes that never end.
        ending: "terminated", "truncated", "both", or "in turn" for the three of them in turn, by (i + e) % 3.
        observation_space: replaces the space given by `observation_shape`, if not None.
        action_space: None takes Box(-1, 1, (6,)).
        first_index: global index of the first env.

    >>> env = ScriptedEnv(2, observation_shape=(3,), episode_lengths=(5, 2))
    >>> env.reset()["observation"]
    tensor([[   0.,   10.,   20.],
            [1000., 1010., 1020.]])
    """

    lengths, terminates, truncates, following = (ConstantBuffer() for _ in range(4))  # by turn
    index = EnvBuffer((), torch.int64)
    elapsed = EpisodeClock(())
    episode = EnvBuffer((), torch.int64, fill=-1)
    turn = EnvBuffer((), torch.int64)  # i + e, modulo the number of turns

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
        device = validation.device("ScriptedEnv", device)
        given = 2**63 - 1 if episode_lengths is None else episode_lengths
        lengths = list(given) if isinstance(given, Sequence) else [given]
        lengths = [validation.integer("ScriptedEnv", "episode_lengths", length, at_least=1) for length in lengths]
        if not lengths:
            raise ValueError(f"ScriptedEnv needs episode_lengths of at least 1, but got {episode_lengths}.")
        if ending not in (*_ENDINGS, "in turn"):
            raise ValueError(f'ScriptedEnv needs ending "terminated", "truncated", "both" or "in turn", but got {ending!r}.')
        if observation_space is None:
            observation_space = gymnasium_spaces.Box(-np.inf, np.inf, observation_shape, np.float32)
        if action_space is None:
            action_space = gymnasium_spaces.Box(-1, 1, (6,), np.float32)
        signature = Signature(num_envs, observation_space, action_space, device, None, first_index)
        super().__init__(signature, metadata={"render_modes": []})
        self.ending = ending
        self.index.copy_(torch.arange(first_index, first_index + num_envs, device=device))
        endings = _ENDINGS if ending == "in turn" else [ending]
        turns = range(math.lcm(len(lengths), len(endings)))
        by_turn = {
            "lengths": [lengths[turn % len(lengths)] for turn in turns],
            "terminates": [endings[turn % len(endings)] != "truncated" for turn in turns],
            "truncates": [endings[turn % len(endings)] != "terminated" for turn in turns],
            "following": [(turn + 1) % len(turns) for turn in turns],
        }
        for name, values in by_turn.items():
            self.register_buffer(name, torch.tensor(values, device=device), persistent=False)
        self.leaves = nn.ModuleList(_Leaf(leaf, device) for _, leaf in spaces.leaves(observation_space))

    def _step(self, action: spaces.Value) -> TensorDict:
        self.elapsed.add_(1)
        ended = self.elapsed >= self.lengths[self.turn]
        successor = {
            "observation": self._observation_now(),
            "reward": self.elapsed.to(torch.float32).unsqueeze(-1),
            "terminated": (ended & self.terminates[self.turn]).unsqueeze(-1),
            "truncated": (ended & self.truncates[self.turn]).unsqueeze(-1),
            "info": TensorDict({"action": action.clone()}, batch_size=[self.num_envs]),
        }
        return TensorDict(successor, batch_size=[self.num_envs])

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        mask.fill_(self.elapsed, 0)
        self.episode.add_(mask.tensor)
        mask.assign_(self.turn, self.following[self.turn])
        return TensorDict({"observation": self._observation_now()}, batch_size=[self.num_envs])

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        mask.fill_(self.episode, -1)
        mask.assign_(self.turn, (self.index - 1) % len(self.following))

    def _observation_now(self) -> spaces.Value:
        start, leaves = 1000 * self.index + self.elapsed, iter(self.leaves)

        def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
            value: Tensor = next(leaves)(start)
            return value

        return spaces.build(self.single_observation_space, make, self.num_envs)


class _Leaf(nn.Module):
    """The values of a leaf, wrapped into its bounds if it has any."""

    offsets, low, width = ConstantBuffer(), ConstantBuffer(), ConstantBuffer()

    def __init__(self, leaf: Space[Any], device: torch.device) -> None:
        super().__init__()
        self.dtype = spaces.dtype(leaf)
        self.is_bounded = not isinstance(leaf, gymnasium_spaces.Box) or leaf.is_bounded()
        width, low = spaces.counts(leaf)
        if isinstance(leaf, gymnasium_spaces.Box):
            is_integer = np.issubdtype(leaf.dtype, np.integer)
            low, high = (bound.astype(np.int64 if is_integer else np.float64) for bound in (leaf.low, leaf.high))
            width = np.where(high > low, high - low + is_integer, 1)  # not 0, because it is a divisor
        exact = torch.float64 if self.dtype.is_floating_point else torch.int64  # both hold every whole number that occurs
        offsets = 10 * torch.arange(math.prod(leaf.shape or ()), dtype=exact, device=device).view(leaf.shape or ())
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("low", torch.tensor(low, device=device), persistent=False)
        self.register_buffer("width", torch.tensor(width, device=device), persistent=False)

    def forward(self, start: Tensor) -> Tensor:
        value = start.view(-1, *(1,) * self.offsets.dim()) + self.offsets
        return (self.low + value % self.width if self.is_bounded else value).to(self.dtype)
