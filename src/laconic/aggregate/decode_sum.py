"""Many packets -> one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import codec
from laconic.errors import InputError
from laconic.frames import open_packet
from laconic.packet import Packet, TensorSpec, allocate
from laconic.wire import MAX_NUMEL, Buffer

__all__ = ["mean", "weighted_sum"]


def weighted_sum(
    packets: Sequence[Packet | Buffer],
    weights: Sequence[float],
    *,
    out: Tensor | None = None,
    max_numel: int = MAX_NUMEL,
) -> Tensor:
    """Sum of weight × decoded tensor, in float32, in the order given.

    Each packet is decoded straight into the sum: no tensor per sender, and a sparse one touches only its entries.

    Args:
        packets: Packets or frames of one shape; their codecs may differ.
        weights: One per packet.
        out: A contiguous float32 tensor for the sum; what it held is overwritten.
        max_numel: Frames that declare more values are refused.
    """
    if not packets or len(packets) != len(weights):
        raise InputError(f"expected as many weights as packets, at least one; got {len(packets)} and {len(weights)}")
    opened = [
        (packet, codec(packet.codec)) if isinstance(packet, Packet) else open_packet(packet, max_numel=max_numel)
        for packet in packets
    ]
    if out is None:
        first = opened[0][0]
        device = first.sections[0].device if first.sections else None
        out = allocate(TensorSpec(first.spec.shape, torch.float32), device, zero=True)
    else:
        out.zero_()
    for (packet, chain), weight in zip(opened, weights, strict=True):
        chain.accumulate(packet, out, weight)
    return out


def mean(
    packets: Sequence[Packet | Buffer],
    *,
    weights: Sequence[float] | None = None,
    out: Tensor | None = None,
    max_numel: int = MAX_NUMEL,
) -> Tensor:
    """The mean of what many senders sent, in float32, weighted when weights (of any sum but zero) are given."""
    if weights is None:
        weights = [1.0] * len(packets)
    total = sum(weights)
    if packets and (total == 0 or not all(weight >= 0 for weight in weights)):
        raise InputError(f"weights must be non-negative and not all zero, got {list(weights)}")
    return weighted_sum(packets, [weight / total for weight in weights], out=out, max_numel=max_numel)
