"""Messages of shards on a GPU: where sections are, and the buffers that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from laconic.collective.reductions.device_codings import DeviceCoding
from laconic.collective.reductions.ranges import Range
from laconic.wire import align

__all__ = ["Message", "Plan"]


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


class Message:
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


class Plan:
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
        means_nbytes = self.mean_nbytes * len(self.peers)
        self.bytes_sent = sum(self.sent_nbytes) + means_nbytes
        self.bytes_received = sum(self.received_nbytes) + means_nbytes

        def buffer(nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        self.sent, self.received = buffer(sum(self.sent_nbytes)), buffer(sum(self.received_nbytes))
        self.mean = buffer(self.mean_nbytes)
        self.means = buffer(ranks * self.mean_nbytes) if self.peers else self.mean
        sent_at = {owner: sum(self.sent_nbytes[:owner]) for owner in self.peers}
        self.outgoing = Message(shards, layouts, sent_at, self.sent)
        self.incoming = [
            Message(shards, layouts, {rank: sum(self.received_nbytes[:peer])}, self.received) for peer in self.peers
        ]
        self.own = Message(shards, layouts, {rank: 0}, self.mean)
        self.all = Message(shards, layouts, {owner: owner * self.mean_nbytes for owner in range(ranks)}, self.means)
