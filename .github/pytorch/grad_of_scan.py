"""torch.func.grad of a scan fails: "Expected FakeTensor". torch.autograd.grad does not."""

import torch
from torch._higher_order_ops.scan import scan


def final(weight):
    """The last carry."""
    last, _ = scan(
        lambda carry, x: (carry * weight + x, x.clone()), torch.ones(()), torch.arange(3.0)
    )
    return last


weight = torch.tensor(0.5, requires_grad=True)
print("PyTorch", torch.__version__)
print("expected", *torch.autograd.grad(final(weight), weight))
found = torch.compile(torch.func.grad(final), backend="eager", fullgraph=True)(weight.detach())
print("found   ", found)
