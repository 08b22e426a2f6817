"""Times DistributedDataParallel with stock hooks and laconic's codecs over links of several rates."""

from __future__ import annotations

from laconic_lab.bench.ddp.settings import DDPSettings
from laconic_lab.bench.ddp.suite import run_ddp
from laconic_lab.bench.ddp.tables import ddp_tables

__all__ = ["DDPSettings", "ddp_tables", "run_ddp"]
