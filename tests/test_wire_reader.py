"""A decoder written from docs/wire-format.md alone agrees with laconic: same bits, and the same frames refused.

``LACONIC_MUTATIONS`` sets how many mutated frames the slow test compares, ``LACONIC_MUTATION_SEED`` the seed.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter

import pytest
import torch

import laconic
import mutate
import wire_reader
from golden import make
from laconic import FrameError

SEED = int(os.environ.get("LACONIC_MUTATION_SEED", "0"))
MANY = int(os.environ.get("LACONIC_MUTATIONS", "20000"))
MAX_NUMEL = mutate.MAX_NUMEL
FLOATS = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)

SELECTORS = (
    "topk:0.01", "topk:0.3", "topk:1.0", "topk:0.1,approx=true", "topk:0.05,chunk=64", "topk:0.1,code=rans",
    "topk:0.1,chunk=128,code=rans", "topk:0.1,code=context", "threshold:0.9,code=context",
    "topk:0.015625,chunk=64,code=rank", "topk:0.1,chunk=64,code=rank", "randk:0.1",
    "randk:0.3,scale=false", "threshold:0.2", "threshold:0.9,code=rans", "threshold:5.0", "union",
)  # fmt: skip
QUANTIZERS = (
    "uniform:1", "uniform:5", "uniform:12", "adaptive:1.0", "adaptive:5.0,zero=true", "adaptive:3.0,tail=0.02",
    "adaptive:4.0,zero=true,tail=0.01", "adaptive:2.5,m=6,f=0.5,integer=true", "adaptive:3.0,c0=0.5,by=grad",
    "qsgd:2,bucket=128", "qsgd:4", "qsgd:8,round=nearest", "qsgd:12,bucket=1024,norm=l2", "terngrad:128", "sign:128",
    "sign:4096", "onebit:128", "bins:1,bucket=128", "bins:2", "bins:4,bucket=256",
)  # fmt: skip
OTHER_VALUES = ("none", "fp16", "bf16", "uniform:16", "uniform:30", "shared:8", "shared:3,round=stochastic", "thc:4",
                "thc:1,rotation=5", "thc:16,round=stochastic", "mean")  # fmt: skip
CODERS = ("huffman:pure", "huffman:auto", "rans:pure", "rans:auto", "deflate:6", "zstd:3")
SUMS = ("shared:8", "shared:2,round=stochastic", "thc:3", "thc:8,rotation=7", "randk:0.3|thc:4", "randk:0.3|shared:6",
        "randk:0.2", "union", "powersgd:2")  # fmt: skip


def random_spec(rng: random.Random) -> str:
    if rng.random() < 0.05:
        return "powersgd:" + rng.choice("1237")
    quantizer = rng.random() < 0.6
    value = rng.choice(QUANTIZERS if quantizer else OTHER_VALUES)
    coder = "|" + rng.choice(CODERS) if quantizer and rng.random() < 0.6 else ""
    return (rng.choice(SELECTORS) + "|" if rng.random() < 0.4 else "") + value + coder


def random_shape(rng: random.Random, largest: int) -> list[int]:
    n = rng.choice((0, 1, 2, 3, 63, 64, 127, 255, 256, 257, 320, 511, 1023, 1024, 1025, rng.randrange(1, largest)))
    first = rng.choice((1, 2, 3, 7, 16))
    return rng.choice(([n], [first, n // first], [1, n], [n, 1, 1], [2, first, n // (2 * first) + 1], []))


def random_tensor(rng: random.Random, largest: int) -> torch.Tensor:
    """Return values of very different sizes: constant, sparse, tiny and huge ones, too."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    shape, kind = random_shape(rng, largest), rng.randrange(8)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == 0:
        x = x**5
    elif kind == 1:
        x = torch.where(x.abs() > 1.5, x, 0.0)
    elif kind == 2:
        x = torch.full_like(x, rng.choice((0.0, -0.0, 1.0, -2.5, 1e-40)))
    elif kind == 3:
        x = x * 2.0 ** rng.choice((-140, -120, -64, 64, 100, 120))
    elif kind == 4:
        x = torch.round(x)
    dtype = rng.choice(FLOATS)
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def random_frame(rng: random.Random, largest: int = 1500) -> bytes:
    """Return a frame of one tensor or of a sum, by any codec, dtype and shape."""
    if rng.random() < 0.05:
        x = torch.tensor([rng.randrange(2) for _ in range(rng.randrange(40))]).to(rng.choice(INTEGERS))
        return bytes(laconic.wire.pack(laconic.codec("none").encode(x, exact=True)))
    x, seed = random_tensor(rng, largest), rng.getrandbits(63)
    if rng.random() < 0.15:
        return random_sum(rng, x, seed)
    spec = random_spec(rng)
    gradient = torch.linspace(-2, 3, 50) if "by=grad" in spec else None
    return laconic.encode(x, spec, seed=seed, gradient=gradient)


def random_sum(rng: random.Random, x: torch.Tensor, seed: int) -> bytes:
    """Return the frame of some of several workers, as for a server or as on a ring."""
    spec, workers = rng.choice(SUMS), rng.choice((1, 2, 3))
    x = x.double().clamp(-2e4, 2e4).to(x.dtype)  # three times as much is finite in every dtype
    summing = laconic.summing(spec, workers=workers, ring=rng.random() < 0.5)
    xs = [x * (worker + 1) / workers for worker in range(workers)]
    agreed = summing.agree([summing.probe(one, seed=seed) for one in xs])
    present = sorted(rng.sample(range(workers), rng.randint(1, workers)))
    frames = [summing.encode(xs[worker], agreed, seed=seed, worker=worker) for worker in present]
    return bytes(laconic.sums.add(*frames))


def as_decoded(tensor: torch.Tensor) -> wire_reader.Decoded:
    flat = tensor.contiguous().reshape(-1)
    data = bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""
    return wire_reader.Decoded(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def outcome(read, error: type[Exception]):
    """Return what a reader gives, and None and the reason if it refuses."""
    try:
        return read(), ""
    except error as refusal:
        return None, str(refusal)


def difference(blob: bytes, is_bundle: bool = False) -> str | None:
    """Return how the two readers differ on some bytes, or None."""
    if is_bundle:
        ours, why = outcome(lambda: laconic.decode_bundle(blob, max_numel=MAX_NUMEL), FrameError)
        mine = None if ours is None else {name: as_decoded(x) for name, x in ours.items()}
        theirs, other = outcome(lambda: dict(wire_reader.decode_bundle(blob, MAX_NUMEL)), wire_reader.InvalidFrameError)
        if theirs is not None and sum(len(x.data) for x in theirs.values()) > MAX_NUMEL and ours is None:
            return None  # ours limits the values of all packets together
    else:
        ours, why = outcome(lambda: laconic.decode(blob, max_numel=MAX_NUMEL), FrameError)
        mine = None if ours is None else as_decoded(ours)
        theirs, other = outcome(lambda: wire_reader.decode(blob, MAX_NUMEL), wire_reader.InvalidFrameError)
    if mine == theirs:
        return None
    if mine is None or theirs is None:
        return f"laconic {'refuses' if mine is None else 'accepts'}: {why or other}"
    return "other values"


def require_no_difference(frames) -> Counter:
    """Compare the two readers on frames; return how many frames were accepted and refused."""
    counts, first = Counter(), {}
    for index, (blob, is_bundle) in enumerate(frames):
        defect = difference(blob, is_bundle)
        if defect is not None:
            spec = "bundle" if is_bundle else mutate.Frame.read(blob).spec.decode("latin-1")
            first.setdefault((defect, spec), (index, blob.hex()))
        counts["accepted" if _accepted(blob, is_bundle) else "refused"] += 1
    assert not first, "\n".join(f"{defect} [{spec}]: {where}" for (defect, spec), where in list(first.items())[:5])
    return counts


def _accepted(blob: bytes, is_bundle: bool) -> bool:
    read = wire_reader.decode_bundle if is_bundle else wire_reader.decode
    return outcome(lambda: read(blob, MAX_NUMEL), wire_reader.InvalidFrameError)[0] is not None


def frames_of(count: int, seed: int, largest: int = 1500):
    rng = random.Random(seed)
    return [random_frame(rng, largest) for _ in range(count)]


@pytest.mark.parametrize("case", make.CASES, ids=[case.name for case in make.CASES])
def test_golden_frame_decodes_to_the_same_bits(case):
    frame = case.path.read_bytes()
    assert wire_reader.decode(frame) == as_decoded(laconic.decode(frame))


def test_golden_bundle_decodes_to_the_same_bits():
    bundle = make.BUNDLE.read_bytes()
    assert dict(wire_reader.decode_bundle(bundle)) == {
        name: as_decoded(x) for name, x in laconic.decode_bundle(bundle).items()
    }


def test_random_frames_decode_to_the_same_bits():
    counts = require_no_difference((frame, False) for frame in frames_of(300, SEED))
    assert counts == {"accepted": 300}


def test_mutated_frames_are_accepted_or_refused_alike():
    counts = require_no_difference(mutate.cases(frames_of(100, SEED + 1, 300), 700, SEED))
    assert counts["accepted"] > 50 and counts["refused"] > 200


@pytest.mark.slow
def test_thousands_of_random_frames_decode_to_the_same_bits():
    counts = require_no_difference((frame, False) for frame in frames_of(MANY // 5, SEED + 2, 6000))
    assert counts == {"accepted": MANY // 5}


@pytest.mark.slow
def test_thousands_of_mutated_frames_are_accepted_or_refused_alike():
    seeds = [case.path.read_bytes() for case in make.CASES if len(case.path.read_bytes()) < 1 << 14]
    counts = require_no_difference(mutate.cases(seeds + frames_of(400, SEED + 3, 700), MANY, SEED + 4))
    assert counts["accepted"] > MANY // 50 and counts["refused"] > MANY // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["uniform:3|huffman:pure", "qsgd:4|rans:pure", "sign|rans:auto", "terngrad|huffman:auto"]
)
@pytest.mark.parametrize("n", [2047, 2048, 16_383, 16_384, 65_535, 65_536, (1 << 19) + 300])
def test_coded_frames_of_every_number_of_streams_decode_to_the_same_bits(spec, n):
    frame = laconic.encode(make.ramp(n), spec, seed=SEED)
    assert wire_reader.decode(frame) == as_decoded(laconic.decode(frame))


def test_spec_of_every_stage_is_known_to_the_reader():
    known = set(laconic.codecs.registry.names()) - {"ef", "momentum"}
    assert set(wire_reader.STAGES) == known


def test_reader_refuses_what_the_document_says():
    frame = mutate.Frame([2], [struct.pack("<2f", 1.0, float("nan"))], b"none").write()
    with pytest.raises(wire_reader.InvalidFrameError, match="not finite"):
        wire_reader.decode(frame)
