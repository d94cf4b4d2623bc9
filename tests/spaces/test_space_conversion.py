import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers.utils import create_zero_array
from space_cases import BOX, SPACES, assert_equal_arrays, batch, every_space, leaves_of

from torchwrap import spaces as tensors


@every_space
def test_from_numpy_copies_gymnasiums_batch_and_to_numpy_inverts_it(space):
    _, value = batch(space)
    result = tensors.from_numpy(space, value)
    assert_equal_arrays(result, value)
    assert result.shape[0] == 6 and (isinstance(result, torch.Tensor) or result.batch_size == (6,))
    back = tensors.to_numpy(space, result)
    assert isinstance(back, type(value)) and back in batch_space(space, 6)
    assert_equal_arrays(tensors.from_numpy(space, back), result)
    kept = result.clone()
    concatenate(space, batch(space, seed=1)[0], value)
    assert_equal_arrays(result, kept)
    for leaf in leaves_of(result):
        leaf.zero_()
    assert_equal_arrays(tensors.from_numpy(space, back), kept)


def test_from_numpy_with_any_layout_casts_to_the_dtype_of_the_space():
    for value in (
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(3, 2).T.copy(order="F"),
        np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
        np.arange(6, dtype=np.float32)[::-1].reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.broadcast_to(np.float32(3), (2, 3)),
        np.frombuffer(bytes(24), np.float32).reshape(2, 3),
        [[0, 1, 2], [3, 4, 5]],
    ):
        result = tensors.from_numpy(spaces.Box(-9, 9, (3,), np.float32), value)
        assert result.dtype == torch.float32 and result.is_contiguous()
        np.testing.assert_array_equal(result.numpy(), np.asarray(value))
        result.zero_()


@every_space
def test_zeros_match_gymnasium_and_do_not_share_memory(space):
    result = tensors.zeros(space, 3)
    assert_equal_arrays(
        result, concatenate(space, [create_zero_array(space)] * 3, create_empty_array(space, 3))
    )
    for leaf in leaves_of(result):
        leaf[0] = 1 if leaf.dtype.is_floating_point else 7
    assert_equal_arrays(result[1:], tensors.zeros(space, 2))


@every_space
def test_flatten_matches_gymnasium_row_by_row(space):
    members, value = batch(space)
    result = tensors.flatten(space, tensors.from_numpy(space, value), torch.float64)
    assert_equal_arrays(
        result, np.stack([spaces.flatten(space, member) for member in members]).astype(np.float64)
    )


# Traversal.


def test_leaves_are_in_order_with_their_paths_and_build_makes_each():
    assert [path for path, _ in tensors.leaves(SPACES["deep"])] == [
        ("x", "0", "y"),
        ("x", "1"),
        ("z",),
    ]
    assert [path for path, _ in tensors.leaves(BOX)] == [()]
    assert [path for path, _ in tensors.leaves(SPACES["Tuple"])] == [(str(i),) for i in range(12)]
    calls = []
    value = tensors.build(
        SPACES["deep"], lambda path, leaf: calls.append((path, leaf)) or torch.zeros(2), 2
    )
    assert calls == list(tensors.leaves(SPACES["deep"]))
    assert (
        value.batch_size == (2,)
        and value["x"].batch_size == (2,)
        and value["x", "0"].batch_size == (2,)
    )


# On a GPU.


@pytest.mark.cuda
@every_space
def test_conversion_on_cuda_matches_the_cpu(space):
    _, value = batch(space)
    on_cuda, on_cpu = tensors.from_numpy(space, value, "cuda"), tensors.from_numpy(space, value)
    assert_equal_arrays(on_cuda.cpu(), value)
    assert_equal_arrays(tensors.zeros(space, 3, "cuda").cpu(), tensors.zeros(space, 3))
    flat = tensors.flatten(space, on_cpu, torch.float64)
    assert torch.equal(tensors.flatten(space, on_cuda, torch.float64).cpu(), flat)
