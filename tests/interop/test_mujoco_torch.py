"""The recipe for mujoco-torch of examples/simulators.py, against MuJoCo and HalfCheetah."""

import os

import gymnasium
import numpy as np
import pytest
import torch

# It reads flags that other versions of MuJoCo lack.
pytest.importorskip("mujoco_torch", exc_type=(ImportError, AttributeError))

import mujoco
from helpers import load_example

from_mujoco_torch = load_example("simulators").from_mujoco_torch

# The tolerance of mujoco-torch's own tests of `step` (its test/forward_test.py), and of these.
STATED = {"atol": 1e-2, "rtol": 1e-3}
OURS = {"atol": 1e-6, "rtol": 0}

SLIDER = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body pos="0 0 0.3">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <geom type="sphere" size="0.1" mass="1"/>
    </body>
  </worldbody>
  <actuator>
    <general joint="x" dyntype="filter" dynprm="0.5" gainprm="3"/>
    <general joint="z" dyntype="integrator" gainprm="9" ctrllimited="true" ctrlrange="-2 4"/>
  </actuator>
</mujoco>
"""  # actuators with states, one of them without a limit, and a contact


def cheetah(num_envs, frame_skip, **kwargs):
    """Gymnasium's HalfCheetah-v5, whose frame skip is 5."""
    folder = os.path.join(gymnasium.__path__[0], "envs/mujoco/assets")
    model = mujoco.MjModel.from_xml_path(os.path.join(folder, "half_cheetah.xml"))
    seconds = frame_skip * model.opt.timestep

    def reward(state, action, after):
        velocity = (after["qpos"][:, 0] - state["qpos"][:, 0]) / seconds
        return velocity - 0.1 * action.square().sum(-1)

    return from_mujoco_torch(model, reward, num_envs, frame_skip=frame_skip, **kwargs)


@pytest.fixture(scope="module")
def trajectory():
    """Steps of Gymnasium's env, from standing, in the air, and in contact."""
    env = gymnasium.make("HalfCheetah-v5").unwrapped
    data = env.data
    actions = np.random.default_rng(0)
    steps = []
    contacts = set()
    for seed in (0, 1):
        env.reset(seed=seed)
        for number in range(60):
            names = "qpos", "qvel", "qacc_warmstart"
            step = {name: getattr(data, name).copy() for name in names}
            step["action"] = actions.uniform(-1, 1, 6).astype(np.float32)
            _, reward, *_ = env.step(step["action"])
            step["reward"] = np.float32(reward)
            step["next_qpos"] = data.qpos.copy()
            step["next_qvel"] = data.qvel.copy()
            if number % 3 == 0:
                steps.append(step)
                contacts.add(data.ncon)
    assert 0 in contacts
    assert max(contacts) >= 2
    columns = {name: np.stack([step[name] for step in steps]) for name in step}
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def env_at(trajectory, **kwargs):
    env = cheetah(len(trajectory["action"]), frame_skip=5, **kwargs)
    env.reset(seed=0)
    for name, value in env.state.items():
        value.copy_(trajectory[name])
    return env


def test_step_agrees_with_gymnasium_from_states_of_its_trajectory(
    trajectory,
):
    env = env_at(trajectory)
    assert env.single_action_space == gymnasium.make("HalfCheetah-v5").action_space
    successor = env.step_without_reset(trajectory["action"])[0]["next"]
    expected = torch.cat([trajectory["next_qpos"], trajectory["next_qvel"]], -1)
    reward = trajectory["reward"].unsqueeze(-1)
    torch.testing.assert_close(successor["observation"], expected, **OURS)
    torch.testing.assert_close(successor["reward"], reward, atol=1e-5, rtol=1e-5)


def test_few_iterations_of_the_solver_do_not_agree(trajectory):
    env = env_at(trajectory, iterations=1, ls_iterations=1)
    env.step(trajectory["action"])
    assert not torch.allclose(env.state["qvel"], trajectory["next_qvel"], **STATED)


def test_model_with_activations_and_unlimited_controls_agrees_with_mujoco():
    model = mujoco.MjModel.from_xml_string(SLIDER)
    iterations = model.opt.iterations
    reward = lambda state, action, after: after["qpos"][:, 0]  # noqa: E731
    env = from_mujoco_torch(model, reward, 2, frame_skip=2)
    assert model.opt.iterations == iterations  # the argument is copied
    assert env.single_action_space.low.tolist() == [-np.inf, -2]
    assert env.single_action_space.high.tolist() == [np.inf, 4]
    env.reset(seed=0)
    rows = [mujoco.MjData(model) for _ in range(2)]
    actions = torch.tensor([[5.0, -2.0], [-1.0, 0.5]])
    touched = False
    for _ in range(12):
        env.step(actions)
        for row, action in zip(rows, actions, strict=True):
            row.ctrl[:] = action
            mujoco.mj_step(model, row, nstep=2)
            touched |= row.ncon > 0
        for name in ("qpos", "qvel", "act"):
            expected = np.stack([getattr(row, name) for row in rows])
            torch.testing.assert_close(env.state[name], torch.from_numpy(expected), **OURS)
    assert touched
