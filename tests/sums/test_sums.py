"""Sums of packets: exact whatever the order and grouping, and nothing that does not belong gets in."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import laconic
import laws
from laconic import kernels, wire
from laconic.aggregate import homomorphic
from laconic.codecs.packed_ints import IntSumHeader
from laconic.kernels.sections import PackedIntCoding, packed_int_count, packed_ints_nbytes

INTEGERS = ("shared:8", "thc:4", "thc:1", "shared:3,round=stochastic", "thc:2,round=stochastic", "randk:0.4|thc:5")
FLOATS = ("randk:0.3", "union", "powersgd:2")


def sent(spec, xs, *, workers=None, ring=False, seed=3):
    """Frames of all workers, and what made them."""
    summing = laconic.summing(spec, workers=workers or len(xs), ring=ring)
    agreed = summing.agree([summing.probe(x, seed=seed) for x in xs])
    assert summing.usable(agreed)
    return summing, [summing.encode(x, agreed, seed=seed, worker=i) for i, x in enumerate(xs)]


def inputs(workers, *shape, dtype=torch.float32):
    return [laws.normal(*shape, seed=100 + i, dtype=dtype) for i in range(workers)]


def levels(frame):
    """The integers of a frame, read by the reference."""
    packet = wire.unpack(frame)
    chain = laconic.codec(packet.codec)
    n = packet.spec.numel if chain.selector is None else chain.selector.count(packet.sections[0], packet.spec.numel)
    head = chain.values.read_header(packet.sections[-3:], n)
    n = packed_int_count(n, chain.values.rotation_seed is not None)
    return kernels.reference.packed_ints._read(packet.sections[-1], n, head.coding), head


# -------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 13, 16, 33, 64])
def test_any_order_and_grouping_gives_the_integer_sum_to_the_last_bit(workers, ring):
    dice = random.Random(workers)
    for bits in (1, 2, 3, 4, 5, 6, 7, 8, 11, 16) if workers < 9 else (1, 4, 7, 8, 16):
        for name in ("shared", "thc"):
            if ring and workers >= 1 << bits:
                with pytest.raises(laconic.ConfigError, match=f"can add {(1 << bits) - 1} workers on a ring"):
                    laconic.summing(f"{name}:{bits}", workers=workers, ring=True)
                continue
            _, frames = sent(f"{name}:{bits}", inputs(workers, 1100), ring=ring)
            each = [levels(frame)[0] for frame in frames]
            truth = sum(each)
            parts = list(frames)
            while len(parts) > 1:  # a random tree
                taken = [parts.pop(dice.randrange(len(parts))) for _ in range(min(len(parts), dice.choice((2, 3))))]
                parts.append(homomorphic.add(*taken))
            found, head = levels(parts[0])
            assert torch.equal(found, truth) and head.count == workers
            in_order = homomorphic.add(*frames)
            assert in_order == parts[0] or workers == 1
            with kernels.use_backend("reference"):
                assert workers > 8 or homomorphic.add(*frames) == in_order
                value = laconic.decode(in_order)
            assert laws.same_bits(laconic.decode(in_order), value)


@pytest.mark.parametrize("width", range(1, 17))
def test_lanes_of_every_width_fill_to_the_brim_without_a_carry(width):
    coding, n = PackedIntCoding((1 << width) - 1, width, False), 2 * 1024 + 77
    for workers in {1, 2, 3, 7, 64} & set(range(1, 1 << width)):
        top = ((1 << width) - 1) // workers
        total = torch.zeros(packed_ints_nbytes(n, coding), dtype=torch.uint8)
        truth = torch.zeros(n, dtype=torch.int64)
        for worker in range(workers):
            q = torch.randint(0, top + 1, (n,), generator=torch.Generator().manual_seed(worker))
            q[::3] = top  # all at once
            lanes = torch.empty_like(total)
            kernels.reference.packed_ints.write_words(q, width, lanes)
            both = total.clone()
            kernels.cpu.packed_int_add(lanes, total)
            kernels.reference.packed_int_add(lanes, both)
            assert torch.equal(total, both)
            truth += q
        assert torch.equal(kernels.reference.packed_ints.read_words(total, n, width), truth)


@pytest.mark.parametrize("lane", [8, 16, 32])
def test_a_wider_sum_takes_packed_integers_of_every_width(lane):
    for width, n in itertools.product((1, 3, 4, 7, 8, 12, 16), (1, 255, 256, 1000)):
        q = torch.randint(0, 1 << width, (n,), generator=torch.Generator().manual_seed(width)) % (1 << lane - 2)
        packed = torch.empty(laconic.kernels.sections.packed_nbytes(n, width), dtype=torch.uint8)
        kernels.reference.pack(q, width, packed)
        ours = torch.zeros(-(-n // 256) * 32 * lane, dtype=torch.uint8)
        truth = ours.clone()
        for _ in range(3):
            kernels.cpu.packed_int_accumulate(packed, n, width, lane, ours)
            kernels.reference.packed_int_accumulate(packed, n, width, lane, truth)
        assert torch.equal(ours, truth)
        wide = min(30, width + 2)
        a, b = (torch.empty(laconic.kernels.sections.packed_nbytes(n, wide), dtype=torch.uint8) for _ in range(2))
        kernels.cpu.packed_int_repack(ours, n, lane, wide, a)
        kernels.reference.packed_int_repack(truth, n, lane, wide, b)
        assert torch.equal(a, b) and torch.equal(kernels.reference.unpack(a, n, wide).long(), 3 * q)


@pytest.mark.parametrize("spec", INTEGERS)
def test_the_sum_is_the_mean_of_what_each_said(spec):
    xs = inputs(5, 30, 90)
    _, frames = sent(spec, xs)
    each = torch.stack([laconic.decode(frame).double() for frame in frames])
    total = laconic.decode(homomorphic.add(*frames))
    torch.testing.assert_close(total.double(), each.mean(0), rtol=1e-5, atol=1e-5 * float(each.abs().max()))


@pytest.mark.parametrize("spec", FLOATS)
def test_floats_add_to_rounding(spec):
    xs = [x * (laws.normal(40, 50, seed=i) > 1) for i, x in enumerate(inputs(4, 40, 50))]
    _, frames = sent(spec, xs)
    each = torch.stack([laconic.decode(frame).double() for frame in frames])
    torch.testing.assert_close(laconic.decode(homomorphic.add(*frames)).double(), each.mean(0), rtol=1e-5, atol=1e-6)
    if spec == "union":
        torch.testing.assert_close(laconic.decode(homomorphic.add(*frames)), sum(xs) / 4, rtol=1e-5, atol=1e-7)


def test_a_missing_worker_does_not_bias_the_mean():
    xs = inputs(6, 5000)
    for spec in ("thc:6", "shared:8", "randk:1.0", "union"):
        for here in ((0, 1, 2, 3, 4, 5), (1, 4), (3,)):
            summing = laconic.summing(spec, workers=6)
            agreed = summing.agree([summing.probe(x) for x in xs])
            total = laconic.Sum()
            for i in here:
                total.add(summing.encode(xs[i], agreed, worker=i))
            mean = torch.stack([xs[i] for i in here]).mean(0)
            assert total.count == homomorphic.count(total.finish()) == len(here)
            error = (laconic.decode(total.finish()) - mean).square().mean() / mean.square().mean()
            assert float(error) < 3e-3, (spec, here)


def test_widths_are_what_the_sum_needs():
    for bits, workers in itertools.product((1, 2, 3, 4, 8), range(2, 17)):
        _, frames = sent(f"thc:{bits}", inputs(workers, 4096), workers=workers)
        top = (1 << bits) - 1
        up, down = wire.unpack(frames[0]), wire.unpack(homomorphic.add(*frames))
        assert 8 * up.sections[2].numel() == bits * 4096
        assert 8 * down.sections[2].numel() == (workers * top).bit_length() * 4096


# ----------------------------------------------------------------------------------------------------------- errors


def nmse(spec, workers, alike=False, rounds=4):
    found = []
    for seed in range(rounds):
        xs = [laws.normal(1 << 15, seed=10 * seed + (0 if alike else i)) for i in range(workers)]
        _, frames = sent(spec, xs, seed=seed)
        mean = sum(xs) / workers
        found.append(float((laconic.decode(homomorphic.add(*frames)) - mean).square().sum() / mean.square().sum()))
    return sum(found) / rounds


@pytest.mark.parametrize("bits, wanted", [(1, 0.363), (2, 0.119), (3, 0.037), (4, 0.0115), (5, 0.0035)])
def test_rotated_errors_are_those_of_a_gaussian_at_the_best_clip(bits, wanted):
    spike = torch.zeros(1 << 15)
    spike[::97] = laws.normal((1 << 15) // 97 + 1, seed=3)  # far from Gaussian, until it is rotated
    for x in (laws.normal(1 << 15, seed=1), spike):
        y = laconic.decode(laconic.encode(x, f"thc:{bits}"))
        assert float((y - x).square().sum() / x.square().sum()) == pytest.approx(wanted, rel=0.2)
    assert nmse(f"thc:{bits}", 4) == pytest.approx(wanted, rel=0.2)


def test_at_two_bits_rotation_is_three_times_better_than_plain_blocks():
    for workers in (2, 4, 8):
        assert nmse("thc:2", workers) * 3 < nmse("shared:2", workers)


def test_clips_of_stochastic_rounding_are_the_best_ones():
    # For workers that agree, whose clipping errors add up while those of rounding do not.
    best = {2: nmse("thc:2,round=stochastic", 4, True), 3: nmse("thc:3,round=stochastic", 16, True)}
    stage = type(laconic.codec("thc:2").values)
    real = stage.clip_factor
    for factor in (0.75, 1.3):

        def other(self, levels, workers, factor=factor):
            return factor * real(self, levels, workers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "clip_factor", other)
            assert nmse("thc:2,round=stochastic", 4, True) > best[2]
            assert nmse("thc:3,round=stochastic", 16, True) > best[3]


def test_stochastic_sums_are_unbiased():
    xs = [laws.normal(600, seed=i) for i in range(3)]
    summing = laconic.summing("shared:2,round=stochastic", workers=3)
    agreed = summing.agree([summing.probe(x) for x in xs])
    seeds, truth = 1500, sum(xs).double() / 3
    total, squares = torch.zeros(600, dtype=torch.float64), torch.zeros(600, dtype=torch.float64)
    for seed in range(seeds):
        packets = [summing.packet(x, agreed, seed=seed, worker=i) for i, x in enumerate(xs)]
        error = laconic.codec("shared:2,round=stochastic").decode(_added(packets)).double() - truth
        total += error
        squares += error * error
    z = total / seeds / (squares / seeds**2).sqrt()
    assert float(z.abs().max()) < 5 and abs(float(z.sum())) / 600**0.5 < 5 and float((z * z).mean()) < 1.3


def _added(packets):
    total = laconic.Sum()
    for packet in packets:
        total.add(packet)
    return total.packet()


# --------------------------------------------------------------------------------------------------- error feedback


@pytest.mark.parametrize("spec", ["ef|thc:2", "ef|shared:4", "ef|thc:1", "ef|randk:0.3|thc:4", "ef|powersgd:2"])
@pytest.mark.parametrize("carry", [False, True])
def test_error_feedback_telescopes(spec, carry):
    """All that was sent, plus what is kept, is all that came in."""
    if carry and "powersgd" in spec:
        return
    workers, shape = 3, (60, 50)
    senders = [laconic.Contributor(spec, workers=workers, worker=i) for i in range(workers)]
    came, went, scales = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), None
    for step in range(12):
        xs = [laws.normal(*shape, seed=50 * step + i) * (1 + i) for i in range(workers)]
        summing = senders[0].summing
        probes = [sender.probe("w", x, seed=step) for sender, x in zip(senders, xs, strict=True)]
        agreed = summing.agree(probes)
        frames = [sender.encode("w", agreed if scales is None else scales, seed=step) for sender in senders]
        if carry:
            scales = summing.carry(agreed)
        came += sum(xs).double() / workers
        answer = homomorphic.add(*frames)
        went += laconic.decode(answer).double()
        for sender in senders:
            sender.received("w", wire.unpack(answer))
    left = (
        sum(_unrotated(spec, sender.residual("w")).double() for sender in senders)[: came.numel()].view(shape) / workers
    )
    assert float((went + left - came).abs().max()) < 1e-4
    assert float((went - came).norm() / came.norm()) < (1.0 if "randk" in spec or "powersgd" in spec else 0.6)


def _unrotated(spec, residual):
    if "randk" in spec or "thc" not in spec:
        return residual
    n = residual.numel()
    rows = kernels.reference.packed_ints.hadamard(residual.view(-1, 1024) * 2.0**-5)
    return rows.view(-1) * kernels.reference.packed_ints.rotation_signs(n, 0, residual.device)


def test_a_skipped_round_leaves_no_trace_but_a_count(caplog):
    senders = [laconic.Contributor("ef|thc:3", workers=2, worker=i) for i in range(2)]
    xs = inputs(2, 3000)

    def a_round(xs):
        agreed = senders[0].summing.agree([s.probe("w", x) for s, x in zip(senders, xs, strict=True)])
        if not senders[0].usable(agreed):
            for sender in senders:
                with pytest.raises(laconic.NonFiniteError):
                    sender.encode("w", agreed)
                sender.skip("w")
            return None
        return [sender.encode("w", agreed) for sender in senders]

    a_round(xs)
    before = [sender.residual("w").clone() for sender in senders]
    bad = xs[1].clone()
    bad[1234] = float("nan")
    assert a_round([xs[0], bad]) is None and a_round([bad / 0, xs[0]]) is None
    for sender, residual in zip(senders, before, strict=True):
        assert torch.equal(sender.residual("w"), residual) and sender.stats.skipped_nonfinite == 2
    assert sum("not finite" in record.message for record in caplog.records) == 2  # once each
    copy = laconic.Contributor("ef|thc:3", workers=2, worker=0)
    copy.load_state_dict(senders[0].state_dict())
    agreed = torch.full((3,), 2.0)
    for sender in (copy, senders[0]):
        sender.probe("w", xs[0])
    assert copy.encode("w", agreed) == senders[0].encode("w", agreed)
    senders[0].undo("w")
    assert torch.equal(senders[0].residual("w"), before[0])


def test_a_residual_of_another_size_or_beyond_float32_is_reset(caplog):
    sender = laconic.Contributor("ef|shared:4", workers=1)
    sender.probe("w", torch.ones(10))
    sender.encode("w", torch.full((1,), 0.25))
    assert torch.equal(sender.residual("w"), torch.full((10,), 0.75))
    sender.probe("w", torch.ones(11))
    assert sender.stats.residual_resets == 1
    sender.encode("w", torch.ones(1))
    with pytest.raises(laconic.InputError, match="call probe first"):
        sender.encode("w", torch.ones(1))


# ------------------------------------------------------------------------------------------------- what is refused


def test_what_does_not_belong_is_refused_and_changes_nothing():
    xs = inputs(3, 2000)
    summing, frames = sent("thc:4", xs)
    other_scales = summing.encode(xs[0], summing.probe(xs[0]) * 9)
    strangers = [
        laconic.encode(xs[0], "qsgd:4"),
        laconic.encode(xs[0], "thc:4"),  # for one worker
        laconic.encode(torch.zeros(2000), "thc:4"),
        sent("thc:4,rotation=1", xs)[1][0],
        sent("thc:5", xs)[1][0],
        sent("thc:4", xs, workers=4)[1][0],
        sent("thc:4", xs, ring=True)[1][0],
        sent("thc:4", [x.view(40, 50) for x in xs])[1][0],
        sent("thc:4", [x.double() for x in xs])[1][0],
        other_scales,
        frames[0][:-1],
        b"",
    ]
    with pytest.raises(laconic.FrameError, match="for 4 workers"):
        laconic.Sum(workers=4).add(frames[0])
    total = laconic.Sum(workers=3)
    total.add(frames[0])
    before = total.finish()
    for stranger in strangers:
        with pytest.raises(laconic.FrameError):
            total.add(stranger)
        assert total.finish() == before and total.count == 1
    total.add(frames[1])
    total.add(frames[2])
    with pytest.raises(laconic.FrameError, match="too many"):
        total.add(frames[1])
    assert total.count == 3
    with pytest.raises(laconic.FrameError, match="or seed"):
        homomorphic.add(sent("randk:0.5|thc:4", xs, seed=1)[1][0], sent("randk:0.5|thc:4", xs, seed=2)[1][0])
    with pytest.raises(laconic.ConfigError, match="nothing has been added"):
        laconic.Sum().finish()


def test_integers_above_what_senders_can_make_are_refused():
    xs = inputs(3, 2000)
    for ring in (False, True):
        _, frames = sent("shared:4", xs, ring=ring)
        packet = wire.unpack(homomorphic.add(frames[0], frames[1]))
        head = laconic.codec("shared:4").values.read_header(packet.sections, 2000)
        assert head.total < (1 << head.width) - 1
        lanes = torch.full_like(packet.sections[2], 0xFF)
        lie = wire.pack(laconic.Packet(packet.codec, packet.spec, (*packet.sections[:2], lanes)))
        for backend in ("cpu", "reference"):
            with kernels.use_backend(backend), pytest.raises(laconic.FrameError, match="above"):
                laconic.decode(lie)
            total = laconic.Sum()
            with kernels.use_backend(backend), pytest.raises(laconic.FrameError, match="above"):
                total.add(lie)
            assert total.count == 0


@pytest.mark.parametrize(
    "head",
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
def test_heads_that_make_no_sense_are_refused(head):
    packet = wire.unpack(laconic.encode(laws.normal(500), "shared:8"))
    section = torch.empty(16, dtype=torch.uint8)
    head.write(section)
    lie = wire.pack(laconic.Packet(packet.codec, packet.spec, (section, *packet.sections[1:])))
    for use in (laconic.decode, laconic.Sum().add, homomorphic.count, laconic.explain):
        with pytest.raises(laconic.FrameError):
            use(lie)


def test_nobody_is_zero():
    packet = wire.unpack(laconic.encode(laws.normal(500), "shared:8"))
    section = torch.empty(16, dtype=torch.uint8)
    IntSumHeader(True, 8, 255, 3, 0).write(section)
    frame = wire.pack(laconic.Packet(packet.codec, packet.spec, (section, *packet.sections[1:])))
    assert not laconic.decode(frame).any()


def test_bad_agreements_are_refused():
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


# ------------------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("spec", INTEGERS + FLOATS)
@pytest.mark.parametrize("ring", [False, True])
def test_shapes_dtypes_and_odd_values(spec, ring):
    bits = 8 if ring else 3
    spec = spec.replace("thc:1", f"thc:{bits}") if ring else spec
    for shape in ((), (0,), (1,), (7, 3), (2, 0), (1024,), (1025,), (3, 4, 5)):
        for dtype in laws.DTYPES:
            xs = [x.to(dtype) for x in inputs(2, *shape)]
            _, frames = sent(spec, xs, ring=ring)
            y = laconic.decode(homomorphic.add(*frames))
            assert y.shape == xs[0].shape and y.dtype == dtype and bool(torch.isfinite(y).all())
    strided = laws.normal(40, 60)[::2, ::3].t()
    assert sent(spec, [strided] * 2, ring=ring)[1] == sent(spec, [strided.clone().contiguous()] * 2, ring=ring)[1]
    # Sums of floats can leave float32, which is refused; integers cannot.
    for fill in (0.0, 1.0, -3e38 if spec not in FLOATS else -1e35, 1e-44):
        xs = [torch.full((70, 40), fill)] * 2
        _, frames = sent(spec, xs, ring=ring)
        y = laconic.decode(homomorphic.add(*frames))
        assert bool(torch.isfinite(y).all())
        if fill == 0:
            assert not y.any()
    for bad in (float("nan"), float("inf"), -float("inf")):
        for at in (0, 1500, 2799):
            x = laws.normal(2800)
            x[at] = bad
            summing = laconic.summing(spec, workers=2, ring=ring)
            probe = summing.probe(x)
            assert laconic.decode(laconic.encode(probe.float(), "none")).equal(probe.float())  # it can travel
            assert not summing.usable(summing.agree([summing.probe(laws.normal(2800)), probe]))


@pytest.mark.parametrize("spec", INTEGERS)
def test_backends_make_the_same_frames(spec):
    for n in (1, 500, 1024, 3001):
        xs = inputs(3, n)
        ours = sent(spec, xs)[1]
        sender = laconic.Contributor(f"ef|{spec}", workers=3, worker=1)
        agreed = sender.probe("a", xs[0], seed=2)
        frame, residual = sender.encode("a", agreed, seed=2), sender.residual("a")
        with kernels.use_backend("reference"):
            assert sent(spec, xs)[1] == ours
            other = laconic.Contributor(f"ef|{spec}", workers=3, worker=1)
            assert laws.same_bits(other.probe("a", xs[0], seed=2), agreed)
            assert other.encode("a", agreed, seed=2) == frame
        assert laws.same_bits(other.residual("a"), residual)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_matter(threads):
    xs = inputs(2, 150_001)
    torch.set_num_threads(1)
    alone = [homomorphic.add(*sent(spec, xs)[1]) for spec in ("thc:3,round=stochastic", "shared:8")]
    torch.set_num_threads(threads)
    assert [homomorphic.add(*sent(spec, xs)[1]) for spec in ("thc:3,round=stochastic", "shared:8")] == alone


def test_a_sum_can_be_used_again():
    total = laconic.Sum()
    _, first = sent("thc:4", inputs(3, 5000))
    _, second = sent("thc:4", inputs(3, 5000)[::-1])
    for frames in (first, second, first):
        total.clear()
        for frame in frames:
            total.add(frame)
        assert total.finish() == homomorphic.add(*frames)
        assert total.nbytes == 5 * 1024  # a byte a value: 3 * 15 fits


def test_clips_that_carry_over_are_a_quarter_wider():
    summing = laconic.summing("shared:8", workers=2)
    assert torch.equal(summing.carry(torch.tensor([0.0, 2.0])), torch.tensor([0.0, 2.5]))
    with pytest.raises(laconic.ConfigError):
        laconic.summing("union", workers=2).carry(torch.zeros(1))
