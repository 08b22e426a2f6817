"""Training of a batch of runs, and the values of their Records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.train.data import Images
from laconic_lab.studies.oland2015 import error_decomposition, quantizers
from laconic_lab.studies.oland2015.exchange import Comparison, Traffic, Watch, exchange_batched, exchange_packets
from laconic_lab.studies.oland2015.network import Batches, Networks, scaled
from laconic_lab.studies.oland2015.settings import LAYERS, NUM_WEIGHTS, CommonSettings, Quantizer, Setting

__all__ = ["ENTROPY_BITS", "ENTROPY_RATES", "Series", "Unit", "train"]

ENTROPY_BITS = (4, 6, 8, 10)
ENTROPY_RATES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Histograms (M in bits) and samples (F) of the experiment ``entropy``."""

WATCHED_RUNS = 12
NEAR = 0.1
"""Points of accuracy below the best that count as near it: the best epoch itself is noisy."""


@dataclass(frozen=True)
class Unit:
    """Runs of one setting that are trained, recorded and skipped together.

    Args:
        first: Number of the first run; runs of one number start from the same weights in every setting.
    """

    experiment: str
    setting: Setting
    first: int
    runs: int

    @property
    def by_epoch(self) -> bool:
        """Whether curves are recorded; those of the many settings of a map would be megabytes."""
        return self.experiment not in ("map", "beyond", "gradients")

    @property
    def group(self) -> tuple[object, ...]:
        """Key of units that can be trained as one batch."""
        setting = self.setting
        return setting.batch, setting.pixels, setting.sends, setting.quantizer.by, self.experiment

    def values(self) -> dict[str, Any]:
        return {"part": self.experiment, "first_run": self.first, "runs": self.runs} | self.setting.values()

    def key(self, common: CommonSettings) -> str:
        """Return the key of the unit's Record; it changes with the configuration."""
        text = json.dumps(common.values() | self.values(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Series:
    """Results of a unit's runs, epoch by epoch; the first dimension of tensors is epochs, the last runs.

    ``comparison`` is that of the whole batch in which the unit was trained.
    """

    unit: Unit
    accuracy: Tensor
    raw_bits: Tensor
    whole_bits: Tensor
    coded_bits: Tensor
    derivative: Tensor | None = None
    entropy: Tensor | None = None
    decomposition: dict[str, Any] | None = None
    measured: str = ""
    comparison: Comparison = field(default_factory=Comparison)

    def values(self) -> dict[str, Any]:
        """Return the values of a Record, rounded to what a figure can show."""
        peak, peak_epoch = self.accuracy.max(0)  # the first epoch that reaches the maximum
        near_epoch = (self.accuracy >= peak - NEAR - 1e-9).to(torch.int8).argmax(0)
        values: dict[str, Any] = {
            "peak": rounded(peak, 3), "final": rounded(self.accuracy[-1], 3), "peak_epoch": (peak_epoch + 1).tolist(),
            "near_peak_epoch": (near_epoch + 1).tolist(), "bits_measured_on": self.measured,
            "packets_compared": self.comparison.packets, "packets_other_values": self.comparison.other_values,
            "packets_other_sizes": self.comparison.other_sizes,
        }  # fmt: skip
        weights = torch.tensor([rows * cols for rows, cols in LAYERS], dtype=torch.float64) / NUM_WEIGHTS
        for name in ("raw_bits", "whole_bits", "coded_bits"):
            layers = getattr(self, name)
            per_epoch = (layers * weights.view(1, -1, 1)).sum(1)
            values[name] = rounded(per_epoch.mean(0), 4)
            values[f"{name}_by_layer"] = rounded(layers.mean((0, 2)), 4)
            if self.unit.by_epoch and name != "whole_bits":
                values[f"{name}_by_epoch"] = rounded(per_epoch.mean(1), 4)
        if self.unit.by_epoch:
            values["accuracy_by_epoch"] = rounded(self.accuracy.mean(1), 3)
            values["accuracy_std_by_epoch"] = rounded(self.accuracy.std(1, correction=0), 3)
        if self.derivative is not None and self.entropy is not None:
            values |= _entropy_values(self.derivative, self.entropy)
        return values | (self.decomposition or {})


def _entropy_values(derivative: Tensor, entropy: Tensor) -> dict[str, Any]:
    """Return the values of a derivative [epochs, layers, runs] and an entropy [epochs, layers, bits, rates, runs]."""
    m, f, whole = ENTROPY_BITS.index(4), ENTROPY_RATES.index(0.03), ENTROPY_RATES.index(1.0)
    chosen = entropy[:, :, m, f]
    x, y = (derivative + 1).log2(), chosen
    x, y = x - x.mean(0), y - y.mean(0)
    correlation = (x * y).sum(0) / (x.square().sum(0) * y.square().sum(0)).sqrt()
    return {
        "derivative_by_epoch": [[float(f"{v:.4g}") for v in layer] for layer in derivative.mean(2).t().tolist()],
        "entropy_by_epoch": rounded(entropy.mean(4).permute(1, 2, 3, 0), 3),  # layer, M, F, epoch
        "entropy_bits": list(ENTROPY_BITS),
        "entropy_rates": list(ENTROPY_RATES),
        "correlation": rounded(correlation, 4),
        "largest_sampling_error": rounded((chosen - entropy[:, :, m, whole]).abs().amax(0), 4),
    }


def rounded(x: Tensor, digits: int) -> list[Any]:
    """Return rounded nested lists with None for NaN."""

    def rounded_value(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded_value(item) for item in value]
        return None if value != value else round(value, digits)

    values: list[Any] = rounded_value(x.tolist())
    return values


def train(
    common: CommonSettings, units: Sequence[Unit], images: Images, device: torch.device, *, real_packets: bool,
    tick: Callable[[int], None],
) -> list[Series]:  # fmt: skip
    """Train all runs of some units of one group as one batch.

    Args:
        common: What all runs share.
        real_packets: Exchange frames, a run at a time, instead of computing what they would decode to.
        tick: Called after each epoch with the number of runs.
    """
    # Consecutive runs of one family are quantized together.
    units = sorted(units, key=lambda unit: str(unit.setting.quantizer.family))
    settings = [unit.setting for unit in units for _ in range(unit.runs)]
    run_ids = [unit.first + r for unit in units for r in range(unit.runs)]
    first, experiment = settings[0], units[0].experiment
    batches = Batches(
        images.train_images, images.train_labels,
        workers=common.workers, batch=first.batch, seed=common.seed, pixels=first.pixels, device=device,
    )  # fmt: skip
    test_images, test_labels = scaled(images.test_images, first.pixels, device), images.test_labels.to(device)
    results = _BatchResults(common.epochs, len(settings), entropy=experiment == "entropy")
    with _fast_products():
        networks = Networks(settings, run_ids, common.workers, common.seed, device)
        num_right = partial(networks.num_right, test_images, test_labels)
        exchange = _Exchange(networks, [setting.quantizer for setting in settings], batches, real_packets)
        for epoch in range(common.epochs):
            seed, measured = common.seed + epoch, epoch % common.workers
            watched = _watched(units) if epoch in (0, common.epochs // 2, common.epochs - 1) else []
            if first.sends == "gradients":
                traffic = _train_by_step(networks, epoch, batches, exchange, seed, measured, watched)
            else:
                networks.train_epoch(epoch, batches)
                if experiment == "entropy":
                    results.measure_entropy(epoch, networks, measured, batches, seed)
                elif experiment == "collapse" and epoch + 1 in error_decomposition.EPOCHS:
                    results.add_variants(
                        epoch, error_decomposition.dissect(networks, seed, num_right), len(test_labels)
                    )
                traffic = exchange(seed, measured, watched)
            results.right[epoch] = num_right().cpu()
            for name in ("raw_bits", "whole_bits", "nbytes"):
                getattr(results, name)[epoch] = getattr(traffic, name)
            tick(len(settings))
    measured_on = "all workers' packets" if real_packets else "worker (epoch mod workers), from its histogram"
    return list(results.series(units, len(test_labels), measured_on, exchange.comparison))


@dataclass
class _Exchange:
    """An exchange with real or computed frames; ``by=grad`` also needs gradients."""

    networks: Networks
    all_quantizers: list[Quantizer]
    batches: Batches
    real_packets: bool
    comparison: Comparison = field(default_factory=Comparison)

    def __call__(self, seed: int, measured: int, watched: Sequence[int]) -> Traffic:
        gradients = None
        if self.all_quantizers[0].by == "grad":
            workers = range(self.networks.workers)
            gradients = torch.stack([self.networks.gradient_rms(k, self.batches) for k in workers])
        if self.real_packets:
            return exchange_packets(self.networks, self.all_quantizers, seed=seed, gradients=gradients)
        watch = Watch(watched)
        traffic = exchange_batched(
            self.networks, self.all_quantizers, seed=seed, measured=measured, gradients=gradients, watch=watch
        )
        self.comparison.compare(watch, self.all_quantizers, traffic, seed)
        return traffic


def _train_by_step(
    networks: Networks, epoch: int, batches: Batches, exchange: _Exchange, seed: int, measured: int, watched: list[int]
) -> Traffic:
    """Train an epoch with an exchange of gradients after every mini-batch, and return the mean traffic.

    A worker sends its step from the common weights, which is the gradient times the learning rate: range and
    distribution, on which quantizers depend, have the same shape.
    """
    rates = networks.rates(epoch, batches.batch)
    shares = list(batches.epoch(epoch))
    total = Traffic.empty(networks.runs)
    for i in range(batches.steps):
        start = networks.common()
        for k, (images, targets) in enumerate(shares):
            networks.step(k, images[i], targets[i], rates)
        networks.add(start, -1)
        total += exchange(seed * batches.steps + i, measured, watched if i + 1 == batches.steps else [])
        networks.add(start, 1)
    return total / batches.steps


def _watched(units: Sequence[Unit]) -> list[int]:
    """Return the first runs of some units, spread over the batch."""
    starts, start = [], 0
    for unit in units:
        starts.append(start)
        start += unit.runs
    return starts[:: -(-len(starts) // WATCHED_RUNS)]


@contextmanager
def _fast_products() -> Iterator[None]:
    """Use TF32 for matrix products where the device has it; everything else stays float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _BatchResults:
    """Results of all runs of a batch."""

    def __init__(self, epochs: int, runs: int, *, entropy: bool) -> None:
        layers = len(LAYERS)
        self.right = torch.zeros(epochs, runs, dtype=torch.float64)
        self.raw_bits, self.whole_bits, self.nbytes, self.derivative = (
            torch.zeros(epochs, layers, runs, dtype=torch.float64) for _ in range(4)
        )
        self.decomposition: dict[str, Any] = {}
        self.entropy = None
        if entropy:
            shape = (epochs, layers, len(ENTROPY_BITS), len(ENTROPY_RATES), runs)
            self.entropy = torch.zeros(shape, dtype=torch.float64)

    def measure_entropy(self, epoch: int, networks: Networks, worker: int, batches: Batches, seed: int) -> None:
        """Measure the derivative of a worker, and the entropy of its weights by histograms and samples."""
        assert self.entropy is not None
        self.derivative[epoch] = networks.gradient_rms(worker, batches).cpu()
        for i in range(len(LAYERS)):
            x = networks.layer(worker, i)
            low, high = x.amin(1), x.amax(1)
            for f, rate in enumerate(ENTROPY_RATES):
                sampled = quantizers.sample(x, rate, seed)
                for m, bits in enumerate(ENTROPY_BITS):
                    bits_by_run = torch.full_like(low, bits, dtype=torch.float64)
                    self.entropy[epoch, i, m, f] = quantizers.entropy(sampled, low, high, bits_by_run).cpu()

    def add_variants(self, epoch: int, results: dict[str, Any], num_images: int) -> None:
        """Add the results of ``error_decomposition.dissect``, whose names in Records begin with ``anatomy_``."""
        self.decomposition.setdefault("anatomy_epochs", []).append(epoch + 1)
        for name, value in results.items():
            if isinstance(value, Tensor):
                value = 100 * float(value.to(torch.float64).mean()) / num_images
            self.decomposition.setdefault(f"anatomy_{name}", []).append(float(f"{value:.4g}"))

    def series(self, units: Sequence[Unit], num_images: int, measured: str, comparison: Comparison) -> Iterator[Series]:
        start = 0
        sizes = torch.tensor([rows * cols for rows, cols in LAYERS], dtype=torch.float64).view(1, -1, 1)
        coded_bits = self.nbytes * 8 / sizes
        for unit in units:
            runs = slice(start, start + unit.runs)
            start += unit.runs
            yield Series(
                unit, 100 * self.right[:, runs] / num_images, self.raw_bits[..., runs], self.whole_bits[..., runs],
                coded_bits[..., runs], self.derivative[..., runs] if self.entropy is not None else None,
                self.entropy[..., runs] if self.entropy is not None else None, self.decomposition, measured, comparison,
            )  # fmt: skip
