"""Figures on pages are those of the Records they name."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType
from xml.etree import ElementTree

import pytest
from doc_pages import ROOT


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_tables", ROOT / "tools" / "readme_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_screen_and_the_choices_are_what_the_records_say(refresh, capsys):
    assert refresh.main(["--check"]) == 0, capsys.readouterr().out


def test_the_tables_of_benches_are_what_the_records_say(tables, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_figure_is_noticed(refresh, monkeypatch, capsys):
    first = refresh.first_table
    monkeypatch.setattr(refresh, "first_table", lambda server: first(server).replace("1/", "1/9"))
    assert refresh.main(["--check"]) == 1 and "README.md: stale" in capsys.readouterr().out


def test_a_codec_that_is_not_clearly_faster_is_not_chosen(refresh):
    plain = {"step_s": 1.0, "step_quartiles_s": [0.9, 1.1]}
    assert refresh.pays({"step_s": 0.5, "step_quartiles_s": [0.4, 0.6]}, plain)
    assert not refresh.pays({"step_s": 0.5, "step_quartiles_s": [0.4, 0.95]}, plain)
    assert not refresh.pays({"step_s": 0.97, "step_quartiles_s": [0.8, 0.85]}, plain)


def test_the_picture_is_small_and_says_what_the_records_say(refresh):
    text = (ROOT / "docs" / "links.svg").read_text()
    assert len(text) < 20_000 and "prefers-color-scheme: dark" in text
    words = [found.text for found in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    for rate, link in refresh.LINKS.items():
        assert link in words
        for one in refresh.ways(rate):
            if one["way"] in refresh.SHOWN:
                assert f"{1e3 * one['step_s']:,.0f}" in words


def test_records_that_pages_name_are_in_the_repository():
    text = (ROOT / "docs" / "choosing.md").read_text()
    named = re.findall(r"results/[\w/.-]+\.jsonl", text)
    assert len(named) >= 8 and [path for path in named if not (ROOT / path).exists()] == []
