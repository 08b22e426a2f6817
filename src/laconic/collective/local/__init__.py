"""Low-communication training: ranks train alone for some steps, then exchange what their optimizers did, compressed."""

from __future__ import annotations

from laconic.collective.local.localsgd import LocalSGD
from laconic.collective.local.optimizers import ParameterSplit, muon, split_parameters
from laconic.collective.local.outer import OUTER

__all__ = ["OUTER", "LocalSGD", "ParameterSplit", "muon", "split_parameters"]
