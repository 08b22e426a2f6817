"""What compression is worth: models of time that move no tensor."""

from __future__ import annotations

from laconic.plan.bound import Bound

__all__ = ["Bound"]
