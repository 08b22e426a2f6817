"""Many tensors of a GPU at once: their frames by one launch, one copy and one wait, and back by the same.

Slot by slot a model's gradients cost launches and waits and hardly anything else. The frames are the same, byte for
byte: only the road is shorter. It is there for codecs whose sections have a fixed size and whose kernels take many
tensors (``kernels.Together``); ``fits`` tells. Frames are laid out on the device as they will lie on the host, so that
one copy brings all sections; headers and checksums are written where the frames leave from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic._core import zero_bytes
from laconic.codecs import Chain
from laconic.codecs.qsgd import QSGD
from laconic.errors import FrameError
from laconic.frames import plan_of
from laconic.kernels.interface import NONFINITE
from laconic.packet import Packet, TensorSpec

__all__ = ["fits", "largest_all", "read_frames", "write_frames"]


def fits(chain: Chain, tensors: Sequence[Tensor]) -> bool:
    """Whether these can go together: several float32 tensors of a GPU, each contiguous and not empty."""
    stage = chain.values
    if not isinstance(stage, QSGD) or not stage.together or chain.selector is not None or chain.coder is not None:
        return False
    device = tensors[0].device if len(tensors) > 1 else None
    alike = all(x.device == device and x.dtype == torch.float32 and x.is_contiguous() and x.numel() for x in tensors)
    return device is not None and alike and kernels.together(tensors[0]) is not None


def largest_all(tensors: Sequence[Tensor]) -> list[int]:
    """The key of each: 0 for one that is all zero, ``NONFINITE`` or more for one that is not finite."""
    backend = _backend(tensors[0])
    return [int(key) for key in backend.largest_all(tensors).tolist()]


def write_frames(
    tensors: Sequence[Tensor],
    chain: Chain,
    room: Tensor,
    *,
    seeds: Sequence[int],
    residuals: Sequence[Tensor] | None = None,
) -> list[tuple[int, int] | None]:
    """Frames of tensors that fit, one behind the other in ``room``: where each begins and ends.

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
    stage, backend = chain.values, _backend(tensors[0])
    assert isinstance(stage, QSGD)
    specs = [TensorSpec.of(x) for x in tensors]
    plans = [plan_of(chain.text, spec.shape, spec.dtype) for spec in specs]
    sizes = [stage.section_nbytes(spec.numel, 4) for spec in specs]
    begins, end = [], 0
    for plan in plans:
        begins.append(end)
        end = wire.align(end + plan.limit)
    there = torch.empty(end, dtype=torch.uint8, device=tensors[0].device)
    norms, packed = [], []
    for begin, plan, (for_norms, for_packed) in zip(begins, plans, sizes, strict=True):
        at = begin + plan.start
        behind = wire.align(at + for_norms)
        norms.append(there[at : at + for_norms])
        packed.append(there[behind : behind + for_packed])
    keys = backend.qsgd_encode_all(
        tensors, residuals, bits=stage.bits, bucket=stage.bucket, stochastic=stage.round == "stochastic", seeds=seeds,
        norms=norms, packed=packed,
    )  # fmt: skip
    room[:end].copy_(there, non_blocking=True)
    found: list[tuple[int, int] | None] = []
    for key, begin, plan, spec, lengths in zip(keys.tolist(), begins, plans, specs, sizes, strict=True):
        if key >= NONFINITE:
            found.append(None)
            continue
        arena = wire.FrameArena(room[begin : begin + plan.limit], plan)
        sections = tuple(arena.take(nbytes) for nbytes in lengths) if key else ()
        last = begin + wire.seal(Packet(chain.text, spec, sections), arena)
        zero_bytes(room.data_ptr() + last, min(wire.align(last), end) - last)
        found.append((begin, last))
    return found


def read_frames(
    message: Tensor, packets: Sequence[Packet], chain: Chain, outs: Sequence[Tensor], weight: float | None
) -> None:
    """Decode packets into tensors that fit, or add them ``weight`` times.

    Args:
        message: What all sections are views of, on the host.
        packets: Of one codec.
        chain: That codec.
        outs: A tensor for each, of its shape.
        weight: What decoded values are multiplied by before they are added; None to store them.
    """
    stage, backend = chain.values, _backend(outs[0])
    assert isinstance(stage, QSGD)
    for packet, out in zip(packets, outs, strict=True):
        if tuple(out.shape) != packet.spec.shape:
            raise FrameError(f"expected a tensor of shape {list(out.shape)}, the frame holds {list(packet.spec.shape)}")
        chain.check(packet)
        if not packet.sections and weight is None:
            out.zero_()
    full = [(packet, out) for packet, out in zip(packets, outs, strict=True) if packet.sections]
    if not full:
        return
    there = message.to(outs[0].device, non_blocking=True)
    moved = there.data_ptr() - message.data_ptr()
    norms, packed = ([packet.sections[i].data_ptr() + moved for packet, _ in full] for i in (0, 1))
    flag = backend.qsgd_decode_all(
        norms, packed, bits=stage.bits, bucket=stage.bucket, outs=[out for _, out in full], weight=weight
    )
    if int(flag):
        raise FrameError("a frame holds a norm that is not a finite, non-negative number")


def _backend(x: Tensor) -> kernels.Together:
    backend = kernels.together(x)
    assert backend is not None, "ask fits() first"
    return backend
