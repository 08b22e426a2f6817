"""Codebooks: lengths that no prefix code beats, shares that add up, and a receiver who is told both."""

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

# Large alphabets take their time; `HYPOTHESIS_PROFILE=wide` looks further here, too.
FEWER = settings(max_examples=settings().max_examples // 4)

counts_of_few = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**19)), min_size=2, max_size=40).filter(
    lambda counts: sum(count > 0 for count in counts) >= 2
)
counts_of_many = st.builds(
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
    """Bits of an optimal prefix code with a longest length: every way to share out Kraft's sum, symbol by symbol."""
    best = {0: 0}  # bits, by how much of 2^limit is taken
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
    assert sum(Fraction(1, 2**length) for length in used) == 1, "the code is not complete"
    assert max(used) <= limit_for(len(used))
    bits, longest = huffman_cost(counts)
    assert bits_of(counts, lengths) >= bits
    if longest <= limit_for(len(used)):
        assert bits_of(counts, lengths) == bits, "a shorter code is known"
    return lengths


@given(counts_of_few)
def test_lengths_are_optimal_for_few_symbols(counts):
    check_lengths(counts)


@FEWER
@given(counts_of_many)
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
def test_fibonacci_counts_meet_the_limit(used):
    # Without a limit their longest code has one bit less than there are symbols.
    counts = fibonacci(used)
    assert huffman_cost(counts)[1] == used - 1
    lengths = check_lengths(counts)
    assert max(lengths) == min(used - 1, 12)


@pytest.mark.parametrize("seed", range(15))
def test_where_the_limit_binds_no_code_within_it_is_shorter(seed):
    dice = random.Random(seed)
    counts = [int(2 ** (dice.random() * 19)) for _ in range(13)]
    if seed % 3 == 0:  # so skewed that the limit of 12 must bind
        counts = [2 ** min(i, 18) + dice.randrange(3) for i in range(15)]
        assert huffman_cost(counts)[1] > 12
    elif seed % 3 == 1:
        counts = fibonacci(16)
        dice.shuffle(counts)
    assert bits_of(counts, check_lengths(counts)) == limited_cost(counts, 12)


@pytest.mark.parametrize("used", [2, 3, 40, 300, 4096])
def test_codes_are_canonical_and_no_code_begins_another(used):
    dice = random.Random(used)
    lengths = code_tables.code_lengths([int(2 ** (dice.random() * 12)) for _ in range(used)])
    codes = [
        f"{code:0{length}b}"[::-1] for code, length in zip(code_tables.canonical_codes(lengths), lengths, strict=True)
    ]  # as they are read
    ordered = sorted(range(used), key=lambda symbol: (lengths[symbol], symbol))
    assert [codes[s] for s in ordered] == sorted(codes), "codes ascend by length, then by symbol"
    for here, there in zip(sorted(codes), sorted(codes)[1:], strict=False):
        assert not there.startswith(here)


# ------------------------------------------------------------------------------------------------------------ shares


def check_shares(counts: list[int], scale: int) -> list[int]:
    shares = code_tables.share_out(counts, scale)
    assert sum(shares) == 1 << scale
    assert [share > 0 for share in shares] == [count > 0 for count in counts]
    assert max(shares) < 1 << scale, "a share of everything would be a constant"
    return shares


@FEWER
@given(counts_of_few, st.sampled_from([12, 15]))
def test_shares_of_few_symbols_add_up(counts, scale):
    check_shares(counts, scale)


@FEWER
@given(counts_of_many, st.sampled_from([12, 15]))
def test_shares_of_many_symbols_add_up(counts, scale):
    shares = check_shares(counts, scale)
    n = sum(counts)
    for share, count in zip(shares, counts, strict=True):
        # What the size limit of a chunk rests on: no symbol is cut to less than a third of its share.
        assert 3 * share * n >= count << scale


@pytest.mark.parametrize("scale, used", [(12, 1024), (15, 4096)])
def test_shares_are_not_cut_to_less_than_a_third(scale, used):
    # Half the symbols want 2.99 and get 2, from which the other half, which want next to nothing, take another.
    for rare in (used // 4, used // 2, used - 300, used - 30, used - 3):
        counts = [1] * rare + [1495] * (used - rare)
        counts[-1] += (1 << 19) - sum(counts) if sum(counts) < 1 << 19 else 0
        shares, n = check_shares(counts, scale), sum(counts)
        assert all(3 * share * n >= count << scale for share, count in zip(shares, counts, strict=True)), rare


@pytest.mark.parametrize("scale, used", [(12, 2), (12, 1024), (15, 2), (15, 1025), (15, 4096)])
def test_rare_symbols_get_the_least_share_and_frequent_ones_nearly_theirs(scale, used):
    counts = [1] * (used - 1) + [(1 << 19) - used + 1]
    shares = check_shares(counts, scale)
    assert set(shares[:-1]) == {1}
    assert shares[-1] == (1 << scale) - used + 1


@pytest.mark.parametrize("scale", [12, 15])
def test_shares_that_divide_exactly_are_exact(scale):
    whole = 1 << scale
    counts = [whole // 2, whole // 4, 0, whole // 8, whole // 8]
    assert check_shares(counts, scale) == counts
    assert check_shares([3 * count for count in counts], scale) == counts


def test_a_fixed_logarithm_is_the_logarithm():
    for share in range(1, 1 << 15):
        exact = math.log2(share) * 65536
        assert exact - 1.01 < code_tables.log2_fixed(share) <= exact + 1e-6


# ------------------------------------------------------------------------------------------------------------- books


def write_and_read(classes: list[int], shares: list[int] | None) -> None:
    data = code_tables.write_book(classes, shares)
    for behind in (b"", b"\x00", b"\xff\xff\xff"):
        found, read, taken = code_tables.read_book(data + behind, len(classes), with_shares=shares is not None)
        assert (found, taken) == (classes, len(data))
        assert shares is None or read == shares
    for end in range(len(data)):
        with pytest.raises(FrameError, match="cut short"):
            code_tables.read_book(data[:end], len(classes), with_shares=shares is not None)


classes_of = st.lists(st.one_of(st.just(0), st.integers(1, 15)), min_size=1, max_size=60).filter(any)


@given(classes_of)
def test_a_book_of_lengths_is_read_back(classes):
    write_and_read(classes, None)


@FEWER
@given(counts_of_few, st.sampled_from([12, 15]))
def test_a_book_of_shares_is_read_back(counts, scale):
    shares = code_tables.share_out(counts, scale)
    write_and_read([share.bit_length() for share in shares], shares)


@pytest.mark.parametrize("gap", [1, 2, 3, 4, 7, 8, 1023, 1024, 4093, 4094])
def test_runs_of_any_length_are_read_back(gap):
    write_and_read([1, *[0] * gap, 1], None)
    classes = [*[0] * (4094 - gap), 3, *[0] * gap, 5]
    found, _, _ = code_tables.read_book(code_tables.write_book(classes), 4096, with_shares=False)
    assert found == classes


def test_a_book_is_written_as_the_format_says():
    # u16 first symbol 2, u16 last less first 5, then: same as 8; one less; one more; class 2; a run of 2; same.
    bits = f"{2:016b}"[::-1] + f"{5:016b}"[::-1] + "0" + "100" + "110" + "0100" + "111" + "010" + "0" + "0"
    bits += "0" * (-len(bits) % 8)
    data = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    classes = [0, 0, 8, 7, 2, 0, 0, 2]
    assert code_tables.write_book(classes) == data
    assert code_tables.read_book(data, 8, with_shares=False)[0] == classes
