"""Reducer: tensors replaced by their mean over a group of ranks, compressed on the way, by summable codecs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.aggregate.homomorphic import Contributor, Summing
from laconic.aggregate.homomorphic.summing import flat_values
from laconic.codecs.mean import FloatHead
from laconic.codecs.packed_ints import PackedIntHead, PackedIntStage
from laconic.collective.stats import ExchangeStats
from laconic.counters import LogOnce
from laconic.errors import ConfigError, FrameError, InputError, NonFiniteError
from laconic.packet import Packet, TensorSpec, allocate

__all__ = ["Reducer", "allreduce"]


PART = 1 << 23
"""Values that are added up at a time: while some are on their way others are encoded."""

ALONE = 1 << 20
"""Values from which on a tensor is added up where it was encoded. Smaller ones are gathered first, to save rounds."""

IN_FLIGHT = 2
"""Sums on their way at once."""

_DIGEST: Final = 1 << 24
"""Digests below this are whole numbers in float32."""


class _Words:
    """Sections, the last with a word behind it: the lane that counts participants. Memory is kept for next time."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.last = torch.empty(0, dtype=torch.uint8)
        self._kept: list[Tensor] = []
        self._taken = 0

    def on(self, device: torch.device) -> _Words:
        """Ready for other packets, whose sections take the place of the last ones'."""
        self.device, self._taken = device, 0
        return self

    def take(self, nbytes: int) -> Tensor:
        if self._taken == len(self._kept):
            self._kept.append(torch.empty(0, dtype=torch.uint8))
        room = self._kept[self._taken]
        if room.numel() < nbytes + 4 or room.device != self.device:
            room = self._kept[self._taken] = allocate(TensorSpec((nbytes + 4,), torch.uint8), self.device)
        self._taken += 1
        self.last = room[: nbytes + 4]
        return room[:nbytes]

    def trim(self, section: Tensor, nbytes: int) -> Tensor:
        self.last = self._kept[self._taken - 1][: nbytes + 4]
        return section[:nbytes]


@dataclass
class _Piece:
    """A tensor, or a part of a large one, on its way through a round."""

    name: str
    slot: str
    x: Tensor
    out: Tensor
    agreed: Tensor
    """At first what this rank brings to the agreement."""
    packet: Packet | None = None


@dataclass
class _Sum:
    """Pieces whose integers travel together."""

    pieces: list[_Piece]
    words: Tensor
    work: Any


class Reducer:
    """Means over a group of ranks by a summable codec, slot by slot, with error feedback when the spec has ``ef``.

    Tensors of more than 2^23 values go part by part, as slots ``name[0]``, ``name[1]``, …: one part is encoded while
    another is on its way. All ranks call ``reduce`` for the same slots in the same order, as they do with any
    collective.

    Args:
        spec: ``ef|thc:4``, ``shared:8,round=stochastic``, ``ef|powersgd:4``, … Bits are those of a lane, which
            holds the sum of all ranks: L = floor((2^bits - 1) / ranks) levels a rank.
        group: The ranks; all of them by default.
        carry: Take scales from the round before, widened by a quarter, and agree on the next ones while the sum is
            under way: one phase instead of two. For ``shared`` and ``thc``, with ``ef``.
        nonfinite: When a value of any rank is not finite, ``skip`` the round on all of them: the result is zeros,
            residuals stay, and it is logged and counted. ``spread``: the same, but the result is NaN, as that of a
            plain all-reduce would be. Or ``raise``, on all of them, too.
        ledger: Where to count; one of its own by default.
    """

    def __init__(
        self,
        spec: str,
        group: dist.ProcessGroup | None = None,
        *,
        carry: bool = False,
        nonfinite: str = "skip",
        ledger: ExchangeStats | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed has no process group yet: call init_process_group first")
        if nonfinite not in ("raise", "skip", "spread"):
            raise ConfigError(f"nonfinite must be 'raise', 'skip' or 'spread', got {nonfinite!r}")
        self.group = group
        self.nonfinite = nonfinite
        self.carry = carry
        self.contributor = Contributor(spec, workers=dist.get_world_size(group), worker=dist.get_rank(group), ring=True)
        if carry and not (self.contributor.feedback and isinstance(self.summing.chain.values, PackedIntStage)):
            raise ConfigError(f"{spec!r}: carried-over scales clip, which 'ef' before 'shared' or 'thc' makes good")
        self.stats = ExchangeStats() if ledger is None else ledger
        self._warn_once = LogOnce("stats")
        self._arenas = tuple(_Words() for _ in range(IN_FLIGHT + 1))
        self._rounds: dict[str, int] = {}
        self._carried: dict[str, Tensor] = {}

    @property
    def summing(self) -> Summing:
        return self.contributor.summing

    def reduce(self, slot: str, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The mean over all ranks, the same bits on each; into ``out``, which may be ``x``, when given."""
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if out.shape != x.shape:
            raise InputError(f"expected a tensor of shape {list(x.shape)} for the mean, got {list(out.shape)}")
        if slot in self._carried:
            self._reduce_by_carried(slot, x, out)
        else:
            self._reduce_agreeing([(slot, x, out)])
        return out

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Replace many tensors by their means, in as few rounds as one takes: one agreement, and sums of many."""
        for slot, x in tensors:
            if slot in self._carried:
                self._reduce_by_carried(slot, x, x)
        self._reduce_agreeing([(slot, x, x) for slot, x in tensors if slot not in self._carried])

    def _next_seed(self, slot: str, x: Tensor) -> int:
        seed = self._rounds.get(slot, 0)
        self._rounds[slot] = seed + 1
        self.stats.rounds += 1
        self.stats.values += x.numel()
        return seed

    # ------------------------------------------------------------------------------------------- agree, add, decode

    def _reduce_agreeing(self, tensors: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        seeds = {slot: self._next_seed(slot, x) for slot, x, _ in tensors}
        if not self._reduce_joined(tensors, seeds):
            self._reduce_in_turn(tensors, seeds)

    def _reduce_in_turn(self, tensors: Sequence[tuple[str, Tensor, Tensor]], seeds: Mapping[str, int]) -> None:
        pieces, copies = [], []
        with self.stats.during("encode_s"):
            for slot, x, out in tensors:
                direct = out.dtype == torch.float32 and out.is_contiguous()
                into = out if direct else torch.empty(x.shape, device=x.device)
                pieces += [
                    _Piece(name, slot, part, room, self.contributor.probe(name, part, seed=seeds[slot]))
                    for name, part, room in self._parts(slot, x, into)
                ]
                if not direct:
                    copies.append((out, into))
        self._agree(pieces, seeds)
        usable = self._usable(pieces)
        if self.carry:
            self._carried |= {piece.slot: self.summing.carry(piece.agreed) for piece in usable}
        under_way: list[_Sum] = []
        for i, together in enumerate(_trains(usable)):
            under_way.append(self._add(together, seeds, self._arenas[i % len(self._arenas)]))
            if len(under_way) > IN_FLIGHT:
                self._finish(under_way.pop(0))
        for each in under_way:
            self._finish(each)
        for out, into in copies:
            out.copy_(into)

    def _parts(self, slot: str, x: Tensor, out: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        chain = self.summing.chain
        if (
            x.numel() <= PART
            or not isinstance(chain.values, PackedIntStage)
            or chain.selector is not None
            or self.carry
        ):
            yield slot, x, out
            return
        flat, into = flat_values(x), out.view(-1)
        for at in range(0, flat.numel(), PART):
            yield f"{slot}[{at // PART}]", flat[at : at + PART], into[at : at + PART]

    def _agree(self, pieces: Sequence[_Piece], seeds: Mapping[str, int]) -> None:
        """Each piece's probe becomes what all ranks agree on: one round for all of them."""
        if not pieces:
            return
        probes = [piece.agreed.reshape(-1) for piece in pieces]
        texts = [f"{piece.name} {list(piece.x.shape)} {seeds[piece.slot]}" for piece in pieces]
        agreed = self._settle(torch.cat(probes), " ".join(texts))()
        for piece, part in zip(pieces, torch.split(agreed, [probe.numel() for probe in probes]), strict=True):
            piece.agreed = part.view(piece.agreed.shape)

    def _usable(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Those that can go on; the slots of the others end their round here, on all ranks."""
        lost = {piece.slot for piece in pieces if not self.summing.usable(piece.agreed)}
        for piece in pieces:
            if piece.slot in lost:
                self.contributor.skip(piece.name)
                self._leave_out(piece.out)
        for slot in lost:
            self._skipped(slot)
        return [piece for piece in pieces if piece.slot not in lost]

    def _add(self, pieces: list[_Piece], seeds: Mapping[str, int], arena: _Words) -> _Sum:
        """Encode, and begin the sum of all ranks' packets."""
        with self.stats.during("encode_s"):
            arena.on(pieces[0].x.device)
            for piece in pieces:
                seed = seeds[piece.slot]
                piece.packet = self.contributor.packet(piece.name, piece.agreed, seed=seed, arena=arena)
            words = arena.last
            if len(pieces) > 1:
                words = self._gathered(pieces, arena)
        return self._begin(pieces, words)

    def _gathered(self, pieces: list[_Piece], arena: _Words) -> Tensor:
        """The last sections one behind the other, with a word for the count behind them."""
        sizes = [piece.packet.sections[-1].numel() for piece in pieces if piece.packet and piece.packet.sections]
        room = arena.take(sum(sizes))
        at = 0
        for piece in pieces:
            if piece.packet is None or not piece.packet.sections:
                continue
            *side, last = piece.packet.sections
            here = room[at : at + last.numel()]
            here.copy_(last)
            piece.packet = Packet(piece.packet.codec, piece.packet.spec, (*side, here))
            at += last.numel()
        return arena.last

    def _begin(self, pieces: list[_Piece], words: Tensor) -> _Sum:
        if not any(piece.packet and piece.packet.sections for piece in pieces):
            return _Sum(pieces, words, None)
        words = words.view(torch.int32 if self._integers else torch.float32)
        words[-1] = 1
        return _Sum(pieces, words, self._reduce(words, dist.ReduceOp.SUM))

    def _finish(self, total: _Sum) -> None:
        if total.work is not None:
            with self.stats.during("wire_s"):
                total.work.wait()
        with self.stats.during("decode_s"):
            for piece in total.pieces:
                assert piece.packet is not None
                packet = self._counted(piece.packet, total.words)
                self.contributor.received(piece.name, packet)
                self.summing.chain.decode(packet, out=piece.out)

    def _counted(self, packet: Packet, words: Tensor) -> Packet:
        """With the number of ranks that took part in its head."""
        if not packet.sections:
            return packet
        at, count = len(packet.sections) - (3 if self._integers else 2), int(words[-1])
        head = torch.empty_like(packet.sections[at])
        if self._integers:
            replace(self._head, count=count).write(head)
        else:
            FloatHead(self.summing.workers, count).write(head)
        return Packet(packet.codec, packet.spec, (*packet.sections[:at], head, *packet.sections[at + 1 :]))

    # ------------------------------------------------------------------------------------------------------- joined

    def _reduce_joined(self, tensors: Sequence[tuple[str, Tensor, Tensor]], seeds: Mapping[str, int]) -> bool:
        """All at once on a GPU, where launches and waits are what slots cost; False where they must go in turn.

        What comes out is the same, but for the dice of stochastic rounding, which are those of the first slot.
        """
        if self.carry or not tensors or any(out is not x or x.numel() > PART for _, x, out in tensors):
            return False
        slots, values = [slot for slot, *_ in tensors], [x for _, x, _ in tensors]
        with self.stats.during("encode_s"):
            joined = self.contributor.join(slots, values)
            if joined is None:
                return False
            probe = self.contributor.probe_joined(joined)
        texts = [f"{slot} {list(x.shape)} {seeds[slot]}" for slot, x in zip(slots, values, strict=True)]
        agreed = self._settle(probe, " ".join(texts))()
        if not self.summing.usable(agreed):  # on all ranks, which find out in turn whose values it was
            return False
        arena = self._arenas[0].on(values[0].device)
        with self.stats.during("encode_s"):
            clips, lanes = self.contributor.encode_joined(joined, agreed, seed=seeds[slots[0]], arena=arena)
            words = arena.last.view(torch.int32)
            words[-1] = 1
        work = self._reduce(words, dist.ReduceOp.SUM)
        with self.stats.during("wire_s"):
            work.wait()
        with self.stats.during("decode_s"):
            head = replace(self._head, count=int(words[-1]))
            backend, stage = kernels.multi_tensor_backend_for(values[0]), self.summing.chain.values
            assert backend is not None and isinstance(stage, PackedIntStage)
            flag = backend.packed_int_decode_all(
                lanes, clips, head.coding, total=head.total, rotation_seed=stage.signs, outs=values
            )
            self.contributor.check_joined(joined)
            if int(flag):
                raise FrameError(f"the sum of {head.count} ranks has a value above {head.total}")
        return True

    # ---------------------------------------------------------------------------------------------- carried scales

    def _reduce_by_carried(self, slot: str, x: Tensor, out: Tensor) -> None:
        seed = self._next_seed(slot, x)
        scales, probe = self._carried.pop(slot), self.contributor.probe(slot, x, seed=seed)
        usable = self.summing.usable(probe)
        if not usable or probe.shape != scales.shape:  # the round is lost for all, but all must go through it
            self.contributor.skip(slot)
            scales = torch.zeros_like(probe)
        settle = self._settle(probe, f"{slot} {list(x.shape)} {seed}")
        arena = self._arenas[0].on(x.device)
        if usable:
            packet = self.contributor.packet(slot, scales, seed=seed, arena=arena)
        else:
            packet = self.summing.packet(torch.zeros_like(x), scales, seed=seed, arena=arena)
        total = self._begin([_Piece(slot, slot, x, out, probe, packet)], arena.last)
        agreed = settle()
        if self.summing.usable(agreed):
            self._finish(total)
            self._carried[slot] = self.summing.carry(agreed)
            return
        if total.work is not None:
            total.work.wait()
        if usable:
            self.contributor.undo(slot)
        self._leave_out(out)
        self._skipped(slot)

    # ------------------------------------------------------------------------------------------------ collectives

    def _settle(self, probe: Tensor, what: str) -> Callable[[], Tensor]:
        """Begin the agreement; what it returns waits for its end."""
        by = self.summing.by
        if by == "or":
            return lambda: self._or(probe)
        text, both = "", probe
        if by == "max":
            text = f"{self.summing.chain.text} {self.summing.workers} {what}"
            mark = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest(), "little")
            marks = torch.tensor([mark, _DIGEST - 1 - mark], dtype=torch.float32, device=probe.device)
            both = torch.cat([probe, marks])
        work = self._reduce(both, dist.ReduceOp.MAX if by == "max" else dist.ReduceOp.SUM)

        def settled() -> Tensor:
            with self.stats.during("wire_s"):
                work.wait()
            if by == "sum":
                return both
            if float(both[-2] + both[-1]) != _DIGEST - 1:
                raise InputError(f"ranks do not reduce the same tensors: this one has {text[:200]!r}")
            return both[:-2]

        return settled

    def _reduce(self, words: Tensor, op: Any) -> Any:
        self.stats.bytes_reduced += words.numel() * words.element_size()
        return dist.all_reduce(words, op=op, group=self.group, async_op=True)

    def _or(self, bits: Tensor) -> Tensor:
        with self.stats.during("wire_s"):
            if dist.get_backend(self.group) != "nccl":
                self._reduce(bits, dist.ReduceOp.BOR).wait()
                return bits
            backend = kernels.backend_for(bits)  # NCCL knows no OR: a byte for each bit, and their maximum
            wide = backend.unpack_symbols(bits, 8 * bits.numel(), 2, False)
            self._reduce(wide, dist.ReduceOp.MAX).wait()
            backend.pack_symbols(wide, 2, False, bits)
            return bits

    @property
    def _integers(self) -> bool:
        return isinstance(self.summing.chain.values, PackedIntStage)

    @property
    def _head(self) -> PackedIntHead:
        stage = self.summing.chain.values
        assert isinstance(stage, PackedIntStage)
        return stage.head(self.summing.workers, ring=True)

    def _leave_out(self, out: Tensor) -> None:
        out.fill_(float("nan") if self.nonfinite == "spread" else 0.0)

    def _skipped(self, slot: str) -> None:
        self.stats.skipped_nonfinite += 1
        if self.nonfinite == "raise":
            raise NonFiniteError(f"slot {slot!r}: a value of some rank is not finite; all ranks leave this round out")
        self._warn_once("nonfinite", f"slot {slot!r}: a value of some rank is not finite, all ranks skip the round")

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals, scales carried over, and rounds by slot: save it with the model, on every rank its own."""
        state = self.contributor.state_dict()
        state |= {f"{slot}/scales": scales.clone() for slot, scales in self._carried.items()}
        return state | {f"{slot}/round": torch.tensor(count) for slot, count in self._rounds.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one."""
        by_part: dict[str, dict[str, Tensor]] = {"scales": {}, "round": {}}
        rest = {}
        for key, value in state.items():
            slot, _, part = key.rpartition("/")
            if part in by_part:
                by_part[part][slot] = value
            else:
                rest[key] = value
        self.contributor.load_state_dict(rest)
        self._carried = {slot: scales.clone() for slot, scales in by_part["scales"].items()}
        self._rounds = {slot: int(count) for slot, count in by_part["round"].items()}


def _trains(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Large pieces by themselves, small ones together."""
    together: list[_Piece] = []
    values = 0
    for piece in pieces:
        if piece.x.numel() >= ALONE:
            yield [piece]
            continue
        together.append(piece)
        values += piece.x.numel()
        if values >= ALONE:
            yield together
            together, values = [], 0
    if together:
        yield together


def allreduce(
    tensor: Tensor,
    spec: str,
    group: dist.ProcessGroup | None = None,
    *,
    seed: int = 0,
    nonfinite: str = "skip",
) -> Tensor:
    """Replace a tensor by its mean over the ranks of a group, compressed on the way; returns it.

    Without memory between calls: for error feedback keep a ``Reducer``.

    Args:
        tensor: Any shape, stride and float dtype.
        spec: A summable codec, such as ``shared:8`` or ``thc:4``. Bits are those of a lane, which holds the sum of all
            ranks.
        group: The ranks; all of them by default.
        seed: The same on all ranks: decides dice and random places.
        nonfinite: ``skip`` (zeros on all ranks), ``spread`` (NaN on all ranks) or ``raise`` (on all ranks) when a value
            of any rank is not finite.
    """
    reducer = Reducer(spec, group, nonfinite=nonfinite)
    reducer._rounds[""] = seed
    return reducer.reduce("", tensor, out=tensor)
