"""ShardRounds: the two rounds of messages in which ranks reduce and gather tensors that are cut into shards.

Each shard has an owner. In the scatter round every rank sends the other shards to their owners, and an owner adds the
frames to its own values in float32. In the gather round an owner encodes its shards once and sends them to all, and all
ranks decode the same bytes. The scatter round alone is a reduce-scatter, the gather round alone an all-gather, and both
are an all-reduce (``TwoShot``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from laconic.collective.reductions.ranges import Range
from laconic.collective.saved_state import ROUND, saved_rounds
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import PREFIX, AllToAll, Transport
from laconic.counters import LogOnce
from laconic.errors import InputError, NonFiniteError
from laconic.kernels.interface import NONFINITE
from laconic.kernels.random import hash_of, splitmix64
from laconic.policy import Policy
from laconic.residual_storage import ResidualStorage
from laconic.residuals import KeepsResiduals

__all__ = ["GATHER", "SCATTER", "Part", "Plan", "Shard", "ShardRounds"]

MAX_PLANS = 256
"""Sets of slots whose plan is kept: a module's DDP buckets, before and after DDP has reordered them."""

SCATTER, GATHER = "there", "back"
"""The two rounds. These are also the prefixes of residuals in saved states."""

_COMPRESS_ALL = Policy(min_numel=0, exempt_1d=False)
"""The exchange's policy has already chosen the codec of each slot."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The values of a range in one round."""

    name: str
    values: Tensor
    round: int
    """Number of the slot's exchange: the same on all ranks, whatever else is in the part."""

    def rounding_seed(self, sender: int) -> int:
        """Return a seed that differs between senders, shards and rounds."""
        return splitmix64(self.round ^ splitmix64(sender ^ hash_of(self.name)))


@lru_cache(maxsize=1024)
def _template(codec: str, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> BundleTemplate:
    return BundleTemplate(names, multi_tensor.layout_of(codec, shapes).templates)


@dataclass(frozen=True)
class Plan:
    """The ranges of one part, and the largest length of a message in each of its rounds."""

    ranges: list[Range]
    limits: Mapping[str, int]


@dataclass
class Part:
    """One part on its way through its rounds."""

    shards: dict[int, list[Shard]]
    """This rank's shards by owner."""
    place: tuple[int, int]
    """Numbers of the reduction among those under way, and of the part in it: each such part has its own buffers."""
    pinned: bool
    rounds: dict[str, AllToAll]
    encoded: Tensor = field(default_factory=lambda: torch.empty(0))
    """The message with this rank's shards in the gather round."""

    def of(self, owner: int) -> list[Shard]:
        return self.shards.get(owner, [])


class ShardRounds:
    """Scatter and gather rounds by one codec or channel, with residuals by range of slot.

    Args:
        spec: ``qsgd:4``, ``ef|topk:0.01|qsgd:4``, ``momentum:0.9|topk:0.001``, … With memory (``ef``, ``momentum``) the
            owner of a shard keeps error feedback for the gather round as well, with the same decay.
        group: The ranks; all of them by default.
        nonfinite: If a value of some rank is not finite: ``spread`` (the shard becomes NaN), ``skip`` (the contribution
            is left out, and counted by its rank) or ``raise``.
        average: ``all`` divides a sum by the number of ranks; ``senders`` divides each value by the number of ranks
            whose selector kept it. A rank's own shard is then encoded, too, which shows what it would have sent.
        stats: Where to count; a new ``ExchangeStats`` by default.
        storage: In which dtype and where residuals are kept between rounds.
    """

    directions: tuple[str, ...] = (SCATTER, GATHER)
    """The rounds that a subclass uses."""

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, nonfinite: str = "spread", average: str = "all",
        stats: ExchangeStats | None = None, storage: ResidualStorage | None = None,
    ) -> None:  # fmt: skip
        memories, chain = parse(spec)
        kept = ResidualStorage() if storage is None else storage
        self.spec, self._chain = spec, chain
        self.nonfinite = nonfinite
        self.stats = ExchangeStats() if stats is None else stats
        self._warn_once = LogOnce("stats")
        self.transport = Transport(group, self.stats)
        feedback = [ErrorFeedback(residual_decay(memories))] if memories else []
        specs = {SCATTER: spec, GATHER: grammar.format_stages([*feedback, *chain.stages])}
        self._channels = {
            direction: Channel(text, policy=_COMPRESS_ALL, residual_dtype=kept.dtype, residual_device=kept.device)
            for direction, text in specs.items()
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
        self._plans: dict[tuple[tuple[str, int], ...], list[Plan]] = {}

    # -------------------------------------------------------------------------------------------------------- plans

    def _cut(self, sizes: Sequence[tuple[str, int]], device: torch.device) -> Sequence[list[Range]]:
        """Return the ranges of each part."""
        raise NotImplementedError

    def _plans_for(self, sizes: tuple[tuple[str, int], ...], device: torch.device) -> list[Plan]:
        plans = self._plans.get(sizes)
        if plans is None:
            if len(self._plans) >= MAX_PLANS:  # the sets of slots do not recur
                self._plans.clear()
            plans = self._plans[sizes] = [
                Plan(ranges, {direction: self._message_limit(ranges, direction) for direction in self.directions})
                for ranges in self._cut(sizes, device)
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

    def _begin(self, plan: Plan, shards: dict[int, list[Shard]], place: tuple[int, int], *, pinned: bool) -> Part:
        """Return a part with all receives of its rounds posted."""
        key = plan.ranges[0].name
        rounds = {
            direction: self.transport.all_to_all(
                (direction, key), limit, pinned=pinned, fixed=self._chain.has_fixed_size
            )
            for direction, limit in plan.limits.items()
        }
        return Part(shards, place, pinned, rounds)

    def _next_round(self, slot: str, numel: int) -> None:
        self.stats.values += numel
        self._rounds[slot] = self._rounds.get(slot, self._first_round) + 1

    def _finish(self, parts: Sequence[Part]) -> None:
        """Wait until all messages have left; raise what was found not to be finite."""
        for part in parts:
            for round_ in part.rounds.values():
                round_.finish()
        if self._nonfinite_shards:  # raised after the round: other ranks still wait for this rank's messages
            name, self._nonfinite_shards = self._nonfinite_shards[0], []
            raise NonFiniteError(f"{name}: a value of some rank is not finite; all ranks skip this round")

    # ------------------------------------------------------------------------------------------------------- rounds

    def _send_shards(self, part: Part) -> None:
        with self.stats.during("encode_s"):
            outgoing = {rank: self._message(part, rank, SCATTER, self.transport.rank) for rank in self.transport.peers}
        part.rounds[SCATTER].send(outgoing)

    def _add_shards(self, part: Part, *, mean: bool = True) -> frozenset[str]:
        """Replace this rank's shards by the mean, or sum, of all contributions; return the names of unusable shards."""
        incoming = part.rounds[SCATTER].receive()
        with self.stats.during("decode_s"):
            return self._add(part, incoming, mean)

    def _send_own(self, part: Part, sender: int, unusable: frozenset[str] = frozenset()) -> None:
        """Send this rank's shards to all ranks."""
        with self.stats.during("encode_s"):
            part.encoded = self._message(part, self.transport.rank, GATHER, sender, unusable)
        part.rounds[GATHER].send(dict.fromkeys(self.transport.peers, part.encoded))

    def _receive_all(self, part: Part) -> None:
        """Decode the shards of all owners, this rank's own from the same bytes as the others."""
        received = part.rounds[GATHER].receive() | {self.transport.rank: part.encoded[PREFIX:]}
        with self.stats.during("decode_s"):
            for rank, message in received.items():
                for shard in self._read(message, part.of(rank), rank):
                    self._fill_nonfinite(shard)

    # ----------------------------------------------------------------------------------------------------- messages

    def _message(
        self, part: Part, owner: int, direction: str, sender: int, unusable: frozenset[str] = frozenset()
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

        limit = part.rounds[direction].limit
        buffer = self._buffers.get((direction, part.place, owner), PREFIX + limit, pinned=part.pinned)
        message = messages.write([shard.name for shard in shards], encode, buffer[PREFIX:])
        return buffer[: PREFIX + message.numel()]

    def _add(self, part: Part, incoming: Mapping[int, Tensor], divide: bool) -> frozenset[str]:
        own, unusable = part.of(self.transport.rank), set()
        accumulator = SenderMeanAccumulator if self._by_senders else MeanAccumulator
        mean = accumulator([shard.values for shard in own], self.transport.size if divide else 1)
        exact = []
        # If contributions are not left out, encoding the mean for the gather round detects values that are not finite.
        check = self.nonfinite == "skip" or self._encodes_own or GATHER not in self.directions
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
        self, message: Tensor, shards: Sequence[Shard], sender: int, mean: MeanAccumulator | None = None
    ) -> list[Shard]:
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

    def _open(self, message: Tensor, shards: Sequence[Shard], sender: int) -> list[OpenedFrame | None]:
        """Return the frames of a message; None for a shard that is not finite."""
        frames = messages.read(message, [shard.name for shard in shards], sender)
        return [
            None if messages.is_void(frame) else OpenedFrame.of(frame, shard.values, shard.name)
            for shard, frame in zip(shards, frames, strict=True)
        ]

    def _read_joined(self, message: Tensor, shards: Sequence[Shard], sender: int, weight: float | None) -> bool:
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

    def _fill_nonfinite(self, shard: Shard) -> None:
        """Replace a shard for which some rank's values, or the mean, are not finite. All ranks do so."""
        self._note_nonfinite(shard.name)
        if self.nonfinite == "raise":
            self._nonfinite_shards.append(shard.name)
        shard.values.fill_(0.0 if self.nonfinite == "skip" else float("nan"))

    def _note_nonfinite(self, name: str, count: int = 1) -> None:
        self.stats.skipped_nonfinite += count
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

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one; an invalid state changes nothing."""
        self.checked_state(state)()

    def checked_state(self, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """Check a saved state; return the function that replaces the memory by it."""
        rounds = saved_rounds(state)
        memory: dict[str, dict[str, Tensor]] = {direction: {} for direction in self._channels}
        for key, x in state.items():
            direction, _, rest = key.partition("/")
            if key.endswith(ROUND):
                continue
            if direction not in memory:
                names = " or ".join(f"'{name}/slot/residual'" for name in memory)
                raise InputError(f"expected tensors named {names} or 'slot/round', got {key!r}")
            memory[direction][rest] = x
        replacements = [channel.checked_state(memory[direction]) for direction, channel in self._channels.items()]

        def replace_all() -> None:
            for replace in replacements:
                replace()
            self._rounds = rounds

        return replace_all

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

    @property
    def residual_resets(self) -> int:
        return sum(channel.stats.residual_resets for channel in self._channels.values())


def _all_finite(shards: Sequence[Shard]) -> list[bool]:
    values = [shard.values for shard in shards]
    if len(values) > 1 and kernels.multi_tensor_backend_for(values[0]) is not None:
        return [amax_bits < NONFINITE for amax_bits in multi_tensor.amax_bits(values)]
    return [kernels.backend_for(x).all_finite(x) for x in values]
