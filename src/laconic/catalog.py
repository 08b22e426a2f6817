"""The catalog of all stages, with their measured sizes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch

from laconic.codecs import ChannelStage, Stage, ValueStage, registry
from laconic.frames import encode

__all__ = ["CATALOG_NUMEL", "CatalogEntry", "catalog"]

CATALOG_NUMEL = 65_536
"""The number of Gaussian values that sizes are measured on."""

QUANTIZER = "uniform:8"
"""The quantizer before each coder, so that coders can be compared."""

KINDS = ("cast", "quantizer", "selector", "coder", "channel")


@dataclass(frozen=True)
class CatalogEntry:
    """One stage.

    ``bits_per_value`` is measured on a whole frame with default arguments (of a coder: after ``uniform:8``); None for
    channel stages. ``bias`` is ``exact``, ``unbiased``, ``biased``, or says when the stage is biased.
    """

    name: str
    kind: str
    summary: str
    arguments: dict[str, Any]
    bits_per_value: float | None
    bias: str | None
    summable: bool
    example: str


def catalog() -> list[CatalogEntry]:
    """Return all stages, ours and those of other packages, by kind."""
    entries = [_entry(name, stage) for name, stage in registry.stages().items()]
    return sorted(entries, key=lambda entry: KINDS.index(entry.kind) if entry.kind in KINDS else len(KINDS))


def _entry(name: str, stage: type[Stage]) -> CatalogEntry:
    arguments = {field.name: field.default for field in dataclasses.fields(cast(Any, stage))}
    bits = None
    if not issubclass(stage, ChannelStage):
        spec = f"{QUANTIZER}|{name}" if stage.kind == "coder" else name  # a coder needs a quantizer
        bits = 8 * len(encode(_gaussian(), spec)) / CATALOG_NUMEL
    return CatalogEntry(name, stage.kind, stage.summary, arguments, bits, _bias(stage), stage.summable, stage.example)


def _bias(stage: type[Stage]) -> str | None:
    if issubclass(stage, ChannelStage):
        return None
    if stage.kind == "coder" or (issubclass(stage, ValueStage) and stage.lossless):
        return "exact"
    if isinstance(stage.biased, str):
        return f"unbiased; biased {stage.biased}" if stage.biased.startswith("only") else f"biased: {stage.biased}"
    return "biased" if stage.biased else "unbiased"


def _gaussian() -> torch.Tensor:
    """Return seeded Gaussian values with the magnitude of typical gradients."""
    return torch.randn(CATALOG_NUMEL, generator=torch.Generator().manual_seed(0)) * 1e-3
