from __future__ import annotations

import copy
import gc

import pytest
import torch
from catalogue import DICT, seven
from gymnasium import spaces
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def steps(env, number, td):
    """The first component of ("next", "observation") and of where to act next, and the flags, step by step."""
    seen = []
    for _ in range(number):
        transition, td = env.step(td.set("action", env.sample_action()))
        following = transition["next"]
        flags = [following[key].flatten().tolist() for key in ("terminated", "truncated", "done")]
        seen.append((following["observation"][:, 0].tolist(), td["observation"][:, 0].tolist(), *flags))
    return seen


def test_an_episode_end_gives_the_final_observation_and_the_first_of_the_next_episode():
    env = ScriptedEnv(2, (1,), episode_lengths=(2, 3), ending="terminated")
    seen = steps(env, 3, env.reset())
    assert seen[0][:2] == ([1, 1001], [1, 1001])
    assert seen[1][:2] == ([2, 1002], [0, 1002])
    assert seen[2][:2] == ([1, 1003], [1, 1000])


@pytest.mark.parametrize(("ending", "terminated", "truncated"), [("terminated", 1, 0), ("truncated", 0, 1), ("both", 1, 1)])
def test_done_is_terminated_or_truncated(ending, terminated, truncated):
    env = ScriptedEnv(1, (1,), episode_lengths=1, ending=ending)
    ((_, after, *flags),) = steps(env, 1, env.reset())
    assert flags == [[bool(terminated)], [bool(truncated)], [True]]
    assert after == [0]


def test_every_env_may_end_at_once_and_every_step_may_be_an_episode():
    env = ScriptedEnv(3, (1,), episode_lengths=1)
    for final, first, _, _, done in steps(env, 3, env.reset()):
        assert (final, first, done) == ([1, 1001, 2001], [0, 1000, 2000], [True] * 3)


def test_without_ends_the_next_root_is_the_successor():
    env = ScriptedEnv(2, (1,), episode_lengths=None)
    assert [(final, first) for final, first, *_ in steps(env, 2, env.reset())] == [([1, 1001],) * 2, ([2, 1002],) * 2]


def test_the_transition_is_the_td_that_came_in():
    env = ScriptedEnv(2)
    td = env.reset().set("action", env.sample_action()).set("log_prob", torch.zeros(2))
    transition, following = env.step(td)
    assert transition is td and "log_prob" in transition and set(following.keys()) == {"observation"}


def test_a_transform_that_truncates_ends_the_episode_of_the_env_below():
    env = tw.TransformedEnv(ScriptedEnv(1, (1,), episode_lengths=9), T.TimeLimit(2))
    seen = steps(env, 3, env.reset())
    assert [first for _, first, *_ in seen] == [[1], [0], [1]]
    assert seen[1][2:] == ([False], [True], [True])


def test_a_partial_reset_leaves_the_other_envs_alone():
    env = ScriptedEnv(3, (1,), episode_lengths=9)
    steps(env, 2, env.reset())
    td = env.reset(mask=torch.tensor([False, True, False]))
    assert td["observation"].flatten().tolist() == [2, 1000, 2002]
    assert steps(env, 1, td)[0][0] == [3, 1001, 2003]


class Careless(ScriptedEnv):
    # Gives garbage in the rows that it was not asked to reset.
    garbage = -1

    def _reset(self, mask):
        td = super()._reset(mask)
        td["observation"][~mask] = self.garbage
        return td


GARBAGE = [
    [],
    [T.NormalizeObservation()],
    [T.FrameStackObservation(3)],
    [T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.FrameStackObservation(2), T.NormalizeReward(), T.TimeLimit(4)],
]


@pytest.mark.parametrize("garbage", [-1, torch.nan])
@pytest.mark.parametrize("transforms", GARBAGE, ids=lambda transforms: str(len(transforms)))
def test_garbage_in_rows_outside_the_mask_of_a_reset_comes_through_nowhere(transforms, garbage):
    env, careful = (kind(4, (2,)) for kind in (Careless, ScriptedEnv))
    env.garbage = garbage
    env, careful = (tw.TransformedEnv(each, *copy.deepcopy(transforms)) for each in (env, careful))
    td, expected, mask = env.reset(seed=0), careful.reset(seed=0), torch.tensor([False, True, False, True])
    for step in range(16):
        if step % 5 == 2:
            td, expected = env.reset(mask=mask), careful.reset(mask=mask)
            assert torch.equal(td["observation"], expected["observation"])
        transition, td = env.step(td.set("action", env.sample_action()))
        reference, expected = careful.step(expected.set("action", careful.sample_action()))
        assert all(torch.equal(transition[key], reference[key]) for key in reference.keys(True, True))
        assert torch.equal(td["observation"], expected["observation"])
    ours, theirs = env.snapshot(), careful.snapshot()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs.keys(True, True))


def test_gradients_stay_outside_of_the_env():
    env = tw.TransformedEnv(ScriptedEnv(2), T.RescaleAction(-2, 2))
    action = torch.zeros(2, 6, requires_grad=True)
    transition, _ = env.step(env.reset().set("action", action))
    assert not transition["next", "info", "action"].requires_grad


def test_a_snapshot_goes_through_a_file_and_branches(tmp_path):
    env = tw.TransformedEnv(tw.make("CartPole-v1", 4), T.RecordEpisodeStatistics(), T.NormalizeObservation())
    _, td = tw.rollout(env, None, 30, env.reset(seed=3))
    torch.save(env.snapshot().to_dict(), tmp_path / "snapshot.pt")
    other = tw.TransformedEnv(tw.make("CartPole-v1", 4), T.RecordEpisodeStatistics(), T.NormalizeObservation())
    restored = other.restore(torch.load(tmp_path / "snapshot.pt", weights_only=True))
    here, _ = tw.rollout(env, None, 30, td)
    there, _ = tw.rollout(other, None, 30, restored)
    assert here["next", "done"].any()
    assert all((one == two).all() for one, two in zip(here.values(True, True), there.values(True, True), strict=True))
    branch, _ = tw.rollout(other, lambda td: torch.zeros(4, dtype=torch.int64), 30, other.restore(env.snapshot()))
    assert (branch["action"] == 0).all()


def test_state_dict_holds_what_is_learned_and_nothing_else():
    stack = [T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.FrameStackObservation(2), T.NormalizeReward()]
    env = tw.TransformedEnv(ScriptedEnv(2), *stack)
    assert {name.split(".", 2)[-1] for name in env.state_dict()} == {
        f"{position}.statistics.{field}" for position in (1, 3) for field in ("reference", "total", "squares", "count")
    }


def test_spaces_and_properties_are_gymnasiums():
    env = tw.make("CartPole-v1", 3)
    assert env.observation_space.shape == (3, 4) and env.action_space == spaces.MultiDiscrete([2, 2, 2])
    assert env.single_observation_space.shape == (4,) and env.single_action_space == spaces.Discrete(2)
    assert (env.num_envs, env.spec.id, env.unwrapped, env.render_mode) == (3, "CartPole-v1", env, None)


def test_a_base_env_without_render_says_so():
    with pytest.raises(NotImplementedError, match="ScriptedEnv needs to be able to draw itself"):
        ScriptedEnv(1).render()


def discrete():
    return ScriptedEnv(2, action_space=spaces.Discrete(2))


def nested():
    return ScriptedEnv(2, action_space=spaces.Dict(a=spaces.Discrete(2)))


BAD_ACTIONS = [
    (ScriptedEnv, {}, ValueError, r'needs td\["action"\], but got a TensorDict with keys'),
    (ScriptedEnv, {"action": torch.zeros(1, 5)}, ValueError, r"needs an action of shape \(1, 6\).*got \(1, 5\)"),
    (ScriptedEnv, {"action": torch.zeros(1, 6, dtype=torch.float64)}, TypeError, "dtype torch.float32.*got torch.float64"),
    (ScriptedEnv, {"action": torch.zeros(1, 6, device="meta")}, ValueError, "on device cpu, but got meta"),
    (ScriptedEnv, {"action": TensorDict({}, [1])}, TypeError, "torch.Tensor, but got TensorDict"),
    (discrete, {"action": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, r"needs an action of shape \(2,\)"),
    (discrete, {"action": torch.full((2,), torch.nan)}, TypeError, "dtype torch.int64 for Discrete.2., but got torch.float32"),
    (discrete, {"action": torch.tensor([0, 2])}, ValueError, r"in Discrete\(2\), but got values from 0 to 2"),
    (discrete, {"action": torch.tensor([-1, 0])}, ValueError, r"in Discrete\(2\), but got values from -1 to 0"),
    (nested, {"action": torch.zeros(2)}, TypeError, r"TensorDict with keys \['a'\], but got Tensor"),
    (nested, {"action": TensorDict({"b": torch.zeros(2)}, [2])}, TypeError, r"keys \['a'\], but got \['b'\]"),
]


@pytest.mark.parametrize(("make", "entries", "error", "message"), BAD_ACTIONS)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_bad_action_is_refused_before_anything_changed(make, entries, error, message, stacked):
    env = tw.TransformedEnv(make(), T.RecordEpisodeStatistics(), T.NormalizeObservation()) if stacked else make()
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(error, match=message):
        env.step(TensorDict(entries, []) if not entries else TensorDict(entries, [env.num_envs]))
    after = env.snapshot()
    assert all((before[key] == after[key]).all() for key in before.keys(True, True))


BAD_RESETS = [
    (dict(seed=-1), ValueError, r"needs a seed that is an integer in \[0, 2\*\*64\), but got -1"),
    (dict(seed=1.5), ValueError, "but got 1.5"),
    (dict(seed=2**64), ValueError, "but got 18446744073709551616"),
    (dict(seed=True), ValueError, "but got True"),
    (dict(mask=torch.ones(3, dtype=torch.bool)), ValueError, r"mask of shape \(2,\) torch.bool on cpu, but got \(3,\)"),
    (dict(mask=torch.ones(2)), ValueError, "but got .2,. torch.float32"),
    (dict(mask=[True, False]), ValueError, r"but got \[True, False\]"),
    (dict(options={"low": 0}), ValueError, "ScriptedEnv.reset takes no options, but got"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_RESETS)
def test_a_bad_reset_is_refused_before_anything_changed(arguments, error, message):
    env = ScriptedEnv(2)
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(error, match=message):
        env.reset(**arguments)
    after = env.snapshot()
    assert all((before[key] == after[key]).all() for key in before.keys(True, True))


def test_the_first_reset_is_one_of_every_env():
    with pytest.raises(RuntimeError, match="needs a first reset of every env"):
        ScriptedEnv(2).reset(mask=torch.tensor([True, False]))


def test_stepping_or_a_snapshot_before_the_first_reset_is_refused():
    env = ScriptedEnv(2)
    with pytest.raises(RuntimeError, match=r"ScriptedEnv needs reset\(\) first, but got step"):
        env.step(TensorDict({"action": env.sample_action()}, [2]))
    with pytest.raises(RuntimeError, match=r"ScriptedEnv needs reset\(\) first, but got snapshot"):
        env.snapshot()


OTHERS = [
    (lambda: tw.make("CartPole-v1", 2), ValueError, "snapshot of the same env, but got one that differs in .*state_theta"),
    (lambda: ScriptedEnv(3), ValueError, r"needs .* of shape \(2,\) torch.int64, but got \(3,\)"),
    (lambda: tw.TransformedEnv(ScriptedEnv(2), T.TimeLimit(3)), ValueError, "differs in .*transform.elapsed"),
]


@pytest.mark.parametrize(("other", "error", "message"), OTHERS)
def test_a_snapshot_of_another_env_is_refused_before_anything_changed(other, error, message):
    env, other = ScriptedEnv(2), other()
    env.reset(seed=0)
    other.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(error, match=message):
        env.restore(other.snapshot())
    after = env.snapshot()
    assert all((before[key] == after[key]).all() for key in before.keys(True, True))


@pytest.mark.parametrize("snapshot", [None, {}, TensorDict({"observation": torch.zeros(2, 17)}, [2])])
def test_what_is_no_snapshot_is_refused(snapshot):
    with pytest.raises(TypeError, match=r"ScriptedEnv.restore needs what snapshot\(\) gave"):
        ScriptedEnv(2).restore(snapshot)


@pytest.mark.parametrize(
    ("td", "error", "message"),
    [
        (torch.zeros(2, 6), TypeError, 'needs a TensorDict with "action", but got Tensor'),
        ({"action": torch.zeros(2, 6)}, TypeError, 'needs a TensorDict with "action", but got dict'),
        (TensorDict({"action": torch.zeros(2, 6)}, [2, 6]), ValueError, r"of batch size \(2,\), but got \(2, 6\)"),
        (TensorDict({"action": torch.zeros(2, 6)}, [2]).lock_(), ValueError, r"unlocked .* but got \(2,\), locked"),
    ],
)
def test_what_cannot_hold_a_transition_is_refused_before_anything_changed(td, error, message):
    env = ScriptedEnv(2)
    env.reset()
    with pytest.raises(error, match=message):
        env.step(td)
    assert (env.elapsed == 0).all()


def test_where_to_act_next_is_a_tensor_of_its_own_where_nothing_ended():
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


@pytest.mark.parametrize("name", STEPPED)
def test_steps_leave_nothing_to_the_garbage_collector(name):
    # A cycle of references would hold a step's tensors, on whatever device, until Python looks for it.
    env = STEPPED[name]()
    td = env.reset(seed=0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(9):
            _, td = env.step(td.set("action", env.sample_action()))
        assert gc.collect() == 0
    finally:
        gc.enable()
