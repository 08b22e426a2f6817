"""Which settings each part of the study trains."""

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

ONE_BIT, TWO_BITS = "ef|thc:1", "ef|thc:2"
EIGHT_BITS = "ef|shared:8"
"""For tensors below 4,096 values: of so few bytes, sixteen bits of each would be a good part."""

EARLY_HALF = (("conv[234]", "subspace:0.5"),)
EARLY_DENSE = (("conv[23]", "dense"), ("conv4", "subspace:0.25"))
"""Of VGG-11's numbers 10 % are in its second to fourth convolution: there it costs little to keep more of them."""


def seeds_of(experiment: str, setting: Setting, seeds: Sequence[int] | None) -> Sequence[int]:
    if seeds is not None:
        return seeds
    if setting.model == "mlp":
        return SEEDS
    judged = experiment == "products" or (experiment == "sums" and setting.codec in ("none", ONE_BIT, TWO_BITS))
    return SEEDS if setting.model == "vgg11" and setting.workers == 2 and judged else SEEDS[:1]


def settings_of(experiment: str, models: Sequence[str], data: str | None = None) -> Iterator[Setting]:
    """The settings of a part, model by model."""
    of = {"sums": sums, "layers": layers, "products": products, "search": search}
    if experiment not in of:
        raise ConfigError(f"experiment {experiment!r} trains nothing: expected one of {', '.join(TRAINED)}")
    for model in models:
        if model not in HYPER:
            raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
        yield from of[experiment](model, data)


def sums(model: str, data: str | None) -> Iterator[Setting]:
    """Dense layers; integers of so many bits, added up over so many workers, and float32 beside them."""
    crowds = (2,) if model == "vgg11" else WORKERS
    for workers in crowds:
        yield setting_of(model, workers=workers, data=data)
        for bits in BITS:
            yield setting_of(model, None, f"ef|thc:{bits}", workers=workers, data=data)


def layers(model: str, data: str | None) -> Iterator[Setting]:
    """Layers in fewer numbers, sent as they are. VGG-11 has convolutions, where monarch is lowrank."""
    for scheme in SCHEMES:
        if (model, scheme) != ("vgg11", "monarch"):
            yield from (setting_of(model, f"{scheme}:{rho:g}", data=data) for rho in RHOS)


def products(model: str, data: str | None) -> Iterator[Setting]:
    """Both."""
    if model == "vgg11":
        yield _small(model, "subspace:0.125", data, rules=EARLY_HALF, decay=2e-3)
        yield _small(model, "subspace:0.025", data, rules=EARLY_DENSE, decay=2e-3)
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
    """How VGG-11's products were found: a sixth of the numbers by a bit, with one thing changed at a time."""
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
    """A scheme by one bit, and eight bits for small tensors."""
    return setting_of(model, scheme, ONE_BIT, data=data, **{"small": EIGHT_BITS, **changes})
