"""Reducer: means over a group of ranks by summable codecs and ordinary all-reduces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.aggregate.homomorphic import Contributor, Summing
from laconic.aggregate.homomorphic.summing import flat_values
from laconic.codecs.packed_ints import PackedIntStage
from laconic.collective.buffers import BufferCache
from laconic.collective.process_groups import backend_of, is_registered, rank_in, size_of
from laconic.collective.reductions.agreement import begin_agreement
from laconic.collective.reductions.device_events import LOOK_EVERY, DeviceEvents
from laconic.collective.reductions.device_sums import DeviceSums
from laconic.collective.reductions.pieces import PendingSum, Piece, SumArena, grouped
from laconic.collective.saved_state import ROUND, SCALES, saved_rounds, saved_scales
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.counters import LogOnce
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.residual_storage import ResidualStorage
from laconic.residuals import KeepsResiduals

__all__ = ["Reducer", "allreduce"]

PART = 1 << 23
"""The largest number of values in one sum: one part is encoded while another is on its way."""

IN_FLIGHT = 2
"""Sums on their way at once."""


class Reducer:
    """Means over a group of ranks by a summable codec, with error feedback per slot if the spec begins with ``ef``.

    Tensors of more than 2^23 values are cut into parts, with the slots ``name[0]``, ``name[1]``, …: one part is encoded
    while another is on its way. All ranks call ``reduce`` for the same slots in the same order, as with any collective.

    Args:
        spec: ``ef|thc:4``, ``shared:8,round=stochastic``, ``ef|powersgd:4``, … The bits are those of a packed integer,
            which holds the sum of all ranks: each rank has L = floor((2^bits - 1) / ranks) levels.
        group: The ranks; all of them by default.
        carry: Use the scales of the round before, widened by a quarter, and agree on the next ones while the sum is
            under way: one phase instead of two. For ``shared`` and ``thc``, with ``ef``.
        nonfinite: If a value of any rank is not finite: ``skip`` the round on all ranks (the result is zeros, residuals
            stay, the event is logged and counted), ``spread`` (the same, but the result is NaN, as in a plain
            all-reduce) or ``raise`` on all ranks.
        stats: Where to count; a new ``ExchangeStats`` by default.
        storage: In which dtype and where residuals are kept between rounds.
    """

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, carry: bool = False, nonfinite: str = "skip",
        stats: ExchangeStats | None = None, storage: ResidualStorage | None = None,
    ) -> None:  # fmt: skip
        if is_registered(group) and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("torch.distributed has no process group yet: call init_process_group first")
        if nonfinite not in ("raise", "skip", "spread"):
            raise ConfigError(f"nonfinite must be 'raise', 'skip' or 'spread', got {nonfinite!r}")
        self.group = group
        self.nonfinite = nonfinite
        self.carry = carry
        self.contributor = Contributor(
            spec, workers=size_of(group), worker=rank_in(group), ring=True, storage=storage
        )  # fmt: skip
        if carry and not (self.contributor.feedback and self._integers):
            raise ConfigError(f"{spec!r}: carry clips values, so it needs 'ef' before 'shared' or 'thc'")
        self.stats = ExchangeStats() if stats is None else stats
        self._warn_once = LogOnce("stats")
        self._arenas = tuple(SumArena() for _ in range(IN_FLIGHT + 1))
        self._rounds: dict[str, int] = {}
        self._first_round = 0
        self._carried: dict[str, Tensor] = {}
        self._events, self._buffers = DeviceEvents(), BufferCache()
        self._device_sums = DeviceSums(
            self.contributor, group, self.stats, self._events, float("nan") if nonfinite == "spread" else 0.0
        )

    @property
    def summing(self) -> Summing:
        return self.contributor.summing

    @property
    def _integers(self) -> bool:
        return isinstance(self.summing.chain.values, PackedIntStage)

    def reduce(self, slot: str, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the mean over all ranks, the same bits on each; in ``out``, which may be ``x``, if given."""
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if out.shape != x.shape:
            raise InputError(f"expected a tensor of shape {list(x.shape)} for the mean, got {list(out.shape)}")
        if slot in self._carried:
            self._reduce_with_carried_scales(slot, x, out)
        else:
            self._reduce_with_agreement([(slot, x, out)])
        return out

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Replace many tensors by their means: one agreement for all, and one sum for many small ones."""
        for slot, x in tensors:
            if slot in self._carried:
                self._reduce_with_carried_scales(slot, x, x)
        self._reduce_with_agreement([(slot, x, x) for slot, x in tensors if slot not in self._carried])

    def _next_seed(self, slot: str, x: Tensor) -> int:
        seed = self._rounds.get(slot, self._first_round)
        self._rounds[slot] = seed + 1
        self.stats.rounds += 1
        self.stats.values += x.numel()
        return seed

    # ------------------------------------------------------------------------------------------- agree, add, decode

    def _reduce_with_agreement(self, tensors: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        seeds = {slot: self._next_seed(slot, x) for slot, x, _ in tensors}
        tensors = self._reduce_on_device(tensors, seeds) if tensors else ()
        if not tensors:
            return
        pieces, copies = [], []
        with self.stats.during("encode_s"):
            for slot, x, out in tensors:
                direct = out.dtype == torch.float32 and out.is_contiguous()
                result = out if direct else torch.empty(x.shape, device=x.device)
                pieces += [
                    Piece(name, slot, part, part_out, self.contributor.probe(name, part, seed=seeds[slot]))
                    for name, part, part_out in self._parts(slot, x, result)
                ]
                if not direct:
                    copies.append((out, result))
        self._agree(pieces, seeds)
        usable = self._drop_unusable(pieces)
        if self.carry:
            self._carried |= {piece.slot: self.summing.carry(piece.agreed) for piece in usable}
        pending: list[PendingSum] = []
        for i, group in enumerate(grouped(usable)):
            pending.append(self._encode_and_add(group, seeds, self._arenas[i % len(self._arenas)]))
            if len(pending) > IN_FLIGHT:
                self._finish(pending.pop(0))
        for total in pending:
            self._finish(total)
        for out, result in copies:
            out.copy_(result)

    def pieces(self, slot: str, numel: int) -> list[tuple[str, int, int]]:
        """Return name, begin and end of the pieces in which a slot is summed, each with a residual of its own."""
        divisible = self._integers and self.summing.chain.selector is None and not self.carry
        if numel <= PART or not divisible:
            return [(slot, 0, numel)]
        return [(f"{slot}[{at // PART}]", at, min(at + PART, numel)) for at in range(0, numel, PART)]

    def _parts(self, slot: str, x: Tensor, out: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        pieces = self.pieces(slot, x.numel())
        if len(pieces) == 1:
            yield slot, x, out
            return
        flat, flat_out = flat_values(x), out.view(-1)
        for name, begin, end in pieces:
            yield name, flat[begin:end], flat_out[begin:end]

    def _agree(self, pieces: Sequence[Piece], seeds: Mapping[str, int]) -> None:
        """Replace each piece's probe by the agreed value, in one all-reduce for all pieces."""
        if not pieces:
            return
        probes = [piece.agreed.reshape(-1) for piece in pieces]
        texts = [f"{piece.name} {list(piece.x.shape)} {seeds[piece.slot]}" for piece in pieces]
        agreed = begin_agreement(self.summing, torch.cat(probes), " ".join(texts), self.group, self.stats)()
        for piece, part in zip(pieces, torch.split(agreed, [probe.numel() for probe in probes]), strict=True):
            piece.agreed = part.view(piece.agreed.shape)

    def _drop_unusable(self, pieces: Sequence[Piece]) -> list[Piece]:
        """End the round of slots that are not finite, on all ranks; return the pieces of the others."""
        unusable = {piece.slot for piece in pieces if not self.summing.usable(piece.agreed)}
        for piece in pieces:
            if piece.slot in unusable:
                self.contributor.skip(piece.name)
                self._fill_nonfinite(piece.out)
        for slot in unusable:
            self._note_nonfinite(f"slot {slot!r}")
        return [piece for piece in pieces if piece.slot not in unusable]

    def _encode_and_add(self, pieces: list[Piece], seeds: Mapping[str, int], arena: SumArena) -> PendingSum:
        with self.stats.during("encode_s"):
            arena.reset(pieces[0].x.device)
            for piece in pieces:
                seed = seeds[piece.slot]
                piece.packet = self.contributor.packet(piece.name, piece.agreed, seed=seed, arena=arena)
            if len(pieces) > 1:
                self._gather_last_sections(pieces, arena)
        return self._add(pieces, arena.with_count)

    def _gather_last_sections(self, pieces: list[Piece], arena: SumArena) -> None:
        """Move the last sections of all pieces one behind the other, so that one all-reduce adds them."""
        packets = [(piece, piece.packet) for piece in pieces if piece.packet is not None and piece.packet.sections]
        joined, at = arena.take(sum(packet.sections[-1].numel() for _, packet in packets)), 0
        for piece, packet in packets:
            *others, last = packet.sections
            moved = joined[at : at + last.numel()].copy_(last)
            piece.packet = replace(packet, sections=(*others, moved))
            at += last.numel()

    def _add(self, pieces: list[Piece], with_count: Tensor) -> PendingSum:
        if not any(piece.packet and piece.packet.sections for piece in pieces):
            return PendingSum(pieces, with_count, None)
        words = with_count.view(torch.int32 if self._integers else torch.float32)
        words[-1] = 1
        return PendingSum(pieces, words, all_reduce(words, self.group, self.stats))

    def _finish(self, total: PendingSum) -> None:
        if total.work is not None:
            with self.stats.during("wire_s"):
                total.work.wait()
        with self.stats.during("decode_s"):
            for piece in total.pieces:
                packet = piece.packet
                assert packet is not None
                if packet.sections:
                    packet = self.summing.with_count(packet, int(total.words[-1]))
                self.contributor.received(piece.name, packet)
                self.summing.chain.decode(packet, out=piece.out)

    # ------------------------------------------------------------------------------------------------- on the device

    def stays_on(self, device: torch.device) -> bool:
        """Whether tensors on a device are exchanged without the host: ``reduce_all`` then only launches work."""
        if device.type != "cuda" or backend_of(self.group) != "nccl" or self.nonfinite == "raise" or self.carry:
            return False
        return self._device_sums.serves(device)

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None] | None:
        """Return a function that does what ``reduce_all`` does, for tensors that stay in place, and only launches work.

        None if the host takes part, or if tensors must be converted.
        """
        sums = self._device_sums
        direct = all(
            x.dtype == torch.float32 and x.is_contiguous() and sums.takes(x.shape) and x.device == tensors[0][1].device
            for _, x in tensors
        )
        if not direct or not self.stays_on(tensors[0][1].device):
            return None
        named, shapes, owners = [], [], []
        for slot, x in tensors:
            pieces, flat = self.pieces(slot, x.numel()), x.view(-1)
            named += [(name, flat[begin:end]) for name, begin, end in pieces]
            shapes += [x.shape] * len(pieces)
            owners += [slot] * len(pieces)
        slots, numel = [slot for slot, _ in tensors], sum(x.numel() for _, x in tensors)
        first = self._next_seeds(slots)
        launch, number = sums.prepare(named, shapes, [first[slot] for slot in owners]), 0

        def mean() -> None:
            nonlocal number
            seeds, stats = self._next_seeds(slots), self.stats
            self._rounds.update((slot, seed + 1) for slot, seed in seeds.items())
            stats.rounds += len(slots)
            stats.values += numel
            look = number % LOOK_EVERY == 0
            number += 1
            if look:
                self._note_device_events(wait=False)
            launch([seeds[slot] for slot in owners])
            if look:
                self._events.copy_to_host()

        return mean

    def _next_seeds(self, slots: Sequence[str]) -> dict[str, int]:
        return {slot: self._rounds.get(slot, self._first_round) for slot in slots}

    def forget_places(self) -> None:
        """Drop what was prepared for tensors where they were."""
        self._device_sums.forget_places()

    def settle(self) -> None:
        """Count what happened on a device so far, which waits for it."""
        self._note_device_events(wait=True)

    def _reduce_on_device(
        self, tensors: Sequence[tuple[str, Tensor, Tensor]], seeds: Mapping[str, int]
    ) -> list[tuple[str, Tensor, Tensor]]:
        """Reduce slots in a few launches on a GPU; return those that are left, the same on all ranks."""
        devices = {x.device for _, x, _ in tensors}
        if self.carry or len(devices) != 1 or not self._device_sums.serves(tensors[0][1].device):
            return list(tensors)
        self._note_device_events(wait=False)
        named: list[tuple[str, Tensor]] = []
        shapes: list[torch.Size] = []
        rounds: list[int] = []
        copies: list[tuple[Tensor, Tensor]] = []
        left = [each for each in tensors if not self._device_sums.takes(each[1].shape)]
        for slot, x, out in tensors:
            if not self._device_sums.takes(x.shape):
                continue
            direct = out.dtype == torch.float32 and out.is_contiguous()
            # Always in the same memory, which a CUDA graph needs.
            flat = out.view(-1) if direct else self._buffers.get(len(copies), x.numel(), torch.float32, x.device)
            if not direct or out is not x:
                flat.view(x.shape).copy_(x)
            if not direct:
                copies.append((out, flat))
            pieces = self.pieces(slot, x.numel())
            named += [(name, flat[begin:end]) for name, begin, end in pieces]
            shapes += [x.shape] * len(pieces)
            rounds += [seeds[slot]] * len(pieces)
        if named:
            self._device_sums.reduce(named, shapes, rounds)
        for out, flat in copies:
            out.copy_(flat.view(out.shape))
        if not self.stays_on(next(iter(devices))):
            self._note_device_events(wait=True)
        return left

    def _note_device_events(self, *, wait: bool) -> None:
        nonfinite, resets = self._events.new(wait=wait)
        if resets:
            self.contributor.stats.residual_resets += resets
            self._warn_once("overflow", "a residual overflowed float32 and is reset")
        if nonfinite:
            self.contributor.stats.skipped_nonfinite += nonfinite
            self._note_nonfinite("a slot", nonfinite)

    # ---------------------------------------------------------------------------------------------- carried scales

    def _reduce_with_carried_scales(self, slot: str, x: Tensor, out: Tensor) -> None:
        scales = self._carried.pop(slot)
        probe = self.contributor.probe(slot, x, seed=self._rounds.get(slot, self._first_round))
        if probe.shape != scales.shape:  # the slot has another shape now, on all ranks
            self._reduce_with_agreement([(slot, x, out)])
            return
        seed = self._next_seed(slot, x)
        usable = self.summing.usable(probe)
        if not usable:  # all ranks drop this round, but all must take part in it
            self.contributor.skip(slot)
            scales = torch.zeros_like(probe)
        wait_for_agreed = begin_agreement(self.summing, probe, f"{slot} {list(x.shape)} {seed}", self.group, self.stats)
        arena = self._arenas[0].reset(x.device)
        if usable:
            packet = self.contributor.packet(slot, scales, seed=seed, arena=arena)
        else:
            packet = self.summing.packet(torch.zeros_like(x), scales, seed=seed, arena=arena)
        total = self._add([Piece(slot, slot, x, out, probe, packet)], arena.with_count)
        agreed = wait_for_agreed()
        if self.summing.usable(agreed):
            self._finish(total)
            self._carried[slot] = self.summing.carry(agreed)
            return
        if total.work is not None:
            total.work.wait()
        if usable:
            self.contributor.undo(slot)
        self._fill_nonfinite(out)
        self._note_nonfinite(f"slot {slot!r}")

    def _fill_nonfinite(self, out: Tensor) -> None:
        out.fill_(float("nan") if self.nonfinite == "spread" else 0.0)

    def _note_nonfinite(self, what: str, count: int = 1) -> None:
        self.stats.skipped_nonfinite += count
        if self.nonfinite == "raise":
            raise NonFiniteError(f"{what}: a value of some rank is not finite; all ranks skip this round")
        self._warn_once("nonfinite", f"{what}: a value of some rank is not finite, all ranks skip the round")

    # -------------------------------------------------------------------------------------------------------- state

    @property
    def residual_resets(self) -> int:
        return self.contributor.stats.residual_resets

    def residual(self, slot: str, numel: int) -> Tensor | None:
        """Return what this rank has yet to send of a slot, flat; None if it keeps nothing."""
        whole = self.contributor.unsent(slot, numel)
        if whole is not None or numel <= PART:
            return whole
        sizes = [min(PART, numel - at) for at in range(0, numel, PART)]
        parts = [self.contributor.unsent(f"{slot}[{i}]", size) for i, size in enumerate(sizes)]
        kept = [part for part in parts if part is not None]
        return torch.cat(kept) if len(kept) == len(sizes) else None

    @property
    def memories(self) -> dict[str, KeepsResiduals]:
        """What error feedback remembers."""
        return {"": self.contributor}

    def set_aside(self) -> AbstractContextManager[None]:
        """Let the block contribute its tensors alone, without what this rank has yet to send, which stays."""
        return self.contributor.set_aside()

    def begin_rounds(self, number: int) -> None:
        """Count the rounds of all slots from this number on, which is the same on all ranks."""
        self._first_round = number
        self._rounds.clear()

    def portable_state(self, slots: Mapping[str, int]) -> dict[str, Tensor]:
        """Return residuals and warm starts, which fit any number of ranks."""
        return self.contributor.state_dict()

    def load_portable_state(self, state: Mapping[str, Tensor]) -> None:
        self.contributor.load_state_dict(state)

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals, carried scales and rounds by slot. Each rank saves its own with the model."""
        state = self.contributor.state_dict()
        state |= {f"{slot}/scales": scales.clone() for slot, scales in self._carried.items()}
        return state | {f"{slot}/round": torch.tensor(count) for slot, count in self._rounds.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one; an invalid state changes nothing."""
        self.checked_state(state)()

    def checked_state(self, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """Check a saved state; return the function that replaces the memory by it."""
        carried, rounds = saved_scales(state), saved_rounds(state)
        memory = {key: x for key, x in state.items() if not key.endswith((ROUND, SCALES))}
        if carried and not self.carry:
            self._warn_once("scales", "saved scales are left out: they were carried, and this reducer has carry=False")
        replace_memory = self.contributor.checked_state(memory)

        def replace_all() -> None:
            replace_memory()
            self._carried, self._rounds = carried if self.carry else {}, rounds

        return replace_all


def allreduce(
    tensor: Tensor, spec: str, group: dist.ProcessGroup | None = None, *, seed: int = 0, nonfinite: str = "skip"
) -> Tensor:
    """Replace a tensor by its mean over the ranks of a group, compressed on the way; return it.

    It has no memory between calls: for error feedback use a ``Reducer``.

    Args:
        tensor: A float tensor of any shape and stride.
        spec: A summable codec, such as ``shared:8`` or ``thc:4``. The bits are those of a packed integer, which holds
            the sum of all ranks.
        group: The ranks; all of them by default.
        seed: The same on all ranks: decides rounding seeds and random positions.
        nonfinite: ``skip`` (zeros on all ranks), ``spread`` (NaN on all ranks) or ``raise`` (on all ranks) if a value
            of any rank is not finite.
    """
    reducer = Reducer(spec, group, nonfinite=nonfinite)
    reducer._rounds[""] = seed
    return reducer.reduce("", tensor, out=tensor)
