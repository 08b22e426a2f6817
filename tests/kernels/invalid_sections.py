"""Coded sections for tests of invalid ones: split into parts, changed, and written again."""

from __future__ import annotations

import struct

import pytest
import torch

from laconic import FrameError
from laconic.kernels import cpu, reference
from laconic.kernels.reference import code_tables
from laconic.kernels.sections import HUFFMAN, RANS, Coding
from symbols import PURE, code, make

BACKENDS = {"cpu": cpu, "reference": reference}
LOW = 1 << 15


def decode(backend, section: bytes, n: int, alphabet: int):
    """Return the symbols, or None if the section is rejected. It lies between bytes that must not matter."""
    buffer = torch.frombuffer(bytearray(b"\xff" * 64 + section + b"\xff" * 64), dtype=torch.uint8)
    try:
        return backend.decode_symbols(buffer[64 : 64 + len(section)], n, alphabet)
    except FrameError:
        return None


def rejected(section: bytes, n: int, alphabet: int) -> bool:
    results = [decode(backend, section, n, alphabet) for backend in BACKENDS.values()]
    assert [result is None for result in results] in ([True, True], [False, False]), "backends differ"
    if results[0] is None:
        buffer = torch.frombuffer(bytearray(section or b"\0"), dtype=torch.uint8)[: len(section)]
        with pytest.raises(FrameError):
            cpu.decode_values(buffer, torch.zeros(alphabet), torch.zeros(n), None)
        return True
    assert torch.equal(*results)
    return False


class Parts:
    """A section of one chunk, split into parts that a test changes before it is written again."""

    def __init__(self, kind: str, n: int, alphabet: int, coding: Coding) -> None:
        self.n, self.alphabet = n, alphabet
        self.symbols = make(kind, n, alphabet)
        data = bytes(code(cpu, self.symbols, alphabet, coding).tolist())
        self.size = None
        self.mode, body = data[4], data[5:]
        self.scale = b""
        if self.mode == RANS:
            self.scale, body = body[:1], body[1:]
        self.classes, self.frequencies, taken = code_tables.read_code_table(
            body, alphabet, with_frequencies=self.mode == RANS
        )
        self.table, body = body[:taken], body[taken:]
        streams = 30 if n >= 65536 else 6 if n >= 2048 else 1
        num_states = 32 if n >= 16384 else 4
        count = streams - 1 if self.mode == HUFFMAN else num_states
        self.numbers = list(struct.unpack_from(f"<{count}I", body))
        self.rest = body[4 * count :]
        assert not rejected(self.write(), n, alphabet), "the unchanged section must be valid"

    def write(self) -> bytes:
        body = bytes([self.mode]) + self.scale + self.table
        body += struct.pack(f"<{len(self.numbers)}I", *self.numbers) + self.rest
        return struct.pack("<I", len(body) if self.size is None else self.size) + body

    def rewrite_table(self) -> None:
        self.table = code_tables.write_code_table(self.classes, self.frequencies if self.mode == RANS else None)

    def rejected(self) -> bool:
        return rejected(self.write(), self.n, self.alphabet)


def bits_to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def u16(value: int) -> str:
    return f"{value:016b}"[::-1]


SMALL = [("normal", n, alphabet, coding) for n, alphabet in ((300, 16), (3000, 256)) for coding in PURE]
PARTS = pytest.mark.parametrize("kind, n, alphabet, coding", SMALL)


def handmade(mode: int, table: str, rest: bytes = bytes(64)) -> bytes:
    """Return a chunk whose code table is given bit by bit, in reading order."""
    body = bytes([mode]) + (b"\x0c" if mode == RANS else b"") + bits_to_bytes(table) + rest
    return struct.pack("<I", len(body)) + body


# THREE has three symbols: explicit class 1, one more, the same. TWO_HALVES gives symbols 3 and 5 a frequency of a half:
# explicit class 12, then the same, each with eleven bits of mantissa, and a run of one between.
THREE = u16(0) + u16(2) + "110" + "1000" + "101" + "0"
TWO_HALVES = u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "0" + "0" * 11
STATES = struct.pack("<4I", 1 << 16, (1 << 16) + 2048, 1 << 16, (1 << 16) + 2048)
