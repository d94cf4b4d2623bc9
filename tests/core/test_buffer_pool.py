from __future__ import annotations

import copy
import pickle
import platform
import queue
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torchwrap._core.buffer_pool import BufferPool

LARGE = (3, 2**18)
HOLDS = {
    "the tensor": lambda tensor: tensor,
    "a row": lambda tensor: tensor[1],
    "its last element": lambda tensor: tensor[-1, -1],
    "another shape": lambda tensor: tensor.view(-1),
    "a transposed view": lambda tensor: tensor.T[7:],
    "a detached view": lambda tensor: tensor.detach(),
    "parts of it": lambda tensor: tensor.unbind(0)[2],
    "strides": lambda tensor: tensor.as_strided((2,), (5,)),
    "an array": lambda tensor: tensor.numpy(),
    "a slice of an array": lambda tensor: tensor.numpy()[2, 3:5],
    "a tensor of an array": lambda tensor: torch.from_numpy(tensor.numpy()[1:]),
    "an array through DLPack": lambda tensor: np.from_dlpack(tensor),
    "a tensor through DLPack": lambda tensor: torch.from_dlpack(tensor),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a list": lambda tensor: [[tensor[0]]],
}


def make_pool(shape=LARGE, dtype=torch.uint8, device="cpu"):
    return BufferPool(shape, dtype, device)


@pytest.mark.parametrize("name", HOLDS)
def test_storage_referenced_in_any_way_is_reused_only_after_it_is_dropped(name):
    pool = make_pool()
    tensor = pool.empty()
    address, held = tensor.data_ptr(), HOLDS[name](tensor)
    del tensor
    others = [pool.empty() for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    del held
    assert pool.empty().data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_tensors_begin_at_a_line_of_the_cache(dtype):
    pool = make_pool((1000,), dtype)
    tensors = [pool.empty() for _ in range(3)]
    assert [tensor.data_ptr() % 64 for tensor in tensors] == [0, 0, 0]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.int32, torch.float32, torch.int64, torch.float64]
)
@pytest.mark.parametrize("shape", [(1000,), (4, 2**16), (2, 3, 2**17), (1,), (0,), (5, 0)])
def test_tensors_have_shape_and_dtype_and_do_not_overlap(shape, dtype):
    pool = make_pool(shape, dtype)
    for _ in range(2):
        tensor, other = pool.empty(), pool.empty()
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.requires_grad
        tensor.fill_(1)
        other.fill_(0)
        assert (tensor == 1).all() and (other == 0).all()


def test_many_held_tensors_never_overlap():
    pool = make_pool()
    held = [pool.empty().fill_(number) for number in range(20)]
    assert all((tensor == number).all() for number, tensor in enumerate(held))
    del held[3:9]
    held += [pool.empty().fill_(number) for number in (100, 101, 102, 103, 104, 105, 106)]
    numbers = [0, 1, 2, *range(9, 20), 100, 101, 102, 103, 104, 105, 106]
    assert all((tensor == number).all() for number, tensor in zip(numbers, held, strict=True))


def test_tensor_dropped_at_once_has_its_storage_reused_each_time():
    pool = make_pool()
    assert len({pool.empty().data_ptr() for _ in range(50)}) == 1


def test_storage_of_held_tensors_is_not_kept_beyond_four_pieces():
    pool = make_pool()
    held = [pool.empty() for _ in range(50)]
    assert sum(piece.memory.nbytes for piece in pool.pieces) <= 4 * pool.num_bytes
    del held
    first, second = pool.empty(), pool.empty()
    assert first.data_ptr() != second.data_ptr()


def test_tensor_outlives_its_pool():
    pool = make_pool()
    tensor = pool.empty().fill_(7)
    del pool
    filler = [make_pool().empty().fill_(0) for _ in range(8)]
    assert (tensor == 7).all() and len(filler) == 8


def test_two_pools_share_no_storage():
    first, second = make_pool(), make_pool()
    for _ in range(3):
        one, other = first.empty().fill_(1), second.empty().fill_(2)
        assert (one == 1).all() and (other == 2).all()


@pytest.mark.parametrize(
    "replicate", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("hold", [False, True])
def test_copied_pool_shares_no_storage(replicate, hold):
    pool = make_pool()
    tensor = pool.empty().fill_(1)
    if not hold:
        del tensor
    other = replicate(pool)
    held = [other.empty().fill_(number) for number in (2, 3, 4)]
    mine = [pool.empty().fill_(number) for number in (5, 6)]
    assert [int(value[0, 0]) for value in (*held, *mine)] == [2, 3, 4, 5, 6]
    assert not hold or (tensor == 1).all()


def test_write_through_a_held_view_reaches_no_other_tensor():
    pool = make_pool()
    tensor = pool.empty().fill_(1)
    row = tensor[0]
    del tensor
    other = pool.empty().fill_(2)
    row.fill_(3)
    assert (other == 2).all()


def test_pool_lends_after_an_interrupt_between_any_two_bytecodes():
    left = None

    def trace(frame, event, argument):
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    pool, held = make_pool(), []
    for stop in range(1, 400):
        left, before = stop, sys.gettrace()
        try:
            sys.settrace(trace)
            pool.empty()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        held = [*held[-2:], pool.empty().fill_(stop % 250)]
        assert [int(tensor[0, 0]) for tensor in held] == [number % 250 for number in range(max(stop - 2, 1), stop + 1)]
    assert left > 0  # the last call came to its end
    assert len(pool.pieces) <= 4


def test_threads_share_no_storage():
    pool, given, release = make_pool(), queue.Queue(), threading.Event()

    def work():
        tensor = pool.empty().fill_(1)
        given.put(tensor.data_ptr())
        release.wait()
        given.put(bool((tensor == 1).all()))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert pool.empty().fill_(2).data_ptr() != given.get()
    release.set()
    thread.join()
    assert given.get()


@pytest.mark.cuda
def test_tensors_on_cuda_are_allocated_by_pytorch():
    pool = make_pool(device="cuda")
    assert pool.empty().device.type == "cuda" and not pool.pieces


def test_copied_pool_leaves_storage_behind():
    pool = BufferPool((4, 2**18), torch.float32)
    pool.empty()
    assert len(pickle.dumps(pool)) < 10_000
    assert copy.deepcopy(pool).empty().shape == (4, 2**18)


def test_rows_are_views_made_once_per_piece_of_storage():
    pool = make_pool(dtype=torch.float32)
    tensor = pool.empty().fill_(0)
    rows = pool.rows(tensor)
    rows[1].fill_(5)
    assert tensor.mean(1).tolist() == [0, 5, 0] and len(rows) == 3
    held, others = tensor, [pool.empty() for _ in range(5)]  # more than the pool keeps
    for other in others:
        pool.rows(other)[2].fill_(7)
        assert other[2].eq(7).all()
    assert held.mean(1).tolist() == [0, 5, 0]
    address = tensor.data_ptr()
    del tensor, held
    again = pool.empty()
    assert again.data_ptr() == address and pool.rows(again) is rows


def test_rows_of_bools_are_bytes():
    pool = make_pool(dtype=torch.bool)
    tensor = pool.empty()
    for row in pool.rows(tensor):
        row.copy_(torch.ones(1, dtype=torch.uint8))
    assert tensor.all() and pool.rows(tensor)[0].dtype == torch.uint8


def test_rows_made_in_inference_mode_are_writable_outside():
    pool = make_pool()
    with torch.inference_mode():
        pool.rows(pool.empty())[0].fill_(1)
    pool.rows(pool.empty())[0].fill_(2)


def test_tracer_that_holds_local_variables_makes_no_held_storage_free():
    pool = make_pool()
    held = [pool.empty().fill_(0)]

    def trace(frame, event, argument):
        frame.f_locals  # noqa: B018  # up to Python 3.12 this keeps another reference to every local variable
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        held.append(pool.empty().fill_(1))
    finally:
        sys.settrace(before)
    held += [pool.empty().fill_(number) for number in (2, 3)]
    assert [int(tensor[0, 0]) for tensor in held] == [0, 1, 2, 3]
    address = held.pop().data_ptr()
    assert pool.empty().data_ptr() == address


def test_threads_that_ask_at_once_share_no_storage():
    pool, barrier, wrong = make_pool((1, 1000)), threading.Barrier(3), []

    def work(number):
        barrier.wait()
        for _ in range(300):
            tensor = pool.empty().fill_(number)
            wrong.extend([] if (tensor == number).all() else [number])

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


STEPS = """
import resource
import torch
import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

torch.set_num_threads(1)
env = ScriptedEnv(16384, observation_shape=(17,))
env = tw.TransformedEnv(env, T.NormalizeObservation(), T.FrameStackObservation(4))
root = env.reset(seed=0)
for step in range(30):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    root = env.step(root.set("action", env.sample_action()))[1]
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_eager_steps_of_many_envs_touch_no_new_memory():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 500  # page faults per step; each of two stacks of frames has 1,088 pages
