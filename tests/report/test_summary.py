from __future__ import annotations

from typing import Any

import pytest

from laconic.errors import InputError
from laconic.records import Record
from laconic.report import compare


def summary(method: str, sent: float, **more: Any) -> dict[str, Any]:
    common = {"model": "mlp", "data": "digits", "workers": 2, "iterations": 200, "accuracy": 92.5}
    seconds = {"compute_s": 0.5, "encode_s": 0.25, "communication_s": 1.0, "total_s": 1.75}
    return {"method": method, "wire_bytes_per_iteration": sent} | common | seconds | more


RUNS = [summary("1", 5_247_232.0), summary("4", 660_000.0), summary("6", 1_857.3, accuracy=88.0)]


def test_table_compares_with_method_1_or_else_the_first() -> None:
    table = compare(RUNS)
    assert table.columns == (
        "method", "accuracy %", "kB per iteration", "of method 1", "encode s", "waiting s", "total s",
    )  # fmt: skip
    assert table.rows[0] == ("1", "92.5", "5,247.2", "1", "0.25", "1.00", "1.75") and table.text_columns == 1
    assert [row[3] for row in table.rows] == ["1", "1/8.0", "1/2,825"]
    other = compare(RUNS[::-1][:2])
    assert other.columns[3] == "of method 6" and [row[3] for row in other.rows] == ["1", "355.4"]


def test_columns_without_figures_are_left_out() -> None:
    known = summary("1", 10_000.0, overlapped_s=0.5, bytes_saved=2_500_000, restarts=1, servers=2, what="all of it")
    columns = compare([known, summary("4", 0.0)]).columns
    assert columns[1] == "what it does"
    assert columns[5:] == ("MB saved", "encode s", "overlapped s", "waiting s", "total s", "restarts")
    rows = compare([known, summary("4", 0.0, accuracy=None)]).rows
    assert rows[0][1] == "all of it" and rows[0][5:7] == ("2.5", "0.25") and rows[0][-1] == "1"
    assert rows[1][1:5] == ("", "–", "0.0", "–") and rows[1][5] == "–"
    assert "restarts" not in compare([summary("1", 1.0, restarts=0)]).columns
    with pytest.raises(InputError, match="at least one run"):
        compare([])


def test_records_and_summaries_make_the_same_table() -> None:
    records = [Record("demo.method", one, machine={"cpu": "a <chip>", "cores": 2}, commit="abc") for one in RUNS]
    assert compare(records) == compare(RUNS)
