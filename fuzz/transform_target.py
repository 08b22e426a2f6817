"""The fuzz target of messages by transform coding: before, with and after the first basis."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import bend
from inputs import ramp
from laconic import FrameError
from laconic.packet import TensorSpec
from laconic.pipeline.ends import TransformReceiver
from laconic.pipeline.messages import COUNT_NBYTES, Position
from laconic.pipeline.traffic import Traffic, load, save

SHAPE = (4, 32, 16)
SPEC, FIRST = TensorSpec(SHAPE, torch.float32), Position(0, 0)
NUMBERS = (0, 64, 127, 128, 191)
"""How many messages came before; the first byte of an input selects one. After 128 of them there is a basis."""


def _traffic() -> Traffic:
    return Traffic("klt:4", "forward", 0, seed=0, delta=False, nonfinite="spread", error_every=0)


@cache
def _cases() -> list[tuple[dict[str, torch.Tensor], bytes]]:
    """Return the state of a stage after each of ``NUMBERS``, and the next message."""
    traffic, cases = _traffic(), []
    for number in range(NUMBERS[-1] + 1):
        state = save(traffic) if number in NUMBERS else None
        x = (ramp(2048).view(SHAPE) * (1 + number % 7)).contiguous()
        message = traffic.sender.message(x, FIRST)
        assert message is not None
        if state is not None:
            cases.append((state, bytes(message.tolist())))
        traffic.receiver.expected_nbytes(SPEC, FIRST)
        traffic.receiver.read(message, torch.empty(SHAPE), FIRST)
    return cases


@cache
def transform_seeds() -> list[bytes]:
    return [bytes([number]) + message for number, (_, message) in enumerate(_cases())]


def bend_transform(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    """Change the count, the first frame, the end with a part of the basis, or any byte of a message."""
    number, count, body = data[:1], data[1 : 1 + COUNT_NBYTES], data[1 + COUNT_NBYTES :]
    move = rng.randrange(10)
    if move < 5:
        bent = bend.frame(body, rng, scramble, room)
        body = bent[: len(body)].ljust(len(body), b"\0")
    elif move < 7:
        body = body[:-200] + scramble(body[-200:], 200)
    elif move == 7:
        count = scramble(count, COUNT_NBYTES)
    elif move == 8:
        number = bytes([rng.randrange(256)])
    else:
        body = scramble(body, len(body) + 16)
    return (number or b"\0") + count + body


def check_transform(data: bytes) -> bool:
    """A message is read into a tensor of the stage's shape, or refused and not counted."""
    state, _ = _cases()[data[0] % len(NUMBERS) if data else 0]
    traffic = _traffic()
    load(state, [traffic])
    receiver = traffic.receiver
    assert isinstance(receiver, TransformReceiver)
    nbytes = receiver.expected_nbytes(SPEC, FIRST)
    assert isinstance(nbytes, int)
    # A stage receives buffers of this size, whatever a peer sends.
    message = torch.frombuffer(bytearray(data[1 : 1 + nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
    out, number = torch.zeros(SHAPE), NUMBERS[data[0] % len(NUMBERS) if data else 0]
    try:
        receiver.read(message, out, FIRST)
    except FrameError:
        transforms = receiver.transforms.by_tensor
        assert not transforms or transforms[0].number == number, "a refused message was counted"
        return False
    assert receiver.transforms.by_tensor[0].number == number + 1
    return True
