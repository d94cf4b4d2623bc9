"""from_functions: simulators on tensors under auto-reset, against one that is stepped by hand."""

import copy
import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces as S
from helpers import (
    Held,
    assert_no_overlap,
    assert_same,
    assert_transforms_compile,
    assert_transition_and_masked_reset_are_a_step,
    load_example,
    play,
)
from single_envs import (
    NESTED,
    NESTED_ACTIONS,
    assert_elapsed_steps_move_the_limit,
    assert_nested_values_pass,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.tensors import from_functions
from torchwrap.testing import check_env

BOX = S.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = S.Box(-1, 1, (3,), np.float32)
# Terminated and truncated, by the length of the episode unless one ending is asked for.
ENDINGS = {
    "terminated": (True, False),
    "truncated": (False, True),
    "both": (True, True),
}


class Simulator:
    """A random walk in buffers that it overwrites, with episodes of random or given length.

    Row i draws from the seed plus i. The simulator keeps actions and results, and erases both.
    """

    def __init__(
        self,
        num_envs=5,
        ending="in turn",
        length=None,
        auto_reset=False,
    ):
        self.num_envs = num_envs
        self.ending = ending
        self.length = length
        self.auto_reset = auto_reset
        self.seed(0)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int32)
        self.end = torch.zeros(num_envs, dtype=torch.int64)
        self.position = torch.zeros(num_envs, 3)
        self.observation = torch.zeros(num_envs, 3)
        self.final = torch.zeros(num_envs, 3)
        self.reward = torch.zeros(num_envs)
        self.flags = torch.zeros(num_envs, 2, dtype=torch.bool)
        self.actions = None
        self.resets = []
        self.is_closed = False

    def seed(self, seed):
        self.seeds = seed + torch.arange(self.num_envs)
        self.episode = torch.full((self.num_envs,), -1)

    def draw(self, number):
        phase = 12.9898 * self.seeds + 78.233 * self.episode + 3.1 * number
        return (torch.sin(phase) * 43758.5453).frac().abs().float()

    def start(self, rows):
        self.episode[rows] += 1
        self.elapsed[rows] = 0
        position = torch.stack([self.draw(number) for number in range(3)], 1)
        self.position[rows] = position[rows]
        self.end[rows] = 1 + (8 * self.draw(3)).long()[rows]
        if self.length is not None:
            self.end[rows] = self.length

    def reset(self, rows):
        self.resets.append(rows.tolist())
        self.start(rows)
        self.observation.fill_(torch.nan)  # in the other rows
        self.observation[rows] = self.position[rows]
        rows.zero_()
        return self.observation

    def step(self, action):
        if self.actions is not None:
            self.actions.zero_()
        self.actions = action
        self.position += 0.1 * torch.sin(action)
        self.elapsed += 1
        is_over = (self.elapsed >= self.end).unsqueeze(-1)
        flags = torch.tensor([*ENDINGS.values()])[self.end % 3]
        if self.ending != "in turn":
            flags = torch.tensor(ENDINGS[self.ending])
        self.flags.copy_(flags & is_over)
        self.reward.copy_(self.position.sum(-1))
        info = {"steps": self.elapsed.clone(), "vector": self.position}
        done = self.flags.any(-1)
        if self.auto_reset and done.any():
            self.final.fill_(torch.nan)
            self.final[done] = self.position[done]
            info["final_obs"] = self.final
            self.start(done)
        self.observation.copy_(self.position)
        return (
            self.observation,
            self.reward,
            *self.flags.unbind(-1),
            info,
        )

    def close(self):
        self.is_closed = True


def wrap(simulator, step=None, **kwargs):
    given = {"seed": simulator.seed, "close": simulator.close}
    if simulator.auto_reset:
        given["final_key"] = "final_obs"
    functions = simulator.reset, step or simulator.step
    return from_functions(
        *functions,
        simulator.num_envs,
        BOX,
        ACTIONS,
        **{**given, **kwargs},
    )


def make(
    num_envs=5,
    ending="in turn",
    length=None,
    auto_reset=False,
    **kwargs,
):
    return wrap(Simulator(num_envs, ending, length, auto_reset), **kwargs)


def by_hand(simulator, actions, seed, limit):
    """Steps and resets a simulator without auto-reset: yields the successor and the next root."""
    simulator.seed(seed)
    simulator.reset(torch.ones(simulator.num_envs, dtype=torch.bool))
    for action in actions:
        observation, reward, terminated, truncated, _ = simulator.step(action.clone())
        if limit is not None:
            truncated = truncated | (simulator.elapsed >= limit)
        done = terminated | truncated
        expected = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
        }
        expected = {name: value.clone() for name, value in expected.items()}
        initial = simulator.reset(done.clone())
        root = torch.where(done.unsqueeze(-1), initial, expected["observation"])
        yield expected, root


def assert_equals_by_hand(env, simulator, num_steps=30, limit=None, seed=3):
    """Every transition and root is bit-identical. Returns the successors."""
    actions = [env.sample_action() for _ in range(num_steps)]
    td = env.reset(seed=seed)
    successors = []
    for action, (expected, root) in zip(
        actions, by_hand(simulator, actions, seed, limit), strict=True
    ):
        transition, td = env.step(td.set("action", action.clone()))
        assert (transition["action"] == action).all()  # the simulator erases its arguments
        successors.append(transition["next"])
        for name, value in expected.items():
            assert (successors[-1][name].view_as(value) == value).all(), name
        assert (td["observation"] == root).all()
    return torch.stack(successors)


RESETS = {
    "mask": {},
    "ids": {"reset_by": "ids"},
    "auto-reset": {"auto_reset": True},
    "auto-reset, ids": {"auto_reset": True, "reset_by": "ids"},
}
each_reset = pytest.mark.parametrize("kwargs", RESETS.values(), ids=RESETS)


# Steps and resets.


@each_reset
@pytest.mark.parametrize("ending", [*ENDINGS, "in turn"])
def test_steps_equal_the_simulator_by_hand(kwargs, ending):
    seen = assert_equals_by_hand(make(20, ending, **kwargs), Simulator(20, ending))
    assert seen["done"].sum() > 50
    env = make(20, ending, 4, **kwargs)
    seen = assert_equals_by_hand(env, Simulator(20, ending, 4), 13)
    assert seen["done"].sum() == 60  # all in one step


@each_reset
def test_simulator_without_an_end_is_reset_once(kwargs):
    env = make(3, length=99, **kwargs)
    assert not assert_equals_by_hand(env, Simulator(3, length=99))["done"].any()
    assert len(env.functions["reset"].__self__.resets) == 1


@pytest.mark.parametrize("has_clock", [False, True])
@pytest.mark.parametrize("auto_reset", [False, True])
def test_steps_with_a_limit_equal_the_simulator_by_hand(has_clock, auto_reset):
    simulator = Simulator(7, auto_reset=auto_reset)
    clock = (lambda: simulator.elapsed) if has_clock else None
    env = wrap(simulator, clock=clock, max_episode_steps=4)
    assert env.signature.max_episode_steps == 4
    seen = assert_equals_by_hand(env, Simulator(7), limit=4)
    assert seen["done"].sum() > 50
    assert (seen["truncated"] & seen["terminated"]).any()


@each_reset
def test_env_keeps_the_contract(kwargs):
    check_env(functools.partial(make, info_keys=("steps",), **kwargs))


@each_reset
def test_step_without_reset_resets_nothing_and_a_masked_reset_does(
    kwargs,
):
    assert_transition_and_masked_reset_are_a_step(make(**kwargs), make())


def test_rows_that_the_simulator_has_reset_are_not_reset_again():
    simulator = Simulator(6, auto_reset=True)
    env = wrap(simulator, max_episode_steps=5)
    play(env, 20, env.reset(seed=0))
    assert any(any(rows) for rows in simulator.resets[1:])  # those that reach the limit
    simulator.resets.clear()
    env = wrap(simulator)
    play(env, 20, env.reset(seed=0))
    assert len(simulator.resets) == 1


@pytest.mark.parametrize("auto_reset", [False, True])
def test_reset_reaches_its_rows_alone(auto_reset):
    simulator = Simulator(3, length=2, auto_reset=auto_reset)
    env = wrap(simulator, reset_by="ids")

    def advance(num_steps):
        for _ in range(num_steps):
            transition, _ = env.step_without_reset(env.sample_action())
        return transition["next"]

    td = env.reset(seed=0)
    assert_same(env.reset(mask=torch.zeros(3, dtype=torch.bool)), td)
    assert len(simulator.resets) == 1  # none for no row
    assert advance(2)["done"].all()
    # Also rows that the simulator has reset, or else rows that step on after their end.
    assert_same(env.reset(seed=5), make(3).reset(seed=5))
    advance(1 if auto_reset else 3)
    env.reset()
    assert simulator.resets[-1] == [0, 1, 2]
    assert simulator.elapsed.tolist() == [0, 0, 0]
    episodes = simulator.episode.clone()
    for _ in range(2):
        env.step(env.sample_action())
    env.reset()  # after an auto-reset, another episode
    assert simulator.resets[-1] == [0, 1, 2]
    assert (simulator.episode == episodes + 2).all()


# Memory.


@each_reset
def test_results_own_their_memory(kwargs):
    env = make(16, info_keys=["steps"], **kwargs)
    held = Held()
    td = env.reset(seed=0)
    for _ in range(12):
        transition, td = env.step(td.set("action", env.sample_action()))
        held.add(transition.clone(False), td.clone(False))
        held.assert_unchanged()
    assert_no_overlap(transition, td)


def test_simulator_that_makes_new_tensors_is_not_copied():
    flags = torch.zeros(2, 4, dtype=torch.bool)
    made = torch.zeros(4, 3), torch.ones(4), *flags
    simulator = Simulator(4)
    env = wrap(simulator, lambda action: (*made, {}), reuses_memory=False)
    env.reset()
    transition, _ = env.step_without_reset(env.sample_action())
    for name, value in zip(
        ("observation", "reward", "terminated", "truncated"),
        made,
        strict=True,
    ):
        assert transition["next", name].data_ptr() == value.data_ptr()


def test_step_of_a_differentiable_simulator_has_no_graph():
    scale = torch.ones(4, 1, requires_grad=True)
    columns = scale, scale < 0, scale < 0, {"height": scale.squeeze(1)}
    made = scale.expand(4, 3), *columns
    env = wrap(Simulator(4), lambda action: made, reuses_memory=False, info_keys=["height"])
    env.reset()
    transition, td = env.step(env.sample_action())
    tensors = [*transition.values(True, True), *td.values(True, True)]
    assert [value for value in tensors if value.requires_grad] == []


# Values.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=str)
def test_rewards_and_flags_of_any_dtype_become_columns(dtype, shape):
    simulator = Simulator()

    def step(action):
        observation, reward, *flags, info = simulator.step(action)
        terminated, truncated = [flag.to(dtype).reshape(shape) for flag in flags]
        return (
            observation,
            reward.reshape(shape),
            terminated,
            truncated,
            info,
        )

    assert_equals_by_hand(wrap(simulator, step), Simulator())


def test_info_keys_are_columns_of_numbers():
    env = make(info_keys=["steps"])
    td = env.reset(seed=0)
    for _ in range(6):
        elapsed = env.elapsed_steps
        transition, td = env.step(td.set("action", env.sample_action()))
        steps = transition["next", "info", "steps"]
        assert steps.dtype == torch.float32
        assert (steps == 1.0 + elapsed.unsqueeze(-1)).all()


def test_nested_values_reach_the_functions_and_come_back():
    def observe(turn, many):
        return {
            "a": turn.int().view(-1, 1, 1).expand(4, 2, 2),
            "b": {
                "0": torch.stack([turn, many[:, 0]], 1),
                "1": many[:, 1],
            },
            "more": turn,
        }

    def reset(rows):
        return observe(
            torch.zeros(4, dtype=torch.long),
            torch.zeros(4, 2, dtype=torch.long),
        )

    def step(action):
        assert type(action) is dict
        no = torch.zeros(4)
        push = action["push"]
        return observe(action["turn"], push["0"]), push["1"], no, no, {}

    assert_nested_values_pass(from_functions(reset, step, 4, NESTED, NESTED_ACTIONS))


# Clocks, seeds and the end.


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("has_clock", [False, True])
def test_elapsed_steps_move_the_limit(has_clock, auto_reset):
    simulator = Simulator(3, "terminated", 100, auto_reset)
    clock = (lambda: simulator.elapsed) if has_clock else None
    env = wrap(simulator, clock=clock, max_episode_steps=10)
    assert_elapsed_steps_move_the_limit(env)
    assert env.elapsed_steps.dtype == torch.int64
    assert env.elapsed_steps.data_ptr() != simulator.elapsed.data_ptr()
    if has_clock:
        assert simulator.elapsed.tolist() == [1, 0, 9]


def test_seed_of_a_shard_is_shifted_and_bounded():
    seeds = []
    env = make(2, seed=seeds.append, first_index=5)
    env.reset(seed=3)
    env.reset(seed=2**31)
    env.reset()
    assert seeds == [8, 5]


def test_seed_without_a_function_for_it_is_refused_before_anything_changes():
    simulator = Simulator()
    env = wrap(simulator, seed=None)
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=3)
    assert simulator.resets == []
    env.reset()
    assert simulator.seeds.tolist() == [0, 1, 2, 3, 4]
    assert isinstance(env.np_random_seed, int)


def test_close_closes_the_simulator():
    simulator = Simulator()
    with wrap(simulator):
        assert not simulator.is_closed
    assert simulator.is_closed
    wrap(simulator, close=None).close()


@pytest.mark.full
def test_compile_compiles_the_transforms():
    assert_transforms_compile(lambda: make(20))


# Errors.

UNFIT = {
    "reset": (3, TypeError),
    "clock": (torch.zeros(2), TypeError),
    "reset_by": ("id", ValueError),
    "reuses_memory": (1, TypeError),
    "device": ("nope", ValueError),
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_argument_is_refused_at_construction(name):
    value, error = UNFIT[name]
    good = {
        "reset": Simulator().reset,
        "step": Simulator().step,
        "num_envs": 5,
        "observation_space": BOX,
        "action_space": ACTIONS,
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

    given = lambda rows: results["reset"], step, 2, space, ACTIONS
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
    simulator = Simulator(2, length=9)
    env = wrap(
        simulator,
        lambda action: change(*simulator.step(action)),
        **kwargs,
    )
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


def test_step_of_rows_that_the_simulator_has_reset_itself_raises():
    env = make(2, length=3, auto_reset=True)
    env.reset()
    for _ in range(3):
        env.step_without_reset(env.sample_action())
    with pytest.raises(RuntimeError, match=r"reset .*\[0, 1\]"):
        env.step(env.sample_action())
