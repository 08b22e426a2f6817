"""What workers report: progress and times of one worker, and the summary of all workers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Progress", "ReportSummary", "Times", "summarize"]


@dataclass
class Times:
    """Seconds of a worker by activity.

    Args:
        compute: Forward, backward, local steps, and the loss on held-out examples.
        encode: Encoding of frames; it runs beside backward where possible.
        communication: Waiting after the computation: the exposed part of communication.
        overlapped: Communication beside the computation, from the first frame on.
        apply: Decoding replies and applying them.
    """

    compute: float = 0.0
    encode: float = 0.0
    communication: float = 0.0
    overlapped: float = 0.0
    apply: float = 0.0


@dataclass(frozen=True)
class Progress:
    """Progress of a worker after an exchange; ``bytes_raw`` is float32 in both directions in every iteration."""

    iteration: int
    loss: float
    bytes_sent: int
    bytes_received: int
    bytes_raw: int


@dataclass(frozen=True)
class ReportSummary:
    """Progress of all workers of a run.

    Args:
        iteration: Iterations that every worker has done.
        loss: Mean loss of the last batches.
        bytes_per_s: Bytes of frames per second, sent and received, of all workers.
        bytes_saved: Bytes saved compared with float32 in both directions.
    """

    iteration: int
    loss: float
    bytes_per_s: float
    bytes_saved: float


def summarize(reports: Sequence[Mapping[str, Any]]) -> ReportSummary:
    """Summarize the newest report of each worker of one run."""
    sent = sum(report["bytes_sent"] + report["bytes_received"] for report in reports)
    raw = sum(report["bytes_raw"] for report in reports)
    seconds = max(report["total_s"] for report in reports)
    return ReportSummary(
        iteration=min(report["iteration"] for report in reports),
        loss=sum(report["loss"] for report in reports) / len(reports),
        bytes_per_s=sent / max(seconds, 1e-9),
        bytes_saved=max(raw - sent, 0),
    )
