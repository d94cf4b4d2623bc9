"""AlternatingCollector: the policy acts for one group of envs while the simulators of the others step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import nested
from torchwrap._core.graph_hints import as_bytes
from torchwrap._env import checks, policy_state
from torchwrap.collector import Collector, Policy, Root, Storage, act, as_data
from torchwrap.env import Env

Result = tuple[TensorDict, spaces.Value]
"""The successor, and the observation to act on next."""


class AlternatingCollector:
    """Collects as `Collector`, from groups of envs of which one steps while the policy acts for another.

    Each group steps in its own thread, and with two groups this is double-buffered sampling. It is for simulators that
    compute outside of Python: EnvPool, ALE's vector env, Gymnasium's envs in processes, JAX. It saves time only where cores
    are free for the policy and for the simulators at once; otherwise smaller batches cost some. Compare it with `Collector`.

    The transitions of a group are those of its env, stepped alone with the same actions. The policy runs in the caller's
    thread, for group 0, 1, ..., and 0 again, so results depend on the seeds and not on timing. Statistics, such as those of
    `NormalizeObservation`, are learned by each group alone. `torchwrap.compile` compiles the groups.

    Args:
        envs: the groups: at least two envs on simulators on the host, with the same spaces, on one device. Each needs another
            `first_index`, so that no two envs of the groups have the same random numbers.
        policy, num_steps, keys: as for `Collector`. The policy is given one group at a time.

    Shape: `data` is `(total_envs, num_steps)`, group after group, the last dimension named "time". It is stored time-first.

    Raises:
        TypeError, ValueError: for arguments of the wrong kind, and in the first call for keys that no transition has.

    >>> import torchwrap as tw
    >>> groups = [tw.make("CartPole-v1", 2, backend="gymnasium", first_index=first) for first in (0, 2)]
    >>> collect = AlternatingCollector(groups, lambda td: (td["observation"][:, 2] > 0).long(), num_steps=4)
    >>> data, td = collect(torch.cat([env.reset(seed=0) for env in groups]))
    >>> data["next", "observation"].shape
    torch.Size([4, 4, 4])
    """

    def __init__(
        self, envs: Sequence[Env], policy: Policy | None, num_steps: int, *, keys: Sequence[NestedKey] | None = None
    ) -> None:
        _check_groups(envs)
        self.envs, self.policy = tuple(envs), policy
        self._storage = Collector(envs[0], policy, num_steps, keys=keys)
        self._sizes = [env.num_envs for env in envs]

    @property
    def num_envs(self) -> int:
        """The number of envs of all groups."""
        return sum(self._sizes)

    @property
    def num_steps(self) -> int:
        """Transitions per env and call."""
        return self._storage.num_steps

    @torch.no_grad()
    def __call__(self, td: TensorDict | None = None) -> tuple[TensorDict, TensorDict]:
        """Collects one chunk.

        If a group raises, or the policy, or Ctrl-C interrupts the call, the other groups finish the step that they are in,
        and no thread is left. The next call then asks for a reset of each env.

        Args:
            td: the root to start from: what the last call returned, as you left it, or a copy; or `torch.cat` of what the
                last reset of each env returned. None resets the envs.

        Returns:
            data: the transitions.
            td: the root of the next step, of all envs.

        Raises:
            TypeError, ValueError: for another root, such as an earlier one, before anything has changed.
        """
        td = TensorDict.cat([env.reset() for env in self.envs]) if td is None else td
        roots = self._split(td)
        for env in self.envs:
            env._position.unfinished = "collection"
        with ExitStack() as stack:
            # New ones, which take over the caller's `torch.get_num_threads()`. They start before there is any work, because an
            # interrupt in between leaves a thread that nothing waits for.
            threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in self.envs]
            wait([thread.submit(int) for thread in threads])
            storage, roots = self._collect(roots, threads)
        whole = {key: torch.cat([root[key] for root in roots]) for key in roots[0]}
        following = nested.tensordict(whole, self.num_envs)
        for env, root in zip(self.envs, following.split(self._sizes), strict=True):
            env._root(dict(root.items()))
        return as_data(storage, self.num_steps, self.num_envs), following

    def _split(self, td: TensorDict) -> list[Root]:
        if not isinstance(td, TensorDictBase) or td.batch_size != (self.num_envs,):
            got = f"{type(td).__name__} of shape {tuple(td.shape)}" if hasattr(td, "shape") else type(td).__name__
            needed = f"AlternatingCollector needs the root of all {self.num_envs} envs, a TensorDict"
            raise TypeError(f"{needed}, but got {got}: `torch.cat` makes it of the roots of the groups.")
        roots: list[Root] = []
        for env, root in zip(self.envs, td.split(self._sizes), strict=True):
            checks.root(env, root, env._check_has_reset("a rollout"))
            roots.append({key: root[key] for key in ("observation", *policy_state.keys(env.signature))})
        return roots

    def _collect(self, roots: list[Root], threads: list[ThreadPoolExecutor]) -> tuple[Storage, list[Root]]:
        storage: Storage = {}
        rows: dict[NestedKey, list[Tensor]] = {}
        running = [self._start(*group) for group in zip(self.envs, roots, threads, strict=True)]
        for step in range(self.num_steps):
            transitions = []
            for group, (env, (td, state, result)) in enumerate(zip(self.envs, running, strict=True)):
                successor, observation = result.result()
                roots[group] = env._following(state, successor, observation)
                transitions.append(td.set("next", successor))
                if step < self.num_steps - 1:
                    running[group] = self._start(env, roots[group], threads[group])
            if not storage:
                self._storage._allocate(TensorDict.cat(transitions))
                storage = self._storage._empty()
                rows = {key: self._storage._pools[key].rows(value) for key, value in storage.items()}
            for key, row in rows.items():  # while all groups step
                for part, transition in zip(row[step].split(self._sizes), transitions, strict=True):
                    part.copy_(as_bytes(transition.get(key)))
        return storage, roots

    def _start(
        self, env: Env, root: Root, thread: ThreadPoolExecutor
    ) -> tuple[TensorDict, policy_state.State, Future[Result]]:
        # A copy, because the policy may write its next actions, for another group, into the same tensors.
        td = act(env, self.policy, nested.tensordict(dict(root), env.num_envs)).clone()
        checks.step_input(env, td)
        # The current device and stream, like the modes, are those of a thread.
        stream = torch.cuda.current_stream(env.device) if env.device.type == "cuda" else None
        future = thread.submit(_step, env, td["action"], torch.is_inference_mode_enabled(), stream)
        return td, policy_state.read(env, td), future

    def __repr__(self) -> str:
        return f"AlternatingCollector({list(self.envs)!r}, num_steps={self.num_steps})"


def _step(env: Env, action: spaces.Value, inference: bool, stream: torch.cuda.Stream | None) -> Result:
    with torch.inference_mode(inference), torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
        return env._executor.step(env, action)


def _check_groups(envs: Sequence[Env]) -> None:
    if not isinstance(envs, Sequence) or len(envs) < 2 or not all(isinstance(env, Env) for env in envs):
        raise TypeError(f"AlternatingCollector needs a list of at least two envs, but got {envs!r}.")
    if not all(env.host_stepped for env in envs):  # PyTorch's tracers, which native envs use, are not safe in threads
        needed = "AlternatingCollector needs envs that a simulator outside of PyTorch steps"
        raise ValueError(f"{needed}, but got {envs!r}: Collector steps native envs, and gains more from larger batches.")
    signatures = [env.signature for env in envs]
    kinds = [
        (each.single_observation_space, each.single_action_space, each.device, [*each.policy_state]) for each in signatures
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"AlternatingCollector needs envs of the same spaces, device and policy state, but got {envs!r}.")
    if any(env.is_compiled and env.device.type == "cuda" for env in envs):
        raise ValueError(f"AlternatingCollector needs envs on CUDA that are not compiled, but got {envs!r}.")
    indices = [index for each in signatures for index in range(each.first_index, each.first_index + each.num_envs)]
    if len(set(indices)) < len(indices):
        got = [each.first_index for each in signatures]
        remedy = [0, *itertools.accumulate(each.num_envs for each in signatures[:-1])]
        raise ValueError(
            f"AlternatingCollector needs envs whose global indices differ, but got first_index {got}: make them with {remedy}."
        )
