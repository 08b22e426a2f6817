"""Records of the study: runs by experiment and setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from statistics import fmean
from typing import Any, ClassVar, TypedDict

from laconic.records import Record
from laconic_lab.studies import study
from laconic_lab.studies.gpt.positions import CONTEXTS
from laconic_lab.studies.gpt.positions import KIND as POSITIONS
from laconic_lab.studies.gpt.runner import KIND
from laconic_lab.studies.gpt.settings import LOCAL, Setting
from laconic_lab.studies.study import Count, Positive, Series

__all__ = ["ADAMW", "Results", "Row"]

ADAMW, MUON = "AdamW-DDP", "Muon-DDP"

_RunFields = TypedDict("_RunFields", {  # noqa: UP013
    "part": str, "method": str, "exchange": str, "size": str, "numel": Count, "workers": Count, "batch": Count,
    "steps": Count, "final": float, "optimizer": str, "lr": float, "momentum": float, "every": Count, "up": str,
    "down": str, "decay": float, "outer_lr": float, "outer_momentum": float, "outer_first": bool, "carry": float,
    "fragments": Count, "gather": bool, "seed": int, "validation_loss": Series, "steps_evaluated": list[int],
    "up_bytes": Count, "down_bytes": Count, "ratio": Positive, "seconds": float, "frames_compared": int,
    "frames_other": int, "corpus": str,
})  # fmt: skip
_PositionFields = TypedDict("_PositionFields", {  # noqa: UP013
    "method": str, "size": str, "optimizer": str, "spec": str, "bits_per_sent": Positive, "kept": Count,
    "arrived": float,
})  # fmt: skip
_ContextFields = TypedDict("_ContextFields", {  # noqa: UP013
    "method": str, "size": str, "steps": Count, "workers": Count, "matrices": str, "sent": Count,
    "positions": dict[str, float], "signs": dict[str, float], "selections": dict[str, list[float]],
})  # fmt: skip
SETTING = {each.name: each.default for each in fields(Setting)}
"""Fields with their defaults, which hold for Records older than a field."""


class Row(study.Runs):
    """All runs of one setting, sorted by seed."""

    @property
    def losses(self) -> list[float]:
        """Validation loss after the last step, by seed, in nats a byte."""
        return [run["validation_loss"][-1] for run in self.runs]

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    @property
    def ratio(self) -> float:
        """Bytes of float32 data parallelism over those of this method, both directions."""
        return fmean(run["ratio"] for run in self.runs)

    @property
    def is_local(self) -> bool:
        return bool(self.values["exchange"] == LOCAL)


class Results(study.Results):
    """Runs by experiment and setting."""

    schemas: ClassVar[Mapping[str, Any]] = {KIND: _RunFields, POSITIONS: _PositionFields, CONTEXTS: _ContextFields}

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(records)
        self.rows = study.rows_by_part(self.of_kind(KIND), Row, SETTING)
        """By experiment, in the order of the Records."""

    @property
    def positions(self) -> list[Mapping[str, Any]]:
        """Codecs of changes that send one of 64 values."""
        return self.of_kind(POSITIONS)

    @property
    def contexts(self) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
        """Ideal bits by context and by selection, of groups of matrices; by a training's name and size."""
        found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for values in self.of_kind(CONTEXTS):
            found.setdefault((values["method"], values["size"]), {})[values["matrices"]] = values
        return found

    def of(self, part: str) -> list[Row]:
        return self.rows.get(part, [])

    def best(self, part: str, method: str, size: str | None = None) -> Row | None:
        """Return the row of a method with the lowest loss over learning rates, of those with the most seeds."""
        rows = [row for row in self.of(part) if row.values["method"] == method and size in (None, row.values["size"])]
        return min(rows, key=lambda row: (-len(row.runs), row.loss), default=None)

    def beside_adamw(self, row: Row) -> float | None:
        """Return by how many per cent a loss is above that of AdamW-DDP at the same size; None without such a run."""
        return self._beside(row, ADAMW)

    def beside_muon(self, row: Row) -> float | None:
        return self._beside(row, MUON)

    def _beside(self, row: Row, method: str) -> float | None:
        base = self.best(row.values["part"], method, row.values["size"])
        return None if base is None else 100 * (row.loss / base.loss - 1)
