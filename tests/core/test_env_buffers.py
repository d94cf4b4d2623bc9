from __future__ import annotations

import copy
import pickle

import pytest
import torch

from torchwrap._core.env_buffers import BatchedModule, EnvBuffer


class Clock(BatchedModule):
    elapsed = EnvBuffer((1,), torch.int64, fill=-1)
    frames = EnvBuffer(row=lambda self: self.padding.expand(2, 3))

    def __init__(self):
        super().__init__()
        self.padding = torch.tensor([1.0, 2.0, 3.0])


class Alarm(Clock):
    rings = EnvBuffer((), torch.bool)


def test_declaration_allocates_one_row_per_env():
    alarm = Alarm()
    alarm.allocate(4)
    assert alarm._env_buffer_names == ("elapsed", "frames", "rings") and not alarm.state_dict()
    assert alarm.elapsed.tolist() == [[-1]] * 4 and alarm.elapsed.dtype == torch.int64
    assert alarm.frames.tolist() == [[[1, 2, 3]] * 2] * 4 and alarm.rings.tolist() == [False] * 4
    alarm.frames[0, 0] = 9  # the rows share no memory
    assert alarm.frames[1, 0].tolist() == alarm.padding.tolist() == [1, 2, 3]
    assert isinstance(Alarm.rings, EnvBuffer)
    with pytest.raises(ValueError, match=r"^EnvBuffer needs a fill that torch.int64 holds, but got 0.5"):
        EnvBuffer((1,), torch.int64, fill=0.5)


def test_declaration_reads_the_registered_buffer():
    changes = [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), reassigned]
    for change in changes:
        module = Alarm()
        module.allocate(2)
        module = change(module)
        assert module.rings is module._buffers["rings"]
    assert torch.func.functional_call(Reader(), {"rings": torch.ones(3, dtype=torch.bool)}).tolist() == [True] * 3
    with pytest.raises(AttributeError, match="'rings'"):
        _ = Alarm().rings


class Reader(Alarm):
    def __init__(self):
        super().__init__()
        self.allocate(3)

    def forward(self):
        return self.rings


def reassigned(module):
    module.rings = torch.ones(2, dtype=torch.bool)
    return module
