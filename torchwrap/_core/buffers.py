"""Declarations of a module's buffers, and the module whose buffers have one row per env."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from torchwrap._core import validation


class _Declaration:
    """A class attribute that reads the module's buffer of its name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, module: None, owner: type) -> _Declaration: ...
    @overload
    def __get__(self, module: nn.Module, owner: type) -> Tensor: ...
    def __get__(self, module: nn.Module | None, owner: type) -> _Declaration | Tensor:
        if module is None:
            return self
        try:
            return module._buffers[self.name]  # type: ignore[return-value]
        except KeyError:
            raise AttributeError(
                self.name
            ) from None  # Python then calls nn.Module.__getattr__, which has the message


class ConstantBuffer(_Declaration):
    """Declares a buffer of configuration, such as bounds. `.to` moves it, but it is not state, so no snapshot holds it."""


class EnvBuffer(_Declaration):
    """Declares a buffer with one row per env, which belongs to running episodes.

    The declaration is the initial value of one row. `BatchedModule.allocate` makes the buffer from it, attribute access reads
    it, `.to` moves it, `Env.snapshot` saves it, and `state_dict` leaves it out.

    Args:
        shape, dtype: of one row.
        fill: the initial value of each element.
        row: instead of the three above: gives the initial row as a tensor, from the module. Needed if it depends on a space.

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
        self.shape, self.dtype, self.row, self.fill = (
            shape,
            dtype,
            row,
            validation.fill("EnvBuffer", fill, dtype),
        )

    def allocate(self, module: Any, num_envs: int, device: torch.device | str) -> Tensor:
        """The initial rows of all envs, in new memory."""
        if self.row is None:
            return torch.full((num_envs, *self.shape), self.fill, dtype=self.dtype, device=device)
        with torch.device(device):  # whatever the default device is
            row = self.row(module).to(device)
        return row.expand(num_envs, *row.shape).clone()


class EpisodeClock(EnvBuffer):
    """Declares the number of steps since the start of the episode, one per env. `Env.elapsed_steps` writes it."""

    def __init__(self, shape: tuple[int, ...] = (1,), dtype: torch.dtype = torch.int64) -> None:
        super().__init__(shape, dtype)

    @staticmethod
    def of(module: BatchedModule) -> list[Tensor]:
        """The clocks of a module, without its submodules."""
        names = [
            name
            for name in module._env_buffer_names
            if isinstance(getattr(type(module), name, None), EpisodeClock)
        ]
        return [module.get_buffer(name) for name in names]


class BatchedModule(nn.Module):
    """An `nn.Module` that knows which of its buffers have one row per env. Base of envs, transforms, and what they consist of.

    What it was made with stays: its dtypes, constructor arguments and submodules, from which later code has computed values. A
    buffer, a parameter, and a property with a setter can be assigned under the name of an argument.
    """

    _env_buffer_names: tuple[str, ...] = ()
    _constructor_arguments: frozenset[str] = frozenset()  # of this class and its bases
    _fixed_names: frozenset[str] = frozenset()  # attributes that cannot be assigned

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._constructor_arguments = frozenset().union(
            *[getattr(kind, "_constructor_arguments", ()) for kind in cls.__mro__]
        )
        if "__init__" in vars(cls):
            cls._constructor_arguments |= inspect.signature(cls.__init__).parameters.keys()
            cls.__init__ = _fixing(cls.__init__)  # type: ignore[method-assign]

    def allocate(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        """Registers every `EnvBuffer` that the class declares, with its initial value."""
        for kind in reversed(type(self).__mro__):
            for name, declaration in vars(kind).items():
                if isinstance(declaration, EnvBuffer):
                    self.register_env_buffer(name, declaration.allocate(self, num_envs, device))

    def register_env_buffer(self, name: str, tensor: Tensor) -> None:
        """Registers a buffer `(num_envs, ...)` whose name is known only at run time, such as one per leaf of a space."""
        self.register_buffer(name, tensor, persistent=False)
        self._env_buffer_names = (*dict.fromkeys((*self._env_buffer_names, name)),)

    def _check_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Raises for arguments that no constructor takes, before one complains about something else."""

    def _warn_untrained(self, owner: str) -> None:
        """Warns if a reset in eval mode finds statistics that have counted nothing; `owner` says where."""

    def _fix(self) -> None:
        """From now on, no constructor argument and no submodule of now can be assigned."""
        settable = {
            name
            for name in self._constructor_arguments
            if getattr(getattr(type(self), name, None), "fset", None)
        }
        fixed = self._constructor_arguments.union(self._modules)
        self._fixed_names = fixed.difference(self._buffers, self._parameters, settable)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed_names:
            kind, got = type(self).__name__, " ".join(repr(value).split())
            raise AttributeError(
                f"{kind}.{name} is fixed at construction, but got {got}: make a new {kind}, or a new env with "
                "torchwrap.make(env.spec, ...); new.load_state_dict(old.state_dict()) copies what was learned. Put a number "
                "that changes during training into a buffer, which a compiled step reads in every call."
            )
        super().__setattr__(name, value)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`, but a call that raises leaves everything as it was."""
        held: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (tensors, name, tensor, tensor.detach().clone())
            for module in self.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None and name not in getattr(module, "_env_buffer_names", ())
        ]
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except BaseException:
            with torch.inference_mode():  # in which every tensor can be written to
                for tensors, name, tensor, value in held:
                    tensors[name] = tensor
                    tensor.copy_(value)
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to`, `.double()` and their like come here.
        for dtype in sorted(self._dtypes(), key=str):
            if (got := fn(torch.empty(0, dtype=dtype, device="cpu")).dtype) != dtype:
                fault = f"{type(self).__name__} has fixed dtypes, but got a conversion of {dtype} to {got}"
                remedy = "move it with `.to(device)`, without a dtype, and cast observations with T.DtypeObservation"
                raise TypeError(f"{fault}: {remedy}.")
        return super()._apply(fn, recurse)

    def _dtypes(self) -> set[torch.dtype]:
        return {buffer.dtype for buffer in self.buffers()}


def own(value: Any) -> Any:
    """A copy of an array or a plain tensor, which the caller could change later. A parameter stays the caller's."""
    if type(value) is Tensor and not value.requires_grad:
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _fixing(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor after which the module is fixed, if no subclass has a constructor around it."""

    @functools.wraps(init)
    def __init__(self: BatchedModule, *args: Any, **kwargs: Any) -> None:
        is_outermost = type(self).__init__ is __init__
        if is_outermost:
            self._check_arguments(*args, **kwargs)
            args, kwargs = (
                tuple(map(own, args)),
                {name: own(value) for name, value in kwargs.items()},
            )
        init(self, *args, **kwargs)
        if is_outermost:
            self._fix()

    return __init__
