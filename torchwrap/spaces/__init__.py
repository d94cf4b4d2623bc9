"""Gymnasium's spaces, and batched tensors as their values.

A value of a space holds one member per env. It is a tensor `(num_envs, *space.shape)` in the space's dtype (`Discrete`:
`(num_envs,)` int64). For a `Dict` or `Tuple` space it is a TensorDict of such values, under the dict's keys or "0", "1", ...
"""

from torchwrap._core.rows import apply
from torchwrap.spaces.sampling import Sampler, sample
from torchwrap.spaces.signature import Signature
from torchwrap.spaces.validation import REWARD, box, check, check_function, contains, optional_space, outside
from torchwrap.spaces.values import (
    TORCH_DTYPES,
    Value,
    bound,
    build,
    children,
    counts,
    dtype,
    flatten,
    from_numpy,
    leaves,
    tensor,
    to_device,
    to_numpy,
    zeros,
)

__all__ = [
    "REWARD",
    "TORCH_DTYPES",
    "Sampler",
    "Signature",
    "Value",
    "apply",
    "bound",
    "box",
    "build",
    "check",
    "check_function",
    "children",
    "contains",
    "counts",
    "dtype",
    "flatten",
    "from_numpy",
    "leaves",
    "optional_space",
    "outside",
    "sample",
    "tensor",
    "to_device",
    "to_numpy",
    "zeros",
]
