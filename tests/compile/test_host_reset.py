"""Host-driven auto-reset: a partial reset computes the finished rows only, and matches eager mode."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from catalogue import COMPILED, ENDINGS, TRANSFORMS, WRAPPERS, cartpole, seven
from helpers import AOT, INDUCTOR, after, assert_plays_the_same, assert_same, buffers, mostly_full, play
from tensordict import TensorDict
from torch import Tensor

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import host_reset
from torchwrap.envs.cartpole import CartPole
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import ScriptedEnv

N = 64  # a partial reset covers at most 4 of them
LENGTHS = (*[17] * 6, *range(18, 60))  # several end at once, then one at a time
scripted = functools.partial(ScriptedEnv, episode_lengths=LENGTHS)
full = pytest.mark.full


@pytest.fixture(autouse=True)
def small_minimum(monkeypatch):
    """Lowers the minimum batch size for a host-side check of `done`."""
    monkeypatch.setattr(host_reset, "_MIN_HOST_RESET_ENVS", N)


@pytest.fixture
def runs(monkeypatch):
    """How many steps ended no episode, had a partial reset, and had a full reset."""
    counter = Counter()
    original = host_reset.HostAutoReset.__call__

    def counting(self, done, observation):
        number = int(done.sum())
        counter["none" if not number else "full" if number > self.max_partial else "partial"] += 1
        return original(self, done, observation)

    monkeypatch.setattr(host_reset.HostAutoReset, "__call__", counting)
    return counter


def stack(name, num_envs=N, **arguments):
    make, make_env = COMPILED[name]
    scripted = make_env is ScriptedEnv or getattr(make_env, "func", None) is ScriptedEnv
    return tw.TransformedEnv(make_env(num_envs, **{**({"episode_lengths": LENGTHS} if scripted else {}), **arguments}), make())


def out_of_phase(env):
    """The root after three envs were reset later than the others, so that a time limit does not end all episodes at once."""
    after(env, 5)
    return env.reset(mask=torch.arange(N) < 3)


def assert_continues_the_same(eager, compiled, num_steps):
    expected, given = (play(env, num_steps, out_of_phase(env))[0] for env in (eager, compiled))
    assert_same(given, expected, AOT)


@pytest.mark.parametrize("name", mostly_full(TRANSFORMS, "FrameStackObservation", "StickyAction", "NormalizeReward"))
def test_transform_matches_eager(name, runs):
    assert_continues_the_same(stack(name), tw.compile(stack(name), backend="aot_eager"), 90)
    assert runs["partial"]


ENVS = {
    "CartPole": functools.partial(cartpole, N),
    "CartPole, float64": functools.partial(tw.make, "CartPole-v1", N, dtype=torch.float64),
    "Acrobot": lambda: tw.TransformedEnv(tw.make("Acrobot-v1", N), T.TimeLimit(11)),
    "Pendulum": lambda: tw.TransformedEnv(tw.make("Pendulum-v1", N), T.StickyAction(0.3), T.TimeLimit(13)),
    "MountainCar": lambda: tw.TransformedEnv(tw.make("MountainCar-v0", N), T.TimeLimit(12)),
    "a reset pool as large as the batch": lambda: tw.FunctionalEnv(CartPole(), N, reset_pool=N),
    "action_repeat": lambda: tw.FunctionalEnv(Pendulum(), N, max_episode_steps=32, action_repeat=3),
    "RepeatAction": functools.partial(WRAPPERS["RepeatAction"], N, episode_lengths=LENGTHS),
    "MaxAndSkipObservation": functools.partial(WRAPPERS["MaxAndSkipObservation"], N, episode_lengths=LENGTHS),
    "a shard": lambda: tw.make("CartPole-v1", N, first_index=1000),
    "layers": lambda: tw.TransformedEnv(tw.TransformedEnv(scripted(N), T.TimeLimit(21)), seven()),
}


@pytest.mark.parametrize("name", mostly_full(ENVS, "RepeatAction"))
def test_env_matches_eager(name, runs):
    assert_continues_the_same(ENVS[name](), tw.compile(ENVS[name](), backend="aot_eager"), 60)
    assert runs["partial"]


@pytest.mark.parametrize("name", mostly_full(ENDINGS))
def test_episodes_that_end_in_any_way_match_eager(name, runs):
    make = functools.partial(stack, "Compose of seven", **ENDINGS[name])
    assert_plays_the_same(make(), tw.compile(make(), backend="aot_eager"), 60, AOT)
    assert dict(runs).keys() == {"never": {"none"}, "all at once": {"none", "full"}, "at every step": {"full"}}.get(
        name, {"none", "partial", "full"}
    )


ROWS = [[0], [63], [0, 1, 2, 3], [60, 61, 62, 63], [3, 4, 62], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("rows", mostly_full(ROWS, [63], [3, 4, 62], [0, 1, 2, 3, 4]), ids=str)
def test_finished_rows_alone_are_reset(rows, runs):
    eager, compiled = scripted(N), tw.compile(scripted(N), backend="aot_eager")
    for env in (eager, compiled):
        env.reset(seed=0)
        env.elapsed[rows] = 36
    one, other = (env.step(TensorDict({"action": torch.zeros(N, 6)}, [N])) for env in (eager, compiled))
    assert_same(other[0], one[0])
    assert_same(other[1], one[1])
    assert_same(buffers(compiled), buffers(eager))
    assert other[0]["next", "done"].squeeze(1).nonzero().squeeze(1).tolist() == rows
    assert runs == {"partial" if len(rows) <= 4 else "full": 1}


WITHOUT_DONE = ["observation", ("next", "reward")]


@pytest.mark.parametrize(
    ("name", "backend", "keys", "unroll"),
    [
        pytest.param("Compose of seven", "aot_eager", None, 1, marks=full),
        pytest.param("Compose of seven", "aot_eager", None, 4, marks=full),
        ("Compose of two", "aot_eager", WITHOUT_DONE, 1),
        pytest.param("Compose of seven", "aot_eager", WITHOUT_DONE, 1, marks=full),
        pytest.param("Compose of seven", "aot_eager", WITHOUT_DONE, 4, marks=full),
        pytest.param("Compose of seven", "inductor", WITHOUT_DONE, 1, marks=full),
    ],
)
def test_collector_matches_eager(name, backend, keys, unroll, runs):
    def make():
        return tw.Collector(stack(name), lambda td: td["observation"][:, -1, :6].tanh(), 25, keys=keys)

    eager, compiled = make(), tw.compile(make(), backend=backend, unroll=unroll)
    tolerance = AOT if backend == "aot_eager" else INDUCTOR
    td, other = (collect.env.reset(seed=0) for collect in (eager, compiled))
    for _ in range(4):
        (expected, td), (given, other) = eager(td), compiled(other)
        assert_same(given, expected, tolerance)
        assert_same(other, td, tolerance)
        assert_same(buffers(compiled.env), buffers(eager.env), tolerance)
    assert bool(runs) == (unroll == 1)


@full
@pytest.mark.parametrize("make", [functools.partial(stack, "Compose of seven"), ENVS["CartPole"]], ids=["seven", "CartPole"])
def test_env_through_inductor_matches_eager(make, runs):
    assert_plays_the_same(make(), tw.compile(make()), 120, INDUCTOR)
    assert runs["partial"] and runs["full"]


@pytest.mark.parametrize("name", mostly_full(("NormalizeReward", "Compose of seven"), "NormalizeReward"))
def test_graphs_are_traced_by_compile_and_not_during_a_run(graphs, name):
    env = tw.compile(stack(name), backend="counting")
    assert len(graphs) == 3
    after(env, 90)
    assert len(graphs) == 3


@full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_graphs_traced_in_inference_mode_match_eager(backend, runs):
    eager, compiled = ENVS["CartPole"](), tw.compile(ENVS["CartPole"](), backend=backend)
    given = []
    for env in (eager, compiled):
        td = env.eval().reset(seed=0)
        with torch.inference_mode():  # eval mode is traced here
            given.append(play(env, 40, td)[0].clone())
    assert_same(*given, INDUCTOR)
    assert runs["partial"]
    assert_plays_the_same(eager.train(), compiled.train(), 40, INDUCTOR)


def test_frozen_statistics_stay_frozen_in_a_partial_reset(runs):
    eager, compiled = stack("NormalizeObservation"), tw.compile(stack("NormalizeObservation"), backend="aot_eager")
    for env in (eager, compiled):
        after(env, 20)
        env.eval()
    before = compiled.transforms[0].statistics.count.clone()
    assert_plays_the_same(eager, compiled, 60, AOT)
    assert runs["partial"] and compiled.transforms[0].statistics.count == before


class OwnBuffers(T.RewardTransform):
    """A user's transform whose state is a plain buffer instead of an `EnvBuffer`."""

    def setup(self, signature):
        self.register_buffer("steps", torch.zeros(signature.num_envs, 1), persistent=False)
        return signature

    def reward(self, reward: Tensor) -> Tensor:
        return reward + self.steps.add_(1)

    def reset(self, td, mask):
        self.steps.masked_fill_(mask.column, 0)
        return td


class OwnNumber(OwnBuffers):
    """A user's transform that keeps the number of envs."""

    def setup(self, signature):
        self.num_envs = signature.num_envs
        self.register_env_buffer("steps", torch.zeros(signature.num_envs, 1))
        return signature

    def reset(self, td, mask):
        self.steps.mul_((~mask.tensor).float().view(self.num_envs, 1))
        return td


@pytest.mark.parametrize("kind", [OwnBuffers, OwnNumber])
def test_transform_that_cannot_be_restricted_to_rows_has_full_resets(kind, runs):
    def make():
        return tw.TransformedEnv(scripted(N), kind(), T.FrameStackObservation(2))

    with pytest.warns(UserWarning, match=rf"resets all {N} envs .* EnvBuffer.* {kind.__name__}\.reset"):
        compiled = tw.compile(make(), backend="aot_eager")
    assert_plays_the_same(make(), compiled, 90, AOT)
    assert runs["full"] and not runs["partial"]


@pytest.mark.parametrize("name", mostly_full(("NormalizeReward", "Compose of seven"), "NormalizeReward"))
def test_fewer_envs_than_the_minimum_are_one_graph(runs, graphs, name):
    make = functools.partial(stack, name, N - 1)
    assert_plays_the_same(make(), tw.compile(make(), backend="counting"), 60, AOT)
    assert not runs and len(graphs) == 1
