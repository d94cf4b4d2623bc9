"""Transform: four hooks over a TensorDict, the one-method bases for common cases, and Compose: several transforms as one."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import rows
from torchwrap._core.buffers import BatchedModule
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import RowMask, is_traced
from torchwrap.spaces import Signature, Value


class Transform(BatchedModule):
    """What happens to actions on their way into an env, and to observations and rewards on their way out.

    A transform knows a signature and a TensorDict, never an env. Override the hooks whose data you change; each is the
    identity by default. `td` has batch size `(num_envs,)` and may be written to.

    | hook | job |
    |---|---|
    | `setup(signature) -> signature` | checks and changes the description, registers buffers that depend on the spaces |
    | `action(action) -> action` | the agent's action to the env's, as a new tensor; runs outermost first |
    | `step(td) -> td` | the successor: `observation`, `reward`, `terminated`, `truncated`, `info` |
    | `reset(td, mask) -> td` | initial observations in the rows of `mask`; other rows neither change nor count |

    Declare what belongs to running episodes as class attributes, one `EnvBuffer(shape, dtype, fill)` each. They are allocated
    before `setup`; `mask.fill_(buffer, value)` and `mask.assign_(buffer, value)` reset rows of them. What is learned goes into
    persistent buffers that do not depend on `num_envs`. Write buffers in place and never return them. Keep constructor
    arguments under their own names, for `repr` and `spec`. No hook may read values on the host: use `mask` and `torch.where`.

    >>> import torch; from torchwrap import EnvBuffer
    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> class CountSteps(Transform):
    ...     elapsed = EnvBuffer((1,), torch.int64)
    ...     def step(self, td):
    ...         return td.set("steps", self.elapsed.add_(1).clone())
    ...     def reset(self, td, mask):
    ...         mask.fill_(self.elapsed, 0)
    ...         return td
    >>> env = TransformedEnv(ScriptedEnv(1), CountSteps())
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "steps"]
    tensor([[1]])
    """

    attached = False
    """Whether the transform belongs to an env. It holds the state of one env only."""

    is_passive = False
    """Whether observations and actions pass as they are, so that `deploy` leaves the transform out."""

    def __init__(self) -> None:
        super().__init__()  # and so takes no arguments, although nn.Module takes any

    def _check_arguments(self, *args: Any, **kwargs: Any) -> None:
        # Gymnasium's wrappers take an env first. The constructor would complain about another argument.
        env = args[0] if args else kwargs.get("env")
        if hasattr(env, "step") and hasattr(env, "render"):
            given = [
                *map(repr, args[1:]),
                *(f"{name}={value!r}" for name, value in kwargs.items() if name != "env"),
            ]
            remedy = (
                f"write `env = TransformedEnv(env, {construction(type(self), ', '.join(given))})`"
            )
            raise TypeError(
                f"{type(self).__name__} is a transform and takes no env, but got {type(env).__name__}: {remedy}."
            )

    def setup(self, signature: Signature) -> Signature:
        return signature

    def action(self, action: Value) -> Value:
        return action

    def step(self, td: TensorDict) -> TensorDict:
        return td

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return td

    def forward(self, td: TensorDict) -> TensorDict:
        """Transforms a TensorDict of any batch size outside an env. Only stateless transforms can be called so."""
        raise TypeError(
            f"{self!r} is stateful and cannot be called standalone: put it in a TransformedEnv."
        )

    def flat(self) -> Iterator[Transform]:
        """The transforms that this one consists of, innermost first."""
        yield self

    def _frozen(self) -> Transform:
        """Returns the transform that replaces a copy of this one in `deploy`: it learns nothing, and rows share no state."""
        return self

    def _standalone(
        self, td: TensorDict, key: str, function: Callable[[Value], Value]
    ) -> TensorDict:
        try:
            value = function(td[key].clone())  # which it may write to
        except AttributeError as error:
            remedy = "put it in a TransformedEnv before a standalone call"
            raise RuntimeError(
                f"{self!r} learns the spaces from an env ({error}): {remedy}."
            ) from error
        return td.copy().set(key, value)

    def extra_repr(self) -> str:
        names = inspect.signature(type(self).__init__).parameters
        shown = ", ".join(
            f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name)
        )
        return " ".join(shown.split())  # one line, arrays too

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class ObservationTransform(Transform):
    """Base for transforms of each observation by itself: implement `observation`, and `setup` if the space changes.

    >>> class Absolute(ObservationTransform):
    ...     def observation(self, observation):
    ...         return observation.abs()
    >>> Absolute()(TensorDict({"observation": torch.tensor([[-1.0]])}, [1]))["observation"]
    tensor([[1.]])
    """

    masked_reset = False
    """Whether a reset should compute the rows of the mask only, if it can. For expensive transforms of a single tensor."""

    def observation(self, observation: Value) -> Value:
        raise NotImplementedError(
            f"{type(self).__name__} does not implement observation(observation)."
        )

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self.observation(td["observation"]))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        observation = td["observation"]
        initial = (
            mask.apply(self.observation, observation)
            if self.masked_reset
            else self.observation(observation)
        )
        return td.set("observation", initial)

    def forward(self, td: TensorDict) -> TensorDict:
        return self._standalone(td, "observation", self.observation)


class RewardTransform(Transform):
    """Base for transforms of each reward by itself: implement `reward`, which takes and returns `(num_envs, 1)`.

    >>> class Sign(RewardTransform):
    ...     def reward(self, reward):
    ...         return reward.sign()
    >>> Sign()(TensorDict({"reward": torch.tensor([[-3.0]])}, [1]))["reward"]
    tensor([[-1.]])
    """

    is_passive = True

    def reward(self, reward: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement reward(reward).")

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("reward", self.reward(td["reward"]))

    def forward(self, td: TensorDict) -> TensorDict:
        return self._standalone(td, "reward", self.reward)


class ActionTransform(Transform):
    """Base for transforms of each action by itself: implement `action`, and `setup` if the space changes.

    >>> class Flip(ActionTransform):
    ...     def action(self, action):
    ...         return -action
    >>> Flip()(TensorDict({"action": torch.tensor([[0.5]])}, [1]))["action"]
    tensor([[-0.5000]])
    """

    def action(self, action: Value) -> Value:
        raise NotImplementedError(f"{type(self).__name__} does not implement action(action).")

    def forward(self, td: TensorDict) -> TensorDict:
        return self._standalone(td, "action", self.action)


def construction(kind: Any, arguments: str = "") -> str:
    """The code that makes a transform, for messages. Without arguments it shows the names of the required ones."""
    required = [
        each.name
        for each in inspect.signature(kind).parameters.values()
        if each.default is each.empty
    ]
    prefix = "T." if kind.__module__.startswith("torchwrap.") else ""
    return f"{prefix}{kind.__name__}({arguments or ', '.join(required)})"


class Compose(Transform):
    """Several transforms as one, innermost first: observations and rewards pass in order, actions in reverse.

    It has `len`, iteration, indexing and slicing; a slice is a list. A transform is named after its class, and from the second
    of a class on with its number: "NormalizeReward_2.statistics.count" is a key of `state_dict`. A dict gives other names.

    Args:
        transforms: the transforms, or a dict of them by name. An empty list is the identity.

    >>> from torchwrap import transforms as T
    >>> Compose([T.ClipReward(-1, 1), T.TimeLimit(9)])
    Compose([ClipReward(min_reward=-1, max_reward=1), TimeLimit(max_episode_steps=9)])
    """

    _modules: dict[str, Transform]  # type: ignore[assignment]
    _checked: frozenset[str] = frozenset()  # hooks that have been checked

    def __init__(self, transforms: Iterable[Transform] | Mapping[str, Transform]) -> None:
        super().__init__()
        if not isinstance(transforms, Iterable):
            raise TypeError(f"Compose needs a list of Transforms, but got {transforms!r}.")
        self.is_named = isinstance(transforms, Mapping)
        given = list(
            transforms.items() if isinstance(transforms, Mapping) else enumerate(transforms)
        )
        for position, (name, transform) in enumerate(given):
            if not isinstance(transform, Transform):
                got, remedy = (
                    type(transform).__name__,
                    ": write `*transforms`" if isinstance(transform, list) else "",
                )
                if isinstance(transform, type) and issubclass(transform, Transform):
                    got, remedy = (
                        f"the class {transform.__name__}",
                        f": pass an instance, `{construction(transform)}`",
                    )
                raise TypeError(
                    f"Compose needs Transforms, but got {got} at transforms[{position}]{remedy}."
                )
            if not self.is_named:
                kind = type(transform).__name__
                numbered = (
                    f"{kind}_{number}" if number > 1 else kind for number in itertools.count(1)
                )
                name = next(name for name in numbered if not hasattr(self, name))
            elif not str(name).isidentifier() or hasattr(self, name):
                raise ValueError(
                    f"Compose needs names that are identifiers and not attributes of Compose, but got {name!r}."
                )
            self.add_module(name, transform)
        parts = list(self.flat())
        for position, part in enumerate(parts):
            if any(part is other for other in parts[:position]):
                raise ValueError(
                    f"Compose needs each transform once, but got {part!r} twice: make a second one."
                )

    @property
    def transforms(self) -> list[Transform] | dict[str, Transform]:
        """The transforms, innermost first: a list, or a dict if they were given names."""
        return dict(self._modules) if self.is_named else list(self)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self._modules.values())

    @overload
    def __getitem__(self, index: int) -> Transform: ...
    @overload
    def __getitem__(self, index: slice) -> list[Transform]: ...
    def __getitem__(self, index: int | slice) -> Transform | list[Transform]:
        return list(self)[index]

    def setup(self, signature: Signature) -> Signature:
        self._signatures = [signature]  # below the first transform, and above each one
        for position, transform in enumerate(self):
            transform.allocate(signature.num_envs, signature.device)
            try:
                signature = transform.setup(signature)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(
                    f"transforms[{position}] ({type(transform).__name__}): {error}"
                ) from error
            if not isinstance(signature, Signature):
                owner = f"transforms[{position}] ({type(transform).__name__}).setup"
                raise TypeError(
                    f"{owner} needs to return the signature, but got {type(signature).__name__}."
                )
            self._signatures.append(signature)
        return signature

    def action(self, action: Value) -> Value:
        if not torch.compiler.is_compiling() and "action" not in self._checked:
            return self._first("action", action)
        for transform in reversed(self._modules.values()):
            if type(transform).action is not Transform.action:  # most leave actions as they are
                action = transform.action(action)
        return action

    def step(self, td: TensorDict) -> TensorDict:
        if not torch.compiler.is_compiling() and "step" not in self._checked:
            return self._first("step", td)
        for transform in self._modules.values():
            td = transform.step(td)
        return td

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        if not torch.compiler.is_compiling() and "reset" not in self._checked:
            return self._first("reset", td, mask)
        for transform in self._modules.values():
            td = transform.reset(td, mask)
        return td

    def _first(self, hook: str, value: Any, *mask: RowMask) -> Any:
        """A call of a hook in which each transform is checked, as in the first one and in every trace."""
        tensor, parts = rows.leaves(value)[0], list(enumerate(self))
        traced, device = (
            is_traced(tensor),
            tensor.device,
        )  # `.to(device)` does not reach the signatures
        for position, transform in reversed(parts) if hook == "action" else parts:
            owner = f"transforms[{position}] ({type(transform).__name__}).{hook}"
            below, above = (
                signature.replace(device=device)
                for signature in self._signatures[position : position + 2]
            )
            with no_foreign_draws(
                owner, "draw from a stream of `signature.stream()`", None if traced else device
            ):
                value = getattr(transform, hook)(value, *mask)
            if hook == "action":
                spaces.check(
                    owner,
                    "to return actions",
                    below.single_action_space,
                    value,
                    below.num_envs,
                    device,
                )
            else:
                spaces.check_layer(owner, above, value, flags=hook == "step")
        if not traced:
            self._checked |= {hook}
        return value

    def forward(self, td: TensorDict) -> TensorDict:
        actions = [part for part in self.flat() if isinstance(part, ActionTransform)]
        for transform in (
            *(part for part in self.flat() if not isinstance(part, ActionTransform)),
            *reversed(actions),
        ):
            td = transform(td)
        return td

    def flat(self) -> Iterator[Transform]:
        for transform in self:
            yield from transform.flat()

    def __repr__(self) -> str:
        return f"Compose({self.transforms})"
