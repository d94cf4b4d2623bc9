"""Declarations of a module's buffers, and the module whose buffers have one row per env."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchwrap._core import rows
from torchwrap._core.errors import refusal
from torchwrap._core.generators import no_foreign_draws, no_key_twice
from torchwrap._core.rows import RowMask


class EnvBuffer:
    """Declares a buffer with one row per env, which belongs to running episodes.

    The declaration is the initial value of one row. `BatchedModule.allocate` makes the buffer,
    attribute access reads it, `.to` moves it, `Env.snapshot` saves it, and `state_dict` leaves it
    out.

    Args:
        shape, dtype: of one row.
        fill: the initial value of each element.
        row: instead of the three above, a function from the module to the initial row, for a row
            that depends on a space.

    >>> from torchwrap import TransformedEnv, testing, transforms
    >>> class CountSteps(transforms.Transform):
    ...     elapsed = EnvBuffer((1,), torch.int64)
    >>> TransformedEnv(testing.ScriptedEnv(3), CountSteps()).transforms[0].elapsed.shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        fill: float = 0,
        *,
        row: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.row = row
        self.fill = fill

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, module: None, owner: type) -> EnvBuffer: ...
    @overload
    def __get__(self, module: nn.Module, owner: type) -> Tensor: ...
    def __get__(self, module: nn.Module | None, owner: type) -> EnvBuffer | Tensor:
        if module is None:
            return self
        try:
            return module._buffers[self.name]  # type: ignore[return-value]
        except KeyError:
            # Python then calls nn.Module.__getattr__, whose message names the module.
            raise AttributeError(self.name) from None

    def allocate(self, module: Any, num_envs: int, device: torch.device | str) -> Tensor:
        """The initial rows of all envs, in new memory."""
        if self.row is None:
            shape = (num_envs, *self.shape)
            return torch.full(shape, self.fill, dtype=self.dtype, device=device)
        with torch.device(device):  # overrides the user's default device
            row = self.row(module).to(device)
        return row.repeat(num_envs, *[1] * row.dim())  # contiguous, unlike a clone of no elements


class EpisodeClock(EnvBuffer):
    """Declares the number of steps since the start of an episode, as `Env.elapsed_steps`.

    It is int64 `(num_envs, 1)`; the env or transform adds 1 in each step, and sets 0 in a reset.
    Assigning `Env.elapsed_steps` writes it.

    >>> from torchwrap import TransformedEnv, testing, transforms
    >>> class Clock(transforms.Transform):
    ...     elapsed = EpisodeClock()
    >>> TransformedEnv(testing.ScriptedEnv(3), Clock()).elapsed_steps
    tensor([0, 0, 0])
    """

    def __init__(self) -> None:
        super().__init__((1,), torch.int64)


class BatchedModule(nn.Module):
    """Base class of envs, transforms and their parts, with buffers of one row per env.

    A snapshot holds these buffers, those of `register_state_buffer`, and those of `state_dict`.
    Other buffers are configuration. Dtypes are fixed after construction.
    """

    _env_buffer_names: tuple[str, ...] = ()
    _state_buffer_names: tuple[str, ...] = ()
    _trusted: frozenset[str] = frozenset()
    """The hooks whose first result was checked."""
    buffer_limits: dict[str, Any] = {}
    """The smallest and the largest number that `restore` takes for a buffer, by name."""

    def allocate(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        """Registers every `EnvBuffer` that the class declares, with its initial value."""
        for kind in reversed(type(self).__mro__):
            for name, declaration in vars(kind).items():
                if isinstance(declaration, EnvBuffer):
                    tensor = declaration.allocate(self, num_envs, device)
                    self.register_env_buffer(name, tensor)

    def register_env_buffer(self, name: str, tensor: Tensor) -> None:
        """Registers a buffer `(num_envs, ...)` whose name is known only at run time."""
        self.register_buffer(name, tensor, persistent=False)
        if name not in self._env_buffer_names:
            self._env_buffer_names += (name,)

    def register_state_buffer(self, name: str, tensor: Tensor) -> None:
        """Registers a buffer that all envs share, for snapshots but not for `state_dict`."""
        self.register_buffer(name, tensor, persistent=False)
        if name not in self._state_buffer_names:
            self._state_buffer_names += (name,)

    def _run(self, hook: str, *args: Any) -> Any:
        """Calls a hook. Checks its result in the first call, and in every trace."""
        call = getattr(self, hook)
        if hook in self._trusted or torch.compiler.is_compiling():  # sizes may be symbols
            return call(*args)
        first = args[0]
        tensor = first.tensor if isinstance(first, RowMask) else rows.leaves(first)[0]
        is_traced = rows.is_traced(tensor)
        # A simulator on the host has its own generators.
        may_draw = is_traced or getattr(self, "host_stepped", False)
        device = None if may_draw else tensor.device
        remedy = "Draw with torchwrap.random, from a stream"
        owner = self._hook_name(hook)
        with no_foreign_draws(owner, remedy, device), no_key_twice(owner):
            result = call(*args)
        self._check_result(hook, result, tensor.device)
        if not is_traced:
            self._trusted |= {hook}
        return result

    def _clocks(self) -> list[Tensor]:
        """The tensors in which this module, without its parts, counts the steps of episodes."""
        clocks = []
        for name in self._env_buffer_names:
            if isinstance(getattr(type(self), name, None), EpisodeClock):
                clocks.append(self.get_buffer(name))
        return clocks

    def _hook_name(self, hook: str) -> str:
        return f"{type(self).__name__}.{hook}"

    def _check_result(self, hook: str, result: Any, device: torch.device) -> None:
        """Raises a TypeError or ValueError for a wrong result of a hook."""

    def _warn_untrained(self, owner: str) -> None:
        """Warns if a reset in eval mode finds statistics without samples; `owner` says where."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`, but a call that raises leaves everything as it was."""
        loaded = {*self.state_dict(), *self._paths("_state_buffer_names")}
        held = chain(
            self.named_parameters(remove_duplicate=False),
            self.named_buffers(remove_duplicate=False),
        )
        tensors = {path: tensor for path, tensor in held if path in loaded}
        values = {path: tensor.detach().clone() for path, tensor in tensors.items()}
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except BaseException:
            for path, tensor in tensors.items():
                with torch.inference_mode():  # the only mode that can write to every tensor
                    tensor.copy_(values[path])
                parent, _, name = path.rpartition(".")
                setattr(self.get_submodule(parent), name, tensor)
            raise

    def _paths(self, kind: str) -> list[str]:
        """The paths of all buffers whose modules name them in the attribute `kind`."""
        paths: list[str] = []
        for prefix, module in self.named_modules():
            paths += [f"{prefix}.{name}".lstrip(".") for name in getattr(module, kind, ())]
        return paths

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to` and `.double()` come here.
        for dtype in sorted(self._dtypes(), key=str):
            converted = fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
            if converted != dtype:
                raise TypeError(
                    refusal(
                        type(self).__name__,
                        f"dtypes are fixed, so {dtype} cannot become {converted}",
                        remedy="Use `.to(device)` alone, and T.DtypeObservation for observations",
                    )
                )
        return super()._apply(fn, recurse)

    def _dtypes(self) -> set[torch.dtype]:
        return {buffer.dtype for buffer in self.buffers()}


def distrust(modules: Iterable[nn.Module]) -> None:
    """Lets the next call of each hook of some modules be checked, like the first one."""
    for module in modules:
        vars(module).pop("_trusted", None)
