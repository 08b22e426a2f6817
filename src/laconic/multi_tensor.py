"""Many tensors of a GPU at once: their frames by one launch, one copy and one wait, and back by the same.

Slot by slot a model's gradients cost launches and waits and hardly anything else. The frames are the same, byte for
byte: only the road is shorter. It is there for codecs whose sections have a fixed size and whose kernels take many
tensors (``kernels.MultiTensorKernels``); ``fits`` tells. Frames are laid out on the device as they will lie on the
host, so that one copy brings all sections; headers and checksums are written where the frames leave from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic._core import zero_bytes
from laconic.codecs import Chain, codec
from laconic.codecs.bucketed import BucketedQuantizer
from laconic.errors import FrameError
from laconic.kernels.interface import NONFINITE
from laconic.packet import Packet, tensor_spec

__all__ = ["Layout", "amax_bits_all", "fits", "layout_of", "read_frames", "write_frames"]


class Layout:
    """Where frames of tensors that are not all zero lie, one behind the other from multiples of 16 on."""

    def __init__(self, codec_text: str, shapes: Sequence[tuple[int, ...]]) -> None:
        self.chain = codec(codec_text)
        assert isinstance(self.chain.values, BucketedQuantizer)
        self.stage: BucketedQuantizer = self.chain.values
        self.specs = [tensor_spec(shape, torch.float32) for shape in shapes]
        self.moulds, self.begins, self.floats, self.packed = [], [], [], []
        at = 0
        for spec in self.specs:
            mould = wire.FrameTemplate(codec_text, spec, self.stage.section_nbytes(spec.numel, 4))
            self.moulds.append(mould)
            self.begins.append(at)
            floats, packed = mould.sections
            self.floats.append(at + floats)
            self.packed.append(at + packed)
            at = wire.align(at + mould.nbytes)
        self.nbytes = at

    @property
    def sizes(self) -> list[int]:
        return [mould.nbytes for mould in self.moulds]

    def found_at(self, address: int) -> bool:
        """Whether all frames that lie there are as they should be, and undamaged."""
        return all(mould.fits(address + at) for mould, at in zip(self.moulds, self.begins, strict=True))


@lru_cache(maxsize=1024)
def layout_of(codec_text: str, shapes: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout of tensors of these shapes; they recur every step."""
    return Layout(codec_text, shapes)


def fits(chain: Chain, tensors: Sequence[Tensor]) -> bool:
    """Whether these can go together: several float32 tensors of a GPU, each contiguous and not empty."""
    stage = chain.values
    if chain.selector is not None or chain.coder is not None:
        return False
    if not isinstance(stage, BucketedQuantizer) or not stage.together:
        return False
    device = tensors[0].device if len(tensors) > 1 else None
    alike = all(x.device == device and x.dtype == torch.float32 and x.is_contiguous() and x.numel() for x in tensors)
    return device is not None and alike and kernels.multi_tensor_backend_for(tensors[0]) is not None


def amax_bits_all(tensors: Sequence[Tensor]) -> list[int]:
    """The key of each: 0 for one that is all zero, ``NONFINITE`` or more for one that is not finite."""
    return [int(amax_bits) for amax_bits in _backend(tensors[0]).amax_bits_all(tensors).tolist()]


def write_frames(
    tensors: Sequence[Tensor],
    chain: Chain,
    room: Tensor,
    *,
    seeds: Sequence[int],
    residuals: Sequence[Tensor] | None = None,
) -> list[tuple[int, int] | None]:
    """Frames of tensors that fit, in ``room``: where each begins and ends.

    None stands for a tensor that is not finite. With residuals it is their sums with the tensors that are encoded, and
    what the receiver will not have stays there; the residual of a sum that is not finite is spent.

    Args:
        tensors: Those that ``fits`` was asked about.
        chain: The same.
        room: A uint8 tensor on the host, pinned where the device writes it without a stop; all frames' ``max_nbytes``,
            each rounded up to 16, suffice.
        seeds: Of each.
        residuals: What was not sent before, if it is to be sent now.
    """
    layout, backend = layout_of(chain.text, tuple(tuple(x.shape) for x in tensors)), _backend(tensors[0])
    there = torch.empty(layout.nbytes, dtype=torch.uint8, device=tensors[0].device)
    base = there.data_ptr()
    floats, packed = ([base + at for at in offsets] for offsets in (layout.floats, layout.packed))
    amax_bits_by_tensor = layout.stage.quantize_all(tensors, residuals, backend, seeds, floats, packed)
    last = min(layout.nbytes, room.numel())  # behind the last frame there may be no room for what follows none
    room[:last].copy_(there[:last], non_blocking=True)
    found: list[tuple[int, int] | None] = []
    address = room.data_ptr()
    for i, amax_bits in enumerate(amax_bits_by_tensor.tolist()):
        begin, mould = layout.begins[i], layout.moulds[i]
        if amax_bits >= NONFINITE:
            found.append(None)
            continue
        if amax_bits:
            mould.stamp(address + begin)
            end = begin + mould.nbytes
        else:
            zero = wire.pack(Packet(chain.text, layout.specs[i], ()))
            end = begin + len(zero)
            room[begin:end] = wire.as_bytes(zero)
        zero_bytes(address + end, min(wire.align(end), last) - end)
        found.append((begin, end))
    return found


def read_frames(message: Tensor, at: int, layout: Layout, outs: Sequence[Tensor], weight: float | None) -> None:
    """Decode frames that lie in a message as a layout has it, or add them ``weight`` times.

    Args:
        message: A uint8 tensor on the host.
        at: Where the first frame begins in it, a multiple of 16.
        layout: For which ``found_at`` has said that it holds here.
        outs: A tensor for each, of its shape.
        weight: What decoded values are multiplied by before they are added; None to store them.
    """
    backend = _backend(outs[0])
    there = message.to(outs[0].device, non_blocking=True)
    base = there.data_ptr() + at
    floats, packed = ([base + each for each in offsets] for offsets in (layout.floats, layout.packed))
    if int(layout.stage.dequantize_all(floats, packed, backend, outs, weight)):
        raise FrameError("a frame holds a scale that is not a finite, non-negative number")


def _backend(x: Tensor) -> kernels.MultiTensorKernels:
    backend = kernels.multi_tensor_backend_for(x)
    assert backend is not None, "ask fits() first"
    return backend
