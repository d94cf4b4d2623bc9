"""Collector, rollout and evaluate: chunks of transitions, and the returns of whole episodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchwrap import policy as policies
from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.generators import kept_generators
from torchwrap._core.rows import equal, tensordict
from torchwrap.env import Env, Root, check_is_env
from torchwrap.policy import DECLARED, Policy, act, modules_of
from torchwrap.transforms.episode import RecordEpisodeStatistics

Storage = dict[NestedKey, Tensor]
"""A tensor `(num_steps, num_envs, ...)` per key."""

_PATIENCE = 100_000  # steps that evaluate waits for an episode to end


class Collector:
    """Collects `num_steps` transitions of every env per call: `data = collect()`.

    A call continues from `env.root`, and leaves the root of the next step there, such as for the
    value of the last observation. The first one resets the env, unless it has been reset.

    Args:
        env: the env.
        policy: takes a TensorDict with `observation` and returns it with `action` (and other
            entries to be kept, such as a log probability), or returns the action alone; for a
            `Dict` space, that may be a dict. It may modify its input. None acts at random, by the
            `action_masks` in the observation or the info, if there are any. A recurrent one
            declares its state with `PolicyState`. Another policy can be assigned, but no other
            argument.
        num_steps: transitions per env and call.
        keys: the entries to keep, such as `["observation", "action", ("next", "reward")]`. None
            keeps everything.

    Shape: `data` is `(num_envs, num_steps)`, the last dimension named "time". It is stored
    time-first, each step in one piece.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = ScriptedEnv(2, episode_lengths=3)
    >>> collect = Collector(env, None, num_steps=4, keys=[("next", "reward")])
    >>> data = collect()
    >>> data["next", "reward"].squeeze(-1)
    tensor([[1., 2., 3., 1.],
            [1., 2., 3., 1.]])
    """

    def __init__(
        self,
        env: Env,
        policy: Policy | None,
        num_steps: int,
        *,
        keys: Sequence[NestedKey] | None = None,
    ) -> None:
        _check("Collector", env, policy)
        if keys is not None:
            is_list = isinstance(keys, Sequence) and not isinstance(keys, str)
            if not is_list or not keys or not all(map(_is_key, keys)):
                raise ValueError(
                    refusal(
                        "Collector",
                        "keys must be a non-empty list of strings and tuples of strings",
                        repr(keys),
                    )
                )
        self.env = env
        self.policy = policy
        self.num_steps = validation.integer("Collector", "num_steps", num_steps, at_least=1)
        self.keys = keys
        self._compiled: Callable[[Root], Storage] | None = None

    @torch.no_grad()
    def __call__(self) -> TensorDict:
        """Collects one chunk of transitions."""
        env = self.env
        signature = env.signature
        if env._status.root is None:
            env.reset()
        last = env.root
        keys = policies.keys(signature)
        # A graph fits one layout alone.
        if self._compiled is None or not set(last.keys()).issuperset(keys):
            env._check_root("Collector", last)
        root: Root = {}
        for name in keys:
            root[name] = last[name]
        collect = self._compiled or self._collect
        storage = collect(root)
        names: Any = [None, "time"]
        data = TensorDict({}, [signature.num_envs, self.num_steps], names=names)
        for key, value in storage.items():
            data.set(key, value.transpose(0, 1))
        return data

    @property
    def is_compiled(self) -> bool:
        """Whether `torchwrap.compile` has compiled this collector. A copy of it runs eagerly."""
        return self._compiled is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}

    def _collect(self, root: Root) -> Storage:
        env = self.env
        entries = {**root, **env.unwrapped._root_info()}
        td = tensordict(entries, env.num_envs)
        storage: Storage = {}
        for step in range(self.num_steps):
            transition, td = env.step(act(env, self.policy, td))
            if not storage:  # only a transition tells which keys there are
                for key, leaf in self._select(transition).items():
                    storage[key] = leaf.new_empty(self.num_steps, *leaf.shape)
            for key, value in storage.items():
                row = value[step]
                leaf = transition.get(key, None)
                what = f"{key} of every step"
                spaces.check_tensor("Collector", what, leaf, row.shape, row.dtype, row.device)
                row.copy_(leaf)
        return storage

    def _select(self, transition: TensorDict) -> dict[NestedKey, Tensor]:
        """The leaves of a transition that are kept."""
        known = set(transition.keys(True))
        unknown = [key for key in self.keys or () if key not in known]
        if unknown:
            raise ValueError(
                refusal("Collector", f"keys must be among {sorted(map(str, known))}", unknown)
            )
        kept = transition
        if self.keys is not None:
            kept = transition.select(*self.keys)
        return {key: kept.get(key) for key in kept.keys(True, True)}


def rollout(env: Env, policy: Policy | None, num_steps: int) -> TensorDict:
    """Collects `num_steps` transitions of every env, as one call of a `Collector`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> data = rollout(ScriptedEnv(2, episode_lengths=3), None, 4)
    >>> data["next", "terminated"].shape
    torch.Size([2, 4, 1])
    """
    return Collector(env, policy, num_steps)()


@torch.no_grad()
def evaluate(
    env: Env,
    policy: Policy | None,
    num_episodes: int,
    *,
    seed: int | None = None,
    max_steps: int | None = None,
    progress: bool = False,
) -> TensorDict:
    """Returns and lengths of new episodes, with frozen statistics and the policy in eval mode.

    Each env runs the same number of episodes, at least `num_episodes` in all, so that short ones
    are not over-represented. The env is reset and stepped: pass a separate one, made by
    `make(env.spec)` and `load_state_dict`.

    Args:
        env: the env. Its (innermost) `RecordEpisodeStatistics` gives the return, or the sum of its
            rewards if it has none.
        policy: as for `Collector`.
        num_episodes: rounded up to a multiple of `num_envs`.
        seed: for the reset. None continues the env's random streams.
        max_steps: stops after this number of steps of every env, with the episodes that have ended
            by then.
        progress: whether to show a progress bar of tqdm.

    Returns:
        A TensorDict `(episodes,)`, env after env, with `episode_return` float32, `episode_length`
        and `env_index` int64; and with `episode_<name>` float32 for each of the `metrics` of its
        `RecordEpisodeStatistics`.

    Raises:
        ValueError: for a policy that carries state from call to call, which no episode resets:
            two calls at the start, with the same root and global generators, differ.
        RuntimeError: with no `max_steps`, if an episode does not end within 100,000 steps, or four
            times the env's own limit.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = ScriptedEnv(2, episode_lengths=(1, 2))  # whose returns are 1, and 1 + 2
    >>> evaluate(env, None, 4)["episode_return"]
    tensor([1., 3., 3., 1.])
    """
    _check("evaluate", env, policy)
    validation.integer("evaluate", "num_episodes", num_episodes, at_least=1)
    if max_steps is not None:
        validation.integer("evaluate", "max_steps", max_steps, at_least=1)
    validation.flag("evaluate", "progress", progress)
    num_envs = env.num_envs
    per_env = -(-num_episodes // num_envs)
    keys: dict[str, Any] = {}
    for recorder in reversed(RecordEpisodeStatistics.of(env)):  # the innermost has the env's return
        keys |= recorder.keys
    return_key = keys.pop("return", None)
    keys.pop("length", None)
    width = 2 + len(keys)
    totals = torch.zeros(num_envs, width, dtype=torch.float64, device=env.device)
    episodes = totals.new_zeros(num_envs, per_env + 1, width)  # the last: beyond those asked for
    counts = torch.zeros(num_envs, dtype=torch.int64, device=env.device)
    indices = torch.arange(num_envs, device=env.device)
    with eval_mode(env, *modules_of(policy)), _progress_bar(progress, num_envs * per_env) as bar:
        td = env.reset(seed=seed)
        if policy is not None:
            _check_repeats(env, policy, td)
        for step in itertools.count(1):
            transition, td = env.step(act(env, policy, td))
            successor = transition["next"]
            totals[:, :1] += successor["reward"]
            totals[:, 1] += 1
            if return_key is not None:
                totals[:, :1] = successor[return_key]
            for column, key in enumerate(keys.values(), 2):
                totals[:, column] = successor[key].squeeze(-1)
            done = successor["done"]
            episodes[indices, counts] = totals
            counts = (counts + done.squeeze(-1)).clamp(max=per_env)
            totals = totals.masked_fill(done, 0)
            if bar is not None:
                bar.update(int(counts.sum()) - bar.n)
            if step == max_steps or bool((counts == per_env).all()):
                break
            if max_steps is None and step % _PATIENCE == 0:
                _check_lengths(env, totals[counts < per_env, 1])
    is_complete = torch.arange(per_env, device=env.device) < counts.unsqueeze(-1)
    returns, lengths, *metrics = episodes[:, :per_env][is_complete].unbind(1)
    columns = {"episode_return": returns.float(), "episode_length": lengths.long()}
    columns["env_index"] = indices.repeat_interleave(counts)
    for name, values in zip(keys, metrics, strict=True):
        columns[f"episode_{name}"] = values.float()
    return TensorDict(columns, [len(returns)])  # type: ignore[arg-type]


def _check_repeats(env: Env, policy: Policy, root: TensorDict) -> None:
    """Raises if two calls with the same root and global generators return different actions."""
    actions = []
    for _ in range(3):  # the first one may fill caches
        with kept_generators():
            actions.append(act(env, policy, root.clone())["action"])
    _, first, second = actions
    if not equal(first, second, 1e-5):
        must = "policy must return the same action in two calls with the same root and generators"
        remedy = f"{DECLARED}, and draw from PyTorch's global generator"
        raise ValueError(refusal("evaluate", must, remedy=remedy))


def _check_lengths(env: Env, lengths: Tensor) -> None:
    """Raises if a running episode has become too long."""
    longest = int(lengths.max())
    if longest >= max(_PATIENCE, 4 * (env.signature.max_episode_steps or 0)):
        raise RuntimeError(
            refusal(
                "evaluate",
                "every episode must end",
                f"one of {env!r} that has taken {longest} steps so far",
                "Put transforms.TimeLimit on the env, or pass max_steps to evaluate",
            )
        )


@contextlib.contextmanager
def eval_mode(*roots: torch.nn.Module) -> Iterator[None]:
    """Puts modules in eval mode, and each back in its own mode in the end."""
    modes = {}
    for root in roots:
        for module in root.modules():
            modes[module] = getattr(module, "training", False)  # frozen TorchScript has no mode
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _progress_bar(show: bool, total: int) -> Any:
    if not show:
        return contextlib.nullcontext()
    from tqdm import tqdm  # an optional dependency

    return tqdm(total=total, unit="episode")


def _check(owner: str, env: Any, policy: Any) -> None:
    check_is_env(owner, env)
    if policy is not None:
        validation.function(owner, "policy", policy)


def _is_key(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(isinstance(part, str) for part in parts)
