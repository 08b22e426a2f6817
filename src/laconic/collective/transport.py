"""All bytes that ranks exchange leave through this module, which counts them: collectives, and messages each to each.

Messages go by isend and irecv, because gloo's all_gather takes four times as long for the same bytes. gloo moves
nothing before the receiver has posted its buffer, and that notice queues behind megabytes that are already on their
way. So all receives of a round are posted before the first send, and no lengths travel ahead: both ends remember the
length of the message with the same key in the last round, and a message that has grown beyond it comes in two pieces.

gloo's all_reduce is a ring: 2 (M - 1) round trips, which on distant hosts is nearly all of its time if the tensor is
small. Small tensors go from each rank to each other instead, in one round trip.

A group is any ProcessGroup of torch, also one that ``torch.distributed`` does not know (torchft's). torch's threaded
group, for tests, cannot send: there each round is two ``all_to_all_single``. In a fake group nothing arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.buffers import BufferCache
from laconic.collective.process_groups import (
    backend_of,
    is_registered,
    rank_in,
    size_of,
    start_all_reduce,
    start_messages,
)
from laconic.collective.stats import ExchangeStats
from laconic.errors import InputError

__all__ = [
    "DIRECT", "PREFIX", "AllToAll", "Transport", "all_gather", "all_reduce", "broadcast", "broadcast_all",
    "reduce_scatter",
]  # fmt: skip

PREFIX = 16
"""Bytes before a message, which hold its length: a multiple of the alignment of frames."""

_TAGS = 1 << 29

_JOINED = 1 << 22
"""The largest number of values that are copied into one tensor for a broadcast."""


DIRECT = 1 << 20
"""Bytes that a rank sends at most if all others receive all of a small tensor; beyond, a ring sends fewer."""

_COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda total, x: total.add_(x),
    dist.ReduceOp.MAX: lambda total, x: torch.maximum(total, x, out=total),
    dist.ReduceOp.BOR: lambda total, x: total.bitwise_or_(x),
}

_NEW = hasattr(dist, "reduce_scatter_single")
REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"
ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
"""Functions of torch.distributed: since torch 2.13 the former names are deprecated."""


def all_reduce(
    x: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats, op: Any = dist.ReduceOp.SUM, *,
    as_torch: bool = False,
) -> Any:  # fmt: skip
    """Start an all-reduce in place and count its bytes; return the work to wait for.

    Args:
        as_torch: Whether a sum must have the bits of torch's all-reduce, which adds in another order.
    """
    if not as_torch and _goes_directly(x, group) and op in _COMBINE:
        return _DirectAllReduce(x, group, stats, _COMBINE[op])
    parts = (x._indices(), x._values()) if x.is_sparse else (x,)
    stats.bytes_reduced += sum(part.numel() * part.element_size() for part in parts)
    return start_all_reduce(x, group, op)


def _goes_directly(x: Tensor, group: dist.ProcessGroup | None) -> bool:
    if x.device.type != "cpu" or x.is_sparse or not is_registered(group) or backend_of(group) != "gloo":
        return False
    return 0 < x.numel() * x.element_size() * (size_of(group) - 1) <= DIRECT


class _DirectAllReduce:
    """An all-reduce in which each rank sends its tensor to all others, and all combine them in the order of ranks."""

    def __init__(
        self, x: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats,
        combine: Callable[[Tensor, Tensor], Tensor],
    ) -> None:  # fmt: skip
        self._x, self._combine, self._rank = x, combine, rank_in(group)
        others, sizes = size_of(group) - 1, [x.numel() * x.element_size()] * size_of(group)
        sizes[self._rank] = 0
        sent = x.reshape(-1).repeat(others)
        received = torch.empty_like(sent)
        self._received = received.view(others, *x.shape)
        stats.bytes_sent += sent.nbytes
        stats.bytes_received += sent.nbytes
        # As bytes, because gloo does not know all dtypes.
        self._work = dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8), sizes, sizes, group=group, async_op=True
        )

    def wait(self, *timeout: timedelta) -> None:
        """Wait, once; the tensor then holds the result."""
        assert self._work is not None
        self._work.wait(*timeout)
        tensors = [*self._received[: self._rank], self._x.clone(), *self._received[self._rank :]]
        for x in tensors[1:]:
            self._combine(tensors[0], x)
        self._x.copy_(tensors[0])


def reduce_scatter(
    output: Tensor, x: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats, *, mean: bool
) -> Callable[[], None]:
    """Start torch's reduce-scatter of contiguous tensors; the returned function waits for it."""
    stats.bytes_scattered += x.numel() * x.element_size()
    averages = mean and backend_of(group) in ("nccl", "threaded")  # gloo cannot average
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work = getattr(dist, REDUCE_SCATTER)(output, x, op=op, group=group, async_op=True)

    def finish() -> None:
        with stats.during("wire_s"):
            work.wait()
        if mean and not averages:
            output.div_(size_of(group))

    return finish


def all_gather(
    output: Tensor, x: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats
) -> Callable[[], None]:  # fmt: skip
    """Start torch's all-gather of contiguous tensors; the returned function waits for it."""
    stats.bytes_gathered += x.numel() * x.element_size()
    work = getattr(dist, ALL_GATHER)(output, x, group=group, async_op=True)

    def finish() -> None:
        with stats.during("wire_s"):
            work.wait()

    return finish


def broadcast(x: Tensor, source: int, group: dist.ProcessGroup | None, stats: ExchangeStats) -> None:
    """Replace a tensor, of any stride, by that of a global rank."""
    if dist.get_rank() == source:
        stats.bytes_broadcast += x.numel() * x.element_size()
    if x.is_contiguous():
        dist.broadcast(x, source, group=group)
        return
    dense = x.contiguous()
    dist.broadcast(dense, source, group=group)
    x.copy_(dense)


def broadcast_all(
    tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup | None, stats: ExchangeStats
) -> None:
    """Replace tensors by those of a global rank, many small ones in one operation."""
    kinds = dict.fromkeys((x.dtype, x.device) for x in tensors)
    for dtype, device in kinds:
        pending: list[Tensor] = []
        for x in tensors:
            if (x.dtype, x.device) != (dtype, device):
                continue
            if pending and sum(each.numel() for each in pending) + x.numel() > _JOINED:
                _broadcast_joined(pending, source, group, stats)
                pending = []
            pending.append(x)
        _broadcast_joined(pending, source, group, stats)


def _broadcast_joined(
    tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup | None, stats: ExchangeStats
) -> None:
    if len(tensors) == 1:
        broadcast(tensors[0], source, group, stats)
        return
    joined = torch.cat([x.reshape(-1) for x in tensors])
    broadcast(joined, source, group, stats)
    for x, part in zip(tensors, torch.split(joined, [x.numel() for x in tensors]), strict=True):
        x.copy_(part.view(x.shape))


class _LengthHistory:
    """Lengths of the messages of one key and peer, which both ends see alike.

    Args:
        first: Length of the first message; 0 if it is not known.
    """

    def __init__(self, first: int = 0) -> None:
        self._last, self._constant = first, first > 0

    @property
    def expected(self) -> int:
        """Length of the first piece: the whole message, if lengths stay constant or grow by less than 1/32."""
        return self._last if self._constant else self._last + self._last // 32 + PREFIX

    def record(self, nbytes: int) -> None:
        self._last, self._constant = nbytes, nbytes == self._last


class Transport:
    """Messages between one rank and the other ranks of its group."""

    def __init__(self, group: dist.ProcessGroup | None, stats: ExchangeStats) -> None:
        self.group, self.stats = group, stats
        self.rank, self.size = rank_in(group), size_of(group)
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.buffers = BufferCache()
        backend = backend_of(group)
        nccl = backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.by_all_to_all = backend == "threaded"
        self.delivers = backend != "fake"
        # NCCL takes GPU memory only, has no tags, and needs sends and receives to be started in one group.
        self.grouped = nccl or self.by_all_to_all
        self._histories: dict[Hashable, _LengthHistory] = {}
        self._tag = 0

    def point_to_point(
        self, key: Hashable, limit: int, tag: int, *, sources: Sequence[int] = (), pinned: bool = False
    ) -> AllToAll:
        """Post the receives for a message from some ranks, which need not be all; the tag tells messages apart."""
        return AllToAll(self, key, limit, tag, pinned, sources)

    def all_to_all(self, key: Hashable, limit: int, *, pinned: bool = False, fixed: bool = False) -> AllToAll:
        """Post the receives for a message from each peer. All ranks call it in the same order.

        Args:
            key: Names the messages: the same in every round and on all ranks. Their buffers are valid until the next
                call with this key.
            limit: The largest length of a message.
            pinned: A GPU will read the messages.
            fixed: Whether messages have this length, or nearly: the first one then comes in one piece.
        """
        self._tag = (self._tag + 1) % _TAGS
        return AllToAll(self, key, limit, 2 * self._tag, pinned, self.peers, fixed)

    def history(self, *key: Hashable, first: int = 0) -> _LengthHistory:
        return self._histories.setdefault(key, _LengthHistory(first))

    def start(self, sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor], tag: int) -> list[Any]:
        """Start sends and receives by rank, and count their bytes."""
        self.stats.bytes_sent += sum(message.numel() for message in sending.values())
        self.stats.bytes_received += sum(buffer.numel() for buffer in receiving.values())
        if self.by_all_to_all:
            return [self._all_to_all_single(sending, receiving)]
        if not is_registered(self.group):
            assert self.group is not None
            return start_messages(self.group, sending, receiving, tag)
        operations = [
            dist.P2POp(operation, x, group=self.group, tag=tag, group_peer=rank)
            for operation, tensors in ((dist.isend, sending), (dist.irecv, receiving))
            for rank, x in tensors.items()
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _all_to_all_single(self, sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor]) -> _Scatter:
        none = torch.empty(0, dtype=torch.uint8, device=self.device)
        outgoing = [sending.get(rank, none) for rank in range(self.size)]
        incoming = [receiving.get(rank, none) for rank in range(self.size)]
        sizes = [x.numel() for x in incoming]
        joined = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        work = dist.all_to_all_single(
            joined, torch.cat(outgoing), sizes, [x.numel() for x in outgoing], group=self.group, async_op=True
        )
        return _Scatter(work, joined, incoming)

    def wait(self, works: list[Any]) -> None:
        with self.stats.during("wire_s"):
            for work in works:
                work.wait()


class _Scatter:
    """An all-to-all whose result is copied into the receivers' buffers when it is there."""

    def __init__(self, work: Any, joined: Tensor, buffers: Sequence[Tensor]) -> None:
        self._work, self._joined, self._buffers = work, joined, buffers

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        for buffer, part in zip(
            self._buffers, torch.split(self._joined, [x.numel() for x in self._buffers]), strict=True
        ):
            buffer.copy_(part)


class AllToAll:
    """A message to each peer and one from each: receives are posted at once, then ``send``, then ``receive``."""

    def __init__(
        self, transport: Transport, key: Hashable, limit: int, tag: int, pinned: bool, sources: Sequence[int],
        fixed: bool = False,
    ) -> None:  # fmt: skip
        self._transport, self._key, self.limit, self._tag = transport, key, limit, tag
        self._first = PREFIX + limit if fixed else 0
        self._buffers: dict[int, Tensor] = {}
        self._first_nbytes: dict[int, int] = {}
        for rank in sources:
            buffer = transport.buffers.get((key, rank), PREFIX + limit, device=transport.device, pinned=pinned)
            self._buffers[rank] = buffer
            self._first_nbytes[rank] = self._piece_nbytes("in", rank)
        receives = {rank: buffer[: self._first_nbytes[rank]] for rank, buffer in self._buffers.items()}
        self._deferred = receives if transport.grouped else {}
        self._arriving = [] if transport.grouped else transport.start({}, receives, tag)
        self._leaving: list[Any] = []
        self._second_pieces: dict[int, Tensor] = {}
        self._in_use: list[Tensor] = []

    def _piece_nbytes(self, direction: str, rank: int) -> int:
        expected = self._transport.history(direction, self._key, rank, first=self._first).expected
        return min(max(PREFIX, expected), PREFIX + self.limit)

    def send(self, outgoing: Mapping[int, Tensor]) -> None:
        """Send each peer its message: a uint8 tensor that begins with ``PREFIX`` free bytes.

        Its storage must extend to ``limit`` bytes, and must not change before ``finish`` returns.
        """
        transport, first = self._transport, {}
        for rank, message in outgoing.items():
            message[:8].view(torch.int64)[0] = message.numel() - PREFIX
            piece = self._piece_nbytes("out", rank)
            transport.history("out", self._key, rank).record(message.numel())
            whole = _extended(message, piece).to(transport.device)
            self._in_use.append(whole)
            first[rank] = whole[:piece]
            if message.numel() > piece:
                self._second_pieces[rank] = whole[piece : message.numel()]
        self._leaving = transport.start(first, self._deferred, self._tag)
        if not transport.grouped:
            self._leaving += transport.start(self._second_pieces, {}, self._tag + 1)

    def receive(self) -> dict[int, Tensor]:
        """Wait for the messages; return them by rank, on the host and without their prefix; none in a fake group."""
        transport = self._transport
        if transport.grouped:  # sends and receives are one work, which must not be waited for twice
            self._arriving, self._leaving = self._leaving, []
        transport.wait(self._arriving)
        if not transport.delivers:
            return {}
        sizes, missing = {}, {}
        for rank, buffer in self._buffers.items():
            nbytes = int(buffer[:8].view(torch.int64)[0])
            if not 0 <= nbytes <= self.limit:
                raise InputError(f"rank {rank} announces {nbytes} bytes, expected at most {self.limit}")
            sizes[rank] = PREFIX + nbytes
            transport.history("in", self._key, rank).record(sizes[rank])
            if sizes[rank] > self._first_nbytes[rank]:
                missing[rank] = buffer[self._first_nbytes[rank] : sizes[rank]]
        transport.wait(transport.start(self._second_pieces if transport.grouped else {}, missing, self._tag + 1))
        return {rank: buffer[PREFIX : sizes[rank]].cpu() for rank, buffer in self._buffers.items()}

    def finish(self) -> None:
        """Wait until all messages have left, so that their memory can be reused."""
        self._transport.wait(self._leaving)


def _extended(message: Tensor, nbytes: int) -> Tensor:
    """Return the message, or it and the bytes behind it in its buffer if it is shorter than ``nbytes``."""
    return message if message.numel() >= nbytes else message.as_strided((nbytes,), (1,))
