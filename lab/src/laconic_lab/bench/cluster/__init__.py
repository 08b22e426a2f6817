"""Benchmarks of the parameter server: cost of aggregation, rounds over slow links, load by many clients.

Needs gRPC and cryptography (``laconic[cluster]``) to run, not to import.
"""

from __future__ import annotations

from laconic_lab.bench.cluster.settings import PARTS, ClusterSettings
from laconic_lab.bench.cluster.tables import ClusterTable, tables

__all__ = ["PARTS", "ClusterSettings", "ClusterTable", "tables"]
