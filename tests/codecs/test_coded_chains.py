"""Coders after quantizers are lossless, near the entropy, and safe against compression bombs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from functools import partial

import pytest
import torch

import laconic
import laws
import mutate
from laconic import ConfigError, FrameError
from laconic.codecs import registry
from laconic.kernels.sections import CHUNK
from waiting import in_threads

# Chains behind a selector run the laws in the selector's file.
SPECS = [spec for spec in laws.CODED if not spec.startswith("topk")]

QUANTIZERS = (
    "uniform:1", "uniform:5", "uniform:12", "qsgd:2,bucket=128", "qsgd:4", "qsgd:9,norm=l2", "qsgd:12,round=nearest",
    "terngrad:128", "sign:128", "onebit:256", "bins:4,bucket=128", "adaptive:0.0,m=1", "adaptive:5.0",
    "adaptive:6.0,integer=true", "adaptive:4.0,zero=true", "adaptive:3.0,tail=0.02",
    "adaptive:12.0,zero=true,tail=0.01",
)  # fmt: skip
CODERS = ("huffman", "huffman:auto", "rans", "rans:auto", "deflate", "deflate:1", "zstd", "zstd:19")


test_law = laws.holds


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("coder", CODERS)
def test_coder_is_lossless(quantizer, coder):
    plain, coded = laconic.codec(quantizer), laconic.codec(f"{quantizer}|{coder}")
    for n in (1, 2, 77, 1500, 20_011):
        for x in (
            laws.weights(n),
            laws.gradients(n),
            torch.full((n,), -0.3),
            torch.where(laws.weights(n) > 0.05, 1.0, 0.0),
        ):
            before, packet = plain.encode(x, seed=n), coded.encode(x, seed=n)
            assert laws.same_bits(coded.decode(packet), plain.decode(before)), n
            # All sections but the last are the quantizer's own.
            assert [laws.bytes_of(section) for section in packet.sections[:-1]] == [
                laws.bytes_of(section) for section in before.sections[:-1]
            ]
            ours, wanted = laws.normal(n, seed=5), laws.normal(n, seed=5)
            coded.accumulate(packet, ours, -0.7)
            plain.accumulate(before, wanted, -0.7)
            assert laws.same_bits(ours, wanted), n


@pytest.mark.parametrize("selector", ["topk:0.1", "randk:0.2", "threshold:0.05"])
@pytest.mark.parametrize("coder", ["huffman", "rans:auto", "deflate"])
def test_coder_after_a_selector_is_lossless(selector, coder):
    x = laws.weights(30_000)
    for quantizer in ("qsgd:4", "adaptive:5.0,zero=true", "terngrad", "adaptive:4.0,tail=0.01"):
        spec = f"{selector}|{quantizer}"
        assert laws.same_bits(laws.roundtrip(x, f"{spec}|{coder}", 3), laws.roundtrip(x, spec, 3))


@pytest.mark.parametrize("memory", ["ef", "momentum:0.9"])
def test_residual_is_the_same_with_and_without_a_coder(memory):
    plain, coded = (laconic.channel(f"{memory}|topk:0.05|qsgd:4{coder}") for coder in ("", "|rans"))
    for step in range(4):
        x = laws.gradients(8000, seed=step).view(80, 100)
        assert laws.same_bits(
            laconic.decode(plain.encode("w", x, seed=step)), laconic.decode(coded.encode("w", x, seed=step))
        )
    assert laws.same_bits(plain.residual("w"), coded.residual("w"))


def test_all_quantizers_and_coders_are_covered():
    named = {spec.split(":")[0] for spec in QUANTIZERS}
    summed = {"shared", "thc"}  # added while packed, so nothing may be coded behind them
    assert set(registry.names("quantizer")) == named | summed
    assert {spec.split(":")[0] for spec in CODERS} == set(registry.names("coder"))


def test_several_chunks_decode(threads):
    x = laws.weights(2 * CHUNK + 3)
    for quantizer in ("adaptive:5.0", "uniform:10", "qsgd:4", "terngrad"):
        wanted = laws.roundtrip(x, quantizer, 1)
        for coder in ("huffman", "rans"):
            assert laws.same_bits(laws.roundtrip(x, f"{quantizer}|{coder}", 1), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["adaptive:5.0|huffman", "adaptive:5.0|rans", "qsgd:4|rans:auto", "uniform:10|huffman"]
)
def test_25_million_values_decode(spec):
    x = laws.weights(25_000_000)
    assert laws.same_bits(laws.roundtrip(x, spec), laws.roundtrip(x, spec.split("|")[0]))


@pytest.mark.parametrize("spec, beyond", [("adaptive:5.0|huffman", 1.013), ("adaptive:5.0|rans", 1.01)])
@pytest.mark.parametrize("n", [1_500_000, pytest.param(25_000_000, marks=pytest.mark.slow)])
def test_frame_size_is_close_to_the_entropy(spec, beyond, n):
    frame = laconic.encode(laws.weights(n), spec)
    (packet,) = laconic.explain(frame)
    assert packet.entropy > 3
    assert 8 * len(frame) <= beyond * packet.entropy * n


def test_coders_shrink_frames():
    x = laws.gradients(200_000)
    for quantizer in ("adaptive:5.0", "uniform:8", "qsgd:4", "terngrad", "topk:0.01|qsgd:4"):
        plain = len(laconic.encode(x, quantizer))
        for coder in ("rans", "huffman:auto", "rans:auto"):
            assert len(laconic.encode(x, f"{quantizer}|{coder}")) < plain, (quantizer, coder)


def test_auto_mode_does_not_enlarge_noise():
    x = (torch.arange(100_000) * 2654435761 % 2**32).float()
    plain = len(laconic.encode(x, "uniform:8"))
    for coder in ("huffman:auto", "rans:auto"):
        assert len(laconic.encode(x, f"uniform:8|{coder}")) <= 1.0005 * plain + 64


def test_every_level_of_a_compressor_decodes():
    x = laws.weights(5000)
    for name, levels in (("deflate", (1, 6, 9)), ("zstd", (1, 3, 19))):
        decoded = {laws.bytes_of(laws.roundtrip(x, f"uniform:6|{name}:{level}")) for level in levels}
        assert decoded == {laws.bytes_of(laws.roundtrip(x, "uniform:6"))}


def test_other_bytes_of_the_same_compressor_decode():
    """The format says a zlib stream, not which: stored blocks, another window, another strategy."""
    x = laws.weights(3000)
    it = mutate.Frame.read(laconic.encode(x, "uniform:8|deflate"))
    symbols = zlib.decompress(it.sections[1])
    for how in ((0,), (9,), (6, zlib.DEFLATED, 9), (6, zlib.DEFLATED, 15, 1, zlib.Z_HUFFMAN_ONLY)):
        packer = zlib.compressobj(*how)
        it.sections[1] = packer.compress(symbols) + packer.flush()
        assert laws.same_bits(laconic.decode(it.write()), laws.roundtrip(x, "uniform:8"))


def test_section_above_the_maximum_raises_frame_error():
    # Empty blocks are good deflate, and as many as one likes.
    it = mutate.Frame.read(laconic.encode(laws.weights(1000), "uniform:8|deflate"))
    symbols = zlib.decompress(it.sections[1])
    for blocks, taken in ((50, True), (1000, False)):
        packer = zlib.compressobj()
        it.sections[1] = packer.compress(symbols) + packer.flush(zlib.Z_FULL_FLUSH)
        it.sections[1] += b"\x00\x00\x00\xff\xff" * blocks + packer.flush()
        assert zlib.decompress(it.sections[1]) == symbols
        assert mutate.survives(it.write(), False) is taken


@pytest.mark.parametrize("coder", ["deflate:6", "zstd:3"])
def test_invalid_compressed_symbols_raise_frame_error(coder):
    zstandard = pytest.importorskip("zstandard")
    n = 1000
    it = mutate.Frame.read(laconic.encode(laws.weights(n), f"uniform:5|{coder}"))
    pack = (lambda data: zlib.compress(data)) if coder.startswith("deflate") else zstandard.ZstdCompressor().compress
    assert laconic.decode(it.write()).shape == (n,)
    good = it.sections[1]
    for section in (
        pack(bytes(n - 1)),
        pack(bytes(n + 1)),
        pack(bytes(2 * n)),
        pack(b""),
        pack(bytes(n - 1) + b"\x20"),  # symbol 32 of 32
        pack(b"\xff" * n),
        pack(bytes(n)) + b"\0",
        pack(bytes(n)) + pack(b""),
        pack(bytes(n // 2)) + pack(bytes(n // 2)),
        good[:-1],
        good[: len(good) // 2],
        good[1:],
        bytes(100),
        b"\x78\x9c",
        b"\x28\xb5\x2f\xfd",
    ):
        it.sections[1] = section
        with pytest.raises(FrameError):
            laconic.decode(it.write())
    it.sections[1] = pack(bytes(n))
    assert laconic.decode(it.write()).shape == (n,)


def test_missing_zstandard_package_is_named(monkeypatch):
    x = laws.weights(100)
    frame = laconic.encode(x, "uniform:8|zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        laconic.encode(x, "uniform:8|zstd")
    with pytest.raises(FrameError, match="zstandard"):
        laconic.decode(frame)
    assert str(laconic.codec("uniform:8|zstd")) == "uniform:8|zstd:3"


BOMBS = """
import resource, struct, sys, time, zlib, torch, zstandard, laconic, mutate
torch.set_num_threads(2)

def rle(window, blocks):
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\\0"
    last = ((1 << 17) << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\\0"
    return b"\\x28\\xb5\\x2f\\xfd" + bytes([0, window - 10 << 3]) + block * (blocks - 1) + last

def deflated(blocks):
    packer = zlib.compressobj(9)
    head = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * (blocks - 1) + packer.flush()

bounds = struct.pack("<ff", 0.0, 1.0)
claims = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(1 << 26))
states = struct.pack("<32I", *[1 << 15] * 32)
constant = struct.pack("<BH", 0, 1)
frames = {}
for n in (100_000, 1 << 22):
    bomb = deflated(5 if n < 1 << 20 else 64)
    frames |= {
        f"deflate {n}": ([n], [bounds, bomb], b"uniform:8|deflate:6"),
        f"deflate of two bytes {n}": ([n], [bounds, bomb], b"uniform:10|deflate:6"),
        f"deflate behind buckets {n}": ([n], [bytes(4 * -(-n // 512)), bomb], b"terngrad:512|deflate:6"),
        f"deflate cut {n}": ([n], [bounds, bomb[:50_000]], b"uniform:8|deflate:6"),
        f"zstd that says its size {n}": ([n], [bounds, claims], b"uniform:8|zstd:3"),
        f"zstd of runs {n}": ([n], [bounds, rle(17, 8000)], b"uniform:8|zstd:3"),
        f"zstd of runs and a large window {n}": ([n], [bounds, rle(27, 8000)], b"uniform:8|zstd:3"),
        f"zstd of runs and a larger window {n}": ([n], [bounds, rle(31, 8000)], b"uniform:8|zstd:3"),
    }
# Chunks that are not there, for as many values as are allowed.
frames |= {
    "chunks": ([1 << 22], [bounds, struct.pack("<I", 3) + constant], b"uniform:8|huffman:pure"),
    "chunks of nothing": ([1 << 22], [bounds, bytes(40)], b"uniform:8|rans:pure"),
    "chunks that overflow": ([1 << 22], [bounds, b"\\xff" * 60], b"uniform:8|rans:auto"),
    "words": ([1 << 22], [bounds, struct.pack("<8I", *[9] * 8) + b"\\3\\x0c" * 36], b"uniform:8|rans:pure"),
    "adaptive": ([1 << 22], [struct.pack("<ffIf", 0, 1, 2**32 - 1, 5), bytes(9)], b"adaptive:5.0|rans:pure"),
    "apart": ([1 << 22], [struct.pack("<ffIf", 0, 1, 16, 5), struct.pack("<Q", 1 | 31 << 8 | 2**40 << 16), bytes(400),
                          bytes(9)], b"adaptive:5.0,tail=0.01|rans:pure"),
}
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, (shape, sections, spec) in frames.items():
    blob = mutate.Frame(shape, sections, spec).write()
    for what in (laconic.decode, laconic.explain):
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        try:
            what(blob, max_numel=1 << 22)
            outcome = "decoded"
        except laconic.FrameError:
            outcome = "FrameError"
        except BaseException as error:
            outcome = type(error).__name__ + " " + str(error)[:60]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        print(name, what.__name__, outcome, f"{time.perf_counter() - began:.3f}", grown, sep="|")
"""


def test_decompression_bombs_take_neither_time_nor_memory():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", BOMBS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert len(lines) == 2 * (2 * 8 + 6)
    for name, what, outcome, seconds, grown in lines:
        assert outcome == "FrameError", (name, what, outcome)
        assert float(seconds) < 1.0, (name, what, seconds)
        # The largest tensor has 16 MiB, its symbols 8 at most, read and copied; a window of zstd's may be touched once.
        assert int(grown) < 100, (name, what, grown)


def test_two_python_threads_encode_concurrently(threads):
    """Workspaces belong to a thread: another one's chunk at the same time must not show."""
    jobs = [
        (f"{quantizer}|{coder}", laws.weights(n, seed=i))
        for i, (quantizer, coder, n) in enumerate(
            (quantizer, coder, n)
            for quantizer in ("adaptive:5.0", "uniform:10", "qsgd:4")
            for coder in ("huffman", "rans", "huffman:auto")
            for n in (3001, CHUNK + 77)
        )
    ]
    wanted = [laconic.encode(x, spec, seed=1) for spec, x in jobs]
    values = [laws.bytes_of(laconic.decode(frame)) for frame in wanted]
    failures, start = [], threading.Barrier(2)

    def work(part):
        torch.set_num_threads(threads)
        start.wait()
        for turn in range(len(jobs)):
            at = (turn + part * 7) % len(jobs)
            spec, x = jobs[at]
            frame = laconic.encode(x, spec, seed=1)
            if frame != wanted[at]:
                failures.append(("encode", spec, x.numel()))
            if laws.bytes_of(laconic.decode(wanted[at])) != values[at]:
                failures.append(("decode", spec, x.numel()))

    in_threads(*(partial(work, part) for part in range(2)))
    assert failures == []
