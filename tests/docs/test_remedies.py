"""Remedies that the guides and errors name: what they mend, and that they mend it."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from stable_baselines3 import PPO, SAC

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile.internals import scan_operator
from torchwrap.interop.sb3 import to_sb3
from torchwrap.testing import ScriptedEnv


class Counts(gymnasium.Env):
    """Counts steps in one array, which it returns each time."""

    observation_space = Box(0, 60_000, (1,), np.uint16)
    action_space = Discrete(2)

    def __init__(self, dtype=np.uint16):
        self.observation_space = Box(0, 60_000, (1,), dtype)
        self.steps = np.zeros(1, dtype)

    def reset(self, seed=None, options=None):
        self.steps[:] = 0
        return self.steps, {}

    def step(self, action):
        self.steps += 1
        return self.steps, 1.0, bool(self.steps[0] >= 3), False, {}


def test_uint16_is_refused_and_gymnasiums_dtype_observation_converts_it(registry):
    gymnasium.register("test/Counts-v0", Counts)
    with pytest.raises(TypeError, match=r"uint16.*DtypeObservation"):
        tw.make("test/Counts-v0", 2)
    wrapper = lambda env: gymnasium.wrappers.DtypeObservation(env, np.int32)  # noqa: E731
    env = tw.make("test/Counts-v0", 2, wrappers=[wrapper])
    assert env.reset(seed=0)["observation"].dtype == torch.int32


@pytest.fixture
def unvalidated():
    """PyTorch's distributions look at no value."""
    torch.distributions.Distribution.set_default_validate_args(False)
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


def test_policy_of_sb3_is_exported_without_validation(unvalidated):
    env = tw.TransformedEnv(tw.make("CartPole-v1", 4), T.NormalizeObservation())
    tw.rollout(env, None, 5)
    model = PPO("MlpPolicy", to_sb3(env), device="cpu")
    policy = lambda td: model.policy._predict(td["observation"], deterministic=True)  # noqa: E731
    observation = torch.randn(64, 4)
    actions = tw.deploy(env, policy)(observation)
    normalized = env.transforms[0].observation(observation).numpy()
    expected, _ = model.predict(normalized, deterministic=True)
    assert len(actions.unique()) == 2
    np.testing.assert_array_equal(actions, expected)


BOX_POLICIES = {"PPO": (PPO, T.ClipAction), "SAC": (SAC, lambda: T.RescaleAction(-1, 1))}


@pytest.mark.parametrize("kind, make", BOX_POLICIES.values(), ids=BOX_POLICIES)
def test_exported_actions_of_sb3_are_those_of_predict(unvalidated, kind, make):
    env = tw.make("Pendulum-v1", 4)
    model = kind("MlpPolicy", to_sb3(env), seed=0, device="cpu")
    head = model.policy.action_net if kind is PPO else model.policy.actor.mu
    with torch.no_grad():
        head.bias.fill_(3.0)
    policy = lambda td: model.policy._predict(td["observation"], deterministic=True)  # noqa: E731
    deployed = tw.deploy(tw.TransformedEnv(env, make()), policy)
    observation = torch.randn(64, 3)
    expected, _ = model.predict(observation.numpy(), deterministic=True)
    assert np.abs(expected).min() > 1.5
    np.testing.assert_allclose(deployed(observation), expected, rtol=1e-5)


@pytest.mark.full
@pytest.mark.skipif(scan_operator is None, reason="scan is a loop before PyTorch 2.11")
def test_compiled_scan_over_steps_with_parameters_needs_no_grad():
    functions = tw.pure(ScriptedEnv(2, (1,), action_space=Box(-1, 1, (1,))))
    network = torch.nn.Linear(1, 1)

    def body(carry, noise):
        state, td = carry
        state, transition, td = functions.step(state, network(td["observation"]) + noise)
        return (state, td), transition["next", "observation"]

    def scan(carry):
        return tw.scan(body, carry, torch.zeros(3, 2, 1))

    compiled = torch.compile(scan, backend="eager", fullgraph=True)
    carry = functions.init(seed=0)
    with pytest.raises(RuntimeError, match="outs_to_grad"):
        compiled(carry)
    with torch.no_grad():
        _, observations = compiled(carry)
    assert observations[:, 1].flatten().tolist() == [1001, 1002, 1003]
