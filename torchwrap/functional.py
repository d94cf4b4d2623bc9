"""FunctionalEnv: a batch of envs from the pure functions of a single env."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.experimental.functional import FuncEnv
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import rows, validation
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import RowMask, materialize, tensordict
from torchwrap.env import Env, Options
from torchwrap.random import Key, Stream
from torchwrap.spaces import Signature, Value

State = dict[str, Tensor]
"""The simulator's state by field, each `(num_envs, ...)`."""

Functions = FuncEnv[Any, Any, Any, Any, Any, Any, Any]

# The index of a function is part of its key, so that no two functions of a step draw the same numbers.
_TAGS = {
    "initial": 0,
    "transition": 1,
    "observation": 2,
    "reward": 3,
    "terminal": 4,
    "truncated": 6,
}
_INFO = ("transition_info", "state_info")  # they get no random numbers

# Words of PyTorch's errors under torch.vmap, and what they mean for the author of a function.
_ON_HOST = "reads values on the host: use tensor operators, torch.where instead of `if`"
_IN_PLACE = "writes in place to a tensor that all envs share: return new tensors"
_CAUSES = {
    "random operation": "draws from a generator of PyTorch: draw from its rng, with torchwrap.random",
    **dict.fromkeys(("control flow", ".item()", "data pointer", "aten::equal"), _ON_HOST),
    "dynamic shape": "makes a tensor whose shape depends on values: use torch.where instead of a mask",
    **dict.fromkeys(("there exists a Tensor", "the broadcast shape"), _IN_PLACE),
    **dict.fromkeys(
        ("must only return Tensors", "has no attribute 'keys'"), "needs to return tensors ({})"
    ),
}


class FunctionalEnv(Env):
    """`num_envs` copies of an env that is written as pure functions: Gymnasium's `FuncEnv`, in torch.

    Write each function for a single env; `torch.vmap` batches it. Each is called at construction, where errors name it.

    | function | returns, for a single env |
    |---|---|
    | `initial(rng)` | the initial state: a dict of tensors, with the same fields, shapes and dtypes at every call |
    | `transition(state, action, rng)` | the next state, with the same fields |
    | `observation(state, rng)` | a tensor, or a dict of tensors for a `Dict` space, that lies in `observation_space` |
    | `reward(state, action, next_state, rng)` | a scalar of any real dtype |
    | `terminal(state, rng)` | a bool scalar |
    | `truncated(state, rng)`, optional | a bool scalar, in addition to `max_episode_steps` |
    | `transition_info(state, action, next_state)`, optional | a dict of tensors, each of which is `("next", "info", name)` |
    | `state_info(state)`, optional | the same, about the next state, under other names |

    `rng` is a `torchwrap.random.Key`. Draw from it with `torchwrap.random`, and use `rng.fold_in(1)`, `rng.fold_in(2)`, ...
    for further independent draws in the same function. Use tensor operators only: `torch.where` instead of `if`; write to no
    argument. `terminal` and `truncated` get the next state. Scalars of an info become `(num_envs, 1)`. Keyword arguments of
    `initial` are the env's reset options; `reset(options={"state": {...}})` gives fields of the state, each `(num_envs, ...)`.

    Buffers of a `class Levels(nn.Module, FuncEnv)` are moved and saved with the env. A class that sets `broadcasts = True` is
    called without `torch.vmap`: all tensors then have the leading dimension of `rng.env.shape`, which in `initial` and
    `observation` is any number of rows of the batch.

    Args:
        func_env: the functions, with `observation_space` and `action_space` of a single env.
        num_envs: number of envs.
        device: of all tensors.
        max_episode_steps: truncates episodes at this length. None disables it.
        first_index: global index of the first env, for a shard of a larger run.
        params: what differs between envs, by name: tensors `(num_envs, ...)`. Functions get a dict of their env's as `params`.
            `env.set_wrapper_attr(name, value)` changes them during training, compiled or not, for one value or one per env.
        render_mode: "rgb_array" if the functions have `render_init()` and `render_image(state, render_state)`, which returns
            `(render_state, frame)`; `render_close(render_state)` is optional. None disables rendering.
        spec: Gymnasium's `EnvSpec`, if there is one.

    >>> from torchwrap.envs.cartpole import CartPole
    >>> env = FunctionalEnv(CartPole(), num_envs=3, max_episode_steps=500)
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        func_env: Functions,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int | None = None,
        first_index: int = 0,
        params: Mapping[str, Tensor] | None = None,
        render_mode: str | None = None,
        spec: EnvSpec | None = None,
    ) -> None:
        if isinstance(func_env, type) or not all(
            hasattr(func_env, name) for name in ("observation_space", "action_space")
        ):
            raise TypeError(
                f"FunctionalEnv needs a FuncEnv with observation_space and action_space, but got {func_env!r}."
            )
        device = validation.device("FunctionalEnv", device)
        missing = [name for name in ("render_init", "render_image") if not _defines(func_env, name)]
        metadata = {
            "render_modes": [] if missing else ["rgb_array"],
            **(getattr(func_env, "metadata", None) or {}),
        }
        if render_mode not in (None, *(modes := metadata["render_modes"])):
            raise ValueError(
                f"FunctionalEnv needs a render_mode among {[None, *modes]}, but got {render_mode!r}."
            )
        if render_mode is not None and missing:
            raise TypeError(
                f"FunctionalEnv needs the functions {missing} for {render_mode=}, but got {func_env!r}."
            )
        if max_episode_steps is not None:
            max_episode_steps = validation.integer(
                "FunctionalEnv", "max_episode_steps", max_episode_steps, at_least=1
            )
        both = func_env.observation_space, func_env.action_space
        signature = Signature(num_envs, *both, device, max_episode_steps, first_index)
        super().__init__(signature, spec=spec, metadata=metadata, render_mode=render_mode)
        self.func_env = func_env
        for name, value in (params or {}).items():
            if not isinstance(value, Tensor) or value.shape[:1] != (num_envs,):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                needed = f"params[{name!r}] as a tensor ({num_envs}, ...)"
                raise ValueError(
                    f"FunctionalEnv needs {needed}, but got {got}: pass other `params`."
                )
            self.register_env_buffer(f"params_{name}", value.to(device, copy=True))
        self.parameter_names = list(params or {})
        self.stream = Stream(num_envs, first_index, tag=0, device=device)
        self.optional = [name for name in ("truncated", *_INFO) if _defines(func_env, name)]
        self._results_to_clone: set[str] = set()
        self._renderer: Any = None  # as FuncEnv.render_init returns it
        self._call_all_functions()

    @property
    def state(self) -> State:
        """The simulator's state by field, each `(num_envs, ...)`. These are the buffers: write to them in place."""
        return dict(
            zip(self.fields, map(self._buffers.__getitem__, self._state_names), strict=True)
        )  # type: ignore[arg-type]

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters that differ between envs, each `(num_envs, ...)`. These are the buffers: write to them in place."""
        return {name: self.get_buffer(f"params_{name}") for name in self.parameter_names}

    # Steps and resets.

    def _step(self, action: Value) -> TensorDict:
        self.stream.draw.add_(1)
        state = self.state
        next_state, successor = self._next(state, action, self.stream.key())
        for name, buffer in state.items():
            buffer.copy_(next_state[name])
        return successor

    def _next(self, state: State, action: Value, key: Key) -> tuple[State, TensorDict]:
        """The next state, and the successor, of a step of all envs, which neither reads nor writes a buffer of the state."""
        following = self._call("transition", key, state, action)
        # The observation, the reward and the flags are functions of it.
        next_state = dict(zip(following, map(materialize, following.values()), strict=True))
        reward = self._call("reward", key, state, action, next_state)
        terminated = self._call("terminal", key, next_state)
        observation = self._call("observation", key, next_state)
        limit = self.signature.max_episode_steps
        truncated = torch.zeros_like(terminated) if limit is None else key.draw >= limit
        if "truncated" in self.optional:
            truncated = truncated | self._call("truncated", key, next_state)
        info = {}
        if "transition_info" in self.optional:
            info.update(self._call("transition_info", key, state, action, next_state))
        if "state_info" in self.optional:
            info.update(self._call("state_info", key, next_state))
        successor = {
            "observation": observation,
            "reward": reward.to(torch.float32).unsqueeze(-1),
            "terminated": terminated.unsqueeze(-1),
            "truncated": truncated.unsqueeze(-1),
        }
        if info:
            columns = {
                name: value.unsqueeze(-1) if value.dim() == 1 else value
                for name, value in info.items()
            }
            successor["info"] = tensordict(columns, self.signature.num_envs)
        return next_state, tensordict(successor, self.signature.num_envs)

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        self.stream.next_episode(mask)
        key, params = self.stream.key(), self.params if self.parameter_names else None
        if mask.indices is not None:
            key = key.select(mask.indices)
            params = params and {name: mask.gather(value) for name, value in params.items()}
        given: State = (options := dict(options or {})).pop("state", {})
        initial = self._call("initial", key, params=params, options=options)
        initial |= {name: mask.gather(value) for name, value in given.items()}
        for name, buffer in self.state.items():
            mask.scatter_(buffer, initial[name])
        observation = self._call("observation", key, initial, params=params)
        return tensordict({"observation": mask.spread(observation)}, self.num_envs)

    def _call(
        self,
        name: str,
        key: Key,
        *arguments: Any,
        params: dict[str, Tensor] | None = None,
        options: Options | None = None,
    ) -> Any:
        """The result of a function for each row of the key. `params` defaults to the parameters of all envs."""
        function, options = getattr(self.func_env, name), options or {}
        if params is None:
            params = self.params if self.parameter_names else {}
        tag = key.tag + _TAGS.get(name, 0)

        def run(words: tuple[Tensor, ...], params: dict[str, Tensor], *arguments: Any) -> Any:
            rng = {} if name in _INFO else {"rng": Key(*words, tag)}  # type: ignore[call-arg,arg-type]
            return function(*arguments, **rng, **({"params": params} if params else {}), **options)

        batched = run if getattr(self.func_env, "broadcasts", False) else torch.vmap(run)
        result = batched(key[:-1], params, *arguments)
        if name == "observation" and isinstance(result, dict):
            result = _nested(result, len(key.env))
        if name in self._results_to_clone:
            return (
                {field: value.clone() for field, value in result.items()}
                if isinstance(result, dict)
                else result.clone()
            )
        return result

    def simulate(
        self, state: Mapping[str, Tensor], action: Value, *, offset: int = 0
    ) -> tuple[TensorDict, State]:
        """Takes a step from any state, differentiably. The env itself does not change, and nothing is reset.

        From `env.state`, it returns what `env.step(action)` would, with the same random numbers and the same truncation: those
        of the clock. Gradients flow to the state and the action. Wrappers and transforms take no part.

        Args:
            state: as `env.state`, whose buffers it never writes to: clone them before you require their gradients.
            action: of all envs.
            offset: number of steps to add to the clock: *h* for step *h*, counted from 0, of a plan that starts now.

        Returns:
            successor: a TensorDict, as `transition["next"]`: `observation`, `reward`, the three flags, and `info` if any.
            state: the next one, as `env.state`.

        >>> from torchwrap.envs.pendulum import Pendulum
        >>> env = FunctionalEnv(Pendulum(), num_envs=2)
        >>> action = torch.ones(2, 1, requires_grad=True)
        >>> successor, state = env.simulate(env.state, action)
        >>> torch.autograd.grad(successor["reward"].sum(), action)[0].flatten()  # of -0.001 * action**2
        tensor([-0.0020, -0.0020])
        """
        owner = f"{self._name()}.simulate"
        _check_state(f"{owner} needs", state, self.state)
        spaces.check(
            owner, "an action", self.single_action_space, action, self.num_envs, self.device
        )
        offset = validation.integer(owner, "offset", offset, at_least=0)
        key = self.stream.key()
        current = {name: state[name].clone() for name in self.fields}
        following, successor = self._next(
            current, action.clone(), key._replace(draw=key.draw + offset + 1)
        )
        return successor.set("done", successor["terminated"] | successor["truncated"]), following

    def _clocks(self) -> list[Tensor]:
        return [self.stream.draw]

    def has_wrapper_attr(self, name: str) -> bool:
        return name in self.parameter_names or hasattr(self, name) or hasattr(self.func_env, name)

    def get_wrapper_attr(self, name: str) -> Any:
        if name in self.parameter_names:
            return self.params[name]
        if hasattr(self, name) or not hasattr(self.func_env, name):
            return super().get_wrapper_attr(name)
        return getattr(self.func_env, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        if name not in self.parameter_names:
            if hasattr(self.func_env, name) and not hasattr(self, name):
                fault = f"cannot set {name!r}, an attribute of the functions, which is a constant"
                raise AttributeError(f"{self._name()} {fault}.")
            return super().set_wrapper_attr(name, value, force=force)
        try:
            self.params[name].copy_(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError) as error:
            needed = f"{self._name()} needs a value for params[{name!r}] that broadcasts to {tuple(self.params[name].shape)}"
            raise ValueError(f"{needed}, but got {validation.shown(value)}.") from error
        return True

    # Rendering.

    def render(self, envs: Sequence[int] | None = None) -> tuple[np.ndarray[Any, Any], ...]:
        if self.render_mode is None:
            raise RuntimeError(
                f'{self._name()} was made without a render mode: make it with render_mode="rgb_array".'
            )
        if self._renderer is None:
            self._renderer = self.func_env.render_init()
        states, frames = {name: value.cpu() for name, value in self.state.items()}, []
        for row in range(self.num_envs) if envs is None else envs:
            single = {name: value[row] for name, value in states.items()}
            result = self.func_env.render_image(single, self._renderer)
            if not isinstance(result, tuple) or len(result) != 2:
                needed = f"{type(self.func_env).__name__}.render_image needs to return (render_state, frame)"
                raise TypeError(f"{needed}, but got {type(result).__name__}.")
            self._renderer = result[0]
            frames.append(np.asarray(result[1]))
        return tuple(frames)

    def close(self) -> None:
        if self._renderer is not None and _defines(self.func_env, "render_close"):
            self.func_env.render_close(self._renderer)
        self._renderer = None

    # Checks. Each function is called at construction, so that the error names it.

    def _call_all_functions(self) -> None:
        owner, n, device = type(self.func_env).__name__, self.num_envs, self.device
        if getattr(type(self.func_env), "step_info", None) is not getattr(
            FuncEnv, "step_info", None
        ):
            raise TypeError(
                f"{owner} defines step_info, as FuncEnv's docstring calls it: rename it to transition_info."
            )
        state = self._inspect("initial")
        _check_tensors(f"{owner}.initial", state, n, device)
        self.fields, self._state_names = list(state), [f"state_{field}" for field in state]
        for name, value in zip(self._state_names, state.values(), strict=True):
            self.register_env_buffer(name, value.clone())
        state, action = self.state, spaces.zeros(self.single_action_space, n, device)
        observation = self._inspect("observation", state)
        spaces.check(
            f"{owner}.observation",
            "to return observations",
            self.single_observation_space,
            observation,
            n,
            device,
        )
        next_state = self._inspect("transition", state, action)
        _check_state(f"{owner}.transition needs to return", next_state, state)
        scalars = {
            "reward": (state, action, next_state),
            "terminal": (next_state,),
            "truncated": (next_state,),
        }
        for function, arguments in scalars.items():
            if function == "truncated" and function not in self.optional:
                continue
            value = self._inspect(function, *arguments)
            if value.shape != (n,):
                needed = f"{owner}.{function} needs to return one scalar per env"
                raise ValueError(f"{needed}, but got shape {tuple(value.shape)} for {n} envs.")
            if function != "reward" and value.dtype != torch.bool:
                raise TypeError(
                    f"{owner}.{function} needs to return torch.bool, but got {value.dtype}."
                )
        names: set[str] = set()
        for function, arguments in (
            ("transition_info", (state, action, next_state)),
            ("state_info", (next_state,)),
        ):
            info = self._inspect(function, *arguments) if function in self.optional else {}
            _check_tensors(f"{owner}.{function}", info, n, device)
            if both := sorted(names & set(info)):
                raise ValueError(
                    f"{owner} needs different names in transition_info and state_info, but got {both} in both."
                )
            names |= set(info)

    def _inspect(self, name: str, *arguments: Any) -> Any:
        """The result of the first call of a function, which must not write to its arguments or draw from global generators.

        If results of two calls share memory, with each other, the arguments or in themselves, later calls clone the result.
        """
        owner, key, given = (
            f"{type(self.func_env).__name__}.{name}",
            self.stream.key(),
            rows.leaves(arguments),
        )
        versions = [leaf.is_inference() or leaf._version for leaf in given]
        keywords = ["rng"] * (name not in _INFO) + ["params"] * bool(self.parameter_names)
        try:
            inspect.signature(getattr(self.func_env, name)).bind(
                *arguments, **dict.fromkeys(keywords)
            )
        except TypeError as error:
            raise TypeError(
                f"{owner} needs to take the arguments in the table of FunctionalEnv: {error}."
            ) from None
        with no_foreign_draws(owner, "draw from its rng, with torchwrap.random", self.device):
            try:
                result, second = (
                    self._call(name, key, *arguments),
                    self._call(name, key, *arguments),
                )
                leaves = rows.leaves(result)
                storages, others = (
                    _storages(leaves),
                    _storages([*rows.leaves(second), *rows.leaves(arguments)]),
                )
            except Exception as error:
                causes = (cause for words, cause in _CAUSES.items() if words in str(error))
                cause = next(causes, "raised {}").format(f"{type(error).__name__}: {error}")
                raise TypeError(f"{owner} {cause.removesuffix('.')}.") from error
        kept = len(given) == len(rows.leaves(arguments)) and all(
            map(operator.is_, given, rows.leaves(arguments))
        )
        if not kept or [leaf.is_inference() or leaf._version for leaf in given] != versions:
            remedy = "return new tensors, `x + 1` instead of `x += 1`"
            raise TypeError(f"{owner} writes to its arguments: {remedy}.")
        if not all(
            map(functools.partial(torch.allclose, equal_nan=True), leaves, rows.leaves(second))
        ):
            remedy = "keep values that change in the state, and draw from rng"
            raise TypeError(
                f"{owner} returns different results in two calls with the same arguments: {remedy}."
            )
        shared = bool(storages & others) or any(0 in leaf.stride() for leaf in leaves)
        if shared or (name in _INFO and len(storages) < len(leaves)):  # the caller gets each entry
            self._results_to_clone.add(name)
        return result

    def _check_options(self, options: Options) -> None:
        known = [
            name
            for name in inspect.signature(self.func_env.initial).parameters
            if name not in ("rng", "params")
        ]
        if unknown := sorted(set(options) - {"state", *known}):
            raise ValueError(
                f"{self._name()}.reset needs options among {['state', *known]}, but got {unknown}."
            )
        given, others = (
            options.get("state", {}),
            {name: value for name, value in options.items() if name != "state"},
        )
        _check_state(f"{self._name()}.reset needs", given, self.state, some=True)
        try:
            _check_state(
                "initial needs to return",
                self._call("initial", self.stream.key(), options=others),
                self.state,
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self._name()}.reset needs options that fit initial(), but got {options}: {error}"
            ) from error


def _nested(observation: Mapping[str, Any], num_rows: int) -> TensorDict:
    parts = {
        key: _nested(part, num_rows) if isinstance(part, dict) else part
        for key, part in observation.items()
    }
    return tensordict(parts, num_rows)


def _defines(func_env: Functions, name: str) -> bool:
    function = getattr(func_env, name, None)
    return callable(function) and getattr(function, "__func__", function) is not getattr(
        FuncEnv, name, None
    )


def _storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _check_tensors(owner: str, values: object, num_envs: int, device: torch.device) -> None:
    if not isinstance(values, dict):
        raise TypeError(
            f"{owner} needs to return a dict of tensors, but got {type(values).__name__}."
        )
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"{owner} needs to return strings as names, but got {name!r}.")
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{owner} needs to return {name!r} as a tensor, but got {type(value).__name__}."
            )
        if value.shape[:1] != (num_envs,):
            raise ValueError(
                f"{owner} needs to return {name!r} of shape ({num_envs}, ...), but got {tuple(value.shape)}."
            )
        if value.device != device:
            raise ValueError(
                f"{owner} needs to return {name!r} on device {device}, but got {value.device}."
            )


def _check_state(needs: str, state: object, own: State, some: bool = False) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{needs} a state as a dict of tensors, as `env.state` is, but got {type(state).__name__}."
        )
    if not set(state) <= set(own) or (len(state) < len(own) and not some):
        raise ValueError(f"{needs} a state with fields {list(own)}, but got {list(state)}.")
    for field, given in state.items():
        value = own[field]
        if not isinstance(given, Tensor):
            raise TypeError(
                f"{needs} state[{field!r}] as a torch.Tensor, but got {type(given).__name__}."
            )
        if (given.shape, given.dtype, given.device) != (value.shape, value.dtype, value.device):
            needed = f"{needs} state[{field!r}] of shape {tuple(value.shape)} {value.dtype} on {value.device}"
            raise ValueError(f"{needed}, but got {validation.described(given)} on {given.device}.")
