"""What all envs of classic control have in common, beside Gymnasium's own."""

from __future__ import annotations

import functools
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import AcrobotEnv

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap.envs.acrobot import Acrobot
from torchwrap.envs.cartpole import CartPole
from torchwrap.envs.mountain_car import MountainCar
from torchwrap.envs.mountain_car_continuous import MountainCarContinuous
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import check_env

FUNCTIONS = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
}
IDS = list(FUNCTIONS)
FIRST = {  # where episodes begin, by field
    "CartPole-v1": [(-0.05, 0.05)] * 4,
    "Pendulum-v1": [(-math.pi, math.pi), (-1, 1)],
    "Acrobot-v1": [(-0.1, 0.1)] * 4,
    "MountainCar-v0": [(-0.6, -0.4), (0, 0)],
    "MountainCarContinuous-v0": [(-0.6, -0.4), (0, 0)],
}
ANYWHERE = {  # beyond the limits too, and fast enough to cross them in one step
    "CartPole-v1": [(-2.6, 2.6), (-3, 3), (-0.24, 0.24), (-3, 3)],
    "Pendulum-v1": [(-12, 12), (-8, 8)],
    "Acrobot-v1": [(-math.pi, math.pi)] * 2 + [(-4 * math.pi, 4 * math.pi), (-9 * math.pi, 9 * math.pi)],
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "MountainCarContinuous-v0": [(-1.2, 0.6), (-0.07, 0.07)],
}
VARIANTS = [  # the arguments that change what happens
    *[(id, {}) for id in IDS],
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("Pendulum-v1", {"g": 9.81}),
    ("Acrobot-v1", {"book_or_nips": "nips"}),
    ("MountainCar-v0", {"goal_velocity": 0.02}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.02}),
]


def draw(bounds, count, random):
    low, high = np.array(bounds, np.float64).T
    return random.uniform(low, high, (count, len(bounds)))


def as_state(id, state):
    # Gymnasium's state is of float64, MountainCarContinuous's after its first step of float32.
    return np.array(state, np.float32 if id == "MountainCarContinuous-v0" else np.float64)


def make_gymnasium(id, max_episode_steps=None, book_or_nips=None, **kwargs):
    single = gymnasium.make(id, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs)
    if book_or_nips is not None:
        single.unwrapped.book_or_nips = book_or_nips
    single.reset(seed=0)
    return single


def inject(env, states):
    for field, column in zip(env.func_env.fields, states.T, strict=True):
        env.state[field].copy_(torch.from_numpy(column.copy()))


def state_of(env):
    return torch.stack([env.state[field] for field in env.func_env.fields], -1).numpy()


def step_all(env, actions):
    # The state before auto-reset is not to be had from outside, so it is read between the two halves of a step.
    successor = env._step({"action": torch.from_numpy(np.stack(actions))})
    return {key: value.numpy() for key, value in successor.items()}, state_of(env)


def choose(id, skill, random, observation):
    """An action: at random, or, as often as `skill` says, what solves the task."""
    clever = random.random() < skill
    if id == "CartPole-v1":
        return int(observation @ [0.3, 0.6, 9.0, 3.0] > 0) if clever else int(random.integers(2))
    if id == "Pendulum-v1":
        cos, sin, speed = observation
        torque = -8 * sin - 2 * speed if cos > 0.7 else 2 * np.sign(speed)
        return np.float32([torque if clever else random.uniform(-3, 3)])
    if id == "Acrobot-v1":
        return 2 * int(observation[5] > 0) if clever else int(random.integers(3))
    if id == "MountainCar-v0":
        return 2 * int(observation[1] > 0) if clever else int(random.integers(3))
    return np.float32([np.copysign(0.9, observation[1]) if clever else random.uniform(-1.3, 1.3)])


def play_gymnasium(single, id, first, skill, random):
    """A whole episode from a state, step by step: what was done, and what came of it."""
    observation, _ = single.reset()
    single.unwrapped.state = as_state(id, first)
    episode, over = [], False
    while not over:
        action = choose(id, skill, random, observation)
        observation, reward, terminated, truncated, _ = single.step(action)
        state = np.array(single.unwrapped.state, np.float64)
        episode.append((action, state, np.array(observation), reward, terminated, truncated))
        over = terminated or truncated
    return episode


def deviations(env, id, first, episodes, again=None):
    """Does the same from the same states: the greatest differences. Every `again` steps both are in the same state again."""
    env.reset(seed=0)
    inject(env, as_state(id, first))
    off = dict.fromkeys(("state", "observation", "reward"), 0.0)
    for step in range(max(map(len, episodes))):
        alive = [i for i, episode in enumerate(episodes) if step < len(episode)]
        if again is not None and step and step % again == 0:
            inject(env, as_state(id, [episode[min(step, len(episode)) - 1][1] for episode in episodes]))
        successor, states = step_all(env, [episode[min(step, len(episode) - 1)][0] for episode in episodes])
        theirs = zip(*(episodes[i][step] for i in alive), strict=True)
        _, state, observation, reward, terminated, truncated = map(np.array, theirs)
        for name, ours, other in (
            ("state", states, state),
            ("observation", successor["observation"], observation),
            ("reward", successor["reward"].squeeze(-1), reward.astype(np.float32)),
        ):
            off[name] = max(off[name], np.abs(ours[alive].astype(np.float64) - other).max())
        for name, other in (("terminated", terminated), ("truncated", truncated)):
            assert (successor[name].squeeze(-1)[alive] == other).all(), f"{name} at step {step}"
    return off


# Unstable systems multiply the last bit: CartPole's pole by 50 a second, and Acrobot by more where it spins.
AGAIN = {"CartPole-v1": 100, "Acrobot-v1": 5}


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize(
    ("bounds", "count", "limit", "skills", "again"),
    [(FIRST, 100, None, (0, 0.7, 1), AGAIN), (ANYWHERE, 900, 40, (0, 0.7, 1), AGAIN), (FIRST, 30, 200, (0,), {})],
    ids=["whole", "anywhere", "random"],
)
def test_whole_float64_episodes_are_gymnasiums(id, bounds, count, limit, skills, again):
    random = np.random.default_rng(1)
    first, single = draw(bounds[id], count, random), make_gymnasium(id, limit)
    episodes = [play_gymnasium(single, id, first[i], skills[i % len(skills)], random) for i in range(count)]
    env = tw.make(id, count, dtype=torch.float64, max_episode_steps=limit)
    off = deviations(env, id, first, episodes, again.get(id))
    assert off["state"] < (1e-10 if id == "Acrobot-v1" and again else 1e-12)
    assert off["observation"] < 2e-6 and off["reward"] < 2e-6  # a last bit of float32
    ends = [episode[-1][4:] for episode in episodes]
    assert any(truncated for _, truncated in ends) or skills == (0,)
    assert any(terminated for terminated, _ in ends) or id == "Pendulum-v1" or skills == (0,)


def step_each(id, states, actions, **kwargs):
    """One step of Gymnasium's from each state."""
    single, results = make_gymnasium(id, **kwargs), []
    for state, action in zip(states, actions, strict=True):
        single.reset()
        single.unwrapped.state = as_state(id, state)
        observation, reward, terminated, _, _ = single.step(action)
        results.append((np.array(single.unwrapped.state, np.float64), np.array(observation), reward, terminated))
    return map(np.array, zip(*results, strict=True))


@pytest.mark.parametrize(("id", "kwargs"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_step_from_anywhere_is_gymnasiums(id, kwargs, dtype):
    random = np.random.default_rng(2)
    states = draw(ANYWHERE[id], 600, random).astype(np.float32)
    if id == "Acrobot-v1" and dtype == torch.float32:
        states[:, 2:] /= 4  # where it is fast, it accelerates by hundreds
    actions = [choose(id, 0, random, np.zeros(3)) for _ in states]
    state, observation, reward, terminated = step_each(id, states, actions, **kwargs)
    env = tw.make(id, len(states), dtype=dtype, **kwargs)
    env.reset(seed=0)
    inject(env, states)
    successor, after = step_all(env, actions)
    off = np.abs(after - state)
    if id == "Acrobot-v1":  # the same angle, where one is just below pi and the other just above -pi
        off[:, :2] = np.minimum(off[:, :2], 2 * math.pi - off[:, :2])
    assert off.max() < (1e-12 if dtype == torch.float64 else 1e-5)
    np.testing.assert_allclose(successor["observation"], observation, rtol=0, atol=1e-5)
    np.testing.assert_allclose(successor["reward"].squeeze(-1), reward, rtol=2e-6, atol=1e-6)
    assert (successor["terminated"].squeeze(-1) == terminated).all()
    assert 0 < terminated.sum() < 600 or id == "Pendulum-v1"
    assert successor["reward"].dtype == successor["observation"].dtype == np.float32


@pytest.mark.parametrize("id", [*IDS, "CartPole-v0"])
def test_spaces_time_limits_and_frame_rates_are_gymnasiums(id):
    env, single = tw.make(id, 3), gymnasium.make(id)
    assert type(env) is FunctionalEnv
    for name in ("observation_space", "action_space"):
        ours, theirs = getattr(env, f"single_{name}"), getattr(single, name)
        assert ours == theirs and ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert env.signature.max_episode_steps == single.spec.max_episode_steps
    assert env.metadata["render_fps"] == single.metadata["render_fps"]
    assert env.spec.reward_threshold == single.spec.reward_threshold


@pytest.mark.parametrize("id", [*IDS, "CartPole-v0"])
def test_truncation_comes_at_the_limit_exactly(id):
    env = tw.make(id, 2)
    td, random, limit = env.reset(seed=0), np.random.default_rng(0), env.signature.max_episode_steps
    for step in range(1, limit + 1):
        first = td["observation"].numpy()
        action = [choose("CartPole-v1", 1, random, row) if "CartPole" in id else 1 for row in first]
        action = torch.tensor(action) if env.single_action_space.shape == () else torch.zeros(2, 1)
        transition, td = env.step(td.set("action", action))
        assert not transition["next", "terminated"].any()
        assert transition["next", "truncated"].tolist() == [[step == limit]] * 2


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("arguments", [{"max_episode_steps": 7}, {"max_episode_steps": 9, "dtype": torch.float64}], ids=str)
def test_the_contract_is_kept(id, arguments):
    check_env(functools.partial(tw.make, id, **arguments))


# How episodes begin.


def distance(sample, low, high):
    """Kolmogorov's and Smirnov's, from the uniform distribution."""
    ordered, count = np.sort(np.asarray(sample, np.float64)), len(sample)
    share = (ordered - low) / (high - low)
    return max((np.arange(1, count + 1) / count - share).max(), (share - np.arange(count) / count).max())


WIDER = {
    "CartPole-v1": ({"low": -1, "high": 2.5}, [(-1, 2.5)] * 4),
    "Pendulum-v1": ({"x_init": 0.5, "y_init": 3}, [(-0.5, 0.5), (-3, 3)]),
    "Acrobot-v1": ({"low": -0.4}, [(-0.4, 0.1)] * 4),
    "MountainCar-v0": ({"low": -1.1, "high": 0.3}, [(-1.1, 0.3), (0, 0)]),
    "MountainCarContinuous-v0": ({"high": -0.55}, [(-0.6, -0.55), (0, 0)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("id", "options", "bounds"), [*((id, None, FIRST[id]) for id in IDS), *((id, *WIDER[id]) for id in IDS)], ids=str
)
def test_first_states_are_uniform_as_gymnasiums_are(id, options, bounds, dtype):
    env, single = tw.make(id, 10_000, dtype=dtype), make_gymnasium(id)
    theirs = []
    for _ in range(300):
        single.reset(options=options)
        theirs.append(np.array(single.unwrapped.state))
    env.reset(seed=0)
    for _ in range(2):
        env.reset(options=options)
        for states, allowed in ((state_of(env), 0.0195), (np.array(theirs), 0.113)):  # exceeded once in a thousand
            for column, (low, high) in zip(states.T, bounds, strict=True):
                assert column.min() >= low - 1e-6 and column.max() <= high + 1e-6
                assert low == high or distance(column, low, high) < allowed
        columns = np.stack([column for column, (low, high) in zip(state_of(env).T, bounds, strict=True) if low < high])
        assert np.abs(np.atleast_2d(np.corrcoef(columns)) - np.eye(len(columns))).max() < 0.05  # one draw a field
        assert len(np.unique(columns[0])) > 9_900
    env.reset()
    assert all(column.max() <= high + 1e-6 for column, (_, high) in zip(state_of(env).T, FIRST[id], strict=True))


@pytest.mark.parametrize(
    ("id", "options"),
    [
        *((id, {"low": 1.0, "high": 0.0}) for id in IDS if id != "Pendulum-v1"),
        *((id, {"high": -7}) for id in IDS if id != "Pendulum-v1"),
        *((id, {"low": "a"}) for id in IDS if id != "Pendulum-v1"),
        *((id, {"low": None}) for id in IDS if id != "Pendulum-v1"),
        *((id, {"low": -math.inf}) for id in IDS if id != "Pendulum-v1"),
        *((id, {"low": math.nan}) for id in IDS if id != "Pendulum-v1"),
        *(("Pendulum-v1", {name: value}) for name in ("x_init", "y_init") for value in (-1, math.inf, math.nan, "a", None)),
    ],
    ids=str,
)
def test_reset_options_that_gymnasium_refuses_are_refused_and_nothing_has_changed(id, options):
    env = tw.make(id, 3)
    env.step(env.reset(seed=0).set("action", env.sample_action()))
    before = env.snapshot()["buffers"]
    with pytest.raises(ValueError, match=rf"{id}.reset needs options that fit, but got \{{'"):
        env.reset(seed=5, options=options)
    after = env.snapshot()["buffers"]
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    if not any(value != value for value in options.values()):  # NumPy takes NaN, and makes it everybody's state
        with pytest.raises((ValueError, OverflowError)):
            make_gymnasium(id).reset(options=options)


@pytest.mark.parametrize("id", IDS)
def test_reset_options_that_are_not_known_are_refused(id):
    known = r"\['x_init', 'y_init'\]" if id == "Pendulum-v1" else r"\['low', 'high'\]"
    with pytest.raises(ValueError, match=rf"needs options among {known}, but got \['hihg'\]"):
        tw.make(id, 3).reset(options={"hihg": 1.0})


@pytest.mark.parametrize(
    ("id", "arguments", "match"),
    [
        *((id, {"dtype": dtype}, "a dtype of torch.float32 or") for id in IDS for dtype in (torch.float16, "float32", None)),
        *((id, {"length": 2}, "'length'") for id in IDS),
        *(("Pendulum-v1", {"g": g}, "g") for g in ("10", None, math.nan, [9.8])),
        ("Acrobot-v1", {"book_or_nips": "paper"}, 'book_or_nips "book" or "nips", but got \'paper\''),
        ("Acrobot-v1", {"torque_noise_max": -0.1}, "torque_noise_max"),
        ("Acrobot-v1", {"torque_noise_max": "0"}, "torque_noise_max"),
        ("Acrobot-v1", {"torque_noise_max": math.inf}, "torque_noise_max"),
        *((id, {"goal_velocity": "0"}, "goal_velocity") for id in IDS[3:]),
        *((id, {"goal_velocity": math.nan}, "goal_velocity") for id in IDS[3:]),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(id, arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        tw.make(id, 2, **arguments)
    with pytest.raises((ValueError, TypeError), match=match):
        FUNCTIONS[id](**arguments)


# How they are batched.


def life(env, rows, num_steps=30):
    """What becomes of some envs, by their global index."""
    places = [row - env.signature.first_index for row in rows]
    td, seen = env.reset(seed=3), []
    for _ in range(num_steps):
        transition, td = env.step(td.set("action", env.sample_action()))
        seen.append(
            torch.cat([transition["next", "observation"], transition["next", "reward"], td["observation"]], -1)[places]
        )
    return torch.stack(seen)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_env_does_not_depend_on_how_many_there_are(id, compiled):
    def lives(rows, *where, **arguments):
        env = tw.make(id, *where, max_episode_steps=11, **arguments)
        if compiled:
            tw.compile(env, backend="aot_eager")
        return life(env, rows)

    many = lives(range(7), 4096)
    assert len(many[:, :, 0].unique()) > 180  # they differ
    torch.testing.assert_close(lives(range(7), 7), many, rtol=0, atol=1e-6)
    torch.testing.assert_close(lives([4], 1, first_index=4), many[:, 4:5], rtol=0, atol=1e-6)


def test_compiled_mixed_precision_is_eager():
    id = "MountainCarContinuous-v0"
    first = draw(ANYWHERE[id], 64, np.random.default_rng(0))
    eager, graph = (tw.make(id, 64, dtype=torch.float64, max_episode_steps=5) for _ in range(2))
    tw.compile(graph)
    tds = [env.reset(seed=0) for env in (eager, graph)]
    for env in (eager, graph):
        inject(env, as_state(id, first))
    for _ in range(12):  # two episodes are over
        action = 2 * eager.sample_action()
        (one, td), (two, other) = (e.step(td.set("action", action)) for e, td in zip((eager, graph), tds, strict=True))
        torch.testing.assert_close(one["next"].to_dict(), two["next"].to_dict(), rtol=0, atol=1e-8)
        torch.testing.assert_close(td["observation"], other["observation"], rtol=0, atol=1e-8)
        tds = [td, other]


@pytest.mark.parametrize("id", IDS)
def test_pictures_are_gymnasiums(id):
    pytest.importorskip("pygame")
    env, single = tw.make(id, 4, render_mode="rgb_array"), gymnasium.make(id, render_mode="rgb_array")
    env.reset(seed=0)
    single.reset(seed=0)
    states = draw(ANYWHERE[id], 4, np.random.default_rng(0)).astype(np.float32)
    inject(env, states)
    frames = env.render()
    for frame, state in zip(frames, states, strict=True):
        single.unwrapped.state = state.astype(np.float64)
        np.testing.assert_array_equal(frame, single.render())
    assert not np.array_equal(frames[0], frames[1])
    np.testing.assert_array_equal(env.render([2])[0], frames[2])
    env.close()
    single.close()
    assert np.array_equal(env.render()[3], frames[3])  # it can be opened again
    env.close()


# What is of one of them alone.


@pytest.mark.parametrize(
    "angles",
    [
        *[(math.pi, 0), (-math.pi, 0), (0, math.pi), (0, -math.pi), (math.pi, math.pi), (-math.pi, math.pi)],
        *[(np.nextafter(math.pi, 4), 0), (np.nextafter(-math.pi, -4), 0), (0, np.nextafter(math.pi, 4))],
        *[(6.5, 0), (-6.5, 0), (10, -10), (-17.5, 23.25), (100.0, -1000.0)],
    ],
)
def test_acrobot_angles_go_round_as_gymnasiums_with_both_bounds_inside(angles):
    first = np.array([[*angles, 0.0, 0.0]])
    state, *_ = step_each("Acrobot-v1", first, [1])
    env = FunctionalEnv(Acrobot(dtype=torch.float64), 1)
    env.reset(seed=0)
    inject(env, first)
    _, after = step_all(env, [1])
    np.testing.assert_allclose(after, state, rtol=0, atol=1e-11)


def test_acrobot_torque_noise_is_uniform_and_freshly_drawn():
    count = 5_000
    single, env = AcrobotEnv(), FunctionalEnv(Acrobot(torque_noise_max=0.5, dtype=torch.float64), count)
    single.reset(seed=0)
    torques, speeds = np.linspace(0.4, 1.6, 200), []
    for torque in torques:
        single.AVAIL_TORQUE, single.state = [torque] * 3, np.zeros(4)
        single.step(2)
        speeds.append(single.state[3])
    env.reset(seed=0)
    noise = []
    for _ in range(2):
        inject(env, np.zeros((count, 4)))
        noise.append(np.interp(step_all(env, [2] * count)[1][:, 3], speeds, torques))
        assert noise[-1].min() >= 0.5 - 1e-4 and noise[-1].max() <= 1.5 + 1e-4
        assert distance(noise[-1], 0.5, 1.5) < 1.95 / math.sqrt(count)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("functions", "goal"),
    [(MountainCar, 0.5), (MountainCarContinuous, float(np.float32(0.45)))],
    ids=["discrete", "continuous"],
)
def test_the_goal_and_its_velocity_are_inside(functions, goal):
    below = np.nextafter(np.float32(goal), np.float32(0)) if functions is MountainCarContinuous else np.nextafter(goal, 0)
    func_env = functions(goal_velocity=0.03125, dtype=torch.float64)
    env = FunctionalEnv(func_env, 4)
    env.reset(seed=0)
    slow = np.nextafter(np.float32(0.03125), np.float32(0))
    inject(env, np.array([[goal, 0.03125], [below, 0.03125], [goal, slow], [below, slow]]))
    assert func_env.terminal(env.state, rng=None).tolist() == [True, False, False, False]


@pytest.mark.parametrize("id", IDS[3:])
def test_the_wall_on_the_left_takes_the_speed_and_the_one_on_the_right_does_not(id):
    env = tw.make(id, 3)
    env.reset(seed=0)
    inject(env, np.float32([[-1.18, -0.07], [-1.2, 0.01], [0.58, 0.07]]))
    _, after = step_all(env, [1] * 3 if id == "MountainCar-v0" else np.zeros((3, 1), np.float32))
    assert after[0].tolist() == [np.float32(-1.2), 0]
    assert after[1, 0] > -1.2 and after[1, 1] > 0
    assert after[2].tolist() == [np.float32(0.6), np.float32(0.07)]


def test_a_force_beyond_the_bounds_is_clipped_but_costs_what_it_is():
    env = tw.make("MountainCarContinuous-v0", 3)
    env.reset(seed=0)
    inject(env, np.float32([[-0.5, 0]] * 3))
    successor, after = step_all(env, np.float32([[5], [1], [-1]]))
    np.testing.assert_allclose(successor["reward"].squeeze(-1), [-2.5, -0.1, -0.1], rtol=1e-6)
    np.testing.assert_allclose(after[0], after[1], rtol=0, atol=1e-7)


def test_mountain_car_continuous_begins_in_float32_and_stays_beside_gymnasiums_float64():
    id, random = "MountainCarContinuous-v0", np.random.default_rng(0)
    first, single = draw(FIRST[id], 30, random), make_gymnasium(id)
    episodes = [play_gymnasium(single, "from float64", state, 0.7, random) for state in first]
    env = tw.make(id, 30, dtype=torch.float64)
    assert all(value.dtype == torch.float32 for value in env.state.values())
    off = deviations(env, id, first, episodes)
    assert 1e-8 < off["state"] < 1e-5
