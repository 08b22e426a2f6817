from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_file import tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cli_runner import Run, file_names, laconic
from laconic import checkpoints, wire


def test_names_shapes_dtypes_and_annotations_come_back(run: Run, model: Path) -> None:
    assert run("pack", model, "-o", "m.lac", "--codec", "uniform:12").exit_code == 0
    assert run("unpack", "m.lac", "-o", "back.safetensors").exit_code == 0
    back, wanted = load_file("back.safetensors"), tensors()
    assert list(back) and set(back) == set(wanted)
    for name, x in wanted.items():
        y = back[name]
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        if not x.is_floating_point() or x.dim() < 2 or x.numel() < 4096:
            assert torch.equal(x, y), name
        else:
            assert torch.allclose(x.double(), y.double(), atol=0.02), name
    with safe_open("back.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_none_gives_the_very_file_back(run: Run, model: Path) -> None:
    run("pack", model, "-o", "m.lac", "--codec", "none")
    run("unpack", "m.lac", "-o", "back.safetensors")
    assert Path("back.safetensors").read_bytes() == model.read_bytes()


def test_lac_file_is_the_bundle_that_the_library_writes(run: Run, model: Path) -> None:
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
    found = json.loads(run(*args, "--force", "--json").stdout)
    codecs = {tensor["name"]: tensor["codec"] for tensor in found["tensors"]}
    assert codecs["head.w"] == "bf16" and codecs["body.b"] == "qsgd:4" and codecs["body.w"] == "qsgd:8"
    assert codecs["small"] == codecs["ids"] == "none"
    assert found["bytes_out"] == Path("m.lac").stat().st_size and found["bytes_in"] == model.stat().st_size
    assert found["num_exempt"] == sum(bool(tensor["note"]) for tensor in found["tensors"]) > 0


def test_list_says_what_is_inside(run: Run, model: Path) -> None:
    run("pack", model, "-o", "m.lac", "--codec", "qsgd:8")
    text = run("unpack", "--list", "m.lac").stdout
    assert "200×300" in text and "scalar" in text and "ünï/cødé" in text and "annotations: format" in text
    found = json.loads(run("unpack", "--list", "m.lac", "--json").stdout)
    assert found["metadata"] == {"format": "pt"}
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in found["tensors"]} == {
        name: tuple(x.shape) for name, x in tensors().items()
    }
    assert sum(tensor["nbytes"] for tensor in found["tensors"]) < Path("m.lac").stat().st_size


# ---------------------------------------------------------------------------------------------------------- bad input


def one_line(result, code: int, *words: str) -> None:  # type: ignore[no-untyped-def]
    assert result.exit_code == code, result.output
    assert len(result.stderr.strip().splitlines()) == 1 and not result.stdout, result.output
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.mark.parametrize(
    "spec, words",
    [
        ("nope", "unknown stage 'nope'"),
        ("topk:0", "keep must be in (0, 1], got 0"),
        ("qsgd:40", "bits must be a whole number from 2 to 12, got 40"),
        ("qsgd:4|topk:0.1", "'topk' selects and cannot follow 'qsgd'"),
        ("ef|topk:0.01", "drop it and use 'topk:0.01'"),
        ("", "empty stage"),
    ],
)
def test_bad_spec(run: Run, model: Path, spec: str, words: str) -> None:
    one_line(run("pack", model, "-o", "x.lac", "--codec", spec), 2, words)
    one_line(run("pack", model, "-o", "x.lac", "--codec", "qsgd:4", "--policy", f"*={spec}"), 2)
    assert file_names() == [model.name]


@pytest.mark.parametrize("policy", ["qsgd:4", "=qsgd:4", "a="])
def test_bad_policy(run: Run, model: Path, policy: str) -> None:
    one_line(run("pack", model, "-o", "x.lac", "--codec", "qsgd:4", "--policy", policy), 2, "PATTERN=SPEC")


def test_nan_names_the_tensor_and_leaves_nothing(run: Run, work_dir: Path) -> None:
    bad = torch.randn(100, 100)
    bad[3, 4] = float("nan")
    save_file({"a": torch.randn(100, 100), "b.weight": bad}, "nan.safetensors")
    one_line(run("pack", "nan.safetensors", "-o", "x.lac", "--codec", "qsgd:4"), 1, "'b.weight'", "NaN")
    assert file_names() == ["nan.safetensors"]


def test_file_without_floats(run: Run, work_dir: Path) -> None:
    save_file({"i": torch.arange(5)}, "ints.safetensors")
    one_line(run("pack", "ints.safetensors", "-o", "x.lac", "--codec", "qsgd:4"), 1, "no float tensors", "int64")
    assert run("pack", "ints.safetensors", "-o", "x.lac", "--codec", "none").exit_code == 0
    save_file({}, "empty.safetensors")
    one_line(run("pack", "empty.safetensors", "-o", "y.lac", "--codec", "qsgd:4"), 1, "holds no tensors")


def test_dtype_that_no_frame_carries(run: Run, work_dir: Path) -> None:
    save_file({"f": torch.zeros(4).to(torch.float8_e4m3fn)}, "f8.safetensors")
    one_line(run("pack", "f8.safetensors", "-o", "x.lac", "--codec", "qsgd:4"), 1, "'f'", "F8_E4M3")


def test_wrong_inputs(run: Run, model: Path) -> None:
    Path("text.txt").write_text("not a checkpoint")
    Path("nothing").touch()
    for command, rest in (("pack", ("--codec", "qsgd:4")), ("unpack", ())):
        one_line(run(command, "missing", "-o", "x", *rest), 1, "no such file: missing")
        one_line(run(command, "text.txt", "-o", "x", *rest), 1, "text.txt is not a")
        one_line(run(command, "nothing", "-o", "x", *rest), 1, "nothing is not a")
        one_line(run(command, ".", "-o", "x", *rest), 1, "expected a file to read")
    one_line(run("unpack", model, "-o", "x"), 1, "is not a .lac file")
    one_line(run("unpack", "--list", "text.txt"), 1, "is not a .lac file")
    assert file_names() == ["model.safetensors", "nothing", "text.txt"]


def test_wrong_outputs(run: Run, model: Path) -> None:
    Path("folder").mkdir()
    before = model.read_bytes()

    def pack(out: str, *rest: str):  # type: ignore[no-untyped-def]
        return run("pack", model, "-o", out, "--codec", "qsgd:4", *rest)

    one_line(pack("folder", "--force"), 1, "folder is a folder")
    one_line(pack("nowhere/x.lac"), 1, "no such folder")
    one_line(pack("model.safetensors/x.lac"), 1, "no such folder")
    one_line(pack("x" * 300), 1, "cannot write")
    one_line(pack("/dev/null", "--force"), 1, "/dev/null is something else")
    one_line(pack("model.safetensors", "--force"), 1, "the same file")
    assert pack("m.lac").exit_code == 0
    first = Path("m.lac").read_bytes()
    one_line(pack("m.lac", "--seed", "1"), 1, "m.lac exists", "--force")
    assert Path("m.lac").read_bytes() == first
    assert pack("m.lac", "--seed", "1", "--force").exit_code == 0
    assert Path("m.lac").read_bytes() != first and model.read_bytes() == before
    one_line(run("unpack", "m.lac", "-o", "model.safetensors"), 1, "exists")
    one_line(run("unpack", "m.lac"), 2, "--output", "--list")
    one_line(run("unpack", "--list", "m.lac", "-o", "x"), 2, "--list")
    assert file_names() == ["folder", "m.lac", "model.safetensors"]


def test_a_pickled_model_is_refused_with_a_way_out(run: Run, model: Path) -> None:
    torch.save({"weight": torch.ones(3)}, "model.pt")
    one_line(run("pack", "model.pt", "-o", "m.lac", "--codec", "qsgd:4"), 1, "model.pt", "torch.save", "safetensors")
    Path("model.pt").write_bytes(b"not a model")
    one_line(run("pack", "model.pt", "-o", "m.lac", "--codec", "qsgd:4"), 1, "model.pt is not a safetensors file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(run: Run, model: Path) -> None:
    Path("locked").mkdir(mode=0o500)
    one_line(run("pack", model, "-o", "locked/x.lac", "--codec", "qsgd:4"), 1, "cannot write")


def test_every_cut_and_flip_is_refused(run: Run, model: Path) -> None:
    run("pack", model, "-o", "m.lac", "--codec", "qsgd:8")
    whole = Path("m.lac").read_bytes()
    for end in (0, 1, 23, 24, 200, len(whole) // 2, len(whole) - 1):
        Path("bad.lac").write_bytes(whole[:end])
        one_line(run("unpack", "bad.lac", "-o", "x"), 1, "bad.lac")
    for at in range(0, len(whole), len(whole) // 40):
        Path("bad.lac").write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        one_line(run("unpack", "bad.lac", "-o", "x"), 1, "bad.lac")
    assert file_names() == ["bad.lac", "m.lac", "model.safetensors"]


def test_hostile_bundles_are_refused(run: Run, work_dir: Path) -> None:
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
        one_line(run("unpack", "bad.lac", "-o", "x"), 1, "bad.lac", words)
    Path("bad.lac").write_bytes(frame)
    one_line(run("unpack", "bad.lac", "-o", "x"), 1, "no bundle")
    huge = package.Packet("none", package.TensorSpec((1 << 33,), torch.float32), ())
    Path("bad.lac").write_bytes(wire.pack_bundle([(name, wire.pack(huge)) for name in "abc"]))
    one_line(run("unpack", "bad.lac", "-o", "x"), 1, "more than the 0 allowed")
    assert file_names() == ["bad.lac"]


# ---------------------------------------------------------------------------------------------------------- processes


def test_full_disk_leaves_nothing(model: Path) -> None:
    script = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "runpy.run_module('laconic', run_name='__main__')"
    )
    command = [sys.executable, "-c", script, "pack", str(model), "-o", "x.lac", "--codec", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "cannot write" in done.stderr and len(done.stderr.splitlines()) == 1
    assert file_names() == [model.name]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_leaves_nothing_and_no_traceback(work_dir: Path, number: signal.Signals, code: int) -> None:
    g = torch.Generator().manual_seed(0)
    save_file({f"w{i}": torch.randn(500, 1000, generator=g) for i in range(100)}, "large.safetensors")
    command = [sys.executable, "-m", "laconic", "pack", "large.safetensors", "-o", "x.lac", "--codec", "threshold:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 30
        while not list(work_dir.glob(".*.partial")) and time.monotonic() < until and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in stderr
    assert file_names() == ["large.safetensors"]


def test_process_keeps_json_alone_on_stdout(model: Path) -> None:
    done = laconic("pack", model, "-o", "m.lac", "--codec", "fp16", "--json")
    assert done.returncode == 0 and isinstance(json.loads(done.stdout), dict) and done.stderr == ""
    bad = laconic("unpack", model, "-o", "x", "--json")
    assert bad.returncode == 1 and bad.stdout == "" and "Traceback" not in bad.stderr
