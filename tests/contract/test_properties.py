"""Properties that hold for every random tape, mask, space and stack."""

import contextlib
import functools
import re
from unittest import mock

import numpy as np
import pytest
import torch
from catalogue import TRANSFORMS
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector.utils import batch_space
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import random, spaces
from torchwrap import transforms as T
from torchwrap._core import rows

# Gymnasium's warning, from Box.contains of a number that is given as padding.
pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
FEW = settings(max_examples=20, deadline=None, derandomize=True)
MANY = settings(FEW, max_examples=50)

ENVS = 5
LENGTH = 64
FREE = Box(-np.inf, np.inf, (3,))
ACTIONS = Box(-2, 1, (2,))
SEEDS = st.integers(0, 2**32 - 1)
READABLE = st.booleans()
MASKS = arrays(bool, ENVS).map(torch.from_numpy)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=9)
OPERATIONS = st.lists(st.none() | st.none() | MASKS, max_size=25)  # None steps; a mask resets
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("uint8", "int32", "int64")
SHAPES = ((), (1,), (3,), (2, 2))


@st.composite
def boxes(draw, dtypes=FLOATS + INTEGERS, shapes=(*SHAPES, (4, 4, 3)), bounded=False):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.sampled_from(shapes))
    rng = np.random.default_rng(draw(SEEDS))
    low = rng.integers(0, 100, shape) - 50 * (dtype != "uint8")
    high = low + rng.integers(1, 100, shape)
    if dtype == "int64":  # beyond the precision of float64
        low = low - 2**62
        high = high + 2**62
    if dtype in FLOATS and not bounded:
        low = np.where(rng.random(shape) < 0.3, -np.inf, low)
        high = np.where(rng.random(shape) < 0.3, np.inf, high)
    bounds = [np.asarray(bound).astype(dtype) for bound in (low, high)]
    return Box(*bounds, shape, dtype)


COUNTS = arrays(np.int64, st.sampled_from([3, (2, 2)]), elements=st.integers(1, 4))
NUMBERS = COUNTS.map(lambda count: MultiDiscrete(count, start=2 - count))
NUMBERS |= COUNTS.map(lambda count: MultiBinary(count.shape))
NUMBERS |= st.builds(Discrete, st.integers(1, 5), start=st.integers(-3, 3))
PARTS = st.recursive(
    boxes() | NUMBERS,
    lambda part: st.dictionaries(st.sampled_from("abc"), part, min_size=1).map(Dict),
)
TUPLES = st.lists(PARTS, min_size=1, max_size=3).map(Tuple)
SPACES = boxes() | NUMBERS | PARTS | TUPLES | TUPLES.map(lambda below: Dict(a=below, b=Discrete(2)))


class Tape(tw.Env):
    # Each env plays its own section of a random tape. A reset returns garbage outside the mask.
    def __init__(self, seed, space=FREE, action_space=ACTIONS, num_envs=ENVS, first_index=0):
        super().__init__(spaces.Signature(num_envs, space, action_space, first_index=first_index))
        size = ENVS * LENGTH
        rng = np.random.default_rng(seed)
        whole = batch_space(space, size)
        whole.seed(seed)
        rewards = rng.normal(1, 3, (size, 1)).astype(np.float32)
        terminated, truncated = torch.from_numpy(rng.random((2, size, 1)) < 0.1)
        self.tape = TensorDict(batch_size=[size])
        self.tape["observation"] = spaces.from_numpy(space, whole.sample())
        self.tape["reward"] = torch.from_numpy(rewards)
        self.tape["terminated"] = terminated
        self.tape["truncated"] = truncated
        sections = torch.arange(first_index, first_index + num_envs)
        self.register_env_buffer("cursor", LENGTH * sections)

    def _step(self, action):
        successor = self.tape[self.cursor.add_(1)]
        info = TensorDict({"action": action.clone()}, [self.num_envs])
        return successor.set("info", info)

    def _reset(self, mask, options=None):
        self.cursor.add_(mask.tensor)
        elsewhere = self.cursor * 7 % len(self.tape)
        places = torch.where(mask.tensor, self.cursor, elsewhere)
        return self.tape[places].select("observation")


def play_operations(env, operations, rows=slice(None)):
    # The roots after a reset and each operation: None steps, a mask resets its rows.
    td = env.reset(seed=0)
    actions = random.Stream(ENVS, seed=0)
    outputs = [td]
    for mask in operations:
        if mask is None:
            action = spaces.sample(env.single_action_space, actions)[rows]
            transition, td = env.step(td.copy().set("action", action))
            outputs.append(transition.set("observation", td["observation"]))
        else:
            if mask[rows].any():
                td = env.reset(mask=mask[rows])
            outputs.append(td)
    return outputs


def host(readable):
    # If the host cannot read masks, the code runs as in a graph, without branches.
    if readable:
        return contextlib.nullcontext()
    return mock.patch.object(rows, "is_host_readable", lambda _: False)


HISTORY = ("FrameStackObservation", "FrameStackObservation of images", "DelayObservation")
ALONE = (*HISTORY, "TimeAwareObservation", "TimeLimit", "RecordEpisodeStatistics", "StickyAction")


@FEW
@given(name=st.sampled_from(ALONE), seed=SEEDS, operations=OPERATIONS, readable=READABLE)
def test_env_in_a_batch_equals_the_env_alone(name, seed, operations, readable):
    make = TRANSFORMS[name][0]
    with host(readable):
        together = play_operations(tw.TransformedEnv(Tape(seed), make()), operations)
    alone = []
    for row in range(ENVS):
        env = tw.TransformedEnv(Tape(seed, num_envs=1, first_index=row), make())
        alone.append(play_operations(env, operations, [row]))
    same(together, [torch.cat(ones) for ones in zip(*alone, strict=True)])


OTHERS = {
    *("RescaleObservation", "RescaleAction", "AffineAction"),  # leave the bounds
    *("TransformObservation", "TransformAction", "AddNoise", "on CartPole"),  # for one space
    *("ObservationGroups", "PolicyState"),  # contains AddNoise; needs a policy
}
ANY_SPACE = [name for name in TRANSFORMS if name not in OTHERS]


@pytest.mark.full
@settings(FEW, max_examples=100)
@given(name=st.sampled_from(ANY_SPACE), seed=SEEDS, space=SPACES)
def test_transform_over_any_space_stays_in_its_spaces_or_raises_with_its_name(name, seed, space):
    make, _ = TRANSFORMS[name]
    try:
        env = tw.TransformedEnv(Tape(seed, space, space), make())
    except (TypeError, ValueError) as error:
        assert re.match(r"(?s)(transforms\[\d+\] \(\w+\): )+\w+: .+, got ", str(error))
        return
    for output in play_operations(env, [None] * 12)[1:]:
        assert spaces.contains(env.single_action_space, output["action"])
        assert spaces.contains(space, output["next", "info", "action"])
        for observation in (output["next", "observation"], output["observation"]):
            assert spaces.contains(env.single_observation_space, observation)
            array = spaces.to_numpy(env.single_observation_space, observation)
            assert env.observation_space.contains(array)


@MANY
@given(seed=SEEDS, sizes=SIZES, mean=st.sampled_from([0, 1e4]), readable=READABLE)
def test_running_mean_std_in_any_batching_masks_and_order_equals_numpy(seed, sizes, mean, readable):
    rng = np.random.default_rng(seed)
    number = sum(sizes)
    rows = rng.normal(mean, 0.1, (number, 2)).astype(np.float32)
    mask = np.append(True, rng.random(number - 1) < 0.7)
    counted = rows[mask].astype(float)
    as_drawn = np.arange(number)
    shuffled = np.append(0, 1 + rng.permutation(number - 1))
    for order in (as_drawn, shuffled, as_drawn[::-1].copy()):
        statistics = T.RunningMeanStd((2,), dtype=torch.float64)
        with host(readable):
            for part in np.split(order, np.cumsum(sizes)[:-1]):
                statistics.update(torch.from_numpy(rows[part]), torch.from_numpy(mask[part]))
        np.testing.assert_allclose(statistics.mean, counted.mean(0), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(statistics.var, counted.var(0), rtol=1e-9, atol=1e-14)
        assert (statistics.count == len(counted)).all()
