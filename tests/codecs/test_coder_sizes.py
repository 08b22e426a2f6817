"""Sizes of coded sections, code tables included, beside their entropy, and of ``auto`` beside the smallest mode."""

from __future__ import annotations

import pytest
import torch

from laconic.kernels import cpu
from laconic.kernels.sections import CHUNK, Coding
from symbols import CODINGS, KINDS, code, entropy, huffman_cost, make, raw_nbytes, uniform

SPREADS = {
    **{f"normal in {2**bits} bins": ("normal", 2**bits) for bits in range(3, 13)},
    "normal in 500 bins": ("normal", 500), "laplace in 64 bins": ("laplace", 64),
    "laplace in 1024 bins": ("laplace", 1024), "heavy tail in 4096 bins": ("heavy tail", 4096),
    "geometric": ("geometric", 64), "two symbols": ("two symbols", 2), "two symbols of many": ("two symbols", 4096),
    "even in 200": ("even", 200), "even in 4096": ("even", 4096), "fibonacci": ("fibonacci", 20),
}  # fmt: skip


def check_sizes(symbols, alphabet, is_normal):
    least = entropy(symbols)
    a_symbol = least / symbols.numel()
    sizes = {coding: code(cpu, symbols, alphabet, coding).numel() for coding in CODINGS}
    if a_symbol > 3:
        most = 1.013 * least
        if not is_normal:  # a prefix code may cost more, whoever makes it: at most 0.6 % beyond one without a limit
            parts = (torch.bincount(part.long(), minlength=alphabet) for part in symbols.split(CHUNK))
            most = max(most, 1.006 * sum(huffman_cost(counts.tolist())[0] for counts in parts))
        assert 8 * sizes[Coding.HUFFMAN] <= most
    if a_symbol > 0.3:
        assert 8 * sizes[Coding.RANS] <= 1.01 * least
    chunks = -(-symbols.numel() // CHUNK)
    raw = 5 * chunks + sum(raw_nbytes(part.numel(), alphabet) for part in symbols.split(CHUNK))
    best = min(raw, sizes[Coding.HUFFMAN], sizes[Coding.RANS])
    for coding in (Coding.HUFFMAN_AUTO, Coding.RANS_AUTO):
        assert sizes[coding] <= 1.001 * best
    return a_symbol


@pytest.mark.parametrize("name", SPREADS)
def test_a_million_symbols_are_close_to_their_entropy(name):
    torch.set_num_threads(2)
    kind, alphabet = SPREADS[name]
    check_sizes(make(kind, 1_000_000, alphabet), alphabet, kind == "normal")


@pytest.mark.parametrize("p", [0.5, 0.6, 0.75, 0.9, 0.94, 0.946])
def test_two_symbols_of_any_skew_are_close_to_their_entropy(p):
    symbols = (uniform(1_000_000, 3) > p).to(torch.uint8)
    assert check_sizes(symbols, 2, False) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREADS)
def test_25_million_symbols_are_close_to_their_entropy(name):
    torch.set_num_threads(2)
    kind, alphabet = SPREADS[name]
    check_sizes(make(kind, 25_000_000, alphabet), alphabet, kind == "normal")


def test_below_0_3_bits_rans_is_close_to_the_entropy_and_huffman_is_not():
    symbols = (uniform(1_000_000, 4) > 0.9999).to(torch.uint8)
    least = entropy(symbols) / 8
    assert code(cpu, symbols, 2, Coding.RANS).numel() < 1.1 * least + 300
    assert code(cpu, symbols, 2, Coding.HUFFMAN).numel() >= symbols.numel() // 8


# What `auto` goes by is an estimate for rANS, good to a few bytes: it cannot know how full the last states will be.
TINY = 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alphabet", [2, 16, 100, 256, 4096])
def test_auto_is_never_worse_than_the_best_by_more_than_a_few_bytes(kind, alphabet):
    torch.set_num_threads(1)
    whole = make(kind, 40_000, alphabet)
    for n in (1, 2, 5, 30, 100, 600, 2047, 2048, 5000, 16383, 16384, 40_000):
        symbols = whole[:n].clone()
        sizes = {coding: code(cpu, symbols, alphabet, coding).numel() for coding in CODINGS}
        raw = 5 + raw_nbytes(n, alphabet)
        best = min(raw, sizes[Coding.HUFFMAN], sizes[Coding.RANS])
        # Symbols that take turns are no draw: rANS may cost a little more, or less, than their frequencies say.
        beyond = 1.003 if kind == "all but equal" else 1.001
        for coding in (Coding.HUFFMAN_AUTO, Coding.RANS_AUTO):
            assert sizes[coding] <= beyond * best + TINY, (n, coding, raw, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("alphabet, kind", [(32, "normal"), (256, "heavy tail"), (1024, "laplace"), (2, "skewed")])
def test_25_million_symbols_decode(alphabet, kind):
    torch.set_num_threads(2)
    symbols = make(kind, 25_000_000, alphabet)
    for coding in CODINGS:
        section = code(cpu, symbols, alphabet, coding)
        assert torch.equal(cpu.decode_symbols(section, symbols.numel(), alphabet), symbols)
