from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from laconic.records import Record, write
from laconic_lab.bench import Settings, run

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "readme_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    report = run(["topk:0.01|qsgd:4", "sign"], Settings(numel=2000, repeat=1))
    write(report.records(), tmp_path / "codecs.jsonl")
    (tmp_path / "README.md").write_text("# top\n\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n\nend\n")
    return ["--records", str(tmp_path / "codecs.jsonl"), "--readme", str(tmp_path / "README.md")]


def test_table_is_written_once_and_checked(script: ModuleType, files: list[str], tmp_path: Path) -> None:
    assert script.main([*files, "--check"]) == 1
    assert "old" in (tmp_path / "README.md").read_text()
    assert script.main(files) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# top\n\n<!-- bench:begin -->\n| codec |") and text.endswith("<!-- bench:end -->\n\nend\n")
    assert "| `topk:0.01\\|qsgd:4` |" in text and "old" not in text
    assert "`laconic bench 'topk:0.01|qsgd:4' sign --numel 2000 --repeat 1`" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert script.main([*files, "--check"]) == 0


def test_coders_get_a_table_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    settings = Settings(numel=2000, repeat=1, data=("gaussian", "weights"))
    for name, specs in (("both", ["sign", "uniform:8|huffman", "uniform:8|rans"]), ("coders", ["uniform:8|huffman"])):
        records, readme = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.md"
        write(run(specs, settings).records(), records)
        readme.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
        assert script.main(["--records", str(records), "--readme", str(readme)]) == 0
        tables = readme.read_text().split("\n\n")
        assert [("| codec |" in part, "| entropy coder |" in part) for part in tables] == (
            [(True, False), (False, False)] if name == "both" else [(False, False)]
        ) + [(False, True), (False, False)]
        rows = [line for line in tables[-2].splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
        assert len(rows) == 2 + 2 * (len(specs) - (name == "both"))
        assert sum("| weights |" in row and " % |" in row for row in rows) == (len(rows) - 2) // 2


def test_the_demo_has_markers_of_its_own(script: ModuleType, files: list[str], tmp_path: Path) -> None:
    common = {"model": "mlp", "data": "digits", "workers": 2, "iterations": 20, "command": "laconic demo --methods 1,5"}
    runs = [
        {"method": "1", "what": "all", "accuracy": 91.25, "wire_bytes_per_iteration": 5_000_000.0, "total_s": 2.0},
        {"method": "5", "what": "a | b", "accuracy": 90.0, "wire_bytes_per_iteration": 20_000.0, "total_s": 1.5},
    ]
    write([Record("demo.method", run | common) for run in runs], tmp_path / "demo.jsonl")
    page = tmp_path / "README.md"
    page.write_text("<!-- demo:begin -->\n<!-- demo:end -->\n" + page.read_text())
    files[1] = str(tmp_path / "demo.jsonl")
    assert script.main([*files, "--check"]) == 1 and script.main(files) == 0 and script.main([*files, "--check"]) == 0
    text = page.read_text()
    assert "| 5 | a \\| b | 90.0 | 20.0 | 1/250 | 1.50 |" in text and "`laconic demo --methods 1,5`" in text
    assert "old" in text.split("<!-- bench:begin -->")[1]


def test_missing_markers_and_records_are_told(
    script: ModuleType, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("# top\n")
    assert script.main(files) == 1 and "<!-- bench:begin -->" in capsys.readouterr().err
    (tmp_path / "codecs.jsonl").write_text("")
    assert script.main(files) == 1 and "laconic bench --records" in capsys.readouterr().err
    (tmp_path / "codecs.jsonl").unlink()
    assert script.main(files) == 1 and "cannot read records" in capsys.readouterr().err
