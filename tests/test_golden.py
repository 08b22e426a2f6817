"""Frames that were frozen decode to what they did, and the same input still gives the same bytes."""

from __future__ import annotations

import pytest

import laconic
from golden import make
from laconic import kernels
from laconic.codecs import registry

CASES = pytest.mark.parametrize("case", make.CASES, ids=[case.name for case in make.CASES])
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


@CASES
@BACKENDS
def test_golden_frame_decodes_to_the_same_values(case, backend):
    with kernels.use_backend(backend):
        tensor = laconic.decode(case.path.read_bytes())
    wanted = case.make()
    assert tensor.shape == wanted.shape and tensor.dtype == wanted.dtype
    assert make.digest(tensor) == make.digests()[case.name]


@CASES
@BACKENDS
def test_golden_input_encodes_to_the_same_bytes(case, backend):
    with kernels.use_backend(backend):
        frame = case.encode()
        assert laconic.decode(frame).equal(laconic.decode(case.path.read_bytes()))
    assert frame == case.path.read_bytes() or not case.bytes_are_ours


def test_golden_bundle_is_read_and_written_unchanged():
    frozen = make.BUNDLE.read_bytes()
    assert make.bundle() == frozen
    decoded = laconic.decode_bundle(frozen)
    assert list(decoded) == ["layer.weight", "layer.bias", "ŝ", ""]
    assert [tuple(x.shape) for x in decoded.values()] == [(9, 37), (9,), (2, 2), (1,)]


def test_every_codec_has_a_golden_frame():
    covered = {stage.split(":")[0] for case in make.CASES for stage in case.spec.split("|")}
    assert set(registry.names()) - {"ef", "momentum"} <= covered


def test_golden_frames_cover_all_chunk_modes():
    modes = {
        mode: case.name
        for case in make.CASES
        for packet in laconic.explain(case.path.read_bytes())
        for mode in packet.modes
    }
    assert set(modes) == {"constant", "raw", "huffman", "rans"}


def test_golden_files_are_all_described():
    described = {case.path.name for case in make.CASES} | {make.BUNDLE.name}
    assert {path.name for path in make.HERE.glob("*.bin")} == described
    assert set(make.digests()) == {case.name for case in make.CASES}


def test_golden_inputs_follow_the_formula():
    first = [((i * 2654435761 % 2**32) - 2**31) / 2**31 for i in (1, 2, 3)]
    assert make.ramp(3).double().tolist() == pytest.approx([v**3 for v in first], rel=1e-6)


def test_make_does_not_overwrite_golden_files(tmp_path, monkeypatch):
    for case in make.CASES:
        (tmp_path / case.path.name).write_bytes(b"frozen")
    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(make, "BUNDLE", tmp_path / "bundle.bin")
    monkeypatch.setattr(make, "DIGESTS", tmp_path / "decoded.sha256")
    make.main()
    assert {path.read_bytes() for path in tmp_path.glob("*.bin") if path.name != "bundle.bin"} == {b"frozen"}
    assert make.BUNDLE.exists()
