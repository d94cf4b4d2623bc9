"""Results of simulators that change their shape after the first step are refused."""

import pytest
import torch
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from helpers import OtherVectorEnv, assert_same, buffers

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.tensors import from_functions
from torchwrap.testing import ScriptedEnv

REFUSED = (TypeError, ValueError)
UNIT = Box(-9, 9, (1,))


def steps(env, count):
    env.reset()
    for _ in range(count):
        env.step(env.sample_action())


# Functions of a simulator: the third call returns something else.


def values():
    flags = torch.zeros(2, 2, dtype=torch.bool)
    return [torch.ones(2, 1), torch.ones(2), *flags, {"energy": torch.ones(2)}]


def simulator(index, late, space=UNIT, **arguments):
    calls = iter(range(99))

    def step(action):
        results = values()
        if next(calls) == 2:
            results[index] = late
        return results

    return from_functions(lambda mask: values()[0], step, 2, space, UNIT, **arguments)


LATE = {  # the index and the value of a wrong result, and the name in the error
    "observation (2,)": (0, torch.ones(2), "observation"),
    "observation as a list": (0, [[1.0], [1.0]], "observation"),
    "reward ()": (1, torch.tensor(1.0), "reward"),
    "reward as a number": (1, 1.0, "reward"),
    "terminated as a bool": (2, False, "terminated"),
    "truncated as a bool": (3, True, "truncated"),
    "no info": (4, None, "info"),
    "an info that lacks a key": (4, {}, "energy"),
    "an info of another size": (4, {"energy": torch.ones(3)}, "energy"),
}


@pytest.mark.parametrize(("index", "late", "name"), LATE.values(), ids=LATE)
def test_late_result_of_a_simulators_step_is_refused_by_name(index, late, name):
    env = simulator(index, late, info_keys=["energy"])
    steps(env, 2)
    with pytest.raises(REFUSED, match=f"^from_functions: .*{name}"):
        env.step(env.sample_action())


def test_late_final_observation_of_another_shape_is_refused():
    finals = iter([torch.ones(2, 1), torch.ones(2)])
    done = torch.tensor([True, False])

    def step(action):
        observation, reward, _, truncated, _ = values()
        return observation, reward, done, truncated, {"final": next(finals)}

    env = from_functions(lambda mask: values()[0], step, 2, UNIT, UNIT, final_key="final")
    steps(env, 1)
    with pytest.raises(ValueError, match="final observations"):
        env.step(env.sample_action())


@pytest.mark.parametrize("reset_by", ["ids", "mask"])
def test_reset_that_returns_only_its_rows_is_refused_by_name(reset_by):
    def reset(rows):
        count = len(rows) if reset_by == "ids" else int(rows.sum())
        return torch.zeros(count, 1)

    def step(action):
        observation, reward, _, truncated, info = values()
        return observation, reward, torch.tensor([True, False]), truncated, info

    env = from_functions(reset, step, 2, UNIT, UNIT, reset_by=reset_by)
    with pytest.raises(ValueError, match=r"^from_functions: reset must return observation"):
        steps(env, 1)


def test_late_entry_of_a_nested_observation_is_refused_by_path():
    late = {"a": torch.ones(2, 1), "b": torch.ones(2)}
    first = {"a": torch.ones(2, 1), "b": torch.ones(2, 1)}
    results = iter([first, first, late])

    def step(action):
        return next(results), *values()[1:]

    env = from_functions(lambda mask: first, step, 2, Dict(a=UNIT, b=UNIT), UNIT)
    steps(env, 2)
    with pytest.raises(ValueError, match=r"observation\['b'\]"):
        env.step(env.sample_action())


def test_late_clock_of_another_shape_is_refused():
    clock = torch.ones(2, dtype=torch.int64)
    calls = []

    def read():
        calls.append(None)
        return clock[0] if len(calls) > 2 else clock

    env = simulator(0, values()[0], clock=read, max_episode_steps=9)
    with pytest.raises(REFUSED, match=r"^from_functions: clock"):
        steps(env, 5)


# The last root, as the user left it.

KEPT = {  # of which masked calls keep rows
    "an observation of one number per env": ("observation", torch.zeros(3, 1)),
    "a float64 observation": ("observation", torch.zeros(3, 2, dtype=torch.float64)),
    "a hidden state of one number per env": ("hidden", torch.zeros(3, 1)),
}


@pytest.mark.parametrize("call", ["reset", "restore"])
@pytest.mark.parametrize(("key", "value"), KEPT.values(), ids=KEPT)
def test_last_root_that_does_not_fit_is_refused_by_masked_calls(key, value, call):
    recurrent = tw.PolicyState({"hidden": (4,)})
    env = tw.TransformedEnv(ScriptedEnv(3, (2,)), recurrent)
    root = env.reset(seed=0)
    snapshot = env.snapshot()
    root[key] = value
    mask = torch.tensor([True, False, False])
    given = {"reset": [None, mask], "restore": [snapshot, mask]}
    with pytest.raises(REFUSED, match=rf"\.{call}: {key} of the last root"):
        getattr(env, call)(*given[call])
    assert env.reset(seed=0)["observation"].tolist() == snapshot["observation"].tolist()


# A vector env, of which step 300 returns something else.


class LateShape(OtherVectorEnv):
    calls = 0

    def step(self, actions):
        observation, *rest = super().step(actions)
        self.calls += 1
        return observation[:, :1] if self.calls == 300 else observation, *rest


@pytest.mark.parametrize("backend", [None, "eager"], ids=["eager", "compiled"])
def test_late_observation_of_a_vector_env_is_refused_before_transforms_see_it(backend):
    vector_env = LateShape([PendulumEnv] * 2, autoreset_mode=AutoresetMode.DISABLED)
    env = tw.TransformedEnv(tw.from_gymnasium(vector_env), T.NormalizeObservation())
    if backend is not None:
        tw.compile(env, backend=backend)
    steps(env, 299)
    before = buffers(env.transforms)
    with pytest.raises(ValueError, match="observation"):
        env.step(env.sample_action())
    assert_same(buffers(env.transforms), before)
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        env.step(env.sample_action())
