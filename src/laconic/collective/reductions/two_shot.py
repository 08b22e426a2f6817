"""TwoShot: means over ranks by any codec, in two rounds of messages.

Every tensor is cut into as many shards as there are ranks, and each rank owns one of them. First, each rank sends the
other shards to their owners (scatter). An owner adds the frames to its own values in float32, encodes the mean once,
with its own error feedback, and sends it to all (gather). So a rank sends about twice the size of one encoded tensor,
for any number of ranks, and all ranks decode the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.codecs import parse
from laconic.codecs.memory import MomentumCorrection
from laconic.collective.process_groups import is_registered
from laconic.collective.reductions.device_codings import coding_of
from laconic.collective.reductions.device_events import LOOK_EVERY
from laconic.collective.reductions.device_rounds import DeviceRounds
from laconic.collective.reductions.ranges import PART, Range, cut_into_parts, join_residuals, split_residual
from laconic.collective.reductions.shards import GATHER, SCATTER, Part, Plan, Shard, ShardRounds
from laconic.collective.stats import ExchangeStats
from laconic.errors import InputError, NonFiniteError
from laconic.residual_storage import ResidualStorage

__all__ = ["TwoShot"]

PART_BY_DEVICE = {"cpu": PART, "cuda": 4 * PART}
"""The largest number of values of several tensors in one part: a GPU encodes many tensors in the time of a few."""


class TwoShot(ShardRounds):
    """Means over a group of ranks by any codec or channel. All ranks call ``reduce_all`` for the same slots in turn.

    Args:
        spec: ``qsgd:4``, ``ef|topk:0.01|qsgd:4``, ``momentum:0.9|topk:0.001``, … With memory (``ef``, ``momentum``) the
            owner of a shard keeps error feedback for the mean as well, with the same decay.
        group: The ranks; all of them by default.
        nonfinite: If a value of some rank is not finite: ``spread`` (the shard becomes NaN on all ranks), ``skip`` (the
            contribution is left out, and counted by its rank) or ``raise`` (on all ranks).
        average: ``all`` divides a sum by the number of ranks; ``senders`` divides each value by the number of ranks
            whose selector kept it.
        stats: Where to count; a new ``ExchangeStats`` by default.
        storage: In which dtype and where residuals are kept between rounds.
        on_device: Exchange sections between GPUs instead of frames between hosts. By default where it is possible: with
            NCCL or one rank, for CUDA tensors, not with ``skip``, and for codecs whose messages have a fixed size.
    """

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, nonfinite: str = "spread", average: str = "all",
        stats: ExchangeStats | None = None, storage: ResidualStorage | None = None, on_device: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, group, nonfinite=nonfinite, average=average, stats=stats, storage=storage)
        self._device_rounds: DeviceRounds | None = None
        self._needs_cuda = on_device is None
        if on_device is None:
            on_device = is_registered(group) and (self.transport.grouped or self.transport.size == 1)
        coding = coding_of(self._chain)
        if on_device and coding is not None and nonfinite != "skip" and not self._encodes_own:
            self._device_rounds = DeviceRounds(
                coding, self._channels[SCATTER], self._channels[GATHER], group, self.stats
            )

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Replace tensors by their means: the same bits on every rank."""
        for _ in self.reduce_in_steps(tensors):
            pass

    def reduce_in_steps(self, tensors: Sequence[tuple[str, Tensor]], turn: int = 0) -> Iterator[None]:
        """Do what ``reduce_all`` does, and yield before each wait for other ranks.

        Another reduction may begin there, on all ranks in the same order: what it sends fills the link meanwhile.

        Args:
            turn: A number that no other reduction under way has.
        """
        copies = []
        flats = []
        for number, (slot, x) in enumerate(tensors):
            direct = x.dtype == torch.float32 and x.is_contiguous()
            if direct:
                flat = x.view(-1)
            else:  # always in the same memory, which a CUDA graph needs
                flat = self._buffers.get(("float32", number), x.numel(), torch.float32, x.device)
                flat.view(x.shape).copy_(x.detach())
                copies.append((x, flat))
            flats.append((slot, flat))
            self._next_round(slot, x.numel())
        self.stats.rounds += 1
        rounds = self._rounds_on(flats[0][1].device)
        if rounds is not None:
            self._note_device_events(rounds.events.new(wait=False))
            rounds.reduce(flats, self._rounds)
        else:
            yield from self._reduce_by_frames(flats, turn)
        for x, flat in copies:
            x.copy_(flat.view(x.shape))
        if rounds is not None and self.nonfinite == "raise":
            self.settle()

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None] | None:
        """Return a function that does what ``reduce_all`` does, for tensors that stay in place, and only launches work.

        None if the host takes part, or if tensors must be converted.
        """
        device = tensors[0][1].device
        rounds = self._rounds_on(device) if self.nonfinite == "spread" else None
        if rounds is None or not all(x.dtype == torch.float32 and x.is_contiguous() for _, x in tensors):
            return None
        slots, numel = [slot for slot, _ in tensors], sum(x.numel() for _, x in tensors)
        launch, number = rounds.prepare([(slot, x.view(-1)) for slot, x in tensors]), 0

        def mean() -> None:
            nonlocal number
            counted, first, stats = self._rounds, self._first_round, self.stats
            numbers = [counted.get(slot, first) + 1 for slot in slots]
            counted.update(zip(slots, numbers, strict=True))
            stats.values += numel
            stats.rounds += 1
            look = number % LOOK_EVERY == 0
            number += 1
            if look:
                self._note_device_events(rounds.events.new(wait=False))
            launch(numbers)
            if look:
                rounds.events.copy_to_host()

        return mean

    def forget_places(self) -> None:
        """Drop what was prepared for tensors where they were."""
        if self._device_rounds is not None:
            self._device_rounds.forget_places()

    def stays_on(self, device: torch.device) -> bool:
        """Whether tensors on a device are exchanged without the host: ``reduce_all`` then only launches work."""
        return self.nonfinite == "spread" and self._rounds_on(device) is not None

    def _rounds_on(self, device: torch.device) -> DeviceRounds | None:
        if self._needs_cuda and device.type != "cuda":
            return None
        found = self._device_rounds
        return found if found and kernels.multi_tensor_backend_for(torch.empty(0, device=device)) is not None else None

    def settle(self) -> None:
        """Count what happened on a device so far, which waits for it."""
        if self._device_rounds is not None:
            self._note_device_events(self._device_rounds.events.new(wait=True))

    def _note_device_events(self, events: tuple[int, int]) -> None:
        nonfinite, resets = events
        if resets:
            self._channels[SCATTER].stats.residual_resets += resets
            self._warn_once("overflow", "a residual overflowed float32 and is reset")
        if nonfinite:
            self._note_nonfinite("a shard", nonfinite)
            if self.nonfinite == "raise":
                raise NonFiniteError("a value of some rank is not finite; all ranks skip this round of its shard")

    def _reduce_by_frames(self, flats: Sequence[tuple[str, Tensor]], turn: int) -> Iterator[None]:
        sizes = tuple((slot, flat.numel()) for slot, flat in flats)
        plans = self._plans_for(sizes, flats[0][1].device)
        parts = [self._begin_part(plan, flats, (turn, i)) for i, plan in enumerate(plans)]
        # Three parts overlap: while one is sent to the owners, the one before is summed and its means are sent, and
        # the one before that is decoded.
        for i in range(len(parts) + 2):
            if i < len(parts):
                self._send_shards(parts[i])
            if 1 <= i <= len(parts):
                yield
                unusable = self._add_shards(parts[i - 1])
                self._send_own(parts[i - 1], self.transport.size, unusable)
            if i >= 2:
                yield
                self._receive_all(parts[i - 2])
        self._finish(parts)

    def _cut(self, sizes: Sequence[tuple[str, int]], device: torch.device) -> list[list[Range]]:
        return list(cut_into_parts(sizes, PART_BY_DEVICE.get(device.type, PART), self.transport.size))

    def _begin_part(self, plan: Plan, flats: Sequence[tuple[str, Tensor]], place: tuple[int, int]) -> Part:
        """Return this round's shards of a plan, with all receives posted."""
        shards: dict[int, list[Shard]] = {}
        for piece in plan.ranges:
            slot, flat = flats[piece.slot]
            shard = Shard(piece.name, flat[piece.begin : piece.end], self._rounds[slot])
            shards.setdefault(piece.owner, []).append(shard)
        return self._begin(plan, shards, place, pinned=flats[0][1].is_cuda)

    # --------------------------------------------------------------------------------------------------------- state

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
                if sent is not None and sent.shape != mean.shape:
                    raise InputError(f"{slot!r}: residuals of a sender and of a mean must have the same shape")
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
