"""Messages: frames of several slots in one bundle, written where it will be sent from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laconic import wire
from laconic._core import set_bytes, zero_bytes
from laconic.errors import InputError
from laconic.packet import Packet, TensorSpec

__all__ = ["is_void", "longest", "read", "write"]

Encode = Callable[[Tensor], Sequence[tuple[int, int] | None]]
"""Writes the slots' frames into a buffer and says where each begins and ends; None: there is nothing to say of it."""

_VOID = bytes(wire.pack(Packet("none", TensorSpec((0,), torch.float32), ())))
"""Stands for a slot whose values are not finite. (No slot is empty.)"""


def longest(names: Sequence[str], frames: Sequence[int]) -> int:
    """The most bytes of a message whose frames take at most so many."""
    return len(wire.bundle_header(names, frames)) + sum(max(nbytes, len(_VOID)) + wire.ALIGN for nbytes in frames)


def write(names: Sequence[str], encode: Encode, room: Tensor) -> Tensor:
    """The message of these slots; returns the part of the room that it fills."""
    header = len(wire.bundle_header(names, [0] * len(names)))
    body = room[header:]
    spans = encode(body)
    frames = [_VOID if span is None else body[slice(*span)] for span in spans]
    sizes, end, in_place = [len(frame) for frame in frames], 0, True
    for span, nbytes in zip(spans, sizes, strict=True):
        begin = wire.align(end)
        end = begin + nbytes
        in_place = in_place and span == (begin, end)
    if not in_place:  # some had less to say than there was room for, or nothing
        _close_ranks([frame if isinstance(frame, bytes) else frame.clone() for frame in frames], body)
    set_bytes(room.data_ptr(), wire.bundle_header(names, sizes))
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


def is_void(frame: Tensor) -> bool:
    """Whether it says that the slot's values are not finite."""
    return frame.numel() == len(_VOID) and bytes(frame.tolist()) == _VOID
