"""`simulate`: differentiable steps from a given state, which leave the env unchanged."""

import numpy as np
import pytest
import torch
from func_envs import Noisy, Walk, both_noisy, changed, equal, play, some_actions, variant
from helpers import buffers

from torchwrap import FunctionalEnv, random
from torchwrap.envs.pendulum import Pendulum


def simulate(env, state, actions):
    """The successors of a plan `(num_steps, num_envs, ...)`."""
    successors = []
    for offset, action in enumerate(actions):
        successor, state = env.simulate(state, action, offset=offset)
        successors.append(successor)
    return successors


def total_reward(env, state, actions):
    """The sum of the rewards of a plan, for each env."""
    rewards = [successor["reward"] for successor in simulate(env, state, actions)]
    return sum(rewards).squeeze(-1)


TELLING = variant(
    Noisy,
    state_info=lambda state: {**state},
    truncated=lambda state, rng: random.uniform(rng) < 0.2,
)


# It predicts what the env does.


@pytest.mark.parametrize(
    "func_env",
    [TELLING, Walk()],
    ids=["telling", "walk"],
)
def test_simulate_from_the_envs_state_returns_what_step_does(func_env):
    env = FunctionalEnv(func_env, 4, max_episode_steps=3)
    env.reset(seed=1)
    for action in some_actions(env, 12):
        before = buffers(env)
        successor, state = env.simulate(env.state, action)
        assert changed(env, before) == []
        transition, _ = env.step(action)
        assert equal(successor, transition["next"])
        assert set(successor.keys()) == set(transition["next"].keys())
        going_on = ~transition["next", "done"].squeeze(-1)
        assert list(state) == list(env.state)
        for field, value in env.state.items():
            assert equal(state[field][going_on], value[going_on])


@both_noisy
def test_simulate_with_an_offset_returns_what_later_steps_do(func_env):
    env = FunctionalEnv(func_env, 5, max_episode_steps=9)
    td = env.reset(seed=1)
    actions = some_actions(env, 8)
    successors = torch.stack(simulate(env, env.state, actions))
    out, _ = play(env, td, actions)
    ended_before = out["next", "done"].cumsum(0) - out["next", "done"].int()
    alive = (ended_before == 0).squeeze(-1)
    assert equal(successors[alive], out["next"][alive])
    assert not alive[-1].all()


# Gradients.

HORIZON = 8


def numpy_return(plan):
    """The return of (theta, theta_dot, torques...) for the pendulum's equations, in float64."""
    theta, theta_dot, *torques = plan
    total = 0.0
    for torque in torques:
        angle = (theta + np.pi) % (2 * np.pi) - np.pi
        total -= angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2
        theta_dot = theta_dot + (15.0 * np.sin(theta) + 3.0 * torque) * 0.05
        theta = theta + 0.05 * theta_dot
    return total


def numpy_gradient(plan):
    """Central differences."""
    shifts = 1e-5 * np.eye(len(plan))
    differences = [numpy_return(plan + shift) - numpy_return(plan - shift) for shift in shifts]
    return np.array(differences) / 2e-5


def pendulum(dtype=torch.float64):
    """Pendulums and a plan. Their speeds and torques stay below the limits."""
    env = FunctionalEnv(Pendulum(dtype=dtype), 3)
    env.reset(seed=0)
    env.state["theta"].copy_(torch.tensor([0.5, -1.0, 2.0]))
    env.state["theta_dot"].copy_(torch.tensor([0.1, 0.4, -0.3]))
    return env, some_actions(env, HORIZON)


def test_gradient_of_a_return_equals_finite_differences_in_float64():
    env, actions = pendulum()
    before = buffers(env)
    state = {name: value.clone().requires_grad_() for name, value in env.state.items()}
    actions.requires_grad_()
    total = total_reward(env, state, actions)
    inputs = [state["theta"], state["theta_dot"], actions]
    theta, speed, torques = torch.autograd.grad(total.sum(), inputs)
    for row in range(3):
        plan = [value[row].item() for value in env.state.values()]
        plan = np.array(plan + actions[:, row, 0].tolist())
        np.testing.assert_allclose(total[row].item(), numpy_return(plan), rtol=1e-6)
        gradient = [
            theta[row].item(),
            speed[row].item(),
            *torques[:, row, 0].tolist(),
        ]
        np.testing.assert_allclose(gradient, numpy_gradient(plan), rtol=1e-5, atol=1e-6)
    assert changed(env, before) == []
    for buffer in env.buffers():
        assert not buffer.requires_grad and buffer.grad is None


def test_vmap_over_plans_returns_what_each_plan_does():
    env, actions = pendulum(torch.float32)
    plans = actions + torch.linspace(-1, 1, 5).view(
        -1,
        1,
        1,
        1,
    )

    def returns(actions):
        return total_reward(env, env.state, actions)

    batched = torch.vmap(returns)(plans)
    torch.testing.assert_close(batched, torch.stack([returns(actions) for actions in plans]))
    assert batched.shape == (5, 3) and len(batched.unique()) == 15
