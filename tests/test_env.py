"""Env: steps, auto-reset, snapshots and checks."""

import functools
import gc

import pytest
import torch
from catalogue import seven
from gymnasium import spaces
from helpers import assert_same
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def test_steps_and_masked_resets_match_values_computed_by_hand():
    # Episode e of env i has (2, 1, 3)[(i + e) % 3] steps; observations are 1000 * i and the number of the step.
    for ending, flags in (("terminated", (1, 0)), ("truncated", (0, 1)), ("both", (1, 1))):
        env = ScriptedEnv(3, (1,), episode_lengths=(2, 1, 3), ending=ending)
        td = env.reset()
        assert td["observation"].flatten().tolist() == [0, 1000, 2000]
        for final, root, done in (
            ([1, 1001, 2001], [1, 1000, 2001], [0, 1, 0]),
            ([2, 1001, 2002], [0, 1001, 2002], [1, 0, 0]),
            ([1, 1002, 2003], [0, 1002, 2000], [1, 0, 1]),
            ([1, 1003, 2001], [1, 1000, 2001], [0, 1, 0]),
        ):
            transition, td = env.step(td.set("action", env.sample_action()))
            successor = transition["next"]
            assert (
                successor["observation"].flatten().tolist() == final
                and td["observation"].flatten().tolist() == root
            )
            for key, value in zip(("terminated", "truncated", "done"), (*flags, 1), strict=True):
                assert successor[key].flatten().tolist() == [
                    bool(value and ended) for ended in done
                ]
        td = env.reset(mask=torch.tensor([True, False, False]))
        assert td["observation"].flatten().tolist() == [0, 1000, 2001]
        td["observation"].zero_()  # which is the caller's
        assert successor["observation"].flatten().tolist() == final


def test_step_transition_is_the_given_td():
    env = ScriptedEnv(2)
    td = env.reset().set("action", env.sample_action()).set("log_prob", torch.zeros(2))
    transition, following = env.step(td)
    assert (
        transition is td and "log_prob" in transition and set(following.keys()) == {"observation"}
    )


class Careless(ScriptedEnv):
    # Returns garbage in the rows outside the mask of a reset.
    def _reset(self, mask, options=None):
        td = super()._reset(mask)
        td["observation"][~mask.tensor] = torch.nan
        return td


GARBAGE = [
    T.RecordEpisodeStatistics,
    T.NormalizeObservation,
    lambda: T.FrameStackObservation(2),
    T.NormalizeReward,
]


@pytest.mark.parametrize("transforms", [[], GARBAGE], ids=["bare", "stack"])
def test_reset_garbage_outside_the_mask_is_discarded(transforms):
    env, careful = (kind(4, (2,)) for kind in (Careless, ScriptedEnv))
    env, careful = (
        tw.TransformedEnv(each, *(make() for make in transforms)) for each in (env, careful)
    )
    td, expected, mask = (
        env.reset(seed=0),
        careful.reset(seed=0),
        torch.tensor([False, True, False, True]),
    )
    for step in range(16):
        if step % 5 == 2:
            td, expected = env.reset(mask=mask), careful.reset(mask=mask)
            assert torch.equal(td["observation"], expected["observation"])
        transition, td = env.step(td.set("action", env.sample_action()))
        reference, expected = careful.step(expected.set("action", careful.sample_action()))
        assert_same(transition, reference)
        assert torch.equal(td["observation"], expected["observation"])
    assert_same(env.snapshot(), careful.snapshot())


def test_restore_of_some_envs_leaves_the_others_and_what_all_share():
    parts = T.NormalizeObservation, functools.partial(T.FrameStackObservation, 2)
    envs = env, twin = [
        tw.TransformedEnv(tw.make("CartPole-v1", 4), *[part() for part in parts]) for _ in range(2)
    ]
    mask = torch.tensor([True, False, True, False])
    roots = [tw.rollout(one, None, 5, one.reset(seed=3))[1] for one in envs]
    snapshot = env.snapshot()
    td, _ = (tw.rollout(one, None, 5, root)[1] for one, root in zip(envs, roots, strict=True))
    learned = {name: value.clone() for name, value in env.state_dict().items()}
    root = env.restore(snapshot, mask)
    assert torch.equal(root["observation"][mask], snapshot["observation"][mask])
    assert torch.equal(root["observation"][~mask], td["observation"][~mask])
    assert all(torch.equal(value, learned[name]) for name, value in env.state_dict().items())
    assert env.elapsed_steps.tolist() == [5, 10, 5, 10]
    action = torch.zeros(4, dtype=torch.int64)
    here, there = env.eval().step(action)[0]["next"], twin.eval().step(action)[0]["next"]
    assert torch.equal(here["observation"][~mask], there["observation"][~mask])
    with pytest.raises(ValueError, match=r"restore needs a mask of shape \(4,\)"):
        env.restore(snapshot, mask[:2])


class Walker(tw.Env):
    """A user's env: a point that each action moves, and the number of its moves per coordinate."""

    position = tw.EnvBuffer((2,), fill=1.0)
    moves = tw.EnvBuffer(
        row=lambda self: torch.zeros(self.single_action_space.shape, dtype=torch.int64)
    )

    def __init__(self, num_envs):
        super().__init__(tw.Signature(num_envs, spaces.Box(-9, 9, (2,)), spaces.Box(-1, 1, (2,))))

    def _step(self, action):
        self.position.add_(action)
        self.moves.add_(action != 0)
        reward, flags = (
            torch.zeros(self.num_envs, 1),
            torch.zeros(self.num_envs, 1, dtype=torch.bool),
        )
        result = dict(
            observation=self.position.clone(),
            reward=reward,
            terminated=flags,
            truncated=flags.clone(),
        )
        return TensorDict(result, [self.num_envs])

    def _reset(self, mask, options=None):
        mask.fill_(self.position, 1)
        return TensorDict({"observation": self.position.clone()}, [self.num_envs])


def test_env_buffers_of_an_author_are_allocated_reset_saved_and_moved():
    env = Walker(3)
    assert (
        env.position.tolist() == [[1, 1]] * 3
        and env.moves.dtype == torch.int64
        and env.moves.tolist() == [[0, 0]] * 3
    )
    env.reset(seed=0)
    env.step(torch.tensor([[1.0, 0.0]] * 3))
    snapshot = env.snapshot()
    assert {"position", "moves"} <= set(snapshot["buffers"].keys())
    td = env.reset(mask=torch.tensor([True, False, True]))
    assert env.position.tolist() == td["observation"].tolist() == [[1, 1], [2, 1], [1, 1]]
    env.step(torch.tensor([[0.0, 1.0]] * 3))
    assert env.moves.tolist() == [[1, 1]] * 3
    env.restore(snapshot)
    assert env.position.tolist() == [[2, 1]] * 3 and env.moves.tolist() == [[1, 0]] * 3
    assert env.state_dict() == {}
    env.to("meta")
    assert env.position.is_meta and env.moves.is_meta and env.device == torch.device("meta")


def test_env_properties_equal_gymnasiums():
    env = tw.make("CartPole-v1", 3)
    assert env.observation_space.shape == (3, 4) and env.action_space == spaces.MultiDiscrete(
        [2, 2, 2]
    )
    assert env.single_observation_space.shape == (
        4,
    ) and env.single_action_space == spaces.Discrete(2)
    assert (env.num_envs, env.spec.id, env.unwrapped, env.render_mode) == (
        3,
        "CartPole-v1",
        env,
        None,
    )
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
            assert_same(
                transition["next", "info"].select("action"), TensorDict({"action": action}, [3])
            )
            other.sample_action()  # because the stream of actions is part of the snapshot
        assert_same(env.snapshot(), other.snapshot())


def test_step_td_with_only_the_key_action_is_no_bare_action_of_a_dict_space_with_that_key():
    env = ScriptedEnv(3, action_space=ACTIONS["Dict with only the key action"])
    env.reset()
    td = TensorDict({"action": env.sample_action()}, [3])
    transition, _ = env.step(td)
    assert transition is td and "observation" not in td.keys()


def test_step_bare_action_counts_instead_of_one_in_the_last_root():
    for backend in ("torch", "gymnasium"):
        env = tw.make("Pendulum-v1", 2, backend=backend)
        td, given = env.reset(seed=0), torch.tensor([[0.5], [-0.5]])
        with pytest.raises(ValueError):
            env.step(td.set("action", torch.zeros(2, 3)))
        assert torch.equal(env.step(given)[0]["action"], given)
        env.close()


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
    (
        ScriptedEnv,
        torch.zeros(1, 5),
        ValueError,
        r"needs an action of shape \(1, 6\).*got \(1, 5\)",
    ),
    (
        ScriptedEnv,
        torch.zeros(1, 6, dtype=torch.float64),
        TypeError,
        r"dtype torch\.float32.*got torch\.float64",
    ),
    (ScriptedEnv, torch.zeros(1, 6, device="meta"), ValueError, "on device cpu, but got meta"),
    (
        discrete,
        torch.zeros(2, 1, dtype=torch.int64),
        ValueError,
        r"needs an action of shape \(2,\)",
    ),
    (
        discrete,
        torch.full((2,), torch.nan),
        TypeError,
        r"dtype torch\.int64 for Discrete.2., but got torch\.float32",
    ),
    (discrete, torch.tensor([0, 2]), ValueError, r"in Discrete\(2\), but got values from 0 to 2"),
    (discrete, torch.tensor([-1, 0]), ValueError, r"in Discrete\(2\), but got values from -1 to 0"),
    (nested, torch.zeros(2), TypeError, r"TensorDict with keys \['a'\], but got Tensor"),
    (
        nested,
        TensorDict({"a": torch.tensor([0, 5])}, [2]),
        ValueError,
        r"in Discrete\(2\), but got values from 0 to 5",
    ),
    (nested, TensorDict({"a": torch.zeros(2)}, [2]), TypeError, r"dtype torch\.int64"),
    (
        nested,
        TensorDict({"a": torch.zeros(2, 1).long()}, [2]),
        ValueError,
        r"action\['a'\] of shape \(2,\) .* got \(2, 1\)",
    ),
]
NO_TD = 'needs a TensorDict with "action", or an action as a tensor, but got '
NO_ACTION = r'needs td\["action"\], but got a TensorDict with keys '
BAD_STEPS = [
    (discrete, None, TypeError, NO_TD + "NoneType"),
    (discrete, {"action": torch.zeros(2)}, TypeError, NO_TD + "dict"),
    (discrete, TensorDict({}, []), ValueError, NO_ACTION),
    (
        discrete,
        TensorDict({"action": TensorDict({}, [2])}, [2]),
        TypeError,
        "torch.Tensor, but got TensorDict",
    ),
    (
        ScriptedEnv,
        TensorDict({"action": torch.zeros(1, 6)}, [1, 6]),
        ValueError,
        r"batch size \(1,\), but got \(1, 6\)",
    ),
    (
        ScriptedEnv,
        TensorDict({"action": torch.zeros(1, 6)}, [1]).lock_(),
        ValueError,
        r"unlocked .* but got \(1,\), locked",
    ),
    (nested, TensorDict({"b": torch.zeros(2)}, [2]), ValueError, NO_ACTION + r"\['b'\]"),
    (
        nested,
        TensorDict({"action": TensorDict({"b": torch.zeros(2)}, [2])}, [2]),
        TypeError,
        r"\['a'\], but got \['b'\]",
    ),
    *BAD_ACTIONS,
    *(
        (make, TensorDict({"action": action}, [len(action)]), *rest)
        for make, action, *rest in BAD_ACTIONS
    ),
]


@pytest.mark.parametrize("stacked", [False, True])
def test_step_wrong_action_raises_before_anything_changed(stacked):
    for make, given, error, message in BAD_STEPS:
        env = (
            tw.TransformedEnv(make(), T.RecordEpisodeStatistics(), T.NormalizeObservation())
            if stacked
            else make()
        )
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


NO_SNAPSHOT = r"ScriptedEnv.restore needs the result of snapshot\(\)"
DIFFERS = "snapshot of the same env, but got one that differs in .*"
BAD_CALLS = [
    (
        lambda env: env.reset(seed=-1),
        ValueError,
        "needs seed as an integer of at least 0, but got -1",
    ),
    (lambda env: env.reset(seed=1.5), TypeError, "but got 1.5"),
    (lambda env: env.reset(seed=2**64), ValueError, "but got 18446744073709551616"),
    (lambda env: env.reset(seed=True), ValueError, "but got True"),
    (
        lambda env: env.reset(mask=torch.ones(3) > 0),
        ValueError,
        r"mask of shape \(2,\) torch.bool on cpu, but got \(3,\)",
    ),
    (lambda env: env.reset(mask=torch.ones(2)), ValueError, "but got .2,. torch.float32"),
    (lambda env: env.reset(mask=[True, False]), ValueError, r"but got \[True, False\]"),
    (
        lambda env: env.reset(options={"low": 0}),
        ValueError,
        "ScriptedEnv.reset takes no options, but got",
    ),
    (lambda env: env.restore(None), TypeError, NO_SNAPSHOT),
    (lambda env: env.restore({}), TypeError, NO_SNAPSHOT),
    (
        lambda env: env.restore(TensorDict({"observation": torch.zeros(2, 17)}, [2])),
        TypeError,
        NO_SNAPSHOT,
    ),
    (restored_from(lambda: tw.make("CartPole-v1", 2)), ValueError, DIFFERS + "state_theta"),
    (
        restored_from(lambda: ScriptedEnv(3)),
        ValueError,
        r"needs .* of shape \(2,\) .*, but got \(3,\)",
    ),
    (
        restored_from(lambda: tw.TransformedEnv(ScriptedEnv(2), T.TimeLimit(3))),
        ValueError,
        DIFFERS + ".*TimeLimit.elapsed",
    ),
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
    (
        lambda env: env.step(torch.zeros(2, 6)),
        r"ScriptedEnv has not been reset yet: call reset\(\) before step",
    ),
    (
        lambda env: env.step(TensorDict({"action": torch.zeros(2, 6)}, [2])),
        r"not been reset yet: call reset\(\) before step",
    ),
    (lambda env: env.snapshot(), r"call reset\(\) before snapshot\(\)\.$"),
    (lambda env: env.reset(mask=torch.tensor([True, False])), "needs a first reset of every env"),
]


def test_calls_before_the_first_reset_raise():
    for call, message in BEFORE_RESET:
        with pytest.raises(RuntimeError, match=message):
            call(ScriptedEnv(2))


def test_step_creates_no_reference_cycles():
    # A reference cycle would keep a step's tensors, on any device, until Python's garbage collector runs.
    for env in (
        tw.make("CartPole-v1", 4),
        tw.TransformedEnv(ScriptedEnv(4, episode_lengths=3), seven()),
    ):
        _, td = env.step(
            env.reset(seed=0).set("action", env.sample_action())
        )  # the first call traces functions
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
    with pytest.raises(
        ValueError,
        match=r"\['goal'\], which no root would hold: make it part of a Dict observation",
    ):
        env.reset()


@pytest.mark.parametrize(
    "change", [torch.Tensor.double, lambda observation: observation[:, :1]], ids=["dtype", "shape"]
)
def test_auto_reset_never_changes_the_dtype_or_shape_of_the_root(change):
    class Changed(ScriptedEnv):
        def _reset(self, mask, options=None):
            td = super()._reset(mask, options)
            return (
                td
                if self.np_random_seed is None
                else td.set("observation", change(td["observation"]))
            )

    env = Changed(2, (3,), episode_lengths=1)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="index_copy_"):
        env.step(env.sample_action())
