"""EnvFacade: what an env says about itself, under Gymnasium's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from gymnasium import Space
from gymnasium.vector.utils import batch_space
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.buffer_pool import raise_mmap_threshold
from torchwrap._core.env_buffers import BatchedModule, EpisodeClock, SubmoduleAttribute
from torchwrap._env.position import Position
from torchwrap.random import Stream, fresh_seed
from torchwrap.spaces import Signature

AnEnv = TypeVar("AnEnv", bound="EnvFacade")


class EnvFacade(BatchedModule):
    """The description of an env: its signature, and the properties of Gymnasium's `VectorEnv` that follow from it."""

    action_stream, action_sampler = SubmoduleAttribute(), SubmoduleAttribute()

    def __init__(self, signature: Signature, spec: Any, metadata: dict[str, Any] | None, render_mode: str | None) -> None:
        super().__init__()
        raise_mmap_threshold()
        self.signature = signature
        self._position = Position()
        self._spec = spec
        self.metadata = metadata or {}
        self.render_mode = render_mode
        self.action_stream = Stream(signature.num_envs, signature.first_index, tag=1, device=signature.device)

    def _fix(self) -> None:
        # Only now is the action space of this layer final.
        self.action_sampler = spaces.Sampler(self.single_action_space, self.device)
        super()._fix()

    @property
    def num_envs(self) -> int:
        return self.signature.num_envs

    @property
    def single_observation_space(self) -> Space[Any]:
        return self.signature.single_observation_space

    @property
    def single_action_space(self) -> Space[Any]:
        return self.signature.single_action_space

    @property
    def observation_space(self) -> Space[Any]:
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def action_space(self) -> Space[Any]:
        return batch_space(self.single_action_space, self.num_envs)

    @property
    def device(self) -> torch.device:
        return self.signature.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to(device)` comes here: the signature follows the buffers.
        super()._apply(fn, recurse)
        vars(self)["signature"] = self.signature.replace(device=fn(torch.empty(0, device=self.device)).device)
        return self

    def _dtypes(self) -> set[torch.dtype]:
        values = (spaces.REWARD, self.single_observation_space, self.single_action_space)
        return super()._dtypes() | {spaces.dtype(leaf) for space in values for _, leaf in spaces.leaves(space)}

    @property
    def spec(self) -> Any:
        """Gymnasium's `EnvSpec`, with every wrapper and transform: `torchwrap.make(env.spec)` builds another env like this."""
        return self._spec

    @property
    def np_random_seed(self) -> int | tuple[int, ...] | None:
        """The seed in use, drawn by the first reset if it was given none; a tuple with one per env if they differ."""
        if self._position.root is None:
            return None
        words = zip(self.action_stream.seed_low.tolist(), self.action_stream.seed_high.tolist(), strict=True)
        seeds = tuple(low + (high << 32) for low, high in words)
        return seeds[0] if len(set(seeds)) == 1 else seeds

    def _choose_seed(self, seed: int | None, is_first: bool) -> int | None:
        """The seed that a reset uses if it is given `seed`. None continues the random streams.

        A first reset has one, readable as `np_random_seed`, so that an unseeded run can be repeated. Raises for a seed that
        the simulator does not take.
        """
        return fresh_seed() if seed is None and is_first else seed

    @property
    def elapsed_steps(self) -> Tensor:
        """Steps since the start of each running episode: int64 `(num_envs,)`, a copy.

        Assigning it moves the clocks of every layer, those of native limits and `TimeLimit` included, so that episodes can be
        truncated at different times from the start. Statistics and frames are not touched.

        Raises:
            RuntimeError: if no layer has a clock, as over a simulator that counts the steps itself.
            ValueError: for another shape or dtype, or a negative number.

        >>> from torchwrap.envs.cartpole import CartPole; from torchwrap import FunctionalEnv
        >>> env = FunctionalEnv(CartPole(), num_envs=2, max_episode_steps=500)
        >>> _ = env.reset()
        >>> env.elapsed_steps = torch.tensor([0, 499])
        >>> env.step(env.sample_action())[0]["next", "truncated"].flatten()
        tensor([False,  True])
        """
        steps = self._read_clock()
        if steps is None:
            raise RuntimeError(
                f"{self._name()} needs a layer that counts steps in a tensor for elapsed_steps, but got none: "
                "put transforms.TimeLimit on it."
            )
        return steps.reshape(-1).to(torch.int64, copy=True)

    @elapsed_steps.setter
    def elapsed_steps(self, steps: Tensor) -> None:
        shape = self.elapsed_steps.shape
        if not isinstance(steps, Tensor) or steps.shape != shape or steps.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(steps.shape)} {steps.dtype}" if isinstance(steps, Tensor) else repr(steps)
            raise ValueError(f"{self._name()} needs elapsed_steps of shape {tuple(shape)} torch.int64, but got {got}.")
        if bool((steps < 0).any()):
            raise ValueError(f"{self._name()} needs elapsed_steps of at least 0, but got {int(steps.min())}.")
        self._write_clock(steps.to(self.device))

    def _read_clock(self) -> Tensor | None:
        """The elapsed steps; None if this env has no clock."""
        return next(iter(EpisodeClock.of(self)), None)

    def _write_clock(self, steps: Tensor) -> None:
        for clock in EpisodeClock.of(self):
            clock.copy_(steps.view_as(clock))

    def sample_action(self) -> spaces.Value:
        """Random actions, drawn on the env's device from a stream of their own, so that the env's streams do not move."""
        return self.action_sampler(self.action_stream)

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Renders all envs, or those with the given indices, as NumPy arrays `(height, width, 3)` uint8.

        The env needs `render_mode="rgb_array"` at construction.
        """
        raise NotImplementedError(f"{self._name()} does not implement render().")

    def close(self) -> None:
        """Releases what the env holds outside of PyTorch. `with env:` calls it at the end."""

    def __enter__(self: AnEnv) -> AnEnv:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What other libraries' envs have, and these do not.

    def seed(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: `reset` takes the seed."""
        raise AttributeError(f"{self._name()} needs its seed in reset, but got a call of seed(): `td = env.reset(seed=0)`.")

    def __getitem__(self, index: Any) -> NoReturn:  # iteration comes here too; with __iter__, an env would be an Iterable
        raise TypeError(
            f"{self._name()} needs reset() and step(), but got an index or a loop over it: `td = env.reset()`, then "
            '`for _ in range(100): _, td = env.step(td.set("action", env.sample_action()))`.'
        )

    def __len__(self) -> int:
        raise TypeError(f"{self._name()} has no len(): `env.num_envs` is the number of envs.")

    def __bool__(self) -> bool:
        return True  # without it, Python would call __len__

    def _name(self) -> str:
        return self._spec.id if self._spec is not None else type(self).__name__

    def __repr__(self) -> str:
        return f"<{self._name()}(num_envs={self.num_envs}, device={self.device})>"
