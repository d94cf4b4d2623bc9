"""from_functions: simulators on tensors under auto-reset, against one that is stepped by hand."""

import copy
import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces as S
from gymnasium.wrappers import TimeLimit
from helpers import (
    assert_same,
    load_example,
    params,
    play,
)
from single_envs import (
    BOX,
    PUSH,
    Scripted,
    Simulator,
    assert_elapsed_steps_move_the_limit,
    check_transitions,
    scripted,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.tensors import from_functions
from torchwrap.testing import check_env

RESETS = {
    "mask": {},
    "ids": {"reset_by": "ids"},
    "auto-reset": {"auto_reset": True},
    "auto-reset, ids": {"auto_reset": True, "reset_by": "ids"},
}
by_auto_reset = pytest.mark.parametrize("auto_reset", [False, True])


def simulate(num_envs=5, auto_reset=False, **kwargs):
    return Simulator(scripted(num_envs, **kwargs), auto_reset)


def make(num_envs=5, auto_reset=False, lengths=(), **kwargs):
    return simulate(num_envs, auto_reset, lengths=lengths).make_env(**kwargs)


# Steps and resets. Transitions are those of `test_engines`.


@pytest.mark.parametrize("has_clock", [False, True])
@by_auto_reset
def test_steps_with_a_limit_equal_single_envs_with_a_limit(has_clock, auto_reset):
    simulator = simulate(5, auto_reset, lengths=(2, 9))
    clock = (lambda: simulator.elapsed) if has_clock else None
    env = simulator.make_env(clock=clock, max_episode_steps=4)
    assert env.signature.max_episode_steps == 4
    limited = [lambda: TimeLimit(Scripted(lengths=(2, 9)), 4)] * 5
    assert check_transitions(env, limited, 12) == 5 * 4


@pytest.mark.parametrize("kwargs", params(RESETS, quick=["mask"]))
def test_env_keeps_the_contract(kwargs):
    check_env(functools.partial(make, info_keys=("elapsed",), **kwargs))


def test_rows_that_the_simulator_has_reset_are_not_reset_again():
    simulator = simulate(auto_reset=True)
    env = simulator.make_env(max_episode_steps=4)
    play(env, 20, env.reset(seed=0))
    assert any(any(rows) for rows in simulator.resets[1:])  # those that reach the limit
    simulator.resets.clear()
    env = simulator.make_env()
    play(env, 20, env.reset(seed=0))
    assert len(simulator.resets) == 1


@by_auto_reset
def test_reset_reaches_its_rows_alone(auto_reset):
    simulator = simulate(3, auto_reset, lengths=(2,))
    env = simulator.make_env(reset_by="ids")

    def advance(num_steps):
        for _ in range(num_steps):
            transition, _ = env.step_without_reset(env.sample_action())
        return transition["next"]

    td = env.reset(seed=0)
    assert_same(env.reset(mask=torch.zeros(3, dtype=torch.bool)), td)
    assert len(simulator.resets) == 1  # none for no row
    assert advance(2)["done"].all()
    # Also rows that the simulator has reset, or else rows that step on after their end.
    assert_same(env.reset(seed=5), make(3, lengths=(2,)).reset(seed=5))
    advance(1 if auto_reset else 3)
    env.reset()
    assert simulator.resets[-1] == [0, 1, 2]
    assert simulator.elapsed.tolist() == [0, 0, 0]
    episodes = [each.episode for each in simulator.envs]
    for _ in range(2):
        env.step(env.sample_action())
    env.reset()  # after an auto-reset, another episode
    assert simulator.resets[-1] == [0, 1, 2]
    assert [each.episode - 2 for each in simulator.envs] == episodes


# Memory.


def test_simulator_that_makes_new_tensors_is_not_copied():
    flags = torch.zeros(2, 4, dtype=torch.bool)
    made = torch.zeros(4, 3), torch.ones(4), *flags
    env = simulate(4).make_env(lambda action: (*made, {}), reuses_memory=False)
    env.reset()
    transition, _ = env.step_without_reset(env.sample_action())
    names = ("observation", "reward", "terminated", "truncated")
    for name, value in zip(names, made, strict=True):
        assert transition["next", name].data_ptr() == value.data_ptr()


def test_step_of_a_differentiable_simulator_has_no_graph():
    scale = torch.ones(4, 1, requires_grad=True)
    columns = scale, scale < 0, scale < 0, {"height": scale.squeeze(1)}
    made = scale.expand(4, 3), *columns
    env = simulate(4).make_env(lambda action: made, reuses_memory=False, info_keys=["height"])
    env.reset()
    transition, td = env.step(env.sample_action())
    tensors = [*transition.values(True, True), *td.values(True, True)]
    assert [value for value in tensors if value.requires_grad] == []


# Values.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=str)
def test_rewards_and_flags_of_any_dtype_become_columns(dtype, shape):
    simulator = simulate()

    def step(action):
        observation, reward, *flags, info = simulator.step(action)
        terminated, truncated = [flag.to(dtype).reshape(shape) for flag in flags]
        return observation, reward.reshape(shape), terminated, truncated, info

    check_transitions(simulator.make_env(step), scripted(5), 12)


def test_info_keys_are_columns_of_numbers():
    env = make(info_keys=["elapsed"])
    td = env.reset(seed=0)
    for _ in range(6):
        elapsed = env.elapsed_steps
        transition, td = env.step(td.set("action", env.sample_action()))
        steps = transition["next", "info", "elapsed"]
        assert steps.dtype == torch.float32
        assert (steps == 1.0 + elapsed.unsqueeze(-1)).all()


# Clocks, seeds and the end.


@by_auto_reset
@pytest.mark.parametrize("has_clock", [False, True])
def test_elapsed_steps_move_the_limit(has_clock, auto_reset):
    simulator = simulate(3, auto_reset, lengths=(100,))
    clock = (lambda: simulator.elapsed) if has_clock else None
    env = simulator.make_env(clock=clock, max_episode_steps=10)
    assert_elapsed_steps_move_the_limit(env)
    assert env.elapsed_steps.dtype == torch.int64
    assert env.elapsed_steps.data_ptr() != simulator.elapsed.data_ptr()
    if has_clock:
        assert simulator.elapsed.tolist() == [1, 0, 9]


def test_seed_of_a_shard_is_bounded():
    seeds = []
    env = make(2, seed=seeds.append, first_index=5)
    env.reset(seed=2**31)
    env.reset()
    assert seeds == [5]


def test_seed_without_a_function_for_it_is_refused_before_anything_changes():
    simulator = simulate()
    env = simulator.make_env(seed=None)
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=3)
    assert simulator.resets == []
    env.reset()
    assert isinstance(env.np_random_seed, int)


def test_close_closes_the_simulator():
    simulator = simulate()
    with simulator.make_env():
        assert not simulator.is_closed
    assert simulator.is_closed
    simulator.make_env(close=None).close()


# Errors.

UNFIT = {
    "reset": (3, TypeError),
    "clock": (torch.zeros(2), TypeError),
    "reset_by": ("id", ValueError),
    "reuses_memory": (1, TypeError),
    "device": ("nope", ValueError),
}


def test_levels_that_are_no_dict_are_refused_by_a_trainer():
    sb3 = pytest.importorskip("torchwrap.interop.sb3")
    env = from_functions(print, print, 2, BOX, BOX, levels=lambda: torch.ones(2))
    with pytest.raises(TypeError, match="levels"):
        sb3.to_sb3(env)


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_argument_is_refused_at_construction(name):
    value, error = UNFIT[name]
    good = {
        "reset": print,
        "step": print,
        "num_envs": 5,
        "observation_space": BOX,
        "action_space": PUSH,
    }
    with pytest.raises(error, match=f"from_functions.*{name}"):
        from_functions(**{**good, name: value})


UNFIT_OBSERVATIONS = {
    "shape": (BOX, torch.zeros(2, 2)),
    "dtype": (BOX, torch.zeros(2, 3, dtype=torch.complex64)),
    "lossy dtype": (S.Box(0, 9, (3,), np.uint8), torch.zeros(2, 3)),
    "device": (BOX, torch.zeros(2, 3, device="meta")),
    "NumPy": (BOX, np.zeros((2, 3))),
    "key": (S.Dict(a=BOX), {"b": torch.zeros(2, 3)}),
}
FUNCTIONS = ["reset", "step", "step's final observations"]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("space", "value"),
    UNFIT_OBSERVATIONS.values(),
    ids=UNFIT_OBSERVATIONS,
)
def test_unfit_observation_is_refused_at_the_first_call(function, space, value):
    results = dict.fromkeys(FUNCTIONS, tw.spaces.zeros(space, 2))
    results[function] = value
    done = torch.ones(2, dtype=torch.bool)

    def step(action):
        info = {"final": results["step's final observations"]}
        return results["step"], torch.zeros(2), done, done, info

    given = lambda rows: results["reset"], step, 2, space, PUSH
    env = from_functions(*given, final_key="final")
    with pytest.raises(ValueError, match=f"{function}.*observation"):
        env.reset()
        env.step(env.sample_action())


def replaced(index, value):
    """Replaces one of the five results of `step`."""
    return lambda *values: (
        *values[:index],
        value,
        *values[index + 1 :],
    )


UNFIT_STEPS = {
    "no info": (lambda *values: values[:4], {}, TypeError, "info"),
    "vector as reward": (
        replaced(1, torch.zeros(2, 3)),
        {},
        ValueError,
        "reward",
    ),
    "bool": (replaced(2, False), {}, ValueError, "terminated"),
    "device": (
        replaced(3, torch.zeros(2, device="meta")),
        {},
        ValueError,
        "truncated",
    ),
    "unknown info": (
        lambda *values: values,
        {"info_keys": ["nope"]},
        ValueError,
        "nope",
    ),
    "vector as info": (
        lambda *values: values,
        {"info_keys": ["vector"]},
        ValueError,
        "vector",
    ),
    "no final observation": (
        replaced(2, torch.ones(2, dtype=torch.bool)),
        {"final_key": "final"},
        ValueError,
        "final",
    ),
}


@pytest.mark.parametrize("case", UNFIT_STEPS)
def test_unfit_result_of_step_is_refused_at_the_first_call(case):
    change, kwargs, error, name = UNFIT_STEPS[case]
    simulator = simulate(2, lengths=(9,))
    env = simulator.make_env(lambda action: change(*simulator.step(action)), **kwargs)
    env.reset()
    with pytest.raises(error, match=name):
        env.step(env.sample_action())


# mjlab, on the CPU.


@pytest.fixture(scope="module")
def make_mjlab():
    pytest.importorskip("mjlab")
    import mjlab.tasks  # noqa: F401
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import load_env_cfg

    def make():
        cfg = load_env_cfg("Mjlab-Velocity-Flat-Unitree-Go1")
        cfg.scene.num_envs = 4
        cfg.auto_reset = False
        cfg.seed = 1
        cfg.episode_length_s = 0.4  # 20 steps
        cfg.terminations["fell_over"].params["limit_angle"] = 0.25
        return ManagerBasedRlEnv(cfg, device="cpu")

    return make


def mjlab_by_hand(env, actions, elapsed):
    """Steps and resets mjlab's env alone: yields the results of the step, and the next root."""
    env.reset(seed=3)
    env.episode_length_buf.copy_(elapsed)
    for action in actions:
        *results, _ = env.step(action.clone())
        results = copy.deepcopy(results)
        root = copy.deepcopy(results[0])
        _, _, terminated, truncated = results
        ids = (terminated | truncated).nonzero().squeeze(-1)
        if len(ids):
            initial, _ = env.reset(env_ids=ids)
            for group, value in root.items():
                value[ids] = initial[group][ids]
        yield results, root


def test_mjlab_equals_its_env_by_hand(make_mjlab):
    generator = torch.Generator().manual_seed(0)
    elapsed = torch.tensor([0, 5, 18, 18])
    actions = [3 * torch.randn(4, 12, generator=generator) for _ in range(40)]
    by_hand = list(mjlab_by_hand(make_mjlab(), actions, elapsed))
    env = load_example("simulators").from_mjlab(make_mjlab())
    assert env.signature.max_episode_steps == 20
    assert env.single_action_space.shape == (12,)
    td = env.reset(seed=3)
    env.elapsed_steps = elapsed
    flags = []
    for action, ((observation, *numbers), root) in zip(actions, by_hand, strict=True):
        transition, td = env.step(td.set("action", action))
        successor = transition["next"]
        for group, value in observation.items():
            assert (successor["observation", group] == value).all()
            assert (td["observation", group] == root[group]).all()
        for name, value in zip(("reward", "terminated", "truncated"), numbers, strict=True):
            assert (successor[name].squeeze(-1) == value).all()
        flags.append(torch.stack(numbers[1:]))
    terminated, truncated = torch.stack(flags).unbind(1)
    assert terminated.any()
    assert truncated.any()
    assert ((terminated | truncated).sum(-1) > 1).any()
    env.close()


def test_runner_of_rsl_rl_learns_on_mjlab_under_transforms(make_mjlab):
    main = load_example("simulators").main
    task = "Mjlab-Velocity-Flat-Unitree-Go1"
    env = main(task, num_envs=16, num_iterations=2, device="cpu")
    ends = T.RecordEpisodeStatistics.of(env)[0].episode_count
    assert ends > 0
    state = env.state_dict()
    counts = [state[name] for name in state if name.endswith("count")]
    assert len(counts) == 2
    for count in counts:  # initial observations, and successors
        assert count.unique().item() == 16 + 16 * 48 + ends
    env.close()
