"""Frames of many tensors on a GPU by one launch, one copy and one wait, and the same for decoding.

Encoded slot by slot, the gradients of a model cost mostly launches and waits. The frames are byte for byte the same.
This needs a codec whose sections have fixed sizes and whose value stage has multi-tensor kernels; see ``supports``.
Frames have the same layout on the device and on the host, so that one copy moves all sections; headers and checksums
are written on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic._core import zero_bytes
from laconic.codecs import Chain, codec
from laconic.codecs.base import MultiTensorStage
from laconic.errors import FrameError
from laconic.kernels.interface import NONFINITE
from laconic.packet import Packet, tensor_spec

__all__ = [
    "FrameLayout", "amax_bits", "layout_of", "read_frames", "stage_of", "supports", "write_frames",
]  # fmt: skip


class FrameLayout:
    """Offsets of the frames of tensors that are not all zero, each at a multiple of 16.

    Attributes:
        stage: The value stage with multi-tensor kernels.
        templates: The header of each frame.
        offsets: Where each frame starts.
        floats: Where the first section of each frame starts.
        packed: Where the second section of each frame starts.
        nbytes: The bytes of all frames.
    """

    def __init__(self, codec_text: str, shapes: Sequence[tuple[int, ...]]) -> None:
        self.stage = stage = stage_of(codec(codec_text))
        self.specs = [tensor_spec(shape, torch.float32) for shape in shapes]
        self.templates, self.offsets, self.floats, self.packed = [], [], [], []
        offset = 0
        for spec in self.specs:
            template = wire.FrameTemplate(codec_text, spec, stage.section_nbytes(spec.numel, 4))
            self.templates.append(template)
            self.offsets.append(offset)
            floats, packed = template.section_offsets
            self.floats.append(offset + floats)
            self.packed.append(offset + packed)
            offset = wire.align(offset + template.nbytes)
        self.nbytes = offset

    @property
    def sizes(self) -> list[int]:
        return [template.nbytes for template in self.templates]

    def matches(self, address: int) -> bool:
        """Return whether the bytes at an address are undamaged frames of this layout."""
        return all(
            template.matches(address + offset) for template, offset in zip(self.templates, self.offsets, strict=True)
        )


@lru_cache(maxsize=1024)
def layout_of(codec_text: str, shapes: tuple[tuple[int, ...], ...]) -> FrameLayout:
    """Return the layout for tensors of these shapes; it is cached, because shapes recur every step."""
    return FrameLayout(codec_text, shapes)


def supports(chain: Chain, tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors can be encoded together: several contiguous, non-empty float32 tensors of one GPU."""
    if _multi_tensor_stage(chain) is None:
        return False
    device = tensors[0].device if len(tensors) > 1 else None
    alike = all(x.device == device and x.dtype == torch.float32 and x.is_contiguous() and x.numel() for x in tensors)
    return device is not None and alike and kernels.multi_tensor_backend_for(tensors[0]) is not None


def stage_of(chain: Chain) -> MultiTensorStage:
    """Return the chain's value stage with multi-tensor kernels."""
    stage = _multi_tensor_stage(chain)
    assert stage is not None, "call supports() first"
    return stage


def _multi_tensor_stage(chain: Chain) -> MultiTensorStage | None:
    if chain.selector is not None or chain.coder is not None or chain.values is None:
        return None
    return chain.values.multi_tensor


def amax_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Return the ``amax_bits`` of each tensor: 0 if it is all zero, ``NONFINITE`` or more if it is not finite."""
    return [int(bits) for bits in _backend(tensors[0]).amax_bits_all(tensors).tolist()]


def write_frames(
    tensors: Sequence[Tensor], chain: Chain, buffer: Tensor, *, seeds: Sequence[int],
    residuals: Sequence[Tensor] | None = None,
) -> list[tuple[int, int] | None]:  # fmt: skip
    """Encode tensors into a buffer; return where each frame begins and ends, None for a tensor that is not finite.

    With residuals, residual + tensor is encoded and the error stays in the residual. If a sum is not finite, its
    residual is undefined.

    Args:
        tensors: Tensors for which ``supports`` is true.
        buffer: A uint8 tensor on the host, pinned for a copy without an intermediate buffer. The sum of all frames'
            ``max_nbytes``, each rounded up to 16, suffices.
        residuals: The residual of each tensor, for error feedback.
    """
    layout, backend = layout_of(chain.text, tuple(tuple(x.shape) for x in tensors)), _backend(tensors[0])
    on_device = torch.empty(layout.nbytes, dtype=torch.uint8, device=tensors[0].device)
    floats, packed = _addresses(on_device.data_ptr(), layout)
    all_amax_bits = layout.stage.quantize_all(tensors, residuals, backend, seeds, floats, packed)
    end_of_copy = min(layout.nbytes, buffer.numel())  # the padding after the last frame may not fit into the buffer
    buffer[:end_of_copy].copy_(on_device[:end_of_copy], non_blocking=True)
    spans: list[tuple[int, int] | None] = []
    address = buffer.data_ptr()
    for i, bits in enumerate(all_amax_bits.tolist()):
        begin, template = layout.offsets[i], layout.templates[i]
        if bits >= NONFINITE:
            spans.append(None)
            continue
        if bits:
            template.write(address + begin)
            end = begin + template.nbytes
        else:
            zero = wire.pack(Packet(chain.text, layout.specs[i], ()))
            end = begin + len(zero)
            buffer[begin:end] = wire.as_bytes(zero)
        zero_bytes(address + end, min(wire.align(end), end_of_copy) - end)
        spans.append((begin, end))
    return spans


def read_frames(
    message: Tensor, offset: int, layout: FrameLayout, outs: Sequence[Tensor], weight: float | None
) -> None:
    """Decode the frames of a layout from a message, or add them ``weight`` times.

    Args:
        message: A uint8 tensor on the host.
        offset: Where the first frame starts, a multiple of 16.
        layout: A layout whose ``matches`` is true there.
        weight: The factor of the decoded values that are added; None to store them.
    """
    on_device = message.to(outs[0].device, non_blocking=True)
    floats, packed = _addresses(on_device.data_ptr() + offset, layout)
    if int(layout.stage.dequantize_all(floats, packed, _backend(outs[0]), outs, weight)):
        raise FrameError("a frame holds a scale that is not a finite, non-negative number")


def _addresses(base: int, layout: FrameLayout) -> tuple[list[int], list[int]]:
    return [base + offset for offset in layout.floats], [base + offset for offset in layout.packed]


def _backend(x: Tensor) -> kernels.MultiTensorKernels:
    backend = kernels.multi_tensor_backend_for(x)
    assert backend is not None, "call supports() first"
    return backend
