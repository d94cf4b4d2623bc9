"""MuJoCo in PyTorch: HalfCheetah against Gymnasium's own, and what `FunctionalEnv` promises of an env with its physics."""

import io
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("torchwrap.interop.mujoco_torch", exc_type=ImportError)

import mujoco
from helpers import assert_same, steps

import torchwrap as tw
from torchwrap.interop.mujoco_torch import HalfCheetah, MujocoWorld
from torchwrap.random import Stream

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


class Slider(MujocoWorld):
    def reward(self, state, action, next_state, rng, params=None):
        return next_state["qpos"][:, 0]


def slider(**kwargs):
    return Slider(mujoco.MjModel.from_xml_string(SLIDER), **kwargs)


def quick(num_envs, max_episode_steps=3, **kwargs):
    """HalfCheetah with a fifth of the physics, because a step takes a tenth of a second and more."""
    return tw.FunctionalEnv(HalfCheetah(frame_skip=1), num_envs, max_episode_steps=max_episode_steps, **kwargs)


@pytest.fixture(scope="module")
def trajectory():
    """Steps of Gymnasium's env, from every third state of two episodes: standing, in the air, and in contact."""
    env, actions, found, contacts = gymnasium.make("HalfCheetah-v5").unwrapped, np.random.default_rng(0), [], []
    for seed in (0, 1):
        env.reset(seed=seed)
        for step in range(60):
            before = {name: getattr(env.data, name).copy() for name in ("qpos", "qvel", "qacc_warmstart")}
            action = actions.uniform(-1, 1, 6).astype(np.float32)
            observation, reward, terminated, *_ = env.step(action)
            after = {"next_qpos": env.data.qpos.copy(), "next_qvel": env.data.qvel.copy(), "observation": observation}
            if step % 3 == 0:
                found.append({**before, **after, "action": action, "reward": np.float32(reward), "terminated": terminated})
                contacts.append(env.data.ncon)
    assert 0 in contacts and max(contacts) >= 2
    return {name: torch.from_numpy(np.stack([one[name] for one in found])) for name in found[0]}


def env_at(trajectory, functions):
    env = tw.FunctionalEnv(functions, len(trajectory["action"]), max_episode_steps=1000)
    env.reset(seed=0)
    for name, value in env.state.items():
        value.copy_(trajectory[name])
    return env


def test_step_agrees_with_gymnasium_from_states_of_its_trajectory(trajectory):
    env = env_at(trajectory, HalfCheetah())
    transition, _ = env.step(trajectory["action"])
    for name in ("qpos", "qvel"):
        torch.testing.assert_close(env.state[name], trajectory[f"next_{name}"], **OURS)
    torch.testing.assert_close(transition["next", "observation"], trajectory["observation"], **OURS)
    reward = trajectory["reward"].unsqueeze(-1)
    torch.testing.assert_close(transition["next", "reward"], reward, atol=1e-5, rtol=1e-5)
    assert torch.equal(transition["next", "terminated"].flatten(), trajectory["terminated"])


def test_too_few_solver_iterations_leave_the_stated_tolerance(trajectory):
    env = env_at(trajectory, HalfCheetah(iterations=1, ls_iterations=1))
    env.step(trajectory["action"])
    assert not torch.allclose(env.state["qvel"], trajectory["next_qvel"], **STATED)


def test_spaces_and_limit_are_those_of_gymnasium():
    env, expected = tw.make("mujoco_torch/HalfCheetah-v5", num_envs=2), gymnasium.make("HalfCheetah-v5")
    assert env.single_observation_space == expected.observation_space
    assert env.single_action_space == expected.action_space
    assert env.signature.max_episode_steps == expected.spec.max_episode_steps
    assert env.func_env.dt == pytest.approx(expected.unwrapped.dt)


def test_initial_states_have_the_distribution_of_gymnasium():
    functions = HalfCheetah(frame_skip=1)
    start = functions.initial(Stream(4000, seed=3).key())
    moved = start["qpos"] - torch.from_numpy(functions.model.qpos0)
    assert moved.abs().max() <= 0.1
    torch.testing.assert_close(moved.std(0), torch.full((9,), 0.1 / 3**0.5, dtype=torch.float64), atol=0.003, rtol=0)
    torch.testing.assert_close(start["qvel"].std(0), torch.full((9,), 0.1, dtype=torch.float64), atol=0.005, rtol=0)
    correlations = torch.corrcoef(torch.cat([moved, start["qvel"].square()], -1).T) - torch.eye(18)
    assert correlations.abs().max() < 0.08


def test_weights_and_noise_are_arguments_of_make():
    kwargs = {"forward_reward_weight": 2.0, "ctrl_cost_weight": 0.5, "reset_noise_scale": 0.0, "frame_skip": 1}
    env = tw.make("mujoco_torch/HalfCheetah-v5", num_envs=2, **kwargs)
    td = env.reset(seed=0)
    assert (td["observation"] == 0).all()
    action = torch.full((2, 6), 0.5)
    transition, _ = env.step(action)
    velocity = env.state["qpos"][:, :1] / 0.01
    torch.testing.assert_close(transition["next", "reward"], (2 * velocity - 0.5 * 6 * 0.25).to(torch.float32))


def test_model_with_activations_and_unlimited_controls_agrees_with_mujoco():
    env = tw.FunctionalEnv(slider(frame_skip=2), 2)
    assert env.single_action_space.low.tolist() == [-np.inf, -2] and env.single_action_space.high.tolist() == [np.inf, 4]
    assert env.fields == ["qpos", "qvel", "qacc_warmstart", "act"]
    env.reset(seed=0)
    model = mujoco.MjModel.from_xml_string(SLIDER)
    rows = [mujoco.MjData(model) for _ in range(2)]
    touched = False
    for actions in torch.tensor([[[5.0, -2.0], [-1.0, 0.5]]] * 12):
        transition, _ = env.step(actions)
        for row, action in zip(rows, actions, strict=True):
            row.ctrl[:] = action
            mujoco.mj_step(model, row, nstep=2)
            touched |= row.ncon > 0
        for name in ("qpos", "qvel", "act"):
            expected = torch.from_numpy(np.stack([getattr(row, name) for row in rows]))
            torch.testing.assert_close(env.state[name], expected, **OURS)
        assert torch.equal(transition["next", "observation"], torch.cat([env.state["qpos"], env.state["qvel"]], -1))
    assert touched


def test_model_argument_is_copied_and_a_path_is_read(tmp_path):
    model = mujoco.MjModel.from_xml_string(SLIDER)
    iterations = model.opt.iterations
    functions = Slider(model, iterations=3)
    assert (model.opt.iterations, functions.model.opt.iterations) == (iterations, 3)
    path = tmp_path / "slider.xml"
    path.write_text(SLIDER)
    assert Slider(path).model.nu == Slider(str(path)).model.nu == 2


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Slider(3), TypeError, "Slider needs a mujoco.MjModel or the path of an XML file, but got 3"),
        (lambda: slider(frame_skip=0), ValueError, "Slider needs frame_skip"),
        (lambda: slider(iterations=0), ValueError, "Slider needs iterations"),
        (lambda: slider(ls_iterations=1.5), TypeError, "Slider needs an integer ls_iterations"),
        (lambda: HalfCheetah(ctrl_cost_weight="1"), TypeError, "HalfCheetah needs a number as ctrl_cost_weight"),
    ],
)
def test_invalid_argument_raises(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_version_of_mujoco_that_mujoco_torch_cannot_read_is_an_import_error():
    code = "import mujoco; del mujoco.mjtEnableBit.mjENBL_MULTICCD; mujoco.__version__ = '4.0.0'; "
    code += "import torchwrap.interop.mujoco_torch"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: torchwrap.interop.mujoco_torch needs a version of mujoco that" in result.stderr
    assert "but got mujoco 4.0.0: pip install 'mujoco>=3.4,<3.8'." in result.stderr


def test_compile_refuses_the_physics_before_it_traces_it():
    env = quick(2)
    with pytest.raises(
        ValueError, match=r"HalfCheetah needs an eager env, because .*, but got a trace: leave out `tw.compile`"
    ):
        tw.compile(env)
    td = env.reset(seed=0)
    env.step(td.set("action", env.sample_action()))


# What FunctionalEnv promises.


def test_gradient_of_simulate_equals_a_finite_difference():
    env = quick(2)
    env.reset(seed=0)
    action = torch.zeros(2, 6, requires_grad=True)

    def velocity(action):
        return env.simulate(env.state, action)[1]["qvel"][:, 0].sum()

    (gradient,) = torch.autograd.grad(velocity(action), action)
    step = torch.zeros(2, 6).index_fill_(1, torch.tensor(0), 2.0**-10)
    difference = (velocity(action + step) - velocity(action - step)) / 2.0**-9
    torch.testing.assert_close(gradient[:, 0].sum().double(), difference.detach(), rtol=1e-3, atol=0)
    assert difference != 0


def test_same_seed_gives_the_same_steps_and_another_seed_others():
    env = quick(3)
    actions = [env.sample_action() for _ in range(4)]

    def run(seed):
        td = env.reset(seed=seed)
        return torch.stack([env.step(action)[1].clone() for action in actions if td is not None])

    first = run(1)
    assert_same(first, run(1))
    assert not torch.equal(first["observation"], run(2)["observation"])


def test_env_depends_on_its_index_and_not_on_the_number_of_envs():
    env, single = quick(4), quick(1, first_index=2)
    td, single_td = env.reset(seed=5), single.reset(seed=5)
    assert torch.equal(td["observation"][[2]], single_td["observation"])  # bit for bit; the physics up to rounding
    for _ in range(5):
        action = env.sample_action()
        transition, _ = env.step(action)
        single_transition, _ = single.step(action[[2]])
        assert_same(transition[[2]], single_transition, 1e-9)


def test_rows_are_independent():
    env, other = quick(3), quick(3)
    for one in (env, other):
        one.reset(seed=0)
    other.state["qvel"][1] += 1.0
    action = env.sample_action()
    first, second = (one.step(action)[0]["next", "observation"] for one in (env, other))
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    assert not torch.allclose(first[1], second[1], atol=0.1)


def test_snapshot_in_mid_episode_continues_bit_for_bit():
    env, other = quick(2, 4), quick(2, 4)
    *_, (_, td) = steps(env, 2, env.reset(seed=0))
    file = io.BytesIO()
    torch.save(env.snapshot().to_dict(), file)
    file.seek(0)
    actions = [env.sample_action() for _ in range(4)]  # past the end of the episode
    expected = [env.step(action)[0].clone() for action in actions]
    td = other.restore(torch.load(file, weights_only=True))
    assert torch.equal(td["observation"], expected[0]["observation"])
    for action, transition in zip(actions, expected, strict=True):
        assert_same(transition, other.step(action)[0])


def test_limit_truncates_with_the_final_observation_and_starts_a_new_episode():
    env, endless = quick(2, 3), quick(2, None)
    for one in (env, endless):
        one.reset(seed=0)
    first = env.state["qpos"].clone()
    for step in range(1, 4):
        action = env.sample_action()
        transition, td = env.step(action)
        expected, _ = endless.step(action)
        assert torch.equal(transition["next", "observation"], expected["next", "observation"])
        assert (transition["next", "truncated"] == (step == 3)).all()
        assert not transition["next", "terminated"].any()
    assert not torch.equal(td["observation"], transition["next", "observation"])
    assert torch.equal(td["observation"], torch.cat([env.state["qpos"][:, 1:], env.state["qvel"]], -1))
    assert (env.state["qpos"].abs() <= 0.1).all() and (env.state["qacc_warmstart"] == 0).all()
    assert not torch.equal(env.state["qpos"], first)
