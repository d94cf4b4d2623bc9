import pytest
import torch

from torchwrap import RowMask, random
from torchwrap.random import Stream


def mask(*rows):
    return RowMask(torch.tensor(rows, dtype=torch.bool))


def state(stream):
    return {name: buffer.clone() for name, buffer in stream.named_buffers()}


def changed(stream, before):
    """Whether each row of each buffer that changed did so."""
    rows = {name: buffer != before[name] for name, buffer in stream.named_buffers()}
    return {name: row.int().tolist() for name, row in rows.items() if row.any()}


@pytest.fixture
def used_stream():
    stream = Stream(3, first_index=4, seed=9)
    stream.next_episode(mask(1, 1, 1))
    stream.next_episode(mask(1, 0, 0))
    for _ in range(5):
        stream.next_draw()
    return stream


def test_next_draw_advances_every_row(used_stream):
    before = state(used_stream)
    numbers = random.uniform(used_stream.key())
    used_stream.next_draw()
    assert changed(used_stream, before) == {"draw": [1, 1, 1]}
    assert (random.uniform(used_stream.key()) != numbers).all()


def test_next_episode_advances_the_rows_of_its_mask(used_stream):
    before = state(used_stream)
    numbers = random.uniform(used_stream.key())
    used_stream.next_episode(mask(1, 0, 1))
    assert changed(used_stream, before) == {
        "episode": [1, 0, 1],
        "draw": [1, 0, 1],
    }
    assert (used_stream.episode - before["episode"]).tolist() == [1, 0, 1]
    assert used_stream.draw.tolist() == [0, 5, 0]
    assert (random.uniform(used_stream.key()) != numbers).tolist() == [True, False, True]


def test_seed_with_a_mask_restarts_its_rows_before_their_first_episode(used_stream):
    before = random.uniform(used_stream.key())
    fresh = Stream(3, first_index=4, seed=77)
    used_stream.seed(77, mask(1, 0, 1))
    for name, buffer in used_stream.named_buffers():
        assert torch.equal(buffer[[0, 2]], fresh.get_buffer(name)[[0, 2]])
    drawn = random.uniform(used_stream.key())
    assert torch.equal(drawn[[0, 2]], random.uniform(fresh.key())[[0, 2]])
    assert drawn[1] == before[1]
    assert used_stream.episode.tolist() == [-1, 0, -1]
    assert used_stream.draw.tolist() == [0, 5, 0]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_stream_keeps_every_bit_of_a_seed(seed):
    stream = Stream(2, seed=seed)
    assert stream.seed_low.tolist() == [seed % 2**32] * 2
    assert stream.seed_high.tolist() == [seed >> 32] * 2


def test_streams_without_a_seed_differ_and_have_no_state_dict():
    stream = Stream(3)
    assert (random.uniform(stream.key()) != random.uniform(Stream(3).key())).all()
    assert stream.state_dict() == {}


def test_stream_beyond_the_counter_raises():
    with pytest.raises(ValueError, match="tag"):
        Stream(1, tag=32)
    with pytest.raises(ValueError, match="first_index"):
        Stream(2, first_index=2**24 - 1)


@pytest.mark.parametrize("number", [0, 256, -1])
def test_fold_in_beyond_the_counter_raises(number):
    with pytest.raises(ValueError, match="number"):
        Stream(1, seed=0).key().fold_in(number)


# Keys.


def test_keys_of_all_streams_functions_and_folds_draw_other_numbers():
    tags = []
    for tag in range(32):
        stream = Stream(1, tag=tag, seed=0)
        tags += [stream.key(function).tag for function in range(8)]
    assert sorted(tags) == list(range(256))
    key = Stream(3, seed=0).key()
    keys = [key._replace(tag=tag) for tag in tags] + [
        key.fold_in(1),
        key.fold_in(255),
    ]
    words = torch.cat([random.bits(key, 4) for key in keys])
    assert len(words.unique(dim=0)) == 3 * 258


def test_key_select_draws_the_numbers_of_its_rows():
    key = Stream(5, first_index=7, seed=3).key()
    rows = torch.tensor([4, 1])
    expected = random.uniform(key, shape=(3,))[rows]
    assert torch.equal(random.uniform(key.select(rows), shape=(3,)), expected)


# Philox.


def python_philox(k0, k1, c0, c1, c2, c3):
    """Philox4x32-10 in Python integers, after the paper's definition."""
    for number in range(10):
        if number > 0:
            k0 = (k0 + 0x9E3779B9) % 2**32
            k1 = (k1 + 0xBB67AE85) % 2**32
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
    return [c0, c1, c2, c3]


def philox(words):
    """The library's, for a tensor of words (6,) or (6, n)."""
    return torch.stack(random.philox(tuple(words[:2]), tuple(words[2:])))


VECTORS = {  # published: key, counter and result
    "zeros": "0 0 0 0 0 0 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ones": "ffffffff " * 6 + "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "pi": "a4093822 299f31d0 243f6a88 85a308d3 13198a2e 03707344 "
    "d16cfe09 94fdcceb 5001e420 24126ea1",
}


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_philox_known_inputs_match_published_vectors(vector):
    numbers = [int(word, 16) for word in vector.split()]
    words = torch.tensor(numbers[:6])
    expected = numbers[6:]
    assert python_philox(*numbers[:6]) == expected
    assert philox(words).tolist() == expected
    # Under vmap the host cannot read the words. They are computed in PyTorch, not in NumPy.
    assert torch.vmap(philox)(words.unsqueeze(0)).tolist() == [expected]


def test_philox_random_inputs_match_python_integers():
    inputs = torch.randint(
        0,
        2**32,
        (2000, 6),
        generator=torch.Generator().manual_seed(0),
    )
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 5]
    inputs[:8] = torch.tensor(edges).unsqueeze(-1)
    expected = [python_philox(*row) for row in inputs.tolist()]
    assert philox(inputs.T).T.tolist() == expected
    assert torch.vmap(philox)(inputs).tolist() == expected


def test_bits_of_a_stream_are_philox_of_seed_env_episode_and_draw():
    stream = Stream(3, first_index=5, tag=2, seed=0x0123456789ABCDEF)
    stream.next_episode(mask(1, 1, 0))
    stream.next_draw()
    result = random.bits(stream.key(), 6)
    for row, episode in enumerate(stream.episode.tolist()):
        words = []
        for block in (0, 1):
            counter = (1, (16 << 24) + block, 5 + row, episode % 2**32)
            words += python_philox(0x89ABCDEF, 0x01234567, *counter)
        assert result[row].tolist() == words[:6]


MANY = 4 * 50_000


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 4099])
def test_bits_for_a_larger_count_start_with_the_same_words(count):
    key = Stream(3, seed=1).key()
    few = random.bits(key, count)
    assert few.shape == (3, count) and torch.equal(few, random.bits(key, MANY)[:, :count])


@pytest.mark.parametrize("period", [0, -3])
def test_key_is_held_for_at_least_one_step(used_stream, period):
    with pytest.raises(ValueError, match="period"):
        used_stream.key().hold(period)
