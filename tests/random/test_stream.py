from __future__ import annotations

import pytest
import torch

from torchwrap import RowMask, random
from torchwrap.random import Stream


@pytest.mark.parametrize("num_envs, first_index", [(1, 0), (1, 63), (7, 20), (64, 0)])
def test_stream_of_a_shard_equals_its_rows_of_the_whole(num_envs, first_index):
    whole, shard = Stream(64, seed=9), Stream(num_envs, first_index, seed=9)
    for stream in (whole, shard):
        stream.next_episode(RowMask.full(len(stream.env)))
        stream.next_draw()
    assert torch.equal(
        random.uniform(whole.key(), (3,))[first_index : first_index + num_envs], random.uniform(shard.key(), (3,))
    )


@pytest.mark.compiles
@pytest.mark.full
def test_stream_when_compiled_advances_as_in_eager_mode():
    def three(stream, mask):
        drawn = []
        for _ in range(3):
            drawn.append(random.normal(stream.key(), (2,)))
            stream.next_draw()
            stream.next_episode(RowMask(mask))
        return torch.stack(drawn)

    eager, compiled, mask = Stream(4, seed=3), Stream(4, seed=3), torch.tensor([True, False, True, False])
    torch.compiler.reset()
    assert torch.equal(torch.compile(three, fullgraph=True, backend="aot_eager")(compiled, mask), three(eager, mask))
    assert all(torch.equal(one, other) for one, other in zip(eager.buffers(), compiled.buffers(), strict=True))


def state(stream):
    return {name: buffer.clone() for name, buffer in stream.named_buffers()}


def changes(stream, before):
    return {
        name: (buffer != before[name]).tolist() for name, buffer in stream.named_buffers() if (buffer != before[name]).any()
    }


@pytest.fixture
def used_stream():
    stream = Stream(3, first_index=4, seed=9)
    for mask in ([True, True, True], [True, False, False]):
        stream.next_episode(RowMask(torch.tensor(mask)))
    for _ in range(5):
        stream.next_draw()
    return stream


def test_next_draw_advances_the_draw_of_every_env(used_stream):
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_draw()
    assert changes(used_stream, before) == {"draw": [True] * 3}
    assert (random.uniform(used_stream.key()) != numbers).all()


def test_next_episode_with_a_mask_advances_the_episode_of_its_rows(used_stream):
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_episode(RowMask(torch.tensor([True, False, True])))
    assert changes(used_stream, before) == {"episode": [True, False, True], "draw": [True, False, True]}
    assert torch.equal(used_stream.episode, before["episode"] + torch.tensor([1, 0, 1]))
    assert used_stream.draw.tolist() == [0, 5, 0]
    assert (random.uniform(used_stream.key()) != numbers).tolist() == [True, False, True]


def test_seed_precedes_the_first_episode_which_next_episode_starts(used_stream):
    assert Stream(3, seed=9).episode.tolist() == [-1, -1, -1]
    used_stream.seed(9, RowMask(torch.tensor([True, True, False])))
    assert used_stream.episode.tolist() == [-1, -1, 0] and used_stream.draw.tolist() == [0, 0, 5]
    used_stream.next_episode(RowMask(torch.tensor([True, False, False])))
    assert used_stream.episode.tolist() == [0, -1, 0]


def test_seed_with_a_mask_restarts_its_rows_only(used_stream):
    numbers, fresh = random.uniform(used_stream.key()), Stream(3, first_index=4, seed=77)
    used_stream.seed(77, RowMask(torch.tensor([True, False, True])))
    for name, buffer in used_stream.named_buffers():
        assert torch.equal(buffer[[0, 2]], dict(fresh.named_buffers())[name][[0, 2]])
    drawn = random.uniform(used_stream.key())
    assert torch.equal(drawn[[0, 2]], random.uniform(fresh.key())[[0, 2]])
    assert torch.equal(drawn[1], numbers[1])


def test_stream_without_a_seed_differs_from_another():
    assert (random.uniform(Stream(3).key()) != random.uniform(Stream(3).key())).all()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_stream_with_a_64_bit_seed_keeps_every_bit(seed):
    stream = Stream(2, seed=seed)
    assert stream.seed_low.tolist() == [seed % 2**32] * 2
    assert stream.seed_high.tolist() == [seed >> 32] * 2


def test_stream_state_dict_is_empty():
    assert Stream(2).state_dict() == {}


@pytest.mark.parametrize("arguments", [dict(num_envs=1, tag=32), dict(num_envs=2, first_index=2**24 - 1)])
def test_stream_beyond_the_counter_raises(arguments):
    with pytest.raises(ValueError, match="Stream needs"):
        Stream(**arguments)


# Keys.


def test_key_used_twice_draws_the_same_numbers(used_stream):
    before = state(used_stream)
    first, second = (random.normal(used_stream.key(), (3,)) for _ in range(2))
    assert torch.equal(first, second)
    assert changes(used_stream, before) == {}


def test_key_with_another_tag_draws_other_numbers(used_stream):
    key = used_stream.key()
    assert (random.uniform(key, (100,)) != random.uniform(key._replace(tag=key.tag + 1), (100,))).float().mean() > 0.99


def test_key_tags_of_all_streams_and_functions_are_distinct():
    tags = [Stream(1, tag=tag, seed=0).key().tag + offset for tag in range(32) for offset in range(8)]
    assert sorted(tags) == list(range(256))


def test_key_fold_in_draws_independent_numbers():
    key = Stream(100, seed=3).key()
    draws = [random.uniform(one, (50,)).flatten() for one in (key, key.fold_in(1), key.fold_in(2), key.fold_in(255))]
    assert (torch.corrcoef(torch.stack(draws)) - torch.eye(4)).abs().max() < 0.06
    for tag in range(256):
        assert not torch.equal(random.bits(key._replace(tag=tag), 4), random.bits(key.fold_in(1), 4))


@pytest.mark.parametrize("number", [0, 256, -1])
def test_key_fold_in_outside_1_to_255_raises(number):
    with pytest.raises(ValueError, match=f"Key.fold_in needs a number from 1 to 255, but got {number}"):
        Stream(1, seed=0).key().fold_in(number)


def test_key_select_draws_the_numbers_of_its_rows():
    key, rows = Stream(5, first_index=7, seed=3).key(), torch.tensor([4, 1])
    assert torch.equal(random.uniform(key.select(rows), (3,)), random.uniform(key, (3,))[rows])
