import pytest
import torch

from torchwrap import RowMask, random
from torchwrap.random import Stream


def state(stream):
    return {name: buffer.clone() for name, buffer in stream.named_buffers()}


def changes(stream, before):
    now = state(stream)
    return {name: (now[name] != before[name]).tolist() for name in now if (now[name] != before[name]).any()}


@pytest.fixture
def used_stream():
    stream = Stream(3, first_index=4, seed=9)
    for mask in ([True, True, True], [True, False, False]):
        stream.next_episode(RowMask(torch.tensor(mask)))
    for _ in range(5):
        stream.next_draw()
    return stream


def test_next_draw_and_next_episode_advance_their_rows(used_stream):
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_draw()
    assert changes(used_stream, before) == {"draw": [True] * 3}
    assert (random.uniform(used_stream.key()) != numbers).all()
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_episode(RowMask(torch.tensor([True, False, True])))
    assert changes(used_stream, before) == {"episode": [True, False, True], "draw": [True, False, True]}
    assert torch.equal(used_stream.episode, before["episode"] + torch.tensor([1, 0, 1]))
    assert used_stream.draw.tolist() == [0, 6, 0]
    assert (random.uniform(used_stream.key()) != numbers).tolist() == [True, False, True]


def test_seed_with_a_mask_restarts_its_rows_before_their_first_episode(used_stream):
    numbers, fresh = random.uniform(used_stream.key()), Stream(3, first_index=4, seed=77)
    used_stream.seed(77, RowMask(torch.tensor([True, False, True])))
    for name, buffer in used_stream.named_buffers():
        assert torch.equal(buffer[[0, 2]], dict(fresh.named_buffers())[name][[0, 2]])
    drawn = random.uniform(used_stream.key())
    assert torch.equal(drawn[[0, 2]], random.uniform(fresh.key())[[0, 2]]) and drawn[1] == numbers[1]
    assert used_stream.episode.tolist() == [-1, 0, -1] and used_stream.draw.tolist() == [0, 5, 0]
    used_stream.next_episode(RowMask(torch.tensor([True, False, False])))
    assert used_stream.episode.tolist() == [0, 0, -1]


def test_stream_keeps_every_bit_of_a_seed_and_without_one_differs_from_another():
    for seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1):
        stream = Stream(2, seed=seed)
        assert stream.seed_low.tolist() == [seed % 2**32] * 2 and stream.seed_high.tolist() == [seed >> 32] * 2
    assert (random.uniform(Stream(3).key()) != random.uniform(Stream(3).key())).all()
    assert stream.state_dict() == {}


def test_stream_and_key_beyond_the_counter_raise():
    for arguments in (dict(num_envs=1, tag=32), dict(num_envs=2, first_index=2**24 - 1)):
        with pytest.raises(ValueError, match="Stream needs"):
            Stream(**arguments)
    for number in (0, 256, -1):
        with pytest.raises(ValueError, match=f"Key.fold_in needs a number from 1 to 255, but got {number}"):
            Stream(1, seed=0).key().fold_in(number)


# Keys.


def test_key_tags_of_all_streams_and_functions_are_distinct_and_draw_other_numbers():
    tags = [Stream(1, tag=tag, seed=0).key(function).tag for tag in range(32) for function in range(8)]
    assert sorted(tags) == list(range(256))
    key = Stream(3, seed=0).key()
    words = [random.bits(one, 4) for one in (*(key._replace(tag=tag) for tag in tags), key.fold_in(1), key.fold_in(255))]
    assert len(torch.cat(words).unique(dim=0)) == 3 * 258


def test_key_select_draws_the_numbers_of_its_rows():
    key, rows = Stream(5, first_index=7, seed=3).key(), torch.tensor([4, 1])
    assert torch.equal(random.uniform(key.select(rows), shape=(3,)), random.uniform(key, shape=(3,))[rows])
