"""Figures of the pages are drawn from the report's plots, and equal Records give equal files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laconic.errors import ConfigError, FileError
from laconic.report.plots import Data, Mark, Plot
from laconic_lab.studies import load_study
from laconic_lab.studies.figures import Panel, draw_all

ROOT = Path(__file__).resolve().parents[3]

CURVES = Data(
    ("method", "seed", "link", "epoch", "top-1 %", "low", "high"),
    [
        (method, seed, link, epoch, 80.0 + epoch + seed, 79.0 + epoch, 84.0 + epoch)
        for method in ("one", "two")
        for seed in (0, 1)
        for link in ("fast", "slow")
        for epoch in (1, 2, 3)
    ],
)
SHARES = Data(
    ("method", "share", "seconds"),
    [(method, share, 1.0 + number) for method in ("one", "two") for number, share in enumerate(("compute", "wait"))],
)
PLOTS = [
    Plot("lines", "Lines", "", "line", CURVES, "epoch", "top-1 %", series="method", group="seed", pick="link",
         low="low", high="high", marks=(Mark("y", 82.0, "paper"), Mark("x", 2.0, "here"))),
    Plot("points", "Points", "", "points", CURVES, "epoch", "top-1 %", series="method", log="xy", diagonals=(0.9, 1)),
    Plot("bars", "Bars", "", "bars", SHARES, "seconds", "method", series="share"),
    Plot("stacked", "Stacked", "", "bars", SHARES, "seconds", "method", series="share", stacked=True, log="x"),
]  # fmt: skip
FIGURES = {
    "curves": (Panel("lines", 3.0, "fast"), Panel("points"), Panel("missing")),
    "bars": (Panel("bars", 1.5), Panel("stacked")),
    "none": (Panel("missing"),),
}


def test_equal_plots_give_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw_all(FIGURES, PLOTS, tmp_path / "first")
    assert [path.name for path in drawn] == ["curves.svg", "bars.svg"]
    (again,) = draw_all({"bars": FIGURES["bars"]}, PLOTS, tmp_path / "second")
    assert again.read_bytes() == drawn[1].read_bytes()
    curves, bars = (path.read_text() for path in drawn)
    assert "Lines: fast" in curves and "Lines: slow" not in curves and "Points" in curves and "paper" in curves
    assert "compute" in bars and "wait" in bars


def test_unwritable_folder_raises_file_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        draw_all({"bars": FIGURES["bars"]}, PLOTS, tmp_path / "file")


def test_missing_matplotlib_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"laconic\[plots\]"):
        draw_all(FIGURES, PLOTS, tmp_path)


def test_committed_figure_is_drawn_from_the_committed_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study = load_study("homomorphic")
    (drawn,) = study.draw(study.load(ROOT / "results" / "homomorphic"), tmp_path)
    page = ROOT / "docs" / "studies" / "homomorphic" / drawn.name
    assert drawn.read_bytes() == page.read_bytes(), "run python docs/studies/refresh.py"
