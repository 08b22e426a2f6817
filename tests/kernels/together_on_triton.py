"""Many tensors in one launch: the frames, values and residuals of one after the other. Run by ``test_triton.py``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_triton import DEVICE, _nothing_gives_way, pytestmark  # noqa: F401

import laconic
import laws
from laconic import FrameError, kernels, multi_tensor, wire
from laconic.collective import bundles
from laconic.collective.reductions.allreduce import Reducer
from laconic.collective.reductions.two_shot import TwoShot
from laconic.frames import open_packet
from laconic.kernels.triton import multi_tensor as multi_tensor_kernels

ALL = laconic.Policy(min_numel=0, exempt_1d=False)
LAUNCHED = ("amax_bits_all", "qsgd_encode_all", "qsgd_decode_all", "sign_encode_all", "sign_decode_all")
SHAPES = {"a": (2, 270), "b": (1,), "c": (255,), "d": (3, 5, 7), "e": (1024,), "f": (1100,)}


@pytest.fixture
def launches(monkeypatch):
    """What was launched for many."""
    with kernels.use_backend("triton"):
        assert (
            kernels.multi_tensor_backend_for(torch.zeros(1, device=DEVICE)) is not None
        )  # which tries it once on a GPU
    made = []
    for name in (*LAUNCHED, "gather_blocks", "packed_int_decode_all"):
        real = getattr(kernels._triton(), name)
        monkeypatch.setattr(
            kernels._triton(), name, lambda *a, name=name, real=real, **k: made.append(name) or real(*a, **k)
        )
    return made


def tensors(seed, shapes=SHAPES):
    return {name: laws.normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def frames_of(channel, given, seeds, device):
    slots, xs = list(given), [x.to(device) for x in given.values()]
    room = torch.full(
        (sum(channel.max_nbytes(name, x) + 16 for name, x in zip(slots, xs, strict=True)),), 0xEE, dtype=torch.uint8
    )
    spans = channel.encode_all_into(slots, xs, room, seeds=seeds)
    return [None if span is None else bytes(room[slice(*span)].tolist()) for span in spans], spans, room


@pytest.mark.parametrize(
    "spec",
    [
        "qsgd:4",
        pytest.param("qsgd:2,round=nearest", marks=pytest.mark.slow),
        "qsgd:8,bucket=128",
        "ef|qsgd:4",
        pytest.param("sign:512", marks=pytest.mark.slow),
        "ef|onebit:256",
    ],
)
def test_frames_are_those_of_one_after_the_other(spec, launches):
    ours, truth = (laconic.channel(spec, policy=ALL) for _ in range(2))
    for step in range(2):
        given = tensors(10 * step)
        given["d"] *= step != 1  # all zero once
        seeds = [100 * step + i for i in range(len(given))]
        wanted = [truth.encode(name, x, seed=seed) for (name, x), seed in zip(given.items(), seeds, strict=True)]
        with kernels.use_backend("triton"):
            found, spans, room = frames_of(ours, given, seeds, DEVICE)
        assert found == wanted
        assert all(begin % 16 == 0 for begin, _ in spans)
        assert not room[spans[0][1] : spans[1][0]].any(), "nothing between frames"
    assert ours.stats == truth.stats
    for name in SHAPES:
        mine, theirs = ours.residual(name), truth.residual(name)
        assert (mine is None and theirs is None) or laws.same_bits(mine.cpu(), theirs)
    encode, decode = ("qsgd_encode_all", []) if "qsgd" in spec else ("sign_encode_all", ["sign_decode_all"])
    assert launches == (["amax_bits_all", encode, *decode] if "ef" in spec else [encode]) * 2


def test_tensors_that_begin_between_vectors_are_served(launches):
    given = {name: torch.cat([torch.zeros(1), laws.normal(n)])[1:] for name, n in (("a", 1500), ("b", 300))}
    wanted = [laconic.encode(x, "qsgd:4", seed=i) for i, x in enumerate(given.values())]
    channel, flat = laconic.channel("qsgd:4", policy=ALL), torch.cat([torch.zeros(1), *given.values()]).to(DEVICE)
    views = {"a": flat[1:1501], "b": flat[1501:]}
    with kernels.use_backend("triton"):
        assert frames_of(channel, views, [0, 1], DEVICE)[0] == wanted
    assert launches


def test_one_that_is_not_finite_is_left_out_alone(launches):
    channel = laconic.channel("ef|qsgd:4", policy=ALL)
    with kernels.use_backend("triton"):
        frames_of(channel, tensors(0), range(6), DEVICE)
        before = channel.residual("c").clone()
        given = tensors(7)
        given["c"][-1] = float("nan")
        found, *_ = frames_of(channel, given, range(6), DEVICE)
        assert [frame is None for frame in found] == [name == "c" for name in given]
        assert torch.equal(channel.residual("c"), before) and channel.stats.residual_resets == 0
        channel.residual("c").fill_(laws.FLOAT32_MAX)
        given["c"] = torch.full((255,), laws.FLOAT32_MAX)
        found, *_ = frames_of(channel, given, range(6), DEVICE)
    assert [frame is None for frame in found] == [name == "c" for name in given]
    assert channel.residual("c") is None and channel.stats.residual_resets == 1


OTHERS = ("momentum:0.9|qsgd:4", "qsgd:4,norm=l2", "qsgd:5", "sign:128", "topk:0.3", "topk:0.3|qsgd:4")


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=pytest.mark.slow if i else ()) for i, spec in enumerate(OTHERS)]
)
def test_what_has_no_such_kernel_goes_one_after_the_other(spec, launches):
    ours, truth, given = laconic.channel(spec, policy=ALL), laconic.channel(spec, policy=ALL), tensors(3)
    wanted = [truth.encode(name, x, seed=i) for i, (name, x) in enumerate(given.items())]
    with kernels.use_backend("triton"):
        found, *_ = frames_of(ours, given, range(6), DEVICE)
    assert found == wanted and not launches


def bundle(given, spec="qsgd:4"):
    """Frames in one aligned message, as they arrive."""
    frames = [laconic.encode(x, spec, seed=i) for i, x in enumerate(given.values())]
    packed = wire.pack_bundle(list(zip(given, frames, strict=True)))
    message = torch.empty(len(packed), dtype=torch.uint8)
    message[:] = torch.frombuffer(packed, dtype=torch.uint8)
    layout = multi_tensor.layout_of(spec, tuple(tuple(x.shape) for x in given.values()))
    at = bundles.body_of(message, tuple(given), tuple(layout.sizes))
    assert at == len(wire.bundle_header(list(given), layout.sizes)) and layout.sizes == [len(frame) for frame in frames]
    return message, at, layout, frames


@pytest.mark.parametrize("spec", ["qsgd:4", "onebit:512"])
@pytest.mark.parametrize("weight", [None, -0.3])
def test_values_are_those_of_one_after_the_other(spec, weight, launches):
    given = tensors(5)
    message, at, layout, frames = bundle(given, spec)
    truth = [torch.ones(x.shape) for x in given.values()]
    ours = [x.to(DEVICE, copy=True) for x in truth]
    for frame, to in zip(frames, truth, strict=True):
        packet, chain = open_packet(frame)
        chain.decode(packet, out=to) if weight is None else chain.accumulate(packet, to, weight)
    assert layout.found_at(message.data_ptr() + at)
    with kernels.use_backend("triton"):
        multi_tensor.read_frames(message, at, layout, ours, weight)
    assert all(laws.same_bits(mine.cpu(), theirs) for mine, theirs in zip(ours, truth, strict=True))
    assert launches == ["qsgd_decode_all" if "qsgd" in spec else "sign_decode_all"]


def test_frames_that_lie_are_refused_together():
    given = tensors(5)
    message, at, layout, _ = bundle(given)
    outs = [torch.zeros(x.shape, device=DEVICE) for x in given.values()]
    first = message.data_ptr() + at
    for wrong in (0, 30, layout.begins[3] + 8, layout.floats[2], layout.packed[5] + 7):
        message[at + wrong] ^= 1
        assert not layout.found_at(first), wrong
        message[at + wrong] ^= 1
    assert layout.found_at(first)
    names, sizes = tuple(given), tuple(layout.sizes)
    assert bundles.body_of(message, names, sizes) == at
    assert bundles.body_of(message[:-1], names, sizes) is None
    assert bundles.body_of(message[:8], names, sizes) is None
    assert bundles.body_of(message, names[::-1], sizes) is None
    norms = layout.floats[3] + at
    message[norms : norms + 4].view(torch.float32)[0] = -1.0
    with kernels.use_backend("triton"), pytest.raises(FrameError, match="scale"):
        multi_tensor.read_frames(message, at, layout, outs, 0.5)
    assert all(bool(torch.isfinite(out).all()) for out in outs)


def test_programs_find_their_tensor_and_their_part_of_it():
    parts = multi_tensor_kernels._parts((5, 16, 17, 1), 16, torch.device(DEVICE))
    assert parts.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0]]


LANES = {"gather_blocks", "packed_int_decode_all"}
ROADS = {"qsgd:4": TwoShot, "ef|qsgd:4": TwoShot, "ef|thc:4": Reducer, "thc:3": Reducer, "ef|shared:8": Reducer}


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if spec.startswith("ef") else pytest.mark.slow) for spec in ROADS]
)
def test_an_exchange_gives_the_same_means(spec, launches):
    """A rank alone is owner of all: it encodes the sum with a memory and reads its own answer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours, truth = (ROADS[spec](spec, nonfinite="spread") for _ in range(2))
        for step in range(3):
            given = tensors(step)
            there = {name: x.to(DEVICE, copy=True) for name, x in given.items()}
            if step == 1:
                given["e"][3] = there["e"][3] = float("inf")
            truth.reduce_all(list(given.items()))
            with kernels.use_backend("triton"):
                ours.reduce_all(list(there.items()))
            for name, x in given.items():
                assert laws.same_bits(there[name].cpu(), x), name
            assert bool(given["e"].isnan().all()) == (step == 1)
        mine, theirs = ours.state_dict(), truth.state_dict()
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key].cpu(), theirs[key]) for key in mine)
        assert ours.stats.skipped_nonfinite == truth.stats.skipped_nonfinite == 1
    finally:
        dist.destroy_process_group()
    checked = {"amax_bits_all"} if spec == "ef|qsgd:4" else set()
    assert set(launches) == (LANES if ROADS[spec] is Reducer else {"qsgd_encode_all", "qsgd_decode_all"} | checked)
