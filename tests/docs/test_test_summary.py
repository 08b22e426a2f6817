"""The summary that ``make test-all`` writes."""

from __future__ import annotations

from xml.etree import ElementTree

import test_all

REPORT = """<testsuite>
<testcase classname="tests.lab.bench.test_run" name="test_a" time="2.0"/>
<testcase classname="tests.test_wire" name="test_b" time="0.5"><failure message="x"/></testcase>
<testcase classname="tests.test_wire" name="test_c" time="0"><skipped message="no nft"/></testcase>
</testsuite>"""


def test_summary_counts_outcomes_by_folder_and_names_what_was_not_run():
    text = test_all.summary(list(ElementTree.fromstring(REPORT)), ["cluster"], ["cli"])
    assert "1 passed, 1 failed, 1 skipped" in text and "Not run: cluster." in text
    assert "| lab/bench | 1 | 0 | 0 | 2 |" in text and "| top level | 0 | 1 | 1 | 0 |" in text
    assert "- `tests.test_wire::test_b`" in text and "- 1: no nft" in text and "Ended without a report: cli." in text


def test_every_test_file_belongs_to_one_folder():
    files = [path for folder in test_all.test_folders() for path in test_all.files_of(folder)]
    assert len(files) == len(set(files)) == len(list(test_all.TESTS.rglob("test_*.py")))
