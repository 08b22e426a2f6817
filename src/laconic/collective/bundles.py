"""Messages: frames of several slots in one bundle, written where it will be sent from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from laconic import wire
from laconic._core import bytes_at, set_bytes, zero_bytes
from laconic.errors import InputError
from laconic.packet import Packet, TensorSpec

__all__ = ["body_of", "is_void", "longest", "read", "write"]

Encode = Callable[[Tensor], Sequence[tuple[int, int] | None]]
"""Writes the slots' frames into a buffer and says where each begins and ends; None: there is nothing to say of it."""

_VOID = bytes(wire.pack(Packet("none", TensorSpec((0,), torch.float32), ())))
"""Stands for a slot whose values are not finite. (No slot is empty.)"""


def longest(names: Sequence[str], frames: Sequence[int]) -> int:
    """The most bytes of a message whose frames take at most so many."""
    return len(wire.bundle_header(names, frames)) + sum(max(nbytes, len(_VOID)) + wire.ALIGN for nbytes in frames)


def write(names: Sequence[str], encode: Encode, room: Tensor) -> Tensor:
    """The message of these slots; returns the part of the room that it fills."""
    header = len(_full_header(tuple(names), (0,) * len(names)))
    body = room[header:]
    spans = encode(body)
    sizes, end, in_place = [len(_VOID) if span is None else span[1] - span[0] for span in spans], 0, True
    for span, nbytes in zip(spans, sizes, strict=True):
        begin = wire.align(end)
        end = begin + nbytes
        in_place = in_place and span == (begin, end)
    if not in_place:  # some had less to say than there was room for, or nothing
        _close_ranks([_VOID if span is None else body[slice(*span)].clone() for span in spans], body)
    set_bytes(room.data_ptr(), _full_header(tuple(names), tuple(sizes)))
    return room[: header + end]


def _close_ranks(frames: Sequence[bytes | Tensor], body: Tensor) -> None:
    end, address = 0, body.data_ptr()
    for frame in frames:
        begin = wire.align(end)
        zero_bytes(address + end, begin - end)
        end = begin + len(frame)
        if isinstance(frame, bytes):
            set_bytes(address + begin, frame)
        else:
            body[begin:end] = frame


def read(message: Tensor, names: Sequence[str], sender: int) -> list[Tensor]:
    """The frames of these slots. ``InputError`` when they are of others: then ranks do not do the same."""
    found = wire.unpack_bundle(message)
    if [name for name, _ in found] != list(names):
        theirs, ours = ", ".join(name for name, _ in found)[:200], ", ".join(names)[:200]
        raise InputError(f"rank {sender} exchanges other tensors ({theirs}) than this one ({ours}): compare the models")
    return [frame for _, frame in found]


@lru_cache(maxsize=1024)
def _full_header(names: tuple[str, ...], sizes: tuple[int, ...]) -> bytes:
    return wire.bundle_header(names, sizes)


def body_of(message: Tensor, names: tuple[str, ...], sizes: tuple[int, ...]) -> int | None:
    """Where the first frame begins, if the message is one of these slots with frames of these sizes."""
    header = _full_header(names, sizes)
    if message.numel() < len(header) or bytes_at(message.data_ptr(), len(header)) != header:
        return None
    return len(header) if message.numel() == len(header) + wire.body_nbytes(sizes) else None


def is_void(frame: Tensor) -> bool:
    """Whether it says that the slot's values are not finite."""
    return frame.numel() == len(_VOID) and bytes(frame.tolist()) == _VOID
