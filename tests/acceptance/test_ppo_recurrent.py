"""examples/ppo_recurrent.py: the state that the env carries is the one that backpropagation through time computes again."""

import pytest
import torch
from helpers import load_example

import torchwrap as tw
from torchwrap import transforms as T


@pytest.fixture(scope="module")
def recurrent():
    threads = torch.get_num_threads()
    load_example("ppo")  # the script imports it from its own folder
    yield load_example("ppo_recurrent")
    torch.set_num_threads(threads)


def test_states_computed_through_time_equal_those_that_were_carried(recurrent):
    args = recurrent.Args(num_envs=6, num_steps=40)
    torch.manual_seed(0)
    env, agent = recurrent.make_env(args, args.num_envs), recurrent.Agent(args)
    collect = tw.Collector(env, agent.act, args.num_steps)
    _, td = collect(env.reset(seed=0))
    data, _ = collect(td)
    assert data["is_init"][:, 1:].any() and data["hidden"][:, 0].any()
    with torch.no_grad():
        states = agent.remember_all(data["observation"], data["hidden"][:, 0], data["is_init"])
    torch.testing.assert_close(states, data["next", "hidden"])


def test_loss_of_a_fresh_batch_has_ratios_of_one_and_gradients_through_time(recurrent):
    args = recurrent.Args(num_envs=4, num_steps=12)
    env, agent = recurrent.make_env(args, args.num_envs), recurrent.Agent(args)
    data, _ = tw.rollout(env, agent.act, args.num_steps)
    batch = recurrent.make_batch(agent, data, args)
    states = agent.remember_all(batch["observation"], batch["hidden"], batch["is_init"])
    torch.testing.assert_close(
        agent.get_distribution(states).log_prob(batch["action"]).detach(), batch["logprob"]
    )
    start = batch["hidden"].requires_grad_()
    recurrent.ppo_loss(
        agent, {**batch, "is_init": torch.zeros_like(batch["is_init"])}, args
    ).backward()
    assert start.grad.abs().sum() > 0


def test_value_after_a_truncation_is_that_of_the_final_observation_and_its_state(recurrent):
    args = recurrent.Args(num_envs=4, num_steps=3, gamma=0.5)
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 4, max_episode_steps=3),
        T.TransformObservation(recurrent.positions, recurrent.Box(-10, 10, (2,))),
        tw.PolicyState({"hidden": (args.hidden_size,)}),
    )
    agent = recurrent.Agent(args)
    data, _ = tw.rollout(env, agent.act, 3, env.reset(seed=0))
    assert data["next", "truncated"][:, -1].all()
    with torch.no_grad():
        batch = recurrent.make_batch(agent, data, args)
        final = data["next"][:, -1]
        hidden = agent.cell(agent.encoder(final["observation"]), final["hidden"])
        expected = 1 + 0.5 * agent.critic(hidden).squeeze(-1)
    torch.testing.assert_close(batch["ret"][:, -1], expected)


@pytest.mark.long
@pytest.mark.full
def test_recurrent_policy_balances_a_pole_whose_velocity_it_does_not_see(recurrent):
    assert recurrent.main(recurrent.Args(seed=7, total_timesteps=120_000)) >= 450
