"""A network on one machine: hosts with slow, late, lossy cables, to measure in and to break.

``Lab`` makes hosts out of network namespaces and needs root; ``laconic_lab.network.paced_proxy`` is its loopback
counterpart for machines without root. See docs/lab.md.
"""

from laconic_lab.network.hosts import Counters, Host
from laconic_lab.network.link import Link
from laconic_lab.network.namespaces import Lab, labs, remove, stale
from laconic_lab.network.state import unique_name

__all__ = ["Counters", "Host", "Lab", "Link", "labs", "remove", "stale", "unique_name"]
