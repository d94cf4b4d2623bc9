"""JAX simulators as torchwrap envs: `from_jax` for pure functions, `from_brax` and `from_gymnax`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack

from torchwrap import spaces
from torchwrap._core import nested
from torchwrap._core.rows import RowMask
from torchwrap.env import Env
from torchwrap.interop._jax_functions import JaxFunctions
from torchwrap.interop._jax_functions import signature as describe
from torchwrap.random import Stream, bits
from torchwrap.spaces import Signature

# They count steps, reset, or batch, which the env does itself.
_BRAX_WRAPPERS = ("EpisodeWrapper", "AutoResetWrapper", "VmapWrapper", "DomainRandomizationVmapWrapper", "EvalWrapper")
_PLAYGROUND_WRAPPERS = ("BraxAutoResetWrapper", "BraxDomainRandomizationVmapWrapper")


def from_jax(
    reset: Callable[..., Any],
    step: Callable[..., Any],
    num_envs: int,
    observation_space: Space[Any],
    action_space: Space[Any],
    *,
    batched: bool = False,
    max_episode_steps: int | None = None,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> JaxEnv:
    """Makes a torchwrap env of a simulator written in JAX: for torchwrap's auto-reset, transforms, collectors and trainers.

    | function | returns, for a single env |
    |---|---|
    | `reset(key)` | `(state, observation)`. The state is any pytree of numbers and PRNG keys |
    | `step(state, action)` | `(state, observation, reward, terminated, truncated, info)`, with a dict as `info` |

    The functions are pure, and know nothing of auto-reset. A `step` that draws random numbers keeps a key in the state. Both
    are compiled once each, with `jax.vmap` around them. Arrays pass between JAX and PyTorch by DLPack, without a copy on the
    host. The key of an episode depends on the seed, the global index of the env, and the number of the episode.

    Values of a `Dict` space are dicts, of a `Tuple` space tuples. Unless JAX is configured for 64 bits, it computes with 32:
    values of spaces of 64 bits are converted.

    Args:
        reset, step: the functions.
        num_envs: number of envs.
        observation_space, action_space: of a single env.
        batched: whether the functions take a batch: `reset` any number of keys, `step` all envs.
        max_episode_steps: truncates episodes at this length, in addition to `truncated`. None disables it.
        info_keys: the entries of `info` to pass on under `("next", "info", name)`: names of numbers, which become
            `(num_envs, 1)` float32.
        device: of all tensors, and of JAX's computation.
        first_index: global index of the first env, for a shard of a larger run.

    Returns:
        The env. It has snapshots.

    Raises:
        TypeError, ValueError: if an argument is invalid, or if the functions do not fit each other or the spaces.

    >>> from gymnasium.spaces import Box
    >>> space = Box(-1, 1, ())
    >>> step = lambda state, action: (state + action, state + action, -state, state > 3, False, {})
    >>> env = from_jax(lambda key: 2 * (jax.random.uniform(key),), step, 3, space, space)
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3])
    """
    signature = describe(
        "from_jax", num_envs, observation_space, action_space, max_episode_steps, first_index, info_keys, device=device
    )
    return JaxEnv(JaxFunctions("from_jax", reset, step, signature, batched, list(info_keys)), signature)


def from_brax(
    env: Any,
    num_envs: int,
    *,
    max_episode_steps: int | None = 1000,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> JaxEnv:
    """Makes a torchwrap env of an env of Brax, or one of MuJoCo Playground, which has the same functions.

    `done` is `terminated`, and `max_episode_steps` truncates. Each episode starts in a new random state; with Brax's
    `AutoResetWrapper`, all of them start in the first one. Actions are in [-1, 1].

    Args:
        env: a name, as for `brax.envs.get_environment`, or the env itself, without Brax's training wrappers.
        num_envs, device, first_index: as for `from_jax`.
        max_episode_steps: truncates episodes at this length. None disables it. Brax's own default is 1000.
        info_keys: names among the numbers in `state.metrics` and `state.info`; see `from_jax`.

    Raises:
        TypeError, ValueError: as `from_jax`, and for an env in a wrapper that counts steps, resets or batches, or in Warp, as
            MuJoCo Playground's are unless they are loaded with `config_overrides={"impl": "jax"}`.

    >>> env = from_brax("inverted_pendulum", num_envs=4096)  # doctest: +SKIP
    """
    if isinstance(env, str):
        import brax.envs

        known = sorted(brax.envs._envs)
        if env not in known:
            raise ValueError(f"from_brax needs the name of one of Brax's envs, {', '.join(known)}, but got {env!r}.")
        name, env = env, brax.envs.get_environment(env)
    else:
        name = type(env).__name__
    if not all(hasattr(env, attribute) for attribute in ("reset", "step", "observation_size", "action_size")):
        raise TypeError(f"from_brax needs an env of Brax or its name, but got {env!r}.")
    layer = env
    while layer is not None:
        if {kind.__name__ for kind in type(layer).__mro__} & {*_BRAX_WRAPPERS, *_PLAYGROUND_WRAPPERS}:
            raise ValueError(
                f"from_brax needs an env that does not count steps, reset or batch, but got {type(layer).__name__}: "
                "brax.envs.get_environment makes one, and max_episode_steps limits its episodes."
            )
        layer = vars(layer).get("env")
    impl = getattr(getattr(env, "mjx_model", None), "impl", None)
    if getattr(impl, "value", impl) == "warp":
        remedy = '`registry.load(name, config_overrides={"impl": "jax"})` makes one of MuJoCo Playground'
        raise ValueError(f"from_brax needs an env that computes in JAX, but got {name} in Warp: {remedy}.")

    def reset(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, state.obs

    def step(state: Any, action: Any) -> tuple[Any, ...]:
        state = env.step(state, action)
        return state, state.obs, state.reward, state.done != 0, jax.numpy.zeros((), bool), {**state.info, **state.metrics}

    def space(size: Any) -> Space[Any]:
        if isinstance(size, int | np.integer | tuple):
            return gym_spaces.Box(-np.inf, np.inf, size if isinstance(size, tuple) else (int(size),), np.float32)
        return gym_spaces.Dict({key: space(part) for key, part in size.items()})

    action_space = gym_spaces.Box(-1, 1, (int(env.action_size),), np.float32)
    signature = describe(
        "from_brax",
        num_envs,
        space(env.observation_size),
        action_space,
        max_episode_steps,
        first_index,
        info_keys,
        device=device,
    )
    return JaxEnv(JaxFunctions("from_brax", reset, step, signature, False, list(info_keys)), signature, name)


def from_gymnax(
    env: Any,
    num_envs: int,
    *,
    params: Any = None,
    max_episode_steps: int | None = None,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> JaxEnv:
    """Makes a torchwrap env of an env of gymnax 1.0.

    It calls `reset_env`, `step_env` and `is_truncated`, so gymnax's own auto-reset does not take part.

    Args:
        env: a name, as for `gymnax.make`, or the env itself, without wrappers.
        num_envs, info_keys, device, first_index: as for `from_jax`.
        params: of the env. None takes its default.
        max_episode_steps: replaces `params.max_steps_in_episode`, if not None.

    Raises:
        TypeError, ValueError: as `from_jax`, and for a wrapped env.

    >>> from_gymnax("CartPole-v1", num_envs=2)  # doctest: +SKIP
    <CartPole-v1(num_envs=2, device=cpu)>
    """
    import gymnax
    from gymnax.environments import environment
    from gymnax.environments.spaces import gymnax_space_to_gym_space

    if isinstance(env, str):
        env = gymnax.make(env)[0]
    if not isinstance(env, environment.Environment):
        raise TypeError(
            f"from_gymnax needs an env of gymnax without wrappers, or its name, but got {type(env).__name__}: torchwrap's "
            "transforms do what gymnax's wrappers do."
        )
    if params is None:
        params = env.default_params
    if max_episode_steps is not None:
        params = params.replace(max_steps_in_episode=max_episode_steps)

    def reset(key: Any) -> tuple[Any, Any]:
        reset_key, step_key = jax.random.split(key)
        observation, state = env.reset_env(reset_key, params)
        return (state, step_key), observation

    def step(state_and_key: Any, action: Any) -> tuple[Any, ...]:
        state, key = state_and_key
        # The key of an episode stays: an env that draws nothing then computes no random numbers.
        step_key = jax.random.fold_in(key, state.time)
        observation, state, reward, terminated, info = env.step_env(step_key, state, action, params)
        return (state, key), observation, reward, terminated, env.is_truncated(state, params), info

    observation_space, action_space = (
        gymnax_space_to_gym_space(space) for space in (env.observation_space(params), env.action_space(params))
    )
    limit = int(params.max_steps_in_episode)
    signature = describe(
        "from_gymnax", num_envs, observation_space, action_space, limit, first_index, info_keys, device=device
    )
    return JaxEnv(JaxFunctions("from_gymnax", reset, step, signature, False, list(info_keys)), signature, env.name)


class JaxEnv(Env):
    """A JAX simulator as a torchwrap env; made by `from_jax`, `from_brax` and `from_gymnax`.

    The state is in a buffer, so the env has snapshots. `state` unpacks it.
    """

    host_stepped = True


    def __init__(self, functions: JaxFunctions, signature: Signature, name: str = "JaxEnv") -> None:
        super().__init__(signature)
        self.functions, self._simulator = functions, name
        self.stream = Stream(signature.num_envs, signature.first_index, tag=0, device=signature.device)
        state = torch.zeros(self.num_envs, functions.num_words, dtype=torch.int32, device=self.device)
        self.register_env_buffer("packed_state", state)

    @property
    def state(self) -> Any:
        """The simulator's own state: a pytree of JAX arrays with one row per env. It is a copy."""
        return self.functions.unpack(_to_jax(self.packed_state))

    def _step(self, action: spaces.Value) -> TensorDict:
        self.stream.next_draw()
        leaves = [_to_jax(action[path] if path else action) for path, _ in spaces.leaves(self.single_action_space)]
        # Not before everything is computed may the caller change the action, which JAX reads in place.
        results = jax.block_until_ready(self.functions.step(_to_jax(self.packed_state), leaves))
        state, observation, flags, info = jax.tree.map(from_dlpack, results)
        self._buffers["packed_state"] = state
        reward, terminated, truncated = flags
        if self.signature.max_episode_steps is not None:
            truncated |= (self.stream.draw >= self.signature.max_episode_steps).unsqueeze(-1)
        successor = {
            "observation": self._observation(observation),
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        if info:
            successor["info"] = nested.tensordict(dict(zip(self.functions.info_keys, info, strict=True)), self.num_envs)
        return nested.tensordict(successor, self.num_envs)

    def _reset(self, mask: RowMask, options: dict[str, Any] | None = None) -> TensorDict:
        self.stream.next_episode(mask)
        observation = spaces.zeros(self.single_observation_space, self.num_envs, self.device)
        rows, size = torch.from_numpy(np.flatnonzero(mask.numpy())).to(self.device), self.functions.reset_size
        for some in rows.split(size) if len(rows) else ():
            words = bits(self.stream.key().select(some), self.functions.key_words)
            keys = F.pad(words, (0, 0, 0, size - len(some))).to(torch.uint32)
            results = jax.block_until_ready(self.functions.reset(_to_jax(keys)))
            state, initial = jax.tree.map(from_dlpack, results)
            self.packed_state.index_copy_(0, some, state[: len(some)])
            observation[some] = self._observation([leaf[: len(some)] for leaf in initial])
        return nested.tensordict({"observation": observation}, self.num_envs)

    def _observation(self, leaves: list[Tensor]) -> spaces.Value:
        remaining = iter(leaves)
        space = self.single_observation_space
        return spaces.build(space, lambda _, leaf: next(remaining).to(spaces.dtype(leaf)), len(leaves[0]))

    def _read_clock(self) -> Tensor:
        return self.stream.draw

    def _write_clock(self, steps: Tensor) -> None:
        self.stream.draw.copy_(steps)

    def _name(self) -> str:
        return self._simulator


def _to_jax(tensor: Tensor) -> Any:
    # A view; of int64 a copy, if JAX computes with 32 bits.
    return jax.dlpack.from_dlpack(tensor.contiguous())
