"""Records of the study: runs by experiment and setting, and step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from statistics import fmean, median
from typing import Any, ClassVar, TypedDict

from laconic.records import Record
from laconic_lab.studies import study
from laconic_lab.studies.pipeline.runner import KIND
from laconic_lab.studies.pipeline.settings import REPEATED, Setting
from laconic_lab.studies.pipeline.times import KIND as TIME_KIND
from laconic_lab.studies.study import Count, Positive, Series

__all__ = ["Results", "Row"]

_RunFields = TypedDict("_RunFields", {  # noqa: UP013
    "part": str, "method": str, "stages": Count, "forward": str, "backward": str, "delta": bool, "samples": str,
    "bottleneck": int, "size": str, "micro_batches": Count, "windows": Count, "steps": Count, "lr": float, "seed": int,
    "validation_loss": Series, "steps_evaluated": list[int], "compressed_loss": float, "train_loss": float,
    "forward_bytes": Count, "backward_bytes": Count, "plain_bytes": Count, "ratio": Positive, "seconds": float,
    "corpus": str,
})  # fmt: skip
_TimeFields = TypedDict("_TimeFields", {  # noqa: UP013
    "link": str, "stages": Count, "model": str, "codec": str, "seconds": Series, "sent_nbytes": Positive,
    "encode_s": float, "decode_s": float, "valid": bool, "made_of": str, "micro_batches": Count,
})  # fmt: skip
SETTING = {each.name: each.default for each in fields(Setting)}
"""Fields with their defaults, which hold for Records older than a field."""


class Row(study.Runs):
    """All runs of one setting, sorted by seed."""

    @property
    def losses(self) -> list[float]:
        """Loss by seed, in nats a byte: validation loss after the last step.

        Of repeated samples it is the training loss of the last steps, because the model overfits them.
        """
        if self.values["samples"] == REPEATED:
            return [run["train_loss"] for run in self.runs]
        return [run["validation_loss"][-1] for run in self.runs]

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    def mean(self, name: str) -> float:
        return fmean(run[name] for run in self.runs)

    @property
    def is_plain(self) -> bool:
        values = self.values
        return bool(values["forward"] == values["backward"] == "none" and not values["bottleneck"])


class Results(study.Results):
    """Runs by experiment and setting, and step times."""

    schemas: ClassVar[Mapping[str, Any]] = {KIND: _RunFields, TIME_KIND: _TimeFields}

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(records)
        self.rows = study.rows_by_part(self.of_kind(KIND), Row, {"corpus": None, **SETTING})
        """By experiment, in the order of the Records."""

    def of(self, part: str) -> list[Row]:
        return self.rows.get(part, [])

    def plain(self, row: Row) -> Row | None:
        """Return the uncompressed row beside a row: the same text, model, stages, samples, steps and windows."""
        same = ("corpus", "stages", "samples", "size", "steps", "lr", "micro_batches", "windows")
        others = (other for part in self.rows.values() for other in part if other.is_plain)
        return next((one for one in others if all(one.values[name] == row.values[name] for name in same)), None)

    def above(self, row: Row) -> float | None:
        """Return by how many per cent a loss is above the uncompressed one; None without such a run."""
        base = self.plain(row)
        return None if base is None else 100 * (row.loss / base.loss - 1)

    @property
    def times(self) -> list[Mapping[str, Any]]:
        return self.of_kind(TIME_KIND)

    def speed_up(self, time: Mapping[str, Any]) -> float | None:
        """Return how many times as long the uncompressed step takes over the same link; None without such a Record."""
        same = ("link", "stages", "model")
        for other in self.times:
            if other["codec"] == "none" and all(other[name] == time[name] for name in same):
                return float(median(other["seconds"]) / median(time["seconds"]))
        return None
