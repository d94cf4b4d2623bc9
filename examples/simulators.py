"""Envs of nine simulators as torchwrap envs.

mjlab, Isaac Lab, ManiSkill, Genesis, Newton, PufferLib, TorchRL, gymnax and mujoco-torch.

python examples/simulators.py       trains mjlab's Unitree Go1 with rsl_rl's PPO (extra `mjlab`)

Each function takes an env or a model as its simulator makes it, and names the version that was run
or read in November 2026. Copy a function and adapt it. The result takes transforms, collectors and
the adapters for trainers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict
from torch import Tensor

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.tensors import from_functions

State = dict[str, Tensor]
Results = tuple[Any, ...]
Step = Callable[[Tensor], Results]


def from_mjlab(env: Any, **kwargs: Any) -> tw.Env:
    """mjlab 1.6.0, run: a `ManagerBasedRlEnv` with `cfg.auto_reset = False`."""
    if env.cfg.auto_reset:
        remedy = "Set cfg.auto_reset = False before it is made"
        raise ValueError(f"from_mjlab: env must not reset itself. {remedy}.")

    def space(value: Any) -> Space[Any]:  # mjlab has spaces of its own
        if hasattr(value, "spaces"):
            return Dict({name: space(part) for name, part in value.spaces.items()})
        return Box(value.low, value.high, value.shape, np.dtype(value.dtype))

    return from_functions(
        lambda ids: env.reset(env_ids=ids)[0],
        env.step,
        env.num_envs,
        space(env.single_observation_space),
        space(env.single_action_space),
        reset_by="ids",
        max_episode_steps=env.max_episode_length or None,
        clock=lambda: env.episode_length_buf,
        seed=env.seed,
        close=env.close,
        device=env.device,
        **kwargs,
    )


def from_isaac_lab(env: Any, **kwargs: Any) -> tw.Env:
    """Isaac Lab 3.0.0 with `cfg.compute_final_obs = True`, run with Newton, and 2.3.2, read.

    Takes a `ManagerBasedRLEnv` or `DirectRLEnv`. 2.3 loses final observations, so they are computed
    here, without the noise of a direct env. Terms with a history or a delay of Isaac Lab's own have
    the values of the step before in them, in both versions. The Warp envs of
    `isaaclab_experimental` lose them too: the first end of an episode raises. Only a manager-based
    env takes `reset(mask=)`, and adds a frame to the histories of all rows.
    """
    env = env.unwrapped
    if not getattr(env.cfg, "compute_final_obs", True):
        remedy = "Set cfg.compute_final_obs = True before the env is made"
        raise ValueError(f"from_isaac_lab: env must return final observations. {remedy}.")

    def step(action: Tensor) -> Results:
        env.extras.pop("final_obs", None)  # from an earlier step
        return env.step(action)

    def reset(ids: Tensor) -> Any:
        arguments = {} if len(ids) == env.num_envs else {"env_ids": ids}
        observation, _ = env.reset(**arguments)
        return observation

    if not hasattr(env.cfg, "compute_final_obs"):
        if hasattr(env, "observation_manager"):
            observe = env.observation_manager.compute
        else:
            observe = env._get_observations
        step = add_final(env, env.step, observe)
    return from_functions(
        reset,
        step,
        env.num_envs,
        env.single_observation_space,
        env.single_action_space,
        reset_by="ids",
        max_episode_steps=env.max_episode_length,
        clock=lambda: env.episode_length_buf,
        final_key="final_obs",
        seed=env.seed,
        close=env.close,
        device=env.device,
        **kwargs,
    )


def add_final(env: Any, step: Step, observe: Callable[[], Any]) -> Step:
    """`step`, with the observation before `env._reset_idx` as "final_obs" of the info."""

    def step_with_final(action: Tensor) -> Results:
        final: dict[str, TensorDict] = {}
        reset_rows = env._reset_idx

        def observe_and_reset(rows: Any) -> None:
            final["final_obs"] = TensorDict(observe(), [env.num_envs]).clone()
            reset_rows(rows)

        env._reset_idx = observe_and_reset
        try:
            *result, info = step(action)
        finally:
            env._reset_idx = reset_rows
        return *result, {**info, **final}

    return step_with_final


def from_maniskill(env: Any, **kwargs: Any) -> tw.Env:
    """ManiSkill 3.0.1, run: `gymnasium.make(id, num_envs=...)`, without `ManiSkillVectorEnv`.

    Other wrappers are left out.
    """
    seeds: list[list[int]] = []
    limit = env.get_wrapper_attr("_max_episode_steps")  # TimeLimitWrapper's; no spec has it
    env = env.unwrapped

    def reset(ids: Tensor) -> Any:
        seed = seeds.pop() if seeds else None
        observation, _ = env.reset(seed=seed, options={"env_idx": ids})
        return observation

    def seed(first: int) -> None:
        torch.manual_seed(first)  # for later episodes
        seeds.append([first + row for row in range(env.num_envs)])

    return from_functions(
        reset,
        env.step,
        env.num_envs,
        env.single_observation_space,
        env.single_action_space,
        reset_by="ids",
        max_episode_steps=limit,
        clock=lambda: env.elapsed_steps,
        seed=seed,
        close=env.close,
        device=env.device,
        **kwargs,
    )


def from_genesis(env: Any, **kwargs: Any) -> tw.Env:
    """Genesis 1.4.5, run: an env as examples/locomotion/go2_env.py (no final observations)."""

    def observe() -> dict[str, Tensor]:
        env._update_observation()
        return {"policy": env.get_observations()["policy"]}

    def step(action: Tensor) -> Results:
        observation, reward, done, extras = env.step(action)
        time_out = extras["time_outs"].bool()
        return observation, reward, done & ~time_out, time_out, extras

    def reset(mask: Tensor) -> dict[str, Tensor]:
        env._reset_idx(mask)
        return observe()

    size = observe()["policy"].shape[1]
    return from_functions(
        reset,
        add_final(env, step, observe),
        env.num_envs,
        Dict(policy=_box(size)),
        _box(env.num_actions),
        max_episode_steps=env.max_episode_length + 1,
        clock=lambda: env.episode_length_buf,
        final_key="final_obs",
        seed=torch.manual_seed,
        device=env.device,
        **kwargs,
    )


def from_newton(
    solver: Any,
    view: Any,
    reward: Callable[[Tensor], Tensor],
    terminated: Callable[[Tensor], Tensor],
    initial: Callable[[], Tensor],
    *,
    num_substeps: int = 10,
    dt: float = 1 / 600,
    **kwargs: Any,
) -> tw.Env:
    """Newton 1.8.0, run: articulations of an `ArticulationView`, one per world; actions are forces.

    Observations are positions and velocities of the joints, `(num_envs, 2 * num_dofs)`. `reward`
    and `terminated` get them, and `initial` draws them. Warp's arrays and the tensors share their
    memory.
    """
    import warp

    model = view.model
    states = [model.state(), model.state()]
    control = model.control()

    def observe() -> Tensor:
        positions = warp.to_torch(view.get_dof_positions(states[0]))
        velocities = warp.to_torch(view.get_dof_velocities(states[0]))
        return torch.cat([positions[:, 0], velocities[:, 0]], -1)

    def step(force: Tensor) -> Results:
        view.set_dof_forces(control, force.unsqueeze(1))
        for _ in range(num_substeps):
            states[0].clear_forces()
            solver.step(states[0], states[1], control, None, dt)
            states.reverse()
        observation = observe()
        truncated = torch.zeros(len(observation), device=observation.device)
        return observation, reward(observation), terminated(observation), truncated, {}

    def reset(mask: Tensor) -> Tensor:
        positions, velocities = initial().unsqueeze(1).chunk(2, -1)
        view.set_dof_positions(states[0], positions, mask=mask)
        view.set_dof_velocities(states[0], velocities, mask=mask)
        view.eval_fk(states[0], mask=mask)
        return observe()

    size = observe().shape[1]
    device = warp.device_to_torch(model.device)
    spaces = [_box(size), _box(size // 2)]
    return from_functions(reset, step, view.world_count, *spaces, device=device, **kwargs)


def from_pufferlib(env: Any, **kwargs: Any) -> tw.Env:
    """PufferLib 3.0.0, run: a native env such as Ocean's `Squared(num_envs=64)`; rows are agents.

    A `vector.make` of native envs works too. They start new episodes in `step` and lose the final
    observation: here it is the previous observation, harmless without bootstrapping. Their time
    limits are terminations or, as in Ocean's `Cartpole`, no end at all.
    """
    if env.emulated:
        remedy = "Pass an env of Gymnasium to tw.make"
        raise ValueError(f"from_pufferlib: env must be a native env of PufferLib. {remedy}.")
    last = torch.zeros(0)
    next_seed = 0

    def step(action: Tensor) -> Results:
        nonlocal last
        *results, _ = env.step(action.numpy())
        results = [torch.from_numpy(value) for value in results]
        previous = last
        last = results[0].clone()
        return *results, {"final_obs": previous}

    def reset(mask: Tensor) -> Tensor:
        nonlocal last, next_seed
        if not mask.all():
            remedy = "Leave out mask and max_episode_steps"
            raise ValueError(f"from_pufferlib: mask must hold all rows. {remedy}.")
        observation, _ = env.reset(seed=next_seed)
        next_seed += 1  # most envs have a default seed, and would repeat their episodes
        last = torch.from_numpy(observation).clone()
        return last

    def seed(value: int) -> None:
        nonlocal next_seed
        next_seed = value

    return from_functions(
        reset,
        step,
        env.num_agents,
        env.single_observation_space,
        env.single_action_space,
        final_key="final_obs",
        seed=seed,
        close=env.close,
        **kwargs,
    )


def from_torchrl(
    env: Any, observation_space: Space[Any], action_space: Space[Any], **kwargs: Any
) -> tw.Env:
    """TorchRL 0.14, run: an `EnvBase` of batch size `(num_envs,)` that does not reset itself.

    Its actions are categorical. The observation is the entry "observation", or all observation keys
    as a `Dict`.
    """
    root: Any = None  # TorchRL's root, with the state of the env

    def observe(td: Any) -> Any:
        if isinstance(observation_space, Dict):
            return {name: td[name] for name in observation_space.spaces}
        return td["observation"]

    def reset(rows: Tensor) -> Any:
        nonlocal root
        if root is None or rows.all():
            root = env.reset()
        else:
            root = env.reset(root.set("_reset", rows.unsqueeze(-1)), select_reset_only=True)
        return observe(root)

    def step(action: Any) -> Results:
        nonlocal root
        stepped = env.step(root.set("action", action))
        root = env.step_mdp(stepped)
        successor = stepped["next"]
        terminated = successor["terminated"]
        truncated = successor.get("truncated", successor["done"] & ~terminated)
        return observe(successor), successor["reward"], terminated, truncated, {}

    return from_functions(
        reset,
        step,
        env.batch_size[0],
        observation_space,
        action_space,
        seed=env.set_seed,
        close=lambda: env.close(raise_if_closed=False),
        device=env.device or "cpu",
        **kwargs,
    )


def from_gymnax(env: Any, num_envs: int, params: Any = None, **kwargs: Any) -> tw.Env:
    """gymnax 1.0, run: `gymnax.make(name)[0]`. `params.max_steps_in_episode` truncates."""
    import jax
    from gymnax.environments.spaces import gymnax_space_to_gym_space

    from torchwrap.interop.jax import from_jax

    params = env.default_params if params is None else params

    def reset(key: Any) -> tuple[Any, Any]:
        reset_key, step_key = jax.random.split(key)
        observation, state = env.reset_env(reset_key, params)
        return (state, step_key), observation

    def step(state_and_key: Any, action: Any) -> Results:
        state, key = state_and_key
        # The key of an episode stays: an env that draws nothing then computes no random numbers.
        step_key = jax.random.fold_in(key, state.time)
        observation, state, reward, terminated, info = env.step_env(step_key, state, action, params)
        truncated = env.is_truncated(state, params)
        return (state, key), observation, reward, terminated, truncated, info

    return from_jax(
        reset,
        step,
        num_envs,
        gymnax_space_to_gym_space(env.observation_space(params)),
        gymnax_space_to_gym_space(env.action_space(params)),
        max_episode_steps=int(params.max_steps_in_episode),
        **kwargs,
    )


def from_mujoco_torch(
    model: Any,
    reward: Callable[[State, Tensor, State], Tensor],
    num_envs: int,
    *,
    frame_skip: int = 1,
    iterations: int = 8,
    ls_iterations: int = 4,
    noise: float = 0.0,
    device: str = "cpu",
    **kwargs: Any,
) -> tw.Env:
    """mujoco-torch 0.2.0, run: the physics of a `mujoco.MjModel` in PyTorch; slow on a CPU.

    It has snapshots and gradients. States hold MuJoCo's `qpos`, `qvel`, `qacc_warmstart` and `act`;
    `reward` takes a state, the action and the next state. `noise` is the standard deviation of the
    initial velocities. The solver takes a fixed number of iterations, because PyTorch cannot batch
    loops that test for convergence: compare with MuJoCo before you reduce it. Leave out
    `tw.compile`: a step has 100,000 operators.
    """
    import mujoco_torch

    model = copy.copy(model)
    model.opt.iterations = iterations
    model.opt.ls_iterations = ls_iterations
    physics = mujoco_torch.device_put(model).to(device)
    start = mujoco_torch.make_data(physics).to(device)
    advance = torch.vmap(lambda data: mujoco_torch.step(physics, data, fixed_iterations=True))
    names = ["qpos", "qvel", "qacc_warmstart"]
    if model.na > 0:
        names.append("act")
    is_limited = model.actuator_ctrllimited[:, None]
    bounds = np.where(is_limited, model.actuator_ctrlrange, [-np.inf, np.inf])
    low, high = bounds.astype(np.float32).T

    class World(FuncEnv):
        broadcasts = True
        observation_space = Box(-np.inf, np.inf, (model.nq + model.nv,), np.float64)
        action_space = Box(low, high, dtype=np.float32)

        def initial(self, rng):
            state = {name: getattr(start, name).repeat(len(rng.env), 1) for name in names}
            velocity = tw.random.normal(rng, 0, noise, (model.nv,), torch.float64)
            return {**state, "qvel": state["qvel"] + velocity}

        def transition(self, state, action, rng):
            # Its own copy for each row, because a step writes to some fields in place.
            data = start.expand(len(action)).clone()
            data = data.replace(**state, ctrl=action.double())
            for _ in range(frame_skip):
                data = advance(data)
            return {name: getattr(data, name) for name in names}

        def observation(self, state, rng):
            return torch.cat([state["qpos"], state["qvel"]], -1)

        def reward(self, state, action, next_state, rng):
            return reward(state, action, next_state)

        def terminal(self, state, rng):
            return torch.zeros_like(state["qpos"][:, 0], dtype=torch.bool)

    return tw.FunctionalEnv(World(), num_envs, device=device, **kwargs)


def _box(size: int) -> Box:
    return Box(-np.inf, np.inf, (size,), np.float32)


def main(
    task: str = "Mjlab-Velocity-Flat-Unitree-Go1",
    num_envs: int = 1024,
    num_iterations: int = 300,
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu",
) -> tw.Env:
    """Trains a task of mjlab with its hyperparameters."""
    import mjlab.tasks  # noqa: F401
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import MjlabOnPolicyRunner
    from mjlab.tasks.registry import load_env_cfg, load_rl_cfg

    from torchwrap.interop.rsl_rl import to_rsl_rl

    cfg = load_env_cfg(task)
    cfg.scene.num_envs = num_envs
    cfg.auto_reset = False
    env = from_mjlab(ManagerBasedRlEnv(cfg, device=device))
    env = tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.NormalizeObservation())
    train_cfg = asdict(load_rl_cfg(task))
    train_cfg["algorithm"]["class_name"] = "torchwrap.interop.rsl_rl:PPO"
    for network in ("actor", "critic"):
        train_cfg[network]["obs_normalization"] = False  # a transform's
    runner = MjlabOnPolicyRunner(to_rsl_rl(env, seed=1), train_cfg, device=device)
    runner.learn(num_iterations, init_at_random_ep_len=True)
    return env


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
