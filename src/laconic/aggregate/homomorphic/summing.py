"""Summing: a summable codec for a given number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from laconic import wire
from laconic.aggregate.homomorphic.families import UNUSABLE, Family, PackedInts, ProbeOp, Sender, family_of
from laconic.codecs import Chain, codec
from laconic.codecs.mean import FloatSumHeader, Mean
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.packet import FLOATS, Arena, HeapArena, Packet, TensorSpec

__all__ = ["CARRY", "Summing", "summing"]

CARRY = 1.25
"""Factor by which a scale is widened when it is carried over to the next round."""


def flat_values(x: Tensor) -> Tensor:
    """Return a float tensor as a flat, contiguous float32 one."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        kind = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"expected a float32, float64, float16 or bfloat16 tensor, got {kind}")
    return x.detach().reshape(-1).resolve_neg().to(torch.float32).contiguous()


@dataclass(frozen=True)
class Summing:
    """A summable codec for a number of workers. Keeps no state.

    Args:
        chain: The codec: ``shared`` or ``thc``, alone or behind ``randk``; ``randk``, ``union`` or ``powersgd``.
        workers: The largest number of packets that will be added. Where the sum's width is fixed, the number of
            levels follows from it.
        ring: Pack integers as wide as the sum of all workers needs, so that any integer all-reduce adds them
            (``laconic.collective``). Otherwise each worker sends as few bits as its own integers need.
    """

    chain: Chain
    workers: int
    ring: bool = False

    def __post_init__(self) -> None:
        if self.chain.values is None:  # floats, and the number of workers that sent them
            object.__setattr__(self, "chain", replace(self.chain, values=Mean()))
        if family_of(self.chain) is None:
            raise ConfigError(
                f"packets of {self.chain.text!r} cannot be added: use 'shared:8' or 'thc:4', alone or behind 'randk'; "
                "'randk', 'union' or 'powersgd:4'"
            )
        self.family.check(self.workers, self.ring)  # too many workers are rejected before anything is encoded

    def __str__(self) -> str:
        return self.chain.text

    @cached_property
    def family(self) -> Family:
        family = family_of(self.chain)
        assert family is not None
        return family

    @property
    def by(self) -> ProbeOp:
        """How probes are reduced to the agreed value: ``max``, ``sum`` or ``or``."""
        return self.family.probe_op

    def probe(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """Return this worker's probe. All workers use the same seed.

        For ``shared`` and ``thc`` it has a float32 per block of 1,024 values. Its numbers are finite even if ``x`` is
        not, so that it can travel by ``laconic.encode(probe, "none")``.
        """
        flat = flat_values(x)
        return self.family.probe(flat, TensorSpec.of(x), seed) if flat.numel() else self.empty_probe(flat)

    def empty_probe(self, like: Tensor) -> Tensor:
        """Return the probe of a tensor without values."""
        return like.new_empty(0, dtype=torch.uint8 if self.by == "or" else torch.float32)

    def agree(self, probes: Sequence[Tensor]) -> Tensor:
        """Reduce probes to the agreed value. Agreed values of groups of workers can be reduced again."""
        if not probes:
            raise InputError("expected at least one probe")
        agreed = probes[0].clone()
        for probe in probes[1:]:
            if probe.shape != agreed.shape or probe.dtype != agreed.dtype:
                raise InputError(f"probes of {list(agreed.shape)} and {list(probe.shape)} values are not of one tensor")
            if self.by == "max":
                torch.maximum(agreed, probe, out=agreed)
            elif self.by == "or":
                agreed |= probe
            else:
                agreed += probe
        return agreed

    def usable(self, agreed: Tensor) -> bool:
        """Return False if a worker's value is not finite or near float32's limit: then all skip the round."""
        return not agreed.numel() or self.family.usable(agreed)

    def require_usable(self, agreed: Tensor) -> None:
        if not self.usable(agreed):
            raise NonFiniteError("a worker's values are not finite: all workers must skip this round")

    def carry(self, agreed: Tensor) -> Tensor:
        """Return scales for the next round, 1.25 times this round's, which saves the round trip of an agreement.

        Larger values are clipped, and error feedback sends the rest later.
        """
        if not isinstance(self.family, PackedInts):
            raise ConfigError(f"{self.chain.text!r} has no scales to carry over to the next round")
        return torch.clamp(agreed * CARRY, max=UNUSABLE / 2)

    def encode(self, x: Tensor, agreed: Tensor, *, seed: int = 0, worker: int = 0) -> bytearray:
        """Return the frame of one worker's tensor.

        Args:
            x: A float tensor of any shape and stride; not modified.
            agreed: The result of ``agree`` or ``carry``.
            seed: Of the round, the same for all workers: decides which entries ``randk`` takes.
            worker: This worker's number: each worker uses its own rounding seed.
        """
        return wire.pack(self.packet(x, agreed, seed=seed, worker=worker))

    def packet(
        self, x: Tensor, agreed: Tensor, *, seed: int = 0, worker: int = 0, arena: Arena | None = None
    ) -> Packet:
        """Return the packet of one worker's tensor, on the device of ``x``, with its sections in the arena."""
        spec, flat = TensorSpec.of(x), flat_values(x)
        if not flat.numel():
            return Packet(self.chain.text, spec, ())
        self.require_usable(agreed)
        sender = Sender(self.workers, self.ring, seed, worker)
        sections = self.family.sections(flat, spec, agreed, arena or HeapArena(x.device), sender)
        return Packet(self.chain.text, spec, sections)

    def with_count(self, packet: Packet, count: int) -> Packet:
        """Return the packet of a sum that was added outside of ``Sum``, with the number of its workers in the head."""
        if not packet.sections:
            return packet
        family = self.family
        at = len(packet.sections) - (3 if isinstance(family, PackedInts) else 2)
        head = torch.empty_like(packet.sections[at])
        if isinstance(family, PackedInts):
            replace(family.head(self.workers, self.ring), count=count).write(head)
        else:
            FloatSumHeader(self.workers, count).write(head)
        return replace(packet, sections=(*packet.sections[:at], head, *packet.sections[at + 1 :]))


def summing(spec: str | Chain, *, workers: int, ring: bool = False) -> Summing:
    """Return ``Summing`` for a spec. Too many workers for the codec raise ``ConfigError``."""
    return Summing(spec if isinstance(spec, Chain) else codec(spec), workers, ring)
