"""``topk:keep,chunk=c``: the largest magnitudes of each chunk, in the sections of ``topk``."""

from __future__ import annotations

import math

import pytest
import torch
from test_topk import DATA

import laconic
import laws
from laconic import ConfigError, FrameError, NonFiniteError, kernels, wire
from laconic.codecs.topk import TopK, num_kept

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def by_chunk(x, keep, chunk):
    """Decode what ``topk`` sends of each chunk as a tensor of its own."""
    parts = [laws.roundtrip(part, f"topk:{keep!r}") for part in x.split(chunk)]
    # A chunk of zeros sends nothing on its own, but the sign of its first zeros here.
    if x.any():
        for part, source in zip(parts, x.split(chunk), strict=True):
            k = num_kept(keep, source.numel())
            if not source.any():
                part[:k] = source[:k]
    return torch.cat(parts)


def check(x, keep, chunk):
    frame = laconic.encode(x, f"topk:{keep!r},chunk={chunk}")
    packet = wire.unpack(frame)
    codec, n = laconic.codec(packet.codec), x.numel()
    if packet.sections:
        kept = sum(num_kept(keep, min(chunk, n - at)) for at in range(0, n, chunk))
        assert codec.num_kept(packet) == codec.selector.fixed_count(n) == codec.selector.max_kept(n) == kept
        positions = codec.positions(packet)
        assert bool((positions[1:] > positions[:-1]).all()), "positions are not ascending"
    assert laws.same_bits(laconic.decode(frame), by_chunk(x, keep, chunk))


@BACKENDS
@pytest.mark.parametrize("name", DATA)
def test_equals_topk_of_each_chunk(name, backend):
    with kernels.use_backend(backend):
        for n, chunk, keep in (
            (1, 64, 0.5), (63, 64, 0.1), (64, 64, 1e-6), (65, 64, 0.1), (5003, 128, 0.02), (5003, 1024, 0.3),
            (9000, 4096, 0.015625), (5003, 65536, 0.01), (1000, 256, 1.0), (4096, 1024, 0.51),
        ):  # fmt: skip
            check(DATA[name](n), keep, chunk)


@pytest.mark.parametrize("chunk", [64, 4096, 65536])
@pytest.mark.parametrize("name", DATA)
def test_backends_and_threads_agree_on_many_chunks(name, chunk, threads):
    x = DATA[name](140_007)
    spec = f"topk:0.02,chunk={chunk}"
    with kernels.use_backend("reference"):
        expected = laconic.encode(x, spec)
    assert laconic.encode(x, spec) == expected


@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_chunks_of_unlike_magnitudes_agree(spread, threads):
    """The search of a chunk begins where the one before ended: far too high, or far too low."""
    scales = torch.exp(spread * laws.normal(100, 1)).clamp(1e-30, 1e30)
    x = (laws.normal(100, 700) * scales).view(-1)
    x[5000:9000] = 0.0
    for chunk in (64, 512):
        with kernels.use_backend("reference"):
            expected = laconic.encode(x, f"topk:0.05,chunk={chunk}")
        assert laconic.encode(x, f"topk:0.05,chunk={chunk}") == expected


@BACKENDS
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
def test_equals_topk_of_each_chunk_in_every_dtype(dtype, backend):
    with kernels.use_backend(backend):
        check(laws.normal(1000, dtype=dtype), 0.05, 128)
        check((laws.normal(1000) * 3).round().to(dtype), 0.05, 64)


@BACKENDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_raises(bad, backend):
    x = laws.normal(1000)
    x[777] = bad
    with kernels.use_backend(backend), pytest.raises(NonFiniteError):
        laconic.encode(x, "topk:0.02,chunk=64")


def test_one_chunk_has_the_sections_of_topk():
    x = laws.normal(3000)
    chunked, whole = laconic.codec("topk:0.02,chunk=4096").encode(x), laconic.codec("topk:0.02").encode(x)
    assert all(laws.same_bits(a, b) for a, b in zip(chunked.sections, whole.sections, strict=True))


def test_chunk_0_is_the_codec_without_chunks():
    x = laws.normal(3000)
    assert laconic.encode(x, "topk:0.02,chunk=0") == laconic.encode(x, "topk:0.02")
    assert TopK(0.02) == TopK(0.02, chunk=0)


@pytest.mark.parametrize("chunk", [1, 63, 100, 131072, True, 64.0, "64"])
def test_invalid_chunk_raises_config_error(chunk):
    with pytest.raises(ConfigError, match="chunk must be 0 or a power of two from 64 to 65536, got"):
        TopK(0.1, chunk=chunk)


def test_approx_and_chunk_exclude_each_other():
    with pytest.raises(ConfigError, match="chunk must be 0 with approx=true"):
        TopK(0.1, approx=True, chunk=64)


def test_frame_with_more_positions_than_chunks_keep_is_rejected():
    more = laconic.codec("topk:0.2").encode(laws.normal(1000))
    packet = wire.pack(laconic.packet.Packet("topk:0.1,chunk=128", more.spec, more.sections))
    with pytest.raises(FrameError, match="more than codec"):
        laconic.decode(packet)


def test_error_feedback_by_chunks_conserves_the_sum():
    sender = laconic.channel("ef|topk:0.05,chunk=64|qsgd:4", policy=laconic.Policy(min_numel=0, exempt_1d=False))
    total, sent = torch.zeros(1000).double(), torch.zeros(1000).double()
    for i in range(10):
        x = laws.normal(1000, seed=i)
        total += x.double()
        sent += laconic.decode(sender.encode("w", x, seed=i)).double()
    torch.testing.assert_close(sent + sender.residual("w").double(), total, rtol=0, atol=2e-5)
