"""`simulate`: steps from a given state, through which gradients flow, and which leave the env as it is."""

import numpy as np
import pytest
import torch
from func_envs import Noisy, Walk, both_noisy, changed, equal, odd, some_actions
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from helpers import buffers

from torchwrap import FunctionalEnv, random
from torchwrap.envs.pendulum import Pendulum


def plan(env, state, actions):
    """The sum of the rewards of a plan `(num_steps, num_envs, ...)`, for each env."""
    total = 0
    for step, action in enumerate(actions):
        successor, state = env.simulate(state, action, offset=step)
        total = total + successor["reward"]
    return total.squeeze(-1)


TELLING = odd(
    Noisy,
    state_info=lambda state: {**state},
    truncated=lambda state, rng: random.uniform(rng) < 0.2,
)


# It predicts what the env does.


@pytest.mark.parametrize("func_env", [Noisy(), TELLING, Walk()], ids=["noisy", "telling", "walk"])
def test_simulate_from_the_envs_state_returns_what_step_does(func_env):
    env = FunctionalEnv(func_env, 4, max_episode_steps=3)
    env.reset(seed=1)
    for action in some_actions(env, 12):
        before = buffers(env)
        successor, state = env.simulate(env.state, action)
        assert changed(env, before) == []
        transition, _ = env.step(action)
        assert equal(successor, transition["next"]) and set(successor.keys()) == set(
            transition["next"].keys()
        )
        going_on = ~transition["next", "done"].squeeze(-1)
        assert list(state) == env.fields
        for field, value in env.state.items():
            assert torch.equal(state[field][going_on], value[going_on])


@both_noisy
def test_simulate_with_an_offset_returns_what_later_steps_do(func_env):
    env = FunctionalEnv(func_env, 5, max_episode_steps=9)
    td = env.reset(seed=1)
    actions = some_actions(env, 8)
    state, successors = env.state, []
    for step, action in enumerate(actions):
        successor, state = env.simulate(state, action, offset=step)
        successors.append(successor)
    alive = torch.ones(5, dtype=torch.bool)
    for successor, action in zip(successors, actions, strict=True):
        transition, td = env.step(td.set("action", action))
        assert equal(successor[alive], transition["next"][alive])
        alive &= ~transition["next", "done"].squeeze(-1)
    assert not alive.all()


def test_simulate_gets_the_params_of_each_env():
    weighing = odd(
        reward=lambda state, action, next_state, rng, params: params["weight"] * action[0]
    )
    env = FunctionalEnv(weighing, 2, params={"weight": torch.tensor([2.0, 3.0])})
    action = torch.ones(2, 1, requires_grad=True)
    successor, _ = env.simulate(env.state, action)
    assert torch.autograd.grad(successor["reward"].sum(), action)[0].tolist() == [[2], [3]]


# Gradients.

HORIZON = 8


def numpy_return(theta, theta_dot, torques):
    """The return of a plan for the pendulum, in float64, written from its equations."""
    total = 0.0
    for torque in torques:
        total -= (
            ((theta + np.pi) % (2 * np.pi) - np.pi) ** 2 + 0.1 * theta_dot**2 + 0.001 * torque**2
        )
        theta_dot = theta_dot + (15.0 * np.sin(theta) + 3.0 * torque) * 0.05
        theta = theta + 0.05 * theta_dot
    return total


def start(dtype=torch.float64):
    """A pendulum whose speed and torque stay below their limits."""
    env = FunctionalEnv(Pendulum(dtype=dtype), 3)
    env.reset(seed=0)
    env.state["theta"].copy_(torch.tensor([0.5, -1.0, 2.0]))
    env.state["theta_dot"].copy_(torch.tensor([0.1, 0.4, -0.3]))
    return env, torch.empty(HORIZON, 3, 1).uniform_(
        -1, 1, generator=torch.Generator().manual_seed(0)
    )


def test_gradient_of_a_return_equals_finite_differences_in_float64():
    env, actions = start()
    before = buffers(env)
    state = {name: value.clone().requires_grad_() for name, value in env.state.items()}
    actions.requires_grad_()
    total = plan(env, state, actions)
    by_action, by_theta, by_speed = torch.autograd.grad(
        total.sum(), [actions, state["theta"], state["theta_dot"]]
    )
    for row in range(3):
        given = np.array(
            [env.state["theta"][row], env.state["theta_dot"][row], *actions.detach()[:, row, 0]],
            np.float64,
        )
        np.testing.assert_allclose(
            total[row].item(), numpy_return(given[0], given[1], given[2:]), rtol=1e-6
        )
        expected = []
        for index in range(len(given)):
            shift = 1e-5 * np.eye(len(given))[index]
            ends = [
                numpy_return(moved[0], moved[1], moved[2:])
                for moved in (given + shift, given - shift)
            ]
            expected.append((ends[0] - ends[1]) / 2e-5)
        found = [by_theta[row], by_speed[row], *by_action[:, row, 0]]
        np.testing.assert_allclose(
            torch.stack([value.double() for value in found]).numpy(), expected, rtol=1e-5, atol=1e-6
        )
    assert changed(env, before) == []
    assert not any(
        buffer.requires_grad or buffer.grad_fn or buffer.grad is not None
        for buffer in env.buffers()
    )


def test_forward_mode_derivative_equals_the_gradient():
    env, actions = start()
    direction = torch.empty_like(actions).normal_(generator=torch.Generator().manual_seed(1))
    _, along = torch.func.jvp(
        lambda actions: plan(env, env.state, actions), (actions,), (direction,)
    )
    gradient = torch.func.grad(lambda actions: plan(env, env.state, actions).sum())(actions)
    torch.testing.assert_close((gradient * direction).sum((0, 2)), along)


def test_vmap_over_plans_returns_what_each_plan_does():
    env, actions = start(torch.float32)
    plans = actions + torch.linspace(-1, 1, 5).view(-1, 1, 1, 1)
    returns = torch.vmap(lambda actions: plan(env, env.state, actions))(plans)
    torch.testing.assert_close(
        returns, torch.stack([plan(env, env.state, actions) for actions in plans])
    )
    assert returns.shape == (5, 3) and len(returns.unique()) == 15


def test_gradient_through_vmap_equals_the_one_by_hand():
    env = FunctionalEnv(Walk(), 2)
    env.reset(seed=0)
    actions = torch.ones(2, 2, 1, requires_grad=True)
    position = torch.zeros(2, 2, requires_grad=True)
    total = plan(env, {"position": position, "count": torch.zeros(2, dtype=torch.int64)}, actions)
    # Rewards x1 - 2 x0 and x2 - 2 x1, with x1 = x0 + a0 and x2 = x1 + a1: -2 x0 - a0 + (x0 + a0 + a1) - ...
    by_action, by_position = torch.autograd.grad(total.sum(), [actions, position])
    assert by_action.flatten().tolist() == [0, 0, 1, 1]
    assert by_position.tolist() == [[-2, 0], [-2, 0]]


class Growth(FuncEnv):
    """The derivative with respect to the action is the state, which autograd keeps for the backward pass."""

    observation_space = action_space = spaces.Box(-9, 9, (1,), np.float32)
    broadcasts = True

    def initial(self, rng, params=None):
        return {"x": 1 + random.uniform(rng)}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] * action.squeeze(-1)}

    def observation(self, state, rng, params=None):
        return state["x"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["x"] * action.squeeze(-1)

    def terminal(self, state, rng, params=None):
        return state["x"] < 0


def test_gradient_is_not_disturbed_by_later_steps_and_changed_actions():
    env = FunctionalEnv(Growth(), 3)
    env.reset(seed=0)
    action = torch.tensor([[1.5], [2.0], [0.5]], requires_grad=True)
    x, before = env.state["x"].clone(), action.detach().flatten().clone()
    successor, _ = env.simulate(env.state, action)
    env.step(torch.full((3, 1), 3.0))
    with torch.no_grad():
        action.fill_(3.0)
    (gradient,) = torch.autograd.grad(successor["reward"].sum(), action)  # of x * action**2
    torch.testing.assert_close(gradient.flatten(), 2 * x * before)


def test_results_belong_to_the_caller():
    still = odd(  # returns the action and fields of the state as they are
        Growth,
        initial=lambda rng: {
            "x": random.uniform(rng, shape=(1,)),
            "goal": random.uniform(rng.fold_in(1)),
        },
        transition=lambda state, action, rng: {"x": action, "goal": state["goal"]},
        observation=lambda state, rng: state["x"],
        reward=lambda state, action, next_state, rng: state["goal"],
        terminal=lambda state, rng: state["goal"] < 0,
    )
    env = FunctionalEnv(still, 2)
    env.reset(seed=0)
    before, action = buffers(env), torch.ones(2, 1)
    successor, state = env.simulate(env.state, action)
    for value in (*successor.values(), *state.values()):
        value.fill_(False if value.dtype == torch.bool else 7)
        assert action.tolist() == [[1], [1]] and changed(env, before) == []
    assert successor["observation"].tolist() == [[7], [7]]
