"""Pipeline parallelism with compressed activations and gradients, for stages of ``torch.distributed.pipelining``."""

from __future__ import annotations

from laconic.pipeline.stage import StageCompression, compress

__all__ = ["StageCompression", "compress"]
