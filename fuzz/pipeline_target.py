"""The fuzz target of messages between pipeline stages, with and without differences."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import bend
from inputs import ramp
from laconic import FrameError, wire
from laconic.packet import TensorSpec
from laconic.pipeline.messages import COUNT_NBYTES, Position, Receiver, Sender, message_nbytes, stage_codec

SHAPE = (4, 5, 16)
CASES = [
    (spec, dtype, delta)
    for spec in ("thc:4", "qsgd:4", "shared:8", "bf16", "topk:0.1,chunk=64|qsgd:4", "sign:128", "uniform:8")
    for dtype in (torch.float32, torch.float16)
    for delta in (False, True)
]
"""Codec, dtype, and whether differences are sent; the first byte of an input selects one."""
FIRST = Position(0, 0)


def _values(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (ramp(320).view(SHAPE) * scale).to(dtype)


@cache
def pipeline_seeds() -> list[bytes]:
    seeds = []
    for number, (spec, dtype, delta) in enumerate(CASES):
        sender = Sender(stage_codec(spec, "forward"), "forward", 0, delta=delta)
        for scale in (1.0, float("inf")) if number < 4 else (1.0,):
            message = sender.message(_values(dtype, scale), FIRST)
            if message is not None:  # otherwise it would be no smaller than the tensor
                seeds.append(bytes([number]) + bytes(message.tolist()))
    return seeds


def bend_pipeline(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    """Change the frame in a message, the count after it, the bytes between them, or any of them."""
    number, message = data[:1], data[1:]
    count = message[-COUNT_NBYTES:] if number and CASES[number[0] % len(CASES)][2] else b""
    body = message[: len(message) - len(count)]
    move = rng.randrange(10)
    if move < 7:
        try:
            frame = body[: wire.frame_nbytes(body)]
        except FrameError:
            frame = body
        frame = bend.frame(frame, rng, scramble, room)
        body = frame + bytes(max(0, len(body) - len(frame)))
    elif move == 7 and count:
        count = rng.choice((bytes(COUNT_NBYTES), b"\x01" + bytes(COUNT_NBYTES - 1), scramble(count, COUNT_NBYTES)))
    elif move == 8:
        number = bytes([rng.randrange(256)])
    else:
        body = scramble(body, len(body) + 16)
    return (number or b"\0") + body + count


def check_pipeline(data: bytes) -> bool:
    """A message is read into a tensor of the stage's shape, or refused and not counted.

    The next message of its sender is then refused, too, because the counts of both ends differ: values that a refused
    message has added to a copy are never used.
    """
    spec, dtype, delta = CASES[data[0] % len(CASES) if data else 0]
    chain = stage_codec(spec, "forward")
    out = torch.zeros(SHAPE, dtype=dtype)
    nbytes = message_nbytes(chain, TensorSpec.of(out), delta=delta)
    if isinstance(nbytes, str):
        return False
    # A stage receives buffers of this size, whatever a peer sends.
    message = torch.frombuffer(bytearray(data[1 : 1 + nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
    receiver = Receiver(chain, "forward", 1, delta=delta)
    try:
        receiver.read(message, out, FIRST)
    except FrameError:
        held = [] if receiver.copies is None else list(receiver.copies.by_sample.values())
        assert not any(copy.updates for copy in held), "a refused message was counted"
        return False
    assert out.shape == SHAPE and out.dtype == dtype
    if receiver.copies is not None and receiver.copies.by_sample:
        (copy,) = receiver.copies.by_sample.values()
        assert copy.updates == 1 and torch.equal(copy.values.to(dtype).nan_to_num(), out.nan_to_num())
    else:  # NaN stands for values that were not finite
        assert bool(torch.isfinite(out).all()) or bool(out.isnan().all())
    return True
