"""Every layer is stepped through its own `_step`; compiled graphs belong to one object."""

import itertools

import pytest
import torch
from catalogue import NUM_ENVS, gymnasium_cartpole
from helpers import AOT, after, assert_same, buffers, each_copy, from_reset, play

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full
Transformed = tw.TransformedEnv


# Overridden methods.


def overriding(kind, method):
    """A subclass whose `_step` returns rewards of -7, or whose `_reset` observations of -77."""

    class Override(kind):
        def _step(self, action):
            successor = super()._step(action)
            return successor.set("reward", torch.full_like(successor["reward"], -7))

        def _reset(self, mask, options=None):
            td = super()._reset(mask, options)
            return td.set("observation", torch.full_like(td["observation"], -77))

    delattr(Override, "_reset" if method == "_step" else "_step")
    return Override


LEVELS = {"innermost": Transformed, "middle": tw.Wrapper, "outermost": Transformed}


def make_env(kind, depth, method, backend):
    """Three layers on an env. One of them overrides a method."""
    if backend == "torch":
        env = ScriptedEnv(8, (3,), (5, 3, 11, 4, 9))
    else:
        env = tw.make("CartPole-v1", 8, backend=backend)
    for level, plain in LEVELS.items():
        layer = overriding(kind, method) if level == depth else plain
        transforms = ()
        if issubclass(layer, tw.TransformedEnv):
            transforms = (T.TimeLimit(30), T.ScaleReward(1))
        env = layer(env, *transforms)
    return env


def stepped(env):
    td = env.reset(seed=0)
    transitions = []
    for _ in range(24):
        transition, td = env.step(td.set("action", env.sample_action()))
        transitions.append(transition)
    return torch.stack(transitions, 1)


def collected(collect):
    first = from_reset(collect)
    return torch.cat([first, collect()], 1)


def compiled(target):
    return tw.compile(target, backend="eager")


WAYS = {  # how an env is run, and its backend; each returns transitions (num_envs, 24)
    "eager": (stepped, "torch"),
    "eager, host-stepped": (stepped, "gymnasium"),
    "eager collector": (lambda env: collected(tw.Collector(env, None, 12)), "torch"),
    "compiled": (lambda env: stepped(compiled(env)), "torch"),
    "compiled, host-stepped": (lambda env: stepped(compiled(env)), "gymnasium"),
    "compiled collector": (lambda env: collected(compiled(tw.Collector(env, None, 12))), "torch"),
}
OVERRIDES = [  # each class, depth and method
    (Transformed, "middle", "_reset"),
    (Transformed, "innermost", "_step"),
    (Transformed, "outermost", "_step"),
    (tw.Wrapper, "innermost", "_reset"),
    (tw.Wrapper, "middle", "_step"),
    (tw.Wrapper, "outermost", "_reset"),
]
FAST = [("compiled", 0), ("compiled, host-stepped", 0)]
CASES = [
    pytest.param(way, *override, marks=() if "eager" in way or (way, number) in FAST else full)
    for way, (number, override) in itertools.product(WAYS, enumerate(OVERRIDES))
]


@pytest.mark.parametrize(("way", "kind", "depth", "method"), CASES)
def test_method_overridden_in_any_layer_takes_effect(way, kind, depth, method):
    run, backend = WAYS[way]
    data = run(make_env(kind, depth, method, backend))
    done = data["next", "done"][:, :-1, 0]
    assert done.any()
    assert not done.all(0).any()
    assert (data["next", "observation"] != -77).any(-1).all()
    assert (data["next", "reward"] == -7).all() == (method == "_step")
    initial = (data["observation"] == -77).all(-1)
    assert initial[:, 0].all() == (method == "_reset")
    expected = done if method == "_reset" else torch.zeros_like(done)
    assert (initial[:, 1:] == expected).all()


class TakesOptions(tw.Wrapper):
    def _check_options(self, options):
        assert set(options) == {"observation"}

    def _reset(self, mask, options=None):
        td = self.env._reset(mask)
        value = (options or {"observation": 1})["observation"]
        return td.set("observation", torch.full_like(td["observation"], value))


def test_options_reach_a_reset_overridden_in_the_middle():
    env = compiled(tw.TransformedEnv(TakesOptions(ScriptedEnv(2, (3,))), T.TimeLimit(3)))
    assert (env.reset(options={"observation": 5})["observation"] == 5).all()
    assert (env.reset()["observation"] == 1).all()


@pytest.mark.full
def test_is_compiled_of_a_host_stepped_env_is_true_above_the_innermost_transforms():
    env = tw.TransformedEnv(tw.Wrapper(gymnasium_cartpole()), T.TimeLimit(3))
    compiled(env)
    layers = (env, env.env, env.env.env, env.unwrapped)
    assert [layer.is_compiled for layer in layers] == [True, True, True, False]


# Copies.


def normalized():
    return tw.TransformedEnv(
        ScriptedEnv(NUM_ENVS), T.NormalizeObservation(), T.FrameStackObservation(2)
    )


@pytest.mark.full
@each_copy
def test_copy_of_a_compiled_env_continues_eagerly(graphs, replicate):
    env = tw.compile(normalized(), backend="counting")
    td = after(env, 7)
    twin = replicate(env)
    assert env.is_compiled
    assert not any(layer.is_compiled for layer in (twin, twin.env))
    before = buffers(env)
    snapshot = env.snapshot()
    expected, _ = play(env, 20, td.clone())
    env.restore(snapshot)
    assert_same(play(twin, 20, td.clone())[0], expected, AOT)
    assert_same(buffers(env), before)
    assert len(graphs) == 1
    assert not tw.Wrapper(replicate(twin)).is_compiled
