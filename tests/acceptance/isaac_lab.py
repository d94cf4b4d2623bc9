"""A stand-in for Isaac Lab, which runs the recipe of its guide."""

from types import SimpleNamespace

import numpy as np
import torch
from gymnasium.spaces import Box, Dict

NUM_ENVS = 4
LIMIT = 6
LENGTHS = torch.tensor([3, 6, 99, 99])  # of episodes that terminate: the second one at the limit
ROWS = torch.arange(NUM_ENVS)


class IsaacLab:
    """Isaac Lab 3.0.0, `ManagerBasedRLEnv`: observations hold the row, the episode, and the step.

    isaaclab/envs/manager_based_rl_env.py, `step` (205-281); manager_based_env.py, `reset` (403).
    Its buffers are overwritten.
    """

    num_envs = NUM_ENVS
    device = "cpu"
    max_episode_length = LIMIT
    single_observation_space = Dict(policy=Box(-np.inf, np.inf, (3,)))
    single_action_space = Box(-np.inf, np.inf, (2,))

    def __init__(self, compute_final_obs=True):
        self.unwrapped = self
        self.cfg = SimpleNamespace(compute_final_obs=compute_final_obs)
        self.observation_manager = SimpleNamespace(compute=self.compute)
        self.episode = torch.full((NUM_ENVS,), -1)
        self.episode_length_buf = torch.zeros(NUM_ENVS, dtype=torch.long)
        self.obs = torch.zeros(NUM_ENVS, 3)
        self.extras = {}
        self.seed = self.close = lambda *seed: None

    def observe(self):
        return self.obs.copy_(torch.stack([ROWS, self.episode, self.episode_length_buf], 1))

    def compute(self, update_history=False):
        return {"policy": self.observe().clone()}

    def reset(self, env_ids=slice(None), *, seed=None, options=None):
        self._reset_idx(env_ids)
        return {"policy": self.observe()}, self.extras

    def _reset_idx(self, env_ids):
        self.episode[env_ids] += 1
        self.episode_length_buf[env_ids] = 0
        self.extras["log"] = {"Episode/lengths": LENGTHS[env_ids].float().mean()}

    def step(self, action):
        self.episode_length_buf += 1
        reward = self.episode_length_buf.float()
        terminated = self.episode_length_buf >= LENGTHS
        time_outs = self.episode_length_buf >= LIMIT
        ids = (terminated | time_outs).nonzero().squeeze(-1).int()
        if len(ids) > 0:
            self.extras["final_obs"] = self.observation_manager.compute()
            self._reset_idx(ids)
        return {"policy": self.observe()}, reward, terminated, time_outs, self.extras
