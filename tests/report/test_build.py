from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import pytest

from laconic.errors import FileError
from laconic.records import Record, RecordError
from laconic.report import Prices, Report, build, write_page
from laconic.report.plots import Data, Mark, Plot, Section
from laconic.report.plugins import ByKind
from laconic.report.run_plots import overview
from laconic.report.runs import runs_of
from report_records import embedded, record

VOID = {"meta", "br", "hr", "img", "link", "input"}


def summary(method: str, sent: float, **more: Any) -> Record:
    common = {"model": "mlp", "data": "digits", "workers": 2, "servers": 1, "iterations": 200, "accuracy": 92.5}
    seconds = {"compute_s": 0.5, "encode_s": 0.25, "communication_s": 1.0, "apply_s": 0.1, "total_s": 3.6}
    return record("demo.method", method=method, wire_bytes_per_iteration=sent, **{**common, **seconds, **more})


class Outline(HTMLParser):
    """Collects the elements of a page and checks that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_table_has_speed_up_and_cost() -> None:
    runs = runs_of([summary("1", 5e6), summary("5", 50_000.0, total_s=1.8)])
    priced = overview(runs, Prices(hour=10.0, gigabyte=0.5))
    row = dict(zip(priced.table.columns, priced.table.rows[1], strict=True))
    assert row["bytes, of the baseline"] == "1/100" and row["speed-up"] == "2.00×" and row["MB in all"] == "10.00"
    first = dict(zip(priced.data.columns, priced.data.rows[0], strict=True))
    assert first["cost"] == pytest.approx(3.6 / 3600 * 3 * 10 + 1.0 * 0.5)  # three machines, and a gigabyte
    assert all(part in priced.table.caption for part in ("10 an hour", "0.5 a gigabyte", "is 1."))
    assert "cost" not in overview(runs, Prices()).table.columns


def test_runs_are_compared_with_method_1_of_the_same_model() -> None:
    other = {"model": "lenet5", "run": "other"}
    runs = runs_of([summary("1", 1000.0), summary("5", 10.0), summary("5", 100.0, **other)])
    table = overview(runs, Prices()).table
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["bytes, of the baseline"] for row in rows] == ["1", "1/100", "1"]
    assert [row["model"] for row in rows] == ["mlp", "mlp", "lenet5"] and "workers" not in table.columns


def test_page_is_well_formed_and_loads_nothing() -> None:
    text = build([summary("1", 5e6), summary("5", 5e4)], title="a title", command="laconic demo").html
    outline = Outline(text)
    assert outline.open == [] and outline.all("html") == [{"lang": "en"}]
    assert {tag for tag, _ in outline.tags}.isdisjoint({"link", "img", "iframe", "object", "embed", "form"})
    assert not any({"src", "srcset", "style"} & set(attributes) for _, attributes in outline.tags)
    assert all(str(link["href"]).startswith("#") for link in outline.all("a"))
    assert not re.search(r"url\(|@import|\son\w+=", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text and "unsafe" not in text and "prefers-color-scheme: dark" in text
    assert "Measured on: a chip, 2 cores." in text and "commit abc" in text and "Again: laconic demo" in text


def test_markup_in_names_stays_text() -> None:
    nasty = "</script><script>alert('&')</script><img src=x onerror=alert(1)>"
    track = {"worker": 0, "iteration": [1], "seconds": [1.0], "loss": [1.0], "bytes_sent": [1], "bytes_received": [1]}
    records = [
        summary("5", 10.0, what=nasty, model=nasty, run=nasty),
        record("train.track", run=nasty, numel=1, iterations_per_epoch=1, **track),
        record("train.slots", run=nasty, exchanges=1,
               slots=[{"slot": nasty, "numel": 1, "sent": 1, "received": 1, "errors": [0.5]}]),
        record(nasty, a=1),
    ]  # fmt: skip
    report = build(records, title=nasty, command=nasty, skipped=[nasty])
    outline = Outline(report.html)
    assert outline.open == [] and len(outline.all("script")) == 6 and outline.all("img") == []
    assert "<script>alert" not in report.html and embedded(report.html)["plots"]
    assert any(nasty in line for line in report.skipped)


def test_values_that_are_not_finite_become_null() -> None:
    data = Data(("a", "b"), [("x", float("nan")), ("y", 1.0), (None, float("inf"))])
    assert data.values()["cells"] == [
        {"words": ["x", "y"], "at": [0, 1, None]},
        {"numbers": [None, 1.0, None]},
    ]
    assert build([summary("1", 5e6, accuracy=float("nan"), loss=float("inf"))]).runs == 1


class FakePlugin:
    """A plug-in with one section, drawn from Records of kind ``fake.point``."""

    class Point(TypedDict):
        x: float

    schemas: ClassVar[dict[str, Any]] = {"fake.point": Point}

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def derive(self, records: list[Record]) -> tuple[list[Record], list[str]]:
        return [], [f"{len(records)} Records seen"]

    def sections(self, by_kind: ByKind) -> list[tuple[str, Callable[[], Section]]]:
        return [("fake", lambda: self.draw(by_kind["fake.point"]))]

    def draw(self, points: Sequence[Mapping[str, Any]]) -> Section:
        if self.error is not None:
            raise self.error
        data = Data(("x",), [(point["x"],) for point in points])
        return Section("fake", "Fake", plots=[Plot("fake-x", "X", "", "points", data, "x", "x")])


def build_with(monkeypatch: pytest.MonkeyPatch, plugins: list[Any], *records: Record) -> Report:
    monkeypatch.setattr("laconic.report.plugins.installed", lambda: plugins)
    return build(records)


def test_plugin_draws_its_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    report = build_with(monkeypatch, [FakePlugin()], record("fake.point", x=1.0), summary("1", 5e6))
    assert "fake-x" in report.plots and report.runs == 1 and report.skipped == ("2 Records seen",)


def test_without_a_plugin_the_report_names_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    report = build_with(monkeypatch, [], record("fake.point", x=1.0), summary("1", 5e6))
    assert report.runs == 1 and report.skipped == ("1 Record of kind fake.point: no plot is made of these",)
    assert 'id="skipped"' in report.html and "fake.point" in report.html


@pytest.mark.parametrize("error", [AttributeError("x"), TypeError("x"), AssertionError("x"), KeyError("x")])
def test_error_of_a_plugin_is_named_and_the_rest_drawn(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    report = build_with(monkeypatch, [FakePlugin(error)], record("fake.point", x=1.0), summary("1", 5e6))
    assert report.runs == 1
    assert any(type(error).__name__ in line for line in report.skipped), report.skipped


class PairsPlugin(FakePlugin):
    """A plug-in that needs points of one length, and a mark that is a number."""

    class Point(TypedDict):
        x: list[float]

    schemas: ClassVar[dict[str, Any]] = {"fake.point": Point}

    def draw(self, points: Sequence[Mapping[str, Any]]) -> Section:
        rows = [(float(sum(values)),) for values in zip(*(point["x"] for point in points), strict=True)]
        data = Data(("x",), rows)
        plot = Plot("fake-x", "X", "", "points", data, "x", "x", marks=(Mark("y", points[0]["x"][0], "first"),))
        return Section("fake", "Fake", plots=[plot])


def test_record_that_does_not_fit_the_others_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [record("fake.point", x=[1.0, 2.0]) for _ in range(3)]
    report = build_with(monkeypatch, [PairsPlugin()], *points, record("fake.point", x=[1.0]))
    assert report.plots.count("fake-x") == 1
    assert any("(1 left out)" in line for line in report.skipped), report.skipped


def test_mark_that_is_not_finite_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    report = build_with(monkeypatch, [PairsPlugin()], record("fake.point", x=[float("nan"), 1.0]))
    assert [plot["marks"] for plot in embedded(report.html)["plots"] if plot["id"] == "fake-x"] == [[]]


def test_record_error_of_a_section_is_named_and_the_rest_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RecordError("points have no common unit")
    report = build_with(monkeypatch, [FakePlugin(error)], record("fake.point", x=1.0), summary("1", 5e6))
    assert report.runs == 1 and "fake: points have no common unit" in report.skipped


@pytest.mark.parametrize("broken, message", [
    (record("fake.point", y=1.0), "Record of kind fake.point: x is missing (1 Record left out)"),
    (record("fake.point", x="far"), "Record of kind fake.point: x must be float, got 'far' (1 Record left out)"),
    (record("train.track", run="1"), "Record of kind train.track: bytes_received is missing (1 Record left out)"),
    (record("demo.method", workers="two"), "Record of kind demo.method: workers must be int | None, got 'two'"),
])  # fmt: skip
def test_record_without_a_required_field_is_named_and_the_rest_drawn(
    monkeypatch: pytest.MonkeyPatch, broken: Record, message: str
) -> None:
    report = build_with(monkeypatch, [FakePlugin()], record("fake.point", x=1.0), broken, summary("1", 5e6))
    assert report.runs == 1 and "fake-x" in report.plots
    assert any(line.startswith(message) for line in report.skipped), report.skipped


def test_track_with_columns_of_different_lengths_is_named() -> None:
    track = {
        "worker": 0, "iteration": [1, 2], "seconds": [1.0], "loss": [1.0], "bytes_sent": [1], "bytes_received": [1],
    }  # fmt: skip
    report = build([summary("5", 10.0, run="a"), record("train.track", run="a", **track)])
    assert any("runs: a: fields must have the same length" in line for line in report.skipped)


def test_page_is_written_atomically(tmp_path: Path) -> None:
    write_page("one", tmp_path / "new" / "demo.html")
    write_page("two", tmp_path / "new" / "demo.html")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["demo.html"]
    assert (tmp_path / "new" / "demo.html").read_text() == "two"
    with pytest.raises(FileError, match="cannot write the page to"):
        write_page("three", tmp_path / "new")
