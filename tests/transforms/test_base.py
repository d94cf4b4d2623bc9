from __future__ import annotations

import traceback

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

BOX = spaces.Box(-1, 1, (2,), np.float32)


def add(number):
    return T.TransformObservation(lambda observation: observation + number)


def double():
    return T.TransformObservation(lambda observation: 2 * observation)


def stack():
    return [
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.ClipObservation(-10, 10),
        T.FrameStackObservation(3),
        T.NormalizeReward(),
        T.ClipReward(-10, 10),
        T.TimeLimit(4),
        T.RescaleAction(-3, 5),
        T.ClipAction(),
    ]


EVERY = [*(lambda i=i: stack()[i] for i in range(9)), T.FlattenObservation, double, lambda: T.TransformReward(torch.neg)]
NAMES = [type(make()).__name__ for make in EVERY]
FIELDS = ("reference", "total", "squares", "count")  # of a RunningMeanStd
REMEMBER = (T.RecordEpisodeStatistics, T.FrameStackObservation, T.NormalizeReward, T.TimeLimit)


def scripted(*transforms, num_envs=3, **arguments):
    return tw.TransformedEnv(ScriptedEnv(num_envs, action_space=BOX, **arguments), *transforms)


def rollout(env, num_steps=12):
    return tw.rollout(env, None, num_steps, env.reset(seed=0))[0]


def rollout_td(env):
    return tw.rollout(env, lambda td: torch.zeros(3, 2), 2, env.reset(seed=0))[1]


def assert_same(ours, theirs):
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in ours.keys(True, True):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)


# Laws of composition


def test_compose_equals_wrapping_one_by_one():
    nested = scripted()
    for transform in stack():
        nested = tw.TransformedEnv(nested, transform)
    assert_same(rollout(scripted(tw.Compose(stack()))), rollout(nested))


@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_compose_is_associative(cut):
    parts = stack()
    grouped = tw.Compose([tw.Compose(parts[:cut]), tw.Compose(parts[cut:])])
    assert_same(rollout(scripted(grouped)), rollout(scripted(*stack())))


def test_compose_of_nothing_is_the_identity():
    assert_same(rollout(scripted(tw.Compose([]))), rollout(scripted()))
    assert_same(rollout(scripted()), tw.rollout(env := ScriptedEnv(3, action_space=BOX), None, 12, env.reset(seed=0))[0])


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_compose_of_one_is_that_one(make):
    assert_same(rollout(scripted(tw.Compose([make()]))), rollout(scripted(make())))


def test_compose_with_the_identity_changes_nothing():
    ours = rollout(scripted(tw.Compose([]), add(1), T.Transform(), tw.Compose([tw.Compose([])])))
    assert_same(ours, rollout(scripted(add(1))))


def test_compose_takes_observations_through_in_order():
    assert scripted(add(1), double()).reset()["observation"][0, 0].item() == 2
    assert scripted(double(), add(1)).reset()["observation"][0, 0].item() == 1


def test_compose_takes_rewards_through_in_order():
    env = scripted(T.TransformReward(lambda reward: 10 * reward), T.ClipReward(0, 5))
    assert rollout(env, 1)["next", "reward"].flatten().tolist() == [5, 5, 5]


def test_compose_takes_actions_through_in_reverse():
    env = scripted(T.RescaleAction(-10, 10), T.ClipAction())
    transition, _ = env.step(env.reset().set("action", torch.full((3, 2), 40.0)))
    torch.testing.assert_close(transition["next", "info", "action"], torch.ones(3, 2))


def test_compose_hands_the_description_on_from_one_to_the_next():
    env = scripted(T.FrameStackObservation(2), T.FlattenObservation(), T.TimeLimit(7), observation_shape=(3,))
    assert env.single_observation_space == spaces.Box(-np.inf, np.inf, (6,), np.float32)
    assert env.signature.max_episode_steps == 7


def test_compose_flattens_to_its_parts_innermost_first():
    parts = [add(1), double(), T.TimeLimit(3)]
    assert list(tw.Compose([parts[0], tw.Compose(parts[1:])]).flat()) == parts


def test_compose_keeps_the_learned_state_of_every_part():
    assert set(tw.Compose(stack()).state_dict()) == set()
    env = scripted(*stack())
    names = {f"transform.transforms.{i}.statistics.{name}" for i in (1, 4) for name in FIELDS}
    assert set(env.state_dict()) == names


def test_state_dict_carries_a_whole_stack_into_another_number_of_envs():
    env, other = scripted(*stack()), scripted(*stack(), num_envs=5)
    rollout(env)
    other.load_state_dict(env.state_dict())
    assert_same(TensorDict(env.state_dict()), TensorDict(other.state_dict()))
    expected = env.eval().reset()["observation"]
    torch.testing.assert_close(other.eval().reset()["observation"][:3], expected, rtol=0, atol=0)


def test_eval_freezes_a_whole_stack_and_train_thaws_it():
    env = scripted(*stack())
    rollout(env)
    before = {name: value.clone() for name, value in env.eval().state_dict().items()}
    rollout(env)
    assert all(torch.equal(value, before[name]) for name, value in env.state_dict().items())
    rollout(env.train())
    changed = {name for name, value in env.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not name.endswith(".reference")}


# What every transform promises


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_every_transform_stays_in_the_spaces_it_declares(make):
    env = scripted(make())
    data = rollout(env)
    for observation in (data["observation"], data["next", "observation"]):
        assert tw.spaces.contains(env.single_observation_space, observation.flatten(0, 1))
    assert tw.spaces.contains(env.single_action_space, data["action"].flatten(0, 1))
    assert tw.spaces.contains(BOX, data["next", "info", "action"].flatten(0, 1))


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_every_transform_works_on_each_row_by_itself_in_eval(make):
    batch = rollout(scripted(make()).eval())
    for i in range(3):
        alone = tw.TransformedEnv(ScriptedEnv(1, action_space=BOX, first_index=i), make()).eval()
        assert_same(batch[i : i + 1], rollout(alone))


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_every_transform_leaves_rows_outside_the_mask_of_a_reset(make):
    env, undisturbed = scripted(make(), episode_lengths=None).eval(), scripted(make(), episode_lengths=None).eval()
    td, other = rollout_td(env), rollout_td(undisturbed)
    td = env.reset(mask=torch.tensor([False, True, False]))
    td, other = td.set("action", torch.zeros(3, 2)), other.set("action", torch.zeros(3, 2))
    assert_same(td[[0, 2]], other[[0, 2]])
    assert_same(env.step(td)[0][[0, 2]], undisturbed.step(other)[0][[0, 2]])


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_every_transform_continues_from_a_snapshot_bit_for_bit(make):
    env = scripted(make())
    tw.rollout(env, None, 4, env.reset(seed=0))
    snapshot = env.snapshot()
    first = tw.rollout(env, None, 6, env.restore(snapshot))[0]
    assert_same(tw.rollout(env, None, 6, env.restore(snapshot))[0], first)


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_every_transform_hands_out_tensors_that_later_steps_leave_alone(make):
    env = scripted(make())
    td = env.reset(seed=0)
    given = []
    for _ in range(8):
        transition, td = env.step(td.set("action", env.sample_action()))
        given.append((transition, transition.clone()))
    for transition, copy in given:
        assert_same(transition, copy)


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_every_transform_is_deaf_to_what_the_caller_does_with_what_it_was_given(make):
    env, undisturbed = scripted(make()), scripted(make())
    td, other = env.reset(seed=0), undisturbed.reset(seed=0)
    for _ in range(8):
        following, td = env.step(td.set("action", torch.zeros(3, 2)))
        expected, other = undisturbed.step(other.set("action", torch.zeros(3, 2)))
        assert_same(following["next"], expected["next"])
        following.apply_(lambda leaf: leaf.fill_(1))
        td.apply_(lambda leaf: leaf.fill_(1))
    assert_same(env.snapshot()["buffers"], undisturbed.snapshot()["buffers"])


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_what_the_caller_did_with_rows_outside_the_mask_of_a_reset_reaches_no_transition(make):
    env, undisturbed, mask = scripted(make()), scripted(make()), torch.tensor([True, False, False])
    for each in (env, undisturbed):
        td = each.reset(seed=0)
        if each is env:
            td.apply_(lambda leaf: leaf.fill_(1))
    td, other = env.reset(mask=mask), undisturbed.reset(mask=mask)
    assert torch.equal(td["observation"][mask], other["observation"][mask])
    td.apply_(lambda leaf: leaf.fill_(1))
    following, _ = env.step(td.set("action", torch.zeros(3, 2)))
    expected, _ = undisturbed.step(other.set("action", torch.zeros(3, 2)))
    assert_same(following["next"], expected["next"])
    assert_same(env.snapshot()["buffers"], undisturbed.snapshot()["buffers"])


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_rows_outside_the_mask_of_a_reset_and_a_snapshot_are_as_the_caller_left_them(make):
    env, mask = scripted(make()), torch.tensor([True, False, False])
    td = env.reset(seed=0)
    td["observation"].fill_(-1)
    assert (env.snapshot()["observation"] == -1).all()
    observation = env.reset(mask=mask)["observation"]
    assert (observation[~mask] == -1).all() and (observation[mask] != -1).any()


# forward


@pytest.mark.parametrize(
    "make", [make for make in EVERY if not isinstance(make(), REMEMBER)], ids=lambda make: repr(make())[:20]
)
def test_a_transform_without_memory_is_outside_an_env_what_it_is_inside(make):
    env, plain = scripted(make()).eval(), scripted()
    td = plain.reset().set("action", torch.full((3, 2), 0.5)).set("reward", torch.full((3, 1), 7.0))
    before, ours = td.clone(), env.transform(td)
    assert_same(td, before)
    torch.testing.assert_close(ours["observation"], env.reset()["observation"], rtol=0, atol=0)
    torch.testing.assert_close(ours["action"], env.transform.action(td["action"]), rtol=0, atol=0)


def test_compose_outside_an_env_goes_through_its_parts_in_order():
    td = TensorDict({"observation": torch.ones(2, 5, 1)}, [2, 5])
    assert torch.equal(tw.Compose([add(1), double()])(td)["observation"], torch.full((2, 5, 1), 4.0))
    assert torch.equal(td["observation"], torch.ones(2, 5, 1))


def test_compose_outside_an_env_takes_actions_through_in_reverse_as_inside():
    compose = tw.Compose([T.RescaleAction(-10, 10), T.ClipAction()])
    env, action = scripted(compose), torch.full((3, 2), 40.0)
    transition, _ = env.step(env.reset().set("action", action))
    outside = compose(TensorDict({"action": action}, [3]))["action"]
    torch.testing.assert_close(outside, transition["next", "info", "action"])


@pytest.mark.parametrize("make", [make for make in EVERY if isinstance(make(), REMEMBER)], ids=lambda make: repr(make())[:20])
def test_a_transform_that_remembers_refuses_to_be_called_outside_an_env(make):
    transform = make()
    td = TensorDict({"observation": torch.ones(2, 1), "reward": torch.ones(2, 1)}, [2])
    for called in (transform, tw.Compose([transform])):
        with pytest.raises(TypeError, match=rf"{type(transform).__name__}\(.*\) needs an env around it.* but got a call"):
            called(td)


@pytest.mark.parametrize("make", [T.FlattenObservation, T.NormalizeObservation, T.ClipAction, lambda: T.RescaleAction(-1, 1)])
def test_a_transform_that_was_never_set_up_says_so_when_it_is_called(make):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"{type(make()).__name__}.* needs"):
        make()(TensorDict({"observation": torch.ones(2, 1), "action": torch.ones(2, 1)}, [2]))


def test_a_bare_transform_is_the_identity_but_for_forward():
    td = TensorDict({"observation": torch.ones(2, 1)}, [2])
    transform = T.Transform()
    assert transform.step(td) is td and transform.reset(td, torch.ones(2, dtype=torch.bool)) is td
    assert transform.action(td["observation"]) is td["observation"]


# in_use


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
def test_a_transform_of_one_env_is_refused_by_another(make):
    transform = make()
    assert not transform.in_use
    scripted(transform)
    assert transform.in_use
    for other in (transform, tw.Compose([transform])):
        with pytest.raises(
            ValueError, match=rf"TransformedEnv needs transforms of its own, but got {type(transform).__name__}"
        ):
            scripted(other)


def test_a_transform_is_free_again_after_an_env_that_refused_it():
    transform = T.NormalizeObservation()
    with pytest.raises(TypeError):
        scripted(transform, T.ClipReward(0, 1), T.FlattenObservation(), T.RescaleAction(0, 1), T.NormalizeObservation(), 3)
    with pytest.raises(TypeError):
        tw.TransformedEnv(ScriptedEnv(2, observation_space=spaces.Discrete(2)), transform)
    with pytest.raises(ValueError):
        scripted(transform, T.ClipAction(), T.RescaleAction(-1, 1))
    assert not transform.in_use
    assert_same(rollout(scripted(transform)), rollout(scripted(T.NormalizeObservation())))


# Errors


def test_compose_names_the_position_of_the_part_that_does_not_fit():
    match = r"transforms\[2\] \(NormalizeObservation\): NormalizeObservation needs a Box .* but got Discrete\(3\)"
    with pytest.raises(TypeError, match=match):
        parts = T.TimeLimit(3), T.ClipReward(0, 1), T.NormalizeObservation()
        tw.TransformedEnv(ScriptedEnv(2, observation_space=spaces.Discrete(3)), *parts)


def test_compose_names_every_level_of_a_nested_position():
    match = r"transforms\[1\] \(Compose\): transforms\[0\] \(RescaleAction\): RescaleAction needs .* finite bounds"
    with pytest.raises(ValueError, match=match):
        scripted(T.ClipAction(), tw.Compose([T.RescaleAction(-1, 1)]))


ONCE = "Compose needs each transform once, but got"


def shared_at_two_depths():
    transform = T.TimeLimit(3)
    return [transform, tw.Compose([transform])]


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: tw.Compose([3]), TypeError, r"Compose needs Transforms, but got int at transforms\[0\]"),
        (lambda: tw.Compose([double(), None]), TypeError, r"Compose needs Transforms, but got NoneType at transforms\[1\]"),
        (lambda: tw.Compose([T.TimeLimit]), TypeError, r"Compose needs Transforms, but got type at transforms\[0\]"),
        (lambda: tw.Compose([torch.nn.Tanh()]), TypeError, r"Compose needs Transforms, but got Tanh at transforms\[0\]"),
        (lambda: tw.Compose([double()] * 2), ValueError, f"{ONCE} TransformObservation.* twice"),
        (lambda: tw.Compose(shared_at_two_depths()), ValueError, rf"{ONCE} TimeLimit\(max_episode_steps=3\) twice"),
        (lambda: tw.Compose(None), TypeError, "Compose needs a list of Transforms, but got None"),
        (lambda: tw.Compose(T.TimeLimit(3)), TypeError, "Compose needs a list of Transforms, but got TimeLimit"),
        (lambda: scripted([double()]), TypeError, "TransformedEnv needs Transforms, but got list"),
        (lambda: scripted(None), TypeError, "TransformedEnv needs Transforms, but got NoneType"),
        (lambda: scripted(double(), 3), TypeError, r"needs Transforms, but got int at transforms\[1\]"),
        (lambda: scripted(*[double()] * 2), ValueError, f"{ONCE} TransformObservation.* twice"),
        (lambda: scripted(*shared_at_two_depths()), ValueError, rf"{ONCE} TimeLimit\(max_episode_steps=3\) twice"),
        (lambda: tw.TransformedEnv(double()), TypeError, "TransformedEnv needs a torchwrap.Env first, but got Transform"),
    ],
)
def test_compose_refuses_what_is_no_transform_or_stands_twice(build, error, match):
    with pytest.raises(error, match=match):
        build()


def test_an_error_in_a_users_function_keeps_the_place_where_it_was_raised():
    def broken(observation):
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own") as caught:
        scripted(T.TimeLimit(3), T.TransformObservation(broken))
    error, places = caught.value, []
    while error is not None:
        places += [entry.name for entry in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__
    assert "broken" in places


# repr


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (T.RecordEpisodeStatistics(), "RecordEpisodeStatistics(buffer_length=100, stats_key='episode')"),
        (T.NormalizeObservation(), "NormalizeObservation(epsilon=1e-08)"),
        (T.ClipObservation(-10, 10), "ClipObservation(min_obs=-10, max_obs=10)"),
        (T.FrameStackObservation(4), "FrameStackObservation(stack_size=4, padding_type='reset')"),
        (T.NormalizeReward(0.9), "NormalizeReward(gamma=0.9, epsilon=1e-08)"),
        (T.ClipReward(max_reward=1), "ClipReward(min_reward=None, max_reward=1)"),
        (T.TimeLimit(4), "TimeLimit(max_episode_steps=4)"),
        (T.RescaleAction(-3, 5), "RescaleAction(min_action=-3, max_action=5)"),
        (T.ClipAction(), "ClipAction()"),
        (T.FlattenObservation(), "FlattenObservation()"),
        (T.TransformReward(abs), "TransformReward(func=<built-in function abs>)"),
        (T.TransformObservation(abs), "TransformObservation(func=<built-in function abs>, observation_space=None)"),
        (T.Transform(), "Transform()"),
        (tw.Compose([]), "Compose([])"),
        (
            tw.Compose([T.TimeLimit(4), tw.Compose([T.ClipAction()])]),
            "Compose([TimeLimit(max_episode_steps=4), Compose([ClipAction()])])",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_repr_of_a_transform_is_the_call_that_makes_it(transform, text):
    assert repr(transform) == text


def test_the_repr_of_a_transform_is_the_same_in_an_env():
    for make in EVERY[:10]:
        transform = make()
        before = repr(transform)
        rollout(scripted(transform), 2)
        assert repr(transform) == before


def test_extra_repr_shows_the_arguments_of_a_users_own_transform():
    class Shift(T.ObservationTransform):
        def __init__(self, by, *, twice=False):
            super().__init__()
            self.by, self.twice, self.other = by, twice, 3

    assert Shift(2, twice=True).extra_repr() == "by=2, twice=True"
    assert repr(Shift(2)) == "Shift(by=2, twice=False)"


@pytest.mark.parametrize("base", [T.ObservationTransform, T.RewardTransform, T.ActionTransform])
def test_a_base_with_one_method_needs_that_method(base):
    td = TensorDict({key: torch.zeros(1, 1) for key in ("observation", "reward", "action")}, [1])
    with pytest.raises(NotImplementedError):
        base()(td)
