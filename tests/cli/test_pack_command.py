from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from checkpoint_file import tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cli_runner import Run, assert_error, file_names
from laconic import checkpoints, wire


def test_names_shapes_dtypes_and_annotations_are_restored(run: Run, model: Path) -> None:
    assert run("pack", model, "-o", "m.lac", "--codec", "uniform:12").exit_code == 0
    assert run("unpack", "m.lac", "-o", "back.safetensors").exit_code == 0
    restored, original = load_file("back.safetensors"), tensors()
    assert list(restored) and set(restored) == set(original)
    for name, x in original.items():
        y = restored[name]
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        if not x.is_floating_point() or x.dim() < 2 or x.numel() < 4096:
            assert torch.equal(x, y), name
        else:
            assert torch.allclose(x.double(), y.double(), atol=0.02), name
    with safe_open("back.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_codec_none_restores_the_same_bytes(run: Run, model: Path) -> None:
    run("pack", model, "-o", "m.lac", "--codec", "none")
    run("unpack", "m.lac", "-o", "back.safetensors")
    assert Path("back.safetensors").read_bytes() == model.read_bytes()


def test_lac_file_is_a_bundle_of_the_library(run: Run, model: Path) -> None:
    run("pack", model, "-o", "m.lac", "--codec", "topk:0.1|qsgd:4", "--seed", "3")
    blob = Path("m.lac").read_bytes()
    frames = wire.unpack_bundle(blob)
    assert frames[-1][0] == checkpoints.METADATA and len(frames) == len(tensors()) + 1
    assert bytes(wire.pack_bundle(frames)) == blob
    run("pack", model, "-o", "same.lac", "--codec", "topk:0.1|qsgd:4", "--seed", "3")
    run("pack", model, "-o", "other.lac", "--codec", "topk:0.1|qsgd:4", "--seed", "4")
    assert Path("same.lac").read_bytes() == blob != Path("other.lac").read_bytes()


def test_policy_and_exemptions_are_applied_and_shown(run: Run, model: Path) -> None:
    args = ("pack", model, "-o", "m.lac", "--codec", "qsgd:8", "--policy", "head.*=bf16", "--policy", "*.b=qsgd:bits=4")
    result = run(*args)
    assert "bf16 instead of qsgd:8: 1 tensor that matches 'head.*'" in result.stdout
    assert "x smaller" in result.stdout
    summary = json.loads(run(*args, "--force", "--json").stdout)
    codecs = {tensor["name"]: tensor["codec"] for tensor in summary["tensors"]}
    assert codecs["head.w"] == "bf16" and codecs["body.b"] == "qsgd:4" and codecs["body.w"] == "qsgd:8"
    assert codecs["small"] == codecs["ids"] == "none"
    assert summary["bytes_out"] == Path("m.lac").stat().st_size and summary["bytes_in"] == model.stat().st_size
    assert summary["num_exempt"] == sum(bool(tensor["note"]) for tensor in summary["tensors"]) > 0


def test_list_shows_all_tensors(run: Run, model: Path) -> None:
    run("pack", model, "-o", "m.lac", "--codec", "qsgd:8")
    text = run("unpack", "--list", "m.lac").stdout
    assert "200×300" in text and "scalar" in text and "ünï/cødé" in text and "annotations: format" in text
    listing = json.loads(run("unpack", "--list", "m.lac", "--json").stdout)
    assert listing["metadata"] == {"format": "pt"}
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in listing["tensors"]} == {
        name: tuple(x.shape) for name, x in tensors().items()
    }
    assert sum(tensor["nbytes"] for tensor in listing["tensors"]) < Path("m.lac").stat().st_size


@pytest.mark.parametrize("spec, words", [
    ("nope", "unknown stage 'nope'"), ("topk:0", "keep must be in (0, 1], got 0"),
    ("qsgd:40", "bits must be a whole number from 2 to 12, got 40"),
    ("qsgd:4|topk:0.1", "'topk' selects and cannot follow 'qsgd'"), ("ef|topk:0.01", "drop it and use 'topk:0.01'"),
    ("", "empty stage"),
])  # fmt: skip
def test_invalid_spec_is_one_line(run: Run, model: Path, spec: str, words: str) -> None:
    assert_error(run("pack", model, "-o", "x.lac", "--codec", spec), 2, words)
    assert_error(run("pack", model, "-o", "x.lac", "--codec", "qsgd:4", "--policy", f"*={spec}"), 2)
    assert file_names() == [model.name]


@pytest.mark.parametrize("policy", ["qsgd:4", "=qsgd:4", "a="])
def test_invalid_policy_is_one_line(run: Run, model: Path, policy: str) -> None:
    assert_error(run("pack", model, "-o", "x.lac", "--codec", "qsgd:4", "--policy", policy), 2, "PATTERN=SPEC")


def test_nan_is_reported_with_the_tensors_name(run: Run, work_dir: Path) -> None:
    bad = torch.randn(100, 100)
    bad[3, 4] = float("nan")
    save_file({"a": torch.randn(100, 100), "b.weight": bad}, "nan.safetensors")
    assert_error(run("pack", "nan.safetensors", "-o", "x.lac", "--codec", "qsgd:4"), 1, "'b.weight'", "NaN")
    assert file_names() == ["nan.safetensors"]


def test_file_without_float_tensors(run: Run, work_dir: Path) -> None:
    save_file({"i": torch.arange(5)}, "ints.safetensors")
    assert_error(run("pack", "ints.safetensors", "-o", "x.lac", "--codec", "qsgd:4"), 1, "no float tensors", "int64")
    assert run("pack", "ints.safetensors", "-o", "x.lac", "--codec", "none").exit_code == 0
    save_file({}, "empty.safetensors")
    assert_error(run("pack", "empty.safetensors", "-o", "y.lac", "--codec", "qsgd:4"), 1, "holds no tensors")


def test_unsupported_dtype_is_one_line(run: Run, work_dir: Path) -> None:
    save_file({"f": torch.zeros(4).to(torch.float8_e4m3fn)}, "f8.safetensors")
    assert_error(run("pack", "f8.safetensors", "-o", "x.lac", "--codec", "qsgd:4"), 1, "'f'", "F8_E4M3")


def test_unreadable_inputs_are_one_line(run: Run, model: Path) -> None:
    Path("text.txt").write_text("not a checkpoint")
    Path("nothing").touch()
    for command, rest in (("pack", ("--codec", "qsgd:4")), ("unpack", ())):
        assert_error(run(command, "missing", "-o", "x", *rest), 1, "no such file: missing")
        assert_error(run(command, "text.txt", "-o", "x", *rest), 1, "text.txt is not a")
        assert_error(run(command, "nothing", "-o", "x", *rest), 1, "nothing is not a")
        assert_error(run(command, ".", "-o", "x", *rest), 1, "expected a file to read")
    assert_error(run("unpack", model, "-o", "x"), 1, "is not a .lac file")
    assert_error(run("unpack", "--list", "text.txt"), 1, "is not a .lac file")
    assert file_names() == ["model.safetensors", "nothing", "text.txt"]


def test_unwritable_outputs_are_one_line(run: Run, model: Path) -> None:
    Path("folder").mkdir()
    before = model.read_bytes()

    def pack(out: str, *rest: str):  # type: ignore[no-untyped-def]
        return run("pack", model, "-o", out, "--codec", "qsgd:4", *rest)

    assert_error(pack("folder", "--force"), 1, "folder is a folder")
    assert_error(pack("nowhere/x.lac"), 1, "no such folder")
    assert_error(pack("model.safetensors/x.lac"), 1, "no such folder")
    assert_error(pack("x" * 300), 1, "cannot write")
    assert_error(pack("/dev/null", "--force"), 1, "/dev/null is not a regular file")
    assert_error(pack("model.safetensors", "--force"), 1, "the same file")
    assert pack("m.lac").exit_code == 0
    first = Path("m.lac").read_bytes()
    assert_error(pack("m.lac", "--seed", "1"), 1, "m.lac exists", "--force")
    assert Path("m.lac").read_bytes() == first
    assert pack("m.lac", "--seed", "1", "--force").exit_code == 0
    assert Path("m.lac").read_bytes() != first and model.read_bytes() == before
    assert_error(run("unpack", "m.lac", "-o", "model.safetensors"), 1, "exists")
    assert_error(run("unpack", "m.lac"), 2, "--output", "--list")
    assert_error(run("unpack", "--list", "m.lac", "-o", "x"), 2, "--list")
    assert file_names() == ["folder", "m.lac", "model.safetensors"]


def test_pickled_model_is_rejected_with_advice(run: Run, model: Path) -> None:
    torch.save({"weight": torch.ones(3)}, "model.pt")
    assert_error(
        run("pack", "model.pt", "-o", "m.lac", "--codec", "qsgd:4"), 1, "model.pt", "torch.save", "safetensors"
    )
    Path("model.pt").write_bytes(b"not a model")
    assert_error(run("pack", "model.pt", "-o", "m.lac", "--codec", "qsgd:4"), 1, "model.pt is not a safetensors file")


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root")
def test_folder_without_write_permission_is_one_line(run: Run, model: Path) -> None:
    Path("locked").mkdir(mode=0o500)
    assert_error(run("pack", model, "-o", "locked/x.lac", "--codec", "qsgd:4"), 1, "cannot write")


def test_damaged_file_is_rejected(run: Run, model: Path) -> None:
    run("pack", model, "-o", "m.lac", "--codec", "qsgd:8")
    intact = Path("m.lac").read_bytes()
    for end in (0, 23, len(intact) // 2, len(intact) - 1):
        Path("bad.lac").write_bytes(intact[:end])
        assert_error(run("unpack", "bad.lac", "-o", "x"), 1, "bad.lac")
    for at in range(0, len(intact), len(intact) // 10):
        Path("bad.lac").write_bytes(intact[:at] + bytes([intact[at] ^ 4]) + intact[at + 1 :])
        assert_error(run("unpack", "bad.lac", "-o", "x"), 1, "bad.lac")
    assert file_names() == ["bad.lac", "m.lac", "model.safetensors"]


def test_hostile_bundle_is_rejected(run: Run, work_dir: Path) -> None:
    import laconic as package

    frame = package.encode(torch.randn(10), "none")
    note = checkpoints._metadata_frame({"a": "b"})
    for frames, words in (
        ([("a", frame), ("a", frame)], "twice"),
        ([("__metadata__", note), ("__metadata__", note)], "twice"),
        ([("__metadata__", frame)], "JSON object of strings"),
        ([("a", frame[:-1])], "'a'"),
    ):
        Path("bad.lac").write_bytes(wire.pack_bundle(frames))
        assert_error(run("unpack", "bad.lac", "-o", "x"), 1, "bad.lac", words)
    Path("bad.lac").write_bytes(frame)
    assert_error(run("unpack", "bad.lac", "-o", "x"), 1, "expected a bundle")
    huge = package.Packet("none", package.TensorSpec((1 << 33,), torch.float32), ())
    Path("bad.lac").write_bytes(wire.pack_bundle([(name, wire.pack(huge)) for name in "abc"]))
    assert_error(run("unpack", "bad.lac", "-o", "x"), 1, "25,769,803,776 values", "--max-numel 25769803776")
    assert file_names() == ["bad.lac"]


def test_full_disk_leaves_no_file(run: Run, model: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        result = run("pack", model, "-o", "x.lac", "--codec", "none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_error(result, 1, "cannot write")
    assert file_names() == [model.name]


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (SystemExit(143), 143)], ids=["SIGINT", "SIGTERM"])
def test_interrupt_leaves_no_file(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """The signal handlers raise these exceptions; tests/cli/test_train_command.py sends a real signal."""
    names: list[list[str]] = []

    def interrupted(self: object, *args: object, **values: object) -> None:
        names.append(file_names())
        raise error

    monkeypatch.setattr("rich.progress.Progress.update", interrupted)
    result = run("pack", model, "-o", "x.lac", "--codec", "qsgd:4")
    assert result.exit_code == code and "Traceback" not in result.output
    assert any(name.endswith(".partial") for name in names[0]), "the file was being written"
    assert file_names() == [model.name]


def test_json_is_alone_on_stdout(run: Run, model: Path) -> None:
    result = run("pack", model, "-o", "m.lac", "--codec", "fp16", "--json")
    assert result.exit_code == 0 and isinstance(json.loads(result.stdout), dict) and result.stderr == ""
    assert_error(run("unpack", model, "-o", "x", "--json"), 1)
