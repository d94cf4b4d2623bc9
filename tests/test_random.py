from __future__ import annotations

import math

import pytest
import torch

from torchwrap import random
from torchwrap.random import Key, Stream

WORD = 0xFFFFFFFF
COUNT = 2**19


def reference(key, counter):
    # Philox4x32-10 in Python's own integers, after the paper's definition: ten rounds, the key bumped between them.
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
def test_philox_gives_the_published_vectors(key, counter, expected):
    given = random.philox(words_of(key), words_of(counter))
    assert " ".join(f"{int(word):08x}" for word in given) == expected
    assert reference([int(w) for w in words_of(key)], [int(w) for w in words_of(counter)]) == tuple(int(w) for w in given)
    # A few numbers are Python's, many are NumPy's, and where there are no values they are PyTorch's.
    many = random.philox(words_of(key), tuple(word.expand(50) for word in words_of(counter)))
    assert all(torch.equal(word.expand(50), others) for word, others in zip(given, many, strict=True))
    batched = torch.vmap(lambda *words: random.philox(words[:2], words[2:]))(*words_of(key), *words_of(counter))
    assert all(torch.equal(word, others) for word, others in zip(given, batched, strict=True))


def test_philox_equals_python_integers_on_random_input():
    inputs = torch.randint(0, 2**32, (2000, 6), generator=torch.Generator().manual_seed(0))
    inputs[:8] = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, WORD - 1, WORD, 5]).unsqueeze(-1)
    k0, k1, *counter = inputs.unbind(-1)
    given = torch.stack(random.philox((k0, k1), tuple(counter)), -1)
    assert given.tolist() == [list(reference(row[:2], row[2:])) for row in inputs.tolist()]


def test_bits_are_philox_of_seed_env_episode_and_draw():
    stream = Stream(3, first_index=5, tag=2, seed=0x0123456789ABCDEF)
    stream.next_episode(torch.tensor([True, True, False]))
    stream.next_draw()
    given = random.bits(stream.key(), 6)
    for row, episode in enumerate(stream.episode.tolist()):
        blocks = [reference((0x89ABCDEF, 0x01234567), (1, (16 << 24) + block, 5 + row, episode % 2**32)) for block in (0, 1)]
        assert given[row].tolist() == [word for block in blocks for word in block][:6]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 4099])
def test_the_first_bits_do_not_depend_on_how_many_are_asked_for(count):
    key = Stream(3, seed=1).key()
    words = random.bits(key, count)
    assert words.shape == (3, count)
    assert torch.equal(words, random.bits(key, 5000)[:, :count])


def test_no_two_words_of_a_stream_are_the_same_block():
    words = random.bits(Stream(1, seed=1).key(), 4 * 50_000).view(-1, 4)
    assert len(words.unique(dim=0)) == 50_000


DRAWS = {
    "uniform": lambda key: random.uniform(key, (5, 2)),
    "uniform float64": lambda key: random.uniform(key, (5, 2), torch.float64),
    "normal": lambda key: random.normal(key, (5, 2)),
    "exponential": lambda key: random.exponential(key, (5, 2)),
    "integers": lambda key: random.integers(key, 10, (5, 2)),
    "integers with counts": lambda key: random.integers(key, torch.tensor([3, 2**31]), (5, 2)),
    "scalar uniform": random.uniform,
    "scalar uniform float64": lambda key: random.uniform(key, (), torch.float64),
    "scalar normal": random.normal,
    "scalar exponential": random.exponential,
    "scalar integers": lambda key: random.integers(key, 10),
    "bits": lambda key: random.bits(key, 7),
}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def vmapped(draw, key):
    *words, tag = key
    return torch.vmap(lambda *words: draw(Key(*words, tag)))(*words)


@every_draw
def test_vmap_gives_the_same_numbers(draw):
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    assert torch.equal(vmapped(draw, key), draw(key))


@every_draw
def test_a_scalar_key_gives_the_numbers_of_its_row(draw):
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    *words, tag = key
    assert torch.equal(draw(Key(*(word[4] for word in words), tag)), draw(key)[4])


@every_draw
def test_compiled_gives_the_same_numbers(draw):
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    torch.compiler.reset()
    assert torch.equal(torch.compile(draw, fullgraph=True, backend="aot_eager")(key), draw(key))


def test_a_compiled_stream_moves_as_an_eager_one():
    def three(stream, mask):
        drawn = []
        for _ in range(3):
            drawn.append(random.normal(stream.key(), (2,)))
            stream.next_draw()
            stream.next_episode(mask)
        return torch.stack(drawn)

    eager, compiled, mask = Stream(4, seed=3), Stream(4, seed=3), torch.tensor([True, False, True, False])
    torch.compiler.reset()
    assert torch.equal(torch.compile(three, fullgraph=True, backend="aot_eager")(compiled, mask), three(eager, mask))
    assert all(torch.equal(one, other) for one, other in zip(eager.buffers(), compiled.buffers(), strict=True))


@every_draw
def test_shapes_are_the_keys_and_then_ones_own(draw):
    shape = draw(Stream(7, seed=0).key()).shape
    assert shape in [(7,), (7, 5, 2), (7, 7)]
    assert draw(Stream(1, seed=0).key()).shape == (1, *shape[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["uniform", "normal", "exponential"])
def test_every_float_dtype_gives_finite_numbers_of_that_dtype(name, dtype):
    drawn = getattr(random, name)(Stream(1, seed=0).key(), (10_000,), dtype)
    assert drawn.dtype == dtype
    assert drawn.isfinite().all()
    assert abs(drawn.double().mean() - {"uniform": 0.5, "normal": 0.0, "exponential": 1.0}[name]) < 0.05
    if name == "uniform":
        assert (drawn >= 0).all() and (drawn < 1).all()


# Distributions, from half a million numbers of one env, and one number of half a million envs.


def many(draw):
    return torch.stack([draw(Stream(1, seed=1).key(), (COUNT,))[0], draw(Stream(COUNT, seed=2).key(), (1,))[:, 0]]).double()


def ks_distance(sample, cdf):
    ordered, count = cdf(sample.sort().values), len(sample)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())


CDFS = {
    "uniform": lambda x: x,
    "normal": torch.special.ndtr,
    "exponential": lambda x: 1 - torch.exp(-x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CDFS)
def test_numbers_follow_their_distribution(name, dtype):
    for sample in many(lambda key, shape: getattr(random, name)(key, shape, dtype)):
        assert ks_distance(sample, CDFS[name]) < 1.95 / math.sqrt(COUNT)  # exceeded once in a thousand


@pytest.mark.parametrize(
    "name, mean, variance, fourth", [("uniform", 0.5, 1 / 12, 1 / 80), ("normal", 0, 1, 3), ("exponential", 1, 1, 9)]
)
def test_moments_are_those_of_the_distribution(name, mean, variance, fourth):
    for sample in many(getattr(random, name)):
        error = 5 / math.sqrt(COUNT)
        assert abs(sample.mean() - mean) < error * math.sqrt(variance)
        assert abs(sample.var() - variance) < error * math.sqrt(fourth - variance**2)
        centred = (sample - sample.mean()) ** 4
        assert abs(centred.mean() - fourth) < error * centred.std()


def test_uniform_numbers_reach_zero_and_never_one():
    for sample in many(random.uniform):
        assert 0 <= sample.min() < 3e-5
        assert 1 - 3e-5 < sample.max() < 1
        assert torch.equal(sample * 2**24, (sample * 2**24).round())


def test_float64_uniform_numbers_have_53_bits():
    sample = random.uniform(Stream(1, seed=1).key(), (COUNT,), torch.float64)
    assert sample.min() >= 0 and sample.max() < 1
    multiples = sample * 2.0**53
    assert torch.equal(multiples, multiples.floor())
    assert (multiples.long() % 2).double().mean() == pytest.approx(0.5, abs=0.003)


def test_the_tails_of_normal_and_exponential_are_there_and_finite():
    normal, exponential = many(random.normal).flatten(), many(random.exponential).flatten()
    assert normal.isfinite().all() and exponential.isfinite().all()
    assert normal.min() < -4.4 and normal.max() > 4.4
    assert exponential.min() >= 0 and exponential.max() > 12


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97, 1000])
def test_integers_are_equally_frequent(count):
    for sample in many(lambda key, shape: random.integers(key, count, shape)):
        frequency = torch.bincount(sample.long(), minlength=count).double()
        assert len(frequency) == count
        expected = COUNT / count
        chi_square = ((frequency - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (count - 1)) <= 4 * math.sqrt(2 * count)


@pytest.mark.parametrize("count", [2**31, 2**31 - 1, 2**30 + 1])
def test_integers_reach_over_large_counts(count):
    drawn = random.integers(Stream(1, seed=1).key(), count, (COUNT,))
    assert drawn.dtype == torch.int64
    assert 0 <= drawn.min() < count * 3e-5
    assert count * (1 - 3e-5) < drawn.max() < count


def test_integers_take_a_count_for_each_place():
    counts = torch.tensor([[1, 2, 3], [10, 100, 2**31]])
    drawn = random.integers(Stream(50_000, seed=1).key(), counts, (2, 3))
    assert (drawn >= 0).all() and (drawn < counts).all()
    assert torch.allclose(drawn.double().mean(0), (counts.double() - 1) / 2, rtol=0.02)


@pytest.mark.parametrize(
    "one, other",
    [
        (dict(seed=1), dict(seed=2)),
        (dict(seed=1), dict(seed=1, tag=1)),
        (dict(seed=1), dict(seed=1, first_index=1)),
        (dict(seed=1), dict(seed=1 + 2**32)),
        (dict(seed=0), dict(seed=2**63)),
    ],
    ids=str,
)
def test_neighbouring_streams_are_uncorrelated(one, other):
    first, second = (random.normal(Stream(1, **what).key(), (100_000,))[0] for what in (one, other))
    assert abs((first * second).mean()) < 5 / math.sqrt(100_000)


def test_neighbouring_envs_episodes_and_draws_are_uncorrelated():
    stream = Stream(100_000, seed=1)
    first = random.normal(stream.key())
    stream.next_draw()
    second = random.normal(stream.key())
    stream.next_episode(torch.ones(100_000, dtype=torch.bool))
    third = random.normal(stream.key())
    for a, b in ((first, second), (first, third), (second, third), (first[1:], first[:-1])):
        assert abs((a * b).mean()) < 5 / math.sqrt(100_000)


# Streams.


@pytest.mark.parametrize("num_envs, first_index", [(1, 0), (1, 63), (7, 20), (64, 0)])
def test_a_stream_depends_on_its_global_index_alone(num_envs, first_index):
    whole, shard = Stream(64, seed=9), Stream(num_envs, first_index, seed=9)
    for stream in (whole, shard):
        stream.next_episode(torch.ones(len(stream.env), dtype=torch.bool))
        stream.next_draw()
    assert torch.equal(
        random.uniform(whole.key(), (3,))[first_index : first_index + num_envs], random.uniform(shard.key(), (3,))
    )


def state(stream):
    return {name: buffer.clone() for name, buffer in stream.named_buffers()}


def moved(stream, before):
    return {
        name: (buffer != before[name]).tolist() for name, buffer in stream.named_buffers() if (buffer != before[name]).any()
    }


@pytest.fixture
def used_stream():
    stream = Stream(3, first_index=4, seed=9)
    for mask in ([True, True, True], [True, False, False]):
        stream.next_episode(torch.tensor(mask))
    for _ in range(5):
        stream.next_draw()
    return stream


def test_next_draw_moves_the_draw_of_every_env(used_stream):
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_draw()
    assert moved(used_stream, before) == {"draw": [True] * 3}
    assert (random.uniform(used_stream.key()) != numbers).all()


def test_next_episode_moves_the_masked_envs_to_the_start_of_their_next_episode(used_stream):
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_episode(torch.tensor([True, False, True]))
    assert moved(used_stream, before) == {"episode": [True, False, True], "draw": [True, False, True]}
    assert torch.equal(used_stream.episode, before["episode"] + torch.tensor([1, 0, 1]))
    assert used_stream.draw.tolist() == [0, 5, 0]
    assert (random.uniform(used_stream.key()) != numbers).tolist() == [True, False, True]


def test_a_seeded_stream_is_before_its_first_episode_and_next_episode_begins_it(used_stream):
    assert Stream(3, seed=9).episode.tolist() == [-1, -1, -1]
    used_stream.seed(9, torch.tensor([True, True, False]))
    assert used_stream.episode.tolist() == [-1, -1, 0] and used_stream.draw.tolist() == [0, 0, 5]
    used_stream.next_episode(torch.tensor([True, False, False]))
    assert used_stream.episode.tolist() == [0, -1, 0]


def test_seed_begins_the_masked_envs_afresh_and_leaves_the_others(used_stream):
    numbers, fresh = random.uniform(used_stream.key()), Stream(3, first_index=4, seed=77)
    used_stream.seed(77, torch.tensor([True, False, True]))
    for name, buffer in used_stream.named_buffers():
        assert torch.equal(buffer[[0, 2]], dict(fresh.named_buffers())[name][[0, 2]])
    drawn = random.uniform(used_stream.key())
    assert torch.equal(drawn[[0, 2]], random.uniform(fresh.key())[[0, 2]])
    assert torch.equal(drawn[1], numbers[1])


def test_a_key_draws_the_same_numbers_whenever_it_is_used(used_stream):
    before = state(used_stream)
    first, second = (random.normal(used_stream.key(), (3,)) for _ in range(2))
    assert torch.equal(first, second)
    assert moved(used_stream, before) == {}


def test_another_tag_gives_other_numbers(used_stream):
    key = used_stream.key()
    assert (random.uniform(key, (100,)) != random.uniform(key._replace(tag=key.tag + 1), (100,))).float().mean() > 0.99


def test_the_eight_tags_of_each_of_the_32_streams_are_its_own():
    tags = [Stream(1, tag=tag, seed=0).key().tag + offset for tag in range(32) for offset in range(8)]
    assert sorted(tags) == list(range(256))


def test_without_a_seed_two_streams_differ():
    assert (random.uniform(Stream(3).key()) != random.uniform(Stream(3).key())).all()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_64_bit_seed_is_taken_whole(seed):
    stream = Stream(2, seed=seed)
    assert stream.seed_low.tolist() == [seed % 2**32] * 2
    assert stream.seed_high.tolist() == [seed >> 32] * 2


def test_streams_are_state_of_running_episodes_and_not_learned():
    assert Stream(2).state_dict() == {}


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    stream = Stream(4)
    for draw in DRAWS.values():
        draw(stream.key())
    stream.seed(3, torch.ones(4, dtype=torch.bool))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["uniform", "uniform float64", "integers", "integers with counts", "bits"])
def test_on_cuda_the_numbers_are_those_of_the_cpu(name):
    cpu, cuda = (Stream(64, first_index=3, tag=2, device=device, seed=2**63 + 5).key() for device in ("cpu", "cuda"))
    draw = (lambda key: random.integers(key, 2**31, (5, 2))) if name == "integers with counts" else DRAWS[name]
    assert torch.equal(draw(cuda).cpu(), draw(cpu))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_on_cuda_transformed_numbers_agree_to_rounding(name):
    cpu, cuda = (Stream(64, device=device, seed=5).key() for device in ("cpu", "cuda"))
    assert torch.allclose(getattr(random, name)(cuda, (1000,)).cpu(), getattr(random, name)(cpu, (1000,)), atol=1e-5)


def test_the_parts_of_a_key_draw_numbers_of_their_own():
    key = Stream(100, seed=3).key()
    draws = [random.uniform(one, (50,)).flatten() for one in (key, key.part(1), key.part(2), key.part(255))]
    assert (torch.corrcoef(torch.stack(draws)) - torch.eye(4)).abs().max() < 0.06
    for tag in range(256):
        assert not torch.equal(random.bits(key._replace(tag=tag), 4), random.bits(key.part(1), 4))


@pytest.mark.parametrize("number", [0, 256, -1])
def test_a_key_has_parts_1_to_255(number):
    with pytest.raises(ValueError, match=f"Key.part needs a number from 1 to 255, but got {number}"):
        Stream(1, seed=0).key().part(number)


@pytest.mark.parametrize("arguments", [dict(num_envs=1, tag=32), dict(num_envs=2, first_index=2**24 - 1)])
def test_a_stream_beyond_the_counter_is_refused(arguments):
    with pytest.raises(ValueError, match="Stream needs"):
        Stream(**arguments)
