"""Cases of `fake_device`: every env, transform and wrapper on tensors, with all that users do."""

import contextlib
import functools
import importlib
import sys
from pathlib import Path

import numpy as np
import torch
from catalogue import (
    ACTIONS,
    BOXES,
    DICT,
    FINITE,
    IMAGE,
    REPRESENTATIVE,
    TRANSFORMS,
    UNCAPTURED,
    WRAPPERS,
)
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import torchwrap as tw
from torchwrap import spaces
from torchwrap.testing import ScriptedEnv

ROOT = Path(__file__).parents[2]
N = 4
TUPLE = Tuple([Box(-1, 1, (2,)), Discrete(5, start=-2), MultiDiscrete([3, 4]), MultiBinary(2)])
UNEVEN = Box(np.float32([-1, -np.inf, 0, -np.inf]), np.float32([1, 2, np.inf, np.inf]))
SPACES = {  # of observations, and of actions
    "Box": (None, None),
    "Dict": (DICT, ACTIONS),
    "Dict of Boxes": (BOXES, DICT),
    "Tuple": (TUPLE, TUPLE),
    "image": (IMAGE, Box(0, 255, (2,), "uint8")),
    "uneven Box": (UNEVEN, UNEVEN),
    "bounded Box": (FINITE, Box(np.float32([-1, -2]), np.float32([1, 2]))),
    "float64": (Box(-1, 1, (2,), "float64"), Box(-1, 1, (2,), "float64")),
    "Discrete": (Discrete(3, start=1), Discrete(3, start=1)),
    "MultiDiscrete": (MultiDiscrete([2, 3]), MultiDiscrete([2, 3])),
    "MultiBinary": (MultiBinary(3), MultiBinary(3)),
}
# Those that are also moved to the device.
QUICK = (
    "CartPole-v1",
    "maze",
    "ScriptedEnv, Dict",
    "RepeatAction",
    "PassiveEnvChecker",
    *REPRESENTATIVE,
)
RENDERING = ("AddRenderObservation", "RecordVideo")


def cases():
    """Functions that make an env on a device, by name."""
    sys.path.insert(0, str(ROOT / "examples"))
    maze = importlib.import_module("maze")
    make = functools.partial
    functional = tw.FunctionalEnv
    found = {id: make(tw.make, id, N) for id in tw.registration.NATIVE}
    found["Acrobot with noise"] = make(tw.make, "Acrobot-v1", N, torque_noise_max=0.5)
    found["CartPole of float64"] = make(tw.make, "CartPole-v1", N, dtype=torch.float64)
    found["maze"] = make(functional, maze.Maze(), N, max_episode_steps=9)
    for name, (observation, action) in SPACES.items():
        found[f"ScriptedEnv, {name}"] = make(
            ScriptedEnv, N, observation_space=observation, action_space=action
        )
    for name in {**TRANSFORMS, **UNCAPTURED}:
        found[name] = make(transformed, *{**TRANSFORMS, **UNCAPTURED}[name])
    found |= {
        name: make(wrap, N)
        for name, wrap in WRAPPERS.items()
        if name not in RENDERING and "Gymnasium" not in name
    }
    return found


def transformed(transform, make_env, device="cpu"):
    return tw.TransformedEnv(make_env(N, device=device), transform())


class Sampler(nn.Module):
    """A policy that samples: from a Categorical for Discrete actions, else from a Normal."""

    def __init__(self, env):
        super().__init__()
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.is_discrete = isinstance(self.action_space, Discrete)
        inputs = spaces.flatten(
            self.observation_space, spaces.zeros(self.observation_space, 1), torch.float32
        ).shape[1]
        self.shape = (int(self.action_space.n),) if self.is_discrete else self.action_space.shape
        self.linear = nn.Linear(inputs, int(np.prod(self.shape)), device=env.device)

    def forward(self, td):
        scores = self.linear(
            spaces.flatten(self.observation_space, td["observation"], torch.float32)
        )
        if self.is_discrete:  # validate_args reads values on the host
            distribution = Categorical(logits=scores, validate_args=False)
            start = int(self.action_space.start)
        else:
            mean = scores.view(-1, *self.shape)
            normal = Normal(mean, torch.ones_like(mean), validate_args=False)
            distribution = Independent(normal, len(self.shape), validate_args=False)
            start = 0
        sample = distribution.sample()
        action = (sample + start).to(spaces.dtype(self.action_space))
        return td.update({"action": action, "log_prob": distribution.log_prob(sample)})


def play(device, env, policy=None):
    """Everything that an env does between two constructions."""

    def act(action):
        for name in env.signature.policy_state:
            td["next", name] = td[name].clone()
        return td.set("action", action)

    mask = torch.ones(N, dtype=torch.bool, device=env.device)
    policies = [None, policy] if policy is not None else [None]
    if (
        policy is None
        and isinstance(env.single_action_space, Discrete | Box)
        and not env.signature.policy_state
    ):
        policies.append(Sampler(env))
    with device.phase("reset", answer=1):
        td = env.reset(seed=0)
    with device.phase("sample_action"):
        action = env.sample_action()
    with device.phase("step", answer=env.host_stepped):
        transition, td = env.step(act(action))
    with device.phase("masked reset", answer=env.host_stepped):
        td = env.reset(mask=mask)
    with device.phase("transition"):
        _, td = env.step_without_reset(act(action))
    has_no_clock = contextlib.suppress(RuntimeError)
    with device.phase("elapsed_steps", answer=1), has_no_clock:
        env.elapsed_steps = env.elapsed_steps + 1
    for policy in policies:
        with device.phase("collect", answer=env.host_stepped):
            data = tw.rollout(env, policy, 1)
    if env.can_snapshot:
        with device.phase("snapshot"):
            td = env.restore(env.snapshot())
    with device.phase("state_dict", answer=1):
        env.load_state_dict(env.state_dict())
    env.eval()
    with device.phase("step in eval mode"):
        transition, td = env.step(act(action))
    with device.phase("evaluate", answer=1):
        tw.evaluate(env, policies[-1], N, seed=1, max_steps=2)
    with device.phase("results"):
        for name, tensor in (
            *env.named_buffers(),
            *data.items(True, True),
            *transition.items(True, True),
        ):
            if tensor.is_cpu:
                device.note("tensor made on the host", name)
