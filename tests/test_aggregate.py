from __future__ import annotations

import math

import pytest
import torch

import laconic
import laws
from laconic import FrameError, InputError, aggregate, wire


def senders(spec, n=5, shape=(40, 30)):
    return [laconic.encode(laws.normal(*shape, seed=i), spec, seed=i) for i in range(n)]


@pytest.mark.parametrize("spec", laws.EVERY)
def test_mean_is_decode_then_average(spec):
    frames = senders(spec)
    wanted = torch.stack([laconic.decode(frame) for frame in frames]).double().mean(0)
    torch.testing.assert_close(aggregate.mean(frames).double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["qsgd:4", "topk:0.1|qsgd:4", "none"])
def test_weights_belong_to_their_packets(spec):
    frames, weights = senders(spec), [0.5, 2.0, 0.0, 1.0, 4.0]
    decoded = torch.stack([laconic.decode(frame) for frame in frames]).double()
    each = torch.tensor(weights, dtype=torch.float64).view(-1, 1, 1)
    torch.testing.assert_close(
        aggregate.weighted_sum(frames, weights).double(), (decoded * each).sum(0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        aggregate.mean(frames, weights=weights).double(), (decoded * each).sum(0) / 7.5, rtol=1e-5, atol=1e-5
    )


def test_the_sum_is_taken_in_the_order_given():
    frames = [laconic.encode(torch.tensor([v]), "none") for v in (1e8, 1.0, -1e8)]
    assert aggregate.weighted_sum(frames, [1, 1, 1]).item() == 0.0
    assert aggregate.weighted_sum([frames[0], frames[2], frames[1]], [1, 1, 1]).item() == 1.0


def test_codecs_and_dtypes_may_differ_and_the_sum_is_float32():
    x = laws.normal(50)
    frames = [laconic.encode(x, "none"), laconic.encode(x.bfloat16(), "none"), laconic.encode(x.double(), "topk:1.0"),
              laconic.encode(x, "fp16"), laconic.encode(torch.zeros(50), "qsgd:4")]  # fmt: skip
    found = aggregate.mean(frames)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, 0.8 * x, rtol=1e-2, atol=1e-3)


def test_packets_and_frames_mix():
    frames = senders("qsgd:4")
    packets = [wire.unpack(frame) if i % 2 else frame for i, frame in enumerate(frames)]
    assert torch.equal(aggregate.mean(packets), aggregate.mean(frames))


def test_one_sender_is_its_own_mean():
    (frame,) = senders("topk:0.1", n=1)
    assert torch.equal(aggregate.mean([frame]), laconic.decode(frame))


def test_out_is_overwritten_and_returned():
    frames = senders("qsgd:4")
    out = torch.full((40, 30), 9.0)
    assert aggregate.mean(frames, out=out) is out
    assert torch.equal(out, aggregate.mean(frames))


@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_small_shapes_sum(shape):
    frames = [laconic.encode(torch.ones(shape), "qsgd:4") for _ in range(3)]
    assert torch.equal(aggregate.weighted_sum(frames, [1, 1, 1]), torch.full(shape, 3.0))


@pytest.mark.parametrize(
    "count, weights, message",
    [
        (0, [], "at least one"),
        (2, [1.0], "as many weights as packets"),
        (2, [1.0, 1.0, 1.0], "as many weights as packets"),
        (2, [1.0, math.nan], "finite"),
        (2, [math.inf, 1.0], "finite"),
    ],
)
def test_weights_must_fit(count, weights, message):
    with pytest.raises(InputError, match=message):
        aggregate.weighted_sum(senders("qsgd:4", count), weights)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [2.0, -1.0], [1.0, math.nan], [1.0]])
def test_a_mean_takes_no_negative_or_vanishing_weights(weights):
    with pytest.raises(InputError, match="weights"):
        aggregate.mean(senders("qsgd:4", 2), weights=weights)


def test_a_mean_of_nothing_is_an_input_error():
    with pytest.raises(InputError, match="at least one"):
        aggregate.mean([])


def test_other_shapes_are_refused():
    with pytest.raises(FrameError, match=r"expected a tensor of shape \[40, 30\], the frame holds \[3\]"):
        aggregate.mean([*senders("qsgd:4", 2), laconic.encode(torch.ones(3), "none")])
    with pytest.raises(FrameError):
        aggregate.mean(senders("qsgd:4", 2), out=torch.zeros(30, 40))


def test_out_must_be_contiguous_float32():
    for out in (torch.zeros(40, 30, dtype=torch.float64), torch.zeros(30, 40).t()):
        with pytest.raises(InputError, match="contiguous float32"):
            aggregate.mean(senders("qsgd:4", 2), out=out)


def test_a_damaged_frame_is_a_frame_error_before_the_sum_begins():
    good, bad = senders("qsgd:4", 2)
    out = torch.full((40, 30), 9.0)
    with pytest.raises(FrameError):
        aggregate.mean([good, bad[:-1]], out=out)
    assert bool((out == 9).all())
