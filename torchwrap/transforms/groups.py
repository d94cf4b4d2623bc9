"""ObservationGroups: several views of one observation, each with its own transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict
from torch import nn

from torchwrap import spaces
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import Compose, Transform


class ObservationGroups(Transform):
    """Makes a `Dict` of named groups from one observation, such as a noisy one for the actor and a clean one for the critic.

    Each group transforms a copy of what comes from below.

    Args:
        groups: transforms of observations by the name of the group, innermost first. An empty group is the raw observation.

    Shape: `observation` becomes a nested TensorDict with one entry per group.

    Raises:
        TypeError: for what is no mapping from names to lists of transforms.
        ValueError: for no group, and for a transform that changes actions, rewards or the ends of episodes: it belongs beside
            the groups.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from torchwrap import transforms as T
    >>> env = TransformedEnv(ScriptedEnv(1, (2,)), ObservationGroups({"actor": [T.ClipObservation(-1, 1)], "critic": []}))
    >>> td = env.reset()
    >>> td["observation", "actor"], td["observation", "critic"]
    (tensor([[0., 1.]]), tensor([[ 0., 10.]]))
    """

    def __init__(self, groups: Mapping[str, Iterable[Transform]]) -> None:
        super().__init__()
        if not isinstance(groups, Mapping) or not all(isinstance(name, str) for name in groups):
            raise TypeError(f"ObservationGroups needs a dict of lists of transforms by name, but got {groups!r}.")
        if not groups:
            raise ValueError("ObservationGroups needs at least one group, but got none.")
        self.parts: Any = nn.ModuleDict({name: Compose(transforms) for name, transforms in groups.items()})

    @property
    def groups(self) -> dict[str, list[Transform] | dict[str, Transform]]:
        """The transforms of each group, innermost first: a list, or a dict if they were given names."""
        return {name: part.transforms for name, part in self.parts.items()}

    def setup(self, signature: Signature) -> Signature:
        found = {}
        for name, part in self.parts.items():
            above = part.setup(signature)
            found[name] = above.single_observation_space
            expected = signature.replace(single_observation_space=found[name], num_streams=above.num_streams)
            if above != expected or not _changes_only_observations(part, signature):
                got = f"{part!r} in group {name!r}: put those of actions, rewards, episode ends and policies beside the groups"
                raise ValueError(f"ObservationGroups needs transforms of observations, but got {got}.")
            signature = signature.replace(num_streams=above.num_streams)
        return signature.replace(single_observation_space=gym_spaces.Dict(found))

    def step(self, td: TensorDict) -> TensorDict:
        return self._grouped(td, lambda part, copied: part.step(copied))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return self._grouped(td, lambda part, copied: part.reset(copied, mask))

    def _grouped(self, td: TensorDict, transform: Callable[[Compose, TensorDict], TensorDict]) -> TensorDict:
        found = {}
        for name, part in self.parts.items():  # each with an observation of its own, which it may write to
            found[name] = transform(part, td.copy().set("observation", td["observation"].clone()))["observation"]
        return td.set("observation", tensordict({name: found[name] for name in sorted(found)}, td.batch_size[0]))


def _changes_only_observations(part: Compose, signature: Signature) -> bool:
    """Whether a step leaves everything else as it is. A copy tries it out, so that nothing is learned."""
    if any(type(transform).action is not Transform.action for transform in part.flat()):
        return False
    n, device = signature.num_envs, signature.device
    flags = torch.zeros(3, n, 1, dtype=torch.bool, device=device).unbind(0)
    others = {"reward": flags[2].float(), "terminated": flags[0], "truncated": flags[1]}
    observation = spaces.zeros(signature.single_observation_space, n, device)
    result = copy.deepcopy(part).step(tensordict({"observation": observation, **others}, n))
    return set(result.keys()) == {"observation", *others} and all(result[name] is value for name, value in others.items())
