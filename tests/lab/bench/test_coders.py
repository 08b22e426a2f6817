"""Entropy coders in the bench: their symbols and entropy are right, stock coders give them back, both are reported."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.records import Record
from laconic_lab.bench import SETS, Rate, Settings, codecs, run
from laconic_lab.bench.coders import ANS, ZSTD, coder_peers, entropy, measure, missing, symbols, uncoded
from laconic_lab.bench.peers import message_nbytes
from laconic_lab.bench.samples import SAMPLES, gradient_like


def test_entropy_matches_shannons_formula() -> None:
    assert entropy(torch.arange(256, dtype=torch.uint8)) == 8.0
    assert entropy(torch.zeros(100, dtype=torch.uint8)) == 0.0
    assert entropy(torch.tensor([0, 0, 0, 700], dtype=torch.int16)) == pytest.approx(2 - 0.75 * math.log2(3))


def test_overhead_is_relative_to_the_entropy() -> None:
    assert Rate(numel=8000, entropy=4.0, nbytes=4040).overhead == pytest.approx(1.0)
    assert Rate(numel=8000, entropy=0.0, nbytes=40).overhead is None


@pytest.mark.parametrize("dtype, alphabet", [(torch.uint8, 2), (torch.uint8, 200), (torch.int16, 1000)])
def test_stock_coders_are_lossless(dtype: torch.dtype, alphabet: int) -> None:
    given = torch.randn(20_011, generator=torch.Generator().manual_seed(0)).mul(alphabet / 8).add(alphabet / 2)
    given = given.clamp(0, alphabet - 1).to(dtype)
    bound = entropy(given)
    for peer in coder_peers(dtype, given.numel()):
        message = peer.encode(given.to(peer.dtype or dtype))
        assert peer.decode is not None and torch.equal(peer.decode(message).to(dtype), given), peer.name
        assert 8 * message_nbytes(message) > bound * given.numel(), peer.name


def test_one_symbol_alone_is_coded() -> None:
    given = torch.zeros(1000, dtype=torch.uint8)
    for peer in coder_peers(given.dtype, 1000):
        assert peer.decode is not None
        assert torch.equal(peer.decode(peer.encode(given.to(peer.dtype or given.dtype))).to(given.dtype), given)


def test_missing_stock_coder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [note.split()[0] for note in missing()] == ["zstandard", "constriction"]
    assert [peer.name for peer in coder_peers(torch.uint8, 1000)] == ["zlib, Huffman only"]


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_depend_on_the_seed_only(name: str) -> None:
    make = SAMPLES[name]
    x = make(5000, 3)
    assert x.shape == (5000,) and x.dtype == torch.float32 and bool(torch.isfinite(x).all())
    assert torch.equal(x, make(5000, 3)) and not torch.equal(x, make(5000, 4))


def test_samples_grow_more_skewed() -> None:
    """A share of the range that holds nine values in ten."""
    shares = []
    for make in SAMPLES.values():
        x = make(200_000, 0)
        shares.append(float(x.abs().kthvalue(180_000).values / x.abs().max()))
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("spec", SETS["coders"])
def test_symbols_are_those_of_the_quantizer(spec: str) -> None:
    chain, x = codec(spec), gradient_like(20_011, 0)
    assert spec.startswith(f"{uncoded(chain)}|")
    actual = symbols(chain, x, 0)
    assert actual.shape == x.shape
    order = x.argsort()
    assert bool((actual[order].diff() >= 0).all())  # larger values have larger symbols
    rate = measure(chain, x, 0)
    assert rate.entropy == entropy(actual) and rate.overhead is not None and 0 < rate.overhead < 25


def test_symbols_behind_a_selector_are_those_of_kept_values() -> None:
    chain, x = codec("topk:0.01|qsgd:4|rans"), gradient_like(20_000, 0)
    assert symbols(chain, x, 0).numel() == 200
    assert measure(chain, x, 0).numel == 200


def test_report_holds_coders_on_every_kind_of_data() -> None:
    report = run(["uniform:8|huffman", "uniform:8|rans", "sign"], Settings(numel=5000, repeat=1))
    assert [(result.spec, result.data) for result in report.codecs] == [
        ("uniform:8|huffman", "gaussian"), ("uniform:8|rans", "gaussian"), ("sign", "gaussian"),
        ("uniform:8|huffman", "weights"), ("uniform:8|rans", "weights"),
        ("uniform:8|huffman", "grads"), ("uniform:8|rans", "grads"),
    ]  # fmt: skip
    beside = {(peer.of, peer.data, peer.name) for peer in report.peers if peer.rate}
    for data in SAMPLES:  # once for both: they get the same symbols
        assert ("uniform:8|huffman", data, "zlib, Huffman only") in beside
        assert ("uniform:8|rans", data, "zlib, Huffman only") not in beside
    assert {ZSTD.format(1), ZSTD.format(3), ANS} <= {name for _, _, name in beside} or report.notes
    for record in report.records():
        assert Record.from_json(record.to_json()) == record
    ours = next(record.values for record in report.records() if record.kind == "bench.codec")
    assert ours["data"] == "gaussian" and ours["over_entropy_percent"] > 0 and ours["symbols"] == 5000
    stock = next(record.values for record in report.records() if record.values.get("name") == "zlib, Huffman only")
    assert stock["entropy_bits_per_symbol"] == ours["entropy_bits_per_symbol"] and stock["encode_x_memcpy"] > 0


def test_two_threads_are_compared_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = codecs.encode_into

    def watched(*args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(torch.get_num_threads())
        return real(*args, **kwargs)

    monkeypatch.setattr(codecs.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(codecs, "encode_into", watched)
    report = run(["uniform:8|huffman"], Settings(numel=5000, repeat=1, data=("gaussian",)), with_peers=False)
    values = report.codecs[0].values()
    assert values["encode_scaling_2_threads"] > 0 and values["decode_scaling_2_threads"] > 0
    assert set(seen) == {1, 2}
    report = run(["uniform:8|huffman"], Settings(numel=5000, repeat=1, threads=2), with_peers=False)
    assert report.codecs[0].scaling("encode") is None  # there is nothing to compare with
    assert run(["sign"], Settings(numel=5000, repeat=1), with_peers=False).codecs[0].scaling("encode") is None


def test_command_contains_data_and_sets() -> None:
    assert Settings().command(SETS["coders"]) == "laconic bench --only coders"
    assert Settings(data=("weights",)).command(["sign"]) == "laconic bench sign --data weights"
    with pytest.raises(ConfigError, match="data must be among gaussian, weights, grads, got noise"):
        Settings(data=("noise",))
