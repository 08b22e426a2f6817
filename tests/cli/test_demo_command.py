from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from processes import running

from cli_runner import Run, assert_error, file_names
from laconic.cli import demo, output
from laconic.records import read
from laconic.train.demo import DEMO_METHODS, demo_config
from laconic.train.run import Config

pytest.importorskip("grpc")


def test_short_demo_writes_table_page_and_records(run: Run, work_dir: Path) -> None:
    default, example = demo.EXAMPLES
    assert default == "laconic demo"
    result = run(*shlex.split(example)[1:], "--run-dir", work_dir / "kept")
    assert result.exit_code == 0, result.output
    for text in ("push and pull gradients by Top-k", "of method", "5,247.2", "1/14", "wrote quick.html"):
        assert text in result.stdout
    assert "method 1: iteration 20, loss " in result.stderr and " MB/s" in result.stderr
    assert "2 records written to quick.jsonl" in result.stderr
    assert file_names() == ["kept", "quick.html", "quick.jsonl"] and running(work_dir) == []
    records = read(Path("quick.jsonl"))
    assert [(record.kind, record.values["method"]) for record in records] == [
        ("demo.method", "1"),
        ("demo.method", "5"),
    ]
    assert records[0].values["command"] == "laconic demo --methods 1,5 --iterations 20"
    assert all(record.values["accuracy"] > 30 and record.values["workers"] == 2 for record in records)
    text = Path("quick.html").read_text()
    assert "laconic demo --methods 1,5 --iterations 20" in text
    for plot in ("accuracy-bytes", "loss-bytes", "bits-epoch", "layer-bytes", "slot-error"):
        assert f'data-plot="{plot}"' in text
    assert json.loads(Path("kept/5/summary.json").read_text())["method"] == "5"
    again = run("demo", "--methods", "5", "--run-dir", "kept")
    assert again.exit_code == 1 and "holds a run already" in again.stderr


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replace the launcher; return the configurations that it gets."""
    configs: list[Config] = []

    def launch(runs: dict[Path, Config], **_: Any) -> list[dict[str, Any]]:
        configs.extend(runs.values())
        common = {"accuracy": 90.0, "wire_bytes_per_iteration": 100.0, "workers": 2, "model": "mlp", "data": "digits"}
        return [common | {"method": config.method, "iterations": config.iterations} for config in runs.values()]

    monkeypatch.setattr("laconic.train.launch.launch", launch)
    return configs


def test_default_trains_all_methods_and_writes_a_page(run: Run, work_dir: Path, launched: list[Config]) -> None:
    result = run("demo", "--iterations", "50", "--json")
    values = json.loads(result.stdout)
    assert [summary["method"] for summary in values["runs"]] == list(DEMO_METHODS) and values["html"] == "demo.html"
    assert {config.method: config.iterations for config in launched if config.job.every > 1} == {
        "6": 60,
        "adaptive": 60,
        "laconic": 52,
    }
    assert {config.job.workers for config in launched} == {2} and file_names() == ["demo.html"]


def test_page_is_written_to_the_run_dir(run: Run, work_dir: Path, launched: list[Config]) -> None:
    result = run("demo", "--methods", " 2w, laconic,2w", "--run-dir", "kept")
    assert result.exit_code == 0 and "wrote kept/demo.html" in result.stdout and file_names() == ["kept"]
    assert [config.method for config in launched] == ["2w", "laconic"]
    assert "The baseline of bytes and speed-up is 2w." in Path("kept/demo.html").read_text()


def test_narrow_terminal_shows_descriptions_below_the_table(
    run: Run, work_dir: Path, launched: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    for module in (demo, output):
        monkeypatch.setattr(module, "stdout_console", lambda: Console(width=80, highlight=False))
    result = run("demo", "--methods", "1,6")
    assert "\n6: method 5's codecs every 20 iterations" in result.stdout and "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("args, code, words", [
    (["--methods", "1,9"], 2, "unknown method '9'"), (["--methods", " , "], 2, "got none"),
    (["--iterations", "0"], 2, "--iterations must be at least 1, got 0"),
    (["--html", "folder"], 1, "folder is a folder"), (["--record", "folder"], 1, "folder is a folder"),
    (["--html", "file/demo.html"], 1, "is not a writable folder"),
])  # fmt: skip
def test_invalid_input_is_one_line(
    run: Run, work_dir: Path, launched: list[Config], args: list[str], code: int, words: str
) -> None:
    Path("folder").mkdir()
    Path("file").touch()
    result = run("demo", *args)
    assert_error(result, code, words)
    assert not launched and file_names() == ["file", "folder"]


def test_progress_describes_finished_and_current_methods() -> None:
    progress = demo._Progress({Path("runs") / name: demo_config(name, 20) for name in ("1", "5")})

    def report(method: str, iteration: int, sent: int) -> dict[str, Any]:
        counts = {"bytes_sent": sent, "bytes_received": sent, "bytes_raw": 2000 * iteration, "total_s": 1.0}
        return {"run_dir": f"runs/{method}", "iteration": iteration, "loss": 1.0} | counts

    assert progress.finished([report("1", 4, 4000)]) == []
    assert (progress.done, progress.total) == (4, 40)
    assert progress.line == "method 1: iteration 4, loss 1.000, 0.01 MB/s, 0 B saved"
    first = [report("1", 20, 20_000), report("1", 20, 20_000)]
    lines = progress.finished([*first, report("5", 10, 500)])
    assert lines == ["method 1: iteration 20, loss 1.000, 0.08 MB/s, 0 B saved"]
    progress.finished([*first, report("5", 11, 500)])
    assert (progress.done, progress.line) == (31, "method 5: iteration 11, loss 1.000, 0.00 MB/s, 21 kB saved")
    assert progress.finished([*first, report("5", 12, 500)]) == []
