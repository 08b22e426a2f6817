"""Explain a frame: how each packet was coded, and how many bits each part takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic.codecs import Chain
from laconic.codecs.base import Quantizer
from laconic.codecs.coded import Coded
from laconic.errors import FrameError
from laconic.frames import open_packet
from laconic.kernels.sections import MAX_ALPHABET
from laconic.packet import oom_as_frame_error
from laconic.wire import MAX_NUMEL, Buffer

__all__ = ["Explanation", "explain"]

_COUNTED_AT_ONCE = 1 << 20
"""Symbols are counted in parts of this size, because bincount takes eight bytes a symbol."""


@dataclass(frozen=True)
class Explanation:
    """One packet. Bits per symbol and per position are per value sent: all values, or those that a selector kept.

    Args:
        name: The packet's name in its bundle; empty for a single frame.
        codec: The canonical spec.
        kept: Values sent.
        nbytes: Bytes of the frame, including its header.
        symbols: Symbols that occur, for a quantizer.
        entropy: Shannon's entropy of the symbols, in bits: the lower bound for coders of single symbols.
        bits_before: Bits of a packed symbol, without a coder.
        bits_after: Bits of a symbol as sent, including code tables.
        position_bits: Bits of the position of a kept value.
        bits_per_value: Bits of the whole frame per value of the tensor.
        bits_per_kept: Bits of the whole frame per value sent.
        modes: How many chunks were coded in which way.
        details: What the quantizer reports: ``levels``, ``entropy_estimate`` (H), ``bits_wanted`` (N), the range.
    """

    name: str
    codec: str
    shape: tuple[int, ...]
    numel: int
    kept: int
    nbytes: int
    sections: tuple[int, ...]
    symbols: int | None = None
    entropy: float | None = None
    bits_before: float | None = None
    bits_after: float | None = None
    position_bits: float | None = None
    bits_per_value: float | None = None
    bits_per_kept: float | None = None
    modes: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def explain(blob: Buffer, *, max_numel: int = MAX_NUMEL) -> list[Explanation]:
    """Explain each packet of a frame or bundle; invalid bytes raise ``FrameError``.

    >>> import torch, laconic
    >>> (packet,) = laconic.explain(laconic.encode(torch.linspace(-1, 1, 4096), "adaptive:5.0|huffman"))
    >>> packet.details["entropy_estimate"], packet.details["levels"], round(packet.entropy, 2)
    (4.0, 512, 9.0)
    """
    if not wire.is_bundle(blob):
        return [_explain("", blob, max_numel)]
    explanations: dict[str, Explanation] = {}
    for name, frame in wire.unpack_bundle(blob):
        if name in explanations:
            raise FrameError(f"the bundle holds {name!r} twice")
        explanations[name] = _explain(name, frame, max_numel)
        max_numel -= explanations[name].numel
    return list(explanations.values())


def _explain(name: str, blob: Buffer, max_numel: int) -> Explanation:
    packet, chain = open_packet(blob, max_numel=max_numel)
    chain.decode(packet)  # raises FrameError if a section is invalid
    n, nbytes, kept = packet.spec.numel, wire.as_bytes(blob).numel(), chain.num_kept(packet)
    optional: dict[str, Any] = {}
    sections = packet.sections
    if sections and chain.selector is not None:
        optional["position_bits"] = 8 * sections[0].numel() / kept
        sections = sections[1:]
    if sections and isinstance(chain.values, Quantizer):
        with oom_as_frame_error(kept):
            optional |= _explain_symbols(sections, kept, chain, chain.values)
    return Explanation(
        name, packet.codec, packet.spec.shape, n, kept, nbytes, tuple(section.numel() for section in packet.sections),
        bits_per_value=8 * nbytes / n if n else None, bits_per_kept=8 * nbytes / kept if kept else None, **optional,
    )  # fmt: skip


def _explain_symbols(sections: tuple[Tensor, ...], n: int, chain: Chain, quantizer: Quantizer) -> dict[str, Any]:
    side, last = sections[:-1], sections[-1]
    fields: dict[str, Any] = {"details": quantizer.describe(side, n)}
    if not last.numel():
        return fields | {"symbols": 1, "entropy": 0.0, "bits_before": 0.0, "bits_after": 0.0}
    backend = kernels.backend_for(last)
    if chain.coder is not None:
        symbols = Coded(quantizer, chain.coder).symbols(sections, n, backend)
        fields["modes"] = chain.coder.chunk_modes(last, n, backend)
    elif quantizer.max_alphabet > MAX_ALPHABET:  # too many to count
        return fields | {"bits_before": 8 * last.numel() / n, "bits_after": 8 * last.numel() / n}
    else:
        symbols = quantizer.packed_symbols(last, side, n, backend)
    if symbols is None:
        raise FrameError("the frame needs symbols and has none")
    counts = torch.zeros(MAX_ALPHABET, dtype=torch.int64, device=symbols.device)
    for start in range(0, n, _COUNTED_AT_ONCE):
        counts += torch.bincount(symbols[start : start + _COUNTED_AT_ONCE].long(), minlength=MAX_ALPHABET)
    counts = counts[counts > 0].to(torch.float64)
    entropy = math.log2(n) - float((counts * counts.log2()).sum()) / n
    return fields | {
        "symbols": counts.numel(),
        "entropy": max(0.0, entropy),
        "bits_before": quantizer.packed_bits(side, n),
        "bits_after": 8 * last.numel() / n,
    }
