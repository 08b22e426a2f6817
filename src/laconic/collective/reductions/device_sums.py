"""Means of packed integers on a GPU: all slots of a DDP bucket in a few launches, and the host never waits for them.

Two all-reduces, the largest scales and the integers, are handed to ``torch.distributed`` in every case, so that ranks
call it in the same order with the same sizes whatever their values are. What the host would decide is decided on the
device: a slot that is not finite on some rank has zeros for integers, keeps its residual, and ends as NaN on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.aggregate.homomorphic.contributor import Contributor, JoinedSlots
from laconic.aggregate.homomorphic.families import PackedInts
from laconic.collective.reductions.agreement import MAX_DIGEST, digest_of
from laconic.collective.reductions.device_events import INVALID, MISMATCH, NONFINITE, RESETS, DeviceEvents
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.kernels.interface import FLOAT32_MAX, PackedIntSum
from laconic.kernels.interface import NONFINITE as NONFINITE_BITS
from laconic.kernels.sections import SUM_BLOCK, num_buckets

__all__ = ["DeviceSums"]


class DeviceSums:
    """Means over ranks of tensors on one GPU by ``shared`` or ``thc``, with the bits of the sums that the host leads.

    Stochastic rounding uses the rounding seed of the first slot for all.

    Args:
        fill: What a slot becomes that is not finite on some rank.
    """

    def __init__(
        self, contributor: Contributor, group: dist.ProcessGroup | None, stats: ExchangeStats, events: DeviceEvents,
        fill: float,
    ) -> None:  # fmt: skip
        self._contributor, self._group, self.stats, self._events = contributor, group, stats, events
        self._fill = fill

    def serves(self, x: Tensor) -> bool:
        """Whether there are kernels for tensors like this one."""
        family = self._contributor.summing.family
        joined = isinstance(family, PackedInts) and family.selector is None
        return joined and kernels.multi_tensor_backend_for(x) is not None

    def reduce(self, named: Sequence[tuple[str, Tensor]], tensors: str, seed: int) -> None:
        """Replace flat, contiguous float32 tensors by their means. It only launches work.

        Args:
            tensors: Describes the tensors, the same on all ranks.
        """
        contributor, outs = self._contributor, [x for _, x in named]
        backend, device = kernels.multi_tensor_backend_for(outs[0]), outs[0].device
        family, workers = contributor.summing.family, contributor.summing.workers
        assert backend is not None and isinstance(family, PackedInts)
        head, counts = family.head(workers, True), self._events.on(device)
        joined = contributor.join([name for name, _ in named], outs)
        blocks = joined.values.numel() // SUM_BLOCK
        maxima = torch.empty(blocks + 2, device=device)
        scales, own = maxima[:blocks], contributor.scales_joined(joined)
        torch.nan_to_num(own, nan=FLOAT32_MAX, posinf=FLOAT32_MAX, out=scales)
        digest = digest_of(f"{contributor.summing.chain.text} {workers} {tensors}")
        maxima[-2].fill_(digest)
        maxima[-1].fill_(MAX_DIGEST - digest)
        all_reduce(maxima, self._group, self.stats, dist.ReduceOp.MAX).wait()
        clips, flags, own_flags = backend.agreed_clips(
            maxima, own, _heads(tuple(joined.sizes), device), family.stage.clip_factor(head.levels, workers),
            MAX_DIGEST, counts[NONFINITE], counts[MISMATCH],
        )  # fmt: skip
        integers = contributor.encode_joined(joined, clips, seed=seed)
        all_reduce(integers.view(torch.int32), self._group, self.stats).wait()
        if contributor.feedback:
            self._keep_residuals(joined, outs, backend, flags, own_flags, counts)
        total = PackedIntSum(integers, clips, head.coding, replace(head, count=workers).total)
        flag = backend.packed_int_decode_all(total, rotation_seed=family.stage.rotation_seed, outs=outs)
        counts[INVALID].add_(flag[0])
        backend.fill_all(outs, flags, self._fill)
        self._events.copy_to_host()

    def _keep_residuals(
        self, joined: JoinedSlots, tensors: Sequence[Tensor], backend: kernels.MultiTensorKernels, flags: Tensor,
        own_flags: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        """Undo the round of slots that are not usable. A residual that is the reason is reset, as it would be again."""
        residuals = self._contributor.split_joined(joined)
        backend.restore_all(residuals, joined.residuals, flags)
        if any(residual is not None for residual in joined.residuals):
            bits = backend.amax_bits_all(tensors, only=own_flags)
            reset = torch.where(bits < NONFINITE_BITS, own_flags, 0)
            backend.fill_all(residuals, reset, 0.0)
            counts[RESETS].add_((reset > 0).sum())


@lru_cache(maxsize=256)
def _heads(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first block of each slot, and the end of the last."""
    blocks = accumulate((num_buckets(size, SUM_BLOCK) for size in sizes), initial=0)
    return torch.tensor(list(blocks), dtype=torch.int32).to(device)
