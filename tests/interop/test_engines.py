"""One contract for the engines below envs over simulators, against single envs stepped by hand."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from helpers import (
    Held,
    OtherVectorEnv,
    assert_no_overlap,
    assert_plays_the_same,
    assert_same,
    assert_transition_and_masked_reset_are_a_step,
    buffers,
    mostly_full,
)
from single_envs import (
    BOX,
    DISABLED,
    NEVER,
    SAME_STEP,
    SPACES,
    Scripted,
    Simulator,
    Singles,
    assert_equal_trees,
    check_transitions,
    follow,
    sample_and_step,
    scripted,
)

import torchwrap as tw
from torchwrap import transforms as T


def over_vector_env(kind, mode, num_envs, options, kwargs):
    vector_env = kind(scripted(num_envs, **kwargs), autoreset_mode=mode)
    return tw.from_gymnasium(vector_env, **options)


def over_workers(num_envs, options, kwargs):
    id = "TorchwrapTest/Scripted-v0"
    return tw.make(id, num_envs, vectorization_mode="async", **options, **kwargs)


def over_functions(auto_reset, reset_by, num_envs, options, kwargs):
    simulator = Simulator(scripted(num_envs, **kwargs), auto_reset)
    return simulator.make_env(reset_by=reset_by, **options)


ENGINES = {
    "sync": functools.partial(over_vector_env, SyncVectorEnv, DISABLED),
    "other": functools.partial(over_vector_env, OtherVectorEnv, DISABLED),
    "other, same step": functools.partial(over_vector_env, OtherVectorEnv, SAME_STEP),
    "async": functools.partial(over_vector_env, AsyncVectorEnv, DISABLED),
    "async, same step": functools.partial(over_vector_env, AsyncVectorEnv, SAME_STEP),
    "workers": over_workers,
    "functions": functools.partial(over_functions, False, "mask"),
    "functions by ids": functools.partial(over_functions, False, "ids"),
    "functions, auto-reset": functools.partial(over_functions, True, "mask"),
    "functions by ids, auto-reset": functools.partial(over_functions, True, "ids"),
}
FULL = ("async", "async, same step", "functions by ids", "workers")
RESET_THEMSELVES = [name for name in ENGINES if name.endswith(("same step", "auto-reset"))]


def over(names, full=FULL):
    fast = {*names} - {*full}
    return pytest.mark.parametrize("engine", mostly_full(names, *fast))


every_engine = over(ENGINES)


@pytest.fixture
def make():
    """Makes envs over an engine of scripted single envs, and closes them at the end."""
    opened = []

    def build(engine, num_envs=4, options=None, **kwargs):
        opened.append(ENGINES[engine](num_envs, options or {}, kwargs))
        return opened[-1]

    yield build
    for env in opened:
        env.close()


# Transitions.

EPISODES = {  # lengths, and the number of ends of each of four envs in 12 steps
    "staggered": ((), None),
    "one step": ((1,), 12),
    "all at once": ((4,), 3),
    "never": (NEVER, 0),
}


@pytest.mark.parametrize("ending", mostly_full(["terminated", "truncated", "both"], "both"))
@over(ENGINES, FULL[:3])
def test_episodes_of_every_kind(make, engine, ending):
    for lengths, ends in EPISODES.values():
        kwargs = {"lengths": lengths, "ending": ending}
        found = check_transitions(make(engine, **kwargs), scripted(4, **kwargs), 12)
        assert found > 9 if ends is None else found == 4 * ends


@every_engine
def test_observations_and_actions_of_every_space(make, engine):
    for space in SPACES.values():
        kwargs = {"space": space, "action_space": space}
        assert check_transitions(make(engine, 2, **kwargs), scripted(2, **kwargs), 6)


@every_engine
def test_limit_of_a_transform_matches_that_of_gymnasium(make, engine):
    makers = scripted(4, lengths=(3, 9))
    limited = [lambda maker=maker: gymnasium.wrappers.TimeLimit(maker(), 4) for maker in makers]
    env = tw.TransformedEnv(make(engine, lengths=(3, 9)), T.TimeLimit(4))
    assert check_transitions(env, limited, 17) == 4 * 5


@every_engine
def test_compiled_steps_and_masked_resets_have_the_bits_of_eager_ones(make, engine):
    envs = []
    for _ in range(2):
        base = make(engine, options={"info_keys": ["elapsed"]}, space=BOX)
        envs.append(tw.TransformedEnv(base, T.RecordEpisodeStatistics(), T.TimeLimit(4)))
    eager, env = envs
    tw.compile(env, backend="eager")
    done = assert_plays_the_same(eager, env, 20)["done"]
    assert done.any(0).all()
    mask = torch.tensor([True, False, False, True])
    assert_same(env.reset(mask=mask), eager.reset(mask=mask))


# Resets and seeds.


@pytest.mark.parametrize("seed", [None, 77])
@every_engine
def test_partial_reset_starts_episodes_in_its_rows_only(make, engine, seed):
    env = make(engine)
    singles = Singles(scripted(4), 3)
    td, _ = follow(env, singles, env.reset(seed=3), 2)
    for rows in ([], [1, 2], [0, 1, 2, 3]):
        singles.reset(rows, seed)
        td = env.reset(seed=seed, mask=torch.tensor([row in rows for row in range(4)]))
        for row in rows:
            np.testing.assert_array_equal(td["observation"][row], singles.now[row])
        td, _ = follow(env, singles, td, 4)


@every_engine
def test_step_without_reset_and_a_masked_reset_are_a_step(make, engine):
    assert assert_transition_and_masked_reset_are_a_step(make(engine), make(engine)) > 3


@pytest.mark.parametrize("seed", [40, 2**31 - 9])
@every_engine
def test_seed_of_env_i_is_seed_plus_its_global_index(make, engine, seed):
    env = make(engine, 2, {"first_index": 3})
    expected = [Scripted().reset(seed=seed + 3 + row)[0] for row in range(2)]
    assert_equal_trees(env.reset(seed=seed)["observation"], np.stack(expected))
    assert env.np_random_seed == seed


# Memory.


@pytest.mark.parametrize("space", [BOX, SPACES["nested"]], ids=["Box", "nested"])
@every_engine
def test_returned_tensors_are_never_changed_and_share_no_memory(make, engine, space):
    env = make(engine, space=space)
    held = Held()
    td = env.reset(seed=0)
    for _ in range(8):
        held.add(td)
        transition, td = sample_and_step(env, td)
        held.add(transition["next"])
    env.reset()
    held.assert_unchanged()
    assert_no_overlap(transition, td)


@every_engine
def test_writing_into_returned_tensors_does_not_change_the_env(make, engine):
    env, untouched = make(engine), make(engine)
    mask = torch.arange(4) == 1
    td, expected = (each.reset(seed=0) for each in (env, untouched))
    for step in range(8):
        td.apply_(lambda leaf: leaf.fill_(9))
        if step == 3:
            td, expected = (each.reset(mask=mask) for each in (env, untouched))
            assert torch.equal(td["observation"][mask], expected["observation"][mask])
            assert (td["observation"][~mask] == 9).all()  # as the caller left it
            td.apply_(lambda leaf: leaf.fill_(9))
        transition, td = sample_and_step(env, td)
        reference, expected = sample_and_step(untouched, expected)
        assert_same(transition["next"], reference["next"])
        assert torch.equal(td["observation"], expected["observation"])
        transition.apply_(lambda leaf: leaf.fill_(1))
    assert_same(*[buffers(each) for each in (env, untouched)])


# Refusals.


@over(RESET_THEMSELVES)
def test_step_of_rows_that_the_engine_has_reset_itself_raises(make, engine):
    env = make(engine, 2, lengths=(3,))
    env.reset()
    for _ in range(3):
        env.step_without_reset(env.sample_action())
    with pytest.raises(RuntimeError, match=r"reset .*\[0, 1\]"):
        env.step(env.sample_action())


@every_engine
def test_invalid_action_is_refused_before_the_simulator_moves(make, engine):
    env, untouched = make(engine), make(engine)
    td, _ = (each.reset(seed=0) for each in (env, untouched))
    with pytest.raises(ValueError, match="action"):
        env.step(td.set("action", torch.zeros(4, 5)))
    results = [each.step(torch.zeros(4, 2))[0]["next"] for each in (env, untouched)]
    assert_same(*results)


@every_engine
def test_snapshot_and_restore_of_a_simulator_raise(make, engine):
    native = tw.make("CartPole-v1", 2)
    native.reset(seed=0)
    snapshot = native.snapshot()
    env = make(engine, 2)
    for each in (env, tw.TransformedEnv(env, T.TimeLimit(4))):
        each.reset()
        for call in (each.snapshot, lambda each=each: each.restore(snapshot)):
            with pytest.raises(RuntimeError, match="simulator"):
                call()
