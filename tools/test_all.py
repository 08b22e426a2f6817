"""Run every test that needs no GPU, folder by folder, and write a dated summary to results/tests/: ``make test-all``.

The summary names the machine and the commit, counts outcomes by folder, and lists failures, skips by reason and the
slowest tests. It is rewritten after each folder, so that an interrupted run leaves what it has. Arguments select
folders (``python tools/test_all.py cluster lab/bench``). Exits with 1 if a test failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from laconic.records import commit, machine, versions

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
TOP_LEVEL = "top level"
SLOWEST = 15
PYTEST = (sys.executable, "-m", "pytest", "-m", "not gpu", "-n", "2", "--dist", "loadfile", "--timeout", "3600", "-q")


def main(arguments: Sequence[str]) -> int:
    folders = list(arguments) or test_folders()
    now = datetime.now(timezone.utc)
    path = ROOT / "results" / "tests" / f"{now:%Y-%m-%d-%H%M}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    cases: list[ElementTree.Element] = []
    broken: list[str] = []
    for done, folder in enumerate(folders, 1):
        print(f"== {folder} ({done} of {len(folders)})", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "junit.xml"
            subprocess.run([*PYTEST, f"--junitxml={report}", *files_of(folder)], cwd=ROOT)
            if report.exists():
                cases += ElementTree.parse(report).iter("testcase")
            else:
                broken.append(folder)
        text = summary(cases, folders[done:], broken)
        path.write_text(f"# `make test-all`, {now:%Y-%m-%d %H:%M} UTC\n\n{text}", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
    return int(bool(broken) or any(_outcome(case) in ("failure", "error") for case in cases))


def test_folders() -> list[str]:
    """Return the folders that hold test files, relative to tests/, and the top level last."""
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    return [*sorted(folders - {"."}), TOP_LEVEL]


def files_of(folder: str) -> list[str]:
    return [str(path) for path in sorted((TESTS if folder == TOP_LEVEL else TESTS / folder).glob("test_*.py"))]


def summary(cases: Sequence[ElementTree.Element], missing: Sequence[str] = (), broken: Sequence[str] = ()) -> str:
    """Return the Markdown summary of test cases of junit reports.

    Args:
        missing: Folders that have not been run.
        broken: Folders whose run left no report.
    """
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    durations: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in cases:
        folder, outcome = _folder(case.get("classname") or ""), _outcome(case)
        outcomes[folder][outcome] += 1
        durations[folder] += float(case.get("time") or 0)
        if outcome == "skipped":
            reasons[str(next(iter(case)).get("message"))] += 1
    failures = [_name(case) for case in cases if _outcome(case) in ("failure", "error")]
    slowest = sorted(((float(case.get("time") or 0), _name(case)) for case in cases), reverse=True)[:SLOWEST]
    total = sum(outcomes.values(), Counter[str]())
    host = ", ".join(f"{key} {value}" for key, value in machine().items())
    software = ", ".join(f"{name} {value}" for name, value in versions().items())
    lines = [
        f"{total['passed']} passed, {len(failures)} failed, {total['skipped']} skipped in "
        f"{sum(durations.values()):.0f} s of tests. Commit {commit()}; {host}; {software}.",
        *([f"\nNot run: {', '.join(missing)}."] if missing else []),
        *([f"\nEnded without a report: {', '.join(broken)}."] if broken else []),
        "",
        "| tests | passed | failed | skipped | seconds |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {folder} | {count['passed']} | {count['failure'] + count['error']} | {count['skipped']} "
            f"| {durations[folder]:.0f} |"
            for folder, count in sorted(outcomes.items())
        ),
    ]
    lines += ["", "## Failures", "", *(f"- `{name}`" for name in failures)] if failures else []
    if reasons:
        lines += ["", "## Skipped", "", *(f"- {count}: {reason}" for reason, count in reasons.most_common())]
    lines += ["", "## Slowest", "", *(f"- {seconds:.0f} s `{name}`" for seconds, name in slowest)]
    return "\n".join(lines) + "\n"


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return next((tag for tag in ("failure", "error", "skipped") if tag in tags), "passed")


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _folder(classname: str) -> str:
    """Return the test folder of a junit class name: tests.lab.bench.test_run -> lab/bench."""
    return "/".join(classname.split(".")[1:-1]) or TOP_LEVEL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
