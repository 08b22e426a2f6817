"""A fault campaign against the parameter server: real sockets, faults by step number, promises checked."""

from __future__ import annotations

import laconic.cluster.server  # noqa: F401 - first: it tells gRPC, before that is loaded, to keep quiet about strangers
from laconic_lab.faults.campaign import MODES, Outcome, campaign
from laconic_lab.faults.fault_types import CLASSES
from laconic_lab.faults.flood import Siege, siege
from laconic_lab.faults.soak import Soak, soak

__all__ = ["CLASSES", "MODES", "Outcome", "Siege", "Soak", "campaign", "siege", "soak"]
