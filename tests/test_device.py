"""`device` of an env follows `.to`, and so do all of its buffers."""

import functools

import pytest
import torch

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

MAKERS = {
    "FunctionalEnv": functools.partial(tw.make, "CartPole-v1", 3),
    "FunctionalEnv with a pool": lambda: tw.FunctionalEnv(tw.envs.cartpole.CartPole(), 3, reset_pool=8),
    "GymnasiumEnv": functools.partial(tw.make, "CartPole-v1", 3, backend="gymnasium"),
    "ScriptedEnv": lambda: ScriptedEnv(3),
    "Wrapper": lambda: tw.Wrapper(ScriptedEnv(3)),
    "RepeatAction": lambda: tw.wrappers.RepeatAction(tw.make("CartPole-v1", 3), 2),
    "TransformedEnv": lambda: tw.TransformedEnv(ScriptedEnv(3), T.TimeLimit(5), T.NormalizeObservation(), T.StickyAction(0.5)),
    "nested TransformedEnv": lambda: tw.TransformedEnv(tw.TransformedEnv(ScriptedEnv(3), T.ClipReward(-1, 1)), T.TimeLimit(5)),
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
    with pytest.raises(TypeError, match="needs to keep its dtypes"):
        env.to(device, torch.float64)
    for layer in layers(env):
        layer.action_stream.to(device)  # where the stream is does not count
    assert {layer.device for layer in layers(env)} == {torch.device("cpu")}
    assert env.to(device) is env
    assert {layer.device for layer in layers(env)} == {layer.signature.device for layer in layers(env)} == {device}
    assert {buffer.device for buffer in env.buffers()} == {device}
    env.close()


@pytest.mark.cuda
@each_env
def test_env_moved_to_cuda_steps_there(make):
    env = make().cuda()
    transition, td = env.step(env.reset(seed=0).set("action", env.sample_action()))
    assert {leaf.device.type for leaf in [*transition["next"].values(True, True), td["observation"]]} == {"cuda"}
    env.close()
