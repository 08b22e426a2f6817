"""Summing: a summable codec among a number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic import wire
from laconic.aggregate.homomorphic.families import UNUSABLE, Method, PackedInts, Reduction, Sender, method_of
from laconic.codecs import Chain, codec
from laconic.codecs.mean import Mean
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.packet import FLOATS, Arena, HeapArena, Packet, TensorSpec

__all__ = ["CARRY", "Summing", "summing"]

CARRY = 1.25
"""What a scale that is carried over to the next round is widened by."""


def flat_values(x: Tensor) -> Tensor:
    """Any float tensor as a flat, contiguous float32 one."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        what = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"expected a float32, float64, float16 or bfloat16 tensor, got {what}")
    return x.detach().reshape(-1).resolve_neg().to(torch.float32).contiguous()


@dataclass(frozen=True)
class Summing:
    """A summable codec among a number of workers. Keeps no state.

    Args:
        chain: The codec: ``shared`` or ``thc``, alone or behind ``randk``; ``randk``, ``union`` or ``powersgd``.
        workers: The most that will be added up. Levels follow from it where the sum's width is fixed.
        ring: Integers in words of lanes as wide as the sum of all needs, so that any engine's integer SUM adds them
            (``laconic.collective``). Otherwise each worker sends as few bits as its own integers need.
    """

    chain: Chain
    workers: int
    ring: bool = False

    def __post_init__(self) -> None:
        if self.chain.values is None:  # floats, and a count of those who sent them
            object.__setattr__(self, "chain", replace(self.chain, values=Mean()))
        if method_of(self.chain) is None:
            raise ConfigError(
                f"packets of {self.chain.text!r} cannot be added: use 'shared:8' or 'thc:4', alone or behind 'randk'; "
                "'randk', 'union' or 'powersgd:4'"
            )
        self.method.check(self.workers, self.ring)  # one worker too many is refused before anything is encoded

    def __str__(self) -> str:
        return self.chain.text

    @property
    def method(self) -> Method:
        found = method_of(self.chain)
        assert found is not None
        return found

    @property
    def by(self) -> Reduction:
        """How probes become an agreement: ``max``, ``sum`` or ``or``."""
        return self.method.by

    # -------------------------------------------------------------------------------------------------- agreement

    def probe(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """What this worker brings to the agreement. The same seed for all workers.

        For ``shared`` and ``thc`` a float32 per block of 1,024 values. Numbers in it are finite, whatever x is, so that
        it can travel by ``laconic.encode(probe, "none")``.
        """
        flat = flat_values(x)
        return self.method.probe(flat, TensorSpec.of(x), seed) if flat.numel() else self.nothing(flat)

    def nothing(self, like: Tensor) -> Tensor:
        """The probe of a tensor without values."""
        return like.new_empty(0, dtype=torch.uint8 if self.by == "or" else torch.float32)

    def agree(self, probes: Sequence[Tensor]) -> Tensor:
        """Probes as one: the largest of each, their sum, or the OR of their bits. Any number at a time."""
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
        """False when a value of some worker was not finite, or close to the end of float32: then all skip the round."""
        return not agreed.numel() or self.method.usable(agreed)

    def carry(self, agreed: Tensor) -> Tensor:
        """Scales for the next round out of this one's, 1.25 times as wide, to save the round trip of an agreement.

        What outgrows them is clipped, and error feedback sends it later.
        """
        if not isinstance(self.method, PackedInts):
            raise ConfigError(f"{self.chain.text!r} has no scales to carry over to the next round")
        return torch.clamp(agreed * CARRY, max=UNUSABLE / 2)

    # ------------------------------------------------------------------------------------------------------ encode

    def encode(self, x: Tensor, agreed: Tensor, *, seed: int = 0, worker: int = 0) -> bytearray:
        """The frame of one worker's tensor.

        Args:
            x: Any shape, stride and float dtype; left alone.
            agreed: What ``agree`` gave, or ``carry``.
            seed: Of the round, the same for all workers: which entries ``randk`` takes.
            worker: Which one this is: workers round by different dice.
        """
        return wire.pack(self.packet(x, agreed, seed=seed, worker=worker))

    def packet(
        self, x: Tensor, agreed: Tensor, *, seed: int = 0, worker: int = 0, arena: Arena | None = None
    ) -> Packet:
        """The same as a packet, on the device of ``x``, its sections in the arena."""
        spec, flat = TensorSpec.of(x), flat_values(x)
        if not flat.numel():
            return Packet(self.chain.text, spec, ())
        self.refuse_unusable(agreed)
        sections = self.method.sections(
            flat,
            spec,
            agreed,
            arena or HeapArena(x.device),
            Sender(self.workers, self.ring, seed, worker),
        )
        return Packet(self.chain.text, spec, sections)

    def refuse_unusable(self, agreed: Tensor) -> None:
        if not self.usable(agreed):
            raise NonFiniteError("some worker's values are not finite: all must skip this round")


def summing(spec: str | Chain, *, workers: int, ring: bool = False) -> Summing:
    """A summable codec among workers; see ``Summing``. One worker too many for it is a ``ConfigError``."""
    return Summing(spec if isinstance(spec, Chain) else codec(spec), workers, ring)
