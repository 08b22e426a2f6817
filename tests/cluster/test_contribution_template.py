"""The fast check of a worker's contribution accepts nothing that parsing in full would refuse."""

from __future__ import annotations

import math

import pytest
import torch

import laconic
from laconic import wire
from laconic.cluster.homomorphic import server
from laconic.cluster.homomorphic.server import Contribution, RoundSums, SlotSum, pack_contribution
from laconic.cluster.homomorphic.worker import SummingWorker
from laconic.cluster.job import Job
from laconic.errors import FrameError
from laconic.packet import Packet

SHAPE = (30, 70)
SPEC = "thc:4"
HOW = SlotSum("w", SHAPE, laconic.summing(SPEC, workers=2))


def message(worker: int = 0, *, scales: torch.Tensor | None = None, agreed_scales: torch.Tensor | None = None) -> bytes:
    """Return a contribution with valid checksums, whatever scales are in it."""
    contributor = laconic.Contributor(SPEC, workers=2, worker=worker)
    probe = contributor.probe("w", torch.randn(SHAPE, generator=torch.Generator().manual_seed(worker)))
    packet = contributor.packet("w", torch.full_like(probe, 3.0))
    if agreed_scales is not None:
        head, _, integers = packet.sections
        packet = Packet(packet.codec, packet.spec, (head, agreed_scales.view(torch.uint8), integers))
    offered = probe if scales is None else scales
    frame = wire.pack(Packet("none", laconic.TensorSpec.of(offered), (offered.contiguous().view(torch.uint8),)))
    return bytes(pack_contribution(frame, wire.pack(packet)))


def bad_scales(value: float) -> torch.Tensor:
    return torch.tensor([1.0, value, 1.0])


@pytest.mark.parametrize("shape", [(1,), (70, 70), (5000,)])
@pytest.mark.parametrize("spec", ["shared:8", "ef|thc:4", "thc:3", "shared:16"])
def test_fast_check_reads_what_parsing_in_full_reads(spec: str, shape: tuple[int, ...]) -> None:
    job = Job(workers=3, push=spec, push_small=spec, returns="sum")
    like = {"w": torch.zeros(shape)}
    (how,) = job.slot_sums(like)
    worker = SummingWorker(job, 0, like)
    probe = worker.probe("w", torch.randn(shape, generator=torch.Generator().manual_seed(1)), seed=5)
    contribution = bytes(worker.encode_on("w", probe, probe, seed=5))
    assert how.template is not None
    fast = how.template.read(contribution)
    scales, packet = server._parse(how, contribution)
    assert fast is not None and packet is not None and torch.equal(fast[0], scales)
    assert fast[1].spec == packet.spec and fast[1].codec == packet.codec
    assert all(torch.equal(a, b) for a, b in zip(fast[1].sections, packet.sections, strict=True))


def test_contribution_that_differs_from_the_template_is_parsed_in_full() -> None:
    job = Job(workers=2, push="shared:8", push_small="shared:8", returns="sum")
    (how,) = job.slot_sums({"w": torch.zeros(10)})
    assert how.template is not None
    only_scales = pack_contribution(laconic.encode(torch.ones(1), "none"), None)
    assert how.template.read(only_scales) is None and Contribution.of(how, only_scales).packet is None
    (empty,) = job.slot_sums({"w": torch.zeros(0)})
    assert empty.template is None


def test_every_flipped_bit_is_found() -> None:
    """In header, section table, scales, integers and gaps, by both ways of reading."""
    good = message()
    assert HOW.template is not None and HOW.template.read(good) is not None
    for index in range(len(good)):
        damaged = bytearray(good)
        damaged[index] ^= 1 << (index % 8)
        assert HOW.template.read(bytes(damaged)) is None, index
        if index % 7 == 0:
            with pytest.raises(FrameError, match=r"^slot 'w'"):
                Contribution.of(HOW, bytes(damaged))
    for other in (good[:-1], good + b"\0", b""):
        assert HOW.template.read(other) is None
        with pytest.raises(FrameError):
            Contribution.of(HOW, other)


@pytest.mark.parametrize("value", [-1.0, -0.0, math.nan, -math.nan, math.inf, -math.inf])
def test_invalid_scales_with_a_valid_checksum_are_refused(value: float) -> None:
    hostile = message(scales=bad_scales(value))
    assert HOW.template is not None
    with pytest.raises(FrameError, match="negative or not finite"):
        HOW.template.read(hostile)
    with pytest.raises(FrameError, match="slot 'w': a scale is negative or not finite"):
        Contribution.of(HOW, hostile)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
def test_integers_on_invalid_scales_do_not_become_the_reference_of_the_sum(value: float) -> None:
    hostile = message(agreed_scales=bad_scales(value))
    sums, clean = (RoundSums([HOW], workers=2) for _ in range(2))
    with pytest.raises(FrameError, match="slot 'w': a scale in the frame is negative or not finite"):
        sums.add_slot(0, 0, Contribution.of(HOW, hostile))
    for worker in range(2):  # the round continues as if it had never arrived
        contribution = Contribution.of(HOW, message(worker))
        replies = [each.add_slot(0, worker, contribution) for each in (sums, clean)]
    assert replies[0] is not None and bytes(replies[0]) == bytes(replies[1] or b"")
    with pytest.raises(FrameError, match="negative or not finite"):
        laconic.sums.add(wire.unpack_bundle(hostile)[1][1])
