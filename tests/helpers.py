"""Functions that several test files share: to step envs, to compare what they return, and to copy them."""

import contextlib
import copy
import importlib.util
import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

# Tolerances, relative and absolute. aot_eager runs the operators of eager mode, except that it computes masked sums in another
# order, in float64, and rounds them to float32. Inductor fuses, contracts a * b + c, and has its own sine.
AOT, INDUCTOR = 2e-6, 1e-4


class OtherVectorEnv(SyncVectorEnv):
    """A vector env that `from_gymnasium` steps as a whole, as it does all but `SyncVectorEnv`."""


class RewardTerms(T.Transform):
    """Twice the reward as `twice` of the info, and half of it as `half` of its `terms`, next to what is no number."""

    def step(self, td):
        info, reward = td.get("info", TensorDict({}, td.batch_size)), td["reward"]
        return td.set(
            "info",
            info.update(
                {"twice": 2 * reward, "terms": {"half": reward / 2}, "vector": reward.repeat(1, 2)}
            ),
        )


# Stepping.


def buffers(module):
    """A copy of all buffers."""
    return TensorDict({name: buffer.clone() for name, buffer in module.named_buffers()}, [])


def steps(env, num_steps, td):
    """What `env.step` returns, step by step, for random actions, of which 23 are drawn and repeated."""
    actions = [env.sample_action() for _ in range(min(num_steps, 23))]
    for step in range(num_steps):
        td.set("action", actions[step % 23].clone())
        for name in env.signature.policy_state:
            td["next", name] = td[name] + 1
        transition, td = env.step(td)
        yield transition, td


def play(env, num_steps, td):
    """Transitions, roots and buffers after each step, as (num_steps, ...) tensors; and the last root."""
    seen = []
    for transition, following in steps(env, num_steps, td):
        seen.append(
            TensorDict({"transition": transition, "td": following}, [])
            .clone()
            .set("buffers", buffers(env))
        )
        td = following
    return torch.stack(seen), td


def after(env, num_steps, seed=0):
    """The root some steps after a reset."""
    first = env.reset(seed=seed)
    return [first, *[td for _, td in steps(env, num_steps, first)]][-1]


# Comparing.


def assert_same(first, second, tolerance=0.0):
    """Two TensorDicts have the same keys, shapes and dtypes, and values that agree up to the tolerance."""
    keys = set(first.keys(True, True))
    assert keys == set(second.keys(True, True))
    for key in keys:
        torch.testing.assert_close(
            first[key],
            second[key],
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, k=key: f"{k}: {m}",
        )


def assert_plays_the_same(eager, compiled, num_steps, tolerance=0.0):
    """Two envs play the same from a seed; returns the successors."""
    expected, _ = play(eager, num_steps, eager.reset(seed=0))
    given, _ = play(compiled, num_steps, compiled.reset(seed=0))
    assert_same(given, expected, tolerance)
    return expected["transition", "next"]


def assert_transforms_compile(make):
    """Compiled transforms on an env that a simulator on the host steps equal eager ones."""

    def stack():
        return tw.TransformedEnv(
            make(), T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.TimeLimit(5)
        )

    eager, compiled = stack(), tw.compile(stack(), backend="aot_eager")
    assert compiled.is_compiled and assert_plays_the_same(eager, compiled, 20, 2e-6)["done"].any()


def assert_transition_and_masked_reset_are_a_step(env, other, num_steps=10):
    """A transition resets nothing. With a masked reset of the finished rows after it, the result is that of `step`.

    Returns in how many steps episodes ended.
    """
    td, _, ended = env.reset(seed=0), other.reset(seed=0), 0
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
    for index, leaf in enumerate(leaves(*values)):
        leaf.copy_(torch.full_like(leaf, index % 2 if leaf.dtype == torch.bool else index))
    for index, leaf in enumerate(leaves(*values)):
        assert (
            leaf == torch.full_like(leaf, index % 2 if leaf.dtype == torch.bool else index)
        ).all()


class Held:
    """Tensors that a caller holds, and what they contained when they were returned."""

    def __init__(self):
        self.pairs = []

    def add(self, *values):
        self.pairs += [(leaf, leaf.clone()) for leaf in leaves(*values)]

    def assert_unchanged(self):
        assert self.pairs and all((leaf == before).all() for leaf, before in self.pairs)


@contextlib.contextmanager
def numpy_2_promotion():
    """Under NumPy 1 too, a float32 with a Python float stays float32 inside (NEP 50): the arithmetic of Gymnasium's envs that
    torchwrap's follow. torchwrap itself stays outside, because its results must not depend on NumPy's version.
    """
    promotion = getattr(
        np, "_get_promotion_state", lambda: "weak"
    )()  # NumPy from 2.2 on knows no other
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


each_copy = pytest.mark.parametrize(
    "replicate", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"]
)


# Statistics.


def ks_distance(sample, cdf):
    """The Kolmogorov-Smirnov distance of a one-dimensional sample from a continuous distribution."""
    ordered, count = cdf(torch.as_tensor(sample, dtype=torch.float64).sort().values), len(sample)
    fractions = torch.arange(count + 1, dtype=torch.float64) / count
    return max((fractions[1:] - ordered).max().item(), (ordered - fractions[:-1]).max().item())


# Parameters.


def params(cases, quick):
    """Parameters from a dict of cases, with its keys as ids. Cases that are not in `quick` run only with --full."""
    return [
        pytest.param(case, id=name, marks=[] if name in quick else pytest.mark.full)
        for name, case in cases.items()
    ]


def mostly_full(names, *fast, long=()):
    """The names as parameters for a test. Those that are not listed as fast run with --full only, some before a release."""
    marks = {True: [pytest.mark.full, pytest.mark.long], False: [pytest.mark.full]}
    return [
        name if name in fast else pytest.param(name, marks=marks[name in long]) for name in names
    ]


EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name):
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
