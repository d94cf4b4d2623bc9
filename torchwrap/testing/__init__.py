"""For authors of envs and transforms: the contract as checks, and an env whose values can be computed by hand."""

from torchwrap.testing.checks import check_env, check_transform
from torchwrap.testing.scripted import ScriptedEnv

__all__ = ["ScriptedEnv", "check_env", "check_transform"]
