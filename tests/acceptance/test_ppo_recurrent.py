"""examples/ppo_recurrent.py: backpropagation through time computes the carried states again."""

import ppo_recurrent as recurrent
import pytest
import torch
from gymnasium.spaces import Box
from helpers import from_reset

import torchwrap as tw
from torchwrap import transforms as T


def test_states_through_time_equal_the_carried_states():
    args = recurrent.Args(num_envs=6, num_steps=40)
    torch.manual_seed(0)
    env = recurrent.make_env(args, args.num_envs)
    agent = recurrent.Agent(args)
    collect = tw.Collector(env, agent.act, args.num_steps)
    from_reset(collect)
    data = collect()
    assert data["is_init"][:, 1:].any()
    assert data["hidden"][:, 0].any()
    with torch.no_grad():
        states = agent.remember_all(data["observation"], data["hidden"][:, 0], data["is_init"])
    torch.testing.assert_close(states, data["next", "hidden"])


def test_truncated_episode_is_bootstrapped_from_its_final_observation_and_state():
    args = recurrent.Args(num_envs=4, num_steps=3, gamma=0.5)
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 4, max_episode_steps=3),
        T.TransformObservation(recurrent.positions, Box(-10, 10, (2,))),
        tw.PolicyState({"hidden": (args.hidden_size,)}),
    )
    agent = recurrent.Agent(args)
    data = from_reset(tw.Collector(env, agent.act, 3))
    assert data["next", "truncated"][:, -1].all()
    with torch.no_grad():
        batch = recurrent.make_batch(agent, data, args)
        final = data["next"][:, -1]
        hidden = agent.cell(agent.encoder(final["observation"]), final["hidden"])
        expected = 1 + 0.5 * agent.critic(hidden).squeeze(-1)
    torch.testing.assert_close(batch["ret"][:, -1], expected)


@pytest.mark.long
@pytest.mark.full
def test_recurrent_policy_balances_a_pole_with_hidden_velocities():
    assert recurrent.main(recurrent.Args(seed=7, total_timesteps=120_000)) >= 450
