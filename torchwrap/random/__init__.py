"""Counter-based random numbers: pure functions of (seed, env, episode, draw).

Philox4x32-10 gives the same bits in eager mode, compiled, in CUDA graphs and under `torch.vmap`, on CPU and CUDA. No global
generator is read or advanced. The six input words of Philox hold all coordinates of a number, so no hashing is needed:

    key      seed (64 bits)
    counter  draw | tag and block | fold and env index | episode
"""

from torchwrap.random.distributions import bits, choice, exponential, integers, normal, permutation, uniform
from torchwrap.random.generator import philox
from torchwrap.random.stream import Key, Stream, fresh_seed

__all__ = [
    "Key",
    "Stream",
    "bits",
    "choice",
    "exponential",
    "fresh_seed",
    "integers",
    "normal",
    "permutation",
    "philox",
    "uniform",
]
