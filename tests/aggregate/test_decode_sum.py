"""Means of frames: decoded straight into the sum, in a fixed order; opened frames and bundles of a known layout."""

from __future__ import annotations

import math

import pytest
import torch

import laconic
import laws
from laconic import FrameError, InputError, aggregate, wire
from laconic.aggregate import BundleTemplate, MeanAccumulator, OpenedFrame, SenderMeanAccumulator


def senders(spec, n=5, shape=(40, 30)):
    return [laconic.encode(laws.normal(*shape, seed=i), spec, seed=i) for i in range(n)]


@pytest.mark.parametrize("spec", laws.EVERY)
def test_mean_is_decode_then_average(spec):
    frames = senders(spec)
    expected = torch.stack([laconic.decode(frame) for frame in frames]).double().mean(0)
    torch.testing.assert_close(aggregate.mean(frames).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["qsgd:4", "topk:0.1|qsgd:4", "none"])
def test_weights_belong_to_their_packets(spec):
    frames, weights = senders(spec), [0.5, 2.0, 0.0, 1.0, 4.0]
    decoded = torch.stack([laconic.decode(frame) for frame in frames]).double()
    factors = torch.tensor(weights, dtype=torch.float64).view(-1, 1, 1)
    torch.testing.assert_close(
        aggregate.weighted_sum(frames, weights).double(), (decoded * factors).sum(0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        aggregate.mean(frames, weights=weights).double(), (decoded * factors).sum(0) / 7.5, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("spec", ["topk:0.1", "topk:0.1|sign", "randk:0.2", "threshold:0.5", "qsgd:4"])
def test_mean_over_senders_divides_each_value_by_the_frames_that_hold_it(spec):
    frames, like = senders(spec), torch.zeros(40, 30)
    sums = [torch.zeros(40, 30), torch.zeros(40, 30)]
    mean = SenderMeanAccumulator(sums, len(frames))
    zeros = OpenedFrame.of(laconic.encode(like, spec), like)
    for frame in frames:
        mean.add([OpenedFrame.of(frame, like), None])
    mean.add([zeros, None])
    mean.finish()
    decoded = torch.stack([laconic.decode(frame) for frame in frames])
    counts = (decoded != 0).sum(0) if spec != "qsgd:4" else torch.full((40, 30), len(frames))
    torch.testing.assert_close(sums[0], decoded.sum(0) / counts.clamp(min=1), rtol=1e-5, atol=1e-6)
    assert not sums[1].any()


def test_sum_follows_the_given_order():
    frames = [laconic.encode(torch.tensor([v]), "none") for v in (1e8, 1.0, -1e8)]
    assert aggregate.weighted_sum(frames, [1, 1, 1]).item() == 0.0
    assert aggregate.weighted_sum([frames[0], frames[2], frames[1]], [1, 1, 1]).item() == 1.0


def test_codecs_and_dtypes_may_differ_and_the_sum_is_float32():
    x = laws.normal(50)
    frames = [laconic.encode(x, "none"), laconic.encode(x.bfloat16(), "none"), laconic.encode(x.double(), "topk:1.0"),
              laconic.encode(x, "fp16"), laconic.encode(torch.zeros(50), "qsgd:4")]  # fmt: skip
    mean = aggregate.mean(frames)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, 0.8 * x, rtol=1e-2, atol=1e-3)


def test_packets_and_frames_may_be_mixed():
    frames = senders("qsgd:4")
    packets = [wire.unpack(frame) if i % 2 else frame for i, frame in enumerate(frames)]
    assert torch.equal(aggregate.mean(packets), aggregate.mean(frames))


def test_mean_of_one_sender_is_its_tensor():
    (frame,) = senders("topk:0.1", n=1)
    assert torch.equal(aggregate.mean([frame]), laconic.decode(frame))


def test_out_is_overwritten_and_returned():
    frames = senders("qsgd:4")
    out = torch.full((40, 30), 9.0)
    assert aggregate.mean(frames, out=out) is out
    assert torch.equal(out, aggregate.mean(frames))


@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_small_shapes_are_summed(shape):
    frames = [laconic.encode(torch.ones(shape), "qsgd:4") for _ in range(3)]
    assert torch.equal(aggregate.weighted_sum(frames, [1, 1, 1]), torch.full(shape, 3.0))


@pytest.mark.parametrize("count, weights, message", [
    (0, [], "at least one"), (2, [1.0], "as many weights as packets"),
    (2, [1.0, 1.0, 1.0], "as many weights as packets"), (2, [1.0, math.nan], "finite"), (2, [math.inf, 1.0], "finite"),
])  # fmt: skip
def test_wrong_weights_raise_input_error(count, weights, message):
    with pytest.raises(InputError, match=message):
        aggregate.weighted_sum(senders("qsgd:4", count), weights)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [2.0, -1.0], [1.0, math.nan], [1.0]])
def test_negative_or_zero_weights_of_a_mean_raise_input_error(weights):
    with pytest.raises(InputError, match="weights"):
        aggregate.mean(senders("qsgd:4", 2), weights=weights)


def test_mean_of_no_packets_raises_input_error():
    with pytest.raises(InputError, match="at least one"):
        aggregate.mean([])


def test_other_shapes_raise_frame_error():
    with pytest.raises(FrameError, match=r"expected a tensor of shape \[40, 30\], the frame holds \[3\]"):
        aggregate.mean([*senders("qsgd:4", 2), laconic.encode(torch.ones(3), "none")])
    with pytest.raises(FrameError):
        aggregate.mean(senders("qsgd:4", 2), out=torch.zeros(30, 40))


def test_out_must_be_contiguous_float32():
    for out in (torch.zeros(40, 30, dtype=torch.float64), torch.zeros(30, 40).t()):
        with pytest.raises(InputError, match="contiguous float32"):
            aggregate.mean(senders("qsgd:4", 2), out=out)


def test_damaged_frame_raises_frame_error_before_the_sum_begins():
    good, bad = senders("qsgd:4", 2)
    out = torch.full((40, 30), 9.0)
    with pytest.raises(FrameError):
        aggregate.mean([good, bad[:-1]], out=out)
    assert bool((out == 9).all())


def test_mean_accumulator_equals_mean_and_can_be_reused():
    frames, like = senders("topk:0.1|qsgd:4", 3), torch.zeros(40, 30)
    accumulator = MeanAccumulator([like, torch.zeros(40, 30)], senders=3)
    for _ in range(2):
        for frame in frames:
            accumulator.add([OpenedFrame.of(frame, like, "w"), None])
        torch.testing.assert_close(accumulator.sums[0], aggregate.mean(frames), rtol=0, atol=0)
        assert not accumulator.sums[1].any()
        accumulator.clear()
    own = laws.normal(40, 30, seed=9)
    accumulator = MeanAccumulator([own.clone()], senders=2)
    accumulator.add_values(accumulator.sums)
    accumulator.add([OpenedFrame.of(frames[0], own)])
    torch.testing.assert_close(accumulator.sums[0], (own + laconic.decode(frames[0])) / 2)


def test_opened_frame_errors_name_the_slot():
    (frame,) = senders("qsgd:4", 1)
    for bad, like in (
        (frame[:-1], torch.zeros(40, 30)),
        (frame, torch.zeros(30, 40)),
        (frame, torch.zeros(40, 30, dtype=torch.float64)),
    ):
        with pytest.raises(FrameError, match="slot 'w': "):
            OpenedFrame.of(bad, like, "w")
    opened = OpenedFrame.of(frame, torch.zeros(40, 30), "w")
    out = torch.empty(40, 30)
    opened.decode_into(out)
    assert torch.equal(out, laconic.decode(frame)) and torch.equal(opened.decode(out.device), out)
    negative_norm = wire.unpack(frame)
    negative_norm.sections[0].view(torch.float32).fill_(-1.0)
    with pytest.raises(FrameError, match="slot 'w': "):
        OpenedFrame.of(wire.pack(negative_norm), out, "w").add_to(out, 0.5)


def test_bundle_template_matches_undamaged_bundles_of_its_layout_only():
    frames = {name: laconic.encode(laws.normal(50 + i), "none") for i, name in enumerate(("a", "bb"))}
    packets = [wire.unpack(frame) for frame in frames.values()]
    templates = [wire.FrameTemplate(p.codec, p.spec, [x.numel() for x in p.sections]) for p in packets]
    bundle = wire.as_bytes(wire.pack_bundle(list(frames.items()))).clone()
    template = BundleTemplate(list(frames), templates)
    assert template.matches(bundle) and template.nbytes == bundle.numel()
    for i in range(bundle.numel()):
        damaged = bundle.clone()
        damaged[i] ^= 1
        assert not template.matches(damaged), i
    for other in (bundle[:-1], torch.cat([bundle, bundle[:1]])):
        assert not template.matches(other)
    assert not BundleTemplate(["a", "b"], templates).matches(bundle)
    damaged = bundle.clone()
    damaged[-1] ^= 1
    assert template.matches(damaged, trusted=True)  # of trusted bytes only the header is compared
