"""The laws of codecs: properties that every codec has, as functions of its spec. Each codec's test file runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import laconic
from laconic import kernels, wire
from laconic.errors import FrameError, InputError, NonFiniteError
from laconic.packet import TensorSpec

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOAT32_MAX = torch.finfo(torch.float32).max

CASTS = ("none", "fp16", "bf16")
QUANTIZERS = (
    "uniform:8", "uniform:1", "uniform:5", "uniform:16", "uniform:30", "qsgd:4", "qsgd:2,bucket=128", "qsgd:3,norm=l2",
    "qsgd:8,round=nearest", "qsgd:6,bucket=0,norm=l2", "qsgd:12,bucket=4096",
    "qsgd:5,bucket=1024,norm=l2,round=nearest", "terngrad", "terngrad:128", "sign", "sign:128", "onebit", "onebit:256",
    "bins:2", "bins:3,bucket=128",
)  # fmt: skip
PACKED_INTS = ("shared:8", "shared:5,round=stochastic", "thc:4", "thc:1,round=stochastic,rotation=9", "randk:0.5|thc:7")
LINEAR = ("powersgd:2", "randk:0.5|mean", "union")
"""Codecs whose packets can be added; their sums are tested in sums/."""

SELECTORS = ("topk:0.01", "topk:0.3", "topk:1.0", "topk:0.05,approx=true", "topk:0.03,chunk=128",
             "topk:0.05,chunk=64,code=rank", "randk:0.1", "randk:0.5,scale=false", "threshold:0.5",
             "threshold:1e-30")  # fmt: skip
CHAINS = (
    "topk:0.01|qsgd:4", "topk:0.1|terngrad", "topk:0.2|fp16", "topk:0.25|uniform:6", "randk:0.25|qsgd:4",
    "randk:0.1|bf16", "threshold:1.0|sign", "threshold:0.1|onebit:128", "topk:0.5|none",
    "topk:0.1|bins:2",
)  # fmt: skip
ADAPTIVE = ("adaptive", "adaptive:4.0,zero=true", "adaptive:6.0,m=6,f=1.0,integer=true", "adaptive:3.0,tail=0.01")
CODED = (
    "adaptive:5.0|huffman", "adaptive:5.0|rans", "uniform:8|huffman:auto", "uniform:10|rans", "qsgd:4|rans:auto",
    "terngrad|rans", "sign|huffman", "onebit|rans", "topk:0.01|qsgd:4|rans", "topk:0.1|adaptive:5.0,zero=true|huffman",
    "uniform:6|deflate", "uniform:8|zstd", "topk:0.1,code=rans|sign", "threshold:0.5,code=rans",
    "topk:0.1,code=context|sign", "bins:2|huffman",
)  # fmt: skip
"""Chains with a coder. Their reference codes symbol by symbol, so large sizes are in the slow tests."""

EVERY = CASTS + QUANTIZERS + PACKED_INTS + LINEAR + ADAPTIVE + SELECTORS + CHAINS + CODED
UNBIASED = (
    "qsgd:4", "qsgd:2,bucket=128", "qsgd:8,bucket=256", "qsgd:4,norm=l2", "qsgd:4,bucket=0",
    "qsgd:3,bucket=128,norm=l2", "terngrad", "terngrad:128", "shared:3,round=stochastic", "shared:1,round=stochastic",
    "randk:0.25", "randk:0.5|qsgd:4", "randk:0.5|terngrad", "randk:0.3|qsgd:3,norm=l2",
)  # fmt: skip


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_bucket(bucket: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the parts of flat tensors that share a bucket."""
    yield from zip(*(x.split(bucket) for x in tensors), strict=True)


def weights(n, seed=0):
    return normal(n, seed=seed) * 0.05


def gradients(n, seed=0):
    return normal(n, seed=seed) * torch.exp(2 * normal(n, seed=seed + 1)) * 1e-3


def roundtrip(x: Tensor, spec: str, seed: int = 0) -> Tensor:
    return laconic.decode(laconic.encode(x, spec, seed=seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits; unlike ``torch.equal``, +0 and -0 differ."""
    return a.shape == b.shape and a.dtype == b.dtype and bytes_of(a) == bytes_of(b)


def bytes_of(x: Tensor) -> bytes:
    flat = x.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def seed_changes_bytes(spec: str) -> bool:
    """Return whether the seed changes the bytes of 2,000 values: not if a sample of them is all of them."""
    codec = laconic.codec(spec)
    sampled = "approx=true" in spec or (codec.selector is not None and "adaptive" in spec)
    return codec.randomized and not (sampled and not spec.startswith("randk"))


def shape_and_dtype_return(spec: str) -> None:
    for shape in ((), (0,), (3, 0, 2), (1,), (1, 1, 1), (7,), (5, 3), (2, 3, 4, 5), (1000,), (300, 5)):
        for dtype in DTYPES:
            x = normal(*shape, dtype=dtype)
            y = roundtrip(x, spec)
            assert y.shape == x.shape and y.dtype == dtype, (shape, dtype)
            assert y.device == x.device and y.is_contiguous()
            assert bool(torch.isfinite(y).all()), (shape, dtype)


def strides_do_not_matter(spec: str) -> None:
    base = normal(24, 40, seed=1)
    views = {
        "transposed": base.t(), "every third": base.view(-1)[::3], "a block": base[3:17, 5:30],
        "expanded": base[:1].expand(24, 40), "permuted": base.view(2, 12, 40).permute(2, 0, 1),
        "offset": base.view(-1)[1:], "reversed": base.flip(0),
    }  # fmt: skip
    for name, x in views.items():
        assert laconic.encode(x, spec, seed=3) == laconic.encode(x.clone().contiguous(), spec, seed=3), name


def lazily_negated_tensors_are_resolved(spec: str) -> None:
    # The imaginary part of a conjugate is a view with a pending negation: its memory holds the opposite sign.
    x = torch.complex(normal(1), normal(1, seed=2)).conj().imag
    assert x.is_neg() and x.is_contiguous()
    assert laconic.encode(x, spec) == laconic.encode(x.resolve_neg(), spec)


def input_is_untouched(spec: str) -> None:
    for x in (normal(700, seed=2), normal(30, 20, seed=2).t(), normal(64, seed=2, dtype=torch.float64)):
        x.requires_grad_()
        before, version = bytes_of(x), x._version
        laconic.encode(x, spec)
        laconic.encode_into(x, spec, bytearray(laconic.max_nbytes(spec, x)))
        assert bytes_of(x) == before and x._version == version


def seed_decides_bytes(spec: str) -> None:
    x = normal(50, 40, seed=4)
    assert laconic.encode(x, spec, seed=5) == laconic.encode(x, spec, seed=5)
    for other in (6, -5, 2**63, 5 + 2**32):
        same = laconic.encode(x, spec, seed=5) == laconic.encode(x, spec, seed=other)
        assert same is not seed_changes_bytes(spec), other


def extreme_values_stay_finite(spec: str) -> None:
    for dtype in DTYPES:
        largest = min(torch.finfo(dtype).max, FLOAT32_MAX)
        for scale in (largest, largest / 1024, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).tiny / 16):
            x = (normal(600, seed=7, dtype=torch.float64).clamp(-1, 1) * scale).to(dtype)
            x[0] = scale
            y = roundtrip(x, spec)
            assert bool(torch.isfinite(y).all()), (dtype, scale)
    subnormal = torch.full((300,), 2.0**-149)
    assert bool((roundtrip(subnormal, spec).abs() <= 1e-38).all())


def zeros_cost_a_header(spec: str) -> None:
    if spec in CASTS:
        return
    for shape in ((), (1,), (1000,), (64, 1 << 14), (1, 2, 3, 4, 5, 6, 7, 8)):
        x = torch.zeros(shape)
        frame = laconic.encode(x, spec)
        assert len(frame) < 128
        assert torch.equal(laconic.decode(frame), x)
    assert len(laconic.encode(-torch.zeros(5000), spec)) < 128


def frame_fits_max_nbytes(spec: str) -> None:
    for shape in ((), (0,), (1,), (129,), (5, 77), (4096,), (70001,)):
        for dtype in DTYPES:
            for x in (normal(*shape, dtype=dtype), torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)):
                frame = laconic.encode(x, spec)
                most = laconic.max_nbytes(spec, x)
                assert len(frame) <= most == laconic.max_nbytes(laconic.codec(spec), TensorSpec.of(x))


def text_parses_back(spec: str) -> None:
    codec = laconic.codec(spec)
    again = laconic.codec(str(codec))
    assert again == codec and hash(again) == hash(codec) and str(again) == str(codec)
    assert wire.unpack(laconic.encode(normal(10), spec)).codec == str(codec)


def encode_into_writes_the_same_bytes(spec: str) -> None:
    for x in (normal(1500, seed=8), torch.zeros(40), torch.ones(3, 3), torch.empty(0)):
        frame = laconic.encode(x, spec, seed=9)
        room = laconic.max_nbytes(spec, x)
        for buffer in (bytearray(b"\xaa" * (room + 32)), torch.full((room + 32,), 0xAA, dtype=torch.uint8)):
            nbytes = laconic.encode_into(x, spec, buffer, seed=9)
            held = bytes(buffer) if isinstance(buffer, bytearray) else bytes_of(buffer)
            assert held[:nbytes] == frame
            assert held[room:] == b"\xaa" * 32, "wrote beyond max_nbytes"
        assert laconic.encode_into(x, spec, memoryview(bytearray(room)), seed=9) == len(frame)
        if room > len(frame):
            continue
        with pytest.raises(InputError, match="the buffer holds"):
            laconic.encode_into(x, spec, bytearray(len(frame) - 1), seed=9)


def packets_pack_to_the_same_frame(spec: str) -> None:
    codec = laconic.codec(spec)
    for x in (normal(777, seed=10), torch.zeros(9), torch.empty(0, 4)):
        frame = laconic.encode(x, spec, seed=11)
        assert bytes(wire.pack(codec.encode(x, seed=11))) == frame
        assert bytes(wire.pack(wire.unpack(frame))) == frame


def any_buffer_type_decodes(spec: str) -> None:
    x = normal(901, seed=12)
    frame = laconic.encode(x, spec)
    wanted = laconic.decode(frame)
    shifted = b"\x00" + frame  # sections then start at odd addresses
    as_tensor = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    for blob in (bytearray(frame), memoryview(frame), memoryview(shifted)[1:], as_tensor):
        assert same_bits(laconic.decode(blob), wanted)


def damage_raises_frame_error(spec: str) -> None:
    frame = laconic.encode(normal(257, seed=13), spec)
    for end in range(len(frame)):
        with pytest.raises(FrameError):
            laconic.decode(frame[:end])
    with pytest.raises(FrameError):
        laconic.decode(frame + b"\x00")
    for at in range(len(frame)):
        flipped = bytearray(frame)
        flipped[at] ^= 1 << (at % 8)
        with pytest.raises(FrameError):
            laconic.decode(flipped)


def nonfinite_input_raises(spec: str) -> None:
    for dtype in DTYPES:
        lengths = ((1, 0), (40, 39), (1000, 517), (9001, 9000)) if dtype == torch.float32 else ((300, 17),)
        for bad in (math.nan, math.inf, -math.inf):
            for n, at in lengths:
                x = normal(n, dtype=dtype)
                x[at] = bad
                with pytest.raises(NonFiniteError, match="finite"):
                    laconic.encode(x, spec)
            with pytest.raises(ValueError):
                laconic.encode_into(x, spec, bytearray(laconic.max_nbytes(spec, x)))
            dropped = laconic.decode(laconic.encode(x, spec, nonfinite="skip"))
            assert same_bits(dropped, torch.zeros_like(x))
    x = normal(100, dtype=torch.float64) * 1e300
    if laconic.codec(spec).keeps_dtype:
        assert bool(torch.isfinite(roundtrip(x, spec)).all())
    else:
        with pytest.raises(NonFiniteError, match="float32"):
            laconic.encode(x, spec)


def decode_fills_out(spec: str) -> None:
    for dtype in DTYPES:
        x = normal(31, 9, seed=14, dtype=dtype)
        frame = laconic.encode(x, spec)
        wanted = laconic.decode(frame)
        for out in (torch.full_like(x, 7), torch.full((9, 31), 7, dtype=dtype).t(), torch.full((31, 18), 7.0)[:, ::2]):
            assert laconic.decode(frame, out=out) is out
            torch.testing.assert_close(out, wanted.to(out.dtype), rtol=1e-2, atol=1e-7)  # a step of fp16 at zero
            if out.dtype == dtype:
                assert same_bits(out, wanted)
        zeros = laconic.encode(torch.zeros_like(x), spec)
        assert not bool(laconic.decode(zeros, out=torch.full_like(x, 7)).any())


def accumulate_adds_weighted_values(spec: str) -> None:
    codec = laconic.codec(spec)
    for shape in ((), (13,), (33, 41)):
        x, start = normal(*shape, seed=15), normal(*shape, seed=16)
        packet = codec.encode(x, seed=17)
        decoded = codec.decode(packet)
        for weight in (1.0, -1.0, 0.0, 0.1, 1 / 3):
            out = start.clone()
            codec.accumulate(packet, out, weight)
            assert torch.equal(out, start + decoded * torch.tensor(weight)), (shape, weight)


def backends_agree(spec: str) -> None:
    for n in (1, 77, 300, 1111):
        agree(normal(n, seed=n), spec)


def agree(x: Tensor, spec: str, seed: int = 0) -> None:
    """Check that the C++ core and the reference write the same bytes and decode to the same bits."""
    frame = laconic.encode(x, spec, seed=seed)
    with kernels.use_backend("reference"):
        truth = laconic.encode(x, spec, seed=seed)
        value = laconic.decode(truth)
    assert frame == truth, f"{spec}: bytes differ for {list(x.shape)} of {x.dtype}"
    assert same_bits(laconic.decode(truth), value), f"{spec}: values differ for {list(x.shape)} of {x.dtype}"


CODEC = (
    shape_and_dtype_return, strides_do_not_matter, lazily_negated_tensors_are_resolved, input_is_untouched,
    seed_decides_bytes, extreme_values_stay_finite, zeros_cost_a_header, frame_fits_max_nbytes, text_parses_back,
    encode_into_writes_the_same_bytes, packets_pack_to_the_same_frame, any_buffer_type_decodes,
    damage_raises_frame_error, nonfinite_input_raises, decode_fills_out, accumulate_adds_weighted_values,
    backends_agree,
)  # fmt: skip


def z_scores(spec: str, x: Tensor, seeds: int) -> Tensor:
    """Return how many standard errors the mean over seeds is from the input, per element."""
    codec, truth = laconic.codec(spec), x.double()
    total, squares, farthest = torch.zeros_like(truth), torch.zeros_like(truth), 0.0
    for seed in range(seeds):
        error = codec.decode(codec.encode(x, seed=seed)).double() - truth
        total += error
        squares += error * error
        farthest = max(farthest, float(error.abs().max()))
    # A value close to a level is rounded away so rarely that no seed may show it: count one such error more.
    variance = (squares + farthest**2) / seeds - (total / seeds) ** 2
    return total / seeds / (variance / seeds).sqrt()


def looks_unbiased(spec: str, x: Tensor, seeds: int) -> bool:
    """Return whether the errors are within chance: of each element, of their sum, and of their squares."""
    z = z_scores(spec, x, seeds).view(-1)
    n = z.numel()
    bias = float(z.sum() / n**0.5)
    spread = float((z * z).sum() - n) / (2 * n) ** 0.5
    return float(z.abs().max()) < 5.5 and abs(bias) < 6 and spread < 8


def holds(law: Callable[[str], None], spec: str) -> None:
    """The test of one law for one of a module's ``SPECS``; see ``pytest_generate_tests`` in conftest.py."""
    law(spec)
