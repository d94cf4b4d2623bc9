"""Gymnasium's wrappers as composable `nn.Module` transforms on batched tensors.

    policy
      │ action
      ▼
    transforms.action      outermost first
      ▼
    env._step              dynamics of all envs at once
      ▼
    transforms.step        innermost first   ->  transition["next"], the true successor
      ▼
    auto-reset             env._reset and transforms.reset where an episode ended   ->  td, the root
      ▼ observation
    policy

>>> import torchwrap as tw
>>> from torchwrap import transforms as T
>>> env = tw.make("CartPole-v1", num_envs=4)
>>> env = tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.NormalizeObservation())
>>> td = env.reset(seed=0)
>>> transition, td = env.step(td.set("action", env.sample_action()))
>>> transition["next", "reward"].shape
torch.Size([4, 1])
"""

from torchwrap import transforms
from torchwrap._compile.api import compile
from torchwrap._compile.pure import pure
from torchwrap._compile.scan import scan
from torchwrap._core.buffers import EnvBuffer, EpisodeClock
from torchwrap._core.rows import RowMask
from torchwrap._deploy import deploy
from torchwrap.collector import Collector, evaluate, rollout
from torchwrap.env import Env
from torchwrap.functional import FunctionalEnv
from torchwrap.interop.gymnasium import from_gymnasium
from torchwrap.interop.to_gymnasium import to_gymnasium
from torchwrap.policy import PolicyState
from torchwrap.registration import make, register
from torchwrap.spaces import Signature
from torchwrap.statistics import sync_statistics
from torchwrap.transforms.transform import Compose, Transform
from torchwrap.wrappers import TransformedEnv, Wrapper

__version__ = "0.3.0"

__all__ = [
    "Collector",
    "Compose",
    "Env",
    "EnvBuffer",
    "EpisodeClock",
    "FunctionalEnv",
    "PolicyState",
    "RowMask",
    "Signature",
    "Transform",
    "TransformedEnv",
    "Wrapper",
    "compile",
    "deploy",
    "evaluate",
    "from_gymnasium",
    "make",
    "pure",
    "register",
    "rollout",
    "scan",
    "sync_statistics",
    "to_gymnasium",
    "transforms",
]
