"""TensorSpec and Packet: a tensor's shape and dtype, and one encoded tensor; arenas for its sections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from laconic._core import advise_large_pages
from laconic.errors import FrameError

__all__ = [
    "EXACT", "FLOATS", "Arena", "HeapArena", "Packet", "TensorSpec", "allocate", "has_huge_strides",
    "oom_as_frame_error", "tensor_spec",
]  # fmt: skip

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes that codecs encode."""

LARGE = 1 << 23
"""Tensors of at least this many bytes are allocated in large pages."""

EXACT = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
"""The dtypes that a frame can carry unchanged."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor: what a receiver needs to allocate it. The receiver chooses the device."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> TensorSpec:
        return tensor_spec(x.shape, x.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def has_huge_strides(shape: Sequence[int]) -> bool:
    """Whether strides need more than 63 bits: a tensor without values may have large dimensions beside a zero."""
    return math.prod(size for size in shape if size) > 1 << 62


def allocate(spec: TensorSpec, device: torch.device | None, *, zero: bool = False) -> Tensor:
    """Allocate the tensor that a frame declares; ``FrameError`` if there is not enough memory."""
    try:
        # zeros() maps pages lazily, so a frame of a few bytes that declares a huge zero tensor uses no memory yet.
        if zero:
            return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        fresh = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    except (RuntimeError, MemoryError, TypeError, ValueError) as error:
        raise FrameError(f"no memory for a tensor of shape {list(spec.shape)}: cap frames with max_numel") from error
    if fresh.is_cpu and spec.nbytes >= LARGE:
        advise_large_pages(fresh.data_ptr(), spec.nbytes)
    return fresh


class oom_as_frame_error:  # noqa: N801 (used as a context manager, like a function)
    """Raise ``FrameError`` if the memory does not suffice to decode the values that a frame declares."""

    __slots__ = ("numel",)

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):
            # A few bytes can declare more values than the memory holds: the frame is invalid, not the program.
            raise FrameError(f"no memory to decode {self.numel} values: cap frames with max_numel") from error


@lru_cache(maxsize=4096)
def tensor_spec(shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    """Return the spec of a shape and dtype; it is cached, because shapes recur every step."""
    return TensorSpec(tuple(shape), dtype)


@dataclass(frozen=True, slots=True)
class Packet:
    """One encoded tensor, self-contained.

    ``sections`` are contiguous uint8 vectors, whose contents the codec defines. A packet without sections is all zero,
    so that a zero tensor of any size is sent as a header.
    """

    codec: str
    spec: TensorSpec
    sections: tuple[Tensor, ...]

    def to(self, device: torch.device) -> Packet:
        """Return the packet with its sections on a device."""
        if device.type == "cpu" and all(section.is_cpu for section in self.sections):
            return self
        return Packet(self.codec, self.spec, tuple(section.to(device) for section in self.sections))


class Arena(Protocol):
    """Allocates the sections of an encoder: in a frame, or in separate memory."""

    def take(self, nbytes: int) -> Tensor: ...
    def trim(self, section: Tensor, nbytes: int) -> Tensor:
        """Shrink the last section; return it."""
        ...


class HeapArena:
    """Allocates each section separately."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def trim(self, section: Tensor, nbytes: int) -> Tensor:
        # A coder takes several times the bytes that it needs, and a section may be kept for long.
        return section[:nbytes] if 2 * nbytes >= section.numel() else section[:nbytes].clone()
