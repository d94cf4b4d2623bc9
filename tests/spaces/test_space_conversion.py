from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers.utils import create_zero_array
from space_cases import BOX, NESTED, arrays, assert_equal_arrays, batch, every_leaf, every_space, leaves_of

from torchwrap import RowMask
from torchwrap import spaces as tensors


@every_leaf
def test_dtype_of_a_leaf_matches_the_space(space):
    assert tensors.dtype(space) == torch.from_numpy(np.empty(0, space.dtype)).dtype


@every_space
def test_from_numpy_matches_gymnasiums_batch(space):
    _, value = batch(space)
    result = tensors.from_numpy(space, value)
    assert_equal_arrays(arrays(result), value)
    assert result.shape[0] == 6 and (isinstance(result, torch.Tensor) or result.batch_size == (6,))


@every_space
def test_from_numpy_copies(space):
    _, value = batch(space)
    result = tensors.from_numpy(space, value)
    kept = result.clone()
    concatenate(space, batch(space, seed=1)[0], value)
    assert_equal_arrays(arrays(result), arrays(kept))


@every_space
def test_to_numpy_inverts_from_numpy(space):
    _, value = batch(space)
    result = tensors.to_numpy(space, tensors.from_numpy(space, value))
    assert isinstance(result, type(value)) and result in batch_space(space, 6)
    back = tensors.from_numpy(space, result)
    assert_equal_arrays(arrays(back), value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(3, 2).T.copy(order="F"),
        np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
        np.arange(6, dtype=np.float32)[::-1].reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.broadcast_to(np.float32(3), (2, 3)),
        np.frombuffer(bytes(24), np.float32).reshape(2, 3),
        [[0, 1, 2], [3, 4, 5]],
    ],
    ids=["float64", "Fortran", "strided", "reversed", "int", "broadcast", "read-only", "list"],
)
def test_from_numpy_with_any_layout_casts_to_the_dtype_of_the_space(value):
    result = tensors.from_numpy(spaces.Box(-9, 9, (3,), np.float32), value)
    assert result.dtype == torch.float32 and result.is_contiguous()
    np.testing.assert_array_equal(result.numpy(), np.asarray(value))
    result.zero_()


@every_space
def test_zeros_match_gymnasium_and_do_not_share_memory(space):
    zero, result = create_zero_array(space), tensors.zeros(space, 3)
    expected = concatenate(space, [zero] * 3, create_empty_array(space, 3))
    assert_equal_arrays(arrays(result), expected)
    for leaf in leaves_of(result):
        leaf[0] = 1 if leaf.dtype.is_floating_point else 7
    assert_equal_arrays(arrays(result[1:]), arrays(tensors.zeros(space, 2)))


@every_space
def test_flatten_matches_gymnasium_row_by_row(space):
    members, value = batch(space)
    result = tensors.flatten(space, tensors.from_numpy(space, value), torch.float64)
    assert result.dtype == torch.float64
    expected = np.stack([spaces.flatten(space, member) for member in members])
    np.testing.assert_array_equal(result.numpy(), expected.astype(np.float64))


@every_space
def test_row_mask_where_with_any_space_selects_rows(space):
    mask = torch.tensor([True, False, False, True, False, True])
    first, second = (tensors.from_numpy(space, batch(space, seed=seed)[1]) for seed in (0, 1))
    kept = first.clone()
    mixed = RowMask(mask).where(first, second)
    assert_equal_arrays(arrays(mixed[mask]), arrays(first[mask]))
    assert_equal_arrays(arrays(mixed[~mask]), arrays(second[~mask]))
    for leaf in leaves_of(mixed):
        leaf.zero_()
    assert_equal_arrays(arrays(first), arrays(kept))


# Traversal.


def test_leaves_are_in_order_with_their_paths():
    paths = [path for path, _ in tensors.leaves(NESTED["deep"])]
    assert paths == [("x", "0", "y"), ("x", "1"), ("z",)]
    assert [path for path, _ in tensors.leaves(BOX)] == [()]
    assert [path for path, _ in tensors.leaves(NESTED["Tuple"])] == [(str(i),) for i in range(12)]


def test_build_calls_make_with_each_path_and_leaf():
    calls = []

    def make(path, leaf):
        calls.append((path, leaf))
        return torch.zeros(2)

    value = tensors.build(NESTED["deep"], make, 2)
    assert calls == list(tensors.leaves(NESTED["deep"]))
    assert value.batch_size == (2,) and value["x"].batch_size == (2,) and value["x", "0"].batch_size == (2,)


# On a GPU.


@pytest.mark.cuda
@every_space
def test_conversion_on_cuda_matches_the_cpu(space):
    _, value = batch(space)
    on_cuda = tensors.from_numpy(space, value, "cuda")
    assert_equal_arrays(arrays(on_cuda.cpu()), value)
    assert_equal_arrays(arrays(tensors.zeros(space, 3, "cuda").cpu()), arrays(tensors.zeros(space, 3)))
    on_cpu = tensors.from_numpy(space, value)
    flat = tensors.flatten(space, on_cpu, torch.float64)
    assert torch.equal(tensors.flatten(space, on_cuda, torch.float64).cpu(), flat)
