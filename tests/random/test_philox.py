import pytest
import torch

from torchwrap import RowMask, random
from torchwrap.random import Stream

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
        ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_inputs_match_published_vectors(key, counter, expected):
    result = random.philox(words_of(key), words_of(counter))
    assert " ".join(f"{int(word):08x}" for word in result) == expected
    assert python_philox([int(w) for w in words_of(key)], [int(w) for w in words_of(counter)]) == tuple(int(w) for w in result)
    # Without values, which the host can read, the words are computed in PyTorch and not in NumPy.
    batched = torch.vmap(lambda *words: random.philox(words[:2], words[2:]))(*words_of(key), *words_of(counter))
    assert all(torch.equal(word, others) for word, others in zip(result, batched, strict=True))


def test_philox_random_inputs_match_python_integers():
    inputs = torch.randint(0, 2**32, (2000, 6), generator=torch.Generator().manual_seed(0))
    inputs[:8] = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, WORD - 1, WORD, 5]).unsqueeze(-1)
    k0, k1, *counter = inputs.unbind(-1)
    expected = [list(python_philox(row[:2], row[2:])) for row in inputs.tolist()]
    assert torch.stack(random.philox((k0, k1), tuple(counter)), -1).tolist() == expected
    in_pytorch = torch.vmap(lambda row: torch.stack(random.philox((row[0], row[1]), tuple(row[2:]))))(inputs)
    assert in_pytorch.tolist() == expected


def test_bits_of_a_stream_are_philox_of_seed_env_episode_and_draw():
    stream = Stream(3, first_index=5, tag=2, seed=0x0123456789ABCDEF)
    stream.next_episode(RowMask(torch.tensor([True, True, False])))
    stream.next_draw()
    result = random.bits(stream.key(), 6)
    for row, episode in enumerate(stream.episode.tolist()):
        blocks = [
            python_philox((0x89ABCDEF, 0x01234567), (1, (16 << 24) + block, 5 + row, episode % 2**32)) for block in (0, 1)
        ]
        assert result[row].tolist() == [word for block in blocks for word in block][:6]


def test_bits_for_a_larger_count_start_with_the_same_words_and_repeat_no_block():
    key = Stream(3, seed=1).key()
    many = random.bits(key, 4 * 50_000)
    for count in (0, 1, 3, 4, 5, 4099):
        assert random.bits(key, count).shape == (3, count) and torch.equal(random.bits(key, count), many[:, :count])
    assert len(many.view(-1, 4).unique(dim=0)) == 3 * 50_000
