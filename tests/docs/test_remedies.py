"""Remedies that the guides and errors name: what they mend, and that they mend it."""

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO, SAC

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.sb3 import to_sb3


@pytest.fixture
def unvalidated():
    """PyTorch's distributions look at no value."""
    torch.distributions.Distribution.set_default_validate_args(False)
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


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
