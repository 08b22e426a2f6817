"""Distributions of symbols for tests of coders, and the sizes that coders should reach."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from laconic.kernels.interface import Kernels
from laconic.kernels.sections import Coding, coded_max_nbytes, symbol_bits, symbol_dtype

CODINGS = tuple(Coding)
PURE = (Coding.HUFFMAN, Coding.RANS)


def uniform(n: int, seed: int = 0) -> Tensor:
    """Return uniform values in [0, 1), the same on every machine."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).double()


def _bins(x: Tensor, alphabet: int) -> Tensor:
    low, high = x.min(), x.max()
    return ((x - low) / (high - low + 1e-300) * alphabet).clamp(0, alphabet - 1)


def _fibonacci(n: int, alphabet: int) -> Tensor:
    weights = [1.0, 1.0]
    while len(weights) < alphabet:
        weights.append(weights[-1] + weights[-2] if len(weights) < 60 else 1.0)
    bounds = torch.tensor(weights[:alphabet], dtype=torch.float64).cumsum(0)
    return torch.searchsorted(bounds, uniform(n, 5) * bounds[-1], right=True).clamp(max=alphabet - 1).double()


KINDS = {
    "even": lambda n, a: uniform(n) * a,
    "normal": lambda n, a: _bins(normal(n, 1), a),
    "laplace": lambda n, a: _bins(uniform(n, 2).sub(0.5).sign() * uniform(n, 3).clamp(min=1e-12).log(), a),
    "heavy tail": lambda n, a: _bins(normal(n, 3) * (3 * normal(n, 4)).exp(), a),
    "geometric": lambda n, a: (uniform(n, 4).clamp(min=1e-12).log() / -0.7).clamp(max=a - 1),
    "skewed": lambda n, a: torch.where(uniform(n, 6) < 0.9999, 1.0, uniform(n, 7) * a),
    "one symbol": lambda n, a: torch.full((n,), float(a - 1)),
    "two symbols": lambda n, a: torch.where(uniform(n, 8) < 0.3, 0.0, float(a - 1)),
    "all but equal": lambda n, a: (torch.arange(n) % a).double(),
    "fibonacci": _fibonacci,
    "one in the middle": lambda n, a: torch.where(torch.arange(n) == n // 2, 0.0, float(a - 1)),
    "first and last": lambda n, a: torch.where((torch.arange(n) == 0) | (torch.arange(n) == n - 1), 0.0, a / 2),
}


def make(kind: str, n: int, alphabet: int) -> Tensor:
    return KINDS[kind](n, alphabet).floor().clamp(0, alphabet - 1).to(symbol_dtype(alphabet))


def code(backend: Kernels, symbols: Tensor, alphabet: int, coding: Coding) -> Tensor:
    """Return the coded section; fail if the writer touches bytes outside of its buffer."""
    limit = coded_max_nbytes(symbols.numel(), alphabet)
    buffer = torch.full((limit + 96,), 0xA5, dtype=torch.uint8)
    nbytes = backend.encode_symbols(symbols, alphabet, coding, buffer[32 : 32 + limit])
    assert nbytes <= limit
    assert bool((buffer[:32] == 0xA5).all()) and bool((buffer[32 + limit :] == 0xA5).all()), "wrote past its buffer"
    return buffer[32 : 32 + nbytes].clone()


def entropy(symbols: Tensor) -> float:
    """Return the total information of the symbols in bits, by their own frequencies."""
    counts = torch.bincount(symbols.long()).double()
    counts = counts[counts > 0]
    n = symbols.numel()
    return float((counts * (n / counts).log2()).sum())


def raw_nbytes(n: int, alphabet: int) -> int:
    return n // 256 * 32 * symbol_bits(alphabet) + (n % 256 * symbol_bits(alphabet) + 7) // 8


def huffman_cost(counts: list[int]) -> tuple[int, int]:
    """Return the bits of an optimal prefix code without a length limit, and the smallest possible longest length."""
    heap = [(count, 0) for count in counts if count]
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        (a, deep), (b, deeper) = heapq.heappop(heap), heapq.heappop(heap)
        bits += a + b
        heapq.heappush(heap, (a + b, max(deep, deeper) + 1))
    return bits, heap[0][1]
