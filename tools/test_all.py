"""Run every test that needs no GPU and write a dated summary to results/tests/: ``make test-all``.

The summary names the machine and the commit, counts outcomes by folder, and lists failures, skips by reason and the
slowest tests. Exits with pytest's status.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from datetime import datetime, timezone
from pathlib import Path

from laconic.records import commit, machine, versions

ROOT = Path(__file__).resolve().parents[1]
SLOWEST = 15


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [
            sys.executable, "-m", "pytest", "-m", "not gpu", "-n", "2", "--dist", "loadfile", "--timeout", "3600",
        ]  # fmt: skip
        status = subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT).returncode
        if not report.exists():
            return status or 1
        text = summary(ElementTree.parse(report), time.monotonic() - began)
    now = datetime.now(timezone.utc)
    path = ROOT / "results" / "tests" / f"{now:%Y-%m-%d}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# `make test-all`, {now:%Y-%m-%d %H:%M} UTC\n\n{text}", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
    return status


def summary(tree: ElementTree.ElementTree, seconds: float) -> str:
    """Return the Markdown summary of a junit report."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    durations: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    reasons: Counter[str] = Counter()
    failures: list[str] = []
    for case in tree.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        folder = _folder(case.get("classname") or "")
        children = {child.tag: child for child in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in children), "passed")
        outcomes[folder][outcome] += 1
        durations[folder] += float(case.get("time") or 0)
        slowest.append((float(case.get("time") or 0), name))
        if outcome == "skipped":
            reasons[str(children["skipped"].get("message"))] += 1
        elif outcome != "passed":
            failures.append(name)
    total = sum(outcomes.values(), Counter[str]())
    host = ", ".join(f"{key} {value}" for key, value in machine().items())
    lines = [
        f"{total['passed']} passed, {total['failure'] + total['error']} failed, {total['skipped']} skipped in "
        f"{seconds:.0f} s. Commit {commit()}; {host}; {', '.join(f'{k} {v}' for k, v in versions().items())}.",
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
    lines += [
        "",
        "## Slowest",
        "",
        *(f"- {took:.0f} s `{name}`" for took, name in sorted(slowest)[: -SLOWEST - 1 : -1]),
    ]
    return "\n".join(lines) + "\n"


def _folder(classname: str) -> str:
    """Return the test folder of a junit class name: tests.lab.bench.test_run -> lab/bench."""
    parts = [part for part in classname.split(".") if part and part[0].islower()]
    return "/".join(parts[1:-1]) or "top level"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
