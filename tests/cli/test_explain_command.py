from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoint_file import tensors

import laconic
from cli_runner import Run


@pytest.fixture
def packed(run: Run, model: Path) -> Path:
    assert run("pack", model, "-o", "m.lac", "--codec", "adaptive:5,m=4|huffman").exit_code == 0
    return Path("m.lac")


def test_table_has_a_row_for_every_tensor(run: Run, packed: Path) -> None:
    shown = run("unpack", "--explain", packed)
    assert shown.exit_code == 0, shown.stderr
    for name in tensors():
        assert name in shown.stdout
    shown = run("unpack", "--explain", "--wide", packed)
    for column in ("H", "N", "levels", "entropy", "packed", "coded", "per sent", "per value"):
        assert column in shown.stdout


def test_json_equals_the_librarys_explanation(run: Run, packed: Path) -> None:
    result = json.loads(run("unpack", "--explain", "--json", packed).stdout)
    packets = {packet["name"]: packet for packet in result["packets"]}
    assert "__metadata__" not in packets and set(packets) == set(tensors())
    body = packets["body.w"]
    assert body["details"]["levels"] == math.floor(2 ** (body["details"]["entropy_estimate"] + 5) + 0.5)
    assert body["entropy"] <= body["bits_after"] < body["details"]["bits_wanted"] <= body["bits_before"]
    assert body["modes"] == {"huffman": 1}
    explained = {packet.name: packet for packet in laconic.explain(packed.read_bytes())}["body.w"]
    assert (explained.entropy, explained.nbytes) == (body["entropy"], body["nbytes"])
    assert packets["steps"]["codec"] == "none" and packets["steps"]["entropy"] is None


def test_bits_of_values_and_positions_are_separate() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    frame = laconic.encode(x, "topk:0.01|qsgd:4|rans")
    (packet,) = laconic.explain(frame)
    assert packet.kept == 1000 and packet.bits_per_kept == pytest.approx(8 * len(frame) / 1000)
    assert packet.position_bits is not None and 8.0 < packet.position_bits < 8.6  # the entropy of 1 % is 8.08 bits
    assert packet.entropy is not None and packet.bits_after is not None
    assert packet.entropy < packet.bits_after < packet.bits_before == 4


@pytest.mark.parametrize("args, line", [
    (("--explain", "--list", "m.lac"), "choose one"), (("--explain", "m.lac", "-o", "x.safetensors"), "write no file"),
    (("m.lac",), "--explain"),
])  # fmt: skip
def test_list_explain_and_output_exclude_each_other(run: Run, packed: Path, args: tuple[str, ...], line: str) -> None:
    shown = run("unpack", *args)
    assert shown.exit_code == 2 and line in shown.stderr and shown.stderr.count("\n") == 1


def test_damaged_file_is_one_line(run: Run, packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    data[-9] ^= 1
    packed.write_bytes(data)
    shown = run("unpack", "--explain", packed)
    assert shown.exit_code == 1 and "m.lac" in shown.stderr and shown.stderr.count("\n") == 1
