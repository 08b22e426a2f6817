"""Training: data sets so far."""

from __future__ import annotations

from laconic.train.data import Images, load

__all__ = ["Images", "load"]
