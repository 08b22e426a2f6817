"""Records of the study by kind, and what the planner's model of time needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict

from laconic.plan import Naive, Training
from laconic.plan.jang2017 import GIGABIT
from laconic.records import Record
from laconic_lab.studies import study
from laconic_lab.studies.jang2017.runs import RUN, latest
from laconic_lab.studies.study import Count, Positive

__all__ = ["GPU_STEP", "KERNELS", "LAYERS", "READER", "STEP", "TABLE", "CompressedModel", "Results"]

TABLE, STEP, KERNELS = "jang2017.table1", "jang2017.step", "jang2017.kernels"
READER = "jang2017.reader"
LAYERS = "bench.layers"
"""Kind of the Records with h and rho of laconic's layers."""
GPU_STEP = "homomorphic.step"
"""Kind of the study homomorphic's Records of the same, among them those on a GPU."""


_OptionalTableFields = TypedDict("_OptionalTableFields", {  # noqa: UP013
    "relative_squared_error": float,
}, total=False)  # fmt: skip
_RequiredTableFields = TypedDict("_RequiredTableFields", {  # noqa: UP013
    "what": str, "way": str, "nbytes": int, "compressed_nbytes": Count, "compress_s": Positive,
    "decompress_s": float, "lossless": bool,
})  # fmt: skip


class _TableFields(_RequiredTableFields, _OptionalTableFields):
    """Fields of a run."""


_StepFields = TypedDict("_StepFields", {  # noqa: UP013
    "model": str, "device": str, "numel": int, "step_s": float,
})  # fmt: skip
_KernelFields = TypedDict("_KernelFields", {  # noqa: UP013
    "device": str, "batch": int, "groups": dict[str, float],
})  # fmt: skip
_RunFields = TypedDict("_RunFields", {  # noqa: UP013
    "engine": str, "workers": int, "rate": str, "codec": str, "predicted_s": float, "measured_s": Positive,
    "measured_quartiles_s": list[float], "measured_push": float | None, "predicted_push": float,
    "others": float | None, "valid": bool,
})  # fmt: skip
_ReaderFields = TypedDict("_ReaderFields", {  # noqa: UP013
    "scheme": str, "device": str, "rho": float, "h": float, "variation": float,
})  # fmt: skip
_LayerFields = TypedDict("_LayerFields", {  # noqa: UP013
    "case": str, "device": str, "scheme": str, "rho": float, "h": float | None,
})  # fmt: skip


class _GpuStepFields(_LayerFields):
    """Fields of a step."""

    batch: int


@dataclass(frozen=True)
class CompressedModel:
    """A model with compressed layers, as measured."""

    scheme: str
    rho: float
    h: float
    source: Mapping[str, Any] = field(compare=False, repr=False)
    """Values of its Record."""


class Results(study.Results):
    """Records by kind."""

    schemas: ClassVar[Mapping[str, Any]] = {
        TABLE: _TableFields, STEP: _StepFields, READER: _ReaderFields, KERNELS: _KernelFields, RUN: _RunFields,
        LAYERS: _LayerFields, GPU_STEP: _GpuStepFields,
    }  # fmt: skip

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(latest(records))
        self.rows, self.runs = self.of_kind(TABLE), self.of_kind(RUN)
        self.steps = {(step["model"], step["device"]): step for step in self.of_kind(STEP)}
        self.kernels = {kernels["device"]: kernels for kernels in self.of_kind(KERNELS)}
        self.layers = [
            CompressedModel(layer["scheme"], layer["rho"], layer["h"], layer)
            for layer in self.of_kind(LAYERS)
            if layer["case"] == "alexnet" and layer["device"] == "cpu" and layer["h"] is not None
        ]

    @property
    def on_gpu(self) -> list[CompressedModel]:
        """AlexNet with compressed layers on a GPU, a step in one launch."""
        return [
            CompressedModel(step["scheme"], step["rho"], step["h"], step)
            for step in self.of_kind(GPU_STEP)
            if step["case"] == "alexnet" and step["device"] == "cuda" and step.get("graph") and step["h"] is not None
        ]

    @property
    def readers(self) -> list[CompressedModel]:
        """The reader with compressed convolutions and LSTMs, on a CPU."""
        return [
            CompressedModel(one["scheme"], one["rho"], one["h"], one)
            for one in self.of_kind(READER)
            if one["device"] == "cpu"
        ]

    def row(self, what: str, way: str) -> Mapping[str, Any] | None:
        return next((row for row in self.rows if (row["what"], row["way"]) == (what, way)), None)

    @property
    def gzip_here(self) -> Naive | None:
        """Gzip with the ratio and times measured on this machine."""
        row = self.row("alexnet", "gzip")
        return None if row is None else Naive(
            row["compressed_nbytes"] / row["nbytes"], row["compress_s"], row["decompress_s"]
        )  # fmt: skip

    def reader(self) -> Training | None:
        """Return the line reader with updates of 20 iterations, by its measured step."""
        step = self.steps.get(("reader", "cpu"))
        return None if step is None else Training(4 * step["numel"], step["step_s"], GIGABIT, every=20)
