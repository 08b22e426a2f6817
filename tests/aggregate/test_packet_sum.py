"""Sum of packets: exact for any order and grouping, and frames that do not belong are rejected."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from sum_helpers import encode_all, inputs

import laconic
import laws
from laconic import kernels, wire
from laconic.aggregate import homomorphic
from laconic.codecs.packed_ints import IntSumHeader
from laconic.kernels.interface import IntRounding, PackedIntSum
from laconic.kernels.sections import PackedIntCoding, packed_int_count, packed_ints_nbytes, packed_nbytes

INTEGERS = ("shared:8", "thc:4", "thc:1", "shared:3,round=stochastic", "thc:2,round=stochastic", "randk:0.4|thc:5")
FLOATS = ("randk:0.3", "union", "powersgd:2")


def integers(frame):
    """Return the integers of a frame and its header, read by the reference."""
    packet = wire.unpack(frame)
    chain = laconic.codec(packet.codec)
    n = packet.spec.numel if chain.selector is None else chain.selector.count(packet.sections[0], packet.spec.numel)
    head = chain.values.read_header(packet.sections[-3:], n)
    n = packed_int_count(n, chain.values.rotation_seed is not None)
    return kernels.reference.packed_ints._read(packet.sections[-1], n, head.coding), head


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 13, 16, 33, 64])
def test_any_order_and_grouping_gives_the_same_integer_sum(workers, ring):
    rng = random.Random(workers)
    for bits in (1, 2, 3, 4, 5, 6, 7, 8, 11, 16) if workers < 9 else (1, 4, 7, 8, 16):
        for name in ("shared", "thc"):
            if ring and workers >= 1 << bits:
                with pytest.raises(laconic.ConfigError, match=f"can add {(1 << bits) - 1} workers on a ring"):
                    laconic.summing(f"{name}:{bits}", workers=workers, ring=True)
                continue
            _, frames = encode_all(f"{name}:{bits}", inputs(workers, 1100), ring=ring)
            truth = sum(integers(frame)[0] for frame in frames)
            parts = list(frames)
            while len(parts) > 1:  # a random tree
                taken = [parts.pop(rng.randrange(len(parts))) for _ in range(min(len(parts), rng.choice((2, 3))))]
                parts.append(homomorphic.add(*taken))
            total, header = integers(parts[0])
            assert torch.equal(total, truth) and header.count == workers
            in_order = homomorphic.add(*frames)
            assert in_order == parts[0] or workers == 1
            with kernels.use_backend("reference"):
                assert workers > 8 or homomorphic.add(*frames) == in_order
                value = laconic.decode(in_order)
            assert laws.same_bits(laconic.decode(in_order), value)


@pytest.mark.parametrize("width", range(1, 17))
def test_packed_integers_of_every_width_add_without_overflow(width):
    coding, n = PackedIntCoding((1 << width) - 1, width, False), 2 * 1024 + 77
    for workers in {1, 2, 3, 7, 64} & set(range(1, 1 << width)):
        largest = ((1 << width) - 1) // workers
        total = torch.zeros(packed_ints_nbytes(n, coding), dtype=torch.uint8)
        truth = torch.zeros(n, dtype=torch.int64)
        for worker in range(workers):
            q = torch.randint(0, largest + 1, (n,), generator=torch.Generator().manual_seed(worker))
            q[::3] = largest
            words = torch.empty_like(total)
            kernels.reference.packed_ints.write_words(q, width, words)
            expected = total.clone()
            kernels.cpu.packed_int_add(words, total)
            kernels.reference.packed_int_add(words, expected)
            assert torch.equal(total, expected)
            truth += q
        assert torch.equal(kernels.reference.packed_ints.read_words(total, n, width), truth)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("width", [3, 4, 8])
def test_whole_blocks_are_packed_like_partial_ones(width, stochastic):
    n = 2 * 1024 + 300
    x = laws.normal(n)
    x[:9] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 0.0, 1e38, -1e38, 1e-40, -1e-40])
    for scale, packed in itertools.product((0.0, 1e-30, 1.0, 1e30), (False, True)):
        coding = PackedIntCoding((1 << width) - 1, width, packed)
        clips = torch.full((3,), scale).view(torch.uint8)
        a, b = (torch.empty(packed_ints_nbytes(n, coding), dtype=torch.uint8) for _ in range(2))
        for backend, out in ((kernels.cpu, a), (kernels.reference, b)):
            rounding = IntRounding(None, None, 7 if stochastic else None)
            backend.packed_int_encode(x * scale, coding, rounding, feedback=False, clips=clips, out=out)
        assert torch.equal(a, b)
        for weight in (None, 0.5):
            ours, truth = torch.ones(n), torch.ones(n)
            total = PackedIntSum(a, clips, coding, coding.levels)
            kernels.cpu.packed_int_decode(total, rotation_seed=None, out=ours, weight=weight)
            kernels.reference.packed_int_decode(total, rotation_seed=None, out=truth, weight=weight)
            assert laws.same_bits(ours, truth)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_accumulator_takes_packed_integers_of_every_width(bits):
    for width, n in itertools.product((1, 3, 4, 7, 8, 12, 16), (1, 255, 256, 1000)):
        q = torch.randint(0, 1 << width, (n,), generator=torch.Generator().manual_seed(width)) % (1 << bits - 2)
        packed = torch.empty(packed_nbytes(n, width), dtype=torch.uint8)
        kernels.reference.pack(q, width, packed)
        ours = torch.zeros(-(-n // 256) * 32 * bits, dtype=torch.uint8)
        truth = ours.clone()
        for _ in range(3):
            kernels.cpu.packed_int_accumulate(packed, n, width, bits, ours)
            kernels.reference.packed_int_accumulate(packed, n, width, bits, truth)
        assert torch.equal(ours, truth)
        wide = min(30, width + 2)
        a, b = (torch.empty(packed_nbytes(n, wide), dtype=torch.uint8) for _ in range(2))
        kernels.cpu.packed_int_repack(ours, n, bits, wide, a)
        kernels.reference.packed_int_repack(truth, n, bits, wide, b)
        assert torch.equal(a, b) and torch.equal(kernels.reference.unpack(a, n, wide).long(), 3 * q)


@pytest.mark.parametrize("spec", INTEGERS)
def test_sum_decodes_to_the_mean_of_the_decoded_frames(spec):
    xs = inputs(5, 30, 90)
    _, frames = encode_all(spec, xs)
    decoded = torch.stack([laconic.decode(frame).double() for frame in frames])
    total = laconic.decode(homomorphic.add(*frames))
    torch.testing.assert_close(total.double(), decoded.mean(0), rtol=1e-5, atol=1e-5 * float(decoded.abs().max()))


@pytest.mark.parametrize("spec", FLOATS)
def test_float_sums_are_exact_up_to_rounding(spec):
    xs = [x * (laws.normal(40, 50, seed=i) > 1) for i, x in enumerate(inputs(4, 40, 50))]
    _, frames = encode_all(spec, xs)
    decoded = torch.stack([laconic.decode(frame).double() for frame in frames])
    torch.testing.assert_close(laconic.decode(homomorphic.add(*frames)).double(), decoded.mean(0), rtol=1e-5, atol=1e-6)
    if spec == "union":
        torch.testing.assert_close(laconic.decode(homomorphic.add(*frames)), sum(xs) / 4, rtol=1e-5, atol=1e-7)


def test_missing_workers_do_not_bias_the_mean():
    xs = inputs(6, 5000)
    for spec in ("thc:6", "shared:8", "randk:1.0", "union"):
        for present in ((0, 1, 2, 3, 4, 5), (1, 4), (3,)):
            summing = laconic.summing(spec, workers=6)
            agreed = summing.agree([summing.probe(x) for x in xs])
            total = laconic.Sum()
            for i in present:
                total.add(summing.encode(xs[i], agreed, worker=i))
            mean = torch.stack([xs[i] for i in present]).mean(0)
            assert total.count == homomorphic.count(total.finish()) == len(present)
            error = (laconic.decode(total.finish()) - mean).square().mean() / mean.square().mean()
            assert float(error) < 3e-3, (spec, present)


def test_sum_is_as_wide_as_its_largest_value_needs():
    for bits, workers in itertools.product((1, 2, 3, 4, 8), (2, 3, 4, 7, 8, 16)):
        _, frames = encode_all(f"thc:{bits}", inputs(workers, 4096), workers=workers)
        largest = (1 << bits) - 1
        pushed, summed = wire.unpack(frames[0]), wire.unpack(homomorphic.add(*frames))
        assert 8 * pushed.sections[2].numel() == bits * 4096
        assert 8 * summed.sections[2].numel() == (workers * largest).bit_length() * 4096


def test_foreign_frames_are_rejected_and_change_nothing():
    xs = inputs(3, 2000)
    summing, frames = encode_all("thc:4", xs)
    other_scales = summing.encode(xs[0], summing.probe(xs[0]) * 9)
    foreign = [
        laconic.encode(xs[0], "qsgd:4"),
        laconic.encode(xs[0], "thc:4"),  # for one worker
        laconic.encode(torch.zeros(2000), "thc:4"),
        encode_all("thc:4,rotation=1", xs)[1][0],
        encode_all("thc:5", xs)[1][0],
        encode_all("thc:4", xs, workers=4)[1][0],
        encode_all("thc:4", xs, ring=True)[1][0],
        encode_all("thc:4", [x.view(40, 50) for x in xs])[1][0],
        encode_all("thc:4", [x.double() for x in xs])[1][0],
        other_scales,
        frames[0][:-1],
        b"",
    ]
    with pytest.raises(laconic.FrameError, match="for 4 workers"):
        laconic.Sum(workers=4).add(frames[0])
    total = laconic.Sum(workers=3)
    total.add(frames[0])
    before = total.finish()
    for frame in foreign:
        with pytest.raises(laconic.FrameError):
            total.add(frame)
        assert total.finish() == before and total.count == 1
    total.add(frames[1])
    total.add(frames[2])
    with pytest.raises(laconic.FrameError, match="too many"):
        total.add(frames[1])
    assert total.count == 3
    with pytest.raises(laconic.FrameError, match="or seed"):
        homomorphic.add(
            encode_all("randk:0.5|thc:4", xs, seed=1)[1][0], encode_all("randk:0.5|thc:4", xs, seed=2)[1][0]
        )
    with pytest.raises(laconic.ConfigError, match="nothing has been added"):
        laconic.Sum().finish()


def test_integers_above_the_senders_maximum_are_rejected():
    xs = inputs(3, 2000)
    for ring in (False, True):
        _, frames = encode_all("shared:4", xs, ring=ring)
        packet = wire.unpack(homomorphic.add(frames[0], frames[1]))
        header = laconic.codec("shared:4").values.read_header(packet.sections, 2000)
        assert header.total < (1 << header.width) - 1
        too_large = torch.full_like(packet.sections[2], 0xFF)
        frame = wire.pack(laconic.Packet(packet.codec, packet.spec, (*packet.sections[:2], too_large)))
        for backend in ("cpu", "reference"):
            with kernels.use_backend(backend), pytest.raises(laconic.FrameError, match="above"):
                laconic.decode(frame)
            total = laconic.Sum()
            with kernels.use_backend(backend), pytest.raises(laconic.FrameError, match="above"):
                total.add(frame)
            assert total.count == 0


@pytest.mark.parametrize(
    "header",
    [
        IntSumHeader(True, 8, 255, 1, 2),
        IntSumHeader(True, 9, 255, 1, 1),
        IntSumHeader(True, 0, 255, 1, 1),
        IntSumHeader(True, 8, 0, 1, 1),
        IntSumHeader(True, 8, 256, 1, 1),
        IntSumHeader(True, 8, 255, 0, 0),
        IntSumHeader(True, 8, 255, 1 << 31, 1),
        IntSumHeader(False, 8, 255, 2, 1),
        IntSumHeader(False, 17, 255, 2, 1),
        IntSumHeader(False, 0, 255, 2, 1),
        IntSumHeader(False, 16, 255, 2, 1),  # the section is shorter
    ],
    ids=repr,
)
def test_invalid_headers_are_rejected(header):
    packet = wire.unpack(laconic.encode(laws.normal(500), "shared:8"))
    section = torch.empty(16, dtype=torch.uint8)
    header.write(section)
    frame = wire.pack(laconic.Packet(packet.codec, packet.spec, (section, *packet.sections[1:])))
    for use in (laconic.decode, laconic.Sum().add, homomorphic.count, laconic.explain):
        with pytest.raises(laconic.FrameError):
            use(frame)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("spec", ["shared:8", "thc:8"])
def test_sum_of_no_workers_is_zero_and_has_no_integers(spec, backend):
    packet = wire.unpack(laconic.encode(laws.normal(500), spec))
    header = torch.empty(16, dtype=torch.uint8)
    IntSumHeader(True, 8, 255, 3, 0).write(header)
    _, clips, integers = packet.sections
    with kernels.use_backend(backend):
        empty = wire.pack(laconic.Packet(packet.codec, packet.spec, (header, clips, torch.zeros_like(integers))))
        assert laconic.decode(empty).equal(torch.zeros(500))
        for sections in (
            (header, clips, integers),
            (header, clips.clone().view(torch.float32) * float("nan"), torch.zeros_like(integers)),
        ):
            sections = tuple(section.view(torch.uint8) for section in sections)
            with pytest.raises(laconic.FrameError):
                laconic.decode(wire.pack(laconic.Packet(packet.codec, packet.spec, sections)))


def test_factors_of_a_sum_of_no_workers_must_be_finite():
    packet = wire.unpack(laconic.encode(laws.normal(40).view(5, 8), "powersgd:2"))
    left, header, right = (section.clone() for section in packet.sections)
    header.view(torch.int32).copy_(torch.tensor([3, 0]))
    frame = wire.pack(laconic.Packet(packet.codec, packet.spec, (left, header, right)))
    assert laconic.decode(frame).equal(torch.zeros(5, 8))
    right.view(torch.float32)[3] = float("inf")
    with pytest.raises(laconic.FrameError, match="not finite"):
        laconic.decode(wire.pack(laconic.Packet(packet.codec, packet.spec, (left, header, right))))


def test_invalid_agreed_values_and_specs_are_rejected():
    summing, x = laconic.summing("thc:4", workers=2), laws.normal(3000)
    good = summing.probe(x)
    for bad in (good[:-1], good.double(), -good, good.view(1, -1)):
        with pytest.raises(laconic.InputError):
            summing.encode(x, bad)
    for bad in (good * float("nan"), torch.full((3,), float("inf"))):
        with pytest.raises(laconic.NonFiniteError):
            summing.encode(x, bad)
    with pytest.raises(laconic.InputError):
        summing.agree([good, good[:-1]])
    with pytest.raises(laconic.InputError):
        summing.probe(torch.arange(5))
    for spec in ("qsgd:4", "topk:0.1|thc:4", "union|thc:4", "none"):
        with pytest.raises(laconic.ConfigError, match="cannot be added"):
            laconic.summing(spec, workers=2)
    for workers in (0, -1, 1.5, True, 1 << 40):
        with pytest.raises(laconic.ConfigError, match="worker"):
            laconic.summing("thc:4", workers=workers)
    with pytest.raises(laconic.ConfigError, match="only"):
        laconic.Contributor("momentum|thc:4", workers=2)


@pytest.mark.parametrize("spec", INTEGERS + FLOATS)
@pytest.mark.parametrize("ring", [False, True])
def test_all_shapes_dtypes_and_extreme_values_add(spec, ring):
    bits = 8 if ring else 3
    spec = spec.replace("thc:1", f"thc:{bits}") if ring else spec
    for shape in ((), (0,), (1,), (7, 3), (2, 0), (1024,), (1025,), (3, 4, 5)):
        for dtype in laws.DTYPES:
            xs = [x.to(dtype) for x in inputs(2, *shape)]
            _, frames = encode_all(spec, xs, ring=ring)
            y = laconic.decode(homomorphic.add(*frames))
            assert y.shape == xs[0].shape and y.dtype == dtype and bool(torch.isfinite(y).all())
    strided = laws.normal(40, 60)[::2, ::3].t()
    assert (
        encode_all(spec, [strided] * 2, ring=ring)[1]
        == encode_all(spec, [strided.clone().contiguous()] * 2, ring=ring)[1]
    )
    # Sums of floats can overflow float32, which is rejected; integers cannot.
    for fill in (0.0, 1.0, -3e38 if spec not in FLOATS else -1e35, 1e-44):
        xs = [torch.full((70, 40), fill)] * 2
        _, frames = encode_all(spec, xs, ring=ring)
        y = laconic.decode(homomorphic.add(*frames))
        assert bool(torch.isfinite(y).all())
        if fill == 0:
            assert not y.any()
    for bad in (float("nan"), float("inf"), -float("inf")):
        for position in (0, 1500, 2799):
            x = laws.normal(2800)
            x[position] = bad
            summing = laconic.summing(spec, workers=2, ring=ring)
            probe = summing.probe(x)
            assert laconic.decode(laconic.encode(probe.float(), "none")).equal(probe.float())  # it is finite
            assert not summing.usable(summing.agree([summing.probe(laws.normal(2800)), probe]))


@pytest.mark.parametrize("spec", INTEGERS)
def test_backends_write_the_same_frames(spec):
    for n in (1, 500, 1024, 3001):
        xs = inputs(3, n)
        ours = encode_all(spec, xs)[1]
        sender = laconic.Contributor(f"ef|{spec}", workers=3, worker=1)
        agreed = sender.probe("a", xs[0], seed=2)
        frame, residual = sender.encode("a", agreed, seed=2), sender.residual("a")
        with kernels.use_backend("reference"):
            assert encode_all(spec, xs)[1] == ours
            other = laconic.Contributor(f"ef|{spec}", workers=3, worker=1)
            assert laws.same_bits(other.probe("a", xs[0], seed=2), agreed)
            assert other.encode("a", agreed, seed=2) == frame
        assert laws.same_bits(other.residual("a"), residual)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_number_of_threads_does_not_change_the_result(threads):
    xs = inputs(2, 150_001)
    torch.set_num_threads(1)
    expected = [homomorphic.add(*encode_all(spec, xs)[1]) for spec in ("thc:3,round=stochastic", "shared:8")]
    torch.set_num_threads(threads)
    assert [homomorphic.add(*encode_all(spec, xs)[1]) for spec in ("thc:3,round=stochastic", "shared:8")] == expected


def test_cleared_sum_is_reused():
    total = laconic.Sum()
    _, first = encode_all("thc:4", inputs(3, 5000))
    _, second = encode_all("thc:4", inputs(3, 5000)[::-1])
    for frames in (first, second, first):
        total.clear()
        for frame in frames:
            total.add(frame)
        assert total.finish() == homomorphic.add(*frames)
        assert total.nbytes == 5 * 1024  # a byte a value: 3 * 15 fits


def test_carried_scales_are_a_quarter_wider():
    summing = laconic.summing("shared:8", workers=2)
    assert torch.equal(summing.carry(torch.tensor([0.0, 2.0])), torch.tensor([0.0, 2.5]))
    with pytest.raises(laconic.ConfigError):
        laconic.summing("union", workers=2).carry(torch.zeros(1))
