"""Sizes and times of a codec's messages, from a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.plan.calibration import GZIP, sum_sizes, summable, without_feedback
from laconic.plan.costs import REDUCED, Message, Network
from laconic.plan.profile import ModelTimes, Profile
from laconic.policy import Policy

__all__ = ["SLOT_NUMEL", "Workload", "message_of"]

SLOT_NUMEL = 1 << 22
"""A model of which only the number of parameters is known is taken to consist of slots of this size."""


@dataclass(frozen=True)
class Workload:
    """What is exchanged: number of values and dimensions of each slot, and the measured model, if there is one."""

    slots: tuple[tuple[int, int], ...]
    model: ModelTimes | None = None

    @classmethod
    def of_params(cls, params: int) -> Workload:
        if not isinstance(params, int) or isinstance(params, bool) or params < 1:
            raise ConfigError(f"params must be a whole number of at least 1, got {params!r}")
        whole, rest = divmod(params, SLOT_NUMEL)
        return cls(((SLOT_NUMEL, 2),) * whole + (((rest, 2),) if rest else ()))

    @classmethod
    def of_model(cls, model: ModelTimes) -> Workload:
        return cls(model.layout(), model)

    @property
    def numel(self) -> int:
        return sum(numel for numel, _ in self.slots)

    @property
    def compressed_slots(self) -> int:
        """Number of slots that are encoded; vectors and small tensors travel together."""
        return sum(not _exempt(numel, dims) for numel, dims in self.slots)


def message_of(profile: Profile, workload: Workload, spec: str, network: Network) -> Message:
    """Return the message that a codec makes of a workload.

    A measured model has the sizes and times of its own gradients; otherwise they are interpolated slot by slot.
    """
    measured = _measured(workload.model, spec)
    if measured is not None:
        push, *seconds = (measured[name] for name in ("push", "encode_s", "decode_s", "add_s"))
    else:
        push, seconds = 0.0, [0.0, 0.0, 0.0]
        for (numel, dims), count in Counter(workload.slots).items():
            point = profile.point("none" if spec != GZIP and _exempt(numel, dims) else spec, numel)
            push += count * point.nbytes
            seconds = [
                total + count * one
                for total, one in zip(seconds, (point.encode_s, point.decode_s, point.add_s), strict=True)
            ]
    is_sum = spec != GZIP and summable(spec)
    pull = push
    if is_sum:
        push, pull = _sum_nbytes(spec, workload, network)
    reduced = network.adds_packets and spec in REDUCED
    if spec == "none" and network.topology != "ps":  # the all-reduce takes tensors without encoding
        reduced, seconds = True, [0.0, 0.0, 0.0]
    encode_s, decode_s, add_s = seconds
    apply_s = workload.model.apply_s if workload.model is not None else 0.0
    has_memory = spec != GZIP and parse(spec)[0] != ()
    return Message(
        spec, push, pull, encode_s, decode_s + apply_s, add_s, summable=is_sum or reduced,
        memory=push + pull + 4.0 * workload.numel * (1 + has_memory),
    )  # fmt: skip


def _measured(model: ModelTimes | None, spec: str) -> Mapping[str, float] | None:
    """Return a codec's size and times on a model's gradients.

    If only ``X`` of ``ef|X`` was measured, decoding what is sent and two passes over the values are added to it.
    """
    if model is None or spec in model.messages:
        return None if model is None else model.messages[spec]
    codec, plain = model.messages.get(without_feedback(spec)), model.messages.get("none")
    if codec is None or plain is None:
        return None
    return {**codec, "encode_s": codec["encode_s"] + codec["decode_s"] + 2 * plain["encode_s"]}


def _sum_nbytes(spec: str, workload: Workload, network: Network) -> tuple[float, float]:
    """Return the bytes of push and pull: large slots by the codec, small ones by ``shared:16``."""
    large = sum(numel for numel, dims in workload.slots if not _exempt(numel, dims))
    small = workload.numel - large
    ring = network.adds_packets
    push, pull = sum_sizes(spec, large, network.workers, ring=ring) if large else (0.0, 0.0)
    return push + (2.0 + 4 / 1024) * small, pull + (4.0 + 4 / 1024) * small


def _exempt(numel: int, dims: int) -> bool:
    return dims <= 1 or numel < Policy().min_numel
