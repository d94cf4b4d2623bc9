"""What compilation leaves unchanged, and that outputs of compiled envs and collectors belong to the caller."""

import functools

import pytest
import torch
from catalogue import NUM_ENVS, stack
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from helpers import (
    AOT,
    INDUCTOR,
    Held,
    after,
    assert_no_overlap,
    assert_plays_the_same,
    assert_same,
    buffers,
    leaves,
    mostly_full,
    play,
    steps,
)

import torchwrap as tw
from torchwrap import transforms as T

small, seven = (
    functools.partial(stack, "Compose of two"),
    functools.partial(stack, "Compose of seven"),
)


@pytest.mark.full
@pytest.mark.parametrize("collects", [False, True], ids=["env", "collector"])
def test_compile_in_mid_episode_leaves_state_unchanged(collects):
    env, eager = small(), small()
    td, eager_td = after(env, 7), after(eager, 7)
    before, generator = env.snapshot(), torch.get_rng_state()
    target = tw.Collector(env, None, 9) if collects else env
    assert tw.compile(target, backend="aot_eager") is target
    assert_same(env.snapshot(), before)
    assert (torch.get_rng_state() == generator).all()
    if collects:
        assert_same(target(td)[0], tw.rollout(eager, None, 9, eager_td)[0], AOT)
        assert_same(buffers(env), buffers(eager), AOT)
    else:
        assert_same(play(env, 30, td)[0], play(eager, 30, eager_td)[0], AOT)


class TestState:
    """Snapshots and state_dicts pass between eager and compiled envs."""

    def test_snapshots_pass_between_eager_and_compiled_bit_for_bit(self):
        compiled, eager = tw.compile(small(), backend="aot_eager"), small()
        after(eager, 13, seed=4)
        snapshot = eager.snapshot()
        once = play(compiled, 40, compiled.restore(snapshot))[0]
        back = compiled.snapshot()
        assert_same(once, play(compiled, 40, compiled.restore(snapshot))[0])
        assert_same(once, play(eager, 40, eager.restore(snapshot))[0], AOT)
        assert_same(eager.restore(back), compiled.restore(back))
        assert_same(eager.snapshot(), back)

    def test_state_dict_loads_into_compiled_env(self):
        eager, compiled, teacher = (
            small(),
            tw.compile(small(), backend="aot_eager"),
            small(episode_lengths=9),
        )
        after(teacher, 30)
        for assign in (False, True):  # True replaces the buffers
            state = {name: value.clone() for name, value in teacher.state_dict().items()}
            for env in (eager, compiled):
                env.load_state_dict(
                    {name: value.clone() for name, value in state.items()}, assign=assign
                )
            assert_plays_the_same(eager, compiled.to("cpu"), 20, AOT)
            assert (
                compiled.transforms[0].statistics.count
                > state["transforms.NormalizeReward.statistics.count"]
            ).all()


class TestStepOutputs:
    @pytest.mark.parametrize("ending", mostly_full(["terminated", "both"], "terminated"))
    def test_do_not_overlap(self, ending):
        # An env that never truncates has done equal to terminated, and a compiler can know it.
        env = tw.compile(stack("Compose of seven", ending=ending), backend="aot_eager")
        transition, td = env.step(env.reset().set("action", env.sample_action()))
        addresses = [
            leaf.data_ptr() for leaf in leaves(transition, td, buffers(env)) if leaf.numel()
        ]
        assert len(set(addresses)) == len(addresses)
        assert_no_overlap(transition.exclude("observation"), td)

    def assert_belong_to_caller(self, eager, compiled, tolerance):
        expected, _ = play(eager, 50, eager.reset(seed=0))
        held = Held()
        for step, (transition, td) in enumerate(steps(compiled, 50, compiled.reset(seed=0))):
            assert_same(transition["next"], expected["transition", "next"][step], tolerance)
            for leaf in leaves(transition["next"], td):
                leaf.copy_(torch.full_like(leaf, step % 2))
            held.add(transition["next"], td)
        held.assert_unchanged()

    def test_belong_to_caller(self):
        self.assert_belong_to_caller(small(), tw.compile(small(), backend="aot_eager"), AOT)

    @pytest.mark.full
    def test_of_inductor_belong_to_caller(self, pair, inductor_cartpole):
        self.assert_belong_to_caller(*pair, INDUCTOR)
        for env in (pair[1], inductor_cartpole):
            transition, td = env.step(env.reset().set("action", env.sample_action()))
            assert_no_overlap(transition.exclude("observation"), td)

    @pytest.mark.full
    def test_of_smallest_inductor_graphs_stay_unchanged(self):
        # No operator in them is external, so Inductor may keep all results in memory that it owns.
        env = tw.compile(tw.make("CartPole-v1", NUM_ENVS))
        stacked = tw.TransformedEnv(tw.make("CartPole-v1", NUM_ENVS), T.FrameStackObservation(2))
        collect = tw.compile(tw.Collector(stacked, None, 3))
        (data, following), held = collect(), Held()
        for transition, td in steps(env, 9, env.reset(seed=0)):
            data, following = collect(following)
            held.add(transition["next"], td, data, following)
        held.assert_unchanged()


def test_data_of_a_collector_belong_to_caller():
    make = functools.partial(stack, "FrameStackObservation")
    collect, eager = (
        tw.compile(tw.Collector(make(), None, 5), backend="aot_eager"),
        tw.Collector(make(), None, 5),
    )
    td, eager_td, held = collect.env.reset(seed=0), eager.env.reset(seed=0), Held()
    for _ in range(6):
        (data, td), (expected, eager_td) = collect(td), eager(eager_td)
        assert_same(data, expected, AOT)
        assert_no_overlap(data)
        held.add(data)
    held.assert_unchanged()


class OneNumber(FuncEnv):
    """An env whose observation is a view of its state."""

    observation_space, action_space = spaces.Box(-9, 9, (1,)), spaces.Box(-1, 1, (1,))

    def initial(self, rng, params=None):
        return {"x": tw.random.uniform(rng, shape=())}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + action[0]}

    def observation(self, state, rng, params=None):
        return state["x"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["x"]

    def terminal(self, state, rng, params=None):
        return state["x"].abs() > 1


@pytest.mark.full
def test_final_observations_that_are_views_of_the_state_survive_a_reset_by_the_host():
    # Inductor drops a copy of a copy, although both are results.
    env, eager = (tw.FunctionalEnv(OneNumber(), 4096, max_episode_steps=3) for _ in range(2))
    tw.compile(env)
    td, other = env.reset(seed=0), eager.reset(seed=0)
    for _ in range(4):
        action = eager.sample_action()
        transition, td = env.step(td.set("action", action))
        expected, other = eager.step(other.set("action", action))
        assert_same(transition["next"], expected["next"], INDUCTOR)
        assert_same(td.select("observation"), other.select("observation"), INDUCTOR)
    transition, td = env.step_without_reset(td.set("action", env.sample_action()))
    assert_no_overlap(transition, td)
