"""Functions that several test files share: to step envs, to compare and to copy results."""

import contextlib
import copy
import importlib.util
import io
import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict

from torchwrap import transforms as T

# Tolerances, relative and absolute. aot_eager runs the operators of eager mode, except that it
# computes masked sums in another order, in float64, and rounds them to float32. Inductor fuses,
# contracts a * b + c, and has its own sine.
AOT = 2e-6
INDUCTOR = 1e-4


class OtherVectorEnv(SyncVectorEnv):
    """A vector env that `from_gymnasium` steps as a whole, as it does all but `SyncVectorEnv`."""


class RewardTerms(T.Transform):
    """Adds two terms of the reward to the info, `twice` and `("terms", "half")`, and a vector."""

    def step(self, td):
        reward = td["reward"]
        info = td.get("info", TensorDict({}, td.batch_size))
        info["twice"] = 2 * reward
        info["terms", "half"] = reward / 2
        info["vector"] = reward.repeat(1, 2)
        return td.set("info", info)


def discrete(count, dtype):
    """A Discrete of any dtype: before Gymnasium 1.3, its constructor takes none."""
    space = Discrete(count)
    space.dtype = np.dtype(dtype)
    return space


# Stepping.


def buffers(module):
    """A copy of all buffers."""
    return TensorDict({name: buffer.clone() for name, buffer in module.named_buffers()}, [])


def steps(env, num_steps, td):
    """Yields the results of `env.step`, with 23 random actions that are repeated."""
    actions = [env.sample_action() for _ in range(min(num_steps, 23))]
    for step in range(num_steps):
        td.set("action", actions[step % 23].clone())
        for name in env.signature.policy_state:
            td["next", name] = td[name] + 1
        transition, td = env.step(td)
        yield transition, td


def play(env, num_steps, td):
    """Transitions, roots and buffers as (num_steps, ...) tensors, and the last root."""
    seen = []
    for transition, following in steps(env, num_steps, td):
        step = TensorDict({"transition": transition, "td": following}, []).clone()
        seen.append(step.set("buffers", buffers(env)))
        td = following
    return torch.stack(seen), td


def from_reset(collect, seed=0):
    """What a collector returns after a reset."""
    collect.env.reset(seed=seed)
    return collect()


def after(env, num_steps, seed=0):
    """The root some steps after a reset."""
    td = env.reset(seed=seed)
    for _, following in steps(env, num_steps, td):
        td = following
    return td


# Comparing.


def assert_same(first, second, tolerance=0.0):
    """Two TensorDicts have the same keys, shapes and dtypes, and close values."""
    both = [dict(td.items(True, True)) for td in (first, second)]
    torch.testing.assert_close(*both, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_files(given, expected):
    """Two checkpoints hold the same, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(given, expected)
    elif hasattr(expected, "keys"):
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_files(given[name], value)
    elif isinstance(expected, list | tuple):
        assert len(given) == len(expected)
        for one, other in zip(given, expected, strict=True):
            assert_same_files(one, other)
    else:
        assert given == expected


def assert_plays_the_same(eager, compiled, num_steps, tolerance=0.0):
    """Two envs play the same from a seed; returns the successors."""
    expected, _ = play(eager, num_steps, eager.reset(seed=0))
    given, _ = play(compiled, num_steps, compiled.reset(seed=0))
    assert_same(given, expected, tolerance)
    return expected["transition", "next"]


def assert_transition_and_masked_reset_are_a_step(env, other, num_steps=10):
    """`step_without_reset` and a masked reset of the finished rows give the result of `step`.

    Returns in how many steps episodes ended.
    """
    td = env.reset(seed=0)
    other.reset(seed=0)
    ended = 0
    for _ in range(num_steps):
        action = env.sample_action()
        expected, root = other.step(action.clone())
        transition, td = env.step_without_reset(td.set("action", action))
        assert_same(transition["next"], expected["next"])
        assert (td["observation"] == transition["next", "observation"]).all()
        td = env.reset(mask=transition["next", "done"].squeeze(-1))
        assert_same(td, root.select("observation"))
        ended += int(transition["next", "done"].any())
    return ended


def leaves(*values):
    """The tensors of TensorDicts."""
    return [leaf for value in values for leaf in value.values(True, True)]


def assert_no_overlap(*values):
    """No two leaves share memory: each keeps what is written to it. The values are overwritten."""

    def fill(index, leaf):
        return index % 2 if leaf.dtype == torch.bool else index

    tensors = list(enumerate(leaves(*values)))
    for index, leaf in tensors:
        leaf.fill_(fill(index, leaf))
    for index, leaf in tensors:
        assert (leaf == fill(index, leaf)).all()


class Held:
    """Tensors that a caller keeps, and a copy of each from when it was returned."""

    def __init__(self):
        self.pairs = []

    def add(self, *values):
        self.pairs += [(leaf, leaf.clone()) for leaf in leaves(*values)]

    def assert_unchanged(self):
        assert self.pairs and all((leaf == before).all() for leaf, before in self.pairs)


@contextlib.contextmanager
def numpy_2_promotion():
    """NEP 50 under NumPy 1 too: a float32 with a Python float stays float32, as our envs assume.

    torchwrap itself runs outside, because its results must not depend on NumPy's version.
    """
    promotion = "weak"
    if hasattr(np, "_get_promotion_state"):  # NumPy from 2.2 on knows no other
        promotion = np._get_promotion_state()
    if promotion == "weak":
        yield
        return
    np._set_promotion_state("weak")
    try:
        yield
    finally:
        np._set_promotion_state(promotion)


# Copying.


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_file(snapshot):
    """A snapshot that was saved and loaded."""
    file = io.BytesIO()
    torch.save(snapshot.to_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle}
each_copy = pytest.mark.parametrize("replicate", COPIES.values(), ids=COPIES)


# Statistics.


def ks_distance(sample, cdf):
    """The Kolmogorov-Smirnov distance of a sample `(n,)` from a continuous distribution."""
    ordered = cdf(torch.as_tensor(sample, dtype=torch.float64).sort().values)
    fractions = torch.arange(len(sample) + 1, dtype=torch.float64) / len(sample)
    above = fractions[1:] - ordered
    below = ordered - fractions[:-1]
    return torch.maximum(above, below).max().item()


# Parameters.


def params(cases, quick):
    """Parameters from a dict, with its keys as ids. Those not in `quick` run only with --full."""
    return [
        pytest.param(case, id=name, marks=[] if name in quick else pytest.mark.full)
        for name, case in cases.items()
    ]


AT_RELEASES = [pytest.mark.full, pytest.mark.long]


def mostly_full(names, *fast, long=()):
    """Names as parameters: all but the `fast` ones run with --full, the `long` ones at releases."""
    parameters = []
    for name in names:
        marks = [] if name in fast else [pytest.mark.full]
        if name in long:
            marks.append(pytest.mark.long)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name):
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def block_in_two_processes(page):
    """What the first block of a guide prints on ranks 0 and 1, without the rank."""
    text = (EXAMPLES / "guides" / f"{page}.md").read_text()
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    runs = []
    for rank in ("0", "1"):
        env = {**os.environ, **group, "RANK": rank, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script]
        runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
    return [run.communicate(timeout=120)[0].split(maxsplit=1)[1] for run in runs]
