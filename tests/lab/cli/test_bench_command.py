from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runner import Run
from laconic.kernels import cpu
from laconic.records import read

SMALL = ("--numel", "20000", "--repeat", "2")


def test_table_shows_codecs_alternatives_goals_and_ceilings(run: Run) -> None:
    result = run("bench", "topk:0.01", "fp16", *SMALL)
    assert result.exit_code == 0, result.output
    for text in ("topk:0.01", "plain torch", "torch.topk", "np.argpartition", "copy_ to float16", "zlib level 1"):
        assert text in result.stdout
    assert "only reads runs at" in result.stdout
    assert "not judged here" in result.stdout and "missed" not in result.stdout


def test_json_output_matches_the_records(run: Run, work_dir: Path) -> None:
    result = run("bench", "qsgd:4", "sign", *SMALL, "--no-peers", "--json", "--records", "out/bench.jsonl")
    printed = json.loads(result.stdout)
    assert [codec["spec"] for codec in printed["codecs"]] == ["qsgd:4", "sign"] and printed["peers"] == []
    assert printed["codecs"][0]["encode_floor_x_memcpy"] == 1.3
    records = read(work_dir / "out" / "bench.jsonl")
    assert [record.kind for record in records] == ["bench.machine", "bench.codec", "bench.codec"]
    assert records[1].values["encode_s"] == printed["codecs"][0]["encode_s"]
    assert records[0].values["command"] == "laconic bench qsgd:4 sign --numel 20000 --repeat 2"
    assert "3 Records" in result.stderr


@pytest.mark.parametrize("args, code, words", [
    (["nope:4"], 2, "unknown stage 'nope'"), (["dpp"], 2, "'dpp' is neither a benchmark (codecs, "),
    (["ef|topk:0.01"], 2, "'ef' in 'ef|topk:0.01' keeps memory"),
    (["qsgd:40"], 2, "bits must be a whole number from 2 to 12, got 40"), (["qsgd:4", "--numel", "3"], 2, "--numel"),
    (["qsgd:4", "--threads", "0"], 2, "--threads"), (["qsgd:4", "--records", "."], 1, "is a folder"),
])  # fmt: skip
def test_invalid_arguments_give_one_line(run: Run, work_dir: Path, args: list[str], code: int, words: str) -> None:
    result = run("bench", *args)
    assert result.exit_code == code
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1 and not result.stdout


def test_wrong_codec_is_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu.qsgd_decode

    def broken(norms, packed, *, bits, bucket, out, weight):  # type: ignore[no-untyped-def]
        real(norms, packed, bits=bits, bucket=bucket, out=out, weight=weight)
        out[7] = 1.0

    monkeypatch.setattr(cpu, "qsgd_decode", broken)
    result = run("bench", "qsgd:4", *SMALL)
    assert result.exit_code == 1 and "qsgd:4" in result.stderr and not result.stdout
