"""Simulators on tensors: their functions under torchwrap's auto-reset, against such a simulator that is stepped by hand."""

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

BOX, ACTIONS = S.Box(-np.inf, np.inf, (3,), np.float32), S.Box(-1, 1, (3,), np.float32)
PARTS = torch.tensor([[True, False], [False, True], [True, True]])  # terminated, truncated
ENDINGS = {"terminated": 0, "truncated": 1, "both": 2, "in turn": None}


class Simulator:
    """A random walk in buffers that it overwrites. Episodes end after a random number of steps, or all after `length`.

    Row i draws from the seed plus i. The simulator keeps the actions it is given, and what it returned, and erases both.
    """

    def __init__(
        self,
        num_envs=5,
        ending="in turn",
        length=None,
        auto_reset=False,
        flags=torch.bool,
        shape=(-1,),
    ):
        self.num_envs, self.ending, self.length, self.auto_reset = (
            num_envs,
            ENDINGS[ending],
            length,
            auto_reset,
        )
        self.flags, self.shape = flags, shape
        self.seeds, self.episode = torch.arange(num_envs), torch.full((num_envs,), -1)
        self.elapsed, self.end = (
            torch.zeros(num_envs, dtype=torch.int32),
            torch.zeros(num_envs, dtype=torch.int64),
        )
        self.position, self.observation, self.final = (torch.zeros(num_envs, 3) for _ in range(3))
        self.reward, self.terminated, self.truncated = (
            torch.zeros(num_envs, dtype=t) for t in (torch.float32, flags, flags)
        )
        self.actions, self.returned, self.resets, self.is_closed = None, [], [], False

    def seed(self, seed):
        self.seeds, self.episode = (
            seed + torch.arange(self.num_envs),
            torch.full((self.num_envs,), -1),
        )

    def draw(self, number):
        return (
            (torch.sin(12.9898 * self.seeds + 78.233 * self.episode + 3.1 * number) * 43758.5453)
            .frac()
            .abs()
            .float()
        )

    def start(self, rows):
        self.episode[rows] += 1
        self.elapsed[rows] = 0
        self.position[rows] = torch.stack([self.draw(number) for number in range(3)], 1)[rows]
        end = (
            1 + (8 * self.draw(3)).long()
            if self.length is None
            else torch.full((self.num_envs,), self.length)
        )
        self.end[rows] = end[rows]

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
        kind = torch.full_like(self.end, self.ending) if self.ending is not None else self.end % 3
        terminated, truncated = (PARTS[kind] & (self.elapsed >= self.end).unsqueeze(-1)).unbind(-1)
        self.terminated.copy_(terminated)
        self.truncated.copy_(truncated)
        self.reward.copy_(self.position.sum(-1))
        info = {"steps": self.elapsed.clone(), "vector": self.position}
        done = terminated | truncated
        if self.auto_reset and done.any():
            info["final_obs"] = self.final.copy_(self.position).masked_fill_(
                ~done.unsqueeze(-1), torch.nan
            )
            self.start(done)
        self.observation.copy_(self.position)
        columns = (
            column.reshape(self.shape) for column in (self.reward, self.terminated, self.truncated)
        )
        return self.observation, *columns, info

    def close(self):
        self.is_closed = True


def wrap(simulator, **kwargs):
    final_key = "final_obs" if simulator.auto_reset else None
    arguments = {"seed": simulator.seed, "close": simulator.close, "final_key": final_key, **kwargs}
    return from_functions(
        simulator.reset, simulator.step, simulator.num_envs, BOX, ACTIONS, **arguments
    )


def make(num_envs=5, ending="in turn", length=None, auto_reset=False, **kwargs):
    return wrap(Simulator(num_envs, ending, length, auto_reset), **kwargs)


def by_hand(simulator, actions, seed, limit=None):
    """Steps and resets a simulator that does not reset itself: yields what a transition and the next root hold."""
    simulator.seed(seed)
    simulator.reset(torch.ones(simulator.num_envs, dtype=torch.bool))
    for action in actions:
        observation, reward, terminated, truncated, _ = simulator.step(action.clone())
        if limit is not None:
            truncated = truncated | (simulator.elapsed >= limit)
        values = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        expected = {name: value.clone() for name, value in values.items()}
        expected["done"] = terminated | truncated
        initial = simulator.reset(expected["done"].clone())
        yield {
            **expected,
            "root": torch.where(expected["done"].unsqueeze(-1), initial, expected["observation"]),
        }


def assert_equals_by_hand(env, simulator, num_steps=30, limit=None, seed=3):
    """Every transition and root is bit-identical. Returns the successors."""
    actions = [env.sample_action() for _ in range(num_steps)]
    td, successors = env.reset(seed=seed), []
    for action, expected in zip(actions, by_hand(simulator, actions, seed, limit), strict=True):
        transition, td = env.step(td.set("action", action.clone()))
        assert (
            transition["action"] == action
        ).all()  # the simulator erases the actions that it was given
        successors.append(transition["next"])
        got = {**successors[-1].to_dict(), "root": td["observation"]}
        for name, right in expected.items():
            assert (got[name].view_as(right) == right).all(), name
    return torch.stack(successors)


AUTO, IDS = {"auto_reset": True}, {"reset_by": "ids"}
each_reset = pytest.mark.parametrize("kwargs", [{}, IDS, AUTO, {**AUTO, **IDS}], ids=str)


# Steps and resets.


@each_reset
def test_steps_equal_the_simulator_by_hand_however_episodes_end(kwargs):
    for ending in ENDINGS:
        assert (
            assert_equals_by_hand(make(20, ending, **kwargs), Simulator(20, ending))["done"].sum()
            > 50
        )
        assert (
            assert_equals_by_hand(make(20, ending, 4, **kwargs), Simulator(20, ending, 4), 13)[
                "done"
            ].sum()
            == 60
        )
    env = make(3, length=99, **kwargs)
    assert not assert_equals_by_hand(env, Simulator(3, length=99))["done"].any()
    assert len(env.functions["reset"].__self__.resets) == 1


@each_reset
def test_steps_with_a_limit_equal_the_simulator_by_hand_whoever_counts(kwargs):
    for has_clock in (False, True):
        simulator = Simulator(7, auto_reset=kwargs.get("auto_reset", False))
        clock = (lambda simulator=simulator: simulator.elapsed) if has_clock else None
        env = wrap(
            simulator, clock=clock, max_episode_steps=4, reset_by=kwargs.get("reset_by", "mask")
        )
        assert env.signature.max_episode_steps == 4
        seen = assert_equals_by_hand(env, Simulator(7), limit=4)
        assert seen["done"].sum() > 50 and (seen["truncated"] & seen["terminated"]).any()


@each_reset
def test_env_keeps_the_contract(kwargs):
    check_env(functools.partial(make, info_keys=("steps",), **kwargs))


@each_reset
def test_transition_resets_nothing_and_a_masked_reset_does(kwargs):
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
def test_reset_reaches_the_rows_that_it_was_asked_for(auto_reset):
    simulator = Simulator(3, length=2, auto_reset=auto_reset)
    env = wrap(simulator, reset_by="ids")
    td = env.reset(seed=0)
    assert_same(env.reset(mask=torch.zeros(3, dtype=torch.bool)), td)
    assert len(simulator.resets) == 1  # none for no row
    for _ in range(2):
        transition, td = env.step_without_reset(td.set("action", env.sample_action()))
    assert transition["next", "done"].all()
    assert_same(
        env.reset(seed=5), make(3).reset(seed=5)
    )  # also in rows that the simulator has reset
    for _ in range(3):  # also in rows that step on after their end
        _, td = env.step_without_reset(td.set("action", env.sample_action()))
    env.reset()
    assert simulator.resets[-1] == [0, 1, 2] and simulator.elapsed.tolist() == [0, 0, 0]
    episodes = simulator.episode.clone()
    for _ in range(2):
        env.step(env.sample_action())
    env.reset()  # after an auto-reset, another episode
    assert simulator.resets[-1] == [0, 1, 2] and (simulator.episode == episodes + 2).all()


# Memory.


@each_reset
def test_results_own_their_memory(kwargs):
    env, held = make(16, info_keys=["steps"], **kwargs), Held()
    td = env.reset(seed=0)
    for _ in range(12):
        transition, td = env.step(td.set("action", env.sample_action()))
        held.add(transition.clone(False), td.clone(False))
        held.assert_unchanged()
    assert_no_overlap(transition, td)


def test_simulator_that_makes_new_tensors_is_not_copied():
    flags = torch.zeros(4, dtype=torch.bool)
    made = [torch.zeros(4, 3), torch.ones(4), flags, flags.clone()]
    env = from_functions(
        lambda rows: torch.zeros(4, 3),
        lambda action: (*made, {}),
        4,
        BOX,
        ACTIONS,
        reuses_memory=False,
    )
    env.reset()
    transition, _ = env.step_without_reset(env.sample_action())
    for name, value in zip(("observation", "reward", "terminated", "truncated"), made, strict=True):
        assert transition["next", name].data_ptr() == value.data_ptr()


# Values.


def test_rewards_and_flags_of_any_dtype_become_columns():
    for flags in (torch.bool, torch.uint8, torch.int64, torch.float32):
        for shape in ((-1,), (-1, 1)):
            assert_equals_by_hand(wrap(Simulator(flags=flags, shape=shape)), Simulator())


def test_info_keys_are_columns_of_numbers():
    env = make(info_keys=["steps"])
    td = env.reset(seed=0)
    for _ in range(6):
        elapsed = env.elapsed_steps
        transition, td = env.step(td.set("action", env.sample_action()))
        info = transition["next", "info"]
        assert (info["steps"] == 1.0 + elapsed.unsqueeze(-1)).all() and info[
            "steps"
        ].dtype == torch.float32
    assert list(env.info_spaces) == ["steps"]  # to_torchrl reads it


def test_nested_values_reach_the_functions_and_come_back():
    def observe(turn, many):
        image = turn.int().view(-1, 1, 1).expand(4, 2, 2)
        return {
            "a": image,
            "b": {"0": torch.stack([turn, many[:, 0]], 1), "1": many[:, 1]},
            "more": turn,
        }

    def reset(rows):
        return observe(torch.zeros(4, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long))

    def step(action):
        assert type(action) is dict
        no = torch.zeros(4)
        return observe(action["turn"], action["push"]["0"]), action["push"]["1"], no, no, {}

    assert_nested_values_pass(from_functions(reset, step, 4, NESTED, NESTED_ACTIONS))


# Clocks and seeds.


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("has_clock", [False, True])
def test_elapsed_steps_move_the_limit_whoever_counts(has_clock, auto_reset):
    simulator = Simulator(3, "terminated", 100, auto_reset)
    env = wrap(
        simulator, clock=(lambda: simulator.elapsed) if has_clock else None, max_episode_steps=10
    )
    assert_elapsed_steps_move_the_limit(env)
    assert not has_clock or simulator.elapsed.tolist() == [1, 0, 9]
    assert (
        env.elapsed_steps.dtype == torch.int64
        and env.elapsed_steps.data_ptr() != simulator.elapsed.data_ptr()
    )


def test_seed_of_a_shard_is_shifted_and_bounded():
    seeds = []
    env = make(2, seed=seeds.append, first_index=5)
    env.reset(seed=3)
    env.reset(seed=2**31)
    env.reset()
    assert seeds == [8, 5]


def test_seed_without_a_function_that_takes_it_is_refused_before_anything_changes():
    simulator = Simulator()
    env = wrap(simulator, seed=None)
    needed = "TensorEnv.reset takes no seed without a function for it, but got 3: seed the simulator where it is made"
    with pytest.raises(ValueError, match=needed):
        env.reset(seed=3)
    assert simulator.resets == []
    env.reset()
    assert simulator.seeds.tolist() == [0, 1, 2, 3, 4] and isinstance(env.np_random_seed, int)


# Around it.


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


def test_arguments_that_do_not_fit_are_refused_at_construction():
    simulator = Simulator(2)
    good = dict(
        reset=simulator.reset,
        step=simulator.step,
        num_envs=2,
        observation_space=BOX,
        action_space=ACTIONS,
    )
    for kwargs, error, message in (
        (dict(reset=3), TypeError, "from_functions needs a function as reset, but got 3"),
        (
            dict(clock=torch.zeros(2)),
            TypeError,
            "from_functions needs a function as clock, but got tensor",
        ),
        (
            dict(observation_space=None),
            TypeError,
            "gymnasium Space as observation_space, but got None",
        ),
        (
            dict(reset_by="id"),
            ValueError,
            'from_functions needs reset_by="mask" or "ids", but got \'id\'',
        ),
        (dict(max_episode_steps=0), ValueError, "max_episode_steps as an integer of at least 1"),
        (dict(info_keys="steps"), TypeError, "info_keys as a list, but got the string 'steps'"),
        (dict(reuses_memory=1), TypeError, "reuses_memory"),
        (dict(device="nope"), ValueError, "from_functions needs a torch.device or its name"),
    ):
        with pytest.raises(error, match=message):
            from_functions(**{**good, **kwargs})


META = torch.zeros(2, 3, device="meta")


@pytest.mark.parametrize("function", ["reset", "step", "step's final observations"])
def test_observation_that_does_not_fit_is_refused_at_the_first_call(function):
    def step(action):
        return (
            result["step"],
            torch.zeros(2),
            done,
            done,
            {"final": result["step's final observations"]},
        )

    done = torch.ones(2, dtype=torch.bool)
    whole = r"observation of Box\(-inf, inf, \(3,\), float32\), .* \(2, 3\) on cpu, but got float32\[2, 2\]"
    for space, returned, got in (
        (BOX, torch.zeros(2, 2), whole),
        (BOX, torch.zeros(2, 3, dtype=torch.complex64), r"but got complex64\[2, 3\] on cpu"),
        (BOX, META, r"but got float32\[2, 3\] on meta"),
        (BOX, np.zeros((2, 3)), r"but got array"),
        (
            S.Box(0, 9, (3,), np.uint8),
            torch.zeros(2, 3),
            r"uint8\), a tensor .* but got float32\[2, 3\]",
        ),
        (
            S.Dict(a=BOX),
            {"b": torch.zeros(2, 3)},
            r"observation\['a'\] of .* but got {'b': float32\[2, 3\] on cpu}",
        ),
    ):
        good = tw.spaces.zeros(space, 2)
        result = {
            name: returned if name == function else good
            for name in ("reset", "step", "step's final observations")
        }
        env = from_functions(
            lambda rows, result=result: result["reset"], step, 2, space, ACTIONS, final_key="final"
        )
        with pytest.raises(ValueError, match=f"from_functions needs {function} to return .*{got}"):
            env.reset()
            env.step(env.sample_action())


def test_step_that_does_not_fit_is_refused_at_the_first_call():
    vector = r"vector as one number per env.* but got float32\[2, 3\]"
    final = r"needs step to return info\['final'\] where an episode ends, but got an info with \['steps', 'vector'\]"
    for change, kwargs, error, message in (
        (
            lambda *values: values[:4],
            {},
            TypeError,
            r"step to return \(.*, info\) with a dict as info, but got \(float32",
        ),
        (
            lambda o, r, *values: (o, o, *values),
            {},
            ValueError,
            r"reward as one number per env.* but got float32\[2, 3\]",
        ),
        (
            lambda o, r, t, *values: (o, r, False, *values),
            {},
            ValueError,
            "terminated as one number per env.* but got False",
        ),
        (
            lambda o, r, t, u, info: (o, r, t, META[:, 0], info),
            {},
            ValueError,
            "truncated as one .* on meta",
        ),
        (
            lambda *values: values,
            {"info_keys": ["nope"]},
            ValueError,
            r"got \['nope'\]. It contains \['steps', 'vector'\]",
        ),
        (lambda *values: values, {"info_keys": ["vector"]}, ValueError, vector),
        (
            lambda o, r, t, *values: (o, r, t + 1, *values),
            {"final_key": "final"},
            ValueError,
            final,
        ),
    ):
        simulator = Simulator(2, length=9, flags=torch.uint8)
        env = from_functions(
            simulator.reset,
            lambda a, s=simulator, c=change: c(*s.step(a)),
            2,
            BOX,
            ACTIONS,
            **kwargs,
        )
        env.reset()
        with pytest.raises(error, match=message):
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
        cfg.scene.num_envs, cfg.auto_reset, cfg.seed = 4, False, 1
        cfg.episode_length_s = 0.4  # 20 steps
        cfg.terminations["fell_over"].params["limit_angle"] = 0.25
        return ManagerBasedRlEnv(cfg, device="cpu")

    return make


def mjlab_by_hand(env, actions, elapsed):
    """Steps and resets mjlab's env alone: yields what a transition and the next root hold."""
    env.reset(seed=3)
    env.episode_length_buf.copy_(elapsed)
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action.clone())
        values = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        expected = {**copy.deepcopy(values), "root": copy.deepcopy(observation)}
        ids = (terminated | truncated).nonzero().squeeze(-1)
        if len(ids):
            initial, _ = env.reset(env_ids=ids)
            for group, value in expected["root"].items():
                value[ids] = initial[group][ids]
        yield expected


def test_mjlab_equals_its_env_by_hand(make_mjlab):
    generator, elapsed = torch.Generator().manual_seed(0), torch.tensor([0, 5, 18, 18])
    actions = [3 * torch.randn(4, 12, generator=generator) for _ in range(40)]
    by_hand = list(mjlab_by_hand(make_mjlab(), actions, elapsed))
    env, ends = load_example("simulators").from_mjlab(make_mjlab()), []
    assert env.signature.max_episode_steps == 20 and env.single_action_space.shape == (12,)
    td = env.reset(seed=3)
    env.elapsed_steps = elapsed
    for action, expected in zip(actions, by_hand, strict=True):
        transition, td = env.step(td.set("action", action))
        successor = transition["next"]
        for group, value in expected["observation"].items():
            assert (successor["observation", group] == value).all()
            assert (td["observation", group] == expected["root"][group]).all()
        for name in ("reward", "terminated", "truncated"):
            assert (successor[name].squeeze(-1) == expected[name]).all()
        ends.append(torch.stack([expected["terminated"], expected["truncated"]]))
    terminated, truncated = torch.stack(ends).unbind(1)
    assert terminated.any() and truncated.any() and ((terminated | truncated).sum(-1) > 1).any()
    env.close()


def test_runner_of_rsl_rl_learns_on_mjlab_under_transforms(make_mjlab):
    env = load_example("simulators").main(
        "Mjlab-Velocity-Flat-Unitree-Go1", num_envs=16, num_iterations=2, device="cpu"
    )
    ends, rows = (
        T.RecordEpisodeStatistics.of(env)[0].episode_count,
        16 + 16 * 48,
    )  # initial observations, and successors
    counts = [
        value.unique().item() for name, value in env.state_dict().items() if name.endswith("count")
    ]
    assert ends > 0 and counts == [rows + ends, rows + ends]
    env.close()
