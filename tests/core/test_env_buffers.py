from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from torchwrap._core.env_buffers import BatchedModule, BufferAttribute, EnvBuffer, SubmoduleAttribute


class Counter(nn.Module):
    count = BufferAttribute()

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        return x + self.count


def reassigned(module):
    module.count = torch.ones(2)
    return module


def assigned(module):
    module.load_state_dict({"count": torch.ones(2)}, assign=True)
    return module


@pytest.mark.parametrize(
    "change",
    [lambda m: m, lambda m: m.double(), copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), reassigned, assigned],
)
def test_buffer_attribute_reads_the_registered_buffer(change):
    module = change(Counter())
    assert module.count is dict(module.named_buffers())["count"] is module._buffers["count"]
    assert list(module.state_dict()) == ["count"]


class Pair(nn.Module):
    first = SubmoduleAttribute()


@pytest.mark.parametrize("change", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_submodule_attribute_reads_the_assigned_submodule(change):
    module = Pair()
    assert not hasattr(module, "first")
    module.first = nn.Linear(1, 1)
    module = change(module)
    assert module.first is module._modules["first"] and list(module.state_dict()) == ["first.weight", "first.bias"]
    module.first = nn.Identity()
    assert isinstance(module.first, nn.Identity)


def test_buffer_attribute_under_functional_call_reads_the_substitute():
    given = torch.func.functional_call(Counter(), {"count": torch.ones(2)}, (torch.zeros(2),))
    assert given.tolist() == [1, 1]


def test_buffer_attribute_compiled_is_written_in_place():
    module = Counter()
    compiled = torch.compile(lambda: module.count.add_(1).clone(), fullgraph=True, backend="aot_eager")
    assert [compiled().tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert module.count.tolist() == [3, 3]


def test_buffer_attribute_before_registration_is_missing():
    module = Counter()
    del module.count
    assert not hasattr(module, "count")
    with pytest.raises(AttributeError, match="count"):
        _ = module.count


def test_registered_env_buffer_is_not_persistent_and_listed_once():
    module = BatchedModule()
    for number in (1.0, 2.0):  # a module may be set up again
        module.register_env_buffer("elapsed", torch.full((3, 1), number))
    module.register_env_buffer("length", torch.zeros(3))
    assert module._env_buffer_names == ("elapsed", "length") and module.elapsed.tolist() == [[2], [2], [2]]
    assert not module.state_dict() and set(dict(module.named_buffers())) == {"elapsed", "length"}
    assert copy.deepcopy(module)._env_buffer_names == module._env_buffer_names and BatchedModule()._env_buffer_names == ()


class Clock(BatchedModule):
    elapsed = EnvBuffer((1,), torch.int64, fill=-1)
    frames = EnvBuffer(row=lambda self: self.padding.expand(2, 3))

    def __init__(self):
        super().__init__()
        self.padding = torch.tensor([1.0, 2.0, 3.0])


class Alarm(Clock):
    rings = EnvBuffer((), torch.bool)


def test_env_buffer_declaration_allocates_one_row_per_env():
    alarm = Alarm()
    alarm.allocate(4)
    assert alarm._env_buffer_names == ("elapsed", "frames", "rings") and not alarm.state_dict()
    assert alarm.elapsed.tolist() == [[-1]] * 4 and alarm.elapsed.dtype == torch.int64
    assert alarm.frames.tolist() == [[[1, 2, 3]] * 2] * 4 and alarm.rings.tolist() == [False] * 4
    alarm.frames[0, 0] = 9  # the rows share no memory
    assert alarm.frames[1, 0].tolist() == alarm.padding.tolist() == [1, 2, 3]
    assert isinstance(Alarm.rings, EnvBuffer)


class Named(BatchedModule):
    """Parts and arguments, which stay from the end of the constructor on."""

    part = SubmoduleAttribute()

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


@pytest.mark.parametrize(("make", "names"), [(Named, "name others size more part"), (NamedTwice, "title name size part")])
@pytest.mark.parametrize("change", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_batched_module_keeps_arguments_and_parts_after_its_constructor(make, names, change):
    module = change(make("a"))
    for name in names.split():
        before = getattr(module, name)
        with pytest.raises(AttributeError, match=f"{make.__name__} needs the {name} that it was made with, but got None"):
            setattr(module, name, None)
        assert getattr(module, name) is before
    module.free, module.training, module.other = 1, False, nn.Linear(1, 1)
    module.other = nn.Identity()  # no part of it when the constructor ended
    assert inspect.signature(NamedTwice) == inspect.signature(lambda title, **more: None)


def test_batched_module_whose_constructor_raised_is_not_fixed():
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


def test_env_buffer_before_allocation_is_missing():
    with pytest.raises(AttributeError, match="'rings'"):
        _ = Alarm().rings
