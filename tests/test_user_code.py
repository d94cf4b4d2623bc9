"""What users write: it may write to what it is given, returns what it likes, and draws from wherever."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv
from torchwrap.wrappers import MaxAndSkipObservation, RepeatAction, Wrapper

SENT = 0.8


class HalvingEnv(ScriptedEnv):
    def _step(self, action):
        return super()._step(action.mul_(0.5))


class HalvingWrapper(Wrapper):
    def _step(self, action):
        return self.env._step(action.mul_(0.5))


class HalvingTransform(T.ActionTransform):
    def action(self, action):
        return action.mul_(0.5)


WRITERS = {
    "an env": lambda: HalvingEnv(2, (1,)),
    "a wrapper": lambda: HalvingWrapper(ScriptedEnv(2, (1,))),
    "a transform": lambda: tw.TransformedEnv(ScriptedEnv(2, (1,)), HalvingTransform()),
    "a function": lambda: tw.TransformedEnv(ScriptedEnv(2, (1,)), T.TransformAction(lambda action: action.mul_(0.5))),
    "a repeated env": lambda: RepeatAction(HalvingEnv(2, (1,), episode_lengths=9), 3),
    "a skipped env": lambda: MaxAndSkipObservation(HalvingEnv(2, (1,), episode_lengths=9), 3),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_action_of_the_agent_stays_as_it_is(name, compiled):
    env, policy = WRITERS[name](), torch.full((2, 6), SENT)
    env = tw.compile(env, backend="aot_eager") if compiled else env
    td = env.reset(seed=0)
    for _ in range(3):
        transition, td = env.step(td.set("action", policy))
        assert (policy == SENT).all() and (transition["action"] == SENT).all()
        assert (transition["next", "info", "action"] == SENT / 2).all()
    data, _ = tw.rollout(env, lambda td: policy, 2, td)
    assert (data["action"] == SENT).all() and (policy == SENT).all()


class Push(FuncEnv):
    observation_space, action_space = Box(-9, 9, (1,)), Box(-1, 1, (1,))

    def initial(self, rng):
        return {"x": torch.zeros(())}

    def transition(self, state, action, rng):
        return {"x": state["x"] + action[0]}

    def observation(self, state, rng):
        return state["x"].unsqueeze(0)

    def reward(self, state, action, next_state, rng):
        return next_state["x"] - state["x"]

    def terminal(self, state, rng):
        return state["x"] > 3


def in_place(state, *others):
    state["x"] += 1
    return state


def test_function_that_writes_to_its_arguments_is_refused_by_name():
    written = {
        "transition": lambda self, state, action, rng: in_place(state),
        "observation": lambda self, state, rng: state["x"].mul_(1).unsqueeze(0) + 0,
        "reward": lambda self, state, action, next_state, rng: next_state["x"].sub_(state["x"]) * 1,
        "terminal": lambda self, state, rng: state["x"].add_(0) > 3,
    }
    for name, function in written.items():
        kind = type("Written", (Push,), {name: function})
        with pytest.raises(TypeError, match=rf"^Written\.{name} needs to leave its arguments as they are"):
            tw.FunctionalEnv(kind(), 3)
    action_writer = type(
        "Written", (Push,), {"transition": lambda self, state, action, rng: {"x": state["x"] + action.mul_(0)[0]}}
    )
    with pytest.raises(TypeError, match=r"^Written\.transition needs to leave"):
        tw.FunctionalEnv(action_writer(), 3)
    env = tw.FunctionalEnv(Push(), 3)
    env.reset(seed=0)
    assert env.step(torch.full((3, 1), 0.8))[0]["next", "reward"].flatten().tolist() == pytest.approx([0.8] * 3)


def test_group_that_writes_to_the_observation_changes_no_other_group():
    double = T.TransformObservation(lambda observation: observation.mul_(2))
    env = tw.TransformedEnv(ScriptedEnv(2, (1,)), T.ObservationGroups({"actor": [double], "critic": []}))
    td = env.reset()
    assert td["observation", "critic"].flatten().tolist() == [0, 1000]
    transition, td = env.step(env.sample_action())
    successor = transition["next", "observation"]
    assert successor["critic"].flatten().tolist() == [1, 1001] and successor["actor"].flatten().tolist() == [2, 2002]


def test_standalone_call_leaves_the_callers_values():
    td = TensorDict({"observation": torch.ones(2, 1)}, [2])
    assert T.TransformObservation(lambda observation: observation.mul_(2))(td)["observation"].tolist() == [[2], [2]]
    assert td["observation"].tolist() == [[1], [1]]


# What is returned.


def replaced(key, function):
    def change(td):
        return td.set(key, function(td[key], td)) if key in td.keys() else td

    return change


# What is done to a right result, in which hooks; the error, and what it says.
RETURNED = {
    "a reward for each pair of envs": (
        replaced("reward", lambda reward, td: reward + 0.1 * td["observation"][:, 0]),
        ValueError,
        r"to return reward of shape \(3, 1\) torch.float32 on cpu, but got \(3, 3\) torch.float32 on cpu: `.unsqueeze\(-1\)`",
    ),
    "a reward without a column": (
        replaced("reward", lambda reward, td: reward[:, 0]),
        ValueError,
        r"but got \(3,\) .*unsqueeze",
    ),
    "float64": (replaced("reward", lambda reward, td: reward.double()), ValueError, r"`.to\(torch.float32\)` converts it"),
    "int64": (replaced("reward", lambda reward, td: reward.long()), ValueError, r"but got \(3, 1\) torch.int64"),
    "flags without a column": (
        replaced("terminated", lambda flag, td: flag[:, 0]),
        ValueError,
        r"terminated of shape \(3, 1\)",
    ),
    "flags as numbers": (replaced("truncated", lambda flag, td: flag.float()), ValueError, r"truncated of .* torch.bool"),
    "an observation of another shape": (
        replaced("observation", lambda observation, td: observation[:, :1]),
        ValueError,
        r"to return observations of shape \(3, 2\) \(num_envs first\), but got \(3, 1\)",
    ),
    "an observation of another dtype": (
        replaced("observation", lambda o, td: o.double()),
        TypeError,
        "of dtype torch.float32",
    ),
    "a missing key": (lambda td: td.exclude("observation"), ValueError, r"to return \['observation'\] too, but got"),
    "nothing": (lambda td: None, TypeError, r"to return a TensorDict of batch size \(3,\), but got NoneType"),
    "a TensorDict without a batch": (lambda td: TensorDict(td.to_dict(), []), TypeError, r"but got batch size \(\)"),
}


def returning(change, base, *hooks):
    def of(hook):
        def changed(self, *args):
            return change(getattr(base, hook)(self, *args))

        return changed

    return type("Mine", (base,), {hook: of(hook) for hook in hooks})


@pytest.mark.parametrize("name", RETURNED)
def test_result_that_does_not_fit_is_refused_by_layer(name):
    change, error, message = RETURNED[name]
    in_steps = {
        r"Mine\._step": lambda n: returning(change, ScriptedEnv, "_step")(n, (2,)),
        r"Mine\._step ": lambda n: returning(change, Wrapper, "_step")(ScriptedEnv(n, (2,))),
        r"Mine\._step  ": lambda n: RepeatAction(returning(change, ScriptedEnv, "_step")(n, (2,)), 2),
        r"transforms\[1\] \(Mine\)\.step": lambda n: tw.TransformedEnv(
            ScriptedEnv(n, (2,)), T.ClipReward(-1, 1), returning(change, T.Transform, "step")()
        ),
    }
    for owner, make in in_steps.items():
        env = make(3)
        td = env.reset()
        with pytest.raises(
            error,
            match=f"^{owner.strip()} needs {message}" if message.startswith("to") else f"^{owner.strip()} needs .*{message}",
        ):
            env.step(td.set("action", env.sample_action()))
        if name != "a reward for each pair of envs":  # of a single env, it is one number
            with pytest.raises((ValueError, TypeError), match="needs to return"):
                tw.rollout(make(1), None, 2)
        with pytest.raises((ValueError, TypeError), match="needs to return"):
            tw.compile(make(3), backend="eager")
    if "observation" in name or name in ("nothing", "a TensorDict without a batch", "a missing key"):
        for owner, make in {
            r"Mine\._reset": lambda: returning(change, ScriptedEnv, "_reset")(3, (2,)),
            r"transforms\[0\] \(Mine\)\.reset": lambda: tw.TransformedEnv(
                ScriptedEnv(3, (2,)), returning(change, T.Transform, "reset")()
            ),
        }.items():
            with pytest.raises(error, match=f"^{owner} needs"):
                make().reset()


def test_action_of_another_shape_is_refused_by_position():
    env = tw.TransformedEnv(
        ScriptedEnv(3), T.ClipAction(), returning(lambda action: action[:, :2], T.ActionTransform, "action")()
    )
    Mine = type(env.transforms[1])
    Mine.action = lambda self, action: action[:, :2]
    env.reset()
    with pytest.raises(ValueError, match=r"^transforms\[1\] \(Mine\)\.action needs to return actions of shape \(3, 6\)"):
        env.step(env.sample_action())


# Foreign random numbers.

DRAWS = {
    "numpy.random": lambda value: value + float(np.random.rand()),
    "Python's random": lambda value: value + random.random(),
    "PyTorch's global generator": lambda value: value + torch.randn_like(value),
}


def states():
    return repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize("generator", DRAWS)
def test_foreign_random_numbers_are_refused_by_name_and_leave_the_generator(generator):
    draw = DRAWS[generator]

    def noisy(td):
        return td.set("observation", draw(td["observation"]))

    makers = {
        r"Mine\._step": lambda: returning(noisy, ScriptedEnv, "_step")(2),
        r"Mine\._reset": lambda: returning(noisy, ScriptedEnv, "_reset")(2),
        r"transforms\[0\] \(Mine\)\.step": lambda: tw.TransformedEnv(ScriptedEnv(2), returning(noisy, T.Transform, "step")()),
        r"transforms\[0\] \(Mine\)\.reset": lambda: tw.TransformedEnv(
            ScriptedEnv(2), returning(noisy, T.Transform, "reset")()
        ),
        r"transforms\[0\] \(TransformObservation\)\.reset": lambda: tw.TransformedEnv(
            ScriptedEnv(2), T.TransformObservation(draw)
        ),
        r"Drawing\.transition": lambda: tw.FunctionalEnv(
            type("Drawing", (Push,), {"transition": lambda self, state, action, rng: {"x": draw(state["x"])}})(), 2
        ),
    }
    for owner, make in makers.items():
        before = states()
        with pytest.raises(
            TypeError, match=rf"^{owner} needs to draw .*{re.escape(generator) if 'Drawing' not in owner else ''}"
        ):
            env = make()
            before = states()
            env.step(env.reset(seed=0).set("action", env.sample_action()))
        assert states() == before, owner


def test_simulators_may_draw_what_they_like():
    class Noisy(ScriptedEnv):
        host_stepped = True

        def _step(self, action):
            np.random.rand()
            return super()._step(action)

    env = tw.TransformedEnv(Noisy(2), T.ClipReward(-1, 1))
    env.step(env.reset().set("action", env.sample_action()))
