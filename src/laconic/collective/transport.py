"""Transport: messages of any length between ranks, each to each.

By isend and irecv, because gloo's all_gather takes four times as long for the same bytes. gloo moves nothing before the
receiver has made room and said so, and what it says waits behind megabytes that are on their way already. So room is
made for all messages of a round before the first is sent, and no lengths travel ahead: both ends remember how long the
message of the same name was in the last round, and one that has outgrown that comes in two pieces.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.buffers import BufferCache
from laconic.collective.stats import ExchangeStats
from laconic.errors import InputError

__all__ = ["PREFIX", "Swap", "Transport"]

PREFIX = 16
"""Bytes before a message, which hold its length: a multiple of what frames are aligned to."""

_TAGS = 1 << 29


class _Lengths:
    """How long the messages of one name were, as both ends saw it."""

    def __init__(self) -> None:
        self._last, self._same = 0, False

    @property
    def expected(self) -> int:
        """Of the first piece: all of it, if lengths stay as they were or grow a little."""
        return self._last if self._same else self._last + self._last // 32 + PREFIX

    def saw(self, nbytes: int) -> None:
        self._last, self._same = nbytes, nbytes == self._last


class Transport:
    """The ranks of a group, as seen from one of them."""

    def __init__(self, group: dist.ProcessGroup | None, ledger: ExchangeStats) -> None:
        self.group, self.ledger = group, ledger
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.rooms = BufferCache()
        # NCCL takes what is on the GPU and nothing else, has no tags, and must be told of sends and receives together.
        self.grouped = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.grouped else torch.device("cpu")
        self.lengths: dict[Hashable, _Lengths] = {}
        self._tag = 0

    def swap(self, key: Hashable, limit: int, *, pinned: bool = False) -> Swap:
        """Make room for a message from each of the others. All ranks do so in the same order.

        Args:
            key: What the messages are about: the same in every round, and on all ranks. They lie in memory that is kept
                under this key until the next swap with it.
            limit: The most bytes that a message may have.
            pinned: They will be read by a GPU.
        """
        self._tag = (self._tag + 1) % _TAGS
        return Swap(self, key, limit, 2 * self._tag, pinned)

    def length(self, *key: Hashable) -> _Lengths:
        return self.lengths.setdefault(key, _Lengths())

    def start(self, sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor], tag: int) -> list[Any]:
        operations = []
        for rank, words in sending.items():
            self.ledger.bytes_sent += words.numel()
            operations.append(dist.P2POp(dist.isend, words, group=self.group, tag=tag, group_peer=rank))
        for rank, room in receiving.items():
            operations.append(dist.P2POp(dist.irecv, room, group=self.group, tag=tag, group_peer=rank))
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def wait(self, works: list[Any]) -> None:
        with self.ledger.during("wire_s"):
            for work in works:
                work.wait()


class Swap:
    """A message to each of the others and one from each: room is made at once, then ``send``, then ``take``."""

    def __init__(self, peers: Transport, key: Hashable, limit: int, tag: int, pinned: bool) -> None:
        self._peers, self._key, self.limit, self._tag = peers, key, limit, tag
        self._rooms: dict[int, Tensor] = {}
        self._pieces: dict[int, int] = {}
        for rank in peers.others:
            self._rooms[rank] = peers.rooms.of((key, rank), PREFIX + limit, device=peers.device, pinned=pinned)
            self._pieces[rank] = min(max(PREFIX, peers.length("in", key, rank).expected), PREFIX + limit)
        first = {rank: room[: self._pieces[rank]] for rank, room in self._rooms.items()}
        self._receiving = {} if peers.grouped else first
        self._later = first if peers.grouped else {}
        self._arriving = peers.start({}, self._receiving, tag)
        self._leaving: list[Any] = []
        self._rest: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    def send(self, outgoing: Mapping[int, Tensor]) -> None:
        """Each of the others its message: a uint8 tensor that begins with ``PREFIX`` bytes for us.

        There must be room behind the message for ``limit`` bytes in all, and all of it stays as it is until ``take``
        returns.
        """
        peers, first = self._peers, {}
        for rank, message in outgoing.items():
            message[:8].view(torch.int64)[0] = message.numel() - PREFIX
            lengths = peers.length("out", self._key, rank)
            piece = min(max(PREFIX, lengths.expected), PREFIX + self.limit)
            lengths.saw(message.numel())
            whole = _padded(message, piece).to(peers.device)
            self._kept.append(whole)
            first[rank] = whole[:piece]
            if message.numel() > piece:
                self._rest[rank] = whole[piece : message.numel()]
        self._leaving = peers.start(first, self._later, self._tag)
        if not peers.grouped:
            self._leaving += peers.start(self._rest, {}, self._tag + 1)

    def take(self) -> dict[int, Tensor]:
        """The messages, on the host and without their prefix, by the rank they came from."""
        peers = self._peers
        if peers.grouped:  # both are one, and a second wait for it would not end
            self._arriving, self._leaving = self._leaving, []
        peers.wait(self._arriving)
        sizes, missing = {}, {}
        for rank, room in self._rooms.items():
            nbytes = int(room[:8].view(torch.int64)[0])
            if not 0 <= nbytes <= self.limit:
                raise InputError(f"rank {rank} announces {nbytes} bytes, at most {self.limit} make sense here")
            sizes[rank] = PREFIX + nbytes
            peers.length("in", self._key, rank).saw(sizes[rank])
            if sizes[rank] > self._pieces[rank]:
                missing[rank] = room[self._pieces[rank] : sizes[rank]]
        peers.wait(peers.start(self._rest if peers.grouped else {}, missing, self._tag + 1))
        return {rank: room[PREFIX : sizes[rank]].cpu() for rank, room in self._rooms.items()}

    def end(self) -> None:
        """Wait until what was sent has left, so that its memory can be written to again."""
        self._peers.wait(self._leaving)


def _padded(message: Tensor, nbytes: int) -> Tensor:
    """The message, or it and what lies behind it in its room."""
    if message.numel() >= nbytes:
        return message
    return message.as_strided((nbytes,), (1,))
