"""PyTorch's default dtype and default device change nothing of ours; an env keeps its dtypes, and `device` follows `.to`."""

import functools
import itertools

import pytest
import torch
from catalogue import DICT, NUM_ENVS, REPRESENTATIVE, TRANSFORMS, UNCAPTURED, WRAPPERS, seven
from gymnasium import spaces
from helpers import assert_same, buffers, play
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T
from torchwrap.registration import NATIVE
from torchwrap.testing import ScriptedEnv

DEFAULTS = {
    "float64": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    # A tensor on this device has no values, so computing with it and a tensor on the CPU fails.
    "meta": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
}


@pytest.fixture(params=DEFAULTS)
def under_default(request):
    """Calls a function under another default."""

    def call(function):
        set_default, restore = DEFAULTS[request.param]
        set_default()
        try:
            return function()
        finally:
            restore()

    return call


def stacked(make, make_env):
    return lambda: tw.TransformedEnv(make_env(NUM_ENVS), make())


ENVS = {
    **{name: stacked(*case) for name, case in {**TRANSFORMS, **UNCAPTURED}.items()},
    **{id: functools.partial(tw.make, id, NUM_ENVS, max_episode_steps=6) for id in NATIVE},
    "Acrobot-v1 with noise": lambda: tw.make("Acrobot-v1", NUM_ENVS, torque_noise_max=0.5),
    "CartPole-v1 in float64": lambda: tw.make("CartPole-v1", NUM_ENVS, dtype=torch.float64),
    "Gymnasium's CartPole": lambda: tw.make(
        "CartPole-v1", NUM_ENVS, backend="gymnasium", max_episode_steps=6
    ),
    "RepeatAction": lambda: WRAPPERS["RepeatAction"](NUM_ENVS),
    "MaxAndSkipObservation": lambda: WRAPPERS["MaxAndSkipObservation"](NUM_ENVS),
    "DtypeObservation of torch's dtype": lambda: tw.TransformedEnv(
        ScriptedEnv(NUM_ENVS), T.DtypeObservation(torch.float16)
    ),
    "a Dict of actions": lambda: ScriptedEnv(NUM_ENVS, action_space=DICT),
}

FEW = [*REPRESENTATIVE, "TimeAwareObservation", "AddNoise", "CartPole-v1"]
FEW += ["Gymnasium's CartPole", "RepeatAction", "a Dict of actions"]


def played_and_restored(make):
    env = make()
    played, td = play(env, 6, env.reset(seed=0))
    td = env.reset(mask=torch.arange(NUM_ENVS, device="cpu") % 2 == 0)
    found = [played, td.select("observation"), buffers(env), TensorDict(env.state_dict(), [])]
    if env.can_snapshot:
        found += [env.snapshot(), env.restore(env.snapshot().to_dict())]
    env.close()
    return found


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(ENVS, marks=pytest.mark.full)], ids=["few", "all"]
)
def test_env_under_another_default_plays_the_same(names, under_default):
    for name in names:
        run = functools.partial(played_and_restored, ENVS[name])
        for expected, found in zip(run(), under_default(run), strict=True):
            try:
                assert_same(found, expected)
            except AssertionError as error:
                pytest.fail(f"{name}: {error}")


DRAWS = {
    "uniform": lambda key: random.uniform(key, shape=(3,)),
    "normal": lambda key: random.normal(key, shape=(3,)),
    "exponential": lambda key: random.exponential(key, shape=(3,)),
    "integers": lambda key: random.integers(key, 5, shape=(3,)),
    "permutation": lambda key: random.permutation(key, 5),
    "choice": lambda key: random.choice(
        key, 2, (3,), torch.full((2,), 0.5, dtype=torch.float32, device="cpu")
    ),
}


@pytest.mark.parametrize("num_envs", [2, 100])
def test_random_numbers_under_another_default_are_the_same(num_envs, under_default):
    def draw():
        key = random.Stream(num_envs, seed=3).key()
        vmapped = {
            name: torch.vmap(lambda *words, f=f: f(random.Key(*words)))(*key[:5])
            for name, f in DRAWS.items()
        }
        return TensorDict(
            {
                "drawn": {name: function(key) for name, function in DRAWS.items()},
                "vmapped": vmapped,
            },
            [],
        )

    assert_same(under_default(draw), draw())


def test_collector_and_evaluate_under_another_default_return_the_same(under_default):
    def collect():
        env = tw.TransformedEnv(
            tw.make("CartPole-v1", NUM_ENVS), T.NormalizeObservation(), T.FrameStackObservation(2)
        )
        env.reset(seed=0)
        collector = tw.Collector(env, None, 7)
        held = [collector()[0] for _ in range(2)]
        return torch.stack(held), tw.evaluate(ScriptedEnv(3), None, 7, seed=0)

    for found, expected in zip(under_default(collect), collect(), strict=True):
        assert_same(found, expected)


@pytest.mark.full
def test_compiled_env_under_another_default_plays_the_same(under_default):
    def run():
        make = lambda: tw.TransformedEnv(  # noqa: E731
            ScriptedEnv(NUM_ENVS), T.TimeLimit(4), T.TimeAwareObservation(True, True), seven()
        )
        env = tw.compile(make(), backend="aot_eager")
        return play(env, 5, env.reset(seed=0))[0]

    assert_same(under_default(run), run())


class Row(T.Transform):
    """A user's transform, whose initial row depends on the default device."""

    row = tw.EnvBuffer(row=lambda self: torch.tensor([1.5, 2.5], dtype=torch.float32))


def test_env_buffer_row_under_another_default_device_is_on_the_device_of_the_env(under_default):
    assert (
        under_default(lambda: tw.TransformedEnv(ScriptedEnv(2), Row())).transforms[0].row.tolist()
        == [[1.5, 2.5]] * 2
    )


# Conversions.

CONVERSIONS = {
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.bfloat16(),
    "to float64": lambda module: module.to(torch.float64),
    "to a device and float16": lambda module: module.to("meta", torch.float16),
    "like a float64 tensor": lambda module: module.to(
        torch.zeros(1, dtype=torch.float64, device="meta")
    ),
    "type": lambda module: module.type(torch.float64),
}
MODULES = {
    "integers": lambda: ScriptedEnv(
        2, observation_space=spaces.Discrete(2), action_space=spaces.Discrete(2)
    ),
    "CartPole": lambda: tw.make("CartPole-v1", 2),
    "Gymnasium's CartPole": lambda: tw.make("CartPole-v1", 2, backend="gymnasium"),
    "a stack": lambda: tw.TransformedEnv(tw.Wrapper(ScriptedEnv(2)), seven()),
    "Compose": lambda: tw.TransformedEnv(ScriptedEnv(2), seven()).transforms,
    "RunningMeanStd": lambda: T.RunningMeanStd((3,)),
}


def layout(module):
    return {
        name: (buffer.dtype, buffer.device, buffer.data_ptr())
        for name, buffer in module.named_buffers()
    }


def test_conversion_to_another_dtype_raises_before_anything_changed():
    for name, convert in itertools.product(MODULES, CONVERSIONS):
        module = MODULES[name]()
        before, signature = layout(module), getattr(module, "signature", None)
        message = rf"{type(module).__name__} has fixed dtypes, but got .*`\.to\(device\)`.*T\.DtypeObservation"
        with pytest.raises(TypeError, match=message):
            CONVERSIONS[convert](module)
            pytest.fail(f"{name} allows {convert}")
        assert layout(module) == before and getattr(module, "signature", None) is signature, (
            name,
            convert,
        )


def test_conversion_is_allowed_where_it_changes_no_dtype():
    for module in (
        tw.TransformedEnv(ScriptedEnv(2), T.NormalizeReward()),
        tw.make("CartPole-v1", 2, dtype=torch.float64),
    ):
        with pytest.raises(TypeError, match=r"a conversion of torch\.float64 to torch\.float32"):
            module.float()
    env = tw.make("CartPole-v1", 2)
    assert env.float() is env.to(torch.float32) is env and env.to("meta").device.type == "meta"
    clip = T.ClipReward(-1, 1)
    assert (
        nn.Sequential(nn.Linear(1, 1), clip).half()[1] is clip
    )  # a stateless transform ships with a policy


# The device.

MAKERS = {
    "FunctionalEnv": functools.partial(tw.make, "CartPole-v1", 3),
    "GymnasiumEnv": functools.partial(tw.make, "CartPole-v1", 3, backend="gymnasium"),
    "ScriptedEnv": lambda: ScriptedEnv(3),
    "Wrapper": lambda: tw.Wrapper(ScriptedEnv(3)),
    "RepeatAction": lambda: tw.wrappers.RepeatAction(tw.make("CartPole-v1", 3), 2),
    "TransformedEnv": lambda: tw.TransformedEnv(
        ScriptedEnv(3), T.TimeLimit(5), T.NormalizeObservation(), T.StickyAction(0.5)
    ),
    "nested TransformedEnv": lambda: tw.TransformedEnv(
        tw.TransformedEnv(ScriptedEnv(3), T.ClipReward(-1, 1)), T.TimeLimit(5)
    ),
}
CUDA = pytest.param(torch.device("cuda:0"), marks=pytest.mark.cuda)
each_device = pytest.mark.parametrize("device", [torch.device("meta"), CUDA], ids=str)
each_env = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def layers(env):
    return [env, *layers(env.env)] if isinstance(env, tw.Wrapper) else [env]


@each_device
@each_env
def test_device_after_to_is_the_new_device_in_every_layer_and_buffer(make, device):
    env = make()
    with pytest.raises(TypeError, match="has fixed dtypes"):
        env.to(device, torch.float64)
    for layer in layers(env):
        layer.action_stream.to(device)  # where the stream is does not count
    assert {layer.device for layer in layers(env)} == {torch.device("cpu")}
    assert env.to(device) is env
    assert (
        {layer.device for layer in layers(env)}
        == {layer.signature.device for layer in layers(env)}
        == {device}
    )
    assert {buffer.device for buffer in env.buffers()} == {device}
    env.close()


@pytest.mark.cuda
@each_env
def test_env_moved_to_cuda_steps_there(make):
    env = make().cuda()
    transition, td = env.step(env.reset(seed=0).set("action", env.sample_action()))
    assert {
        leaf.device.type for leaf in [*transition["next"].values(True, True), td["observation"]]
    } == {"cuda"}
    env.close()
