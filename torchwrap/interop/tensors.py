"""Simulators that step a batch of tensors, such as Isaac Lab and mjlab: `from_functions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gymnasium import Space
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer, EpisodeClock
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask, is_host_readable, tensordict
from torchwrap.env import Options
from torchwrap.interop import _simulator
from torchwrap.interop._functions import FunctionsEnv
from torchwrap.spaces import Signature


def from_functions(
    reset: Callable[[Tensor], Any],
    step: Callable[[Any], tuple[Any, ...]],
    num_envs: int,
    observation_space: Space[Any],
    action_space: Space[Any],
    *,
    reset_by: str = "mask",
    final_key: str | None = None,
    reuses_memory: bool = True,
    max_episode_steps: int | None = None,
    clock: Callable[[], Tensor] | None = None,
    levels: Callable[[], dict[str, Tensor]] | None = None,
    seed: Callable[[int], Any] | None = None,
    close: Callable[[], Any] | None = None,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> TensorEnv:
    """Makes a torchwrap env of a simulator that steps all envs together, on tensors on its device.

    | function | returns |
    |---|---|
    | `reset(rows)` | observations of all envs, after new episodes started in `rows` |
    | `step(action)` | `(observation, reward, terminated, truncated, info)`; `info` is a dict |

    Other rows of the result of `reset` are ignored. `examples/simulators.py` has these functions
    for Isaac Lab, mjlab, ManiSkill, Genesis, Newton and PufferLib.

    Values of `Dict` and `Tuple` spaces are nested dicts, the latter with the keys "0", "1", and so
    on. Rewards and flags are `(num_envs,)` or `(num_envs, 1)`. Values are cast to the dtypes of the
    spaces, where PyTorch can. Shapes of all results are checked. Adapters for trainers log the
    numbers in `info["log"]` or `info["episode"]`, which are dicts.

    Args:
        reset, step: the functions. The env owns the simulator from now on.
        num_envs: number of envs.
        observation_space, action_space: of a single env.
        reset_by: the argument of `reset`: a "mask", bool `(num_envs,)`, or "ids", int64, in
            increasing order. The first reset is of all rows.
        final_key: for simulators that reset finished rows in `step`: the entry of `info` with the
            final observations, in the finished rows of a value for all envs. It may be missing
            where no episode ended. None: `observation` is the true successor in every row, and
            episodes start in `reset` only.
        reuses_memory: whether the simulator keeps or overwrites its results and arguments, as most
            do. Everything is then copied once. False passes tensors on where their dtypes fit.
        max_episode_steps: truncates episodes at this length, in addition to `truncated`. None
            disables it.
        clock: returns the simulator's own count of steps of each episode, integers `(num_envs,)`.
            `env.elapsed_steps` then reads and writes it in place. None: the env counts.
        levels: returns what a curriculum changes, tensors `(num_envs, ...)` by name. Checkpoints of
            trainers save them, and write them in place to resume.
        seed: seeds the simulator with `seed + first_index`, an int below 2**31. Without it,
            `env.reset` takes no seed.
        close: for `env.close()`.
        info_keys: names of numbers in `info` to pass on under `("next", "info", name)`, as
            `(num_envs, 1)` float32.
        device: of the simulator's tensors. `.to(device)` moves the env, and not the simulator.
        first_index: global index of the first env, for a shard of a larger run.

    >>> from gymnasium.spaces import Box
    >>> height = torch.zeros(2, 1)
    >>> reset = lambda mask: height.masked_fill_(mask.unsqueeze(-1), 0.5)
    >>> step = lambda push: (height.add_(push), -height, height < -1, torch.zeros(2), {})
    >>> env = from_functions(reset, step, 2, Box(-9, 9, (1,)), Box(-2, 2, (1,)))
    >>> transition, td = env.step(env.reset().set("action", torch.tensor([[-2.0], [1.0]])))
    >>> transition["next", "observation"].flatten(), td["observation"].flatten()
    (tensor([-1.5000,  1.5000]), tensor([0.5000, 1.5000]))
    """
    owner = "from_functions"
    functions = {"reset": reset, "step": step, "clock": clock, "levels": levels}
    functions |= {"seed": seed, "close": close}
    for name, function in functions.items():
        if name in ("reset", "step") or function is not None:
            validation.function(owner, name, function)
    validation.choice(owner, "reset_by", reset_by, "mask", "ids")
    reuses_memory = validation.flag(owner, "reuses_memory", reuses_memory)
    signature = Signature(
        num_envs,
        observation_space,
        action_space,
        validation.device(owner, device),
        max_episode_steps,
        first_index,
    )
    return TensorEnv(functions, signature, reset_by, final_key, reuses_memory, info_keys)


class TensorEnv(FunctionsEnv):
    """A simulator on tensors as a torchwrap env; made by `from_functions`. It has no snapshots.

    The attribute `last_info` is the `info` of the last `step`, as the simulator returned it.
    """

    elapsed = EpisodeClock()
    # Rows that the simulator has reset in its step, and `_reset` has not returned yet.
    already_reset = EnvBuffer((), torch.bool)

    def __init__(
        self,
        functions: dict[str, Any],
        signature: Signature,
        reset_by: str,
        final_key: str | None,
        reuses_memory: bool,
        info_keys: Sequence[str],
    ) -> None:
        super().__init__("from_functions", signature, info_keys)
        self.functions = functions
        self.reset_by = reset_by
        self.final_key = final_key
        self.reuses_memory = reuses_memory
        self._simulator_device = signature.device
        self._kind = f"a tensor on {signature.device}"
        self.last_info: dict[str, Any] = {}
        # Initial observations of the rows that are already reset.
        self._initial = spaces.zeros(self.single_observation_space, self.num_envs, self.device)

    def _choose_seed(
        self, seed: int | None, is_first: bool, mask: Tensor | None = None
    ) -> int | None:
        if seed is not None and self.functions["seed"] is None:
            must = "seed must be None, because from_functions got no function for it"
            raise ValueError(refusal(f"{self._label}.reset", must, seed))
        return super()._choose_seed(seed, is_first)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        mask.fill_(self.already_reset, False)  # their episodes have started with another seed
        seed_simulator = self.functions["seed"]
        if seed_simulator is not None:
            # NumPy's generator, which many simulators seed too, takes 32 bits.
            seed_simulator((seed + self.signature.first_index) % 2**31)

    def _step(self, action: spaces.Value) -> TensorDict:
        if self.final_key is not None and is_host_readable(self.already_reset):
            _simulator.check_reset(self._label, self.already_reset.numpy())
        self.already_reset.zero_()
        given: Any = spaces.to_device(action, self._simulator_device)
        if isinstance(given, TensorDict):
            given = given.to_dict()
        result = self.functions["step"](given)
        self._check_numbers(result, _simulator.STEP)
        observation, *numbers, info = result
        self.last_info = info
        self._check_observation("step", observation, self.num_envs)
        observation = self._observation(observation, self.num_envs, copy=self.reuses_memory)
        if self.final_key is not None:
            _, terminated, truncated = numbers
            done = self._column(terminated, torch.bool) | self._column(truncated, torch.bool)
            final = info.get(self.final_key)
            observation = self._final_observation(observation, RowMask(done), final)
            self.already_reset.copy_(done.squeeze(-1))
        if self.functions["clock"] is None:
            self.elapsed.add_(1)
        return self._successor(observation, numbers, info)

    def _leave_out(self, rows: RowMask) -> None:
        if self.final_key is not None:
            fault = "cannot repeat actions, because the simulator resets finished rows itself"
            raise ValueError(refusal(self._label, fault, remedy="Repeat them within step"))

    def _final_observation(self, initial: spaces.Value, done: RowMask, final: Any) -> spaces.Value:
        if final is None:
            if done.tensor.any():
                must = f"info must hold {self.final_key!r} where an episode ends"
                raise ValueError(refusal("from_functions", must))
            return initial
        self._initial = initial
        self._check_observation("step's final observations", final, self.num_envs)
        return done.where(self._observation(final, self.num_envs, copy=False), initial)

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        already_reset = RowMask(self.already_reset & mask.tensor)
        rows = mask.tensor & ~self.already_reset
        mask.fill_(self.already_reset, False)
        mask.fill_(self.elapsed, 0)
        observation = self._initial
        # Without `final_key`, no rows are already reset, and `mask` needs no second sync.
        if mask.any() if self.final_key is None else rows.any():
            rows = rows.to(self._simulator_device)
            if self.reset_by == "ids":
                rows = rows.nonzero().squeeze(-1)
            result = self.functions["reset"](rows)
            self._check_observation("reset", result, self.num_envs)
            observation = self._observation(result, self.num_envs, copy=self.reuses_memory)
            if self.final_key is not None:
                initial = spaces.to_device(self._initial, self.device)
                observation = already_reset.where(initial, observation)
        return tensordict({"observation": observation}, self.num_envs)

    def _fits(self, value: Any, shape: tuple[int, ...]) -> bool:
        is_tensor = isinstance(value, Tensor) and value.device == self._simulator_device
        return is_tensor and super()._fits(value, shape)

    def _can_cast(self, value: Tensor, leaf: Space[Any]) -> bool:
        return torch.can_cast(value.dtype, spaces.dtype(leaf))

    def _clocks(self) -> list[Tensor]:
        if self.functions["clock"] is None:
            return [self.elapsed]
        clock = self.functions["clock"]()
        self._check_column("clock", "steps", clock)
        return [clock]

    def close(self) -> None:
        if self.functions["close"] is not None:
            self.functions["close"]()
