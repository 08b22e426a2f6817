"""A selector, a quantizer and a coder of another package, in chains with ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
import torch

import laconic
import laws
from laconic.catalog import catalog
from laconic.codecs import Coder, Quantizer, Selector, ValueStage, registry
from laconic.codecs import _parse as cached_parse
from laconic.codecs.base import Selected, Symbols, require_finite
from laconic.errors import ConfigError, FrameError
from laconic.kernels.interface import NONFINITE
from laconic.kernels.sections import packed_nbytes, symbol_bits, symbol_dtype, write_bytes


@dataclass(frozen=True)
class EveryNth(Selector):
    """Keep every n-th value; its section is empty, because the positions follow from the spec."""

    step: int = 4
    scale: bool = True

    name, example = "everynth", "everynth:4"
    summary = "every n-th value"
    biased = True

    def select(self, x, kernels, arena, seed):
        amax_bits = int(bool(x.any())) if kernels.all_finite(x) else NONFINITE
        return Selected(arena.take(0), x[self.positions(None, x.numel(), kernels).long()], amax_bits)

    def count(self, section, n):
        if section.numel():
            raise FrameError("a section of everynth must be empty")
        return len(range(0, n, self.step))

    def positions(self, section, n, kernels):
        return torch.arange(0, n, self.step, dtype=torch.int32)

    def gain(self, n):
        return float(self.step) if self.scale else 1.0

    def without_gain(self):
        return replace(self, scale=False)

    def max_kept(self, n):
        return -(-n // self.step)

    def max_section_nbytes(self, n):
        return 0


@dataclass(frozen=True)
class Ternary(Quantizer):
    """Minus, zero or plus the largest magnitude, by a threshold at its half."""

    name, example = "ternary", "ternary"
    summary = "three levels, rounded to nearest"
    biased = True
    num_sections = 2

    @property
    def max_alphabet(self):
        return 3

    def to_symbols(self, x, kernels, arena, seed):
        low, high, amax_bits = kernels.value_range(x)
        require_finite(amax_bits, x.numel())
        if amax_bits == 0:
            return None
        largest, scale = torch.tensor([max(-low, high)]), arena.take(4)
        scale.copy_(largest.view(torch.uint8))
        return (scale,), Symbols(3, (x / largest).round().add(1).to(torch.uint8))

    def from_symbols(self, side, reader, kernels, out, weight):
        scale = side[0].clone().view(torch.float32)
        if reader is None or not bool((scale > 0) & torch.isfinite(scale)):
            raise FrameError("ternary needs symbols and a positive scale")
        reader.values(scale * torch.arange(-1.0, 2.0), out, weight)

    def section_nbytes(self, n, itemsize):
        return 4, packed_nbytes(n, symbol_bits(3))


@dataclass(frozen=True)
class RunLength(Coder):
    """Runs of equal symbols: a length of one byte, then the symbol."""

    name, example = "runlength", "ternary|runlength"
    summary = "run-length code"
    max_alphabet: ClassVar[int] = 256

    def max_nbytes(self, n, alphabet):
        return 2 * n

    def encode(self, symbols, kernels, arena):
        values, counts = torch.unique_consecutive(symbols.materialize(kernels), return_counts=True)
        data = bytearray()
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            data += bytes([255, value]) * (count // 255) + (bytes([count % 255, value]) if count % 255 else b"")
        section = arena.take(len(data))
        write_bytes(section, bytes(data))
        return section

    def decode(self, section, n, alphabet, kernels):
        pairs = section.view(-1, 2) if section.numel() % 2 == 0 else section[:0].view(0, 2)
        if int(pairs[:, 0].sum()) != n or int(pairs[:, 1].max()) >= alphabet:
            raise FrameError("the run lengths are invalid")
        return pairs[:, 1].repeat_interleave(pairs[:, 0].long()).to(symbol_dtype(alphabet))


@dataclass(frozen=True)
class Transposed(ValueStage):
    """The values of the transposed matrix: a stage that needs the shape of the tensor."""

    rows: int = 1

    name, example = "transposed", "transposed"
    kind = "cast"
    summary = "the transposed matrix"
    num_sections = 1
    needs_shape = True
    lossless = True

    def for_shape(self, shape):
        return replace(self, rows=shape[0] if shape else 1)

    def encode(self, x, kernels, arena, seed):
        section = arena.take(x.numel() * x.element_size())
        section.copy_(x.view(self.rows, -1).t().contiguous().view(-1).view(torch.uint8))
        return (section,)

    def decode(self, sections, dtype, kernels, out, weight):
        values = sections[0].clone().view(dtype).view(-1, self.rows).t().reshape(-1)
        out.copy_(values) if weight is None else out.add_(values * torch.tensor(weight))

    def section_nbytes(self, n, itemsize):
        return (n * itemsize,)


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    """Register the stages of this file as the entry points of an installed package."""
    stages = {"everynth": "EveryNth", "ternary": "Ternary", "runlength": "RunLength", "transposed": "Transposed"}
    entries = [EntryPoint(name, f"{__name__}:{cls}", "laconic.codecs") for name, cls in stages.items()]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [e for e in entries if e.group == group])
    caches = (registry.stages, cached_parse)
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


SPECS = ["everynth:3|qsgd:4", "topk:0.1|ternary", "qsgd:4|runlength", "everynth:2|ternary|runlength"]


def test_plugin_chain_obeys_law(law, spec):
    law(spec)


@pytest.mark.parametrize("spec", [*SPECS, "everynth", "ternary|rans", "everynth|fp16"])
def test_plugin_chain_is_explained_and_packed_in_bundles(spec):
    x = laws.normal(40, 30)
    (explanation,) = laconic.explain(laconic.encode(x, spec))
    assert explanation.numel == 1200 and explanation.codec == str(laconic.codec(spec))
    bundle = laconic.encode_bundle({"a": x}, spec)
    assert laws.same_bits(laconic.decode_bundle(bundle)["a"], laws.roundtrip(x, spec))


def test_coder_of_a_plugin_is_lossless():
    x = laws.normal(3000)
    for quantizer in ("qsgd:4", "terngrad", "uniform:8", "ternary", "topk:0.5|sign"):
        assert laws.same_bits(laws.roundtrip(x, f"{quantizer}|runlength"), laws.roundtrip(x, quantizer))


def test_coder_with_a_small_alphabet_refuses_a_larger_quantizer():
    with pytest.raises(ConfigError, match="'runlength' codes at most 256 symbols, 'uniform' has more"):
        laconic.codec("uniform:10|runlength")


def test_gain_of_a_plugin_selector_is_off_after_error_feedback():
    assert str(laconic.codec("everynth:4")) == "everynth:4"
    channel = laconic.channel("ef|everynth:4", policy=laconic.Policy(min_numel=0, exempt_1d=False))
    x = laws.normal(64)
    sent = laconic.decode(channel.encode("w", x, seed=0))
    assert laws.same_bits(sent[::4], x[::4]) and not bool(sent[1::4].any())


def test_plugin_stage_that_needs_the_shape_cannot_follow_a_selector():
    x = laws.normal(6, 5)
    assert laws.same_bits(laws.roundtrip(x, "transposed"), x)
    with pytest.raises(ConfigError, match="'transposed' needs a whole matrix and cannot follow 'topk'"):
        laconic.codec("topk:0.1|transposed")


def test_catalog_lists_plugin_stages_by_kind():
    by_name = {entry.name: entry for entry in catalog()}
    assert by_name["everynth"].kind == "selector" and 8 < by_name["everynth"].bits_per_value < 8.1
    assert by_name["ternary"].bias == "biased" and by_name["runlength"].kind == "coder"
    assert {"everynth", "ternary"} <= set(laconic.codec_names())
