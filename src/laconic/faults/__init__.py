"""A fault campaign against the parameter server: real sockets, faults by step number, promises checked."""

from __future__ import annotations

from laconic.faults.campaign import MODES, Outcome, campaign
from laconic.faults.classes import CLASSES
from laconic.faults.soak import Soak, soak

__all__ = ["CLASSES", "MODES", "Outcome", "Soak", "campaign", "soak"]
