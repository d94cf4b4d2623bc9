"""FunctionalEnv: a batch of envs from pure functions of one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from gymnasium.experimental.functional import FuncEnv
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.random import Key, Stream
from torchwrap.spaces import Signature

# Which numbers each function gets from its key: they must not share any.
_INITIAL, _TRANSITION, _OBSERVATION, _REWARD = range(4)


class FunctionalEnv(Env):
    """`num_envs` copies of a world that is written as pure functions: Gymnasium's `FuncEnv`, in torch.

    The functions are `initial(rng)`, `transition(state, action, rng)`, `observation(state, rng)`,
    `reward(state, action, next_state, rng)` and `terminal(state, rng)`. A state is a dict of tensors (one tensor a field
    vectorises best), `rng` is a `torchwrap.random.Key`: the same functions of it always draw the same numbers. Each
    function is written for one world and batched by `torch.vmap`, or, where the class sets `broadcasts = True`, is called
    with `(num_envs,)` in front of every shape.

    Args:
        func_env: the functions, with `observation_space` and `action_space`.
        num_envs: how many worlds.
        device: where they live.
        max_episode_steps: truncates episodes of that length; never where None.
        first_index: global index of the first world, for a shard of a larger run.
        spec: Gymnasium's `EnvSpec`, where there is one.

    Reset options are passed on as keyword arguments of `initial`.

    >>> from torchwrap.envs.cartpole import CartPole
    >>> env = FunctionalEnv(CartPole(), num_envs=3, max_episode_steps=500)
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        func_env: FuncEnv[Any, Any, Any, Any, Any, Any, Any],
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int | None = None,
        first_index: int = 0,
        spec: Any = None,
    ) -> None:
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"FunctionalEnv needs max_episode_steps of at least 1, but got {max_episode_steps}.")
        signature = Signature(
            num_envs, func_env.observation_space, func_env.action_space, torch.device(device), max_episode_steps, first_index
        )
        super().__init__(signature, spec=spec, metadata=getattr(func_env, "metadata", None))
        self.func_env = func_env
        self.stream = Stream(num_envs, first_index, tag=0, device=device)
        state = self._call(func_env.initial, rng=self.stream.key())
        self.fields = list(state)
        for name, value in state.items():
            self.register_buffer(f"state_{name}", value.clone(), persistent=False)
        self._try_out()

    def _try_out(self) -> None:
        # One step that changes nothing: what the functions give has to fit their spaces.
        state, key, name = self.state, self.stream.key(), type(self.func_env).__name__
        observation = self._call(self.func_env.observation, state, rng=key)
        spaces.check(f"{name}.observation", "to give", self.single_observation_space, observation, self.num_envs, self.device)
        # An observation that is (a view of) the state has to be copied before it is handed out.
        own = {value.untyped_storage().data_ptr() for value in state.values()}
        parts = [observation] if isinstance(observation, Tensor) else observation.values(True, True)
        self.observes_itself = any(part.untyped_storage().data_ptr() in own for part in parts)
        action = spaces.zeros(self.single_action_space, self.num_envs, self.device)
        following = self._call(self.func_env.transition, state, action, rng=key)
        if list(following) != self.fields:
            raise ValueError(f"{name}.transition needs to give a state with fields {self.fields}, but got {list(following)}.")
        for field, value in state.items():
            new = following[field]
            if new.shape != value.shape or new.dtype != value.dtype:
                raise ValueError(
                    f"{name}.transition needs to give {field!r} of shape {tuple(value.shape)} {value.dtype}, "
                    f"but got {tuple(new.shape)} {new.dtype}."
                )
        reward = self._call(self.func_env.reward, state, action, following, rng=key)
        terminal = self._call(self.func_env.terminal, following, rng=key)
        for function, value in (("reward", reward), ("terminal", terminal)):
            if value.shape != (self.num_envs,):
                raise ValueError(f"{name}.{function} needs to give one scalar an env, but got {tuple(value.shape)} in all.")
        if terminal.dtype != torch.bool:
            raise TypeError(f"{name}.terminal needs to give torch.bool, but got {terminal.dtype}.")

    @property
    def state(self) -> dict[str, Tensor]:
        """The simulator's state by field, each `(num_envs, ...)`: the buffers themselves, so write to them in place."""
        return {name: getattr(self, f"state_{name}") for name in self.fields}

    def _step(self, td: TensorDict) -> TensorDict:
        self.stream.next_draw()
        state, key, call, functions = self.state, self.stream.key(), self._call, self.func_env
        next_state = call(functions.transition, state, td["action"], rng=key._replace(tag=_TRANSITION))
        reward = call(functions.reward, state, td["action"], next_state, rng=key._replace(tag=_REWARD))
        terminated = call(functions.terminal, next_state, rng=key._replace(tag=_REWARD))
        observation = self._observe(next_state, key)
        self._write(next_state)
        limit = self.signature.max_episode_steps
        truncated = torch.zeros_like(terminated) if limit is None else self.stream.draw >= limit
        return TensorDict(
            {
                "observation": observation,
                "reward": reward.to(torch.float32).view(-1, 1),
                "terminated": terminated.view(-1, 1),
                "truncated": truncated.view(-1, 1),
            },
            batch_size=[self.num_envs],
        )

    def _reset(self, mask: Tensor, options: dict[str, Any] | None = None) -> TensorDict:
        known = inspect.signature(self.func_env.initial).parameters
        for name in options or {}:
            if name not in known:
                raise ValueError(f"{self._name()}.reset needs options among {list(known)[1:]}, but got {name!r}.")
        self.stream.next_episode(mask)
        key = self.stream.key()
        first = self._call(self.func_env.initial, rng=key._replace(tag=_INITIAL), **(options or {}))
        self._write({name: spaces.where(mask, first[name], value) for name, value in self.state.items()})
        observation = self._observe(self.state, key)
        return TensorDict({"observation": observation}, batch_size=[self.num_envs])

    def _observe(self, state: dict[str, Tensor], key: Key) -> spaces.Value:
        observation = self._call(self.func_env.observation, state, rng=key._replace(tag=_OBSERVATION))
        return observation.clone() if self.observes_itself else observation

    def _write(self, state: dict[str, Tensor]) -> None:
        for name, value in self.state.items():
            value.copy_(state[name])

    def _call(self, function: Any, *arguments: Any, rng: Key, **options: Any) -> Any:
        if getattr(self.func_env, "broadcasts", False):
            return function(*arguments, rng=rng, **options)

        def alone(words: tuple[Tensor, ...], *arguments: Any) -> Any:
            return function(*arguments, rng=Key(*words, rng.tag), **options)  # type: ignore[arg-type, call-arg]

        return torch.vmap(alone)(rng[:-1], *arguments)
