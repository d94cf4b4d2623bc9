"""Executor of a compiled collector: a graph of a few steps that write into the storage, run again and again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import Space
from gymnasium.spaces import Box
from tensordict import NestedKey
from torch import Tensor
from torch.fx import Node

from torchwrap import spaces
from torchwrap._compile import replay
from torchwrap._compile.graph import Graph, Program
from torchwrap._compile.host_reset import HostAutoReset
from torchwrap._compile.reads import Reads
from torchwrap._compile.replay import Replay, Run
from torchwrap._compile.trace import outline
from torchwrap._core import nested
from torchwrap._core.buffer_pool import references
from torchwrap._core.graph_hints import as_bytes
from torchwrap._env import policy_state
from torchwrap._env.executor import Collects, Eager
from torchwrap.collector import Collector, Root, Storage

Rows = dict[NestedKey, list[Tensor]]
"""For each key, where each step writes to."""

_LARGE_STORAGE = 2**23  # bytes; two such chunks are in no cache when somebody reads them
_MAX_LENT = 2  # chunks in the memory of a CUDA graph: what the caller holds, and the next one


class _Chunk:
    """Where a chunk is written to.

    Args:
        storage: the storage, time-first.
        rows: for each key, in order, where each step writes to. What a root holds lies in the storage from the start, so no
            step writes it.
        roots: for each leaf of the root, where it lies at each step and after the last one.
    """

    def __init__(self, storage: Storage, rows: Rows, roots: list[list[Tensor]]) -> None:
        self.storage, self.rows, self.roots = storage, rows, roots
        self.replays: dict[Run, Replay] = {}
        self.counts: list[int] = []

    def lend(self) -> Storage:
        """The storage, of which the caller takes views."""
        self.counts = self._references()
        return self.storage

    def is_free(self) -> bool:
        """Whether no view of what was lent is left."""
        return not self.counts or self.counts == self._references()

    def _references(self) -> list[int]:
        return list(map(references, self.storage.values()))


class CompiledCollector(Eager):
    """A rollout as a graph of `unroll` steps. On CUDA all of them are one launch, and what they write is not copied.

    The root that a step acts on lies where it is to be kept: the graph of the step before has written it there.
    """

    def __init__(self, collector: Collector, unroll: int, keywords: dict[str, Any]) -> None:
        env = collector.env
        self.reads = Reads((vars(collector), "env"), (vars(collector), "policy"))
        self.collector, self.static_outputs, self.unroll = collector, keywords["static_outputs"], unroll
        keywords = {**keywords, "part": True}
        self.steps = Graph(self._run_steps, self.reads, streamed=self._streamed, **keywords)
        self.auto_reset = HostAutoReset(env, keywords)
        self.chunks: list[_Chunk] = []  # in whose memory CUDA graphs write
        self.layout: Any = None  # what the pools and the chunks were made for
        self.known: Any = None  # what the programs were looked up for
        self.programs: dict[int, Program] = {}  # by their number of steps
        self.num_roots = self.num_targets = 0  # leaves of a root, and tensors that a step writes to
        root: Root = {
            "observation": spaces.zeros(env.single_observation_space, env.num_envs, env.device),
            **policy_state.initial(env.signature),
        }
        self._allocate(root)
        self._programs(root, self._chunk(root))
        if self.resets_on_host:
            self.auto_reset.prepare()

    def _allocate(self, root: Root) -> None:
        # Another policy may return other keys.
        self.reads.refresh()
        device = self.collector.env.device
        if self.layout != (self.reads.version, device):
            transition = functools.partial(self.collector._transition, step=self.collector.env._step_and_reset)
            self.collector._allocate(outline(transition, (root,), self.reads)[0])
            self.layout, self.chunks = (self.reads.version, device), []

    def _chunk(self, root: Root) -> _Chunk:
        # One that is not lent. A CUDA graph writes to the same memory each time, so there are up to three chunks, each with
        # its own graph. The third one is never lent, but copied.
        if not replay.captures(self.collector.env.device):
            return self._new_chunk(root)
        found = next((chunk for chunk in self.chunks if chunk.is_free()), None)
        if found is None:
            with torch.inference_mode(False):  # because later calls can be outside of it
                found = self._new_chunk(root)
            self.chunks.append(found)
        return found

    def _new_chunk(self, root: Root) -> _Chunk:
        collector = self.collector
        storage = collector._empty()
        rows = {key: collector._pools[key].rows(storage[key]) for key in sorted(storage, key=str)}
        roots = []
        for key, leaf in zip(nested.keys(root), nested.leaves(root), strict=True):
            row = rows.get(key)
            if row and (row[0].shape, row[0].dtype) == (leaf.shape, leaf.dtype):  # a policy may keep another tensor there
                roots.append([*rows.pop(key), torch.empty_like(leaf)])
            else:  # one more than the steps of a graph, so that no graph gets a tensor twice
                spare = [torch.empty_like(leaf) for _ in range(self.unroll + 1)]
                roots.append([spare[step % len(spare)] for step in range(collector.num_steps + 1)])
        return _Chunk(storage, rows, roots)

    def _programs(self, root: Root, chunk: _Chunk) -> tuple[list[Program], list[list[Tensor]]]:
        # What to run one after the other, and the tensors that each of them writes to, in the order of `nested.leaves`.
        keys = list(chunk.rows)
        steps = list(zip(*chunk.rows.values(), *[leaves[1:] for leaves in chunk.roots], strict=True))
        parts = [steps[start : start + self.unroll] for start in range(0, len(steps), self.unroll)]
        # Looked up only if something has changed, because that takes as long as a few steps of few envs.
        while self.known != (known := (self.layout, keys, self.steps.state()[0])):
            build, programs = nested.builder(root), {}
            self.num_roots, self.num_targets = len(chunk.roots), len(steps[0])
            for number, part in {len(part): part for part in (parts[0], parts[-1])}.items():
                targets = [(dict(zip(keys, step, strict=False)), build(iter(step[len(keys) :]))) for step in part]
                programs[number] = self.steps.program(root, tuple(targets))
            self.known, self.programs = known, programs
            # A trace can have met tensors that were not known before, but what a step returns is the same.
            self.layout = self.reads.version, self.collector.env.device
        return [self.programs[len(part)] for part in parts], [list(itertools.chain(*part)) for part in parts]

    def _run_steps(self, root: Root, steps: tuple[tuple[Storage, Root], ...]) -> tuple[dict[str, Tensor], Root]:
        collector, env = self.collector, self.collector.env
        step = env._step_without_reset if self.resets_on_host else env._step_and_reset
        outside = []
        for row, following in steps:
            transition, after = collector._transition(root, step)
            if not collector._fits(transition):
                raise ValueError(
                    "another mode of the policy needs the same keys, shapes and dtypes: make a Collector for each"
                )
            if self.checks_actions:
                outside.append(_outside(env.single_action_space, transition["action"]))
            for key in collector._pools:
                value, target = transition.get(key), row[key] if key in row else _leaf(root, key)
                if value is not target:  # what the root holds lies there already, unless the policy has replaced it
                    target.copy_(as_bytes(value))
            nested.copy_(following, after)
            done, root = transition["next", "done"], following
        flags = {"done": done, "outside": torch.stack(outside).any()} if outside else {"done": done}
        return flags, root

    def _streamed(self, inputs: list[Node]) -> list[Node]:
        # What the graph writes to, if no cache holds the storage and nobody reads it soon: not the graph itself, not the next
        # one, which reads of a root what this one does, and not the host, which resets some rows of it.
        if sum(pool.num_bytes for pool in self.collector._pools.values()) < _LARGE_STORAGE:
            return []
        root, targets = inputs[: self.num_roots], inputs[self.num_roots :]
        is_read = [False] * (self.num_targets - self.num_roots) + [bool(leaf.users) or self.resets_on_host for leaf in root]
        return [node for node, read in zip(targets, itertools.cycle(is_read), strict=False) if not read and _is_result(node)]

    @property
    def checks_actions(self) -> bool:
        """Whether to look for actions out of bounds, as eager mode does on the CPU."""
        env = self.collector.env
        discrete = any(not isinstance(leaf, Box) for _, leaf in spaces.leaves(env.single_action_space))
        return discrete and self.collector.policy is not None and not replay.captures(env.device)

    @property
    def resets_on_host(self) -> bool:
        """Whether the host resets finished envs between the graphs."""
        return self.unroll == 1 and self.auto_reset.enabled

    def collect(self, collector: Collects, root: Any) -> tuple[Storage, Any]:
        self._allocate(root)
        chunk = self._chunk(root)
        (programs, parts), resets_on_host = self._programs(root, chunk), self.resets_on_host
        env, buffers, first = self.collector.env, self.reads.tensors(), [leaves[0] for leaves in chunk.roots]
        num_flags = 1 + self.checks_actions
        outside: list[Tensor] = []

        def run_all(buffers: list[Tensor]) -> Sequence[Tensor]:
            leaves = first
            for (run, build), part in zip(programs, parts, strict=True):
                results = run([*buffers, *leaves, *part])
                leaves = list(results[num_flags:])
                outside.extend(results[1:num_flags])
                if resets_on_host:
                    self.auto_reset(results[0], build(iter(results))[1]["observation"])
            return results

        for target, leaf in zip(first, nested.leaves(root), strict=True):
            target.copy_(leaf)
        run, build = programs[0]
        if not replay.captures(env.device):
            results = run_all(buffers)
        else:
            results = chunk.replays.setdefault(run, Replay(run_all, len(buffers)))(buffers)
        if outside and torch.stack(outside).any():
            space = env.single_action_space
            raise ValueError(f"{env._name()} needs an action in {space}, but got another one from the policy.")
        return self._data(chunk), build(iter(results))[1]

    def _data(self, chunk: _Chunk) -> Storage:
        if chunk not in self.chunks or self.static_outputs:
            return chunk.storage
        if chunk in self.chunks[:_MAX_LENT]:
            return chunk.lend()
        return {key: value.clone() for key, value in chunk.storage.items()}


def _outside(space: Space[Any], action: spaces.Value) -> Tensor:
    # Whether an action is out of bounds. Numbers of a Box are not checked in eager mode either.
    parts = [
        spaces.outside(leaf, action[path] if path else action).any()
        for path, leaf in spaces.leaves(space)
        if not isinstance(leaf, Box)
    ]
    return torch.stack(parts).any()


def _is_result(node: Node) -> bool:
    # Whether all that a graph does with an input is to write to it.
    return all(user.target is torch.ops.aten.copy_.default and user.args[0] is node and not user.users for user in node.users)


def _leaf(root: Root, key: NestedKey) -> Tensor:
    value: Any = root
    for part in key if isinstance(key, tuple) else (key,):
        value = value[part]
    return value  # type: ignore[no-any-return]
