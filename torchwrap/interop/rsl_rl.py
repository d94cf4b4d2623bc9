"""rsl_rl: a torchwrap env as an `rsl_rl.env.VecEnv`, and a PPO with the true final observations."""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import torch
from gymnasium import Space
from gymnasium.spaces import Dict
from rsl_rl import algorithms
from rsl_rl.env import VecEnv
from rsl_rl.models import MLPModel, RNNModel
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap._core.errors import refusal
from torchwrap.env import Env, take
from torchwrap.interop import _trainers
from torchwrap.policy import PolicyState
from torchwrap.statistics import sync_statistics
from torchwrap.transforms.groups import ObservationGroups, ObservationKeys
from torchwrap.transforms.normalize import NormalizeObservation
from torchwrap.transforms.transform import Transform


def to_rsl_rl(
    env: Env,
    cfg: dict[str, Any] | None = None,
    *,
    seed: int | None = None,
) -> RslRlVecEnv:
    """Wraps an env for the runners of rsl_rl: `OnPolicyRunner(to_rsl_rl(env), train_cfg)`.

    The env is reset here, because the runner does not reset it. Tensors are passed on without
    copies.

    At a time-out, rsl_rl's PPO adds gamma * V(s_t) to the reward, the value of the observation
    acted in. With "torchwrap.interop.rsl_rl:PPO" as `class_name` of the algorithm in `train_cfg`,
    it is the value of the final observation, and `runner.save` and `runner.load` include
    `env.state_dict()`, such as running statistics of transforms.

    Args:
        env: its actions are a float32 Box with one dimension. Its observations are such a Box, or
            images `(C, H, W)` for rsl_rl's CNNModel, named "policy" for rsl_rl; or a Dict of them,
            whose keys are the names of rsl_rl's observation groups. rsl_rl's actions
            are unbounded: put `transforms.ClipAction` on the env. Bounds of its actions warn.
        cfg: for the runner's loggers; it is copied. `{"is_finite_horizon": True}` leaves
            `extras["time_outs"]` out, as in Isaac Lab, so that nothing is added to the reward at a
            time-out. "step_dt" is the time step by which rsl_rl multiplies the weight of random
            network distillation; without it, 1.
        seed: for the reset. None draws one from the operating system.

    Returns:
        The `VecEnv`. Its `step(actions)`, float32 `(num_envs, num_actions)`, returns the groups in
        a TensorDict, rewards `(num_envs,)` float32, dones `(num_envs,)` int64, and `extras` with
        "time_outs", `(num_envs,)` bool: truncated and not terminated; and "final_obs", the groups
        of the true successor. `extras["log"]` holds the numbers of the env's info, those that a
        simulator of `from_functions` logs, and those of `transforms.RecordEpisodeStatistics` for
        the episodes that ended. rsl_rl logs their means.

    >>> from torchwrap.testing import ScriptedEnv
    >>> from torchwrap import TransformedEnv, transforms as T
    >>> env = ScriptedEnv(2, (3,), episode_lengths=1, ending="truncated")
    >>> env = to_rsl_rl(TransformedEnv(env, T.ClipAction()))
    >>> obs, rewards, dones, extras = env.step(torch.zeros(2, env.num_actions))
    >>> obs["policy"][0], extras["final_obs"]["policy"][0], dones, extras["time_outs"]
    (tensor([ 0., 10., 20.]), tensor([ 1., 11., 21.]), tensor([1, 1]), tensor([True, True]))
    """
    return RslRlVecEnv(env, cfg, seed)


StepResult: TypeAlias = tuple[TensorDict, Tensor, Tensor, dict[str, Any]]


class RslRlVecEnv(VecEnv):
    """A torchwrap env, the attribute `env`, as a `VecEnv`; made by `to_rsl_rl`."""

    def __init__(self, env: Env, cfg: Any, seed: int | None) -> None:
        self.env = _trainers.require_env("to_rsl_rl", env)
        if not isinstance(cfg, dict | None):
            raise TypeError(refusal("to_rsl_rl", "cfg must be a dict", type(cfg).__name__))
        self.cfg = _Config(cfg or {})
        observations = env.single_observation_space
        groups = observations.values() if isinstance(observations, Dict) else [observations]
        for group in groups:
            _check_space("observations", group, 1, 3)
        actions = env.single_action_space
        _check_space("actions", actions, 1)
        if actions.bounded_above.any() or actions.bounded_below.any():  # type: ignore[attr-defined]
            fault = f"rsl_rl's actions are unbounded, those of the env are in {actions}"
            remedy = "Put transforms.ClipAction on the env"
            warnings.warn(refusal("to_rsl_rl", fault, remedy=remedy), stacklevel=3)
        self.unwrapped = self  # random network distillation reads unwrapped.step_dt
        self.step_dt = self.cfg.get("step_dt", 1)
        self.num_envs = env.num_envs
        self.num_actions = actions.shape[0]  # type: ignore[index]
        self.device = env.device
        self._metric_keys = _trainers.metric_keys(env)
        env.reset(seed=seed)
        self._is_first_step = True

    @property
    def max_episode_length(self) -> int:
        limit = self.env.signature.max_episode_steps
        if limit is None:
            must = "the env must have a time limit for init_at_random_ep_len"
            remedy = "Put transforms.TimeLimit on it"
            raise RuntimeError(refusal("to_rsl_rl", must, self.env, remedy))
        return limit

    @property
    def episode_length_buf(self) -> Tensor:
        return self.env.elapsed_steps

    @episode_length_buf.setter
    def episode_length_buf(self, steps: Tensor) -> None:
        self.env.elapsed_steps = steps

    def reset(self) -> tuple[TensorDict, dict[str, Any]]:
        """Starts new episodes in every env. The runner does not call it."""
        return _groups(self.env.reset()), {}

    def get_observations(self) -> TensorDict:
        """The observations of the last step, reset or `env.restore`."""
        return _groups(self.env.root)

    # The runner steps in inference mode: a tensor made there, and kept, cannot be written outside.
    @torch.inference_mode(False)
    def step(self, actions: Tensor) -> StepResult:
        if self._is_first_step:
            self._is_first_step = False
            _trainers.warn_untrained("to_rsl_rl", self.env)
        successor, td = take(self.env, actions)
        extras: dict[str, Any] = {"final_obs": _groups(successor)}
        if not self.cfg.get("is_finite_horizon"):
            time_outs = successor["truncated"] & ~successor["terminated"]
            extras["time_outs"] = time_outs.squeeze(-1)
        log = _trainers.logs(self.env, self._metric_keys, successor)
        if log:
            extras["log"] = log
        dones = successor["done"].squeeze(-1).long()
        return _groups(td), successor["reward"].squeeze(-1), dones, extras


def _groups(td: TensorDict) -> TensorDict:
    observation = td["observation"]
    if isinstance(observation, Tensor):
        observation = {"policy": observation}
    return TensorDict(dict(observation.items()), td.batch_size)


class _Config(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:  # for the writers of Weights & Biases and Neptune
        return dict(self)


def _check_space(name: str, space: Space[Any], *dims: int) -> None:
    if not _trainers.is_float_box(space, *dims):  # rsl_rl would cast other dtypes silently
        must = f"{name} must be a float32 Box with a number of dimensions in {dims}"
        raise ValueError(refusal("to_rsl_rl", must, space))


class _WithEnv:
    """Lets an algorithm of rsl_rl merge, save and load what a torchwrap env holds.

    It also saves the step of random network distillation's schedule, which rsl_rl leaves out.
    """

    env: Env | None = None
    rnd: Any = None

    @classmethod
    def construct_algorithm(cls, obs: TensorDict, env: VecEnv, *args: Any) -> Any:
        algorithm = super().construct_algorithm(obs, env, *args)  # type: ignore[misc]
        if isinstance(env, RslRlVecEnv):
            algorithm.env = env.env
            algorithm.params = _trainers.Params(env.env)
        return algorithm

    def train_mode(self: Any) -> None:
        super().train_mode()  # type: ignore[misc]
        if self.env is not None:
            self.params.resume()

    def update(self: Any) -> Any:
        if self.env is not None and self.is_multi_gpu:
            sync_statistics(self.env)
        return super().update()  # type: ignore[misc]

    def save(self: Any) -> Any:
        saved = super().save()  # type: ignore[misc]
        if self.env is not None:
            saved["env_state_dict"] = self.env.state_dict()
            saved["env_params"] = self.params.state_dict()
        if self.rnd:
            saved["rnd_step"] = self.rnd.update_counter
        return saved

    def load(self: Any, loaded_dict: Any, load_cfg: Any, strict: bool) -> Any:
        is_resumed = super().load(loaded_dict, load_cfg, strict)  # type: ignore[misc]
        if self.env is not None and (load_cfg or {}).get("env", True):
            state = loaded_dict.get("env_state_dict")
            _trainers.load_statistics("to_rsl_rl", self.env, "env_state_dict", state, strict)
            if is_resumed:
                self.params.load_state_dict(loaded_dict.get("env_params", {}))
        if self.rnd and is_resumed:
            self.rnd.update_counter = loaded_dict.get("rnd_step", 0)
        return is_resumed


class PPO(_WithEnv, algorithms.PPO):
    """rsl_rl's PPO that adds the true final observation's value at a time-out, not the last one's.

    The env has to put `extras["final_obs"]` next to `extras["time_outs"]`, as `to_rsl_rl` does.
    Running statistics of several ranks are merged before each update.

    Its checkpoints hold the `state_dict` of a torchwrap env under "env_state_dict", which is loaded
    unless `load_cfg` has `"env": False`; the env's `params` or a simulator's levels under
    "env_params"; and the step of a schedule of random network distillation. A run resumes with new
    episodes: after a `load` that sets the iteration, `learn` sets the `params`, if they are of as
    many envs and the env is in train mode.

    >>> algorithm = {"class_name": "torchwrap.interop.rsl_rl:PPO", "gamma": 0.97}  # in `train_cfg`
    >>> issubclass(PPO, algorithms.PPO)
    True
    """

    def process_env_step(
        self, obs: TensorDict, rewards: Tensor, dones: Tensor, extras: dict[str, Any]
    ) -> None:
        if "time_outs" in extras:
            hidden_state = self.critic.get_hidden_state()
            values = self.critic(extras["final_obs"].to(self.device))
            self.critic.reset(hidden_state=hidden_state)
            extras = dict(extras)
            time_outs = extras.pop("time_outs").to(self.device, torch.bool)
            bootstrap = self.gamma * values.detach().squeeze(-1)
            # Other rows may have ended because the simulation diverged: their values can be NaN.
            rewards = rewards + torch.where(time_outs, bootstrap, 0)
        super().process_env_step(obs, rewards, dones, extras)


class Distillation(_WithEnv, algorithms.Distillation):
    """rsl_rl's Distillation, with the statistics of a torchwrap env in checkpoints, as `PPO`.

    A teacher's checkpoint of `PPO` holds those it was trained with. From the `load` on, those of
    the groups that the teacher reads are frozen, as rsl_rl freezes the teacher's own.

    >>> algorithm = {"class_name": "torchwrap.interop.rsl_rl:Distillation"}  # in `train_cfg`
    >>> issubclass(Distillation, algorithms.Distillation)
    True
    """

    def load(self, loaded_dict: Any, load_cfg: Any, strict: bool) -> Any:
        is_resumed = super().load(loaded_dict, load_cfg, strict)
        learning: set[nn.Module] = set()
        # A group comes before what it consists of.
        for module in self.env.modules() if self.env else ():
            if isinstance(module, ObservationGroups | ObservationKeys):
                for name in module.groups.keys() - set(self.teacher.obs_groups):
                    learning.update(module.part_of[name].modules())
            if isinstance(module, NormalizeObservation) and module not in learning:
                module.eval()
        return is_resumed


class RslRlPolicy(nn.Module):
    """A model of rsl_rl as a policy for `evaluate`, `Collector` and `deploy`.

    It takes a root TensorDict and returns it with the deterministic "action". The state of a
    recurrent model is in the roots, as `PolicyState` declares, and not in the model:

    `policy = RslRlPolicy(runner.get_inference_policy())`
    `env = TransformedEnv(make_env(), *policy.transforms)`

    Args:
        model: an `MLPModel`, `CNNModel` or `RNNModel` of rsl_rl.

    >>> obs = TensorDict({"policy": torch.zeros(2, 3)}, [2])
    >>> policy = RslRlPolicy(RNNModel(obs, {"actor": ["policy"]}, "actor", 1, rnn_type="gru"))
    >>> policy.transforms[0].shapes
    {'hidden': (1, 256)}
    """

    def __init__(self, model: MLPModel) -> None:
        super().__init__()
        if not isinstance(model, MLPModel):
            must = "model must be a model of rsl_rl"
            raise TypeError(refusal("RslRlPolicy", must, type(model).__name__))
        self.model = model
        self.shapes: dict[str, tuple[int, int]] = {}
        if isinstance(model, RNNModel):
            rnn = model.rnn.rnn
            names = ["hidden", "cell"] if isinstance(rnn, nn.LSTM) else ["hidden"]
            self.shapes = dict.fromkeys(names, (rnn.num_layers, rnn.hidden_size))

    @property
    def transforms(self) -> list[Transform]:
        """The outermost transforms of its envs: a `PolicyState` for a recurrent model."""
        return [PolicyState(self.shapes)] if self.shapes else []

    def forward(self, td: TensorDict) -> TensorDict:
        own = self.model.get_hidden_state()
        # rsl_rl has the layers first.
        given = [td[name].transpose(0, 1).contiguous() for name in self.shapes]
        if given:
            self.model.reset(hidden_state=tuple(given) if len(given) > 1 else given[0])
        td["action"] = self.model(_groups(td))
        following = self.model.get_hidden_state()
        self.model.reset(hidden_state=own)
        if isinstance(following, Tensor):
            following = (following,)
        for name, value in zip(self.shapes, following or (), strict=True):
            td["next", name] = value.transpose(0, 1).contiguous()
        return td
