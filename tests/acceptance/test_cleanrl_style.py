"""examples/cleanrl_style.py: PPO on the vector env that `to_gymnasium` returns."""

import cleanrl_style as example
import pytest

SMALL = dict(num_envs=4, num_steps=16, total_timesteps=512, num_minibatches=2, update_epochs=2)


def test_example_repeats_itself():
    runs = [example.main(example.Args(seed=seed, **SMALL)) for seed in (1, 1, 2)]
    first, second, other = [run["mean_return"] for run in runs]
    assert first == second != other
    assert runs[0]["env_steps"] == SMALL["total_timesteps"]


@pytest.mark.parametrize(("num_envs", "num_steps"), [(128, 16), (256, 16)], ids=["kept", "more"])
def test_another_number_of_envs_keeps_the_batch_from_16_steps_up(num_envs, num_steps):
    sizes = dict(total_timesteps=1, update_epochs=1)  # one iteration
    run = example.main(example.Args(num_envs=num_envs, **sizes))
    assert run["env_steps"] == num_envs * num_steps


@pytest.mark.long
@pytest.mark.full
def test_example_solves_cartpole():
    assert example.main(example.Args(seed=1))["mean_return"] >= 450
