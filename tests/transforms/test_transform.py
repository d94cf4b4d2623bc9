"""Transform: what every transform guarantees, standalone calls, and the base classes."""

import copy
import functools

import numpy as np
import oracles
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from helpers import assert_same
from oracles import TYPICAL
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

BOX = Box(-1, 1, (2,))
IMAGE = Box(
    0,
    255,
    (12, 8, 3),
    np.uint8,
)
GRID = MultiDiscrete(
    [[2, 3], [4, 2]],
    start=[[0, 1], [-2, 5]],
)
STATEFUL = ["RecordEpisodeStatistics", "FrameStackObservation", "NormalizeReward", "TimeLimit"]
STATELESS = sorted(TYPICAL.keys() - STATEFUL)
scripted = functools.partial(oracles.scripted, action_space=BOX)


@pytest.fixture
def td():
    values = torch.full((3, 2), 0.5)
    return TensorDict(
        {"observation": values, "reward": values[:, :1], "action": values},
        [3],
    )


# The contract of `check_transform` runs over the whole catalogue in tests/testing.


@pytest.mark.parametrize("name", TYPICAL)
def test_masked_reset_and_snapshot_keep_the_callers_root(name):
    env = scripted(TYPICAL[name]())
    env.reset(seed=0)["observation"].fill_(-1)
    assert (env.snapshot()["observation"] == -1).all()
    mask = torch.tensor([True, False, False])
    observation = env.reset(mask=mask)["observation"]
    assert (observation[~mask] == -1).all()
    assert (observation[mask] != -1).any()


ARRAYS = {
    "AddNoise": T.AddNoise,
    "AffineAction": T.AffineAction,
    "CommandObservation": lambda array: T.CommandObservation(-array, array, 2),
    "LowPassAction": T.LowPassAction,
    "RescaleAction": lambda array: T.RescaleAction(-array, array),
    "RescaleObservation": lambda array: T.RescaleObservation(-array, array),
}
TENSORS = {"a gradient": torch.Tensor.requires_grad_, "a lazy sign": lambda x: torch._neg_view(-x)}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("name", ARRAYS)
def test_argument_may_be_a_tensor_that_numpy_does_not_take(name, change):
    array = np.array([0.25, 0.5], np.float32)
    given = change(torch.from_numpy(array.copy()))
    transform = ARRAYS[name](given)
    with torch.no_grad():
        given.fill_(7)
    assert repr(transform) == repr(ARRAYS[name](array))


# Standalone calls


@pytest.mark.filterwarnings("ignore:.*no sample")
@pytest.mark.parametrize("name", STATELESS)
def test_standalone_transform_equals_the_one_in_an_env(name, td):
    env = scripted(TYPICAL[name]()).eval()
    td["observation"] = scripted().reset()["observation"]
    before = td.clone()
    ours = env.transforms(td)
    assert_same(td, before)
    assert torch.equal(ours["observation"], env.reset()["observation"])
    assert torch.equal(ours["action"], env.transforms[0].action(td["action"]))


@pytest.mark.parametrize(
    "batch",
    [(), (2, 5)],
    ids=str,
)
@pytest.mark.parametrize(
    ("transform", "space"),
    [
        (T.FlattenObservation(), BOX),
        (T.FlattenObservation(), Discrete(3)),
        (T.FlattenObservation(), GRID),
        (T.FlattenObservation(), IMAGE),
        (T.ReshapeObservation((8, 36)), IMAGE),
        (T.ResizeObservation((5, 5)), IMAGE),
        (T.ClipObservation(0, 1), BOX),
        (T.NormalizeObservation(), BOX),
        (T.GrayscaleObservation(keep_dim=True), IMAGE),
        (T.DtypeObservation("float64"), IMAGE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_standalone_transform_takes_any_batch_size_and_keeps_its_input(transform, space, batch):
    compose = scripted(tw.Compose([copy.deepcopy(transform)]), observation_space=space).transforms
    number = int(np.prod(batch))
    rows = torch.as_tensor(np.stack([np.asarray(space.sample()) for _ in range(number)]))
    flat = compose(TensorDict({"observation": rows}, [number]))["observation"]
    td = TensorDict(
        {"observation": rows.reshape((*batch, *rows.shape[1:]))},
        batch,
    )
    before = td.clone()
    assert torch.equal(compose(td)["observation"], flat.reshape((*batch, *flat.shape[1:])))
    assert_same(td, before)


@pytest.mark.parametrize("name", STATEFUL)
def test_standalone_call_of_a_stateful_transform_raises(name, td):
    transform = TYPICAL[name]()
    for called in (transform, tw.Compose([transform])):
        with pytest.raises(TypeError, match=name):
            called(td)


# State that an author declares


class CountSteps(T.Transform):
    """A user's transform with a buffer of its own."""

    elapsed = tw.EnvBuffer((1,), torch.int64, fill=3)


class KeepObservation(CountSteps):
    """A subclass with another one, whose row depends on an argument."""

    latest = tw.EnvBuffer(row=lambda self: torch.tensor(-1.0).expand(self.size))

    def __init__(self, size):
        super().__init__()
        self.size = size


def test_env_buffer_before_its_allocation_raises():
    with pytest.raises(AttributeError, match="'elapsed'"):
        CountSteps().elapsed  # noqa: B018


def test_env_buffers_of_a_class_and_its_base_are_allocated_in_rows():
    transform = KeepObservation(2)
    scripted(transform)
    assert transform.elapsed.dtype == torch.int64
    assert transform.elapsed.tolist() == [[3]] * 3
    assert transform.latest.dtype == torch.float32
    assert transform.latest.tolist() == [[-1, -1]] * 3
    transform.latest[0] = 9
    assert transform.latest[1].tolist() == [-1, -1]


@pytest.mark.parametrize("name", TYPICAL)
def test_transform_of_one_env_raises_on_another(name):
    transform = TYPICAL[name]()
    assert not transform.attached
    scripted(transform)
    assert transform.attached
    for other in (transform, tw.Compose([transform])):
        with pytest.raises(ValueError, match=name):
            scripted(other)


REPRS = [
    "RecordEpisodeStatistics(buffer_length=100, stats_key='episode', metrics={})",
    "NormalizeObservation(epsilon=1e-08)",
    "ClipObservation(min_obs=-10, max_obs=10)",
    "FrameStackObservation(stack_size=4, padding_type='reset', axis=None)",
    "ClipReward(min_reward=None, max_reward=1)",
    "ClipAction()",
    "Transform()",
    "Compose([TimeLimit(max_episode_steps=4), Compose([])])",
]


@pytest.mark.parametrize("text", REPRS)
def test_repr_is_the_constructor_call(text):
    assert repr(eval(text, vars(T))) == text
