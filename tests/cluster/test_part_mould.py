"""The fast way to read what a worker sends of a slot: nothing gets by it that the long way would refuse."""

from __future__ import annotations

import math

import pytest
import torch

import laconic
from laconic import wire
from laconic.cluster.homomorphic.server import Additions, Part, SlotSum, pack_part
from laconic.errors import FrameError
from laconic.packet import Packet

SHAPE = (30, 70)
SPEC = "thc:4"
HOW = SlotSum("w", SHAPE, laconic.summing(SPEC, workers=2))


def message(
    worker: int = 0, *, scales: torch.Tensor | None = None, clips: torch.Tensor | None = None
) -> tuple[bytes, torch.Tensor]:
    """What a worker sends, with right checksums whatever is in it; and the scales that it agreed on."""
    one = laconic.Contributor(SPEC, workers=2, worker=worker)
    probe = one.probe("w", torch.randn(SHAPE, generator=torch.Generator().manual_seed(worker)))
    agreed = torch.full_like(probe, 3.0)
    packet = one.packet("w", agreed)
    if clips is not None:
        head, _, lanes = packet.sections
        packet = Packet(packet.codec, packet.spec, (head, clips.view(torch.uint8), lanes))
    told = probe if scales is None else scales
    frame = wire.pack(Packet("none", laconic.TensorSpec.of(told), (told.contiguous().view(torch.uint8),)))
    return bytes(pack_part(frame, wire.pack(packet))), agreed


def bad(value: float) -> torch.Tensor:
    return torch.tensor([1.0, value, 1.0])


def test_a_worker_s_message_is_read_the_fast_way() -> None:
    good, _ = message()
    assert HOW.mould is not None
    found = HOW.mould.read(good)
    assert found is not None and found[1].spec.shape == SHAPE
    part = Part.of(HOW, good)
    assert part.packet is not None and torch.equal(part.scales, found[0])


def test_no_bit_can_be_flipped() -> None:
    """Header, section table, scales, integers, gaps: whatever is damaged, neither way takes it."""
    good, _ = message()
    assert HOW.mould is not None
    for at in range(len(good)):
        damaged = bytearray(good)
        damaged[at] ^= 1 << (at % 8)
        assert HOW.mould.read(bytes(damaged)) is None, at
        if at % 7 == 0:
            with pytest.raises(FrameError, match=r"^slot 'w'"):
                Part.of(HOW, bytes(damaged))
    for other in (good[:-1], good + b"\0", b""):
        assert HOW.mould.read(other) is None
        with pytest.raises(FrameError):
            Part.of(HOW, other)


@pytest.mark.parametrize("value", [-1.0, -0.0, math.nan, -math.nan, math.inf, -math.inf])
def test_scales_that_are_no_scales_are_refused_whatever_their_checksum(value: float) -> None:
    hostile, _ = message(scales=bad(value))
    assert HOW.mould is not None
    with pytest.raises(FrameError, match="negative or not finite"):
        HOW.mould.read(hostile)
    with pytest.raises(FrameError, match="slot 'w': a scale is negative or not finite"):
        Part.of(HOW, hostile)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
def test_integers_on_such_scales_are_not_what_others_are_held_against(value: float) -> None:
    hostile, _ = message(clips=bad(value))
    additions, clean = (Additions([HOW], workers=2) for _ in range(2))
    with pytest.raises(FrameError, match="slot 'w': a scale in the frame is negative or not finite"):
        additions.add(0, 0, Part.of(HOW, hostile))
    for worker in range(2):  # and the round goes on as if it had never come
        part = Part.of(HOW, message(worker)[0])
        answers = [each.add(0, worker, part) for each in (additions, clean)]
    assert answers[0] is not None and bytes(answers[0]) == bytes(answers[1] or b"")
    frame = wire.unpack_bundle(hostile)[1][1]
    with pytest.raises(FrameError, match="negative or not finite"):
        laconic.sums.add(frame)
