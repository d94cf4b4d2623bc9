"""Env: steps, auto-reset, snapshots and checks."""

import gc

import pytest
import torch
from catalogue import seven
from gymnasium import spaces
from helpers import assert_same, from_reset
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def column(*values):
    return [[value] for value in values]


# Episode e of env i has (2, 1, 3)[(i + e) % 3] steps. Observations are 1000 * i plus the step.
BY_HAND = [  # final observation, root, done
    (
        [1, 1001, 2001],
        [1, 1000, 2001],
        [0, 1, 0],
    ),
    (
        [2, 1001, 2002],
        [0, 1001, 2002],
        [1, 0, 0],
    ),
    (
        [1, 1002, 2003],
        [0, 1002, 2000],
        [1, 0, 1],
    ),
    (
        [1, 1003, 2001],
        [1, 1000, 2001],
        [0, 1, 0],
    ),
]


@pytest.mark.parametrize(
    "ending, terminates, truncates",
    [
        ("terminated", True, False),
        ("truncated", False, True),
        ("both", True, True),
    ],
)
def test_steps_and_masked_resets_match_values_by_hand(ending, terminates, truncates):
    env = ScriptedEnv(
        3,
        (1,),
        episode_lengths=(2, 1, 3),
        ending=ending,
    )
    td = env.reset()
    assert td["observation"].tolist() == column(0, 1000, 2000)
    for final, root, done in BY_HAND:
        transition, td = env.step(td.set("action", env.sample_action()))
        successor = transition["next"]
        assert successor["observation"].tolist() == column(*final)
        assert td["observation"].tolist() == column(*root)
        assert successor["done"].tolist() == column(*done)
        assert successor["terminated"].tolist() == column(*[terminates and one for one in done])
        assert successor["truncated"].tolist() == column(*[truncates and one for one in done])
    td = env.reset(mask=torch.tensor([True, False, False]))
    assert td["observation"].tolist() == column(0, 1000, 2001)
    td["observation"].zero_()
    assert successor["observation"].tolist() == column(*final)


def test_step_transition_is_the_given_td():
    env = ScriptedEnv(2)
    td = env.reset().set("action", env.sample_action()).set("log_prob", torch.zeros(2))
    transition, following = env.step(td)
    assert transition is td and "log_prob" in transition
    assert set(following.keys()) == {"observation"}


def no_transforms():
    return []


def stateful_transforms():
    stack = T.FrameStackObservation(2)
    return [
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        stack,
        T.NormalizeReward(),
    ]


def test_restore_of_some_envs_leaves_the_others_and_shared_state():
    def make():
        transforms = T.NormalizeObservation(), T.FrameStackObservation(2)
        env = tw.TransformedEnv(tw.make("CartPole-v1", 4), *transforms)
        from_reset(tw.Collector(env, None, 5), seed=3)
        return env

    env = make()
    twin = make()
    mask = torch.tensor([True, False, True, False])
    snapshot = env.snapshot()
    tw.rollout(env, None, 5)
    tw.rollout(twin, None, 5)
    left = env.root
    learned = TensorDict(env.state_dict(), []).clone()
    root = env.restore(snapshot, mask)
    assert torch.equal(
        root["observation"][mask],
        snapshot["observation"][mask],
    )
    assert torch.equal(
        root["observation"][~mask],
        left["observation"][~mask],
    )
    assert_same(TensorDict(env.state_dict(), []), learned)
    assert env.elapsed_steps.tolist() == [5, 10, 5, 10]
    action = torch.zeros(4, dtype=torch.int64)
    here = env.eval().step(action)[0]["next", "observation"]
    there = twin.eval().step(action)[0]["next", "observation"]
    assert torch.equal(here[~mask], there[~mask])
    with pytest.raises(ValueError, match="mask"):
        env.restore(snapshot, mask[:2])


class Walker(tw.Env):
    """A user's env: a point that each action moves, and the number of its moves per coordinate."""

    position = tw.EnvBuffer((2,), fill=1.0)
    moves = tw.EnvBuffer(
        row=lambda self: torch.zeros(self.single_action_space.shape, dtype=torch.int64)
    )

    def __init__(self, num_envs):
        super().__init__(
            tw.Signature(
                num_envs,
                spaces.Box(-9, 9, (2,)),
                spaces.Box(-1, 1, (2,)),
            )
        )

    def _step(self, action):
        self.position.add_(action)
        self.moves.add_(action != 0)
        successor = self._reset(tw.RowMask(torch.zeros(self.num_envs) > 0))
        successor["reward"] = torch.zeros(self.num_envs, 1)
        successor["terminated"] = successor["reward"] > 0
        return successor.set("truncated", successor["terminated"].clone())

    def _reset(self, mask, options=None):
        mask.fill_(self.position, 1)
        return TensorDict(
            {"observation": self.position.clone()},
            [self.num_envs],
        )


def test_env_buffers_of_an_author_are_allocated_reset_saved_and_moved():
    env = Walker(3)
    assert env.position.tolist() == [[1, 1]] * 3
    assert env.moves.dtype == torch.int64 and env.moves.tolist() == [[0, 0]] * 3
    env.reset(seed=0)
    env.step(torch.tensor([[1.0, 0.0]] * 3))
    snapshot = env.snapshot()
    assert {"position", "moves"} <= set(snapshot["buffers"].keys())
    td = env.reset(mask=torch.tensor([True, False, True]))
    assert (
        env.position.tolist()
        == td["observation"].tolist()
        == [
            [1, 1],
            [2, 1],
            [1, 1],
        ]
    )
    env.step(torch.tensor([[0.0, 1.0]] * 3))
    assert env.moves.tolist() == [[1, 1]] * 3
    env.restore(snapshot)
    assert env.position.tolist() == [[2, 1]] * 3 and env.moves.tolist() == [[1, 0]] * 3
    assert env.state_dict() == {}
    env.to("meta")
    assert env.position.is_meta and env.moves.is_meta and env.device == torch.device("meta")


def test_env_properties_equal_gymnasiums():
    env = tw.make("CartPole-v1", 3)
    assert env.observation_space.shape == (3, 4)
    assert env.action_space == spaces.MultiDiscrete([2, 2, 2])
    assert env.single_observation_space.shape == (4,)
    assert env.single_action_space == spaces.Discrete(2)
    assert env.num_envs == 3 and env.spec.id == "CartPole-v1"
    assert env.unwrapped is env and env.render_mode is None
    with pytest.raises(NotImplementedError, match="render"):
        ScriptedEnv(1).render()


# A bare action.

FOUR = spaces.Discrete(4, start=-1)
ACTIONS = {
    "Box": spaces.Box(-1, 1, (2,)),
    "Discrete": FOUR,
    "Dict": spaces.Dict(
        push=spaces.Box(-1, 1, (2,)),
        gear=FOUR,
    ),
    "Dict with the key action": spaces.Dict(
        action=spaces.Box(-1, 1, (2,)),
        gear=FOUR,
    ),
    "Dict with only the key action": spaces.Dict(action=FOUR),
    "Tuple": spaces.Tuple(
        [
            FOUR,
            spaces.Box(-1, 1, (2,)),
        ]
    ),
}


@pytest.mark.parametrize("space", ACTIONS.values(), ids=ACTIONS)
def test_step_bare_action_equals_the_action_in_the_root(space):
    def make():
        env = ScriptedEnv(
            3,
            action_space=space,
            episode_lengths=(2, 3, 1),
        )
        return tw.TransformedEnv(env, *stateful_transforms())

    env = make()
    other = make()
    root = other.reset(seed=0)
    env.reset(seed=0)
    for _ in range(7):
        action = env.sample_action()
        transition, following = env.step(action.clone())
        expected, root = other.step(root.set("action", action))
        assert_same(transition, expected)
        assert_same(following, root)
        received = transition["next", "info"].select("action")
        assert_same(received, TensorDict({"action": action}, [3]))
        other.sample_action()  # because the stream of actions is part of the snapshot
    assert_same(env.snapshot(), other.snapshot())


def test_step_td_with_only_an_action_of_a_dict_space_is_no_bare_action():
    env = ScriptedEnv(3, action_space=ACTIONS["Dict with only the key action"])
    env.reset()
    td = TensorDict({"action": env.sample_action()}, [3])
    transition, _ = env.step(td)
    assert transition is td and "observation" not in td.keys()


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_step_bare_action_replaces_a_wrong_one_in_the_last_root(backend):
    env = tw.make("Pendulum-v1", 2, backend=backend)
    td = env.reset(seed=0).set("action", torch.zeros(2, 3))
    action = torch.tensor([[0.5], [-0.5]])
    with pytest.raises(ValueError, match="action"):
        env.step(td)
    assert torch.equal(
        env.step(action)[0]["action"],
        action,
    )
    env.close()


def test_step_bare_action_keeps_the_callers_entries_of_the_root():
    env = ScriptedEnv(2)
    root = env.reset()
    root["log_prob"] = torch.tensor([0.5, 0.25])
    root["observation"].add_(7)
    action = env.sample_action()
    transition, _ = env.step(action)
    assert transition["log_prob"].tolist() == [0.5, 0.25] and transition["action"] is action
    assert transition["observation"][:, 0].tolist() == [7, 1007]
    assert set(root.keys()) == {"observation", "log_prob"}


# Wrong input.


def box():
    return ScriptedEnv(1)


def discrete():
    return ScriptedEnv(2, action_space=spaces.Discrete(2))


def nested():
    return ScriptedEnv(
        2,
        action_space=spaces.Dict(a=spaces.Discrete(2)),
    )


def root_with(action):
    return TensorDict({"action": action}, [len(action)])


def td_of(**parts):
    return TensorDict(parts, [2])


BAD_ACTIONS = {  # refused in the root and bare
    "shape": (box, torch.zeros(1, 5), ValueError),
    "dtype": (box, torch.zeros(1, 6).double(), TypeError),
    "device": (box, torch.zeros(1, 6, device="meta"), ValueError),
    "above": (discrete, torch.tensor([0, 2]), ValueError),
    "no dict": (nested, torch.zeros(2), TypeError),
    "dtype in a dict": (nested, td_of(a=torch.zeros(2)), TypeError),
}
BAD_STEPS = {
    "none": (discrete, None, TypeError),
    "no action": (discrete, TensorDict({}, []), ValueError),
    "empty action": (discrete, td_of(action=td_of()), TypeError),
    "batch size": (box, TensorDict({"action": torch.zeros(1, 6)}, [1, 6]), ValueError),
    "locked": (box, root_with(torch.zeros(1, 6)).lock_(), ValueError),
    "wrong keys": (nested, td_of(b=torch.zeros(2)), ValueError),
}
for name, (make, action, error) in BAD_ACTIONS.items():
    BAD_STEPS[f"bare {name}"] = (make, action, error)
    BAD_STEPS[name] = (make, root_with(action), error)


@pytest.mark.parametrize("make, given, error", BAD_STEPS.values(), ids=BAD_STEPS)
def test_step_wrong_action_raises_before_anything_changed(make, given, error):
    env = tw.TransformedEnv(make(), *stateful_transforms())
    root = env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(error, match=r"action|td must"):
        env.step(given)
    assert_same(env.snapshot(), before)
    assert set(root.keys()) == {"observation"}
    env.step(env.sample_action())


def snapshot_of(make):
    env = make()
    env.reset(seed=0)
    return env.snapshot()


def limited():
    return tw.TransformedEnv(ScriptedEnv(2), T.TimeLimit(3))


BAD_CALLS = {  # method, arguments, error, name in the message
    "seed below 0": ("reset", dict(seed=-1), ValueError, "seed"),
    "seed no integer": ("reset", dict(seed=1.5), TypeError, "seed"),
    "mask shape": ("reset", dict(mask=torch.ones(3) > 0), ValueError, "mask"),
    "mask dtype": ("reset", dict(mask=torch.ones(2)), ValueError, "mask"),
    "options": ("reset", dict(options={"low": 0}), ValueError, "options"),
    "snapshot none": ("restore", dict(snapshot=None), TypeError, "snapshot"),
    "snapshot of a stack": (
        "restore",
        dict(snapshot=snapshot_of(limited)),
        ValueError,
        "TimeLimit",
    ),
}


@pytest.mark.parametrize("call, arguments, error, name", BAD_CALLS.values(), ids=BAD_CALLS)
def test_wrong_arguments_raise_before_anything_changed(call, arguments, error, name):
    env = ScriptedEnv(2)
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(error, match=name):
        getattr(env, call)(**arguments)
    assert_same(env.snapshot(), before)


BEFORE_RESET = {
    "bare step": lambda env: env.step(torch.zeros(2, 6)),
    "step": lambda env: env.step(root_with(torch.zeros(2, 6))),
    "snapshot": lambda env: env.snapshot(),
    "masked reset": lambda env: env.reset(mask=torch.tensor([True, False])),
}


@pytest.mark.parametrize("call", BEFORE_RESET.values(), ids=BEFORE_RESET)
def test_calls_before_the_first_reset_raise(call):
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        call(ScriptedEnv(2))


@pytest.mark.parametrize(
    "transforms",
    [pytest.param(no_transforms, marks=pytest.mark.full), lambda: [seven()]],
    ids=["none", "seven"],
)
def test_step_creates_no_reference_cycles(transforms):
    # A cycle would keep a step's tensors, on any device, until Python's garbage collector runs.
    env = tw.TransformedEnv(
        tw.make("Pendulum-v1", 4, max_episode_steps=3),
        *transforms(),
    )
    _, td = env.step(env.reset(seed=0).set("action", env.sample_action()))
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
    with pytest.raises(ValueError, match="goal"):
        env.reset()


@pytest.mark.parametrize("mask", [[False, False], [True, False], [True, True]], ids=str)
def test_root_of_a_masked_reset_shares_no_memory_with_the_last_one(mask):
    env = ScriptedEnv(2)
    last = env.reset()
    root = env.reset(mask=torch.tensor(mask))
    before = last.clone()
    root["observation"].fill_(-1)
    assert_same(last, before)


def test_roots_are_contiguous_whatever_a_transform_returns():
    class SwapAxes(T.ObservationTransform):
        def observation(self, observation):
            return observation.mT

    env = tw.TransformedEnv(ScriptedEnv(2, (3, 3), episode_lengths=2), SwapAxes())
    roots = [env.reset(), *[env.step(env.sample_action())[1] for _ in range(3)]]
    assert all(root["observation"].is_contiguous() for root in roots)
