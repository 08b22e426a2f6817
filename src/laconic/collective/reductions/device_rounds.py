"""The two rounds of ``TwoShot`` on a GPU: sections travel between GPUs, and the host never waits for them.

It serves codecs whose messages have a fixed size (``device_codings.py``), with or without error feedback. There are no
headers and checksums: both ends know the layout, and NCCL delivers what was sent. What the host would look at stays on
the device: whether a shard is finite travels as its amax bits behind the sections, and events are counted there and
read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.channels import Channel
from laconic.collective.process_groups import rank_in, size_of
from laconic.collective.reductions.device_codings import DeviceCoding
from laconic.collective.reductions.device_events import INVALID, NONFINITE, RESETS, DeviceEvents
from laconic.collective.reductions.ranges import Range, cut_into_parts
from laconic.collective.reductions.shards import hash_of
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import ALL_GATHER
from laconic.kernels.interface import NONFINITE as NONFINITE_BITS
from laconic.kernels.random import splitmix64, splitmix64_all
from laconic.wire import align

__all__ = ["DeviceRounds"]

PART = 1 << 26
"""The largest number of values of one round. More would need large buffers; fewer, more launches."""

MAX_PLANS = 256


@dataclass(frozen=True)
class _Layout:
    """Where the sections of shards are in a message: the sections of all shards, then the amax bits of each."""

    sections: list[tuple[int, ...]]
    amax_bits: int
    nbytes: int

    @classmethod
    def of(cls, sizes: Sequence[int], coding: DeviceCoding) -> _Layout:
        sections, at = [], 0
        for size in sizes:
            begins = list(accumulate(map(align, coding.section_nbytes(size)), initial=at))
            sections.append(tuple(begins[:-1]))
            at = begins[-1]
        return cls(sections, at, align(at + 4 * len(sizes)))

    def words(self, begin: int) -> list[int]:
        """Return where the amax bits are, in words, in a buffer whose message begins at a byte."""
        return [(begin + self.amax_bits) // 4 + i for i in range(len(self.sections))]


class _Message:
    """Shards, and the addresses of their sections in a buffer that holds one message or one of each rank.

    Args:
        begins: Where the message of each owner begins in the buffer, in bytes.
    """

    def __init__(
        self, shards: Sequence[Sequence[Range]], layouts: Sequence[_Layout], begins: Mapping[int, int], buffer: Tensor
    ) -> None:
        base = buffer.data_ptr()
        self.buffer = buffer
        self.ranges = [piece for owner in begins for piece in shards[owner]]
        self.names = [piece.name for piece in self.ranges]
        placed = [(base + begin, each) for owner, begin in begins.items() for each in layouts[owner].sections]
        self.sections = list(zip(*([begin + at for at in each] for begin, each in placed), strict=True))
        words = [word for owner, begin in begins.items() for word in layouts[owner].words(begin)]
        self._words = buffer.view(torch.int32)
        self._amax_at = torch.tensor(words, dtype=torch.int64).to(buffer.device)

    def values(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [flats[piece.slot][piece.begin : piece.end] for piece in self.ranges]

    @property
    def amax_bits(self) -> Tensor:
        """The amax bits in the message, of each shard."""
        return self._words[self._amax_at]

    @amax_bits.setter
    def amax_bits(self, bits: Tensor) -> None:
        self._words[self._amax_at] = bits


class _Plan:
    """Shards of slots of some sizes, and buffers for their messages."""

    def __init__(
        self, ranges: Sequence[Range], coding: DeviceCoding, rank: int, ranks: int, device: torch.device
    ) -> None:
        shards: list[list[Range]] = [[] for _ in range(ranks)]
        for piece in ranges:
            shards[piece.owner].append(piece)
        layouts = [_Layout.of([piece.end - piece.begin for piece in owned], coding) for owned in shards]
        self.peers = [peer for peer in range(ranks) if peer != rank]
        self.sent_nbytes = [0 if owner == rank else layout.nbytes for owner, layout in enumerate(layouts)]
        self.received_nbytes = [0 if peer == rank else layouts[rank].nbytes for peer in range(ranks)]
        self.mean_nbytes = max(layout.nbytes for layout in layouts)

        def buffer(nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        self.sent, self.received = buffer(sum(self.sent_nbytes)), buffer(sum(self.received_nbytes))
        self.mean, self.means = buffer(self.mean_nbytes), buffer(ranks * self.mean_nbytes)
        sent_at = {owner: sum(self.sent_nbytes[:owner]) for owner in self.peers}
        self.outgoing = _Message(shards, layouts, sent_at, self.sent)
        self.incoming = [
            _Message(shards, layouts, {rank: sum(self.received_nbytes[:peer])}, self.received) for peer in self.peers
        ]
        self.own = _Message(shards, layouts, {rank: 0}, self.mean)
        self.all = _Message(shards, layouts, {owner: owner * self.mean_nbytes for owner in range(ranks)}, self.means)


class DeviceRounds:
    """Means over ranks of tensors on one GPU, the same bits as those of the rounds that go through the host.

    A shard that is not finite on some rank becomes NaN on all of them (``nonfinite="spread"``); its residuals stay.

    Args:
        scatter, gather: The channels that keep the residuals of this rank, as a sender and as an owner.
    """

    def __init__(
        self, coding: DeviceCoding, scatter: Channel, gather: Channel, group: dist.ProcessGroup | None,
        stats: ExchangeStats,
    ) -> None:  # fmt: skip
        self._coding = coding
        self._scatter, self._gather, self._group, self.stats = scatter, gather, group, stats
        self.rank, self.ranks = rank_in(group), size_of(group)
        self._plans: dict[tuple[Any, ...], list[_Plan]] = {}
        self._seeds: dict[tuple[tuple[str, ...], int], Any] = {}
        self.events = DeviceEvents()

    def reduce(self, flats: Sequence[tuple[str, Tensor]], rounds: Mapping[str, int]) -> None:
        """Replace tensors by their means. It only launches work: later uses on the same stream see the means."""
        slots, values = [slot for slot, _ in flats], [flat for _, flat in flats]
        counts = self.events.on(values[0].device)
        for plan in self._plans_for(flats):
            unusable = self._sum_shards(plan, slots, values, rounds, counts) if plan.peers else None
            self._send_means(plan, slots, values, rounds, counts, unusable)
        self.events.copy_to_host()

    def _plans_for(self, flats: Sequence[tuple[str, Tensor]]) -> list[_Plan]:
        device, sizes = flats[0][1].device, tuple((slot, flat.numel()) for slot, flat in flats)
        plans = self._plans.get((device, sizes))
        if plans is None:
            if len(self._plans) >= MAX_PLANS:  # the sets of slots do not recur
                self._plans.clear()
            plans = self._plans[device, sizes] = [
                _Plan(ranges, self._coding, self.rank, self.ranks, device)
                for ranges in cut_into_parts(sizes, PART, self.ranks)
            ]
        return plans

    def _sum_shards(
        self, plan: _Plan, slots: Sequence[str], flats: Sequence[Tensor], rounds: Mapping[str, int], counts: Tensor
    ) -> Tensor | None:
        """Send the shards of other owners and add up those of this rank; return which of these are not finite."""
        outgoing = plan.outgoing
        if outgoing.names:
            seeds = self._seeds_of(outgoing, self.rank, slots, rounds)
            outgoing.amax_bits = self._encode(self._scatter, outgoing, outgoing.values(flats), seeds, None, counts)
        self.stats.bytes_sent += sum(plan.sent_nbytes)
        self.stats.bytes_received += sum(plan.received_nbytes)
        dist.all_to_all_single(plan.received, plan.sent, plan.received_nbytes, plan.sent_nbytes, group=self._group)
        own = plan.own.values(flats)
        if not own:
            return None
        backend, weight = self._backend(own[0]), 1.0 / self.ranks
        torch._foreach_mul_(own, weight)
        unusable = torch.zeros(len(own), dtype=torch.int32, device=own[0].device)
        for message in plan.incoming:
            bits = message.amax_bits
            flag = self._coding.decode(message.sections, backend, own, weight, bits)
            counts[INVALID].add_(flag[0])
            unusable = torch.maximum(unusable, bits)
        return unusable

    def _send_means(
        self, plan: _Plan, slots: Sequence[str], flats: Sequence[Tensor], rounds: Mapping[str, int], counts: Tensor,
        unusable: Tensor | None,
    ) -> None:  # fmt: skip
        own, everything = plan.own.values(flats), plan.all.values(flats)
        if own:
            seeds = self._seeds_of(plan.own, self.ranks, slots, rounds)
            plan.own.amax_bits = self._encode(self._gather, plan.own, own, seeds, unusable, counts)
        if plan.peers:
            self.stats.bytes_sent += plan.mean_nbytes * len(plan.peers)
            self.stats.bytes_received += plan.mean_nbytes * len(plan.peers)
            getattr(dist, ALL_GATHER)(plan.means, plan.mean, group=self._group)
        else:
            plan.means.copy_(plan.mean)
        backend, bits = self._backend(everything[0]), plan.all.amax_bits
        flag = self._coding.decode(plan.all.sections, backend, everything, None, bits)
        backend.fill_all(everything, bits, float("nan"))
        counts[INVALID].add_(flag[0])
        counts[NONFINITE].add_((bits >= NONFINITE_BITS).sum())

    def _encode(
        self, channel: Channel, message: _Message, values: Sequence[Tensor], seeds: Any, unusable: Tensor | None,
        counts: Tensor,
    ) -> Tensor:  # fmt: skip
        """Encode shards with their residuals; return the amax bits of each, or those that make it unusable."""
        backend, residuals = self._backend(values[0]), channel.residuals_of(message.names, values)
        if self._coding.zeroed:
            message.buffer.zero_()
        if residuals is None:
            bits = self._coding.encode(values, None, backend, seeds, message.sections, unusable, counts)
            return bits if unusable is None else torch.maximum(bits, unusable)
        skip = backend.amax_bits_all(values)  # an error must leave residuals unchanged, so it is detected beforehand
        if unusable is not None:
            skip = torch.maximum(skip, unusable)
        if channel.decay != 1.0:
            backend.scale_all(residuals, channel.decay, skip)
        bits = self._coding.encode(values, residuals, backend, seeds, message.sections, skip, counts)
        backend.fill_all(residuals, bits, 0.0)  # where a sum with the residual left float32
        counts[RESETS].add_((bits >= NONFINITE_BITS).sum())
        return torch.maximum(bits, skip)

    def _seeds_of(self, message: _Message, sender: int, slots: Sequence[str], rounds: Mapping[str, int]) -> Any:
        """Return the rounding seed of each shard: those of the frames that ``TwoShot`` would send."""
        import numpy as np

        key = (tuple(message.names), sender)
        inner = self._seeds.get(key)
        if inner is None:
            if len(self._seeds) >= MAX_PLANS:
                self._seeds.clear()
            inner = self._seeds[key] = np.array(
                [splitmix64(sender ^ hash_of(name)) for name in message.names], dtype=np.uint64
            )
        counts = np.array([rounds[slots[piece.slot]] for piece in message.ranges], dtype=np.uint64)
        return splitmix64_all(counts ^ inner)

    def _backend(self, x: Tensor) -> kernels.MultiTensorKernels:
        backend = kernels.multi_tensor_backend_for(x)
        assert backend is not None
        return backend
