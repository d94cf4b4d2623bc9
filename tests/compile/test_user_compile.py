"""The user's own `torch.compile(fullgraph=True)` of a function that chooses an action and steps an env.

It equals eager mode in every value and buffer while episodes end at different times; the whole step with its auto-reset is one
graph, and no call after the first compiles another.
"""

import functools
import math

import pytest
import torch
from catalogue import COMPILED, NUM_ENVS, REPRESENTATIVE, WRAPPERS, ActorCritic, cartpole
from gymnasium.spaces import Box, Discrete
from helpers import AOT, INDUCTOR, assert_same, buffers
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import spaces
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import ScriptedEnv

NATIVE = ["Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]


def choose(space, number):
    """Members of an action space that depend on a number `(num_envs,)`."""
    if (parts := spaces.children(space)) is not None:
        return TensorDict({key: choose(part, number) for key, part in parts.items()}, [len(number)])
    if isinstance(space, Box):
        shift = torch.arange(math.prod(space.shape)).view(space.shape) / 7
        return torch.tanh(number.view(-1, *(1,) * len(space.shape)) + shift).to(spaces.dtype(space))
    counts = [space.n] if isinstance(space, Discrete) else space.nvec.tolist()
    index = (10 * number).long().unsqueeze(-1).remainder(torch.tensor(counts))
    return index.squeeze(-1) + int(space.start) if isinstance(space, Discrete) else index


def users_step(env, policy=None):
    """A policy step, and an env step, as a user would write them."""

    def step(td):
        if policy is not None:
            return env.step(policy(td))
        observation = td["observation"]
        leaves = (
            [observation]
            if isinstance(observation, torch.Tensor)
            else observation.values(True, True)
        )
        number = sum(leaf.float().view(len(leaf), -1).mean(1) for leaf in leaves)
        for name in env.signature.policy_state:
            td["next", name] = td[name] + 1
        return env.step(td.set("action", choose(env.single_action_space, number)))

    return step


def state_of(env):
    """A copy of all buffers, without the rows that `RecordEpisodeStatistics` writes to and never reads."""
    found = buffers(env)
    for name, module in env.named_modules():
        if isinstance(module, T.RecordEpisodeStatistics):
            found[f"{name}.records"] = found[f"{name}.records"][: module.ring_size]
    return found


@torch.no_grad()
@torch._dynamo.config.patch(error_on_recompile=True)
def assert_compiles(make, backend="eager", tolerance=0.0, num_steps=50, policy=None):
    """One graph plays what eager mode plays. A graph break raises, and so does a second compilation."""
    torch._dynamo.reset()
    eager, compiled = make(), make()
    step = users_step(eager, policy)
    compiled_step = torch.compile(users_step(compiled, policy), fullgraph=True, backend=backend)
    expected_td, td = eager.reset(seed=0), compiled.reset(seed=0)
    ended, is_staggered = torch.zeros(eager.num_envs, dtype=torch.bool), False
    for index in range(num_steps):
        (expected, expected_td), (transition, td) = step(expected_td), compiled_step(td)
        assert_same(transition, expected, tolerance)
        assert_same(td, expected_td, tolerance)
        assert_same(state_of(compiled), state_of(eager), tolerance)
        done = expected["next", "done"].flatten()
        ended, is_staggered = ended | done, is_staggered or bool(done.any() and not done.all())
        if (
            index == 25
        ):  # a call outside of the graph, from which on the rows end at different times
            mask = torch.arange(eager.num_envs) % 2 == 0
            expected_td, td = eager.reset(mask=mask), compiled.reset(mask=mask)
    assert ended.all() and is_staggered


def stacks(names):
    """Transforms of the catalogue in as few stacks as their spaces allow: functions that make an env."""
    found = []
    for name in names:
        for stacked in found:
            if make_stack([*stacked, name]) is not None:
                stacked.append(name)
                break
        else:
            found.append([name])
    return [functools.partial(make_stack, stacked) for stacked in found]


def make_stack(names):
    """An env with several transforms of the catalogue; None if their envs or spaces do not fit together."""
    (_, make_env), *others = [COMPILED[name] for name in names]
    if any(repr(other) != repr(make_env) for _, other in others):
        return None
    try:
        return tw.TransformedEnv(make_env(NUM_ENVS), *[COMPILED[name][0]() for name in names])
    except (TypeError, ValueError):
        return None


def test_transforms_compile_in_a_stack():
    assert_compiles(stacks(REPRESENTATIVE)[0])


@pytest.mark.full
def test_native_env_with_transforms_and_a_network_compiles():
    torch.manual_seed(0)
    assert_compiles(cartpole, policy=ActorCritic())


class VmappedPendulum(Pendulum):
    broadcasts = False


@pytest.mark.full
def test_functional_env_compiles():
    assert_compiles(lambda: tw.FunctionalEnv(VmappedPendulum(), NUM_ENVS, max_episode_steps=5))


@pytest.mark.full
def test_native_envs_and_wrappers_compile():
    for id in NATIVE:
        assert_compiles(functools.partial(tw.make, id, NUM_ENVS, max_episode_steps=7))
    assert_compiles(lambda: tw.TransformedEnv(WRAPPERS["RepeatAction"](NUM_ENVS), T.TimeLimit(2)))
    assert_compiles(lambda: WRAPPERS["MaxAndSkipObservation"](NUM_ENVS, episode_lengths=(7, 4, 9)))


def test_action_is_not_changed_and_outputs_are_the_callers():
    env = ScriptedEnv(2, (3,), episode_lengths=2)
    step = torch.compile(users_step(env), fullgraph=True, backend="aot_eager")
    transition, td = step(env.reset())
    held = transition.clone()
    step(td)
    assert_same(transition, held)


@pytest.mark.long
@pytest.mark.full
def test_every_transform_compiles_through_aot_autograd_in_stacks():
    for make in stacks(COMPILED):
        assert_compiles(make, "aot_eager", AOT)


@pytest.mark.full
def test_transforms_compile_through_inductor():
    for make in stacks(["Compose of seven", "StickyAction"]):
        assert_compiles(make, "inductor", INDUCTOR)
