"""Records of the study, grouped by experiment and setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, TypedDict

from laconic.records import Record
from laconic_lab.studies import study
from laconic_lab.studies.oland2015.buckets import KIND as BUCKETS
from laconic_lab.studies.oland2015.coding import KIND as CODING
from laconic_lab.studies.study import Count, Positive, Series

__all__ = ["BUCKETS", "CODING", "KIND", "POINT", "Results", "SettingRuns"]

KIND = "study.oland2015"
POINT = ("lr", "l1", "decay", "batch", "pixels", "sends")
"""Fields that identify a setting together with the codec."""
PER_RUN = ("raw_bits", "whole_bits", "coded_bits", "peak", "final", "peak_epoch", "near_peak_epoch")


_OptionalFields = TypedDict("_OptionalFields", {  # noqa: UP013
    "accuracy_by_epoch": list[float], "raw_bits_by_epoch": list[float], "coded_bits_by_epoch": list[float],
    "anatomy_epochs": list[int], "correlation": list[list[float | None]], "derivative_by_epoch": list[list[float]],
    "entropy_bits": list[int], "entropy_by_epoch": list[list[list[list[float]]]], "entropy_rates": list[float],
    "largest_sampling_error": list[list[float]],
}, total=False)  # fmt: skip
_RequiredFields = TypedDict("_RequiredFields", {  # noqa: UP013
    "part": str, "codec": str, "data": str, "device": str, "workers": int, "epochs": int, "seed": int, "lr": float,
    "l1": float, "decay": float, "batch": int, "pixels": str, "sends": str, "runs": Count, "first_run": int,
    "raw_bits": Series, "whole_bits": Series, "coded_bits": Series, "coded_bits_by_layer": list[float],
    "peak": Series, "final": Series, "peak_epoch": Series, "near_peak_epoch": Series,
})  # fmt: skip


class _Fields(_RequiredFields, _OptionalFields):
    """Fields of a run."""


_BucketFields = TypedDict("_BucketFields", {  # noqa: UP013
    "codec": str, "bits": float, "relative_error": float, "fullest_bin": float | None, "peak": float, "final": float,
})  # fmt: skip
_CodingFields = TypedDict("_CodingFields", {  # noqa: UP013
    "data": str, "epochs": int, "nbytes": Count, "lzw_nbytes": Count, "lzw_s": float, "deflate_nbytes": Count,
    "frame_nbytes": Count, "side_nbytes": int, "encode_s": Positive, "decode_s": Positive,
})  # fmt: skip


@dataclass
class SettingRuns(study.Runs):
    """All runs of one setting: the values of its Records, in the order of the runs' numbers."""

    originals: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def sources(self) -> list[Mapping[str, Any]]:
        """Values of the Records themselves, also of a setting that holds copies of their first runs."""
        return self.originals or self.runs

    @property
    def num_runs(self) -> int:
        return sum(unit["runs"] for unit in self.runs)

    def per_run(self, name: str) -> list[float]:
        """Return a value for each run."""
        return [value for unit in self.runs for value in unit[name]]

    def mean(self, name: str) -> float:
        return fmean(self.per_run(name))

    def curve(self, name: str) -> list[float]:
        """Return the mean over runs for each epoch or layer."""
        weights = [unit["runs"] for unit in self.runs]
        columns = zip(*(unit[name] for unit in self.runs), strict=True)
        return [sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights) for values in columns]

    def first(self, runs: int) -> SettingRuns:
        """Return the first runs: only runs of the same number start from the same weights."""
        kept: list[Mapping[str, Any]] = []
        for unit in self.runs:
            left = runs - sum(one["runs"] for one in kept)
            if left > 0:
                kept.append({**unit, "runs": min(left, unit["runs"]), **{k: unit[k][:left] for k in PER_RUN}})
        return SettingRuns(kept, self.runs)


class Results(study.Results):
    """Settings by experiment; of an experiment that was run with several data sets or lengths the one of most runs."""

    schemas: ClassVar[Mapping[str, Any]] = {KIND: _Fields, BUCKETS: _BucketFields, CODING: _CodingFields}

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(records)
        self.buckets, self.coding = self.of_kind(BUCKETS), _longest(self.of_kind(CODING))
        self.experiments: dict[str, dict[tuple[Any, ...], SettingRuns]] = {}
        variants: dict[str, dict[tuple[Any, ...], list[Mapping[str, Any]]]] = {}
        for values in self.of_kind(KIND):
            variant = tuple(values[name] for name in ("data", "workers", "epochs", "seed", "device"))
            variants.setdefault(values["part"], {}).setdefault(variant, []).append(values)
        for experiment, by_variant in variants.items():
            largest = max(by_variant.values(), key=lambda units: sum(unit["runs"] for unit in units))
            settings = self.experiments.setdefault(experiment, {})
            for unit in sorted(largest, key=lambda unit: int(unit["first_run"])):
                key = (unit["codec"], *(unit[name] for name in POINT))
                settings.setdefault(key, SettingRuns([])).runs.append(unit)

    def find(self, experiment: str, codec: str, **point: Any) -> SettingRuns | None:
        """Return the first setting of a codec whose fields have the given values."""
        for key, setting in self.experiments.get(experiment, {}).items():
            fields = dict(zip(POINT, key[1:], strict=True))
            if key[0] == codec and all(fields[name] == value for name, value in point.items()):
                return setting
        return None

    def in_grid(self, codec: str) -> SettingRuns | None:
        """Return a setting of the grid; the headline's first runs are the same and are not trained again."""
        setting = self.find("grid", codec)
        if setting is None and "grid" in self.experiments and (setting := self.find("headline", codec)) is not None:
            return setting.first(min(one.num_runs for one in self.experiments["grid"].values()))
        return setting


def _longest(coded: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs on full MNIST if there are any, and of these the ones with most epochs."""
    best = max(((one["data"] == "mnist", one["epochs"]) for one in coded), default=None)
    return [one for one in coded if (one["data"] == "mnist", one["epochs"]) == best]
