"""Network emulation on one machine: hosts whose links have a given rate, delay and loss.

``Lab`` builds hosts from network namespaces and needs root. ``paced_proxy`` and ``paced_sockets`` emulate slow links on
loopback without root. See docs/lab.md.
"""

from laconic_lab.network.hosts import Counters, Host
from laconic_lab.network.link import Link
from laconic_lab.network.namespaces import Lab, labs, remove, stale
from laconic_lab.network.state import unique_name

__all__ = ["Counters", "Host", "Lab", "Link", "labs", "remove", "stale", "unique_name"]
