"""Measuring a cluster: what the server costs, what methods gain on slow links, and how many clients it bears.

Needs gRPC and cryptography: ``pip install 'laconic[cluster]'``. Importing this module does not.
"""

from __future__ import annotations

from laconic_lab.bench.cluster.settings import PARTS, ClusterSettings
from laconic_lab.bench.cluster.tables import ClusterTable, tables

__all__ = ["PARTS", "ClusterSettings", "ClusterTable", "tables"]
