"""Messages between stages: fixed sizes, shorter frames, differences, values that are not finite, foreign bytes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.errors import ConfigError, FrameError, NonFiniteError
from laconic.packet import TensorSpec
from laconic.pipeline.ends import make_receiver, make_sender
from laconic.pipeline.messages import Position, Receiver, Sender, message_nbytes, stage_codec
from laconic.pipeline.traffic import Traffic, load, save

SHAPE = (4, 16, 64)
FIXED = (
    "thc:4", "thc:2,round=stochastic", "qsgd:4", "qsgd:2", "shared:8", "sign", "onebit", "uniform:8", "terngrad",
    "bf16", "fp16", "bins:2", "randk:0.1", "topk:0.1|qsgd:4",
)  # fmt: skip
FIRST = Position(0, 0)


def activations(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends(spec: str, **options) -> tuple[Sender, Receiver]:
    delta = options.pop("delta", False)
    chain = stage_codec(spec, "forward")
    return Sender(chain, "forward", 0, delta=delta), Receiver(chain, "forward", 1, delta=delta, **options)


def send(sender: Sender, receiver: Receiver, x: torch.Tensor, position: Position = FIRST, **options) -> torch.Tensor:
    message, out = sender.message(x, position, **options), torch.empty_like(x)
    assert message is not None
    receiver.read(message, out, position, **options)
    return out


@pytest.mark.parametrize("spec", FIXED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_message_has_the_announced_size_and_decodes_as_its_frame(spec, dtype):
    if dtype == torch.bfloat16 and spec in ("bf16", "fp16"):
        assert message_nbytes(stage_codec(spec, "forward"), TensorSpec(SHAPE, dtype)) == "is too small to be compressed"
        return
    sender, receiver = ends(spec)
    nbytes = message_nbytes(sender.chain, TensorSpec(SHAPE, dtype))
    for step, x in enumerate((activations(0, dtype), torch.zeros(SHAPE, dtype=dtype), activations(1, dtype))):
        message = sender.message(x, FIRST)
        assert message.numel() == nbytes == laconic.max_nbytes(spec, x)
        out = torch.empty_like(x)
        receiver.read(message, out, FIRST)
        if step == 1:
            assert not out.any()
        elif not sender.chain.randomized:
            assert torch.equal(out, laconic.decode(laconic.encode(x, spec)))
        assert out.dtype == dtype
    assert sender.stats.bytes_sent == 3 * nbytes and sender.stats.bytes_uncompressed == 3 * x.nbytes


def test_rounding_differs_between_steps_positions_and_stages_and_repeats_with_the_seed():
    x, chain = activations(), stage_codec("qsgd:3", "forward")
    one, same = Sender(chain, "forward", 0), Sender(chain, "forward", 0)
    messages = [
        one.message(x, FIRST),
        one.message(x, FIRST),
        one.message(x, Position(1, 0)),
        one.message(x, Position(0, 1)),
    ]
    messages += [Sender(chain, "forward", 1).message(x, FIRST), Sender(chain, "backward", 0).message(x, FIRST)]
    messages += [Sender(chain, "forward", 0, seed=1).message(x, FIRST)]
    assert len({bytes(message.tolist()) for message in messages}) == len(messages)
    assert torch.equal(same.message(x, FIRST), messages[0])
    same.message(x, FIRST, training=False)  # an evaluation changes nothing
    assert torch.equal(same.message(x, FIRST), messages[1])


def test_tensors_that_cannot_shrink_travel_as_they_are_and_are_counted():
    sender, _ = ends("qsgd:4")
    for x in (torch.arange(10), torch.ones(8, dtype=torch.bool), torch.randn(3), torch.randn(0, 4)):
        assert sender.message(x, FIRST) is None
    assert sender.stats.exempt == {"is int64": 1, "is bool": 1, "is too small to be compressed": 2}
    assert sender.stats.bytes_sent == sender.stats.bytes_uncompressed == 80 + 8 + 12
    none, _ = ends("none")
    assert none.message(activations(), FIRST) is None


def test_values_that_are_not_finite_become_nan_zeros_or_an_error():
    x = activations()
    x[0, 0, 0] = torch.inf
    assert send(*ends("thc:4", nonfinite="spread"), x).isnan().all()
    assert not send(*ends("thc:4", nonfinite="skip"), x).any()
    sender, receiver = ends("qsgd:4", nonfinite="raise")
    with pytest.raises(NonFiniteError, match="stage 1 received activations that hold a NaN"):
        send(sender, receiver, x)
    assert sender.stats.nonfinite == 1


def test_differences_approach_a_sample_that_is_sent_again():
    sender, receiver = ends("qsgd:3,round=nearest", delta=True)
    first, second = activations(0), activations(1)
    errors = []
    for _ in range(6):
        for key, x in (("a", first), ("b", second)):
            out = send(sender, receiver, x, sample=key)
            errors.append(float((out - x).square().mean()))
    assert errors[10] < errors[0] / 1000 and errors[11] < errors[1] / 1000
    for key, copy in sender.copies.by_sample.items():
        assert torch.equal(copy.values, receiver.copies.by_sample[key].values)
    before = {key: copy.values.clone() for key, copy in receiver.copies.by_sample.items()}
    plain = send(sender, receiver, first, sample="a", training=False)
    assert torch.equal(plain, laconic.decode(laconic.encode(first, "qsgd:3,round=nearest")))
    assert all(torch.equal(copy, receiver.copies.by_sample[key].values) for key, copy in before.items())


def test_copies_beyond_float16_saturate():
    sender, receiver = ends("thc:2", delta=True)
    for step in range(4):
        x = torch.sign(activations(step)).half() * torch.finfo(torch.float16).max
        assert bool(send(sender, receiver, x, sample="a").isfinite().all())
    assert max(float(copy.values.abs().max()) for copy in receiver.copies.by_sample.values()) > 65504


def test_a_sample_that_is_not_finite_leaves_both_copies_alone():
    sender, receiver = ends("qsgd:4", delta=True)
    send(sender, receiver, activations())
    before = next(iter(sender.copies.by_sample.values())).values.clone()
    assert send(sender, receiver, activations() / 0).isnan().all()
    for end in (sender, receiver):
        assert torch.equal(next(iter(end.copies.by_sample.values())).values, before)


def test_receiver_that_missed_an_update_raises_frame_error():
    sender, receiver = ends("qsgd:4", delta=True)
    sender.message(activations(), FIRST)
    with pytest.raises(FrameError, match="updated its copy of this sample 1 times, the receiver 0 times"):
        send(sender, receiver, activations())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ef|qsgd:4", "'ef' in 'ef|qsgd:4' keeps memory between rounds: .*write 'qsgd:4'"),
        ("qsgd:4|rans", "forward cannot be 'qsgd:4|rans': .* fixed size, but 'rans' writes as many bytes"),
        ("threshold:0.1", "'threshold' keeps as many values"),
        ("union", "'union' keeps as many values"),
        ("adaptive", "'adaptive' computes its number of levels"),
        ("powersgd:4", "'powersgd' approximates the matrix of a parameter"),
        ("nothing", "unknown"),
    ],
)
def test_codec_whose_size_depends_on_the_values_is_refused(spec, words):
    with pytest.raises(ConfigError, match=words.replace("|", r"\|")):
        stage_codec(spec, "forward")


@settings(max_examples=60)
@given(st.data())
def test_foreign_bytes_raise_frame_error_only(data):
    spec = data.draw(st.sampled_from(FIXED))
    sender, receiver = ends(spec)
    x = torch.zeros(SHAPE) if data.draw(st.booleans()) else activations()
    message, out = sender.message(x, FIRST), torch.empty(SHAPE)
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, message.numel() - 1) | st.integers(0, 63))] ^= data.draw(st.integers(1, 255))
    with suppress(FrameError):
        receiver.read(message, out, FIRST)


def test_frame_of_another_codec_shape_or_length_raises_frame_error():
    _, receiver = ends("qsgd:4")
    out = torch.empty(SHAPE)
    for x, spec in ((activations(), "qsgd:8"), (activations()[:2], "qsgd:4"), (activations().bfloat16(), "qsgd:4")):
        frame = torch.frombuffer(bytearray(laconic.encode(x, spec)), dtype=torch.uint8)
        with pytest.raises(FrameError, match=r"expected \[4, 16, 64\] of torch.float32 by 'qsgd:4'|values"):
            receiver.read(frame, out, FIRST)
    message = ends("qsgd:4")[0].message(activations(), FIRST)
    with pytest.raises(FrameError, match="truncated"):
        receiver.read(message[:-1].clone(), out, FIRST)
    with pytest.raises(FrameError, match=r"at least \d+ bytes"):
        receiver.read(torch.zeros(8, dtype=torch.uint8), out, FIRST)
    with pytest.raises(FrameError, match="bytes after the frame must be zero"):
        receiver.read(torch.cat([message, torch.ones(3, dtype=torch.uint8)]), out, FIRST)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", FIXED)
@pytest.mark.parametrize("delta", [False, True])
def test_stages_on_a_gpu_send_the_bytes_of_those_on_a_cpu(spec, delta):
    on_host, on_gpu = ends(spec, delta=delta), ends(spec, delta=delta)
    for step in range(3):
        x = activations(step)
        messages = [sender.message(y, FIRST) for (sender, _), y in ((on_host, x), (on_gpu, x.cuda()))]
        assert messages[1].is_cuda and torch.equal(messages[0], messages[1].cpu())
        outs = [torch.empty_like(x), torch.empty_like(x, device="cuda")]
        for (_, receiver), message, out in zip((on_host, on_gpu), messages, outs, strict=True):
            receiver.read(message, out, FIRST)
        assert torch.equal(outs[0], outs[1].cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_transform_coding_on_a_gpu_rotates_and_resumes(dtype):
    """The basis is computed on the GPU and travels through the host; a group of zeros and autocast change nothing."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(4, 64, generator=generator)
    options = {"seed": 3, "delta": False, "nonfinite": "spread", "error_every": 1}
    traffic, resumed = (Traffic("klt:2", "forward", 0, **options) for _ in range(2))

    def exchange(which: Traffic, x: torch.Tensor) -> torch.Tensor:
        nbytes = which.receiver.expected_nbytes(TensorSpec.of(x), FIRST)
        with torch.autocast("cuda", dtype=torch.float16):
            message, out = which.sender.message(x, FIRST), torch.empty_like(x)
            assert message.is_cuda and message.numel() == nbytes
            which.receiver.read(message, out, FIRST)
        return out

    for step in range(200):
        x = torch.randn(8, 64, 4, generator=generator) @ directions
        x = (x + 0.01 * torch.randn(x.shape, generator=generator)).to("cuda", dtype)
        out = exchange(traffic, x)
        if step == 130:
            load(save(traffic), [resumed])
        if step > 130:
            assert torch.equal(out, exchange(resumed, x))
    assert out.is_cuda and float((x - out).float().square().sum() / x.float().square().sum()) < 1e-3
    assert 0 < traffic.stats.error < 1e-3
    assert not exchange(traffic, torch.zeros_like(x)).any()
    on_host = make_sender("klt:2", "forward", 0), make_receiver("klt:2", "forward", 1)
    message = on_host[0].message(x.cpu(), FIRST)  # a first message is the same on both
    assert torch.equal(message, make_sender("klt:2", "forward", 0).message(x, FIRST).cpu())
