"""Backend that defines the bytes of all codecs, in plain torch, on any device.

Written to be read: vectorised rather than fast. docs/wire-format.md describes the same bytes in words. Sums that affect
bytes have a fixed order (``pairwise_sum``), so neither the number of threads nor the backend can change a frame.
"""

from __future__ import annotations

from laconic.kernels.reference.casts import *
from laconic.kernels.reference.contexts import *
from laconic.kernels.reference.entropy_coding import *
from laconic.kernels.reference.gaps import *
from laconic.kernels.reference.linear import *
from laconic.kernels.reference.lowrank import *
from laconic.kernels.reference.packed_ints import *
from laconic.kernels.reference.packing import *
from laconic.kernels.reference.positions import *
from laconic.kernels.reference.quantizers import *
from laconic.kernels.reference.ranks import *
from laconic.kernels.reference.reductions import *
from laconic.kernels.reference.selection import *
