import pytest
import torch
from func_envs import BroadcastNoisy, Noisy, both_noisy, equal, odd, play, some_actions

from torchwrap import FunctionalEnv, random


def test_seed_uses_all_64_bits_and_is_drawn_if_none_is_given():
    env = FunctionalEnv(Noisy(), 3)
    for seeds in ((0, 2**32), (0, 2**63), (1, 2**32 + 1), (2**64 - 1, 2**32 - 1)):
        first, second = (env.reset(seed=seed)["observation"] for seed in seeds)
        assert not (first == second).any()
    first, second = (FunctionalEnv(Noisy(), 3).reset()["observation"] for _ in range(2))
    assert not (first == second).any()


@both_noisy
def test_draws_of_all_steps_episodes_and_envs_differ(func_env):
    env = FunctionalEnv(func_env, 16, max_episode_steps=5)
    out, _ = play(env, env.reset(seed=0), torch.zeros(60, 16, 3))
    rewards = out[:, 0]["reward"].flatten()
    assert len(rewards.unique()) == len(rewards)


def test_draws_of_the_functions_of_one_step_are_independent():
    telling = odd(
        BroadcastNoisy,
        transition=lambda state, action, rng: {"position": random.uniform(rng, shape=(3,))},
        observation=lambda state, rng: torch.cat(
            [state["position"][..., :2], random.uniform(rng, shape=(1,))], -1
        ),
        reward=lambda state, action, next_state, rng: random.uniform(rng, shape=(1,))[..., 0],
        terminal=lambda state, rng: random.uniform(rng, shape=(1,))[..., 0] < 0.5,
    )
    env = FunctionalEnv(telling, 5000)
    td = env.reset(seed=0)
    columns = [*td["observation"].unbind(-1)]
    following = env.step(td.set("action", torch.zeros(5000, 3)))[0]["next"]
    columns += [
        *following["observation"].unbind(-1),
        following["reward"][:, 0],
        following["terminated"][:, 0].float(),
    ]
    assert (torch.corrcoef(torch.stack(columns)) - torch.eye(8)).abs().max() < 0.08


def test_partial_reset_with_a_seed_starts_the_first_episode_of_that_seed():
    env, fresh = FunctionalEnv(Noisy(), 4), FunctionalEnv(Noisy(), 4)
    _, td = play(env, env.reset(seed=5), torch.zeros(3, 4, 3))
    mask = torch.tensor([True, False, False, True])
    observation = env.reset(seed=8, mask=mask)["observation"]
    assert equal(observation[mask], fresh.reset(seed=8)["observation"][mask])
    assert equal(observation[~mask], td["observation"][~mask])


def test_steps_move_neither_the_global_generator_nor_by_sampled_actions():
    env, same = (
        FunctionalEnv(Noisy(), 4, max_episode_steps=2),
        FunctionalEnv(Noisy(), 4, max_episode_steps=2),
    )
    before = torch.get_rng_state()
    td, expected, actions = env.reset(seed=5), same.reset(seed=5), some_actions(env, 10)
    for action in actions:
        env.sample_action()
        transition, td = env.step(td.set("action", action))
        reference, expected = same.step(expected.set("action", action))
        assert equal(transition["next"], reference["next"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
@pytest.mark.parametrize("func_env", [Noisy(), BroadcastNoisy()], ids=["vmap", "broadcast"])
def test_trajectory_on_cuda_matches_the_cpu(func_env):
    env, same = (
        FunctionalEnv(func_env, 8, device="cuda", max_episode_steps=9),
        FunctionalEnv(func_env, 8, max_episode_steps=9),
    )
    actions = some_actions(same, 40)
    out, _ = play(env, env.reset(seed=11), actions.cuda())
    expected, _ = play(same, same.reset(seed=11), actions)
    assert equal(out["reward"].cpu(), expected["reward"])
    assert equal(out["done"].cpu(), expected["done"])
    assert torch.allclose(out["observation"].cpu(), expected["observation"], atol=1e-5)
