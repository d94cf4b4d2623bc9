"""Every layer is stepped through its own `_step`, compiled or not, and what is compiled belongs to one object."""

import itertools

import pytest
import torch
from catalogue import NUM_ENVS, Push, gymnasium_cartpole
from helpers import AOT, after, assert_same, buffers, each_copy, play

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

full, long = pytest.mark.full, pytest.mark.long


def overriding(kind, method):
    """A subclass with its own `_step`, whose reward is -7; or its own `_reset`, whose observations are -77."""

    class Override(kind):
        def _step(self, action):
            successor = super()._step(action)
            return successor.set("reward", torch.full_like(successor["reward"], -7))

        def _reset(self, mask, options=None):
            td = super()._reset(mask, options)
            return td.set("observation", torch.full_like(td["observation"], -77))

    delattr(Override, "_reset" if method == "_step" else "_step")
    return Override


def make_env(kind, depth, method, backend="torch"):
    """Three layers on an env, one of which overrides a method."""
    env = (
        ScriptedEnv(32, (3,), (5, 3, 11, 4, 9))
        if backend == "torch"
        else tw.make("CartPole-v1", 8, backend=backend)
    )
    for level, plain in {
        "innermost": tw.TransformedEnv,
        "middle": tw.Wrapper,
        "outermost": tw.TransformedEnv,
    }.items():
        layer = overriding(kind, method) if level == depth else plain
        env = (
            layer(env, T.TimeLimit(30), T.ScaleReward(1))
            if issubclass(layer, tw.TransformedEnv)
            else layer(env)
        )
    return env


def stepped(env):
    td, transitions = env.reset(seed=0), []
    for _ in range(24):
        transition, td = env.step(td.set("action", env.sample_action()))
        transitions.append(transition)
    return torch.stack(transitions, 1)


def collected(collect):
    first, td = collect(collect.env.reset(seed=0))
    return torch.cat([first, collect(td)[0]], 1)


def compiled(target):
    return tw.compile(target, backend="aot_eager")


# How an env is run, and whether a simulator on the host steps it. Each returns transitions (num_envs, 24).
WAYS = {
    "eager": (stepped, "torch"),
    "eager, host-stepped": (stepped, "gymnasium"),
    "eager collector": (lambda env: collected(tw.Collector(env, None, 12)), "torch"),
    "compiled": (lambda env: stepped(compiled(env)), "torch"),
    "compiled, host-stepped": (lambda env: stepped(compiled(env)), "gymnasium"),
    "compiled collector": (lambda env: collected(compiled(tw.Collector(env, None, 12))), "torch"),
}
OVERRIDES = list(
    itertools.product(
        [tw.TransformedEnv, tw.Wrapper], ["outermost", "middle", "innermost"], ["_step", "_reset"]
    )
)
FEW = (
    0,
    3,
    4,
    7,
    8,
    11,
)  # each class, depth and method; the third is a reset in the middle, between two layers
CASES = [
    pytest.param(
        way,
        *override,
        marks=() if "eager" in way or number == 3 else full if number in FEW else [full, long],
    )
    for way in WAYS
    for number, override in enumerate(OVERRIDES)
]


@pytest.mark.parametrize(("way", "kind", "depth", "method"), CASES)
def test_method_overridden_in_any_layer_takes_effect(way, kind, depth, method):
    run, backend = WAYS[way]
    data = run(make_env(kind, depth, method, backend))
    done = data["next", "done"][:, :-1, 0]
    assert done.any() and not done.all(0).any()
    assert (data["next", "reward"] == -7).all() == (method == "_step")
    initial = (data["observation"] == -77).all(-1)
    assert (data["next", "observation"] != -77).any(-1).all()
    if method == "_step":
        assert not initial.any()
    else:
        assert initial[:, 0].all() and (initial[:, 1:] == done).all()


def test_options_reach_a_reset_overridden_in_the_middle():
    class TakesOptions(tw.Wrapper):
        def _check_options(self, options):
            assert set(options) == {"observation"}

        def _reset(self, mask, options=None):
            td = self.env._reset(mask)
            return td.set(
                "observation",
                torch.full_like(td["observation"], (options or {"observation": 1})["observation"]),
            )

    env = compiled(tw.TransformedEnv(TakesOptions(ScriptedEnv(2, (3,))), T.TimeLimit(3)))
    assert (env.reset(options={"observation": 5})["observation"] == 5).all()
    assert (env.reset()["observation"] == 1).all()


def test_is_compiled_of_a_host_stepped_env_is_true_from_the_innermost_transforms_on():
    env = tw.TransformedEnv(tw.Wrapper(gymnasium_cartpole()), T.TimeLimit(3))
    tw.compile(env, backend="eager")
    assert [layer.is_compiled for layer in (env, env.env, env.env.env, env.unwrapped)] == [
        True,
        True,
        True,
        False,
    ]


class TestCopy:
    """A copied or unpickled object runs eagerly, from the state of the original."""

    @each_copy
    def test_of_compiled_env_continues_eagerly(self, graphs, replicate):
        env = tw.TransformedEnv(
            ScriptedEnv(NUM_ENVS), T.NormalizeObservation(), T.FrameStackObservation(2)
        )
        tw.compile(env, backend="counting")
        td = after(env, 7)
        twin = replicate(env)
        assert env.is_compiled and not any(layer.is_compiled for layer in (twin, twin.env))
        before, snapshot = buffers(env), env.snapshot()
        expected, _ = play(env, 20, td.clone())
        env.restore(snapshot)
        assert_same(play(twin, 20, td.clone())[0], expected, AOT)
        assert_same(buffers(env), before)
        assert len(graphs) == 1
        assert not tw.Wrapper(replicate(twin)).is_compiled  # which a compiled env would refuse

    @full
    @each_copy
    def test_of_compiled_collector_collects_eagerly(self, graphs, replicate):
        env = tw.TransformedEnv(
            ScriptedEnv(NUM_ENVS), T.NormalizeObservation(), T.FrameStackObservation(2)
        )
        collect = tw.compile(
            tw.Collector(env, Push(), 4, keys=["action", ("next", "reward")]), backend="counting"
        )
        td, number = env.reset(seed=0), len(graphs)
        twin = replicate(collect)
        assert collect.is_compiled and not twin.is_compiled
        expected, _ = collect(td)
        assert_same(twin(td)[0], expected, AOT)
        assert_same(buffers(twin.env), buffers(env), AOT)
        assert twin.env is not env and len(graphs) == number
        assert tw.compile(twin, backend="eager").is_compiled
