"""A GPU rehearsed without one: no step copies from the host, is read by it, or waits for it.

`fake_device` runs in a separate process and finds faults; `ALLOWED` lists the accepted ones. The
tests in `test_cuda.py` run on the CUDA graphs of `cuda_graphs`. Planted defects show that both find
each kind.
"""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import catalogue
import numpy as np
import pytest
import torch
from cuda_graphs import simulated
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

GPU = Path(__file__).parent
ROOT = Path(__file__).parents[2]
ALLOWED = {  # (phase, kind, where): the reason
    (
        None,
        None,
        "torchwrap/transforms/checker.py",
    ): "PassiveEnvChecker reads values by design: it names what is wrong.",
    (
        "elapsed_steps",
        "host read",
        "torchwrap/env.py",
    ): "The setter checks the numbers that a caller sets.",
    (
        "elapsed_steps",
        "host read",
        "torchwrap/_core/rows.py",
    ): "The setter looks whether the observation shows the time.",
    (
        "state_dict",
        "host read",
        "torchwrap/statistics.py",
    ): "load_state_dict checks the statistics that it loads.",
    (
        "evaluate",
        "host read",
        "torchwrap/collector.py",
    ): "evaluate looks whether every episode has ended.",
    (
        "evaluate",
        "bool mask as an index",
        "torchwrap/collector.py",
    ): "The result has a row for each finished episode.",
}


# Planted defects. Each is in a step that would work on a GPU, or, where it says so, would not.


class Faulty(T.RewardTransform):
    """A transform whose `reward` is a fault, with a tensor that `.to` does not move."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def setup(self, signature):
        self.own = torch.ones(signature.num_envs, 1, device=signature.device)
        return signature

    def reward(self, reward):
        return self.fault(self, reward)


def waits(transform, reward):
    torch.get_device_module(reward.device).synchronize()
    return reward


def branches(transform, reward):
    return reward if reward.max() > 3 else 2 * reward


def writes_masked_rows(transform, reward):
    reward = reward.clone()
    reward[reward > 1] = reward[
        :1, 0
    ]  # since 2.15, PyTorch fills with a number without looking at the mask
    return reward


def finds_rows(transform, reward):
    return reward.index_fill(0, (reward[:, 0] > 1).nonzero()[:, 0], 1)


FAULTS = {
    "operands on two devices": lambda transform, reward: (
        reward + transform.own
    ),  # raises on a GPU, once it is moved
    "copy from the host": lambda transform, reward: (
        reward * torch.from_numpy(np.ones((1, 1), np.float32)).to(reward.device)
    ),
    "copy to the host": lambda transform, reward: reward * float(reward.cpu().numpy()[0, 0]),
    "host read": branches,
    "shape depends on values": finds_rows,
    "bool mask as an index": writes_masked_rows,
    "tensor made on the host": lambda transform, reward: (
        reward * torch.tensor(2.0, device=reward.device)
    ),
    "wait for the device": waits,
}


def faulty_env(fault, device="cpu"):
    return tw.TransformedEnv(ScriptedEnv(4, device=device), Faulty(fault))


class DrawsGlobally(FuncEnv):
    """Broadcasting functions that draw from the global generator, which torch.vmap would refuse."""

    observation_space = action_space = Box(-1, 1, (1,))
    broadcasts = True

    def initial(self, rng, params=None):
        return {"x": torch.rand(*rng.env.shape, 1, device=rng.env.device)}


class Sums(ScriptedEnv):
    """An env that makes a tensor at each step."""

    def _step(self, action):
        successor = super()._step(action)
        return successor.set(
            "reward", successor["reward"] + torch.ones(self.num_envs, 1).to(self.device)
        )


def reading_policy(device="cpu"):
    return ScriptedEnv(4, device=device), lambda td: td["observation"][:, :6].clamp(
        -td["observation"].max().item(), 1
    )


CASES = {
    **{kind: functools.partial(faulty_env, fault) for kind, fault in FAULTS.items()},
    "no fault": functools.partial(faulty_env, lambda transform, reward: 2 * reward),
    "env": functools.partial(Sums, 4),
    "policy": reading_policy,
    "global generator": functools.partial(tw.FunctionalEnv, DrawsGlobally(), 4),
    "bridge": functools.partial(catalogue.gymnasium_cartpole, 4),
}


def is_allowed(finding, rule):
    phase, kind, where = rule
    return (
        phase in (None, finding["phase"])
        and kind in (None, finding["kind"])
        and where in finding["where"]
    )


@pytest.mark.long
@pytest.mark.full
def test_library_and_examples_on_a_gpu_do_nothing_that_waits_and_planted_faults_are_found():
    command = [sys.executable, GPU / "fake_device.py", Path(__file__).stem]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    lines = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=env
    ).stdout
    *findings, total = map(json.loads, lines.splitlines())
    assert total["cases"] > 70 + 2 * len(CASES) and total["operators"] > 300 * total["cases"]
    found = [finding for finding in findings if finding["case"] not in CASES]
    assert [
        finding for finding in found if not any(is_allowed(finding, rule) for rule in ALLOWED)
    ] == []
    assert [
        rule for rule in ALLOWED if not any(is_allowed(finding, rule) for finding in found)
    ] == []

    def planted(case, phase, way="moved"):
        counts = Counter()
        for finding in findings:
            if (finding["way"], finding["case"], finding["phase"]) == (way, case, phase):
                counts[finding["kind"]] += finding["count"]
        return counts

    for kind in FAULTS:
        assert planted(kind, "step")[kind] == 1, kind
    assert planted("no fault", "step") == planted("no fault", "collect") == {}
    assert planted("env", "step") == {"tensor made on the host": 1, "copy from the host": 1}
    assert planted("policy", "collect") == {"host read": 1}
    (refused,) = [
        one for one in findings if (one["way"], one["case"]) == ("made", "global generator")
    ]
    assert "DrawsGlobally.initial: must not draw from PyTorch's global" in refused["operator"]
    for way in ("made", "moved"):  # the bridge waits for the actions and for the rows that ended
        step = planted("bridge", "step", way)
        assert step["copy to the host"] == 2 and step["copy from the host"] == 0
        assert step["host read"] <= 1  # whether a row has ended
        assert (
            step["copy without a wait"] == 5
        )  # observations, rewards, two flags, and initial observations
        assert planted("bridge", "masked reset", way)["copy to the host"] == 1
        assert planted("bridge", "reset", way)["copy to the host"] <= 1


# Graphs that are simulated.


def captured(function):
    """A graph of the function, and what the function returned while it was captured."""
    with simulated(), torch.cuda.device("cuda"), torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            result = function()
    return graph, result


def test_simulated_graph_computes_in_its_memory_when_it_is_replayed():
    parameter = torch.nn.Parameter(torch.ones(2))
    target = torch.zeros(2)
    graph, result = captured(lambda: (target.add_(parameter), parameter.cumsum(0))[1])
    assert target.tolist() == [0, 0] and result.tolist() != [1, 2]
    for number, total in ((1, 1), (3, 4)):
        with torch.no_grad():
            parameter.fill_(number)
        graph.replay()
        assert target.tolist() == [total] * 2 and result.tolist() == [number, 2 * number]
    parameter.data = torch.full((2,), 5.0)
    graph.replay()
    assert result.tolist() == [3, 6]


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), torch.nonzero, lambda x: x[x > 0]],
    ids=["item", "rows", "mask"],
)
def test_simulated_graph_cannot_be_read_by_the_host(read):
    target = torch.zeros(2)
    with pytest.raises(RuntimeError, match="capturing"):
        captured(lambda: read(target))
