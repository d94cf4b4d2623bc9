"""Transform: four hooks over a TensorDict. Compose: several transforms as one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Tuple
from gymnasium.spaces.utils import flatten_space
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.buffers import BatchedModule
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature, Value


class _WithoutEnv(BatchedModule):
    # A base, so that signatures of transforms are those of `__init__`.
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        others = [value for value in args if not isinstance(value, _WithoutEnv)]
        if any(hasattr(value, "action_space") for value in others):
            fault = "it takes no env"
            remedy = f"Write TransformedEnv(env, {cls.__name__}(...))"
            raise TypeError(refusal(cls.__name__, fault, remedy=remedy))
        return super().__new__(cls)


class Transform(_WithoutEnv):
    """Base of what is done to actions before an env, and to observations and rewards after it.

    A transform knows a signature and a TensorDict, never an env. Override the hooks whose data you
    change; each is the identity by default. `td` has batch size `(num_envs,)`, and a hook may write
    to it.

    | hook | job |
    |---|---|
    | `setup(signature) -> signature` | checks and changes the description, registers buffers |
    | `action(action) -> action` | the agent's action to the env's, a new tensor; outermost first |
    | `step(td) -> td` | the successor: `observation`, `reward`, `terminated`, `truncated`, `info` |
    | `reset(td, mask) -> td` | initial observations; rows outside `mask` neither change nor count |

    Declare the state of running episodes as class attributes, one `EnvBuffer(shape, dtype, fill)`
    each. They are allocated before `setup`; `mask.fill_(buffer, value)` and
    `mask.assign_(buffer, value)` reset rows of them. Learned state goes into persistent buffers
    that do not depend on `num_envs`; configuration goes into non-persistent ones. Write buffers in
    place and never return them. No hook may read values on the host: use `mask` and `torch.where`.

    Keep constructor arguments under their own names, for `repr` and `spec`. Once the transform is
    attached to an env, they cannot be assigned, unless they are buffers, parameters, or properties
    with a setter.

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

    _standalone = ""
    """The entry of a TensorDict and the hook of the same name, which `forward` calls."""

    _position: str | None = None
    """The name in error messages, such as "transforms[0] (ClipReward)". None before `setup`."""
    _below: Signature
    _above: Signature

    def __init__(self) -> None:
        super().__init__()  # takes no arguments, whereas nn.Module takes any

    def __setattr__(self, name: str, value: Any) -> None:
        if self.attached and name in inspect.signature(type(self).__init__).parameters:
            is_property = isinstance(getattr(type(self), name, None), property)
            if not (is_property or name in self._buffers or name in self._parameters):
                raise AttributeError(
                    refusal(
                        type(self).__name__,
                        f"{name} cannot be assigned after the transform is attached to an env",
                        value,
                        "Make a new env with torchwrap.make(env.spec, ...); "
                        "new.load_state_dict(old.state_dict()) copies what was learned",
                    )
                )
        if isinstance(value, np.ndarray):  # its caller may change it
            value = value.copy()
        super().__setattr__(name, value)

    def setup(self, signature: Signature) -> Signature:
        return signature

    def action(self, action: Value) -> Value:
        return action

    def step(self, td: TensorDict) -> TensorDict:
        return td

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return td

    def forward(self, td: TensorDict) -> TensorDict:
        """Transforms a TensorDict of any batch size outside an env. For stateless transforms.

        One that learns spaces in `setup` belongs into a `TransformedEnv` first.
        """
        key = self._standalone
        if not key:
            fault = "it is stateful and cannot be called standalone"
            raise TypeError(refusal(repr(self), fault, remedy="Put it in a TransformedEnv"))
        copy = td[key].clone()  # because the hook may write to it
        return td.copy().set(key, getattr(self, key)(copy))

    def flat(self) -> Iterator[Transform]:
        """The transforms that this one consists of, innermost first."""
        yield self

    def _register_constants(self, device: torch.device, **values: Any) -> None:
        """Registers arrays, tensors or lists as buffers that are not saved."""
        for name, value in values.items():
            self.register_buffer(name, torch.as_tensor(value, device=device), persistent=False)

    def _register_coefficients(self, box: Box, device: torch.device, **arguments: str) -> None:
        """Registers buffers of a Box's shape and dtype, by name, from arguments of these names."""
        for name, argument in arguments.items():
            value = getattr(self, argument)
            try:
                array = np.broadcast_to(value, box.shape).astype(box.dtype)
            except ValueError:
                must = f"{argument} must broadcast to shape {box.shape}"
                raise ValueError(refusal(type(self).__name__, must, repr(value))) from None
            self._register_constants(device, **{name: array})

    def _attach(self, position: str, signature: Signature) -> Signature:
        """Allocates buffers and sets up. Returns the signature of the layer above."""
        self.allocate(signature.num_envs, signature.device)
        try:
            above = self.setup(signature)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{position}: {error}") from error
        if not isinstance(above, Signature):
            raise TypeError(
                refusal(position, "setup must return the signature", type(above).__name__)
            )
        self._position = position
        self._below = signature
        self._above = above
        return above

    def _hook_name(self, hook: str) -> str:
        return f"{self._position or type(self).__name__}.{hook}"

    def _check_result(self, hook: str, result: Any, device: torch.device) -> None:
        owner = self._hook_name(hook)
        if self._position is None:
            return
        if hook == "action":
            space = self._below.single_action_space
            spaces.check(owner, "the result", space, result, self._below.num_envs, device)
        else:
            # `.to(device)` moves buffers, but not the signature.
            above = self._above.replace(device=device)
            spaces.check_layer(owner, above, result, flags=hook == "step")

    def deployed(self) -> Transform | None:
        """Returns the transform that replaces this one in `deploy`, or None to leave it out.

        None is right for a transform that changes neither observations nor actions. `deploy` takes
        the result of a copy in eval mode, whose env buffers have one row. The transform itself is
        asked too, and must not change. A ValueError says why the transform cannot be deployed, such
        as "it drives the env".
        """
        return self

    def extra_repr(self) -> str:
        names = inspect.signature(type(self).__init__).parameters
        arguments = [f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name)]
        return " ".join(", ".join(arguments).split())  # one line, arrays too

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class ObservationTransform(Transform):
    """Base for transforms of observations: implement `observation`, and `setup` for a new space.

    >>> class Absolute(ObservationTransform):
    ...     def observation(self, observation):
    ...         return observation.abs()
    >>> Absolute()(TensorDict({"observation": torch.tensor([[-1.0]])}, [1]))["observation"]
    tensor([[1.]])
    """

    _standalone = "observation"
    masked_reset = False
    """True if a reset should compute only the rows of the mask: for expensive transforms."""

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


class AugmentedObservation(Transform):
    """Base for transforms that add an entry to the observation.

    A `Dict` holds it under its key, a `Tuple` as its last element; any other observation becomes a
    `Dict` of "obs" and the entry. With `flatten`, all of it is one vector.
    """

    flatten: bool

    def _add_space(
        self,
        signature: Signature,
        key: str,
        entry: Space[Any],
        argument: str = "key",
    ) -> Signature:
        """Returns the signature with the entry's space. Call it in `setup`."""
        below = signature.single_observation_space
        self.is_single = spaces.children(below) is None
        self.entry_key = key
        self.space: Space[Any]  # before flattening
        if isinstance(below, Tuple):
            self.entry_key = str(len(below.spaces))
            self.space = Tuple((*below.spaces, entry))
        else:
            entries = below.spaces if isinstance(below, Dict) else {"obs": below}
            if key in entries:
                must = f"{argument} must differ from the keys of the observation"
                raise ValueError(refusal(type(self).__name__, must, repr(key)))
            if isinstance(below, Dict):
                self.space = spaces.dict_like(below, {key: entry, **entries})
            else:
                self.space = Dict([*entries.items(), (key, entry)])
        above: Space[Any] = self.space
        if self.flatten:
            above = flatten_space(self.space)
            self.dtype = spaces.dtype(above)
        return signature.replace(single_observation_space=above)

    def _add_entry(self, td: TensorDict, entry: Value) -> TensorDict:
        observation = td["observation"]
        parts = {"obs": observation} if self.is_single else dict(observation.items())
        parts[self.entry_key] = entry
        augmented: Any = TensorDict(parts, batch_size=td.batch_size)
        if self.flatten:
            augmented = spaces.flatten(self.space, augmented, self.dtype)
        return td.set("observation", augmented)


class RewardTransform(Transform):
    """Base for transforms of rewards: implement `reward`, from and to `(num_envs, 1)`.

    >>> class Sign(RewardTransform):
    ...     def reward(self, reward):
    ...         return reward.sign()
    >>> Sign()(TensorDict({"reward": torch.tensor([[-3.0]])}, [1]))["reward"]
    tensor([[-1.]])
    """

    _standalone = "reward"

    def reward(self, reward: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement reward(reward).")

    def deployed(self) -> None:
        return None

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("reward", self.reward(td["reward"]))


class ActionTransform(Transform):
    """Base for transforms of actions: implement `action`, and `setup` if the space changes.

    >>> class Flip(ActionTransform):
    ...     def action(self, action):
    ...         return -action
    >>> Flip()(TensorDict({"action": torch.tensor([[0.5]])}, [1]))["action"]
    tensor([[-0.5000]])
    """

    _standalone = "action"

    def action(self, action: Value) -> Value:
        raise NotImplementedError(f"{type(self).__name__} does not implement action(action).")


class Compose(Transform):
    """Several transforms as one, innermost first: actions pass in reverse order.

    It has `len`, iteration, indexing and slicing; a slice is a list. A transform is named after its
    class, and from the second of a class on with its number, so that a key of `state_dict` is
    "NormalizeReward_2.statistics.count". A dict gives other names.

    Args:
        transforms: the transforms, or a dict of them by name. An empty list is the identity.

    >>> from torchwrap import transforms as T
    >>> Compose([T.ClipReward(-1, 1), T.TimeLimit(9)])
    Compose([ClipReward(min_reward=-1, max_reward=1), TimeLimit(max_episode_steps=9)])
    """

    _modules: dict[str, Transform]  # type: ignore[assignment]

    def __init__(self, transforms: Iterable[Transform] | Mapping[str, Transform]) -> None:
        super().__init__()
        if not isinstance(transforms, Iterable):
            raise TypeError(
                refusal("Compose", "transforms must be a list of Transforms", repr(transforms))
            )
        self.is_named = isinstance(transforms, Mapping)
        named = dict(transforms) if isinstance(transforms, Mapping) else _numbered(transforms)
        for position, (name, part) in enumerate(named.items()):
            if not isinstance(part, Transform):
                must = f"transforms[{position}] must be a Transform, not its class or a list"
                raise TypeError(refusal("Compose", must, repr(part)))
            if not str(name).isidentifier() or hasattr(self, name):
                must = "names must be identifiers and not attributes of Compose"
                raise ValueError(refusal("Compose", must, repr(name)))
            self.add_module(name, part)
        flat = list(self.flat())
        if len(set(flat)) < len(flat):
            must = "every transform must occur only once"
            raise ValueError(refusal("Compose", must, flat, "Make a second one"))

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
        for position, transform in enumerate(self):
            name = f"transforms[{position}] ({type(transform).__name__})"
            signature = transform._attach(name, signature)
        return signature

    def action(self, action: Value) -> Value:
        for transform in reversed(self._modules.values()):
            if type(transform).action is not Transform.action:  # most leave actions as they are
                action = transform._run("action", action)
        return action

    def step(self, td: TensorDict) -> TensorDict:
        for transform in self._modules.values():
            td = transform._run("step", td)
        return td

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        for transform in self._modules.values():
            td = transform._run("reset", td, mask)
        return td

    def forward(self, td: TensorDict) -> TensorDict:
        parts = list(self.flat())
        actions = [part for part in parts if isinstance(part, ActionTransform)]
        others = [part for part in parts if not isinstance(part, ActionTransform)]
        for transform in (*others, *reversed(actions)):
            td = transform(td)
        return td

    def flat(self) -> Iterator[Transform]:
        for transform in self:
            yield from transform.flat()

    def __repr__(self) -> str:
        return f"Compose({self.transforms})"


def _numbered(parts: Iterable[Transform]) -> dict[str, Transform]:
    """Transforms by name: the class, and from the second of a class on its number."""
    named: dict[str, Transform] = {}
    for part in parts:
        name = kind = type(part).__name__
        number = 2
        while name in named or hasattr(Compose, name):
            name = f"{kind}_{number}"
            number += 1
        named[name] = part
    return named
