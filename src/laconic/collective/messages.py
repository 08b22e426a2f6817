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

Encode = Callable[[int, Tensor], int | None]
"""Writes the frame of the i-th slot into a buffer and returns its bytes; None: there is nothing to say."""

_VOID = bytes(wire.pack(Packet("none", TensorSpec((0,), torch.float32), ())))
"""Stands for a slot whose values are not finite. (No slot is empty.)"""


def longest(names: Sequence[str], frames: Sequence[int]) -> int:
    """The most bytes of a message whose frames take at most so many."""
    return len(wire.bundle_header(names, frames)) + sum(max(nbytes, len(_VOID)) + wire.ALIGN for nbytes in frames)


def write(names: Sequence[str], encode: Encode, room: Tensor) -> Tensor:
    """The message of these slots; returns the part of the room that it fills."""
    at = len(wire.bundle_header(names, [0] * len(names)))
    sizes, address = [], room.data_ptr()
    for i in range(len(names)):
        gap = -at % wire.ALIGN
        zero_bytes(address + at, gap)
        at += gap
        nbytes = encode(i, room[at:])
        if nbytes is None:
            set_bytes(address + at, _VOID)
            nbytes = len(_VOID)
        sizes.append(nbytes)
        at += nbytes
    set_bytes(address, wire.bundle_header(names, sizes))
    return room[:at]


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
