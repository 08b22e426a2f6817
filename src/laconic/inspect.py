"""What is inside a frame: how each packet was coded, and where its bits went."""

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
from laconic.codecs.coders import ChunkCoder
from laconic.errors import FrameError
from laconic.frames import open_packet
from laconic.kernels.sections import CONSTANT, HUFFMAN, MAX_ALPHABET, RANS, RAW
from laconic.packet import Packet, oom_as_frame_error
from laconic.wire import MAX_NUMEL, Buffer

__all__ = ["Explanation", "explain"]

_PART = 1 << 20
"""Symbols that are counted at a time: each takes eight bytes meanwhile."""
_MODES = {CONSTANT: "constant", RAW: "raw", HUFFMAN: "huffman", RANS: "rans"}


@dataclass(frozen=True)
class Explanation:
    """One packet. Bits are per value sent: all values, or those that a selector kept.

    Args:
        name: The packet's name in its bundle; empty for a frame of its own.
        codec: The canonical spec.
        shape: Of the tensor.
        numel: Values of the tensor.
        kept: Values sent.
        nbytes: Bytes of the frame, header and all.
        sections: Bytes of each section.
        symbols: Symbols that occur, for a quantizer.
        entropy: Shannon's entropy of the symbols, in bits: what no coder of single symbols can beat.
        bits_before: Bits a symbol takes packed, without a coder.
        bits_after: Bits a symbol takes as sent, codebooks included.
        position_bits: Bits that say where a kept value stands.
        bits_per_value: Bits of the whole frame per value of the tensor.
        bits_per_kept: Bits of the whole frame per value sent.
        modes: How many chunks were coded in which way.
        details: What the quantizer tells: ``levels``, ``entropy_estimate`` (H), ``bits_wanted`` (N), the range.
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
    """How each packet of a frame was coded. Anything else than a good frame raises ``FrameError``.

    >>> import torch, laconic
    >>> (packet,) = laconic.explain(laconic.encode(torch.linspace(-1, 1, 4096), "adaptive:5.0|huffman"))
    >>> packet.details["entropy_estimate"], packet.details["levels"], round(packet.entropy, 2)
    (4.0, 512, 9.0)
    """
    if wire.is_bundle(blob):
        found: dict[str, Explanation] = {}
        for name, frame in wire.unpack_bundle(blob):
            if name in found:
                raise FrameError(f"the bundle holds {name!r} twice")
            found[name] = _explain(name, frame, max_numel)
            max_numel -= found[name].numel
        return list(found.values())
    return [_explain("", blob, max_numel)]


def _explain(name: str, blob: Buffer, max_numel: int) -> Explanation:
    packet, chain = open_packet(blob, max_numel=max_numel)
    chain.decode(packet)  # whatever makes no sense in it is refused here
    n, nbytes = packet.spec.numel, wire.as_bytes(blob).numel()
    kept = _kept(packet, chain)
    known: dict[str, Any] = {}
    sections = packet.sections
    if sections and chain.selector is not None:
        known["position_bits"] = 8 * sections[0].numel() / kept
        sections = sections[1:]
    if sections and isinstance(chain.values, Quantizer):
        with oom_as_frame_error(kept):
            known |= _symbols(sections, kept, chain, chain.values)
    return Explanation(
        name,
        packet.codec,
        packet.spec.shape,
        n,
        kept,
        nbytes,
        tuple(section.numel() for section in packet.sections),
        bits_per_value=8 * nbytes / n if n else None,
        bits_per_kept=8 * nbytes / kept if kept else None,
        **known,
    )


def _kept(packet: Packet, chain: Chain) -> int:
    if not packet.sections:
        return 0
    return (
        packet.spec.numel if chain.selector is None else chain.selector.head(packet.sections[0], packet.spec.numel).kept
    )


def _symbols(sections: tuple[Tensor, ...], n: int, chain: Chain, quantizer: Quantizer) -> dict[str, Any]:
    *side_sections, last = sections
    side = tuple(side_sections)
    known: dict[str, Any] = {"details": quantizer.describe(side, n)}
    if not last.numel():
        return known | {"symbols": 1, "entropy": 0.0, "bits_before": 0.0, "bits_after": 0.0}
    backend = kernels.backend_for(last)
    if chain.coder is not None:
        symbols = Coded(quantizer, chain.coder).symbols(sections, n, backend)
        if isinstance(chain.coder, ChunkCoder):
            modes = backend.chunk_modes(last, n).tolist()
            known["modes"] = {_MODES[mode]: modes.count(mode) for mode in sorted(set(modes))}
    elif quantizer.max_alphabet > MAX_ALPHABET:  # too many to count
        return known | {"bits_before": 8 * last.numel() / n, "bits_after": 8 * last.numel() / n}
    else:
        symbols = quantizer.packed_symbols(last, side, n, backend)
    if symbols is None:
        raise FrameError("the frame has no symbols where it must")
    counts = torch.zeros(MAX_ALPHABET, dtype=torch.int64, device=symbols.device)
    for at in range(0, n, _PART):
        counts += torch.bincount(symbols[at : at + _PART].long(), minlength=MAX_ALPHABET)
    counts = counts[counts > 0].to(torch.float64)
    entropy = math.log2(n) - float((counts * counts.log2()).sum()) / n
    before = quantizer.packed_bits(side, n)
    return known | {
        "symbols": counts.numel(),
        "entropy": max(0.0, entropy),
        "bits_before": before,
        "bits_after": 8 * last.numel() / n,
    }
