"""Backend for CPU tensors: the C++ core, with the bytes of ``reference``.

Each module has the name of its counterpart in ``reference``. The core uses ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import logging
import os

from laconic import _core
from laconic.kernels.cpu.casts import *
from laconic.kernels.cpu.entropy_coding import *
from laconic.kernels.cpu.linear import *
from laconic.kernels.cpu.lowrank import *
from laconic.kernels.cpu.packed_ints import *
from laconic.kernels.cpu.packing import *
from laconic.kernels.cpu.positions import *
from laconic.kernels.cpu.quantizers import *
from laconic.kernels.cpu.selection import *

if os.environ.get("LACONIC_ISA", _core.isa) != _core.isa:
    logging.getLogger("laconic").warning(
        "LACONIC_ISA=%s is not available on this machine, using %s", os.environ["LACONIC_ISA"], _core.isa
    )
