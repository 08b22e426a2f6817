"""Families of summable codecs: what a worker's probe is, and how it encodes on the agreed value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs import Chain
from laconic.codecs.mean import FloatSumHeader, Mean
from laconic.codecs.packed_ints import IntSumHeader, PackedIntStage
from laconic.codecs.powersgd import Matrix, PowerSGD, orthonormal
from laconic.codecs.randk import RandK
from laconic.codecs.union import Union
from laconic.errors import ConfigError, InputError
from laconic.kernels.interface import NONFINITE
from laconic.kernels.random import M64, splitmix64
from laconic.kernels.sections import SUM_BLOCK, num_buckets
from laconic.packet import Arena, HeapArena, TensorSpec

__all__ = ["Family", "LowRank", "PackedInts", "ProbeOp", "RandomFloats", "Sender", "UnionFloats", "family_of"]

ProbeOp = Literal["max", "sum", "or"]
"""How probes are reduced to the agreed value."""

UNUSABLE = torch.finfo(torch.float32).max
"""The scale of a block that is not finite. (A finite number, so that probes can travel in ordinary frames.)"""

Sections = tuple[Tensor, ...]


class Sender(NamedTuple):
    """One worker's place in a round."""

    workers: int
    ring: bool
    seed: int
    worker: int

    @property
    def rounding_seed(self) -> int:
        """A seed that differs between workers and rounds."""
        return splitmix64((self.seed & M64) ^ splitmix64(self.worker & M64))


class Family:
    """Probe and encoding of one family. Values are flat float32; ``spec`` describes the original tensor."""

    probe_op: ClassVar[ProbeOp] = "max"

    def check(self, workers: int, ring: bool) -> None:
        """Raise ``ConfigError`` if so many workers cannot be added."""
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers < 1 << 32:
            raise ConfigError(f"workers must be a whole number from 1 on, got {workers}")

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        raise NotImplementedError

    def usable(self, agreed: Tensor) -> bool:
        return bool((agreed < UNUSABLE).all())

    def fits(self, probe: Tensor, workers: int) -> bool:
        """Whether the agreed value is usable if the probes of all workers are like this one."""
        return self.usable(probe)

    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections:
        raise NotImplementedError


def _check_agreed(agreed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(agreed.shape) != shape or agreed.dtype != dtype:
        raise InputError(
            f"expected an agreed value of {list(shape)} {dtype}, got {list(agreed.shape)} of {agreed.dtype}"
        )


@dataclass(frozen=True)
class PackedInts(Family):
    """Integers on shared scales: of all values, or of those at random positions."""

    stage: PackedIntStage
    selector: RandK | None

    def head(self, workers: int, ring: bool) -> IntSumHeader:
        return self.stage.header(workers, ring=ring)

    def check(self, workers: int, ring: bool) -> None:
        self.head(workers, ring)

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        backend, amax_bits = kernels.backend_for(x), 0
        if self.selector is not None:
            _, x, amax_bits = self.selector.select_any(x, backend, HeapArena(x.device), seed)
        scales = self.stage.scales(x, backend)
        if amax_bits >= NONFINITE:  # a value that is not sent is not finite
            scales = torch.full_like(scales, UNUSABLE)
        return self.clamp_scales(scales)

    def clamp_scales(self, scales: Tensor) -> Tensor:
        """Replace scales that are not finite by ``UNUSABLE``, which can travel."""
        return torch.where(scales < UNUSABLE, scales, UNUSABLE)

    def sections(
        self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender, feedback: bool = False
    ) -> Sections:
        backend, head = kernels.backend_for(x), self.head(sender.workers, sender.ring)
        positions: Sections = ()
        if self.selector is not None:
            section, x, _ = self.selector.select_any(x, backend, arena, sender.seed)
            positions = (section,)
        _check_agreed(agreed, (num_buckets(x.numel(), SUM_BLOCK),), torch.float32)
        if bool((agreed < 0).any()):
            raise InputError("agreed scales must not be negative")
        clips = self.stage.clips(agreed.to(x.device), head)
        rounding_seed = sender.rounding_seed
        return *positions, *self.stage.encode_sum(
            x, head, clips, backend, arena, rounding_seed=rounding_seed, feedback=feedback
        )


@dataclass(frozen=True)
class RandomFloats(Family):
    """Float32 values at random positions that follow from a common seed."""

    stage: Mean
    selector: RandK

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        return torch.full((1,), 0.0 if kernels.backend_for(x).all_finite(x) else UNUSABLE, device=x.device)

    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections:
        _check_agreed(agreed, (1,), torch.float32)
        section, values, _ = self.selector.select_any(x, kernels.backend_for(x), arena, sender.seed)
        return section, *self.stage.encode_sum(values, FloatSumHeader(sender.workers, 1), kernels.backend_for(x), arena)


@dataclass(frozen=True)
class UnionFloats(Family):
    """Float32 values at all positions where any worker has a nonzero value."""

    stage: Mean
    selector: Union
    probe_op: ClassVar[ProbeOp] = "or"

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        return self.selector.bitmap(x, kernels.backend_for(x))

    def usable(self, agreed: Tensor) -> bool:
        return not int(agreed[-1])

    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections:
        _check_agreed(agreed, (-(-x.numel() // 8) + 1,), torch.uint8)
        taken = self.selector.select_bitmap(x, agreed.to(x.device), kernels.backend_for(x), arena)
        if taken is None:  # zero on all workers
            return ()
        return taken.section, *self.stage.encode_sum(
            taken.values, FloatSumHeader(sender.workers, 1), kernels.backend_for(x), arena
        )


@dataclass(frozen=True)
class LowRank(Family):
    """A matrix times an orthonormal basis of its columns, which workers agree on by adding up sketches."""

    stage: PowerSGD
    probe_op: ClassVar[ProbeOp] = "sum"

    def matrix(self, spec: TensorSpec) -> Matrix:
        return self.stage.for_shape(spec.shape)

    def probe(self, x: Tensor, spec: TensorSpec, seed: int, start: Tensor | None = None) -> Tensor:
        matrix, backend = self.matrix(spec), kernels.backend_for(x)
        if not backend.all_finite(x):
            fill = torch.full((matrix.rows * matrix.r,), UNUSABLE, device=x.device)
            return fill.view(matrix.rows, matrix.r)
        if matrix.whole:
            return torch.zeros(matrix.rows, matrix.r, device=x.device)
        sketch = matrix.sketch(x, matrix.start(seed, x) if start is None else start, backend)
        return torch.where(sketch.abs() < UNUSABLE, sketch, UNUSABLE)

    def usable(self, agreed: Tensor) -> bool:
        return bool((agreed.abs() < UNUSABLE / 2).all())

    def fits(self, probe: Tensor, workers: int) -> bool:
        return bool((probe.abs() < UNUSABLE / (2 * workers)).all())

    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections:
        matrix = self.matrix(spec)
        _check_agreed(agreed, (matrix.rows, matrix.r), torch.float32)
        p = torch.eye(matrix.rows, device=x.device) if matrix.whole else orthonormal(agreed.to(x.device))
        return matrix.encode_sum(x, p, FloatSumHeader(sender.workers, 1), kernels.backend_for(x), arena)


def family_of(chain: Chain) -> Family | None:
    """Return the family of a codec, or None if its packets cannot be added."""
    selector, values = chain.selector, chain.values
    if isinstance(values, PackedIntStage) and (selector is None or isinstance(selector, RandK)):
        return PackedInts(values, selector)
    if isinstance(values, Mean) and isinstance(selector, RandK):
        return RandomFloats(values, selector)
    if isinstance(values, Mean) and isinstance(selector, Union):
        return UnionFloats(values, selector)
    return LowRank(values) if isinstance(values, PowerSGD) and selector is None and chain.coder is None else None
