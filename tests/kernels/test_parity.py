"""Every codec writes and decodes the same bytes on all backends, for any size, dtype and number of threads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import test_entropy_coding
import torch

import laconic
import laws
from laconic import _core, kernels
from laconic.kernels import torch_fallback

# Around packing groups (256; 320 for trits), buckets, ranges of threads (65,536; five times that for trits).
EDGES = (8, 64, 128, 256, 320, 512, 1024, 4096, 65536, 131072, 327680)
SIZES = sorted({1, 2, 3, 7, 31, 100, 300, *(n + d for n in EDGES for d in (-1, 0, 1))})
SMALL = [n for n in SIZES if n < 5000]
LARGE = [n for n in SIZES if n >= 5000] + [400_003]

# The other large sizes are slow: the reference takes seconds.
SOME_LARGE = (65537, 327681)


@pytest.fixture(autouse=True)
def _reference_alone():
    """Use one thread: on shared cores the reference is slower on several. Tests of threads set their number."""
    torch.set_num_threads(1)


def zeros_of_both_signs(n):
    return torch.where(laws.normal(n, seed=5) > 0, 0.0, -0.0)


KINDS = {
    "normal": lambda n: laws.normal(n, seed=n),
    "wide range": lambda n: laws.normal(n, seed=1) * torch.exp2(laws.normal(n, seed=2) * 30),
    "sparse": lambda n: laws.normal(n, seed=3) * (laws.normal(n, seed=4) > 1.5),
    "zeros and a one": lambda n: torch.where(torch.arange(n) == n // 2, 1.0, zeros_of_both_signs(n)),
    "zeros and minus one": lambda n: torch.where(torch.arange(n) == n - 1, -1.0, zeros_of_both_signs(n)),
    "one sign": lambda n: -laws.normal(n, seed=6).abs(),
    "constant": lambda n: torch.full((n,), -0.7),
    "two values": lambda n: torch.where(laws.normal(n, seed=7) > 0, 0.5, -0.25),
    "on the levels": lambda n: (torch.arange(n) % 15 - 7).float() / 7,
    "subnormal": lambda n: laws.normal(n, seed=8) * 1e-40,
    "least": lambda n: torch.full((n,), 2.0**-149),
    "huge": lambda n: laws.normal(n, seed=9).clamp(-1, 1) * laws.FLOAT32_MAX,
    "largest": lambda n: torch.where(laws.normal(n, seed=10) > 0, laws.FLOAT32_MAX, -laws.FLOAT32_MAX),
    "halves": lambda n: laws.normal(n, seed=11).to(torch.bfloat16).float() * 3e4,
    "outliers": lambda n: laws.normal(n, seed=12) + (torch.arange(n) % 97 == 0) * 1e20,
}


@pytest.mark.parametrize("spec", laws.EVERY)
def test_small_sizes_agree(spec):
    for i, n in enumerate(SMALL):
        torch.set_num_threads(1 + i % 2)  # so few values are always one thread's
        laws.agree(laws.normal(n, seed=n), spec, seed=n)


def test_momentum_agrees(threads):
    for n in SIZES:
        x, velocity, residual = (laws.normal(n, seed=seed) for seed in (n, n + 1, n + 2))
        expected = velocity.clone(), residual.clone()
        kernels.reference.add_momentum(x, 0.9, *expected)
        kernels.cpu.add_momentum(x, 0.9, velocity, residual)
        assert laws.same_bits(velocity, expected[0]) and laws.same_bits(residual, expected[1]), n


def large_cases():
    """Yield sizes and specs, slow ones marked as such: the reference of a coder goes symbol by symbol."""
    for n in LARGE:
        for spec in laws.EVERY:
            quick = n == 65537 if spec in laws.CODED else n in SOME_LARGE
            yield pytest.param(n, spec, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("n, spec", list(large_cases()))
def test_large_sizes_agree(n, spec):
    x = laws.normal(n, seed=n)
    with kernels.use_backend("reference"):
        frame = laconic.encode(x, spec, seed=n)
        value = laconic.decode(frame)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert laconic.encode(x, spec, seed=n) == frame, threads
        assert laws.same_bits(laconic.decode(frame), value), threads


@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("spec", laws.EVERY)
def test_dtypes_agree(spec, dtype):
    for n in (1, 257, 17_001):
        laws.agree(laws.normal(n, seed=n, dtype=dtype), spec, seed=7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", laws.EVERY)
def test_odd_values_agree(spec, kind):
    for n in (1, 129, 2051):
        laws.agree(KINDS[kind](n), spec, seed=n)


@pytest.mark.parametrize("spec", laws.EVERY)
def test_nonfinite_values_are_rejected_at_every_position(spec):
    for n in (1, 15, 300):
        for at in range(n):
            x = torch.full((n,), 0.5)
            x[at] = float("inf") if at % 2 else float("nan")
            with pytest.raises(laconic.NonFiniteError):
                laconic.encode(x, spec)


@pytest.mark.parametrize("spec", laws.EVERY)
def test_accumulation_agrees(spec):
    codec = laconic.codec(spec)
    large = 17_001 if spec in laws.CODED else 70_001  # more than one range of a thread
    for n, weight in ((3, 1.0), (257, -0.3), (1000, 1e-3), (large, -0.3)):
        packet = codec.encode(laws.normal(n, seed=n), seed=n)
        expected = laws.normal(n, seed=1)
        with kernels.use_backend("reference"):
            codec.accumulate(packet, expected, weight)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            total = laws.normal(n, seed=1)
            codec.accumulate(packet, total, weight)
            assert laws.same_bits(total, expected)
        torch.set_num_threads(1)


@pytest.mark.parametrize("spec", laws.EVERY)
def test_more_threads_than_cores_agree(spec):
    x = laws.normal(400_003)
    torch.set_num_threads(1)
    alone = laconic.encode(x, spec)
    torch.set_num_threads(16)
    assert laconic.encode(x, spec) == alone


@pytest.mark.parametrize("spec", laws.EVERY)
def test_torch_fallback_agrees(spec, monkeypatch):
    """The fallback copies coded symbols to the host; on the CPU it needs no other device."""
    monkeypatch.setitem(kernels._BACKENDS, "torch_fallback", torch_fallback)
    codec = laconic.codec(spec)
    for n in (1, 300, 17_001):
        x = laws.normal(n, seed=n)
        frame = laconic.encode(x, spec, seed=n)
        value, total, expected = laconic.decode(frame), torch.ones(n), torch.ones(n)
        codec.accumulate(codec.encode(x, seed=n), expected, 0.3)
        with kernels.use_backend("torch_fallback"):
            assert kernels.backend_for(x) is torch_fallback
            assert laconic.encode(x, spec, seed=n) == frame
            assert laws.same_bits(laconic.decode(frame), value)
            codec.accumulate(codec.encode(x, seed=n), total, 0.3)
        assert laws.same_bits(total, expected)


def test_use_backend_switches_the_backend():
    """Guards the other tests, which would otherwise compare the core with itself."""
    x = torch.ones(8)
    assert kernels.backend_for(x).__name__ == "laconic.kernels.cpu"
    with kernels.use_backend("reference"):
        assert kernels.backend_for(x).__name__ == "laconic.kernels.reference"
    assert kernels.backend_for(x).__name__ == "laconic.kernels.cpu"


@cache
def digest() -> str:
    """Return one hash over frames and decoded values of every codec for many sizes and kinds of data."""
    sha = hashlib.sha256()
    for spec in laws.EVERY:
        for i, name in enumerate(KINDS):
            n = (9 + i % 8, 257, 1000, 5003)[i % 4]
            frame = laconic.encode(KINDS[name](n), spec, seed=n)
            sha.update(frame)
            sha.update(laws.bytes_of(laconic.decode(frame)))
        sha.update(laconic.encode(laws.normal(70_001), spec))
    sha.update(test_entropy_coding.digest().encode())
    return sha.hexdigest()


@pytest.mark.parametrize("isa", [isa for isa in ("baseline", "avx2", "avx512") if isa != _core.isa])
def test_instruction_sets_agree(isa):
    here = Path(__file__).resolve()
    code = f"import sys; sys.path[:0] = [{str(here.parent.parent)!r}, {str(here.parent)!r}]\n"
    code += "import test_parity, laconic._core as core; print(core.isa, test_parity.digest())"
    env = {**os.environ, "LACONIC_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    used, result = done.stdout.split()
    if used != isa:
        pytest.skip(f"no {isa}")
    assert result == digest()
