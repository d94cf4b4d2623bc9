"""Executor: what runs the steps of an env and the calls of a collector."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDict

from torchwrap._core.row_mask import RowMask


class Steps(Protocol):
    """What an executor needs of an env."""

    def _step_and_reset(self, action: Any) -> tuple[TensorDict, Any]: ...

    def _step_without_reset(self, action: Any) -> tuple[TensorDict, Any]: ...


class Transforms(Protocol):
    """What an executor needs of a transform."""

    def step(self, td: TensorDict) -> TensorDict: ...

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict: ...


class Collects(Protocol):
    """What an executor needs of a collector."""

    def _collect(self, root: Any) -> tuple[dict[Any, Any], Any]: ...


class Eager:
    """Runs everything as it is written.

    `torchwrap.compile` gives an env or a collector another executor, which overrides the methods whose work it does in a
    graph. A compiled executor belongs to the object that it was made for: a copied or unpickled object runs eagerly.
    """

    def step(self, env: Steps, action: Any) -> tuple[TensorDict, Any]:
        """The successor, and the observation to act on next."""
        return env._step_and_reset(action)

    def step_without_reset(self, env: Steps, action: Any) -> tuple[TensorDict, Any]:
        """As `step`, without the auto-reset."""
        return env._step_without_reset(action)

    def transform_step(self, transform: Transforms, td: TensorDict) -> TensorDict:
        """The transform of a successor."""
        return transform.step(td)

    def transform_reset(self, transform: Transforms, td: TensorDict, mask: RowMask) -> TensorDict:
        """The transform of initial observations."""
        return transform.reset(td, mask)

    def collect(self, collector: Collects, root: Any) -> tuple[dict[Any, Any], Any]:
        """The transitions by key, stored time-first, and the entries of the next root."""
        return collector._collect(root)

    def __reduce__(self) -> tuple[Any, ...]:
        return _eager, ()

    def __deepcopy__(self, memo: Any) -> Eager:
        return EAGER


EAGER = Eager()


def _eager() -> Eager:
    return EAGER
