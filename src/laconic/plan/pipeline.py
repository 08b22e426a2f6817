"""The step time of a pipeline over a link, by codec: bytes of a micro-batch, and how long stages wait.

Stages compute micro-batches in the order of their schedule. A stage starts a micro-batch when it has computed the last
one and the message has arrived; it decodes what it receives and encodes what it sends, and messages of one direction
follow one another on their link. Sending does not stop a stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from laconic.errors import ConfigError
from laconic.packet import TensorSpec
from laconic.pipeline.messages import message_nbytes, stage_codec
from laconic.pipeline.transform import transform_bits
from laconic.plan.calibration import codec_points
from laconic.plan.profile import Point, Profile
from laconic.units import GOODPUT

__all__ = ["CODECS", "SCHEDULES", "PipelineRequest", "PipelineRow", "plan_pipeline", "step_seconds"]

CODECS = ("none", "bf16", "qsgd:8", "thc:4", "qsgd:4")
BACKWARD = 2.0
"""The time of a backward pass over that of a forward pass."""


@dataclass(frozen=True)
class PipelineRequest:
    """A pipeline for which codecs are compared.

    Args:
        activations: Values that a stage sends of a micro-batch, in float32; as many gradients come back.
        step_s: Seconds that one stage computes in a step, all micro-batches, forward and backward.
        rate: Bits per second of the link between two stages, in each direction.
        schedule: ``gpipe`` or ``1f1b``.
    """

    profile: Profile
    stages: int
    micro_batches: int
    activations: int
    step_s: float
    rate: float = 1e9
    round_trip_s: float = 0.0
    schedule: str = "1f1b"
    codecs: Sequence[str] = CODECS

    def __post_init__(self) -> None:
        for name, least in (("stages", 2), ("micro_batches", 1), ("activations", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.step_s < math.inf:
            raise ConfigError(f"the step time must be finite and above 0, got {self.step_s:g} s")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        for spec in self.codecs:
            if transform_bits(spec) is not None:
                raise ConfigError(
                    f"{spec!r} cannot be planned: its time depends on the width of activations, not on their number "
                    "alone. Leave it out, or measure it with laconic.pipeline.compress"
                )


@dataclass(frozen=True)
class PipelineRow:
    """A codec both ways: bytes of a micro-batch in one direction, the time of a step, and shares of it."""

    codec: str
    nbytes: float
    step_s: float
    speedup: float
    """Times as fast as ``none``."""
    waiting: float
    """Share of the step in which a stage, on average, neither computes nor encodes nor decodes."""

    def values(self) -> dict[str, Any]:
        return asdict(self)


def _gpipe(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    numbers = range(micro_batches)
    return [(True, number) for number in numbers] + [(False, number) for number in numbers]


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    ahead = min(micro_batches, stages - stage)
    order = [(True, number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append((False, number))
        if ahead + number < micro_batches:
            order.append((True, ahead + number))
    return order


SCHEDULES: dict[str, Callable[[int, int, int], list[tuple[bool, int]]]] = {
    "gpipe": _gpipe, "1f1b": _one_forward_one_backward,
}  # fmt: skip
"""By name: the order in which a stage computes its micro-batches, (forward, number)."""


def step_seconds(
    schedule: str, stages: int, micro_batches: int, *, forward_s: float, transfer_s: float, delay_s: float = 0.0,
    encode_s: float = 0.0, decode_s: float = 0.0,
) -> tuple[float, float]:  # fmt: skip
    """Return the seconds of a step, and the mean seconds for which a stage works in it.

    Args:
        forward_s: Seconds of a stage's forward pass of a micro-batch.
        transfer_s: Seconds for which a message occupies its link.
        delay_s: Seconds from one stage to another beside that.
        encode_s, decode_s: Of one message.
    """
    orders = [SCHEDULES[schedule](stage, stages, micro_batches) for stage in range(stages)]
    arrived: dict[tuple[int, bool, int], float] = {(0, True, number): 0.0 for number in range(micro_batches)}
    place, free, worked = [0] * stages, [0.0] * stages, [0.0] * stages
    link_free = {(stage, way): 0.0 for stage in range(stages) for way in (True, False)}
    while any(place[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                forward, number = orders[stage][place[stage]]
                last = stage == stages - 1
                if not forward and last:  # the loss has been computed by the same stage
                    arrived.setdefault((stage, False, number), 0.0)
                if (stage, forward, number) not in arrived:
                    break
                receives, sends = (stage > 0, not last) if forward else (not last, stage > 0)
                seconds = forward_s * (1.0 if forward else BACKWARD) + receives * decode_s + sends * encode_s
                end = max(free[stage], arrived[stage, forward, number]) + seconds
                free[stage], worked[stage] = end, worked[stage] + seconds
                if sends:
                    left = max(end, link_free[stage, forward]) + transfer_s
                    link_free[stage, forward] = left
                    arrived[stage + (1 if forward else -1), forward, number] = left + delay_s
                place[stage] += 1
                moved = True
        assert moved, "a schedule in which a stage waits for itself"
    return max(free), sum(worked) / stages


def plan_pipeline(request: PipelineRequest, notify: Callable[[str], None] = lambda line: None) -> list[PipelineRow]:
    """Return a row for each codec, ``none`` first.

    Args:
        notify: Called with a line for each codec that the profile lacks, which is then measured here.
    """
    specs = list(dict.fromkeys(["none", *request.codecs]))
    rows: list[PipelineRow] = []
    for spec in specs:
        nbytes, point = _message(request, spec, notify)
        seconds, worked = step_seconds(
            request.schedule, request.stages, request.micro_batches,
            forward_s=request.step_s / request.micro_batches / (1 + BACKWARD),
            transfer_s=8 * nbytes / (GOODPUT * request.rate), delay_s=request.round_trip_s / 2,
            encode_s=point.encode_s, decode_s=point.decode_s,
        )  # fmt: skip
        speedup = rows[0].step_s / seconds if rows else 1.0
        rows.append(PipelineRow(spec, nbytes, seconds, speedup, 1 - worked / seconds))
    return rows


def _message(request: PipelineRequest, spec: str, notify: Callable[[str], None]) -> tuple[float, Point]:
    """Return the bytes of a message, and the codec's times; ``none``, and what is too small, is not encoded."""
    tensor = TensorSpec((request.activations,), torch.float32)
    nbytes = message_nbytes(stage_codec(spec, "forward"), tensor)
    if isinstance(nbytes, str):
        return float(tensor.nbytes), Point(request.activations, tensor.nbytes, 0.0, 0.0, 0.0)
    profile = request.profile
    if spec not in profile.codecs:
        notify(f"profile {profile.name} lacks {spec}: it is measured on this machine")
        points = codec_points([spec], sizes=(min(request.activations, 1 << 20),), notify=lambda line: None)
        profile = Profile(profile.name, codecs=points)
    return float(nbytes), profile.point(spec, request.activations)
