"""TorchRL's side: seven of its transforms on torchwrap's envs as an `EnvBase`."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence

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
    """An eager torchwrap env behind TorchRL's interface: the same work below the transforms."""

    def __init__(self, env: tw.Env, action_spec: TensorSpec) -> None:
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.inner = env
        n = env.num_envs
        device = env.device
        observation = Unbounded((n, *env.single_observation_space.shape), device=device)
        self.observation_spec = Composite(observation=observation, shape=(n,), device=device)
        self.action_spec = action_spec
        self.reward_spec = Unbounded((n, 1), device=device)
        flags = {}
        for key in ("done", "terminated", "truncated"):
            flags[key] = Categorical(2, (n, 1), dtype=torch.bool, device=device)
        self.done_spec = Composite(flags, shape=(n,), device=device)

    def _step(self, tensordict: TensorDict) -> TensorDict:
        successor = self.inner._step(tensordict["action"]).exclude("info")
        return successor.set("done", successor["terminated"] | successor["truncated"])

    def _reset(self, tensordict: TensorDict | None, **kwargs) -> TensorDict:
        if tensordict is None or "_reset" not in tensordict:
            mask = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        else:
            mask = tensordict["_reset"].squeeze(-1)
        td = self.inner._reset(tw.RowMask(mask))
        for key in ("done", "terminated", "truncated"):
            td[key] = torch.zeros_like(mask).unsqueeze(-1)
        return td

    def _set_seed(self, seed: int | None) -> None:
        pass


def scripted(num_envs: int, transforms: Sequence[str] | None) -> Timed:
    action_spec = Bounded(-1, 1, (num_envs, script.ACTION))
    env = Batch(script.scripted(num_envs), action_spec)
    stepper = _stepper(env, transforms, [script.actions(num_envs)])
    env.inner.elapsed.copy_(script.elapsed(num_envs))
    return stepper


def cartpole(num_envs: int, transforms: Sequence[str] | None) -> Timed:
    """Our eager dynamics, because TorchRL has no batched CartPole in tensors."""
    generator = torch.Generator().manual_seed(0)
    actions = torch.randint(2, (16, num_envs), generator=generator)
    env = Batch(tw.make("CartPole-v1", num_envs), Categorical(2, (num_envs,)))
    return _stepper(env, transforms, actions)


def collector(num_envs: int, num_steps: int, device: str = "cpu") -> Timed:
    """A batch of TorchRL's Collector, with episode statistics and our side's policy."""
    torch.manual_seed(0)
    action_spec = Categorical(2, (num_envs,), device=device)
    env: EnvBase = Batch(tw.make("CartPole-v1", num_envs, device=device), action_spec)
    env = TransformedEnv(env, Compose(StepCounter(), RewardSum()))
    actor = Actor(4, 2).to(device)
    policy = TensorDictModule(actor, in_keys=["observation"], out_keys=["action"])
    collect = Collector(
        env,
        policy,
        frames_per_batch=num_envs * num_steps,
        total_frames=-1,
        device=device,
    )
    batches = iter(collect)
    return Timed(lambda: next(batches), num_steps, wait(device))


def _stepper(
    env: EnvBase,
    transforms: Sequence[str] | None,
    actions: Iterable[Tensor],
) -> Timed:
    if transforms is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*non-empty batch-size is experimental")
            env = TransformedEnv(env, Compose(*[TRANSFORMS[name]() for name in transforms]))
    turns = itertools.cycle(actions)
    td = env.reset()

    @torch.no_grad()
    def call() -> TensorDict:
        nonlocal td
        transition, td = env.step_and_maybe_reset(td.set("action", next(turns)))
        return transition

    return Timed(call)
