"""The catalog of all stages, with their measured sizes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch

from laconic.codecs import ChannelStage, Stage, ValueStage, registry
from laconic.errors import ConfigError
from laconic.frames import encode

__all__ = ["CATALOG_NUMEL", "CatalogEntry", "catalog"]

CATALOG_NUMEL = 65_536
"""The number of Gaussian values that sizes are measured on."""

SHAPES = ((256, 256), (1024, 1024), (CATALOG_NUMEL,))
"""Shapes that stages are measured on whose size depends on them; the first stands for the stage."""

QUANTIZER = "uniform:8"
"""The quantizer before each coder, so that coders can be compared."""

KINDS = ("cast", "quantizer", "selector", "coder", "channel")


@dataclass(frozen=True)
class CatalogEntry:
    """One stage.

    ``bits_per_value`` is measured on a whole frame with default arguments (of a coder: after ``uniform:8``); None for
    channel stages, and for a stage whose package is missing: see ``note``. ``bits_by_shape`` is empty unless a tensor's
    shape decides. ``bias`` is ``exact``, ``unbiased``, ``biased``, or says when the stage is biased;
    ``biased_by_default`` is about the default arguments.
    """

    name: str
    kind: str
    summary: str
    arguments: dict[str, Any]
    bits_per_value: float | None
    bias: str | None
    summable: bool
    example: str
    biased_by_default: bool
    bits_by_shape: dict[str, float]
    note: str | None


def catalog() -> list[CatalogEntry]:
    """Return all stages, ours and those of other packages, by kind."""
    entries = [_entry(name, stage) for name, stage in registry.stages().items()]
    return sorted(entries, key=lambda entry: KINDS.index(entry.kind) if entry.kind in KINDS else len(KINDS))


def _entry(name: str, stage: type[Stage]) -> CatalogEntry:
    arguments = {field.name: field.default for field in dataclasses.fields(cast(Any, stage))}
    bits, by_shape, note = None, {}, None
    if not issubclass(stage, ChannelStage):
        spec = f"{QUANTIZER}|{name}" if stage.kind == "coder" else name  # a coder needs a quantizer
        try:
            if getattr(stage, "needs_shape", False):
                by_shape = {"x".join(map(str, shape)): _bits(spec, shape) for shape in SHAPES}
                bits = next(iter(by_shape.values()))
            else:
                bits = _bits(spec, (CATALOG_NUMEL,))
        except ConfigError as error:  # a package that is not installed
            note = str(error)
    return CatalogEntry(
        name, stage.kind, stage.summary, arguments, bits, _bias(stage), stage.summable, stage.example,
        not issubclass(stage, ChannelStage) and stage.kind != "coder" and stage().is_biased, by_shape, note,
    )  # fmt: skip


def _bits(spec: str, shape: tuple[int, ...]) -> float:
    """Return the bits per value of a frame of seeded Gaussian values with the magnitude of typical gradients."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    return 8 * len(encode(x, spec)) / x.numel()


def _bias(stage: type[Stage]) -> str | None:
    if issubclass(stage, ChannelStage):
        return None
    if stage.kind == "coder" or (issubclass(stage, ValueStage) and stage.lossless):
        return "exact"
    if isinstance(stage.biased, str):
        return f"unbiased; biased {stage.biased}" if stage.biased.startswith("only") else f"biased: {stage.biased}"
    return "biased" if stage.biased else "unbiased"
