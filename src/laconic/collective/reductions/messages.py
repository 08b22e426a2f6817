"""Messages of the two-shot reduction: the frames of several slots as one bundle, written where it is sent from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from laconic import wire
from laconic._core import set_bytes, zero_bytes
from laconic.errors import InputError
from laconic.packet import Packet, TensorSpec

__all__ = ["is_void", "max_nbytes", "read", "write"]

Encode = Callable[[Tensor], Sequence[tuple[int, int] | None]]
"""Writes the slots' frames into a buffer and returns where each begins and ends; None for a slot without a frame."""

_VOID = bytes(wire.pack(Packet("none", TensorSpec((0,), torch.float32), ())))
"""Stands for a slot whose values are not finite. (No slot is empty.)"""


def max_nbytes(names: Sequence[str], frame_limits: Sequence[int]) -> int:
    """Return the largest length of a message whose frames have these limits."""
    header = len(wire.bundle_header(names, frame_limits))
    return header + sum(max(nbytes, len(_VOID)) + wire.ALIGN for nbytes in frame_limits)


def write(names: Sequence[str], encode: Encode, buffer: Tensor) -> Tensor:
    """Write the message of these slots; return the part of the buffer that it fills."""
    header_nbytes = len(_header(tuple(names), (0,) * len(names)))
    body = buffer[header_nbytes:]
    spans = encode(body)
    sizes, end, in_place = [len(_VOID) if span is None else span[1] - span[0] for span in spans], 0, True
    for span, nbytes in zip(spans, sizes, strict=True):
        begin = wire.align(end)
        end = begin + nbytes
        in_place = in_place and span == (begin, end)
    if not in_place:  # a frame is missing or shorter than the space reserved for it
        _write_frames([_VOID if span is None else body[slice(*span)].clone() for span in spans], body)
    set_bytes(buffer.data_ptr(), _header(tuple(names), tuple(sizes)))
    return buffer[: header_nbytes + end]


def _write_frames(frames: Sequence[bytes | Tensor], body: Tensor) -> None:
    end, address = 0, body.data_ptr()
    for frame in frames:
        begin = wire.align(end)
        zero_bytes(address + end, begin - end)
        end = begin + len(frame)
        if isinstance(frame, bytes):
            set_bytes(address + begin, frame)
        else:
            body[begin:end] = frame


@lru_cache(maxsize=1024)
def _header(names: tuple[str, ...], sizes: tuple[int, ...]) -> bytes:
    return wire.bundle_header(names, sizes)


def read(message: Tensor, names: Sequence[str], sender: int) -> list[Tensor]:
    """Return the frames of these slots; ``InputError`` if the message holds other slots."""
    frames = wire.unpack_bundle(message)
    if [name for name, _ in frames] != list(names):
        theirs, ours = ", ".join(name for name, _ in frames)[:200], ", ".join(names)[:200]
        raise InputError(f"rank {sender} exchanges other tensors ({theirs}) than this one ({ours}): compare the models")
    return [frame for _, frame in frames]


def is_void(frame: Tensor) -> bool:
    """Whether a frame marks its slot as not finite."""
    return frame.numel() == len(_VOID) and bytes(frame.tolist()) == _VOID
