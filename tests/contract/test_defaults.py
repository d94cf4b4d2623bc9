"""PyTorch's default dtype and device change nothing; dtypes stay, and devices follow `.to`."""

import functools

import pytest
import torch
from catalogue import DICT, NUM_ENVS, REPRESENTATIVE, TRANSFORMS, UNCAPTURED, WRAPPERS, seven
from helpers import assert_same, buffers, mostly_full, play
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T
from torchwrap.registration import NATIVE
from torchwrap.testing import ScriptedEnv


# A tensor on the device "meta" has no values, so computing with it and the CPU fails.
@pytest.fixture(
    params=[torch.float64, "meta"],
    ids=["float64", "meta"],
)
def under_default(request):
    """Calls a function under another default."""

    def call(function):
        if request.param == "meta":
            with torch.device("meta"):
                return function()
        torch.set_default_dtype(request.param)
        try:
            return function()
        finally:
            torch.set_default_dtype(torch.float32)

    return call


def stacked(make, make_env):
    return lambda: tw.TransformedEnv(make_env(NUM_ENVS), make())


def cartpole(num_envs=NUM_ENVS, **kwargs):
    return tw.make("CartPole-v1", num_envs, **kwargs)


def gymnasium_cartpole(num_envs=NUM_ENVS):
    return cartpole(num_envs, backend="gymnasium", max_episode_steps=6)


def float16():
    return tw.TransformedEnv(
        ScriptedEnv(NUM_ENVS),
        T.DtypeObservation(torch.float16),
    )


ENVS = {name: stacked(*case) for name, case in {**TRANSFORMS, **UNCAPTURED}.items()}
for id in NATIVE:
    ENVS[id] = functools.partial(tw.make, id, NUM_ENVS, max_episode_steps=6)
for name in ("RepeatAction", "MaxAndSkipObservation"):
    ENVS[name] = functools.partial(WRAPPERS[name], NUM_ENVS)
ENVS |= {
    "Acrobot-v1 with noise": lambda: tw.make("Acrobot-v1", NUM_ENVS, torque_noise_max=0.5),
    "CartPole-v1 in float64": lambda: cartpole(dtype=torch.float64),
    "Gymnasium's CartPole": gymnasium_cartpole,
    "DtypeObservation of torch's dtype": float16,
    "a Dict of actions": lambda: ScriptedEnv(NUM_ENVS, action_space=DICT),
}
FEW = [*REPRESENTATIVE, "TimeAwareObservation", "AddNoise", "CartPole-v1"]
FEW += ["Gymnasium's CartPole", "RepeatAction", "a Dict of actions"]


def played_and_restored(make):
    with make() as env:
        played, td = play(
            env,
            6,
            env.reset(seed=0),
        )
        td = env.reset(mask=torch.arange(NUM_ENVS, device="cpu") % 2 == 0)
        results = [played, td.select("observation"), buffers(env)]
        results.append(TensorDict(env.state_dict(), []))
        if env.can_snapshot:
            results += [
                env.snapshot(),
                env.restore(env.snapshot().to_dict()),
            ]
    return results


@pytest.mark.parametrize("name", mostly_full(ENVS, *FEW))
def test_env_under_another_default_plays_the_same(name, under_default):
    run = functools.partial(played_and_restored, ENVS[name])
    for expected, found in zip(
        run(),
        under_default(run),
        strict=True,
    ):
        assert_same(found, expected)


DRAWS = {
    "uniform": lambda key: random.uniform(key, shape=(3,)),
    "normal": lambda key: random.normal(key, shape=(3,)),
    "exponential": lambda key: random.exponential(key, shape=(3,)),
    "integers": lambda key: random.integers(key, 5, shape=(3,)),
    "permutation": lambda key: random.permutation(key, 5),
}


@pytest.mark.parametrize("num_envs", [2, 100])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_under_another_default_are_the_same(draw, num_envs, under_default):
    def both():
        key = random.Stream(num_envs, seed=3).key()
        vmapped = torch.vmap(lambda *words: draw(random.Key(*words)))(*key[:5])
        return TensorDict(
            {"drawn": draw(key), "vmapped": vmapped},
            [],
        )

    assert_same(under_default(both), both())


def test_collector_and_evaluate_under_another_default_return_the_same(under_default):
    def collect():
        env = tw.TransformedEnv(
            cartpole(),
            T.NormalizeObservation(),
            T.FrameStackObservation(2),
        )
        env.reset(seed=0)
        collector = tw.Collector(env, None, 7)
        chunks = [collector() for _ in range(2)]
        return torch.stack(chunks), tw.evaluate(
            ScriptedEnv(3),
            None,
            7,
            seed=0,
        )

    for found, expected in zip(
        under_default(collect),
        collect(),
        strict=True,
    ):
        assert_same(found, expected)


class Row(T.Transform):
    """A user's transform, whose initial row depends on the default device."""

    row = tw.EnvBuffer(row=lambda self: torch.tensor([1.5, 2.5], dtype=torch.float32))


def test_env_buffer_row_under_another_default_is_on_the_device_of_the_env(under_default):
    env = under_default(lambda: tw.TransformedEnv(ScriptedEnv(2), Row()))
    assert env.transforms[0].row.tolist() == [[1.5, 2.5]] * 2


# Conversions.

LIKE = torch.zeros(1, dtype=torch.float64, device="meta")
CONVERSIONS = {
    "double": lambda module: module.double(),
    "to a device and float16": lambda module: module.to("meta", torch.float16),
    "like a float64 tensor": lambda module: module.to(LIKE),
}


def stack():
    return tw.TransformedEnv(
        tw.Wrapper(ScriptedEnv(2)),
        seven(),
    )


MODULES = {
    "Gymnasium's CartPole": gymnasium_cartpole,
    "a stack": stack,
    "Compose": lambda: stack().transforms,
    "RunningMeanStd": lambda: T.RunningMeanStd((3,)),
}


def layout(module):
    found = {}
    for name, buffer in module.named_buffers():
        found[name] = (
            buffer.dtype,
            buffer.device,
            buffer.data_ptr(),
        )
    return found


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_conversion_to_another_dtype_raises_before_anything_changed(make, convert):
    module = make()
    before = layout(module)
    with pytest.raises(TypeError, match=f"{type(module).__name__}: dtypes"):
        convert(module)
    assert layout(module) == before
    assert getattr(module, "device", torch.device("cpu")).type == "cpu"


def test_float_of_statistics_in_float64_raises():
    with pytest.raises(TypeError, match=r"torch\.float64"):
        T.RunningMeanStd((3,)).float()


def test_conversion_is_allowed_where_it_changes_no_dtype():
    env = cartpole()
    assert env.float() is env.to(torch.float32) is env and env.to("meta").device.type == "meta"


def test_stateless_transform_ships_with_a_policy_of_any_dtype():
    clip = T.ClipReward(-1, 1)
    assert nn.Sequential(nn.Linear(1, 1), clip).half()[1] is clip


# The device.


def transformed():
    transforms = T.TimeLimit(5), T.NormalizeObservation(), T.StickyAction(0.5)
    return tw.TransformedEnv(ScriptedEnv(3), *transforms)


MAKERS = {
    "FunctionalEnv": cartpole,
    "GymnasiumEnv": gymnasium_cartpole,
    "TransformedEnv": transformed,
    "nested TransformedEnv": lambda: tw.TransformedEnv(transformed(), T.TimeLimit(5)),
}
CUDA = pytest.param(
    torch.device("cuda:0"),
    marks=pytest.mark.cuda,
)
each_device = pytest.mark.parametrize(
    "device",
    [torch.device("meta"), CUDA],
    ids=str,
)
each_env = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def layers(env):
    return [env, *layers(env.env)] if isinstance(env, tw.Wrapper) else [env]


@each_device
@each_env
def test_device_after_to_is_the_new_device_in_every_layer_and_buffer(make, device):
    with make() as env:
        for layer in layers(env):
            layer.action_stream.to(device)  # the device of the stream does not count
        assert {layer.device.type for layer in layers(env)} == {"cpu"}
        assert env.to(device) is env
        assert {layer.device for layer in layers(env)} == {device}
        assert {layer.signature.device for layer in layers(env)} == {device}
        assert {buffer.device for buffer in env.buffers()} == {device}


@pytest.mark.cuda
@each_env
def test_env_moved_to_cuda_steps_there(make):
    with make().cuda() as env:
        transition, td = env.step(env.reset(seed=0).set("action", env.sample_action()))
        results = [
            *transition["next"].values(True, True),
            td["observation"],
        ]
        assert {leaf.device.type for leaf in results} == {"cuda"}
