"""Remedies that the guides and errors name: what they mend, and that they mend it."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import params
from stable_baselines3 import PPO, SAC
from torch import nn

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.interop.sb3 import to_sb3
from torchwrap.testing import ScriptedEnv, check_transform

pytestmark = pytest.mark.newest


@pytest.fixture
def unvalidated():
    """PyTorch's distributions look at no value."""
    torch.distributions.Distribution.set_default_validate_args(False)
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


BOX_POLICIES = {"PPO": (PPO, T.ClipAction), "SAC": (SAC, lambda: T.RescaleAction(-1, 1))}


@pytest.mark.parametrize("case", params(BOX_POLICIES, quick=["PPO"]))
def test_exported_actions_of_sb3_are_those_of_predict(unvalidated, case):
    kind, make = case
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
def test_exported_policy_of_sb3_takes_a_dict(unvalidated):
    space = spaces.Dict(a=spaces.Box(-9, 9, (2,)), b=spaces.Discrete(3))
    env = ScriptedEnv(4, observation_space=space, action_space=spaces.Discrete(5))
    model = PPO("MultiInputPolicy", to_sb3(env), seed=0, device="cpu")

    def policy(td):
        return model.policy._predict(td["observation"].to_dict(), deterministic=True)

    deployed = tw.deploy(env, policy)
    observation = {"a": torch.randn(64, 2), "b": torch.randint(3, (64,))}
    arrays = {key: value.numpy() for key, value in observation.items()}
    expected, _ = model.predict(arrays, deterministic=True)
    np.testing.assert_array_equal(deployed(observation), expected)


# What an error advises works.


def pendulum(**kwargs):
    return tw.make("Pendulum-v1", 2, **kwargs)


def stack(*transforms):
    return tw.TransformedEnv(ScriptedEnv(2, (3,), episode_lengths=1), *transforms)


def simulated(*transforms):
    return tw.TransformedEnv(pendulum(backend="gymnasium"), *transforms)


def bridged(mode):
    make = [lambda: gymnasium.make("CartPole-v1")] * 2
    return tw.from_gymnasium(SyncVectorEnv(make, autoreset_mode=AutoresetMode[mode]))


def pooled(**kwargs):
    pytest.importorskip("envpool")
    return tw.make("CartPole-v1", 2, backend="envpool", **kwargs)


def ended():
    """An env whose episodes have just ended, and the results of the step."""
    env = stack()
    env.reset()
    return env, *env.step(torch.zeros(2, 6))


def exported(next_call):
    envs = tw.to_gymnasium(stack(), autoreset_mode="DISABLED")
    envs.reset()
    envs.step(np.zeros((2, 6)))
    next_call(envs)


def deployed(observation):
    return tw.deploy(pendulum(), lambda td: td["observation"][:, :1])(observation)


def repeated(number_of):
    return tw.deploy(pendulum(), lambda td: td["observation"][:1, :1].expand(number_of(td), 1))


def compiled(target):
    tw.compile(target, backend="eager")


def collected(network):
    compiled(tw.Collector(pendulum(), lambda td: network(td["observation"]), 2))


def registered(make):
    tw.register("test/Remedy-v0", Pendulum)
    make("test/Remedy-v0")


ROWS = torch.zeros(2, 3)
NETWORK = nn.Linear(3, 1)
ERRORS = {  # a call, what it refuses, the advice, and what is advised
    "observation": (deployed, ROWS[0], "[None]", ROWS[0][None]),
    "array": (deployed, ROWS.numpy(), "torch.as_tensor", torch.as_tensor(ROWS.numpy())),
    "len": (repeated, len, "td.batch_size[0]", lambda td: td.batch_size[0]),
    "compiled": (collected, torch.compile(NETWORK), "what torch.compile was given", NETWORK),
    "collector": (
        lambda wrap: compiled(wrap(simulated(T.ClipReward(-1)))),
        lambda env: tw.Collector(env, None, 2),
        "Compile the env",
        lambda env: env,
    ),
    "copy": (
        lambda copied: copied(simulated(T.NormalizeReward())),
        copy.deepcopy,
        "load_state_dict(env.state_dict())",
        lambda env: simulated(T.NormalizeReward()).load_state_dict(env.state_dict()),
    ),
    "attribute": (
        lambda change: change(),
        lambda: pendulum().set_wrapper_attr("g", 9.8),
        "pass it to make",
        lambda: pendulum(g=9.8),
    ),
    "render": (
        lambda kwargs: pendulum(**kwargs).render(),
        {},
        'render_mode="rgb_array"',
        {"render_mode": "rgb_array"},
    ),
    "mask": (
        lambda shaped: ended()[0].reset(mask=shaped(torch.ones(2, 1, dtype=torch.bool))),
        lambda mask: mask,
        "mask.squeeze(-1)",
        lambda mask: mask.squeeze(-1),
    ),
    "seed": (lambda kwargs: pooled(**kwargs).reset(seed=5), {}, "seed=5", {"seed": 5}),
    "root": (
        lambda choose: choose(*ended()),
        lambda env, transition, td: env.step(transition),
        "transition, td = env.step(td)",
        lambda env, transition, td: env.step(td.set("action", env.sample_action())),
    ),
    "ended": (
        exported,
        lambda envs: envs.step(np.zeros((2, 6))),
        'options={"reset_mask": terminations | truncations}',
        lambda envs: envs.reset(options={"reset_mask": np.ones(2, bool)}),
    ),
    "adapter": (
        lambda choose: tw.evaluate(choose(tw.to_gymnasium(stack())), None, 2),
        lambda envs: envs,
        "`.env`",
        lambda envs: envs.env,
    ),
    "wrapper": (
        lambda wrap: wrap(stack()),
        T.ClipReward,
        "TransformedEnv(env, ClipReward(...))",
        lambda env: tw.TransformedEnv(env, T.ClipReward(-1)),
    ),
    "group": (
        lambda part: stack(*part),
        [T.ObservationGroups({"a": [T.ClipReward(-1)]})],
        "beside it",
        [T.ObservationGroups({"a": []}), T.ClipReward(-1)],
    ),
    "made": (check_transform, T.ClipReward(-1), "`lambda:`", lambda: T.ClipReward(-1)),
    "spec": (
        registered,
        lambda id: tw.make(tw.FunctionalEnv(Pendulum(), 2).spec),
        "register",
        lambda id: tw.make(tw.make(id).spec),
    ),
    "id": (registered, gymnasium.make, "torchwrap.make(id)", tw.make),
    "mode": (bridged, "NEXT_STEP", "AutoresetMode.DISABLED", "DISABLED"),
    "shape": (
        lambda shape: random.uniform(random.Stream(2, seed=0).key(), shape=shape),
        3,
        "shape=(3,)",
        (3,),
    ),
}


@pytest.mark.filterwarnings("ignore:.*already in registry", "ignore:.*precision lowered")
@pytest.mark.parametrize("case", params(ERRORS, quick={*ERRORS} - {"made", "compiled", "array"}))
def test_what_an_error_advises_works(case, registry):
    call, refused, advice, advised = case
    with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError)) as raised:
        call(refused)
    assert advice in str(raised.value)
    call(advised)
