"""The stages by name: ours, and those of other packages, from the entry-point group ``laconic.codecs``."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import entry_points

from laconic.codecs.adaptive import Adaptive
from laconic.codecs.base import Stage
from laconic.codecs.bins import Bins
from laconic.codecs.cast import BF16, FP16, Raw
from laconic.codecs.coders import Deflate, Huffman, Rans, Zstd
from laconic.codecs.mean import Mean
from laconic.codecs.memory import ErrorFeedback, MomentumCorrection
from laconic.codecs.packed_ints import THC, Shared
from laconic.codecs.powersgd import PowerSGD
from laconic.codecs.qsgd import QSGD
from laconic.codecs.randk import RandK
from laconic.codecs.sign import OneBit, Sign
from laconic.codecs.terngrad import TernGrad
from laconic.codecs.threshold import Threshold
from laconic.codecs.topk import TopK
from laconic.codecs.uniform import Uniform
from laconic.codecs.union import Union

__all__ = ["BUILT_IN", "names", "stages"]

log = logging.getLogger("laconic")

BUILT_IN: tuple[type[Stage], ...] = (
    Raw, FP16, BF16, Uniform, Adaptive, QSGD, TernGrad, Sign, OneBit, Bins, Shared, THC, PowerSGD, Mean, TopK,
    RandK, Threshold, Union, Huffman, Rans, Deflate, Zstd, ErrorFeedback, MomentumCorrection,
)  # fmt: skip


@lru_cache(maxsize=1)
def stages() -> dict[str, type[Stage]]:
    """Return all stages by name. Stages of other packages are loaded on first use, not at import."""
    by_name = {stage.name: stage for stage in BUILT_IN}
    for entry in entry_points(group="laconic.codecs"):
        if entry.name in by_name:
            log.warning("codec %r of %s is ignored: the name is taken", entry.name, entry.value)
            continue
        try:
            stage = entry.load()
            if not (isinstance(stage, type) and issubclass(stage, Stage) and stage.name == entry.name):
                raise TypeError(f"it is not a Stage named {entry.name!r}")
        except Exception as error:  # a broken plug-in must neither break the other codecs nor fail silently
            log.warning("codec %r of %s cannot be loaded: %s", entry.name, entry.value, error)
            continue
        by_name[entry.name] = stage
    return by_name


def names(*kinds: str) -> list[str]:
    """Return the names of the stages of the given kinds, or of all."""
    return sorted(name for name, stage in stages().items() if not kinds or stage.kind in kinds)
