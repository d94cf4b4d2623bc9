"""Properties that hold for every random tape, mask, space and stack."""

import contextlib
import functools
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

ENVS, LENGTH = 5, 64
FREE, ACTIONS = Box(-np.inf, np.inf, (3,)), Box(-2, 1, (2,))
SEEDS, READABLE, MASKS = (
    st.integers(0, 2**32 - 1),
    st.booleans(),
    arrays(bool, ENVS).map(torch.from_numpy),
)
OPERATIONS = st.lists(st.none() | st.none() | MASKS, max_size=25)  # None steps; a mask resets
FLOATS, INTEGERS, SHAPES = (
    ("float16", "float32", "float64"),
    ("uint8", "int32", "int64"),
    ((), (1,), (3,), (2, 2)),
)


@st.composite
def boxes(draw, dtypes=FLOATS + INTEGERS, shapes=(*SHAPES, (4, 4, 3)), bounded=False):
    dtype, shape, rng = (
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(shapes)),
        np.random.default_rng(draw(SEEDS)),
    )
    low = rng.integers(0, 100, shape) - 50 * (dtype != "uint8")
    high = low + rng.integers(1, 100, shape)
    if dtype == "int64":
        low, high = low - 2**62, high + 2**62  # beyond the precision of float64
    if dtype in FLOATS and not bounded:
        low, high = (
            np.where(rng.random(shape) < 0.3, -np.inf, low),
            np.where(rng.random(shape) < 0.3, np.inf, high),
        )
    return Box(np.asarray(low).astype(dtype), np.asarray(high).astype(dtype), shape, dtype)


COUNTS = arrays(np.int64, st.sampled_from([3, (2, 2)]), elements=st.integers(1, 4))
NUMBERS = COUNTS.map(lambda count: MultiDiscrete(count, start=2 - count)) | COUNTS.map(
    lambda count: MultiBinary(count.shape)
)
NUMBERS |= st.builds(Discrete, st.integers(1, 5), start=st.integers(-3, 3))
PARTS = st.recursive(
    boxes() | NUMBERS,
    lambda part: st.dictionaries(st.sampled_from("abc"), part, min_size=1).map(Dict),
)
TUPLES = st.lists(PARTS, min_size=1, max_size=3).map(Tuple)
SPACES = boxes() | NUMBERS | PARTS | TUPLES | TUPLES.map(lambda below: Dict(a=below, b=Discrete(2)))


class Tape(tw.Env):
    # Each env plays its own section of a random tape. A reset returns garbage in the rows outside the mask.
    def __init__(self, seed, space=FREE, action_space=ACTIONS, num_envs=ENVS, first_index=0):
        super().__init__(spaces.Signature(num_envs, space, action_space, first_index=first_index))
        size, rng = ENVS * LENGTH, np.random.default_rng(seed)
        whole = batch_space(space, size)
        whole.seed(seed)
        reward = torch.from_numpy(rng.normal(1, 3, (size, 1)).astype(np.float32))
        terminated, truncated = torch.from_numpy(rng.random((2, size, 1)) < 0.1)
        observation = spaces.from_numpy(space, whole.sample())
        self.tape = TensorDict(
            dict(
                observation=observation, reward=reward, terminated=terminated, truncated=truncated
            ),
            [size],
        )
        self.register_env_buffer(
            "cursor", LENGTH * torch.arange(first_index, first_index + num_envs)
        )

    def _step(self, action):
        return self.tape[self.cursor.add_(1)].set(
            "info", TensorDict({"action": action.clone()}, [self.num_envs])
        )

    def _reset(self, mask, options=None):
        self.cursor.add_(mask.tensor)
        return self.tape[
            torch.where(mask.tensor, self.cursor, self.cursor * 7 % len(self.tape))
        ].select("observation")


def play_operations(env, operations, rows=slice(None)):
    # The root after a reset, and after each operation: a step (None) or a masked reset. A step adds its action and `next`.
    td, actions = env.reset(seed=0), random.Stream(ENVS, seed=0)
    outputs = [td]
    for mask in operations:
        if mask is None:
            transition, td = env.step(
                td.copy().set("action", spaces.sample(env.single_action_space, actions)[rows])
            )
            outputs.append(transition.set("observation", td["observation"]))
        else:
            td = env.reset(mask=mask[rows]) if mask[rows].any() else td
            outputs.append(td)
    return outputs


def host(readable):
    # If the host cannot read masks, the code runs as in a graph, without branches.
    return (
        contextlib.nullcontext()
        if readable
        else mock.patch.object(rows, "is_host_readable", lambda _: False)
    )


HISTORY = ("FrameStackObservation", "FrameStackObservation of images", "DelayObservation")
ALONE = (*HISTORY, "TimeAwareObservation", "TimeLimit", "RecordEpisodeStatistics", "StickyAction")


@FEW
@given(name=st.sampled_from(ALONE), seed=SEEDS, operations=OPERATIONS, readable=READABLE)
def test_env_in_a_batch_equals_the_env_alone(name, seed, operations, readable):
    make = TRANSFORMS[name][0]
    with host(readable):
        together = play_operations(tw.TransformedEnv(Tape(seed), make()), operations)
    alone = [
        play_operations(
            tw.TransformedEnv(Tape(seed, num_envs=1, first_index=i), make()), operations, [i]
        )
        for i in range(ENVS)
    ]
    same(together, [torch.cat(ones) for ones in zip(*alone, strict=True)])


@pytest.mark.full
@MANY
@given(seed=SEEDS, box=boxes(), key=st.sampled_from(["kept", 1]))
def test_structural_transforms_of_every_dtype_keep_every_bit(seed, box, key):
    parts = [
        T.FilterObservation([key]),
        T.DelayObservation(0),
        T.FrameStackObservation(1),
        T.FlattenObservation(),
    ]
    parts += [
        T.ClipObservation(-np.inf, np.inf),
        T.TransformObservation(torch.clone),
        T.ReshapeObservation(box.shape),
    ]
    below = Dict(kept=box, other=Discrete(3)) if key == "kept" else Tuple([Discrete(3), box])
    env, plain = (tw.TransformedEnv(Tape(seed, below), *some) for some in (parts, []))
    for tape in (env.unwrapped.tape, plain.unwrapped.tape):
        tape["observation", str(key)][::2] = torch.as_tensor(
            box.low
        )  # samples of int64 are rounded to doubles
    assert env.single_observation_space == box
    raw = [output["observation", str(key)] for output in play_operations(plain, [None] * 5)]
    same([output["observation"] for output in play_operations(env, [None] * 5)], raw)


# These leave the bounds by rounding, or call a function that was written for one space.
OTHERS = (
    "RescaleObservation",
    "RescaleAction",
    "TransformObservation",
    "TransformAction",
    "AddNoise",
    "on CartPole",
)
OTHERS += ("ObservationGroups", "PolicyState")  # it contains AddNoise; it needs a policy


@pytest.mark.full
@settings(FEW, max_examples=100)
@given(
    name=st.sampled_from([name for name in TRANSFORMS if name not in OTHERS]),
    seed=SEEDS,
    space=SPACES,
)
def test_transform_over_any_space_stays_in_its_spaces_or_raises_with_its_name(name, seed, space):
    try:
        env = tw.TransformedEnv(Tape(seed, space, space), TRANSFORMS[name][0]())
    except (TypeError, ValueError) as error:
        assert " needs " in str(error) and ", but got " in str(error)
        return
    for output in play_operations(env, [None] * 12)[1:]:
        assert spaces.contains(env.single_action_space, output["action"])
        assert spaces.contains(space, output["next", "info", "action"])
        for observation in (output["next", "observation"], output["observation"]):
            assert spaces.contains(env.single_observation_space, observation)
            assert env.observation_space.contains(
                spaces.to_numpy(env.single_observation_space, observation)
            )


@MANY
@given(seed=SEEDS, box=boxes(FLOATS, SHAPES, bounded=True))
def test_rescale_maps_bounds_to_bounds_and_back(seed, box):
    low = np.random.default_rng(seed).integers(-50, 50, box.shape)
    high = low + np.random.default_rng(seed + 1).integers(1, 50, box.shape)
    there, back = T.RescaleObservation(low, high), T.RescaleAction(low, high)
    env = tw.TransformedEnv(Tape(seed, box, box), there, back)
    assert (
        env.single_observation_space
        == env.single_action_space
        == Box(low, high, box.shape, box.dtype)
    )
    points = torch.cat(
        [torch.from_numpy(np.stack([box.low, box.high])), env.env.tape["observation"]]
    )
    ours, bottom = there.observation(points), box.low.astype(float)
    gradient = (high - low) / (box.high - bottom)
    rounding = (
        4
        * np.finfo(box.dtype).eps
        * (gradient * (abs(bottom) + abs(box.high)) + abs(low) + abs(high))
    )
    assert (abs(ours.numpy() - (low + gradient * (points.numpy() - bottom))) <= rounding).all()
    assert (abs(back.action(ours).double() - points).numpy() <= rounding / gradient).all()


@MANY
@given(
    seed=SEEDS,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    mean=st.sampled_from([0, 1e4]),
    readable=READABLE,
)
def test_running_mean_std_in_any_batching_masks_and_order_equals_numpy(seed, sizes, mean, readable):
    rng, number = np.random.default_rng(seed), sum(sizes)
    rows, mask = (
        rng.normal(mean, 0.1, (number, 2)).astype(np.float32),
        np.append(True, rng.random(number - 1) < 0.7),
    )
    counted = rows[mask].astype(float)
    orders = {
        "as drawn": np.arange(number),
        "row 0 first": np.append(0, 1 + rng.permutation(number - 1)),
    }
    orders["reversed"] = np.arange(number)[::-1].copy()
    for order in orders.values():
        statistics = T.RunningMeanStd((2,), dtype=torch.float64)
        with host(readable):
            for part in np.split(order, np.cumsum(sizes)[:-1]):
                statistics.update(torch.from_numpy(rows[part]), torch.from_numpy(mask[part]))
        np.testing.assert_allclose(statistics.mean, counted.mean(0), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(statistics.var, counted.var(0), rtol=1e-9, atol=1e-14)
        assert (statistics.count == len(counted)).all()
