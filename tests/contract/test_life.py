"""Running statistics from training to deployment: one set of numbers throughout."""

import pytest
import torch
from helpers import load_example
from processes import kill_and_compare

import torchwrap as tw
from torchwrap.transforms import RunningMeanStd

NUM_ENVS = 16
NUM_STEPS = 32
ITERATIONS = 15
LIMIT = 200


def statistics(module):
    return {name: part for name, part in module.named_modules() if isinstance(part, RunningMeanStd)}


def assert_equal(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.full
def test_statistics_survive_the_whole_life(tmp_path):
    total = NUM_ENVS * NUM_STEPS * ITERATIONS
    flags = ["--env-id", "Pendulum-v1"]
    checkpoint = kill_and_compare(
        tmp_path,
        total,
        kills=1,
        seed=2,
        flags=flags,
    )
    ppo = load_example("ppo")
    env = ppo.make_env(
        ppo.Args(env_id="Pendulum-v1", normalize=True, gamma=0.9),
        4,
    )
    env.load_state_dict(checkpoint["env"])
    learned = env.state_dict()

    # Each observation of any rank counts once: of each step, and the initial ones.
    steps = NUM_STEPS * ITERATIONS
    observations, rewards = statistics(env).values()
    assert (observations.count == NUM_ENVS * (steps + 1 + steps // LIMIT)).all()
    assert rewards.count == total
    for part in checkpoint["processes"]:
        buffers = part["snapshot"]["buffers"]
        for name, module in statistics(env).items():
            for key, value in module.state_dict().items():
                assert_equal(buffers[f"{name}.{key}"], value)

    # Evaluation freezes them.
    agent = ppo.Agent(env)
    agent.load_state_dict(checkpoint["agent"])

    def mean(td):
        return td.set(
            "action",
            agent.get_distribution(td["observation"]).mean,
        )

    tw.evaluate(env, mean, 4, seed=5, max_steps=250)
    assert_equal(env.state_dict(), learned)

    # A deployed policy acts on them: the same actions, bit for bit.
    module = tw.deploy(env, mean)
    raw = tw.make("Pendulum-v1", 4)
    env.eval()
    td = env.reset(seed=6)
    root = raw.reset(seed=6)
    for _ in range(LIMIT + 5):
        action = module(root["observation"])
        assert_equal(
            action,
            env.transforms.action(mean(td)["action"]),
        )
        _, td = env.step(td)
        _, root = raw.step(action)
