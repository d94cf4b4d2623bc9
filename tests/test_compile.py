"""A compiled env or rollout against itself in eager mode, which the other tests hold against oracles that are not ours."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle

import pytest
import torch
from catalogue import DICT, IMAGE, seven
from catalogue import TRANSFORMS as CATALOGUE
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical, Normal

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

N, STEPS = 5, 500
# aot_eager runs the operators of eager mode but for those that look at masks: sums in another order, in float64, which are
# float32 in the end. Inductor fuses, contracts a * b + c, and has its own sine. Both are relative and absolute.
AOT, INDUCTOR = 2e-6, 1e-4

ACTIONS = spaces.Dict(push=spaces.Box(-1, 1, (2,)), gear=spaces.Discrete(4, start=-1))


images, dicts = functools.partial(ScriptedEnv, observation_space=IMAGE), functools.partial(ScriptedEnv, observation_space=DICT)
TRANSFORMS = {
    **CATALOGUE,
    "RecordEpisodeStatistics of more": (lambda: T.RecordEpisodeStatistics(50, stats_key="whole"), ScriptedEnv),
    "FrameStackObservation of one": (lambda: T.FrameStackObservation(1), ScriptedEnv),
    "Compose of none": (lambda: T.Compose([]), functools.partial(dicts, action_space=ACTIONS)),
}


def cartpole(num_envs=N, **arguments):
    transforms = T.TimeLimit(30), T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.FrameStackObservation(2)
    return tw.TransformedEnv(tw.make("CartPole-v1", num_envs, **arguments), *transforms)


def stack(name, **arguments):
    make, make_env = TRANSFORMS[name]
    return tw.TransformedEnv(make_env(N, **arguments), make())


def buffers(module):
    return TensorDict({name: buffer.clone() for name, buffer in module.named_buffers()}, [])


def steps(env, num_steps, td):
    """What `env.step` gives, step by step, for random actions: a few in turn, for to draw each takes as long as a step."""
    actions = [env.sample_action() for _ in range(min(num_steps, 23))]
    for step in range(num_steps):
        transition, td = env.step(td.set("action", actions[step % 23].clone()))
        yield transition, td


def play(env, num_steps, td):
    """Every transition, where to act next, and all buffers after it, as (num_steps, ...) tensors; and where it stopped."""
    seen = []
    for transition, following in steps(env, num_steps, td):
        seen.append(TensorDict({"transition": transition, "td": following}, []).clone().set("buffers", buffers(env)))
        td = following
    return torch.stack(seen), td


def after(env, num_steps, seed=0):
    """Where to act after some steps from a reset on."""
    first = env.reset(seed=seed)
    return [first, *[td for _, td in steps(env, num_steps, first)]][-1]


def assert_same(first, second, tolerance=0.0):
    keys = set(first.keys(True, True))
    assert keys == set(second.keys(True, True))
    for key in keys:
        torch.testing.assert_close(
            first[key], second[key], rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}"
        )


def assert_plays_the_same(eager, compiled, num_steps, tolerance=0.0):
    expected, _ = play(eager, num_steps, eager.reset(seed=0))
    given, _ = play(compiled, num_steps, compiled.reset(seed=0))
    assert_same(given, expected, tolerance)
    return expected["transition", "next"]


@pytest.fixture(scope="module")
def inductor():
    """The stack of seven through inductor, for tests that put it back to where they want it."""
    return tw.compile(stack("Compose of seven"))


@pytest.fixture
def pair(inductor):
    """The stack of seven, in eager mode and through inductor, both as new."""
    eager = stack("Compose of seven")
    for name, buffer in inductor.train().named_buffers():
        buffer.copy_(eager.get_buffer(name))
    return eager, inductor


# The same numbers.


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_compiled_is_that_of_eager_mode(name):
    following = assert_plays_the_same(stack(name), tw.compile(stack(name), backend="aot_eager"), STEPS, AOT)
    done = following["done"]
    assert done.any(0).all() and not done.all(1).all() and (following["terminated"] & following["truncated"]).any()


ENDINGS = {
    "never": {"episode_lengths": None},
    "all at once": {"episode_lengths": 4},
    "at every step": {"episode_lengths": 1},
    "by termination": {"ending": "terminated"},
    "by truncation": {"ending": "truncated"},
    "by both": {"ending": "both"},
}


@pytest.mark.parametrize("name", ENDINGS)
def test_however_episodes_end_a_compiled_env_does_what_eager_mode_does(name):
    make = functools.partial(stack, "Compose of seven", **ENDINGS[name])
    following = assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 60, AOT)
    assert following["done"].any() == (name != "never")


def test_through_inductor_the_stack_of_seven_is_that_of_eager_mode(pair):
    done = assert_plays_the_same(*pair, STEPS, INDUCTOR)["done"]
    assert done.any(0).all() and not done.all(1).all()


@pytest.fixture(scope="module")
def inductor_cartpole():
    return tw.compile(cartpole())


def test_through_inductor_cartpole_is_that_of_eager_mode(inductor_cartpole):
    following = assert_plays_the_same(cartpole(), inductor_cartpole, STEPS, INDUCTOR)
    assert following["terminated"].any() and following["truncated"].any() and not following["done"].all(1).any()


def test_a_user_s_reset_between_steps_is_that_of_eager_mode(pair):
    first, second = (after(env, 7) for env in pair)
    assert_same(first, second, INDUCTOR)
    first, second = (env.reset(mask=torch.arange(N) % 2 == 0) for env in pair)
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


@pytest.mark.parametrize("change", [strided, offset, with_gradient, parameter, expanded], ids=lambda change: change.__name__)
def test_any_action_of_the_right_shape_does_what_it_does_in_eager_mode(pair, change):
    seen = []
    for env in pair:
        td, given = env.reset(seed=1), []
        for _ in range(9):
            action = env.sample_action() * 1.5
            transition, td = env.step(td.set("action", change(action)))
            assert not any(leaf.requires_grad for leaf in [*transition["next"].values(True, True), td["observation"]])
            given.append(transition["next"].clone())
        seen.append(torch.stack(given))
    assert_same(*seen, INDUCTOR)
    assert (seen[0]["info", "action"].abs() == 1).any()  # clipped, so it has arrived


# When graphs are made.


def test_a_graph_is_made_at_once_and_none_in_the_middle_of_a_run(graphs):
    env = tw.compile(stack("Compose of seven"), backend="counting")
    assert len(graphs) == 1
    td = env.reset(seed=0)
    for step in range(200):
        _, td = play(env, 1, td)
        if step % 50 == 49:
            td = env.reset(mask=torch.arange(N) < 2)
            env.restore(env.snapshot())
            env.load_state_dict(env.state_dict())
    assert len(graphs) == 1


def test_the_parts_of_an_action_may_come_in_any_order(graphs):
    env, eager = tw.compile(stack("Compose of none"), backend="counting"), stack("Compose of none")
    td, eager_td = env.reset(seed=0), eager.reset(seed=0)
    for order in (("push", "gear"), ("gear", "push")):
        actions = env.sample_action(), eager.sample_action()
        one, other = (TensorDict({key: action[key] for key in order}, [N]) for action in actions)
        (transition, td), (expected, eager_td) = env.step(td.set("action", one)), eager.step(eager_td.set("action", other))
        assert_same(transition, expected)
    assert len(graphs) == 1


def test_another_mode_is_one_more_graph_and_the_way_back_none(graphs):
    env, eager = tw.compile(stack("Compose of seven"), backend="counting"), stack("Compose of seven")
    for mode, number in ((False, 2), (True, 2), (False, 2)):
        assert_plays_the_same(eager.train(mode), env.train(mode), 12, AOT)
        assert len(graphs) == number


@pytest.mark.parametrize("part", [2, 5])  # NormalizeObservation, NormalizeReward
def test_a_part_that_is_frozen_alone_stays_frozen(graphs, part):
    env, eager = tw.compile(stack("Compose of seven"), backend="counting"), stack("Compose of seven")
    for one in (env, eager):
        after(one, 9)
        one.transform.transforms[part].eval()
    before = eager.transform.transforms[part].statistics.mean
    assert_plays_the_same(eager, env, 30, AOT)
    assert (env.transform.transforms[part].statistics.mean == before).all()
    assert (env.transform.transforms[7 - part].statistics.mean != before[0]).all() and len(graphs) == 2


def test_the_graphs_of_a_rollout_are_made_at_once(graphs):
    collect = tw.compile(tw.Rollout(stack("Compose of seven"), Push(), 6), backend="counting")
    number, (_, td) = len(graphs), collect()
    for _ in range(30):
        _, td = collect(td)
    assert len(graphs) == number > 0


# What compiling leaves alone.


@pytest.mark.parametrize("num_steps", [0, 7])
@pytest.mark.parametrize("make", [functools.partial(stack, "Compose of seven"), cartpole], ids=["seven", "CartPole"])
def test_compiling_in_mid_episode_leaves_the_state_as_it_was(make, num_steps):
    env, eager = make(), make()
    td, eager_td = after(env, num_steps), after(eager, num_steps)
    before, generator = env.snapshot(), torch.get_rng_state()
    assert tw.compile(env, backend="aot_eager") is env
    assert_same(env.snapshot(), before)
    assert (torch.get_rng_state() == generator).all()
    assert_same(play(env, 30, td)[0], play(eager, 30, eager_td)[0], AOT)


def test_compiling_before_the_first_reset_leaves_everything_as_it_was():
    env = cartpole()
    before = buffers(env)
    tw.compile(env, backend="aot_eager")
    assert_same(buffers(env), before)
    with pytest.raises(RuntimeError, match=r"needs reset\(\) first"):
        env.step(TensorDict({"action": env.sample_action()}, [N]))


def test_compiling_a_rollout_leaves_the_state_as_it_was():
    env, eager = cartpole(), cartpole()
    td, eager_td = after(env, 7), after(eager, 7)
    before, generator = env.snapshot(), torch.get_rng_state()
    collect = tw.Rollout(env, None, 9)
    assert tw.compile(collect, backend="aot_eager") is collect
    assert_same(env.snapshot(), before)
    assert (torch.get_rng_state() == generator).all()
    assert_same(collect(td)[0], tw.rollout(eager, None, 9, eager_td)[0], AOT)
    assert_same(buffers(env), buffers(eager), AOT)


def test_snapshots_pass_between_eager_and_compiled_envs_bit_for_bit(inductor_cartpole):
    compiled, eager = inductor_cartpole, cartpole()
    after(eager, 13, seed=4)
    snapshot = eager.snapshot()
    once = play(compiled, 40, compiled.restore(snapshot))[0]
    back = compiled.snapshot()
    assert_same(once, play(compiled, 40, compiled.restore(snapshot))[0])
    assert_same(once, play(eager, 40, eager.restore(snapshot))[0], INDUCTOR)
    assert_same(eager.restore(back), compiled.restore(back))
    assert_same(eager.snapshot(), back)


def test_what_was_learned_loads_into_a_compiled_env(pair):
    eager, compiled = pair
    teacher = stack("Compose of seven", episode_lengths=9)
    after(teacher, 30)
    for assign in (False, True):  # the second puts other tensors into the buffers' places
        state = {name: value.clone() for name, value in teacher.state_dict().items()}
        for env in pair:
            env.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
        assert_plays_the_same(eager, compiled.to("cpu"), 20, INDUCTOR)
        assert (compiled.transform.transforms[2].statistics.count > state["transform.transforms.2.statistics.count"]).all()


# What is handed out is the caller's.


def leaves(*values):
    return [leaf for value in values for leaf in value.values(True, True)]


def assert_apart(*values):
    for position, leaf in enumerate(leaves(*values)):
        leaf.copy_(torch.full_like(leaf, position % 2 if leaf.dtype == torch.bool else position))
    for position, leaf in enumerate(leaves(*values)):
        assert (leaf == torch.full_like(leaf, position % 2 if leaf.dtype == torch.bool else position)).all()


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both", "in turn"])
def test_no_two_outputs_of_a_step_lie_in_the_same_memory(ending):
    # Where an env never truncates, done is terminated, and a compiler may see it.
    env = tw.compile(stack("Compose of seven", ending=ending), backend="aot_eager")
    transition, td = env.step(env.reset().set("action", env.sample_action()))
    places = [leaf.data_ptr() for leaf in leaves(transition, td, buffers(env)) if leaf.numel()]
    assert len(set(places)) == len(places)
    assert_apart(transition.exclude("observation"), td)


def test_no_two_outputs_of_inductor_lie_in_the_same_memory(pair, inductor_cartpole):
    for env in (pair[1], inductor_cartpole):
        transition, td = env.step(env.reset().set("action", env.sample_action()))
        assert_apart(transition.exclude("observation"), td)


def test_transitions_in_hand_are_changed_by_no_later_step_and_change_none(pair):
    eager, compiled = pair
    expected, _ = play(eager, 50, eager.reset(seed=0))
    held = []
    for step, (transition, td) in enumerate(steps(compiled, 50, compiled.reset(seed=0))):
        assert_same(transition["next"], expected["transition", "next"][step], INDUCTOR)
        for leaf in leaves(transition["next"], td):
            leaf.copy_(torch.full_like(leaf, step % 2))
            held.append((leaf, leaf.clone()))
    assert all((leaf == copied).all() for leaf, copied in held)


def test_what_the_smallest_graphs_of_inductor_give_is_changed_by_no_later_run():
    # No operator in them leaves the graph, so that inductor may keep all that they compute in memory of its own.
    env = tw.compile(tw.make("CartPole-v1", N))
    stacked = tw.TransformedEnv(tw.make("CartPole-v1", N), T.FrameStackObservation(2))
    collect = tw.compile(tw.Rollout(stacked, None, 3))
    (data, following), held = collect(), []
    for transition, td in steps(env, 9, env.reset(seed=0)):
        data, following = collect(following)
        held += [(leaf, leaf.clone()) for leaf in leaves(transition["next"], td, data, following)]
    assert all((leaf == copied).all() for leaf, copied in held)


def test_rollouts_in_hand_are_changed_by_no_later_rollout_and_change_none():
    make = functools.partial(stack, "FrameStackObservation")
    collect, eager = tw.compile(tw.Rollout(make(), None, 5), backend="aot_eager"), tw.Rollout(make(), None, 5)
    td, eager_td, held = collect.env.reset(seed=0), eager.env.reset(seed=0), []
    for _ in range(20):
        (data, td), (expected, eager_td) = collect(td), eager(eager_td)
        assert_same(data, expected, AOT)
        assert_apart(data)
        held += [(leaf, leaf.clone()) for leaf in leaves(data)]
    assert all((leaf == copied).all() for leaf, copied in held)


WAYS = {
    "all of it": lambda data: data["observation"],
    "one env": lambda data: data["observation"][3],
    "one number": lambda data: data["next", "observation"][3, 2, :1],
    "a row of all": lambda data: data[7]["next", "reward"],
    "an array": lambda data: data["observation"].numpy(),
    "a slice of an array": lambda data: data["observation"].numpy()[5:7, 1],
    "a tensor of an array": lambda data: torch.from_numpy(data["observation"].numpy()[5:7]),
    "another dtype": lambda data: data["observation"].view(torch.int32)[9],
    "detached": lambda data: data["observation"].detach()[-1],
    "flat": lambda data: data["observation"].transpose(0, 1).flatten(),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_large_rollouts_are_never_written_over_however_they_are_held(compiled):
    collect = tw.Rollout(
        tw.make("CartPole-v1", 16384), None, 5, keys=["observation", ("next", "observation"), ("next", "reward")]
    )
    if compiled:
        tw.compile(collect, backend="aot_eager")
    td = collect.env.reset(seed=0)
    held = []
    for hold in [*WAYS.values(), *WAYS.values()]:
        data, td = collect(td)
        view = hold(data)
        del data
        held.append((view, copy.deepcopy(view)))
        collect(td)  # which nobody keeps: its memory comes back at once
    assert all((view == copied).all() for view, copied in held)


# On a foreign simulator.


def sixfold():
    return T.Compose([*list(seven().flat())[1:]])


def gymnasium_cartpole(mode="sync", num_envs=4):
    env = tw.make("CartPole-v1", num_envs, backend="gymnasium", vectorization_mode=mode, max_episode_steps=25)
    return tw.TransformedEnv(env, sixfold())


def test_on_gymnasiums_cartpole_the_compiled_transforms_are_those_of_eager_mode(graphs):
    compiled = tw.compile(gymnasium_cartpole(), backend="counting")
    assert len(graphs) == 2
    following = assert_plays_the_same(gymnasium_cartpole(), compiled, 300, AOT)
    assert following["terminated"].any() and following["truncated"].any() and not following["done"].any(1).all()
    assert len(graphs) == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("transforms", [[T.ClipReward(-1, 1)], [T.ClipObservation(-1, 1), T.TimeLimit(9)]])
def test_no_two_outputs_on_a_foreign_simulator_lie_in_the_same_memory(backend, transforms):
    below = tw.make("CartPole-v1", 4, backend="gymnasium", vectorization_mode="sync")
    env = tw.compile(tw.TransformedEnv(below, *copy.deepcopy(transforms)), backend=backend)
    transition, td = env.step(env.reset().set("action", env.sample_action()))
    assert_apart(transition.exclude("observation"), td)


def test_on_processes_the_compiled_transforms_are_those_of_eager_mode():
    eager, compiled = gymnasium_cartpole("async", 2), tw.compile(gymnasium_cartpole("async", 2), backend="aot_eager")
    try:
        assert assert_plays_the_same(eager, compiled, 60, AOT)["done"].any()
    finally:
        eager.close()
        compiled.close()


def half_cheetah(info_keys=()):
    env = tw.make("HalfCheetah-v5", 3, max_episode_steps=20, info_keys=info_keys)
    return tw.TransformedEnv(env, seven())


def test_on_mujoco_the_compiled_transforms_are_those_of_eager_mode():
    assert assert_plays_the_same(half_cheetah(), tw.compile(half_cheetah(), backend="aot_eager"), 300, AOT)["done"].any()


def test_info_of_a_foreign_simulator_comes_through_and_takes_one_graph_more(graphs):
    eager, compiled = (half_cheetah(["x_position", "x_velocity"]) for _ in range(2))
    tw.compile(compiled, backend="counting")
    following = assert_plays_the_same(eager, compiled, 50, AOT)
    assert (following["info", "x_position"] != following["info", "x_velocity"]).all() and len(graphs) <= 3


def test_every_layer_on_a_foreign_simulator_is_compiled(graphs):
    def make():
        inner = tw.TransformedEnv(
            tw.make("CartPole-v1", 3, backend="gymnasium"), T.RecordEpisodeStatistics(), T.NormalizeReward()
        )
        return tw.TransformedEnv(tw.Wrapper(inner), T.NormalizeObservation(), T.TimeLimit(11))

    eager, compiled = make(), tw.compile(make(), backend="counting")
    assert len(graphs) == 4
    assert_plays_the_same(eager, compiled, 1, AOT)
    number = len(graphs)  # one more: only a first step tells the outer layer what the inner ones add
    assert_plays_the_same(eager, compiled, 100, AOT)
    assert len(graphs) == number <= 5


def test_on_a_foreign_simulator_train_and_eval_are_respected():
    eager, compiled = gymnasium_cartpole(), tw.compile(gymnasium_cartpole(), backend="aot_eager")
    for mode in (True, False, True):
        assert_plays_the_same(eager.train(mode), compiled.train(mode), 30, AOT)


@pytest.mark.parametrize("transform", [lambda: T.ClipReward(-0.5, 0.5), lambda: T.Compose([])], ids=["ClipReward", "none"])
def test_transforms_without_buffers_compile_on_a_foreign_simulator(transform):
    make = lambda: tw.TransformedEnv(tw.make("CartPole-v1", 2, backend="gymnasium"), transform())  # noqa: E731
    assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 40, AOT)


def test_a_foreign_simulator_without_transforms_is_refused():
    with pytest.raises(ValueError, match=r"compile needs tensor operators, but got .*CartPole-v1.* without transforms"):
        tw.compile(tw.make("CartPole-v1", 2, backend="gymnasium"))


def test_a_rollout_over_a_foreign_simulator_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"compile needs a rollout in tensors, but got .*CartPole-v1.*: compile the env\."):
        tw.compile(tw.Rollout(gymnasium_cartpole(), None, 3))


# What cannot be a graph.


class Branches(T.Transform):
    def step(self, td):
        return td.set("reward", td["reward"] * 2) if td["reward"].sum() > 5 else td


class TakesAnItem(T.RewardTransform):
    def reward(self, reward):
        return reward * reward.max().item()


class TakesAList(T.RewardTransform):
    def reward(self, reward):
        return reward + sum(reward.flatten().tolist())


class GoesThroughNumpy(T.RewardTransform):
    def reward(self, reward):
        return torch.from_numpy(reward.numpy() * 2)


class PicksRows(T.RewardTransform):
    def reward(self, reward):
        return reward + reward[reward > 2].sum()


class CountsRows(T.RewardTransform):
    def reward(self, reward):
        return reward + len((reward > 2).nonzero())


class Rebinds(T.RewardTransform):
    def setup(self, signature):
        self.register_buffer("steps", torch.zeros(signature.num_envs, 1), persistent=False)
        return signature

    def reward(self, reward):
        self.steps = self.steps + 1
        return reward + self.steps


class CountsInPython(T.RewardTransform):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def reward(self, reward):
        self.steps += 1
        return reward + self.steps


class KeepsATensor(T.RewardTransform):
    def setup(self, signature):
        self.last = torch.zeros(signature.num_envs, 1)
        return signature

    def reward(self, reward):
        last, self.last = self.last, reward * 1
        return reward + last


class KeepsAList(T.RewardTransform):
    def setup(self, signature):
        self.seen = [torch.zeros(signature.num_envs, 1)]
        return signature

    def reward(self, reward):
        self.seen.append(reward * 1)
        return reward + self.seen[-2]


REFUSED = [
    Branches,
    TakesAnItem,
    TakesAList,
    GoesThroughNumpy,
    PicksRows,
    CountsRows,
    Rebinds,
    CountsInPython,
    KeepsATensor,
    KeepsAList,
]


@pytest.mark.parametrize("transform", REFUSED)
def test_what_no_graph_can_do_is_refused_by_name_and_leaves_the_env_alone(transform):
    env, eager = (tw.TransformedEnv(ScriptedEnv(N), T.NormalizeReward(), transform(), T.TimeLimit(9)) for _ in range(2))
    td, eager_td = after(env, 4), after(eager, 4)
    before = env.snapshot()
    with pytest.raises(ValueError, match=rf"(?s)^compile needs .*, but got .*\b{transform.__name__}\b"):
        tw.compile(env, backend="aot_eager")
    assert_same(env.snapshot(), before)
    assert_same(play(env, 20, td)[0], play(eager, 20, eager_td)[0])


@pytest.mark.parametrize("transform", REFUSED)
def test_it_is_refused_on_a_foreign_simulator_too(transform):
    make = lambda: tw.TransformedEnv(tw.make("CartPole-v1", 2, backend="gymnasium"), T.NormalizeReward(), transform())  # noqa: E731
    env = make()
    with pytest.raises(ValueError, match=rf"(?s)^compile needs .*, but got .*\b{transform.__name__}\b"):
        tw.compile(env, backend="aot_eager")
    assert_plays_the_same(make(), env, 20)


@pytest.mark.parametrize("transform", REFUSED)
def test_it_is_refused_in_a_rollout_too(transform):
    env = tw.TransformedEnv(ScriptedEnv(N), transform())
    collect = tw.Rollout(env, None, 3)
    before = buffers(env)
    with pytest.raises(ValueError, match=rf"(?s)^compile needs .*, but got .*\b{transform.__name__}\b"):
        tw.compile(collect, backend="aot_eager")
    assert_same(buffers(env), before)
    eager = tw.TransformedEnv(ScriptedEnv(N), transform())
    assert_same(collect(env.reset(seed=0))[0], tw.rollout(eager, None, 3, eager.reset(seed=0))[0])


def looks(td):
    return torch.full((N, 6), 0.5 if td["observation"].sum() > 0 else -0.5)


def test_a_policy_that_looks_at_values_is_refused():
    collect = tw.Rollout(ScriptedEnv(N), looks, 3)
    with pytest.raises(ValueError, match=r"(?s)^compile needs .*, but got the policy"):
        tw.compile(collect, backend="aot_eager")
    assert (collect()[0]["action"] == 0.5).all()


class HalfReward(tw.Wrapper):
    def _step(self, td):
        successor = self.env._step(td)
        return successor.set("reward", successor["reward"] * (0.5 if successor["reward"].sum() > 0 else 1))


def test_a_wrapper_that_looks_at_values_is_refused_by_name():
    with pytest.raises(ValueError, match=r"(?s)^compile needs .*, but got .*HalfReward"):
        tw.compile(HalfReward(ScriptedEnv(N)), backend="aot_eager")


class LooksInReset(ScriptedEnv):
    def _reset(self, mask):
        return super()._reset(mask) if mask.any() else TensorDict({"observation": self._observation_now()}, [self.num_envs])


def test_an_env_that_looks_at_values_is_refused_by_name():
    with pytest.raises(ValueError, match=r"(?s)^compile needs .*, but got LooksInReset\._reset"):
        tw.compile(LooksInReset(N), backend="aot_eager")


def twice(target):
    return tw.compile(tw.compile(target, backend="eager"), backend="eager")


def bare():
    return ScriptedEnv(2)


WRONG = {
    "an env twice": (lambda: twice(bare()), ValueError, "compile needs what is not compiled yet, but got <ScriptedEnv"),
    "a foreign env twice": (lambda: twice(gymnasium_cartpole()), ValueError, "compile needs what is not compiled yet"),
    "a rollout twice": (
        lambda: twice(tw.Rollout(bare(), None, 3)),
        ValueError,
        "compile needs what is not compiled yet, but got Rollout",
    ),
    "a rollout over a compiled env": (
        lambda: tw.compile(tw.Rollout(tw.compile(bare(), backend="eager"), None, 3)),
        ValueError,
        "compile needs what is not compiled yet, but got Rollout",
    ),
    "a compiled env, wrapped": (
        lambda: tw.Wrapper(tw.compile(bare(), backend="eager")),
        ValueError,
        "Wrapper needs an env that is not compiled yet, but got <ScriptedEnv.*: compile it last",
    ),
    "a compiled foreign env, wrapped": (
        lambda: tw.TransformedEnv(tw.compile(gymnasium_cartpole(), backend="eager"), T.TimeLimit(3)),
        ValueError,
        "TransformedEnv needs an env that is not compiled yet",
    ),
    "an unroll of none": (
        lambda: tw.compile(tw.Rollout(bare(), None, 3), unroll=0),
        ValueError,
        "compile needs unroll of at least 1, but got 0",
    ),
    "a backend that nobody knows": (
        lambda: tw.compile(bare(), backend="nope"),
        ValueError,
        "compile needs a backend of torch.compile, but got 'nope'",
    ),
    "options for another backend": (
        lambda: tw.compile(bare(), backend="eager", options={"cpp_wrapper": False}),
        ValueError,
        "compile needs backend=\"inductor\" for options, but got 'eager'",
    ),
    "a module": (lambda: tw.compile(nn.Linear(2, 2)), TypeError, "compile needs an Env or a Rollout, but got Linear"),
    "a transform": (lambda: tw.compile(T.TimeLimit(3)), TypeError, "compile needs an Env or a Rollout, but got TimeLimit"),
    "an env in a list": (lambda: tw.compile([bare()]), TypeError, "compile needs an Env or a Rollout, but got list"),
    "a function": (lambda: tw.compile(bare), TypeError, "compile needs an Env or a Rollout, but got function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_to_be_compiled_is_refused(name):
    make, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        make()


# Copies.


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("replicate", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_compiled_env_goes_on_in_eager_mode_from_the_same_place(graphs, replicate):
    env = tw.compile(
        tw.TransformedEnv(ScriptedEnv(N), T.NormalizeObservation(), T.FrameStackObservation(2)), backend="counting"
    )
    td = after(env, 7)
    twin = replicate(env)
    before = buffers(env)
    expected, _ = play(env, 20, td.clone())
    env.restore(TensorDict({"buffers": before, "observation": td["observation"]}, []))
    assert_same(play(twin, 20, td.clone())[0], expected, AOT)
    assert_same(buffers(env), before)
    assert len(graphs) == 1
    tw.compile(twin, backend="counting")
    assert len(graphs) == 2


class Push(nn.Module):
    def forward(self, td):
        return torch.tanh(td["observation"].flatten(1)[:, :6])


@pytest.mark.parametrize("replicate", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_compiled_rollout_collects_the_same_in_eager_mode(graphs, replicate):
    env = tw.TransformedEnv(ScriptedEnv(N), T.NormalizeObservation(), T.FrameStackObservation(2))
    collect = tw.compile(tw.Rollout(env, Push(), 4, keys=["action", ("next", "reward")]), backend="counting")
    td, number = env.reset(seed=0), len(graphs)
    twin = replicate(collect)
    expected, _ = collect(td)
    assert_same(twin(td)[0], expected, AOT)
    assert_same(buffers(twin.env), buffers(env), AOT)
    assert twin.env is not env and len(graphs) == number
    tw.compile(twin, backend="eager")  # for it is not


# Policies in a compiled rollout.


class ActorCritic(nn.Module):
    """Gives logits and a value beside the action; its last layers have few numbers, which a compiler may keep as they are."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout))
        self.logits, self.value = nn.Linear(16, 2), nn.Linear(16, 1)

    def act(self, td):
        hidden = self.body(td["observation"].flatten(1))
        logits = self.logits(hidden)
        return td.update({"action": logits.argmax(-1), "logits": logits, "value": self.value(hidden)})

    forward = act


HOLDERS = {
    "the module": lambda network: network,
    "a bound method": lambda network: network.act,
    "a lambda": lambda network: lambda td: network(td),
    "a partial": lambda network: functools.partial(ActorCritic.act, network),
    "a list": lambda network: (lambda parts: lambda td: parts[0](td))([network]),
}


def optimize(network, other):
    optimizer = torch.optim.Adam(network.parameters(), 0.1)
    for _ in range(2):
        td = network(TensorDict({"observation": torch.ones(N, 8)}, [N]))
        (td["logits"].square().sum() + td["value"].sum()).backward()
        optimizer.step()


def load(network, other):
    network.load_state_dict(other.state_dict())


def policies(holder, **arguments):
    """The network, and a function that collects with it, compiled and in eager mode, and gives what both gave."""
    torch.manual_seed(0)
    network = ActorCritic(**arguments)
    policy = HOLDERS[holder](network)
    make = lambda: tw.TransformedEnv(tw.make("CartPole-v1", N), T.FrameStackObservation(2))  # noqa: E731
    collect, eager = tw.compile(tw.Rollout(make(), policy, 6), backend="eager"), tw.Rollout(make(), policy, 6)

    def both():
        data, expected = collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0]
        assert not any(leaf.requires_grad for leaf in leaves(data))
        return data, expected

    return network, both


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_compiled_rollout_follows_its_policy_as_that_learns(holder):
    network, both = policies(holder)
    seen = []
    for change in (load, optimize, load):
        data, expected = both()
        assert_same(data, expected, AOT)
        seen.append(data)
        change(network, ActorCritic())
    for before, after in itertools.pairwise(seen):
        assert all(((after[key] - before[key]).abs() > 1e-3).float().mean() > 0.9 for key in ("logits", "value"))


@pytest.mark.parametrize("holder", HOLDERS)
def test_dropout_is_on_in_train_and_off_in_eval(holder):
    network, both = policies(holder, dropout=0.5)
    for _ in range(2):
        network.train()
        (one, _), (other, _) = both(), both()
        assert (one["logits"] != other["logits"]).any(-1).float().mean() > 0.9
        network.eval()
        assert_same(*both(), AOT)


def test_tied_weights_are_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, td):
            return torch.tanh(self.two(self.one(td["observation"][:, :6] / 1000)))

    policy = Tied()
    collect, eager = (
        tw.compile(tw.Rollout(ScriptedEnv(N), policy, 4), backend="aot_eager"),
        tw.Rollout(ScriptedEnv(N), policy, 4),
    )
    for _ in range(2):
        assert_same(collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0], AOT)
        with torch.no_grad():
            policy.one.weight.mul_(0.5)


class Statistics(nn.Module):
    """A policy that remembers, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, td):
        self.calls.add_(1)
        return (self.calls / 100).expand(N, 6) * 1


def test_the_buffers_of_a_policy_are_written_and_left_alone_by_compiling():
    policy = Statistics()
    collect = tw.compile(tw.Rollout(ScriptedEnv(N), policy, 4), backend="aot_eager")
    assert policy.calls == 0
    first, td = collect()
    second, _ = collect(td)
    assert (torch.cat([first, second], 1)["action"][0, :, 0] * 100).round().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def categorical(td, **arguments):
    distribution = Categorical(logits=td["observation"].flatten(1)[:, :2], **arguments)
    action = distribution.sample()
    return td.update({"action": action, "log_prob": distribution.log_prob(action)})


def normal(td, **arguments):
    distribution = Normal(td["observation"].flatten(1)[:, :6] * 0 + 0.5, 2.0, **arguments)
    action = distribution.sample()
    return td.update({"action": action, "log_prob": distribution.log_prob(action).sum(-1)})


# Torch's distributions look at their arguments, unless they are told not to.
UNCHECKED = pytest.mark.parametrize("arguments", [{}, {"validate_args": False}], ids=["checked", "unchecked"])


@UNCHECKED
def test_a_categorical_policy_draws_anew_at_each_step_and_its_log_prob_is_kept(arguments):
    collect = tw.compile(tw.Rollout(cartpole(200), functools.partial(categorical, **arguments), 5), backend="aot_eager")
    data, td = collect(collect.env.reset(seed=0))
    data = torch.cat([data, collect(td)[0]], 1)
    logits = data["observation"].flatten(2)[..., :2]
    torch.testing.assert_close(data["log_prob"], Categorical(logits=logits).log_prob(data["action"]))
    share, expected = data["action"].float().mean(0), logits.softmax(-1)[..., 1].mean(0)
    assert ((share - expected).abs() < 0.16).all()  # of 200: more than four deviations
    assert all((one != other).any() for one, other in itertools.combinations(data["action"].unbind(1), 2))


def test_through_inductor_a_policy_that_draws_is_followed_as_it_learns():
    network = ActorCritic()

    def policy(td):
        distribution = Categorical(logits=network(td)["logits"], validate_args=False)
        return td.set("action", distribution.sample())

    env = tw.TransformedEnv(tw.make("CartPole-v1", 200), T.FrameStackObservation(2))
    collect = tw.compile(tw.Rollout(env, policy, 5))
    td = env.reset(seed=0)
    for _ in range(3):
        data, td = collect(td)
        with torch.no_grad():
            expected = network.logits(network.body(data["observation"].flatten(2)))
        torch.testing.assert_close(data["logits"], expected, rtol=INDUCTOR, atol=INDUCTOR)
        share, expected = data["action"].float().mean(0), expected.softmax(-1)[..., 1].mean(0)
        assert ((share - expected).abs() < 0.16).all()  # of 200: more than four deviations
        assert all((one != other).any() for one, other in itertools.combinations(data["action"].unbind(1), 2))
        optimize(network, None)


@UNCHECKED
def test_a_normal_policy_draws_anew_at_each_step_and_its_log_prob_is_kept(arguments):
    collect = tw.compile(tw.Rollout(ScriptedEnv(500), functools.partial(normal, **arguments), 5), backend="aot_eager")
    data, td = collect()
    data = torch.cat([data, collect(td)[0]], 1)
    action = data["action"]
    torch.testing.assert_close(data["log_prob"], Normal(0.5, 2.0).log_prob(action).sum(-1))
    torch.testing.assert_close(data["next", "info", "action"], action)
    assert abs(action.mean() - 0.5) < 0.06 and abs(action.std() - 2) < 0.04  # of 30,000: five deviations
    assert len(action.unique()) > 29_000


def assert_collects_the_same(make, num_steps, tolerance, **arguments):
    collect, eager = tw.Rollout(make(), None, num_steps), tw.Rollout(make(), None, num_steps)
    tw.compile(collect, **arguments)
    td, eager_td = collect.env.reset(seed=0), eager.env.reset(seed=0)
    for _ in range(3):
        (data, td), (expected, eager_td) = collect(td), eager(eager_td)
        assert data.names == expected.names == [None, "time"] and data.batch_size == (N, num_steps)
        assert_same(data, expected, tolerance)
        assert_same(td, eager_td, tolerance)
        assert_same(buffers(collect.env), buffers(eager.env), tolerance)


@pytest.mark.parametrize("name", ["Compose of none", "Compose of seven"])
def test_compiled_random_rollouts_are_those_of_eager_mode(name):
    assert_collects_the_same(functools.partial(stack, name), 6, AOT, backend="aot_eager")


@pytest.mark.parametrize(("num_steps", "unroll"), [(1, 1), (1, 2), (5, 1), (5, 2), (4, 2)])
def test_rollouts_of_any_length_may_be_unrolled(num_steps, unroll):
    assert_collects_the_same(functools.partial(ScriptedEnv, N, (2,)), num_steps, 0, backend="eager", unroll=unroll)


def test_through_inductor_rollouts_over_500_steps_are_those_of_eager_mode():
    collect, eager = tw.compile(tw.Rollout(cartpole(), None, 6)), tw.Rollout(cartpole(), None, 6)
    td, eager_td, ends = collect.env.reset(seed=0), eager.env.reset(seed=0), 0
    for _ in range(STEPS // 6 + 1):
        (data, td), (expected, eager_td) = collect(td), eager(eager_td)
        assert_same(data, expected, INDUCTOR)
        assert_same(buffers(collect.env), buffers(eager.env), INDUCTOR)
        ends += data["next", "done"].sum()
    assert ends > 50


KEYS = ["action", ("observation", "image"), ("next", "reward"), ("next", "observation", "rest"), ("next", "info")]


def test_a_compiled_rollout_keeps_the_keys_that_are_asked_for():
    make = functools.partial(stack, "Compose of none")
    collect, eager = (
        tw.compile(tw.Rollout(make(), None, 5, keys=KEYS), backend="aot_eager"),
        tw.Rollout(make(), None, 5, keys=KEYS),
    )
    for _ in range(2):
        data = collect(collect.env.reset(seed=0))[0]
        assert_same(data, eager(eager.env.reset(seed=0))[0])
    assert set(data.keys()) == {"action", "observation", "next"} and set(data["observation"].keys()) == {"image"}


def test_keys_that_are_not_there_are_refused_when_a_rollout_is_compiled():
    env = ScriptedEnv(2)
    before = buffers(env)
    with pytest.raises(ValueError, match=r"Rollout needs keys among .*, but got \['value'\]"):
        tw.compile(tw.Rollout(env, None, 3, keys=["action", "value"]), backend="aot_eager")
    assert_same(buffers(env), before)


def test_a_compiled_rollout_respects_the_modes_of_its_env():
    make = functools.partial(stack, "NormalizeObservation")
    collect, eager = tw.compile(tw.Rollout(make(), None, 6), backend="aot_eager"), tw.Rollout(make(), None, 6)
    for mode in (False, True, False):
        collect.env.train(mode)
        eager.env.train(mode)
        assert_same(collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0], AOT)
        assert_same(buffers(collect.env), buffers(eager.env), AOT)


def test_rollouts_and_steps_of_the_same_env_take_turns():
    env, other = stack("Compose of seven"), stack("Compose of seven")
    collect = tw.compile(tw.Rollout(env, None, 4), backend="aot_eager")
    td, other_td = env.reset(seed=0), other.reset(seed=0)
    for _ in range(5):
        (_, td), (_, other_td) = collect(td), tw.rollout(other, None, 4, other_td)
        assert_same(env.snapshot(), other.snapshot(), AOT)
        td, other_td = (one.reset(mask=torch.arange(N) < 2) for one in (env, other))
        assert_same(td, other_td, AOT)
        (_, td), (_, other_td) = play(env, 3, td), play(other, 3, other_td)
        assert_same(env.snapshot(), other.snapshot(), AOT)


# On CUDA.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
@pytest.mark.parametrize("static_outputs", [False, True])
def test_on_cuda_a_captured_step_is_that_of_eager_mode(static_outputs):
    make = functools.partial(stack, "Compose of seven", device="cuda")
    compiled = tw.compile(make(), static_outputs=static_outputs)
    assert_plays_the_same(make(), compiled, STEPS, INDUCTOR)
    assert_plays_the_same(make().eval(), compiled.eval(), 20, 1e9)


@needs_cuda
@pytest.mark.parametrize("name", TRANSFORMS)
def test_on_cuda_no_step_of_a_transform_waits_for_the_device(name):
    env = tw.compile(stack(name, device="cuda"), backend="aot_eager")
    td = env.reset(seed=0)
    for phase in range(2):  # what is captured at the first step is captured by then
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if phase else "default")
        try:
            for _ in range(1000 if phase else 3):
                _, td = env.step(td.set("action", env.sample_action()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_plays_the_same(stack(name, device="cuda"), tw.compile(stack(name, device="cuda"), backend="aot_eager"), STEPS, AOT)


@needs_cuda
@pytest.mark.parametrize("static_outputs", [False, True])
def test_on_cuda_outputs_are_copies_unless_they_are_to_be_static(static_outputs):
    env = tw.compile(stack("Compose of seven", device="cuda"), backend="aot_eager", static_outputs=static_outputs)
    held, td = [], env.reset(seed=0)
    for _ in range(4):
        transition, td = env.step(td.set("action", env.sample_action()))
        held.append(transition["next", "observation"])
    assert (len({value.data_ptr() for value in held}) == 1) is static_outputs
    assert (held[0] == held[-1]).all() == static_outputs


@needs_cuda
def test_on_cuda_compiling_and_capturing_leave_the_state_as_it_was():
    env, eager = (stack("Compose of seven", device="cuda") for _ in range(2))
    td, eager_td = after(env, 7), after(eager, 7)
    before = env.snapshot()
    tw.compile(env, backend="aot_eager")
    assert_same(env.snapshot(), before)
    assert_same(play(env, 30, td)[0], play(eager, 30, eager_td)[0], AOT)


@needs_cuda
def test_on_cuda_an_env_that_moves_is_captured_anew():
    env = tw.compile(stack("Compose of seven"), backend="aot_eager")
    for device in ("cuda", "cpu", "cuda"):
        assert_plays_the_same(stack("Compose of seven", device=device), env.to(device), 20, 1e9)
        assert env.device.type == device
    env.load_state_dict({name: value.clone() for name, value in env.state_dict().items()}, assign=True)
    before = env.snapshot()
    once, _ = play(env, 9, env.restore(before))
    assert_same(play(env, 9, env.restore(before))[0], once, AOT)


@needs_cuda
@pytest.mark.parametrize("static_outputs", [False, True])
def test_on_cuda_a_captured_rollout_is_that_of_eager_mode_and_follows_its_policy(static_outputs):
    torch.manual_seed(0)
    network = ActorCritic().cuda()
    collect = tw.compile(tw.Rollout(cartpole(device="cuda"), network, 6), static_outputs=static_outputs)
    eager = tw.Rollout(cartpole(device="cuda"), network, 6)
    for _ in range(3):
        assert_same(collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0], INDUCTOR)
        with torch.no_grad():
            network.logits.bias.add_(0.5)


@needs_cuda
def test_on_cuda_captured_random_rollouts_draw_anew_each_time():
    collect = tw.compile(tw.Rollout(cartpole(200, device="cuda"), categorical, 5), backend="aot_eager")
    data, td = collect()
    assert (collect(td)[0]["action"] != data["action"]).any()


@needs_cuda
def test_on_cuda_the_transforms_on_a_foreign_simulator_are_captured():
    def make():
        env = tw.make("CartPole-v1", 4, backend="gymnasium", max_episode_steps=25, device="cuda")
        return tw.TransformedEnv(env, sixfold())

    assert_plays_the_same(make(), tw.compile(make()), 300, INDUCTOR)
