"""Stacks of transforms side by side: on the same observation, or on the entries of a Dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gymnasium.spaces import Dict
from tensordict import TensorDict
from torch import nn

from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import Compose, Transform


class _Groups(Transform):
    """Base for named stacks of transforms, each of which gets a separate observation."""

    def __init__(self, groups: Mapping[str, Iterable[Transform]]) -> None:
        super().__init__()
        is_mapping = isinstance(groups, Mapping) and len(groups) > 0
        if not is_mapping or not all(isinstance(name, str) for name in groups):
            must = "groups must be a dict of lists of transforms by name, and not empty"
            raise TypeError(refusal(type(self).__name__, must, repr(groups)))
        self.parts: Any = nn.ModuleDict()
        self.part_of: dict[str, Compose] = {}
        for name, transforms in groups.items():
            # Names of modules have no dot, and are no attributes of nn.ModuleDict.
            key = name.replace(".", "_") or "_"
            while hasattr(self.parts, key) or (key != name and key in groups):
                key += "_"
            if not isinstance(transforms, Compose):  # whose names stay
                transforms = Compose(transforms)
            self.parts[key] = self.part_of[name] = transforms

    @property
    def groups(self) -> dict[str, list[Transform] | dict[str, Transform]]:
        """The transforms by name, innermost first: a list, or a dict if they were given names."""
        return {name: part.transforms for name, part in self.part_of.items()}

    def _entries(self, below: Any) -> dict[str, Any]:
        """The entries of the output, before their transforms: of a space or of its values."""
        raise NotImplementedError

    def setup(self, signature: Signature) -> Signature:
        spaces = self._entries(signature.single_observation_space)
        for name, part in self.part_of.items():
            above = part.setup(signature.replace(single_observation_space=spaces[name]))
            spaces[name] = above.single_observation_space
            signature = signature.replace(single_observation_space=spaces[name])
            if above != signature or any(map(_is_foreign, part.flat())):
                must = "groups must have transforms of observations only"
                remedy = "Put transforms of actions, rewards, episode ends and policies beside it"
                got = f"{part!r} in {name!r}"
                raise ValueError(refusal(type(self).__name__, must, got, remedy))
        # A list of pairs keeps the order of the keys.
        return signature.replace(single_observation_space=Dict(list(spaces.items())))

    def step(self, td: TensorDict) -> TensorDict:
        return self._transform("step", td)

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        return self._transform("reset", td, mask)

    def _transform(
        self,
        hook: str,
        td: TensorDict,
        *mask: RowMask,
    ) -> TensorDict:
        entries = self._entries(td["observation"])
        for name, part in self.part_of.items():
            # A copy, because a stack may write to its input, which others read.
            below = td.set("observation", entries[name].clone())
            td = getattr(part, hook)(below, *mask)
            entries[name] = td["observation"]
        return td.set("observation", tensordict(entries, td.batch_size[0]))


def _is_foreign(transform: Transform) -> bool:
    """True if a transform serves something else than observations."""
    try:
        is_left_out = transform.deployed() is None
    except ValueError:  # it cannot be deployed
        is_left_out = False
    return is_left_out or type(transform).action is not Transform.action


class ObservationGroups(_Groups):
    """Makes a `Dict` of named groups from one observation, such as for an actor and its critic.

    Each group transforms a copy of the observation below. Transforms of actions, rewards and the
    ends of episodes belong beside the groups.

    Args:
        groups: transforms of observations by the name of the group, innermost first. An empty group
            is the raw observation.

    Shape: `observation` becomes a nested TensorDict with one entry per group.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from torchwrap import transforms as T
    >>> groups = ObservationGroups({"actor": [T.ClipObservation(-1, 1)], "critic": []})
    >>> td = TransformedEnv(ScriptedEnv(1, (2,)), groups).reset()
    >>> td["observation", "actor"], td["observation", "critic"]
    (tensor([[0., 1.]]), tensor([[ 0., 10.]]))
    """

    def _entries(self, below: Any) -> dict[str, Any]:
        return dict.fromkeys(sorted(self.part_of), below)


class ObservationKeys(_Groups):
    """Applies stacks of transforms to some entries of a `Dict` observation. Others are unchanged.

    Args:
        groups: transforms of observations by the key of the entry, innermost first. Names of
            modules in `state_dict` are those of `nn.ModuleDict`: "a.b" becomes "a_b".

    Shape: a `Dict` with the same keys.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from torchwrap import transforms as T
    >>> from gymnasium.spaces import Box, Dict, Discrete
    >>> env = ScriptedEnv(1, observation_space=Dict(kind=Discrete(3), stock=Box(-9, 9, (2,))))
    >>> env = TransformedEnv(env, ObservationKeys({"stock": [T.ClipObservation(-1, 1)]}))
    >>> env.single_observation_space
    Dict('kind': Discrete(3), 'stock': Box(-1.0, 1.0, (2,), float32))
    """

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        if not isinstance(below, Dict) or not set(self.part_of) <= set(below):
            must = "groups must name entries of a Dict observation"
            raise ValueError(refusal("ObservationKeys", must, f"{list(self.part_of)} for {below}"))
        return super().setup(signature)

    def _entries(self, below: Any) -> dict[str, Any]:
        return dict(below.items())
