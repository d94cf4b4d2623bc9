"""Code of users may write to its arguments, return any value, and draw from any generator."""

import copy
import inspect
import random

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
from torchwrap.testing import ScriptedEnv, check_env
from torchwrap.wrappers import RepeatAction, Wrapper

SENT = 0.8


def step_once(env):
    return env.step(env.reset(seed=0).set("action", env.sample_action()))


def transformed(*transforms):
    return tw.TransformedEnv(ScriptedEnv(2, (1,)), *transforms)


# Writing in place.


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
    "a transform": lambda: transformed(HalvingTransform()),
    "a repeated env": lambda: RepeatAction(HalvingEnv(2, (1,), episode_lengths=9), 3),
}


@pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
def test_action_of_the_agent_stays_as_it_is(make):
    env = make()
    policy = torch.full((2, 6), SENT)
    td = env.reset(seed=0)
    for _ in range(3):
        transition, td = env.step(td.set("action", policy))
        assert (policy == SENT).all()
        assert (transition["action"] == SENT).all()
        assert (transition["next", "info", "action"] == SENT / 2).all()
    data = tw.rollout(env, lambda td: policy, 2)
    assert (data["action"] == SENT).all()
    assert (policy == SENT).all()


class Push(FuncEnv):
    observation_space = Box(-9, 9, (1,))
    action_space = Box(-1, 1, (1,))

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


def with_function(name, function):
    """A `Push` with one function replaced. `function` takes no `self`."""
    return type("Mine", (Push,), {name: staticmethod(function)})()


def moves_in_place(state, action, rng):
    state["x"] += 1
    return state


IN_PLACE = {
    "the state": ("transition", moves_in_place),
    "the action": ("transition", lambda state, action, rng: {"x": action.mul_(0)[0]}),
    "reward": ("reward", lambda state, action, next_state, rng: next_state["x"].mul_(0.5) * 1),
}


@pytest.mark.parametrize(("name", "function"), IN_PLACE.values(), ids=IN_PLACE)
def test_function_that_writes_to_its_arguments_is_found_by_check_env(name, function):
    functions = with_function(name, function)
    with pytest.raises(AssertionError, match=rf"^Mine: {name} .* arguments"):
        check_env(lambda n: tw.FunctionalEnv(functions, n))


def test_group_that_writes_to_the_observation_changes_no_other_group():
    double = T.TransformObservation(lambda observation: observation.mul_(2))
    env = transformed(T.ObservationGroups({"actor": [double], "critic": []}))
    td = env.reset()
    assert td["observation", "critic"].flatten().tolist() == [0, 1000]
    transition, td = env.step(env.sample_action())
    successor = transition["next", "observation"]
    assert successor["critic"].flatten().tolist() == [1, 1001]
    assert successor["actor"].flatten().tolist() == [2, 2002]


def test_standalone_call_leaves_the_callers_values():
    td = TensorDict({"observation": torch.ones(2, 1)}, [2])
    double = T.TransformObservation(lambda observation: observation.mul_(2))
    assert double(td)["observation"].tolist() == [[2], [2]]
    assert td["observation"].tolist() == [[1], [1]]


# Returning a value that does not fit.

REFUSED = (TypeError, ValueError)


def replaced(key, function):
    """Changes one entry of a result, if it has that entry."""

    def change(td):
        return td.set(key, function(td[key])) if key in td.keys() else td

    return change


STEP_RESULTS = {  # a key, and a change of its value
    "a reward for each pair of envs": ("reward", lambda reward: reward + reward[:, 0]),
    "a reward without a column": ("reward", lambda reward: reward[:, 0]),
    "a float64 reward": ("reward", torch.Tensor.double),
    "an int64 reward": ("reward", torch.Tensor.long),
    "flags without a column": ("terminated", lambda flag: flag[:, 0]),
    "flags as numbers": ("truncated", torch.Tensor.float),
}
OBSERVATIONS = {
    "another shape": lambda observation: observation[:, :1],
    "another dtype": torch.Tensor.double,
}
RESULTS = {  # a change of the whole result, and the word in the error
    "no observation": (lambda td: td.exclude("observation"), "observation"),
    "nothing": (lambda td: None, "TensorDict"),
    "a part": (lambda td: td[:1], "batch size"),
    "no batch size": (lambda td: TensorDict(td.to_dict(), []), "batch size"),
}
HOOKS = [pytest.param("step", lambda td: td.exclude("reward"), "reward", id="step, no reward")]
for name, (key, function) in STEP_RESULTS.items():
    HOOKS.append(pytest.param("step", replaced(key, function), key, id=f"step, {name}"))
for hook in ("step", "reset"):
    for name, function in OBSERVATIONS.items():
        change = replaced("observation", function)
        HOOKS.append(pytest.param(hook, change, "observation", id=f"{hook}, {name}"))
    for name, (change, word) in RESULTS.items():
        HOOKS.append(pytest.param(hook, change, word, id=f"{hook}, {name}"))


def returning(change, base, hook):
    """A subclass whose hook returns a changed result."""
    changed = {hook: lambda self, *args: change(getattr(base, hook)(self, *args))}
    return type("Mine", (base,), changed)


def env_layer(change, hook, num_envs):
    return returning(change, ScriptedEnv, f"_{hook}")(num_envs, (2,))


def wrapper_layer(change, hook, num_envs):
    return returning(change, Wrapper, f"_{hook}")(ScriptedEnv(num_envs, (2,)))


def repeated_layer(change, hook, num_envs):
    return RepeatAction(env_layer(change, hook, num_envs), 2)


def transform_layer(change, hook, num_envs):
    transform = returning(change, T.Transform, hook)
    return tw.TransformedEnv(ScriptedEnv(num_envs, (2,)), T.ClipReward(-1, 1), transform())


OWNER = r"(Mine\._|transforms\[1\] \(Mine\)\.)"
LAYERS = [env_layer, wrapper_layer, repeated_layer, transform_layer]
each_layer = pytest.mark.parametrize("make", LAYERS)
each_hook = pytest.mark.parametrize("hook", ["step", "reset"])


@pytest.mark.parametrize(("hook", "change", "fault"), HOOKS)
def test_result_that_does_not_fit_is_refused(hook, change, fault):
    with pytest.raises(REFUSED, match=f"^{OWNER}{hook}.*{fault}"):
        tw.rollout(transform_layer(change, hook, 3), None, 5)


FLATTEN = replaced("observation", OBSERVATIONS["another shape"])


@each_layer
@each_hook
@pytest.mark.parametrize("num_envs", [1, 3])
def test_result_that_does_not_fit_is_refused_by_layer(make, hook, num_envs):
    with pytest.raises(REFUSED, match=f"^{OWNER}{hook}"):
        tw.rollout(make(FLATTEN, hook, num_envs), None, 2)


@each_hook
def test_result_that_does_not_fit_is_refused_by_a_trace(hook):
    changes = [lambda td: td]
    env = transform_layer(lambda td: changes[-1](td), hook, 3)
    step_once(env)
    changes.append(replaced("observation", OBSERVATIONS["another dtype"]))
    with pytest.raises(REFUSED, match=f"^{OWNER}{hook}.*observation"):
        tw.compile(env, backend="eager")


def test_action_of_another_shape_is_refused_by_position():
    shorten = returning(lambda action: action[:, :2], T.Transform, "action")
    env = tw.TransformedEnv(ScriptedEnv(3), T.ClipAction(), shorten())
    with pytest.raises(ValueError, match=r"^transforms\[1\] \(Mine\)\.action"):
        step_once(env)


# Foreign random numbers.

DRAWS = {
    "numpy.random": lambda value: value + float(np.random.rand()),
    "Python's random": lambda value: value + random.random(),
    "PyTorch's global generator": lambda value: value + torch.randn_like(value),
}


def drawing_env(draw, num_envs=2):
    def transition(state, action, rng):
        return {"x": draw(state["x"])}

    return tw.FunctionalEnv(with_function("transition", transition), num_envs)


@pytest.mark.usefixtures("alone")
@each_hook
@pytest.mark.parametrize("generator", DRAWS)
def test_foreign_draws_of_a_hook_are_refused(generator, hook):
    noisy = replaced("observation", DRAWS[generator])
    with pytest.raises(TypeError, match=f"^{OWNER}{hook}.*{generator}"):
        step_once(transform_layer(noisy, hook, 2))


@pytest.mark.usefixtures("alone")
@each_layer
def test_foreign_draws_of_a_layer_are_refused(make):
    with pytest.raises(TypeError, match=f"^{OWNER}step.*numpy"):
        step_once(make(replaced("observation", DRAWS["numpy.random"]), "step", 2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("generator", DRAWS)
def test_foreign_draws_of_a_func_env_are_refused(generator):
    with pytest.raises(TypeError, match=r"Mine\.transition"):
        drawing_env(DRAWS[generator])


COUNTER = iter(range(999))
GENERATOR = np.random.default_rng(0)
IMPURE = {
    "generator": lambda x: x + GENERATOR.random(),
    "counter": lambda x: x + next(COUNTER) / 999,
}


@pytest.mark.parametrize("draw", IMPURE.values(), ids=IMPURE)
def test_function_with_state_between_calls_is_found_by_check_env(draw):
    with pytest.raises(AssertionError, match=r"^Mine: transition .* two calls"):
        check_env(lambda n: drawing_env(draw, n))


def test_simulators_may_draw_from_any_generator():
    class Noisy(ScriptedEnv):
        host_stepped = True

        def _step(self, action):
            np.random.rand()
            return super()._step(action)

    step_once(tw.TransformedEnv(Noisy(2), T.ClipReward(-1, 1)))


# Memory of the caller, and the order of keys.


@pytest.mark.parametrize("kind", [T.RescaleAction, T.RescaleObservation])
def test_bounds_do_not_follow_the_callers_arrays(kind):
    low = np.full(6, -2.0, np.float32)
    rescale = kind(low, 1.0)
    low[:] = -9
    first, _ = inspect.signature(kind).parameters
    assert (np.asarray(getattr(rescale, first)) == -2).all()


class ManyKeys(gymnasium.Env):
    """Three numbers under keys that are not in alphabetical order."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, make_dict):
        boxes = {key: Box(-9, 9, (1,), np.float32) for key in ("zeta", "alpha", "mid")}
        self.observation_space = make_dict(boxes)
        self.number = 0

    def observe(self):
        values = {"zeta": 1, "alpha": 2, "mid": 3}
        return {key: np.float32([values[key] + self.number]) for key in self.observation_space}

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        self.number += 1
        return self.observe(), 0.0, False, False, {}


def clip_alpha(values):
    return {**values, "alpha": values["alpha"].clip(-2, 2)}


def filtered(env):
    return wrappers.FilterObservation(env, ["zeta", "alpha"])


def clipped(env):
    return wrappers.TransformObservation(env, clip_alpha, None)


def timed(env):
    return wrappers.TimeAwareObservation(wrappers.TimeLimit(env, 9), flatten=False)


STACKS = {  # ours, and Gymnasium's
    "no transform": ([], lambda env: env),
    "a filter": ([T.FilterObservation(["zeta", "alpha"])], filtered),
    "transformed keys": ([T.ObservationKeys({"alpha": [T.ClipObservation(-2, 2)]})], clipped),
    "time": ([T.TimeLimit(9), T.TimeAwareObservation(flatten=False)], timed),
}
ORDERS = {
    "keywords": lambda boxes: gymnasium.spaces.Dict(**boxes),
    "sorted": gymnasium.spaces.Dict,
}
if "sort_keys" in inspect.signature(gymnasium.spaces.Dict).parameters:  # since Gymnasium 1.4
    ORDERS["unsorted"] = lambda boxes: gymnasium.spaces.Dict(boxes, sort_keys=False)
each_order = pytest.mark.parametrize("make_dict", ORDERS.values(), ids=ORDERS)


def one_env(make_dict):
    makers = [lambda: ManyKeys(make_dict)]
    return tw.from_gymnasium(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED))


@each_order
@pytest.mark.parametrize(("transforms", "wrap"), STACKS.values(), ids=STACKS)
def test_flattened_observation_has_the_order_of_gymnasiums(transforms, wrap, make_dict):
    flatten = T.FlattenObservation()
    env = tw.TransformedEnv(one_env(make_dict), *copy.deepcopy(transforms), flatten)
    single = wrappers.FlattenObservation(wrap(ManyKeys(make_dict)))
    expected, _ = single.reset()
    assert env.reset()["observation"].tolist() == [expected.tolist()]
    _, td = env.step(torch.zeros(1, dtype=torch.int64))
    expected, *_ = single.step(0)
    assert td["observation"].tolist() == [expected.tolist()]


@each_order
def test_transformed_space_keeps_the_order_of_keys(make_dict):
    env = one_env(make_dict)
    normal = tw.TransformedEnv(env, T.NormalizeObservation()).single_observation_space
    assert list(normal) == list(env.single_observation_space)
