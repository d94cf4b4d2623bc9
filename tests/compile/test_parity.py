"""A compiled env against the same env in eager mode, which other tests compare with independent oracles."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from catalogue import COMPILED, ENDINGS, NUM_ENVS, REPRESENTATIVE, Push, cartpole, gymnasium_cartpole, seven, stack
from helpers import AOT, INDUCTOR, after, assert_no_overlap, assert_plays_the_same, assert_same, leaves, mostly_full, play
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

STEPS = 500


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_transform_compiled_matches_eager(name):
    following = assert_plays_the_same(stack(name), tw.compile(stack(name), backend="aot_eager"), STEPS, AOT)
    done = following["done"]
    assert done.any(0).all() and not done.all(1).all() and (following["terminated"] & following["truncated"]).any()


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_representative_transform_compiled_matches_eager(name):
    following = assert_plays_the_same(stack(name), tw.compile(stack(name), backend="aot_eager"), 60, AOT)
    done = following["done"]
    assert done.any(0).all() and not done.all(1).all() and (following["terminated"] & following["truncated"]).any()


@pytest.mark.parametrize("name", mostly_full(ENDINGS))
def test_episodes_that_end_in_any_way_compiled_match_eager(name):
    make = functools.partial(stack, "Compose of seven", **ENDINGS[name])
    following = assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 60, AOT)
    assert following["done"].any() == (name != "never")


def test_small_env_through_inductor_matches_eager():
    make = lambda: tw.TransformedEnv(ScriptedEnv(NUM_ENVS, (3,)), T.ClipAction(), T.FrameStackObservation(2))  # noqa: E731
    done = assert_plays_the_same(make(), tw.compile(make()), 60, INDUCTOR)["done"]
    assert done.any(0).all() and not done.all(1).all()


@pytest.mark.compiles
def test_statistics_of_many_rows_through_inductor_are_those_of_numpy():
    def hide(observation):  # infinities are left out, per component
        return torch.where(observation.long() % 7 == 3, math.inf, observation)

    def make():
        return tw.TransformedEnv(ScriptedEnv(1024, (17,), episode_lengths=(2, 3, 5)), T.TransformObservation(hide))

    bare, compiled = make(), tw.compile(tw.TransformedEnv(make(), normalize := T.NormalizeObservation()))
    raw, td = bare.reset(seed=0), compiled.reset(seed=0)
    seen = [raw["observation"]]
    for _ in range(6):
        action = bare.sample_action()
        (following, raw), (_, td) = bare.step(raw.set("action", action)), compiled.step(td.set("action", action))
        seen += [following["next", "observation"], raw["observation"][following["next", "done"].squeeze(-1)]]
    values = np.concatenate([rows.numpy() for rows in seen]).astype(np.float64)
    finite = np.where(np.isfinite(values), values, np.nan)
    assert np.isnan(finite).any() and np.isfinite(finite).any()
    np.testing.assert_allclose(normalize.statistics.mean, np.nanmean(finite, 0), rtol=1e-12)
    np.testing.assert_allclose(normalize.statistics.var, np.nanvar(finite, 0), rtol=1e-9)


@pytest.mark.full
def test_stack_of_seven_through_inductor_matches_eager(pair):
    done = assert_plays_the_same(*pair, STEPS, INDUCTOR)["done"]
    assert done.any(0).all() and not done.all(1).all()


@pytest.mark.full
def test_cartpole_through_inductor_matches_eager(inductor_cartpole):
    following = assert_plays_the_same(cartpole(), inductor_cartpole, STEPS, INDUCTOR)
    assert following["terminated"].any() and following["truncated"].any() and not following["done"].all(1).any()


@pytest.mark.full
def test_partial_reset_between_steps_compiled_matches_eager(pair):
    first, second = (after(env, 7) for env in pair)
    assert_same(first, second, INDUCTOR)
    first, second = (env.reset(mask=torch.arange(NUM_ENVS) % 2 == 0) for env in pair)
    assert_same(first, second, INDUCTOR)
    assert_same(*[play(env, 9, td)[0] for env, td in zip(pair, (first, second), strict=True)], INDUCTOR)


def strided(action):
    return action.T.contiguous().T


def offset(action):
    return torch.cat([torch.zeros(1), action.flatten()])[1:].view(action.shape)


def with_gradient(action):
    return action.requires_grad_() * 1


def parameter(action):
    return nn.Parameter(action)


def expanded(action):
    return action[:, :1].expand_as(action)


@pytest.mark.full
@pytest.mark.parametrize("change", [strided, offset, with_gradient, parameter, expanded], ids=lambda change: change.__name__)
def test_action_of_any_layout_compiled_matches_eager(pair, change):
    seen = []
    for env in pair:
        td, given = env.reset(seed=1), []
        for _ in range(9):
            action = env.sample_action() * 1.5
            transition, td = env.step(td.set("action", change(action)))
            assert not any(leaf.requires_grad for leaf in leaves(transition["next"], td.select("observation")))
            given.append(transition["next"].clone())
        seen.append(torch.stack(given))
    assert_same(*seen, INDUCTOR)
    assert (seen[0]["info", "action"].abs() == 1).any()  # clipped, so it has arrived


def test_action_parts_in_any_order_take_one_graph(graphs):
    name = "Compose of none, Dict spaces"
    env, eager = tw.compile(stack(name), backend="counting"), stack(name)
    td, eager_td = env.reset(seed=0), eager.reset(seed=0)
    for order in (("push", "gear"), ("gear", "push")):
        actions = env.sample_action(), eager.sample_action()
        one, other = (TensorDict({key: action[key] for key in order}, [NUM_ENVS]) for action in actions)
        (transition, td), (expected, eager_td) = env.step(td.set("action", one)), eager.step(eager_td.set("action", other))
        assert_same(transition, expected)
    assert len(graphs) == 1


class TestTraces:
    """When graphs are traced: by `compile`, and later only for another mode."""

    @pytest.mark.parametrize("name", mostly_full(("Compose of two", "Compose of seven"), "Compose of two"))
    def test_step_is_traced_once_and_not_during_a_run(self, graphs, name):
        env = tw.compile(stack(name), backend="counting")
        assert len(graphs) == 1
        td = env.reset(seed=0)
        for step in range(200):
            _, td = play(env, 1, td)
            if step % 50 == 49:
                td = env.reset(mask=torch.arange(NUM_ENVS) < 2)
                env.restore(env.snapshot())
                env.load_state_dict(env.state_dict())
        assert len(graphs) == 1

    @pytest.mark.parametrize("name", mostly_full(("Compose of two", "Compose of seven"), "Compose of two"))
    def test_collector_is_traced_by_compile_and_not_during_a_run(self, graphs, name):
        collect = tw.compile(tw.Collector(stack(name), Push(), 6), backend="counting")
        number, (_, td) = len(graphs), collect()
        for _ in range(30):
            _, td = collect(td)
        assert len(graphs) == number > 0

    @pytest.mark.parametrize("name", mostly_full(("Compose of two", "Compose of seven"), "Compose of two"))
    def test_mode_that_changes_is_traced_once_per_mode(self, graphs, name):
        env, eager = tw.compile(stack(name), backend="counting"), stack(name)
        for mode, number in ((False, 2), (True, 2), (False, 2)):
            assert_plays_the_same(eager.train(mode), env.train(mode), 12, AOT)
            assert len(graphs) == number

    @pytest.mark.parametrize(
        ("name", "index"),
        [("Compose of two", 0), *[pytest.param("Compose of seven", index, marks=pytest.mark.full) for index in (2, 5)]],
    )
    def test_transform_frozen_alone_stays_frozen(self, graphs, name, index):
        env, eager = tw.compile(stack(name), backend="counting"), stack(name)
        for one in (env, eager):
            after(one, 9)
            one.transforms[index].eval()
        before = eager.transforms[index].statistics.mean
        assert_plays_the_same(eager, env, 30, AOT)
        assert (env.transforms[index].statistics.mean == before).all() and len(graphs) == 2
        if name == "Compose of seven":  # NormalizeObservation and NormalizeReward, of which the other one learns
            assert (env.transforms[7 - index].statistics.mean != before[0]).all()


def half_cheetah(info_keys=()):
    return tw.TransformedEnv(tw.make("HalfCheetah-v5", 3, max_episode_steps=20, info_keys=info_keys), seven())


class TestHostSteppedEnv:
    """A simulator on the host, whose transforms are compiled."""

    @pytest.mark.parametrize("num_steps", mostly_full([100, 300], 100))
    def test_transforms_compiled_match_eager(self, graphs, num_steps):
        compiled = tw.compile(gymnasium_cartpole(), backend="counting")
        assert len(graphs) == 2
        following = assert_plays_the_same(gymnasium_cartpole(), compiled, num_steps, AOT)
        assert following["terminated"].any() and following["truncated"].any() and not following["done"].any(1).all()
        assert len(graphs) == 2

    @pytest.mark.parametrize("backend", mostly_full(["aot_eager", "inductor"], "aot_eager"))
    @pytest.mark.parametrize(
        "transforms", [lambda: [T.ClipReward(-1, 1)], lambda: [T.ClipObservation(-1, 1), T.TimeLimit(9)]], ids=["one", "two"]
    )
    def test_outputs_do_not_overlap(self, backend, transforms):
        below = tw.make("CartPole-v1", 4, backend="gymnasium", vectorization_mode="sync")
        env = tw.compile(tw.TransformedEnv(below, *transforms()), backend=backend)
        transition, td = env.step(env.reset().set("action", env.sample_action()))
        assert_no_overlap(transition.exclude("observation"), td)

    @pytest.mark.full
    def test_transforms_over_processes_compiled_match_eager(self):
        eager = gymnasium_cartpole(2, "async")
        compiled = tw.compile(gymnasium_cartpole(2, "async"), backend="aot_eager")
        try:
            assert assert_plays_the_same(eager, compiled, 60, AOT)["done"].any()
        finally:
            eager.close()
            compiled.close()

    @pytest.mark.full
    def test_transforms_over_mujoco_compiled_match_eager(self):
        assert assert_plays_the_same(half_cheetah(), tw.compile(half_cheetah(), backend="aot_eager"), 300, AOT)["done"].any()

    @pytest.mark.full
    def test_info_takes_at_most_one_more_graph(self, graphs):
        eager, compiled = (half_cheetah(["x_position", "x_velocity"]) for _ in range(2))
        tw.compile(compiled, backend="counting")
        following = assert_plays_the_same(eager, compiled, 50, AOT)
        assert (following["info", "x_position"] != following["info", "x_velocity"]).all() and len(graphs) <= 3

    def test_every_layer_is_compiled(self, graphs):
        def make():
            inner = tw.TransformedEnv(
                tw.make("CartPole-v1", 3, backend="gymnasium"), T.RecordEpisodeStatistics(), T.NormalizeReward()
            )
            return tw.TransformedEnv(tw.Wrapper(inner), T.NormalizeObservation(), T.TimeLimit(11))

        eager, compiled = make(), tw.compile(make(), backend="counting")
        assert len(graphs) == 4
        assert_plays_the_same(eager, compiled, 1, AOT)
        number = len(graphs)  # one more, because the outer layer learns at the first step which keys the inner ones add
        assert_plays_the_same(eager, compiled, 100, AOT)
        assert len(graphs) == number <= 5

    @pytest.mark.full
    def test_train_and_eval_compiled_match_eager(self):
        eager, compiled = gymnasium_cartpole(), tw.compile(gymnasium_cartpole(), backend="aot_eager")
        for mode in (True, False, True):
            assert_plays_the_same(eager.train(mode), compiled.train(mode), 30, AOT)

    @pytest.mark.parametrize("transform", [lambda: T.ClipReward(-0.5, 0.5), lambda: T.Compose([])], ids=["ClipReward", "none"])
    def test_transforms_without_buffers_compiled_match_eager(self, transform):
        make = lambda: tw.TransformedEnv(tw.make("CartPole-v1", 2, backend="gymnasium"), transform())  # noqa: E731
        assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 40, AOT)
