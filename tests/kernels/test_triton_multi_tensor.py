"""Multi-tensor kernels: the frames, values and residuals of single-tensor kernels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from triton_support import DEVICE, MARKS, no_compile_fallback  # noqa: F401

import laconic
import laws
from laconic import FrameError, kernels, multi_tensor, wire
from laconic.aggregate import BundleTemplate
from laconic.collective.reductions.allreduce import Reducer
from laconic.collective.reductions.two_shot import TwoShot
from laconic.frames import open_packet

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]

ALL = laconic.Policy(min_numel=0, exempt_1d=False)
BUCKET_KERNELS = (
    "amax_bits_all", "qsgd_encode_all", "qsgd_decode_all", "sign_encode_all", "sign_decode_all", "bins_encode_all",
    "bins_decode_all",
)  # fmt: skip
SHAPES = {"a": (2, 270), "b": (1,), "c": (255,), "d": (3, 5, 7), "e": (512,)}
"""Sizes below, at and above a bucket, with and without a tail."""


@pytest.fixture
def launched_kernels(monkeypatch):
    """Names of the multi-tensor kernels that were launched."""
    with kernels.use_backend("triton"):
        assert (
            kernels.multi_tensor_backend_for(torch.zeros(1, device=DEVICE)) is not None
        )  # runs one of them once on a GPU
    made = []
    for name in (*BUCKET_KERNELS, "gather_blocks", "packed_int_decode_all"):
        real = getattr(kernels._triton(), name)
        monkeypatch.setattr(
            kernels._triton(), name, lambda *a, name=name, real=real, **k: made.append(name) or real(*a, **k)
        )
    return made


def kernel_family(spec):
    return next(family for family in ("qsgd", "bins", "sign") if family in spec.replace("onebit", "sign"))


def tensors(seed, shapes=SHAPES):
    return {name: laws.normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def encode_frames(channel, given, seeds, device):
    slots, xs = list(given), [x.to(device) for x in given.values()]
    nbytes = sum(channel.max_nbytes(name, x) + 16 for name, x in zip(slots, xs, strict=True))
    buffer = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
    spans = channel.encode_all_into(slots, xs, buffer, seeds=seeds)
    return [None if span is None else bytes(buffer[slice(*span)].tolist()) for span in spans], spans, buffer


@pytest.mark.parametrize("spec", [
    pytest.param("qsgd:4", marks=pytest.mark.slow), pytest.param("qsgd:2,round=nearest", marks=pytest.mark.slow),
    "qsgd:8,bucket=128", "ef|qsgd:4", pytest.param("sign:512", marks=pytest.mark.slow), "ef:0.9|onebit:256",
    pytest.param("ef:0.9|qsgd:4", marks=pytest.mark.slow),
    pytest.param("bins:3,bucket=512", marks=pytest.mark.slow), "ef:0.9|bins:2,bucket=128",
])  # fmt: skip
def test_frames_equal_those_of_single_tensor_kernels(spec, launched_kernels):
    on_triton, on_cpu = (laconic.channel(spec, policy=ALL) for _ in range(2))
    for step in range(2):
        given = tensors(10 * step)
        given["d"] *= step != 1  # all zero once
        seeds = [100 * step + i for i in range(len(given))]
        expected = [on_cpu.encode(name, x, seed=seed) for (name, x), seed in zip(given.items(), seeds, strict=True)]
        with kernels.use_backend("triton"):
            frames, spans, buffer = encode_frames(on_triton, given, seeds, DEVICE)
        assert frames == expected
        assert all(begin % 16 == 0 for begin, _ in spans)
        assert not buffer[spans[0][1] : spans[1][0]].any(), "nonzero bytes between frames"
    assert on_triton.stats == on_cpu.stats
    for name in SHAPES:
        residual, expected_residual = on_triton.residual(name), on_cpu.residual(name)
        assert (residual is None and expected_residual is None) or laws.same_bits(residual.cpu(), expected_residual)
    family = kernel_family(spec)
    encode, decode = f"{family}_encode_all", [] if family == "qsgd" else [f"{family}_decode_all"]
    assert launched_kernels == (["amax_bits_all", encode, *decode] if "ef" in spec else [encode]) * 2


def test_unaligned_tensors_are_encoded(launched_kernels):
    given = {name: torch.cat([torch.zeros(1), laws.normal(n)])[1:] for name, n in (("a", 600), ("b", 300))}
    expected = [laconic.encode(x, "qsgd:4", seed=i) for i, x in enumerate(given.values())]
    channel, flat = laconic.channel("qsgd:4", policy=ALL), torch.cat([torch.zeros(1), *given.values()]).to(DEVICE)
    views = {"a": flat[1:601], "b": flat[601:]}
    with kernels.use_backend("triton"):
        assert encode_frames(channel, views, [0, 1], DEVICE)[0] == expected
    assert launched_kernels


FEW = {"a": (540,), "c": (255,)}


def test_only_the_non_finite_tensor_is_skipped(launched_kernels):
    channel = laconic.channel("ef|qsgd:4", policy=ALL)
    with kernels.use_backend("triton"):
        encode_frames(channel, tensors(0, FEW), range(2), DEVICE)
        before = channel.residual("c").clone()
        given = tensors(7, FEW)
        given["c"][-1] = float("nan")
        frames, *_ = encode_frames(channel, given, range(2), DEVICE)
        assert [frame is None for frame in frames] == [name == "c" for name in given]
        assert torch.equal(channel.residual("c"), before) and channel.stats.residual_resets == 0
        channel.residual("c").fill_(laws.FLOAT32_MAX)
        given["c"] = torch.full((255,), laws.FLOAT32_MAX)
        frames, *_ = encode_frames(channel, given, range(2), DEVICE)
    assert [frame is None for frame in frames] == [name == "c" for name in given]
    assert channel.residual("c") is None and channel.stats.residual_resets == 1


OTHERS = ("momentum:0.9|qsgd:4", "qsgd:4,norm=l2", "qsgd:5", "sign:128", "topk:0.3", "topk:0.3|qsgd:4")


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=pytest.mark.slow if i else ()) for i, spec in enumerate(OTHERS)]
)
def test_codecs_without_a_multi_tensor_kernel_use_single_tensor_kernels(spec, launched_kernels):
    on_triton, on_cpu, given = laconic.channel(spec, policy=ALL), laconic.channel(spec, policy=ALL), tensors(3, FEW)
    expected = [on_cpu.encode(name, x, seed=i) for i, (name, x) in enumerate(given.items())]
    with kernels.use_backend("triton"):
        frames, *_ = encode_frames(on_triton, given, range(2), DEVICE)
    assert frames == expected and not launched_kernels


def bundle(given, spec="qsgd:4"):
    """Return frames in one aligned message, as they arrive."""
    frames = [laconic.encode(x, spec, seed=i) for i, x in enumerate(given.values())]
    packed = wire.pack_bundle(list(zip(given, frames, strict=True)))
    message = torch.empty(len(packed), dtype=torch.uint8)
    message[:] = torch.frombuffer(packed, dtype=torch.uint8)
    layout = multi_tensor.layout_of(spec, tuple(tuple(x.shape) for x in given.values()))
    template = BundleTemplate(tuple(given), layout.templates)
    at = template.offsets[0]
    assert (
        template.matches(message)
        and at == len(wire.bundle_header(list(given), layout.sizes))
        and layout.sizes == [len(frame) for frame in frames]
    )
    return message, at, layout, frames


@pytest.mark.parametrize("spec", ["qsgd:4", "onebit:512", "bins:2,bucket=512"])
@pytest.mark.parametrize("weight", [None, -0.3])
def test_values_equal_those_of_single_tensor_kernels(spec, weight, launched_kernels):
    given = tensors(5)
    message, at, layout, frames = bundle(given, spec)
    expected = [torch.ones(x.shape) for x in given.values()]
    outs = [x.to(DEVICE, copy=True) for x in expected]
    for frame, to in zip(frames, expected, strict=True):
        packet, chain = open_packet(frame)
        chain.decode(packet, out=to) if weight is None else chain.accumulate(packet, to, weight)
    assert layout.matches(message.data_ptr() + at)
    with kernels.use_backend("triton"):
        multi_tensor.read_frames(message, at, layout, outs, weight)
    assert all(laws.same_bits(mine.cpu(), theirs) for mine, theirs in zip(outs, expected, strict=True))
    assert launched_kernels == [f"{kernel_family(spec)}_decode_all"]


def test_invalid_frames_are_rejected():
    given = tensors(5)
    message, at, layout, _ = bundle(given)
    outs = [torch.zeros(x.shape, device=DEVICE) for x in given.values()]
    first = message.data_ptr() + at
    for wrong in (0, 30, layout.offsets[3] + 8, layout.floats[2], layout.packed[4] + 7):
        message[at + wrong] ^= 1
        assert not layout.matches(first), wrong
        message[at + wrong] ^= 1
    assert layout.matches(first)
    template = BundleTemplate(tuple(given), layout.templates)
    assert template.matches(message) and not template.matches(message[:-1]) and not template.matches(message[:8])
    assert not BundleTemplate(tuple(given)[::-1], layout.templates).matches(message)
    norms = layout.floats[3] + at
    message[norms : norms + 4].view(torch.float32)[0] = -1.0
    with kernels.use_backend("triton"), pytest.raises(FrameError, match="scale"):
        multi_tensor.read_frames(message, at, layout, outs, 0.5)
    assert all(bool(torch.isfinite(out).all()) for out in outs)


def test_each_program_gets_one_part_of_one_tensor():
    from laconic.kernels.triton import tensor_table

    parts = tensor_table.part_table((5, 16, 17, 1), 16, torch.device(DEVICE))
    assert parts.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0]]


BLOCK_KERNELS = {"gather_blocks", "packed_int_decode_all"}
REDUCTIONS = {
    "qsgd:4": TwoShot, "ef|qsgd:4": TwoShot, "ef:0.9|qsgd:4": TwoShot, "ef|thc:4": Reducer, "ef:0.9|thc:4": Reducer,
    "thc:3": Reducer, "ef|shared:8": Reducer, "ef:0.9|shared:8": Reducer,
}  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec in ("ef|qsgd:4", "ef:0.9|thc:4") else pytest.mark.slow)
        for spec in REDUCTIONS
    ],
)
def test_an_exchange_gives_the_means_of_the_cpu(spec, launched_kernels):
    """A single rank owns all shards: it encodes the sum with error feedback and decodes its own reply."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        on_triton, on_cpu = (REDUCTIONS[spec](spec, nonfinite="spread") for _ in range(2))
        for step in range(3):
            given = tensors(step, {"a": (2, 270), "b": (1,), "e": (255,)})
            on_device = {name: x.to(DEVICE, copy=True) for name, x in given.items()}
            if step == 1:
                given["e"][3] = on_device["e"][3] = float("inf")
            on_cpu.reduce_all(list(given.items()))
            with kernels.use_backend("triton"):
                on_triton.reduce_all(list(on_device.items()))
            for name, x in given.items():
                assert laws.same_bits(on_device[name].cpu(), x), name
            assert bool(given["e"].isnan().all()) == (step == 1)
        state, expected = on_triton.state_dict(), on_cpu.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[key].cpu(), expected[key]) for key in state)
        assert on_triton.stats.skipped_nonfinite == on_cpu.stats.skipped_nonfinite == 1
    finally:
        dist.destroy_process_group()
    check = {"amax_bits_all"} if spec.startswith("ef") else set()
    assert set(launched_kernels) == (
        check | (BLOCK_KERNELS if REDUCTIONS[spec] is Reducer else {"qsgd_encode_all", "qsgd_decode_all"})
    )
