"""Running statistics from training to deployment: killed, resumed, merged, evaluated and shipped as one set of numbers."""

import pytest
import torch
from helpers import load_example
from processes import kill_and_compare

import torchwrap as tw
from torchwrap.transforms import RunningMeanStd

NUM_ENVS, NUM_STEPS, ITERATIONS, LIMIT = 16, 32, 15, 200


def statistics(module):
    return {name: part for name, part in module.named_modules() if isinstance(part, RunningMeanStd)}


def same(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.full
def test_statistics_survive_the_whole_life(tmp_path):
    flags = ["--env-id", "Pendulum-v1"]
    checkpoint = kill_and_compare(
        tmp_path, NUM_ENVS * NUM_STEPS * ITERATIONS, kills=1, seed=2, flags=flags
    )
    ppo = load_example("ppo")
    env = ppo.make_env(ppo.Args(env_id="Pendulum-v1", normalize=True, gamma=0.9), 4)
    env.load_state_dict(checkpoint["env"])
    learned = env.state_dict()

    # Each observation counts once, on whichever rank: of each step, and the initial one of each episode.
    steps = NUM_STEPS * ITERATIONS
    observations, rewards = statistics(env).values()
    assert (
        observations.count == NUM_ENVS * (steps + 1 + steps // LIMIT)
    ).all() and rewards.count == NUM_ENVS * steps
    for part in checkpoint["processes"]:
        for name, module in statistics(env).items():
            for key, value in module.state_dict().items():
                same(part["snapshot"]["buffers"][f"{name}.{key}"], value)

    # Evaluation freezes them.
    agent = ppo.Agent(env)
    agent.load_state_dict(checkpoint["agent"])

    def mean(td):
        return td.set("action", agent.get_distribution(td["observation"]).mean)

    tw.evaluate(env, mean, 4, seed=5, max_steps=250)
    same(env.state_dict(), learned)

    # A deployed policy acts on them: the same actions, bit for bit.
    module = tw.deploy(env, mean)
    raw = tw.make("Pendulum-v1", 4)
    env.eval()
    td, root = env.reset(seed=6), raw.reset(seed=6)
    for _ in range(LIMIT + 5):
        action = module(root["observation"])
        same(action, env.transforms.action(mean(td)["action"]))
        _, td = env.step(td)
        _, root = raw.step(action)
