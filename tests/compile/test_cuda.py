"""On CUDA, graphs are captured: one launch per step, no device synchronisation, results as in eager mode."""

from __future__ import annotations

import functools

import pytest
import torch
from catalogue import COMPILED, ActorCritic, cartpole, categorical, gymnasium_cartpole, stack
from helpers import AOT, INDUCTOR, after, assert_plays_the_same, assert_same, play

import torchwrap as tw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
static_or_not = pytest.mark.parametrize("static_outputs", [False, True])


@static_or_not
def test_captured_step_matches_eager(static_outputs):
    make = functools.partial(stack, "Compose of seven", device="cuda")
    compiled = tw.compile(make(), static_outputs=static_outputs)
    assert_plays_the_same(make(), compiled, 500, INDUCTOR)
    assert_plays_the_same(make().eval(), compiled.eval(), 20, 1e9)


@pytest.mark.parametrize("name", COMPILED)
def test_step_of_transform_does_not_synchronize(name):
    env = tw.compile(stack(name, device="cuda"), backend="aot_eager")
    td = env.reset(seed=0)
    for phase in range(2):  # the graph is captured at the first step
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if phase else "default")
        try:
            for _ in range(1000 if phase else 3):
                _, td = env.step(td.set("action", env.sample_action()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_plays_the_same(stack(name, device="cuda"), tw.compile(stack(name, device="cuda"), backend="aot_eager"), 500, AOT)


@static_or_not
def test_outputs_are_copies_unless_static(static_outputs):
    env = tw.compile(stack("Compose of seven", device="cuda"), backend="aot_eager", static_outputs=static_outputs)
    held, td = [], env.reset(seed=0)
    for _ in range(4):
        transition, td = env.step(td.set("action", env.sample_action()))
        held.append(transition["next", "observation"])
    assert (len({value.data_ptr() for value in held}) == 1) is static_outputs
    assert (held[0] == held[-1]).all() == static_outputs


def test_compile_and_capture_leave_state_unchanged():
    env, eager = (stack("Compose of seven", device="cuda") for _ in range(2))
    td, eager_td = after(env, 7), after(eager, 7)
    before = env.snapshot()
    tw.compile(env, backend="aot_eager")
    assert_same(env.snapshot(), before)
    assert_same(play(env, 30, td)[0], play(eager, 30, eager_td)[0], AOT)


def test_env_that_moves_is_captured_again():
    env = tw.compile(stack("Compose of seven"), backend="aot_eager")
    for device in ("cuda", "cpu", "cuda"):
        assert_plays_the_same(stack("Compose of seven", device=device), env.to(device), 20, 1e9)
        assert env.device.type == device
    env.load_state_dict({name: value.clone() for name, value in env.state_dict().items()}, assign=True)
    before = env.snapshot()
    once, _ = play(env, 9, env.restore(before))
    assert_same(play(env, 9, env.restore(before))[0], once, AOT)


@static_or_not
def test_captured_collector_matches_eager_and_follows_its_policy(static_outputs):
    torch.manual_seed(0)
    network = ActorCritic().cuda()
    collect = tw.compile(tw.Collector(cartpole(device="cuda"), network, 6), static_outputs=static_outputs)
    eager = tw.Collector(cartpole(device="cuda"), network, 6)
    for _ in range(3):
        assert_same(collect(collect.env.reset(seed=0))[0], eager(eager.env.reset(seed=0))[0], INDUCTOR)
        with torch.no_grad():
            network.logits.bias.add_(0.5)


def test_captured_sampling_policy_samples_at_each_call():
    collect = tw.compile(tw.Collector(cartpole(200, device="cuda"), categorical, 5), backend="aot_eager")
    data, td = collect()
    assert (collect(td)[0]["action"] != data["action"]).any()


def test_transforms_over_host_stepped_env_captured_match_eager():
    make = functools.partial(gymnasium_cartpole, device="cuda")
    assert_plays_the_same(make(), tw.compile(make()), 300, INDUCTOR)
