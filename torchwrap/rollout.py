"""Whole chunks of experience: rollout to learn from, evaluate to judge by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import arguments, spaces
from torchwrap.env import Env
from torchwrap.transforms.episode import RecordEpisodeStatistics

Policy = Callable[[TensorDict], Any]
"""Takes where to act, a TensorDict `(num_envs,)` with `observation`; gives it with `action`, or the action itself."""


def _act(env: Env, policy: Policy | None, td: TensorDict) -> TensorDict:
    if policy is None:
        return td.set("action", env.sample_action())
    given = policy(td)
    parts = spaces.children(env.single_action_space)  # an action may be a TensorDict too
    if isinstance(given, TensorDictBase) and (parts is None or set(given.keys()) != set(parts)):
        return given if given is td else td.update(given)
    return td.set("action", given)


@torch.no_grad()
def rollout(env: Env, policy: Policy | None, num_steps: int, td: TensorDict | None = None) -> tuple[TensorDict, TensorDict]:
    """`num_steps` transitions of every env, and where to act next.

    Args:
        env: the env.
        policy: from a TensorDict with `observation` to one with `action` (and whatever else is to be kept, such as a log
            probability), or to the action alone; random actions where None.
        num_steps: how many.
        td: where to begin, as `env.step` or an earlier rollout left it; a reset where None.

    Shape: `(num_envs, num_steps)`, the last dimension named "time". It is stored with time first, so a step is written in
    one piece.

    >>> from torchwrap.testing import ScriptedEnv
    >>> data, td = rollout(ScriptedEnv(2, episode_lengths=3), None, 4)
    >>> data["next", "reward"].squeeze(-1)
    tensor([[1., 2., 3., 1.],
            [1., 2., 3., 1.]])
    """
    arguments.integer("rollout", "num_steps", num_steps, at_least=1)
    td = env.reset() if td is None else td
    storage: Any = None
    columns: list[tuple[Any, tuple[Tensor, ...]]] = []
    for step in range(num_steps):
        transition, td = env.step(_act(env, policy, td))
        if storage is None:
            storage = transition.apply(
                lambda leaf: leaf.new_empty(num_steps, *leaf.shape), batch_size=[num_steps, env.num_envs]
            )
            columns = [(key, leaf.unbind(0)) for key, leaf in storage.items(True, True)]
        for key, rows in columns:
            rows[step].copy_(transition.get(key))
    data = storage.transpose(0, 1)
    data.names = [None, "time"]
    return data, td


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
