"""PPO in CleanRL's style, on the vector env that `to_gymnasium` returns."""

import pytest
from benchmarks import cleanrl_style as example

SMALL = dict(num_envs=4, num_steps=16, total_timesteps=512, num_minibatches=2, update_epochs=2)


def test_script_repeats_itself():
    runs = [example.main(example.Args(seed=seed, **SMALL)) for seed in (1, 1, 2)]
    first, second, other = [run["mean_return"] for run in runs]
    assert first == second != other


@pytest.mark.long
@pytest.mark.full
def test_script_solves_cartpole():
    assert example.main(example.Args(seed=1))["mean_return"] >= 450
