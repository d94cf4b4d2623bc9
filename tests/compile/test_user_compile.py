"""The user's own `torch.compile(fullgraph=True)` of a function that acts and steps an env.

It equals eager mode in every value and buffer while episodes end at different times. The whole step
with its auto-reset is one graph, and no later call compiles another.
"""

import functools

import pytest
import torch
from catalogue import NUM_ENVS, WRAPPERS, ActorCritic, cartpole, vmapped
from gymnasium.spaces import Box
from helpers import AT_RELEASES, INDUCTOR, assert_same, buffers, mostly_full

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full
NATIVE = ["Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]


def choose(space, number):
    """Members of an action space that depend on a number `(num_envs,)`."""
    if isinstance(space, Box):
        shift = torch.arange(space.shape[0]) / 7
        return torch.tanh(number.unsqueeze(-1) + shift)
    return (10 * number).long().remainder(int(space.n))


def users_step(env, policy=None):
    """A policy step and an env step, as a user would write them."""

    def act(td):
        number = td["observation"].float().flatten(1).mean(1)
        return td.set("action", choose(env.single_action_space, number))

    return lambda td: env.step((policy or act)(td))


def state_of(env):
    """A copy of all buffers without the scratch rows of `RecordEpisodeStatistics`."""
    found = buffers(env)
    for name, module in env.named_modules():
        if isinstance(module, T.RecordEpisodeStatistics):
            key = f"{name}.records"
            found[key] = found[key][: module.ring_size]
    return found


@torch.no_grad()
@torch._dynamo.config.patch(error_on_recompile=True)
def assert_compiles(make, backend="eager", tolerance=0.0, num_steps=50, policy=None):
    """One graph plays as eager mode does. A graph break or a second compilation raises."""
    torch._dynamo.reset()
    eager, compiled = (make() for _ in range(2))
    step = users_step(eager, policy)
    compiled_step = torch.compile(users_step(compiled, policy), fullgraph=True, backend=backend)
    expected_td, td = (env.reset(seed=0) for env in (eager, compiled))
    ended = torch.zeros(eager.num_envs, dtype=torch.bool)
    is_staggered = False
    for index in range(num_steps):
        expected, expected_td = step(expected_td)
        transition, td = compiled_step(td)
        assert_same(transition, expected, tolerance)
        assert_same(td, expected_td, tolerance)
        assert_same(state_of(compiled), state_of(eager), tolerance)
        done = expected["next", "done"].flatten()
        ended |= done
        is_staggered |= bool(done.any() and not done.all())
        if index == 25:  # a call outside of the graph, after which rows end at different times
            mask = torch.arange(eager.num_envs) % 2 == 0
            expected_td, td = (env.reset(mask=mask) for env in (eager, compiled))
    assert ended.all()
    assert is_staggered


def stacked():
    transforms = (
        T.TimeLimit(9),
        T.StickyAction(0.5),
        T.DelayObservation(1),
        T.RecordEpisodeStatistics(3),
        T.NormalizeObservation(),
        T.FrameStackObservation(2),
        T.NormalizeReward(),
    )
    return tw.TransformedEnv(ScriptedEnv(NUM_ENVS), *transforms)


THROUGH_INDUCTOR = pytest.param("inductor", INDUCTOR, marks=AT_RELEASES)


@full
@pytest.mark.parametrize(("backend", "tolerance"), [("eager", 0.0), THROUGH_INDUCTOR])
def test_transforms_compile_in_a_stack(backend, tolerance):
    assert_compiles(stacked, backend, tolerance)


@full
def test_native_env_with_transforms_and_a_network_compiles():
    torch.manual_seed(0)
    assert_compiles(cartpole, policy=ActorCritic())


def repeated():
    return tw.TransformedEnv(WRAPPERS["RepeatAction"](NUM_ENVS), T.TimeLimit(2))


ENVS = {id: functools.partial(tw.make, id, NUM_ENVS, max_episode_steps=7) for id in NATIVE}
ENVS["vmapped"] = vmapped
ENVS["RepeatAction"] = repeated
ENVS["MaxAndSkipObservation"] = functools.partial(
    WRAPPERS["MaxAndSkipObservation"], NUM_ENVS, episode_lengths=(7, 4, 9)
)


@pytest.mark.parametrize("name", mostly_full(ENVS, long={*NATIVE} - {"CartPole-v1"}))
def test_env_compiles(name):
    assert_compiles(ENVS[name])
