"""Collector, rollout and evaluate: chunks of transitions, and the returns of whole episodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import policy as policies
from torchwrap import spaces
from torchwrap._core import rows, validation
from torchwrap._core.rows import tensordict
from torchwrap.env import Env, Step
from torchwrap.policy import DECLARED, Policy, act, modules_of
from torchwrap.spaces import Value
from torchwrap.transforms.episode import RecordEpisodeStatistics

Root = dict[str, Value]  # by key: `observation`, and the state of a recurrent policy
Storage = dict[NestedKey, Tensor]  # a tensor `(num_steps, num_envs, ...)` per key

_NEXT_ROOT = "pass the second result of the last step or collection, `data, td = collect(td)`"
_PATIENCE = 100_000  # steps that evaluate waits for an episode to end


class Collector:
    """Collects `num_steps` transitions of every env per call: `data, td = collect(td)`.

    Args:
        env: the env.
        policy: takes a TensorDict with `observation` and returns it with `action` (and whatever else is to be kept, such as a
            log probability), or returns the action alone. It may modify its input. None acts at random. A recurrent one
            declares its state with `PolicyState`.
        num_steps: transitions per env and call.
        keys: what to keep, such as `["observation", "action", ("next", "reward"), ("next", "done")]`. None keeps everything.
        progress: whether calls show a progress bar of tqdm. A rollout that is one CUDA graph shows none.

    Shape: `data` is `(num_envs, num_steps)`, the last dimension named "time". It is stored time-first, each step in one piece.

    >>> from torchwrap.testing import ScriptedEnv
    >>> collect = Collector(ScriptedEnv(2, episode_lengths=3), None, num_steps=4, keys=[("next", "reward")])
    >>> data, td = collect()
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
        progress: bool = False,
    ) -> None:
        _check("Collector", env, policy)
        listed = (
            isinstance(keys, Sequence) and not isinstance(keys, str) and all(map(_is_key, keys))
        )
        if keys is not None and not (listed and keys):
            raise ValueError(
                f"Collector needs keys as a non-empty list of strings and tuples of strings, but got {keys!r}."
            )
        self.env = env
        self.policy = policy
        self.num_steps = validation.integer("Collector", "num_steps", num_steps, at_least=1)
        self.keys = keys
        self.progress = validation.flag("Collector", "progress", progress)
        self._compiled: Callable[[Root], tuple[Storage, Root]] | None = (
            None  # takes the place of `_collect`
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("env", "num_steps", "keys") and name in vars(self):
            fault = f"Collector.{name} is fixed at construction, but got {value!r}"
            raise AttributeError(f"{fault}: make a new Collector. Only `policy` can be set.")
        super().__setattr__(name, value)

    @torch.no_grad()
    def __call__(self, td: TensorDict | None = None) -> tuple[TensorDict, TensorDict]:
        """Collects one chunk.

        Args:
            td: the root to start from, of the last reset, step or call, as you left it, or a copy. None resets the env.

        Returns:
            data: the transitions.
            td: the root of the next step.
        """
        env = self.env
        td = env.reset() if td is None else td
        self._check_root(td, env._check_ready("a rollout"))
        vars(env)["_unfinished"] = "collection"  # nn.Module.__setattr__ would take longer
        root = {key: td[key] for key in ("observation", *policies.keys(env.signature))}
        storage, root = (self._compiled or self._collect)(root)
        data = TensorDict({}, [env.signature.num_envs, self.num_steps], names=[None, "time"])  # type: ignore[list-item]
        for key, value in storage.items():
            data.set(key, value.transpose(0, 1))
        return data, env._finish(root)

    @property
    def is_compiled(self) -> bool:
        """Whether `torchwrap.compile` has compiled this collector. A copy of a compiled collector runs eagerly."""
        return self._compiled is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}

    # The computation of a call, without checks.

    def _collect(self, root: Root) -> tuple[Storage, Root]:
        storage: Storage = {}
        with progress_bar(self.progress, self.num_steps, "step") as advance:
            for step in range(self.num_steps):
                transition, root = self._transition(
                    root, self.env._compiled or self.env._step_and_reset
                )
                if not storage:  # only a transition tells which keys there are
                    kept = self._kept(transition)
                    storage = {
                        key: leaf.new_empty(self.num_steps, *leaf.shape)
                        for key, leaf in kept.items()
                    }
                for key, value in storage.items():
                    value[step].copy_(transition.get(key))
                advance(1)
        return storage, root

    def _transition(self, root: Root, step: Step) -> tuple[TensorDict, Root]:
        env = self.env
        info = env.unwrapped._root_info() if env._has_root_info else {}
        td = act(env, self.policy, tensordict({**root, **info}, env.num_envs))
        env._check_step_input(td)
        state = policies.read(env._label, env.signature, td) if env.signature.policy_state else {}
        successor, observation = step(td["action"], True)
        following = {"observation": observation, **(env._carry(state, successor) if state else {})}
        return td.set("next", successor), following

    def _kept(self, transition: TensorDict) -> dict[NestedKey, Tensor]:
        known = set(transition.keys(True))
        if unknown := [key for key in self.keys or () if key not in known]:
            raise ValueError(
                f"Collector needs keys among {sorted(map(str, known))}, but got {unknown}."
            )
        kept = transition if self.keys is None else transition.select(*self.keys)
        return {key: kept.get(key) for key in kept.keys(True, True)}

    def _check_root(self, td: object, last: TensorDict) -> None:
        """Raises unless `td` is the last root, or another one with its observation."""
        env, needed = self.env, 'Collector needs a TensorDict with "observation" to start from'
        if not isinstance(td, TensorDictBase):
            remedy = f": {_NEXT_ROOT}" if isinstance(td, tuple) else ""
            raise TypeError(f"{needed}, but got {type(td).__name__}{remedy}.")
        if others := sorted(
            set(td.keys())
            - {"observation", "action", "next", "info", *policies.keys(env.signature)}
        ):
            got = f"the keys {others} too, which no step would carry on: {DECLARED}"
            raise ValueError(f"Collector needs a root of {env._name()}, but got {got}.")
        if "observation" not in td.keys():
            raise ValueError(f"{needed}, but got keys {sorted(td.keys())}.")
        if td is last:
            return
        if "next" in td.keys():
            got = f'a TensorDict with "next", which has been stepped: {_NEXT_ROOT}'
            raise ValueError(f"Collector needs a root, but got {got}.")
        space = env.single_observation_space
        spaces.check(
            env._label, "a root observation", space, td["observation"], env.num_envs, env.device
        )
        if not _equal(td["observation"], spaces.to_device(last["observation"], env.device)):
            needed = f"the root that the last reset, step or collection of {env._name()} returned"
            raise ValueError(
                f"Collector needs {needed}, but got a stale one, with another observation: {_NEXT_ROOT}."
            )


def rollout(
    env: Env, policy: Policy | None, num_steps: int, td: TensorDict | None = None
) -> tuple[TensorDict, TensorDict]:
    """Collects `num_steps` transitions of every env: one call of a `Collector`, with the same arguments.

    >>> from torchwrap.testing import ScriptedEnv
    >>> data, td = rollout(ScriptedEnv(2, episode_lengths=3), None, 4)
    >>> data["next", "terminated"].shape
    torch.Size([2, 4, 1])
    """
    return Collector(env, policy, num_steps)(td)


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
    """Returns and lengths of new episodes, with the statistics of every transform frozen, and the policy in eval mode.

    Each env runs the same number of episodes, at least `num_episodes` in all, so that short ones are not over-represented.
    The env is reset first and left where the last episode ends: give it a sibling of the training env, with `load_state_dict`.

    Args:
        env: the env. Its `RecordEpisodeStatistics` gives the return, or the sum of its rewards if it has none.
        policy: as for `Collector`.
        num_episodes: rounded up to a multiple of `num_envs`.
        seed: for the reset. None continues the env's random streams.
        max_steps: stops after this number of steps of every env, with the episodes that have ended by then.
        progress: whether to show a progress bar of tqdm.

    Returns:
        A TensorDict `(episodes,)` with `episode_return` float32 and `episode_length` int64, env after env; and with
        `episode_<name>` float32 for each of the `metrics` of its `RecordEpisodeStatistics`.

    Raises:
        RuntimeError: with no `max_steps`, if an episode does not end within 100,000 steps, or four times the env's own limit.

    >>> from torchwrap.testing import ScriptedEnv
    >>> evaluate(ScriptedEnv(2, episode_lengths=(1, 2)), None, 4)["episode_return"]  # rewards 1, and 1 + 2
    tensor([1., 3., 3., 1.])
    """
    _check("evaluate", env, policy)
    validation.integer("evaluate", "num_episodes", num_episodes, at_least=1)
    if max_steps is not None:
        validation.integer("evaluate", "max_steps", max_steps, at_least=1)
    validation.flag("evaluate", "progress", progress)
    patience = max(_PATIENCE, 4 * (env.signature.max_episode_steps or 0))
    records = RecordEpisodeStatistics.of(env)
    keys = records[-1].keys if records else {}
    metrics = [name for name in keys if name not in ("return", "length")]
    running_return, running_length = torch.zeros(
        2, env.num_envs, dtype=torch.float64, device=env.device
    )
    per_env, episodes = (
        -(-num_episodes // env.num_envs),
        [list[list[float]]() for _ in range(env.num_envs)],
    )
    modes = {
        module: module.training for part in (env, *modules_of(policy)) for module in part.modules()
    }
    steps = 0
    try:
        for module in modes:
            module.training = False
        td = env.reset(seed=seed)
        with progress_bar(progress, per_env * env.num_envs, "episode") as advance:
            while steps != max_steps and any(
                waiting := [len(episode) < per_env for episode in episodes]
            ):
                transition, td = env.step(act(env, policy, td))
                steps += 1
                following = transition["next"]
                running_return += following["reward"].squeeze(-1)
                running_length += 1
                if keys:
                    running_return.copy_(following[keys["return"]].squeeze(-1))
                if max_steps is None and steps % _PATIENCE == 0:
                    longest = int(running_length[torch.tensor(waiting, device=env.device)].max())
                    if longest >= patience:
                        got = f"an episode of {env!r} has taken {longest} steps so far"
                        remedy = (
                            "put transforms.TimeLimit on the env, or pass max_steps to evaluate"
                        )
                        raise RuntimeError(
                            f"evaluate needs episodes that end, but {got}: {remedy}."
                        )
                done = following["done"].squeeze(-1)
                values = [following[keys[name]].squeeze(-1) for name in metrics]
                numbers = torch.arange(env.num_envs, device=env.device)
                ended = torch.stack([numbers, running_return, running_length, *values], 1)[done]
                for row, *totals in ended.tolist():
                    if waiting[int(row)]:
                        episodes[int(row)].append(totals)
                        advance(1)
                running_return.masked_fill_(done, 0)
                running_length.masked_fill_(done, 0)
    finally:
        for module, mode in modes.items():
            module.training = mode
    found = torch.tensor(list(itertools.chain(*episodes)), dtype=torch.float64, device=env.device)
    totals, lengths, *values = found.view(-1, 2 + len(metrics)).unbind(1)
    columns = {"return": totals.float(), "length": lengths.long()}
    columns |= {name: value.float() for name, value in zip(metrics, values, strict=True)}
    return TensorDict(
        {f"episode_{name}": column for name, column in columns.items()}, batch_size=[len(totals)]
    )


@contextlib.contextmanager
def progress_bar(show: bool, total: int, unit: str) -> Iterator[Callable[[int], Any]]:
    """A function that advances a progress bar of tqdm, or does nothing."""
    if not show:
        yield lambda number: None
        return
    from tqdm import tqdm  # an optional dependency

    with tqdm(total=total, unit=unit) as bar:
        yield bar.update


def _check(owner: str, env: Any, policy: Any) -> None:
    if not isinstance(env, Env):
        remedy = (
            ": pass its `.env`" if isinstance(getattr(env, "env", None), Env) else ""
        )  # of an adapter
        raise TypeError(f"{owner} needs an Env, but got {type(env).__name__}{remedy}.")
    if policy is not None and not callable(policy):
        raise TypeError(f"{owner} needs a callable policy, or None, but got {policy!r}.")


def _equal(first: Value, second: Value) -> bool:
    pairs = zip(rows.leaves(first), rows.leaves(second), strict=False)
    same = rows.flatten(first, []) == rows.flatten(second, [])
    return same and all(
        one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)
        for one, other in pairs
    )


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (
        isinstance(key, tuple) and all(isinstance(part, str) for part in key)
    )
