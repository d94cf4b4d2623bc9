"""Spaces and arguments of the examples that train."""

from pathlib import Path

import dqn
import dqn_graph
import gymnasium
import numpy as np
import ppo
import ppo_graph
import ppo_recurrent
import ppo_recurrent_graph
import pytest
import sac
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from helpers import discrete, params

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

PPO = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
OFF_POLICY = {"num_envs": 4, "learning_starts": 32}
GRAPH = {"backend": "none", "eval_episodes": 4}
SMALL = {
    ppo: {"normalize": True, **PPO},
    ppo_graph: {**GRAPH, **PPO},
    ppo_recurrent_graph: {**GRAPH, **PPO},
    dqn_graph: {**GRAPH, **OFF_POLICY},
    ppo_recurrent: PPO,
    dqn: OFF_POLICY,
    sac: OFF_POLICY,
}


VECTOR = Box(-9, 9, (3,))


class Fixed(gymnasium.Env):
    """Rewards 1, and refuses actions that are not in its space."""

    def __init__(self, action_space, observation_space=VECTOR):
        self.action_space = action_space
        self.observation_space = observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action)), action
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


@pytest.fixture
def train(registry, tmp_path):
    def train(script, action_space, observation_space=VECTOR, **flags):
        def make(id, num_envs, **_):
            return ScriptedEnv(
                num_envs, observation_space=observation_space, action_space=action_space
            )

        spaces = action_space, observation_space
        gymnasium.register("Fixed-v0", lambda **_: Fixed(*spaces), max_episode_steps=50)
        small = SMALL[script] | {"total_timesteps": 64, **flags}
        if script is not ppo_recurrent:
            small["out"] = str(tmp_path)
        made = [make] if "backend" in small else []
        script.main(script.Args(env_id="Fixed-v0", **small), *made)

    return train


DISCRETE = {
    "from 2": Discrete(3, start=2),
    "int8": discrete(3, np.int8),
}
BOXES = {
    "scalar": Box(-2, 2, ()),
    "2-D": Box(0, 2, (2, 3)),
    "float64": Box(0.1, 0.7, (2,), np.float64),
}
CHOICES = {
    "choices": MultiDiscrete([[3, 2], [2, 2]], start=[[1, 0], [-1, 0]]),
    "bits": MultiBinary((2, 2)),
}
TAKEN = {script: DISCRETE | BOXES | CHOICES for script in (ppo, ppo_graph, ppo_recurrent)}
TAKEN[ppo_recurrent_graph] = DISCRETE | BOXES | CHOICES
TAKEN |= {dqn: DISCRETE, dqn_graph: DISCRETE, sac: BOXES}
QUICK = {"ppo-from 2", "ppo-float64", "ppo-choices", "dqn-int8", "sac-scalar"}
CASES = {}
for script, taken in TAKEN.items():
    CASES |= {f"{script.__name__}-{name}": (script, space) for name, space in taken.items()}


@pytest.mark.parametrize("case", params(CASES, QUICK))
def test_script_acts_in_the_space_of_the_env(train, case):
    train(*case)


@pytest.mark.parametrize("script", SMALL, ids=lambda script: script.__name__)
@pytest.mark.parametrize("space", [Box(0, 5, (2,), np.uint8), Dict(a=Discrete(2))], ids=str)
def test_script_refuses_another_space_by_its_name(train, script, space):
    with pytest.raises(ValueError, match=r"^.*$") as error:
        train(script, space)
    assert str(space) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize(
    "script", [ppo, ppo_graph, ppo_recurrent, dqn], ids=lambda script: script.__name__
)
def test_script_takes_observations_of_bools(train, script):
    train(script, Discrete(2), Box(0, 1, (2, 3), bool))


@pytest.mark.parametrize("flags", [{}, {"seeds": (1, 2)}], ids=["one", "grid"])
def test_graph_takes_images(train, flags):
    train(ppo_graph, Discrete(2), Box(0, 255, (7, 7, 3), np.uint8), **flags)


# Masks: one action is allowed in each step


class Masked(Fixed):
    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed)
        return self.observe(), info | self.info

    def observe(self):
        self.mask = np.eye(4, dtype=np.int8)[self.np_random.integers(4)]
        self.info = {"action_masks": self.mask} if self.source == "info" else {}
        vector = np.zeros(3, np.float32)
        if self.source == "observation":
            return {"action_masks": self.mask, "vector": vector}
        return vector

    def step(self, action):
        assert self.mask[action]
        _, *results, info = super().step(action)
        return self.observe(), *results, info | self.info


class MaskedByMethod(Masked):
    def action_masks(self):
        return self.mask


@pytest.fixture
def make_masked(registry):
    def make(source):
        kind = MaskedByMethod if source == "method" else Masked
        kind = type("Kind", (kind,), {"source": source})
        space = VECTOR
        if source == "observation":
            space = Dict(action_masks=MultiBinary(4), vector=space)
        gymnasium.register("Masked-v0", lambda **_: kind(Discrete(4), space), max_episode_steps=9)
        given = {"action_masks": MultiBinary(4)} if source == "info" else ()
        return lambda *args, **kwargs: tw.make(*args, info_keys=given, **kwargs)

    return make


@pytest.mark.parametrize("source", ["observation", "info", "method"])
def test_ppo_takes_allowed_actions_alone(make_masked, tmp_path, source):
    args = ppo.Args("Masked-v0", total_timesteps=64, out=tmp_path, **SMALL[ppo])
    ppo.main(args, make_masked(source))


@pytest.mark.parametrize("source", ["observation", "info"])
def test_random_collection_takes_allowed_actions_alone(make_masked, source):
    tw.rollout(make_masked(source)("Masked-v0", 3), None, 20)


# Rewards of a variant


def scaled(*inner):
    def make(*args, **kwargs):
        env = tw.make(*args, **kwargs)
        return tw.TransformedEnv(env, *(each() for each in inner), T.ScaleReward(0.01))

    return make


@pytest.mark.full
@pytest.mark.parametrize("inner", [(), (T.RecordEpisodeStatistics,)], ids=["none", "recorder"])
@pytest.mark.parametrize("script", [ppo, ppo_graph], ids=lambda script: script.__name__)
def test_returns_are_of_the_envs_own_rewards(tmp_path, script, inner):
    args = script.Args("Pendulum-v1", total_timesteps=1_024, out=tmp_path, **SMALL[script])
    metrics = script.main(args, scaled(*inner))
    returns = metrics["eval_mean_return"]
    assert (returns["seed=1"] if script is ppo_graph else returns) < -500


# Arguments


@pytest.mark.parametrize("script", SMALL, ids=lambda script: script.__name__)
def test_arguments_may_be_strings(script):
    if script is not ppo_recurrent:
        assert script.Args(out="runs").out == Path("runs")
    rate = "policy_lr" if script is sac else "learning_rate"
    value = getattr(script.Args(**{rate: "1e-3"}), rate)
    assert value in (1e-3, (1e-3,))
    assert script.Args(num_envs="8").num_envs == 8


@pytest.mark.parametrize(
    "given", [{"num_envs": "many"}, {"gamma": "x"}, {"compile": "yes"}, {"num_steps": 0}], ids=str
)
def test_argument_that_does_not_fit_is_refused_by_its_name(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        ppo.Args(**given)


@pytest.mark.parametrize("given", [{"gamma": ()}, {"seeds": (1, 1)}, {"clip_coef": "x"}], ids=str)
def test_graph_refuses_arguments_that_do_not_fit_before_it_trains(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        ppo_graph.Args(**given)
