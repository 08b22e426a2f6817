"""What ``laconic.explain`` says of a frame is what the frame holds."""

from __future__ import annotations

import math

import pytest
import torch

import laconic
import laws
import mutate
from laconic import FrameError, wire
from laconic.kernels.sections import CHUNK


def shannon(symbols):
    counts = torch.bincount(symbols.long()).double()
    p = counts[counts > 0] / symbols.numel()
    return float(-(p * p.log2()).sum())


def explained(x, spec, **how):
    frame = laconic.encode(x, spec, **how)
    (packet,) = laconic.explain(frame)
    assert packet.name == "" and packet.codec == str(laconic.codec(spec))
    assert packet.shape == tuple(x.shape) and packet.numel == x.numel()
    assert packet.nbytes == len(frame)
    assert packet.sections == tuple(section.numel() for section in wire.unpack(frame).sections)
    return packet


@pytest.mark.parametrize("spec", laws.EVERY)
def test_every_codec_is_explained(spec):
    for x in (laws.normal(30, 50), laws.normal(1), torch.tensor(0.5), torch.full((70,), -1.0)):
        packet = explained(x, spec)
        if spec.startswith("threshold:1.0") and not packet.sections:  # nothing reaches it
            continue
        assert 1 <= packet.kept <= x.numel()
        assert packet.bits_per_value == pytest.approx(8 * packet.nbytes / x.numel())
        assert packet.bits_per_kept == pytest.approx(8 * packet.nbytes / packet.kept)
        if packet.entropy is not None:
            assert 0 <= packet.entropy <= math.log2(packet.symbols) + 1e-9


@pytest.mark.parametrize("spec", laws.EVERY)
def test_zero_and_empty_tensors_are_explained(spec):
    packet = explained(torch.zeros(9, 9) if spec not in laws.CASTS else torch.empty(0, 9), spec)
    assert packet.kept == 0 and packet.sections == () and packet.bits_per_kept is None and packet.entropy is None
    assert explained(torch.empty(3, 0), spec).bits_per_value is None


@pytest.mark.parametrize("quantizer", ["uniform:5", "adaptive:4.0", "adaptive:4.0,zero=true", "sign:65536"])
@pytest.mark.parametrize("coder", ["", "|huffman", "|rans", "|deflate"])
def test_entropy_is_that_of_the_symbols(quantizer, coder):
    # With one scale for all, symbols and decoded values are the same thing.
    x = laws.normal(20_000)
    packet = explained(x, quantizer + coder)
    _, symbols = laws.roundtrip(x, quantizer).unique(return_inverse=True)
    assert packet.entropy == pytest.approx(shannon(symbols), rel=1e-9)
    assert packet.symbols == int(symbols.max()) + 1
    assert packet.bits_after == pytest.approx(8 * packet.sections[-1] / x.numel())
    assert packet.bits_before == pytest.approx(8 * explained(x, quantizer).sections[-1] / x.numel(), rel=1e-2)
    if coder in ("|huffman", "|rans"):
        assert packet.entropy < packet.bits_after < 1.1 * packet.entropy + 0.1


def test_position_bits_are_reported_separately():
    x = laws.normal(50_000)
    packet = explained(x, "topk:0.02|qsgd:4|rans", seed=3)
    assert packet.kept == 1000 and packet.numel == 50_000
    assert packet.position_bits == pytest.approx(8 * packet.sections[0] / 1000)
    assert packet.bits_after == pytest.approx(8 * packet.sections[-1] / 1000)
    assert packet.bits_before == pytest.approx(4, rel=1e-2)
    assert explained(x, "qsgd:4").position_bits is None


def test_modes_are_counted_by_chunk():
    x = torch.zeros(3 * CHUNK)
    x[:CHUNK] = laws.normal(CHUNK)
    x[2 * CHUNK] = 1.0
    assert explained(x, "uniform:8|rans").modes == {"constant": 1, "rans": 2}
    assert explained(x, "uniform:8|huffman").modes == {"constant": 1, "huffman": 2}
    noise = (torch.arange(3000) * 2654435761 % 2**32).float()
    assert explained(noise, "uniform:8|huffman:auto").modes == {"raw": 1}
    assert explained(noise, "uniform:8|deflate").modes == {} == explained(noise, "uniform:8").modes


def test_large_alphabet_is_explained_without_entropy():
    packet = explained(laws.normal(500), "uniform:30")
    assert packet.entropy is None and packet.bits_after == packet.bits_before == pytest.approx(30, rel=1e-2)


def test_bundle_is_explained_by_packet():
    tensors = {"a": laws.normal(30, 20), "": torch.zeros(5), "ŝ": torch.full((9,), 2.0)}
    blob = laconic.encode_bundle(tensors, "adaptive:5.0|rans")
    packets = laconic.explain(blob)
    assert [packet.name for packet in packets] == list(tensors)
    assert [packet.shape for packet in packets] == [(30, 20), (5,), (9,)]
    assert [packet.kept for packet in packets] == [600, 0, 9]
    with pytest.raises(FrameError, match="declares 9 values, more than the"):
        laconic.explain(blob, max_numel=613)
    assert len(laconic.explain(blob, max_numel=614)) == 3


@pytest.mark.parametrize("spec", [*laws.ADAPTIVE, "uniform:5", "qsgd:4", "terngrad", *laws.CODED])
def test_explaining_an_invalid_frame_raises_frame_error(spec):
    it = mutate.Frame.read(laconic.encode(laws.normal(90) ** 3, spec))
    assert laconic.explain(it.write())
    for blob in (*mutate.with_resized_sections(it, b"\0"), b"", b"LACO", it.write()[:-1], it.write() + b"\0"):
        with pytest.raises(FrameError):
            laconic.explain(blob)
