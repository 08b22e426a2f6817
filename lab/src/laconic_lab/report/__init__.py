"""The lab's sections of ``laconic report``: studies with the claims of their papers, benchmarks, fault campaigns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from laconic.records import Record
from laconic.report.plots import Plot, Section
from laconic_lab.report import benches, studies
from laconic_lab.report.schemas import SCHEMAS
from laconic_lab.studies.verdicts import KIND as CLAIM
from laconic_lab.studies.verdicts import verdicts

__all__ = ["sections"]

ByKind = Mapping[str, Sequence[Mapping[str, Any]]]

PAPERS: tuple[tuple[str, str, str, Callable[[ByKind, Sequence[Mapping[str, Any]]], list[Plot]]], ...] = (
    ("kothari2021", "kothari2021.", "Kothari, Kaushik and Faisal 2021: six methods and ours", studies.kothari2021),
    ("oland2015", "study.oland2015", "Øland and Raj 2015: as many bits as the entropy asks for", studies.oland2015),
    ("jang2017", "jang2017.", "Jang, Na and Yoon 2017: a model of time, and real runs", studies.jang2017),
    ("homomorphic", "homomorphic.", "Homomorphic compression", studies.homomorphic),
)
BENCHES: tuple[tuple[str, str, Callable[[ByKind], list[Plot]]], ...] = (
    ("bench.ddp", "DistributedDataParallel", benches.ddp),
    ("cluster.", "Parameter server", benches.cluster),
    ("bench.codec", "Codecs", benches.codecs),
    ("faults.", "Faults", benches.faults),
)


class LabSections:
    """The report plug-in of laconic-lab; see ``laconic.report.plugins.Plugin``."""

    schemas = SCHEMAS

    def derive(self, records: Sequence[Record]) -> tuple[list[Record], list[str]]:
        return verdicts(records)

    def sections(self, by_kind: ByKind) -> list[tuple[str, Callable[[], Section]]]:
        found: list[tuple[str, Callable[[], Section]]] = []
        for study, prefix, heading, draw in PAPERS:
            claimed = [one for one in by_kind.get(CLAIM, []) if one.get("study") == study]
            mine = {kind: some for kind, some in by_kind.items() if kind.startswith(prefix)}
            if study == "homomorphic":
                mine |= {kind: some for kind, some in by_kind.items() if kind == "bench.layers"}
            if mine:
                found.append((study, partial(_paper, study, heading, draw, mine, claimed)))
        for prefix, heading, draw_bench in BENCHES:
            mine = {kind: some for kind, some in by_kind.items() if kind.startswith(prefix)}
            if mine:
                found.append((heading, partial(_bench, prefix, heading, draw_bench, mine)))
        return found


def _paper(
    study: str,
    heading: str,
    draw: Callable[[ByKind, Sequence[Mapping[str, Any]]], list[Plot]],
    records: ByKind,
    claimed: Sequence[Mapping[str, Any]],
) -> Section:
    plots = draw(records, claimed)
    tables, more = studies.claims(study, claimed)
    return Section(study, heading, tables=tables, plots=[*plots, *more])


def _bench(prefix: str, heading: str, draw: Callable[[ByKind], list[Plot]], records: ByKind) -> Section:
    return Section(prefix.strip(".").replace(".", "-"), heading, plots=draw(records))


sections = LabSections()
