"""MuJoCo in PyTorch: the functions of an env with mujoco-torch's physics, for `FunctionalEnv`."""

from __future__ import annotations

import copy
import os
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor

from torchwrap import random
from torchwrap._core import validation
from torchwrap._core.tracing import is_tracing
from torchwrap.random import Key
from torchwrap.registration import register

try:
    import mujoco_torch
except AttributeError as error:  # it reads flags that other versions of MuJoCo lack
    needed = "torchwrap.interop.mujoco_torch needs a version of mujoco that mujoco-torch can be imported with"
    raise ImportError(f"{needed}, but got mujoco {mujoco.__version__}: pip install 'mujoco>=3.4,<3.8'.") from error

State = dict[str, Tensor]


class MujocoWorld(FuncEnv[State, Tensor, Tensor, Tensor, Tensor, Any, Any]):
    """Base of the functions of an env whose physics is a MuJoCo model, computed in PyTorch by mujoco-torch.

    The state is that of MuJoCo: `qpos`, `qvel`, `qacc_warmstart`, and `act` if there are actuators with a state of their own,
    each `(num_envs, ...)` float64. A subclass defines `reward`. It may replace `initial`, which returns `qpos0` at rest,
    `observation`, which concatenates `qpos` and `qvel`, and `terminal`, which is never true. Its functions broadcast; see
    `FunctionalEnv`, whose `simulate` is differentiable through the physics. `torchwrap.compile` refuses it.

    The constraint solver takes a fixed number of iterations, without a test for convergence, because PyTorch 2.13 cannot
    batch the loops that have one. With the defaults, HalfCheetah agrees with MuJoCo within 1e-6 after `frame_skip` steps.

    Args:
        model: MuJoCo's model, which is copied, or the path of an XML file.
        frame_skip: steps of the physics per action.
        iterations: of the solver. Too few give wrong contact forces; compare with MuJoCo before you reduce them.
        ls_iterations: of its line search.

    Raises:
        TypeError, ValueError: for an invalid argument.
        NotImplementedError: for a model that mujoco-torch does not support.

    Shape: actions `(num_envs, nu)` float32, in the `ctrlrange` of the actuators.
    """

    broadcasts = True

    def __init__(
        self,
        model: mujoco.MjModel | str | os.PathLike[str],
        frame_skip: int = 1,
        *,
        iterations: int = 8,
        ls_iterations: int = 4,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.frame_skip = validation.integer(name, "frame_skip", frame_skip, at_least=1)
        if not isinstance(model, mujoco.MjModel | str | os.PathLike):
            raise TypeError(f"{name} needs a mujoco.MjModel or the path of an XML file, but got {model!r}.")
        model = copy.copy(model) if isinstance(model, mujoco.MjModel) else mujoco.MjModel.from_xml_path(os.fspath(model))
        model.opt.iterations = validation.integer(name, "iterations", iterations, at_least=1)
        model.opt.ls_iterations = validation.integer(name, "ls_iterations", ls_iterations, at_least=1)
        self.model, self.dt = model, model.opt.timestep * self.frame_skip
        self.observation_space = spaces.Box(-np.inf, np.inf, (model.nq + model.nv,), np.float64)
        bounds = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, [-np.inf, np.inf])
        self.action_space = spaces.Box(*bounds.T.astype(np.float32), dtype=np.float32)
        physics = mujoco_torch.device_put(model)
        self._physics = {torch.device("cpu"): (physics, mujoco_torch.make_data(physics))}

    def start(self, qpos: Tensor, qvel: Tensor) -> State:
        """The initial state with these positions `(rows, nq)` and velocities `(rows, nv)`."""
        state = {"qpos": qpos, "qvel": qvel, "qacc_warmstart": torch.zeros_like(qvel)}
        return {**state, "act": qvel.new_zeros(len(qvel), self.model.na)} if self.model.na else state

    def initial(self, rng: Key, params: Any = None) -> State:
        _, data = self._on(rng.env.device)
        return self.start(*(value.repeat(len(rng.env), 1) for value in (data.qpos, data.qvel)))

    def transition(self, state: State, action: Tensor, rng: Key, params: Any = None) -> State:
        if is_tracing(action):
            needed = "an eager env, because mujoco-torch calls 100,000 operators per step, too many to trace"
            raise RuntimeError(f"{type(self).__name__} needs {needed}, but got a trace: leave out `tw.compile`.")
        model, data = self._on(action.device)
        step = torch.vmap(lambda data: mujoco_torch.step(model, data, fixed_iterations=True))
        # Its own copy for each row, because a step writes to some fields in place.
        data = data.expand(len(action)).clone().replace(**state, ctrl=action.to(torch.float64))
        for _ in range(self.frame_skip):
            data = step(data)
        return {field: getattr(data, field) for field in state}

    def observation(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return torch.cat([state["qpos"], state["qvel"]], -1)

    def terminal(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return torch.zeros(len(state["qpos"]), dtype=torch.bool, device=state["qpos"].device)

    def _on(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._physics:
            model, data = self._physics[torch.device("cpu")]
            self._physics[device] = (model.to(device), data.to(device))
        return self._physics[device]


class HalfCheetah(MujocoWorld):
    """HalfCheetah-v5: Gymnasium's model, observation, reward and initial noise. Episodes never terminate.

    The reward is the mean forward velocity during the step, minus the cost of the action. On a CPU, Gymnasium's own env is
    faster by far: see `examples/README.md`. This one stays in PyTorch, and has snapshots.

    Args:
        forward_reward_weight: of the velocity, in metres per second.
        ctrl_cost_weight: of the sum of the squared actions.
        reset_noise_scale: half the width of the uniform noise of the initial positions, and the standard deviation of the
            normal noise of the initial velocities.
        kwargs: as for `MujocoWorld`. `frame_skip` is 5, as Gymnasium's.

    Shape: observations `(num_envs, 17)` float64 (the positions without that along the track, and the velocities), actions
    `(num_envs, 6)` float32, torques in [-1, 1].

    >>> import torchwrap as tw
    >>> tw.make("mujoco_torch/HalfCheetah-v5", num_envs=2)
    <mujoco_torch/HalfCheetah-v5(num_envs=2, device=cpu)>
    """

    def __init__(
        self,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 0.1,
        reset_noise_scale: float = 0.1,
        **kwargs: Any,
    ) -> None:
        assets = os.path.join(os.path.dirname(gymnasium.__file__), "envs", "mujoco", "assets")
        super().__init__(os.path.join(assets, "half_cheetah.xml"), **{"frame_skip": 5, **kwargs})
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.model.nq + self.model.nv - 1,), np.float64)
        self.forward_reward_weight, self.ctrl_cost_weight, self.reset_noise_scale = (
            validation.number("HalfCheetah", name, value)
            for name, value in (
                ("forward_reward_weight", forward_reward_weight),
                ("ctrl_cost_weight", ctrl_cost_weight),
                ("reset_noise_scale", reset_noise_scale),
            )
        )

    def initial(self, rng: Key, params: Any = None) -> State:
        state, scale = super().initial(rng), self.reset_noise_scale
        positions = 2 * random.uniform(rng.fold_in(1), (self.model.nq,), torch.float64) - 1
        velocities = random.normal(rng.fold_in(2), (self.model.nv,), torch.float64)
        return self.start(state["qpos"] + scale * positions, state["qvel"] + scale * velocities)

    def observation(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return super().observation(state, rng)[:, 1:]

    def reward(self, state: State, action: Tensor, next_state: State, rng: Key, params: Any = None) -> Tensor:
        velocity = (next_state["qpos"][:, 0] - state["qpos"][:, 0]) / self.dt
        return self.forward_reward_weight * velocity - self.ctrl_cost_weight * torch.square(action).sum(-1)


register("mujoco_torch/HalfCheetah-v5", HalfCheetah, max_episode_steps=1000)
