"""examples/simulators.py: each recipe on a fake with its simulator's signatures.

The real mjlab is in test_tensors.py. A fake's docstring names the original, with the lines of the
version. All fakes play the same episodes; observations hold the row, the episode, and the step.
"""

import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from helpers import Held, load_example
from tensordict import TensorDict

simulators = load_example("simulators")

NUM_ENVS = 4
LIMIT = 6
LENGTHS = torch.tensor([3, 6, 99, 99])  # of episodes that terminate: the second one at the limit
START = torch.tensor([0, 5, 2, 2])
ROWS = torch.arange(NUM_ENVS)
VECTOR = Box(-np.inf, np.inf, (3,), np.float32)


class Fake:
    """Episodes, and buffers that are overwritten."""

    num_envs = NUM_ENVS
    device = "cpu"
    max_episode_length = LIMIT
    log_key = "log"

    def __init__(self):
        self.episode = torch.full((NUM_ENVS,), -1)
        self.episode_length_buf = torch.zeros(NUM_ENVS, dtype=torch.long)
        self.obs = torch.zeros(NUM_ENVS, 3)
        self.reward_buf = torch.zeros(NUM_ENVS)
        self.extras = {}
        self.seeds = []
        self.seed = self.seeds.append
        self.is_closed = False

    def start(self, rows):
        self.episode[rows] += 1
        self.episode_length_buf[rows] = 0
        # mjlab/envs/manager_based_rl_env.py, `_reset_idx`; Isaac Lab likewise
        self.extras[self.log_key] = {"Episode/lengths": LENGTHS[rows].float().mean()}

    def advance(self, action):
        assert action.shape == (NUM_ENVS, 2)
        self.episode_length_buf += 1
        self.terminated = self.episode_length_buf >= LENGTHS
        self.time_outs = self.episode_length_buf >= LIMIT
        self.reward_buf[:] = self.episode_length_buf

    def observe(self):
        parts = torch.stack([ROWS, self.episode, self.episode_length_buf], 1)
        return self.obs.copy_(parts)

    def results(self, observation):
        return (
            observation,
            self.reward_buf,
            self.terminated,
            self.time_outs,
            self.extras,
        )

    def close(self):
        self.is_closed = True


class Mjlab(Fake):
    """mjlab 1.6.0, `ManagerBasedRlEnv` without auto-reset.

    mjlab/envs/manager_based_rl_env.py, `reset` (358), `step` (386); spaces: mjlab/utils/spaces.py.
    """

    def __init__(self):
        super().__init__()
        box = {"dtype": "float32", "low": -np.inf, "high": np.inf}
        actor = SimpleNamespace(shape=(3,), **box)
        self.cfg = SimpleNamespace(auto_reset=False)
        self.pending = torch.zeros(NUM_ENVS, dtype=torch.bool)
        self.single_observation_space = SimpleNamespace(spaces={"actor": actor})
        self.single_action_space = SimpleNamespace(shape=(2,), **box)

    def reset(self, *, seed=None, env_ids=None, options=None):
        self.start(env_ids)
        self.pending[env_ids] = False
        return {"actor": self.observe()}, self.extras

    def step(self, action):
        assert not self.pending.any()  # mjlab raises
        self.advance(action)
        self.pending = self.terminated | self.time_outs
        return self.results({"actor": self.observe()})


class IsaacLab(Fake):
    """Isaac Lab 3.0.0, `ManagerBasedRLEnv`, the `unwrapped` of its wrapper; its `extras` persist.

    isaaclab/envs/manager_based_rl_env.py, `step` (205-281); manager_based_env.py, `reset` (403).
    """

    def __init__(self, compute_final_obs=True):
        super().__init__()
        self.unwrapped = self
        self.cfg = SimpleNamespace(compute_final_obs=compute_final_obs)
        self.single_observation_space = Dict(policy=VECTOR)
        self.single_action_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_manager = SimpleNamespace(compute=self.compute)

    def compute(self, update_history=False):
        return {"policy": self.observe().clone()}

    def reset(self, env_ids=slice(None), *, seed=None, options=None):
        self._reset_idx(env_ids)
        return {"policy": self.observe()}, self.extras

    def _reset_idx(self, env_ids):
        self.start(env_ids)

    def step(self, action):
        self.advance(action)
        ids = (self.terminated | self.time_outs).nonzero().squeeze(-1).int()
        if len(ids) > 0:
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self.observation_manager.compute()
            self._reset_idx(ids)
        return self.results({"policy": self.observe()})


class IsaacLab2(IsaacLab):
    """Isaac Lab 2.3.2, `ManagerBasedRLEnv`.

    isaaclab/envs/manager_based_rl_env.py, `step` (153-241), `_reset_idx` (349);
    manager_based_env.py, `reset` (341).
    """

    def __init__(self):
        super().__init__()
        self.cfg = SimpleNamespace()

    def reset(self, seed=None, env_ids=None, options=None):
        return super().reset(ROWS if env_ids is None else env_ids)


class IsaacLabDirect2(IsaacLab2):
    """Isaac Lab 2.3.2, `DirectRLEnv`.

    isaaclab/envs/direct_rl_env.py, `reset` (292), `step` (333-418), `_reset_idx` (607).
    """

    def __init__(self):
        super().__init__()
        del self.observation_manager

    def _get_observations(self):
        return {"policy": self.observe()}

    def reset(self, seed=None, options=None):
        return super().reset()


class ManiSkill(Fake):
    """ManiSkill 3.0.1, `BaseEnv`.

    mani_skill/envs/sapien_env.py, `elapsed_steps` (489), `reset` (857), `step` (1042). Its limit is
    in the `TimeLimitWrapper` of mani_skill/utils/registration.py (127).
    """

    def __init__(self):
        super().__init__()
        self.single_observation_space = VECTOR
        self.single_action_space = Box(-1, 1, (2,))
        self.elapsed_steps = self.episode_length_buf = self.episode_length_buf.int()

    def reset(self, seed=None, options=None):
        if seed is not None:
            assert len(seed) == NUM_ENVS
            self.seed(seed[0])
        self.start(options["env_idx"])
        return self.observe(), {}

    def step(self, action):
        self.advance(action)
        no = torch.zeros(NUM_ENVS, dtype=torch.bool)
        return self.observe(), self.reward_buf, self.terminated, no, {}


class ManiSkillTimeLimit(gymnasium.Wrapper):
    """See `ManiSkill`."""

    unwrapped = property(lambda self: self.env)

    def __init__(self, env):
        self.env = env
        self._max_episode_steps = LIMIT

    def get_wrapper_attr(self, name):
        return vars(self)[name]


class Genesis(Fake):
    """`Go2Env` of Genesis 0.4.5; it truncates one step later.

    To run it with Genesis 1.4.5, its option `max_FPS` was renamed `refresh_rate`.
    examples/locomotion/go2_env.py at commit 7bf5f6a, `step` (157), `get_observations` (208),
    `_reset_idx` (211) with a mask, `_update_observation` (262).
    """

    num_actions = 2
    max_episode_length = LIMIT - 1
    log_key = "episode"

    def __init__(self):
        super().__init__()
        self._reset_idx()
        self._update_observation()

    def _update_observation(self):
        self.obs_buf = self.observe()

    def get_observations(self):
        return TensorDict({"policy": self.obs_buf}, batch_size=[NUM_ENVS])

    def _reset_idx(self, envs_idx=None):
        self.start(slice(None) if envs_idx is None else envs_idx)

    def step(self, actions):
        self.advance(actions)
        self.reset_buf = self.terminated | self.time_outs
        self.extras["time_outs"] = self.time_outs.float()
        self._reset_idx(self.reset_buf)
        self._update_observation()
        return (
            self.get_observations(),
            self.reward_buf,
            self.reset_buf,
            self.extras,
        )


class Newton(Fake):
    """Newton 1.8.0. Positions hold the row and the episode, velocities the steps.

    newton/_src/utils/selection.py, `ArticulationView` with `get_dof_positions` (2087),
    `set_dof_positions` (2099), velocities (2115, 2127), `set_dof_forces` (2155), `eval_fk` (2255);
    newton/_src/solvers/solver.py, `step` (1162).
    """

    world_count = NUM_ENVS

    def __init__(self):
        super().__init__()
        self.model = SimpleNamespace(state=self._state, control=SimpleNamespace, device="cpu")
        self.evaluated = []

    def _state(self):
        q, qd = torch.zeros(2, NUM_ENVS, 1, 2)
        return SimpleNamespace(q=q, qd=qd, clear_forces=lambda: None)

    def get_dof_positions(self, source):
        return source.q

    def get_dof_velocities(self, source):
        return source.qd

    def set_dof_positions(self, target, values, mask=None):
        self.start(mask)
        target.q[mask] = values[mask]

    def set_dof_velocities(self, target, values, mask=None):
        target.qd[mask] = values[mask]

    def set_dof_forces(self, target, values, mask=None):
        assert values.shape == (NUM_ENVS, 1, 2)
        target.force = values

    def eval_fk(self, state, mask=None):
        self.evaluated.append(mask.tolist())

    def step(self, state_in, state_out, control, contacts, dt):
        assert control.force is not None
        assert state_in is not state_out
        state_out.q.copy_(state_in.q)
        state_out.qd.copy_(state_in.qd + dt)
        self.episode_length_buf.copy_(state_out.qd[:, 0, 0].round())

    def initial(self):
        rows = torch.stack([ROWS, self.episode + 1], 1).float()
        return torch.cat([rows, torch.zeros(NUM_ENVS, 2)], 1)


def from_newton(fake):
    return simulators.from_newton(
        fake,
        fake,
        lambda seen: seen[:, 2],
        lambda seen: seen[:, 2] >= LENGTHS,
        fake.initial,
        num_substeps=2,
        dt=0.5,
        max_episode_steps=LIMIT,
        seed=fake.seed,
        close=fake.close,
    )


def from_maniskill(fake):
    return simulators.from_maniskill(ManiSkillTimeLimit(fake))


# The fake, its recipe, and the key of its observations.
CASES = {
    "mjlab": (Mjlab, simulators.from_mjlab, "actor"),
    "Isaac Lab 3": (IsaacLab, simulators.from_isaac_lab, "policy"),
    "Isaac Lab 2.3": (IsaacLab2, simulators.from_isaac_lab, "policy"),
    "Isaac Lab 2.3, direct": (
        IsaacLabDirect2,
        simulators.from_isaac_lab,
        "policy",
    ),
    "ManiSkill": (ManiSkill, from_maniskill, None),
    "Genesis": (Genesis, simulators.from_genesis, "policy"),
    "Newton": (Newton, from_newton, None),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request, monkeypatch):
    """The fake, its env, and a function that reads row, episode and step from an observation."""
    make, recipe, key = request.param
    warp = SimpleNamespace(
        to_torch=lambda array: array,
        device_to_torch=lambda device: device,
    )
    monkeypatch.setitem(sys.modules, "warp", warp)

    def read(td):
        observation = td["observation"] if key is None else td["observation", key]
        return observation[:, :3].tolist()

    with torch.random.fork_rng():  # because some recipes seed it
        fake = make()
        yield fake, recipe(fake), read


LOGGING = ["mjlab", "Isaac Lab 3", "Isaac Lab 2.3", "Genesis"]


@pytest.mark.parametrize("name", LOGGING)
def test_log_of_a_step_is_that_of_the_episodes_that_ended_in_it(name):
    make, recipe, _ = CASES[name]
    with torch.random.fork_rng():
        env = recipe(make())
        env.reset(seed=7)
        for _ in range(3):
            env.step(env.sample_action())  # the episode of env 0 ends in the last one
    assert env.last_info[make.log_key]["Episode/lengths"] == 3


def numbers(episode, elapsed):
    return torch.stack([ROWS, episode, elapsed], 1).tolist()


def test_transitions_are_those_of_the_simulator(case):
    fake, env, read = case
    assert env.signature.max_episode_steps == LIMIT
    td = env.reset(seed=7)
    held = Held()
    episode = fake.episode.clone()
    elapsed = torch.zeros(NUM_ENVS, dtype=torch.long)
    assert read(td) == numbers(episode, elapsed)
    if not isinstance(fake, Newton):  # it has the steps in its state
        env.elapsed_steps = START
        elapsed = START.clone()
    num_ends = set()
    for _ in range(30):
        elapsed += 1
        terminated = elapsed >= LENGTHS
        truncated = elapsed >= LIMIT
        done = terminated | truncated
        transition, td = env.step(td.set("action", env.sample_action()))
        held.add(transition.clone(False), td.clone(False))
        successor = transition["next"]
        assert read(successor) == numbers(episode, elapsed)
        assert successor["reward"].flatten().tolist() == elapsed.tolist()
        if isinstance(fake, Genesis):  # its time-outs are part of its dones
            terminated &= ~truncated
        assert successor["terminated"].flatten().tolist() == terminated.tolist()
        assert successor["truncated"].flatten().tolist() == truncated.tolist()
        episode += done
        elapsed = torch.where(done, 0, elapsed)
        assert read(td) == numbers(episode, elapsed)
        assert env.elapsed_steps.tolist() == elapsed.tolist()
        num_ends.add(int(done.sum()))
        held.assert_unchanged()
    assert 0 in num_ends
    assert len(num_ends) >= 3


def test_step_of_isaac_lab_2_leaves_its_methods_as_they_were():
    fake = IsaacLab2()
    env = simulators.from_isaac_lab(fake)
    env.reset()
    env.step(env.sample_action())
    assert fake._reset_idx.__func__ is IsaacLab._reset_idx


def test_seed_and_close_reach_the_simulator(case):
    fake, env, _ = case
    env.reset()
    env.reset(seed=8)
    if isinstance(fake, Genesis | ManiSkill):  # they draw from PyTorch's generator
        assert torch.initial_seed() == 8
    if not isinstance(fake, Genesis):
        assert fake.seeds[-1] == 8
    env.close()
    assert fake.is_closed != isinstance(fake, Genesis)  # it has nothing to close


def test_masked_reset_reaches_the_simulator(case):
    fake, env, read = case
    env.reset()
    env.step(env.sample_action())
    mask = torch.tensor([False, True, False, True])
    episode = fake.episode.clone()
    if isinstance(fake, IsaacLabDirect2):
        with pytest.raises(TypeError, match="env_ids"):
            env.reset(mask=mask)
        return
    td = env.reset(mask=mask)
    assert (fake.episode == episode + mask).all()
    assert read(td) == numbers(episode + mask, 1 - mask.long())
    if isinstance(fake, Newton):
        assert fake.evaluated[-1] == mask.tolist()  # positions, where episodes start


def test_mjlab_may_have_no_limit_but_no_auto_reset():
    mjlab = Mjlab()
    mjlab.max_episode_length = 0
    assert simulators.from_mjlab(mjlab).signature.max_episode_steps is None
    mjlab.cfg.auto_reset = True
    with pytest.raises(ValueError, match="auto_reset"):
        simulators.from_mjlab(mjlab)


def test_isaac_lab_without_final_observations_is_refused():
    with pytest.raises(ValueError, match="compute_final_obs"):
        simulators.from_isaac_lab(IsaacLab(compute_final_obs=False))
    fake = IsaacLab()
    env = simulators.from_isaac_lab(fake)
    env.reset()
    for _ in range(3):
        env.step(env.sample_action())
    fake.cfg.compute_final_obs = False  # like the reset button of its window
    with pytest.raises(ValueError, match="final_obs"):
        for _ in range(3):
            env.step(env.sample_action())


class Puffer:
    """PufferLib 3.0.0, `PufferEnv`: rows end after 2 and 3 steps, and start again in `step`.

    pufferlib/pufferlib.py; `reset` and `step` as in pufferlib/ocean/squared/squared.py, on buffers
    that the C code writes.
    """

    num_agents = 2
    emulated = False
    single_observation_space = Box(0, 255, (2,), np.uint8)
    single_action_space = Discrete(5)

    def __init__(self):
        self.observations = np.zeros((2, 2), np.uint8)
        self.rewards = np.zeros(2, np.float32)
        self.terminals = np.zeros(2, bool)
        self.truncations = np.zeros(2, bool)
        self.is_closed = False

    def reset(self, seed=0):
        self.observations[:] = [
            [seed, 0],
            [seed, 0],
        ]  # the episode, and the step in it
        return self.observations, []

    def step(self, actions):
        assert isinstance(actions, np.ndarray)
        assert actions.shape == (2,)
        self.observations[:, 1] += 1
        self.rewards[:] = actions
        self.terminals[:] = self.observations[:, 1] == [2, 3]
        self.observations[self.terminals, 0] += 1
        self.observations[self.terminals, 1] = 0
        return (
            self.observations,
            self.rewards,
            self.terminals,
            self.truncations,
            [],
        )

    def close(self):
        self.is_closed = True


# Successors, roots, and whether the row is terminated. Where PufferLib loses the final observation,
# the successor repeats the one before.
PUFFER_STEPS = [
    ([[7, 1], [7, 1]], [[7, 1], [7, 1]], [False, False]),
    ([[7, 1], [7, 2]], [[8, 0], [7, 2]], [True, False]),
    ([[8, 1], [7, 2]], [[8, 1], [8, 0]], [False, True]),
    ([[8, 1], [8, 1]], [[9, 0], [8, 1]], [True, False]),
]


def test_pufferlib_repeats_the_observation_before_a_lost_final_one():
    env = simulators.from_pufferlib(Puffer())
    held = Held()
    action = torch.tensor([4, 1])
    td = env.reset(seed=7)
    assert td["observation"].tolist() == [[7, 0], [7, 0]]
    for observation, root, terminated in PUFFER_STEPS:
        transition, td = env.step(td.set("action", action))
        held.add(transition.clone(False), td.clone(False))
        successor = transition["next"]
        assert successor["observation"].tolist() == observation
        assert td["observation"].tolist() == root
        assert successor["terminated"].flatten().tolist() == terminated
        assert not successor["truncated"].any()
        assert successor["reward"].flatten().tolist() == action.tolist()
        held.assert_unchanged()
    assert env.reset()["observation"].tolist() == [
        [8, 0],
        [8, 0],
    ]  # without a seed as well


def test_pufferlib_has_no_masked_reset_and_no_emulation():
    fake = Puffer()
    env = simulators.from_pufferlib(fake)
    env.reset(seed=7)
    with pytest.raises(ValueError, match="mask"):
        env.reset(mask=torch.tensor([True, False]))
    env.close()
    assert fake.is_closed
    fake.emulated = {"observation_dtype": "uint8"}
    with pytest.raises(ValueError, match="PufferLib"):
        simulators.from_pufferlib(fake)
