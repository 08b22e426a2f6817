"""The laboratory of laconic: benchmarks, reproduced papers, a fault campaign and network emulation.

Installed as a second distribution, ``laconic-lab``. It registers ``laconic bench``, ``laconic study`` and
``laconic lab`` with the command line and its own sections with ``laconic report``.
"""
