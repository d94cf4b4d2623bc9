import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers.utils import create_zero_array
from space_cases import BOX, SPACES, assert_equal_arrays, batch, every_space, leaves_of

from torchwrap import spaces as tensors


@every_space
def test_from_numpy_matches_gymnasiums_batch_and_copies_it(space):
    _, value = batch(space)
    result = tensors.from_numpy(space, value)
    assert_equal_arrays(result, value)
    assert result.shape[0] == 6
    copy = result.clone()
    others, _ = batch(space, seed=1)
    concatenate(space, others, value)
    assert_equal_arrays(result, copy)


@every_space
def test_to_numpy_inverts_from_numpy_and_copies(space):
    _, value = batch(space)
    result = tensors.from_numpy(space, value)
    back = tensors.to_numpy(space, result)
    assert isinstance(back, type(value)) and back in batch_space(space, 6)
    for leaf in leaves_of(result):
        leaf.zero_()
    assert_equal_arrays(tensors.from_numpy(space, back), value)


NUMBERS = np.arange(6, dtype=np.float32)
LAYOUTS = {
    "float64": np.arange(6.0).reshape(2, 3),
    "int64": np.arange(6).reshape(2, 3),
    "Fortran": NUMBERS.reshape(3, 2).T.copy(order="F"),
    "strided": np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
    "reversed": NUMBERS[::-1].reshape(2, 3),
    "broadcast": np.broadcast_to(np.float32(3), (2, 3)),
    "read-only": np.frombuffer(bytes(24), np.float32).reshape(2, 3),
    "list": [[0, 1, 2], [3, 4, 5]],
}


@pytest.mark.parametrize("value", LAYOUTS.values(), ids=LAYOUTS)
def test_from_numpy_with_any_layout_casts_to_the_dtype_of_the_space(value):
    result = tensors.from_numpy(BOX, value)
    assert result.dtype == torch.float32 and result.is_contiguous()
    np.testing.assert_array_equal(result, np.asarray(value))
    result.zero_()


@every_space
def test_zeros_match_gymnasium_and_do_not_share_memory(space):
    result = tensors.zeros(space, 3)
    zeros = [create_zero_array(space)] * 3
    assert_equal_arrays(result, concatenate(space, zeros, create_empty_array(space, 3)))
    for leaf in leaves_of(result):
        leaf[0] = 1
    assert_equal_arrays(result[1:], tensors.zeros(space, 2))


@every_space
def test_flatten_matches_gymnasium_row_by_row(space):
    members, value = batch(space)
    result = tensors.flatten(space, tensors.from_numpy(space, value), torch.float64)
    expected = [spaces.flatten(space, member) for member in members]
    assert_equal_arrays(result, np.stack(expected).astype(np.float64))


# Traversal.

PATHS = {
    "deep": [
        ("x", "0", "y"),
        ("x", "1"),
        ("z",),
    ],
    "float32": [()],
    "Tuple": [(str(index),) for index in range(12)],
}


@pytest.mark.parametrize("name", PATHS)
def test_leaves_are_in_order_with_their_paths(name):
    assert [path for path, _ in tensors.leaves(SPACES[name])] == PATHS[name]


# On a GPU.


@pytest.mark.cuda
@every_space
def test_conversion_on_cuda_matches_the_cpu(space):
    _, value = batch(space)
    on_cuda = tensors.from_numpy(space, value, torch.device("cuda"))
    on_cpu = tensors.from_numpy(space, value)
    assert_equal_arrays(on_cuda.cpu(), value)
    assert_equal_arrays(tensors.zeros(space, 3, "cuda").cpu(), tensors.zeros(space, 3))
    flat = tensors.flatten(space, on_cuda, torch.float64).cpu()
    assert torch.equal(flat, tensors.flatten(space, on_cpu, torch.float64))
