"""Mutations of valid frames with valid checksums, as an attacker would send them.

Frames are read and written by ``frame_model``, not by ``laconic.wire``, and all choices follow from a seed: case i of a
seed is the same frame on every machine. A sanitizer run can use ``cases`` and ``survives`` without pytest.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator

import torch

import laconic
from frame_model import CODES, Bundle, Frame, aligned, crc32c, laid_out

__all__ = ["Bundle", "Frame", "aligned", "cases", "crc32c", "laid_out", "survives"]

MAX_NUMEL = 1 << 16
"""The limit of the receiver: a frame that declares more values must not allocate memory."""

SPECS = (
    b"none", b"fp16", b"bf16", b"uniform:8", b"uniform:1", b"uniform:16", b"qsgd:4", b"qsgd:2,bucket=128",
    b"qsgd:12,bucket=65536", b"qsgd:4,norm=l2", b"terngrad:512", b"terngrad:128", b"sign:4096", b"sign:128",
    b"onebit:8192", b"onebit:128", b"bins:2", b"bins:4,bucket=128", b"topk:0.01", b"topk:1.0",
    b"topk:0.3|qsgd:4", b"topk:0.1,approx=true", b"randk:0.01", b"randk:0.5|fp16", b"threshold:0.001",
    b"threshold:0.5|sign:128", b"uniform:30", b"adaptive:5.0",
    b"adaptive:4.0,zero=true", b"adaptive:3.0,tail=0.01", b"adaptive:5.0,by=grad", b"adaptive:5.0|huffman:pure",
    b"adaptive:5.0|rans:auto", b"uniform:8|huffman:auto", b"uniform:12|rans:pure", b"qsgd:4|rans:pure",
    b"terngrad:512|huffman:pure", b"sign:4096|rans:pure", b"topk:0.3|qsgd:4|rans:pure", b"uniform:8|deflate:6",
    b"shared:8", b"shared:3,round=stochastic", b"thc:4", b"thc:16", b"thc:1,rotation=5", b"randk:0.4|thc:4", b"mean",
    b"randk:0.1|mean", b"union", b"union|mean", b"powersgd:2", b"topk:0.3|shared:5", b"topk:0.1,chunk=64",
    b"topk:0.1,code=rans", b"threshold:0.5,code=rans|sign:128", b"topk:0.1,chunk=64,code=rans|sign:128",
    b"topk:0.1,code=context", b"threshold:0.5,code=context|sign:128",
    b"topk:0.1,chunk=64,code=rank", b"topk:0.015625,chunk=64,code=rank|sign:128",
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


def _mutate_shape(frame: Frame, rng: random.Random) -> None:
    sizes = SIZES + (WIDE_SIZES if rng.random() < 0.3 else ())
    move = rng.randrange(5)
    if move == 0 and frame.shape:
        frame.shape[rng.randrange(len(frame.shape))] = rng.choice(sizes)
    elif move == 1 and frame.shape:
        at = rng.randrange(len(frame.shape))
        frame.shape[at] = min(2**64 - 1, max(0, frame.shape[at] + rng.choice((-2, -1, 1, 2, 128))))
    elif move == 2:
        frame.shape.insert(rng.randint(0, len(frame.shape)), rng.choice(sizes))
    elif move == 3 and frame.shape:
        frame.shape.pop(rng.randrange(len(frame.shape)))
    else:
        frame.shape = [rng.choice(sizes) for _ in range(rng.choice((0, 1, 2, 16, 17, 40)))]


def _mutate_dtype(frame: Frame, rng: random.Random) -> None:
    frame.dtype = rng.choice((*CODES, 0, 5, 15, 22, 255))


def _mutate_spec(frame: Frame, rng: random.Random) -> None:
    move = rng.randrange(4)
    if move == 0:
        frame.spec = rng.choice(SPECS)
    elif move == 1:
        frame.spec = rng.choice(BAD_SPECS)
    elif frame.spec:
        spec = bytearray(frame.spec)
        at = rng.randrange(len(spec))
        if move == 2:
            spec[at] = rng.choice(b"0123456789.:|,=ekqstu\x00\x7f\xff \n")
        else:
            spec[at : at + rng.randrange(3)] = bytes(rng.choices(b"0123456789.:|,=ek-_", k=rng.randrange(4)))
        frame.spec = bytes(spec)


def _mutate_section(frame: Frame, rng: random.Random) -> None:
    if not frame.sections:
        frame.sections = [rng.randbytes(rng.choice((0, 1, 4, 8, 16, 300))) for _ in range(rng.randrange(4))]
        return
    at = rng.randrange(len(frame.sections))
    data = bytearray(frame.sections[at])
    move = rng.randrange(7)
    if move == 0:
        data = data[: rng.randint(0, len(data))]
    elif move == 1:
        data += rng.randbytes(rng.choice((1, 2, 4, 8, 32)))
    elif move == 2:
        data = bytearray(rng.choice((b"\x00", b"\xff", b"\xf3")) * len(data))
    elif move == 3:
        data = bytearray(rng.randbytes(len(data)))
    elif data:
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    frame.sections[at] = bytes(data)


def _mutate_section_list(frame: Frame, rng: random.Random) -> None:
    move = rng.randrange(4)
    if move == 0 or not frame.sections:
        frame.sections = []
    elif move == 1:
        frame.sections.insert(rng.randint(0, len(frame.sections)), rng.choice([b"", bytes(8), *frame.sections]))
    elif move == 2:
        frame.sections.pop(rng.randrange(len(frame.sections)))
    else:
        rng.shuffle(frame.sections)


def _mutate_float(frame: Frame, rng: random.Random) -> None:
    long = [i for i, section in enumerate(frame.sections) if len(section) >= 4]
    if not long:
        return
    at = rng.choice(long)
    data = bytearray(frame.sections[at])
    kind = "<f" if len(data) < 8 or rng.random() < 0.8 else "<d"
    struct.pack_into(kind, data, rng.randrange(len(data) // struct.calcsize(kind)) * struct.calcsize(kind),
                     rng.choice(FLOATS))  # fmt: skip
    frame.sections[at] = bytes(data)


def _mutate_positions(frame: Frame, rng: random.Random) -> None:
    """Change a position section: mode, Rice parameter, count, or the bits after them."""
    if not frame.sections or len(frame.sections[0]) < 8:
        return
    data = bytearray(frame.sections[0])
    move = rng.randrange(5)
    count = int.from_bytes(data[2:8], "little")
    if move == 0:
        data[0] = rng.choice((0, 1, 2, 3, 4, 5, 255))
    elif move == 1:
        data[1] = rng.choice((0, 1, 2, 7, 30, 31, 32, 63, 64, 255, max(0, data[1] - 1), (data[1] + 1) & 255))
    elif move == 2:
        count = rng.choice((0, 1, count + 1, max(0, count - 1), 2 * count, 2**31, 2**32, 2**47, 2**48 - 1))
        data[2:8] = min(count, 2**48 - 1).to_bytes(6, "little")
    elif len(data) > 8:
        at = rng.randrange(8, len(data))
        data[at] = rng.choice((0, 1, 128, 255, data[at] ^ 1 << rng.randrange(8)))
    frame.sections[0] = bytes(data)


def _mutate_coded(frame: Frame, rng: random.Random) -> None:
    """Change a section of coded chunks: sizes, mode, scale, the ends of the code table, or the bits after them."""
    if not frame.sections or len(frame.sections[-1]) < 6:
        return
    data = bytearray(frame.sections[-1])
    move = rng.randrange(8)
    if move == 0:
        data[4] = rng.choice((0, 1, 2, 3, 4, 255))
    elif move == 1:
        (size,) = struct.unpack_from("<I", data)
        size += rng.choice((-1, 1, 2, -size, 2**31, 2**32 - 1 - size))
        struct.pack_into("<I", data, 0, size & 0xFFFFFFFF)
    elif move == 2:
        data[5] = rng.choice((0, 11, 12, 13, 15, 16, 255))
    elif move == 3 and len(data) >= 10:
        struct.pack_into("<H", data, rng.choice((5, 6, 7, 8)), rng.choice((0, 1, 2, 255, 4095, 4096, 65535)))
    elif move == 4 and len(data) >= 16:
        number = rng.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1))
        struct.pack_into("<I", data, rng.randrange(9, len(data) - 4), number)
    elif move == 5:  # shorter or longer, with the right size
        longer = data + rng.randbytes(rng.choice((1, 2, 4, 64)))
        data = rng.choice((longer, data[: rng.randint(6, len(data))]))
        struct.pack_into("<I", data, 0, len(data) - 4)
    else:
        at = rng.randrange(4, min(len(data), rng.choice((8, 16, 40, len(data)))))
        data[at] ^= 1 << rng.randrange(8)
    frame.sections[-1] = bytes(data)


def _mutate_levels(frame: Frame, rng: random.Random) -> None:
    """Change a header of ``adaptive``."""
    first = next((i for i, section in enumerate(frame.sections) if len(section) == 16), None)
    if first is None:
        return
    data = bytearray(frame.sections[first])
    field = rng.randrange(4)
    if field == 2 or rng.random() < 0.3:
        (value,) = struct.unpack_from("<I", data, 4 * field)
        other = rng.choice((0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 2**31, 2**32 - 1, value + 1, max(0, value - 1)))
        struct.pack_into("<I", data, 4 * field, other & 0xFFFFFFFF)
    else:
        struct.pack_into("<f", data, 4 * field, rng.choice(FLOATS))
    frame.sections[first] = bytes(data)


def _mutate_claims(frame: Frame, rng: random.Random) -> None:
    lengths = [len(section) for section in frame.sections]
    move = rng.randrange(9)
    if move == 0 and lengths:
        lengths[rng.randrange(len(lengths))] = rng.choice(SIZES + WIDE_SIZES)
        frame.lengths = lengths
    elif move == 1:
        frame.payload = rng.choice(SIZES + WIDE_SIZES)
    elif move == 2:
        frame.ndim = rng.choice((0, 1, 2, 15, 16, 17, 255))
    elif move == 3:
        frame.num_sections = rng.choice((0, 1, 2, 3, 8, 9, 255))
    elif move == 4:
        frame.spec_nbytes = rng.choice((0, 1, 5, 255, 256, 257, 65535))
    elif move == 5:
        frame.flags = rng.choice((0, 1, 2, 3, 4, 128, 255))
    elif move == 6:
        frame.wide = True
    elif move == 7:
        frame.tail = rng.randbytes(rng.choice((1, 15, 16, 100)))
    else:
        frame.header_padding, frame.payload_padding = rng.randbytes(3), rng.randrange(256)


def _mutate_start(frame: Frame, rng: random.Random) -> None:
    frame.version, frame.zero = rng.choice(((0, 0), (2, 0), (255, 0), (1, 1)))
    if rng.random() < 0.2:
        frame.magic = rng.randbytes(4)


MOVES = (
    (_mutate_shape, 3), (_mutate_dtype, 2), (_mutate_spec, 3), (_mutate_section, 4), (_mutate_section_list, 2),
    (_mutate_float, 4), (_mutate_positions, 5), (_mutate_coded, 5), (_mutate_levels, 3),
    (_mutate_claims, 3), (_mutate_start, 1),
)  # fmt: skip


def mutated_frame(seeds: list[bytes], rng: random.Random) -> bytes:
    frame = Frame.read(rng.choice(seeds))
    moves, weights = zip(*MOVES, strict=True)
    for move in rng.choices(moves, weights, k=rng.choice((1, 1, 1, 2, 2, 3))):
        move(frame, rng)
    blob = frame.write()
    if rng.random() < 0.02:
        blob = blob[: rng.randint(0, len(blob))]
    return blob


def mutated_bundle(seeds: list[bytes], rng: random.Random) -> bytes:
    count = rng.randrange(5)
    bundle = Bundle([f"slot{i}".encode() for i in range(count)], [rng.choice(seeds) for _ in range(count)])
    mutate_bundle(bundle, seeds, rng)
    return bundle.write()


def mutate_bundle(bundle: Bundle, seeds: list[bytes], rng: random.Random) -> None:
    count = len(bundle.frames)
    move = rng.randrange(9)
    if move == 0 and count:
        bundle.names[rng.randrange(count)] = rng.choice((b"slot0", b"", b"\xff\xfe", b"x" * 1024, b"x" * 1025, b"\x00"))
    elif move == 1 and count:
        bundle.sizes = [len(frame) for frame in bundle.frames]
        bundle.sizes[rng.randrange(count)] = rng.choice(SIZES + WIDE_SIZES)
    elif move == 2 and count:
        bundle.name_sizes = [len(name) for name in bundle.names]
        bundle.name_sizes[rng.randrange(count)] = rng.choice((0, 1, 4, 6, 1024, 1025, 65535))
    elif move == 3:
        bundle.count = rng.choice((0, 1, count + 1, 2**20, 2**20 + 1, 2**32 - 1))
    elif move == 4:
        bundle.directory = rng.choice((0, 1, 10, 12, 2**16, 2**31, 2**32 - 1))
    elif move == 5:
        bundle.body = rng.choice(SIZES + WIDE_SIZES)
    elif move == 6:
        bundle.flags, bundle.zero, bundle.padding = rng.choice(
            ((0, 0, 0), (3, 0, 0), (1, 1, 0), (255, 0, 0), (1, 0, 9))
        )
    elif move == 7 and count:
        bundle.frames[rng.randrange(count)] = mutated_frame(seeds, rng)
    elif count:  # a nested bundle, or a truncated frame
        at = rng.randrange(count)
        bundle.frames[at] = rng.choice((bundle.write(), bundle.frames[at][: rng.randrange(40)]))


def with_resized_sections(frame: Frame, *extra: bytes) -> Iterator[bytes]:
    """Yield the frame with each section truncated everywhere, and with extra bytes after it."""
    good = list(frame.sections)
    for at, section in enumerate(good):
        for resized in (*(section[:end] for end in range(len(section))), *(section + more for more in extra)):
            frame.sections = [*good[:at], resized, *good[at + 1 :]]
            yield frame.write()
    frame.sections = good


def cases(seeds: list[bytes], count: int, seed: int = 0) -> Iterator[tuple[bytes, bool]]:
    """Yield mutated frames, one in ten a bundle, and whether they are bundles."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.1:
            yield mutated_bundle(seeds, rng), True
        else:
            yield mutated_frame(seeds, rng), False


def survives(blob: bytes, is_bundle: bool) -> bool:
    """Return whether the bytes decode. Anything but ``FrameError`` or a tensor as declared raises an error.

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
            assert is_bundle, "explained, though it does not decode"  # explain does not compare the names of a bundle
        return False
    if explained:
        (explanation,) = laconic.explain(blob, max_numel=MAX_NUMEL)
        assert list(explanation.shape) == list(tensor.shape) and explanation.nbytes == len(blob)
    declared = Frame.read(blob)
    assert list(tensor.shape) == declared.shape, f"declared {declared.shape}, got {list(tensor.shape)}"
    assert tensor.dtype == CODES[declared.dtype] and tensor.is_contiguous()
    assert tensor.numel() <= MAX_NUMEL
    assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()), (
        "a frame decoded to a NaN or an infinity"
    )
    return True
