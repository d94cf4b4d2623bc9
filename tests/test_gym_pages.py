"""The examples that teach: the classes of Gymnasium's pages beside the pages' own, and one transform of each kind by hand."""

from __future__ import annotations

import functools
import importlib.util
import runpy
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

import torchwrap as tw
import torchwrap.testing
from torchwrap.interop.gymnasium import from_gymnasium
from torchwrap.testing import ScriptedEnv, check_env, check_transform

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMITS = (11, 7, 4, 9)
"""Steps that an episode of each env may have, so that ends are staggered."""


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages():
    return load("gym_pages")


@pytest.fixture(scope="module")
def custom():
    return load("custom_transform")


# The pages' own classes, for one env.


class DiscreteActions(gymnasium.ActionWrapper):
    def __init__(self, env, disc_to_cont):
        super().__init__(env)
        self.disc_to_cont = disc_to_cont
        self.action_space = Discrete(len(disc_to_cont))

    def action(self, action):
        return self.disc_to_cont[action]


class RelativePosition(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = Box(-np.inf, np.inf, (2,))

    def observation(self, observation):
        return observation["target"] - observation["agent"]


class ClipReward(gymnasium.RewardWrapper):
    def __init__(self, env, min_reward, max_reward):
        super().__init__(env)
        self.min_reward = min_reward
        self.max_reward = max_reward

    def reward(self, reward):
        return np.clip(reward, self.min_reward, self.max_reward)


class ReacherRewardWrapper(gymnasium.Wrapper):
    def __init__(self, env, reward_dist_weight, reward_ctrl_weight):
        super().__init__(env)
        self.reward_dist_weight = reward_dist_weight
        self.reward_ctrl_weight = reward_ctrl_weight

    def step(self, action):
        observation, _, terminated, truncated, info = self.env.step(action)
        distance, control = self.reward_dist_weight * info["reward_dist"], self.reward_ctrl_weight * info["reward_ctrl"]
        return observation, distance + control, terminated, truncated, info


# Both sides, step by step.


class Heard(gymnasium.Wrapper):
    """Keeps the actions that reach an env."""

    def __init__(self, env):
        super().__init__(env)
        self.actions = []

    def step(self, action):
        self.actions.append(np.array(action))
        return self.env.step(action)


class Rounded(gymnasium.Wrapper):
    """Info in float32, as torchwrap passes it on."""

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {name: np.float32(value) for name, value in info.items()}


def envs(id):
    """One env of each limit."""
    return [Heard(gymnasium.make(id, max_episode_steps=limit)) for limit in LIMITS]


def batch(singles, **arguments):
    vector_env = SyncVectorEnv([lambda env=env: env for env in singles], autoreset_mode=AutoresetMode.DISABLED)
    return from_gymnasium(vector_env, **arguments)


def beside(env, singles, num_steps=60):
    """Steps a batch and single envs with the same random actions, everything equal; gives the batch's transitions."""
    td = env.reset(seed=3)
    for row, single in enumerate(singles):
        same(td["observation"][row], single.reset(seed=3 + row)[0])
    transitions = []
    for _ in range(num_steps):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        after = transition["next"]
        transitions.append(after)
        for row, single in enumerate(singles):
            given = action[row].numpy() if action.dim() > 1 else action[row].item()
            observation, reward, terminated, truncated, _ = single.step(given)
            same(after["observation"][row], observation)
            same(after["reward"][row, 0], np.float32(reward))
            assert (after["terminated"][row].item(), after["truncated"][row].item()) == (terminated, truncated)
            if terminated or truncated:
                observation, _ = single.reset()
            same(td["observation"][row], observation)
    return torch.stack(transitions, 1)


def same(tensor, array):
    assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)


def staggered(data):
    ends = [tuple(row.nonzero().flatten().tolist()) for row in data["done"].squeeze(-1)]
    return len(set(ends)) == len(ends) and all(len(row) > 3 for row in ends)


@pytest.mark.parametrize(
    ("id", "actions"),
    [
        ("Pendulum-v1", [np.float32([-2]), np.float32([0]), np.float32([1.5])]),
        (
            "Reacher-v5",
            [np.array([1, 0]), np.array([-1, 0]), np.array([0, 1]), np.array([0, -1])],
        ),  # the page's, whole numbers
    ],
)
def test_discrete_actions_reach_the_env_as_the_pages_do(pages, id, actions):
    ours, theirs = envs(id), envs(id)
    env = tw.TransformedEnv(batch(ours), pages.DiscreteActions(actions))
    assert env.single_action_space == Discrete(len(actions))
    assert staggered(beside(env, [DiscreteActions(single, actions) for single in theirs]))
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.actions, other.actions) and len(one.actions) == 60
        assert len(np.unique(one.actions, axis=0)) == len(actions)
        assert {action.dtype for action in one.actions} == {np.dtype("float32")}  # whatever the list holds


def test_relative_positions_are_the_pages(pages):
    def grids():
        return [gymnasium.wrappers.TimeLimit(pages.GridWorld(), limit) for limit in LIMITS]

    env = tw.TransformedEnv(batch(grids()), pages.RelativePosition())
    assert env.single_observation_space == Box(-4, 4, (2,), np.int64)
    data = beside(env, [RelativePosition(grid) for grid in grids()])
    assert staggered(data) and data["terminated"].any() and data["truncated"].any()
    assert len(data["observation"].view(-1, 2).unique(dim=0)) > 20


def test_clipped_rewards_are_the_pages(pages):
    env = tw.TransformedEnv(batch(envs("Pendulum-v1")), pages.ClipReward(-5.1, -0.7))
    data = beside(env, [ClipReward(single, -5.1, -0.7) for single in envs("Pendulum-v1")])
    low, high = np.float32([-5.1, -0.7])
    assert staggered(data) and data["reward"].aminmax() == (low, high) and len(data["reward"].unique()) > 50


def test_rewards_of_reacher_are_the_pages_in_float32(pages):
    env = tw.make("Reacher-v5", 3, info_keys=["reward_dist", "reward_ctrl"])
    singles = [Rounded(gymnasium.make("Reacher-v5")) for _ in range(3)]
    env = tw.TransformedEnv(env, pages.ReacherRewardWrapper(0.7, 0.3))
    data = beside(env, [ReacherRewardWrapper(single, 0.7, 0.3) for single in singles], 104)
    assert data["done"].squeeze(-1).nonzero()[:, 1].tolist() == [49, 99] * 3


def test_rewards_of_reacher_are_the_pages_where_info_keeps_its_precision(pages):
    info_keys = {name: Box(-np.inf, np.inf, (1,), to) for name, to in (("reward_dist", "f8"), ("reward_ctrl", "f4"))}
    env = tw.TransformedEnv(batch(envs("Reacher-v5"), info_keys=info_keys), pages.ReacherRewardWrapper(0.7, 0.3))
    data = beside(env, [ReacherRewardWrapper(single, 0.7, 0.3) for single in envs("Reacher-v5")])
    terms = data["info"]
    assert staggered(data) and not torch.isclose(data["reward"].double(), terms["reward_dist"] + terms["reward_ctrl"]).any()


# The old page's auto-reset.


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_one_step_shows_an_end_and_a_beginning(pages, ending):
    # By hand: episode e of env i has (2, 1, 3)[(i + e) % 3] steps, and observations are 1000 * i and the step.
    env = ScriptedEnv(3, (1,), episode_lengths=(2, 1, 3), ending=ending)
    env.reset()
    for new, reward, done, terminal in [
        ([1, 1000, 2001], [1, 1, 1], [False, True, False], [1, 1001, 2001]),
        ([0, 1001, 2002], [2, 1, 2], [True, False, False], [2, 1001, 2002]),
        ([0, 1002, 2000], [1, 2, 3], [True, False, True], [1, 1002, 2003]),
        ([1, 1000, 2001], [1, 3, 1], [False, True, False], [1, 1003, 2001]),
        ([2, 1001, 2000], [2, 1, 2], [False, False, True], [2, 1001, 2002]),
    ]:
        action = env.sample_action()
        new_obs, terminal_reward, terminal_done, info = pages.auto_reset_step(env, action)
        shown = (new_obs, terminal_reward, terminal_done, info["terminal_observation"])
        assert [value.flatten().tolist() for value in shown] == [new, reward, done, terminal]
        assert info["terminal_info"]["action"].equal(action)


@pytest.mark.parametrize(("length", "ends"), [(1, [0, 1, 2, 3, 4, 5]), (3, [2, 5])])
@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_one_step_shows_every_env_ending_at_once(pages, length, ends, ending):
    env = ScriptedEnv(2, (1,), episode_lengths=length, ending=ending)
    env.reset()
    for step in range(6):
        elapsed = step % length + 1
        new_obs, reward, done, info = pages.auto_reset_step(env, env.sample_action())
        assert done.tolist() == [[step in ends]] * 2 and reward.tolist() == [[elapsed]] * 2
        assert info["terminal_observation"].tolist() == [[elapsed], [1000 + elapsed]]
        assert new_obs.tolist() == ([[0], [1000]] if step in ends else [[elapsed], [1000 + elapsed]])


TERMINATED, TRUNCATED, BOTH = (True, False), (False, True), (True, True)


@pytest.mark.parametrize(("backend", "tolerance"), [("gymnasium", 0), ("torch", 1e-6)])
@pytest.mark.parametrize(
    ("limit", "endings"),
    [(500, {TERMINATED}), (5, {TRUNCATED}), (1, {TRUNCATED}), (14, {TERMINATED, TRUNCATED, BOTH})],
)
def test_one_step_of_cartpole_shows_what_single_envs_do(pages, backend, tolerance, limit, endings):
    native = {"dtype": torch.float64} if backend == "torch" else {}
    env = tw.make("CartPole-v1", 4, backend=backend, max_episode_steps=limit, **native)
    singles = [gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in range(4)]

    def begin(row, **seed):
        first, _ = singles[row].reset(**seed)
        if not native:
            return first
        # torchwrap's own draws other numbers: the single env goes on from its state.
        singles[row].unwrapped.state = torch.stack([env.unwrapped.state[name][row] for name in env.unwrapped.fields]).numpy()
        return singles[row].unwrapped.state.astype(np.float32)

    td, seen = env.reset(seed=0), []
    for row in range(4):
        assert begin(row, seed=row) == pytest.approx(td["observation"][row].numpy(), abs=tolerance)
    for _ in range(120):
        action = env.sample_action()
        new_obs, terminal_reward, terminal_done, info = pages.auto_reset_step(env, action)
        for row, single in enumerate(singles):
            observation, reward, terminated, truncated, _ = single.step(action[row].item())
            assert info["terminal_observation"][row].numpy() == pytest.approx(observation, abs=tolerance)
            assert (terminal_reward[row].item(), terminal_done[row].item()) == (reward, terminated or truncated)
            if terminated or truncated:
                seen.append((terminated, truncated))
                assert new_obs[row].abs().max() <= 0.05 and not np.allclose(new_obs[row], observation, atol=1e-3)
                observation = begin(row)
            assert new_obs[row].numpy() == pytest.approx(observation, abs=tolerance)
    assert set(seen) == endings and len(seen) >= 12
    assert list(info["terminal_info"].keys()) == []  # CartPole has none


def test_one_step_shows_the_info_of_the_end(pages):
    limits = (3, 2)
    singles = [gymnasium.make("Reacher-v5", max_episode_steps=limit) for limit in limits]
    env = batch([gymnasium.make("Reacher-v5", max_episode_steps=limit) for limit in limits], info_keys=["reward_dist"])
    env.reset(seed=0)
    for row, single in enumerate(singles):
        single.reset(seed=row)
    for step in range(1, 8):
        action = env.sample_action()
        *_, done, info = pages.auto_reset_step(env, action)
        for row, single in enumerate(singles):
            *_, truncated, expected = single.step(action[row].numpy())
            assert done[row].item() == truncated == (step % limits[row] == 0)
            same(info["terminal_info"]["reward_dist"][row, 0], np.float32(expected["reward_dist"]))
            if truncated:
                single.reset()


# The contract, and its errors.


class Reaching(ScriptedEnv):
    """Its info has Reacher's terms."""

    def _step(self, td):
        after = super()._step(td)
        after["info"].set("reward_dist", -after["reward"]).set("reward_ctrl", -td["action"].square().sum(-1, keepdim=True))
        return after


PARTS = {"agent": Box(0, 4, (2,), np.int64), "target": Box(0, 6, (2,), np.int64)}
scripted = functools.partial(functools.partial, ScriptedEnv)


def test_the_grid_keeps_the_contract_of_an_env(pages):
    check_env(lambda num_envs, first_index: batch([pages.GridWorld() for _ in range(num_envs)], first_index=first_index))


@pytest.mark.parametrize(
    ("make", "make_env"),
    [
        (lambda pages: pages.DiscreteActions([np.ones(6), -np.ones(6), np.zeros(6)]), ScriptedEnv),
        (lambda pages: pages.RelativePosition(), scripted(observation_space=Dict(PARTS))),
        (lambda pages: pages.RelativePosition(), scripted(observation_space=Dict({**PARTS, "rest": Discrete(3)}))),
        (lambda pages: pages.RelativePosition(), scripted(observation_space=Dict(agent=Box(-3, 2), target=Box(-1, 8)))),
        (lambda pages: pages.ClipReward(2, 3), ScriptedEnv),
        (lambda pages: pages.ReacherRewardWrapper(2, 0.5), Reaching),
    ],
)
def test_every_class_keeps_the_contract(pages, make, make_env):
    check_transform(lambda: make(pages), make_env)


def test_a_repr_shows_the_arguments(pages):
    assert repr(pages.DiscreteActions([[1.0], [-1.0]])) == "DiscreteActions(disc_to_cont=[[1.0], [-1.0]])"
    assert repr(pages.RelativePosition()) == "RelativePosition()"
    assert repr(pages.ClipReward(-1, max_reward=2)) == "ClipReward(min_reward=-1, max_reward=2)"
    shown = "ReacherRewardWrapper(reward_dist_weight=0.5, reward_ctrl_weight=2)"
    assert repr(pages.ReacherRewardWrapper(0.5, reward_ctrl_weight=2)) == shown


@pytest.mark.parametrize("actions", [[], [[0.0] * 6, [0.0]], [[0.0] * 6, [2.0] * 6], [0.0] * 6])
def test_discrete_actions_need_actions_of_the_env(pages, actions):
    needs = r"DiscreteActions needs disc_to_cont with actions in Box\(-1.0, 1.0, \(6,\), float32\), but got \["
    with pytest.raises(ValueError, match=needs):
        tw.TransformedEnv(ScriptedEnv(2), pages.DiscreteActions(actions))
    with pytest.raises(TypeError, match=r"DiscreteActions needs a Box action space, but got Discrete\(2\)\."):
        tw.TransformedEnv(ScriptedEnv(2, action_space=Discrete(2)), pages.DiscreteActions(actions))


@pytest.mark.parametrize(
    ("space", "needs"),
    [
        (Box(0, 1, (2,)), 'a Dict observation space with "agent" and "target", but got Box'),
        (Dict(agent=PARTS["agent"]), 'a Dict observation space with "agent" and "target", but got Dict'),
        (Dict({**PARTS, "agent": Discrete(3)}), '"agent" and "target" as Boxes'),
        (Dict({**PARTS, "target": Discrete(3)}), '"agent" and "target" as Boxes'),
        (Dict({**PARTS, "agent": Box(0, 4, (3,), np.int64)}), "of one shape"),
        (Dict({**PARTS, "agent": Box(0, 4, (2,), np.int32)}), "signed dtype, but got Dict"),
        (Dict({name: Box(0, 4, (2,), np.uint8) for name in PARTS}), "signed dtype, but got Dict"),
    ],
)
def test_relative_positions_need_an_agent_and_a_target(pages, space, needs):
    with pytest.raises(TypeError, match=f"RelativePosition needs .*{needs}"):
        tw.TransformedEnv(ScriptedEnv(2, observation_space=space), pages.RelativePosition())


def test_clipping_needs_an_interval(pages):
    with pytest.raises(ValueError, match=r"ClipReward needs min_reward <= max_reward, but got 1 and 0\."):
        pages.ClipReward(1, 0)


@pytest.mark.parametrize(("given", "named"), [({}, r"\[\]"), ({"info_keys": ["reward_dist"]}, r"\['reward_dist'\]")])
def test_info_that_is_missing_is_named(pages, given, named):
    env = tw.TransformedEnv(tw.make("Reacher-v5", 2, **given), pages.ReacherRewardWrapper(1, 1))
    td = env.reset(seed=0)
    with pytest.raises(ValueError, match=rf"needs info_keys=.* of its env, but got {named}\."):
        env.step(td.set("action", env.sample_action()))


def test_the_pages_run(pages, capsys):
    pages.main()
    said = capsys.readouterr().out
    assert "<DiscreteActions(disc_to_cont=[[-2.0], [0.0], [2.0]])<Pendulum-v1(num_envs=3, device=cpu)>>" in said
    assert "Discrete(3), which reach the env as [-2.0, 0.0, 2.0]" in said
    assert "[[2, 1], [3, 4], [0, 1]] from [[4, 3], [2, 2], [4, 1]]: [[-2, -2], [1, 2], [-4, 0]]" in said
    assert "rewards: from -5 to -1" in said
    assert "<ReacherRewardWrapper(reward_dist_weight=1.0, reward_ctrl_weight=0.1)<Reacher-v5(num_envs=3" in said
    shown = (
        "done: [",
        "new observation: [",
        "terminal observation: [",
        "terminal reward: 0.0",
        "{'reward_survive': tensor([0.])}",
    )
    assert all(words in said[said.index("as an episode ends") :] for words in shown)


# A transform of each kind.


def test_custom_transforms_are_short_run_and_are_checked(monkeypatch, capsys):
    path, checked, check = EXAMPLES / "custom_transform.py", [], check_transform

    def checking(make, *arguments):
        checked.append(type(make()).__name__)
        check(make, *arguments)

    monkeypatch.setattr(torchwrap.testing, "check_transform", checking)
    runpy.run_path(str(path), run_name="__main__")
    assert len(path.read_text().splitlines()) < 60
    assert sorted(checked) == ["ContinuousAction", "HideSpeeds", "LogReward", "StreakReward"]
    stack, streaks = capsys.readouterr().out.splitlines()
    assert stack.startswith("<ContinuousAction()<HideSpeeds()<LogReward()<StreakReward()<CartPole-v1(num_envs=64")
    assert "[2, 3, 4, 5, 6" in streaks and ", 1, " in streaks


def test_a_streak_counts_until_it_breaks_and_begins_anew_with_an_episode(custom):
    transform = custom.StreakReward()
    transform.setup(tw.Signature(2, Box(-1, 1, (4,)), Discrete(2)))

    def step(*theta):
        observation = torch.full((2, 4), 9.0)
        observation[:, 2] = torch.tensor(theta)
        return transform.step(TensorDict({"observation": observation, "reward": torch.ones(2, 1)}, [2]))["reward"].tolist()

    assert step(0.0, 0.09) == [[2], [2]]
    assert step(-0.09, -0.11) == [[3], [1]]
    assert step(0.0, 0.0) == [[4], [2]]
    transform.reset(TensorDict({"observation": torch.zeros(2, 4)}, [2]), torch.tensor([True, False]))
    assert step(0.0, 0.0) == [[2], [3]]
    assert list(transform.state_dict()) == []


def test_a_log_reward_is_the_logarithm_of_one_more(custom):
    reward = custom.LogReward()(TensorDict({"reward": torch.tensor([[0.0], [np.e - 1]])}, [2]))["reward"]
    assert reward.flatten().tolist() == pytest.approx([0, 1])


def test_hidden_speeds_leave_the_positions(custom):
    bare, env = tw.make("CartPole-v1", 3), tw.TransformedEnv(tw.make("CartPole-v1", 3), custom.HideSpeeds())
    td, hidden = bare.reset(seed=0), env.reset(seed=0)
    space = bare.single_observation_space
    assert env.single_observation_space == Box(space.low[[0, 2]], space.high[[0, 2]])
    for _ in range(50):
        action = bare.sample_action()
        transition, td = bare.step(td.set("action", action))
        after, hidden = env.step(hidden.set("action", action))
        assert after["next", "observation"].equal(transition["next", "observation"][:, [0, 2]])
        assert hidden["observation"].equal(td["observation"][:, [0, 2]])


def test_continuous_actions_push_left_or_right(custom):
    env = tw.TransformedEnv(ScriptedEnv(3, action_space=Discrete(2)), custom.ContinuousAction())
    assert env.single_action_space == Box(-1, 1, (1,))
    transition, _ = env.step(env.reset().set("action", torch.tensor([[-0.3], [0.2], [0.9]])))
    assert transition["next", "info", "action"].tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"ContinuousAction needs the actions Discrete\(2\), but got Box"):
        tw.TransformedEnv(ScriptedEnv(1), custom.ContinuousAction())
