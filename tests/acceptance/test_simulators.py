"""examples/simulators.py: each recipe on a fake with the signatures of its simulator. The real mjlab is in test_tensors.py.

A fake's docstring names what it imitates, with the lines of the version. All of them play the same episodes, and their
observations tell the row, the number of the episode, and the steps in it.
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

NUM_ENVS, LIMIT = 4, 6
LENGTHS = torch.tensor([3, 6, 99, 99])  # of episodes that terminate: the second one at the limit
START = torch.tensor([0, 5, 2, 2])
VECTOR = Box(-np.inf, np.inf, (3,), np.float32)


class Rows:
    """What all fakes share: episodes, and buffers that are overwritten."""

    num_envs, device, max_episode_length = NUM_ENVS, "cpu", LIMIT

    def __init__(self):
        self.episode, self.episode_length_buf = (
            torch.full((NUM_ENVS,), -1),
            torch.zeros(NUM_ENVS, dtype=torch.long),
        )
        self.obs, self.reward_buf, self.extras = torch.zeros(NUM_ENVS, 3), torch.zeros(NUM_ENVS), {}
        self.seeds, self.seed, self.is_closed = [], lambda seed: self.seeds.append(seed), False

    def start(self, rows):
        self.episode[rows] += 1
        self.episode_length_buf[rows] = 0

    def advance(self, action):
        assert action.shape == (NUM_ENVS, 2)
        self.episode_length_buf += 1
        self.terminated, self.time_outs = (
            self.episode_length_buf >= LENGTHS,
            self.episode_length_buf >= LIMIT,
        )
        self.reward_buf[:] = self.episode_length_buf

    def observe(self):
        return self.obs.copy_(
            torch.stack([torch.arange(NUM_ENVS), self.episode, self.episode_length_buf], 1)
        )

    def results(self, observation):
        return observation, self.reward_buf, self.terminated, self.time_outs, self.extras

    def close(self):
        self.is_closed = True


class Mjlab(Rows):
    """mjlab 1.6.0, `ManagerBasedRlEnv` without auto-reset: mjlab/envs/manager_based_rl_env.py, `reset` (358), `step` (386);
    spaces: mjlab/utils/spaces.py.
    """

    def __init__(self):
        super().__init__()
        box = {"dtype": "float32", "low": -np.inf, "high": np.inf}
        self.cfg, self.pending = (
            SimpleNamespace(auto_reset=False),
            torch.zeros(NUM_ENVS, dtype=torch.bool),
        )
        self.single_observation_space = SimpleNamespace(
            spaces={"actor": SimpleNamespace(shape=(3,), **box)}
        )
        self.single_action_space = SimpleNamespace(shape=(2,), **box)

    def reset(self, *, seed=None, env_ids=None, options=None):
        self.start(env_ids)
        self.pending[env_ids] = False
        return {"actor": self.observe()}, self.extras

    def step(self, action):
        if self.pending.any():
            raise RuntimeError(
                "Environments must be reset via reset(env_ids=...) before calling step() again."
            )
        self.advance(action)
        self.pending = self.terminated | self.time_outs
        return self.results({"actor": self.observe()})


class IsaacLab(Rows):
    """Isaac Lab 3.0.0, `ManagerBasedRLEnv`: isaaclab/envs/manager_based_rl_env.py, `step` (205-281);
    isaaclab/envs/manager_based_env.py, `reset` (403). Its wrapper has it as `unwrapped`, and its `extras` persist.
    """

    def __init__(self, compute_final_obs=True):
        super().__init__()
        self.unwrapped, self.cfg = self, SimpleNamespace(compute_final_obs=compute_final_obs)
        self.single_observation_space = Dict(policy=VECTOR)
        self.single_action_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_manager = SimpleNamespace(
            compute=lambda update_history=False: {"policy": self.observe().clone()}
        )

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
    """Isaac Lab 2.3.2, `ManagerBasedRLEnv`: isaaclab/envs/manager_based_rl_env.py, `step` (153-241), `_reset_idx` (349);
    isaaclab/envs/manager_based_env.py, `reset` (341).
    """

    def __init__(self):
        super().__init__()
        self.cfg = SimpleNamespace()

    def reset(self, seed=None, env_ids=None, options=None):
        return super().reset(torch.arange(NUM_ENVS) if env_ids is None else env_ids)


class IsaacLabDirect2(IsaacLab2):
    """Isaac Lab 2.3.2, `DirectRLEnv`: isaaclab/envs/direct_rl_env.py, `reset` (292), `step` (333-418), `_reset_idx` (607)."""

    def __init__(self):
        super().__init__()
        del self.observation_manager

    def _get_observations(self):
        return {"policy": self.observe()}

    def reset(self, seed=None, options=None):
        return super().reset()


class ManiSkill(Rows):
    """ManiSkill 3.0.1, `BaseEnv`: mani_skill/envs/sapien_env.py, `elapsed_steps` (489), `reset` (857), `step` (1042). Its time
    limit is in the `TimeLimitWrapper` of mani_skill/utils/registration.py (127).
    """

    def __init__(self):
        super().__init__()
        self.single_observation_space, self.single_action_space = VECTOR, Box(-1, 1, (2,))
        self.elapsed_steps = self.episode_length_buf = self.episode_length_buf.int()

    def reset(self, seed=None, options=None):
        assert seed is None or len(seed) == NUM_ENVS
        self.seeds += [] if seed is None else [seed[0]]
        self.start(options["env_idx"])
        return self.observe(), {}

    def step(self, action):
        self.advance(action)
        return (
            self.observe(),
            self.reward_buf,
            self.terminated,
            torch.zeros(NUM_ENVS, dtype=torch.bool),
            {},
        )


class ManiSkillTimeLimit(gymnasium.Wrapper):
    """See `ManiSkill`."""

    def __init__(self, env):
        self.env, self._max_episode_steps = env, LIMIT

    unwrapped = property(lambda self: self.env)

    def get_wrapper_attr(self, name):
        return vars(self)[name]


class Genesis(Rows):
    """Genesis 0.4.5, `Go2Env`: examples/locomotion/go2_env.py at commit 7bf5f6a, `step` (157), `get_observations` (208),
    `_reset_idx` (211) with a mask, `_update_observation` (262). It truncates one step later.
    """

    num_actions, max_episode_length = 2, LIMIT - 1

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
        return self.get_observations(), self.reward_buf, self.reset_buf, self.extras


class Newton(Rows):
    """Newton 1.8.0: newton/_src/utils/selection.py, `ArticulationView` with `get_dof_positions` (2087), `set_dof_positions`
    (2099), velocities (2115, 2127), `set_dof_forces` (2155), `eval_fk` (2255); newton/_src/solvers/solver.py, `step` (1162).

    Positions are those of the row and the episode, velocities the steps.
    """

    world_count = NUM_ENVS

    def __init__(self):
        super().__init__()
        self.model = SimpleNamespace(
            state=self._state, control=lambda: SimpleNamespace(), device="cpu"
        )
        self.force, self.evaluated = None, []

    def _state(self):
        return SimpleNamespace(
            q=torch.zeros(NUM_ENVS, 1, 2), qd=torch.zeros(NUM_ENVS, 1, 2), clear_forces=lambda: None
        )

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
        assert control.force is not None and state_in is not state_out
        state_out.q.copy_(state_in.q)
        state_out.qd.copy_(state_in.qd + dt)
        self.episode_length_buf.copy_(state_out.qd[:, 0, 0].round())

    def initial(self):
        rows = torch.stack([torch.arange(NUM_ENVS), self.episode + 1], 1).float()
        return torch.cat([rows, torch.zeros(NUM_ENVS, 2)], 1)


def newton(monkeypatch):
    fake = Newton()
    warp = SimpleNamespace(to_torch=lambda array: array, device_to_torch=lambda device: device)
    monkeypatch.setitem(sys.modules, "warp", warp)
    parts = (lambda seen: seen[:, 2]), (lambda seen: seen[:, 2] >= LENGTHS), fake.initial
    around = dict(max_episode_steps=LIMIT, seed=fake.seed, close=fake.close)
    return fake, simulators.from_newton(fake, fake, *parts, num_substeps=2, dt=0.5, **around)


def with_recipe(make, recipe, wrap=lambda fake: fake):
    fake = make()
    return fake, recipe(wrap(fake))


MAKE = {
    "mjlab": lambda _: with_recipe(Mjlab, simulators.from_mjlab),
    "Isaac Lab 3": lambda _: with_recipe(IsaacLab, simulators.from_isaac_lab),
    "Isaac Lab 2.3": lambda _: with_recipe(IsaacLab2, simulators.from_isaac_lab),
    "Isaac Lab 2.3, direct": lambda _: with_recipe(IsaacLabDirect2, simulators.from_isaac_lab),
    "ManiSkill": lambda _: with_recipe(ManiSkill, simulators.from_maniskill, ManiSkillTimeLimit),
    "Genesis": lambda _: with_recipe(Genesis, simulators.from_genesis),
    "Newton": newton,
}
KEYS = {"mjlab": "actor", "ManiSkill": None, "Newton": None}


@pytest.fixture(params=MAKE)
def case(request, monkeypatch):
    """The fake, its env, and a function that takes the row, the episode and the steps out of an observation."""
    key = KEYS.get(request.param, "policy")
    with torch.random.fork_rng():  # because some recipes seed it
        made = MAKE[request.param](monkeypatch)
        yield (
            *made,
            lambda td: (td["observation"] if key is None else td["observation", key])[:, :3],
        )


def test_transitions_are_those_of_the_simulator(case):
    fake, env, rows = case
    td, held = env.reset(seed=7), Held()
    episode = fake.episode.clone()
    assert rows(td).tolist() == [[row, episode[row], 0] for row in range(NUM_ENVS)]
    elapsed = torch.zeros(NUM_ENVS, dtype=torch.long)
    if not isinstance(fake, Newton):  # whose steps are in its state
        env.elapsed_steps = START
        elapsed = START.clone()
    seen = set()
    for _ in range(30):
        elapsed += 1
        terminated, truncated = elapsed >= LENGTHS, elapsed >= LIMIT
        transition, td = env.step(td.set("action", env.sample_action()))
        held.add(transition.clone(False), td.clone(False))
        successor, done = transition["next"], terminated | truncated
        assert (
            rows(successor).tolist()
            == torch.stack([torch.arange(NUM_ENVS), episode, elapsed], 1).tolist()
        )
        assert successor["reward"].flatten().tolist() == elapsed.tolist()
        if isinstance(fake, Genesis):  # its time-outs are part of its dones
            terminated &= ~truncated
        assert successor["terminated"].flatten().tolist() == terminated.tolist()
        assert successor["truncated"].flatten().tolist() == truncated.tolist()
        episode, elapsed = episode + done, torch.where(done, 0, elapsed)
        assert (
            rows(td).tolist() == torch.stack([torch.arange(NUM_ENVS), episode, elapsed], 1).tolist()
        )
        assert env.elapsed_steps.tolist() == elapsed.tolist()
        seen.add(int(done.sum()))
        held.assert_unchanged()
    if isinstance(fake, IsaacLab2):
        assert (
            "_reset_idx" not in vars(fake) or fake._reset_idx.__func__ is IsaacLab._reset_idx
        )  # as before the step
    assert 0 in seen and len(seen) >= 3 and env.signature.max_episode_steps == LIMIT


def test_seed_masked_reset_and_close_reach_the_simulator(case):
    fake, env, rows = case
    env.reset()
    td = env.reset(seed=8)
    if isinstance(fake, Genesis | ManiSkill):  # they draw from PyTorch's generator
        assert torch.initial_seed() == 8
    assert fake.seeds[-1:] == ([] if isinstance(fake, Genesis) else [8])
    _, td = env.step(td.set("action", env.sample_action()))
    mask, episode = torch.tensor([False, True, False, True]), fake.episode.clone()
    if isinstance(fake, IsaacLabDirect2):
        with pytest.raises(TypeError, match="env_ids"):
            env.reset(mask=mask)
    else:
        td = env.reset(mask=mask)
        assert (fake.episode == episode + mask).all()
        assert rows(td).tolist() == [
            [row, episode[row] + mask[row], 1 - int(mask[row])] for row in range(NUM_ENVS)
        ]
    if isinstance(fake, Newton):
        assert fake.evaluated[-1] == mask.tolist()  # positions, where episodes start
    env.close()
    assert fake.is_closed != isinstance(fake, Genesis)  # which has nothing to close


def test_configurations_that_lose_final_observations_are_refused_and_mjlab_may_have_no_limit():
    mjlab, lab = Mjlab(), IsaacLab()
    mjlab.max_episode_length = 0
    assert simulators.from_mjlab(mjlab).signature.max_episode_steps is None
    mjlab.cfg.auto_reset = True
    with pytest.raises(ValueError, match="auto_reset"):
        simulators.from_mjlab(mjlab)
    env = simulators.from_isaac_lab(lab)
    env.reset()
    for _ in range(3):
        env.step(env.sample_action())
    lab.cfg.compute_final_obs = False  # as where its window's button for a reset is pressed
    with pytest.raises(
        ValueError, match=r"needs step to return info\['final_obs'\] where an episode ends"
    ):
        for _ in range(3):
            env.step(env.sample_action())
    with pytest.raises(
        ValueError, match="compute_final_obs"
    ):
        simulators.from_isaac_lab(IsaacLab(compute_final_obs=False))


class Puffer:
    """PufferLib 3.0.0, a native `PufferEnv`: pufferlib/pufferlib.py; `reset` and `step` as pufferlib/ocean/squared/squared.py,
    on buffers that the C code writes: rows end after 2 and 3 steps, and `step` then starts the next episode.
    """

    num_agents, emulated = 2, False
    single_observation_space, single_action_space = Box(0, 255, (2,), np.uint8), Discrete(5)

    def __init__(self):
        self.observations, self.rewards = np.zeros((2, 2), np.uint8), np.zeros(2, np.float32)
        self.terminals, self.truncations = np.zeros(2, bool), np.zeros(2, bool)
        self.is_closed = False

    def reset(self, seed=0):
        self.observations[:] = [[seed, 0], [seed, 0]]  # the episode, and the step in it
        return self.observations, []

    def step(self, actions):
        assert isinstance(actions, np.ndarray) and actions.shape == (2,)
        self.observations[:, 1] += 1
        self.rewards[:] = actions
        self.terminals[:] = self.observations[:, 1] == [2, 3]
        self.observations[self.terminals, 0] += 1
        self.observations[self.terminals, 1] = 0
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def close(self):
        self.is_closed = True


def test_pufferlib_repeats_the_observation_before_where_it_loses_the_final_one():
    fake, held, action = Puffer(), Held(), torch.tensor([4, 1])
    env = simulators.from_pufferlib(fake)
    td = env.reset(seed=7)
    assert td["observation"].tolist() == [[7, 0], [7, 0]]
    for successors, roots, ends in (
        ([[7, 1], [7, 1]], [[7, 1], [7, 1]], [False, False]),
        ([[7, 1], [7, 2]], [[8, 0], [7, 2]], [True, False]),
        ([[8, 1], [7, 2]], [[8, 1], [8, 0]], [False, True]),
        ([[8, 1], [8, 1]], [[9, 0], [8, 1]], [True, False]),
    ):
        transition, td = env.step(td.set("action", action))
        held.add(transition.clone(False), td.clone(False))
        successor = transition["next"]
        assert (
            successor["observation"].tolist() == successors and td["observation"].tolist() == roots
        )
        assert (
            successor["terminated"].flatten().tolist() == ends and not successor["truncated"].any()
        )
        assert successor["reward"].flatten().tolist() == action.tolist()
        held.assert_unchanged()
    assert env.reset()["observation"].tolist() == [
        [8, 0],
        [8, 0],
    ]  # new episodes, without a seed as well
    with pytest.raises(ValueError, match="mask"):
        env.reset(mask=torch.tensor([True, False]))
    env.close()
    fake.emulated = {"observation_dtype": "uint8"}
    with pytest.raises(ValueError, match="PufferLib"):
        simulators.from_pufferlib(fake)
    assert fake.is_closed
