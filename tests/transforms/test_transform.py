"""Transform: what every transform guarantees, standalone calls, and the base classes."""

import functools

import numpy as np
import oracles
import pytest
import torch
from gymnasium import spaces
from helpers import assert_same
from oracles import TYPICAL
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._core.buffers import ConstantBuffer

BOX = spaces.Box(-1, 1, (2,), np.float32)
scripted = functools.partial(oracles.scripted, action_space=BOX)


def rollout(env, num_steps=12):
    return tw.rollout(env, None, num_steps, env.reset(seed=0))[0]


# What every transform guarantees. The contract of `check_transform` runs over the whole catalogue in tests/testing.


def test_transform_masked_reset_and_snapshot_keep_the_callers_root():
    mask = torch.tensor([True, False, False])
    for name, make in TYPICAL.items():
        env = scripted(make())
        env.reset(seed=0)["observation"].fill_(-1)
        assert (env.snapshot()["observation"] == -1).all(), name
        observation = env.reset(mask=mask)["observation"]
        assert (observation[~mask] == -1).all() and (observation[mask] != -1).any(), name


# Standalone calls


STATEFUL = ["RecordEpisodeStatistics", "FrameStackObservation", "NormalizeReward", "TimeLimit"]


@pytest.mark.filterwarnings("ignore:.*no sample")
def test_transform_stateless_standalone_equals_the_one_in_an_env():
    for name in TYPICAL.keys() - STATEFUL:
        env, plain = scripted(TYPICAL[name]()).eval(), scripted()
        td = (
            plain.reset()
            .set("action", torch.full((3, 2), 0.5))
            .set("reward", torch.full((3, 1), 7.0))
        )
        before, ours = td.clone(), env.transforms(td)
        assert_same(td, before)
        assert torch.equal(ours["observation"], env.reset()["observation"]), name
        assert torch.equal(ours["action"], env.transforms[0].action(td["action"])), name


def test_transform_stateless_standalone_takes_any_batch_size_and_keeps_its_input():
    image, grid = (
        spaces.Box(0, 255, (12, 8, 3), np.uint8),
        spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [-2, 5]]),
    )
    observing = [
        (T.FlattenObservation(), space) for space in (BOX, spaces.Discrete(3), grid, image)
    ]
    observing += [
        (T.ReshapeObservation((8, 36)), image),
        (T.ResizeObservation((5, 5)), image),
        (T.ClipObservation(0, 1), BOX),
    ]
    observing += [
        (T.GrayscaleObservation(keep_dim=True), image),
        (T.DtypeObservation("float64"), image),
    ]
    for transform, space in observing:
        compose = scripted(transform, observation_space=space).transforms
        rows = torch.as_tensor(np.stack([np.asarray(space.sample()) for _ in range(10)]))
        flat = compose(TensorDict({"observation": rows}, [10]))["observation"]
        for batch in ((), (2, 5)):
            td = TensorDict(
                {"observation": rows[0] if batch == () else rows.unflatten(0, batch)}, batch
            )
            before, given = td.clone(), compose(td)["observation"]
            assert torch.equal(given, flat[0] if batch == () else flat.unflatten(0, batch)), (
                transform,
                batch,
            )
            assert_same(td, before)
    for transform in (T.ClipReward(-1, 1), T.TransformReward(lambda reward: reward.clamp(-1, 1))):
        td = TensorDict({"reward": torch.full((2, 5, 1), 5.0)}, (2, 5))
        assert (
            torch.equal(transform(td)["reward"], torch.ones(2, 5, 1)) and (td["reward"] == 5).all()
        ), transform


def test_transform_that_cannot_be_called_standalone_raises():
    td = TensorDict(
        {"observation": torch.ones(2, 1), "reward": torch.ones(2, 1), "action": torch.ones(2, 1)},
        [2],
    )
    for name in STATEFUL:
        transform = TYPICAL[name]()
        for called in (transform, tw.Compose([transform])):
            with pytest.raises(
                TypeError,
                match=rf"{name}\(.*\) is stateful and cannot be called standalone: put it in",
            ):
                called(td)
    for unset in (
        T.FlattenObservation(),
        T.NormalizeObservation(),
        T.ClipAction(),
        T.RescaleAction(-1, 1),
    ):
        words = (
            rf"{type(unset).__name__}\(.*\) learns the spaces from an env \(.*\): put it in a Trans"
        )
        with pytest.raises(RuntimeError, match=words):
            unset(td)


def test_transform_one_method_base_without_its_method_raises():
    td = TensorDict({key: torch.zeros(1, 1) for key in ("observation", "reward", "action")}, [1])
    for base in (T.ObservationTransform, T.RewardTransform, T.ActionTransform):
        with pytest.raises(NotImplementedError):
            base()(td)


# State that an author declares


class CountSteps(T.Transform):
    """A user's transform: counts the steps of each episode, from 3."""

    elapsed = tw.EnvBuffer((1,), torch.int64, fill=3)

    def step(self, td):
        return td.set("elapsed", self.elapsed.add_(1).clone())

    def reset(self, td, mask):
        mask.fill_(self.elapsed, 3)
        return td


class KeepObservation(CountSteps):
    """A subclass: also keeps the latest observation, negated if it is an initial one, and has a bound as configuration."""

    latest = tw.EnvBuffer(row=lambda self: torch.tensor(-1.0).expand(self.size))
    bound = ConstantBuffer()

    def __init__(self, size, bound):
        super().__init__()
        self.size = size
        self.register_buffer("bound", torch.tensor([bound]), persistent=False)

    def step(self, td):
        self.latest.copy_(td["observation"])
        return super().step(td)

    def reset(self, td, mask):
        mask.assign_(self.latest, -td["observation"])
        return super().reset(td, mask)


def with_state(bound=5.0, **arguments):
    env = scripted(KeepObservation(2, bound), observation_shape=(2,), **arguments)
    return env, env.transforms[0]


def test_transform_env_buffers_of_a_subclass_and_its_base_are_allocated_and_reset_in_the_rows_of_the_mask():
    with pytest.raises(
        ValueError, match=r"^EnvBuffer needs a fill that torch.int64 can represent, but got 0.5"
    ):
        tw.EnvBuffer((1,), torch.int64, fill=0.5)
    with pytest.raises(AttributeError, match="'elapsed'"):
        CountSteps().elapsed  # noqa: B018
    env, transform = with_state(episode_lengths=(2, 9, 9))
    assert transform.elapsed.dtype == torch.int64 and transform.elapsed.tolist() == [[3]] * 3
    assert transform.latest.dtype == torch.float32 and transform.latest.tolist() == [[-1, -1]] * 3
    transform.latest[0] = 9  # the rows share no memory
    assert transform.latest[1].tolist() == [-1, -1]
    oracles.step(env, env.reset(), 2)
    assert transform.elapsed.flatten().tolist() == [3, 5, 5]  # env 0 was reset automatically
    env.reset(mask=torch.tensor([False, True, False]))
    assert transform.elapsed.flatten().tolist() == [3, 3, 5]
    assert transform.latest[:, 0].tolist() == [0, -1000, 2002]


def test_transform_env_buffers_and_no_constants_are_in_a_snapshot_and_all_of_them_move():
    (env, transform), (other, others) = with_state(bound=5.0), with_state(bound=7.0)
    oracles.step(env, env.reset(), 2)
    other.reset()
    snapshot, name = env.snapshot(), type(transform).__name__
    names = {f"transforms.{name}.{buffer}" for buffer in ("elapsed", "latest")}
    assert names <= snapshot["buffers"].keys() and env.state_dict() == {}
    assert f"transforms.{name}.bound" not in snapshot["buffers"].keys()
    other.restore(snapshot)
    assert others.bound.item() == 7 and transform.bound.item() == 5
    assert torch.equal(others.elapsed, transform.elapsed) and torch.equal(
        others.latest, transform.latest
    )
    assert env.to("meta").device == torch.device("meta")
    assert transform.elapsed.is_meta and transform.latest.is_meta and transform.bound.is_meta


def test_transform_attached_to_an_env_raises_on_another():
    for name, make in TYPICAL.items():
        transform = make()
        assert not transform.attached, name
        scripted(transform)
        assert transform.attached, name
        for other in (transform, tw.Compose([transform])):
            with pytest.raises(
                ValueError, match=f"transforms that belong to no other env, but got {name}"
            ):
                scripted(other)


def test_transform_repr_is_its_constructor_call():
    for transform, text in (
        (
            T.RecordEpisodeStatistics(),
            "RecordEpisodeStatistics(buffer_length=100, stats_key='episode', metrics={})",
        ),
        (T.NormalizeObservation(), "NormalizeObservation(epsilon=1e-08)"),
        (T.ClipObservation(-10, 10), "ClipObservation(min_obs=-10, max_obs=10)"),
        (
            T.FrameStackObservation(4),
            "FrameStackObservation(stack_size=4, padding_type='reset', axis=None)",
        ),
        (T.ClipReward(max_reward=1), "ClipReward(min_reward=None, max_reward=1)"),
        (T.ClipAction(), "ClipAction()"),
        (
            T.TransformObservation(abs),
            "TransformObservation(func=<built-in function abs>, observation_space=None)",
        ),
        (T.Transform(), "Transform()"),
        (
            tw.Compose([T.TimeLimit(4), tw.Compose([])]),
            "Compose([TimeLimit(max_episode_steps=4), Compose([])])",
        ),
    ):
        assert repr(transform) == text
    for make in TYPICAL.values():
        transform = make()
        before = repr(transform)
        scripted(transform).reset()
        assert repr(transform) == before


def test_transform_extra_repr_shows_the_arguments_of_a_subclass():
    class Shift(T.ObservationTransform):
        def __init__(self, by, *, twice=False):
            super().__init__()
            self.by, self.twice, self.other = by, twice, 3

    assert Shift(2, twice=True).extra_repr() == "by=2, twice=True"
    assert repr(Shift(2)) == "Shift(by=2, twice=False)"
