"""Summing: a summable codec among a number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic.codecs import Chain, codec
from laconic.codecs.lanes import LaneHead, LaneStage
from laconic.codecs.randk import RandK
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.kernels.random import M64, splitmix64
from laconic.packet import FLOATS, Arena, HeapArena, Packet, TensorSpec

__all__ = ["CARRY", "Summing", "summing"]

CARRY = 1.25
"""What a scale that is carried over to the next round is widened by."""

UNUSABLE = torch.finfo(torch.float32).max
"""The scale of a block that is not finite. (A finite number, so that probes can travel in ordinary frames.)"""


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
        chain: The codec: ``shared:…`` or ``thc:…``, alone or behind ``randk:…``.
        workers: The most that will be added up. Levels follow from it where the sum's width is fixed.
        ring: Integers in words of lanes as wide as the sum of all needs, so that any engine's integer SUM adds them
            (``laconic.collective``). Otherwise each worker sends as few bits as its own integers need.
    """

    chain: Chain
    workers: int
    ring: bool = False

    def __post_init__(self) -> None:
        selector = self.chain.selector
        if not isinstance(self.chain.values, LaneStage) or not (selector is None or isinstance(selector, RandK)):
            raise ConfigError(
                f"packets of {self.chain.text!r} cannot be added: use 'shared:8' or 'thc:4', alone or behind 'randk'"
            )
        _ = self.head  # one worker too many is refused here, before anything is encoded

    def __str__(self) -> str:
        return self.chain.text

    @property
    def stage(self) -> LaneStage:
        assert isinstance(self.chain.values, LaneStage)
        return self.chain.values

    @property
    def head(self) -> LaneHead:
        """Levels, width and layout of one worker's packet."""
        return self.stage.head(self.workers, ring=self.ring)

    # -------------------------------------------------------------------------------------------------- agreement

    def probe(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """What this worker brings to the agreement: a float32 per block. The same seed for all workers."""
        values = self._values(flat_values(x), seed)[1]
        return self.probe_values(values)

    def probe_values(self, values: Tensor) -> Tensor:
        if not values.numel():
            return torch.empty(0, device=values.device)
        scales = self.stage.scales(values, kernels.of(values))
        return torch.where(scales < UNUSABLE, scales, UNUSABLE)

    def agree(self, probes: Sequence[Tensor]) -> Tensor:
        """The largest of each block's scales. (MAX of an all-reduce does the same.)"""
        if not probes:
            raise InputError("expected at least one probe")
        agreed = probes[0].clone()
        for probe in probes[1:]:
            if probe.shape != agreed.shape or probe.dtype != agreed.dtype:
                raise InputError(f"probes of {list(agreed.shape)} and {list(probe.shape)} values are not of one tensor")
            torch.maximum(agreed, probe, out=agreed)
        return agreed

    def usable(self, agreed: Tensor) -> bool:
        """False when a value of some worker was not finite, or close to the end of float32: then all skip the round."""
        return bool((agreed < UNUSABLE).all())

    def carry(self, agreed: Tensor) -> Tensor:
        """Scales for the next round out of this one's, 1.25 times as wide, to save the round trip of an agreement.

        What outgrows them is clipped, and error feedback sends it later.
        """
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

    def packet(self, x: Tensor, agreed: Tensor, *, seed: int = 0, worker: int = 0) -> Packet:
        """The same as a packet, on the device of ``x``."""
        flat, arena = flat_values(x), HeapArena(x.device)
        section, values = self._values(flat, seed, arena)
        return self.packet_of(TensorSpec.of(x), section, values, agreed, arena, seed=seed, worker=worker)

    def packet_of(
        self,
        spec: TensorSpec,
        section: tuple[Tensor, ...],
        values: Tensor,
        agreed: Tensor,
        arena: Arena,
        *,
        seed: int,
        worker: int,
        feedback: bool = False,
    ) -> Packet:
        if not values.numel():
            return Packet(self.chain.text, spec, ())
        backend, head = kernels.of(values), self.head
        if not self.usable(agreed):
            raise NonFiniteError("the workers agreed on scales that are not finite: skip this round on all of them")
        wanted = -(-values.numel() // 1024)
        if agreed.dtype != torch.float32 or agreed.shape != (wanted,) or bool((agreed < 0).any()):
            raise InputError(f"expected {wanted} agreed scales, non-negative float32, got {list(agreed.shape)}")
        clips = self.stage.clips(agreed.to(values.device), head)
        noise = splitmix64((seed & M64) ^ splitmix64(worker & M64))
        coded = self.stage.encode_sum(values, head, clips, backend, arena, noise=noise, feedback=feedback)
        return Packet(self.chain.text, spec, (*section, *coded))

    def _values(self, flat: Tensor, seed: int, arena: Arena | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The selector's section and the values it lets through."""
        selector = self.chain.selector
        if selector is None or not flat.numel():
            return (), flat
        assert isinstance(selector, RandK)
        section, values = selector.take(flat, kernels.of(flat), arena or HeapArena(flat.device), seed)
        return (section,), values


def summing(spec: str | Chain, *, workers: int, ring: bool = False) -> Summing:
    """A summable codec among workers; see ``Summing``. One worker too many for it is a ``ConfigError``."""
    return Summing(spec if isinstance(spec, Chain) else codec(spec), workers, ring)
