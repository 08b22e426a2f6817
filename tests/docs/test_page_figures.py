"""Generated tables and pictures match the Records they are computed from."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import choosing_tables
import first_picture
import links_picture
import refresh_pages
from ddp_records import LINKS, steps
from doc_pages import ROOT


def test_generated_parts_of_pages_are_current(capsys):
    assert refresh_pages.main(["--check"]) == 0, capsys.readouterr().err


def test_stale_figure_makes_check_fail(monkeypatch, capsys):
    first_table = refresh_pages.first_table
    monkeypatch.setattr(refresh_pages, "first_table", lambda server: first_table(server).replace("1/", "1/9"))
    assert refresh_pages.main(["--check"]) == 1 and "README.md is stale" in capsys.readouterr().err


def test_codec_that_is_not_clearly_faster_does_not_pay():
    plain = {"step_s": 1.0, "step_quartiles_s": [0.9, 1.1]}
    assert choosing_tables.pays({"step_s": 0.5, "step_quartiles_s": [0.4, 0.6]}, plain)
    assert not choosing_tables.pays({"step_s": 0.5, "step_quartiles_s": [0.4, 0.95]}, plain)
    assert not choosing_tables.pays({"step_s": 0.97, "step_quartiles_s": [0.8, 0.85]}, plain)


def test_picture_of_links_is_small_and_shows_the_recorded_times():
    text = (ROOT / "docs" / "links.svg").read_text()
    assert len(text) < 20_000 and "prefers-color-scheme: dark" in text
    words = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    for rate, link in LINKS.items():
        assert link in words
        for step in steps(rate):
            if step["way"] in links_picture.SHOWN:
                assert f"{1e3 * step['step_s']:,.0f}" in words


def test_first_picture_shows_every_method_with_its_bytes():
    text = (ROOT / "docs" / "first.svg").read_text()
    assert len(text) < 20_000 and "prefers-color-scheme: dark" in text
    words = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert {*first_picture.GPT_SHOWN.values(), *first_picture.DDP_SHOWN.values()} <= set(words)
    assert sum(bool(re.search(r"[GMk]?B$", word or "")) for word in words) == len(first_picture.GPT_SHOWN) + len(
        first_picture.DDP_SHOWN
    )


def test_tables_of_readme_fit_a_repository_page():
    """A table of about 130 characters fits 830 pixels; code and links count by their texts."""
    text = re.sub(r"\]\([^)]*\)", "", (ROOT / "README.md").read_text()).replace("`", "").replace("[", "")
    for table in re.findall(r"(?:^\|.*\n)+", text.partition("## Documentation")[0], re.MULTILINE):
        cells = [
            re.split(r"(?<!\\)\|", row)[1:-1] for row in table.splitlines() if not row.startswith(("|---", "| ---"))
        ]
        longest_words = [max(max(map(len, row[i].split()), default=0) for row in cells) for i in range(len(cells[0]))]
        assert len(cells[0]) <= 7 and sum(longest_words) + 3 * len(cells[0]) < 130, cells[0]


def test_records_named_on_the_choosing_page_exist():
    text = (ROOT / "docs" / "choosing.md").read_text()
    named = re.findall(r"results/[\w/.-]+\.jsonl", text)
    assert len(named) >= 8 and [path for path in named if not (ROOT / path).exists()] == []
