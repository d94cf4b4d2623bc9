"""Remedies that the guides and errors name: what they mend, and that they mend it."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from helpers import from_reset
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import VecTransposeImage

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile.internals import scan_operator
from torchwrap.interop.sb3 import to_sb3
from torchwrap.testing import ScriptedEnv


class Window(FuncEnv):
    """Observes two of five numbers, from a position that is a tensor."""

    observation_space = Box(-9, 9, (2,))
    action_space = Discrete(2)

    def initial(self, rng, params=None):
        return {"numbers": torch.arange(5.0), "start": tw.random.integers(rng, 4)}

    def transition(self, state, action, rng, params=None):
        return state

    def observation(self, state, rng, params=None):
        start = state["start"]
        return state["numbers"][start : start + 2]

    def reward(self, state, action, next_state, rng, params=None):
        return torch.zeros(())

    def terminal(self, state, rng, params=None):
        return state["start"] < 0


class Gathered(Window):
    def observation(self, state, rng, params=None):
        return state["numbers"][state["start"] + torch.arange(2)]


def test_slice_with_tensor_bounds_is_refused_with_an_index_instead():
    with pytest.raises(TypeError, match=r"Window\.observation.*torch\.arange"):
        tw.FunctionalEnv(Window(), 8)


def test_index_instead_of_a_slice_reads_the_same_numbers():
    env = tw.FunctionalEnv(Gathered(), 8)
    observation = env.reset(seed=0)["observation"]
    start = env.state["start"]
    assert len(start.unique()) > 1
    assert observation.equal(torch.stack([start, start + 1], -1).float())


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


@pytest.mark.parametrize(
    ("mode", "observations"),
    [
        pytest.param(AutoresetMode.DISABLED, [1, 2, 3, 1], id="disabled"),
        pytest.param(AutoresetMode.SAME_STEP, [1, 2, 0, 1], id="same step loses the final one"),
    ],
)
def test_async_vector_env_of_an_env_with_one_array(mode, observations):
    vector_env = AsyncVectorEnv([lambda: Counts(np.int32)] * 2, autoreset_mode=mode)
    with tw.from_gymnasium(vector_env) as env:
        data = from_reset(tw.Collector(env, None, 4))
    assert data["next", "observation"][0].flatten().tolist() == observations


@pytest.mark.parametrize(
    ("backend", "shared"), [("gymnasium", True), ("torch", False)], ids=["gymnasium", "native"]
)
def test_runs_with_successive_seeds_share_envs_of_gymnasium(backend, shared):
    first, second = (
        tw.make("CartPole-v1", 3, backend=backend).reset(seed=seed)["observation"]
        for seed in (7, 8)
    )
    assert first[1:].equal(second[:2]) == shared


def test_double_observations_meet_a_float_network():
    network = torch.nn.Linear(3, 1)
    space = Box(-np.inf, np.inf, (3,), np.float64)
    observation = ScriptedEnv(2, observation_space=space).reset(seed=0)["observation"]
    with pytest.raises(RuntimeError, match="Double and Float"):
        network(observation)
    env = ScriptedEnv(2, observation_space=space)
    env = tw.TransformedEnv(env, T.DtypeObservation("float32"))
    assert network(env.reset(seed=0)["observation"]).shape == (2, 1)


def test_collected_data_is_flattened_by_reshape_and_not_by_view():
    data = tw.rollout(ScriptedEnv(2, (3,)), None, 4)
    with pytest.raises(RuntimeError, match="view size"):
        data["observation"].view(-1, 3)
    rows = data["observation"].flatten(0, 1)
    assert rows.equal(torch.cat(list(data["observation"])))


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
    module = tw.deploy(env, policy)
    shapes = module.dynamic_shapes()
    program = torch.export.export(module, module.example_inputs(), dynamic_shapes=shapes)
    observation = torch.randn(64, 4)
    assert len(module(observation).unique()) == 2
    assert program.module()(observation).equal(module(observation))


BOX_POLICIES = {"PPO": (PPO, T.ClipAction), "SAC": (SAC, lambda: T.RescaleAction(-1, 1))}


@pytest.mark.parametrize("kind, make", BOX_POLICIES.values(), ids=BOX_POLICIES)
def test_exported_actions_of_sb3_are_those_of_predict(unvalidated, kind, make):
    env = tw.make("Pendulum-v1", 4)
    model = kind("MlpPolicy", to_sb3(env), seed=0, device="cpu")
    head = model.policy.action_net if kind is PPO else model.policy.actor.mu
    with torch.no_grad():
        head.bias.fill_(3.0)
    policy = lambda td: model.policy._predict(td["observation"], deterministic=True)  # noqa: E731
    module = tw.deploy(tw.TransformedEnv(env, make()), policy)
    observation = torch.randn(64, 3)
    expected, _ = model.predict(observation.numpy(), deterministic=True)
    assert np.abs(expected).min() > 1.5
    np.testing.assert_allclose(module(observation), expected, rtol=1e-5)


def test_evaluation_of_images_needs_the_wrapper_that_sb3_puts_around_the_training_env():
    def make():
        space = Box(0, 255, (36, 36, 3), np.uint8)
        env = ScriptedEnv(2, (), 3, observation_space=space, action_space=Discrete(2))
        return to_sb3(tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.NormalizeReward()))

    extractor = {"features_extractor_kwargs": {"features_dim": 4}}
    model = PPO("CnnPolicy", make(), n_steps=4, batch_size=8, n_epochs=1, policy_kwargs=extractor)
    callback = EvalCallback(VecTransposeImage(make()), eval_freq=4, n_eval_episodes=2, verbose=0)
    model.learn(8, callback)
    assert callback.last_mean_reward == 1 + 2 + 3


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
