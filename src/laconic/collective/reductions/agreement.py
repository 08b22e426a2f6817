"""Agreement: ranks reduce their probes to the agreed value before they encode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.aggregate.homomorphic import Summing
from laconic.collective.process_groups import backend_of
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.errors import InputError

__all__ = ["MAX_DIGEST", "begin_agreement", "digest_of"]

MAX_DIGEST = (1 << 24) - 1
"""Digests up to this are exact in float32."""


def digest_of(text: str) -> int:
    """Return a number that identifies what a rank reduces, for comparison with other ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest(), "little")


def begin_agreement(
    summing: Summing, probe: Tensor, tensors: str, group: dist.ProcessGroup | None, stats: ExchangeStats
) -> Callable[[], Tensor]:
    """Start the reduction of this rank's probe; the returned function waits for the agreed value.

    Args:
        probe: This rank's probe, or those of several slots one behind the other.
        tensors: Describes the tensors. Ranks with different descriptions get an ``InputError`` where the probes'
            maximum is taken: a digest of the text travels with it.
        stats: Counts bytes and waiting.
    """
    if summing.by == "or":
        return lambda: _union(probe, group, stats)
    if summing.by == "sum":
        work = all_reduce(probe, group, stats)

        def agreed_sum() -> Tensor:
            with stats.during("wire_s"):
                work.wait()
            return probe

        return agreed_sum
    text = f"{summing.chain.text} {summing.workers} {tensors}"
    digest = digest_of(text)
    digests = torch.tensor([digest, MAX_DIGEST - digest], dtype=torch.float32, device=probe.device)
    maxima = torch.cat([probe, digests])
    work = all_reduce(maxima, group, stats, dist.ReduceOp.MAX)

    def agreed_max() -> Tensor:
        with stats.during("wire_s"):
            work.wait()
        if float(maxima[-2] + maxima[-1]) != MAX_DIGEST:
            raise InputError(f"ranks do not reduce the same tensors: this rank reduces {text[:200]!r}")
        return maxima[:-2]

    return agreed_max


def _union(bits: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats) -> Tensor:
    with stats.during("wire_s"):
        if backend_of(group) != "nccl":
            all_reduce(bits, group, stats, dist.ReduceOp.BOR).wait()
            return bits
        backend = kernels.backend_for(bits)  # NCCL has no OR: use the maximum of a byte for each bit
        wide = backend.unpack_symbols(bits, 8 * bits.numel(), 2, False)
        all_reduce(wide, group, stats, dist.ReduceOp.MAX).wait()
        backend.pack_symbols(wide, 2, False, bits)
        return bits
