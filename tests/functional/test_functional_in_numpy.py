"""Small batches on the CPU: functions that are traced and computed in NumPy, and initial states that are drawn ahead."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from func_envs import BroadcastWalk
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete
from torchwrap._env.host_function import HostFunction

import torchwrap as tw
from torchwrap import random

NATIVE = ["Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]


class Counter(FuncEnv):
    """Counts its steps by `rate`, and says how often each function was called."""

    observation_space, action_space = Box(-np.inf, np.inf, (2,)), Discrete(3)
    broadcasts = is_pure = True

    def __init__(self):
        self.rate = 1.0
        self.calls = []

    def initial(self, rng, params=None, low=0.0):
        self.calls.append("initial")
        return {"x": low + random.uniform(rng), "y": random.uniform(rng.fold_in(1))}

    def transition(self, state, action, rng, params=None):
        self.calls.append("transition")
        return {"x": state["x"] + self.rate * (action - 1), "y": state["y"] * 0.5}

    def observation(self, state, rng, params=None):
        return torch.stack([state["x"], state["y"]], -1)

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["x"] - state["x"]

    def terminal(self, state, rng, params=None):
        return state["x"].abs() > 3


def in_pytorch(env):
    """The same env, whose functions are computed in PyTorch."""
    env.unwrapped._is_small = False
    return env


def play(env, num_steps, seed=0):
    generator = torch.Generator().manual_seed(1)
    seen = [env.reset(seed=seed)["observation"]]
    for _ in range(num_steps):
        action = torch.randint(0, 3, (env.num_envs,), generator=generator)
        transition, td = env.step(action)
        seen += [transition["next", key] for key in ("observation", "reward", "terminated", "truncated")]
        seen.append(td["observation"])
    return seen


def require_close(given, expected, tolerance=0.0):
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# Agreement with PyTorch.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [1, 7])
@pytest.mark.parametrize("id", NATIVE)
def test_native_env_in_numpy_agrees_with_pytorch_in_each_step(id, num_envs, dtype):
    env, other = (tw.make(id, num_envs, dtype=dtype, max_episode_steps=9) for _ in range(2))
    env.reset(seed=0), in_pytorch(other).reset(seed=0)
    for _ in range(60):
        action = env.sample_action()
        (transition, td), (expected, root) = env.step(action), other.step(action)
        for key in ("observation", "reward", "terminated", "truncated", "done"):
            torch.testing.assert_close(transition["next", key], expected["next", key], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(td["observation"], root["observation"], rtol=2e-6, atol=2e-6)
        for name, value in env.state.items():  # rounding differs, and must not add up
            other.state[name].copy_(value)
    assert env._host_steps._advance_and_finish._run is not None


def test_env_of_few_and_of_many_rows_plays_the_same():
    few, many = counters(3), counters(9000)
    assert few._is_small and not many._is_small
    few.reset(seed=0), many.reset(seed=0)
    for _ in range(40):
        action = torch.randint(0, 3, (9000,))
        one, other = few.step(action[:3])[1], many.step(action)[1]
        assert torch.equal(one["observation"], other["observation"][:3])


def counters(num_envs, func_env=None, **keywords):
    return tw.FunctionalEnv(func_env or Counter(), num_envs, **keywords)


WEIGHTS = torch.tensor([0.5, -2.0])
NUMBERS = [-np.inf, -2.5, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 3.0, np.inf, np.nan]
OPERATORS = {
    "add": lambda x, k, b: x + 0.1 + k,
    "subtract": lambda x, k, b: (x - k, 1.5 - x, 2 - k, k - 0.5),
    "multiply": lambda x, k, b: (x * 3, k * 3, k * 0.3, x * k, b * x, b & b),
    "divide": lambda x, k, b: (x / 3, 1 / x, k / 2, k / k, x / b),
    "remainder": lambda x, k, b: (x % 0.7, torch.remainder(x, -0.7)),
    "compare": lambda x, k, b: (x > 0, x >= k, x < 1, x <= 0.5, x == 1, k != 2, k == 1.0, k > 0.5),
    "logic": lambda x, k, b: (b & (x > 0), b | (x > 0), ~b, b ^ (x > 0), b.logical_not(), torch.logical_and(x, k)),
    "trigonometry": lambda x, k, b: (x.sin(), x.cos(), torch.tan(x), x.tanh(), k.sin(), x.atan(), torch.atan2(x, x + 1)),
    "inverse trigonometry": lambda x, k, b: (x.asin(), x.acos(), x.sinh(), x.cosh()),
    "exponential": lambda x, k, b: (x.exp(), x.abs().sqrt(), x.expm1()),
    "logarithm": lambda x, k, b: (x.log(), x.log1p(), x.log2(), x.sigmoid(), torch.hypot(x, x + 1)),
    "round": lambda x, k, b: (x.ceil(), x.floor(), x.abs(), -x, k.abs(), -k, x.round(), x.trunc(), torch.fmod(x, 0.7)),
    "clamp": lambda x, k, b: (
        *(x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0), k.clamp(0, 2), x.relu(), k.relu()),
        *(x.clamp(torch.tensor(-1.0), x + 1), x.clamp(max=-x)),
    ),
    "not finite": lambda x, k, b: (x.isnan(), x.isinf(), x.isfinite()),
    "maximum": lambda x, k, b: (torch.maximum(x, -x), torch.minimum(x, -x), torch.copysign(x, -x)),
    "select": lambda x, k, b: (torch.where(b, x, 0.0), torch.where(b, 1.0, -1.0), torch.where(b, x, k), x.masked_fill(b, 7)),
    "convert": lambda x, k, b: (k.to(torch.float32), b.to(torch.int64), b.float(), x.double(), k.to(torch.int32) + 1),
    "fill": lambda x, k, b: (
        *(torch.zeros_like(x), torch.ones_like(k), torch.ones_like(x, dtype=torch.bool), torch.full_like(x, 2.5)),
        *(torch.zeros(3), torch.full((2,), 7)),
    ),
    "constants": lambda x, k, b: (torch.tensor([1.0, 2.0]), x.view(3, 4) * torch.arange(4), WEIGHTS, WEIGHTS + x[0]),
    "powers": lambda x, k, b: (x**2, k**2, x**2.0, k**2.0, x**3, k**3, x**3.0, k**3.0, x**0.5, x.rsqrt(), x.square()),
    "reduce": lambda x, k, b: (
        *(x.view(3, 4).sum(-1), x.view(3, 4).sum(0, keepdim=True), x.view(3, 2, 2).sum((0, 2)), k.view(3, 4).sum(1)),
        *(b.view(3, 4).sum(1), x.view(3, 4).mean(-1), x.view(3, 4).prod(1), x.view(3, 4).amax(1), x.view(3, 4).amin(0, True)),
        *(x.view(3, 4).max(-1).values, x.view(3, 4).min(0, keepdim=True).values, k.view(3, 4).max(1)[0]),
        *(b.view(3, 4).any(1), b.view(3, 4).all(-1, keepdim=True), (x.view(3, 4) > 0).any(0), x.view(3, 4).norm(dim=1)),
        *(torch.linalg.vector_norm(x.view(3, 4), dim=-1, keepdim=True), k.view(3, 4).sum(1, dtype=torch.float32)),
    ),
    "index": lambda x, k, b: (
        *(x.view(3, 4)[0], x.view(3, 4)[:, -1], x.view(3, 4)[..., 1:3], x[1:], x[:-2], x[::2], x[-3:], k[2:] + 1),
        *(x.view(3, 4).narrow(1, 1, 2), x.view(2, 3, 2)[:, 1, :], x.view(3, 4)[1, 2:]),
    ),
    "concatenate": lambda x, k, b: (torch.cat([x, -x]), torch.cat([x.view(3, 4), x.view(3, 4)[:, :1]], -1), torch.cat([x, k])),
    "expand": lambda x, k, b: (x.expand(2, 12), x[:1].expand(5), x.view(3, 1, 4).expand(-1, 2, -1) + 1, torch.outer(x, x)),
    "permute": lambda x, k, b: (
        *(x.view(3, 4).permute(1, 0), x.view(2, 3, 2).permute(2, 0, 1) * 2, x.view(3, 4).permute(1, 0).reshape(-1)),
        torch.vmap(lambda row: torch.stack([row, row + 1]).T.flatten())(x.view(3, 4)),
    ),
    "stack": lambda x, k, b: (torch.stack([x, x], -1), torch.stack([x, k.float()]), *torch.stack([x, -x], 1).unbind(-1)),
    "shape": lambda x, k, b: (x.view(-1, 1), x.unsqueeze(0).squeeze(0), *x.split(5), torch.stack([x, x], 1).unbind(1)[0] + 1),
    "parts": lambda x, k, b: (
        *torch.stack([x, -x]).unbind(),
        *torch.stack([x, -x, x], -1).split(2, -1),
        *x.view(3, 4).split(1),
    ),
    "the same expression twice": lambda x, k, b: (
        x.sin() + x.sin(),
        x.sin(),
        x.sin(),
        torch.ones_like(x),
        torch.zeros_like(x),
    ),
    "one": lambda x, k, b: (x * 1, x / 1.0, 1 * k, k / 1, b * 1, b * 1.0, x * 1 + 1),
    "the same tensor twice": lambda x, k, b: (x, x, x.view(-1, 1), x.view(-1, 1)),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_in_numpy_agrees_with_pytorch(name, dtype):
    x = torch.tensor(NUMBERS, dtype=dtype)
    k, b = torch.arange(12) - 3, torch.arange(12) % 3 == 0

    def function(x, k, b):
        results = OPERATORS[name](x, k, b)
        return [], list(results) if isinstance(results, tuple) else [results]

    run = in_numpy(function, x, k, b)
    given = run()
    require_close_with_nan(given, function(x, k, b)[1])
    for result in given:
        result.fill_(1)  # results are the caller's
    require_close_with_nan(run(), function(x, k, b)[1])


def in_numpy(function, *tensors):
    arrays = [tensor.numpy() for tensor in tensors]
    run = HostFunction().translated(function, 1, arrays)
    return lambda: list(map(torch.from_numpy, run(*arrays)))


def require_close_with_nan(given, expected):
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ([], [x.cumsum(0)]),
        lambda x: ([], [torch.add(x, x, alpha=2)]),
        lambda x: ([], [torch.div(x, 2, rounding_mode="floor")]),
        lambda x: ([], [x**4]),
        lambda x: ([], [x.sum()]),
        lambda x: ([], [x.clone().add_(1)]),
        lambda x: ([], [in_place(x)]),
        lambda x: ([], [x.view(1, 2) @ x.view(2, 1)]),
        lambda x: ([], [x.view(1, 2).max(-1).indices]),
        lambda x: ([], [x.view(1, 2).norm(1, -1)]),
        lambda x: ([], [x.int().round()]),
        lambda x: ([], [x.bfloat16()]),
        lambda x: ([], [x + 1 if x.sum() > 0 else x]),
    ],
)
def test_function_without_counterpart_in_numpy_is_not_translated(function):
    assert HostFunction().translated(function, 1, [np.array([1.0, -4.0], np.float32)]) is None


def in_place(x):
    x = x.clone()
    x.mul_(2)
    return x


@pytest.mark.parametrize("num_envs", [1, 5])
def test_env_with_a_vector_as_its_state_is_computed_in_numpy(num_envs):
    def walks():
        return tw.FunctionalEnv(Walk(), num_envs, max_episode_steps=9)

    env, other = walks(), in_pytorch(walks())
    env.reset(seed=0), other.reset(seed=0)
    for _ in range(40):
        action = env.sample_action()
        (transition, td), (expected, root) = env.step(action), other.step(action)
        for key in ("observation", "reward", "terminated", "truncated"):
            torch.testing.assert_close(transition["next", key], expected["next", key], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(td["observation"], root["observation"], rtol=1e-5, atol=1e-5)
    assert env._host_steps._advance_and_finish._run is not None


class Walk(FuncEnv):
    """Walks to the origin, one env at a time; written as a user would, for `vmap`."""

    observation_space, action_space = Box(-np.inf, np.inf, (5,)), Box(-1, 1, (2,))
    is_pure = True

    def initial(self, rng, params=None):
        return {"position": random.uniform(rng, (2,)), "velocity": torch.zeros(2)}

    def transition(self, state, action, rng, params=None):
        velocity = (0.9 * state["velocity"] + 0.1 * action.clamp(-1, 1)).clamp(-1, 1)
        return {"position": state["position"] + velocity * torch.tensor([1.0, 0.5]), "velocity": velocity}

    def observation(self, state, rng, params=None):
        return torch.cat([state["position"], state["velocity"], state["position"].norm().unsqueeze(0)])

    def reward(self, state, action, next_state, rng, params=None):
        return -next_state["position"].square().sum() - 0.1 * action.abs().max()

    def terminal(self, state, rng, params=None):
        return (state["position"].abs() > 2).any() | (state["position"][0] > 1.5)


def test_results_share_no_memory():
    def function(x):
        total = x + 1
        return [total], [total, total, total.view(-1, 1), x, torch.ones_like(x)]

    x = torch.zeros(3)
    run = in_numpy(function, x)
    for count in (1, 2):
        results = run()
        for number, result in enumerate(results):
            result.fill_(10 + number)
        assert [result.unique().tolist() for result in results] == [[10], [11], [12], [13], [14]]
        assert x.tolist() == [count] * 3


@pytest.mark.parametrize(
    "swap", [lambda x, y: [y.clone(), x.clone()], lambda x, y: [y * 1, x * 1], lambda x, y: [y.view(1), x.view(1)]]
)
def test_updates_may_swap_what_they_read(swap):
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    (old,) = in_numpy(lambda x, y: (swap(x, y), [x]), x, y)()
    assert (x.item(), y.item(), old.item()) == (2, 1, 1)


@pytest.mark.parametrize("id", NATIVE)
def test_native_env_plays_the_same_under_a_transform(id):
    env, other = tw.make(id, 5, max_episode_steps=9), tw.TransformedEnv(tw.make(id, 5, max_episode_steps=9))
    root, td = env.reset(seed=0), other.reset(seed=0)
    for _ in range(60):
        action = env.sample_action()
        assert torch.equal(root["observation"], td["observation"])
        (transition, root), (expected, td) = env.step(action), other.step(action)
        for key in ("observation", "reward", "terminated", "truncated", "done"):
            assert torch.equal(transition["next", key], expected["next", key])
    for name, value in env.state.items():
        assert torch.equal(value, other.env.state[name])


# What is followed.


def test_attribute_that_is_replaced_is_followed():
    env = counters(2)
    env.reset(seed=0)
    first = env.step(torch.tensor([2, 2]))[0]["next", "reward"]
    env.func_env.rate = 0.25
    second = env.step(torch.tensor([2, 2]))[0]["next", "reward"]
    torch.testing.assert_close(first.flatten(), torch.ones(2))
    torch.testing.assert_close(second.flatten(), torch.full((2,), 0.25))


def test_tensor_that_is_written_in_place_is_followed():
    class Weighted(Counter):
        def __init__(self):
            super().__init__()
            self.weights = torch.tensor([1.0, 2.0])

        def reward(self, state, action, next_state, rng, params=None):
            return (torch.stack([state["x"], state["y"]], -1) * self.weights).sum(-1)

    env, other = counters(2, Weighted()), in_pytorch(counters(2, Weighted()))
    env.reset(seed=0), other.reset(seed=0)
    for _ in range(3):
        rewards = [each.step(torch.tensor([1, 1]))[0]["next", "reward"] for each in (env, other)]
        torch.testing.assert_close(*rewards)
        env.func_env.weights += 1
        other.func_env.weights += 1
    assert env._host_steps._advance_and_finish._run is not None


def test_memory_that_moves_is_followed():
    env = counters(2)
    env.reset(seed=0)
    env.step(torch.tensor([1, 1]))
    env.share_memory()  # moves the memory of each buffer
    env.state["x"].fill_(1.5)
    assert env.step(torch.tensor([2, 0]))[0]["next", "observation"][:, 0].tolist() == [2.5, 0.5]
    env.get_submodule("")._buffers["state_x"] = torch.tensor([-1.0, 0.0])
    assert env.step(torch.tensor([2, 0]))[0]["next", "observation"][:, 0].tolist() == [0, -1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copy_continues_like_the_env(duplicate):
    env = counters(3)
    play(env, 5)
    twin = duplicate(env)
    for _ in range(20):
        action = torch.randint(0, 3, (3,))
        assert torch.equal(env.step(action)[1]["observation"], twin.step(action)[1]["observation"])
    assert twin.state["x"].data_ptr() != env.state["x"].data_ptr()


def test_functions_of_a_pure_class_are_traced_once_and_others_are_called_in_each_step():
    pure, impure = Counter(), Counter()
    impure.is_pure = False
    for func_env, calls in ((pure, 1), (impure, 9)):
        env = counters(2, func_env)
        env.reset(seed=0)
        func_env.calls.clear()
        for _ in range(9):
            env.step(torch.tensor([1, 1]))
        assert func_env.calls.count("transition") == calls
    assert not tw.FunctionalEnv(BroadcastWalk(), 2)._is_small


# Initial states that are drawn ahead.


@pytest.mark.parametrize("num_envs", [1, 3, 300])
def test_initial_states_are_those_of_their_episodes(num_envs):
    env, other = counters(num_envs, max_episode_steps=5), in_pytorch(counters(num_envs, max_episode_steps=5))
    require_close(play(env, 200), play(other, 200))


def test_initial_states_follow_masks_seeds_options_snapshots_and_attributes():
    class Shifted(Counter):
        def initial(self, rng, params=None, low=0.0):
            return {name: value + self.rate for name, value in super().initial(rng, params, low).items()}

    env, other = counters(3, Shifted()), in_pytorch(counters(3, Shifted()))
    mask = torch.tensor([False, True, True])
    calls = [
        lambda env: env.reset(seed=0),
        lambda env: env.reset(mask=mask),
        lambda env: env.reset(mask=~mask),
        lambda env: env.reset(mask=mask, seed=5),
        lambda env: env.reset(options={"low": 2.0}),
        lambda env: env.reset(),
        lambda env: env.restore(snapshots[env]),
        lambda env: env.reset(mask=mask),
        lambda env: env.reset(mask=torch.zeros(3, dtype=torch.bool)),
        lambda env: setattr(env.func_env, "rate", 0.5) or env.reset(),
        lambda env: env.reset(seed=0),
    ]
    snapshots = {}
    for call in calls:
        observations = [call(each)["observation"] for each in (env, other)]
        assert torch.equal(*observations)
        for each in (env, other):
            snapshots.setdefault(each, each.snapshot())


def test_parameters_that_are_written_in_place_reach_initial_states():
    class Placed(Counter):
        def initial(self, rng, params=None):
            return {"x": params["start"].clone(), "y": random.uniform(rng)}

    env = tw.FunctionalEnv(Placed(), 2, params={"start": torch.tensor([1.0, 2.0])})
    env.reset(seed=0)
    env.params["start"].fill_(0.5)
    assert env.reset()["observation"][:, 0].tolist() == [0.5, 0.5]


def test_initial_observation_that_draws_is_that_of_its_episode():
    class Noisy(Counter):
        def observation(self, state, rng, params=None):
            return super().observation(state, rng) + random.normal(rng, (2,))

    env, other = counters(3, Noisy(), max_episode_steps=2), in_pytorch(counters(3, Noisy(), max_episode_steps=2))
    require_close(play(env, 20), play(other, 20))


def test_initial_states_after_an_interrupted_draw_are_those_of_their_episodes():
    calls = []

    class Interrupted(Counter):
        def initial(self, rng, params=None, low=0.0):
            calls.append(1)
            if len(calls) == interrupted:
                raise KeyboardInterrupt
            return super().initial(rng, params, low)

    interrupted, interrupts = None, 0
    env, other = counters(3, Interrupted()), in_pytorch(counters(3))
    env.reset(seed=0), other.reset(seed=0)
    interrupted = len(calls) + 1
    for _ in range(300):
        expected = other.reset()["observation"]
        try:
            assert torch.equal(env.reset()["observation"], expected)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
