"""Large tensors of zeros but for a few rows: the same values as new ones, in memory that nobody else sees."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torchwrap._core.zero_pool import ZeroPool

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._core import row_mask
from torchwrap.testing import ScriptedEnv

NUM_ROWS = 6


def rows_at(*indices):
    indices = torch.tensor(indices, dtype=torch.int64)
    return indices, torch.stack([indices + 1.0, -indices - 1.0], 1)


def expected(indices, rows):
    return torch.zeros(NUM_ROWS, 2).index_copy(0, indices, rows)


def test_rows_of_the_last_time_are_cleared_in_the_same_memory():
    pool, addresses = ZeroPool(), set()
    for given in (rows_at(1, 4), rows_at(0), rows_at(), rows_at(5, 0, 3)):
        tensor = pool.with_rows(NUM_ROWS, *given)
        assert torch.equal(tensor, expected(*given))
        addresses.add(tensor.data_ptr())
        del tensor
    assert len(addresses) == 1


@pytest.mark.parametrize("hold", [lambda tensor: tensor, lambda tensor: tensor[1:, 0], lambda tensor: tensor.numpy()])
def test_what_somebody_holds_stays_as_it_is(hold):
    pool, held = ZeroPool(), []
    for number in range(7):  # more than the pool keeps
        given = rows_at(number % NUM_ROWS)
        held.append((hold(pool.with_rows(NUM_ROWS, *given)), hold(expected(*given))))
    assert all((found == wanted).all() for found, wanted in held)


@pytest.mark.parametrize("view", [lambda tensor: tensor, lambda tensor: tensor[:, 1]])
def test_what_somebody_has_written_to_is_not_used_again(view):
    pool = ZeroPool()
    view(pool.with_rows(NUM_ROWS, *rows_at(2))).add_(7)
    given = rows_at(3)
    assert torch.equal(pool.with_rows(NUM_ROWS, *given), expected(*given))


def test_other_shapes_and_dtypes_have_memory_of_their_own():
    pool = ZeroPool()
    indices, rows = rows_at(2)
    for given in (rows, rows.double(), rows.unsqueeze(-1), rows[:, :1].contiguous()):
        for number in (NUM_ROWS, NUM_ROWS + 1):
            tensor = pool.with_rows(number, indices, given)
            assert tensor.shape == (number, *given.shape[1:]) and tensor.dtype == given.dtype
            assert torch.equal(tensor[indices], given) and tensor.count_nonzero() == given.count_nonzero()


def test_tensors_made_in_inference_mode_are_not_kept():
    pool, given = ZeroPool(), rows_at(1)
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            tensor = pool.with_rows(NUM_ROWS, *given)
        assert torch.equal(tensor, expected(*given)) and tensor.is_inference() == inside
        given = rows_at(2, 3)


def test_copies_of_an_env_share_no_memory_and_start_without():
    pool = ZeroPool()
    pool.with_rows(NUM_ROWS, *rows_at(1))
    for other in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert pool.spare and not other.spare


@pytest.mark.parametrize("is_large", [False, True])
def test_an_env_resets_the_same_with_and_without(is_large, monkeypatch):
    """With staggered ends, against the env of which a step and a reset by mask are two calls."""
    monkeypatch.setattr(row_mask, "_LARGE", 0 if is_large else 2**40)

    def make():
        env = ScriptedEnv(5, (3,), episode_lengths=[1, 2, 2, 3, 7])
        return tw.TransformedEnv(env, T.NormalizeObservation(), T.DelayObservation(1), T.FrameStackObservation(2))

    env, other = make(), make()
    td, other_td = env.reset(seed=0), other.reset(seed=0)
    for _ in range(12):
        action = torch.zeros(5, 6)
        transition, td = env.step(td.set("action", action))
        expected, _ = other.transition(other_td.set("action", action))
        other_td = other.reset(mask=expected["next", "done"].squeeze(-1))
        torch.testing.assert_close(td["observation"], other_td["observation"], rtol=0, atol=0)
        torch.testing.assert_close(transition["next", "observation"], expected["next", "observation"], rtol=0, atol=0)
    assert bool(env._zero_pool.spare) == is_large
