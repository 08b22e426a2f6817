"""A network on one machine: hosts with slow, late, lossy cables, to measure in and to break.

``Lab`` makes hosts out of network namespaces and needs root; ``laconic.lab.paced`` is its loopback twin for machines
without. See docs/lab.md.
"""

from laconic.lab.hosts import Counters, Host
from laconic.lab.link import Link
from laconic.lab.network import Lab, labs, remove, stale
from laconic.lab.state import unique_name

__all__ = ["Counters", "Host", "Lab", "Link", "labs", "remove", "stale", "unique_name"]
