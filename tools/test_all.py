"""Run every test that needs no GPU and write a dated summary to results/tests/: ``make test-all``.

All test files go to two processes, those with slow tests first, so that no process waits for the other at the end. Each
outcome is appended to build/test-all.jsonl as it comes, and the summary is rewritten every minute: a run that was
interrupted leaves what it has. The summary names machine and commits, counts outcomes by folder, and lists failures,
skips by reason and the slowest tests.

    python tools/test_all.py              starts a run
    python tools/test_all.py --resume     continues the last run with the files that it has not finished
    python tools/test_all.py --failed     runs the failed tests of the last run again, by themselves
    python tools/test_all.py cluster      starts a run of these folders; the summary names the folders left out

A test that failed and passed when it was run again counts as passed and is listed with both commits. Exits with 1 if
the last outcome of a test is a failure.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import pytest

from laconic.records import commit, machine, versions

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
LOG = ROOT / "build" / "test-all.jsonl"
TOP_LEVEL = "top level"
SLOWEST = 15
SUMMARY_EVERY_S = 60
LONGEST = "docs/test_page_blocks.py"
"""The file whose tests take longest, and which one process must therefore start with."""
OPTIONS = (
    "-m", "not gpu", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--timeout", "3600", "-q",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The end of one test: ``passed``, ``failed`` or ``skipped``, for which reason and at which commit."""

    test: str
    outcome: str
    seconds: float
    reason: str = ""
    commit: str | None = None

    @property
    def file(self) -> str:
        return self.test.split("::")[0]

    @property
    def folder(self) -> str:
        return folder_of(self.file)


class Log:
    """The outcomes of a run, kept in a file of JSON lines, and its summary.

    The first line of the file holds the time when the run started; a line ``{"file": …}`` says that all tests of that
    file have ended.
    """

    def __init__(self, path: Path, start: str | None = None) -> None:
        self.path = path
        self.outcomes: list[Outcome] = []
        self.finished: set[str] = set()
        if start is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"start": start}) + "\n", encoding="utf-8")
        first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        self.start = datetime.fromisoformat(first["start"])
        for line in lines:
            if "file" in line:
                self.finished.add(line["file"])
            else:
                self.outcomes.append(Outcome(**line))

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._append(asdict(outcome))

    def finish(self, file: str) -> None:
        self.finished.add(file)
        self._append({"file": file})

    def write_summary(self) -> Path:
        path = ROOT / "results" / "tests" / f"{self.start:%Y-%m-%d-%H%M}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = sorted(set(test_files()) - self.finished)
        text = summary(self.outcomes, unfinished)
        path.write_text(f"# `make test-all`, {self.start:%Y-%m-%d %H:%M} UTC\n\n{text}", encoding="utf-8")
        return path

    def _append(self, line: object) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Recorder:
    """A pytest plug-in of the process that hands out the tests: adds every outcome to the log.

    Args:
        files: Files that are run whole: each is finished when all its tests have an outcome, at once if all need a GPU.
    """

    def __init__(self, log: Log, files: Collection[str] = ()) -> None:
        self.log = log
        self.files = files
        self.commit = commit()
        self._seconds: Counter[str] = Counter()
        self._worst: dict[str, tuple[str, str]] = {}
        self._left: Counter[str] = Counter()
        self._written = time.monotonic()

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if not self._left:
            self._left.update(test.split("::")[0] for test in ids)
            for file in self.files:
                if file not in self._left:
                    self.log.finish(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] += report.duration
        if report.outcome != "passed" and self._worst.get(test, ("", ""))[0] != "failed":
            self._worst[test] = (report.outcome, _reason(report))
        if report.when != "teardown":
            return
        outcome, reason = self._worst.pop(test, ("passed", ""))
        done = Outcome(test, outcome, round(self._seconds.pop(test), 3), reason, self.commit)
        self.log.add(done)
        self._left[done.file] -= 1
        if done.file in self.files and self._left[done.file] == 0:
            self.log.finish(done.file)
        if time.monotonic() - self._written > SUMMARY_EVERY_S:
            self._written = time.monotonic()
            self.log.write_summary()


def main(arguments: Sequence[str]) -> int:
    again = "--failed" in arguments
    if again or "--resume" in arguments:
        log = Log(LOG)
        tests = failed(log.outcomes) if again else [file for file in test_files() if file not in log.finished]
    else:
        log = Log(LOG, datetime.now(timezone.utc).isoformat(timespec="seconds"))
        tests = [file for file in test_files() if not arguments or folder_of(file) in arguments]
    if tests:
        options = [*OPTIONS, f"--rootdir={ROOT}", *(f"{ROOT}/{test}" for test in tests)]
        pytest.main(options, plugins=[Recorder(log, () if again else tests)])
    print(f"wrote {log.write_summary().relative_to(ROOT)}")
    return int(bool(failed(log.outcomes)))


def test_files() -> list[str]:
    """Return all test files relative to the repository, the longest first, then those with slow tests."""

    def order(path: Path) -> tuple[bool, bool, str]:
        name = path.relative_to(TESTS).as_posix()
        return name != LONGEST, "mark.slow" not in path.read_text(encoding="utf-8"), name

    return [path.relative_to(ROOT).as_posix() for path in sorted(TESTS.rglob("test_*.py"), key=order)]


def folder_of(file: str) -> str:
    """Return the test folder of a file: tests/lab/bench/test_run.py -> lab/bench."""
    return "/".join(file.split("/")[1:-1]) or TOP_LEVEL


def failed(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the tests whose last outcome is a failure."""
    return [outcome.test for outcome in _last(outcomes) if outcome.outcome == "failed"]


def summary(outcomes: Sequence[Outcome], unfinished: Sequence[str] = ()) -> str:
    """Return the Markdown summary of the outcomes of a run.

    Args:
        outcomes: In the order in which they came; of several outcomes of one test the last one counts.
        unfinished: Files that have tests without an outcome.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    durations: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    last = _last(outcomes)
    for outcome in last:
        counts[outcome.folder][outcome.outcome] += 1
        durations[outcome.folder] += outcome.seconds
        if outcome.outcome == "skipped":
            reasons[outcome.reason] += 1
    total = sum(counts.values(), Counter[str]())
    slowest = sorted(((outcome.seconds, outcome.test) for outcome in last), reverse=True)[:SLOWEST]
    failures = failed(outcomes)
    repeated = {test: [o for o in outcomes if o.test == test] for test in _repeated(outcomes)}
    host = ", ".join(f"{key} {value}" for key, value in machine().items())
    software = ", ".join(f"{name} {value}" for name, value in versions().items())
    lines = [
        f"{total['passed']} passed, {len(failures)} failed, {total['skipped']} skipped in "
        f"{sum(durations.values()):.0f} s of tests. {_commits(last)}; {host}; {software}.",
        *([f"\nNot run, or not to the end: {', '.join(f'`{file}`' for file in unfinished)}."] if unfinished else []),
        "",
        "| tests | passed | failed | skipped | seconds |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {folder} | {count['passed']} | {count['failed']} | {count['skipped']} | {durations[folder]:.0f} |"
            for folder, count in sorted(counts.items())
        ),
    ]
    lines += ["", "## Failures", "", *(f"- `{test}`" for test in failures)] if failures else []
    if repeated:
        lines += ["", "## Run again", ""]
        lines += [
            f"- `{test}`: {', then '.join(f'{o.outcome} at {o.commit}' for o in ends)}"
            for test, ends in repeated.items()
        ]
    if reasons:
        lines += ["", "## Skipped", "", *(f"- {count}: {reason}" for reason, count in reasons.most_common())]
    lines += ["", "## Slowest", "", *(f"- {seconds:.0f} s `{test}`" for seconds, test in slowest)]
    return "\n".join(lines) + "\n"


def _last(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return list({outcome.test: outcome for outcome in outcomes}.values())


def _repeated(outcomes: Iterable[Outcome]) -> list[str]:
    counts = Counter(outcome.test for outcome in outcomes if outcome.outcome == "failed")
    runs = Counter(outcome.test for outcome in outcomes)
    return [test for test in counts if runs[test] > 1]


def _commits(outcomes: Iterable[Outcome]) -> str:
    """Return the commits at which the tests ran, with the number of tests where there are several."""
    counts = Counter(str(outcome.commit) for outcome in outcomes)
    if len(counts) == 1:
        return f"Commit {next(iter(counts))}"
    return "Commits " + ", ".join(f"{name} ({count} tests)" for name, count in counts.most_common())


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr).strip().splitlines()[-1] if report.longrepr else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
