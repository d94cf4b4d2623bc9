from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from single_envs import (
    BOX,
    NEVER,
    SPACES,
    Scripted,
    Singles,
    assert_equal_trees,
    check_transitions,
    every_kind,
    every_mode,
    sample_and_step,
    scripted,
    to_tree,
)
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

LENGTHS = {
    "staggered": [(5, 2), (3,), (1, 4), NEVER],
    "one step": [(1,)] * 4,
    "all at once": [(4,)] * 4,
    "one of them": [NEVER, NEVER, (3,), NEVER],
    "never": [NEVER] * 4,
}


@pytest.mark.parametrize(
    "id, kwargs",
    [("HalfCheetah-v5", {"max_episode_steps": 7}), ("CartPole-v1", {}), ("CartPole-v1", {"max_episode_steps": 9})],
)
@every_kind
def test_transitions_of_every_vector_env_match_single_envs(bridge, kind, mode, id, kwargs):
    makers = [functools.partial(gymnasium.make, id, **kwargs)] * 3
    assert check_transitions(bridge(makers, kind, mode), makers, steps=40) >= 3


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
@pytest.mark.parametrize("id, kwargs", [("HalfCheetah-v5", {"max_episode_steps": 7}), ("CartPole-v1", {})])
def test_transitions_of_make_match_single_envs(id, kwargs, vectorization_mode):
    env = tw.make(id, 3, backend="gymnasium", vectorization_mode=vectorization_mode, **kwargs)
    try:
        assert check_transitions(env, [functools.partial(gymnasium.make, id, **kwargs)] * 3, steps=40) >= 3
    finally:
        env.close()


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@every_kind
def test_transitions_with_every_observation_space_match_single_envs(bridge, kind, mode, space):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)], space=space)
    assert check_transitions(bridge(makers, kind, mode), makers, steps=12) > 12


class Doubling(SyncVectorEnv):
    def step(self, actions):
        observation, reward, *rest = super().step(actions)
        return observation, 2 * reward, *rest


def test_step_of_a_subclass_of_the_sync_vector_env_is_called(bridge):
    makers = scripted(2)
    (first, _), (second, _) = [sample_and_step(env, env.reset(seed=0)) for env in (bridge(makers), bridge(makers, Doubling))]
    assert torch.equal(2 * first["next", "reward"], second["next", "reward"])


class Converting(Scripted):
    """Returns observations that are converted by a function."""

    convert = staticmethod(np.asarray)

    def _observe(self):
        return self.convert(super()._observe())


@pytest.mark.parametrize("convert", [np.float16, np.ndarray.tolist, np.asfortranarray])
@every_mode
def test_observations_of_another_type_are_converted_as_gymnasium_does(bridge, monkeypatch, mode, convert):
    monkeypatch.setattr(Converting, "convert", staticmethod(convert))
    space = spaces.Box(-1, 1, (2, 3), np.float32)
    makers = [functools.partial(Converting, lengths=(3,), space=space)] * 2
    env, same = bridge(makers, mode=mode), SyncVectorEnv(makers, autoreset_mode=mode)
    td, (expected, _) = env.reset(seed=0), same.reset(seed=[0, 1])
    for _ in range(2):
        np.testing.assert_array_equal(td["observation"], expected)
        action = env.sample_action()
        (_, td), (expected, *_) = env.step(td.set("action", action)), same.step(action.numpy())
    assert td["observation"].dtype == torch.float32


@pytest.mark.parametrize("convert", [lambda observation: observation[:2], lambda observation: observation.astype(complex)])
def test_observations_that_do_not_fit_the_space_raise(bridge, monkeypatch, convert):
    env = bridge([Converting] * 2)
    td = env.reset(seed=0)
    monkeypatch.setattr(Converting, "convert", staticmethod(convert))
    with pytest.raises((ValueError, TypeError)):
        sample_and_step(env, td)


def test_vector_env_that_is_reset_by_hand_returns_the_last_observations(bridge):
    env = bridge(scripted(2, lengths=NEVER))
    _, td = sample_and_step(env, env.reset(seed=0))
    observation, _ = env.vector_env.reset(options={"reset_mask": np.array([True, False])})
    np.testing.assert_array_equal(observation[1], td["observation"][1])
    assert (observation[0] != td["observation"][0].numpy()).any()


@pytest.mark.full
@pytest.mark.parametrize("space", [SPACES["Dict"], SPACES["Tuple"], SPACES["Discrete"], SPACES["image"]], ids=repr)
@every_mode
def test_transitions_of_async_without_shared_memory_match_single_envs(bridge, mode, space):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)], space=space)
    assert check_transitions(bridge(makers, AsyncVectorEnv, mode, shared_memory=False), makers, steps=12) > 12


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@every_kind
def test_transitions_with_every_ending_match_single_envs(bridge, kind, mode, lengths, ending):
    makers = scripted(4, lengths=lengths, ending=ending)
    ends = check_transitions(bridge(makers, kind, mode), makers, steps=13)
    assert ends == sum(int(np.searchsorted(np.cumsum(list(each) * 13), 13, side="right")) for each in lengths)


@pytest.mark.parametrize("copy", [True, False])
@every_kind
def test_transitions_with_and_without_copies_match_single_envs(bridge, kind, mode, copy):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)])
    assert check_transitions(bridge(makers, kind, mode, copy=copy), makers) > 12


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(4, start=3),
        spaces.MultiDiscrete([3, 5]),
        spaces.MultiBinary(3),
        spaces.Box(0, 9, (2, 2), np.int64),
        spaces.Tuple([BOX, spaces.Discrete(3)]),
        spaces.Dict({"b": BOX, "a": spaces.Discrete(3)}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_transitions_with_every_action_space_match_single_envs(bridge, kind, action_space):
    makers = scripted(2, lengths=(3,), action_space=action_space)
    check_transitions(bridge(makers, kind), makers, steps=5)


# With transforms.


@pytest.mark.parametrize(
    "kind, arguments",
    [(SyncVectorEnv, {}), (AsyncVectorEnv, {"shared_memory": True}), (AsyncVectorEnv, {"shared_memory": False})],
    ids=["sync", "async", "async without shared memory"],
)
@every_mode
def test_time_limit_in_every_autoreset_mode_matches_gymnasium(bridge, kind, mode, arguments):
    makers = scripted(4, lengths=[(3, 9), NEVER, (4, 1, 9), (1,)])
    limited = [lambda maker=maker: gymnasium.wrappers.TimeLimit(maker(), 4) for maker in makers]
    env = tw.TransformedEnv(bridge(makers, kind, mode, **arguments), T.TimeLimit(4))
    assert check_transitions(env, limited, steps=17) > 17


@every_mode
def test_record_episode_statistics_matches_gymnasium(bridge, mode):
    makers = scripted(3, lengths=[(3, 5), (4,), (1,)])
    env = tw.TransformedEnv(bridge(makers, mode=mode), T.RecordEpisodeStatistics())
    singles = Singles([lambda m=m: gymnasium.wrappers.RecordEpisodeStatistics(m()) for m in makers], 3)
    td = env.reset(seed=3)
    for _ in range(12):
        td, actions = singles.act(td)
        transition, td = env.step(td)
        done = singles.step(actions)["done"][:, 0]
        for i in np.flatnonzero(done):
            assert transition["next", "episode_return"][i].item() == pytest.approx(singles.infos[i]["episode"]["r"], abs=1e-5)
            assert transition["next", "episode_length"][i].item() == singles.infos[i]["episode"]["l"]


# On a GPU.


@pytest.mark.cuda
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@every_mode
def test_transitions_on_cuda_match_the_cpu(bridge, mode, space):
    makers = scripted(3, lengths=[(4,), (2, 5), (1,)], space=space)
    env, same = bridge(makers, mode=mode, device="cuda"), bridge(makers, mode=mode)
    td, expected = env.reset(seed=3), same.reset(seed=3)
    for _ in range(12):
        action = same.sample_action()
        transition, td = env.step(td.set("action", action.cuda()))
        reference, expected = same.step(expected.set("action", action))
        assert transition["next", "reward"].device.type == "cuda"
        assert_equal_trees(to_tree(transition["next"]), to_tree(reference["next"]))
        assert_equal_trees(to_tree(td["observation"]), to_tree(expected["observation"]))


@pytest.mark.cuda
@every_kind
def test_pinned_copies_on_cuda_never_change_earlier_outputs(bridge, kind, mode):
    large = spaces.Box(0, 255, (256, 256, 3), np.uint8)
    makers = scripted(4, lengths=[(2,), (3,), NEVER, (1,)], space=large)
    env, same = bridge(makers, kind, mode, copy=False, device="cuda"), bridge(makers, kind, mode)
    td, expected, kept = env.reset(seed=0), same.reset(seed=0), []
    for _ in range(10):
        action = same.sample_action()
        transition, td = env.step(td.set("action", action.cuda()))
        reference, expected = same.step(expected.set("action", action))
        kept.append((transition, td["observation"], reference, expected["observation"]))
    torch.cuda.synchronize()
    for transition, now, reference, reference_now in kept:
        assert_equal_trees(to_tree(transition["next"]), to_tree(reference["next"]))
        assert_equal_trees(to_tree(now), to_tree(reference_now))


@pytest.mark.cuda
def test_mask_and_action_of_the_cpu_on_cuda_raise(bridge):
    env = bridge(scripted(2), device="cuda")
    td = env.reset(seed=0)
    with pytest.raises(ValueError, match="an action on device cuda"):
        env.step(TensorDict({"action": torch.zeros(2, 2)}, batch_size=[2]))
    with pytest.raises(ValueError, match=r"torch\.bool on cuda"):
        env.reset(mask=torch.ones(2, dtype=torch.bool))
    assert td["observation"].device.type == "cuda"
