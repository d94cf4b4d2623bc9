"""A compiled env against the same env in eager mode, which other tests compare with independent oracles."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from catalogue import (
    COMPILED,
    ENDINGS,
    NUM_ENVS,
    TRANSFORMS,
    cartpole,
    gymnasium_cartpole,
    seven,
    stack,
)
from helpers import (
    AOT,
    INDUCTOR,
    after,
    assert_no_overlap,
    assert_plays_the_same,
    assert_same,
    leaves,
    mostly_full,
    play,
)
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

STEPS = 500


# `check_transform` compares every transform of `TRANSFORMS` in the same way.
@pytest.mark.parametrize(
    "name", ["StickyAction", *mostly_full([name for name in COMPILED if name not in TRANSFORMS])]
)
def test_transform_compiled_matches_eager(name):
    following = assert_plays_the_same(
        stack(name), tw.compile(stack(name), backend="aot_eager"), 100, AOT
    )
    done = following["done"]
    assert (
        done.any(0).all()
        and not done.all(1).all()
        and (following["terminated"] & following["truncated"]).any()
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ENDINGS)
def test_episodes_that_end_in_any_way_compiled_match_eager(name):
    make = functools.partial(stack, "Compose of seven", **ENDINGS[name])
    following = assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 60, AOT)
    assert following["done"].any() == (name != "never")


def test_small_env_through_inductor_matches_eager():
    make = lambda: tw.TransformedEnv(  # noqa: E731
        ScriptedEnv(NUM_ENVS, (3,)), T.ClipAction(), T.FrameStackObservation(2)
    )
    done = assert_plays_the_same(make(), tw.compile(make()), 60, INDUCTOR)["done"]
    assert done.any(0).all() and not done.all(1).all()


@pytest.mark.full
@pytest.mark.compiles
def test_statistics_of_many_rows_through_inductor_are_those_of_numpy():
    def hide(observation):  # infinities are left out, per component
        return torch.where(observation.long() % 7 == 3, math.inf, observation)

    def make():
        return tw.TransformedEnv(
            ScriptedEnv(1024, (17,), episode_lengths=(2, 3, 5)), T.TransformObservation(hide)
        )

    bare, compiled = (
        make(),
        tw.compile(tw.TransformedEnv(make(), normalize := T.NormalizeObservation())),
    )
    raw, td = bare.reset(seed=0), compiled.reset(seed=0)
    seen = [raw["observation"]]
    for _ in range(6):
        action = bare.sample_action()
        (following, raw), (_, td) = (
            bare.step(raw.set("action", action)),
            compiled.step(td.set("action", action)),
        )
        seen += [
            following["next", "observation"],
            raw["observation"][following["next", "done"].squeeze(-1)],
        ]
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
    assert (
        following["terminated"].any()
        and following["truncated"].any()
        and not following["done"].all(1).any()
    )


@pytest.mark.full
def test_partial_reset_between_steps_compiled_matches_eager(pair):
    first, second = (after(env, 7) for env in pair)
    assert_same(first, second, INDUCTOR)
    first, second = (env.reset(mask=torch.arange(NUM_ENVS) % 2 == 0) for env in pair)
    assert_same(first, second, INDUCTOR)
    assert_same(
        *[play(env, 9, td)[0] for env, td in zip(pair, (first, second), strict=True)], INDUCTOR
    )


LAYOUTS = {
    "strided": lambda action: action.T.contiguous().T,
    "with an offset": lambda action: torch.cat([torch.zeros(1), action.flatten()])[1:].view(
        action.shape
    ),
    "with a gradient": lambda action: action.requires_grad_() * 1,
    "a parameter": nn.Parameter,
    "expanded": lambda action: action[:, :1].expand_as(action),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_action_of_any_layout_compiled_matches_eager(pair, layout):
    seen = []
    for env in pair:
        td, given = env.reset(seed=1), []
        for _ in range(9):
            action = env.sample_action() * 1.5
            transition, td = env.step(td.set("action", LAYOUTS[layout](action)))
            assert not any(
                leaf.requires_grad for leaf in leaves(transition["next"], td.select("observation"))
            )
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
        one, other = (
            TensorDict({key: action[key] for key in order}, [NUM_ENVS]) for action in actions
        )
        (transition, td), (expected, eager_td) = (
            env.step(td.set("action", one)),
            eager.step(eager_td.set("action", other)),
        )
        assert_same(transition, expected)
    assert len(graphs) == 1


def test_graphs_are_traced_by_compile_and_once_for_another_mode(graphs):
    env, eager = tw.compile(stack("Compose of two"), backend="counting"), stack("Compose of two")
    assert len(graphs) == 1
    td = env.reset(seed=0)
    for _ in range(3):
        _, td = play(env, 20, td)
        td = env.reset(mask=torch.arange(NUM_ENVS) < 2)
        env.restore(env.snapshot())
        env.load_state_dict(env.state_dict())
    assert len(graphs) == 1
    eager.load_state_dict(env.state_dict())
    for mode, number in ((False, 2), (True, 2), (False, 2)):
        assert_plays_the_same(eager.train(mode), env.train(mode), 12, AOT)
        assert len(graphs) == number
    for one in (env.train(), eager.train()):
        one.transforms[0].eval()  # a transform that is frozen alone stays frozen
    before = eager.transforms[0].statistics.mean
    assert_plays_the_same(eager, env, 30, AOT)
    assert (env.transforms[0].statistics.mean == before).all()


def half_cheetah():
    info_keys = ["x_position", "x_velocity"]
    return tw.TransformedEnv(
        tw.make("HalfCheetah-v5", 3, max_episode_steps=20, info_keys=info_keys), seven()
    )


class TestHostSteppedEnv:
    """A simulator on the host, whose transforms are compiled."""

    def test_transforms_compiled_match_eager(self, graphs):
        eager, compiled = gymnasium_cartpole(), tw.compile(gymnasium_cartpole(), backend="counting")
        assert len(graphs) == 2
        following = assert_plays_the_same(eager, compiled, 100, AOT)
        assert (
            following["terminated"].any()
            and following["truncated"].any()
            and not following["done"].any(1).all()
        )
        assert len(graphs) == 2
        assert_plays_the_same(eager.eval(), compiled.eval(), 10, AOT)

    @pytest.mark.full
    def test_transforms_over_processes_and_mujoco_compiled_match_eager(self, graphs):
        for make in (lambda: gymnasium_cartpole(2, "async"), half_cheetah):
            number = len(graphs)
            with make() as eager, tw.compile(make(), backend="counting") as compiled:
                assert assert_plays_the_same(eager, compiled, 60, AOT)["done"].any()
            assert len(graphs) <= number + 3  # one more, for info

    def test_transforms_without_buffers_or_any_match_eager_and_outputs_do_not_overlap(self):
        for transforms in (
            [],
            [T.ClipReward(-0.5, 0.5)],
            [T.ClipObservation(-1, 1), T.TimeLimit(9)],
        ):
            eager, env = (
                tw.TransformedEnv(
                    tw.make("CartPole-v1", 4, backend="gymnasium"), *copy.deepcopy(transforms)
                )
                for _ in range(2)
            )
            assert_plays_the_same(eager, tw.compile(env, backend="aot_eager"), 40, AOT)
            transition, td = env.step(env.reset().set("action", env.sample_action()))
            assert_no_overlap(transition.exclude("observation"), td)

    @pytest.mark.full
    def test_every_layer_is_compiled(self, graphs):
        def make():
            transforms = T.RecordEpisodeStatistics(), T.NormalizeReward()
            inner = tw.TransformedEnv(tw.make("CartPole-v1", 3, backend="gymnasium"), *transforms)
            return tw.TransformedEnv(tw.Wrapper(inner), T.NormalizeObservation(), T.TimeLimit(11))

        eager, compiled = make(), tw.compile(make(), backend="counting")
        assert len(graphs) == 4
        assert_plays_the_same(eager, compiled, 1, AOT)
        number = len(
            graphs
        )  # one more, because the outer layer learns at the first step which keys the inner ones add
        assert_plays_the_same(eager, compiled, 100, AOT)
        assert len(graphs) == number <= 5
