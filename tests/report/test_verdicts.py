"""Verdicts at the top of a page, the order of its sections, and one colour for each name."""

from __future__ import annotations

import re
from typing import Any

from laconic.records import Record
from laconic.report import build, colours
from laconic.report.page import render
from laconic.report.plots import Data, Plot, Question, Section
from laconic.report.verdicts import Candidate, decide
from report_records import embedded, record


def run(method: str, sent: float, accuracy: float, total_s: float, **more: Any) -> Record:
    values = {"model": "mlp", "data": "digits", "workers": 2, "iterations": 100, "accuracy": accuracy}
    return record("demo.method", method=method, wire_bytes_per_iteration=sent, total_s=total_s, **(values | more))


PLAIN = run("1", 8000.0, 92.0, 8.0)


def top_of(*records: Record) -> str:
    """Return the texts at the top of the page about these Records, without tags."""
    text = build(records).html
    match = re.search(r'<section id="verdicts">(.*?)</section>', text, re.S)
    return re.sub("<[^>]*>", "", match[1]) if match else ""


def test_fastest_run_within_the_limit_is_recommended_with_its_loss() -> None:
    top = top_of(PLAIN, run("4", 1000.0, 91.5, 4.0), run("6", 10.0, 80.0, 1.0))
    assert (
        "Parameter server, mlp on digits, 2 workers, on the link of these runs: take method 4, which is 2.00 times as "
        "fast as method 1 and sends 1/8.0 of its bytes; accuracy 91.5 % beside 92.0 %, one run each."
    ) in top
    assert "method 6 may be faster" not in top and "take method 6" not in top


def test_run_that_sends_least_is_named_for_slower_links() -> None:
    top = top_of(PLAIN, run("4", 1000.0, 91.5, 4.0), run("laconic", 40.0, 91.9, 9.0))
    assert "On a slower link method laconic may be faster: it sends 1/200 of the bytes; accuracy 91.9 %" in top
    top = top_of(PLAIN, run("laconic", 40.0, 91.9, 9.0))
    assert "do not compress" in top and "On a slower link method laconic may be faster" in top
    assert "slower link" not in top_of(PLAIN, run("laconic", 40.0, 91.9, 4.0))


def test_page_says_do_not_compress_if_nothing_pays() -> None:
    top = top_of(PLAIN, run("4", 1000.0, 92.0, 7.9))
    assert "do not compress; the fastest, method 4, is 1.01 times as fast as method 1" in top


def test_without_method_1_there_is_no_verdict() -> None:
    assert top_of(run("4", 1000.0, 92.0, 4.0), run("5", 10.0, 91.0, 1.0)) == ""


def test_faster_ways_beyond_the_limit_are_named() -> None:
    plain = Candidate("plain DDP", 8.0, 800.0, "")
    late = Candidate("ef|topk:0.01", 1.0, 8.0, "with Adam far worse", allowed=False)
    verdict = decide("DDP", plain, [late, Candidate("qsgd:4", 2.0, 100.0, "error 0.07")], "any optimizer")
    assert verdict.choice is not None and verdict.choice.name == "qsgd:4" and verdict.refused == (late,)
    assert decide("DDP", plain, [late], "any optimizer").choice is None


def test_sections_follow_the_order_of_questions() -> None:
    def section(name: str, question: Question) -> Section:
        data = Data(("x",), [(1.0,)])
        return Section(name, name, plots=[Plot(f"{name}-p", "", "", "points", data, "x", "x")], question=question)

    sections = [section("study", Question.STUDIES), section("runs", Question.SERVER), section("ddp", Question.DDP)]
    what_if: dict[str, Any] = {}
    text = render(sections, title="", what_if=what_if)
    assert re.findall(r'<section id="([a-z-]+)">', text) == ["ddp", "what-if", "runs", "study"]
    alone = render(sections[:2], title="", what_if=what_if)
    assert re.findall(r'<section id="([a-z-]+)">', alone) == ["runs", "what-if", "study"]


def plot(ident: str, names: list[str], kind: str = "points", pick: list[str] | None = None) -> Plot:
    rows = [(name, float(i), (pick or [""] * len(names))[i]) for i, name in enumerate(names)]
    series, y = (None, "name") if kind == "bars" else ("name", "value")
    return Plot(ident, "", "", kind, Data(("name", "value", "link"), rows), "value", y, series=series,
                pick="link" if pick else None)  # fmt: skip


def test_name_has_one_colour_and_names_drawn_together_differ() -> None:
    many = [f"m{i}" for i in range(colours.COLOURS + 3)]
    plots = [plot("a", ["x", "y"]), plot("b", ["z", "y"]), plot("c", many), plot("d", ["y", "layer 1"], "bars")]
    numbers = colours.assign(plots)
    assert numbers["x"] != numbers["y"] != numbers["z"] and "layer 1" not in numbers
    assert len({numbers[name] for name in many}) == len(many)
    assert {numbers[name] % colours.COLOURS for name in many} == set(range(colours.COLOURS))
    together = colours.assign([plot("a", ["p", "q"], pick=["100 Mbit/s", "1 Gbit/s"])])
    assert together == {"p": 0, "q": 0}  # never drawn at the same time


def test_page_carries_the_colours_of_its_names() -> None:
    page = embedded(build([PLAIN, run("4", 1000.0, 91.5, 4.0)]).html)
    assert set(page["colours"]) >= {"1", "4"} and page["colours"]["1"] != page["colours"]["4"]
