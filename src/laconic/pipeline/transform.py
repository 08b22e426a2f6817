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
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

from laconic import counters
from laconic.codecs import Chain, codec
from laconic.errors import ConfigError, FrameError, InputError, NonFiniteError
from laconic.frames import max_nbytes
from laconic.packet import FLOATS, Packet, TensorSpec
from laconic.pipeline.messages import COUNT_NBYTES
from laconic.wire import MAX_NUMEL

__all__ = ["FIRST", "NAME", "Basis", "Layout", "Role", "Transform", "allocate", "layout_of", "transform_bits"]

Role = Literal["sender", "receiver"]

NAME: Final = "klt"
FIRST: Final = "thc:8"
MAX_BITS: Final = 12
BLOCK: Final = 1024
"""Values of a block of ``thc``: directions get their bits in units that fill one."""
MIN_PERIOD, SHARE = 64, 0.02
"""Messages that carry a basis: at least so many, and so many that it takes at most this share of the frames."""
MAX_PERIOD: Final = 1 << 14
MAX_WIDTH: Final = 8192
"""Channels: at the most a matrix of second moments takes 512 MiB."""
MAX_MOMENT: Final = 1e100
"""Far above the second moments of float32 values, and low enough for their eigenvectors to be computed."""
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
        frames: Bytes for the frames of a message.
    """

    tokens: int
    width: int
    frames: int

    @cached_property
    def unit(self) -> int:
        """Neighbouring directions that get equally many bits."""
        return min(self.width, -(-BLOCK // self.tokens))

    @cached_property
    def period(self) -> int:
        """Messages in which the rows of a basis travel."""
        return max(MIN_PERIOD, math.ceil(2 * self.width * self.width / (SHARE * self.frames)))

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

    def refusal(self) -> str | None:
        """Return why such a tensor travels as it is; None if nothing in these sizes forbids a basis."""
        if self.width > MAX_WIDTH:
            return f"has more than {MAX_WIDTH} channels"
        if self.group_nbytes(1, self.unit) > self.frames:
            return "is too small to be compressed"
        if self.period > MAX_PERIOD:
            return f"needs more than {MAX_PERIOD} messages for a basis"
        return None

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
    layout = Layout(spec.numel // width, width, math.ceil(spec.numel * bits / 8))
    reason = layout.refusal()
    if reason is None and max(map(layout.nbytes, (0, 2 * layout.period))) >= spec.nbytes:
        reason = "is too small to be compressed"
    return layout if reason is None else reason


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
        return _contiguous(self.rows[:, :-1]).view(torch.float16).float()

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
        return cls.of_directions(vectors.flip(1).T, energy.flip(0).clamp_min(0.0), layout)

    @classmethod
    def of_directions(cls, vectors: Tensor, energy: Tensor, layout: Layout) -> Basis:
        """Return the basis of unit vectors, one in each row, by falling energy. It is on the CPU."""
        rows = torch.empty(layout.width, layout.row_nbytes, dtype=torch.uint8)
        rows[:, :-1] = _contiguous(vectors.to(torch.float16).cpu()).view(torch.uint8)
        rows[:, -1] = allocate(energy, layout).to(rows)
        return cls(rows, layout)

    def check(self) -> Basis:
        """Raise ``FrameError`` unless the rows are those of a sender, or the first ones of them."""
        bits = self.rows[:, -1].long()
        if not bool((self.vectors.abs() <= 1.0).all()):
            raise FrameError("a direction of the basis must be a unit vector")
        if not 1 <= int(bits[0]) <= MAX_BITS or bool((bits[1:] > bits[:-1]).any()):
            raise FrameError(f"the bits of directions must not grow, and those of the first be 1 to {MAX_BITS}")
        if self.layout.frames_nbytes(bits.cpu()) > self.layout.frames:
            raise FrameError(f"the directions take more than the {self.layout.frames} bytes of a message")
        return self


def _contiguous(x: Tensor) -> Tensor:
    """Return a copy with the strides of its shape, which ``view`` needs: ``contiguous`` keeps those of a single row."""
    return x.detach().clone(memory_format=torch.contiguous_format)


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
        next: The basis that travels; the receiver's has as many rows as have arrived. Always on the CPU.
        moments: Second moments of what was sent; the sender's alone.
    """

    SAVED: ClassVar = ("number", "layout", "basis", "next", "moments")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.number = 0
        self.basis: Basis | None = None
        self.next: Tensor | None = None
        self.moments: Tensor | None = None

    @property
    def _carried_before(self) -> int:
        """Bytes of the next basis that travelled before the current message."""
        return self.number % self.layout.period * self.layout.carried_nbytes

    def carried(self) -> Tensor | None:
        """Return the bytes of the next basis that travel in the current message, as a view; None if there is none."""
        if self.next is None:
            return None
        return self.next.view(-1)[self._carried_before :][: self.layout.carried_nbytes]

    def observe(self, values: Tensor) -> None:
        """Add some of the tokens to the second moments."""
        layout = self.layout
        stride = max(1, layout.tokens // -(-SAMPLED * layout.width // layout.period))
        sampled = values[self.number % stride :: stride].double()
        if self.moments is None:
            self.moments = sampled.new_zeros(layout.width, layout.width)
        self.moments = self.moments.to(values.device).addmm_(sampled.T, sampled)

    def renew(self) -> None:
        """After the sender's message: the basis that has travelled serves, and the next one is computed."""
        self.number += 1
        if self.number % self.layout.period:
            return
        if self.next is not None:
            self.basis = Basis(self.next, self.layout)
        width = self.layout.width
        if self.moments is None:  # nothing was finite
            self.moments = torch.eye(width, dtype=torch.float64)
        try:
            self.next = Basis.of_moments(self.moments, self.layout).rows
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            counters.count(
                "transform_failures", 1, f"{NAME} keeps a basis: eigenvectors of the next one could not be computed"
            )
            if self.next is None:
                self.next = Basis.of_directions(torch.eye(width), torch.ones(width), self.layout).rows
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
        directions = self._vectors_on(values.device) @ values.T
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

    def decoded(self, packets: Sequence[tuple[Chain, Packet]], device: torch.device) -> Tensor:
        """Return the tensor of the packets of a message, as a matrix on a device."""
        rows = sum(packet.spec.shape[0] for _, packet in packets)
        coded = torch.empty(rows, packets[0][1].spec.shape[1], device=device)
        first = 0
        for chain, packet in packets:
            last = first + packet.spec.shape[0]
            chain.decode(packet.to(device), out=coded[first:last])
            first = last
        return coded if self.basis is None else coded.T @ self._vectors_on(device)[:rows]

    def _vectors_on(self, device: torch.device) -> Tensor:
        assert self.basis is not None
        if self.basis.rows.device != device:  # received, computed or loaded on the CPU
            self.basis = Basis(self.basis.rows.to(device), self.layout)
        return self.basis.vectors

    # ------------------------------------------------------------------------------------------------- checkpoints

    def shared(self) -> list[int]:
        """Return what must be equal on both ends: sizes, number of the message, and a checksum of the bases."""
        layout, checksum = self.layout, 0
        if self.basis is not None:
            checksum = zlib.crc32(self.basis.rows.cpu().numpy().tobytes())
        if self.next is not None:
            checksum = zlib.crc32(self.next.view(-1)[: self._carried_before].numpy().tobytes(), checksum)
        return [layout.tokens, layout.width, layout.frames, self.number, checksum]

    def save(self) -> dict[str, Tensor]:
        """Return the state by the names of ``SAVED``."""
        layout, basis = self.layout, None if self.basis is None else self.basis.rows
        optional = {"basis": basis, "next": self.next, "moments": self.moments}
        return {
            "number": torch.tensor(self.number), "layout": torch.tensor([layout.tokens, layout.width, layout.frames]),
            **{name: x.clone() for name, x in optional.items() if x is not None},
        }  # fmt: skip

    @classmethod
    def load(cls, saved: Mapping[str, Tensor], where: str, role: Role) -> Transform:
        """Return what ``save`` saved; ``InputError`` if it cannot be that.

        Args:
            where: Names the state in errors.
            role: The end whose state it is.
        """

        def field(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            x = saved.get(name)
            dense = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta
            if x is None or not dense or x.dtype != dtype or tuple(x.shape) != shape:
                raise InputError(f"'{where}/{name}' in the saved state must be dense {dtype} of shape {list(shape)}")
            return _contiguous(x)

        number, sizes = int(field("number", torch.int64)), field("layout", torch.int64, 3).tolist()
        tokens, width, frames = sizes
        if number < 0 or min(sizes) < 1 or not frames <= tokens * width <= MAX_NUMEL or Layout(*sizes).refusal():
            raise InputError(f"'{where}' in the saved state holds impossible sizes")
        transform = cls(Layout(*sizes))
        transform.number, period = number, transform.layout.period
        sends, row_nbytes = role == "sender", transform.layout.row_nbytes
        present = {
            "basis": number >= 2 * period, "next": number >= period and (sends or number % period > 0),
            "moments": sends and (number >= period or "moments" in saved),
        }  # fmt: skip
        for name, expected in present.items():
            if (name in saved) != expected:
                raise InputError(f"'{where}/{name}' in the saved state does not belong to message {number} of a {role}")
        if "moments" in saved:
            transform.moments = field("moments", torch.float64, width, width)
            if not bool((transform.moments.abs() <= MAX_MOMENT).all()):
                raise NonFiniteError(f"'{where}/moments' in the saved state must be at most {MAX_MOMENT:g}")
        try:
            if "basis" in saved:
                basis = Basis(field("basis", torch.uint8, width, row_nbytes).cpu(), transform.layout)
                transform.basis = basis.check()
            if "next" in saved:
                transform.next = field("next", torch.uint8, width, row_nbytes).cpu()
                transform._check_next(role)
        except FrameError as error:
            raise InputError(f"a basis of '{where}' in the saved state: {error}") from None
        return transform

    def _check_next(self, role: Role) -> None:
        """Raise ``FrameError`` unless the next basis is one of which so much has travelled."""
        assert self.next is not None
        travelled = self.layout.width
        if role == "receiver":
            if bool(self.next.view(-1)[self._carried_before :].any()):
                raise FrameError("it holds more than has travelled")
            travelled = min(travelled, self._carried_before // self.layout.row_nbytes)
        if travelled:
            Basis(self.next[:travelled], self.layout).check()
