"""Code tables: optimal Huffman lengths, rANS frequencies with the right sum, and the round trip of their bytes."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic import FrameError
from laconic.kernels.reference import code_tables
from symbols import huffman_cost

# Large alphabets are slow. `HYPOTHESIS_PROFILE=wide` tries more examples here, too.
FEWER = settings(max_examples=settings().max_examples // 4)

few_counts = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**19)), min_size=2, max_size=40).filter(
    lambda counts: sum(count > 0 for count in counts) >= 2
)
many_counts = st.builds(
    lambda seed, size, skew: [
        int(2 ** (random.Random(seed * 4096 + i).random() * skew)) - (random.Random(-seed - i).random() < 0.3)
        for i in range(size)
    ],
    st.integers(0, 2**20),
    st.integers(2, 600),
    st.floats(0, 12),
).filter(lambda counts: sum(count > 0 for count in counts) >= 2)


def limit_for(used: int) -> int:
    return min(15, max(12, math.ceil(math.log2(used)) + 3))


def limited_cost(counts: list[int], limit: int) -> int:
    """Return the bits of an optimal length-limited prefix code, by trying every way to fill Kraft's sum."""
    best = {0: 0}  # bits, by the part of 2^limit that is used
    for count in counts:
        following: dict[int, int] = {}
        for taken, bits in best.items():
            for length in range(1, limit + 1):
                place = taken + (1 << (limit - length))
                if place <= 1 << limit and bits + count * length < following.get(place, 1 << 60):
                    following[place] = bits + count * length
        best = following
    return min(best.values())


def bits_of(counts: list[int], lengths: list[int]) -> int:
    return sum(count * length for count, length in zip(counts, lengths, strict=True))


def check_lengths(counts: list[int]) -> list[int]:
    lengths = code_tables.code_lengths(counts)
    used = [length for length, count in zip(lengths, counts, strict=True) if count]
    assert [length > 0 for length in lengths] == [count > 0 for count in counts]
    assert sum(Fraction(1, 2**length) for length in used) == 1, "the code must be complete"
    assert max(used) <= limit_for(len(used))
    bits, longest = huffman_cost(counts)
    assert bits_of(counts, lengths) >= bits
    if longest <= limit_for(len(used)):
        assert bits_of(counts, lengths) == bits, "the code must be optimal"
    return lengths


@given(few_counts)
def test_lengths_are_optimal_for_few_symbols(counts):
    check_lengths(counts)


@FEWER
@given(many_counts)
def test_lengths_are_optimal_for_many_symbols(counts):
    check_lengths(counts)


@pytest.mark.parametrize("used", [2, 3, 5, 128, 129, 255, 256, 257, 511, 512, 1000, 2048, 2049, 4095, 4096])
def test_equal_counts_get_equal_lengths(used):
    lengths = check_lengths([7] * used)
    assert max(lengths) - min(lengths) <= 1 and max(lengths) == math.ceil(math.log2(used))


def fibonacci(used: int) -> list[int]:
    counts = [1, 1]
    while len(counts) < used:
        counts.append(counts[-1] + counts[-2])
    return counts


@pytest.mark.parametrize("used", [2, 5, 12, 13, 14, 16, 20, 25])
def test_fibonacci_counts_reach_the_length_limit(used):
    # Without a limit the longest code has one bit less than there are symbols.
    counts = fibonacci(used)
    assert huffman_cost(counts)[1] == used - 1
    lengths = check_lengths(counts)
    assert max(lengths) == min(used - 1, 12)


@pytest.mark.parametrize("seed", range(15))
def test_lengths_are_optimal_where_the_limit_binds(seed):
    rng = random.Random(seed)
    counts = [int(2 ** (rng.random() * 19)) for _ in range(13)]
    if seed % 3 == 0:  # so skewed that the limit of 12 binds
        counts = [2 ** min(i, 18) + rng.randrange(3) for i in range(15)]
        assert huffman_cost(counts)[1] > 12
    elif seed % 3 == 1:
        counts = fibonacci(16)
        rng.shuffle(counts)
    assert bits_of(counts, check_lengths(counts)) == limited_cost(counts, 12)


@pytest.mark.parametrize("used", [2, 3, 40, 300, 4096])
def test_codes_are_canonical_and_prefix_free(used):
    rng = random.Random(used)
    lengths = code_tables.code_lengths([int(2 ** (rng.random() * 12)) for _ in range(used)])
    codes = [
        f"{code:0{length}b}"[::-1] for code, length in zip(code_tables.canonical_codes(lengths), lengths, strict=True)
    ]  # in reading order
    ordered = sorted(range(used), key=lambda symbol: (lengths[symbol], symbol))
    assert [codes[s] for s in ordered] == sorted(codes), "codes must ascend by length, then by symbol"
    for code, following in zip(sorted(codes), sorted(codes)[1:], strict=False):
        assert not following.startswith(code)


def check_frequencies(counts: list[int], scale: int) -> list[int]:
    frequencies = code_tables.scale_frequencies(counts, scale)
    assert sum(frequencies) == 1 << scale
    assert [frequency > 0 for frequency in frequencies] == [count > 0 for count in counts]
    assert max(frequencies) < 1 << scale, "one symbol alone must be a constant chunk"
    return frequencies


@FEWER
@given(few_counts, st.sampled_from([12, 15]))
def test_frequencies_of_few_symbols_sum_to_the_scale(counts, scale):
    check_frequencies(counts, scale)


@FEWER
@given(many_counts, st.sampled_from([12, 15]))
def test_frequencies_of_many_symbols_sum_to_the_scale(counts, scale):
    frequencies = check_frequencies(counts, scale)
    n = sum(counts)
    for frequency, count in zip(frequencies, counts, strict=True):
        # The maximum size of a chunk relies on this: no frequency is below a third of its exact value.
        assert 3 * frequency * n >= count << scale


@pytest.mark.parametrize("scale, used", [(12, 1024), (15, 4096)])
def test_frequencies_are_at_least_a_third_of_their_exact_value(scale, used):
    # Half the symbols have an exact value of 2.99, rounded to 2, and lose another 1 to symbols that are raised to 1.
    for rare in (used // 4, used // 2, used - 300, used - 30, used - 3):
        counts = [1] * rare + [1495] * (used - rare)
        counts[-1] += (1 << 19) - sum(counts) if sum(counts) < 1 << 19 else 0
        frequencies, n = check_frequencies(counts, scale), sum(counts)
        pairs = zip(frequencies, counts, strict=True)
        assert all(3 * frequency * n >= count << scale for frequency, count in pairs), rare


@pytest.mark.parametrize("scale, used", [(12, 2), (12, 1024), (15, 2), (15, 1025), (15, 4096)])
def test_rare_symbols_get_frequency_1_and_the_frequent_one_the_rest(scale, used):
    counts = [1] * (used - 1) + [(1 << 19) - used + 1]
    frequencies = check_frequencies(counts, scale)
    assert set(frequencies[:-1]) == {1}
    assert frequencies[-1] == (1 << scale) - used + 1


@pytest.mark.parametrize("scale", [12, 15])
def test_frequencies_that_divide_exactly_are_exact(scale):
    whole = 1 << scale
    counts = [whole // 2, whole // 4, 0, whole // 8, whole // 8]
    assert check_frequencies(counts, scale) == counts
    assert check_frequencies([3 * count for count in counts], scale) == counts


def test_log2_fixed_matches_log2():
    for frequency in range(1, 1 << 15):
        exact = math.log2(frequency) * 65536
        assert exact - 1.01 < code_tables.log2_fixed(frequency) <= exact + 1e-6


def check_round_trip(classes: list[int], frequencies: list[int] | None) -> None:
    data = code_tables.write_code_table(classes, frequencies)
    for behind in (b"", b"\x00", b"\xff\xff\xff"):
        classes_read, read, taken = code_tables.read_code_table(
            data + behind, len(classes), with_frequencies=frequencies is not None
        )
        assert (classes_read, taken) == (classes, len(data))
        assert frequencies is None or read == frequencies
    for end in range(len(data)):
        with pytest.raises(FrameError, match="truncated code table"):
            code_tables.read_code_table(data[:end], len(classes), with_frequencies=frequencies is not None)


classes_of = st.lists(st.one_of(st.just(0), st.integers(1, 15)), min_size=1, max_size=60).filter(any)


@given(classes_of)
def test_table_of_lengths_round_trips(classes):
    check_round_trip(classes, None)


@FEWER
@given(few_counts, st.sampled_from([12, 15]))
def test_table_of_frequencies_round_trips(counts, scale):
    frequencies = code_tables.scale_frequencies(counts, scale)
    check_round_trip([frequency.bit_length() for frequency in frequencies], frequencies)


@pytest.mark.parametrize("gap", [1, 2, 3, 4, 7, 8, 1023, 1024, 4093, 4094])
def test_runs_of_any_length_round_trip(gap):
    check_round_trip([1, *[0] * gap, 1], None)
    classes = [*[0] * (4094 - gap), 3, *[0] * gap, 5]
    again, _, _ = code_tables.read_code_table(code_tables.write_code_table(classes), 4096, with_frequencies=False)
    assert again == classes


def test_table_bytes_match_the_format():
    # u16 first symbol 2, u16 last less first 5, then: same as 8; one less; one more; class 2; a run of 2; same.
    bits = f"{2:016b}"[::-1] + f"{5:016b}"[::-1] + "0" + "100" + "110" + "0100" + "111" + "010" + "0" + "0"
    bits += "0" * (-len(bits) % 8)
    data = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    classes = [0, 0, 8, 7, 2, 0, 0, 2]
    assert code_tables.write_code_table(classes) == data
    assert code_tables.read_code_table(data, 8, with_frequencies=False)[0] == classes
