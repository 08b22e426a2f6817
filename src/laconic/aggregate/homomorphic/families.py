"""What each family of summable codecs brings to an agreement, and how it encodes after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs import Chain
from laconic.codecs.mean import FloatHead, Mean
from laconic.codecs.packed_ints import PackedIntHead, PackedIntStage
from laconic.codecs.powersgd import Matrix, PowerSGD, orthonormal
from laconic.codecs.randk import RandK
from laconic.codecs.union import Union
from laconic.errors import ConfigError, InputError
from laconic.kernels.interface import NONFINITE, SUM_BLOCK, num_buckets
from laconic.kernels.random import M64, splitmix64
from laconic.packet import Arena, HeapArena, TensorSpec

__all__ = ["Floats", "LowRank", "Method", "PackedInts", "Reduction", "Sender", "Unions", "method_of"]

Reduction = Literal["max", "sum", "or"]
"""How probes become an agreement."""

UNUSABLE = torch.finfo(torch.float32).max
"""The scale of a block that is not finite. (A finite number, so that probes can travel in ordinary frames.)"""


Sections = tuple[Tensor, ...]


class Sender(NamedTuple):
    """Who sends, to whom, and in which round."""

    workers: int
    ring: bool
    seed: int
    worker: int

    @property
    def rounding_seed(self) -> int:
        """A seed of its own for each worker and round."""
        return splitmix64((self.seed & M64) ^ splitmix64(self.worker & M64))


class Method(Protocol):
    """One family. Values are flat float32; ``spec`` is of the tensor they were."""

    by: ClassVar[Reduction]

    def check(self, workers: int, ring: bool) -> None:
        """``ConfigError`` when these are too many."""
        ...

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor: ...
    def usable(self, agreed: Tensor) -> bool: ...
    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections: ...


def _same_shape(agreed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(agreed.shape) != shape or agreed.dtype != dtype:
        raise InputError(f"expected an agreement of {list(shape)} {dtype}, got {list(agreed.shape)} of {agreed.dtype}")


def _workers(workers: int) -> None:
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers < 1 << 32:
        raise ConfigError(f"workers must be a whole number from 1 on, got {workers}")


@dataclass(frozen=True)
class PackedInts:
    """Integers on shared scales, of all values or of those at random places."""

    stage: PackedIntStage
    selector: RandK | None
    by: ClassVar[Reduction] = "max"

    def head(self, workers: int, ring: bool) -> PackedIntHead:
        return self.stage.head(workers, ring=ring)

    def check(self, workers: int, ring: bool) -> None:
        self.head(workers, ring)

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        backend, amax_bits = kernels.backend_for(x), 0
        if self.selector is not None:
            _, x, amax_bits = self.selector.take(x, backend, HeapArena(x.device), seed)
        scales = self.stage.scales(x, backend)
        if amax_bits >= NONFINITE:  # among the values that are not sent
            scales = torch.full_like(scales, UNUSABLE)
        return self.bounded(scales)

    def bounded(self, scales: Tensor) -> Tensor:
        """Scales that can travel: finite ones."""
        return torch.where(scales < UNUSABLE, scales, UNUSABLE)

    def usable(self, agreed: Tensor) -> bool:
        return bool((agreed < UNUSABLE).all())

    def sections(
        self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender, feedback: bool = False
    ) -> Sections:
        backend, head = kernels.backend_for(x), self.head(sender.workers, sender.ring)
        side: Sections = ()
        if self.selector is not None:
            section, x, _ = self.selector.take(x, backend, arena, sender.seed)
            side = (section,)
        _same_shape(agreed, (num_buckets(x.numel(), SUM_BLOCK),), torch.float32)
        if bool((agreed < 0).any()):
            raise InputError("agreed scales cannot be negative")
        clips = self.stage.clips(agreed.to(x.device), head)
        rounding_seed = sender.rounding_seed
        return *side, *self.stage.encode_sum(
            x, head, clips, backend, arena, rounding_seed=rounding_seed, feedback=feedback
        )


@dataclass(frozen=True)
class Floats:
    """Float32 values at random places that a seed tells."""

    stage: Mean
    selector: RandK
    by: ClassVar[Reduction] = "max"

    def check(self, workers: int, ring: bool) -> None:
        _workers(workers)

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        return torch.full((1,), 0.0 if kernels.backend_for(x).all_finite(x) else UNUSABLE, device=x.device)

    def usable(self, agreed: Tensor) -> bool:
        return bool((agreed < UNUSABLE).all())

    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections:
        _same_shape(agreed, (1,), torch.float32)
        section, values, _ = self.selector.take(x, kernels.backend_for(x), arena, sender.seed)
        return section, *self.stage.encode_sum(values, FloatHead(sender.workers, 1), kernels.backend_for(x), arena)


@dataclass(frozen=True)
class Unions:
    """Float32 values wherever any worker has one."""

    stage: Mean
    selector: Union
    by: ClassVar[Reduction] = "or"

    def check(self, workers: int, ring: bool) -> None:
        _workers(workers)

    def probe(self, x: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        return self.selector.bitmap(x, kernels.backend_for(x))

    def usable(self, agreed: Tensor) -> bool:
        return not int(agreed[-1])

    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections:
        _same_shape(agreed, (-(-x.numel() // 8) + 1,), torch.uint8)
        taken = self.selector.take(x, agreed.to(x.device), kernels.backend_for(x), arena)
        if taken is None:  # zero for everybody
            return ()
        return taken.section, *self.stage.encode_sum(
            taken.values, FloatHead(sender.workers, 1), kernels.backend_for(x), arena
        )


@dataclass(frozen=True)
class LowRank:
    """A matrix times a basis of its columns that the workers settle by adding up sketches."""

    stage: PowerSGD
    by: ClassVar[Reduction] = "sum"

    def check(self, workers: int, ring: bool) -> None:
        _workers(workers)

    def matrix(self, spec: TensorSpec) -> Matrix:
        return self.stage.shaped(spec.shape)

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

    def sections(self, x: Tensor, spec: TensorSpec, agreed: Tensor, arena: Arena, sender: Sender) -> Sections:
        matrix = self.matrix(spec)
        _same_shape(agreed, (matrix.rows, matrix.r), torch.float32)
        p = torch.eye(matrix.rows, device=x.device) if matrix.whole else orthonormal(agreed.to(x.device))
        return matrix.encode_sum(x, p, FloatHead(sender.workers, 1), kernels.backend_for(x), arena)


def method_of(chain: Chain) -> Method | None:
    """How packets of a codec are added; None when they cannot be."""
    selector, values = chain.selector, chain.values
    if isinstance(values, PackedIntStage) and (selector is None or isinstance(selector, RandK)):
        return PackedInts(values, selector)
    if isinstance(values, Mean) and isinstance(selector, RandK):
        return Floats(values, selector)
    if isinstance(values, Mean) and isinstance(selector, Union):
        return Unions(values, selector)
    return LowRank(values) if isinstance(values, PowerSGD) and selector is None and chain.coder is None else None
