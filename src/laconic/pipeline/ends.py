"""Senders and receivers of stages by the name of their codec, and those of transform coding, ``klt``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic import counters, wire
from laconic.codecs import Chain, codec
from laconic.errors import ConfigError, FrameError, NonFiniteError
from laconic.frames import write_packet
from laconic.packet import Packet, TensorSpec
from laconic.pipeline.messages import (
    COUNT_NBYTES,
    Direction,
    Position,
    Receiver,
    Sender,
    WireStats,
    copy_saturated,
    count_bytes,
    is_void,
    open_expected,
    require_zeros,
    stage_codec,
)
from laconic.pipeline.transform import FIRST, NAME, Layout, Transform, layout_of, transform_bits

__all__ = ["TransformReceiver", "TransformSender", "Transforms", "make_receiver", "make_sender"]


class Transforms:
    """The transforms of one end by tensor of a stage."""

    def __init__(self, bits: float) -> None:
        self.bits = bits
        self.by_tensor: dict[int, Transform] = {}

    def of(self, position: Position, layout: Layout, training: bool) -> Transform:
        """Return the transform of a tensor; training begins one where there is none, evaluation leaves no trace."""
        known = self.by_tensor.get(position.tensor)
        if known is not None and known.layout == layout:
            return known
        fresh = Transform(layout)
        if training:
            if known is not None:
                counters.count(
                    "transform_resets",
                    1,
                    f"a tensor between stages has another shape or other bits: {NAME} begins again",
                )
            self.by_tensor[position.tensor] = fresh
        return fresh

    def layout(self, x: Tensor) -> Layout:
        """Return the sizes of a tensor that is compressed."""
        layout = layout_of(self.bits, TensorSpec.of(x))
        assert isinstance(layout, Layout)
        return layout


class TransformSender(Sender):
    """Encodes the tensors that one stage sends in one direction by ``klt``."""

    def __init__(
        self, bits: float, direction: Direction, stage: int, *, seed: int = 0, error_every: int = 0,
        stats: WireStats | None = None,
    ) -> None:  # fmt: skip
        super().__init__(codec(FIRST), direction, stage, seed=seed, error_every=error_every, stats=stats)
        self.text = f"{NAME}:{repr(bits).removesuffix('.0')}"
        self.transforms = Transforms(bits)

    def _nbytes(self, spec: TensorSpec, position: Position, training: bool) -> int | str:
        layout = layout_of(self.transforms.bits, spec)
        if isinstance(layout, str):
            return layout
        return layout.nbytes(self.transforms.of(position, layout, training).number)

    def _write(self, x: Tensor, message: Tensor, position: Position, sample: int | str | None, training: bool) -> None:
        layout, seed = self.transforms.layout(x), self._seed(position)
        transform = self.transforms.of(position, layout, training)
        if not training and not transform.number:
            counters.count(
                "transform_untrained", 1,
                f"stage {self.stage} evaluates a tensor that {NAME} has not seen in training, and codes it by "
                f"{FIRST!r}: a schedule without loss_fn never trains",
            )  # fmt: skip
        values = x.to(torch.float32).reshape(layout.tokens, layout.width)
        frames, rest = message[COUNT_NBYTES : -layout.carried_nbytes], message[-layout.carried_nbytes :]
        message[:COUNT_NBYTES].copy_(count_bytes(transform.number))
        rest.zero_()
        used = 0
        try:
            # All frames are encoded before the first one is copied: a copy from a GPU waits for it.
            packets = [(chain, chain.encode(part, seed=seed)) for chain, part in transform.encoded(values)]
        except NonFiniteError:
            self._write_nonfinite(frames)
        else:
            for _, packet in packets:
                used += write_packet(packet, frames[used:])
            frames[used:].zero_()
            if training:
                transform.observe(values)
                if self.error_every and self.sent[position] % self.error_every == 0:
                    self._measure(values, transform.decoded(packets, values.device))
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
        self.posted: dict[int, tuple[Layout, int]] = {}
        """By tensor: its sizes, and how many messages of these sizes are posted. Schedules read them later."""

    def count_posted(self) -> None:
        """Begin with the numbers of a loaded state."""
        self.posted = {tensor: (each.layout, each.number) for tensor, each in self.transforms.by_tensor.items()}

    def expected_nbytes(self, spec: TensorSpec, position: Position, *, training: bool = True) -> int | str:
        layout = layout_of(self.transforms.bits, spec)
        if isinstance(layout, str):
            return layout
        known, number = self.posted.get(position.tensor, (layout, 0))
        if known != layout:  # both ends begin again
            number = 0
        if training:
            self.posted[position.tensor] = layout, number + 1
        return layout.nbytes(number)

    def _read(self, message: Tensor, out: Tensor, position: Position, sample: int | str | None, training: bool) -> None:
        layout = self.transforms.layout(out)
        transform = self.transforms.of(position, layout, training)
        if message.numel() != layout.nbytes(transform.number):
            raise FrameError(f"a message has {layout.nbytes(transform.number)} bytes, got {message.numel()}")
        number = int.from_bytes(bytes(message[:COUNT_NBYTES].tolist()), "little")
        if number != transform.number:
            raise FrameError(
                f"the sender has sent {number} messages of this tensor, the receiver has read {transform.number}: load "
                "the state of the same step on all stages"
            )
        rest, carried = message[COUNT_NBYTES : -layout.carried_nbytes], message[-layout.carried_nbytes :]
        packets: list[tuple[Chain, Packet]] = []
        finite = True
        for chain, spec in transform.shapes():
            used = wire.frame_nbytes(rest)
            frame, rest = rest[:used], rest[used:]
            finite = not is_void(frame)
            if not finite:
                break
            packets.append((chain, open_expected(frame, chain, spec)))
        require_zeros(rest)
        values = transform.decoded(packets, out.device) if finite else out
        if training:
            transform.receive(carried)
        if finite:
            copy_saturated(values.reshape(out.shape), out)
        else:
            self._read_nonfinite(out)


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
