"""Whole chunks of experience: Rollout to learn from, evaluate to judge by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import arguments, masks, spaces, tree
from torchwrap.env import Env
from torchwrap.memory import Recycled
from torchwrap.transforms.episode import RecordEpisodeStatistics

Policy = Callable[[TensorDict], Any]
"""Takes where to act, a TensorDict `(num_envs,)` with `observation`; gives it with `action`, or the action itself."""

Advance = Callable[[spaces.Value], tuple[TensorDict, spaces.Value]]
"""What an env does with an action: the successor, and where to act next."""

Key = str | tuple[str, ...]
Row = dict[Key, Tensor]
"""Where a transition is stored: a tensor `(num_envs, ...)` for each key."""


def _check(owner: str, env: Any, policy: Any) -> None:
    if not isinstance(env, Env):
        raise TypeError(f"{owner} needs an Env, but got {type(env).__name__}.")
    if policy is not None and not callable(policy):
        raise TypeError(f"{owner} needs a policy that can be called, or None, but got {policy!r}.")


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(part, str) for part in key))


def _act(env: Env, policy: Policy | None, td: TensorDict) -> TensorDict:
    if policy is None:
        return td.set("action", env.sample_action())
    given = policy(td)
    parts = spaces.children(env.single_action_space)  # an action may be a TensorDict too
    if isinstance(given, TensorDictBase) and (parts is None or set(given.keys()) != set(parts)):
        return given if given is td else td.update(given)
    return td.set("action", given)


class Rollout:
    """Collects `num_steps` transitions of every env at a call: `data, td = collect(td)`.

    Args:
        env: the env.
        policy: from a TensorDict with `observation` to one with `action` (and whatever else is to be kept, such as a log
            probability), or to the action alone; random actions where None.
        num_steps: how many.
        keys: what to keep, such as `["observation", "action", ("next", "reward"), ("next", "done")]`; all where None. Images
            without `("next", "observation")` take half the memory.

    Shape: `(num_envs, num_steps)`, the last dimension named "time". It is stored with time first, so a step is written in
    one piece.

    >>> from torchwrap.testing import ScriptedEnv
    >>> collect = Rollout(ScriptedEnv(2, episode_lengths=3), None, num_steps=4, keys=[("next", "reward")])
    >>> data, td = collect()
    >>> data["next", "reward"].squeeze(-1)
    tensor([[1., 2., 3., 1.],
            [1., 2., 3., 1.]])
    """

    def __init__(self, env: Env, policy: Policy | None, num_steps: int, *, keys: Sequence[Key] | None = None) -> None:
        _check("Rollout", env, policy)
        listed = isinstance(keys, Sequence) and not isinstance(keys, str) and all(map(_is_key, keys))
        if keys is not None and not (listed and keys):
            raise ValueError(f"Rollout needs keys as a list of at least one, but got {keys!r}.")
        self.env = env
        self.policy = policy
        self.num_steps = arguments.integer("Rollout", "num_steps", num_steps, at_least=1)
        self.keys = keys
        self._memory: dict[Key, Recycled] = {}

    @torch.no_grad()
    def __call__(self, td: TensorDict | None = None) -> tuple[TensorDict, TensorDict]:
        """The transitions from `td` on, as a step or an earlier call left it (a reset where None), and where to act next."""
        env = self.env
        td = env.reset() if td is None else td
        env._check_begun("a rollout")
        if not isinstance(td, TensorDictBase) or "observation" not in td.keys():
            kind = TypeError if not isinstance(td, TensorDictBase) else ValueError
            raise kind(f'Rollout needs a TensorDict with "observation" to begin with, but got {td!r}.')
        what = "a rollout from an observation"
        spaces.check(env._name(), what, env.single_observation_space, td["observation"], env.num_envs, env.device)
        storage, observation = self._collect(td["observation"])
        data = TensorDict({}, batch_size=[self.num_steps, env.num_envs])
        for key, value in storage.items():
            data.set(key, value)
        data = data.transpose(0, 1)
        data.names = [None, "time"]
        return data, env._hand_out(observation)

    def _collect(self, observation: spaces.Value) -> tuple[Row, spaces.Value]:
        # Everything that computes: the storage, where time comes first, and where to act next.
        known = None
        if not self._memory:  # only the first transition of all tells what there is to keep
            known = self._transition(observation, self.env._advance)
            self._remember(known[0])
        storage, rows, places = self._storage(observation)
        build = tree.builder(observation)
        here, *behind = [build(iter(leaves)) for leaves in zip(*places, strict=True)]
        _copy(observation, here)
        for step, following in enumerate(behind):
            known = known or self._transition(here, self.env._advance)
            self._store(*known, {key: row[step] for key, row in rows.items()}, here, following)
            known, here = None, following
        return storage, here

    def _transition(self, observation: spaces.Value, advance: Advance) -> tuple[TensorDict, spaces.Value]:
        env = self.env
        td = _act(env, self.policy, TensorDict({"observation": observation}, batch_size=[env.num_envs]))
        env._check_action(td)
        successor, observation = advance(td["action"])
        return td.set("next", successor), observation

    def _remember(self, transition: TensorDict) -> None:
        known, keys = set(transition.keys(True)), self.keys
        unknown = [key for key in keys or () if key not in known]
        if unknown:
            raise ValueError(f"Rollout needs keys among {sorted(map(str, known))}, but got {unknown}.")
        kept = transition if keys is None else transition.select(*keys)
        for key, leaf in kept.items(True, True):
            self._memory[key] = Recycled((self.num_steps, *leaf.shape), leaf.dtype, self.env.device)

    def _storage(self, observation: spaces.Value) -> tuple[Row, dict[Key, list[Tensor]], list[list[Tensor]]]:
        # Tensors with time first; where in them each step goes; and where each leaf of the observations lies, of that behind
        # the last step too. Those that are kept lie in the storage from the beginning, and are none of what a step writes.
        for memory in self._memory.values():
            memory.device = self.env.device
        storage = {key: memory.empty() for key, memory in self._memory.items()}
        rows = {key: self._memory[key].rows(value) for key, value in storage.items()}
        places = []
        paths = sorted(path for path, _ in spaces.leaves(self.env.single_observation_space))
        for path, leaf in zip(paths, tree.leaves(observation), strict=True):
            key = ("observation", *path) if path else "observation"
            two, row = [torch.empty_like(leaf) for _ in range(2)], rows.get(key)
            if row and (row[0].shape, row[0].dtype) == (leaf.shape, leaf.dtype):  # a policy may keep another there
                places.append([*rows.pop(key), two[0]])
            else:
                places.append([two[step % 2] for step in range(self.num_steps + 1)])
        return storage, rows, places

    def _store(
        self, transition: TensorDict, after: spaces.Value, row: Row, here: spaces.Value, following: spaces.Value
    ) -> Tensor:
        # Writes a transition to its row, and where to act next behind where it was. Gives whether an episode ended.
        for key in self._memory:
            value, place = transition.get(key), row[key] if key in row else _leaf(here, key)
            if value is not place:  # an observation is where it is to be kept, unless the policy has put another in its place
                place.copy_(masks.as_bytes(value))
        _copy(after, following)
        return transition["next", "done"]

    def __getstate__(self) -> dict[str, Any]:
        # What is compiled stands before the method of its name, and belongs to the rollout it was made for.
        return {name: value for name, value in self.__dict__.items() if not callable(getattr(type(self), name, None))}

    def __repr__(self) -> str:
        return f"Rollout({self.env!r}, num_steps={self.num_steps})"


def _leaf(observation: spaces.Value, key: Key) -> Tensor:
    for part in key[1:] if isinstance(key, tuple) else ():
        observation = observation[part]
    return observation


def _copy(value: spaces.Value, place: spaces.Value) -> None:
    for source, target in zip(tree.leaves(value), tree.leaves(place), strict=True):
        target.copy_(source)


def rollout(env: Env, policy: Policy | None, num_steps: int, td: TensorDict | None = None) -> tuple[TensorDict, TensorDict]:
    """`num_steps` transitions of every env, and where to act next: one call of a `Rollout`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> data, td = rollout(ScriptedEnv(2, episode_lengths=3), None, 4)
    >>> data["next", "terminated"].shape
    torch.Size([2, 4, 1])
    """
    return Rollout(env, policy, num_steps)(td)


@torch.no_grad()
def evaluate(env: Env, policy: Policy | None, num_episodes: int) -> TensorDict:
    """Returns and lengths of fresh episodes, with every transform's statistics frozen.

    Each env runs the same number of episodes, at least `num_episodes` in all: the first to end are not over-represented. The
    env is reset first and left wherever it is then; give the one you train on a sibling, with `load_state_dict`.

    Args:
        env: the env. The return is that of its `RecordEpisodeStatistics`, or of its rewards where it has none.
        policy: as for `rollout`.
        num_episodes: how many, rounded up to a multiple of `num_envs`.

    Shape: a TensorDict `(episodes,)` with `episode_return` float32 and `episode_length` int64, env after env.

    >>> from torchwrap.testing import ScriptedEnv
    >>> evaluate(ScriptedEnv(2, episode_lengths=(1, 2)), None, 4)["episode_return"]  # rewards 1, and 1 + 2
    tensor([1., 3., 3., 1.])
    """
    _check("evaluate", env, policy)
    arguments.integer("evaluate", "num_episodes", num_episodes, at_least=1)
    records = [module for module in env.modules() if isinstance(module, RecordEpisodeStatistics)]
    running_return, running_length = torch.zeros(2, env.num_envs, 1, device=env.device)
    per_env = -(-num_episodes // env.num_envs)
    returns = torch.zeros(env.num_envs, per_env, device=env.device)
    lengths = torch.zeros(env.num_envs, per_env, dtype=torch.int64, device=env.device)
    ended = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
    modes = {module: module.training for module in env.modules()}
    env.eval()
    try:
        td = env.reset()
        while bool((ended < per_env).any()):
            transition, td = env.step(_act(env, policy, td))
            following = transition["next"]
            running_return += following["reward"]
            running_length += 1
            if records:
                running_return = following[records[-1].return_key].clone()
            rows = (following["done"].squeeze(-1) & (ended < per_env)).nonzero().squeeze(-1)
            returns[rows, ended[rows]] = running_return[rows, 0]
            lengths[rows, ended[rows]] = running_length[rows, 0].long()
            ended += following["done"].squeeze(-1)
            running_return.masked_fill_(following["done"], 0)
            running_length.masked_fill_(following["done"], 0)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return TensorDict({"episode_return": returns.flatten(), "episode_length": lengths.flatten()}, [returns.numel()])
