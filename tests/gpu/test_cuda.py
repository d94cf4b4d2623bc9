"""On CUDA, graphs are captured: one launch per step, no device synchronisation, results as in eager mode.

Each test runs on CUDA, where there is a device, and with graphs that are simulated on the CPU (`cuda_graphs`).
"""

import contextlib
import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from catalogue import COMPILED, REPRESENTATIVE, ActorCritic, cartpole, categorical, seven, stack
from cuda_graphs import simulated
from helpers import (
    AOT,
    INDUCTOR,
    Held,
    after,
    assert_plays_the_same,
    assert_same,
    buffers,
    mostly_full,
    play,
    steps,
)
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import cuda_graph
from torchwrap.testing import ScriptedEnv


class Device(NamedTuple):
    name: str
    backend: str
    tolerance: float
    is_simulated: bool


SIMULATED, CUDA = Device("cpu", "eager", AOT, True), Device("cuda", "inductor", INDUCTOR, False)


@pytest.fixture(
    params=[SIMULATED, pytest.param(CUDA, marks=pytest.mark.cuda)], ids=["simulated", "cuda"]
)
def on(request):
    with simulated() if request.param.is_simulated else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def captures(monkeypatch):
    """A list that grows by an item with each capture."""
    made, capture = [], cuda_graph._capture
    monkeypatch.setattr(
        cuda_graph, "_capture", lambda *arguments: made.append(None) or capture(*arguments)
    )
    return made


def act(env, td):
    return td.set("action", env.sample_action())


# Steps.


def test_captured_step_matches_eager(on, captures):
    env, eager = (stack("Compose of seven", device=on.name) for _ in range(2))
    tw.compile(env, backend=on.backend)
    for mode in (True, False, True):
        assert_plays_the_same(eager.train(mode), env.train(mode), 40, on.tolerance)
    assert len(captures) == 2  # one per mode


# The other representative ones are in the stack of seven above.
@pytest.mark.parametrize(
    "name", mostly_full(COMPILED, *{*REPRESENTATIVE} - {type(part).__name__ for part in seven()})
)
def test_captured_step_of_transform_matches_eager_and_does_not_synchronize(on, captures, name):
    make = functools.partial(stack, name, device=on.name)
    env = tw.compile(make(), backend="eager")
    assert_plays_the_same(make(), env, 60, AOT)
    if on.is_simulated:  # which finds host reads while it captures
        return
    td = env.reset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in steps(env, 100, td):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(captures) == 1


def test_outputs_are_copies(on):
    env = tw.compile(stack("Compose of seven", device=on.name), backend="eager")
    held, td = Held(), env.reset(seed=0)
    for _ in range(4):
        transition, td = env.step(act(env, td))
        held.add(transition["next"], td)
    held.assert_unchanged()


ABOVE_HOST = {
    "none": lambda: T.Compose([]),
    "no buffers": lambda: T.ClipObservation(-1, 1),
    "with state": lambda: T.TimeLimit(3),
}


@pytest.mark.parametrize("transform", ABOVE_HOST.values(), ids=ABOVE_HOST)
def test_captured_transforms_over_host_stepped_env_match_eager(on, transform):
    def make():
        env = tw.make("CartPole-v1", 2, backend="gymnasium", max_episode_steps=5, device=on.name)
        return tw.TransformedEnv(env, transform())

    assert_plays_the_same(make(), tw.compile(make(), backend="eager"), 30, AOT)


# Captures.


def test_compile_and_capture_leave_state_unchanged(on):
    env, eager = (stack("Compose of seven", device=on.name) for _ in range(2))
    td, eager_td = after(env, 7), after(eager, 7)
    before = env.snapshot()
    tw.compile(env, backend="eager")
    assert_same(env.snapshot(), before)
    assert_same(play(env, 30, td)[0], play(eager, 30, eager_td)[0], AOT)


def test_env_whose_buffers_are_replaced_is_captured_again(on, captures):
    env, eager = (stack("Compose of seven", device=on.name) for _ in range(2))
    tw.compile(env, backend="eager")
    for number in (1, 2):
        assert_plays_the_same(eager, env, 20, AOT)
        assert len(captures) == number
        eager.load_state_dict(
            learned := {name: value.clone() for name, value in eager.state_dict().items()}
        )
        env.load_state_dict(learned, assign=True)


@pytest.mark.cuda
def test_env_and_collector_that_move_are_captured_again():
    env = tw.compile(stack("Compose of seven"), backend="eager")
    collect, eager = (tw.Collector(cartpole(), None, 6) for _ in range(2))
    tw.compile(collect, backend="eager")
    for device in ("cuda", "cpu", "cuda"):
        assert_plays_the_same(stack("Compose of seven", device=device), env.to(device), 20, 1e9)
        assert env.device.type == device
        collect.env.to(device)
        eager.env.to(device)
        data = collect(collect.env.reset(seed=0))[0]
        assert_same(data, eager(eager.env.reset(seed=0))[0], AOT)
        assert {leaf.device.type for leaf in data.values(True, True)} == {device}


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("number", [1, 4])  # of the run: a warm-up, and the one that is captured
def test_failed_capture_leaves_env_as_it_was(on, monkeypatch, number, again):
    env, eager = (stack("Compose of two", device=on.name) for _ in range(2))
    tw.compile(env, backend="eager")
    if again:
        assert_plays_the_same(eager, env, 5, AOT)
        eager.load_state_dict(
            learned := {name: value.clone() for name, value in eager.state_dict().items()}
        )
        env.load_state_dict(learned, assign=True)
    td, snapshot, capture = env.reset(seed=1), env.snapshot(), cuda_graph._capture

    def broken(run, *tensors):
        calls = []

        def run_out_of_memory(tensors):
            calls.append(run(tensors))
            if len(calls) == number:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return calls[-1]

        return capture(run_out_of_memory, *tensors)

    with monkeypatch.context() as patch:
        patch.setattr(cuda_graph, "_capture", broken)
        with pytest.raises(torch.OutOfMemoryError):
            env.step(act(env, td))
    env.action_stream.draw.sub_(1)  # of the action above
    assert_same(buffers(env).select(*snapshot["buffers"].keys()), snapshot["buffers"])
    assert_same(
        play(env, 20, env.restore(snapshot))[0], play(eager, 20, eager.restore(snapshot))[0], AOT
    )


@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.full)])
def test_captured_env_and_collector_run_in_and_out_of_inference_mode(on, first):
    make = functools.partial(stack, "Compose of two", device=on.name)
    env, eager, collect, plain = (
        make(),
        make(),
        tw.Collector(make(), None, 4),
        tw.Collector(make(), None, 4),
    )
    tw.compile(env, backend="eager")
    tw.compile(collect, backend="eager")
    td, eager_td, root, plain_root = (
        one.reset(seed=0) for one in (env, eager, collect.env, plain.env)
    )
    for number in range(4):
        with torch.inference_mode((number % 2 == 0) is first):
            transition, td = env.step(act(env, td))
            expected, eager_td = eager.step(act(eager, eager_td))
            data, root = collect(root)
            chunk, plain_root = plain(plain_root)
            assert_same(transition["next"].clone(), expected["next"].clone(), AOT)
            assert_same(data.clone(), chunk.clone(), AOT)


# Collectors.


@pytest.mark.full
def test_captured_collector_matches_eager_and_follows_its_policy(on):
    torch.manual_seed(0)
    network = ActorCritic().to(on.name)
    collect = tw.Collector(cartpole(device=on.name), network, 6)
    tw.compile(collect, backend=on.backend)
    eager = tw.Collector(cartpole(device=on.name), network, 6)
    for _ in range(3):
        assert_same(
            collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0], on.tolerance
        )
        with torch.no_grad():
            network.logits.bias.add_(0.5)


def replace_vector(network):
    parameters = list(network.parameters())
    nn.utils.vector_to_parameters(-nn.utils.parameters_to_vector(parameters), parameters)


def replace_data(network):
    network.logits.weight.data = -network.logits.weight.data.clone()


def replace_dtype(network):
    network.double().logits.weight.data.neg_()
    network.float()


@pytest.mark.full
def test_captured_policy_follows_parameters_whose_memory_is_replaced(on):
    torch.manual_seed(0)
    network = ActorCritic().to(on.name)
    collect = tw.compile(tw.Collector(cartpole(device=on.name), network, 4), backend="eager")
    eager = tw.Collector(cartpole(device=on.name), network, 4)
    found = []
    for change in (replace_vector, replace_data, replace_dtype, None):
        data = collect(collect.env.reset(seed=0))[0]
        assert_same(data, eager(eager.env.reset(seed=0))[0], INDUCTOR)
        found.append(data["logits"].clone())
        with torch.no_grad():
            change is None or change(network)
    assert all((before != after).any() for before, after in itertools.pairwise(found))


@pytest.mark.full
def test_captured_sampling_policy_draws_new_actions_at_each_call(on):
    collect, eager = (tw.Collector(cartpole(200, device=on.name), categorical, 5) for _ in range(2))
    tw.compile(collect, backend="eager")
    torch.manual_seed(0)
    data, td = collect(collect.env.reset(seed=0))
    assert (collect(td)[0]["action"] != data["action"]).any()
    if (
        on.is_simulated
    ):  # a graph draws what eager mode draws, so the capture itself has drawn nothing
        torch.manual_seed(0)
        assert_same(data, eager(eager.env.reset(seed=0))[0], AOT)


@pytest.mark.full
def test_chunks_in_hand_are_changed_by_no_later_call(on, captures):
    collect, held = (
        tw.compile(tw.Collector(ScriptedEnv(5, (3, 4), device=on.name), None, 4), backend="eager"),
        Held(),
    )
    td = None
    for _ in range(4):
        data, td = collect(td)
        held.add(data, td)
    held.assert_unchanged()
    assert len(captures) == 1


# What cannot be captured.


COPIES = {
    "from the host": lambda reward: reward.clone().copy_(torch.ones(2, 1)),
    "to the host": lambda reward: reward + reward.cpu().to(reward.device),
}


def test_copy_between_host_and_device_is_refused_by_name():
    for name, function in COPIES.items():
        env = tw.TransformedEnv(ScriptedEnv(2), T.TransformReward(function)).to("meta")
        with pytest.raises(ValueError, match=r"TransformReward\.reward: it copies between devices"):
            tw.compile(env, backend="eager")
            pytest.fail(name)
