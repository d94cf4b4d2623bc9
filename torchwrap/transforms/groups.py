"""Stacks of transforms side by side: on the same observation, as groups, or on the entries of a Dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict
from torch import nn

from torchwrap._core.rows import RowMask, tensordict
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import Compose, Transform


class _Parts(Transform):
    """Base for named stacks of transforms, each of which gets a separate observation."""

    def __init__(self, groups: Mapping[str, Iterable[Transform]]) -> None:
        super().__init__()
        owner = type(self).__name__
        if not isinstance(groups, Mapping) or not all(isinstance(name, str) for name in groups):
            raise TypeError(
                f"{owner} needs a dict of lists of transforms by name, but got {groups!r}."
            )
        if not groups:
            raise ValueError(f"{owner} needs at least one group, but got none.")
        self.parts: Any = nn.ModuleDict(
            {name: Compose(transforms) for name, transforms in groups.items()}
        )

    @property
    def groups(self) -> dict[str, list[Transform] | dict[str, Transform]]:
        """The transforms by name, innermost first: a list, or a dict if they were given names."""
        return {name: part.transforms for name, part in self.parts.items()}

    def _set_up(
        self, signature: Signature, below: Mapping[str, Space[Any]]
    ) -> tuple[dict[str, Space[Any]], Signature]:
        """The spaces above by name, and the signature with the random streams that are in use then."""
        found = {}
        for name, part in self.parts.items():
            own = signature.replace(single_observation_space=below[name])
            above = part.setup(own)
            found[name] = above.single_observation_space
            expected = own.replace(
                single_observation_space=found[name], num_streams=above.num_streams
            )
            acts = [
                each
                for each in part.flat()
                if each.deployed() is None or type(each).action is not Transform.action
            ]
            if above != expected or acts:
                got = f"{part!r} in {name!r}: put transforms of actions, rewards, episode ends and policies next to it"
                raise ValueError(
                    f"{type(self).__name__} needs transforms of observations, but got {got}."
                )
            signature = signature.replace(num_streams=above.num_streams)
        return found, signature

    def _observation_of(self, name: str, observation: Any) -> Value:
        return observation

    def _joined(self, td: TensorDict, found: dict[str, Value]) -> Value:
        return tensordict({name: found[name] for name in sorted(found)}, td.batch_size[0])

    def step(self, td: TensorDict) -> TensorDict:
        return self._apart(td, lambda part, own: part.step(own))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return self._apart(td, lambda part, own: part.reset(own, mask))

    def _apart(
        self, td: TensorDict, transform: Callable[[Compose, TensorDict], TensorDict]
    ) -> TensorDict:
        found, observation = {}, td["observation"]
        for (
            name,
            part,
        ) in self.parts.items():  # each with an observation of its own, which it may write to
            own = td.copy().set("observation", self._observation_of(name, observation).clone())
            found[name] = transform(part, own)["observation"]
        return td.set("observation", self._joined(td, found))


class ObservationGroups(_Parts):
    """Makes a `Dict` of named groups from one observation, such as a noisy one for the actor and a clean one for the critic.

    Each group transforms a copy of what comes from below. Transforms of actions, rewards and the ends of episodes belong
    beside the groups.

    Args:
        groups: transforms of observations by the name of the group, innermost first. An empty group is the raw observation.

    Shape: `observation` becomes a nested TensorDict with one entry per group.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from torchwrap import transforms as T
    >>> env = TransformedEnv(ScriptedEnv(1, (2,)), ObservationGroups({"actor": [T.ClipObservation(-1, 1)], "critic": []}))
    >>> td = env.reset()
    >>> td["observation", "actor"], td["observation", "critic"]
    (tensor([[0., 1.]]), tensor([[ 0., 10.]]))
    """

    def setup(self, signature: Signature) -> Signature:
        found, above = self._set_up(
            signature, dict.fromkeys(self.parts, signature.single_observation_space)
        )
        return above.replace(single_observation_space=gym_spaces.Dict(found))


class ObservationKeys(_Parts):
    """Applies a stack of transforms to each of some entries of a `Dict` observation. Other entries are unchanged.

    Args:
        groups: transforms of observations by the key of the entry, innermost first.

    Shape: a `Dict` with the same keys.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from torchwrap import transforms as T
    >>> space = gym_spaces.Dict(kind=gym_spaces.Discrete(3), stock=gym_spaces.Box(-9, 9, (2,)))
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=space), ObservationKeys({"stock": [T.ClipObservation(-1, 1)]}))
    >>> env.single_observation_space
    Dict('kind': Discrete(3), 'stock': Box(-1.0, 1.0, (2,), float32))
    """

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        if not isinstance(below, gym_spaces.Dict) or not set(self.parts) <= set(below):
            raise ValueError(
                f"ObservationKeys needs a Dict observation with {list(self.parts)}, but got {below}."
            )
        found, above = self._set_up(signature, below.spaces)
        pairs = [
            (key, found.get(key, part)) for key, part in below.spaces.items()
        ]  # pairs keep their order
        return above.replace(single_observation_space=gym_spaces.Dict(pairs))

    def _observation_of(self, name: str, observation: Any) -> Value:
        return observation[name]

    def _joined(self, td: TensorDict, found: dict[str, Value]) -> Value:
        return tensordict({**dict(td["observation"].items()), **found}, td.batch_size[0])
