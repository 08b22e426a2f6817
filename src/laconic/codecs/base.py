"""What a stage is, and what a codec is.

A *stage* is a frozen dataclass: its fields are its arguments in the grammar, its class says which kind it is.

- ``Selector``: dense values -> some of them, and where they stood (one section).
- ``ValueStage``: floats -> bytes. Either a cast (floats stay floats) or a ``Quantizer`` (floats become symbols).
- ``Coder``: the symbols of a quantizer -> fewer bytes, without loss.
- ``ChannelStage``: memory around a codec (error feedback, momentum). It has no bytes of its own.

A codec is a chain of at most one selector, one value stage and, behind a quantizer, one coder (``chain.Chain``).
Codecs are pure: no state, no communication, input untouched, randomness from the seed they are given.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.errors import NonFiniteError
from laconic.kernels.interface import NONFINITE, Grid, Kernels
from laconic.kernels.sections import PositionHeader, symbol_bits
from laconic.packet import Arena, Packet, TensorSpec

__all__ = [
    "ChannelStage",
    "Codec",
    "Coder",
    "Head",
    "Quantizer",
    "SeedHeader",
    "Selected",
    "Selector",
    "Stage",
    "SymbolReader",
    "Symbols",
    "ValueStage",
    "refuse_nonfinite",
]


def refuse_nonfinite(amax_bits: int, n: int) -> None:
    """Raise when an encoder's key says that it met a NaN or an infinity."""
    if amax_bits >= NONFINITE:
        raise NonFiniteError(
            f"expected finite values, got a NaN or an infinity among {n} (or a value beyond float32). "
            "Find where it arises, or drop such rounds with nonfinite='skip'."
        )


class Stage:
    """One word of the grammar. Subclasses are frozen dataclasses; ``name`` is the word."""

    name: ClassVar[str]
    kind: ClassVar[str]
    summary: ClassVar[str]
    """One line for tables."""
    example: ClassVar[str]
    """A spec that uses it."""
    biased: ClassVar[bool | str] = False
    """False when the mean over seeds is the input; otherwise True, or a word on when."""
    summable: ClassVar[bool] = False

    @property
    def is_biased(self) -> bool:
        """Whether this very stage, with its arguments, is."""
        return bool(self.biased)

    @property
    def contractive(self) -> bool:
        """Whether an encoding of ordinary data leaves less than it was given: what error feedback rests on."""
        return True


class Selected(NamedTuple):
    """What a selector hands on: its section, the values it kept, and the largest magnitude (a key)."""

    section: Tensor
    values: Tensor
    amax_bits: int


class SeedHeader(NamedTuple):
    """The head of a section that holds no more than a seed."""

    seed: int
    kept: int


Head = PositionHeader | SeedHeader
"""What a selector's section says in its first bytes: how many values it places, and how to read on."""


class Selector(Stage):
    """Dense -> values and positions."""

    kind: ClassVar[str] = "selector"

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        """Choose from a flat tensor of any float dtype; the position section is taken from the arena."""
        raise NotImplementedError

    def expected(self, n: int) -> int | None:
        """How many of n values every section of ours places; None where that differs."""
        return None

    def head(self, section: Tensor, n: int) -> Head:
        """The section's head, read without placing anything; ``FrameError`` when it cannot be."""
        raise NotImplementedError

    def positions(self, section: Tensor, n: int, head: Head, kernels: Kernels) -> Tensor:
        """Ascending positions back from the section; ``FrameError`` when it lies."""
        raise NotImplementedError

    def put(self, section: Tensor, values: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> bool:
        """Values where the section says and zeros elsewhere; with a weight, added to what is there.

        False, and nothing was added, when the section places another number of values. ``FrameError`` when it lies, or
        when a value is not finite.
        """
        raise NotImplementedError

    def gain(self, n: int) -> float:
        """What decoded values are multiplied by."""
        return 1.0

    def max_kept(self, n: int) -> int:
        raise NotImplementedError

    def max_section_nbytes(self, n: int) -> int:
        raise NotImplementedError


class ValueStage(Stage):
    """Floats -> sections, and back."""

    num_sections: ClassVar[int]
    lossless: ClassVar[bool] = False
    """Keeps the dtype it is given: it then decodes into that dtype instead of float32."""

    def shaped(self, shape: tuple[int, ...]) -> ValueStage:
        """The stage for tensors of a shape, where the shape matters."""
        return self

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        """Sections of a flat tensor; an empty tuple when every value decodes to zero."""
        raise NotImplementedError

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        """Store into a flat tensor (float32, or ``dtype``, the packet's, if lossless), or add ``weight`` times."""
        raise NotImplementedError

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        """Bytes of each section for n values of ``itemsize`` bytes, at most."""
        raise NotImplementedError

    def fits(self, sections: tuple[int, ...], n: int, itemsize: int) -> bool:
        """Whether sections of these sizes can hold n values."""
        return sections == self.section_nbytes(n, itemsize)


class Symbols(NamedTuple):
    """A quantizer's output before it is packed or coded: ready-made, or values and the grid to put them on."""

    alphabet: int
    source: Tensor
    """The symbols, one element each, or the values."""
    grid: Grid | None = None
    """For values."""

    def made(self, kernels: Kernels) -> Tensor:
        return self.source if self.grid is None else kernels.grid_symbols(self.source, self.grid)


class SymbolReader(Protocol):
    """A coded section on its way back, as a quantizer sees it."""

    def symbols(self, n: int, alphabet: int) -> Tensor:
        """n symbols, one element each."""
        ...

    def values(self, table: Tensor, out: Tensor, weight: float | None) -> None:
        """The table's entry for each symbol, stored or added ``weight`` times."""
        ...


class Quantizer(ValueStage):
    """Floats -> symbols and a few numbers. The symbols are the last section; a coder can take their place."""

    kind: ClassVar[str] = "quantizer"

    @property
    def max_alphabet(self) -> int:
        """Symbols that this quantizer can use, at most."""
        raise NotImplementedError

    def split(
        self, x: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[tuple[Tensor, ...], Symbols | None] | None:
        """All sections but the symbols, and the symbols; None for these where none are needed, for all when zero."""
        raise NotImplementedError

    def join(
        self, side: tuple[Tensor, ...], reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        """Decode from the other sections and coded symbols (None: the section is empty)."""
        raise NotImplementedError

    def describe(self, side: tuple[Tensor, ...], n: int) -> dict[str, Any]:
        """What the other sections say, for ``laconic.explain``."""
        return {}

    def alphabet(self, side: tuple[Tensor, ...]) -> int:
        """Symbols that this packet tells apart."""
        return self.max_alphabet

    def packed_bits(self, side: tuple[Tensor, ...], n: int) -> float:
        """Bits of a symbol where no coder takes its place."""
        return symbol_bits(self.alphabet(side))

    def packed_symbols(self, packed: Tensor, side: tuple[Tensor, ...], n: int, kernels: Kernels) -> Tensor:
        """The symbols out of a section that was not coded, one element each."""
        return kernels.unpack_symbols(packed, n, self.alphabet(side), False)


class Coder(Stage):
    """The symbols of a quantizer -> a section, without loss."""

    kind: ClassVar[str] = "coder"

    def limit(self, n: int, alphabet: int) -> int:
        """The most bytes that n symbols can take, and encoding them need."""
        raise NotImplementedError

    def encode(self, symbols: Symbols, kernels: Kernels, arena: Arena) -> Tensor:
        raise NotImplementedError

    def decode(self, section: Tensor, n: int, alphabet: int, kernels: Kernels) -> Tensor:
        """The symbols, one element each; ``FrameError`` when the section lies."""
        raise NotImplementedError

    def decode_values(
        self, section: Tensor, table: Tensor, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        """The table's entry for each symbol, stored or added ``weight`` times."""
        values = table.to(out.device)[self.decode(section, out.numel(), table.numel(), kernels).long()]
        if weight is None:
            out.copy_(values)
        else:
            out.add_(values * torch.tensor(weight, dtype=torch.float32, device=out.device))


class ChannelStage(Stage):
    """Memory that a channel keeps per slot; see ``laconic.channels``."""

    kind: ClassVar[str] = "channel"


@runtime_checkable
class Codec(Protocol):
    """Maps a tensor to a packet and back. ``str(codec)`` is its canonical spec."""

    def encode(self, x: Tensor, *, seed: int = 0, arena: Arena | None = None) -> Packet: ...
    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor: ...
    def accumulate(self, packet: Packet, out: Tensor, weight: float = 1.0) -> None: ...
    def max_section_nbytes(self, spec: TensorSpec) -> tuple[int, ...]: ...
