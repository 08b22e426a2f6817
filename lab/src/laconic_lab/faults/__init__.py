"""A fault campaign against the parameter server: real sockets, faults at given steps, invariants checked."""

from __future__ import annotations

import laconic.cluster.server  # noqa: F401 - first: it sets gRPC's log level before gRPC is loaded
from laconic_lab.faults.campaign import DESCRIPTIONS, MODES, Outcome, campaign, cases, run_case
from laconic_lab.faults.connection_flood import FloodResult, run_flood
from laconic_lab.faults.fault_types import FAULTS
from laconic_lab.faults.idle_calls import IDLE_KINDS
from laconic_lab.faults.idle_phases import IdleResult, run_idle
from laconic_lab.faults.soak import Soak, soak
from laconic_lab.faults.tiers import TIERS, run_tier

__all__ = [
    "DESCRIPTIONS", "FAULTS", "IDLE_KINDS", "MODES", "TIERS", "FloodResult", "IdleResult", "Outcome", "Soak",
    "campaign", "cases", "run_case","run_flood", "run_idle", "run_tier", "soak",
]  # fmt: skip
