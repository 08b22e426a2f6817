"""The run and the summary of ``make test-all``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import test_all
from test_all import Outcome

OUTCOMES = [
    Outcome("tests/lab/bench/test_run.py::test_a", "passed", 2.0, commit="c1"),
    Outcome("tests/test_wire.py::test_b", "failed", 0.5, "x", commit="c1"),
    Outcome("tests/test_wire.py::test_c", "skipped", 0, "no nft", commit="c1"),
]


def test_summary_counts_outcomes_by_folder_and_names_what_was_not_run():
    text = test_all.summary(OUTCOMES, ["tests/cluster/test_core.py"])
    assert "1 passed, 1 failed, 1 skipped" in text and "Commit c1;" in text
    assert "Not run, or not to the end: `tests/cluster/test_core.py`." in text
    assert "| lab/bench | 1 | 0 | 0 | 2 |" in text and "| top level | 0 | 1 | 1 | 0 |" in text
    assert "- `tests/test_wire.py::test_b`" in text and "- 1: no nft" in text


def test_test_that_passes_when_run_again_is_listed_with_both_commits():
    again = [*OUTCOMES, Outcome("tests/test_wire.py::test_b", "passed", 0.5, commit="c2")]
    text = test_all.summary(again)
    assert "2 passed, 0 failed, 1 skipped" in text and "Commits c1 (2 tests), c2 (1 tests)" in text
    assert "- `tests/test_wire.py::test_b`: failed at c1, then passed at c2" in text and "## Failures" not in text
    assert test_all.failed(OUTCOMES) == ["tests/test_wire.py::test_b"] and test_all.failed(again) == []


def test_every_test_file_is_run_and_the_longest_first():
    files = test_all.test_files()
    assert len(files) == len(set(files)) == len(list(test_all.TESTS.rglob("test_*.py")))
    assert files[0] == f"tests/{test_all.LONGEST}"
    assert {test_all.folder_of(file) for file in files} >= {"lab/bench", test_all.TOP_LEVEL}


def test_interrupted_run_is_resumed_and_failed_tests_run_again(tmp_path: Path):
    """The run stops in the second file; the resumed one runs that file whole, and not the first one again."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(test_all.__file__, tmp_path / "tools")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "tests" / "test_a.py").write_text(
        "from pathlib import Path\ndef test_once():\n    Path('once').open('x').close()\n"
    )
    (tmp_path / "tests" / "test_c.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_on_gpu(): pass\n")
    (tmp_path / "tests" / "test_b.py").write_text(
        "from pathlib import Path\ndef test_first(): pass\ndef test_second(): assert Path('repaired').exists()\n"
    )

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "tools/test_all.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        (path,) = (tmp_path / "results" / "tests").glob("*.md")
        return done.returncode, path.read_text()

    code, text = run()
    assert code == 1 and "2 passed, 1 failed" in text and "Not run" not in text
    log = tmp_path / "build" / "test-all.jsonl"
    lines = [line for line in log.read_text().splitlines() if "test_b.py" not in line or "test_first" in line]
    log.write_text("\n".join(lines) + "\n")
    code, text = run("--resume")
    assert code == 1 and "2 passed, 1 failed" in text and "Not run" not in text
    (tmp_path / "repaired").touch()
    code, text = run("--failed")
    assert code == 0 and "3 passed, 0 failed" in text and "test_second`: failed at" in text
