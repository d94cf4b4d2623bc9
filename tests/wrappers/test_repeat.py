"""RepeatAction and MaxAndSkipObservation against Gymnasium's wrappers."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from helpers import OtherVectorEnv, assert_same
from oracles import quick, step

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv


class Counting(gymnasium.Env):
    """Observes -steps and steps from a random point, so that a maximum differs from the last frame, and a ghost episode from
    none. Episodes take the lengths in turn.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, lengths, ending):
        self.lengths, self.ending, self.episode = lengths, ending, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.steps, self.point = 0, self.np_random.normal()
        return self.observation(), {}

    def observation(self):
        return np.float32([self.point - self.steps, self.point + self.steps])

    def step(self, action):
        assert self.steps < self.length, "a step after the end"
        self.steps, self.point = self.steps + 1, self.point + self.np_random.normal()
        over = self.steps == self.length
        terminated, truncated = (
            over and self.ending != "truncated",
            over and self.ending != "terminated",
        )
        return self.observation(), float(self.steps), terminated, truncated, {}

    @property
    def length(self):
        return self.lengths[self.episode % len(self.lengths)]


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("repeats", quick([1, 2, 4], 4))
@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("kind", [SyncVectorEnv, OtherVectorEnv])
def test_repeat_action_equals_gymnasiums_in_each_env(kind, mode, repeats, ending):
    lengths = [(1, 5, 2), (7, 1), (8, 4, 3)][: 1 if kind is OtherVectorEnv else 3]
    vector_env = kind(
        [functools.partial(Counting, one, ending) for one in lengths], autoreset_mode=mode
    )
    env = W.RepeatAction(tw.from_gymnasium(vector_env), repeats)
    compare(env, [wrappers.RepeatAction(Counting(one, ending), repeats) for one in lengths], 12)
    env.close()


def compare(env, theirs, num_steps, action=0):
    td = env.reset(seed=0)
    np.testing.assert_array_equal(
        td["observation"].numpy(), np.stack([one.reset(seed=i)[0] for i, one in enumerate(theirs)])
    )
    for _ in range(num_steps):
        transition, td = env.step(td.set("action", torch.full((len(theirs),), action)))
        steps = [one.step(action) for one in theirs]
        following = transition["next"]
        np.testing.assert_array_equal(
            following["observation"].numpy(), np.stack([step[0] for step in steps])
        )
        for index, key in ((1, "reward"), (2, "terminated"), (3, "truncated")):
            assert following[key].flatten().tolist() == [step[index] for step in steps], key
        first = [
            one.reset()[0] if step[2] or step[3] else step[0]
            for one, step in zip(theirs, steps, strict=True)
        ]
        np.testing.assert_array_equal(td["observation"].numpy(), np.stack(first))


def test_max_and_skip_without_early_endings_equals_gymnasiums():
    lengths = [(4,), (8,), (100,)]
    vector_env = SyncVectorEnv(
        [functools.partial(Counting, one, "both") for one in lengths], autoreset_mode="Disabled"
    )
    theirs = [wrappers.MaxAndSkipObservation(Counting(one, "both"), 4) for one in lengths]
    compare(W.MaxAndSkipObservation(tw.from_gymnasium(vector_env), 4), theirs, 9)


@pytest.mark.parametrize("name", ["eager", "compiled"])
def test_max_and_skip_of_early_endings_equals_hand_computed_values(name):
    # Episodes of 1, 2, 3 and 5 steps, skip 3: observations (-steps, steps) of the last two steps.
    class Falling(ScriptedEnv):
        def _observation_now(self):
            steps = self.elapsed.float()
            return torch.stack([-steps, steps], 1)

    class Each(Falling):
        def _step(self, action):
            td = super()._step(action)
            over = self.elapsed >= torch.tensor([1, 2, 3, 5])
            return td.set("terminated", over.unsqueeze(1)).set(
                "truncated", torch.zeros(4, 1, dtype=torch.bool)
            )

    env = W.MaxAndSkipObservation(Each(4, observation_shape=(2,), episode_lengths=None), 3)
    env = tw.compile(env, backend="aot_eager") if name == "compiled" else env
    transition, td = env.step(env.reset().set("action", env.sample_action()))
    following = transition["next"]
    assert following["observation"].tolist() == [[-1, 1], [-1, 2], [-2, 3], [-2, 3]]
    assert following["reward"].flatten().tolist() == [1, 3, 6, 6]
    assert following["terminated"].flatten().tolist() == [True, True, True, False]
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
    td, tds = alone.reset(seed=0), batch.reset(seed=0)
    for number in range(60):
        if number == 1:
            tds = batch.reset(mask=torch.tensor([False, True]))
        td, tds = alone.step(torch.zeros(1, 1))[1], batch.step(torch.zeros(2, 1))[1]
        assert_same(td, tds[:1])


def test_repeat_wrappers_wrong_arguments_raise():
    transformed = tw.TransformedEnv(ScriptedEnv(1), T.RecordEpisodeStatistics())
    dictionary = ScriptedEnv(1, observation_space=spaces.Dict(a=spaces.Discrete(2)))
    whole = tw.from_gymnasium(
        AsyncVectorEnv([lambda: Counting((2,), "both")] * 2, autoreset_mode="Disabled")
    )
    bare = W.RepeatAction(ScriptedEnv(1), 2, summed_info=["speed"])
    for make, error, words in (
        (
            lambda: W.RepeatAction(ScriptedEnv(1), 0),
            ValueError,
            "RepeatAction needs num_repeats as an integer .* but got 0",
        ),
        (
            lambda: W.RepeatAction(ScriptedEnv(1), 1.5),
            TypeError,
            "RepeatAction needs num_repeats as an integer .* got 1.5",
        ),
        (
            lambda: W.RepeatAction(transformed, 2),
            ValueError,
            "an env without transforms, but got <RecordEpisodeStatistics",
        ),
        (
            lambda: W.RepeatAction(whole, 2),
            ValueError,
            "RepeatAction needs a simulator .* but got <GymnasiumEnv",
        ),
        (
            lambda: W.RepeatAction(ScriptedEnv(1), 2, summed_info="a"),
            TypeError,
            "summed_info as a list of .* strings, .* 'a'",
        ),
        (
            lambda: step(bare, bare.reset()),
            ValueError,
            r"summed_info needs \['speed'\] in the env's info \(key .*\): give an ",
        ),
        (
            lambda: W.MaxAndSkipObservation(ScriptedEnv(1), 1),
            ValueError,
            "skip as an integer of at least 2, but got 1",
        ),
        (
            lambda: W.MaxAndSkipObservation(dictionary),
            TypeError,
            "MaxAndSkipObservation needs a Box .* but got Dict",
        ),
    ):
        with pytest.raises(error, match=words):
            make()
