"""Records of the study, grouped by experiment, model and method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from statistics import fmean, median
from typing import Any, ClassVar, TypedDict

from laconic.records import Record
from laconic_lab.studies import study
from laconic_lab.studies.kothari2021.experiments import METHOD_NAMES, SEEDS
from laconic_lab.studies.kothari2021.settings import MODELS
from laconic_lab.studies.kothari2021.times import LINKS, TIME, busy
from laconic_lab.studies.kothari2021.trainings import TRAINING
from laconic_lab.studies.study import Count, Positive, Series

__all__ = ["LINK_NAMES", "MODEL_NAMES", "ROUND", "RUN", "Results", "Row", "TimedMethod", "method_order"]

RUN, ROUND = "kothari2021.run", "kothari2021.round"
MODEL_NAMES = {"lenet5": "LeNet-5", "vgg11": "VGG-11", "vgg11fc": "VGG-11, 3 linear layers", "resnet50": "ResNet-50"}
LINK_NAMES = {"unshaped": "unshaped", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def method_order(name: str) -> int:
    """Return the sort key of a method: the paper's methods, then ours, then other settings."""
    return METHOD_NAMES.index(name) if name in METHOD_NAMES else len(METHOD_NAMES)


_OptionalRunFields = TypedDict("_OptionalRunFields", {  # noqa: UP013
    "frames_compared": int, "frames_other": int, "worker_accuracy": float, "diverged": bool, "staleness_mean": float,
    "staleness_most": int,
}, total=False)  # fmt: skip
_RequiredRunFields = TypedDict("_RequiredRunFields", {  # noqa: UP013
    "part": str, "model": str, "name": str, "data": str, "epochs": int, "iterations": Count, "seed": int,
    "workers": int, "mode": str, "options": dict[str, Any], "accuracy": Series, "push_bytes": Series,
    "pull_bytes": Series,
})  # fmt: skip


class _RunFields(_RequiredRunFields, _OptionalRunFields):
    """Fields of a run."""


_RequiredRoundFields = TypedDict("_RequiredRoundFields", {  # noqa: UP013
    "name": str, "model": str, "every": int, "bytes_per_iteration": float, "encode_s": float, "aggregate_s": float,
    "answer_s": float, "decode_s": float,
})  # fmt: skip


class _RoundFields(_RequiredRoundFields, total=False):
    """Fields of exchanges without training."""

    transfer_bytes: int
    values: int


_TimeFields = TypedDict("_TimeFields", {  # noqa: UP013
    "model": str, "link": str, "method": str, "data": str, "options": dict[str, Any], "turn": int,
    "iterations": Count, "iterations_per_epoch": int, "epochs": int, "every": int, "exchange_s": Series,
    "compute_s": float, "encode_s": float, "overlapped_s": float, "communication_s": float, "apply_s": float,
    "total_s": float, "valid": bool, "load_average": Series, "link_measured": list[float], "link_made_of": str,
    "retries": int,
})  # fmt: skip


_TrainingFields = TypedDict("_TrainingFields", {  # noqa: UP013
    "part": str, "model": str, "method": str, "data": str, "epochs": int, "seed": int, "workers": int, "situation": str,
    "update": str, "link": str, "seconds": Positive, "iterations": Count, "accuracy": Series, "accuracy_s": Series,
    "push_bytes": Series, "pull_bytes": Series, "valid": bool, "load_average": Series,
})  # fmt: skip


class Row(study.Row):
    """All runs of one setting, sorted by seed."""

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def best(self) -> list[float]:
        return [max(run["accuracy"]) for run in self.runs]

    @property
    def bytes_per_iteration(self) -> float:
        """Bytes in both directions of all workers; iterations without an exchange count."""
        return fmean(sum(run["push_bytes"]) + sum(run["pull_bytes"]) for run in self.runs) / self.iterations

    @property
    def iterations(self) -> int:
        return int(self.values["iterations"])

    @staticmethod
    def bytes_by_epoch(run: Mapping[str, Any]) -> list[float]:
        """Return the bytes that a run has sent and received until the end of each epoch."""
        return list(accumulate(a + b for a, b in zip(run["push_bytes"], run["pull_bytes"], strict=True)))


class TimedMethod(study.Runs):
    """All turns in which a method was timed on one model over one link."""

    @property
    def iterations(self) -> int:
        return sum(int(turn["iterations"]) for turn in self.runs)

    @property
    def valid(self) -> bool:
        return all(turn["valid"] for turn in self.runs)

    @property
    def calm(self) -> bool:
        """Whether no other process loaded the machine."""
        return not any(busy(turn) for turn in self.runs)

    def seconds(self, name: str = "total_s") -> float:
        """Return the mean seconds of an iteration."""
        return float(sum(turn[name] for turn in self.runs)) / self.iterations

    @property
    def median(self) -> float:
        """Median seconds of an iteration; iterations between two exchanges count as one value, their mean."""
        return float(median(seconds / turn["every"] for turn in self.runs for seconds in turn["exchange_s"]))

    def minutes(self, name: str = "total_s") -> float:
        """Return the minutes of all of the paper's epochs, extrapolated from the timed iterations."""
        iterations = int(self.values["epochs"]) * int(self.values["iterations_per_epoch"])
        return self.seconds(name) * iterations / 60


class Results(study.Results):
    """Runs by experiment, model and setting; times by model, link and method.

    Of a setting that was run with several lengths or data sets the paper's data count, then most seeds (up to three),
    then the longest; of a setting whose options changed the newest. Differences are taken between runs of one length
    and data set.
    """

    schemas: ClassVar[Mapping[str, Any]] = {
        RUN: _RunFields,
        ROUND: _RoundFields,
        TIME: _TimeFields,
        TRAINING: _TrainingFields,
    }

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(records)
        self.times = _timed_methods(self.of_kind(TIME))
        self.trainings = _trainings(self.of_kind(TRAINING))
        """Whole trainings by experiment, method, situation and how the server updates."""
        self.rounds = self.of_kind(ROUND)
        """Exchanges of gradients without training, by ``model`` and ``name``."""
        self.experiments: dict[tuple[str, str], dict[str, Row]] = {}
        self._variants: dict[tuple[str, str, str], dict[tuple[str, int], Row]] = {}
        for run in self.of_kind(RUN):
            variants = self._variants.setdefault((run["part"], run["model"], _label(run)), {})
            row = variants.setdefault((run["data"], run["epochs"]), Row([]))
            if row.runs and row.values.get("options") != run.get("options"):
                row.runs.clear()
            row.runs.append(run)
        for (part, model, label), variants in self._variants.items():
            for row in variants.values():
                row.runs.sort(key=lambda run: run["seed"])
            self.experiments.setdefault((part, model), {})[label] = max(variants.values(), key=_preference)

    def row(self, model: str, method: str, experiment: str = "accuracy") -> Row | None:
        return self.experiments.get((experiment, model), {}).get(method)

    def by_length(self, model: str, method: str) -> list[Row]:
        """Return a method's runs with the paper's data, a row for each length, the shortest first; or else its row."""
        variants = self._variants.get(("accuracy", model, method), {})
        of_paper = [(epochs, row) for (data, epochs), row in variants.items() if data == MODELS[model]]
        preferred = self.row(model, method)
        rows = [row for _, row in sorted(of_paper, key=lambda pair: pair[0])]
        return rows or ([] if preferred is None else [preferred])

    def rows(self, experiment: str, model: str) -> list[Row]:
        return sorted(self.experiments.get((experiment, model), {}).values(), key=lambda row: method_order(row.name))

    def rows_by_data(self, experiment: str, model: str) -> list[Row]:
        """Return a row for each setting and data set, of which again most seeds, then the longest count."""
        rows = []
        for (part, of_model, _), variants in self._variants.items():
            if (part, of_model) == (experiment, model):
                by_data: dict[str, list[Row]] = {}
                for (data, _), row in variants.items():
                    by_data.setdefault(data, []).append(row)
                rows += [max(alike, key=_preference) for alike in by_data.values()]
        return sorted(rows, key=lambda row: method_order(row.name))

    def models(self, experiment: str) -> list[str]:
        return [model for model in MODEL_NAMES if (experiment, model) in self.experiments]

    def loss(self, row: Row) -> list[float]:
        """Return the points of top-1 below method 1 of the same seed, or below its mean where that seed is missing."""
        baseline = self.baseline(row)
        if baseline is None:
            return []
        by_seed = dict(zip(baseline.seeds, baseline.final, strict=True))
        mean = fmean(baseline.final)
        return [by_seed.get(seed, mean) - final for seed, final in zip(row.seeds, row.final, strict=True)]

    def baseline(self, row: Row) -> Row | None:
        """Return the runs of method 1 with the data and the length of a row."""
        return self.alike(row, "1")

    def alike(self, row: Row, method: str) -> Row | None:
        """Return the runs of a method with the model, the data and the length of a row."""
        variants = self._variants.get(("accuracy", row.values["model"], method), {})
        return variants.get((row.values["data"], row.values["epochs"]))

    def less(self, row: Row) -> float | None:
        """Return the bytes of method 1 over those of this row; they do not depend on data and length."""
        baseline = self.baseline(row) or self.row(row.values["model"], "1")
        return None if baseline is None else baseline.bytes_per_iteration / row.bytes_per_iteration


TrainingKey = tuple[str, str, str, str]


def _trainings(trainings: Iterable[Mapping[str, Any]]) -> dict[TrainingKey, Row]:
    """Group trainings over valid links by experiment, method, situation and update; the longest variant counts."""
    variants: dict[TrainingKey, dict[tuple[int, str], Row]] = {}
    for one in trainings:
        if one["valid"]:
            key = (one["part"], one["method"], one["situation"], one["update"])
            row = variants.setdefault(key, {}).setdefault((one["epochs"], one["data"]), Row([]))
            row.runs[:] = [run for run in row.runs if run["seed"] != one["seed"]] + [one]
    return {key: max(rows.items())[1] for key, rows in variants.items()}


def _preference(row: Row) -> tuple[bool, int, int]:
    paper = row.values["data"] == MODELS[row.values["model"]]
    return paper, min(len(row.runs), len(SEEDS)), int(row.values["epochs"])


def _label(run: Mapping[str, Any]) -> str:
    if run["part"] == "workers":
        return f"{run['name']}/{run['workers']}/{run['mode']}"
    return str(run["name"])


def _timed_methods(turns: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], TimedMethod]:
    """Group turns by model, link and method, in the order of the tables.

    Of a method whose options changed the newest counts, and of a turn that was measured again the last. Turns over an
    invalid link, or on a busy machine, count only where there are no others.
    """
    newest: dict[tuple[str, str, str], tuple[object, dict[int, Mapping[str, Any]]]] = {}
    for values in turns:
        key, setting = (values["model"], values["link"], values["method"]), (values["data"], values["options"])
        if key not in newest or newest[key][0] != setting:
            newest[key] = (setting, {})
        newest[key][1][values["turn"]] = values
    models = list(MODEL_NAMES)
    timed = {}
    for key in sorted(newest, key=lambda key: (models.index(key[0]), LINKS.index(key[1]), method_order(key[2]))):
        all_turns = [turn for _, turn in sorted(newest[key][1].items())]
        valid = [turn for turn in all_turns if turn["valid"]] or all_turns
        timed[key] = TimedMethod([turn for turn in valid if not busy(turn)] or valid)
    return timed
