"""Simulators that step a batch of tensors, such as Isaac Lab, mjlab and Genesis, as torchwrap envs: `from_functions`."""

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
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Options
from torchwrap.interop import _checks
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
    seed: Callable[[int], Any] | None = None,
    close: Callable[[], Any] | None = None,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> TensorEnv:
    """Makes a torchwrap env of a simulator that steps all envs at once, on tensors that stay on its device.

    | function | returns |
    |---|---|
    | `reset(rows)` | the observations of all envs, after new episodes have started in `rows`. Other rows are ignored |
    | `step(action)` | `(observation, reward, terminated, truncated, info)`, with a dict as `info` |

    `examples/simulators.py` has these functions for Isaac Lab, mjlab, ManiSkill, Genesis, Newton and PufferLib.

    Values of `Dict` and `Tuple` spaces are nested dicts, the latter with the keys "0", "1", and so on. Rewards and flags are
    `(num_envs,)` or `(num_envs, 1)`. Values are cast to the dtypes of the spaces, where PyTorch can. The first result of each
    function is checked.

    Args:
        reset, step: the functions. The env owns the simulator from now on.
        num_envs: number of envs.
        observation_space, action_space: of a single env.
        reset_by: what `reset` takes as rows: a "mask", bool `(num_envs,)`, or "ids", int64, in increasing order. The first
            reset is of all rows.
        final_key: for simulators that reset finished rows in `step`: the entry of `info` with the final observations, in the
            finished rows of a value for all envs. It may be missing where no episode ended. None: `observation` is the true
            successor in every row, and episodes start in `reset` only.
        reuses_memory: whether the simulator keeps or overwrites what it returned or was given, as most do. Everything is then
            copied once. False passes tensors on where their dtypes fit.
        max_episode_steps: truncates episodes at this length, in addition to `truncated`. None disables it.
        clock: returns the simulator's own count of steps of each episode, integers `(num_envs,)`, which `env.elapsed_steps`
            then reads and writes in place. None: the env counts.
        seed: seeds the simulator with `seed + first_index`, an int below 2**31. Without it, `env.reset` takes no seed.
        close: for `env.close()`.
        info_keys: names of numbers in `info` to pass on under `("next", "info", name)`, as `(num_envs, 1)` float32.
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
    functions = {"reset": reset, "step": step, "clock": clock, "seed": seed, "close": close}
    for name, function in functions.items():
        if not (callable(function) or (function is None and name not in ("reset", "step"))):
            raise TypeError(f"{owner} needs a function as {name}, but got {function!r}.")
    if reset_by not in ("mask", "ids"):
        raise ValueError(f'{owner} needs reset_by="mask" or "ids", but got {reset_by!r}.')
    described = (
        num_envs,
        observation_space,
        action_space,
        max_episode_steps,
        first_index,
        device,
        info_keys,
    )
    signature = _checks.signature(owner, *described)
    reuses_memory = validation.flag(owner, "reuses_memory", reuses_memory)
    return TensorEnv(functions, signature, reset_by, final_key, reuses_memory, list(info_keys))


class TensorEnv(_checks.SimulatorEnv):
    """A simulator on tensors as a torchwrap env; made by `from_functions`. It has no snapshots."""

    can_snapshot = False
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
        info_keys: list[str],
    ) -> None:
        super().__init__(signature)
        self.functions, self.reset_by, self.final_key, self.reuses_memory = (
            functions,
            reset_by,
            final_key,
            reuses_memory,
        )
        self.info_spaces: dict[str, Space[Any]] = dict.fromkeys(info_keys, spaces.REWARD)
        self._simulator_device, self.can_repeat = signature.device, final_key is None
        self._unchecked = {"reset", "step", "step's final observations"}
        # Initial observations of the rows that are already reset.
        self._initial = spaces.zeros(
            signature.single_observation_space, signature.num_envs, signature.device
        )

    def _choose_seed(
        self, seed: int | None, is_first: bool, mask: Tensor | None = None
    ) -> int | None:
        if seed is not None and self.functions["seed"] is None:
            remedy = (
                "seed the simulator where it is made, or pass a function as seed to from_functions"
            )
            raise ValueError(
                f"{self._name()}.reset takes no seed without a function for it, but got {seed}: {remedy}."
            )
        return super()._choose_seed(seed, is_first)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        mask.fill_(self.already_reset, False)  # their episodes have started with another seed
        if self.functions["seed"] is not None:
            # NumPy's generator, which many simulators seed too, takes 32 bits.
            self.functions["seed"]((seed + self.signature.first_index) % 2**31)

    def _step(self, action: spaces.Value) -> TensorDict:
        self.already_reset.zero_()
        action = spaces.apply(lambda _, leaf: leaf.to(self._simulator_device), action)
        result = self.functions["step"](action if isinstance(action, Tensor) else action.to_dict())
        if "step" in self._unchecked:
            for name, value in _checks.numbers(
                "from_functions", result, _checks.STEP, self.info_spaces, _describe
            ).items():
                if not self._fits(value, (self.num_envs,), (self.num_envs, 1)):
                    self._refuse("step", f"{name} as one number per env", (self.num_envs,), value)
        observation, reward, terminated, truncated, info = result
        observation = self._observation("step", observation, copy=self.reuses_memory)
        reward = self._column(reward, torch.float32)
        terminated, truncated = (
            self._column(terminated, torch.bool),
            self._column(truncated, torch.bool),
        )
        if self.final_key is not None:
            done = terminated | truncated
            observation = self._successor(observation, RowMask(done), info)
            self.already_reset.copy_(done.squeeze(-1))
        if self.functions["clock"] is None:
            self.elapsed.add_(1)
        if self.signature.max_episode_steps is not None:
            truncated = truncated | (
                self._clocks()[0].view(-1, 1).to(self.device) >= self.signature.max_episode_steps
            )
        successor = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        if self.info_spaces:
            entries = {name: self._column(info[name], torch.float32) for name in self.info_spaces}
            successor["info"] = tensordict(entries, self.num_envs)
        return tensordict(successor, self.num_envs)

    def _successor(
        self, initial: spaces.Value, done: RowMask, info: dict[str, Any]
    ) -> spaces.Value:
        final = info.get(self.final_key or "")
        if final is None and done.tensor.any():
            needed = f"info[{self.final_key!r}] where an episode ends"
            raise ValueError(
                f"from_functions needs step to return {needed}, but got an info with {sorted(info)}."
            )
        if final is None:
            return initial
        self._initial = initial
        return done.where(
            self._observation("step's final observations", final, copy=False), initial
        )

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        already_reset = self.already_reset & mask.tensor
        mask.fill_(self.already_reset, False)
        mask.fill_(self.elapsed, 0)
        observation, rows = self._initial, mask.tensor & ~already_reset
        if mask.any() if self.final_key is None else rows.any():
            rows = rows.to(self._simulator_device)
            result = self.functions["reset"](
                rows if self.reset_by == "mask" else rows.nonzero().squeeze(-1)
            )
            observation = self._observation("reset", result, copy=self.reuses_memory)
            if self.final_key is not None:
                observation = RowMask(already_reset).where(
                    spaces.to_device(self._initial, self.device), observation
                )
        return tensordict({"observation": observation}, self.num_envs)

    def _observation(self, function: str, value: Any, copy: bool) -> spaces.Value:
        if function in self._unchecked:
            self._check_observation(function, value)
            self._unchecked.remove(function)

        def leaf(path: tuple[str, ...], space: Space[Any]) -> Tensor:
            return spaces.at(value, path).to(self.device, spaces.dtype(space), copy=copy)

        return spaces.build(self.single_observation_space, leaf, self.num_envs)

    def _column(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(self.device, dtype, copy=self.reuses_memory).view(self.num_envs, 1)

    def _check_observation(self, function: str, value: Any) -> None:
        for path, space in spaces.leaves(self.single_observation_space):
            try:
                found = spaces.at(value, path)
            except (IndexError, KeyError, TypeError, ValueError):
                found = None
            shape, what = (
                (self.num_envs, *(space.shape or ())),
                "".join([f"[{key!r}]" for key in path]),
            )
            if not self._fits(found, shape) or not torch.can_cast(found.dtype, spaces.dtype(space)):
                self._refuse(
                    function,
                    f"observation{what} of {space}",
                    shape,
                    value if found is None else found,
                )

    def _fits(self, value: Any, *shapes: tuple[int, ...]) -> bool:
        return (
            isinstance(value, Tensor)
            and tuple(value.shape) in shapes
            and value.device == self._simulator_device
        )

    def _refuse(self, function: str, what: str, shape: tuple[int, ...], value: Any) -> None:
        needed = f"{what}, a tensor of shape {shape} on {self._simulator_device}"
        raise ValueError(
            f"from_functions needs {function} to return {needed}, but got {_describe(value)}."
        )

    def _clocks(self) -> list[Tensor]:
        return [self.elapsed if self.functions["clock"] is None else self.functions["clock"]()]

    def close(self) -> None:
        if self.functions["close"] is not None:
            self.functions["close"]()


def _describe(value: Any) -> str:
    """Nested values with shapes, dtypes and devices instead of tensors."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    if isinstance(value, tuple | list):
        return f"({', '.join([_describe(part) for part in value])})"
    if hasattr(value, "items"):
        return f"{{{', '.join([f'{key!r}: {_describe(part)}' for key, part in value.items()])}}}"
    return repr(value)
