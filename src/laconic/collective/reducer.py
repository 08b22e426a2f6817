"""Reducer: tensors replaced by their mean over a group of ranks, compressed on the way."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.codecs.lanes import LaneHead, LaneStage
from laconic.codecs.mean import FloatHead
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.packet import Packet, TensorSpec, allocate
from laconic.sums import Contributor, Summing
from laconic.sums.summing import flat_values

__all__ = ["Reducer", "ReducerStats", "allreduce"]

log = logging.getLogger("laconic")

PART = 1 << 22
"""Values that are reduced at a time: while some are on their way others are encoded, and decoded while in the cache."""

_DIGEST: Final = 1 << 24
"""Digests below this are whole numbers in float32."""


@dataclass
class ReducerStats:
    """What a reducer has done so far."""

    rounds: int = 0
    skipped_nonfinite: int = 0
    values: int = 0
    bytes_reduced: int = 0
    """What this rank gave to all-reduces: a ring sends it about twice."""


class _Words:
    """Sections, the last with a word behind it: the lane that counts participants. Memory is kept for next time."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.last = torch.empty(0, dtype=torch.uint8)
        self._kept: list[Tensor] = []
        self._taken = 0

    def on(self, device: torch.device) -> _Words:
        """Ready for another packet, whose sections take the place of the last one's."""
        self.device, self._taken = device, 0
        return self

    def take(self, nbytes: int) -> Tensor:
        if self._taken == len(self._kept):
            self._kept.append(torch.empty(0, dtype=torch.uint8))
        room = self._kept[self._taken]
        if room.numel() != nbytes + 4 or room.device != self.device:
            room = self._kept[self._taken] = allocate(TensorSpec((nbytes + 4,), torch.uint8), self.device)
        self._taken += 1
        self.last = room
        return room[:nbytes]

    def trim(self, section: Tensor, nbytes: int) -> Tensor:
        raise AssertionError("no summable codec gives bytes back")


class Reducer:
    """Means over a group of ranks by a summable codec, slot by slot, with error feedback when the spec has ``ef``.

    Tensors of more than 2^22 values go part by part, as slots ``name[0]``, ``name[1]``, …: one part is encoded while
    another is on its way. All ranks call ``reduce`` for the same slots in the same order, as they do with any
    collective.

    Args:
        spec: ``ef|thc:4``, ``shared:8,round=stochastic``, ``ef|powersgd:4``, … Bits are those of a lane, which
            holds the sum of all ranks: L = floor((2^bits - 1) / ranks) levels a rank.
        group: The ranks; all of them by default.
        carry: Take scales from the round before, widened by a quarter, and agree on the next ones while the sum is
            under way: one phase instead of two. For ``shared`` and ``thc``, with ``ef``.
        nonfinite: When a value of any rank is not finite, ``skip`` the round on all of them: the result is zeros,
            residuals stay, and it is logged and counted. Or ``raise``, on all of them, too.
    """

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, carry: bool = False, nonfinite: str = "skip"
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed has no process group yet: call init_process_group first")
        if nonfinite not in ("raise", "skip"):
            raise ConfigError(f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
        self.group = group
        self.nonfinite = nonfinite
        self.carry = carry
        self.contributor = Contributor(spec, workers=dist.get_world_size(group), worker=dist.get_rank(group), ring=True)
        if carry and not (self.contributor.feedback and isinstance(self.summing.chain.values, LaneStage)):
            raise ConfigError(f"{spec!r}: carried-over scales clip, which 'ef' before 'shared' or 'thc' makes good")
        self.stats = ReducerStats()
        self._arenas = _Words(), _Words()
        self._rounds: dict[str, int] = {}
        self._carried: dict[str, Tensor] = {}

    @property
    def summing(self) -> Summing:
        return self.contributor.summing

    def reduce(self, slot: str, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The mean over all ranks, the same bits on each; into ``out``, which may be ``x``, when given."""
        seed = self._rounds.get(slot, 0)
        self._rounds[slot] = seed + 1
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if out.shape != x.shape:
            raise InputError(f"expected a tensor of shape {list(x.shape)} for the mean, got {list(out.shape)}")
        self.stats.rounds += 1
        self.stats.values += x.numel()
        if self._in_parts(x):
            if not self._reduce_parts(slot, x, seed, out):
                self._skipped(slot)
                out.zero_()
            return out
        packet = self._carried_round(slot, x, seed) if slot in self._carried else self._agreed_round(slot, x, seed)
        if packet is None:
            self._skipped(slot)
            return out.zero_()
        self.contributor.received(slot, packet)
        return self.summing.chain.decode(packet, out=out)

    # -------------------------------------------------------------------------------------------------------- parts

    def _in_parts(self, x: Tensor) -> bool:
        chain = self.summing.chain
        return x.numel() > PART and isinstance(chain.values, LaneStage) and chain.selector is None and not self.carry

    def _reduce_parts(self, slot: str, x: Tensor, seed: int, out: Tensor) -> bool:
        """A large tensor part by part, each with an agreement and a sum of its own; False when all skip the round."""
        flat = flat_values(x)
        direct = out.dtype == torch.float32 and out.is_contiguous()
        into = out.view(-1) if direct else torch.empty_like(flat)
        names = [f"{slot}[{at // PART}]" for at in range(0, flat.numel(), PART)]
        parts = [flat[at : at + PART] for at in range(0, flat.numel(), PART)]
        settling: dict[int, Callable[[], Tensor]] = {}
        adding: dict[int, Callable[[], Packet]] = {}

        def begin(i: int) -> None:
            if i < len(parts):
                probe = self.contributor.probe(names[i], parts[i], seed=seed)
                settling[i] = self._agree(probe, names[i], parts[i], seed, wait=False)

        def finish(i: int) -> None:
            if i in adding:
                packet = adding.pop(i)()
                self.summing.chain.decode(packet, out=into[i * PART : (i + 1) * PART])

        begin(0)
        begin(1)
        for i in range(len(parts)):
            agreed = settling.pop(i)()
            if not self.summing.usable(agreed):
                for later in list(settling):
                    settling.pop(later)()
                    self.contributor.skip(names[later])
                self.contributor.skip(names[i])
                finish(i - 1)
                for earlier in names[:i]:
                    self.contributor.undo(earlier)
                return False
            arena = self._arenas[i % len(self._arenas)].on(x.device)
            packet = self.contributor.packet(names[i], agreed, seed=seed, arena=arena)
            adding[i] = self._add(packet, arena, wait=False)
            begin(i + 2)
            finish(i - 1)
        finish(len(parts) - 1)
        if not direct:
            out.copy_(into.view(out.shape))
        return True

    # ------------------------------------------------------------------------------------------------------- rounds

    def _agreed_round(self, slot: str, x: Tensor, seed: int) -> Packet | None:
        agreed = self.contributor.probe(slot, x, seed=seed)
        agreed = self._agree(agreed, slot, x, seed)()
        if not self.summing.usable(agreed):
            self.contributor.skip(slot)
            return None
        if self.carry:
            self._carried[slot] = self.summing.carry(agreed)
        arena = self._arenas[0].on(x.device)
        packet = self.contributor.packet(slot, agreed, seed=seed, arena=arena)
        return self._add(packet, arena)()

    def _carried_round(self, slot: str, x: Tensor, seed: int) -> Packet | None:
        scales, probe = self._carried.pop(slot), self.contributor.probe(slot, x, seed=seed)
        usable = self.summing.usable(probe)
        if not usable or probe.shape != scales.shape:  # the round is lost for all, but all must go through it
            self.contributor.skip(slot)
            scales = torch.zeros_like(probe)
        settle = self._agree(probe, slot, x, seed, wait=False)
        arena = self._arenas[0].on(x.device)
        if usable:
            packet = self.contributor.packet(slot, scales, seed=seed, arena=arena)
        else:
            packet = self.summing.packet(torch.zeros_like(x), scales, seed=seed, arena=arena)
        packet = self._add(packet, arena)()
        agreed = settle()
        if not self.summing.usable(agreed):
            if usable:
                self.contributor.undo(slot)
            return None
        self._carried[slot] = self.summing.carry(agreed)
        return packet

    def _agree(self, probe: Tensor, slot: str, x: Tensor, seed: int, *, wait: bool = True) -> Callable[[], Tensor]:
        """Begin the agreement; what it returns waits for its end."""
        by = self.summing.by
        if by == "or":
            return lambda: self._or(probe)
        if by == "sum":
            self._reduce(probe, dist.ReduceOp.SUM)
            return lambda: probe
        text = f"{self.summing.chain.text} {list(x.shape)} {self.summing.workers} {slot} {seed}"
        mark = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest(), "little")
        marks = torch.tensor([mark, _DIGEST - 1 - mark], dtype=torch.float32, device=probe.device)
        both = torch.cat([probe, marks])
        work = self._reduce(both, dist.ReduceOp.MAX, wait=wait)

        def settled() -> Tensor:
            if work is not None:
                work.wait()
            if float(both[-2] + both[-1]) != _DIGEST - 1:
                raise InputError(f"ranks do not reduce the same tensor: this one has {text!r}")
            return both[:-2]

        return settled

    def _reduce(self, words: Tensor, op: Any, *, wait: bool = True) -> Any:
        self.stats.bytes_reduced += words.numel() * words.element_size()
        work = dist.all_reduce(words, op=op, group=self.group, async_op=not wait)
        return None if wait else work

    def _or(self, bits: Tensor) -> Tensor:
        if dist.get_backend(self.group) != "nccl":
            self._reduce(bits, dist.ReduceOp.BOR)
            return bits
        backend = kernels.of(bits)  # NCCL knows no OR: a byte for each bit, and their maximum
        wide = backend.unpack_symbols(bits, 8 * bits.numel(), 2, False)
        self._reduce(wide, dist.ReduceOp.MAX)
        backend.pack_symbols(wide, 2, False, bits)
        return bits

    def _add(self, packet: Packet, arena: _Words, *, wait: bool = True) -> Callable[[], Packet]:
        """Begin the sum of all ranks' packets: of the last section, and of the word behind it that counts them."""
        if not packet.sections:
            return lambda: packet
        integers = isinstance(self.summing.chain.values, LaneStage)
        words = arena.last.view(torch.int32 if integers else torch.float32)
        words[-1] = 1
        work = self._reduce(words, dist.ReduceOp.SUM, wait=wait)

        def added() -> Packet:
            if work is not None:
                work.wait()
            at, count = len(packet.sections) - (3 if integers else 2), int(words[-1])
            head = torch.empty_like(packet.sections[at])
            if integers:
                replace(self._head, count=count).write(head)
            else:
                FloatHead(self.summing.workers, count).write(head)
            return Packet(packet.codec, packet.spec, (*packet.sections[:at], head, *packet.sections[at + 1 :]))

        return added

    @property
    def _head(self) -> LaneHead:
        stage = self.summing.chain.values
        assert isinstance(stage, LaneStage)
        return stage.head(self.summing.workers, ring=True)

    def _skipped(self, slot: str) -> None:
        self.stats.skipped_nonfinite += 1
        if self.nonfinite == "raise":
            raise NonFiniteError(f"slot {slot!r}: a value of some rank is not finite; all ranks leave this round out")
        if self.stats.skipped_nonfinite == 1:
            log.warning("slot %r: a value of some rank is not finite, all skip the round (said once, counted)", slot)

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
        nonfinite: ``skip`` (zeros on all ranks) or ``raise`` (on all ranks) when a value of any rank is not finite.
    """
    reducer = Reducer(spec, group, nonfinite=nonfinite)
    reducer._rounds[""] = seed
    return reducer.reduce("", tensor, out=tensor)
