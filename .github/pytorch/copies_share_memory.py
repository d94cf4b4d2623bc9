"""Two copies of one value in two shapes share memory after Inductor."""

import torch


def copies(x):
    """Two results of one value."""
    total = x.sum(-1)
    return total.clone().unsqueeze(-1), total.clone()


x = torch.ones(64, 3)
column, row = torch.compile(copies, fullgraph=True)(x)
column.zero_()
print("PyTorch", torch.__version__)
print("expected", copies(x)[1][:3])
print("found   ", row[:3])
