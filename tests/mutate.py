"""Frames taken apart, bent and put together again with checksums that fit: what an attacker would send.

Reads and writes the format by its own code, not by ``laconic.wire``, and takes nothing but a seed: case i of a seed is
the same frame on every machine. A sanitizer run can drive ``cases`` and ``survives`` without pytest.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import laconic
from laconic._core import byte_view
from laconic._core import crc32c as core_crc32c

FIXED = struct.Struct("<4sBBBBHBBQI")
BUNDLE = struct.Struct("<4sBBHIIQ")
ENTRY = struct.Struct("<QH")
CODES = {1: torch.float32, 2: torch.float64, 3: torch.float16, 4: torch.bfloat16, 16: torch.uint8, 17: torch.int8,
         18: torch.int16, 19: torch.int32, 20: torch.int64, 21: torch.bool}  # fmt: skip
MAX_NUMEL = 1 << 16
"""What the receiver allows in these tests: a claim past it must cost nothing."""

SPECS = (
    b"none", b"fp16", b"bf16", b"uniform:8", b"uniform:1", b"uniform:16", b"qsgd:4", b"qsgd:2,bucket=128",
    b"qsgd:12,bucket=65536", b"qsgd:4,norm=l2", b"terngrad:512", b"terngrad:128", b"sign:4096", b"sign:128",
    b"onebit:8192", b"onebit:128", b"topk:0.01", b"topk:1.0", b"topk:0.3|qsgd:4", b"topk:0.1,approx=true",
    b"randk:0.01", b"randk:0.5|fp16", b"threshold:0.001", b"threshold:0.5|sign:128", b"uniform:30", b"adaptive:5.0",
    b"adaptive:4.0,zero=true", b"adaptive:3.0,tail=0.01", b"adaptive:5.0,by=grad", b"adaptive:5.0|huffman:pure",
    b"adaptive:5.0|rans:auto", b"uniform:8|huffman:auto", b"uniform:12|rans:pure", b"qsgd:4|rans:pure",
    b"terngrad:512|huffman:pure", b"sign:4096|rans:pure", b"topk:0.3|qsgd:4|rans:pure", b"uniform:8|deflate:6",
    b"shared:8", b"shared:3,round=stochastic", b"thc:4", b"thc:16", b"thc:1,rotation=5", b"randk:0.4|thc:4", b"mean",
    b"randk:0.1|mean", b"union", b"union|mean", b"powersgd:2", b"topk:0.3|shared:5",
    b"uniform:10|zstd:3", b"adaptive:3.0,zero=true,tail=0.01|huffman:pure",
)  # fmt: skip
BAD_SPECS = (
    b"", b"|", b"qsgd", b"qsgd:4|", b"|qsgd:4", b"qsgd:0", b"qsgd:13", b"qsgd:4,bucket=1", b"topk:0.0", b"topk:nan",
    b"topk:inf", b"topk:1e999", b"topk:-1.0", b"ef|topk:0.1", b"momentum:0.9|qsgd:4", b"topk:0.5|topk:0.5", b"\xff\xfe",
    b"qsgd:99999999999999999999", b"uniform:31", b"topk:0.5|qsgd:4|huffman", b"none:1", b"a" * 256, b"topk:1e-320",
    b"huffman:pure", b"uniform:13|huffman:pure", b"none|rans:pure", b"qsgd:4|rans:pure|huffman:pure", b"adaptive:13.0",
    b"thc:0", b"thc:17", b"shared:8|rans:pure", b"thc:4,rotation=-1", b"topk:0.5|powersgd:2", b"powersgd:0",
    b"qsgd:4|rans:best", b"adaptive:5.0,by=hand", b"uniform:8|deflate:0", b"adaptive:5.0,tail=0.5", b"adaptive:-0.0",
)  # fmt: skip
SIZES = (0, 1, 2, 3, 7, 127, 128, 129, 255, 256, 257, 1000, 65535, 65536, 65537, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
WIDE_SIZES = (2**32, 2**33, 2**34, 2**34 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1.0, 3.4e38, 1e-45, -3.4e38)


def crc32c(data: bytes) -> int:
    view = byte_view(data)
    return core_crc32c(view.data_ptr(), len(data))


def aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def laid_out(parts: list[bytes], padding: int = 0) -> bytes:
    blob = bytearray()
    for part in parts:
        blob += bytes([padding]) * (aligned(len(blob)) - len(blob)) + part
    return bytes(blob)


@dataclass
class Frame:
    """The fields of a frame. Those that are None follow from the others; set them to lie."""

    shape: list[int]
    sections: list[bytes]
    spec: bytes
    dtype: int = 1
    wide: bool = False
    magic: bytes = b"LACO"
    version: int = 1
    flags: int | None = None
    zero: int = 0
    lengths: list[int] | None = None
    payload: int | None = None
    payload_crc: int | None = None
    header_crc: int | None = None
    header_padding: bytes = b""
    payload_padding: int = 0
    ndim: int | None = None
    num_sections: int | None = None
    spec_nbytes: int | None = None
    tail: bytes = b""

    @classmethod
    def read(cls, blob: bytes) -> Frame:
        magic, version, flags, dtype, ndim, text, count, zero, _, _ = FIXED.unpack_from(blob)
        numbers = struct.Struct(f"<{ndim + count}{'Q' if flags & 2 else 'I'}")
        values = numbers.unpack_from(blob, FIXED.size)
        at = FIXED.size + numbers.size
        spec, at = blob[at : at + text], aligned(at + text + 4)
        sections = []
        for nbytes in values[ndim:]:
            sections.append(bytes(blob[at : at + nbytes]))
            at = aligned(at + nbytes)
        return cls(list(values[:ndim]), sections, bytes(spec), dtype, bool(flags & 2), magic, version, None, zero)

    def write(self) -> bytes:
        lengths = [len(section) for section in self.sections] if self.lengths is None else self.lengths
        body = laid_out(self.sections, self.payload_padding)
        wide = self.wide or any(n >= 1 << 32 for n in (*self.shape, *lengths))
        fixed = FIXED.pack(
            self.magic,
            self.version,
            (2 if wide else 0) if self.flags is None else self.flags,
            self.dtype,
            (len(self.shape) if self.ndim is None else self.ndim) & 0xFF,
            (len(self.spec) if self.spec_nbytes is None else self.spec_nbytes) & 0xFFFF,
            (len(lengths) if self.num_sections is None else self.num_sections) & 0xFF,
            self.zero,
            len(body) if self.payload is None else self.payload,
            crc32c(body) if self.payload_crc is None else self.payload_crc,
        )
        numbers = struct.pack(f"<{len(self.shape) + len(lengths)}{'Q' if wide else 'I'}", *self.shape, *lengths)
        head = fixed + numbers + self.spec
        room = aligned(len(head) + 4) - 4 - len(head)
        head += (self.header_padding + bytes(room))[:room]
        return head + struct.pack("<I", crc32c(head) if self.header_crc is None else self.header_crc) + body + self.tail


@dataclass
class Bundle:
    """A bundle's directory and frames, and what it claims about them."""

    names: list[bytes]
    frames: list[bytes]
    sizes: list[int] | None = None
    name_sizes: list[int] | None = None
    count: int | None = None
    directory: int | None = None
    body: int | None = None
    version: int = 1
    flags: int = 1
    zero: int = 0
    padding: int = 0

    @classmethod
    def read(cls, blob: bytes) -> Bundle:
        """Whatever can be read as names and frames; ``struct.error`` where there is no directory."""
        _, version, flags, zero, count, directory, _ = BUNDLE.unpack_from(blob)
        names, sizes, at = [], [], BUNDLE.size
        for _ in range(min(count, 64)):
            nbytes, name_nbytes = ENTRY.unpack_from(blob, at)
            at += ENTRY.size
            names.append(bytes(blob[at : at + name_nbytes]))
            sizes.append(nbytes)
            at += name_nbytes
        frames, at = [], aligned(BUNDLE.size + directory + 4)
        for nbytes in sizes:
            frames.append(bytes(blob[at : at + nbytes]))
            at = aligned(at + nbytes)
        return cls(names, frames, version=version, flags=flags, zero=zero)

    def write(self) -> bytes:
        sizes = [len(frame) for frame in self.frames] if self.sizes is None else self.sizes
        name_sizes = [len(name) for name in self.names] if self.name_sizes is None else self.name_sizes
        directory = b"".join(
            ENTRY.pack(size, nbytes & 0xFFFF) + name
            for size, nbytes, name in zip(sizes, name_sizes, self.names, strict=True)
        )
        body = laid_out(self.frames, self.padding)
        head = BUNDLE.pack(
            b"LACO",
            self.version,
            self.flags,
            self.zero,
            len(self.frames) if self.count is None else self.count,
            len(directory) if self.directory is None else self.directory,
            len(body) if self.body is None else self.body,
        )
        head += directory
        head += bytes(aligned(len(head) + 4) - 4 - len(head))
        return head + struct.pack("<I", crc32c(head)) + body


# -------------------------------------------------------------------------------------------------------- mutations


def _bend_shape(it: Frame, dice: random.Random) -> None:
    sizes = SIZES + (WIDE_SIZES if dice.random() < 0.3 else ())
    move = dice.randrange(5)
    if move == 0 and it.shape:
        it.shape[dice.randrange(len(it.shape))] = dice.choice(sizes)
    elif move == 1 and it.shape:
        at = dice.randrange(len(it.shape))
        it.shape[at] = min(2**64 - 1, max(0, it.shape[at] + dice.choice((-2, -1, 1, 2, 128))))
    elif move == 2:
        it.shape.insert(dice.randint(0, len(it.shape)), dice.choice(sizes))
    elif move == 3 and it.shape:
        it.shape.pop(dice.randrange(len(it.shape)))
    else:
        it.shape = [dice.choice(sizes) for _ in range(dice.choice((0, 1, 2, 16, 17, 40)))]


def _bend_dtype(it: Frame, dice: random.Random) -> None:
    it.dtype = dice.choice((*CODES, 0, 5, 15, 22, 255))


def _bend_spec(it: Frame, dice: random.Random) -> None:
    move = dice.randrange(4)
    if move == 0:
        it.spec = dice.choice(SPECS)
    elif move == 1:
        it.spec = dice.choice(BAD_SPECS)
    elif it.spec:
        spec = bytearray(it.spec)
        at = dice.randrange(len(spec))
        if move == 2:
            spec[at] = dice.choice(b"0123456789.:|,=ekqstu\x00\x7f\xff \n")
        else:
            spec[at : at + dice.randrange(3)] = bytes(dice.choices(b"0123456789.:|,=ek-_", k=dice.randrange(4)))
        it.spec = bytes(spec)


def _bend_section(it: Frame, dice: random.Random) -> None:
    if not it.sections:
        it.sections = [dice.randbytes(dice.choice((0, 1, 4, 8, 16, 300))) for _ in range(dice.randrange(4))]
        return
    at = dice.randrange(len(it.sections))
    data = bytearray(it.sections[at])
    move = dice.randrange(7)
    if move == 0:
        data = data[: dice.randint(0, len(data))]
    elif move == 1:
        data += dice.randbytes(dice.choice((1, 2, 4, 8, 32)))
    elif move == 2:
        data = bytearray(dice.choice((b"\x00", b"\xff", b"\xf3")) * len(data))
    elif move == 3:
        data = bytearray(dice.randbytes(len(data)))
    elif data:
        for _ in range(dice.choice((1, 1, 2, 8))):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    it.sections[at] = bytes(data)


def _bend_section_list(it: Frame, dice: random.Random) -> None:
    move = dice.randrange(4)
    if move == 0 or not it.sections:
        it.sections = []
    elif move == 1:
        it.sections.insert(dice.randint(0, len(it.sections)), dice.choice([b"", bytes(8), *it.sections]))
    elif move == 2:
        it.sections.pop(dice.randrange(len(it.sections)))
    else:
        dice.shuffle(it.sections)


def _bend_float(it: Frame, dice: random.Random) -> None:
    long = [i for i, section in enumerate(it.sections) if len(section) >= 4]
    if not long:
        return
    at = dice.choice(long)
    data = bytearray(it.sections[at])
    kind = "<f" if len(data) < 8 or dice.random() < 0.8 else "<d"
    struct.pack_into(kind, data, dice.randrange(len(data) // struct.calcsize(kind)) * struct.calcsize(kind),
                     dice.choice(FLOATS))  # fmt: skip
    it.sections[at] = bytes(data)


def _bend_positions(it: Frame, dice: random.Random) -> None:
    """The first section as positions: mode, Rice parameter, count, and the unary part behind."""
    if not it.sections or len(it.sections[0]) < 8:
        return
    data = bytearray(it.sections[0])
    move = dice.randrange(5)
    count = int.from_bytes(data[2:8], "little")
    if move == 0:
        data[0] = dice.choice((0, 1, 2, 3, 255))
    elif move == 1:
        data[1] = dice.choice((0, 1, 2, 7, 30, 31, 32, 63, 64, 255, max(0, data[1] - 1), (data[1] + 1) & 255))
    elif move == 2:
        count = dice.choice((0, 1, count + 1, max(0, count - 1), 2 * count, 2**31, 2**32, 2**47, 2**48 - 1))
        data[2:8] = min(count, 2**48 - 1).to_bytes(6, "little")
    elif len(data) > 8:
        at = dice.randrange(8, len(data))
        data[at] = dice.choice((0, 1, 128, 255, data[at] ^ 1 << dice.randrange(8)))
    it.sections[0] = bytes(data)


def _bend_coded(it: Frame, dice: random.Random) -> None:
    """The last section as coded chunks: sizes, mode, scale, the book's ends, and what comes behind."""
    if not it.sections or len(it.sections[-1]) < 6:
        return
    data = bytearray(it.sections[-1])
    move = dice.randrange(8)
    if move == 0:
        data[4] = dice.choice((0, 1, 2, 3, 4, 255))
    elif move == 1:
        (size,) = struct.unpack_from("<I", data)
        size += dice.choice((-1, 1, 2, -size, 2**31, 2**32 - 1 - size))
        struct.pack_into("<I", data, 0, size & 0xFFFFFFFF)
    elif move == 2:
        data[5] = dice.choice((0, 11, 12, 13, 15, 16, 255))
    elif move == 3 and len(data) >= 10:
        struct.pack_into("<H", data, dice.choice((5, 6, 7, 8)), dice.choice((0, 1, 2, 255, 4095, 4096, 65535)))
    elif move == 4 and len(data) >= 16:
        number = dice.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1))
        struct.pack_into("<I", data, dice.randrange(9, len(data) - 4), number)
    elif move == 5:  # shorter or longer, with a size that fits
        longer = data + dice.randbytes(dice.choice((1, 2, 4, 64)))
        data = dice.choice((longer, data[: dice.randint(6, len(data))]))
        struct.pack_into("<I", data, 0, len(data) - 4)
    else:
        at = dice.randrange(4, min(len(data), dice.choice((8, 16, 40, len(data)))))
        data[at] ^= 1 << dice.randrange(8)
    it.sections[-1] = bytes(data)


def _bend_levels(it: Frame, dice: random.Random) -> None:
    """The first section as an adaptive header: two ends or a step and a multiple, levels, what they came from."""
    first = next((i for i, section in enumerate(it.sections) if len(section) == 16), None)
    if first is None:
        return
    data = bytearray(it.sections[first])
    field = dice.randrange(4)
    if field == 2 or dice.random() < 0.3:
        (value,) = struct.unpack_from("<I", data, 4 * field)
        other = dice.choice((0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 2**31, 2**32 - 1, value + 1, max(0, value - 1)))
        struct.pack_into("<I", data, 4 * field, other & 0xFFFFFFFF)
    else:
        struct.pack_into("<f", data, 4 * field, dice.choice(FLOATS))
    it.sections[first] = bytes(data)


def _bend_claims(it: Frame, dice: random.Random) -> None:
    lengths = [len(section) for section in it.sections]
    move = dice.randrange(9)
    if move == 0 and lengths:
        lengths[dice.randrange(len(lengths))] = dice.choice(SIZES + WIDE_SIZES)
        it.lengths = lengths
    elif move == 1:
        it.payload = dice.choice(SIZES + WIDE_SIZES)
    elif move == 2:
        it.ndim = dice.choice((0, 1, 2, 15, 16, 17, 255))
    elif move == 3:
        it.num_sections = dice.choice((0, 1, 2, 3, 8, 9, 255))
    elif move == 4:
        it.spec_nbytes = dice.choice((0, 1, 5, 255, 256, 257, 65535))
    elif move == 5:
        it.flags = dice.choice((0, 1, 2, 3, 4, 128, 255))
    elif move == 6:
        it.wide = True
    elif move == 7:
        it.tail = dice.randbytes(dice.choice((1, 15, 16, 100)))
    else:
        it.header_padding, it.payload_padding = dice.randbytes(3), dice.randrange(256)


def _bend_start(it: Frame, dice: random.Random) -> None:
    it.version, it.zero = dice.choice(((0, 0), (2, 0), (255, 0), (1, 1)))
    if dice.random() < 0.2:
        it.magic = dice.randbytes(4)


MOVES = (
    (_bend_shape, 3), (_bend_dtype, 2), (_bend_spec, 3), (_bend_section, 4), (_bend_section_list, 2), (_bend_float, 4),
    (_bend_positions, 5), (_bend_coded, 5), (_bend_levels, 3), (_bend_claims, 3), (_bend_start, 1),
)  # fmt: skip


def bent_frame(seeds: list[bytes], dice: random.Random) -> bytes:
    it = Frame.read(dice.choice(seeds))
    moves, weights = zip(*MOVES, strict=True)
    for move in dice.choices(moves, weights, k=dice.choice((1, 1, 1, 2, 2, 3))):
        move(it, dice)
    blob = it.write()
    if dice.random() < 0.02:
        blob = blob[: dice.randint(0, len(blob))]
    return blob


def bent_bundle(seeds: list[bytes], dice: random.Random) -> bytes:
    count = dice.randrange(5)
    it = Bundle([f"slot{i}".encode() for i in range(count)], [dice.choice(seeds) for _ in range(count)])
    bend_bundle(it, seeds, dice)
    return it.write()


def bend_bundle(it: Bundle, seeds: list[bytes], dice: random.Random) -> None:
    count = len(it.frames)
    move = dice.randrange(9)
    if move == 0 and count:
        it.names[dice.randrange(count)] = dice.choice((b"slot0", b"", b"\xff\xfe", b"x" * 1024, b"x" * 1025, b"\x00"))
    elif move == 1 and count:
        it.sizes = [len(frame) for frame in it.frames]
        it.sizes[dice.randrange(count)] = dice.choice(SIZES + WIDE_SIZES)
    elif move == 2 and count:
        it.name_sizes = [len(name) for name in it.names]
        it.name_sizes[dice.randrange(count)] = dice.choice((0, 1, 4, 6, 1024, 1025, 65535))
    elif move == 3:
        it.count = dice.choice((0, 1, count + 1, 2**20, 2**20 + 1, 2**32 - 1))
    elif move == 4:
        it.directory = dice.choice((0, 1, 10, 12, 2**16, 2**31, 2**32 - 1))
    elif move == 5:
        it.body = dice.choice(SIZES + WIDE_SIZES)
    elif move == 6:
        it.flags, it.zero, it.padding = dice.choice(((0, 0, 0), (3, 0, 0), (1, 1, 0), (255, 0, 0), (1, 0, 9)))
    elif move == 7 and count:
        it.frames[dice.randrange(count)] = bent_frame(seeds, dice)
    elif count:  # a bundle within, or a frame cut short
        at = dice.randrange(count)
        it.frames[at] = dice.choice((it.write(), it.frames[at][: dice.randrange(40)]))


def cases(seeds: list[bytes], count: int, seed: int = 0) -> Iterator[tuple[bytes, bool]]:
    """Bent frames, one in ten a bundle: the bytes, and whether they are meant as one."""
    dice = random.Random(seed)
    for _ in range(count):
        if dice.random() < 0.1:
            yield bent_bundle(seeds, dice), True
        else:
            yield bent_frame(seeds, dice), False


# ----------------------------------------------------------------------------------------------------------- oracle


def survives(blob: bytes, is_bundle: bool) -> bool:
    """Whether a receiver takes the bytes. Anything but ``FrameError`` or a tensor as declared escapes as an error.

    One frame in eight is explained, too, whether it decodes or not.
    """
    explained = crc32c(blob) % 8 == 0
    try:
        if is_bundle:
            tensors = laconic.decode_bundle(blob, max_numel=MAX_NUMEL)
            assert sum(tensor.numel() for tensor in tensors.values()) <= MAX_NUMEL
            assert not explained or len(laconic.explain(blob, max_numel=MAX_NUMEL)) == len(tensors)
            return True
        tensor = laconic.decode(blob, max_numel=MAX_NUMEL)
    except laconic.FrameError:
        if explained:
            try:
                laconic.explain(blob, max_numel=MAX_NUMEL)
            except laconic.FrameError:
                return False
            assert is_bundle, "explained, though it does not decode"  # of a bundle, names are not compared
        return False
    if explained:
        (told,) = laconic.explain(blob, max_numel=MAX_NUMEL)
        assert list(told.shape) == list(tensor.shape) and told.nbytes == len(blob)
    declared = Frame.read(blob)
    assert list(tensor.shape) == declared.shape, f"declared {declared.shape}, got {list(tensor.shape)}"
    assert tensor.dtype == CODES[declared.dtype] and tensor.is_contiguous()
    assert tensor.numel() <= MAX_NUMEL
    assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()), "a frame may not bring in a NaN"
    return True
