"""Transforms that keep earlier observations or actions of the running episode."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import random, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule, EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Path, Signature, Value
from torchwrap.transforms.transform import AugmentedObservation, RewardTransform, Transform


class _Frames(BatchedModule):
    """The latest frames of one leaf in each env, oldest first: `(num_envs, size, *shape)`.

    Args:
        padding: the frame before the initial one, repeated.
        size: number of frames.
        num_envs: number of envs.
        repeats_initial: whether the initial frame itself is repeated instead of `padding`.
    """

    frames = EnvBuffer(row=lambda self: torch.stack([self.padding] * self.size))
    padding: Tensor

    def __init__(
        self,
        padding: Tensor,
        size: int,
        num_envs: int,
        repeats_initial: bool,
    ) -> None:
        super().__init__()
        self.size = size
        self.repeats_initial = repeats_initial
        self.register_buffer("padding", padding, persistent=False)
        self.allocate(num_envs, padding.device)

    def append(self, frame: Tensor) -> Tensor:
        """Adds a frame and drops the oldest one. Returns all frames."""
        kept = self.frames[:, 1:]
        frames = torch.cat([kept, frame.unsqueeze(1)], 1)
        self.frames.copy_(frames)
        return frames

    def restart(
        self,
        initial: Tensor,
        mask: RowMask,
    ) -> Tensor:
        """Starts an episode with an initial frame in the rows of the mask.

        Returns the frames. Other rows are unspecified.
        """
        initial = mask.gather(initial).unsqueeze(1)
        shape = (initial.shape[0], self.size, *self.padding.shape)
        if self.repeats_initial:
            frames = initial.expand(shape)
        else:
            kept = self.padding.expand(shape)[:, 1:]
            frames = torch.cat([kept, initial], 1)
        mask.scatter_(self.frames, frames)
        return mask.spread(frames)

    def clear(self, mask: RowMask) -> None:
        """Starts an episode without a frame in the rows of the mask."""
        mask.assign_(self.frames, self.padding.expand_as(self.frames))


class _History(Transform):
    """Base for transforms that keep the latest frames of each leaf of a space."""

    padding_types: tuple[str, ...] = ("reset", "zero")
    frames_of: dict[Path, _Frames]

    def __init__(self, padding_type: str | Any = "zero") -> None:
        super().__init__()
        if isinstance(padding_type, str | bytes) and padding_type not in self.padding_types:
            names = " or ".join(map(repr, self.padding_types))
            must = f"padding_type must be a member of the space or {names}"
            raise ValueError(refusal(type(self).__name__, must, repr(padding_type)))
        self.padding_type = copy.deepcopy(padding_type)

    def _make_frames(
        self,
        space: Space[Any],
        signature: Signature,
        size: int,
    ) -> None:
        padding_type = self.padding_type
        is_member = not isinstance(padding_type, str)
        if is_member and not space.contains(padding_type):
            must = f"padding_type must be in {space}"
            raise ValueError(refusal(type(self).__name__, must, repr(padding_type)))
        repeats_initial = not is_member and padding_type == "reset"
        self.frames_of = {}
        for path, leaf in spaces.leaves(space):
            padding = spaces.zeros(leaf, 1, signature.device)[0]
            if is_member:
                entry = np.asarray(spaces.entry(padding_type, path), leaf.dtype)
                padding = torch.tensor(entry, device=signature.device)
            self.frames_of[path] = _Frames(padding, size, signature.num_envs, repeats_initial)
        self.histories = nn.ModuleList(self.frames_of.values())  # registers their buffers

    def _output(self, frames: Tensor) -> Tensor:
        """Returns the new value of a leaf, from its frames `(num_envs, size, *shape)`."""
        raise NotImplementedError

    def _append(self, value: Value) -> Value:
        return spaces.apply(
            lambda path, frame: self._output(self.frames_of[path].append(frame)), value
        )


class _ObservationHistory(_History):
    """Base for transforms that keep the latest observations."""

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self._append(td["observation"]))

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        def restart(path: Path, initial: Tensor) -> Tensor:
            return self._output(self.frames_of[path].restart(initial, mask))

        return td.set("observation", spaces.apply(restart, td["observation"]))


class _ActionHistory(_History):
    """Base for transforms that keep the latest actions."""

    padding_types = ("zero",)

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        for frames in self.frames_of.values():
            frames.clear(mask)
        return td


class FrameStackObservation(_ObservationHistory):
    """Stacks the latest observations of an episode, oldest first. A stack never mixes episodes.

    Args:
        stack_size: number of observations in the stack.
        padding_type: fills the stack at the start of an episode: "reset" repeats the initial
            observation, "zero" takes the element of the space nearest to zero, and an observation
            of the space is used itself.
        axis: None stacks along a new first axis. A number joins the observations along that axis of
            a Box, such as -1 for the channels of `(height, width, channels)`, as
            Stable-Baselines3's `VecFrameStack` does.

    Shape: `(num_envs, *shape)` to `(num_envs, stack_size, *shape)`, or with `axis` to `shape` with
    `stack_size` times as many elements along it; each leaf of a `Dict` or `Tuple` by itself.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), FrameStackObservation(3))
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"].flatten()
    tensor([0., 0., 1.])
    """

    def __init__(
        self, stack_size: int, *, padding_type: str | Any = "reset", axis: int | None = None
    ) -> None:
        super().__init__(padding_type)
        owner = "FrameStackObservation"
        self.stack_size = validation.integer(owner, "stack_size", stack_size, at_least=1)
        self.axis = axis

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        self._make_frames(below, signature, self.stack_size)
        if self.axis is None:
            above = batch_space(below, self.stack_size)
        else:
            above = spaces.map_leaves(self._concatenate, below)
        return signature.replace(single_observation_space=above)

    def _concatenate(self, leaf: Space[Any]) -> Box:
        owner = "FrameStackObservation"
        box = spaces.box(owner, "observation", leaf)
        if not box.shape:
            must = "axis must be None for an observation without dimensions"
            raise ValueError(refusal(owner, must, self.axis))
        low = np.concatenate([box.low] * self.stack_size, self.axis)
        high = np.concatenate([box.high] * self.stack_size, self.axis)
        return Box(low, high, dtype=box.dtype.type)

    def _output(self, frames: Tensor) -> Tensor:
        if self.axis is None:
            return frames
        num_dims = frames.dim() - 2  # without envs and frames
        dim = 1 + self.axis % num_dims
        return torch.cat(frames.unbind(1), dim)


class _Delay(_History):
    """Base for delays: one number for all, one for each env, or one drawn for each episode."""

    delays = EnvBuffer(row=lambda self: torch.tensor(self.shortest))

    def __init__(
        self, delay: int | tuple[int, int] | Tensor, *, padding_type: str | Any = "zero"
    ) -> None:
        super().__init__(padding_type)
        owner = type(self).__name__
        bounds: Any = delay
        if isinstance(delay, Tensor):
            if delay.dim() != 1 or delay.dtype != torch.int64:
                must = "delay must be a tensor of shape (num_envs,) and dtype torch.int64"
                raise ValueError(refusal(owner, must, validation.described(delay)))
            bounds = int(delay.min()), int(delay.max())
        self.shortest, self.longest = validation.interval(owner, "delay", bounds, at_least=0)
        self.buffer_limits = {"delays": (self.shortest, self.longest)}
        self.delay = copy.deepcopy(delay)  # its caller may change it

    def _make_delays(
        self,
        space: Space[Any],
        signature: Signature,
    ) -> Signature:
        self._make_frames(space, signature, self.longest + 1)
        if isinstance(self.delay, Tensor):
            if len(self.delay) != signature.num_envs:
                must = f"delay must have one number for each of {signature.num_envs} envs"
                raise ValueError(refusal(type(self).__name__, must, len(self.delay)))
            self.delays.copy_(self.delay)
        self.is_drawn = self.longest > self.shortest and not isinstance(self.delay, Tensor)
        if self.is_drawn:
            self.stream, signature = signature.stream()
        return signature

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        if self.is_drawn:
            delays = random.integers(self.stream.key(), self.shortest, self.longest + 1)
            mask.assign_(self.delays, delays)
        elif not isinstance(self.delay, Tensor):
            # The rows may hold anything: `deploy` takes them from its caller.
            mask.fill_(self.delays, self.shortest)
        return super().reset(td, mask)

    def _output(self, frames: Tensor) -> Tensor:
        index = self.longest - self.delays  # the oldest frame has index 0
        index = index.view(-1, *(1,) * (frames.dim() - 1))
        # `take_along_dim` would fix the batch size of an exported program.
        index = index.expand(-1, -1, *frames.shape[2:])
        return frames.gather(1, index).squeeze(1)


class DelayObservation(_Delay, _ObservationHistory):
    """Delays observations by a number of steps.

    Args:
        delay: the number of steps; a pair (shortest, longest), from which each episode draws; or an
            int64 tensor `(num_envs,)` with a number for each env.
        padding_type: the first `delay` observations of an episode: "zero" is the element of the
            space nearest to zero, "reset" the initial observation, and an observation of the space
            is used itself.

    Shape: any space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), DelayObservation(2))
    >>> td = env.reset()
    >>> for _ in range(3):  # observations 1, 2 and 3, after an initial 0
    ...     _, td = env.step(td.set("action", env.sample_action()))
    >>> td["observation"]
    tensor([[1.]])
    """

    def setup(self, signature: Signature) -> Signature:
        return self._make_delays(signature.single_observation_space, signature)


class DelayAction(_Delay, _ActionHistory):
    """Delays actions by a number of steps, as actuators and networks do.

    Args:
        delay: as for `DelayObservation`.
        padding_type: the env's actions in the first `delay` steps of an episode: "zero" is the
            action of the space nearest to zero, and an action of the space is used itself.

    Shape: any action space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from gymnasium.spaces import Discrete
    >>> env = ScriptedEnv(1, action_space=Discrete(9))
    >>> env = TransformedEnv(env, DelayAction(1))
    >>> td = env.reset()
    >>> for action in (5, 6):
    ...     transition, td = env.step(td.set("action", torch.tensor([action])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([5])
    """

    def setup(self, signature: Signature) -> Signature:
        return self._make_delays(signature.single_action_space, signature)

    def action(self, action: Value) -> Value:
        return self._append(action)


class _FilteredAction(_ActionHistory):
    """Base for filters: the env's action moves from the last one towards the agent's."""

    argument: str
    coefficient: Tensor

    def setup(self, signature: Signature) -> Signature:
        owner = type(self).__name__
        box = spaces.box(owner, "action", signature.single_action_space, of="floats")
        self._make_frames(box, signature, 1)
        self._register_coefficients(box, signature.device, coefficient=self.argument)
        return signature

    def _filter(self, last: Tensor, action: Tensor) -> Tensor:
        """Returns the env's action, which is between its last one and the agent's."""
        raise NotImplementedError

    def action(self, action: Value) -> Value:
        (latest,) = self.frames_of.values()
        filtered = self._filter(latest.frames[:, 0], action)  # type: ignore[arg-type]
        return latest.append(filtered)[:, 0]


class LowPassAction(_FilteredAction):
    """Smooths actions by an exponential moving average, a low-pass filter of first order.

    The env's action is `y[t] = alpha * action[t] + (1 - alpha) * y[t - 1]`, as for Isaac Lab's
    `EMAJointPositionToLimitsAction`. For MuJoCo's `filterexact` with time constant tau and step dt,
    alpha is `1 - exp(-dt / tau)`.

    Args:
        alpha: weight of the new action in [0, 1], a number or an array that broadcasts to the
            action.
        padding_type: the env's action before an episode: "zero" is the action of the space nearest
            to zero, and an action of the space is used itself.

    Shape: a Box of floats, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=Box(-1, 1, (1,))), LowPassAction(0.5))
    >>> _, td = env.step(env.reset().set("action", torch.ones(1, 1)))
    >>> env.step(td.set("action", torch.ones(1, 1)))[0]["next", "info", "action"]
    tensor([[0.7500]])
    """

    argument = "alpha"

    def __init__(self, alpha: ArrayLike, *, padding_type: str | Any = "zero") -> None:
        super().__init__(padding_type)
        self.alpha = validation.numbers("LowPassAction", "alpha", alpha, 0, 1)

    def _filter(self, last: Tensor, action: Tensor) -> Tensor:
        return last.lerp(action, self.coefficient)  # exact for weights 0 and 1, and never beyond


class RateLimitAction(_FilteredAction):
    """Limits the change of the env's action from step to step, as motors and rate limiters do.

    The env's action is `y[t] = y[t - 1] + clip(action[t] - y[t - 1], -max_change, max_change)`.

    Args:
        max_change: largest change of each component in a step, at least 0: a number or an array
            that broadcasts to the action.
        padding_type: as for `LowPassAction`.

    Shape: a Box of floats, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=Box(-1, 1, (1,))), RateLimitAction(0.4))
    >>> _, td = env.step(env.reset().set("action", torch.ones(1, 1)))
    >>> env.step(td.set("action", torch.ones(1, 1)))[0]["next", "info", "action"]
    tensor([[0.8000]])
    """

    argument = "max_change"

    def __init__(self, max_change: ArrayLike, *, padding_type: str | Any = "zero") -> None:
        super().__init__(padding_type)
        self.max_change = validation.numbers("RateLimitAction", "max_change", max_change, 0)

    def _filter(self, last: Tensor, action: Tensor) -> Tensor:
        return action.clamp(last - self.coefficient, last + self.coefficient)


class _KeptAction(_ActionHistory):
    """Base for transforms that keep the agent's latest actions."""

    def action(self, action: Value) -> Value:
        for path, frames in self.frames_of.items():
            frames.append(spaces.entry(action, path))
        return action

    def _kept(self, index: int, td: TensorDict) -> Value:
        return spaces.build(
            self._below.single_action_space,
            lambda path, _: self.frames_of[path].frames[:, index].clone(),
            td.batch_size[0],
        )


class LastActionObservation(_KeptAction, AugmentedObservation):
    """Adds the agent's last action to the observation, as Isaac Lab's `last_action` does.

    It is the action that reaches this transform: before the transforms below change it.

    Args:
        flatten: whether to flatten the result into one vector, as Gymnasium's `flatten` does.
        padding_type: the last action in initial observations: "zero" is the action of the space
            nearest to zero, and an action of the space is used itself.
        key: key of the action in a `Dict` observation.

    Shape: a `Dict` holds the action under `key`, a `Tuple` as its last element; any other
    observation becomes a `Dict` of "obs" and `key`. With `flatten`, all of it is one vector.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, (1,), action_space=Box(-1, 1, (2,)))
    >>> env = TransformedEnv(env, LastActionObservation())
    >>> td = env.reset()
    >>> td["observation"], env.step(td.set("action", torch.tensor([[0.5, -1]])))[1]["observation"]
    (tensor([[0., 0., 0.]]), tensor([[ 1.0000,  0.5000, -1.0000]]))
    """

    def __init__(
        self, flatten: bool = True, *, padding_type: str | Any = "zero", key: str = "last_action"
    ) -> None:
        super().__init__(padding_type)
        self.flatten = validation.flag("LastActionObservation", "flatten", flatten)
        self.key = validation.text("LastActionObservation", "key", key)

    def setup(self, signature: Signature) -> Signature:
        self._make_frames(signature.single_action_space, signature, 1)
        return self._add_space(signature, self.key, signature.single_action_space)

    def step(self, td: TensorDict) -> TensorDict:
        return self._add_entry(td, self._kept(0, td))

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        return self.step(super().reset(td, mask))


class ActionRewardTransform(_KeptAction, RewardTransform):
    """Base for rewards that need the action: implement `reward(reward, action, last_action)`.

    The actions of this step and of the one before are the agent's: before the transforms below
    change them. Rewards are `(num_envs, 1)`. If you override `action`, `reset` or `setup` too, call
    that of `super()`.

    Args:
        padding_type: the last action in the first step of an episode: "zero" is the action of the
            space nearest to zero, as in Isaac Lab, and an action of the space is used itself.

    >>> class ActionRate(ActionRewardTransform):
    ...     def reward(self, reward, action, last_action):
    ...         return reward - (action - last_action).square().sum(-1, keepdim=True)
    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=Box(-1, 1, (2,))), ActionRate())
    >>> env.step(env.reset().set("action", torch.ones(1, 2)))[0]["next", "reward"]
    tensor([[-1.]])
    """

    _standalone = ""

    def setup(self, signature: Signature) -> Signature:
        self._make_frames(signature.single_action_space, signature, 2)
        return signature

    def reward(  # type: ignore[override]
        self, reward: Tensor, action: Any, last_action: Any
    ) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} lacks reward(reward, action, last_action)"
        )

    def step(self, td: TensorDict) -> TensorDict:
        actions = self._kept(1, td), self._kept(0, td)
        return td.set("reward", self.reward(td["reward"], *actions))


class StickyAction(_History):
    """Repeats the previous action at random (sticky actions).

    At each step a series of repeats starts, unless one is running. The first action of an episode
    is always the agent's. Source: Machado et al., "Revisiting the Arcade Learning Environment",
    2018.

    Args:
        repeat_action_probability: probability that a series starts, in [0, 1).
        repeat_action_duration: number of steps in a series, or a pair (shortest, longest) from
            which it is drawn uniformly.

    Shape: any action space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from gymnasium.spaces import Discrete
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=Discrete(9)), StickyAction(0.999))
    >>> _, td = env.step(env.reset(seed=0).set("action", torch.tensor([0])))
    >>> transition, _ = env.step(td.set("action", torch.tensor([1])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([0])
    """

    has_acted = EnvBuffer((), torch.bool)
    repeats_left = EnvBuffer((), torch.int64)

    def __init__(
        self, repeat_action_probability: float, repeat_action_duration: int | tuple[int, int] = 1
    ) -> None:
        super().__init__()
        self.repeat_action_probability = validation.probability(
            "StickyAction", "repeat_action_probability", repeat_action_probability
        )
        self.repeat_action_duration = repeat_action_duration
        # `random.integers` counts up to 2**31.
        self.shortest, self.longest = validation.interval(
            "StickyAction", "repeat_action_duration", repeat_action_duration, 1, 2**31
        )

    def setup(self, signature: Signature) -> Signature:
        self._make_frames(signature.single_action_space, signature, 1)
        self.stream, signature = signature.stream()
        return signature

    def action(self, action: Value) -> Value:
        key = self.stream.key()
        can_start = self.has_acted & (self.repeats_left == 0)
        starts = can_start & (random.uniform(key) < self.repeat_action_probability)
        duration = random.integers(key.fold_in(1), self.shortest, self.longest + 1)
        repeats_left = torch.where(starts, duration, self.repeats_left)
        repeated = RowMask(repeats_left > 0)

        def choose(path: Path, chosen: Tensor) -> Tensor:
            latest = self.frames_of[path]
            frame = repeated.where(latest.frames[:, 0], chosen)
            return latest.append(frame)[:, 0]

        self.repeats_left.copy_((repeats_left - 1).clamp(min=0))
        self.has_acted.fill_(True)
        return spaces.apply(choose, action)

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        mask.fill_(self.has_acted, False)
        mask.fill_(self.repeats_left, 0)
        return td
