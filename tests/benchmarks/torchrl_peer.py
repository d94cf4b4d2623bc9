"""TorchRL's side: seven of its transforms on the same script, as an EnvBase."""

from __future__ import annotations

import warnings

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import (
    CatFrames,
    ClipTransform,
    Compose,
    EnvBase,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)

from . import script
from .measure import Step


class Script(EnvBase):
    """The arithmetic of a ScriptedEnv, behind TorchRL's interface: what is subtracted is the same work."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(device="cpu", batch_size=[num_envs])
        self.script = script.scripted(num_envs)
        self.observation_spec = Composite(observation=Unbounded((num_envs, script.OBSERVATION)), shape=(num_envs,))
        self.action_spec = Bounded(-1, 1, (num_envs, script.ACTION))
        self.reward_spec = Unbounded((num_envs, 1))
        flags = {key: Categorical(2, (num_envs, 1), dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        self.done_spec = Composite(flags, shape=(num_envs,))

    def _step(self, tensordict: TensorDict) -> TensorDict:
        successor = self.script._step(tensordict).exclude("info")
        return successor.set("done", successor["terminated"] | successor["truncated"])

    def _reset(self, tensordict: TensorDict | None, **kwargs) -> TensorDict:
        (num_envs,) = self.batch_size
        everywhere = torch.ones(num_envs, dtype=torch.bool)
        mask = everywhere if tensordict is None or "_reset" not in tensordict else tensordict["_reset"].squeeze(-1)
        done = torch.zeros(num_envs, 1, dtype=torch.bool)
        return self.script._reset(mask).update({"done": done, "terminated": done.clone(), "truncated": done.clone()})

    def _set_seed(self, seed: int | None) -> None:
        pass


def bare(num_envs: int) -> Step:
    return _stepper(Script(num_envs))


def whole(num_envs: int) -> Step:
    transforms = Compose(
        StepCounter(),
        RewardSum(),
        VecNormV2(in_keys=["observation"], reduce_batch_dims=True),
        ClipTransform(in_keys=["observation"], low=-10.0, high=10.0),
        CatFrames(N=4, dim=-1, in_keys=["observation"]),
        RewardScaling(loc=0.0, scale=0.1),
        RewardClipping(-10, 10),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*non-empty batch-size is experimental")
        return _stepper(TransformedEnv(Script(num_envs), transforms))


def _stepper(env: EnvBase) -> Step:
    (num_envs,) = env.batch_size
    action = script.actions(num_envs)
    td = env.reset()
    base = env.base_env if isinstance(env, TransformedEnv) else env
    base.script.elapsed.copy_(script.elapsed(num_envs))

    def step():
        nonlocal td
        transition, td = env.step_and_maybe_reset(td.set("action", action))
        return transition["next", "done"]

    return step
