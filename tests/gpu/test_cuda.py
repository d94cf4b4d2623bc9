"""On CUDA, graphs are captured: one launch per step, no synchronisation, the results of eager mode.

Each test runs on CUDA, if there is a device, and with graphs simulated on the CPU (`cuda_graphs`).
"""

import contextlib
import copy
import functools
from types import SimpleNamespace
from typing import NamedTuple

import dqn_graph
import graph_parts
import ppo
import ppo_graph
import ppo_recurrent_graph
import pytest
import torch
from catalogue import (
    COMPILED,
    NUM_ENVS,
    REPRESENTATIVE,
    ActorCritic,
    cartpole,
    seven,
    stack,
)
from cuda_graphs import simulated, simulated_module
from helpers import (
    AOT,
    INDUCTOR,
    Held,
    after,
    assert_plays_the_same,
    assert_same,
    buffers,
    from_reset,
    mostly_full,
    play,
    steps,
)
from tensordict.nn import CudaGraphModule
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full


class Device(NamedTuple):
    name: str
    backend: str
    tolerance: float
    is_simulated: bool


SIMULATED = Device("cpu", "eager", AOT, True)
CUDA = Device("cuda", "inductor", INDUCTOR, False)


@pytest.fixture(
    params=[SIMULATED, pytest.param(CUDA, marks=pytest.mark.cuda)], ids=["simulated", "cuda"]
)
def on(request):
    with simulated() if request.param.is_simulated else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def captures(on, monkeypatch):
    """A list that grows by an item with each capture."""
    made = []
    capture = torch.cuda.graph

    def counting(*args, **kwargs):
        made.append(None)
        return capture(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "graph", counting)
    return made


def compiled(target):
    return tw.compile(target, backend="eager")


def act(env, td):
    return td.set("action", env.sample_action())


def several(on, name="Compose of seven", number=2):
    return [stack(name, device=on.name) for _ in range(number)]


def learned(env):
    return {name: value.clone() for name, value in env.state_dict().items()}


# Steps.


@pytest.mark.full
def test_captured_step_matches_eager_with_one_capture_a_mode(on, captures):
    env, eager = several(on)
    tw.compile(env, backend=on.backend)
    for mode in (True, False, True):
        assert_plays_the_same(eager.train(mode), env.train(mode), 40, on.tolerance)
    assert len(captures) == 2


# The other representative ones are in the stack of seven above.
SOME = {*REPRESENTATIVE} - {type(part).__name__ for part in seven()}


@pytest.mark.parametrize("name", mostly_full(COMPILED, "TimeLimit", long={*COMPILED} - SOME))
def test_captured_step_of_a_transform_matches_eager_without_a_sync(on, captures, name):
    make = functools.partial(stack, name, device=on.name)
    env = compiled(make())
    assert_plays_the_same(make(), env, 60, AOT)
    if on.is_simulated:  # finds host reads while it captures
        return
    td = env.reset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in steps(env, 100, td):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(captures) == 1


def test_outputs_of_a_captured_step_are_copies(on):
    (env,) = several(on, number=1)
    compiled(env)
    held = Held()
    td = env.reset(seed=0)
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
def test_captured_transforms_over_a_simulator_match_eager(on, transform):
    def make():
        env = tw.make("CartPole-v1", 2, backend="gymnasium", max_episode_steps=5, device=on.name)
        return tw.TransformedEnv(env, transform())

    assert_plays_the_same(make(), compiled(make()), 30, AOT)


# Captures.


def test_compile_and_capture_leave_state_unchanged(on):
    env, eager = several(on)
    td, eager_td = (after(each, 7) for each in (env, eager))
    before = env.snapshot()
    compiled(env)
    assert_same(env.snapshot(), before)
    assert_same(play(env, 30, td)[0], play(eager, 30, eager_td)[0], AOT)


@pytest.mark.full
def test_env_whose_buffers_are_replaced_is_captured_again(on, captures):
    env, eager = several(on)
    compiled(env)
    for number in (1, 2):
        assert_plays_the_same(eager, env, 20, AOT)
        assert len(captures) == number
        eager.load_state_dict(learned(eager))
        env.load_state_dict(learned(eager), assign=True)


@contextlib.contextmanager
def run_out_of_memory(*args, **kwargs):
    """In place of a context manager of `torch.cuda`; the warm-ups in it have written to buffers."""
    if "capture_error_mode" not in kwargs:
        yield
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("name", ["stream", "graph"], ids=["warm-up", "capture"])
def test_failed_capture_leaves_the_env_as_it_was(on, monkeypatch, name):
    env, eager = several(on, "Compose of two")
    compiled(env)
    td = env.reset(seed=1)
    snapshot = env.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, name, run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            env.step(act(env, td))
    env.action_stream.draw.sub_(1)  # for the action above
    assert_same(buffers(env).select(*snapshot["buffers"].keys()), snapshot["buffers"])
    given, _ = play(env, 20, env.restore(snapshot))
    expected, _ = play(eager, 20, eager.restore(snapshot))
    assert_same(given, expected, AOT)


# Collectors.


def replace_bias(network):
    network.logits.bias.add_(0.5)


def replace_vector(network):
    parameters = list(network.parameters())
    nn.utils.vector_to_parameters(-nn.utils.parameters_to_vector(parameters), parameters)


def replace_data(network):
    network.logits.weight.data = -network.logits.weight.data.clone()


def replace_dtype(network):
    network.double().logits.weight.data.neg_()
    network.float()


@full
@pytest.mark.parametrize("change", [replace_bias, replace_vector, replace_data, replace_dtype])
def test_captured_collector_matches_eager_and_follows_its_policy(on, change):
    torch.manual_seed(0)
    network = ActorCritic().to(on.name)
    collect, eager = (tw.Collector(cartpole(device=on.name), network, 6) for _ in range(2))
    tw.compile(collect, backend=on.backend)
    found = []
    for _ in range(2):
        data = from_reset(collect)
        assert_same(data, from_reset(eager), INDUCTOR)
        found.append(data["logits"].clone())
        with torch.no_grad():
            change(network)
    assert (found[0] != found[1]).any()


@full
def test_no_later_call_changes_chunks_in_hand(on, captures):
    collect = compiled(tw.Collector(ScriptedEnv(5, (3, 4), device=on.name), None, 4))
    held = Held()
    for _ in range(4):
        data = collect()
        held.add(data, collect.env.root)
    held.assert_unchanged()
    assert len(captures) == 1


# Copies between devices cannot be captured.


@pytest.mark.parametrize(
    "function",
    [
        lambda reward: reward.clone().copy_(torch.ones(2, 1)),
        lambda reward: reward + reward.cpu().to(reward.device),
    ],
    ids=["from the host", "to the host"],
)
def test_copy_between_host_and_device_is_refused(function):
    env = tw.TransformedEnv(ScriptedEnv(2), T.TransformReward(function)).to("meta")
    with pytest.raises(ValueError, match=r"TransformReward.*between devices"):
        compiled(env)


# A scan in the user's own graph.


@pytest.mark.cuda
@pytest.mark.full
def test_scan_over_a_pure_env_matches_its_loop():
    pure = tw.pure(stack("Compose of two", device="cuda"))
    state, _ = pure.init(0)
    actions = torch.zeros(20, NUM_ENVS, 6, device="cuda")

    def rollout(state):
        return tw.scan(lambda carry, action: pure.step(carry, action)[:2], state, actions)

    last, transitions = torch.compile(rollout, fullgraph=True)(state)
    expected_last, expected = rollout(state)
    assert_same(transitions, expected, INDUCTOR)
    assert_same(last, expected_last, INDUCTOR)


@pytest.mark.newest  # with the TensorDict of today
def test_captured_minibatches_train_as_others(on, captures):
    """Those of examples/ppo.py; the first two run before the capture."""
    env = tw.make("CartPole-v1", 1, device=on.name)
    batch = {}
    for name in ("logprob", "advantage", "value", "ret"):
        batch[name] = torch.randn(8, device=on.name)
    batch["observation"] = torch.randn(8, 4, device=on.name)
    batch["action"] = torch.randint(2, (8,), device=on.name)
    agent = ppo.Agent(env).to(on.name)
    agents = [agent, copy.deepcopy(agent)]
    trains = []
    rates = []
    for each in agents:
        rate = torch.tensor(1e-2, device=on.name)
        adam = dict(fused=True, capturable=not on.is_simulated)
        optimizer = torch.optim.Adam(each.parameters(), rate, **adam)
        arguments = (each, optimizer, ppo.Args(clip_vloss=True), ppo.compute_gradients)
        trains.append(functools.partial(ppo.train_minibatch, *arguments))
        rates.append(rate)
    with simulated_module() if on.is_simulated else contextlib.nullcontext():
        trains[0] = CudaGraphModule(trains[0], warmup=3)
        for number in range(6):
            rows = torch.randint(8, (4,), device=on.name)
            for rate in rates:
                rate.fill_(1e-2 / (1 + number))
            found, expected = [train(batch, rows) for train in trains]
            torch.testing.assert_close(found, expected)
            vectors = [nn.utils.parameters_to_vector(each.parameters()) for each in agents]
            torch.testing.assert_close(*vectors)
    assert len(captures) == 1


PPO = dict(num_minibatches=2, update_epochs=2, normalize_reward=True)
TRAININGS = {
    ppo_graph: PPO,
    ppo_recurrent_graph: PPO,
    dqn_graph: dict(buffer_size=80, batch_size=8, learning_starts=64),
}


@pytest.mark.newest
@pytest.mark.full
@pytest.mark.parametrize("script", TRAININGS, ids=lambda script: script.__name__)
def test_captured_training_equals_one_that_is_not(script, on, captures, tmp_path):
    """Iterations of an example; the first two run before the capture."""
    sizes = dict(num_envs=4, num_steps=8, **TRAININGS[script])
    args = script.Args(out=tmp_path, seeds=(1, 2), device=on.name, **sizes)
    run, _, _, iteration = script.start(args)
    backend = "none" if on.is_simulated else on.backend
    how = SimpleNamespace(device="cuda", backend=backend)
    hyper = run.grid.hyper(args)
    progress = torch.zeros((), device=on.name)
    close = dict(rtol=on.tolerance, atol=on.tolerance, equal_nan=True)
    assert_close = functools.partial(torch.testing.assert_close, **close)
    state = expected = run.state
    with simulated_module() if on.is_simulated else contextlib.nullcontext():
        captured = graph_parts.compiled(iteration, how)
        for _ in range(5):
            random = run.random()
            state, figures = captured(state, hyper, progress, *random)
            expected, expected_figures = iteration(expected, hyper, progress, *random)
            assert_close(figures, expected_figures)
            assert_same(state["env"], expected["env"], on.tolerance)
            assert_close(state["adam"], expected["adam"])
    assert len(captures) == 1
