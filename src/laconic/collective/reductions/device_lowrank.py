"""Means of PowerSGD on a GPU: the matrices of a DDP bucket together, and the host never waits for them.

Two all-reduces, of all sketches and of all factors, are handed to ``torch.distributed`` in every case. A matrix that is
not finite on some rank keeps its residual and its start, and ends as NaN on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.aggregate.homomorphic.contributor import Contributor
from laconic.codecs.powersgd import Matrix
from laconic.collective.reductions.device_events import INVALID, NONFINITE, RESETS
from laconic.collective.reductions.device_replay import Replay
from laconic.collective.reductions.device_residuals import DeviceResiduals, Workspace, residuals_of
from laconic.kernels.interface import NONFINITE as NONFINITE_BITS

__all__ = ["LowRankRound", "stretches_of"]

LARGE = 0x71800000
"""Bits of 2^100: a sum with such a residual is the reason why a round fails."""


def stretches_of(
    begin: Callable[[], None], encode: Callable[[], None], decode: Callable[[], None], device: torch.device,
    alone: bool, *, encode_recorded: bool = True,
) -> list[Replay]:  # fmt: skip
    """Return the work before, between and after two all-reduces; as one stretch where there is no other rank."""
    if not alone:
        return [Replay(begin, device), Replay(encode, device, recorded=encode_recorded), Replay(decode, device)]

    def whole() -> None:
        begin()
        encode()
        decode()

    return [Replay(whole, device, recorded=encode_recorded)]


class LowRankRound:
    """The mean of some matrices, in stretches of work between the collectives.

    Args:
        memory: For the sums with residuals; None without error feedback.
        alone: Whether there is no other rank.
    """

    op = dist.ReduceOp.SUM

    def __init__(
        self, contributor: Contributor, named: Sequence[tuple[str, Tensor]], matrices: Sequence[Matrix],
        rounds: Sequence[int], memory: Tensor | None, counts: Tensor, fill: float, workspace: Workspace, alone: bool,
    ) -> None:  # fmt: skip
        from laconic.kernels.triton.lowrank_all import Matrices

        backend, device = kernels.multi_tensor_backend_for(named[0][1]), named[0][1].device
        assert backend is not None
        self._contributor, self._backend, self._counts, self._fill = contributor, backend, counts, fill
        self._slots, self._outs = [slot for slot, _ in named], [x for _, x in named]
        shapes = [(matrix.rows, matrix.columns, matrix.r) for matrix in matrices]
        self._matrices = Matrices(shapes, max(r for _, _, r in shapes), device)
        starts = [contributor.start(slot, m, x) for (slot, x), m in zip(named, matrices, strict=True)]
        drawn = [m.start(seed, x) for (_, x), m, seed in zip(named, matrices, rounds, strict=True)]
        self._fresh = torch.cat([matrix.start(0, x).view(-1) for matrix, x in zip(matrices, self._outs, strict=True)])
        self._start = torch.cat(
            [(new if old is None else old).reshape(-1) for old, new in zip(starts, drawn, strict=True)]
        )
        parts = torch.split(self._start, [matrix.r * matrix.columns for matrix in matrices])
        self._starts = [part.view(m.r, m.columns) for part, m in zip(parts, matrices, strict=True)]
        contributor.keep_starts(self._slots, self._starts)
        self._residuals: DeviceResiduals | None = None
        self._sums = None
        sizes = [x.numel() for x in self._outs]
        if memory is not None:
            self._residuals = residuals_of(contributor, self._slots, sizes, device, workspace)
            self._sums = list(torch.split(memory, sizes))
            self._residual_addresses = self._matrices.addresses(self._residuals.floats)
        self._addresses = self._matrices.addresses(self._outs)
        self._sum_addresses = self._addresses if self._sums is None else self._matrices.addresses(self._sums)
        self._bits = torch.zeros(len(named), dtype=torch.int32, device=device)
        self._workers = torch.full((1,), float(contributor.summing.workers), device=device)
        self.first, self.second = self._matrices.sketch, self._matrices.factor
        self.stretches = stretches_of(self._begin, self._encode, self._decode, device, alone)

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def current(self) -> bool:
        """Whether the contributor still keeps the same residuals and starts."""
        starts = self._contributor.companion
        if not all(starts(slot) is x for slot, x in zip(self._slots, self._starts, strict=True)):
            return False
        return self._residuals is None or self._residuals.current

    def begin_round(self, rounds: Sequence[int]) -> None:
        """Note the round of each slot."""
        if self._residuals is not None:
            self._residuals.begin_round(rounds)

    def _begin(self) -> None:
        sums = self._outs
        if self._residuals is not None and self._sums is not None:
            sums = self._sums
            self._residuals.load()
            torch._foreach_copy_(sums, self._residuals.floats)
            if self._contributor.decay != 1.0:
                torch._foreach_mul_(sums, self._contributor.decay)
            torch._foreach_add_(sums, self._outs)
        self._bits = self._backend.amax_bits_all(sums)
        self._matrices.write_sketch(self._sum_addresses, self._bits, self._start)

    def _encode(self) -> None:
        matrices, invalid = self._matrices, self._counts[INVALID]
        matrices.write_basis(self._counts[NONFINITE])
        matrices.write_factor(self._sum_addresses)
        if self._residuals is None:
            return
        matrices.store_products(self._residual_addresses, matrices.factor, invalid, self._sum_addresses)
        bits = self._backend.amax_bits_all(self._outs, only=matrices.flags)
        unusable = (matrices.flags > 0) & (self._bits >= LARGE) & (bits < LARGE)
        reset = torch.where(unusable, NONFINITE_BITS, 0).to(torch.int32)
        self._backend.fill_all(self._residuals.floats, reset, 0.0)
        self._residuals.store(self._backend)
        self._counts[RESETS].add_(unusable.sum())

    def _decode(self) -> None:
        matrices = self._matrices
        matrices.write_start(self._fresh, self._start)
        factor = matrices.factor
        if self._contributor.summing.workers > 1:
            factor = factor / self._workers
        matrices.store_products(self._addresses, factor, self._counts[INVALID])
        self._backend.fill_all(self._outs, matrices.flags, self._fill)
