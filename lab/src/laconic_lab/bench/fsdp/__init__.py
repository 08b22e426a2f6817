"""Trains a GPT by FSDP2 with replicas on nodes that a slow link connects: torch's HSDP, attach and LocalSGD."""

from __future__ import annotations

from laconic_lab.bench.fsdp.settings import FSDPSettings
from laconic_lab.bench.fsdp.suite import run_fsdp
from laconic_lab.bench.fsdp.tables import fsdp_tables

__all__ = ["FSDPSettings", "fsdp_tables", "run_fsdp"]
