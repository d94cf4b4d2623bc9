"""A mode of PyTorch that sees every operator that Python code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class OperatorMode(TorchFunctionMode):
    """Calls `operator` in place of each operator."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return self.operator(func, args, kwargs or {})

    def operator(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise NotImplementedError
