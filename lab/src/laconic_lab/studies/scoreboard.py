"""The scoreboard of a study: every claim with one of five outcomes, and what the outcome rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.records import Record, read
from laconic.tables import Table
from laconic_lab.studies.claims import Finding, verdict

__all__ = ["GOAL", "OUTCOMES", "index_tables", "other_records", "outcome", "scoreboard"]

GOAL = "goal"
"""Section of claims that are our own goals and not a paper's."""
OUTCOMES = ("reproduced", "not reproduced", "set-up differs", "fitted", "formula only")
"""Outcomes of a paper's claims. A goal of ours is ``met``, ``not met`` or has ``no interval``."""
NO_COMMIT = "†"
"""Mark of Records that name no commit."""
CLAIM_COLUMNS = ("claim", "paper", "here (95 %)", "outcome", "runs", "epochs", "machine")
GOAL_COLUMNS = ("what", "goal", *CLAIM_COLUMNS[2:])
RecordOf = Callable[[Mapping[str, Any]], Record]


def outcome(finding: Finding) -> str:
    """Return the outcome of a claim: one of ``OUTCOMES`` for a paper's, whether it is met for a goal of ours.

    The whole interval must agree with the claim, not only the mean. A goal with a single run has no interval.
    """
    evidence = finding.evidence
    if evidence.how == "formula":
        return "formula only"
    holds = verdict(finding.claim, evidence.interval, "measured").partition(",")[0] == "yes"
    if finding.claim.section == GOAL:
        single = holds and evidence.interval.runs == 1
        return "no interval" if single else "met" if holds else "not met"
    if evidence.how == "fitted":
        return "fitted"
    if evidence.differs:
        return "set-up differs"
    return "reproduced" if holds else "not reproduced"


def _row(finding: Finding, record_of: RecordOf) -> tuple[str, ...]:
    claim, evidence = finding
    records = [record_of(values) for values in evidence.sources]
    reason = f": {evidence.differs}" if evidence.differs else ""
    machines = dict.fromkeys(map(_machine, records))
    measured = evidence.how != "formula"
    return (
        claim.statement, claim.claimed, finding.found, outcome(finding) + reason,
        f"{evidence.interval.runs:,}" if measured else "–", _lengths(evidence.sources), ", ".join(machines) or "–",
    )  # fmt: skip


def scoreboard(findings: Sequence[Finding], record_of: RecordOf) -> Table:
    """Return the scoreboard of a study: of a paper's claims, or of goals of ours."""
    rows = [_row(finding, record_of) for finding in findings]
    columns = GOAL_COLUMNS if all(one.claim.section == GOAL for one in findings) else CLAIM_COLUMNS
    return Table(columns, rows, text_columns=len(columns), title="Scoreboard")


def index_tables(
    studies: Iterable[tuple[str, Sequence[Finding], RecordOf, Sequence[Record]]],
    others: Mapping[str, Sequence[Record]] | None = None,
) -> list[Table]:
    """Return the scoreboard of all papers, that of our goals, and a count of Records without a commit.

    Args:
        studies: Name, findings, function from values to their Record, and all Records of each study.
        others: Records of benchmarks and tests, by folder.
    """
    rows: dict[bool, list[tuple[str, ...]]] = {False: [], True: []}
    counts = []
    for name, findings, record_of, records in studies:
        link = f"[{name}]({name}.md)"
        for finding in findings:
            rows[finding.claim.section == GOAL].append((link, *_row(finding, record_of)))
        counts.append((link, *_count(records)))
    counts += [(f"`{folder}`", *_count(records)) for folder, records in sorted((others or {}).items())]
    width = len(CLAIM_COLUMNS) + 1
    return [
        Table(("study", *CLAIM_COLUMNS), rows[False], width, "Scoreboard"),
        Table(("study", *GOAL_COLUMNS), rows[True], width, "Goals"),
        Table(("study or benchmark", "Records", f"of these without a commit ({NO_COMMIT})"), counts, 1, "Records"),
    ]


def _count(records: Sequence[Record]) -> tuple[str, str]:
    """Return the number of Records, and of those without a commit."""
    return f"{len(records):,}", f"{sum(record.commit is None for record in records):,}"


def other_records(results: Path, studies: Iterable[str]) -> dict[str, list[Record]]:
    """Return the Records in the folders of ``results`` that belong to no study."""
    known, by_folder = set(studies), dict[str, list[Record]]()
    for path in sorted(results.glob("*/**/*.jsonl")):
        folder = path.relative_to(results).parts[0]
        if folder not in known:
            by_folder.setdefault(folder, []).extend(read(path))
    return by_folder


def _lengths(sources: Sequence[Mapping[str, Any]]) -> str:
    """Return the epochs of the runs, or their steps where they are not measured in epochs."""
    trained = ("accuracy", "peak", "frame_nbytes")  # Records of times also have epochs, to which they are extrapolated
    epochs = sorted({values["epochs"] for values in sources if any(name in values for name in trained)})
    steps = sorted({values["steps"] for values in sources if "steps" in values and "validation_loss" in values})
    return ", ".join([*map(str, epochs), *(f"{number:,} steps" for number in steps)]) or "–"


def _machine(record: Record) -> str:
    """Describe a machine in a word or two, with a mark where the Record names no commit."""
    machine = record.machine
    if "gpu" in machine and record.values.get("device") != "cpu":
        name = str(machine["gpu"]).removeprefix("NVIDIA ")
    else:
        maker = next((word for word in ("Xeon", "EPYC") if word in str(machine.get("cpu"))), str(machine.get("cpu")))
        name = f"{maker}, {machine.get('cores')} cores"
    return name if record.commit else f"{name} {NO_COMMIT}"
