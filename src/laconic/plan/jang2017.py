"""Figures of Jang, Na and Yoon 2017, and the assumptions where the paper gives none."""

from __future__ import annotations

from laconic.plan import Naive, Training

__all__ = [
    "ALEXNET", "ALEXNET_EPOCHS", "GIGABIT", "GZIP", "NODES", "PAPER_STEP_S", "PAPER_TABLE", "RHOS", "WORKERS",
]  # fmt: skip

GIGABIT = 125e6
"""Bytes per second of the paper's network. Like the paper, this ignores packet headers."""
NODES = 25
WORKERS = 16
"""Workers of figures 6b and c."""
RHOS = (0.2, 0.5)

PAPER_TABLE = {
    "AlexNet": (233e6, 1.079, 8.079, 1.898),
    "ILSVRC 2012": (240e9, 1.269, 10532.177, 3886.498),
    "CIFAR-100": (147e6, 1.097, 660.876, 2.242),
}
"""Table 1: bytes, original over compressed, and seconds of gzip."""

PAPER_STEP_S = 0.6
"""C of AlexNet at 256 images on a GTX 970. The paper's text does not give it: estimated from published timings of
neighbouring cards (0.38 s on a TITAN X, 0.98 s on a K40c, for 256 images)."""

ALEXNET = Training(nbytes=233e6, step_s=PAPER_STEP_S, bandwidth=GIGABIT, every=200)
GZIP = Naive.of(233e6, times_smaller=1.079, compress_s=8.079, decompress_s=1.898)

ALEXNET_EPOCHS = 450_000
"""Iterations of a whole training, for figure 7a: Caffe's default for AlexNet. The paper does not give its own."""
