from __future__ import annotations

import copy
import pickle
import queue
import threading

import numpy as np
import pytest
import torch

from torchwrap.memory import Recycled

LARGE = (3, 2**18)
HOLDS = {
    "the tensor": lambda tensor: tensor,
    "a row": lambda tensor: tensor[1],
    "its last number": lambda tensor: tensor[-1, -1],
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


def recycled(shape=LARGE, dtype=torch.uint8, device="cpu"):
    return Recycled(shape, dtype, device)


@pytest.mark.parametrize("name", HOLDS)
def test_what_is_held_in_any_way_is_not_given_out_again_and_what_is_let_go_is(name):
    memory = recycled()
    tensor = memory.empty()
    place, held = tensor.data_ptr(), HOLDS[name](tensor)
    del tensor
    others = [memory.empty() for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    del held
    assert memory.empty().data_ptr() == place


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.int32, torch.float32, torch.int64, torch.float64]
)
@pytest.mark.parametrize("shape", [(2**18,), (2, 3, 2**17), (1,), (0,), (5, 0)])
def test_tensors_have_the_shape_and_dtype_that_were_asked_for_and_are_new(shape, dtype):
    memory = recycled(shape, dtype)
    for _ in range(2):
        tensor, other = memory.empty(), memory.empty()
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.requires_grad
        tensor.fill_(1)
        other.fill_(0)
        assert (tensor == 1).all() and (other == 0).all()


def test_tensors_in_hand_never_overlap_however_many():
    memory = recycled()
    held = [memory.empty().fill_(number) for number in range(20)]
    assert all((tensor == number).all() for number, tensor in enumerate(held))
    del held[3:9]
    held += [memory.empty().fill_(number) for number in (100, 101, 102, 103, 104, 105, 106)]
    numbers = [0, 1, 2, *range(9, 20), 100, 101, 102, 103, 104, 105, 106]
    assert all((tensor == number).all() for number, tensor in zip(numbers, held, strict=True))


def test_a_caller_who_lets_go_at_once_gets_the_same_memory_forever():
    memory = recycled()
    assert len({memory.empty().data_ptr() for _ in range(50)}) == 1


def test_what_a_caller_collects_is_not_hoarded():
    memory = recycled()
    held = [memory.empty() for _ in range(50)]
    assert sum(piece.nbytes for piece in memory.pieces) <= 4 * memory.num_bytes
    del held
    first, second = memory.empty(), memory.empty()
    assert first.data_ptr() != second.data_ptr()


def test_memory_outlives_who_gave_it():
    memory = recycled()
    tensor = memory.empty().fill_(7)
    del memory
    filler = [recycled().empty().fill_(0) for _ in range(8)]
    assert (tensor == 7).all() and len(filler) == 8


def test_two_of_the_same_kind_share_nothing():
    first, second = recycled(), recycled()
    for _ in range(3):
        one, other = first.empty().fill_(1), second.empty().fill_(2)
        assert (one == 1).all() and (other == 2).all()


@pytest.mark.parametrize(
    "replicate", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("hold", [False, True])
def test_a_copy_gives_memory_of_its_own(replicate, hold):
    memory = recycled()
    tensor = memory.empty().fill_(1)
    if not hold:
        del tensor
    other = replicate(memory)
    held = [other.empty().fill_(number) for number in (2, 3, 4)]
    mine = [memory.empty().fill_(number) for number in (5, 6)]
    assert [int(value[0, 0]) for value in (*held, *mine)] == [2, 3, 4, 5, 6]
    assert not hold or (tensor == 1).all()


def test_writing_through_a_view_that_was_kept_reaches_its_own_tensor_alone():
    memory = recycled()
    tensor = memory.empty().fill_(1)
    row = tensor[0]
    del tensor
    other = memory.empty().fill_(2)
    row.fill_(3)
    assert (other == 2).all()


def test_threads_get_tensors_of_their_own():
    memory, given, release = recycled(), queue.Queue(), threading.Event()

    def work():
        tensor = memory.empty().fill_(1)
        given.put(tensor.data_ptr())
        release.wait()
        given.put(bool((tensor == 1).all()))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert memory.empty().fill_(2).data_ptr() != given.get()
    release.set()
    thread.join()
    assert given.get()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_tensors_are_pytorchs_own():
    memory = recycled(device="cuda")
    assert memory.empty().device.type == "cuda" and not memory.pieces


def test_copies_leave_the_memory_behind():
    recycled = Recycled((2**20,), torch.float32)
    recycled.empty()
    assert len(pickle.dumps(recycled)) < 10_000
    assert copy.deepcopy(recycled).empty().shape == (2**20,)


def test_rows_are_those_of_the_tensor_and_made_once_for_each_piece_of_memory():
    memory = recycled(dtype=torch.float32)
    tensor = memory.empty().fill_(0)
    rows = memory.rows(tensor)
    rows[1].fill_(5)
    assert tensor.mean(1).tolist() == [0, 5, 0] and len(rows) == 3
    held, others = tensor, [memory.empty() for _ in range(5)]  # more than are kept
    for other in others:
        memory.rows(other)[2].fill_(7)
        assert other[2].eq(7).all()
    assert held.mean(1).tolist() == [0, 5, 0]
    place = tensor.data_ptr()
    del tensor, held
    again = memory.empty()
    assert again.data_ptr() == place and memory.rows(again) is rows


def test_rows_of_bools_are_bytes():
    memory = recycled(dtype=torch.bool)
    tensor = memory.empty()
    for row in memory.rows(tensor):
        row.copy_(torch.ones(1, dtype=torch.uint8))
    assert tensor.all() and memory.rows(tensor)[0].dtype == torch.uint8


def test_rows_made_in_inference_mode_can_be_written_to_outside():
    memory = recycled()
    with torch.inference_mode():
        memory.rows(memory.empty())[0].fill_(1)
    memory.rows(memory.empty())[0].fill_(2)
