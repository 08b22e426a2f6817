"""The settings of each experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from laconic.errors import ConfigError
from laconic_lab.studies.homomorphic.settings import HYPER, Setting, setting_of

__all__ = ["BITS", "EXPERIMENTS", "RHOS", "SCHEMES", "SEEDS", "TRAINED", "WORKERS", "seeds_of", "settings_of"]

TRAINED = ("sums", "layers", "products", "search")
EXPERIMENTS = (*TRAINED, "speed")

BITS = (1, 2, 3, 4, 8)
WORKERS = (2, 4, 8, 16)
RHOS = (0.5, 0.2, 0.1, 0.05, 0.02)
SCHEMES = ("monarch", "lowrank", "subspace", "hashed")

SEEDS = (0, 1, 2)
WITH_CONVOLUTIONS = ("vgg11", "vgg11fc")
"""Models that are trained with two workers alone."""

ONE_BIT, TWO_BITS = "ef|thc:1", "ef|thc:2"
EIGHT_BITS = "ef|shared:8"
"""Codec of tensors below 4,096 values: sixteen bits would be a large share of so few bytes."""

EARLY_HALF = (("conv[234]", "subspace:0.5"),)
EARLY_DENSE = (("conv[23]", "dense"), ("conv4", "subspace:0.25"))
"""VGG-11's second to fourth convolutions have 10 % of its parameters: it costs little to keep more of them."""


def seeds_of(experiment: str, setting: Setting, seeds: Sequence[int] | None) -> Sequence[int]:
    if seeds is not None:
        return seeds
    if setting.model == "mlp":
        return SEEDS
    has_goal = experiment == "products" or (experiment == "sums" and setting.codec in ("none", ONE_BIT, TWO_BITS))
    return SEEDS if setting.model == "vgg11" and setting.workers == 2 and has_goal else SEEDS[:1]


def settings_of(experiment: str, models: Sequence[str], data: str | None = None) -> Iterator[Setting]:
    """Yield the settings of an experiment, model by model."""
    generators = {"sums": sums, "layers": layers, "products": products, "search": search}
    if experiment not in generators:
        raise ConfigError(f"experiment {experiment!r} trains nothing: expected one of {', '.join(TRAINED)}")
    for model in models:
        if model not in HYPER:
            raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
        yield from generators[experiment](model, data)


def sums(model: str, data: str | None) -> Iterator[Setting]:
    """Yield dense layers with sums of integers by bits and workers, and float32 to compare with."""
    for workers in (2,) if model in WITH_CONVOLUTIONS else WORKERS:
        yield setting_of(model, workers=workers, data=data)
        for bits in () if model == "vgg11fc" else BITS:
            yield setting_of(model, None, f"ef|thc:{bits}", workers=workers, data=data)


def layers(model: str, data: str | None) -> Iterator[Setting]:
    """Yield compressed layers with float32 messages. VGG-11 has convolutions, for which monarch equals lowrank.

    With three linear layers on top it is trained by the two schemes that also compute less.
    """
    if model == "vgg11fc":
        yield from (setting_of(model, f"{scheme}:{rho:g}", data=data) for scheme in SCHEMES[:2] for rho in RHOS[1:4])
        return
    for scheme in SCHEMES:
        if (model, scheme) != ("vgg11", "monarch"):
            yield from (setting_of(model, f"{scheme}:{rho:g}", data=data) for rho in RHOS)


def products(model: str, data: str | None) -> Iterator[Setting]:
    """Yield compressed layers with compressed messages."""
    if model == "vgg11":
        yield _small(model, "subspace:0.125", data, rules=EARLY_HALF, decay=2e-3)
        yield _small(model, "subspace:0.025", data, rules=EARLY_DENSE, decay=2e-3)
    if model in WITH_CONVOLUTIONS:
        return
    for scheme, codec in (
        ("subspace:0.2", ONE_BIT),
        ("subspace:0.1", "ef|thc:4"),
        ("subspace:0.1", TWO_BITS),
        ("subspace:0.1", ONE_BIT),
        ("subspace:0.05", TWO_BITS),
        ("hashed:0.1", TWO_BITS),
        ("monarch:0.2", "ef|thc:4"),
        ("monarch:0.2", TWO_BITS),
    ):
        yield setting_of(model, scheme, codec, workers=4, data=data)


def search(model: str, data: str | None) -> Iterator[Setting]:
    """Yield the search for VGG-11's products: a sixth of the parameters by one bit, with one change at a time."""
    if model != "vgg11":
        return
    sixth = "subspace:0.1666"
    yield _small(model, sixth, data)
    yield _small(model, sixth, data, at_renewal="forget")
    yield _small(model, f"{sixth},T=20", data)
    yield _small(model, f"{sixth},T=500", data)
    yield _small(model, sixth, data, carry=False)
    yield _small(model, sixth, data, lr=0.1)
    yield from (_small(model, sixth, data, decay=decay) for decay in (1e-3, 2e-3, 4e-3))
    yield from (_small(model, "subspace:0.125", data, rules=EARLY_HALF, decay=decay) for decay in (5e-4, 1e-3))
    dense = (("conv[23]", "dense"), ("conv4", "subspace:0.5"))
    yield _small(model, "subspace:0.0769", data, rules=dense, decay=1e-3)
    yield _small(model, "subspace:0.0769", data)
    yield _small(model, "subspace:0.0714", data, decay=2e-3)
    yield setting_of(model, "subspace:0.0833", TWO_BITS, data=data, small=EIGHT_BITS)
    yield _small(model, "lowrank:0.18", data)
    yield setting_of(model, None, ONE_BIT, data=data, carry=False)
    yield setting_of(model, data=data, decay=1e-3)


def _small(model: str, scheme: str, data: str | None, **changes: Any) -> Setting:
    """Return a scheme with one bit for messages and eight bits for small tensors."""
    return setting_of(model, scheme, ONE_BIT, data=data, **{"small": EIGHT_BITS, **changes})
