"""Entropy coding: core and reference write the same bytes for any number of threads, and symbols round-trip."""

from __future__ import annotations

import hashlib
import random
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from laconic import InputError, _core
from laconic.kernels import cpu, reference
from laconic.kernels.interface import LinearGrid, UniformGrid
from laconic.kernels.reference import code_tables, entropy_coding
from laconic.kernels.sections import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding, coded_max_nbytes, symbol_dtype
from symbols import CODINGS, KINDS, PURE, code, make, normal, raw_nbytes
from waiting import in_threads

# More Huffman streams from 2,048 and 65,536 symbols on, more rANS states from 16,384 on, another chunk after 2^19.
EDGES = (2048, 16384, 65536)
ALPHABETS = (2, 3, 16, 200, 256, 257, 1000, 4096)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def check_round_trip(symbols, alphabet, section):
    """Decode with the core as symbols, through a table, and accumulated."""
    n = symbols.numel()
    assert torch.equal(cpu.decode_symbols(section, n, alphabet), symbols)
    table = normal(alphabet, seed=9).float()
    values, out = table[symbols.long()], torch.full((n,), torch.nan)
    cpu.decode_values(section, table, out, None)
    assert laws.same_bits(out, values)
    start = normal(n, seed=10).float()
    out = start.clone()
    cpu.decode_values(section, table, out, -0.3)
    assert laws.same_bits(out, start + values * torch.tensor(-0.3))


def check_backends_agree(symbols, alphabet, codings=CODINGS):
    """Check that core and reference write the same section, and that both decode it."""
    for coding in codings:
        section = code(cpu, symbols, alphabet, coding)
        expected = code(reference, symbols, alphabet, coding)
        assert torch.equal(section, expected), (symbols.numel(), alphabet, coding)
        assert torch.equal(reference.decode_symbols(expected, symbols.numel(), alphabet), symbols)
        check_round_trip(symbols, alphabet, section)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_sections_agree_and_round_trip(kind, alphabet):
    for n in (1, 2, 3, 7, 64, 257, 1000):
        check_backends_agree(make(kind, n, alphabet), alphabet)


@pytest.mark.parametrize("part", range(10))
def test_lengths_up_to_a_thousand_agree(part):
    for n in range(100 * part + 1, 100 * part + 101, 2):
        alphabet = (5, 2, 33)[n % 3]
        check_backends_agree(make(("normal", "two symbols", "geometric")[n % 3], n, alphabet), alphabet, PURE)


@pytest.mark.parametrize("alphabet", [2, 37, 256, 4096])
@pytest.mark.parametrize("coding", (*PURE, Coding.RANS_AUTO), ids=lambda coding: coding.name)
def test_every_length_up_to_a_thousand_reads_back(alphabet, coding):
    whole = make("normal", 1000, alphabet)
    for n in range(1, 1001):
        symbols = whole[:n].clone()
        section = code(cpu, symbols, alphabet, coding)
        assert torch.equal(cpu.decode_symbols(section, n, alphabet), symbols), n


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("edge, alphabets", [(2048, (2, 40, 256, 1000)), (16384, (2, 256, 1000)), (65536, (40, 300))])
def test_sections_agree_where_more_streams_and_states_begin(edge, alphabets, step):
    for alphabet in alphabets:
        check_backends_agree(make("normal", edge + step, alphabet), alphabet, PURE)


@pytest.mark.slow
@pytest.mark.parametrize("alphabet", [2, 256, 4096])
@pytest.mark.parametrize("n", [65535, 65536, 65537, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_sections_agree_at_large_sizes(n, alphabet):
    check_backends_agree(make("normal", n, alphabet), alphabet)


# With 30 streams the last one can be up to 29 symbols shorter than the others: these sizes cover each difference.
@pytest.mark.parametrize("alphabet", [2, 256, 4096])
@pytest.mark.parametrize("kind", ["normal", "skewed", "all but equal", "fibonacci"])
def test_large_sections_round_trip(alphabet, kind):
    sizes = {e + d for e in EDGES for d in (-1, 0, 1, 31, 33)} | {65536 + d for d in range(30)}
    whole = make(kind, max(sizes), alphabet)
    for n in sorted(sizes):
        symbols = whole[:n].clone()
        for coding in PURE:
            check_round_trip(symbols, alphabet, code(cpu, symbols, alphabet, coding))


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("alphabet, kind", [(2, "skewed"), (30, "one symbol"), (256, "normal"), (4096, "normal")])
def test_thread_count_does_not_change_sections(n, alphabet, kind):
    symbols = make(kind, n, alphabet)
    for coding in CODINGS:
        sections = []
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            sections.append(code(cpu, symbols, alphabet, coding))
            assert torch.equal(cpu.decode_symbols(sections[0], n, alphabet), symbols), (coding, threads)
        assert all(torch.equal(section, sections[0]) for section in sections)
    check_round_trip(symbols, alphabet, sections[0])


@pytest.mark.parametrize("alphabet", [2, 256, 4096])
def test_no_symbols_take_no_bytes(alphabet):
    empty = torch.empty(0, dtype=symbol_dtype(alphabet))
    for coding in CODINGS:
        assert code(cpu, empty, alphabet, coding).numel() == 0
    assert coded_max_nbytes(0, alphabet) == 0


def symbols_of(counts: list[int], seed: int = 0) -> torch.Tensor:
    """Return symbols with these counts, in random order."""
    each = torch.tensor(counts)
    symbols = torch.arange(len(counts)).repeat_interleave(each)
    order = torch.randperm(symbols.numel(), generator=torch.Generator().manual_seed(seed))
    return symbols[order].to(symbol_dtype(len(counts)))


@settings(max_examples=settings().max_examples // 2)
@given(
    st.one_of(
        st.lists(st.integers(0, 40), min_size=1, max_size=20),
        st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 200]), min_size=1, max_size=300),
        st.integers(2, 13).map(lambda used: [2**i for i in range(used)]),
        st.builds(lambda a, b, gap: [a, *[0] * gap, b], st.integers(1, 9), st.integers(1, 3000), st.integers(0, 4000)),
        st.builds(lambda used, more: [1] * used + [more], st.integers(1, 1500), st.integers(1, 500)),
    ).filter(any),
    st.integers(0, 9),
)
def test_sections_of_any_counts_agree(counts, seed):
    check_backends_agree(symbols_of(counts, seed), len(counts))


@pytest.mark.parametrize("used", [12, 14, 20, 26])
def test_counts_that_reach_the_length_limit_agree(used):
    counts = [1, 1]
    while len(counts) < used:
        counts.append(min(counts[-1] + counts[-2], 20_000))
    check_backends_agree(symbols_of(counts), used, PURE)


# Codes of 13, 14 and 15 bits need the decoder's largest tables, and three instead of four symbols per step.
@pytest.mark.parametrize("used, longest", [(600, 13), (1100, 14), (2100, 15), (4096, 15)])
def test_long_codes_agree(used, longest):
    counts = [max(1, 3000 >> (i % 14)) if i < 40 else 1 for i in range(used)]
    symbols = symbols_of(counts)
    check_backends_agree(symbols, used, PURE)
    lengths = code_tables.code_lengths(counts)
    assert max(lengths) >= longest - 2
    large = symbols.repeat(-(-70_000 // symbols.numel()))
    check_round_trip(large, used, code(cpu, large, used, Coding.HUFFMAN))
    check_round_trip(large, used, code(cpu, large, used, Coding.RANS))


def modes(section, n):
    numbers = cpu.chunk_modes(section, n).tolist()
    assert numbers == reference.chunk_modes(section, n).tolist()
    return numbers


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
def test_constant_chunk_takes_three_bytes(coding):
    for alphabet in (2, 256, 4096):
        section = code(cpu, make("one symbol", CHUNK + 5, alphabet), alphabet, coding)
        assert section.numel() == 2 * (4 + 3)
        assert modes(section, CHUNK + 5) == [CONSTANT, CONSTANT]


def test_pure_coder_uses_only_its_mode():
    for kind in ("even", "normal", "skewed"):
        for n in (3, 300, 70_000):
            symbols = make(kind, n, 200)
            for coding, mode in ((Coding.HUFFMAN, HUFFMAN), (Coding.RANS, RANS)):
                used = modes(code(cpu, symbols, 200, coding), n)
                assert used == [mode if len(set(symbols.tolist())) > 1 else CONSTANT]


def test_auto_chooses_the_smallest_mode():
    for coding in (Coding.HUFFMAN_AUTO, Coding.RANS_AUTO):
        assert modes(code(cpu, make("even", 5000, 256), 256, coding), 5000) == [RAW]
        assert modes(code(cpu, make("skewed", 200_000, 256), 256, coding), 200_000) == [RANS]
        assert modes(code(cpu, make("one symbol", 900, 9), 9, coding), 900) == [CONSTANT]
        # Powers of two: the Huffman code is perfect, and its table is smaller.
        dyadic = symbols_of([1 << (9 - i) for i in range(9)] + [1])
        assert modes(code(cpu, dyadic, 10, coding), dyadic.numel()) == [HUFFMAN]


def test_backends_prefer_the_named_coder_alike():
    """Sizes differ by about one byte in 2,048, the threshold of the preference."""
    chosen = set()
    for each in range(330, 450, 7):
        symbols = symbols_of([each] * 31)
        check_backends_agree(symbols, 31, (Coding.HUFFMAN_AUTO, Coding.RANS_AUTO))
        sections = [code(cpu, symbols, 31, coding) for coding in (Coding.HUFFMAN_AUTO, Coding.RANS_AUTO)]
        chosen.add(tuple(modes(section, symbols.numel())[0] for section in sections))
    assert (HUFFMAN, RANS) in chosen, "no case was close to the threshold"


def check_plans_agree(counts):
    """Check that the core plans a chunk with these counts as the reference does, which need not code it."""
    symbols, alphabet = symbols_of(counts), len(counts)
    for coding in CODINGS:
        section = code(cpu, symbols, alphabet, coding)
        mode = entropy_coding.choose(counts, alphabet, coding)
        assert modes(section, symbols.numel()) == [mode], coding
        if mode == HUFFMAN:
            nbytes, lengths = entropy_coding.huffman_size(counts)
            table = code_tables.write_code_table(lengths)
            assert section.numel() == 4 + nbytes
        elif mode == RANS:
            _, scale, frequencies = entropy_coding.rans_size(counts)
            classes = [frequency.bit_length() for frequency in frequencies]
            table = bytes([scale]) + code_tables.write_code_table(classes, frequencies)
        else:
            continue
        assert laws.bytes_of(section)[5 : 5 + len(table)] == table, coding


@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy tail", "geometric", "skewed", "even", "fibonacci"])
def test_plans_of_large_chunks_agree(kind):
    for n, alphabet in ((CHUNK, 40), (CHUNK, 1000), (100_000, 256), (70_000, 4096)):
        check_plans_agree(torch.bincount(make(kind, n, alphabet).long(), minlength=alphabet).tolist())


def test_plans_agree_where_the_larger_scale_saves_little():
    for n in range(30_000, 500_000, 60_000):
        for rare in (5, 10, 20):
            check_plans_agree([1] * rare + [n // 3, n - n // 3])
    rng = random.Random(1)
    for _ in range(25):
        weights = [rng.random() ** rng.choice((1, 4, 10, 20)) + 10 ** -rng.uniform(2, 6) for _ in range(200)]
        check_plans_agree([max(1, int(300_000 * weight / sum(weights))) for weight in weights])


@pytest.mark.parametrize("rare", [50, 100, 200, 300])
def test_equal_counts_are_reduced_in_the_same_order(rare):
    for often in (5, 7, 12):
        check_plans_agree([1] * rare + [1000] * often)
        check_plans_agree([1000] * often + [1] * rare)


def test_each_chunk_is_coded_independently():
    parts = [make(kind, CHUNK, 256) for kind in ("skewed", "even", "one symbol")] + [make("even", 999, 256)]
    section = code(cpu, torch.cat(parts), 256, Coding.HUFFMAN_AUTO)
    assert modes(section, 3 * CHUNK + 999) == [RANS, HUFFMAN, CONSTANT, RAW]
    alone = [code(cpu, part, 256, Coding.HUFFMAN_AUTO) for part in parts]
    together = [part[:4] for part in alone] + [part[4:] for part in alone]
    assert torch.equal(section, torch.cat(together))


@pytest.mark.parametrize("alphabet", [1, 2, 3, 255, 256, 257, 4095, 4096])
def test_interface_and_core_agree_on_the_maximum_size(alphabet):
    for n in (0, 1, 255, 256, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 25_000_000, 2**34):
        assert coded_max_nbytes(n, alphabet) == _core.coded_max_nbytes(n, alphabet)


def test_maximum_size_grows_with_symbols_and_alphabet():
    for alphabet in (2, 3, 256, 4096):
        limits = [coded_max_nbytes(n, alphabet) for n in (1, 2, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)]
        assert limits == sorted(limits)
    assert [coded_max_nbytes(5000, a) for a in range(1, 4097)] == sorted(
        coded_max_nbytes(5000, a) for a in range(1, 4097)
    )


def expensive_counts(alphabet: int) -> list[list[int]]:
    """Return counts whose coded size exceeds their entropy most, such as frequencies just below 3 cut to 1."""
    half = alphabet // 2
    return [
        [1] * alphabet, [2] * alphabet, [1] * half + [1495] * (alphabet - half),
        [1] * (alphabet - 2) + [100_000, 100_000], [3] + [1] * (alphabet - 1),
        [max(1, int(2**19 / (i + 1) ** 2 / 2)) for i in range(alphabet)],
    ]  # fmt: skip


@pytest.mark.parametrize("alphabet", [2, 3, 5, 16, 250, 256, 700, 1024, 1025, 4096])
def test_sections_never_exceed_their_maximum_size(alphabet):
    for counts in expensive_counts(alphabet):
        symbols = symbols_of(counts)[: 2 * CHUNK]
        for coding in CODINGS:
            section = code(cpu, symbols, alphabet, coding)  # checks the maximum size and the bytes behind it
            assert torch.equal(cpu.decode_symbols(section, symbols.numel(), alphabet), symbols)


@pytest.mark.parametrize("alphabet", [2, 5, 64, 256, 1000, 4096])
def test_huffman_nbytes_is_the_size_of_the_section(alphabet, threads):
    rng = random.Random(alphabet)
    rows = []
    for _ in range(12):
        skew, used = rng.random() * 8, rng.randint(1, alphabet)
        counts = [int(2 ** (rng.random() * skew)) for _ in range(used)] + [0] * (alphabet - used)
        rng.shuffle(counts)
        rows.append(counts)
    rows += [counts for counts in expensive_counts(alphabet) if sum(counts) <= CHUNK]
    rows += [[0] * (alphabet - 1) + [77], [0] * alphabet]
    sizes = cpu.huffman_nbytes(torch.tensor(rows)).tolist()
    for counts, nbytes in zip(rows, sizes, strict=True):
        assert nbytes == code(cpu, symbols_of(counts), alphabet, Coding.HUFFMAN).numel()


def test_huffman_nbytes_of_a_full_chunk():
    for kind in ("normal", "skewed", "even", "heavy tail"):
        for alphabet in (16, 256, 4096):
            symbols = make(kind, CHUNK, alphabet)
            counts = torch.bincount(symbols.long(), minlength=alphabet).view(1, -1)
            wanted = code(cpu, symbols, alphabet, Coding.HUFFMAN).numel()
            assert cpu.huffman_nbytes(counts).tolist() == [wanted]


def test_huffman_nbytes_rejects_impossible_counts():
    for counts in (
        torch.ones(5),
        torch.ones(2, 4097),
        torch.ones(2, 0),
        torch.tensor([[CHUNK, 1]]),
        torch.tensor([[5, -1]]),
        torch.tensor([[2**31, 2**31]]),
    ):
        with pytest.raises(InputError, match="counts must"):
            cpu.huffman_nbytes(counts.long())
    assert cpu.huffman_nbytes(torch.zeros(0, 7, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("levels", [2, 33, 256, 257, 4096])
@pytest.mark.parametrize("kind", ["linear", "uniform"])
def test_values_are_coded_as_their_symbols(levels, kind):
    for n in (2, 15, 16, 17, 300, 20_000, 140_001):
        x = normal(n, seed=n).float()
        # A linear grid clamps values outside of it; a uniform grid always covers the range of the values.
        grid = LinearGrid(1.0, -4.0, levels / 8.0, levels)
        if kind == "uniform":
            grid = UniformGrid(float(x.min()), float(x.max()), levels)
        symbols = reference.grid_symbols(x, grid)
        assert symbols.dtype == symbol_dtype(levels)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(cpu.grid_symbols(x, grid), symbols)
            for coding in CODINGS:
                section = torch.empty(coded_max_nbytes(n, levels), dtype=torch.uint8)
                nbytes = cpu.encode_values(x, grid, coding, section)
                assert torch.equal(section[:nbytes], code(cpu, symbols, levels, coding))


def test_packed_symbols_agree_and_round_trip():
    for n in (1, 255, 256, 257, 319, 320, 321, 1000):
        for alphabet, trits in ((3, True), *((alphabet, False) for alphabet in (2, 3, 16, 256, 300, 4096))):
            symbols = make("even", n, alphabet)
            nbytes = n // 320 * 64 + -(-(n % 320) // 5) if trits else raw_nbytes(n, alphabet)
            written, expected = torch.full((nbytes,), 7, dtype=torch.uint8), torch.full((nbytes,), 9, dtype=torch.uint8)
            cpu.pack_symbols(symbols, alphabet, trits, written)
            reference.pack_symbols(symbols, alphabet, trits, expected)
            assert torch.equal(written, expected), (n, alphabet, trits)
            for backend in (cpu, reference):
                assert torch.equal(backend.unpack_symbols(written, n, alphabet, trits), symbols)


def test_sections_decode_at_any_address():
    for coding in CODINGS:
        for n in (300, 20_000, 66_000):
            symbols = make("normal", n, 200)
            section = code(cpu, symbols, 200, coding)
            for shift in (1, 2, 3, 7):
                buffer = torch.full((section.numel() + 16,), 0xFF, dtype=torch.uint8)
                buffer[shift : shift + section.numel()] = section
                assert torch.equal(cpu.decode_symbols(buffer[shift : shift + section.numel()], n, 200), symbols)


def test_python_threads_do_not_share_a_workspace():
    """Each thread of the core keeps its own tables, while chunks of different alphabets and modes are coded at once."""
    jobs = [
        (make(kind, n, alphabet), alphabet, coding)
        for kind in ("normal", "geometric")
        for n in (3000, 40_000, CHUNK + 9)
        for alphabet, coding in ((5, Coding.RANS), (256, Coding.HUFFMAN), (4000, Coding.RANS), (900, Coding.HUFFMAN))
    ]
    wanted = [code(cpu, *job) for job in jobs]
    failures, start = [], threading.Barrier(4)

    def work(part):
        torch.set_num_threads(1 + part % 2)
        start.wait()
        for _ in range(3):
            for at in range(part, len(jobs) + part):
                (symbols, alphabet, coding), section = jobs[at % len(jobs)], wanted[at % len(jobs)]
                if not torch.equal(code(cpu, symbols, alphabet, coding), section):
                    failures.append(("encode", at))
                if not torch.equal(cpu.decode_symbols(section, symbols.numel(), alphabet), symbols):
                    failures.append(("decode", at))

    in_threads(*(partial(work, part) for part in range(4)))
    assert failures == []


def digest() -> str:
    """Return one hash over sections, symbols and values of many kinds, alphabets and sizes, for ``test_parity``."""
    sha = hashlib.sha256()
    for alphabet in (2, 100, 256, 1500, 4096):
        table = normal(alphabet, seed=3).float()
        for kind in ("normal", "skewed", "fibonacci", "all but equal"):
            whole = make(kind, 65_541, alphabet)
            for n in (1, 33, 2048, 16_390, 65_541):
                symbols = whole[:n].clone()
                for coding in PURE:
                    section = code(cpu, symbols, alphabet, coding)
                    sha.update(laws.bytes_of(section))
                    sha.update(laws.bytes_of(cpu.decode_symbols(section, n, alphabet)))
                    out = torch.ones(n)
                    cpu.decode_values(section, table, out, 0.7)
                    sha.update(laws.bytes_of(out))
    return sha.hexdigest()
