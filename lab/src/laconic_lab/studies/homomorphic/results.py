"""Records of the study: runs by experiment, model and setting; steps and codecs by device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, ClassVar, TypedDict

from laconic.records import Record
from laconic_lab.studies import study
from laconic_lab.studies.homomorphic.settings import HYPER, scheme_text
from laconic_lab.studies.homomorphic.speed import CODEC_KIND, STEP_KIND
from laconic_lab.studies.study import Count, Series

__all__ = ["DEVICES", "KIND", "MODEL_NAMES", "SERVER_RUN", "Results", "Row"]

KIND = "homomorphic.run"
SERVER_RUN = "kothari2021.run"
"""Trainings of kothari2021, whose method 1 is dense float32."""
MODEL_NAMES = {
    "mlp": "MLP",
    "lenet5": "LeNet-5",
    "vgg11": "VGG-11",
    "vgg11fc": "VGG-11, 3 linear",
    "alexnet": "AlexNet",
}
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
SETTING = (
    "model", "data", "epochs", "layers", "codec", "small", "workers", "carry", "at_renewal", "batch", "lr", "decay",
)  # fmt: skip
"""Fields that identify a setting together with its rules."""


_RunFields = TypedDict("_RunFields", {  # noqa: UP013
    "part": str, "model": str, "data": str, "epochs": int, "layers": str | None, "rules": list[list[str]],
    "codec": str, "small": str, "workers": int, "carry": bool, "at_renewal": str, "batch": int, "lr": float,
    "decay": float, "seed": int, "accuracy": Series, "held_loss": Series, "numel": int, "numel_dense": int,
    "rho": float, "rho_layers": float, "frames_compared": int, "frames_other": int,
})  # fmt: skip
_ServerRunFields = TypedDict("_ServerRunFields", {  # noqa: UP013
    "part": str, "model": str, "name": str, "data": str, "epochs": int, "seed": int, "workers": int, "accuracy": Series,
})  # fmt: skip
_StepFields = TypedDict("_StepFields", {  # noqa: UP013
    "case": str, "device": str, "scheme": str, "rho": float, "h": float | None, "dense_s": float, "numel": int,
    "numel_compressed": int,
})  # fmt: skip
_CodecFields = TypedDict("_CodecFields", {  # noqa: UP013
    "device": str, "codec": str, "values": Count, "encode_s": float, "decode_s": float, "error": float,
})  # fmt: skip


class Row(study.Row):
    """All runs of one setting, sorted by seed."""

    @property
    def layers(self) -> str:
        return scheme_text(self.values["layers"], self.values["rules"])

    @property
    def codec(self) -> str:
        return "float32" if self.values["codec"] == "none" else str(self.values["codec"])

    @property
    def top1(self) -> float:
        return fmean(self.final)

    @property
    def rho(self) -> float:
        """Bytes of a worker's message, headers and scales included, over those of the dense model in float32."""
        return float(self.values["rho"])


class Results(study.Results):
    """Runs by experiment, model and setting; steps and codecs by device."""

    schemas: ClassVar[Mapping[str, Any]] = {
        KIND: _RunFields, STEP_KIND: _StepFields, CODEC_KIND: _CodecFields, SERVER_RUN: _ServerRunFields,
    }  # fmt: skip

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(records)
        self.steps = {(step["device"], step["case"], step["scheme"]): step for step in self.of_kind(STEP_KIND)}
        """By device, model or layer, and scheme."""
        self.codecs = {(codec["device"], codec["codec"]): codec for codec in self.of_kind(CODEC_KIND)}
        """By device and codec."""
        by_setting: dict[tuple[str, str], dict[tuple[Any, ...], Row]] = {}
        for run in self.of_kind(KIND):
            key = (*(run[name] for name in SETTING), tuple(map(tuple, run["rules"])))
            by_setting.setdefault((run["part"], run["model"]), {}).setdefault(key, Row([])).runs.append(run)
        self.rows = {key: list(rows.values()) for key, rows in by_setting.items()}
        for rows in self.rows.values():
            for row in rows:
                row.runs.sort(key=lambda run: run["seed"])

    def find(
        self, experiment: str, model: str, layers: str | None = None, codec: str = "none", **fields: Any
    ) -> Row | None:
        wanted = {"layers": layers, "codec": codec, **fields}
        for row in self.rows.get((experiment, model), []):
            if all(row.values[name] == value for name, value in wanted.items()):
                return row
        return None

    def dense(self, row: Row) -> Row | None:
        """Return float32 of the same model and workers, or of two workers where that is missing.

        Method 1 of kothari2021 is the same training; it counts where it has more seeds.
        """
        for workers in (row.values["workers"], 2):
            dense = self.find("sums", row.values["model"], workers=workers)
            server = self._method_1(row, workers)
            if dense is not None or server:
                return max((one for one in (dense, server) if one), key=lambda one: len(one.runs))
        return None

    def _method_1(self, row: Row, workers: int) -> Row | None:
        """Return the runs of kothari2021's method 1 with the hyper-parameters of a model's dense runs."""
        hyper = HYPER[row.values["model"]]
        usual = {
            "part": "accuracy", "name": "1", "model": row.values["model"], "data": row.values["data"],
            "epochs": row.values["epochs"], "workers": workers, "batch": hyper.batch // workers, "lr": hyper.lr,
            "ramp": hyper.ramp, "decay": hyper.decay,
        }  # fmt: skip
        runs = [run for run in self.of_kind(SERVER_RUN) if all(run.get(name) == usual[name] for name in usual)]
        return Row(sorted(runs, key=lambda run: int(run["seed"]))) if runs else None

    def lost(self, row: Row) -> float | None:
        """Return the points of top-1 below dense float32: a difference of means over all seeds."""
        dense = self.dense(row)
        return None if dense is None else dense.top1 - row.top1

    def models(self, *experiments: str) -> list[str]:
        return [model for model in MODEL_NAMES if any((one, model) in self.rows for one in experiments)]

    def h(self, model: str, scheme: str, device: str) -> float | None:
        """Return h of a scheme, 1 for dense layers, None where it was not measured or varied too much."""
        if scheme == "dense":
            return 1.0
        step = self.steps.get((device, model, scheme))
        return None if step is None else step["h"]

    def dense_step_s(self, model: str, device: str) -> float | None:
        """Return the fastest step of the dense model."""
        times = [step["dense_s"] for (where, case, _), step in self.steps.items() if (where, case) == (device, model)]
        return min(times, default=None)

    def coding_s(self, codec: str, numel: float, device: str) -> float:
        """Return the seconds that a worker needs to encode and decode so many values."""
        timed = self.codecs.get((device, codec))
        return 0.0 if timed is None else (timed["encode_s"] + timed["decode_s"]) * numel / timed["values"]
