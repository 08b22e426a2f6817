"""Untrusted bytes raise ``FrameError`` or decode to a tensor as declared, within bounds of time and memory.

``LACONIC_MUTATIONS`` sets how many mutated frames are tried, ``LACONIC_MUTATION_SEED`` their seed. The quick tests try
a tenth of the slow ones.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest
import torch

import laconic
import laws
import mutate
from golden import make
from laconic import FrameError, kernels

MANY = int(os.environ.get("LACONIC_MUTATIONS", "100000"))
SOME = MANY if "LACONIC_MUTATIONS" in os.environ else MANY // 10
MUTATIONS = pytest.mark.parametrize("mutations", [SOME, pytest.param(MANY, marks=pytest.mark.slow)])
SEED = int(os.environ.get("LACONIC_MUTATION_SEED", "0"))
CASES = pytest.mark.parametrize("case", make.CASES, ids=[case.name for case in make.CASES])


# Besides the golden frames: more options of coders and ``adaptive``, and all numbers of streams.
MORE = [
    *((spec, n) for n in (2, 60, 700) for spec in (
        "adaptive", "adaptive:2.0,tail=0.02", "adaptive:5.0|huffman", "adaptive:5.0|rans", "uniform:10|rans",
        "adaptive:3.0,zero=true|rans:auto", "adaptive:4.0,tail=0.01|huffman", "uniform:3|huffman:auto", "qsgd:4|rans",
        "terngrad|huffman", "sign:128|rans", "onebit:128|huffman", "bins:2|rans", "topk:0.3|qsgd:4|rans",
        "uniform:5|deflate", "uniform:5|zstd",
    )),
    ("adaptive:1.0|huffman", 2_100), ("terngrad|rans", 16_390), ("sign|huffman", 65_536), ("adaptive:0.0|rans", 65_000),
]  # fmt: skip


def seed_frames(largest=1 << 16):
    """Return the golden frames, and frames of more codecs with at most ``largest`` values."""
    frames = [case.path.read_bytes() for case in make.CASES]
    return frames + [laconic.encode(make.ramp(n), spec) for spec, n in MORE if n <= largest]


@CASES
def test_flipped_bit_of_a_golden_frame_raises_frame_error(case):
    frame = bytearray(case.path.read_bytes())
    head = 8 * 256  # the payload after it has one checksum: one bit of each byte suffices
    for bit in (*range(min(head, 8 * len(frame))), *range(head, 8 * len(frame), 7)):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            laconic.decode(frame)
        frame[bit // 8] ^= 1 << bit % 8
    assert laconic.decode(frame).shape == case.make().shape


@CASES
def test_truncated_golden_frame_raises_frame_error(case):
    frame = case.path.read_bytes()
    for end in range(len(frame)):
        with pytest.raises(FrameError):
            laconic.decode(memoryview(frame)[:end])


@MUTATIONS
def test_mutated_frame_raises_frame_error_or_decodes_as_declared(mutations):
    seeds, failures, slowest = seed_frames(), Counter(), 0.0
    examples, taken = {}, 0
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i, (blob, is_bundle) in enumerate(mutate.cases(seeds, mutations, SEED)):
        began = time.perf_counter()
        try:
            taken += mutate.survives(blob, is_bundle)
        except Exception as error:
            kind = f"{type(error).__name__}: {str(error)[:80]}"
            failures[kind] += 1
            examples.setdefault(kind, (i, blob[:400].hex()))
        slowest = max(slowest, time.perf_counter() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    assert not failures, f"{failures}; first of each: {examples}"
    assert 0.02 * mutations < taken < 0.6 * mutations, "the mutator has lost its aim: all or none are refused"
    assert slowest < 2.0, f"one frame took {slowest:.1f} s"
    # The largest tensor allowed has 512 KiB; the rest is slack for the allocator.
    assert grown < 64, f"decoding small frames took {grown:.0f} MiB"


@MUTATIONS
def test_backends_accept_the_same_mutated_frames(mutations):
    seeds = [blob for blob in seed_frames(largest=700) if len(blob) < 4096]  # the reference takes its time
    for blob, is_bundle in mutate.cases(seeds, mutations // 10, SEED + 1):
        if is_bundle:
            continue
        answers = []
        for backend in ("cpu", "reference"):
            with kernels.use_backend(backend):
                try:
                    answers.append(laconic.decode(blob, max_numel=mutate.MAX_NUMEL))
                except FrameError:
                    answers.append(None)
        ours, truth = answers
        assert (ours is None) == (truth is None), blob.hex()
        assert ours is None or laws.same_bits(ours, truth), blob.hex()


def test_frame_that_places_fewer_values_than_its_codec_keeps_decodes_alike_on_all_backends():
    """The coded values are valid for the 222 that the section places, not for the 228 that top-k would keep."""
    blob = (make.HERE / "fuzz" / "decode-selectors" / "fewer-values-than-topk-keeps.bin").read_bytes()
    decoded = laconic.decode(blob)
    with kernels.use_backend("reference"):
        assert laws.same_bits(laconic.decode(blob), decoded)


def test_valid_frame_decodes_after_an_invalid_one():
    good = [case.path.read_bytes() for case in make.CASES]
    wanted = [make.digest(laconic.decode(blob)) for blob in good]
    for blob, is_bundle in mutate.cases(good, 300, SEED + 2):
        mutate.survives(blob, is_bundle)
    assert [make.digest(laconic.decode(blob)) for blob in good] == wanted


@pytest.mark.parametrize("noise", range(20))
def test_random_bytes_raise_frame_error(noise):
    generator = torch.Generator().manual_seed(noise)
    blob = bytes(torch.randint(0, 256, (noise * 37,), generator=generator, dtype=torch.uint8).tolist())
    with pytest.raises(FrameError):
        laconic.decode(blob)
    with pytest.raises(FrameError):
        laconic.decode(b"LACO\x01\x00" + blob)
    with pytest.raises(FrameError):
        laconic.decode_bundle(b"LACO\x01\x01" + blob)


HUGE = """
import resource, struct, torch, zlib, laconic, mutate
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
positions = (1 | 31 << 8 | 1 << 16).to_bytes(8, "little") + bytes(4) + b"\\x01"
frames = {
    "zeros": mutate.Frame([2**34], [], b"qsgd:4"),
    "zeros of many sizes": mutate.Frame([2**17, 2**17], [], b"topk:0.01"),
    "one of many": mutate.Frame([2**34], [positions, bytes(4)], b"topk:1e-12"),
    "one of many halves": mutate.Frame([2**29], [positions, bytes(2)], b"topk:1e-12", dtype=3),
    "a random one of many": mutate.Frame([2**30], [bytes(8), bytes(4)], b"randk:1e-12"),
    "a constant": mutate.Frame([2**34], [bytes.fromhex("0000803f0000803f"), b""], b"uniform:8"),
    "adaptive": mutate.Frame([2**34], [struct.pack("<ffIf", 1, 1, 1, 0), b""], b"adaptive:5.0"),
    "adaptive to zero": mutate.Frame([2**34], [struct.pack("<fiIf", 1, 1, 1, 0), b""],
                                     b"adaptive:5.0,zero=true|rans:pure"),
    "one apart": mutate.Frame([2**34], [struct.pack("<ffIf", 1, 1, 1, 0), positions, bytes(4), b""],
                              b"adaptive:5.0,tail=0.01|huffman:pure"),
}


def coded(n, spec, *side):
    chunks = -(-n // 2**19)
    return mutate.Frame([n], [*side, struct.pack(f"<{chunks}I", *[3] * chunks) + bytes([0, 1, 0]) * chunks], spec)


fewer = 15 * 2**24
scales = [bytes(n // 65536 * 4) for n in (fewer, 2**34)]
frames |= {
    "coded constants": coded(2**34, b"uniform:8|rans:pure", struct.pack("<ff", 0, 1)),
    "coded constants of levels": coded(2**34, b"adaptive:5.0,tail=0.01|huffman:pure", struct.pack("<ffIf", 0, 1, 8, 0),
                                       positions, bytes(4)),
    "coded constants of buckets": coded(2**34, b"sign:65536|huffman:pure", scales[1]),
    # The tensor itself finds room here, its symbols do not.
    "coded constants of fewer buckets": coded(fewer, b"sign:65536|huffman:pure", scales[0]),
    "coded thirds of fewer buckets": coded(fewer, b"terngrad:65536|rans:auto", scales[0]),
    "deflated symbols of fewer buckets": mutate.Frame([fewer], [scales[0], zlib.compress(bytes(2**20))],
                                                      b"qsgd:4,bucket=65536|deflate:6"),
}
for name, frame in frames.items():
    for what, read in {
        "decode": laconic.decode,
        "mean": lambda blob: laconic.aggregate.mean([blob]),
        "bundle": lambda blob: laconic.decode_bundle(mutate.Bundle([b"a"], [blob]).write()),
    }.items():
        try:
            read(frame.write())
            print(name, what, "decoded", sep=": ")
        except laconic.FrameError:
            print(name, what, "FrameError", sep=": ")
        except BaseException as error:
            print(name, what, type(error).__name__ + " " + str(error)[:60].replace(chr(10), " "), sep=": ")
"""


def test_frame_that_declares_more_than_memory_raises_frame_error():
    path = os.pathsep.join(sys.path)
    code = textwrap.dedent(HUGE)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * (9 + 6)
    assert [line for line in lines if not line.endswith((": FrameError", ": decoded"))] == []
