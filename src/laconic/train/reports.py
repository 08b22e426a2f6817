"""Summary of the newest reports of a run's workers, for a progress line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ReportSummary", "summarize"]


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
