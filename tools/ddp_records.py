"""Records of ``laconic bench ddp`` as the pages need them: steps over links, and whole trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median_high
from typing import Any

from page_blocks import RESULTS

from laconic.records import read

LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "unshaped": "not shaped"}
LACONIC = "laconic "
"""Prefix of the benchmark's names for attachments of ours; torch's hooks have none."""


def values_of(name: str) -> list[Mapping[str, Any]]:
    """Return the values of the Records in a file under results/."""
    return [record.values for record in read(RESULTS / name)]


def steps(rate: str) -> list[Mapping[str, Any]]:
    """Return the measured steps over one link, by exchange; a link that was not valid ends the program."""
    measured = [values for values in values_of("ddp/links.jsonl") if values["rate"] == rate]
    if not all(values["valid"] for values in measured):
        raise SystemExit(f"results/ddp/links.jsonl: the {rate} link was not valid: measure it again")
    return [values for values in measured if not values["failed"]]


def signed(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}".replace("-", "−")


class Training:
    """All runs of one way to train, one per seed."""

    def __init__(self, way: str, runs: Sequence[Mapping[str, Any]]) -> None:
        self.way, self.runs = way, runs

    @property
    def top1(self) -> str:
        """Accuracy relative to plain DDP, in points."""
        points = fmean(run["accuracy"] - run["plain_accuracy"] for run in self.runs)
        return f"{signed(points)} ({len(self.runs)} seed{'s' * (len(self.runs) > 1)})"

    @property
    def reached_s(self) -> float:
        """Seconds until plain DDP's accuracy; infinite where fewer than half of the seeds reached it."""
        return median_high([float("inf") if run["reached_s"] is None else run["reached_s"] for run in self.runs])


def trainings(name: str) -> list[Training]:
    """Return the trainings in a file under results/, by way."""
    values = values_of(name)
    ways = dict.fromkeys(run["way"] for run in values)
    return [Training(way, [run for run in values if run["way"] == way]) for way in ways]
