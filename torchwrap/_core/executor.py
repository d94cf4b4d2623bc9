"""Executor: what runs the steps of an env and the calls of a collector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from torchwrap._core.row_mask import RowMask

if TYPE_CHECKING:
    from torchwrap.collector import Collector
    from torchwrap.env import Env
    from torchwrap.transforms.transform import Transform


class Eager:
    """Runs everything as it is written.

    `torchwrap.compile` gives an env or a collector another executor, which overrides the methods whose work it does in a
    graph. A compiled executor belongs to the object that it was made for: a copied or unpickled object runs eagerly.
    """

    def step(self, env: Env, action: Any) -> tuple[TensorDict, Any]:
        """The successor, and the observation to act on next."""
        return env._step_and_reset(action)

    def transform_step(self, transform: Transform, td: TensorDict) -> TensorDict:
        """The transform of a successor."""
        return transform.step(td)

    def transform_reset(self, transform: Transform, td: TensorDict, mask: RowMask) -> TensorDict:
        """The transform of initial observations."""
        return transform.reset(td, mask)

    def collect(self, collector: Collector, observation: Any) -> tuple[dict[Any, Any], Any]:
        """The transitions by key, stored time-first, and the observation to act on next."""
        return collector._collect(observation)

    def __reduce__(self) -> tuple[Any, ...]:
        return _eager, ()

    def __deepcopy__(self, memo: Any) -> Eager:
        return EAGER


EAGER = Eager()


def _eager() -> Eager:
    return EAGER
