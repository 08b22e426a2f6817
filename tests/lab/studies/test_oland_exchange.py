"""Exchanges computed for all runs at once equal real frames, bit for bit and byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from laconic.kernels import cpu
from laconic_lab.studies.oland2015 import quantizers
from laconic_lab.studies.oland2015.exchange import Comparison, Watch, exchange_batched, exchange_packets
from laconic_lab.studies.oland2015.network import Networks
from laconic_lab.studies.oland2015.settings import BASELINE, LAYERS, Quantizer, Setting


def adaptive(c: float, **fields: object) -> Quantizer:
    return Quantizer("adaptive", c=c, **fields)  # type: ignore[arg-type]


QUANTIZERS = sorted(
    [
        BASELINE, Quantizer("uniform", bits=3), adaptive(5), adaptive(2, m=8), adaptive(5, integer=True),
        adaptive(5, zero=True), adaptive(4, zero=True, tail=0.001), adaptive(3, tail=0.01), adaptive(6, by="grad"),
        adaptive(10, zero=True, m=2),
    ],
    key=lambda q: str(q.family),
)  # fmt: skip


def _heavy(x: Tensor, i: int) -> Tensor:
    return torch.randn(x.shape) ** 5


def _shrunk(x: Tensor, i: int) -> Tensor:
    small = torch.randn(x.shape) * 1e-4
    return torch.where(torch.rand(x.shape) < 0.005, small * 5000, small)


def _constant(x: Tensor, i: int) -> Tensor:
    return torch.full_like(x, 0.25) if i == 1 else torch.zeros_like(x) if i == 2 else x


def _tiny(x: Tensor, i: int) -> Tensor:
    return x * 1e-30


WEIGHTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "initial": lambda x, i: x, "heavy": _heavy, "shrunk": _shrunk, "constant": _constant, "tiny": _tiny,
}  # fmt: skip


def networks(weights: str, workers: int = 2) -> Networks:
    torch.manual_seed(1)
    settings = [Setting(quantizer=q) for q in QUANTIZERS]
    trained = Networks(settings, range(len(settings)), workers, 0, torch.device("cpu"))
    for k in range(workers):
        for i in range(len(LAYERS)):
            trained.layer(k, i).copy_(WEIGHTS[weights](trained.layer(k, i), i))
        trained.b1[k].normal_()
    return trained


@pytest.mark.parametrize("weights", WEIGHTS)
def test_batched_exchange_equals_real_frames(weights: str) -> None:
    gradients = torch.rand(2, len(LAYERS), len(QUANTIZERS), generator=torch.Generator().manual_seed(0))
    batched, real = networks(weights), networks(weights)
    watch, comparison = Watch(range(len(QUANTIZERS))), Comparison()
    computed = exchange_batched(batched, QUANTIZERS, seed=5, measured=1, gradients=gradients, watch=watch)
    comparison.compare(watch, QUANTIZERS, computed, 5)
    sent = exchange_packets(real, QUANTIZERS, seed=5, gradients=gradients)
    assert comparison == Comparison(packets=len(LAYERS) * len(QUANTIZERS), other_values=0, other_sizes=0)
    assert torch.equal(computed.raw_bits, sent.raw_bits) and torch.equal(computed.whole_bits, sent.whole_bits)
    for k in range(2):
        for i in range(len(LAYERS)):
            assert torch.equal(batched.layer(k, i), real.layer(k, i))
        assert all(map(torch.equal, batched.biases(k), real.biases(k)))


def test_comparison_counts_differing_packets() -> None:
    trained, watch, comparison = networks("initial"), Watch(range(len(QUANTIZERS))), Comparison()
    traffic = exchange_batched(
        trained, QUANTIZERS, seed=5, measured=0, gradients=torch.rand(2, 3, len(QUANTIZERS)), watch=watch
    )
    watch.decoded[0, 3][7] += 1e-3
    traffic.nbytes[1, 4] += 1
    comparison.compare(watch, QUANTIZERS, traffic, 5)
    assert (comparison.other_values, comparison.other_sizes) == (1, 1)


def test_sample_equals_the_kernels() -> None:
    x = torch.randn(2, 5000)
    assert torch.equal(quantizers.sample(x, 0.3, 7)[1], cpu.sample(x[1].contiguous(), 1500, 7))
    assert quantizers.sample_positions(900, 0.3, 7) is None


def test_zero_is_a_level_and_outliers_are_exact() -> None:
    x = torch.randn(1, 20_000) * 0.01
    x[0, 100], x[0, 200:300] = 3.0, 0.0
    fitted = quantizers.fit([adaptive(4, zero=True, tail=0.001)], x, 0)
    decoded, _ = fitted.decode(x)
    assert decoded[0, 100] == 3.0 and not decoded[0, 200:300].any()
