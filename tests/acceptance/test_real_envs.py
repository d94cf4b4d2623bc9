"""Transforms match Gymnasium's wrappers of the same names on real envs, step by step."""

from collections import Counter

import ale_py
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from oracles import assert_values_equal

import torchwrap as tw
from torchwrap import transforms as T

gymnasium.register_envs(ale_py)


# Gymnasium warns about bounds that it rounds to the space's dtype.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
PONG = {"frameskip": 4, "repeat_action_probability": 0.0}  # deterministic

ENVS = {  # an id, its arguments, number of steps, and how episodes end within them
    "poles": ("CartPole-v1", {}, 90, {"terminated"}),
    "short poles": (
        "CartPole-v1",
        {"max_episode_steps": 15},
        90,
        {"terminated", "truncated", "both"},
    ),
    "one step": ("CartPole-v1", {"max_episode_steps": 1}, 8, {"truncated"}),
    "pendulums": (
        "Pendulum-v1",
        {"max_episode_steps": 7},
        30,
        {"truncated"},
    ),
    "reachers": ("Reacher-v5", {"max_episode_steps": 5}, 20, {"truncated"}),
    "pongs": (
        "ALE/Pong-v5",
        {"max_episode_steps": 6, **PONG},
        20,
        {"truncated"},
    ),
    "long pongs": (
        "ALE/Pong-v5",
        {"max_episode_steps": 80, **PONG},
        165,
        {"truncated"},
    ),
}

INFO = {
    "Reacher-v5": ["reward_dist", "reward_ctrl"],
    "ALE/Pong-v5": ["lives", "episode_frame_number"],
}


def use(name, **arguments):
    return name, arguments


STACK = "FrameStackObservation"
TIME = "TimeAwareObservation"
RECORD = use("RecordEpisodeStatistics")
GRAY = use("GrayscaleObservation")
SQUARE = use("ResizeObservation", shape=(84, 84))

EVERYWHERE = [  # stacks of transforms, innermost first
    [use(STACK, stack_size=3)],
    [use(STACK, stack_size=4, padding_type="zero")],
    [use("DelayObservation", delay=3)],
    [use("FlattenObservation")],
    [use(TIME, flatten=False, normalize_time=True, dict_time_key="clock")],
    [
        use(TIME, flatten=False),
        use("FilterObservation", filter_keys=["time"]),
        use("FlattenObservation"),
    ],
    [RECORD, use("TimeLimit", max_episode_steps=4)],
    [use("TransformReward", func=abs), RECORD],
    [use("ClipReward", min_reward=-0.1, max_reward=0.5)],
    [use("DelayObservation", delay=1), use(STACK, stack_size=2)],
]
SHORT = use("TimeLimit", max_episode_steps=9)
MINUS = use("TransformAction", func=lambda action: 1 - action, action_space=None)
CLIP = use("TransformObservation", func=lambda obs: obs.clip(-0.5, 0.5), observation_space=None)
RESCALE = use("RescaleAction", min_action=np.array([-1, 0.0]), max_action=np.array([5, 0.1]))
SPECIAL = {
    "short poles": [
        [SHORT, use(TIME, normalize_time=True), use(STACK, stack_size=8)],
        [MINUS, use("DtypeObservation", dtype=np.float64)],
    ],
    "pendulums": [
        [CLIP, use("ClipAction"), use("DiscretizeObservation", bins=(2, 3, 5))],
        [use("RescaleObservation", min_obs=-1.0, max_obs=3.0)],
        [use("DiscretizeAction", bins=(4,), multidiscrete=True)],
    ],
    "reachers": [
        [use("DtypeObservation", dtype=np.float32), use("ReshapeObservation", shape=(5, 2))],
        [RESCALE],
    ],
    "pongs": [
        [GRAY, use("ResizeObservation", shape=(105, 80))],  # exactly half
        [SQUARE, use(TIME), use("DelayObservation", delay=2)],
    ],
    "long pongs": [[RECORD, GRAY, SQUARE, use(STACK, stack_size=4)]],
}

CASES = [(group, []) for group in ENVS]
CASES += [("short poles", stack) for stack in EVERYWHERE]
CASES += [(group, stack) for group, stacks in SPECIAL.items() for stack in stacks]


QUICK = ["short poles"]  # with every stack; of the others, without --full, one


def build(group, stack):
    """A batch with transforms, and single envs with Gymnasium's wrappers."""
    id, arguments, *_ = ENVS[group]
    env = tw.make(id, 3, backend="gymnasium", info_keys=INFO.get(id, ()), **arguments)
    oracles = [gymnasium.make(id, **arguments) for _ in range(3)]
    for name, settings in stack:
        oracles = [getattr(wrappers, name)(oracle, **settings) for oracle in oracles]
    transforms = [getattr(T, name)(**settings) for name, settings in stack]
    return tw.TransformedEnv(env, *transforms), oracles


def assert_agree(env, oracles, num_steps):
    """Asserts that an env equals single envs, which are reset by hand. Counts the kinds of ends."""
    assert env.single_observation_space == oracles[0].observation_space
    assert env.single_action_space == oracles[0].action_space
    endings = Counter()
    td = env.reset(seed=3)
    observations = [oracle.reset(seed=3 + i)[0] for i, oracle in enumerate(oracles)]
    for step in range(num_steps):
        if step == 3:  # from here on, even episodes of equal length do not end together
            td = env.reset(mask=torch.tensor([False, True, False]))
            observations[1], _ = oracles[1].reset()
        assert_values_equal(td["observation"], observations)
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        results = [oracle.step(row.numpy()) for oracle, row in zip(oracles, action, strict=True)]
        successor = transition["next"]
        assert_successor(successor, results, env.unwrapped.info_spaces)
        for row, (observation, _, terminated, truncated, info) in enumerate(results):
            observations[row] = observation
            if not terminated and not truncated:
                continue
            endings[ENDINGS[bool(terminated), bool(truncated)]] += 1
            observations[row], _ = oracles[row].reset()
            if "episode" in info:  # Gymnasium sums in float64, torchwrap's rewards are float32
                returned = pytest.approx(info["episode"]["r"], rel=1e-6)
                assert successor["episode_return"][row].item() == returned
                assert successor["episode_length"][row].item() == info["episode"]["l"]
    assert_values_equal(td["observation"], observations)
    return endings


ENDINGS = {
    (True, False): "terminated",
    (False, True): "truncated",
    (True, True): "both",
}


def assert_successor(successor, results, info_keys):
    observations, reward, terminated, truncated, infos = zip(*results, strict=True)
    assert_values_equal(successor["observation"], list(observations))
    assert_values_equal(successor["reward"], np.float32(reward)[:, None])
    assert_values_equal(successor["terminated"], np.array(terminated)[:, None])
    assert_values_equal(successor["truncated"], np.array(truncated)[:, None])
    for key in info_keys:
        expected = np.float32([info[key] for info in infos])
        assert_values_equal(successor["info", key], expected[:, None])


def case(group, stack):
    is_quick = group in QUICK
    if "pongs" not in group:
        is_quick |= stack in SPECIAL.get(group, [])[:1]
    name = "-".join([group, *(name for name, _ in stack)])
    return pytest.param(group, stack, id=name, marks=[] if is_quick else pytest.mark.full)


@pytest.mark.parametrize("group, stack", [case(*each) for each in CASES])
def test_transforms_on_a_real_env_match_gymnasiums_wrappers(group, stack):
    endings = assert_agree(*build(group, stack), ENVS[group][2])
    assert endings.total() >= 6
    if not stack:
        assert set(endings) == ENVS[group][3]


def test_time_limit_truncates_as_gymnasiums_and_still_terminates():
    limited = build("poles", [use("TimeLimit", max_episode_steps=15)])
    assert set(assert_agree(*limited, 90)) == ENVS["short poles"][3]


def test_all_of_gymnasiums_transforms_have_cases():
    # Others differ on purpose, draw random numbers, or change nothing.
    others = {
        "NormalizeObservation",
        "NormalizeReward",
        "AddWhiteNoise",
        "ObstructView",
        "StickyAction",
        "PassiveEnvChecker",
    }
    tested = {name for _, stack in CASES for name, _ in stack}
    assert tested == {name for name in T.__all__ if hasattr(wrappers, name)} - others
