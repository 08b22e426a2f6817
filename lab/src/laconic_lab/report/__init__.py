"""The lab's sections of ``laconic report``: studies with the claims of their papers, benchmarks, fault campaigns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from laconic.records import Record
from laconic.report.plots import Plot, Section
from laconic_lab.report import benches
from laconic_lab.report.schemas import SCHEMAS
from laconic_lab.report.studies import study_section
from laconic_lab.studies import load_study, study_names
from laconic_lab.studies.study import claim_records, with_records

__all__ = ["sections"]

ByKind = Mapping[str, Sequence[Mapping[str, Any]]]

BENCHES: tuple[tuple[str, str, Callable[[ByKind], list[Plot]]], ...] = (
    ("bench.ddp", "DistributedDataParallel", benches.ddp),
    ("bench.gpt", "A GPT over slow links", benches.gpt),
    ("cluster.", "Parameter server", benches.cluster),
    ("bench.codec", "Codecs", benches.codecs),
    ("bench.layers", "Layers", benches.layers),
    ("faults.", "Faults", benches.faults),
)


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
            (study.name, partial(study_section, study, used)) for study, used in with_records(records)
        ]
        for prefix, heading, draw in BENCHES:
            matching = {kind: values for kind, values in by_kind.items() if kind.startswith(prefix)}
            if matching:
                drawings.append((heading, partial(_bench, prefix, heading, draw, matching)))
        return drawings


def _bench(prefix: str, heading: str, draw: Callable[[ByKind], list[Plot]], by_kind: ByKind) -> Section:
    return Section(prefix.strip(".").replace(".", "-"), heading, plots=draw(by_kind))


sections = LabSections()
