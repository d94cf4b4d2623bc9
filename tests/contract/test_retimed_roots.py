"""After `elapsed_steps = ...`, the root shows the new time, or the assignment is refused."""

import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

STEPS = torch.tensor([3, 7])


class Clock(FuncEnv):
    """Observes its time."""

    observation_space = spaces.Box(0, 99, (1,))
    action_space = spaces.Discrete(2)

    def initial(self, rng):
        return {"x": torch.zeros(())}

    def transition(self, state, action, rng):
        return {"x": state["x"] + 1}

    def observation(self, state, rng):
        return rng.draw.float().unsqueeze(-1)

    def reward(self, state, action, next_state, rng):
        return next_state["x"]

    def terminal(self, state, rng):
        return state["x"] < 0


def native(*transforms):
    return tw.TransformedEnv(tw.FunctionalEnv(Clock(), 2, max_episode_steps=10), *transforms)


def timed(*transforms, space=None, **arguments):
    env = ScriptedEnv(2, (2,), episode_lengths=None, observation_space=space)
    below = tw.TransformedEnv(env, T.TimeLimit(10))
    return tw.TransformedEnv(below, T.TimeAwareObservation(**arguments), *transforms)


def grouped(kind, *above, space=None):
    groups = {"group": [T.TimeAwareObservation(), *above]}
    if kind is T.ObservationGroups:
        groups["other"] = [T.NormalizeObservation()]
    env = ScriptedEnv(2, (2,), episode_lengths=None, observation_space=space)
    return tw.TransformedEnv(env, T.TimeLimit(10), kind(groups), T.RecordEpisodeStatistics())


def shown(env, root):
    """The time in the last column, or under its key."""
    observation = root.get(("observation", "group"), None)
    if observation is None:
        observation = root["observation"]
    if isinstance(observation, torch.Tensor):
        return observation[:, -1].tolist()
    return observation["time" if "time" in observation.keys() else "1"].flatten().tolist()


OTHERS = [T.ClipAction, T.RecordEpisodeStatistics, T.NormalizeReward]
PARTS = spaces.Dict(a=spaces.Box(-9, 9, (2,)))
GROUP = spaces.Dict(group=spaces.Box(-9, 9, (2,)), other=spaces.Discrete(3))
PAIR = spaces.Tuple([spaces.Box(-9, 9, (2,))])
SHOWN = {  # and the time of 3 and 7 steps
    "native": (native, [3, 7]),
    "native below others": (lambda: native(T.RecordEpisodeStatistics(), T.ScaleReward(2)), [3, 7]),
    "flat": (timed, [3, 7]),
    "a fraction": (lambda: timed(normalize_time=True), [3 / 10, 7 / 10]),
    "a Dict": (lambda: timed(flatten=False), [3, 7]),
    "a flat Dict": (lambda: timed(space=PARTS), [3, 7]),
    "a Tuple": (lambda: timed(space=PAIR, flatten=False), [3, 7]),
    "below others": (lambda: timed(*[kind() for kind in OTHERS]), [3, 7]),
    "a group": (lambda: grouped(T.ObservationGroups), [3, 7]),
    "a key": (lambda: grouped(T.ObservationKeys, space=GROUP), [3, 7]),
    "an env that retimes": (lambda: own(Retimed), [3, 7]),
}


@pytest.mark.parametrize(("make", "expected"), SHOWN.values(), ids=SHOWN)
def test_root_shows_the_assigned_time_and_the_next_step_goes_on(make, expected):
    env = make()
    root = env.reset(seed=0)
    old = root["observation"].clone()
    env.elapsed_steps = STEPS
    assert shown(env, root) == pytest.approx(expected)
    transition, _ = env.step(env.sample_action())
    assert shown(env, transition) == pytest.approx(expected)
    unit = expected[0] / 3
    assert shown(env, transition["next"]) == pytest.approx([time + unit for time in expected])
    assert old.shape == root["observation"].shape


class Broken(Clock):
    """Does not observe its time. A sensor is out of order."""

    def observation(self, state, rng):
        return torch.full((1,), torch.nan)


def test_nan_in_observations_does_not_hide_the_time():
    env = tw.FunctionalEnv(Broken(), 2, max_episode_steps=10)
    env = tw.TransformedEnv(env, T.ClipObservation(0, 9))
    env.reset(seed=0)
    env.elapsed_steps = STEPS
    assert env.elapsed_steps.tolist() == [3, 7]


class Counting(tw.Env):
    """An env of a user that observes its clock."""

    elapsed = tw.EpisodeClock()

    def _observed(self):
        return TensorDict({"observation": self.elapsed.float()}, [2])

    def _step(self, action):
        self.elapsed.add_(1)
        no = torch.zeros(2, 1, dtype=torch.bool)
        successor = {"reward": action.float().unsqueeze(-1), "terminated": no, "truncated": no}
        return self._observed().update(successor)

    def _reset(self, mask, options=None):
        mask.fill_(self.elapsed, 0)
        return self._observed()


class Retimed(Counting):
    def _retimed(self, observation, steps):
        if observation is None:
            return super()._retimed(observation, steps)
        return steps.float().unsqueeze(-1)


class AddTime(T.ObservationTransform):
    """A transform of a user that shows its clock."""

    elapsed = tw.EpisodeClock()

    def observation(self, observation):
        return observation + self.elapsed

    def step(self, td):
        self.elapsed.add_(1)
        return super().step(td)


def own(kind, *transforms):
    signature = tw.spaces.Signature(2, Clock.observation_space, Clock.action_space)
    return tw.TransformedEnv(kind(signature), *transforms)


HIDDEN = {
    "native below a stack": lambda: native(T.FrameStackObservation(2)),
    "native below time": lambda: native(T.TimeAwareObservation()),
    "time below a clip": lambda: timed(T.ClipObservation(0, 9)),
    "time below a clip in a group": lambda: grouped(T.ObservationGroups, T.ClipObservation(0, 9)),
    "an env with a clock": lambda: own(Counting),
    "an env with a clock below others": lambda: own(Counting, T.ScaleReward(2)),
    "a retimed env below a clip": lambda: own(Retimed, T.ClipObservation(0, 9)),
    "a transform with a clock": lambda: tw.TransformedEnv(tw.make("Pendulum-v1", 2), AddTime()),
}


@pytest.mark.parametrize("make", HIDDEN.values(), ids=HIDDEN)
def test_assignment_that_the_root_could_not_show_is_refused(make):
    env = make()
    root = env.reset(seed=0)
    before = root["observation"].clone()
    with pytest.raises(RuntimeError, match="elapsed_steps"):
        env.elapsed_steps = STEPS
    assert (root["observation"] == before).all()
    assert env.elapsed_steps.tolist() == [0, 0]


def test_stack_over_observations_without_time_keeps_the_root():
    env = tw.TransformedEnv(tw.make("Pendulum-v1", 2), T.FrameStackObservation(2))
    before = env.reset(seed=0)["observation"].clone()
    env.elapsed_steps = STEPS
    transition, _ = env.step(env.sample_action())
    assert torch.equal(transition["observation"], before)
