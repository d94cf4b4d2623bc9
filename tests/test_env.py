"""Env: steps, auto-reset, snapshots and checks."""

from __future__ import annotations

import gc

import pytest
import torch
from catalogue import DICT, seven
from gymnasium import spaces
from helpers import assert_same, steps
from oracles import quick
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def play(env, num_steps, td):
    """The first component of each successor's and root's observation, and the flags, step by step."""
    played = []
    for transition, root in steps(env, num_steps, td):
        successor = transition["next"]
        flags = [successor[key].flatten().tolist() for key in ("terminated", "truncated", "done")]
        played.append((successor["observation"][:, 0].tolist(), root["observation"][:, 0].tolist(), *flags))
    return played


def test_step_finishing_an_episode_gives_its_final_and_the_next_initial_observation():
    env = ScriptedEnv(2, (1,), episode_lengths=(2, 3), ending="terminated")
    played = play(env, 3, env.reset())
    assert played[0][:2] == ([1, 1001], [1, 1001])
    assert played[1][:2] == ([2, 1002], [0, 1002])
    assert played[2][:2] == ([1, 1003], [1, 1000])


@pytest.mark.parametrize(("ending", "terminated", "truncated"), [("terminated", 1, 0), ("truncated", 0, 1), ("both", 1, 1)])
def test_step_done_is_terminated_or_truncated(ending, terminated, truncated):
    env = ScriptedEnv(1, (1,), episode_lengths=1, ending=ending)
    ((_, root, *flags),) = play(env, 1, env.reset())
    assert (root, flags) == ([0], [[bool(terminated)], [bool(truncated)], [True]])


def test_step_one_step_episodes_of_all_envs_at_once_are_all_reset():
    env = ScriptedEnv(3, (1,), episode_lengths=1)
    for final, initial, _, _, done in play(env, 3, env.reset()):
        assert (final, initial, done) == ([1, 1001, 2001], [0, 1000, 2000], [True] * 3)


def test_step_within_episodes_returns_the_successor_as_root():
    env = ScriptedEnv(2, (1,), episode_lengths=None)
    assert [(successor, root) for successor, root, *_ in play(env, 2, env.reset())] == [([1, 1001],) * 2, ([2, 1002],) * 2]


def test_step_transition_is_the_given_td():
    env = ScriptedEnv(2)
    td = env.reset().set("action", env.sample_action()).set("log_prob", torch.zeros(2))
    transition, following = env.step(td)
    assert transition is td and "log_prob" in transition and set(following.keys()) == {"observation"}


def test_step_truncation_by_a_transform_resets_the_inner_env():
    env = tw.TransformedEnv(ScriptedEnv(1, (1,), episode_lengths=9), T.TimeLimit(2))
    played = play(env, 3, env.reset())
    assert [root for _, root, *_ in played] == [[1], [0], [1]]
    assert played[1][2:] == ([False], [True], [True])


def test_reset_with_a_mask_keeps_the_other_envs():
    env = ScriptedEnv(3, (1,), episode_lengths=9)
    play(env, 2, env.reset())
    td = env.reset(mask=torch.tensor([False, True, False]))
    assert td["observation"].flatten().tolist() == [2, 1000, 2002]
    assert play(env, 1, td)[0][0] == [3, 1001, 2003]


class Careless(ScriptedEnv):
    # Returns garbage in the rows outside the mask of a reset.
    garbage = -1

    def _reset(self, mask, options=None):
        td = super()._reset(mask)
        td["observation"][~mask.tensor] = self.garbage
        return td


GARBAGE = [T.RecordEpisodeStatistics, T.NormalizeObservation, lambda: T.FrameStackObservation(2), T.NormalizeReward]


@pytest.mark.parametrize("garbage", [-1, torch.nan])
@pytest.mark.parametrize("transforms", [[], GARBAGE], ids=["bare", "stack"])
def test_reset_garbage_outside_the_mask_is_discarded(transforms, garbage):
    env, careful = (kind(4, (2,)) for kind in (Careless, ScriptedEnv))
    env.garbage = garbage
    env, careful = (tw.TransformedEnv(each, *(make() for make in transforms)) for each in (env, careful))
    td, expected, mask = env.reset(seed=0), careful.reset(seed=0), torch.tensor([False, True, False, True])
    for step in range(16):
        if step % 5 == 2:
            td, expected = env.reset(mask=mask), careful.reset(mask=mask)
            assert torch.equal(td["observation"], expected["observation"])
        transition, td = env.step(td.set("action", env.sample_action()))
        reference, expected = careful.step(expected.set("action", careful.sample_action()))
        assert_same(transition, reference)
        assert torch.equal(td["observation"], expected["observation"])
    assert_same(env.snapshot(), careful.snapshot())


def test_step_records_no_gradients():
    env = tw.TransformedEnv(ScriptedEnv(2), T.RescaleAction(-2, 2))
    action = torch.zeros(2, 6, requires_grad=True)
    transition, _ = env.step(env.reset().set("action", action))
    assert not transition["next", "info", "action"].requires_grad


def test_snapshot_through_a_file_continues_and_branches(tmp_path):
    env = tw.TransformedEnv(tw.make("CartPole-v1", 4), T.RecordEpisodeStatistics(), T.NormalizeObservation())
    _, td = tw.rollout(env, None, 30, env.reset(seed=3))
    torch.save(env.snapshot().to_dict(), tmp_path / "snapshot.pt")
    other = tw.TransformedEnv(tw.make("CartPole-v1", 4), T.RecordEpisodeStatistics(), T.NormalizeObservation())
    restored = other.restore(torch.load(tmp_path / "snapshot.pt", weights_only=True))
    here, _ = tw.rollout(env, None, 30, td)
    there, _ = tw.rollout(other, None, 30, restored)
    assert here["next", "done"].any()
    assert_same(here, there)
    branch, _ = tw.rollout(other, lambda td: torch.zeros(4, dtype=torch.int64), 30, other.restore(env.snapshot()))
    assert (branch["action"] == 0).all()


class Walker(tw.Env):
    """A user's env: a point that each action moves."""

    position = tw.EnvBuffer((2,), fill=1.0)

    def __init__(self, num_envs):
        super().__init__(tw.Signature(num_envs, spaces.Box(-9, 9, (2,)), spaces.Box(-1, 1, (2,))))

    def _step(self, action):
        self.position.add_(action)
        flags = torch.zeros(self.num_envs, 1, dtype=torch.bool)
        result = {
            "observation": self.position.clone(),
            "reward": flags.float(),
            "terminated": flags,
            "truncated": flags.clone(),
        }
        return TensorDict(result, [self.num_envs])

    def _reset(self, mask, options=None):
        mask.fill_(self.position, 1)
        return TensorDict({"observation": self.position.clone()}, [self.num_envs])


class CountingWalker(Walker):
    """A subclass: also counts its steps per coordinate."""

    steps = tw.EnvBuffer(row=lambda self: torch.zeros(self.single_action_space.shape, dtype=torch.int64))

    def _step(self, action):
        self.steps.add_(action != 0)
        return super()._step(action)


def test_env_buffers_of_an_author_are_allocated_reset_saved_and_moved():
    env = CountingWalker(3)
    assert env.position.tolist() == [[1, 1]] * 3 and env.steps.dtype == torch.int64 and env.steps.tolist() == [[0, 0]] * 3
    env.reset(seed=0)
    env.step(torch.tensor([[1.0, 0.0]] * 3))
    snapshot = env.snapshot()
    assert {"position", "steps"} <= set(snapshot["buffers"].keys())
    td = env.reset(mask=torch.tensor([True, False, True]))
    assert env.position.tolist() == td["observation"].tolist() == [[1, 1], [2, 1], [1, 1]]
    env.step(torch.tensor([[0.0, 1.0]] * 3))
    assert env.steps.tolist() == [[1, 1]] * 3
    env.restore(snapshot)
    assert env.position.tolist() == [[2, 1]] * 3 and env.steps.tolist() == [[1, 0]] * 3
    assert env.state_dict() == {}
    env.to("meta")
    assert env.position.is_meta and env.steps.is_meta and env.device == torch.device("meta")


def test_state_dict_holds_only_statistics():
    stack = [T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.FrameStackObservation(2), T.NormalizeReward()]
    env = tw.TransformedEnv(ScriptedEnv(2), *stack)
    assert set(env.state_dict()) == {
        f"transforms.{position}.statistics.{field}"
        for position in (1, 3)
        for field in ("reference", "total", "squares", "count", "skipped")
    }


def test_env_properties_equal_gymnasiums():
    env = tw.make("CartPole-v1", 3)
    assert env.observation_space.shape == (3, 4) and env.action_space == spaces.MultiDiscrete([2, 2, 2])
    assert env.single_observation_space.shape == (4,) and env.single_action_space == spaces.Discrete(2)
    assert (env.num_envs, env.spec.id, env.unwrapped, env.render_mode) == (3, "CartPole-v1", env, None)


def test_render_of_an_env_without_it_raises():
    with pytest.raises(NotImplementedError, match=r"ScriptedEnv does not implement render\(\)"):
        ScriptedEnv(1).render()


def discrete():
    return ScriptedEnv(2, action_space=spaces.Discrete(2))


def nested():
    return ScriptedEnv(2, action_space=spaces.Dict(a=spaces.Discrete(2)))


# A bare action

FOUR = spaces.Discrete(4, start=-1)
ACTIONS = {
    "Box": spaces.Box(-1, 1, (2,)),
    "Discrete": FOUR,
    "Dict": spaces.Dict(push=spaces.Box(-1, 1, (2,)), gear=FOUR),
    "Dict with the key action": spaces.Dict(action=spaces.Box(-1, 1, (2,)), gear=FOUR),
    "Dict with only the key action": spaces.Dict(action=FOUR),
    "Tuple": spaces.Tuple([FOUR, spaces.Box(-1, 1, (2,))]),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_step_bare_action_equals_the_action_in_the_root(name):
    def make():
        env = ScriptedEnv(3, action_space=ACTIONS[name], episode_lengths=(2, 3, 1))
        return tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.NormalizeObservation())

    for env, other in ((make(), make()), (make().env, make().env)):
        root = other.reset(seed=0)
        env.reset(seed=0)
        for _ in range(7):
            action = env.sample_action()
            transition, following = env.step(action.clone())
            expected, root = other.step(root.set("action", action))
            assert_same(transition, expected)
            assert_same(following, root)
            assert_same(transition["next", "info"].select("action"), TensorDict({"action": action}, [3]))
            other.sample_action()  # because the stream of actions is part of the snapshot
        assert_same(env.snapshot(), other.snapshot())


def test_step_td_with_only_the_action_of_a_dict_space_with_only_that_key_is_not_a_bare_action():
    env = ScriptedEnv(3, action_space=ACTIONS["Dict with only the key action"])
    env.reset()
    action = env.sample_action()
    td = TensorDict({"action": action}, [3])
    transition, _ = env.step(td)
    assert transition is td and "observation" not in td.keys()
    assert_same(transition["next", "info", "action"], action)


def test_step_bare_action_transition_contains_the_last_root_and_what_the_caller_put_into_it():
    env = ScriptedEnv(2)
    root = env.reset()
    root["log_prob"] = torch.tensor([0.5, 0.25])
    root["observation"].add_(7)
    action = env.sample_action()
    transition, _ = env.step(action)
    assert transition["log_prob"].tolist() == [0.5, 0.25] and transition["action"] is action
    assert transition["observation"][:, 0].tolist() == [7, 1007]
    assert set(root.keys()) == {"observation", "log_prob"}


# Wrong input

BAD_ACTIONS = [  # refused in the root and bare
    (ScriptedEnv, torch.zeros(1, 5), ValueError, r"needs an action of shape \(1, 6\).*got \(1, 5\)"),
    (ScriptedEnv, torch.zeros(1, 6, dtype=torch.float64), TypeError, r"dtype torch\.float32.*got torch\.float64"),
    (ScriptedEnv, torch.zeros(1, 6, device="meta"), ValueError, "on device cpu, but got meta"),
    (discrete, torch.zeros(2, 1, dtype=torch.int64), ValueError, r"needs an action of shape \(2,\)"),
    (discrete, torch.full((2,), torch.nan), TypeError, r"dtype torch\.int64 for Discrete.2., but got torch\.float32"),
    (discrete, torch.tensor([0, 2]), ValueError, r"in Discrete\(2\), but got values from 0 to 2"),
    (discrete, torch.tensor([-1, 0]), ValueError, r"in Discrete\(2\), but got values from -1 to 0"),
    (nested, torch.zeros(2), TypeError, r"TensorDict with keys \['a'\], but got Tensor"),
    (nested, TensorDict({"a": torch.tensor([0, 5])}, [2]), ValueError, r"in Discrete\(2\), but got values from 0 to 5"),
    (nested, TensorDict({"a": torch.zeros(2)}, [2]), TypeError, r"dtype torch\.int64"),
]
NO_TD = 'needs a TensorDict with "action", or an action as a tensor, but got '
NO_ACTION = r'needs td\["action"\], but got a TensorDict with keys '
BAD_STEPS = [
    (discrete, None, TypeError, NO_TD + "NoneType"),
    (discrete, {"action": torch.zeros(2)}, TypeError, NO_TD + "dict"),
    (discrete, TensorDict({}, []), ValueError, NO_ACTION),
    (discrete, TensorDict({"action": TensorDict({}, [2])}, [2]), TypeError, "torch.Tensor, but got TensorDict"),
    (ScriptedEnv, TensorDict({"action": torch.zeros(1, 6)}, [1, 6]), ValueError, r"batch size \(1,\), but got \(1, 6\)"),
    (ScriptedEnv, TensorDict({"action": torch.zeros(1, 6)}, [1]).lock_(), ValueError, r"unlocked .* but got \(1,\), locked"),
    (nested, TensorDict({"b": torch.zeros(2)}, [2]), ValueError, NO_ACTION + r"\['b'\]"),
    (nested, TensorDict({"action": TensorDict({"b": torch.zeros(2)}, [2])}, [2]), TypeError, r"\['a'\], but got \['b'\]"),
    *BAD_ACTIONS,
    *((make, TensorDict({"action": action}, [len(action)]), *rest) for make, action, *rest in BAD_ACTIONS),
]


@pytest.mark.parametrize("stacked", [False, True])
def test_step_wrong_action_raises_before_anything_changed(stacked):
    for make, given, error, message in BAD_STEPS:
        env = tw.TransformedEnv(make(), T.RecordEpisodeStatistics(), T.NormalizeObservation()) if stacked else make()
        root = env.reset(seed=0)
        before = env.snapshot()
        with pytest.raises(error, match=message):
            env.step(given)
        assert_same(env.snapshot(), before)
        assert set(root.keys()) == {"observation"}
        env.step(env.sample_action())


def restored_from(make):
    """A call that restores the snapshot of another env."""

    def call(env):
        other = make()
        other.reset(seed=0)
        env.restore(other.snapshot())

    return call


NO_SNAPSHOT = r"ScriptedEnv.restore needs what snapshot\(\) returned"
DIFFERS = "snapshot of the same env, but got one that differs in .*"
BAD_CALLS = [
    (lambda env: env.reset(seed=-1), ValueError, r"needs a seed that is an integer in \[0, 2\*\*64\), but got -1"),
    (lambda env: env.reset(seed=1.5), ValueError, "but got 1.5"),
    (lambda env: env.reset(seed=2**64), ValueError, "but got 18446744073709551616"),
    (lambda env: env.reset(seed=True), ValueError, "but got True"),
    (lambda env: env.reset(mask=torch.ones(3) > 0), ValueError, r"mask of shape \(2,\) torch.bool on cpu, but got \(3,\)"),
    (lambda env: env.reset(mask=torch.ones(2)), ValueError, "but got .2,. torch.float32"),
    (lambda env: env.reset(mask=[True, False]), ValueError, r"but got \[True, False\]"),
    (lambda env: env.reset(options={"low": 0}), ValueError, "ScriptedEnv.reset takes no options, but got"),
    (lambda env: env.restore(None), TypeError, NO_SNAPSHOT),
    (lambda env: env.restore({}), TypeError, NO_SNAPSHOT),
    (lambda env: env.restore(TensorDict({"observation": torch.zeros(2, 17)}, [2])), TypeError, NO_SNAPSHOT),
    (restored_from(lambda: tw.make("CartPole-v1", 2)), ValueError, DIFFERS + "state_theta"),
    (restored_from(lambda: ScriptedEnv(3)), ValueError, r"needs .* of shape \(2,\) torch.int32, but got \(3,\)"),
    (restored_from(lambda: tw.TransformedEnv(ScriptedEnv(2), T.TimeLimit(3))), ValueError, DIFFERS + "transforms.0.elapsed"),
]


def test_wrong_arguments_raise_before_anything_changed():
    for call, error, message in BAD_CALLS:
        env = ScriptedEnv(2)
        env.reset(seed=0)
        before = env.snapshot()
        with pytest.raises(error, match=message):
            call(env)
        assert_same(env.snapshot(), before)


BEFORE_RESET = [
    (lambda env: env.step(torch.zeros(2, 6)), r"Call reset\(\) before step\(\) of ScriptedEnv"),
    (lambda env: env.step(TensorDict({"action": torch.zeros(2, 6)}, [2])), r"Call reset\(\) before step\(\) of ScriptedEnv"),
    (lambda env: env.snapshot(), r"Call reset\(\) before snapshot\(\) of ScriptedEnv"),
    (lambda env: env.reset(mask=torch.tensor([True, False])), "needs a first reset of every env"),
]


def test_calls_before_the_first_reset_raise():
    for call, message in BEFORE_RESET:
        with pytest.raises(RuntimeError, match=message):
            call(ScriptedEnv(2))


def test_step_root_is_not_aliased_to_the_successor():
    env = ScriptedEnv(2, episode_lengths=None)
    transition, td = env.step(env.reset().set("action", env.sample_action()))
    td["observation"].zero_()
    assert transition["next", "observation"][1, 0] == 1001


STEPPED = {
    "CartPole": lambda: tw.make("CartPole-v1", 4),
    "Pendulum": lambda: tw.make("Pendulum-v1", 4),
    "a stack": lambda: tw.TransformedEnv(ScriptedEnv(4, episode_lengths=3), seven()),
    "a Dict": lambda: tw.TransformedEnv(ScriptedEnv(4, observation_space=DICT), T.FrameStackObservation(2)),
}


@pytest.mark.parametrize("name", quick(STEPPED, "CartPole", "a stack"))
def test_step_creates_no_reference_cycles(name):
    # A reference cycle would keep a step's tensors, on any device, until Python's garbage collector runs.
    env = STEPPED[name]()
    _, td = env.step(env.reset(seed=0).set("action", env.sample_action()))  # the first call traces functions
    gc.collect()
    gc.freeze()  # so that the second collection inspects only new objects
    gc.disable()
    try:
        for _ in range(9):
            _, td = env.step(td.set("action", env.sample_action()))
        assert gc.collect() == 0
    finally:
        gc.enable()
        gc.unfreeze()


def test_key_that_a_reset_adds_is_refused_instead_of_dropped():
    class Adds(T.Transform):
        def reset(self, td, mask):
            return td.set("goal", td["observation"])

    env = tw.TransformedEnv(ScriptedEnv(2), Adds())
    with pytest.raises(ValueError, match=r"\['goal'\], which no root would hold: make it a part of a Dict observation"):
        env.reset()
