"""Transform coding of activations: bits for the directions in which they vary (Karhunen-Loève transform).

The channels of activations vary together, so that few directions hold most of their energy. Other codecs spread their
error over all directions alike, and it covers what varies little. Here both ends rotate by the eigenvectors of the
second moments, and each direction gets the bits that its energy is worth (reverse water-filling); what is below the
error gets none. Directions with equally many bits are a frame of ``thc``.

The sender computes the eigenvectors. They travel a part in each message and serve from the message after the last part
on; until then messages are coded by ``FIRST``. So the sizes of all messages follow from codec, shape and number of the
message. A message holds that number (8 bytes), frames and zeros, and a part of the next basis, whose rows are float16
values and a byte with the bits of a direction.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Final

import torch
from torch import Tensor

from laconic.codecs import Chain, codec
from laconic.errors import ConfigError, FrameError, InputError, NonFiniteError
from laconic.frames import max_nbytes
from laconic.packet import FLOATS, TensorSpec
from laconic.pipeline.messages import COUNT_NBYTES

__all__ = ["FIRST", "NAME", "Basis", "Layout", "Transform", "allocate", "layout_of", "transform_bits"]

NAME: Final = "klt"
FIRST: Final = "thc:8"
MAX_BITS: Final = 12
BLOCK: Final = 1024
"""Values of a block of ``thc``: directions get their bits in units that fill one."""
MIN_PERIOD, SHARE = 64, 0.02
"""Messages that carry a basis: at least so many, and so many that it takes at most this share of the frames."""
SAMPLED = 8
"""Tokens for each channel, from which second moments are computed."""
FADE = 0.5
"""What is left of earlier second moments when a basis is computed."""
SEARCH_STEPS = 48


def transform_bits(spec: str) -> float | None:
    """Return the bits a value of ``klt:bits``; None if it is another codec."""
    name, colon, text = spec.partition(":")
    if name != NAME:
        return None
    try:
        bits = float(text) if colon else 4.0
    except ValueError:
        bits = math.nan
    if not 0 < bits <= 8:
        raise ConfigError(f"bits of {NAME!r} must be above 0 and at most 8, such as 'klt:2' or 'klt:0.5', got {text!r}")
    return bits


@dataclass(frozen=True)
class Layout:
    """The sizes of the messages of one tensor.

    Args:
        tokens, width: The tensor as a matrix.
        unit: Neighbouring directions that get equally many bits.
        frames: Bytes for the frames of a message.
        period: Messages in which the rows of a basis travel.
    """

    tokens: int
    width: int
    unit: int
    frames: int
    period: int

    @property
    def row_nbytes(self) -> int:
        return 2 * self.width + 1

    @property
    def carried_nbytes(self) -> int:
        """Bytes of a basis in one message."""
        return -(-self.width * self.row_nbytes // self.period)

    def nbytes(self, number: int) -> int:
        """Return the bytes of a message by its number."""
        frames = _first_nbytes(self) if number < 2 * self.period else self.frames
        return COUNT_NBYTES + frames + self.carried_nbytes

    def group_nbytes(self, bits: int, directions: int) -> int:
        return max_nbytes(f"thc:{bits}", TensorSpec((directions, self.tokens), torch.float32))

    def frames_nbytes(self, bits: Tensor) -> int:
        """Return the bytes of the frames of all directions."""
        counts = torch.bincount(bits, minlength=MAX_BITS + 1).tolist()
        return sum(self.group_nbytes(each, count) for each, count in enumerate(counts) if each and count)


def _first_nbytes(layout: Layout) -> int:
    return max_nbytes(FIRST, TensorSpec((layout.tokens, layout.width), torch.float32))


@lru_cache(maxsize=1024)
def layout_of(bits: float, spec: TensorSpec) -> Layout | str:
    """Return the sizes for a tensor, or the reason why it travels as it is."""
    if spec.dtype not in FLOATS:
        return f"is {str(spec.dtype).removeprefix('torch.')}"
    if len(spec.shape) < 2 or not spec.numel:
        return "has no channels"
    width = spec.shape[-1]
    tokens, frames = spec.numel // width, math.ceil(spec.numel * bits / 8)
    unit = min(width, -(-BLOCK // tokens))
    layout = Layout(tokens, width, unit, frames, max(MIN_PERIOD, math.ceil(2 * width * width / (SHARE * frames))))
    fits = layout.group_nbytes(1, unit) <= frames and max(map(layout.nbytes, (0, 2 * layout.period))) < spec.nbytes
    return layout if fits else "is too small to be compressed"


@dataclass(frozen=True, eq=False)
class Basis:
    """Directions, by falling energy, and the bits of each: as both ends hold it.

    Args:
        rows: [directions, row_nbytes] of uint8, as they travel.
    """

    rows: Tensor
    layout: Layout

    @cached_property
    def vectors(self) -> Tensor:
        return self.rows[:, :-1].contiguous().view(torch.float16).float()

    @cached_property
    def groups(self) -> list[tuple[Chain, int, int]]:
        """The codec of each group of directions, and the first and the last one."""
        ends = torch.cumsum(torch.bincount(self.rows[:, -1].cpu().long(), minlength=MAX_BITS + 1).flip(0), 0).tolist()
        bounds = [0, *ends]
        return [
            (codec(f"thc:{MAX_BITS - number}"), bounds[number], bounds[number + 1])
            for number in range(MAX_BITS)
            if bounds[number] < bounds[number + 1]
        ]

    @classmethod
    def of_moments(cls, moments: Tensor, layout: Layout) -> Basis:
        """Compute the eigenvectors of a matrix of second moments, and their bits."""
        energy, vectors = torch.linalg.eigh(moments)
        energy, vectors = energy.flip(0).clamp_min(0.0), vectors.flip(1).T
        rows = torch.empty(layout.width, layout.row_nbytes, dtype=torch.uint8, device=moments.device)
        rows[:, :-1] = vectors.to(torch.float16).contiguous().view(torch.uint8)
        rows[:, -1] = allocate(energy, layout).to(rows)
        return cls(rows, layout)

    def check(self) -> Basis:
        """Raise ``FrameError`` unless the rows are those of a sender."""
        bits = self.rows[:, -1].long()
        if not bool(torch.isfinite(self.vectors).all()):
            raise FrameError("a direction of the basis is not finite")
        if not 1 <= int(bits[0]) <= MAX_BITS or bool((bits[1:] > bits[:-1]).any()):
            raise FrameError(f"the bits of directions must not grow, and those of the first be 1 to {MAX_BITS}")
        if self.layout.frames_nbytes(bits.cpu()) > self.layout.frames:
            raise FrameError(f"the directions take more than the {self.layout.frames} bytes of a message")
        return self


def allocate(energy: Tensor, layout: Layout) -> Tensor:
    """Return the bits of each direction: an error that is the same for all, as small as the bytes allow.

    Args:
        energy: By direction, falling.
    """
    units = torch.arange(layout.width) // layout.unit
    means = torch.bincount(units, weights=energy.double().cpu()) / torch.bincount(units)
    logs = torch.log2(means / means[0].clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(-2.0 * MAX_BITS) / 2

    def bits_above(error: float) -> Tensor:
        return (logs - error).round().clamp(0, MAX_BITS).long()

    def fits(bits: Tensor) -> bool:
        return layout.frames_nbytes(bits[units]) <= layout.frames

    # Halves of the base-2 logarithms of energies over the first one; at the lower end every direction has most bits.
    low, high = -3.0 * MAX_BITS, 0.5
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(bits_above(middle)) else (middle, high)
    # Many directions may be alike: the first of them get one bit more, as many as fit.
    fewer, more = bits_above(high), bits_above(low)
    count = bisect.bisect_left(range(1, len(means) + 1), True, key=lambda n: not fits(_mixed(more, fewer, n)))
    bits = _mixed(more, fewer, count)
    if not bool(bits.any()):
        bits[0] = 1  # always fits: see layout_of
    return bits[units]


def _mixed(more: Tensor, fewer: Tensor, count: int) -> Tensor:
    return torch.cat((more[:count], fewer[count:]))


class Transform:
    """What one end knows of one tensor of a stage.

    Args:
        moments: Second moments of what was sent; the sender's alone.
    """

    SAVED: ClassVar = ("number", "layout", "basis", "next", "moments")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.number = 0
        self.basis: Basis | None = None
        self.next: Tensor | None = None
        self.moments: Tensor | None = None

    def carried(self) -> Tensor | None:
        """Return the bytes of the next basis that travel in the current message, as a view; None if there is none."""
        if self.next is None:
            return None
        first = self.number % self.layout.period * self.layout.carried_nbytes
        return self.next.view(-1)[first : first + self.layout.carried_nbytes]

    def observe(self, values: Tensor) -> None:
        """Add some of the tokens to the second moments."""
        layout = self.layout
        stride = max(1, layout.tokens // -(-SAMPLED * layout.width // layout.period))
        sampled = values[self.number % stride :: stride].double()
        moments = sampled.T @ sampled
        self.moments = moments if self.moments is None else self.moments.to(values.device) + moments

    def renew(self) -> None:
        """After the sender's message: the basis that has travelled serves, and the next one is computed."""
        self.number += 1
        if self.number % self.layout.period == 0:
            if self.next is not None:
                self.basis = Basis(self.next, self.layout)
            if self.moments is None:  # nothing was finite
                self.moments = torch.eye(self.layout.width, dtype=torch.float64)
            self.next = Basis.of_moments(self.moments, self.layout).rows
            self.moments *= FADE

    def receive(self, carried: Tensor) -> None:
        """After the receiver's message: keep its part of the next basis, which serves when all of it is there."""
        layout = self.layout
        if self.number >= layout.period:
            if self.next is None:
                self.next = torch.zeros(layout.width, layout.row_nbytes, dtype=torch.uint8)
            part = self.carried()
            assert part is not None
            part.copy_(carried[: part.numel()])
            if (self.number + 1) % layout.period == 0:
                self.basis, self.next = Basis(self.next, layout).check(), None
        self.number += 1

    def encoded(self, values: Tensor) -> list[tuple[Chain, Tensor]]:
        """Return the tensors of the frames of a message with their codecs."""
        if self.basis is None:
            return [(codec(FIRST), values)]
        self._move_to(values.device)
        directions = self.basis.vectors @ values.T
        return [(chain, directions[first:last]) for chain, first, last in self.basis.groups]

    def shapes(self) -> list[tuple[Chain, TensorSpec]]:
        """Return the codecs of the frames of a message, and what each of them holds."""
        layout = self.layout
        if self.basis is None:
            return [(codec(FIRST), TensorSpec((layout.tokens, layout.width), torch.float32))]
        return [
            (chain, TensorSpec((last - first, layout.tokens), torch.float32))
            for chain, first, last in self.basis.groups
        ]

    def decoded(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor of the frames of a message, as a matrix."""
        if self.basis is None:
            return parts[0]
        self._move_to(parts[0].device)
        directions = torch.cat(tuple(parts))
        return directions.T @ self.basis.vectors[: len(directions)]

    def _move_to(self, device: torch.device) -> None:
        if self.basis is not None and self.basis.rows.device != device:  # received, or loaded, on the CPU
            self.basis = Basis(self.basis.rows.to(device), self.layout)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> dict[str, Tensor]:
        """Return the state by the names of ``SAVED``."""
        layout, basis = self.layout, None if self.basis is None else self.basis.rows
        fields = [layout.tokens, layout.width, layout.unit, layout.frames, layout.period]
        optional = {"basis": basis, "next": self.next, "moments": self.moments}
        return {
            "number": torch.tensor(self.number), "layout": torch.tensor(fields),
            **{name: x.clone() for name, x in optional.items() if x is not None},
        }  # fmt: skip

    @classmethod
    def load(cls, saved: Mapping[str, Tensor], where: str) -> Transform:
        """Return what ``save`` saved; ``InputError`` if it cannot be that.

        Args:
            where: Names the state in errors.
        """

        def field(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            x = saved.get(name)
            if not isinstance(x, Tensor) or x.dtype != dtype or tuple(x.shape) != shape or x.is_meta:
                raise InputError(f"'{where}/{name}' in the saved state must be {dtype} of shape {list(shape)}")
            return x.clone()

        number, sizes = int(field("number", torch.int64, ())), field("layout", torch.int64, (5,)).tolist()
        if number < 0 or min(sizes) < 1 or max(sizes) > 1 << 40:
            raise InputError(f"'{where}' in the saved state holds impossible sizes")
        transform = cls(Layout(*sizes))
        transform.number, width, row_nbytes = number, transform.layout.width, transform.layout.row_nbytes
        if "next" in saved:
            transform.next = field("next", torch.uint8, (width, row_nbytes))
        if "moments" in saved:
            transform.moments = field("moments", torch.float64, (width, width))
            if not bool(torch.isfinite(transform.moments).all()):
                raise NonFiniteError(f"'{where}/moments' in the saved state must be finite")
        if ("basis" in saved) != (number >= 2 * transform.layout.period):
            raise InputError(f"'{where}/basis' in the saved state does not belong to message {number}")
        if "basis" in saved:
            try:
                transform.basis = Basis(field("basis", torch.uint8, (width, row_nbytes)), transform.layout).check()
            except FrameError as error:
                raise InputError(f"'{where}/basis' in the saved state: {error}") from None
        return transform
