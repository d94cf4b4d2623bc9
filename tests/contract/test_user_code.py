"""What users write: it may write to what it is given, returns what it likes, and draws from wherever."""

import collections
import copy
import inspect
import random
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
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
    "a function": lambda: tw.TransformedEnv(
        ScriptedEnv(2, (1,)), T.TransformAction(lambda action: action.mul_(0.5))
    ),
    "a repeated env": lambda: RepeatAction(HalvingEnv(2, (1,), episode_lengths=9), 3),
    "a skipped env": lambda: MaxAndSkipObservation(HalvingEnv(2, (1,), episode_lengths=9), 3),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_action_of_the_agent_stays_as_it_is(name, compiled):
    env, policy = WRITERS[name](), torch.full((2, 6), SENT)
    env = tw.compile(env, backend="eager") if compiled else env
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
        with pytest.raises(
            TypeError, match=rf"^Written\.{name} writes to its arguments: return new"
        ):
            tw.FunctionalEnv(kind(), 3)
    action_writer = type(
        "Written",
        (Push,),
        {"transition": lambda self, state, action, rng: {"x": state["x"] + action.mul_(0)[0]}},
    )
    with pytest.raises(TypeError, match=r"^Written\.transition writes to its arguments"):
        tw.FunctionalEnv(action_writer(), 3)
    env = tw.FunctionalEnv(Push(), 3)
    env.reset(seed=0)
    assert env.step(torch.full((3, 1), 0.8))[0][
        "next", "reward"
    ].flatten().tolist() == pytest.approx([0.8] * 3)


def test_group_that_writes_to_the_observation_changes_no_other_group():
    double = T.TransformObservation(lambda observation: observation.mul_(2))
    env = tw.TransformedEnv(
        ScriptedEnv(2, (1,)), T.ObservationGroups({"actor": [double], "critic": []})
    )
    td = env.reset()
    assert td["observation", "critic"].flatten().tolist() == [0, 1000]
    transition, td = env.step(env.sample_action())
    successor = transition["next", "observation"]
    assert successor["critic"].flatten().tolist() == [1, 1001] and successor[
        "actor"
    ].flatten().tolist() == [2, 2002]


def test_standalone_call_leaves_the_callers_values():
    td = TensorDict({"observation": torch.ones(2, 1)}, [2])
    assert T.TransformObservation(lambda observation: observation.mul_(2))(td)[
        "observation"
    ].tolist() == [[2], [2]]
    assert td["observation"].tolist() == [[1], [1]]


# What is returned.


def replaced(key, function):
    return lambda td: td.set(key, function(td[key], td)) if key in td.keys() else td


COLUMN = r"but got \(3,\) .*: make a column with `.unsqueeze\(-1\)`"
# What is done to a right result; the error, and what it says.
RETURNED = {
    "a reward for each pair of envs": (
        replaced("reward", lambda reward, td: reward + 0.1 * td["observation"][:, 0]),
        ValueError,
        r"reward of shape \(3, 1\) torch.float32 on cpu, but got \(3, 3\) torch.float32 on cpu: make a column with `.uns",
    ),
    "a reward without a column": (
        replaced("reward", lambda reward, td: reward[:, 0]),
        ValueError,
        COLUMN,
    ),
    "float64": (
        replaced("reward", lambda reward, td: reward.double()),
        ValueError,
        r"convert it with `.to\(torch.float32\)`",
    ),
    "int64": (
        replaced("reward", lambda reward, td: reward.long()),
        ValueError,
        r"but got \(3, 1\) torch.int64",
    ),
    "flags without a column": (
        replaced("terminated", lambda flag, td: flag[:, 0]),
        ValueError,
        COLUMN,
    ),
    "flags as numbers": (
        replaced("truncated", lambda flag, td: flag.float()),
        ValueError,
        r"truncated of .* torch.bool",
    ),
    "another shape": (
        replaced("observation", lambda seen, td: seen[:, :1]),
        ValueError,
        r" first\), but got \(3, 1\)",
    ),
    "another dtype": (
        replaced("observation", lambda seen, td: seen.double()),
        TypeError,
        "of dtype torch.float32",
    ),
    "no observation": (
        lambda td: td.exclude("observation"),
        ValueError,
        r"\['observation'\] too, but got",
    ),
    "nothing": (lambda td: None, TypeError, r"a TensorDict of batch size \(3,\), but got NoneType"),
    "no batch": (lambda td: TensorDict(td.to_dict(), []), TypeError, r"but got batch size \(\)"),
}


def returning(change, base, hook):
    return type(
        "Mine", (base,), {hook: lambda self, *args: change(getattr(base, hook)(self, *args))}
    )


def layers(change, hook):
    """An env, a wrapper and a transform whose hook returns something else, and who is to blame; from the number of envs."""
    yield rf"Mine\._{hook}", lambda n: returning(change, ScriptedEnv, f"_{hook}")(n, (2,))
    yield rf"Mine\._{hook}", lambda n: returning(change, Wrapper, f"_{hook}")(ScriptedEnv(n, (2,)))
    yield (
        rf"Mine\._{hook}",
        lambda n: RepeatAction(returning(change, ScriptedEnv, f"_{hook}")(n, (2,)), 2),
    )
    parts = lambda: (T.ClipReward(-1, 1), returning(change, T.Transform, hook)())  # noqa: E731
    yield (
        rf"transforms\[1\] \(Mine\)\.{hook}",
        lambda n: tw.TransformedEnv(ScriptedEnv(n, (2,)), *parts()),
    )


def step_once(env):
    return env.step(env.reset(seed=0).set("action", env.sample_action()))


@pytest.mark.parametrize("name", RETURNED)
def test_result_that_does_not_fit_is_refused_by_layer(name):
    change, error, message = RETURNED[name]
    for hook in ("step", "reset"):
        for owner, make in layers(change, hook):
            if hook == "reset" and not name.startswith(("another", "no")):
                continue  # a reset returns observations only
            with pytest.raises(error, match=f"^{owner} needs to return .*{message}"):
                step_once(make(3))
            if name != "a reward for each pair of envs":  # of a single env, it is one number
                with pytest.raises((ValueError, TypeError), match="needs to return"):
                    tw.rollout(make(1), None, 2)
            if name == "another dtype":  # a trace checks in the same place
                with pytest.raises((ValueError, TypeError), match="needs to return"):
                    tw.compile(make(3), backend="eager")


def test_action_of_another_shape_is_refused_by_position():
    cut = type("Mine", (T.ActionTransform,), {"action": lambda self, action: action[:, :2]})
    env = tw.TransformedEnv(ScriptedEnv(3), T.ClipAction(), cut())
    with pytest.raises(
        ValueError,
        match=r"^transforms\[1\] \(Mine\)\.action needs to return actions of shape \(3, 6\)",
    ):
        step_once(env)


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
    noisy = replaced("observation", lambda observation, td: draw(observation))
    function = {"transition": lambda self, state, action, rng: {"x": draw(state["x"])}}
    cases = [
        *layers(noisy, "step"),
        *layers(noisy, "reset"),
        (
            r".*: TransformObservation's func",
            lambda n: tw.TransformedEnv(ScriptedEnv(n), T.TransformObservation(draw)),
        ),
        (
            r"Drawing\.transition",
            lambda n: tw.FunctionalEnv(type("Drawing", (Push,), function)(), n),
        ),
    ]
    for owner, make in cases:
        said = (
            "(drew|draws) from .*: draw from its rng"
            if "Drawing" in owner
            else f"drew from {generator}: draw "
        )
        before = states()
        with pytest.raises(TypeError, match=rf"^{owner} {said}"):
            step_once(make(2))
        assert states()[:2] == before[:2], owner  # streams are seeded by the operating system


def test_function_with_a_generator_or_a_counter_of_its_own_is_refused_by_name():
    own, counter = np.random.default_rng(0), iter(range(99))
    for draw in (own.random, lambda: next(counter)):
        kind = type(
            "Moody",
            (Push,),
            {"transition": lambda self, state, action, rng, d=draw: {"x": state["x"] + d()}},
        )
        with pytest.raises(
            TypeError,
            match=r"^Moody\.transition returns different results .* keep values that change in",
        ):
            tw.FunctionalEnv(kind(), 3)
    tw.FunctionalEnv(
        type("NaN", (Push,), {"initial": lambda self, rng: {"x": torch.tensor(torch.nan)}})(), 3
    )


def test_simulators_may_draw_what_they_like():
    class Noisy(ScriptedEnv):
        host_stepped = True

        def _step(self, action):
            np.random.rand()
            return super()._step(action)

    step_once(tw.TransformedEnv(Noisy(2), T.ClipReward(-1, 1)))


# Memory of the caller, and the order of keys.


def test_spec_does_not_follow_the_callers_arrays():
    low, padding = np.full(6, -2.0, np.float32), {"a": np.zeros(1, np.float32)}
    rescale, frames = T.RescaleAction(low, 1.0), T.FrameStackObservation(2, padding_type=padding)
    low[:], padding["a"][:] = -9, 9
    assert (rescale.min_action == -2).all() and frames.padding_type["a"] == 0
    options = {"map": [1, 2]}
    tw.register("docs/Options-v0", lambda options=None: Push())
    env = tw.make("docs/Options-v0", 2, options=options)
    options["map"][0] = 9
    assert env.spec.kwargs["options"] == {"map": [1, 2]}


class Shift(T.ObservationTransform):
    def __init__(self, shift, lock=None):
        super().__init__()
        self.shift, self.lock = shift, lock

    def observation(self, observation):
        return observation + self.shift


def test_parameter_stays_the_callers_and_what_cannot_be_copied_is_passed_on():
    shift, lock = torch.nn.Parameter(torch.ones(1)), threading.Lock()
    transform = Shift(shift, lock)
    assert (
        transform.shift is shift
        and list(transform.parameters()) == [shift]
        and transform.lock is lock
    )
    tw.register("docs/Locked-v0", lambda lock=None: Push())
    assert tw.make("docs/Locked-v0", 2, lock=lock).spec.kwargs["lock"] is lock


class ManyKeys(gymnasium.Env):
    """Three numbers under keys that are not in alphabetical order."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how="pairs"):
        boxes = {key: Box(-9, 9, (1,), np.float32) for key in ("zeta", "alpha", "mid")}
        makers = {
            "pairs": lambda: gymnasium.spaces.Dict(list(boxes.items())),
            "ordered": lambda: gymnasium.spaces.Dict(collections.OrderedDict(boxes)),
            "keywords": lambda: gymnasium.spaces.Dict(**boxes),
            "sorted": lambda: gymnasium.spaces.Dict(boxes),
            "unsorted": lambda: gymnasium.spaces.Dict(boxes, sort_keys=False),
        }
        self.observation_space = makers[how]()
        self.number = 0

    def observe(self):
        values = {"zeta": 1, "alpha": 2, "mid": 3}
        return {key: np.float32([values[key] + self.number]) for key in self.observation_space}

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        self.number += 1
        return self.observe(), 0.0, False, False, {}


CLIPPED = lambda values: {**values, "alpha": values["alpha"].clip(-2, 2)}  # noqa: E731
STACKS = {
    "nothing": ([], []),
    "a filter": (
        [T.FilterObservation(["zeta", "alpha"])],
        [(wrappers.FilterObservation, {"filter_keys": ["zeta", "alpha"]})],
    ),
    "transformed keys": (
        [T.ObservationKeys({"alpha": [T.ClipObservation(-2, 2)]})],
        [(wrappers.TransformObservation, {"func": CLIPPED, "observation_space": None})],
    ),
    "time": (
        [T.TimeLimit(9), T.TimeAwareObservation(flatten=False)],
        [
            (wrappers.TimeLimit, {"max_episode_steps": 9}),
            (wrappers.TimeAwareObservation, {"flatten": False}),
        ],
    ),
}


@pytest.mark.parametrize("how", ["pairs", "ordered", "keywords", "sorted", "unsorted"])
def test_any_stack_flattens_in_the_order_of_gymnasium(how):
    if how == "unsorted" and "sort_keys" not in inspect.signature(gymnasium.spaces.Dict).parameters:
        pytest.skip("needs Gymnasium 1.4")
    for name, (ours, theirs) in STACKS.items():
        env = tw.from_gymnasium(
            SyncVectorEnv([lambda: ManyKeys(how)], autoreset_mode=AutoresetMode.DISABLED)
        )
        env = tw.TransformedEnv(env, *copy.deepcopy(ours), T.FlattenObservation())
        single = ManyKeys(how)
        for wrapper, arguments in theirs:
            single = wrapper(single, **arguments)
        single = wrappers.FlattenObservation(single)
        td, (expected, _) = env.reset(), single.reset()
        assert td["observation"].tolist() == [expected.tolist()], name
        _, td = env.step(torch.zeros(1, dtype=torch.int64))
        assert td["observation"].tolist() == [single.step(0)[0].tolist()], name
    env = tw.from_gymnasium(
        SyncVectorEnv([lambda: ManyKeys(how)], autoreset_mode=AutoresetMode.DISABLED)
    )
    normal = tw.TransformedEnv(env, T.NormalizeObservation()).single_observation_space
    assert list(normal) == list(env.single_observation_space)
