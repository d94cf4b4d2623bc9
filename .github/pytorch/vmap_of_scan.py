"""A compiled torch.vmap over a scan gives another shape, with backend="eager"."""

import torch
from torch._higher_order_ops.scan import scan


def final(weight):
    """The last carry."""
    last, _ = scan(
        lambda carry, x: (carry + weight * x, x.clone()), torch.zeros(()), torch.arange(4.0)
    )
    return last


weights = torch.tensor([1.0, 2.0])
expected = 6 * weights  # 0 + 1 + 2 + 3 times each weight
found = torch.compile(torch.vmap(final), backend="eager", fullgraph=True)(weights)
print("PyTorch", torch.__version__)
print("expected", expected)
print("found   ", found)
