"""Peers: messages of any length between ranks, each to each.

By isend and irecv, because gloo's all_gather takes four times as long for the same bytes. A receiver must know how many
are to come, so lengths travel first; and gloo moves nothing before the receiver has made room, so that is done as early
as the length is known and not when the message is needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.ledger import Ledger
from laconic.collective.rooms import Rooms
from laconic.errors import InputError

__all__ = ["Peers", "Swap"]

_TAGS = 1 << 30


class Peers:
    """The ranks of a group, as seen from one of them."""

    def __init__(self, group: dist.ProcessGroup | None, ledger: Ledger) -> None:
        self.group, self.ledger = group, ledger
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.rooms = Rooms()
        on_device = dist.get_backend(group) == "nccl"  # which takes nothing else
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
        self._tag = 0

    def swap(self, outgoing: Mapping[int, Tensor], *, limit: int, key: Hashable) -> Swap:
        """Begin to send each of the others its message and to receive one from each.

        Args:
            outgoing: By rank. The bytes must stay as they are until ``Swap.take`` returns.
            limit: The most bytes that a message may have.
            key: What is received lies in memory kept under this key: it is overwritten by the next swap with it.
        """
        return Swap(self, outgoing, limit, key)

    def start(self, sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor]) -> list[Any]:
        """One message each way with each of the others; the same on all ranks, in the same order."""
        self._tag = (self._tag + 1) % _TAGS
        operations = []
        for rank in self.others:
            operations.append(dist.P2POp(dist.isend, sending[rank], group=self.group, tag=self._tag, group_peer=rank))
            operations.append(dist.P2POp(dist.irecv, receiving[rank], group=self.group, tag=self._tag, group_peer=rank))
            self.ledger.bytes_sent += sending[rank].numel() * sending[rank].element_size()
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def wait(self, works: list[Any]) -> None:
        with self.ledger.during("wire_s"):
            for work in works:
                work.wait()


class Swap:
    """A message to each of the others, and one from each: lengths first, then ``open``, then ``take``."""

    def __init__(self, peers: Peers, outgoing: Mapping[int, Tensor], limit: int, key: Hashable) -> None:
        self._peers, self._limit, self._key = peers, limit, key
        self._outgoing = {rank: message.to(peers.device) for rank, message in outgoing.items()}
        sizes = {rank: torch.tensor([outgoing[rank].numel()], device=peers.device) for rank in peers.others}
        self._sizes = {rank: torch.zeros(1, dtype=torch.int64, device=peers.device) for rank in peers.others}
        self._incoming: dict[int, Tensor] = {}
        self._kept = sizes  # until they are sent
        self._works = peers.start(sizes, self._sizes)

    def open(self) -> None:
        """Wait for the lengths, make room, and let the messages come."""
        peers = self._peers
        peers.wait(self._works)
        for rank in peers.others:
            nbytes = int(self._sizes[rank])
            if not 0 <= nbytes <= self._limit:
                raise InputError(f"rank {rank} announces {nbytes} bytes, at most {self._limit} make sense here")
            self._incoming[rank] = peers.rooms.of((self._key, rank), nbytes, device=peers.device)
        self._works = peers.start(self._outgoing, self._incoming)

    def take(self) -> dict[int, Tensor]:
        """The messages, on the host, by the rank they came from."""
        self._peers.wait(self._works)
        return {rank: message.cpu() for rank, message in self._incoming.items()}
