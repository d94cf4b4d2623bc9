import pytest
import torch
from func_envs import (
    BroadcastNoisy,
    Noisy,
    both_noisy,
    both_styles,
    equal,
    play,
    some_actions,
)

from torchwrap import FunctionalEnv

SEEDS = [
    (0, 2**32),
    (2**64 - 1, 2**32 - 1),
    (None, None),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_seeds_that_differ_in_any_bit_or_are_drawn_give_other_numbers(seeds):
    first, second = (FunctionalEnv(Noisy(), 3).reset(seed=seed)["observation"] for seed in seeds)
    assert not (first == second).any()


@both_noisy
def test_draws_of_all_steps_episodes_and_envs_differ(func_env):
    env = FunctionalEnv(func_env, 16, max_episode_steps=5)
    out, _ = play(env, env.reset(seed=0), torch.zeros(60, 16, 3))
    rewards = out["next", "reward"].flatten()
    assert len(rewards.unique()) == len(rewards)


def test_partial_reset_with_a_seed_starts_the_first_episode_of_that_seed():
    env = FunctionalEnv(Noisy(), 4)
    fresh = FunctionalEnv(Noisy(), 4).reset(seed=8)["observation"]
    _, td = play(env, env.reset(seed=5), torch.zeros(3, 4, 3))
    mask = torch.tensor([True, False, False, True])
    observation = env.reset(seed=8, mask=mask)["observation"]
    assert equal(observation[mask], fresh[mask])
    assert equal(observation[~mask], td["observation"][~mask])
    assert env.stream.seed_low.tolist() == [8, 5, 5, 8]


def test_steps_use_neither_the_global_generator_nor_that_of_actions():
    env = FunctionalEnv(Noisy(), 4, max_episode_steps=2)
    same = FunctionalEnv(Noisy(), 4, max_episode_steps=2)
    actions = some_actions(env, 10)
    before = torch.get_rng_state()
    expected, _ = play(same, same.reset(seed=5), actions)
    td = env.reset(seed=5)
    for action, reference in zip(actions, expected, strict=True):
        env.sample_action()
        transition, td = env.step(td.set("action", action))
        assert equal(transition["next"], reference["next"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
@both_styles(Noisy(), BroadcastNoisy())
def test_trajectory_on_cuda_matches_the_cpu(func_env):
    played = []
    for device in ("cuda", "cpu"):
        env = FunctionalEnv(func_env, 8, device=device, max_episode_steps=9)
        out, _ = play(env, env.reset(seed=11), some_actions(env, 40).to(device))
        played.append(out.cpu())
    out, expected = played
    assert equal(out["next", "reward"], expected["next", "reward"])
    assert equal(out["next", "done"], expected["next", "done"])
    for key in (("next", "observation"), ("root", "observation")):
        assert torch.allclose(out[key], expected[key], atol=1e-5)
