"""Few new episodes among many envs, in a graph that knows those alone, against eager mode, which knows all of them."""

from __future__ import annotations

import functools
import sys
from collections import Counter

import pytest
import torch
from catalogue import TRANSFORMS, WRAPPERS, seven
from tensordict import TensorDict
from test_compile import AOT, ENDINGS, INDUCTOR, after, assert_plays_the_same, assert_same, buffers, cartpole, play
from torch import Tensor

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.envs.cartpole import CartPole
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import ScriptedEnv

N = 64  # of which 4 are few
LENGTHS = (*[17] * 6, *range(18, 60))  # many at once, and few
scripted = functools.partial(ScriptedEnv, episode_lengths=LENGTHS)


@pytest.fixture(autouse=True)
def looking(monkeypatch):
    """As if so few envs were many, so that the host looks who ended."""
    monkeypatch.setattr(sys.modules["torchwrap.compile"], "_ENOUGH", N)


@pytest.fixture
def runs(monkeypatch):
    """How often no episode ended, how often few, which have a graph of their own, and how often more."""
    counter = Counter()
    begin_anew = sys.modules["torchwrap.compile"]._BeginAnew

    def counting(self, done, observation, original=begin_anew.__call__):
        number = int(done.sum())
        counter["none" if not number else "all" if number > self.num_few else "few"] += 1
        return original(self, done, observation)

    monkeypatch.setattr(begin_anew, "__call__", counting)
    return counter


def stack(name, num_envs=N, **arguments):
    make, make_env = TRANSFORMS[name]
    scripted = make_env is ScriptedEnv or getattr(make_env, "func", None) is ScriptedEnv
    return tw.TransformedEnv(make_env(num_envs, **{**({"episode_lengths": LENGTHS} if scripted else {}), **arguments}), make())


def apart(env):
    """Where to act when three envs have begun later than the others, so that a limit does not end all of them at once."""
    after(env, 5)
    return env.reset(mask=torch.arange(N) < 3)


def assert_goes_on_the_same(eager, compiled, num_steps):
    expected, given = (play(env, num_steps, apart(env))[0] for env in (eager, compiled))
    assert_same(given, expected, AOT)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_begins_few_episodes_as_in_eager_mode(name, runs):
    assert_goes_on_the_same(stack(name), tw.compile(stack(name), backend="aot_eager"), 90)
    assert runs["few"]


WORLDS = {
    "CartPole": functools.partial(cartpole, N),
    "CartPole, float64": functools.partial(tw.make, "CartPole-v1", N, dtype=torch.float64),
    "Acrobot": lambda: tw.TransformedEnv(tw.make("Acrobot-v1", N), T.TimeLimit(11)),
    "Pendulum": lambda: tw.TransformedEnv(tw.make("Pendulum-v1", N), T.StickyAction(0.3), T.TimeLimit(13)),
    "MountainCar": lambda: tw.TransformedEnv(tw.make("MountainCar-v0", N), T.TimeLimit(12)),
    "a pool as large as the batch": lambda: tw.FunctionalEnv(CartPole(), N, reset_pool=N),
    "action_repeat": lambda: tw.FunctionalEnv(Pendulum(), N, max_episode_steps=32, action_repeat=3),
    "RepeatAction": functools.partial(WRAPPERS["RepeatAction"], N, episode_lengths=LENGTHS),
    "MaxAndSkipObservation": functools.partial(WRAPPERS["MaxAndSkipObservation"], N, episode_lengths=LENGTHS),
    "a shard": lambda: tw.make("CartPole-v1", N, first_index=1000),
    "layers": lambda: tw.TransformedEnv(tw.TransformedEnv(scripted(N), T.TimeLimit(21)), seven()),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_begins_few_episodes_as_in_eager_mode(name, runs):
    assert_goes_on_the_same(WORLDS[name](), tw.compile(WORLDS[name](), backend="aot_eager"), 60)
    assert runs["few"]


@pytest.mark.parametrize("name", ENDINGS)
def test_however_episodes_end_it_is_as_in_eager_mode(name, runs):
    make = functools.partial(stack, "Compose of seven", **ENDINGS[name])
    assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 60, AOT)
    assert dict(runs).keys() == {"never": {"none"}, "all at once": {"none", "all"}, "at every step": {"all"}}.get(
        name, {"none", "few", "all"}
    )


@pytest.mark.parametrize("which", [[0], [63], [0, 1, 2, 3], [60, 61, 62, 63], [3, 4, 62], [0, 1, 2, 3, 4]], ids=str)
def test_whichever_envs_end_those_alone_begin_anew(which, runs):
    eager, compiled = scripted(N), tw.compile(scripted(N), backend="aot_eager")
    for env in (eager, compiled):
        env.reset(seed=0)
        env.elapsed[which] = 36
    one, other = (env.step(TensorDict({"action": torch.zeros(N, 6)}, [N])) for env in (eager, compiled))
    assert_same(other[0], one[0])
    assert_same(other[1], one[1])
    assert_same(buffers(compiled), buffers(eager))
    assert other[0]["next", "done"].squeeze(1).nonzero().squeeze(1).tolist() == which
    assert runs == {"few" if len(which) <= 4 else "all": 1}


WITHOUT_DONE = ["observation", ("next", "reward")]


@pytest.mark.parametrize(
    ("backend", "keys", "unroll"),
    [
        ("aot_eager", None, 1),
        ("aot_eager", None, 4),
        ("aot_eager", WITHOUT_DONE, 1),
        ("aot_eager", WITHOUT_DONE, 4),
        ("inductor", WITHOUT_DONE, 1),
    ],
)
def test_rollouts_begin_few_episodes_as_in_eager_mode(backend, keys, unroll, runs):
    def make():
        return tw.Rollout(stack("Compose of seven"), lambda td: td["observation"][:, -1, :6].tanh(), 25, keys=keys)

    eager, compiled = make(), tw.compile(make(), backend=backend, unroll=unroll)
    tolerance = AOT if backend == "aot_eager" else INDUCTOR
    td, other = (collect.env.reset(seed=0) for collect in (eager, compiled))
    for _ in range(4):
        (expected, td), (given, other) = eager(td), compiled(other)
        assert_same(given, expected, tolerance)
        assert_same(other, td, tolerance)
        assert_same(buffers(compiled.env), buffers(eager.env), tolerance)
    assert bool(runs) == (unroll == 1)


@pytest.mark.parametrize("make", [functools.partial(stack, "Compose of seven"), WORLDS["CartPole"]], ids=["seven", "CartPole"])
def test_through_inductor_it_is_as_in_eager_mode(make, runs):
    assert_plays_the_same(make(), tw.compile(make()), 120, INDUCTOR)
    assert runs["few"] and runs["all"]


def test_graphs_are_made_at_once_and_none_in_the_middle_of_a_run(graphs):
    env = tw.compile(stack("Compose of seven"), backend="counting")
    assert len(graphs) == 3
    after(env, 90)
    assert len(graphs) == 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_graphs_are_made_in_inference_mode_too(backend, runs):
    eager, compiled = WORLDS["CartPole"](), tw.compile(WORLDS["CartPole"](), backend=backend)
    given = []
    for env in (eager, compiled):
        td = env.eval().reset(seed=0)
        with torch.inference_mode():  # where both modes of evaluating meet, another graph is made
            given.append(play(env, 40, td)[0].clone())
    assert_same(*given, INDUCTOR)
    assert runs["few"]
    assert_plays_the_same(eager.train(), compiled.train(), 40, INDUCTOR)


def test_frozen_statistics_stay_frozen_when_few_begin_anew(runs):
    eager, compiled = stack("NormalizeObservation"), tw.compile(stack("NormalizeObservation"), backend="aot_eager")
    for env in (eager, compiled):
        after(env, 20)
        env.eval()
    before = compiled.transform.statistics.count.clone()
    assert_plays_the_same(eager, compiled, 60, AOT)
    assert runs["few"] and compiled.transform.statistics.count == before


class OwnBuffers(T.RewardTransform):
    """What was written for an earlier torchwrap, or by somebody who does not know `register_rows`."""

    def setup(self, signature):
        self.register_buffer("steps", torch.zeros(signature.num_envs, 1), persistent=False)
        return signature

    def reward(self, reward: Tensor) -> Tensor:
        return reward + self.steps.add_(1)

    def reset(self, td, mask):
        self.steps.masked_fill_(mask.unsqueeze(1), 0)
        return td


class OwnNumber(OwnBuffers):
    """One that knows how many envs there are."""

    def setup(self, signature):
        self.num_envs = signature.num_envs
        self.register_rows("steps", torch.zeros(signature.num_envs, 1))
        return signature

    def reset(self, td, mask):
        self.steps.mul_((~mask).float().view(self.num_envs, 1))
        return td


@pytest.mark.parametrize("kind", [OwnBuffers, OwnNumber])
def test_what_cannot_be_narrowed_begins_all_episodes_in_one_graph(kind, runs):
    def make():
        return tw.TransformedEnv(scripted(N), kind(), T.FrameStackObservation(2))

    assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 90, AOT)
    assert runs["all"] and not runs["few"]


def test_fewer_envs_than_it_pays_for_are_one_graph(runs):
    make = functools.partial(stack, "Compose of seven", N - 1)
    assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 60, AOT)
    assert not runs
