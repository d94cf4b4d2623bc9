"""Inductor does not lower a scan with complex tensors: "scan is not lowered to while_loop"."""

import torch
from torch._higher_order_ops.scan import scan


def products(carry, xs):
    """A scan of complex tensors."""
    return scan(lambda carry, x: (carry * x, carry.imag.clone()), carry, xs)


carry = torch.tensor([1 + 2j, 3 - 1j])
xs = torch.tensor([1.0, 2.0, 3.0])
print("PyTorch", torch.__version__)
print("expected", products(carry, xs))
print("found   ", torch.compile(products, fullgraph=True)(carry, xs))
