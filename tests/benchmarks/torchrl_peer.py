"""TorchRL's side: seven of its transforms on torchwrap's envs as an `EnvBase`."""

import itertools
import warnings
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import (
    CatFrames,
    ClipTransform,
    Compose,
    EnvBase,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
    VecNormV2,
)

import torchwrap as tw

from . import script
from .torchwrap_side import Actor, wait
from .worker import Timed

TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "StepCounter": StepCounter,
    "RewardSum": RewardSum,
    "VecNormV2": lambda: VecNormV2(in_keys=["observation"], reduce_batch_dims=True),
    "ClipTransform": lambda: ClipTransform(in_keys=["observation"], low=-10.0, high=10.0),
    "CatFrames": lambda: CatFrames(N=4, dim=-1, in_keys=["observation"]),
    "RewardScaling": lambda: RewardScaling(loc=0.0, scale=0.1),
    "RewardClipping": lambda: RewardClipping(-10, 10),
}


class Batch(EnvBase):
    """A torchwrap env behind TorchRL's interface, eager, so that the work below the transforms is the same."""

    def __init__(self, env: tw.Env, action_spec: TensorSpec) -> None:
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.inner, n = env, env.num_envs
        observation = Unbounded((n, *env.single_observation_space.shape), device=env.device)
        self.observation_spec = Composite(observation=observation, shape=(n,), device=env.device)
        self.action_spec = action_spec
        self.reward_spec = Unbounded((n, 1), device=env.device)
        keys = ("done", "terminated", "truncated")
        flags = {key: Categorical(2, (n, 1), dtype=torch.bool, device=env.device) for key in keys}
        self.done_spec = Composite(flags, shape=(n,), device=env.device)

    def _step(self, tensordict: TensorDict) -> TensorDict:
        successor = self.inner._step(tensordict["action"]).exclude("info")
        return successor.set("done", successor["terminated"] | successor["truncated"])

    def _reset(self, tensordict: TensorDict | None, **kwargs) -> TensorDict:
        (num_envs,) = self.batch_size
        all_rows = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        mask = (
            all_rows
            if tensordict is None or "_reset" not in tensordict
            else tensordict["_reset"].squeeze(-1)
        )
        done = torch.zeros(num_envs, 1, dtype=torch.bool, device=self.device)
        return self.inner._reset(tw.RowMask(mask)).update(
            {"done": done, "terminated": done.clone(), "truncated": done.clone()}
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


def scripted(num_envs: int, transforms: Sequence[str] | None) -> Timed:
    env = Batch(script.scripted(num_envs), Bounded(-1, 1, (num_envs, script.ACTION)))
    stepper = _stepper(env, transforms, [script.actions(num_envs)])
    env.inner.elapsed.copy_(script.elapsed(num_envs))
    return stepper


def cartpole(num_envs: int, transforms: Sequence[str] | None) -> Timed:
    """Our eager dynamics, because TorchRL has no batched CartPole in tensors."""
    generator = torch.Generator().manual_seed(0)
    actions = [torch.randint(2, (num_envs,), generator=generator) for _ in range(16)]
    return _stepper(
        Batch(tw.make("CartPole-v1", num_envs), Categorical(2, (num_envs,))), transforms, actions
    )


def collector(num_envs: int, num_steps: int, device: str = "cpu") -> Timed:
    """A batch of TorchRL's Collector, with episode statistics and the same policy as on our side."""
    torch.manual_seed(0)
    env: EnvBase = Batch(
        tw.make("CartPole-v1", num_envs, device=device), Categorical(2, (num_envs,), device=device)
    )
    env = TransformedEnv(env, Compose(StepCounter(), RewardSum()))
    policy = TensorDictModule(Actor(4, 2).to(device), in_keys=["observation"], out_keys=["action"])
    batches = iter(
        Collector(
            env, policy, frames_per_batch=num_envs * num_steps, total_frames=-1, device=device
        )
    )
    return Timed(lambda: next(batches), num_steps, wait(device))


def _stepper(env: EnvBase, transforms: Sequence[str] | None, actions: Sequence[Tensor]) -> Timed:
    if transforms is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*non-empty batch-size is experimental")
            env = TransformedEnv(env, Compose(*(TRANSFORMS[name]() for name in transforms)))
    turns, td = itertools.cycle(actions), env.reset()

    @torch.no_grad()
    def call() -> TensorDict:
        nonlocal td
        transition, td = env.step_and_maybe_reset(td.set("action", next(turns)))
        return transition

    return Timed(call)
