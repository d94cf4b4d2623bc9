"""FunctionalEnv: a batch of envs from the pure functions of a single env."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.experimental.functional import FuncEnv
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import rows, validation
from torchwrap._core.errors import refusal
from torchwrap._core.generators import no_foreign_draws, no_key_twice
from torchwrap._core.rows import RowMask, materialize, tensordict
from torchwrap.env import Env, Options, with_done
from torchwrap.random import Key, Stream
from torchwrap.spaces import Signature, Value

State = dict[str, Tensor]
"""The simulator's state by field, each `(num_envs, ...)`."""

Functions = FuncEnv[Any, Any, Any, Any, Any, Any, Any]

# The key of a function contains its number, so that two functions of a step draw independently.
_NUMBERS = {
    "initial": 0,
    "transition": 1,
    "observation": 2,
    "reward": 3,
    "terminal": 4,
    "curriculum": 5,
    "truncated": 6,
}
_VMAP = (
    "It computes one env, under torch.vmap: return tensors, draw from rng by torchwrap.random, and "
    "write torch.where in place of if, without .item() or an index of bools"
)
_INFO = ("transition_info", "state_info")


class FunctionalEnv(Env):
    """`num_envs` copies of an env written as pure functions: Gymnasium's `FuncEnv`, in torch.

    Write each function for a single env; `torch.vmap` batches it. Each is called at construction,
    where errors name it.

    | function | returns, for a single env |
    |---|---|
    | `initial(rng)` | the initial state: a dict of tensors, always of the same names and shapes |
    | `transition(state, action, rng)` | the next state, with the same fields |
    | `observation(state, rng)` | a tensor in `observation_space`; a dict of them for a `Dict` |
    | `reward(state, action, next_state, rng)` | a scalar of any real dtype |
    | `terminal(state, rng)` | a bool scalar |
    | `truncated(state, rng)`, optional | a bool scalar, in addition to `max_episode_steps` |
    | `curriculum(state, rng, params)`, optional, experimental | `params` for the next episode |
    | `transition_info(state, action, next_state)`, optional | a dict of tensors by name |
    | `state_info(state)`, optional | the same, about the next state, under other names |

    `rng` is a `torchwrap.random.Key`. Draw from it with `torchwrap.random`, and use
    `rng.fold_in(1)`, `rng.fold_in(2)`, ... for further independent draws in the same function: two
    draws from one key are refused. Use tensor operators only: `torch.where` instead of `if`; write
    to no argument. `terminal` and `truncated` get the next state, `curriculum` the last state of an
    episode, in train mode. The tensors of the infos are
    `("next", "info", name)`, a scalar as `(num_envs, 1)`. Keyword arguments of `initial` are the
    env's reset options; `reset(options={"state": {...}})` gives fields of the state, each
    `(num_envs, ...)`.

    Tensors of a `class Levels(nn.Module, FuncEnv)` are moved with the env, and are in its
    snapshots. A class that sets `broadcasts = True` is called without `torch.vmap`: all tensors
    then have the leading dimension of `rng.env.shape`. In `initial` and `observation` that is any
    number of rows.

    Args:
        func_env: the functions, with `observation_space` and `action_space` of a single env.
        num_envs: number of envs.
        device: of all tensors.
        max_episode_steps: truncates episodes at this length. None disables it.
        first_index: global index of the first env, for a shard of a larger run.
        params: values that differ between envs, by name: tensors `(num_envs, ...)`. Functions get
            a dict of their env's as `params`. `env.unwrapped.params[name].copy_(value)` changes
            them during training, compiled or not. Snapshots hold them, and `spec` holds those that
            `make` was given; `state_dict` leaves them out.
        render_mode: "rgb_array" if the functions have `render_init()` and
            `render_image(state, render_state)`, which returns `(render_state, frame)`;
            `render_close(render_state)` is optional. None disables rendering.
        spec: Gymnasium's `EnvSpec`, if there is one.

    >>> from torchwrap.envs.cartpole import CartPole
    >>> env = FunctionalEnv(CartPole(), num_envs=3, max_episode_steps=500)
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3, 4])
    """

    _not_copied = ("_compiled", "_renderer")  # which may hold surfaces of pygame

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
        owner = "FunctionalEnv"
        has_spaces = hasattr(func_env, "observation_space") and hasattr(func_env, "action_space")
        if isinstance(func_env, type) or not has_spaces:
            must = "func_env must be a FuncEnv with observation_space and action_space"
            raise TypeError(refusal(owner, must, repr(func_env)))
        can_render = _defines(func_env, "render_init") and _defines(func_env, "render_image")
        metadata: dict[str, Any] = {}
        metadata.update(getattr(func_env, "metadata", None) or {})
        metadata["render_modes"] = ["rgb_array"] if can_render else []
        if render_mode not in (None, *metadata["render_modes"]):
            must = 'render_mode must be None, or "rgb_array" with render_init and render_image'
            raise ValueError(refusal(owner, must, repr(render_mode)))
        signature = Signature(
            num_envs,
            copy.deepcopy(func_env.observation_space),  # a class shares its spaces' generators
            copy.deepcopy(func_env.action_space),
            validation.device(owner, device),
            max_episode_steps,
            first_index,
        )
        super().__init__(signature, spec=spec, metadata=metadata, render_mode=render_mode)
        self.func_env = func_env
        if isinstance(func_env, nn.Module):
            names = [f"func_env.{name}" for name in func_env.state_dict()]
            self._state_buffer_names = tuple(names)
        self.register_state_dict_post_hook(_leave_definition_out)
        params = params or {}
        self.parameter_names = list(params)
        for name, value in params.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (num_envs,):
                must = f"params[{name!r}] must be a tensor ({num_envs}, ...)"
                raise ValueError(refusal(owner, must, validation.described(value)))
            parameter = value.detach().to(device, copy=True)
            self.register_env_buffer(f"params_{name}", parameter)
        self.stream = Stream(num_envs, first_index, tag=0, device=device)
        self.optional = [
            name for name in ("truncated", "curriculum", *_INFO) if _defines(func_env, name)
        ]
        self._results_to_clone: set[str] = set()
        self._renderer: Any = None  # as FuncEnv.render_init returns it
        self._check_functions()

    @property
    def state(self) -> State:
        """The simulator's state by field, each `(num_envs, ...)`.

        These are the buffers: write to them in place.
        """
        state: Any = {}
        for field in self.fields:
            state[field] = self._buffers[f"state_{field}"]
        return state

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters that differ between envs, each `(num_envs, ...)`.

        These are the buffers: write to them in place.
        """
        return {name: self.get_buffer(f"params_{name}") for name in self.parameter_names}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _leave_definition_out(self, state_dict, prefix)  # files of 0.2.0 hold it
        if isinstance(self.func_env, nn.Module):
            own = f"{prefix}func_env."
            self.func_env.state_dict(destination=state_dict, prefix=own, keep_vars=True)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Steps and resets.

    def _step(self, action: Value) -> TensorDict:
        self.stream.draw.add_(1)
        state = self.state
        next_state, successor = self._next(state, action, self.stream.key())
        for name, buffer in state.items():
            buffer.copy_(next_state[name])
        return successor

    def _next(
        self,
        state: State,
        action: Value,
        key: Key,
    ) -> tuple[State, TensorDict]:
        """Returns the next state and the successor, and does not change the env."""
        next_state = self.call("transition", key, state, action)
        # Otherwise a compiled graph would compute the next state again in each function below.
        for field, value in next_state.items():
            next_state[field] = materialize(value)
        reward = self.call("reward", key, state, action, next_state)
        terminated = self.call("terminal", key, next_state)
        observation = self.call("observation", key, next_state)
        limit = self.signature.max_episode_steps
        truncated = torch.zeros_like(terminated) if limit is None else key.draw >= limit
        if "truncated" in self.optional:
            truncated = truncated | self.call("truncated", key, next_state)
        successor = {
            "observation": observation,
            "reward": reward.to(torch.float32).unsqueeze(-1),
            "terminated": terminated.unsqueeze(-1),
            "truncated": truncated.unsqueeze(-1),
        }
        info: Any = {}
        if "transition_info" in self.optional:
            info |= self.call("transition_info", key, state, action, next_state)
        if "state_info" in self.optional:
            info |= self.call("state_info", key, next_state)
        num_envs = self.signature.num_envs
        if info:
            for name, value in info.items():
                info[name] = value.unsqueeze(-1) if value.dim() == 1 else value
            successor["info"] = tensordict(info, num_envs)
        return next_state, tensordict(successor, num_envs)

    def _seed(self, seed: int, mask: RowMask) -> None:
        self._follow_curriculum(mask)  # before the reseed: `draw == 0` is an episode without a step
        super()._seed(seed, mask)

    def _reset(
        self,
        mask: RowMask,
        options: Options | None = None,
    ) -> TensorDict:
        self._follow_curriculum(mask)
        self.stream.next_episode(mask)
        key = self.stream.key()
        if mask.indices is not None:
            key = key.select(mask.indices)
        params: dict[str, Tensor] = {}
        for name in self.parameter_names:
            params[name] = mask.gather(self.get_buffer(f"params_{name}"))
        options = dict(options or {})
        given_state: State = options.pop("state", {})
        initial = self.call("initial", key, params=params, options=options)
        for field, value in given_state.items():
            initial[field] = mask.gather(value)
        for field, buffer in self.state.items():
            mask.scatter_(buffer, initial[field])
        observation = self.call("observation", key, initial, params=params)
        return tensordict({"observation": mask.spread(observation)}, mask.num_rows)

    def _follow_curriculum(self, mask: RowMask) -> None:
        """Changes parameters in the rows of the mask, but not before their first step."""
        if "curriculum" not in self.optional or not self.training:
            return
        key = self.stream.key()
        played = RowMask(mask.tensor & (key.draw > 0))
        for name, value in self.call("curriculum", key, self.state).items():
            played.assign_(self.params[name], value)

    def call(
        self,
        name: str,
        key: Key,
        *arguments: Any,
        params: dict[str, Tensor] | None = None,
        options: Options | None = None,
    ) -> Any:
        """Calls a function for each row of the key. None takes the parameters of all envs."""
        function = getattr(self.func_env, name)
        number = _NUMBERS.get(name)  # infos get no rng
        if params is None:
            params = self.params if self.parameter_names else {}

        def with_keywords(
            words: Any,
            params: dict[str, Tensor],
            *arguments: Any,
        ) -> Any:
            keywords: dict[str, Any] = {}
            if number is not None:
                keywords["rng"] = Key(*words, key.tag + number)  # type: ignore[call-arg]
            if params:
                keywords["params"] = params
            return function(*arguments, **(options or {}), **keywords)

        batched = with_keywords
        if not getattr(self.func_env, "broadcasts", False):
            batched = torch.vmap(with_keywords)
        words = key[:5]  # without the tag and the fold: torch.vmap takes no ints
        result = batched(words, params, *arguments)
        if name == "observation" and isinstance(result, dict):
            result = _nested(result, len(key.env))
        if name not in self._results_to_clone:
            return result
        if isinstance(result, dict):
            return {field: value.clone() for field, value in result.items()}
        return result.clone()

    def simulate(
        self,
        state: Mapping[str, Tensor],
        action: Value,
        *,
        offset: int = 0,
    ) -> tuple[TensorDict, State]:
        """Takes a step from any state, differentiably. The env does not change; nothing is reset.

        From `env.state`, it returns what `env.step(action)` would, with the same random numbers and
        the same truncation: those of the clock. Gradients flow to the state and the action.
        Wrappers and transforms take no part.

        Args:
            state: as `env.state`, whose buffers it never writes to: clone them before you require
                their gradients.
            action: of all envs.
            offset: number of steps to add to the clock: *h* for step *h*, counted from 0, of a plan
                that starts now.

        Returns:
            The successor, a TensorDict as `transition["next"]`, and the next state, as `env.state`.

        >>> from torchwrap.envs.pendulum import Pendulum
        >>> env = FunctionalEnv(Pendulum(), num_envs=2)
        >>> action = torch.ones(2, 1, requires_grad=True)
        >>> successor, state = env.simulate(env.state, action)
        >>> loss = -successor["reward"].sum()  # 0.001 * action**2, and a constant
        >>> torch.autograd.grad(loss, action)[0].flatten()
        tensor([0.0020, 0.0020])
        """
        owner = f"{self._label}.simulate"
        _check_state(owner, state, self.state)
        space = self.single_action_space
        spaces.check(owner, "action", space, action, self.num_envs, self.device)
        offset = validation.integer(owner, "offset", offset, at_least=0)
        key = self.stream.key()
        key = key._replace(draw=key.draw + offset + 1)  # a step counts itself before it draws
        current = {name: state[name].clone() for name in self.fields}
        next_state, successor = self._next(current, action.clone(), key)
        return with_done(successor), next_state

    def _clocks(self) -> list[Tensor]:
        return [self.stream.draw]

    @property
    def action_masks(self) -> Callable[[], Tensor]:
        """The functions' `action_masks(state)`, if they have it, called for each env."""
        if not hasattr(self.func_env, "action_masks"):
            raise AttributeError
        return functools.partial(self.call, "action_masks", self.stream.key(), self.state)

    def get_wrapper_attr(self, name: str) -> Any:
        return getattr(self if hasattr(self, name) else self.func_env, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        if name in self.params or hasattr(self.func_env, name):
            fault = f"cannot set {name!r}, because the functions would not see it"
            remedy = f"Write env.unwrapped.params[{name!r}].copy_(value), or pass it to make"
            raise AttributeError(refusal(self._label, fault, remedy=remedy))
        return super().set_wrapper_attr(name, value, force=force)

    # Rendering.

    def render(
        self,
        envs: Sequence[int] | None = None,
    ) -> tuple[np.ndarray[Any, Any], ...]:
        if self.render_mode is None:
            remedy = 'Make it with render_mode="rgb_array"'
            raise RuntimeError(refusal(self._label, "has no render mode", remedy=remedy))
        if self._renderer is None:
            self._renderer = self.func_env.render_init()
        states = {name: value.cpu() for name, value in self.state.items()}
        frames = []
        for row in range(self.num_envs) if envs is None else envs:
            state = {name: value[row] for name, value in states.items()}
            result = self.func_env.render_image(state, self._renderer)
            if not isinstance(result, tuple) or len(result) != 2:
                owner = f"{type(self.func_env).__name__}.render_image"
                must = "result must be (render_state, frame)"
                raise TypeError(refusal(owner, must, type(result).__name__))
            self._renderer, frame = result
            frames.append(np.asarray(frame))
        return tuple(frames)

    def close(self) -> None:
        if self._renderer is not None and _defines(self.func_env, "render_close"):
            self.func_env.render_close(self._renderer)
        self._renderer = None

    # Checks at construction: each function is called, so that an error names it.

    def _check_functions(self) -> None:
        owner = type(self.func_env).__name__
        num_envs = self.num_envs
        device = self.device
        initial = self._first_result("initial")
        _check_fields(f"{owner}.initial", initial, num_envs, device)
        self.fields = list(initial)
        for field, value in initial.items():
            self.register_env_buffer(f"state_{field}", value.clone())
        state = self.state
        action = spaces.zeros(self.single_action_space, num_envs, device)
        observation = self._first_result("observation", state)
        space = self.single_observation_space
        spaces.check(f"{owner}.observation", "result", space, observation, num_envs, device)
        next_state = self._first_result("transition", state, action)
        _check_state(f"{owner}.transition", next_state, state)
        reward = self._first_result("reward", state, action, next_state)
        shape = (num_envs,)
        spaces.check_tensor(f"{owner}.reward", "result", reward, shape, reward.dtype, device)
        for name in ("terminal", "truncated"):
            if name == "terminal" or name in self.optional:
                flag = self._first_result(name, next_state)
                spaces.check_tensor(f"{owner}.{name}", "result", flag, shape, torch.bool, device)
        if "curriculum" in self.optional:
            changed = self._first_result("curriculum", next_state)
            _check_state(f"{owner}.curriculum", changed, self.params, "params", partial=True)
        arguments = {"transition_info": (state, action, next_state), "state_info": (next_state,)}
        names: list[str] = []
        for name in _INFO:
            if name in self.optional:
                info = self._first_result(name, *arguments[name])
                _check_fields(f"{owner}.{name}", info, num_envs, device)
                names += info
        if len(set(names)) < len(names):
            must = "transition_info and state_info must have different names"
            raise ValueError(refusal(owner, must, names))

    def _first_result(
        self,
        name: str,
        *arguments: Any,
    ) -> Any:
        """Calls a function twice. Raises a TypeError if it draws from a foreign generator.

        If the results share memory with an argument, with those of the second call, or among
        themselves, `call` clones them from now on.
        """
        owner = f"{type(self.func_env).__name__}.{name}"
        key = self.stream.key()
        remedy = "Draw from its rng, with torchwrap.random"
        results: list[list[Tensor]] = []
        for _ in range(2):
            with no_foreign_draws(owner, remedy, self.device), no_key_twice(owner):
                try:
                    result = self.call(name, key, *arguments)
                    results.append(rows.leaves(result))
                except Exception as error:
                    fault = f"raised {type(error).__name__}: {error}".rstrip("?. ")
                    remedy = _VMAP if "vmap" in fault else ""
                    raise TypeError(refusal(owner, fault, remedy=remedy)) from error
        others, leaves = results
        given = rows.leaves((arguments, self.params))
        storages = _storages(leaves)
        is_aliased = not storages.isdisjoint(_storages([*others, *given]))
        is_expanded = any(0 in leaf.stride() for leaf in leaves)
        # The caller gets every entry of an info, so its entries may not share memory.
        entries_overlap = name in _INFO and len(storages) < len(leaves)
        if is_aliased or is_expanded or entries_overlap:
            self._results_to_clone.add(name)
        return result

    def _check_options(self, options: Options) -> None:
        owner = f"{self._label}.reset"
        options = {**options}
        _check_state(owner, options.pop("state", {}), self.state, partial=True)
        try:
            initial = self.call("initial", self.stream.key(), options=options)
            _check_state("initial", initial, self.state)
        except (TypeError, ValueError, RuntimeError) as error:
            must = f"options must be state, or fit initial(): {error}"
            raise ValueError(refusal(owner, must, options)) from error


def _leave_definition_out(env: Any, state: Any, prefix: str, *_: Any) -> None:
    """Removes `params` and the tensors of functions from a `state_dict`."""
    for name in list(state):
        if name.startswith((f"{prefix}func_env.", f"{prefix}params_")):
            del state[name]


def _nested(observation: Mapping[str, Any], num_rows: int) -> TensorDict:
    parts = {}
    for key, part in observation.items():
        parts[key] = _nested(part, num_rows) if isinstance(part, dict) else part
    return tensordict(parts, num_rows)


def _defines(func_env: Functions, name: str) -> bool:
    """True if the class of the functions, and not FuncEnv, defines this function."""
    function = getattr(func_env, name, None)
    inherited = getattr(FuncEnv, name, None)
    return callable(function) and getattr(function, "__func__", function) is not inherited


def _storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _check_fields(
    owner: str,
    fields: object,
    num_envs: int,
    device: torch.device,
) -> None:
    """Raises unless a function has returned a dict of tensors `(num_envs, ...)`."""
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        must = "result must be a dict of tensors by name"
        got = list(fields) if isinstance(fields, dict) else validation.described(fields)
        raise TypeError(refusal(owner, must, got))
    for name, value in fields.items():
        if not isinstance(value, Tensor):
            raise TypeError(refusal(owner, f"{name!r} must be a tensor", type(value).__name__))
        shape = (num_envs, *value.shape[1:])
        spaces.check_tensor(owner, repr(name), value, shape, value.dtype, device)


def _check_state(
    owner: str,
    state: object,
    like: State,
    name: str = "state",
    *,
    partial: bool = False,
) -> None:
    """Raises unless the fields are tensors like those of `like`, or some of them if `partial`."""
    if not isinstance(state, Mapping):
        must = f"{name} must be a dict of tensors, as `env.{name}` is"
        raise TypeError(refusal(owner, must, type(state).__name__))
    unknown = state.keys() - like.keys()
    missing = like.keys() - state.keys()
    if unknown or (missing and not partial):
        must = f"{name} must have the fields {list(like)}"
        raise ValueError(refusal(owner, must, list(state)))
    for field, value in state.items():
        buffer = like[field]
        entry = f"{name}[{field!r}]"
        spaces.check_tensor(owner, entry, value, buffer.shape, buffer.dtype, buffer.device)
