"""Tables of benchmark Records, and the blocks of pages they are filled into."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_tables import blocks
from page_blocks import fill, update
from refresh_pages import wanted_pages

from laconic import FileError
from laconic.records import Record, read, write
from laconic.train.methods import METHODS
from laconic_lab.bench import Settings, run

TOP = "# top\n\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n\nend\n"


def columns_of(markdown: str) -> set[int]:
    return {line.replace("\\|", "").count("|") for line in markdown.splitlines() if line.startswith("|")}


def test_codec_records_give_one_table_with_escaped_specs():
    report = run(["topk:0.01|qsgd:4", "sign"], Settings(numel=2000, repeat=1))
    ((name, markdown),) = blocks(report.records())
    assert name == "bench" and markdown.startswith("| codec |") and len(columns_of(markdown)) == 1
    assert "| `topk:0.01\\|qsgd:4` |" in markdown
    assert "`laconic bench 'topk:0.01|qsgd:4' sign --numel 2000 --repeat 1`" in markdown


@pytest.mark.parametrize("specs", [["sign", "uniform:8|huffman", "uniform:8|rans"], ["uniform:8|huffman"]])
def test_coder_records_give_a_table_of_their_own(specs):
    records = run(specs, Settings(numel=2000, repeat=1, data=("gaussian", "weights"))).records()
    ((_, markdown),) = blocks(records)
    parts = markdown.split("\n\n")
    coders = [spec for spec in specs if "|" in spec]
    assert ("| codec |" in parts[0]) == (len(coders) < len(specs))
    rows = [line for line in parts[-2].splitlines() if line.startswith("|")]
    assert "| entropy coder |" in rows[0] and len(rows) == 2 + 2 * len(coders) and len(columns_of(parts[-2])) == 1
    assert sum("| weights |" in row and " % |" in row for row in rows) == len(coders)


def test_goals_are_judged_for_large_tensors_only():
    records = run(["uniform:8", "fp16"], Settings(numel=2000, repeat=1), with_peers=False).records()
    ((_, small),) = blocks(records)
    assert "Goals:" not in small
    for record in records:
        record.values.update(numel=25_000_000, encode_x_memcpy=1.25, decode_x_memcpy=0.5)
        record.values.update(small_encode_us=12.0, small_decode_us=20.0)
    ((_, large),) = blocks(records)
    _, goals = large.split("Goals:\n\n")
    assert goals.splitlines() == [
        "- `uniform:8` encode: 1.25 of 1, met.",
        "- `uniform:8` decode: 0.50 of 1, missed.",
        "- 1,000 values under 20 µs each way: missed by `uniform:8` (12 / 20), `fp16` (12 / 20).",
    ]


@pytest.mark.parametrize("speedup, outcome", [(2.6, "2.60 of 2.5, met"), (1.7, "1.70 of 2.5, missed")])
def test_collective_records_give_a_table_with_the_goal(speedup, outcome):
    common = {
        "command": "laconic bench collective",
        "numel": 1000,
        "ranks": 2,
        "repeat": 9,
        "best_s": 0.1,
        "nbytes": 4000,
    }
    common |= {"median_s": 0.1, "relative_squared_error": 0.0, "speedup_fp32_best": speedup}
    names = {"fp32": 1.0, "shared:8": speedup}
    ((name, markdown),) = blocks(
        [Record("bench.collective", common | {"name": name, "speedup_fp32": ratio}) for name, ratio in names.items()]
    )
    assert name == "collective" and "| fp32 | 100.0 | 1.00 |" in markdown
    assert f"- `shared:8`, × fp32: {outcome}" in markdown


def test_demo_records_give_the_demo_block():
    common = {"model": "mlp", "data": "digits", "workers": 2, "iterations": 20, "command": "laconic demo --methods 1,5"}
    runs = [
        {"method": "1", "what": "all", "accuracy": 91.25, "wire_bytes_per_iteration": 5_000_000.0, "total_s": 2.0},
        {"method": "mine", "what": "a | b", "accuracy": 90.0, "wire_bytes_per_iteration": 20_000.0, "total_s": 1.5},
    ]
    ((name, markdown),) = blocks([Record("demo.method", run | common) for run in runs])
    assert name == "demo" and "`laconic demo --methods 1,5`" in markdown
    assert "| a \\| b | 90.0 | 20.0 | 1/250 | 1.50 |" in markdown
    assert f"| {METHODS['1'][0]} | 91.2" in markdown  # the present description of a known method, not the Record's


def test_records_without_codecs_raise_and_name_the_command():
    with pytest.raises(FileError, match="laconic bench --records"):
        blocks([])


def test_fill_replaces_one_block_and_leaves_the_rest():
    assert fill(TOP, "bench", "new") == TOP.replace("old", "new")
    with pytest.raises(FileError, match="<!-- demo:begin -->"):
        fill(TOP, "demo", "new")
    with pytest.raises(FileError, match="in this order"):
        fill("<!-- a:end -->\n<!-- a:begin -->\n", "a", "new")


def test_update_writes_stale_files_and_check_only_names_them(tmp_path: Path, capsys):
    page = tmp_path / "page.md"
    page.write_text("old")
    assert update({page: "new"}, check=True, command="make docs") == 1 and page.read_text() == "old"
    assert f"{page} is stale: run make docs" in capsys.readouterr().err
    assert update({page: "new"}, check=False, command="make docs") == 0 and page.read_text() == "new"
    assert update({page: "new"}, check=True, command="make docs") == 0


def test_pages_are_filled_from_files_of_records(tmp_path: Path):
    write(run(["sign"], Settings(numel=2000, repeat=1)).records(), tmp_path / "codecs.jsonl")
    (tmp_path / "page.md").write_text(TOP)
    pages = wanted_pages([(tmp_path / "codecs.jsonl", tmp_path / "page.md", None)])
    assert blocks(read(tmp_path / "codecs.jsonl"))[0][1] in pages[tmp_path / "page.md"]
    with pytest.raises(FileError, match="cannot read records"):
        wanted_pages([(tmp_path / "missing.jsonl", tmp_path / "page.md", None)])
