"""Constants: numbers of a space, such as bounds, where the operators of a step find them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn


class Constants(nn.Module):
    """Numbers of a space, one per component.

    They are made once, because a step on a GPU would wait for a copy from the host, and a captured one cannot copy. Subclasses
    declare each as a `ConstantBuffer`, which `.to` moves and no snapshot holds.
    """

    def set_constants(self, device: torch.device | str, **values: Any) -> None:
        """Sets attributes: Python's numbers if each value is the same in all components, else buffers."""
        arrays = {name: np.asarray(value) for name, value in values.items()}
        uniform = all(len(np.unique(array)) == 1 for array in arrays.values())
        for name, array in arrays.items():
            if uniform:
                vars(self)[name] = array.flat[0].item()
            else:
                self.register_buffer(name, torch.tensor(array, device=device), persistent=False)
