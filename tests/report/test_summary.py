from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from laconic.errors import FileError, InputError
from laconic.records import Record
from laconic.report import NOTES, compare, page, write_page

VOID = {"meta", "br", "hr", "img", "link", "input"}


def summary(method: str, sent: float, **more: Any) -> dict[str, Any]:
    common = {"model": "mlp", "data": "digits", "workers": 2, "iterations": 200, "accuracy": 92.5}
    seconds = {"compute_s": 0.5, "encode_s": 0.25, "communication_s": 1.0, "total_s": 1.75}
    return {"method": method, "wire_bytes_per_iteration": sent} | common | seconds | more


RUNS = [summary("1", 5_247_232.0), summary("4", 660_000.0), summary("6", 1_857.3, accuracy=88.0)]


class Outline(HTMLParser):
    """What is open, what was seen, and what a reader would be told."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_table_compares_with_method_1_or_else_the_first() -> None:
    table = compare(RUNS)
    assert table.columns == (
        "method",
        "accuracy %",
        "kB per iteration",
        "of method 1",
        "encode s",
        "waiting s",
        "total s",
    )
    assert table.rows[0] == ("1", "92.5", "5,247.2", "1", "0.25", "1.00", "1.75") and table.words == 1
    assert [row[3] for row in table.rows] == ["1", "1/8.0", "1/2,825"]
    other = compare(RUNS[::-1][:2])
    assert other.columns[3] == "of method 6" and [row[3] for row in other.rows] == ["1", "355.4"]


def test_columns_follow_what_the_runs_know() -> None:
    known = summary("1", 10_000.0, overlapped_s=0.5, bytes_saved=2_500_000, restarts=1, servers=2, what="all of it")
    columns = compare([known, summary("4", 0.0)]).columns
    assert columns[1] == "what it does"
    assert columns[5:] == ("MB saved", "encode s", "overlapped s", "waiting s", "total s", "restarts")
    rows = compare([known, summary("4", 0.0, accuracy=None)]).rows
    assert rows[0][1] == "all of it" and rows[0][5:7] == ("2.5", "0.25") and rows[0][-1] == "1"
    assert rows[1][1:5] == ("", "–", "0.0", "–") and rows[1][5] == "–"
    assert "restarts" not in compare([summary("1", 1.0, restarts=0)]).columns
    assert "2 parameter servers and 2 workers" in page([known])
    with pytest.raises(InputError, match="at least one run"):
        compare([])


def test_records_and_summaries_make_the_same_table_and_records_say_where_from() -> None:
    records = [Record("demo.method", one, machine={"cpu": "a <chip>", "cores": 2}, commit="abc") for one in RUNS]
    assert compare(records) == compare(RUNS)
    text = page(records, command="laconic demo")
    for words in ("a &lt;chip&gt;, 2 cores", "commit abc", "torch ", "<code>laconic demo</code>"):
        assert words in text
    assert "commit" not in page(RUNS)


def test_page_needs_nothing_else() -> None:
    text = page(RUNS, title="laconic demo")
    outline = Outline(text)
    assert outline.open == []
    assert {tag for tag, _ in outline.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form"})
    assert not any({"src", "href", "srcset", "xlink:href"} & set(attributes) for _, attributes in outline.tags)
    assert not re.search(r"https?:|url\(|@import|javascript|\son\w+=", text)
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert outline.all("html") == [{"lang": "en"}] and "laconic demo" in outline.text


def test_table_and_charts_can_be_read_aloud() -> None:
    text = page(RUNS)
    outline = Outline(text)
    assert len(outline.all("caption")) == 1 and len(outline.all("table")) == 1
    assert [one["scope"] for one in outline.all("th")] == ["col"] * 7 + ["row"] * 3
    assert {"role": "region", "aria-labelledby": "runs", "tabindex": "0", "class": "wide"} in outline.all("div")
    assert NOTES in outline.text
    charts = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(charts) == 2
    for chart, words in zip(charts, ("method 6: 1.9 kB", "method 6: 88.0 %"), strict=True):
        ids = chart.attrib["aria-labelledby"].split()
        assert chart.attrib["role"] == "img" and ids == [chart[0].attrib["id"], chart[1].attrib["id"]]
        assert (chart[0].tag, chart[1].tag) == ("title", "desc") and words in str(chart[1].text)
    identifiers = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_page_has_the_words_behind_the_figures() -> None:
    text = page([summary("1", 10_000.0, what="all of it")])
    head = re.findall(r"<th scope='col'[^>]*>(.*?)</th>", text)
    assert (head[0], head[1], head[-1]) == ("method", "accuracy %", "what it does")
    assert re.findall(r"<td[^>]*>(.*?)</td>", text)[-2:] == ["1.75", "all of it"]


def test_bars_grow_by_the_logarithm() -> None:
    text = page([summary("1", 1_000_000.0), summary("4", 10_000.0), summary("5", 1_000.0), summary("6", 0.0)])
    chart = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", text, re.DOTALL)[0])
    lengths = [float(rect.attrib["width"]) for rect in chart.iter("rect")]
    assert lengths[0] - lengths[1] == pytest.approx(2 * (lengths[1] - lengths[2]), abs=0.3)
    assert lengths[2] > 0 and lengths[3] == 0
    marks = [mark.text for mark in chart.iter("text") if mark.attrib.get("class") == "mark"]
    assert marks == ["100 B", "1 kB", "10 kB", "100 kB", "1 MB"]
    width = float(chart.attrib["viewBox"].split()[2])
    assert all(float(rect.attrib["x"]) + float(rect.attrib["width"]) < width for rect in chart.iter("rect"))


def test_names_from_outside_stay_text() -> None:
    nasty = "<script>alert('&')</script>"
    text = page([summary(nasty, 10.0, what=nasty, model=nasty)], title=nasty, command=nasty)
    assert "<script" not in text and Outline(text).open == []


def test_all_figures_are_there_as_csv() -> None:
    outline = Outline(page([summary("1", 10.0, what="a, b"), summary("4", 5.0, loss=0.5)]))
    found = next(text for text in outline.text if text.startswith("method,"))
    rows = list(csv.DictReader(io.StringIO(found)))
    assert rows[0]["what"] == "a, b" and rows[1]["loss"] == "0.5" and rows[0]["loss"] == ""


def test_nothing_to_draw_is_left_out() -> None:
    text = page([summary("1", 0.0, accuracy=None)])
    assert "<svg" not in text and Outline(text).open == []


def test_page_is_written_as_a_whole(tmp_path: Path) -> None:
    write_page("one", tmp_path / "new" / "demo.html")
    write_page("two", tmp_path / "new" / "demo.html")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["demo.html"]
    assert (tmp_path / "new" / "demo.html").read_text() == "two"
    with pytest.raises(FileError, match="cannot write the page to"):
        write_page("three", tmp_path / "new")
