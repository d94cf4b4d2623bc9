"""A device without values, on any build of PyTorch, that finds waits and failures of a GPU.

`python tests/gpu/fake_device.py` plays `device_cases` with envs that are made on the device, and
some of them with envs that are moved there. An argument is a module with more `CASES`, which are
played both ways. Each finding is a line of JSON.

Tensors on the device are FakeTensors: operators check devices, dtypes and shapes as CUDA's would,
and compute nothing. A build with CUDA fakes "cuda" itself. Others fake PyTorch's hook for backends
in Python. It cannot be removed again, so this runs in a separate process.
"""

import collections
import contextlib
import functools
import importlib
import json
import operator
import sys
import traceback
import warnings
from pathlib import Path

import device_cases
import numpy as np
import torch
from tensordict.base import TensorDictBase
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from torchwrap import functional, random
from torchwrap._core import rows, validation

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(f"{ROOT / folder}/" for folder in ("torchwrap", "examples", "tests"))
OWN = (__file__, device_cases.__file__)
DEVICE = "cuda:0" if torch.version.cuda else "fake:0"

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.allclose, aten.equal}
DYNAMIC = {
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.repeat_interleave,
}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}
MAKERS = {
    getattr(aten, name)
    for name in (
        "arange",
        "empty",
        "full",
        "linspace",
        "ones",
        "scalar_tensor",
        "zeros",
        "eye",
        "rand",
    )
}
LIFTED = {aten.lift_fresh, aten.lift_fresh_copy, aten.lift}


class _Functions(TorchFunctionMode):
    """Functions that are no operators: `numpy`, and `as_tensor` of numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.numpy:
            values = args[0].cpu()
            with _disable_current_modes():
                return func(values)
        kwargs = kwargs or {}
        if str(kwargs.get("device")) == "meta":  # has no values, so that nothing is copied
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.as_tensor and not isinstance(args[0], Tensor | np.ndarray):
            func = torch.tensor
        return func(*args, **kwargs)


class FakeDevice(TorchDispatchMode):
    """Counts in `found` the faults of a step: (phase, kind, operator, the two innermost lines).

    The host reads zeros or ones from the device, as the `phase` says. With ones, every episode has
    ended.
    """

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()
        self.operators = 0
        self.draws = 0
        self.now = None
        self.answer = 1
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # torch.tensor(..., device=...) makes a tensor on the host and copies it
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        self._stack.enter_context(_Functions())
        backend = torch.get_device_module(DEVICE)
        backend.synchronize = TensorDictBase._sync_all = lambda *_: self.note(
            "wait for the device", "synchronize"
        )
        backend.get_rng_state = self._get_rng_state
        backend.set_rng_state = lambda *_: None
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._stack.__exit__(*error)

    @contextlib.contextmanager
    def phase(self, name, answer=0):
        """Counts under this name; nothing is counted outside of a phase."""
        self.now = name
        self.answer = answer
        yield
        self.now = None
        self.answer = 1

    def note(self, kind, operator):
        if self.now is not None:
            self.found[self.now, kind, str(operator), place(sys._getframe(1))] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        packet = func.overloadpacket
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kinds = [_kind(tensor) for tensor in given]
        there = any(kind != "cpu" for kind in kinds)
        target = torch.device(kwargs.get("device") or "cpu").type
        self.operators += 1
        self.draws += (there or target != "cpu") and torch.Tag.nondeterministic_seeded in func.tags
        if packet is aten._pin_memory:
            return args[0]
        if packet in READS:
            if not any(isinstance(tensor, FakeTensor) for tensor in given):
                with _disable_current_modes():
                    return func(*args, **kwargs)
            self.note("host read", func)
            is_flag = packet is not aten._local_scalar_dense or given[0].dtype == torch.bool
            return bool(self.answer) if is_flag else self.answer
        if packet is aten._to_copy and given and "device" in kwargs and target != kinds[0]:
            return self._transfer(func, given[0], kwargs)
        if packet is aten.copy_ and kinds[0] != kinds[1] and given[1].dim():
            self.note("copy to the host" if kinds[0] == "cpu" else "copy from the host", func)
        elif there and any(
            kind == "cpu" and tensor.dim() for kind, tensor in zip(kinds, given, strict=True)
        ):
            self.note(
                "operands on two devices", func
            )  # numbers are not meant: kernels take them from the host
        elif packet in LIFTED or (packet in MAKERS and target == "cpu"):
            self.note("tensor made on the host", func)
        elif packet in INDEXED and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        ):
            self.note("bool mask as an index", func)
            indices = [index for part in args[1] for index in _as_indices(part)]
            args = (args[0], indices, *args[2:])
        elif packet in DYNAMIC:
            self.note("shape depends on values", func)
            if packet is aten.nonzero:
                return torch.empty(1, given[0].dim(), dtype=torch.int64, device=given[0].device)
        return func(*args, **kwargs)

    def _get_rng_state(self, device):
        with _disable_current_modes():
            return torch.tensor([self.draws])

    def _transfer(self, func, tensor, kwargs):
        dtype = kwargs.get("dtype") or tensor.dtype
        if _kind(tensor) == "cpu":  # FakeTensorMode would copy the values of a constant
            self.note(
                "copy without a wait" if kwargs.get("non_blocking") else "copy from the host", func
            )
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=dtype, device=kwargs["device"]
            )
        self.note("copy to the host", func)
        with _disable_current_modes():
            return torch.full(tensor.shape, self.answer, dtype=dtype)


def _kind(tensor):
    return (
        tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    ).type  # other ways are operators, too


def _as_indices(part):
    # One entry of each mask is set; an index for each of its dimensions.
    if not isinstance(part, Tensor) or part.dtype not in (torch.bool, torch.uint8):
        return [part]
    return [torch.zeros(1, dtype=torch.int64, device=part.device)] * part.dim()


def place(frame):
    """The two innermost lines in the files of this project, but for those that look."""
    lines = []
    while frame is not None and len(lines) < 2:
        name = frame.f_code.co_filename
        line = (
            f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
            if name.startswith(FOLDERS) and name not in OWN
            else None
        )
        if line is not None and line not in lines:
            lines.append(line)
        frame = frame.f_back
    return " < ".join(lines)


def prepare():
    """Makes the device known to PyTorch, and its FakeTensors plain tensors for the library."""
    if not torch.version.cuda:
        from torch.utils import backend_registration

        backend_registration._setup_privateuseone_for_python_backend(
            "fake", backend_registration._DummyBackendModule()
        )
    rows._PLAIN = (*rows._PLAIN, FakeTensor)
    FakeTensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata
    validation.fill = lambda owner, value, dtype: value  # reads a tensor of the host
    functional._storages = lambda tensors: {leaf.data_ptr() for leaf in tensors}
    # Ten rounds of the generator are the same few operators again and again.
    random.philox = _philox


def _philox(key, counter):
    return (functools.reduce(operator.xor, (*key, *counter)),) * 4


def run(make, moved):
    """Plays a case. Returns its findings and the number of operators."""
    device = FakeDevice()
    error = None
    try:
        there = make() if moved else None  # before any tensor is fake
        with device:
            made = there if moved else make(device=DEVICE)
            env, *policy = made if isinstance(made, tuple) else (made,)
            device_cases.play(device, env.to(DEVICE), *policy)
    except Exception as raised:
        error = raised
    found = [(*key, count) for key, count in device.found.items()]
    if error is not None:
        last = list(traceback.walk_tb(error.__traceback__))[-1][0]
        found.append((device.now, "error", f"{type(error).__name__}: {error}", place(last), 1))
    return found, device.operators


def main(*modules):
    warnings.filterwarnings("ignore")
    prepare()
    more = {
        name: make
        for module in modules
        for name, make in importlib.import_module(module).CASES.items()
    }
    made = device_cases.cases() | more
    operators = 0
    ways = {"made": made, "moved": {name: made[name] for name in (*device_cases.QUICK, *more)}}
    for way, chosen in ways.items():
        for name, make in chosen.items():
            found, number = run(make, moved=way == "moved")
            operators += number
            for finding in found:
                fields = ("way", "case", "phase", "kind", "operator", "where", "count")
                print(json.dumps(dict(zip(fields, (way, name, *finding), strict=True))))
    print(json.dumps({"cases": sum(map(len, ways.values())), "operators": operators}))


if __name__ == "__main__":
    main(*sys.argv[1:])
