"""Means of packed integers on a GPU: all slots of a DDP bucket in a few launches, and the host never waits for them.

Two all-reduces, the largest scales and the integers, are handed to ``torch.distributed`` in every case, so that ranks
call it in the same order with the same sizes whatever their values are. What the host would decide is decided on the
device: a slot that is not finite on some rank has zeros for integers, keeps its residual, and ends as NaN on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.aggregate.homomorphic.contributor import Contributor
from laconic.aggregate.homomorphic.families import LowRank, PackedInts
from laconic.collective.process_groups import is_registered, size_of
from laconic.collective.reductions.agreement import MAX_DIGEST, digest_of
from laconic.collective.reductions.device_events import INVALID, MISMATCH, NONFINITE, RESETS, DeviceEvents
from laconic.collective.reductions.device_lowrank import LowRankRound, stretches_of
from laconic.collective.reductions.device_replay import Recent
from laconic.collective.reductions.device_residuals import DeviceResiduals, Workspace, residuals_of
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.kernels.interface import FLOAT32_MAX, PackedIntSum
from laconic.kernels.interface import NONFINITE as NONFINITE_BITS
from laconic.kernels.sections import SUM_BLOCK, num_buckets, packed_int_count
from laconic.packet import HeapArena

__all__ = ["DeviceSums"]


class PackedIntRound:
    """The sum of some tensors, in stretches of work between the collectives.

    The blocks of all slots are one behind the other in ``values``: scales, integers and residuals belong to blocks.
    """

    op = dist.ReduceOp.MAX
    """How the first all-reduce joins the ranks' probes."""

    def __init__(
        self, contributor: Contributor, named: Sequence[tuple[str, Tensor]], values: Tensor, counts: Tensor,
        fill: float, workspace: Workspace, alone: bool,
    ) -> None:  # fmt: skip
        family, summing, device = contributor.summing.family, contributor.summing, values.device
        assert isinstance(family, PackedInts)
        backend = kernels.multi_tensor_backend_for(values)
        assert backend is not None
        self._contributor, self._stage, self._head = contributor, family.stage, family.head(summing.workers, True)
        self._slots, self._outs, self._values = [slot for slot, _ in named], [x for _, x in named], values
        self._backend, self._counts, self._fill = backend, counts, fill
        sizes = [x.numel() for x in self._outs]
        blocks = list(accumulate((num_buckets(size, SUM_BLOCK) for size in sizes), initial=0))
        self._heads = torch.tensor(blocks, dtype=torch.int32).to(device, non_blocking=True)
        rotated = self._stage.rotation_seed is not None
        shapes = [packed_int_count(size, rotated) for size in sizes]
        self._parts = [values[SUM_BLOCK * at : SUM_BLOCK * at + n] for at, n in zip(blocks, shapes, strict=False)]
        self._residuals: DeviceResiduals | None = None
        if contributor.feedback:
            self._residuals = residuals_of(contributor, self._slots, shapes, device, workspace)
        described = " ".join(f"{slot} {size}" for slot, size in zip(self._slots, sizes, strict=True))
        self._digest = digest_of(f"{summing.chain.text} {summing.workers} on the device {described}")
        self.seed = 0
        self.first = torch.empty(blocks[-1] + 2, device=device)
        self._integers = torch.empty(0)
        self._own = self._clips = self._flags = self._own_flags = torch.empty(0)
        # Stochastic rounding has a seed for an argument.
        self.stretches = stretches_of(
            self._begin, self._encode, self._decode, device, alone, encode_recorded=not self._stage.stochastic
        )

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def second(self) -> Tensor:
        """What the second all-reduce adds."""
        return self._integers.view(torch.int32)

    @property
    def current(self) -> bool:
        """Whether the contributor still keeps the same residuals."""
        return self._residuals is None or self._residuals.current

    def begin_round(self, rounds: Sequence[int]) -> None:
        """Note the round of each slot."""
        self.seed = rounds[0]
        if self._residuals is not None:
            self._residuals.begin_round(rounds)

    def _begin(self) -> None:
        """Gather the blocks, and write their scales, and a digest of what is reduced, for the agreement."""
        residuals: Sequence[Tensor | None] = [None] * len(self._slots)
        if self._residuals is not None:
            self._residuals.load()
            residuals = self._residuals.floats
        self._backend.gather_blocks(
            self._outs, residuals, self._contributor.decay, self._stage.rotation_seed, self._values
        )
        self._own = self._stage.scales(self._values, kernels.backend_for(self._values))
        torch.nan_to_num(self._own, nan=FLOAT32_MAX, posinf=FLOAT32_MAX, out=self.first[:-2])
        self.first[-2].fill_(self._digest)
        self.first[-1].fill_(MAX_DIGEST - self._digest)

    def _encode(self) -> None:
        head, contributor = self._head, self._contributor
        self._clips, self._flags, self._own_flags = self._backend.agreed_clips(
            self.first, self._own, self._heads, self._stage.clip_factor(head.levels, head.workers), MAX_DIGEST,
            self._counts[NONFINITE], self._counts[MISMATCH],
        )  # fmt: skip
        self._integers = self._stage.encode_packed_ints(
            self._values, head, self._clips, kernels.backend_for(self._values), HeapArena(self._values.device),
            rotation_seed=None, rounding_seed=contributor.rounding_seed(self.seed), feedback=contributor.feedback,
        )  # fmt: skip

    def _decode(self) -> None:
        if self._residuals is not None:
            self._keep_residuals(self._residuals)
        total = PackedIntSum(
            self._integers, self._clips, self._head.coding, replace(self._head, count=self._head.workers).total
        )
        flag = self._backend.packed_int_decode_all(total, rotation_seed=self._stage.rotation_seed, outs=self._outs)
        self._counts[INVALID].add_(flag[0])
        self._backend.fill_all(self._outs, self._flags, self._fill)

    def _keep_residuals(self, kept: DeviceResiduals) -> None:
        """Keep what was not sent. A slot that is not usable keeps its residual, unless this is the reason."""
        residuals = kept.floats
        self._backend.copy_all(self._parts, residuals, self._flags)
        bits = self._backend.amax_bits_all(self._outs, only=self._own_flags)
        reset = torch.where(bits < NONFINITE_BITS, self._own_flags, 0)
        self._backend.fill_all(residuals, reset, 0.0)
        kept.store(self._backend)
        self._counts[RESETS].add_((reset > 0).sum())


class DeviceSums:
    """Means over ranks of tensors on one GPU by ``shared``, ``thc`` or ``powersgd``, the bits of sums led by the host.

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
        self._alone = is_registered(group) and size_of(group) == 1
        self._rounds: Recent[tuple[list[torch.Size], PackedIntRound | LowRankRound]] = Recent()
        self._values, self._workspace = Workspace(), Workspace()

    def serves(self, device: torch.device) -> bool:
        """Whether there are kernels for the codec on a device."""
        family = self._contributor.summing.family
        joined = isinstance(family, LowRank) or (isinstance(family, PackedInts) and family.selector is None)
        return joined and kernels.multi_tensor_backend_for(torch.empty(0, device=device)) is not None

    def takes(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape is reduced here; PowerSGD sends vectors and flat matrices whole."""
        family = self._contributor.summing.family
        return shape.numel() > 0 and not (isinstance(family, LowRank) and family.stage.for_shape(tuple(shape)).whole)

    def reduce(self, named: Sequence[tuple[str, Tensor]], shapes: Sequence[torch.Size], rounds: Sequence[int]) -> None:
        """Replace flat, contiguous float32 tensors by their means. It only launches work.

        Args:
            named: Slots, or parts of them.
            shapes: The shape of each slot.
            rounds: The round of each slot.
        """
        self._launch(self._round_for(named, shapes, rounds), rounds)
        self._events.copy_to_host()

    def prepare(
        self, named: Sequence[tuple[str, Tensor]], shapes: Sequence[torch.Size], rounds: Sequence[int]
    ) -> Callable[[Sequence[int]], None]:
        """Return a function that replaces tensors, which stay where they are, by their means; it takes their rounds."""
        prepared = self._round_for(named, shapes, rounds)

        def launch(rounds: Sequence[int]) -> None:
            nonlocal prepared
            if not prepared.current:
                prepared = self._round_for(named, shapes, rounds)
            self._launch(prepared, rounds)

        return launch

    def forget_places(self) -> None:
        """Drop what was prepared for tensors where they were."""
        self._rounds.clear()

    def _launch(self, exchange: PackedIntRound | LowRankRound, rounds: Sequence[int]) -> None:
        first, *others = exchange.stretches
        exchange.begin_round(rounds)
        first()
        if others:
            encode, decode = others
            all_reduce(exchange.first, self._group, self.stats, exchange.op).wait()
            encode()
            all_reduce(exchange.second, self._group, self.stats).wait()
            decode()
        self._contributor.stats.rounds += exchange.slots

    def _round_for(
        self, named: Sequence[tuple[str, Tensor]], shapes: Sequence[torch.Size], rounds: Sequence[int]
    ) -> PackedIntRound | LowRankRound:
        """Return the round of tensors, made anew if they or their residuals are elsewhere than before."""
        found = self._rounds.get(named)
        if found is None or found[0] != list(shapes) or not found[1].current:
            contributor, family = self._contributor, self._contributor.summing.family
            counts = self._events.on(named[0][1].device)
            if isinstance(family, LowRank):
                matrices = [family.stage.for_shape(tuple(shape)) for shape in shapes]
                memory = self._memory_for(named, 1) if contributor.feedback else None
                found = (
                    [*shapes],
                    LowRankRound(
                        contributor, named, matrices, rounds, memory, counts, self._fill, self._workspace, self._alone
                    ),
                )
            else:
                memory = self._memory_for(named, SUM_BLOCK)
                found = (
                    [*shapes],
                    PackedIntRound(contributor, named, memory, counts, self._fill, self._workspace, self._alone),
                )
            self._rounds.put(named, found)
        return found[1]

    def _memory_for(self, named: Sequence[tuple[str, Tensor]], block: int) -> Tensor:
        """Return memory for the values of all slots, in whole blocks; rounds run one after the other and share it."""
        numel = block * sum(num_buckets(x.numel(), block) for _, x in named)
        return self._values.floats(numel, named[0][1].device)
