"""Stages and codecs: the classes that a codec, here or in another package, implements.

A *stage* is a frozen dataclass whose fields are its arguments in a spec. Its base class decides its place in a chain:

- ``Selector``: keeps some of the values and writes their positions (one section).
- ``ValueStage``: writes float values as bytes; a cast, or a ``Quantizer``, which writes each value as a symbol.
- ``Coder``: writes the symbols of a quantizer in fewer bytes, without loss.
- ``ChannelStage``: memory of a channel (error feedback, momentum). It writes no bytes.

What a stage can do beyond that is a property with a default (``copies_values``, ``needs_shape``, ``multi_tensor``, …).
``chain.Chain`` reads these properties and knows no concrete stage.

A codec is a chain of at most one selector, one value stage and, after a quantizer, one coder. Codecs have no state, do
not communicate, do not change their input, and take all randomness from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.errors import FrameError, NonFiniteError
from laconic.kernels.interface import NONFINITE, Grid, Kernels
from laconic.kernels.multi_tensor_interface import Addresses, MultiTensorKernels, Tensors
from laconic.kernels.sections import MAX_ALPHABET, packed_nbytes, symbol_bits
from laconic.packet import Arena, Packet, TensorSpec

__all__ = [
    "ChannelStage", "Codec", "Coder", "MultiTensorStage", "PackedSymbols", "Quantizer", "Selected", "Selector", "Stage",
    "SymbolReader", "Symbols", "ValueStage", "add_weighted", "require_finite",
]  # fmt: skip


def require_finite(amax_bits: int, n: int) -> None:
    """Raise ``NonFiniteError`` if the largest magnitude of n values is an infinity or a NaN."""
    if amax_bits >= NONFINITE:
        raise NonFiniteError(
            f"expected finite values, got a NaN or an infinity among {n} (or a value beyond float32). "
            "Find where it arises, or drop such rounds with nonfinite='skip'."
        )


def add_weighted(values: Tensor, out: Tensor, weight: float | None) -> None:
    """Store values in ``out``, or add ``weight`` times the values: two float32 roundings, no fused multiply-add."""
    if weight is None:
        out.copy_(values)
    else:
        out.add_(values * torch.tensor(weight, dtype=torch.float32, device=out.device))


class Stage:
    """One stage of a spec. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    """The stage's name in specs."""
    kind: ClassVar[str]
    summary: ClassVar[str]
    """One line for tables."""
    example: ClassVar[str]
    """A spec that uses the stage."""
    biased: ClassVar[bool | str] = False
    """False if the mean over seeds is the input; True if not; or a text that says when it is not."""
    summable: ClassVar[bool] = False
    """Whether packets can be added without decoding."""

    @property
    def is_biased(self) -> bool:
        """Whether the stage is biased with these arguments."""
        return bool(self.biased)

    @property
    def randomized(self) -> bool:
        """Whether the bytes depend on the seed."""
        return False

    @property
    def contractive(self) -> bool:
        """Whether the error of one encoding is smaller than its input, which error feedback needs."""
        return True


class Selected(NamedTuple):
    """The output of a selector: its section, the kept values, and the largest magnitude of the input."""

    section: Tensor
    values: Tensor
    amax_bits: int


class Selector(Stage):
    """Keeps some of the values and writes their positions into one section."""

    kind: ClassVar[str] = "selector"
    keeps_largest: ClassVar[bool] = False
    """Whether the largest magnitude of the input is among the kept values, if there are any."""

    def for_shape(self, shape: tuple[int, ...]) -> Selector:
        """Return the selector that encodes tensors of a shape; decoding needs none."""
        return self

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        """Select values of a flat tensor of any float dtype; the section is taken from the arena."""
        raise NotImplementedError

    def count(self, section: Tensor, n: int) -> int:
        """Return how many of n values the section places; ``FrameError`` if its header is invalid."""
        raise NotImplementedError

    def positions(self, section: Tensor, n: int, kernels: Kernels) -> Tensor:
        """Return the ascending positions that the section holds; ``FrameError`` if it is invalid."""
        raise NotImplementedError

    def max_kept(self, n: int) -> int:
        raise NotImplementedError

    def max_section_nbytes(self, n: int) -> int:
        raise NotImplementedError

    def fixed_count(self, n: int) -> int | None:
        """Return how many of n values every section of this encoder places; None if it depends on the data."""
        return None

    def gain(self, n: int) -> float:
        """Return the factor of decoded values."""
        return 1.0

    def without_gain(self) -> Selector:
        """Return the selector for use after error feedback, whose residual a gain above 1 would make grow."""
        return self

    def scatter(self, section: Tensor, values: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> bool:
        """Write values to the section's positions and zeros elsewhere; with a weight, add them to ``out``.

        Return False, and leave ``out`` alone, if the section places another number of values. Raise ``FrameError`` if
        the section is invalid or a value is not finite.
        """
        n = out.numel()
        if self.count(section, n) != values.numel():
            return False
        if not kernels.all_finite(values):
            raise FrameError("a value in the frame is not finite")
        gain = self.gain(n)
        if gain != 1.0:
            largest = torch.finfo(values.dtype).max
            values = (values * gain).clamp_(-largest, largest)
        positions = self.positions(section, n, kernels)
        kernels.scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
        return True


class ValueStage(Stage):
    """Writes float values into sections and reads them back."""

    num_sections: ClassVar[int]
    lossless: ClassVar[bool] = False
    """Keeps the dtype of the values: decodes into that dtype instead of float32."""
    copies_values: ClassVar[bool] = False
    """Its one section is the bytes of the values, so that a chain may copy and view them."""
    fixed_size: ClassVar[bool] = True
    """As many values take as many bytes, unless all of them are equal."""
    needs_shape: ClassVar[bool] = False
    """Needs the shape of a whole tensor, and so cannot follow a selector."""

    def for_shape(self, shape: tuple[int, ...]) -> ValueStage:
        """Return the stage for tensors of a shape, if ``needs_shape``."""
        return self

    @property
    def needs_gradient(self) -> bool:
        """Whether encoding needs the gradient of the tensor."""
        return False

    def with_gradient(self, gradient: Tensor | None) -> ValueStage:
        """Return the stage for one encoding, if ``needs_gradient``."""
        raise NotImplementedError

    @property
    def multi_tensor(self) -> MultiTensorStage | None:
        """The stage itself if it has multi-tensor kernels."""
        return None

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        """Return the sections of a flat tensor; an empty tuple if every value decodes to zero."""
        raise NotImplementedError

    def encode_feedback(
        self, x: Tensor, residual: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[Tensor, ...] | None:
        """Encode residual + x in one pass and leave the error in the residual; None if there is no such kernel."""
        return None

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        """Store into a flat tensor, or add ``weight`` times the values.

        The tensor is float32, or of ``dtype``, the packet's, if the stage is lossless.
        """
        raise NotImplementedError

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        """Return the most bytes of each section for n values of ``itemsize`` bytes."""
        raise NotImplementedError

    def accepts(self, section_nbytes: tuple[int, ...], n: int, itemsize: int) -> bool:
        """Return whether sections of these sizes can hold n values."""
        return section_nbytes == self.section_nbytes(n, itemsize)


class MultiTensorStage(Protocol):
    """A value stage whose kernels take many tensors in one launch.

    It has two sections of fixed sizes: the floats of all buckets, and the packed symbols. Kernels get them by address.
    """

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]: ...

    def quantize_all(
        self, tensors: Tensors, residuals: Tensors | None, kernels: MultiTensorKernels, seeds: Sequence[int] | Tensor,
        floats: Addresses, packed: Addresses, skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write both sections of each tensor; return the ``amax_bits`` of each, on the device.

        With residuals, encode residual + tensor and leave the error in the residual. Tensors whose amax bits in
        ``skip`` are not finite are left alone. Seeds may also be keys on the device, ``random.keys(…, ROUNDING)``.
        """
        ...

    def dequantize_all(
        self, floats: Addresses, packed: Addresses, kernels: MultiTensorKernels, outs: Tensors, weight: float | None,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Decode many; return a flag on the device that is not 0 if a section is invalid."""
        ...


class Symbols(NamedTuple):
    """Symbols of a quantizer: as integers, or as values and the grid that maps them to symbols."""

    alphabet: int
    source: Tensor
    """One symbol per element; or, with a grid, the values."""
    grid: Grid | None = None

    def materialize(self, kernels: Kernels) -> Tensor:
        """Return the symbols, one per element."""
        return self.source if self.grid is None else kernels.grid_symbols(self.source, self.grid)


class SymbolReader(Protocol):
    """Reads the section of symbols for a quantizer, coded or packed."""

    def symbols(self, n: int, alphabet: int) -> Tensor:
        """Return n symbols, one per element."""
        ...

    def values(self, table: Tensor, out: Tensor, weight: float | None) -> None:
        """Look each symbol up in a table of float32; store the entries, or add them ``weight`` times."""
        ...


class PackedSymbols(NamedTuple):
    """Reads symbols that no coder has coded: ``ceil(log2(alphabet))`` bits each."""

    packed: Tensor
    kernels: Kernels

    def symbols(self, n: int, alphabet: int) -> Tensor:
        self.check(n, alphabet)
        return self.kernels.unpack_symbols(self.packed, n, alphabet, False)

    def values(self, table: Tensor, out: Tensor, weight: float | None) -> None:
        self.check(out.numel(), table.numel())
        self.kernels.table_decode(self.packed, table, out, weight)

    def check(self, n: int, alphabet: int) -> None:
        expected = packed_nbytes(n, symbol_bits(alphabet))
        if self.packed.numel() != expected:
            raise FrameError(f"{n} symbols of {alphabet} take {expected} bytes, the frame has {self.packed.numel()}")


class Quantizer(ValueStage):
    """Writes each value as a symbol. The symbols are the last section; the sections before it are the *side*.

    ``encode`` and ``decode`` pack the symbols of ``to_symbols`` and ``from_symbols``; override them where one kernel
    quantizes and packs.
    """

    kind: ClassVar[str] = "quantizer"

    @property
    def max_alphabet(self) -> int:
        """The most symbols that a packet can use."""
        raise NotImplementedError

    def to_symbols(
        self, x: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[tuple[Tensor, ...], Symbols | None] | None:
        """Return the side sections and the symbols.

        The symbols are None if the side suffices (a constant tensor); the result is None if every value is zero.
        """
        raise NotImplementedError

    def from_symbols(
        self, side: tuple[Tensor, ...], reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        """Decode from the side sections and the symbols (None if their section is empty)."""
        raise NotImplementedError

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        quantized = self.to_symbols(x, kernels, arena, seed)
        if quantized is None:
            return ()
        side, symbols = quantized
        if symbols is None:
            return (*side, arena.take(0))
        packed = arena.take(packed_nbytes(x.numel(), symbol_bits(symbols.alphabet)))
        self.pack(x, symbols, kernels, packed)
        return (*side, packed)

    def pack(self, x: Tensor, symbols: Symbols, kernels: Kernels, packed: Tensor) -> None:
        """Write the packed symbols of x."""
        kernels.pack_symbols(symbols.materialize(kernels), symbols.alphabet, False, packed)

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        *side, packed = sections
        reader = PackedSymbols(packed, kernels) if packed.numel() else None
        self.from_symbols(tuple(side), reader, kernels, out, weight)

    def describe(self, side: tuple[Tensor, ...], n: int) -> dict[str, Any]:
        """Return what the side sections hold, for ``laconic.explain``."""
        return {}

    def alphabet(self, side: tuple[Tensor, ...]) -> int:
        """Return how many symbols this packet uses."""
        return self.max_alphabet

    def packed_bits(self, side: tuple[Tensor, ...], n: int) -> float:
        """Return the bits of a symbol without a coder."""
        return symbol_bits(self.alphabet(side))

    def packed_symbols(self, packed: Tensor, side: tuple[Tensor, ...], n: int, kernels: Kernels) -> Tensor:
        """Return the symbols of a section that no coder has coded, one per element."""
        return PackedSymbols(packed, kernels).symbols(n, self.alphabet(side))


class Coder(Stage):
    """Writes the symbols of a quantizer into one section, without loss."""

    kind: ClassVar[str] = "coder"
    max_alphabet: ClassVar[int] = MAX_ALPHABET
    """The most symbols that it can tell apart."""
    host_only: ClassVar[bool] = False
    """Has no kernels for devices: packets are decoded on the host."""

    def max_nbytes(self, n: int, alphabet: int) -> int:
        """Return the most bytes that n symbols can take, which are allocated before encoding."""
        raise NotImplementedError

    def encode(self, symbols: Symbols, kernels: Kernels, arena: Arena) -> Tensor:
        raise NotImplementedError

    def decode(self, section: Tensor, n: int, alphabet: int, kernels: Kernels) -> Tensor:
        """Return n symbols below ``alphabet``, one per element; ``FrameError`` if the section is invalid."""
        raise NotImplementedError

    def decode_values(
        self, section: Tensor, table: Tensor, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        """Look each symbol up in a table of float32; store the entries, or add them ``weight`` times."""
        symbols = self.decode(section, out.numel(), table.numel(), kernels)
        add_weighted(table.to(out.device)[symbols.long()], out, weight)

    def chunk_modes(self, section: Tensor, n: int, kernels: Kernels) -> dict[str, int]:
        """Return how many chunks were coded in which way, for ``laconic.explain``."""
        return {}


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
