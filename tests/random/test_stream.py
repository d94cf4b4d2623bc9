import pytest
import torch

from torchwrap import RowMask, random
from torchwrap.random import Stream


def state(stream):
    return {name: buffer.clone() for name, buffer in stream.named_buffers()}


def changes(stream, before):
    now = state(stream)
    return {
        name: (now[name] != before[name]).tolist()
        for name in now
        if (now[name] != before[name]).any()
    }


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
    assert changes(used_stream, before) == {
        "episode": [True, False, True],
        "draw": [True, False, True],
    }
    assert torch.equal(used_stream.episode, before["episode"] + torch.tensor([1, 0, 1]))
    assert used_stream.draw.tolist() == [0, 6, 0]
    assert (random.uniform(used_stream.key()) != numbers).tolist() == [True, False, True]


def test_seed_with_a_mask_restarts_its_rows_before_their_first_episode(used_stream):
    numbers, fresh = random.uniform(used_stream.key()), Stream(3, first_index=4, seed=77)
    used_stream.seed(77, RowMask(torch.tensor([True, False, True])))
    for name, buffer in used_stream.named_buffers():
        assert torch.equal(buffer[[0, 2]], dict(fresh.named_buffers())[name][[0, 2]])
    drawn = random.uniform(used_stream.key())
    assert (
        torch.equal(drawn[[0, 2]], random.uniform(fresh.key())[[0, 2]]) and drawn[1] == numbers[1]
    )
    assert used_stream.episode.tolist() == [-1, 0, -1] and used_stream.draw.tolist() == [0, 5, 0]
    used_stream.next_episode(RowMask(torch.tensor([True, False, False])))
    assert used_stream.episode.tolist() == [0, 0, -1]


def test_stream_keeps_every_bit_of_a_seed_and_without_one_differs_from_another():
    for seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1):
        stream = Stream(2, seed=seed)
        assert (
            stream.seed_low.tolist() == [seed % 2**32] * 2
            and stream.seed_high.tolist() == [seed >> 32] * 2
        )
    assert (random.uniform(Stream(3).key()) != random.uniform(Stream(3).key())).all()
    assert stream.state_dict() == {}


def test_stream_and_key_beyond_the_counter_raise():
    for arguments in (dict(num_envs=1, tag=32), dict(num_envs=2, first_index=2**24 - 1)):
        with pytest.raises(ValueError, match="Stream needs"):
            Stream(**arguments)
    for number in (0, 256, -1):
        with pytest.raises(
            ValueError, match=f"Key.fold_in needs a number from 1 to 255, but got {number}"
        ):
            Stream(1, seed=0).key().fold_in(number)


# Keys.


def test_key_tags_of_all_streams_and_functions_are_distinct_and_draw_other_numbers():
    tags = [
        Stream(1, tag=tag, seed=0).key(function).tag for tag in range(32) for function in range(8)
    ]
    assert sorted(tags) == list(range(256))
    key = Stream(3, seed=0).key()
    words = [
        random.bits(one, 4)
        for one in (*(key._replace(tag=tag) for tag in tags), key.fold_in(1), key.fold_in(255))
    ]
    assert len(torch.cat(words).unique(dim=0)) == 3 * 258


def test_key_select_draws_the_numbers_of_its_rows():
    key, rows = Stream(5, first_index=7, seed=3).key(), torch.tensor([4, 1])
    assert torch.equal(
        random.uniform(key.select(rows), shape=(3,)), random.uniform(key, shape=(3,))[rows]
    )


# Philox.

WORD = 0xFFFFFFFF


def python_philox(key, counter):
    # Philox4x32-10 in Python integers, after the paper's definition: ten rounds, with the key bumped in between.
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for number in range(10):
        if number > 0:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def words_of(text):
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ("0 0", "0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff",
            "ffffffff ffffffff ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "a4093822 299f31d0",
            "243f6a88 85a308d3 13198a2e 03707344",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_inputs_match_published_vectors(key, counter, expected):
    result = random.philox(words_of(key), words_of(counter))
    assert " ".join(f"{int(word):08x}" for word in result) == expected
    assert python_philox(
        [int(w) for w in words_of(key)], [int(w) for w in words_of(counter)]
    ) == tuple(int(w) for w in result)
    # Without values, which the host can read, the words are computed in PyTorch and not in NumPy.
    batched = torch.vmap(lambda *words: random.philox(words[:2], words[2:]))(
        *words_of(key), *words_of(counter)
    )
    assert all(torch.equal(word, others) for word, others in zip(result, batched, strict=True))


def test_philox_random_inputs_match_python_integers():
    inputs = torch.randint(0, 2**32, (2000, 6), generator=torch.Generator().manual_seed(0))
    inputs[:8] = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, WORD - 1, WORD, 5]).unsqueeze(-1)
    k0, k1, *counter = inputs.unbind(-1)
    expected = [list(python_philox(row[:2], row[2:])) for row in inputs.tolist()]
    assert torch.stack(random.philox((k0, k1), tuple(counter)), -1).tolist() == expected
    in_pytorch = torch.vmap(
        lambda row: torch.stack(random.philox((row[0], row[1]), tuple(row[2:])))
    )(inputs)
    assert in_pytorch.tolist() == expected


def test_bits_of_a_stream_are_philox_of_seed_env_episode_and_draw():
    stream = Stream(3, first_index=5, tag=2, seed=0x0123456789ABCDEF)
    stream.next_episode(RowMask(torch.tensor([True, True, False])))
    stream.next_draw()
    result = random.bits(stream.key(), 6)
    for row, episode in enumerate(stream.episode.tolist()):
        blocks = [
            python_philox(
                (0x89ABCDEF, 0x01234567), (1, (16 << 24) + block, 5 + row, episode % 2**32)
            )
            for block in (0, 1)
        ]
        assert result[row].tolist() == [word for block in blocks for word in block][:6]


def test_bits_for_a_larger_count_start_with_the_same_words_and_repeat_no_block():
    key = Stream(3, seed=1).key()
    many = random.bits(key, 4 * 50_000)
    for count in (0, 1, 3, 4, 5, 4099):
        assert random.bits(key, count).shape == (3, count) and torch.equal(
            random.bits(key, count), many[:, :count]
        )
    assert len(many.view(-1, 4).unique(dim=0)) == 3 * 50_000
