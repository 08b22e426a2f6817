"""How many launches and waits of the host a call takes on a GPU: for small tensors they are most of its time."""

from __future__ import annotations

import pytest
import torch
from triton_support import INTERPRETED, no_compile_fallback  # noqa: F401

import laconic
import laws
from laconic import kernels

if not INTERPRETED:
    pytest.skip("the kernels are not interpreted", allow_module_level=True)
from launch_counts import Work, counted_work

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("no_compile_fallback")]

MOST = {
    "none": ((2, 1), (2, 1)), "fp16": ((2, 1), (2, 1)), "bf16": ((2, 1), (2, 1)), "qsgd:4": ((1, 1), (2, 1)),
    "sign": ((1, 1), (2, 1)), "onebit": ((1, 1), (2, 1)), "bins:2": ((1, 1), (2, 1)), "terngrad": ((2, 1), (2, 1)),
    "uniform:8": ((2, 1), (1, 0)), "shared:8": ((1, 1), (2, 1)), "thc:4": ((1, 1), (2, 1)),
    "topk:0.01": ((3, 1), (2, 1)), "randk:0.01": ((3, 1), (2, 1)), "threshold:2.0": ((5, 2), (2, 1)),
    "topk:0.01|qsgd:4": ((4, 1), (4, 2)), "adaptive:5.0": ((3, 1), (1, 0)),
    "adaptive:5.0|huffman": ((7, 2), (5, 1)), "adaptive:5.0|rans": ((8, 2), (5, 1)),
}  # fmt: skip
"""The most launches and waits of an encoder, and of a decoder.

Coders wait for the range, from which the host computes the levels, and for the size; their tables are built between the
launches that count and write. Every other encoder but ``threshold`` waits once.
"""

SLOW = ("adaptive:5.0|huffman", "adaptive:5.0|rans")
"""The interpreter codes symbol by symbol."""


def work_of(spec: str, n: int) -> tuple[Work, Work]:
    """Return what encoding and decoding n values asks of a device, once everything is compiled and cached."""
    codec, x, out = laconic.codec(spec), laws.normal(n), torch.empty(n)
    with kernels.use_backend("triton"):
        for _ in range(2):
            with counted_work() as encoding:
                packet = codec.encode(x, seed=1)
            with counted_work() as decoding:
                codec.decode(packet, out=out)
    return encoding, decoding


@pytest.mark.parametrize("spec", [pytest.param(spec, marks=pytest.mark.slow if spec in SLOW else ()) for spec in MOST])
def test_a_call_takes_at_most_so_many_launches_and_waits(spec: str) -> None:
    """For up to 2^22 values a kernel of several phases is one launch, so 4 MB take what 8,192 values take."""
    for work, (launches, waits) in zip(work_of(spec, 512 if spec in SLOW else 8192), MOST[spec], strict=True):
        assert work.launches <= launches and work.waits <= waits, work


def test_everything_is_counted() -> None:
    with counted_work() as work:
        x = torch.zeros(10)
        (x + 1).view(-1)[:3].tolist()
        int(x[0])
    assert work.operations == {"zeros": 1, "add": 1} and work.waits == 2 and work.launches == 2
