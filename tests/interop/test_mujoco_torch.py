"""The recipe for mujoco-torch of examples/simulators.py, against MuJoCo itself and Gymnasium's HalfCheetah."""

import os

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip(
    "mujoco_torch", exc_type=(ImportError, AttributeError)
)  # it reads flags that other MuJoCos lack

import mujoco
from helpers import load_example

from_mujoco_torch = load_example("simulators").from_mujoco_torch

# What mujoco-torch's own tests of `step` allow against MuJoCo (its test/forward_test.py), and what these allow.
STATED, OURS = {"atol": 1e-2, "rtol": 1e-3}, {"atol": 1e-6, "rtol": 0}

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


def cheetah(num_envs, **kwargs):
    """Gymnasium's HalfCheetah-v5, with a fifth of the physics unless `frame_skip` is 5."""
    model = mujoco.MjModel.from_xml_path(
        os.path.join(gymnasium.__path__[0], "envs/mujoco/assets/half_cheetah.xml")
    )

    def reward(state, action, after):
        velocity = (after["qpos"][:, 0] - state["qpos"][:, 0]) / (
            kwargs.get("frame_skip", 1) * model.opt.timestep
        )
        return velocity - 0.1 * action.square().sum(-1)

    return from_mujoco_torch(model, reward, num_envs, **kwargs)


@pytest.fixture(scope="module")
def trajectory():
    """Steps of Gymnasium's env, from every third state of an episode: standing, in the air, and in contact."""
    env, actions, found, contacts = (
        gymnasium.make("HalfCheetah-v5").unwrapped,
        np.random.default_rng(0),
        [],
        [],
    )
    for seed in (0, 1):
        env.reset(seed=seed)
        for step in range(60):
            before = {
                name: getattr(env.data, name).copy() for name in ("qpos", "qvel", "qacc_warmstart")
            }
            action = actions.uniform(-1, 1, 6).astype(np.float32)
            _, reward, *_ = env.step(action)
            after = {"next_qpos": env.data.qpos.copy(), "next_qvel": env.data.qvel.copy()}
            if step % 3 == 0:
                found.append({**before, **after, "action": action, "reward": np.float32(reward)})
                contacts.append(env.data.ncon)
    assert 0 in contacts and max(contacts) >= 2
    return {name: torch.from_numpy(np.stack([one[name] for one in found])) for name in found[0]}


def env_at(trajectory, **kwargs):
    env = cheetah(len(trajectory["action"]), frame_skip=5, **kwargs)
    env.reset(seed=0)
    for name, value in env.state.items():
        value.copy_(trajectory[name])
    return env


def test_step_agrees_with_gymnasium_from_states_of_its_trajectory(trajectory):
    env = env_at(trajectory)
    successor = env.step_without_reset(trajectory["action"])[0]["next"]
    expected = torch.cat([trajectory["next_qpos"], trajectory["next_qvel"]], -1)
    torch.testing.assert_close(successor["observation"], expected, **OURS)
    torch.testing.assert_close(
        successor["reward"].squeeze(-1), trajectory["reward"], atol=1e-5, rtol=1e-5
    )
    assert env.single_action_space == gymnasium.make("HalfCheetah-v5").action_space
    few = env_at(trajectory, iterations=1, ls_iterations=1)
    few.step(trajectory["action"])
    assert not torch.allclose(few.state["qvel"], trajectory["next_qvel"], **STATED)


def test_model_with_activations_and_unlimited_controls_agrees_with_mujoco():
    model = mujoco.MjModel.from_xml_string(SLIDER)
    iterations = model.opt.iterations
    env = from_mujoco_torch(
        model, lambda state, action, after: after["qpos"][:, 0], 2, frame_skip=2
    )
    assert model.opt.iterations == iterations  # the argument is copied
    assert env.single_action_space.low.tolist() == [
        -np.inf,
        -2,
    ] and env.single_action_space.high.tolist() == [np.inf, 4]
    env.reset(seed=0)
    rows, touched = [mujoco.MjData(model) for _ in range(2)], False
    for actions in torch.tensor([[[5.0, -2.0], [-1.0, 0.5]]] * 12):
        env.step(actions)
        for row, action in zip(rows, actions, strict=True):
            row.ctrl[:] = action
            mujoco.mj_step(model, row, nstep=2)
            touched |= row.ncon > 0
        for name in ("qpos", "qvel", "act"):
            expected = torch.from_numpy(np.stack([getattr(row, name) for row in rows]))
            torch.testing.assert_close(env.state[name], expected, **OURS)
    assert touched
