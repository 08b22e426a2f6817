"""The paper's claims, and the evidence for them.

Its figures are pictures; the numbers are from its text and formulas. Of figures without numbers the shape is claimed:
which curve overtakes which, and where. Claims about its formulas are checked by the formulas: their evidence is
``formula``, not a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laconic.plan.jang2017 import ALEXNET, GIGABIT, GZIP, NODES, WORKERS
from laconic_lab.studies.claims import Claim, Evidence, How
from laconic_lab.studies.intervals import Interval
from laconic_lab.studies.jang2017.results import CompressedModel, Results

__all__ = ["CLAIMS"]


def _single(value: float, basis: str, how: How = "measured", *sources: Mapping[str, Any]) -> Evidence:
    return Evidence(Interval.exact(value), basis, how, sources)


def _gzip_ratio(results: Results) -> Evidence | None:
    row = results.row("alexnet", "gzip")
    if row is None:
        return None
    return _single(row["nbytes"] / row["compressed_nbytes"], "fresh weights, zlib level 6", "measured", row)


def _gzip_over_transfer(results: Results) -> Evidence | None:
    row = results.row("alexnet", "gzip")
    if row is None:
        return None
    seconds = row["compress_s"] + row["decompress_s"]
    return _single(seconds / (row["nbytes"] / GIGABIT), "one thread, one Gbit/s", "measured", row)


def _crossover(results: Results) -> Evidence:
    return _single(ALEXNET.crossover, "the paper's formula, C = 0.6 s", "formula")


def _beyond_one_node(results: Results) -> Evidence:
    """Return M at which M W / BW = i C, the computing of an update on one node."""
    workers = ALEXNET.every * ALEXNET.step_s * ALEXNET.bandwidth / ALEXNET.nbytes
    return _single(workers, "the paper's formula, 200 iterations; of a single minibatch from 1 worker on", "formula")


def _gzip_exceeds(results: Results) -> Evidence:
    """Return the fewest workers for which gzip's own time is longer than the whole update without it."""
    for workers in range(1, NODES + 1):
        update = ALEXNET.naive(workers, GZIP)
        if update.compress + update.decompress > ALEXNET.vanilla(workers).total:
            return _single(workers, "the paper's formula and table 1; the server decompresses all", "formula")
    raise AssertionError("gzip is never that slow")


def _gzip_loses(results: Results) -> Evidence:
    slower = sum(
        ALEXNET.naive(workers, GZIP, server_decompressions=1).total > ALEXNET.vanilla(workers).total
        for workers in range(1, NODES + 1)
    )
    return _single(slower, "the paper's formula, in the reading that favours gzip", "formula")


def _largest_h(results: Results) -> Evidence:
    """Return 1 + k (1 - rho), the h at which homomorphic compression stops paying."""
    return _single(1 + ALEXNET.bound(WORKERS).slope * (1 - 0.5), "the paper's formula", "formula")


def _share_of_products(results: Results) -> Evidence | None:
    kernels = results.kernels.get("cuda") or results.kernels.get("cpu")
    if kernels is None:
        return None
    groups, basis = kernels["groups"], f"torch's profiler, {kernels['device']}, batch {kernels['batch']}"
    return _single(groups["convolution"] + groups["matrix product"], basis, "measured", kernels)


def _measured_h(results: Results) -> Evidence | None:
    return _smallest_h(results.layers, lambda _: "one CPU thread, batch 16")


def _measured_h_on_gpu(results: Results) -> Evidence | None:
    return _smallest_h(results.on_gpu, lambda model: f"one launch a step, batch {model.source['batch']}")


def _smallest_h(models: Sequence[CompressedModel], how: Callable[[CompressedModel], str]) -> Evidence | None:
    if not models:
        return None
    best = min(models, key=lambda model: model.h)
    return _single(best.h, f"{best.scheme}, rho {best.rho:.3f}: {how(best)}, untrained", "measured", best.source)


CLAIMS = (
    Claim("gzip_weights", "gzip makes AlexNet's weights smaller by", "table 1", 1.079, "=", "×", 0.03, _gzip_ratio),
    Claim("gzip_slow", "gzip's seconds for AlexNet over those of a transfer", "table 1", 1.0, ">", "×",
          evidence=_gzip_over_transfer),
    Claim("crossover", "workers from which AlexNet's transfer takes longer than its computation", "4.2", 25.0, "<",
          evidence=_crossover),
    Claim("beyond_one_node", "workers from which AlexNet's transfer takes longer than an update on one node", "4.2",
          25.0, "<", evidence=_beyond_one_node),
    Claim("gzip_exceeds", "workers from which gzip alone takes longer than an update without it", "4.2", 25.0, "<",
          evidence=_gzip_exceeds),
    Claim("gzip_loses", "workers of 1 to 25 for which gzip is slower than vanilla", "4.2", 25.0, "=",
          evidence=_gzip_loses),
    Claim("h_16", "largest h that still beats vanilla on 16 workers, rho 0.5", "4.3", 2.0, ">", evidence=_largest_h),
    Claim("gemm", "share of AlexNet's time in convolutions and matrix products", "5", 0.5, ">",
          evidence=_share_of_products),
    Claim("measured_h", "h of a compressed AlexNet", "4.3", 1.0, ">", evidence=_measured_h),
    Claim("measured_h_gpu", "h of a compressed AlexNet on a GPU", "4.3", 1.0, ">", evidence=_measured_h_on_gpu),
)  # fmt: skip
