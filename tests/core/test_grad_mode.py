"""without_grad: as torch.no_grad."""

from __future__ import annotations

import pytest
import torch
from torchwrap._core.grad_mode import without_grad


@pytest.mark.parametrize("enabled", [True, False])
def test_mode_is_off_in_the_call_and_restored_after_it(enabled):
    @without_grad
    def fails(fail):
        assert not torch.is_grad_enabled()
        if fail:
            raise KeyboardInterrupt

    with torch.set_grad_enabled(enabled):
        fails(False)
        assert torch.is_grad_enabled() == enabled
        with pytest.raises(KeyboardInterrupt):
            fails(True)
        assert torch.is_grad_enabled() == enabled
