"""TwoShot: means over ranks by any codec, in two rounds of messages.

Every tensor is cut into as many shards as there are ranks, and each rank owns one. First all send the others' shards to
their owners; an owner adds them up in float32, straight out of the frames, and its own values as they are. Then it
encodes the sum once, with a memory of its own, and sends that to all. So a rank sends about twice what one encoded
tensor takes, however many ranks there are, and all decode the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels, multi_tensor
from laconic.channels import Channel
from laconic.codecs import Chain, parse
from laconic.codecs.memory import MomentumCorrection
from laconic.collective import bundles
from laconic.collective.buffers import BufferCache
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import PREFIX, Swap, Transport
from laconic.counters import LogOnce
from laconic.errors import InputError, NonFiniteError
from laconic.frames import open_packet
from laconic.kernels.interface import NONFINITE
from laconic.kernels.random import splitmix64
from laconic.packet import Packet
from laconic.policy import Policy

__all__ = ["TwoShot"]


PART = 1 << 22
"""Values of a tensor that travel together at most: while some are on their way others are encoded."""

TOGETHER = {"cpu": PART, "cuda": 4 * PART}
"""Values of several tensors, by the device's type: a GPU encodes many in the time of a few."""

GRAIN = 256
"""Shards begin at multiples of this, which suits packed bits."""

KEPT_PLANS = 256
"""Sets of slots whose cut is remembered: a module's buckets, before and after DDP has put them in order."""

_EVERY = Policy(min_numel=0, exempt_1d=False)
"""Who comes here has been chosen already."""


@dataclass(frozen=True)
class _Range:
    """Of a slot, and whose it is."""

    slot: int
    begin: int
    end: int
    owner: int
    name: str


@dataclass(frozen=True, slots=True)
class _Shard:
    """A range's values in a round."""

    name: str
    values: Tensor
    seed: int
    """Of the slot and its round: the same on all ranks, whatever else travels with it."""

    def rounding_seed(self, sender: int) -> int:
        """A seed of its own for each sender."""
        return splitmix64(self.seed ^ splitmix64(sender ^ _hash(self.name)))


@lru_cache(maxsize=4096)
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class _Plan:
    """What travels together, and the most bytes of a message in each round: the same as long as slots are."""

    ranges: list[_Range]
    there: int
    back: int


@dataclass
class _Part:
    """A plan on its way through the two rounds."""

    shards: dict[int, list[_Shard]]
    """By owner."""
    key: int
    pinned: bool
    there: Swap
    back: Swap
    answer: Tensor = field(default_factory=lambda: torch.empty(0))

    def of(self, owner: int) -> list[_Shard]:
        return self.shards.get(owner, [])


class TwoShot:
    """Means over a group of ranks by any codec or channel. All ranks call ``reduce_all`` for the same slots in turn.

    Args:
        spec: ``qsgd:4``, ``ef|topk:0.01|qsgd:4``, ``momentum:0.9|topk:0.001``, … With memory (``ef``, ``momentum``) the
            owner of a shard keeps error feedback for the sum as well.
        group: The ranks; all of them by default.
        nonfinite: ``spread`` (a shard becomes NaN on all ranks), ``skip`` (the contribution is left out, and
            counted by the rank whose it is) or ``raise`` (on all ranks) when a value of some rank is not finite.
        ledger: Where to count; one of its own by default.
    """

    def __init__(
        self,
        spec: str,
        group: dist.ProcessGroup | None = None,
        *,
        nonfinite: str = "spread",
        ledger: ExchangeStats | None = None,
    ) -> None:
        memories, chain = parse(spec)
        self.spec, self._chain = spec, chain
        self.nonfinite = nonfinite
        self.stats = ExchangeStats() if ledger is None else ledger
        self._warn_once = LogOnce("stats")
        self.peers = Transport(group, self.stats)
        self.there = Channel(spec, policy=_EVERY)
        self.back = Channel(f"ef|{chain.text}" if memories else chain.text, policy=_EVERY)
        # Momentum is part of what a rank contributes, so its own shard must go through the channel, too. Otherwise the
        # owner's values need no encoding: less work, and less error.
        self._own_encoded = any(isinstance(stage, MomentumCorrection) for stage in memories)
        self._rounds: dict[str, int] = {}
        self._unsaid: list[str] = []
        self._rooms = BufferCache()
        self._plans: dict[tuple[tuple[str, int], ...], list[_Plan]] = {}

    # ------------------------------------------------------------------------------------------------------- rounds

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Replace tensors by their means: the same bits on every rank."""
        copies = []
        flats = []
        for slot, x in tensors:
            direct = x.dtype == torch.float32 and x.is_contiguous()
            flat = x.view(-1) if direct else x.detach().to(torch.float32).reshape(-1).contiguous()
            flats.append((slot, flat))
            if not direct:
                copies.append((x, flat))
            self.stats.values += x.numel()
            self._rounds[slot] = self._rounds.get(slot, 0) + 1
        self.stats.rounds += 1
        parts = [self._begin(plan, flats, i) for i, plan in enumerate(self._plans_of(flats))]
        # While one part's shards are on their way to owners, the one before is added up and answered, and the one
        # before that is decoded.
        for i in range(len(parts) + 2):
            if i < len(parts):
                self._send(parts[i])
            if 1 <= i <= len(parts):
                self._answer(parts[i - 1])
            if i >= 2:
                self._receive(parts[i - 2])
        for part in parts:
            part.there.end()
            part.back.end()
        if self._unsaid:  # not before the round is through: others still wait for what this rank sends
            name, self._unsaid = self._unsaid[0], []
            raise NonFiniteError(f"{name}: a value of some rank is not finite; all ranks leave this round out")
        for x, flat in copies:
            x.copy_(flat.view(x.shape))

    def _plans_of(self, flats: Sequence[tuple[str, Tensor]]) -> list[_Plan]:
        most = TOGETHER.get(flats[0][1].device.type, PART)
        sizes = tuple((slot, flat.numel()) for slot, flat in flats)
        plans = self._plans.get(sizes)
        if plans is None:
            if len(self._plans) >= KEPT_PLANS:  # slots that are never the same again
                self._plans.clear()
            plans = self._plans[sizes] = [
                _Plan(ranges, self._longest(ranges, self.there), self._longest(ranges, self.back))
                for ranges in self._cut(sizes, most)
            ]
        return plans

    def _cut(self, sizes: Sequence[tuple[str, int]], most: int) -> Iterator[list[_Range]]:
        """Parts of bounded size. Where a tensor is cut follows from its own size alone, so its memory stays valid."""
        together: list[_Range] = []
        values = 0
        for number, (slot, numel) in enumerate(sizes):
            for begin in range(0, numel, PART):
                end = min(begin + PART, numel)
                if values and values + end - begin > most:
                    yield together
                    together, values = [], 0
                step = -(-(end - begin) // self.peers.size)
                step = -(-step // GRAIN) * GRAIN
                for owner, at in enumerate(range(begin, end, step)):
                    last = min(at + step, end)
                    together.append(_Range(number, at, last, owner, f"{slot}[{at}:{last}]"))
                values += end - begin
        if together:
            yield together

    def _longest(self, ranges: Sequence[_Range], channel: Channel) -> int:
        """The most bytes of a message to any owner, or from it."""
        longest = 0
        for owner in range(self.peers.size):
            its = [each for each in ranges if each.owner == owner]
            frames = [channel.max_nbytes(each.name, torch.empty(each.end - each.begin, device="meta")) for each in its]
            longest = max(longest, bundles.longest([each.name for each in its], frames))
        return longest

    def _begin(self, plan: _Plan, flats: Sequence[tuple[str, Tensor]], key: int) -> _Part:
        """Shards of this round, and room for what will come."""
        shards: dict[int, list[_Shard]] = {}
        for each in plan.ranges:
            slot, flat = flats[each.slot]
            shard = _Shard(each.name, flat[each.begin : each.end], self._rounds[slot])
            shards.setdefault(each.owner, []).append(shard)
        about, pinned = plan.ranges[0].name, flats[0][1].is_cuda
        there = self.peers.swap(("there", about), plan.there, pinned=pinned)
        return _Part(shards, key, pinned, there, self.peers.swap(("back", about), plan.back, pinned=pinned))

    def _send(self, part: _Part) -> None:
        """Each of the others its shards."""
        with self.stats.during("encode_s"):
            outgoing = {rank: self._message(part, rank, self.there, self.peers.rank) for rank in self.peers.others}
        part.there.send(outgoing)

    def _answer(self, part: _Part) -> None:
        """Add up what came for the own shards, and send the sum to all."""
        incoming = part.there.take()
        with self.stats.during("decode_s"):
            lost = self._sum(part, incoming)
        with self.stats.during("encode_s"):
            part.answer = self._message(part, self.peers.rank, self.back, self.peers.size, lost)
        part.back.send(dict.fromkeys(self.peers.others, part.answer))

    def _receive(self, part: _Part) -> None:
        """Everybody's sums; the own one, too, as the others read it."""
        answers = part.back.take() | {self.peers.rank: part.answer[PREFIX:]}
        with self.stats.during("decode_s"):
            for rank, answer in answers.items():
                for shard in self._take(answer, part.of(rank), rank, None):
                    self._lost(shard)

    # --------------------------------------------------------------------------------------------------------- parts

    def _message(
        self, part: _Part, owner: int, channel: Channel, sender: int, lost: frozenset[str] = frozenset()
    ) -> Tensor:
        shards = part.of(owner)

        def encode(room: Tensor) -> list[tuple[int, int] | None]:
            sent = [shard for shard in shards if shard.name not in lost]
            names, values = [shard.name for shard in sent], [shard.values for shard in sent]
            found = channel.encode_all_into(names, values, room, seeds=[shard.rounding_seed(sender) for shard in sent])
            spans = dict(zip(names, found, strict=True))
            for name in [name for name in names if spans[name] is None]:
                if self.nonfinite == "skip" and channel is self.there:
                    self._say_skipped(name)
            return [spans.get(shard.name) for shard in shards]

        swap = part.there if channel is self.there else part.back
        room = self._rooms.of((channel is self.there, part.key, owner), PREFIX + swap.limit, pinned=part.pinned)
        message = bundles.write([shard.name for shard in shards], encode, room[PREFIX:])
        return room[: PREFIX + message.numel()]

    def _sum(self, part: _Part, incoming: Mapping[int, Tensor]) -> frozenset[str]:
        """The mean of all contributions in the place of the own shards; returns those that nothing can be said of."""
        mine, lost = part.of(self.peers.rank), set()
        weight = 1.0 / self.peers.size
        exact = []
        # Where nobody's contribution is left out, the sum tells by itself, when it is encoded.
        check = self.nonfinite == "skip" or self._own_encoded
        for shard, finite in zip(mine, _all_finite(mine) if check else [True] * len(mine), strict=True):
            if not finite:
                lost.add(shard.name)
                if self.nonfinite == "skip":
                    self._say_skipped(shard.name)
                shard.values.zero_()
            elif self._own_encoded:
                own = self.there.encode(shard.name, shard.values, seed=shard.rounding_seed(self.peers.rank))
                self._add(own, shard.values.zero_(), weight)
            else:
                exact.append(shard.values)
        if exact and weight != 1.0:
            torch._foreach_mul_(exact, weight)
        for rank, message in sorted(incoming.items()):
            lost |= {shard.name for shard in self._take(message, mine, rank, weight)}
        return frozenset() if self.nonfinite == "skip" else frozenset(lost)

    def _take(self, message: Tensor, shards: Sequence[_Shard], sender: int, weight: float | None) -> list[_Shard]:
        """Decode a message into shards, or add it to them; returns those that it says nothing of."""
        if self._take_together(message, shards, sender, weight):
            return []
        frames = bundles.read(message, [shard.name for shard in shards], sender)
        said, void = [], []
        for shard, frame in zip(shards, frames, strict=True):
            if bundles.is_void(frame):
                void.append(shard)
            else:
                said.append((shard.values, *self._open(frame, shard.values)))
        for to, packet, chain in said:
            if weight is None:
                chain.decode(packet.to(to.device), out=to)
            else:
                chain.accumulate(packet.to(to.device), to, weight)
        return void

    def _take_together(self, message: Tensor, shards: Sequence[_Shard], sender: int, weight: float | None) -> bool:
        """The same at once, where the message is as it mostly is; otherwise nothing has happened."""
        values = [shard.values for shard in shards]
        if not values or not multi_tensor.fits(self._chain, values):
            return False
        layout = multi_tensor.layout_of(self._chain.text, tuple(tuple(x.shape) for x in values))
        begin = bundles.body_of(message, tuple(shard.name for shard in shards), tuple(layout.sizes))
        if begin is None or not (sender == self.peers.rank or layout.found_at(message.data_ptr() + begin)):
            return False
        multi_tensor.read_frames(message, begin, layout, values, weight)
        return True

    def _open(self, frame: bytes | Tensor, to: Tensor) -> tuple[Packet, Chain]:
        packet, chain = open_packet(frame, max_numel=to.numel())
        if packet.spec.shape != tuple(to.shape):
            raise InputError(f"a frame of {list(packet.spec.shape)} values came for a shard of {list(to.shape)}")
        return packet, chain

    def _add(self, frame: bytes, to: Tensor, weight: float) -> None:
        packet, chain = self._open(frame, to)
        chain.accumulate(packet.to(to.device), to, weight)

    def _lost(self, shard: _Shard) -> None:
        """Nothing can be said of a shard: some rank's values, or the sum's, are not finite. All ranks come here."""
        self._say_skipped(shard.name)
        if self.nonfinite == "raise":
            self._unsaid.append(shard.name)
        shard.values.fill_(0.0 if self.nonfinite == "skip" else float("nan"))

    def _say_skipped(self, name: str) -> None:
        self.stats.skipped_nonfinite += 1
        self._warn_once("nonfinite", f"{name}: a value of some rank is not finite (nonfinite={self.nonfinite!r})")

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """What was not sent yet, by range of slot, as a sender and as an owner."""
        state = {f"there/{key}": value for key, value in self.there.state_dict().items()}
        state |= {f"back/{key}": value for key, value in self.back.state_dict().items()}
        return state | {f"{slot}/round": torch.tensor(count) for slot, count in self._rounds.items()}

    def take_over(self, before: TwoShot) -> bool:
        """Go on with another's residuals, which have one form whatever the codec; False when they must be dropped."""
        state = before.state_dict()
        velocities = any(key.endswith("/velocity") for key in state)
        residuals = any(key.endswith("/residual") for key in state)
        remembers = bool(parse(self.spec)[0])
        if velocities or (residuals and not remembers):
            return False
        self.load_state_dict(state)
        return True

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        there = {key.removeprefix("there/"): value for key, value in state.items() if key.startswith("there/")}
        back = {key.removeprefix("back/"): value for key, value in state.items() if key.startswith("back/")}
        self.there.load_state_dict(there)
        self.back.load_state_dict(back)
        rounds = {key.removesuffix("/round"): int(count) for key, count in state.items() if key.endswith("/round")}
        self._rounds = rounds


def _all_finite(shards: Sequence[_Shard]) -> list[bool]:
    values = [shard.values for shard in shards]
    if len(values) > 1 and kernels.multi_tensor_backend_for(values[0]) is not None:
        return [amax_bits < NONFINITE for amax_bits in multi_tensor.amax_bits_all(values)]
    return [kernels.backend_for(x).all_finite(x) for x in values]
