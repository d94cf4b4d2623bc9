"""Executor of a compiled collector: a graph of a few steps that write into the storage, run again and again."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from gymnasium import Space
from gymnasium.spaces import Box
from tensordict import NestedKey
from torch import Tensor

from torchwrap import spaces
from torchwrap._compile.graph import Graph, Program
from torchwrap._compile.host_reset import HostAutoReset
from torchwrap._compile.reads import Reads
from torchwrap._compile.replay import Replay, Run
from torchwrap._core import nested
from torchwrap._core.graph_hints import as_bytes
from torchwrap._env import policy_state
from torchwrap._env.executor import Collects, Eager
from torchwrap.collector import Collector, Root, Storage

Rows = dict[NestedKey, list[Tensor]]
"""For each key, where each step writes to."""


class CompiledCollector(Eager):
    """A rollout as a graph of `unroll` steps. On CUDA all of them are one launch.

    The root that a step acts on lies where it is to be kept: the graph of the step before has written it there.
    """

    def __init__(self, collector: Collector, unroll: int, keywords: dict[str, Any]) -> None:
        env = collector.env
        self.reads = Reads((vars(collector), "env"), (vars(collector), "policy"))
        self.collector, self.static_outputs, self.unroll = collector, keywords["static_outputs"], unroll
        keywords = {**keywords, "part": True}
        self.transition = Graph(functools.partial(collector._transition, step=env._step_and_reset), self.reads, **keywords)
        self.steps = Graph(self._run_steps, self.reads, **keywords)
        self.auto_reset = HostAutoReset(env, keywords)
        self.replays: dict[Run, Replay] = {}
        self.version = 0  # of what is read, when the storage was laid out
        root: Root = {
            "observation": spaces.zeros(env.single_observation_space, env.num_envs, env.device),
            **policy_state.initial(env.signature),
        }
        self._allocate(root)
        self._programs(root, *(self.static or self._storage(root))[1:])
        if self.resets_on_host:
            self.auto_reset.prepare()

    def _allocate(self, root: Root) -> None:
        # Another policy may return other keys.
        self.reads.refresh()
        if self.version != self.reads.version:
            self.collector._allocate(self.transition.trace(root).result[0])
            self.version = self.reads.version
            # A CUDA graph writes into the same storage each time; on the CPU each call has its own.
            self.static = self._storage(root) if self.collector.env.device.type == "cuda" else None

    def _storage(self, root: Root) -> tuple[Storage, Rows, list[list[Tensor]]]:
        # The storage, time-first; where each step writes to; and for each leaf of the root, where it lies at each step and
        # after the last one. If it is kept, it lies in the storage from the start, and no step writes it.
        collector = self.collector
        storage = collector._empty()
        rows = {key: collector._pools[key].rows(value) for key, value in storage.items()}
        roots = []
        for key, leaf in zip(nested.keys(root), nested.leaves(root), strict=True):
            # One more than the steps of a graph, so that no graph gets a tensor twice.
            spare, row = [torch.empty_like(leaf) for _ in range(self.unroll + 1)], rows.get(key)
            if row and (row[0].shape, row[0].dtype) == (leaf.shape, leaf.dtype):  # a policy may keep another tensor there
                roots.append([*rows.pop(key), spare[0]])
            else:
                roots.append([spare[step % len(spare)] for step in range(collector.num_steps + 1)])
        return storage, rows, roots

    def _programs(self, root: Root, rows: Rows, roots: list[list[Tensor]]) -> tuple[list[Program], list[list[Tensor]]]:
        # What to run one after the other, and the tensors that each of them writes to, in the order of `nested.leaves`.
        keys, build = sorted(rows, key=str), nested.builder(root)
        columns = [*[rows[key] for key in keys], *[leaves[1:] for leaves in roots]]
        steps = list(zip(*columns, strict=True))
        chunks = [steps[start : start + self.unroll] for start in range(0, len(steps), self.unroll)]
        version, programs = None, {}
        while version != self.reads.version:  # a trace can meet tensors that were not known before
            version = self.reads.version
            for number, chunk in {len(chunk): chunk for chunk in (chunks[0], chunks[-1])}.items():
                targets = [(dict(zip(keys, step, strict=False)), build(iter(step[len(keys) :]))) for step in chunk]
                programs[number] = self.steps.program(root, tuple(targets))
        return [programs[len(chunk)] for chunk in chunks], [list(itertools.chain(*chunk)) for chunk in chunks]

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

    @property
    def checks_actions(self) -> bool:
        """Whether to look for actions out of bounds, as eager mode does on the CPU."""
        env = self.collector.env
        discrete = any(not isinstance(leaf, Box) for _, leaf in spaces.leaves(env.single_action_space))
        return discrete and self.collector.policy is not None and env.device.type == "cpu"

    @property
    def resets_on_host(self) -> bool:
        """Whether the host resets finished envs between the graphs."""
        return self.unroll == 1 and self.auto_reset.enabled

    def collect(self, collector: Collects, root: Any) -> tuple[Storage, Any]:
        self._allocate(root)
        storage, rows, roots = self.static or self._storage(root)
        (programs, chunks), resets_on_host = self._programs(root, rows, roots), self.resets_on_host
        env, buffers, first = self.collector.env, self.reads.tensors(), [leaves[0] for leaves in roots]
        count, num_flags = len(buffers), 1 + self.checks_actions
        outside: list[Tensor] = []

        def run_all(tensors: list[Tensor]) -> list[Tensor]:
            buffers, leaves = tensors[:count], tensors[count:]
            for target, leaf in zip(first, leaves, strict=True):
                target.copy_(leaf)
            leaves = first
            for (run, build), chunk in zip(programs, chunks, strict=True):
                results = run([*buffers, *leaves, *chunk])
                leaves = list(results[num_flags:])
                outside.extend(results[1:num_flags])
                if resets_on_host:
                    self.auto_reset(results[0], build(iter(results))[1]["observation"])
            return [*storage.values(), *results]

        run, build = programs[0]
        whole: Run = run_all
        if self.static:
            whole = self.replays.setdefault(run, Replay(run_all, count, self.static_outputs))
        tensors = iter(whole([*buffers, *nested.leaves(root)]))
        data = {key: next(tensors) for key in storage}
        if outside and torch.stack(outside).any():
            space = env.single_action_space
            raise ValueError(f"{env._name()} needs an action in {space}, but got another one from the policy.")
        return data, build(tensors)[1]


def _outside(space: Space[Any], action: spaces.Value) -> Tensor:
    # Whether an action is out of bounds. Numbers of a Box are not checked in eager mode either.
    parts = [
        spaces.outside(leaf, action[path] if path else action).any()
        for path, leaf in spaces.leaves(space)
        if not isinstance(leaf, Box)
    ]
    return torch.stack(parts).any()


def _leaf(root: Root, key: NestedKey) -> Tensor:
    value: Any = root
    for part in key if isinstance(key, tuple) else (key,):
        value = value[part]
    return value  # type: ignore[no-any-return]
