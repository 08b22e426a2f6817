"""Senders and receivers of stages by the name of their codec, and those of transform coding, ``klt``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from laconic import counters, wire
from laconic.codecs import codec
from laconic.errors import ConfigError, FrameError, NonFiniteError
from laconic.frames import write_frame
from laconic.packet import TensorSpec
from laconic.pipeline.messages import (
    COUNT_NBYTES,
    Direction,
    Position,
    Receiver,
    Sender,
    WireStats,
    count_bytes,
    is_void,
    open_expected,
    require_zeros,
    stage_codec,
)
from laconic.pipeline.transform import FIRST, NAME, Transform, layout_of, transform_bits

__all__ = ["TransformReceiver", "TransformSender", "Transforms", "make_receiver", "make_sender"]


class Transforms:
    """The transforms of one end by tensor of a stage."""

    def __init__(self, bits: float) -> None:
        self.bits = bits
        self.by_tensor: dict[int, Transform] = {}

    def of(self, position: Position, spec: TensorSpec) -> Transform | str:
        layout = layout_of(self.bits, spec)
        if isinstance(layout, str):
            return layout
        known = self.by_tensor.get(position.tensor)
        if known is None or known.layout != layout:
            if known is not None:
                counters.count("transform_resets", 1, f"a tensor between stages has another shape: {NAME} begins again")
            known = self.by_tensor[position.tensor] = Transform(layout)
        return known


class TransformSender(Sender):
    """Encodes the tensors that one stage sends in one direction by ``klt``."""

    def __init__(
        self, bits: float, direction: Direction, stage: int, *, seed: int = 0, error_every: int = 0,
        stats: WireStats | None = None,
    ) -> None:  # fmt: skip
        super().__init__(codec(FIRST), direction, stage, seed=seed, error_every=error_every, stats=stats)
        self.text = f"{NAME}:{bits:g}"
        self.transforms = Transforms(bits)

    def _nbytes(self, spec: TensorSpec, position: Position) -> int | str:
        transform = self.transforms.of(position, spec)
        return transform if isinstance(transform, str) else transform.layout.nbytes(transform.number)

    def _write(self, x: Tensor, message: Tensor, position: Position, sample: int | str | None, training: bool) -> None:
        transform = self.transforms.of(position, TensorSpec.of(x))
        assert isinstance(transform, Transform)
        layout, seed = transform.layout, self._seed(position)
        values = x.to(torch.float32).reshape(layout.tokens, layout.width)
        frames, rest = message[COUNT_NBYTES : -layout.carried_nbytes], message[-layout.carried_nbytes :]
        message[:COUNT_NBYTES].copy_(count_bytes(transform.number))
        rest.zero_()
        used, decoded = 0, []
        measured = self.error_every and training and self.sent[position] % self.error_every == 0
        try:
            for chain, part in transform.encoded(values):
                nbytes, packet = write_frame(part, chain, frames[used:], seed=seed)
                used += nbytes
                if measured:
                    decoded.append(chain.decode(packet))
        except NonFiniteError:
            self._write_nonfinite(frames)
        else:
            frames[used:].zero_()
            if training:
                transform.observe(values)
            if measured:
                self._measure(values, transform.decoded(decoded))
        if training:
            carried = transform.carried()
            if carried is not None:
                rest[: carried.numel()].copy_(carried)
            transform.renew()


class TransformReceiver(Receiver):
    """Decodes the messages that one stage receives in one direction by ``klt``."""

    def __init__(
        self, bits: float, direction: Direction, stage: int, *, nonfinite: str = "spread",
        stats: WireStats | None = None,
    ) -> None:  # fmt: skip
        super().__init__(codec(FIRST), direction, stage, nonfinite=nonfinite, stats=stats)
        self.transforms = Transforms(bits)
        self.posted: Counter[int] = Counter()
        """Messages of each tensor whose size was asked for."""

    def count_posted(self) -> None:
        """Begin with the numbers of a loaded state."""
        self.posted = Counter({tensor: each.number for tensor, each in self.transforms.by_tensor.items()})

    def expected_nbytes(self, spec: TensorSpec, position: Position, *, training: bool = True) -> int | str:
        transform = self.transforms.of(position, spec)
        if isinstance(transform, str):
            return transform
        if transform.number == 0 and self.posted[position.tensor] >= transform.layout.period:
            self.posted[position.tensor] = 0  # another shape: both ends begin again
        number = self.posted[position.tensor]
        self.posted[position.tensor] += training
        return transform.layout.nbytes(number)

    def _read(self, message: Tensor, out: Tensor, position: Position, sample: int | str | None, training: bool) -> None:
        transform = self.transforms.of(position, TensorSpec.of(out))
        assert isinstance(transform, Transform)
        layout = transform.layout
        if message.numel() != layout.nbytes(transform.number):
            raise FrameError(f"a message has {layout.nbytes(transform.number)} bytes, got {message.numel()}")
        number = int.from_bytes(bytes(message[:COUNT_NBYTES].tolist()), "little")
        if number != transform.number:
            raise FrameError(
                f"the sender has sent {number} messages of this tensor, the receiver has read {transform.number}: load "
                "the state of the same step on all stages"
            )
        rest, carried = message[COUNT_NBYTES : -layout.carried_nbytes], message[-layout.carried_nbytes :]
        parts: list[Tensor] | None = []
        for chain, spec in transform.shapes():
            used = wire.frame_nbytes(rest)
            if is_void(rest[:used]):
                parts, rest = None, rest[used:]
                break
            assert parts is not None
            parts.append(chain.decode(open_expected(rest[:used], chain, spec).to(out.device)))
            rest = rest[used:]
        require_zeros(rest)
        if parts is not None:
            values = transform.decoded(parts).reshape(out.shape)
        if training:
            transform.receive(carried)
        if parts is None:
            self._read_nonfinite(out)
        else:
            out.copy_(values)


def make_sender(spec: str, direction: Direction, stage: int, *, delta: bool = False, **options: Any) -> Sender:
    """Return the end that sends by a codec; ``Sender`` describes the options."""
    bits = transform_bits(spec)
    if bits is None:
        return Sender(stage_codec(spec, direction), direction, stage, delta=delta, **options)
    if delta:
        raise ConfigError(f"delta=True needs a codec without a memory of its own, got {spec!r}: use 'thc:2', …")
    return TransformSender(bits, direction, stage, **options)


def make_receiver(spec: str, direction: Direction, stage: int, *, delta: bool = False, **options: Any) -> Receiver:
    """Return the end that receives what ``make_sender`` sends."""
    bits = transform_bits(spec)
    if bits is None:
        return Receiver(stage_codec(spec, direction), direction, stage, delta=delta, **options)
    return TransformReceiver(bits, direction, stage, **options)
