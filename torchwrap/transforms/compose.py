"""Compose: several transforms as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import overload

from tensordict import TensorDict

from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import ActionTransform, Transform, construction


class Compose(Transform):
    """Several transforms as one, innermost first: observations and rewards pass in order, actions in reverse.

    It has `len`, iteration, indexing and slicing; a slice is a list.

    Args:
        transforms: the transforms. An empty list is the identity.

    Raises:
        TypeError, ValueError: for what is no transform, or one that appears twice.

    >>> from torchwrap import transforms as T
    >>> compose = Compose([T.ClipReward(-1, 1), T.TimeLimit(9)])
    >>> compose
    Compose([ClipReward(min_reward=-1, max_reward=1), TimeLimit(max_episode_steps=9)])
    >>> compose[1]
    TimeLimit(max_episode_steps=9)
    """

    def __init__(self, transforms: Iterable[Transform]) -> None:
        super().__init__()
        if not isinstance(transforms, Iterable):
            raise TypeError(f"Compose needs a list of Transforms, but got {transforms!r}.")
        for position, transform in enumerate(transforms):
            if not isinstance(transform, Transform):
                got, remedy = type(transform).__name__, ""
                if isinstance(transform, type) and issubclass(transform, Transform):
                    got, remedy = f"the class {transform.__name__}", f": `{construction(transform)}` makes an instance"
                raise TypeError(f"Compose needs Transforms, but got {got} at transforms[{position}]{remedy}.")
            self.add_module(str(position), transform)
        parts = list(self.flat())
        for position, part in enumerate(parts):
            if any(part is other for other in parts[:position]):
                raise ValueError(f"Compose needs each transform once, but got {part!r} twice: each has state of its own.")

    @property
    def transforms(self) -> list[Transform]:
        """The transforms, innermost first."""
        return list(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    @overload
    def __getitem__(self, index: int) -> Transform: ...
    @overload
    def __getitem__(self, index: slice) -> list[Transform]: ...
    def __getitem__(self, index: int | slice) -> Transform | list[Transform]:
        return self.transforms[index]

    def setup(self, signature: Signature) -> Signature:
        self._signatures = [signature]  # below the first transform, and above each one
        for position, transform in enumerate(self):
            transform.allocate(signature.num_envs, signature.device)
            try:
                signature = transform.setup(signature)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"transforms[{position}] ({type(transform).__name__}): {error}") from error
            self._signatures.append(signature)
        return signature

    def action(self, action: Value) -> Value:
        for transform in reversed(self.transforms):
            if type(transform).action is not Transform.action:  # most leave actions as they are
                action = transform.action(action)
        return action

    def step(self, td: TensorDict) -> TensorDict:
        for transform in self.transforms:
            td = transform.step(td)
        return td

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        for transform in self.transforms:
            td = transform.reset(td, mask)
        return td

    def forward(self, td: TensorDict) -> TensorDict:
        actions = [part for part in self.flat() if isinstance(part, ActionTransform)]
        for transform in (*(part for part in self.flat() if not isinstance(part, ActionTransform)), *reversed(actions)):
            td = transform(td)
        return td

    def flat(self) -> Iterator[Transform]:
        for transform in self:
            yield from transform.flat()

    def __repr__(self) -> str:
        return f"Compose([{', '.join(map(repr, self))}])"
