"""Which settings each part of the study trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from laconic.errors import ConfigError
from laconic.studies.homomorphic.settings import HYPER, Setting, setting_of

__all__ = ["BITS", "PARTS", "RHOS", "SCHEMES", "SEEDS", "TRAINED", "WORKERS", "seeds_of", "settings_of"]

TRAINED = ("sums", "layers", "products")
PARTS = (*TRAINED, "speed")

BITS = (1, 2, 3, 4, 8)
WORKERS = (2, 4, 8, 16)
RHOS = (0.5, 0.2, 0.1, 0.05, 0.02)
SCHEMES = ("monarch", "lowrank", "subspace", "hashed")

SEEDS = (0, 1, 2)

EIGHT_BITS: dict[str, Any] = {"small": "ef|shared:8"}
"""For tensors below 4,096 values, where they would otherwise be a good part of what is sent."""

VGG_HEADLINE: tuple[tuple[str | None, str, dict[str, Any]], ...] = (
    (None, "none", {}),
    (None, "ef|thc:2", {}),
    (None, "ef|thc:1", {}),
    ("subspace:0.1666", "ef|thc:1", EIGHT_BITS),
    ("subspace:0.0769", "ef|thc:1", EIGHT_BITS),
)
"""Of three seeds. The products: a sixth and a thirteenth of the numbers, each by a bit."""


def seeds_of(part: str, setting: Setting, seeds: Sequence[int] | None) -> Sequence[int]:
    if seeds is not None:
        return seeds
    if setting.model == "mlp":
        return SEEDS
    headline = any((layers, codec) == (setting.layers, setting.codec) for layers, codec, _ in VGG_HEADLINE)
    return SEEDS if setting.model == "vgg11" and setting.workers == 2 and headline else SEEDS[:1]


def settings_of(part: str, models: Sequence[str], data: str | None = None) -> Iterator[Setting]:
    """The settings of a part, model by model."""
    for model in models:
        if model not in HYPER:
            raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
        if part == "sums":
            yield from sums(model, data)
        elif part == "layers":
            yield from layers(model, data)
        elif part == "products":
            yield from products(model, data)
        else:
            raise ConfigError(f"part {part!r} trains nothing: expected one of {', '.join(TRAINED)}")


def sums(model: str, data: str | None) -> Iterator[Setting]:
    """Dense layers; integers of so many bits, added up over so many workers, and float32 beside them."""
    crowds = (2,) if model == "vgg11" else WORKERS
    for workers in crowds:
        yield setting_of(model, workers=workers, data=data)
        for bits in BITS:
            yield setting_of(model, None, f"ef|thc:{bits}", workers=workers, data=data)
    if model == "vgg11":  # with smaller batches each: batch norm feels it, so float32 is trained again
        for workers in (4, 8):
            yield setting_of(model, workers=workers, data=data)
            yield setting_of(model, None, "ef|thc:2", workers=workers, data=data)


def layers(model: str, data: str | None) -> Iterator[Setting]:
    """Layers in fewer numbers, sent as they are. All of VGG-11's are convolutions, where monarch is lowrank."""
    for scheme in SCHEMES:
        if (model, scheme) != ("vgg11", "monarch"):
            yield from (setting_of(model, f"{scheme}:{rho:g}", data=data) for rho in RHOS)


def products(model: str, data: str | None) -> Iterator[Setting]:
    """Both."""
    if model == "vgg11":
        for scheme, codec, rest in (
            *VGG_HEADLINE[3:],
            ("subspace:0.1", "ef|thc:2", {}),
            ("lowrank:0.2", "ef|thc:2", {}),
        ):
            yield setting_of(model, scheme, codec, data=data, **rest)
        return
    combined: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("subspace:0.2", "ef|thc:1", {}),
        ("subspace:0.1", "ef|thc:4", {}),
        ("subspace:0.1", "ef|thc:2", {}),
        ("subspace:0.1", "ef|thc:1", {}),
        ("subspace:0.05", "ef|thc:2", {}),
        ("hashed:0.1", "ef|thc:2", {}),
        ("monarch:0.2", "ef|thc:4", {}),
        ("monarch:0.2", "ef|thc:2", {}),
    )
    for scheme, codec, rest in combined:
        yield setting_of(model, scheme, codec, workers=4, data=data, **rest)
