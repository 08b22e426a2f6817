"""TwoShot: means over ranks by any codec, in two rounds of messages.

Every tensor is cut into as many shards as there are ranks, and each rank owns one of them. First, each rank sends the
other shards to their owners (scatter). An owner adds the frames to its own values in float32, encodes the mean once,
with its own error feedback, and sends it to all (gather). So a rank sends about twice the size of one encoded tensor,
for any number of ranks, and all ranks decode the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels, multi_tensor
from laconic.aggregate import BundleTemplate, MeanAccumulator, OpenedFrame, SenderMeanAccumulator
from laconic.channels import Channel
from laconic.codecs import parse
from laconic.codecs import spec as grammar
from laconic.codecs.memory import ErrorFeedback, MomentumCorrection, residual_decay
from laconic.collective.buffers import BufferCache
from laconic.collective.reductions import messages
from laconic.collective.reductions.ranges import PART, Range, cut_into_parts, join_residuals, split_residual
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import PREFIX, AllToAll, Transport
from laconic.counters import LogOnce
from laconic.errors import NonFiniteError
from laconic.kernels.interface import NONFINITE
from laconic.kernels.random import splitmix64
from laconic.policy import Policy
from laconic.residuals import KeepsResiduals

__all__ = ["TwoShot"]

PART_BY_DEVICE = {"cpu": PART, "cuda": 4 * PART}
"""The largest number of values of several tensors in one part: a GPU encodes many tensors in the time of a few."""

MAX_PLANS = 256
"""Sets of slots whose plan is kept: a module's DDP buckets, before and after DDP has reordered them."""

SCATTER, GATHER = "there", "back"
"""The two rounds. These are also the prefixes of residuals in saved states."""

_COMPRESS_ALL = Policy(min_numel=0, exempt_1d=False)
"""The exchange's policy has already chosen the codec of each slot."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """The values of a range in one round."""

    name: str
    values: Tensor
    round: int
    """Of the slot: the same on all ranks, whatever else is in the part."""

    def rounding_seed(self, sender: int) -> int:
        """A seed that differs between senders, shards and rounds."""
        return splitmix64(self.round ^ splitmix64(sender ^ _hash(self.name)))


@lru_cache(maxsize=4096)
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1024)
def _template(codec: str, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> BundleTemplate:
    return BundleTemplate(names, multi_tensor.layout_of(codec, shapes).templates)


@dataclass(frozen=True)
class _Plan:
    """The ranges of one part, and the largest length of a message in each round."""

    ranges: list[Range]
    scatter_limit: int
    gather_limit: int


@dataclass
class _Part:
    """One part on its way through the two rounds."""

    shards: dict[int, list[_Shard]]
    """By owner."""
    index: int
    pinned: bool
    scatter: AllToAll
    gather: AllToAll
    means: Tensor = field(default_factory=lambda: torch.empty(0))
    """The message with the means of this rank's shards."""

    def of(self, owner: int) -> list[_Shard]:
        return self.shards.get(owner, [])


class TwoShot:
    """Means over a group of ranks by any codec or channel. All ranks call ``reduce_all`` for the same slots in turn.

    Args:
        spec: ``qsgd:4``, ``ef|topk:0.01|qsgd:4``, ``momentum:0.9|topk:0.001``, … With memory (``ef``, ``momentum``) the
            owner of a shard keeps error feedback for the mean as well, with the same decay.
        group: The ranks; all of them by default.
        nonfinite: If a value of some rank is not finite: ``spread`` (the shard becomes NaN on all ranks), ``skip`` (the
            contribution is left out, and counted by its rank) or ``raise`` (on all ranks).
        average: ``all`` divides a sum by the number of ranks; ``senders`` divides each value by the number of ranks
            whose selector kept it. A rank's own shard is then encoded, too: only that tells what it would have sent.
        stats: Where to count; a new ``ExchangeStats`` by default.
    """

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, nonfinite: str = "spread", average: str = "all",
        stats: ExchangeStats | None = None,
    ) -> None:  # fmt: skip
        memories, chain = parse(spec)
        self.spec, self._chain = spec, chain
        self.nonfinite = nonfinite
        self.stats = ExchangeStats() if stats is None else stats
        self._warn_once = LogOnce("stats")
        self.transport = Transport(group, self.stats)
        feedback = [ErrorFeedback(residual_decay(memories))] if memories else []
        self._channels = {
            SCATTER: Channel(spec, policy=_COMPRESS_ALL),
            GATHER: Channel(grammar.format_stages([*feedback, *chain.stages]), policy=_COMPRESS_ALL),
        }
        # With momentum a rank's own shard must go through the channel, too, because momentum is part of what a rank
        # contributes. Otherwise the owner's values are not encoded: less work, and less error.
        momentum = any(isinstance(stage, MomentumCorrection) for stage in memories)
        self._by_senders = average == "senders" and chain.selector is not None
        self._encodes_own = momentum or self._by_senders
        self._rounds: dict[str, int] = {}
        self._first_round = 0
        self._nonfinite_shards: list[str] = []
        self._buffers = BufferCache()
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
            self._rounds[slot] = self._rounds.get(slot, self._first_round) + 1
        self.stats.rounds += 1
        parts = [self._begin(plan, flats, i) for i, plan in enumerate(self._plans_for(flats))]
        # Three parts overlap: while one is sent to the owners, the one before is summed and its means are sent, and
        # the one before that is decoded.
        for i in range(len(parts) + 2):
            if i < len(parts):
                self._send_shards(parts[i])
            if 1 <= i <= len(parts):
                self._send_means(parts[i - 1])
            if i >= 2:
                self._receive_means(parts[i - 2])
        for part in parts:
            part.scatter.finish()
            part.gather.finish()
        if self._nonfinite_shards:  # raised after the round: other ranks still wait for this rank's messages
            name, self._nonfinite_shards = self._nonfinite_shards[0], []
            raise NonFiniteError(f"{name}: a value of some rank is not finite; all ranks skip this round")
        for x, flat in copies:
            x.copy_(flat.view(x.shape))

    def _send_shards(self, part: _Part) -> None:
        with self.stats.during("encode_s"):
            outgoing = {rank: self._message(part, rank, SCATTER, self.transport.rank) for rank in self.transport.peers}
        part.scatter.send(outgoing)

    def _send_means(self, part: _Part) -> None:
        """Add up the contributions to this rank's shards and send the means to all."""
        incoming = part.scatter.receive()
        with self.stats.during("decode_s"):
            unusable = self._sum(part, incoming)
        with self.stats.during("encode_s"):
            part.means = self._message(part, self.transport.rank, GATHER, self.transport.size, unusable)
        part.gather.send(dict.fromkeys(self.transport.peers, part.means))

    def _receive_means(self, part: _Part) -> None:
        """Decode the means of all owners, this rank's own from the same bytes as the others."""
        means = part.gather.receive() | {self.transport.rank: part.means[PREFIX:]}
        with self.stats.during("decode_s"):
            for rank, message in means.items():
                for shard in self._read(message, part.of(rank), rank):
                    self._fill_nonfinite(shard)

    # -------------------------------------------------------------------------------------------------------- plans

    def _plans_for(self, flats: Sequence[tuple[str, Tensor]]) -> list[_Plan]:
        limit = PART_BY_DEVICE.get(flats[0][1].device.type, PART)
        sizes = tuple((slot, flat.numel()) for slot, flat in flats)
        plans = self._plans.get(sizes)
        if plans is None:
            if len(self._plans) >= MAX_PLANS:  # the sets of slots do not recur
                self._plans.clear()
            plans = self._plans[sizes] = [
                _Plan(ranges, self._message_limit(ranges, SCATTER), self._message_limit(ranges, GATHER))
                for ranges in cut_into_parts(sizes, limit, self.transport.size)
            ]
        return plans

    def _message_limit(self, ranges: Sequence[Range], direction: str) -> int:
        """Return the largest length of a message to or from any owner."""
        longest, channel = 0, self._channels[direction]
        for owner in range(self.transport.size):
            owned = [shard for shard in ranges if shard.owner == owner]
            frames = [channel.max_nbytes(r.name, torch.empty(r.end - r.begin, device="meta")) for r in owned]
            longest = max(longest, messages.max_nbytes([r.name for r in owned], frames))
        return longest

    def _begin(self, plan: _Plan, flats: Sequence[tuple[str, Tensor]], index: int) -> _Part:
        """Return this round's shards of a plan, with all receives posted."""
        shards: dict[int, list[_Shard]] = {}
        for piece in plan.ranges:
            slot, flat = flats[piece.slot]
            shard = _Shard(piece.name, flat[piece.begin : piece.end], self._rounds[slot])
            shards.setdefault(piece.owner, []).append(shard)
        key, pinned = plan.ranges[0].name, flats[0][1].is_cuda
        scatter = self.transport.all_to_all((SCATTER, key), plan.scatter_limit, pinned=pinned)
        gather = self.transport.all_to_all((GATHER, key), plan.gather_limit, pinned=pinned)
        return _Part(shards, index, pinned, scatter, gather)

    # ----------------------------------------------------------------------------------------------------- messages

    def _message(
        self, part: _Part, owner: int, direction: str, sender: int, unusable: frozenset[str] = frozenset()
    ) -> Tensor:
        shards, channel = part.of(owner), self._channels[direction]

        def encode(buffer: Tensor) -> list[tuple[int, int] | None]:
            sent = [shard for shard in shards if shard.name not in unusable]
            names, values = [shard.name for shard in sent], [shard.values for shard in sent]
            seeds = [shard.rounding_seed(sender) for shard in sent]
            spans = dict(zip(names, channel.encode_all_into(names, values, buffer, seeds=seeds), strict=True))
            if self.nonfinite == "skip" and direction == SCATTER:
                for name in names:
                    if spans[name] is None:
                        self._note_nonfinite(name)
            return [spans.get(shard.name) for shard in shards]

        limit = (part.scatter if direction == SCATTER else part.gather).limit
        buffer = self._buffers.get((direction, part.index, owner), PREFIX + limit, pinned=part.pinned)
        message = messages.write([shard.name for shard in shards], encode, buffer[PREFIX:])
        return buffer[: PREFIX + message.numel()]

    def _sum(self, part: _Part, incoming: Mapping[int, Tensor]) -> frozenset[str]:
        """Replace this rank's shards by the mean of all contributions; return the names of unusable shards."""
        own, unusable = part.of(self.transport.rank), set()
        accumulator = SenderMeanAccumulator if self._by_senders else MeanAccumulator
        mean = accumulator([shard.values for shard in own], self.transport.size)
        exact = []
        # Unless contributions are left out, encoding the mean detects values that are not finite.
        check = self.nonfinite == "skip" or self._encodes_own
        for i, (shard, finite) in enumerate(zip(own, _all_finite(own) if check else [True] * len(own), strict=True)):
            if not finite:
                unusable.add(shard.name)
                if self.nonfinite == "skip":
                    self._note_nonfinite(shard.name)
                shard.values.zero_()
            elif self._encodes_own:
                seed = shard.rounding_seed(self.transport.rank)
                frame = self._channels[SCATTER].encode(shard.name, shard.values, seed=seed)
                opened = OpenedFrame.of(frame, shard.values)
                shard.values.zero_()
                mean.add_frame(i, opened)
            else:
                exact.append(shard.values)
        mean.add_values(exact)
        for rank, message in sorted(incoming.items()):
            unusable |= {shard.name for shard in self._read(message, own, rank, mean)}
        mean.finish()
        return frozenset() if self.nonfinite == "skip" else frozenset(unusable)

    def _read(
        self, message: Tensor, shards: Sequence[_Shard], sender: int, mean: MeanAccumulator | None = None
    ) -> list[_Shard]:
        """Add a rank's message to the means, or decode it; return the shards that it marks as not finite."""
        if self._read_joined(message, shards, sender, None if mean is None else mean.weight):
            return []
        frames = self._open(message, shards, sender)
        if mean is not None:
            mean.add(frames)
        else:
            for shard, frame in zip(shards, frames, strict=True):
                if frame is not None:
                    frame.decode_into(shard.values)
        return [shard for shard, frame in zip(shards, frames, strict=True) if frame is None]

    def _open(self, message: Tensor, shards: Sequence[_Shard], sender: int) -> list[OpenedFrame | None]:
        """Return the frames of a message; None for a shard that is not finite."""
        frames = messages.read(message, [shard.name for shard in shards], sender)
        return [
            None if messages.is_void(frame) else OpenedFrame.of(frame, shard.values, shard.name)
            for shard, frame in zip(shards, frames, strict=True)
        ]

    def _read_joined(self, message: Tensor, shards: Sequence[_Shard], sender: int, weight: float | None) -> bool:
        """Decode or add all frames in one launch, if they have the usual layout; otherwise False, with no effect."""
        values = [shard.values for shard in shards]
        if not values or self._by_senders or not multi_tensor.supports(self._chain, values):
            return False
        shapes, codec = tuple(tuple(x.shape) for x in values), self._chain.text
        template = _template(codec, tuple(shard.name for shard in shards), shapes)
        if not template.matches(message, trusted=sender == self.transport.rank):
            return False
        multi_tensor.read_frames(message, template.offsets[0], multi_tensor.layout_of(codec, shapes), values, weight)
        return True

    def _fill_nonfinite(self, shard: _Shard) -> None:
        """Replace a shard for which some rank's values, or the mean, are not finite. All ranks do so."""
        self._note_nonfinite(shard.name)
        if self.nonfinite == "raise":
            self._nonfinite_shards.append(shard.name)
        shard.values.fill_(0.0 if self.nonfinite == "skip" else float("nan"))

    def _note_nonfinite(self, name: str) -> None:
        self.stats.skipped_nonfinite += 1
        self._warn_once("nonfinite", f"{name}: a value of some rank is not finite (nonfinite={self.nonfinite!r})")

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals by range of slot, as a sender and as an owner, and rounds by slot."""
        state = {
            f"{direction}/{key}": value
            for direction, channel in self._channels.items()
            for key, value in channel.state_dict().items()
        }
        return state | {f"{slot}/round": torch.tensor(count) for slot, count in self._rounds.items()}

    @property
    def residual_resets(self) -> int:
        return sum(channel.stats.residual_resets for channel in self._channels.values())

    def residual(self, slot: str, numel: int) -> Tensor | None:
        """Return what this rank has yet to send of a slot, flat; None if it keeps nothing. Its own shard is zero."""
        return join_residuals(self._channels[SCATTER], slot, numel, self.transport.size)

    def carry_residuals(self, before: TwoShot, slots: Mapping[str, int]) -> bool:
        """Continue with the residuals that this rank kept in another group; False if they must be dropped.

        A residual is cut anew for the number of ranks now. What the rank kept as an owner (of the mean) becomes part
        of what it has yet to send, times the number of ranks; of its own shard everything becomes the owner's.

        Args:
            slots: Number of values of each slot.
        """
        if any(isinstance(stage, MomentumCorrection) for stage in parse(self.spec)[0]):
            return not before._channels[SCATTER].state_dict()
        self.load_portable_state(before.portable_state(slots))
        return True

    @property
    def memories(self) -> dict[str, KeepsResiduals]:
        """What error feedback remembers, as a sender and as an owner of means."""
        return dict(self._channels)

    def set_aside(self) -> AbstractContextManager[None]:
        """Let the block contribute its tensors alone, without what this rank has yet to send, which stays."""
        return self._channels[SCATTER].set_aside()

    def begin_rounds(self, number: int) -> None:
        """Count the rounds of all slots from this number on, which is the same on all ranks."""
        self._first_round = number
        self._rounds.clear()

    def portable_state(self, slots: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the residuals of whole slots, which fit any number of ranks, by ``direction/slot/residual``.

        Args:
            slots: Number of values of each slot.
        """
        state = {}
        for direction, channel in self._channels.items():
            for slot, numel in slots.items():
                for part in ("residual", "velocity"):
                    whole = join_residuals(channel, slot, numel, self.transport.size, part)
                    if whole is not None:
                        state[f"{direction}/{slot}/{part}"] = whole
        return state

    def load_portable_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by one that ``portable_state`` returned; see ``carry_residuals``."""
        ranks, cut = self.transport.size, dict[str, dict[str, Tensor]]({SCATTER: {}, GATHER: {}})
        for slot in dict.fromkeys(key.partition("/")[2].rpartition("/")[0] for key in state):
            sent, mean = (state.get(f"{direction}/{slot}/residual") for direction in (SCATTER, GATHER))
            if mean is not None:
                sent = mean * ranks if sent is None else torch.add(sent, mean, alpha=ranks)
            for piece, residual in split_residual(sent, slot, ranks) if sent is not None else ():
                own = piece.owner == self.transport.rank and not self._encodes_own
                cut[GATHER if own else SCATTER][f"{piece.name}/residual"] = residual / ranks if own else residual
            velocity = state.get(f"{SCATTER}/{slot}/velocity")
            for piece, part in split_residual(velocity, slot, ranks) if velocity is not None else ():
                cut[SCATTER][f"{piece.name}/velocity"] = part
        for direction, channel in self._channels.items():
            channel.load_state_dict(cut[direction])

    def take_over(self, before: TwoShot) -> bool:
        """Continue with another's residuals, which do not depend on the codec; False if they must be dropped."""
        state = before.state_dict()
        has_velocity = any(key.endswith("/velocity") for key in state)
        has_residual = any(key.endswith("/residual") for key in state)
        if has_velocity or (has_residual and not parse(self.spec)[0]):
            return False
        self.load_state_dict(state)
        return True

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for direction, channel in self._channels.items():
            prefix = f"{direction}/"
            channel.load_state_dict({key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)})
        self._rounds = {key.removesuffix("/round"): int(x) for key, x in state.items() if key.endswith("/round")}


def _all_finite(shards: Sequence[_Shard]) -> list[bool]:
    values = [shard.values for shard in shards]
    if len(values) > 1 and kernels.multi_tensor_backend_for(values[0]) is not None:
        return [amax_bits < NONFINITE for amax_bits in multi_tensor.amax_bits(values)]
    return [kernels.backend_for(x).all_finite(x) for x in values]
