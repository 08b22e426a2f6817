"""Every codec passes; every kind of slip is caught."""

from __future__ import annotations

import pytest
import torch

from laconic.codecs import codec
from laconic.kernels import cpu, reference
from laconic_lab.bench import SPECS
from laconic_lab.bench.checks import WrongResultError, check
from laconic_lab.bench.codecs import gradient_like

MORE = (
    "qsgd:12,norm=l2", "qsgd:3,round=nearest", "uniform:1", "uniform:16", "sign:128", "topk:1.0",
    "topk:0.01,approx=true", "randk:0.5,scale=false", "threshold:1.0", "randk:0.1|sign", "topk:0.1|fp16",
    "threshold|uniform:4", "topk:0.01|qsgd:4|rans", "qsgd:4|huffman", "terngrad|rans", "sign|deflate",
    "adaptive:3.0", "adaptive:5.0,zero=true|huffman", "adaptive:5.0,tail=0.01|rans", "adaptive:2.0,integer=true|zstd",
    "topk:0.1|adaptive:4.0|huffman:auto",
)  # fmt: skip


@pytest.mark.parametrize("spec", [*SPECS, *MORE])
@pytest.mark.parametrize("n", [1000, 20_011])
def test_right_codec_passes(spec: str, n: int) -> None:
    check(codec(spec), gradient_like(n, 1), seed=2)


def test_zeros_and_constants_pass() -> None:
    for spec in SPECS:
        check(codec(spec), torch.zeros(2000))
        check(codec(spec), torch.full((2000,), -0.5))


@pytest.mark.parametrize("spec, kernel, place", [
    ("qsgd:4", "qsgd_decode", "out"), ("qsgd:4", "qsgd_encode", "norms"), ("sign", "sign_decode", "out"),
    ("sign", "sign_encode", "scales"), ("onebit", "onebit_encode", "means"), ("terngrad", "ternary_decode", "out"),
    ("uniform:8", "uniform_decode", "out"),
])  # fmt: skip
@pytest.mark.parametrize("backends", [(cpu,), (cpu, reference)], ids=["core", "both"])
def test_wrong_kernel_is_caught(monkeypatch, spec, kernel, place, backends) -> None:  # type: ignore[no-untyped-def]
    """In the core alone the bytes give it away; in both, the bound does."""
    for backend in backends:
        real = getattr(backend, kernel)

        def broken(*args, _real=real, **kwargs):  # type: ignore[no-untyped-def]
            result = _real(*args, **kwargs)
            room = kwargs[place]
            room[7] = 0.5 if room.is_floating_point() else int(room[7]) ^ 0x3F
            return result

        monkeypatch.setattr(backend, kernel, broken)
    with pytest.raises(WrongResultError):
        check(codec(spec), gradient_like(5000, 0))


def test_wrong_selection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (cpu, reference):
        real = backend.topk_encode
        monkeypatch.setattr(backend, "topk_encode", lambda x, k, out, _real=real: _real(1.0 / x, k, out))
    with pytest.raises(WrongResultError):
        check(codec("topk:0.01"), gradient_like(5000, 0))


def test_selection_by_chunks_is_checked_within_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    check(codec("topk:0.05,chunk=64"), gradient_like(5000, 0))
    for backend in (cpu, reference):
        real = backend.topk_chunks_encode
        monkeypatch.setattr(backend, "topk_chunks_encode", lambda x, c, out, _real=real: _real(1.0 / x, c, out))
    with pytest.raises(WrongResultError):
        check(codec("topk:0.05,chunk=64"), gradient_like(5000, 0))


@pytest.mark.parametrize("spec", ["adaptive:5.0|huffman", "uniform:8|rans"])
@pytest.mark.parametrize("backends", [(cpu,), (cpu, reference)], ids=["core", "both"])
def test_lossy_coder_is_caught(monkeypatch, spec, backends) -> None:  # type: ignore[no-untyped-def]
    """Even by one level, which the bound on values would let pass now and then."""
    for backend in backends:
        real = backend.decode_values

        def broken(section, table, out, weight, _real=real):  # type: ignore[no-untyped-def]
            _real(section, torch.cat([table[:1], table[:-1]]), out, weight)

        monkeypatch.setattr(backend, "decode_values", broken)
    with pytest.raises(WrongResultError):
        check(codec(spec), gradient_like(5000, 0))


def test_too_few_levels_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (cpu, reference):
        real = backend.range_histogram

        def broken(x, *, bins, _real=real, **how):  # type: ignore[no-untyped-def]
            *ends, counts = _real(x, bins=bins, **how)
            return *ends, [sum(counts), *[0] * (bins - 1)]

        monkeypatch.setattr(backend, "range_histogram", broken)
    with pytest.raises(WrongResultError, match=r"more than .* away from"):
        check(codec("adaptive:5.0|huffman"), gradient_like(5000, 0))
