"""Files that somebody else wrote: one line on stderr in bounded time, no traceback, no control codes in a terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import laconic
from cli_runner import assert_error
from laconic import wire
from laconic.json_files import parse_json, read_json
from laconic.records import Record, read_valid
from laconic.report import gather
from laconic.tables import printable

RED = "\x1b[31mred\u202e\x9b\ud800"
"""Control codes, an override of the direction of text, and half of a surrogate pair."""
RECORD = {"kind": "demo.method", "values": {"method": "1", "workers": 2}, "seed": 0, "machine": {"cpu": "a chip"},
          "versions": {"laconic": "0"}, "commit": None, "at": "2026-01-01"}  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def packed(*frames: tuple[str, bytes]) -> Path:
    path = Path("model.lac")
    path.write_bytes(wire.pack_bundle(frames))
    return path


def zeros(numel: int) -> bytes:
    return bytes(wire.pack(laconic.Packet("none", laconic.TensorSpec((numel,), torch.float32), ())))


# ----------------------------------------------------------------------------------------------------------- unpack


def test_short_file_that_declares_gigabytes_is_refused_without_max_numel(run):
    packed(("w", zeros(1 << 29)))
    assert Path("model.lac").stat().st_size < 200
    for option in ("-o", "--explain"):
        arguments = ("-o", "x.safetensors") if option == "-o" else (option,)
        assert_error(run("unpack", "model.lac", *arguments), 1, "536,870,912 values", "--max-numel 536870912")
    assert not Path("x.safetensors").exists()
    assert run("unpack", "--list", "model.lac").exit_code == 0


def test_max_numel_counts_the_values_of_all_tensors(run):
    packed(("a", zeros(600)), ("b", zeros(600)))
    assert_error(run("unpack", "model.lac", "-o", "x.safetensors", "--max-numel", "1000"), 1, "1,200 values", "1,000")
    assert run("unpack", "model.lac", "-o", "x.safetensors", "--max-numel", "1200").exit_code == 0
    assert_error(run("unpack", "model.lac", "--max-numel", "0", "--list"), 2, "--max-numel")


def test_packed_file_of_the_smallest_codec_is_unpacked_by_default(run):
    x = torch.randn(1 << 18)
    frame = laconic.encode(x, "topk:0.001|qsgd:4")
    packed(("w", frame))
    assert len(x) < 1024 * len(frame)
    assert run("unpack", "model.lac", "-o", "x.safetensors").exit_code == 0


@pytest.mark.parametrize("arguments", [("--list",), ("--explain",), ("--list", "--json"), ("--explain", "--json")])
def test_names_of_a_file_are_printed_escaped(run, arguments):
    name = RED.replace("\ud800", "") + "\r\n\tüber"
    packed((name, laconic.encode(torch.randn(9), "qsgd:4")))
    result = run("unpack", "model.lac", *arguments)
    assert result.exit_code == 0
    assert result.stdout.replace("\n", "").isprintable() and "über" in result.stdout
    assert ("\\u001b" if "--json" in arguments else "\\x1b[31m") in result.stdout


def test_printable_escapes_what_a_terminal_executes():
    assert printable("ok é 日") == "ok é 日"
    assert printable(RED) == r"\x1b[31mred\u202e\x9b\ud800"
    assert printable("a\nb", keep="\n") == "a\nb"


# ----------------------------------------------------------------------------------------------------------- report


BAD_LINES = [
    (DEEP, "nesting"),
    ('{"kind": "demo.method", "values": ' + '{"a":' * 400 + "1" + "}" * 401, "nesting"),
    (json.dumps(RECORD | {"kind": "\ud800"}), "not Unicode"),
    (json.dumps(RECORD | {"values": {"method": "1", "what": "\udfff"}}), "not Unicode"),
    (json.dumps(RECORD | {"machine": "a chip"}), "'machine' has the type str"),
    (json.dumps(RECORD | {"versions": [1]}), "'versions' has the type list"),
    (json.dumps(RECORD | {"at": 5}), "'at' has the type int"),
    (json.dumps(RECORD | {"commit": {}}), "'commit' has the type dict"),
    (json.dumps(RECORD | {"values": []}), "'values' has the type list"),
    (json.dumps(RECORD | {"more": 1}), "an object with kind"),
    ('{"kind": "demo.method"}', "'values' is missing"),
    ('{"kind": "demo.method", "values": {"workers": 1' + "0" * 400 + "}}", "401 digits"),
    ("[1, 2]", "an object with kind"), ("\x00", "line 2"), ('"' + RED[:5], "line 2"),
]  # fmt: skip


@pytest.mark.parametrize("line, words", BAD_LINES)
def test_line_that_is_no_record_is_named_and_the_others_are_read(line, words):
    Path("records.jsonl").write_text(json.dumps(RECORD) + "\n" + line + "\n")
    sources = gather([Path("records.jsonl")])
    assert len(sources.records) == 1 and len(sources.skipped) == 1
    assert words in sources.skipped[0] and "line 2" in sources.skipped[0] and len(sources.skipped[0]) < 200
    Path("records.jsonl").write_text(line)
    with pytest.raises(laconic.ConfigError, match="does not hold records"):
        gather([Path("records.jsonl")])


def test_report_names_a_file_with_lines_that_are_no_records_in_one_line(run):
    Path("records.jsonl").write_text("\n".join([json.dumps(RECORD), *(line for line, _ in BAD_LINES)]))
    result = run("report", "records.jsonl", "-o", "page.html")
    assert result.exit_code == 0 and "1 run," in result.stdout
    assert len(result.stderr.splitlines()) == 1 and f"and {len(BAD_LINES) - 1} more" in result.stderr


ODD_VALUES = [
    {"workers": 1e400}, {"workers": 2**63 + 1}, {"workers": -5}, {"workers": 2**62, "numel": 2**62, "compute_s": 1.0},
    {"model": ["a"], "data": {}}, {"iterations": 0, "total_s": 5.0, "wire_bytes": 1}, {"method": RED[:9]},
    {"numel": 10**9, "compute_s": 1e308, "iterations": 1, "wire_bytes": 1e308}, {"accuracy": 2**63}, {"every": -1},
    {"numel": 1.0, "compute_s": 1.0, "iterations": 1, "wire_bytes": 1, "every": 0},
]  # fmt: skip


@pytest.mark.parametrize("odd", [
    pytest.param(ODD_VALUES, id="all"),
    *(pytest.param([values], marks=pytest.mark.slow, id=str(i)) for i, values in enumerate(ODD_VALUES)),
])  # fmt: skip
def test_records_with_odd_values_do_not_stop_the_report(run, odd):
    strange = [RECORD | {"values": {"method": "2", "workers": 2, **values}} for values in odd]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, [RECORD, *strange])))
    result = run("report", "records.jsonl", "-o", "page.html", "--price-hour", "1")
    assert result.exit_code == 0, result.exception
    assert all(line.isprintable() for line in result.output.splitlines())
    assert "run" in result.stdout and Path("page.html").stat().st_size > 1000


def test_track_with_a_bad_worker_is_left_out(run):
    columns = {name: [1] for name in ("bytes_received", "bytes_sent", "iteration", "loss", "seconds")}
    tracks = [
        RECORD | {"kind": "train.track", "values": {"run": "1", "worker": worker, **columns}}
        for worker in ("zero", None, 1.5, [], True, -(2**63))
    ]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, [RECORD, *tracks])))
    result = run("report", "records.jsonl", "-o", "page.html")
    assert result.exit_code == 0 and "worker must be int" in result.stderr and "1 run," in result.stdout


def test_links_that_lead_back_are_read_once(folder: Path):
    (folder / "results").mkdir()
    (folder / "results" / "records.jsonl").write_text(json.dumps(RECORD) + "\n")
    for name in "abcdef":
        (folder / "results" / name).symlink_to(".")
    (folder / "results" / "self").symlink_to("self")
    assert len(gather([Path("results")]).records) == 1


def test_pipe_and_device_in_place_of_records_are_refused(folder: Path):
    run_folder = folder / "run"
    run_folder.mkdir()
    os.mkfifo(run_folder / "summary.json")
    (run_folder / "records.jsonl").symlink_to("/dev/zero")
    (folder / "good.jsonl").write_text(json.dumps(RECORD) + "\n")
    os.mkfifo(folder / "pipe.jsonl")
    sources = gather([Path("good.jsonl"), Path("run")])
    assert len(sources.records) == 1 and "not a regular file" in sources.skipped[0]
    (run_folder / "records.jsonl").unlink()
    assert len(gather([Path("good.jsonl"), Path("run")]).skipped) == 1
    assert any("pipe.jsonl" in line for line in gather([Path()]).skipped)


def test_name_of_a_folder_that_is_not_unicode_is_reported(run, folder: Path):
    strange = folder / os.fsdecode(b"run-\xff\x1b[2J")
    strange.mkdir()
    (strange / "config.json").write_text("{}")
    (strange / "records.jsonl").write_text(json.dumps(RECORD) + "\n")
    result = run("report", ".", "-o", "page.html")
    assert result.exit_code == 0, result.output
    assert r"run-\udcff" in Path("page.html").read_text(encoding="utf-8")


def test_valid_records_round_trip(folder: Path):
    record = Record("demo.method", {"a": [1, 2.5, None, {"b": "é"}]}, 3, {"cpu": "x"}, {"torch": "2"}, "abc", "2026")
    Path("records.jsonl").write_text(record.to_json() + "\n\n" + record.to_json())
    assert read_valid(Path("records.jsonl")) == ([record, record], None)


# ------------------------------------------------------------------------------------------------------------- runs


def test_json_of_strangers_is_bounded(folder: Path):
    assert parse_json('{"a": [1, {"b": "\\ud83d\\ude00"}], "n": 18446744073709551615}')["n"] == 2**64 - 1
    for text in (DEEP, "1" * 5000, '"\\ud800"', "18446744073709551616", '{"\\udc00": 1}', "nul"):
        with pytest.raises(ValueError, match=r"^.{0,120}$"):
            parse_json(text)
    assert parse_json("[1" + "0" * 400 + "]", long_as_none=True) == [None]
    Path("deep.json").write_text(DEEP)
    with pytest.raises(laconic.errors.FileError, match=r"deep\.json is not JSON: more than 64 levels"):
        read_json(Path("deep.json"))


@pytest.mark.parametrize("text", [
    DEEP, '{"servers": 1' + "0" * 15 + "}", '{"servers": 1' + "0" * 500 + "}",
    '{"job": ' + '{"a":' * 900 + "1" + "}" * 901,
    '{"model": "\\u001b[2J\\ud800"}', '{"iterations": 1e400, "servers": -3}', "[]", "",
])  # fmt: skip
def test_hostile_config_gives_one_line_in_bounded_time(run, text, folder: Path):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(text)
    result = run("watch", "run", "--once")
    assert result.exit_code in (0, 1) and "Traceback" not in result.output and "no config.json" not in result.output
    assert all(line.isprintable() for line in result.output.splitlines())
    assert_error(run("train", "--resume", "--run-dir", "run"), 1, "config.json")


def test_config_that_is_a_pipe_or_a_device_is_refused(run, folder: Path):
    (folder / "run").mkdir()
    os.mkfifo(folder / "run" / "config.json")
    assert_error(run("watch", "run", "--once"), 1, "run")
    assert_error(run("train", "--resume", "--run-dir", "run"), 1, "not a regular file")
    (folder / "run" / "config.json").unlink()
    (folder / "run" / "config.json").symlink_to("/dev/zero")
    assert_error(run("train", "--resume", "--run-dir", "run"), 1, "not a regular file")


@pytest.mark.parametrize("name", ["config.json", "status.json", "progress.jsonl", "accuracy.jsonl", "summary.json"])
def test_file_of_gigabytes_does_not_take_the_memory(run, name, folder: Path):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text('{"model": "mlp", "iterations": 9}')
    with (folder / "run" / name).open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    result = run("watch", "run", "--once")
    assert result.exit_code in (0, 1) and "Traceback" not in result.output
    assert name.endswith(".jsonl") or "longer than 256 MiB" in result.output.replace("\n", " ")


def test_summary_of_a_run_must_have_its_times(run, folder: Path):
    from laconic.train.run import Config

    Config().save(folder / "run")
    arguments = ("plan", "--what-if", "run")
    for text, words in (("{}", "compute_s"), ("[]", "compute_s"), (DEEP, "64 levels"), ('{"compute_s": "x"}', "'x'")):
        (folder / "run" / "summary.json").write_text(text)
        assert_error(run(*arguments), 1, "summary.json", words)
    (folder / "run" / "summary.json").unlink()
    os.mkfifo(folder / "run" / "summary.json")
    assert_error(run(*arguments), 1, "not a regular file")


@pytest.mark.parametrize("change", [
    {"settings": []}, {"outcomes": {}}, {"outcomes": [1]}, {"outcomes": [{"label": "none"}]},
    {"outcomes": [{"label": 1, "loss": 0.5, "nbytes": 1, "compute_s": 1, "slots": {}}]},
    {"outcomes": [{"label": "none", "loss": "x", "nbytes": 1, "compute_s": 1, "slots": {}}]},
    {"outcomes": [{"label": "none", "loss": 1, "nbytes": 1, "compute_s": -1, "slots": {}}]},
    {"outcomes": [{"label": "none", "loss": 1, "nbytes": 1, "compute_s": 1, "slots": {"w": {"growth": None}}}]},
])  # fmt: skip
def test_damaged_file_of_tune_is_refused_in_one_line(change, folder: Path):
    from laconic.tuning.search import Kept

    values = {"format": "laconic evidence", "settings": {"steps": 8}, "outcomes": []}
    path = folder / "tune.json"
    path.write_text(json.dumps(values))
    Kept(path, {"steps": 8})
    path.write_text(json.dumps(values | change))
    with pytest.raises(laconic.errors.FileError, match=r"^[^\n]*tune\.json[^\n]*$"):
        Kept(path, {"steps": 8})


def test_profile_that_is_a_pipe_or_nested_json_is_refused(run, folder: Path):
    os.mkfifo(folder / "pipe.json")
    (folder / "deep.json").write_text(DEEP)
    (folder / "latin.json").write_bytes(b"\xff")
    for name, words in (("pipe.json", "not a regular file"), ("deep.json", "profile"), ("latin.json", "profile")):
        assert_error(run("plan", "--profile", name, "--params", "1000000", "--step-time", "0.1"), 1, name, words)
