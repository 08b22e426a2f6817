"""Helpers of the Triton tests: the device, the comparison with the reference, and sections of coded symbols.

Triton decides when it is imported whether it interprets kernels. ``tests/conftest.py`` lets it interpret them on a
machine without a GPU; on a machine with one they are compiled and their tests are marked ``gpu``.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator

import pytest
import torch

import laconic
import laws
import symbols as kinds
from laconic import FrameError, counters, kernels, wire
from laconic.kernels import cpu
from laconic.kernels.sections import RANS, RAW, Coding, coded_max_nbytes

pytest.importorskip("triton", reason="no triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# The interpreter computes with numpy, which warns of quotients and casts whose results the kernels discard.
MARKS = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), *([] if INTERPRETED else gpu)]


def gpu_only(test):
    """Mark a test that needs the compiled kernels: its tensors are too large for the interpreter."""
    return pytest.mark.gpu(pytest.mark.skipif(INTERPRETED, reason="no CUDA device")(test))


ALPHABETS = [
    pytest.param(alphabet, marks=pytest.mark.slow if alphabet in (2, 100, 257) or not INTERPRETED else gpu)
    for alphabet in (2, 3, 100, 256, 257, 4096)
]
"""Sizes of alphabets for coders: the interpreter takes seconds for each, so it checks one below each limit."""


def triton_kernels():
    from laconic.kernels.triton import backend

    return backend


def fallbacks() -> int:
    return counters.counts().get("hosted_kernels", 0)


@pytest.fixture
def no_compile_fallback(monkeypatch):
    """Fail when a kernel cannot be compiled: the fallback to torch would give the same bytes."""
    count_fallback = triton_kernels()._count_fallback

    def check(kernel, reason):
        assert "compiled" not in reason, f"{kernel} {reason}"
        count_fallback(kernel, reason)

    monkeypatch.setattr(triton_kernels(), "_count_fallback", check)


def few(spec: str, n: int) -> int:
    """Return a size that the interpreter can handle: it decodes coded symbols one by one."""
    return min(n, 64) if INTERPRETED and ("huffman" in spec or "code=rans" in spec) else n


def reference_packet(x, spec, seed):
    """Return the reference's packet, decoded values and accumulated sum; the C++ core stands in for its slow coders."""
    with kernels.use_backend("cpu" if spec in laws.CODED else "reference"):
        packet = wire.unpack(laconic.encode(x, spec, seed=seed))
        values, total = laconic.codec(spec).decode(packet), torch.ones(x.shape)
        laconic.codec(spec).accumulate(packet, total, -0.3)
    return packet, values, total


def agree(x, spec, seed=0):
    """Assert that Triton encodes, decodes and accumulates ``x`` as the reference does, bit for bit."""
    expected, values, expected_total = reference_packet(x, spec, seed)
    codec, device = laconic.codec(spec), torch.device(DEVICE)
    with kernels.use_backend("triton"):
        assert kernels.backend_for(x) is triton_kernels()
        packet = codec.encode(x.to(device), seed=seed)
        assert len(packet.sections) == len(expected.sections)
        for number, (section, other) in enumerate(zip(packet.sections, expected.sections, strict=True)):
            assert laws.same_bits(section.cpu(), other.contiguous()), f"section {number} of {spec}, {x.numel()} values"
        on_device = expected.to(device)
        decoded = codec.decode(on_device, out=torch.empty(x.shape, dtype=x.dtype, device=device))
        assert laws.same_bits(decoded.cpu(), values), f"{spec}, {x.numel()} values"
        total = torch.ones(x.shape, device=device)
        codec.accumulate(on_device, total, -0.3)
        assert laws.same_bits(total.cpu(), expected_total), f"{spec}, {x.numel()} values, accumulated"


def triton_section(symbols, alphabet, coding=Coding.HUFFMAN) -> bytes:
    """Return the section that Triton writes; fail when it writes outside of it."""
    limit = coded_max_nbytes(symbols.numel(), alphabet)
    buffer = torch.full((limit + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
    nbytes = triton_kernels().encode_symbols(symbols.to(DEVICE), alphabet, coding, buffer[32 : 32 + limit])
    buffer = buffer.cpu()
    assert bool((buffer[:32] == 0xA5).all()) and bool((buffer[32 + nbytes :] == 0xA5).all()), "wrote past its section"
    return bytes(buffer[32 : 32 + nbytes].tolist())


def core_section(symbols, alphabet, coding=Coding.HUFFMAN) -> bytes:
    return bytes(kinds.code(cpu, symbols, alphabet, coding).tolist())


def on_device(section: bytes, before: int = 64):
    """Copy a section to the device, between other bytes that must not matter."""
    buffer = torch.frombuffer(bytearray(b"\xff" * before + section + b"\xff" * 64), dtype=torch.uint8).to(DEVICE)
    return buffer[before : before + len(section)]


def section_agrees(kind: str, n: int, alphabet: int, coding: Coding = Coding.HUFFMAN) -> bytes:
    """Assert that Triton writes the core's section and decodes it without a fallback; return the section."""
    symbols = kinds.make(kind, n, alphabet)
    section, before = core_section(symbols, alphabet, coding), fallbacks()
    assert triton_section(symbols, alphabet, coding) == section, (kind, n, alphabet, coding.name)
    decoded = triton_kernels().decode_symbols(on_device(section), n, alphabet)
    assert torch.equal(decoded.cpu(), symbols) and fallbacks() == before, (kind, n, alphabet, coding.name)
    return section


def decode_or_none(backend, data: bytes, n: int, alphabet: int):
    """Return the symbols, or None where the backend raises FrameError."""
    section = on_device(data) if backend is not cpu else on_device(data).cpu()
    try:
        return backend.decode_symbols(section, n, alphabet).cpu()
    except FrameError:
        return None


def rejected(data: bytes, n: int, alphabet: int) -> bool:
    """Return whether Triton rejects a section; the core must reject it as well, or decode the same symbols."""
    before = fallbacks()
    symbols, expected = (decode_or_none(backend, data, n, alphabet) for backend in (triton_kernels(), cpu))
    assert fallbacks() == before or (symbols is not None and data[4] in (RAW, RANS)), "decoded by a fallback"
    assert (symbols is None) == (expected is None), "the core disagrees"
    assert symbols is None or torch.equal(symbols, expected)
    if symbols is None:
        out = torch.ones(n, device=DEVICE)
        with pytest.raises(FrameError, match=f"{n} symbols of {alphabet} that no coder wrote"):
            triton_kernels().decode_values(on_device(data), torch.zeros(alphabet, device=DEVICE), out, 0.5)
        assert bool((out == 1).all()), "a rejected section was accumulated"
    return symbols is None


def flips_are_rejected_or_agree(section: bytes, n: int, alphabet: int, flipped_bits=None) -> None:
    """Flip each of the bits in turn: Triton must do with the section what the core does."""
    data, accepted = bytearray(section), 0
    for bit in range(8 * len(data)) if flipped_bits is None else flipped_bits:
        data[bit // 8] ^= 1 << bit % 8
        accepted += not rejected(bytes(data), n, alphabet)
        data[bit // 8] ^= 1 << bit % 8
    assert flipped_bits is not None or accepted < 4 * len(data)


def values_agree(section, n: int, table, weight) -> None:
    """Assert that Triton decodes symbols to values of a table, or accumulates them, as the core does."""
    expected = torch.ones(n)
    out = expected.to(DEVICE, copy=True)
    cpu.decode_values(section.cpu(), table, expected, weight)
    triton_kernels().decode_values(section, table, out, weight)
    assert laws.same_bits(out.cpu(), expected)


def with_size(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def random_sections(seed: int, count: int, head: Callable[[random.Random], bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Yield sections of random bytes after a head, and the numbers of symbols and of an alphabet."""
    generator = random.Random(seed)
    for _ in range(count):
        n, alphabet = generator.choice((1, 5, 60)), generator.choice((2, 5, 256, 4096))
        body = head(generator)
        yield with_size(body + generator.randbytes(generator.choice((0, 2, 9, 60, 300)))), n, alphabet


def bits_to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def u16(value: int) -> str:
    return f"{value:016b}"[::-1]
