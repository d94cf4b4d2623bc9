"""The user's own `torch.compile(fullgraph=True)` of a function that acts and steps an env.

It equals eager mode in every value and buffer while episodes end at different times. The whole step
with its auto-reset is one graph, and no later call compiles another.
"""

import functools
import math

import pytest
import torch
from catalogue import COMPILED, NUM_ENVS, REPRESENTATIVE, WRAPPERS, ActorCritic, cartpole
from gymnasium.spaces import Box, Discrete
from helpers import AOT, INDUCTOR, assert_same, buffers, mostly_full
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import spaces
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full
NATIVE = ["Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]


def choose(space, number):
    """Members of an action space that depend on a number `(num_envs,)`."""
    parts = spaces.children(space)
    if parts is not None:
        actions = {key: choose(part, number) for key, part in parts.items()}
        return TensorDict(actions, [len(number)])
    if isinstance(space, Box):
        shift = torch.arange(math.prod(space.shape)).view(space.shape) / 7
        column = number.view(-1, *(1,) * len(space.shape))
        return torch.tanh(column + shift).to(spaces.dtype(space))
    counts = [space.n] if isinstance(space, Discrete) else space.nvec.tolist()
    index = (10 * number).long().unsqueeze(-1).remainder(torch.tensor(counts))
    return index.squeeze(-1) + int(space.start) if isinstance(space, Discrete) else index


def users_step(env, policy=None):
    """A policy step and an env step, as a user would write them."""

    def act(td):
        observation = td["observation"]
        leaves = [observation]
        if not isinstance(observation, torch.Tensor):
            leaves = observation.values(True, True)
        number = sum(leaf.float().view(len(leaf), -1).mean(1) for leaf in leaves)
        for name in env.signature.policy_state:
            td["next", name] = td[name] + 1
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


def make_stack(names):
    """An env with transforms of the catalogue; None if their envs or spaces do not fit."""
    envs = {repr(COMPILED[name][1]): COMPILED[name][1] for name in names}
    if len(envs) > 1:
        return None
    (make_env,) = envs.values()
    try:
        return tw.TransformedEnv(make_env(NUM_ENVS), *[COMPILED[name][0]() for name in names])
    except (TypeError, ValueError):
        return None


def stacks(names):
    """Functions that make an env: the transforms in as few stacks as their spaces allow."""
    found = []
    for name in names:
        fitting = [stacked for stacked in found if make_stack([*stacked, name]) is not None]
        if fitting:
            fitting[0].append(name)
        else:
            found.append([name])
    return [functools.partial(make_stack, stacked) for stacked in found]


def test_transforms_compile_in_a_stack():
    assert_compiles(stacks(REPRESENTATIVE)[0])


@full
def test_native_env_with_transforms_and_a_network_compiles():
    torch.manual_seed(0)
    assert_compiles(cartpole, policy=ActorCritic())


class VmappedPendulum(Pendulum):
    broadcasts = False


def repeated():
    return tw.TransformedEnv(WRAPPERS["RepeatAction"](NUM_ENVS), T.TimeLimit(2))


ENVS = {id: functools.partial(tw.make, id, NUM_ENVS, max_episode_steps=7) for id in NATIVE}
ENVS["vmapped"] = lambda: tw.FunctionalEnv(VmappedPendulum(), NUM_ENVS, max_episode_steps=5)
ENVS["RepeatAction"] = repeated
ENVS["MaxAndSkipObservation"] = functools.partial(
    WRAPPERS["MaxAndSkipObservation"], NUM_ENVS, episode_lengths=(7, 4, 9)
)


@pytest.mark.parametrize("name", mostly_full(ENVS, long={*NATIVE} - {"CartPole-v1"}))
def test_env_compiles(name):
    assert_compiles(ENVS[name])


def test_action_is_not_changed_and_outputs_are_the_callers():
    env = ScriptedEnv(2, (3,), episode_lengths=2)
    step = torch.compile(users_step(env), fullgraph=True, backend="aot_eager")
    transition, td = step(env.reset())
    held = transition.clone()
    step(td)
    assert_same(transition, held)


@pytest.mark.long
@full
def test_every_transform_compiles_through_aot_autograd_in_stacks():
    for make in stacks(COMPILED):
        assert_compiles(make, "aot_eager", AOT)


@pytest.mark.long
@full
def test_transforms_compile_through_inductor():
    for make in stacks(["Compose of seven", "StickyAction"]):
        assert_compiles(make, "inductor", INDUCTOR)
