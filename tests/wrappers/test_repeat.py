"""RepeatAction and MaxAndSkipObservation against Gymnasium's wrappers."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AsyncVectorEnv
from helpers import OtherVectorEnv, assert_same, mostly_full
from oracles import quick
from single_envs import Singles, assert_equal_trees, stack_values

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.interop.tensors import from_functions
from torchwrap.testing import ScriptedEnv


class Counting(gymnasium.Env):
    """Observes -steps and steps from a random point. Episodes take the lengths of a seed in turn.

    A maximum differs from the last frame, and an extra reset or step changes the point.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, lengths, ending="both"):
        self.lengths = lengths
        self.ending = ending
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed
        self.episode += 1
        self.steps = 0
        self.point = self.np_random.normal()
        return self.observation(), {}

    def observation(self):
        return np.float32([self.point - self.steps, self.point + self.steps])

    def step(self, action):
        assert self.steps < self.length, "a step after the end"
        self.steps += 1
        self.point += self.np_random.normal()
        over = self.steps == self.length
        terminated = over and self.ending != "truncated"
        truncated = over and self.ending != "terminated"
        return (
            self.observation(),
            float(self.steps),
            terminated,
            truncated,
            {"steps": self.steps},
        )

    @property
    def length(self):
        lengths = self.lengths[self.seed]
        return lengths[self.episode % len(lengths)]


gymnasium.register("TorchwrapTest/Counting-v0", entry_point=Counting)


def counting(lengths, ending, vectorization_mode="sync"):
    return tw.make(
        "TorchwrapTest/Counting-v0",
        len(lengths),
        lengths=lengths,
        ending=ending,
        vectorization_mode=vectorization_mode,
        info_keys=["steps"],
    )


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("repeats", quick([1, 2, 4], 4))
@pytest.mark.parametrize("vectorization_mode", mostly_full(["sync", "async"], "sync"))
def test_repeat_action_equals_gymnasiums_in_each_env(vectorization_mode, repeats, ending):
    lengths = [(1, 5, 2), (7, 1), (8, 4, 3)]
    with W.RepeatAction(counting(lengths, ending, vectorization_mode), repeats) as env:
        make = lambda: wrappers.RepeatAction(Counting(lengths, ending), repeats)  # noqa: E731
        compare(env, [make] * 3, 12)


def compare(env, makers, num_steps):
    singles = Singles(makers, 0)
    td = env.reset(seed=0)
    for _ in range(num_steps):
        assert_equal_trees(td["observation"], stack_values(singles.now))
        td, actions = singles.act(td)
        transition, td = env.step(td)
        expected = singles.step(actions)
        steps = [[info["steps"]] for info in singles.infos]
        expected["info"] = {"steps": np.float32(steps)}
        assert_equal_trees(transition["next"], expected)


def test_max_and_skip_without_early_endings_equals_gymnasiums():
    lengths = [(4,), (8,), (100,)]
    env = W.MaxAndSkipObservation(counting(lengths, "both"), 4)
    compare(env, [lambda: wrappers.MaxAndSkipObservation(Counting(lengths), 4)] * 3, 9)


@pytest.mark.parametrize("name", mostly_full(["eager", "compiled"], "eager"))
def test_max_and_skip_of_early_endings_equals_hand_computed_values(name):
    # Episodes of 1, 2, 3 and 5 steps, skip 3: observations (-steps, steps) of the last two steps.
    class Falling(ScriptedEnv):
        def _observation_now(self):
            steps = self.elapsed.float()
            return torch.stack([-steps, steps], 1)

    env = W.MaxAndSkipObservation(Falling(4, (2,), (1, 2, 3, 5), ending="terminated"), 3)
    env = tw.compile(env, backend="aot_eager") if name == "compiled" else env
    transition, td = env.step(env.reset().set("action", env.sample_action()))
    following = transition["next"]
    assert following["observation"].tolist() == [
        [-1, 1],
        [-1, 2],
        [-2, 3],
        [-2, 3],
    ]
    assert following["reward"].flatten().tolist() == [1, 3, 6, 6]
    assert following["terminated"].flatten().tolist() == [
        True,
        True,
        True,
        False,
    ]
    assert td["observation"].tolist() == [[0, 0], [0, 0], [0, 0], [-2, 3]]
    transition, _ = env.step(td.set("action", env.sample_action()))
    assert transition["next", "observation"][3].tolist() == [-4, 5]
    assert transition["next", "reward"][3].item() == 9


def test_step_limit_of_repeated_actions_is_the_number_of_actions_in_an_episode():
    env = W.RepeatAction(tw.make("Pendulum-v1", 2, max_episode_steps=50), 4)
    assert env.signature.max_episode_steps == 13
    env.reset(seed=0)
    flags = [env.step(env.sample_action())[0]["next", "truncated"].all().item() for _ in range(13)]
    assert flags == [False] * 12 + [True]


def test_initial_states_of_repeated_actions_do_not_depend_on_other_envs():
    below = [tw.FunctionalEnv(tw.envs.pendulum.Pendulum(), n, max_episode_steps=3) for n in (1, 2)]
    alone, batch = (W.RepeatAction(env, 2) for env in below)
    td = alone.reset(seed=0)
    tds = batch.reset(seed=0)
    for number in range(60):
        if number == 1:
            tds = batch.reset(mask=torch.tensor([False, True]))
        _, td = alone.step(torch.zeros(1, 1))
        _, tds = batch.step(torch.zeros(2, 1))
        assert_same(td, tds[:1])


TRANSFORMED = tw.TransformedEnv(ScriptedEnv(1), T.RecordEpisodeStatistics())
DICTIONARY = ScriptedEnv(1, observation_space=spaces.Dict(a=spaces.Discrete(2)))
INVALID = {
    "num_repeats": lambda: W.RepeatAction(ScriptedEnv(1), 0),
    "num_repeats .*1.5": lambda: W.RepeatAction(ScriptedEnv(1), 1.5),
    "env .*transforms": lambda: W.RepeatAction(TRANSFORMED, 2),
    "skip": lambda: W.MaxAndSkipObservation(ScriptedEnv(1), 1),
    "observation .*Dict": lambda: W.MaxAndSkipObservation(DICTIONARY),
}


@pytest.mark.parametrize("match", INVALID)
def test_invalid_argument_raises_with_its_name(match):
    with pytest.raises((ValueError, TypeError), match=match):
        INVALID[match]()


def vector_env(kind):
    return tw.from_gymnasium(kind([lambda: Counting([(2,)])], autoreset_mode="Disabled"))


def tensors(**arguments):
    box = spaces.Box(-1, 1, (1,))
    return from_functions(torch.zeros, torch.zeros, 1, box, box, **arguments)


REFUSED = {  # with what to write
    "AsyncVectorEnv": (lambda: vector_env(AsyncVectorEnv), "wrappers"),
    "another vector env": (lambda: vector_env(OtherVectorEnv), "wrappers"),
    "a simulator that resets itself": (lambda: tensors(final_key="final"), "within step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_simulator_that_cannot_leave_out_finished_envs_raises(case):
    make, remedy = REFUSED[case]
    with make() as env, pytest.raises(ValueError, match=f"repeat.*{remedy}"):
        W.RepeatAction(env, 2)


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_every_env_steps_again_after_an_error_within_a_repeated_action(vectorization_mode):
    class FailingOnce(T.Transform):
        calls = 0

        def action(self, action):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("once")
            return action

    below = counting([(1, 9), (9,)], "both", vectorization_mode)
    with W.RepeatAction(tw.TransformedEnv(below, FailingOnce()), 2) as env:
        env.reset(seed=0)
        with pytest.raises(RuntimeError, match="once"):
            env.step(env.sample_action())
        env.reset(seed=0)
        transition, _ = env.step(env.sample_action())
        assert transition["next", "reward"].flatten().tolist() == [3, 3]


def test_delay_below_repeated_actions_counts_the_steps_of_the_env():
    received = []

    class Recorded(ScriptedEnv):
        def _step(self, action):
            received.append(action.tolist())
            return super()._step(action)

    env = Recorded(2, action_space=spaces.Discrete(9), episode_lengths=(6, 2))
    env = W.RepeatAction(tw.TransformedEnv(env, T.DelayAction(torch.tensor([3, 1]))), 2)
    td = env.reset()
    for action in (5, 6, 7, 8):
        _, td = env.step(td.set("action", torch.full((2,), action)))
    first, second = zip(*received, strict=True)
    assert first == (0, 0, 0, 5, 5, 6, 0, 0)  # a new episode starts with the last action
    assert second == (0, 5, 0, 6, 6, 7, 7, 8)  # after 2, then 6 steps
