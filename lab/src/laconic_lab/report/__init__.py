"""The lab's sections of ``laconic report``: studies with the claims of their papers, benchmarks, fault campaigns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from laconic.records import Record
from laconic.report.plots import Question, Section
from laconic_lab.report import benches, engines
from laconic_lab.report.schemas import SCHEMAS
from laconic_lab.report.studies import study_section
from laconic_lab.studies import load_study, study_names
from laconic_lab.studies.study import claim_records, with_records

__all__ = ["sections"]

ByKind = Mapping[str, Sequence[Mapping[str, Any]]]

BENCHES: Mapping[str, tuple[tuple[str, ...], Callable[[ByKind], Section]]] = {
    "DDP": (("bench.ddp", "bench.ddp.train"), engines.ddp),
    "FSDP2": (("bench.fsdp", "bench.fsdp.loss"), engines.fsdp),
    "torchft": (("faults.replica_step",), engines.torchft),
    "GPT over slow links": (("bench.gpt", "bench.gpt.loss"), engines.gpt),
    "parameter server": (("cluster.round", "cluster.load"), benches.cluster),
    "codecs": (("bench.codec", "bench.peer"), benches.codecs),
    "codecs on a GPU": (("bench.device.codec", "bench.device.step"), benches.device),
    "layers": (("bench.layers",), benches.layers),
    "faults": (("faults.scene", "faults.scenarios", "faults.kills", "faults.soak", "faults.replicas"), benches.faults),
}
"""Kinds of Records and the function that draws their section, by the name in messages."""
TRANSFORMER_STUDIES = {"gpt", "pipeline"}
"""Studies that answer a question about transformers; the others measure papers again."""


class LabSections:
    """The report plug-in of laconic-lab; see ``laconic.report.plugins.Plugin``."""

    @cached_property
    def schemas(self) -> Mapping[str, Any]:
        studies = (load_study(name).results.schemas for name in study_names())
        return SCHEMAS | {kind: schema for schemas in studies for kind, schema in schemas.items()}

    def derive(self, records: Sequence[Record]) -> tuple[list[Record], list[str]]:
        return claim_records(records)

    def sections(self, by_kind: ByKind) -> list[tuple[str, Callable[[], Section]]]:
        records = [Record(kind, values, 0, {}, {}, None, "") for kind in by_kind for values in by_kind[kind]]
        drawings: list[tuple[str, Callable[[], Section]]] = [
            (study.name, partial(study_section, study, used, _question(study.name)))
            for study, used in with_records(records)
        ]
        for name, (kinds, draw) in BENCHES.items():
            if any(by_kind.get(kind) for kind in kinds):
                drawings.append((name, partial(draw, by_kind)))
        return drawings


def _question(study: str) -> Question:
    return Question.TRANSFORMERS if study in TRANSFORMER_STUDIES else Question.STUDIES


sections = LabSections()
