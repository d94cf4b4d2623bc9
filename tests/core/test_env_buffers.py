from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

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


def test_declaration_reads_the_registered_buffer():
    changes = [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), reassigned]
    for change in changes:
        module = Alarm()
        module.allocate(2)
        module = change(module)
        assert module.rings is module._buffers["rings"]
    given = torch.func.functional_call(Reader(), {"rings": torch.ones(3, dtype=torch.bool)})
    assert given.tolist() == [True] * 3
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


def test_registered_buffer_is_not_persistent_and_listed_once():
    module = BatchedModule()
    for number in (1.0, 2.0):  # a module may be set up again
        module.register_env_buffer("elapsed", torch.full((3, 1), number))
    module.register_env_buffer("length", torch.zeros(3))
    assert module._env_buffer_names == ("elapsed", "length") and module.elapsed.tolist() == [[2], [2], [2]]
    assert not module.state_dict() and set(dict(module.named_buffers())) == {"elapsed", "length"}
    assert copy.deepcopy(module)._env_buffer_names == module._env_buffer_names and BatchedModule()._env_buffer_names == ()


class Named(BatchedModule):
    """Parts and arguments, which stay from the end of the constructor on."""

    def __init__(self, name, *others, size=1, **more):
        super().__init__()
        self.part = nn.Identity()
        for self.name in (*others, name):
            pass
        self.others, self.size, self.more, self.free = others, size, more, 0


class NamedTwice(Named):
    def __init__(self, title, **more):
        super().__init__(title, **more)
        self.name, self.part, self.title = f"{self.name}!", nn.ReLU(), title


def test_arguments_and_parts_cannot_be_assigned_after_the_constructor():
    for make, names in ((Named, "name others size more part"), (NamedTwice, "title name size part")):
        for change in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            module = change(make("a"))
            for name in names.split():
                before = getattr(module, name)
                match = f"{make.__name__} needs the {name} that it was made with, but got None"
                with pytest.raises(AttributeError, match=match):
                    setattr(module, name, None)
                assert getattr(module, name) is before
            module.free, module.training, module.other = 1, False, nn.Linear(1, 1)
            module.other = nn.Identity()  # no part of it when the constructor ended
    assert inspect.signature(NamedTwice) == inspect.signature(lambda title, **more: None)


def test_module_whose_constructor_raised_is_not_fixed():
    class Failing(Named):
        def __init__(self, name):
            super().__init__(name)
            made.append(self)
            raise ValueError

    made = []
    with pytest.raises(ValueError):
        Failing("a")
    made[0].name = "b"
    assert made[0].name == "b"
