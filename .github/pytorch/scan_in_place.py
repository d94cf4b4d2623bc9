"""With `cpp_wrapper`, Inductor declares the result of a scan twice, and g++ refuses."""

import torch
from torch._higher_order_ops.scan import scan


def halves(carry, xs):
    """Something of the outputs of a scan, which Inductor computes in place."""
    carry, outputs = scan(lambda carry, x: (carry + x, carry * x), carry, xs)
    return carry, outputs / 2


carry = torch.zeros(4)
xs = torch.ones(3, 4)
print("PyTorch", torch.__version__)
print("expected", halves(carry, xs))
with torch.no_grad():
    compiled = torch.compile(halves, fullgraph=True, options={"cpp_wrapper": True})
    print("found   ", compiled(carry, xs))
