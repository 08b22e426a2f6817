"""Golden frames: what format 1 looked like when it was frozen.

``python tests/golden/make.py`` writes the frames that are missing and refuses to touch those that exist: a frame that
no longer matches is a change of the wire format, to be made on purpose (delete the file, run this, say so in
CHANGELOG.md under "Wire format"). Inputs come from integer arithmetic, so that no library's random numbers matter.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import laconic

HERE = Path(__file__).resolve().parent
DIGESTS = HERE / "decoded.sha256"


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in (-1, 1), small ones more often, from a multiplicative hash: exact in float64, rounded once."""
    n = torch.Size(shape).numel()
    unit = ((torch.arange(1, n + 1) * 2654435761 % 2**32).double() - 2**31) / 2**31
    return (unit * unit * unit).to(dtype).view(shape)


@dataclass(frozen=True)
class Case:
    """One frozen frame: a name, the codec, the input, the seed; and the gradient, for a codec that asks for one."""

    name: str
    spec: str
    make: Callable[[], Tensor] = lambda: ramp(9, 37)
    seed: int = 7
    gradient: Callable[[], Tensor | None] = lambda: None

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.bin"

    @property
    def bytes_are_ours(self) -> bool:
        """False where another library writes them, which may do so in another way tomorrow."""
        return not self.spec.rpartition("|")[2].startswith(("deflate", "zstd"))

    def encode(self) -> bytes:
        return laconic.encode(self.make(), self.spec, seed=self.seed, gradient=self.gradient())


@dataclass(frozen=True)
class SumCase(Case):
    """A frozen sum: of some of so many workers, whose tensors are multiples of one."""

    workers: int = 4
    present: tuple[int, ...] = (0, 1, 2, 3)
    ring: bool = False

    def encode(self) -> bytes:
        summing = laconic.summing(self.spec, workers=self.workers, ring=self.ring)
        xs = [self.make() * (worker + 1) / 4 for worker in range(self.workers)]
        agreed = summing.agree([summing.probe(x, seed=self.seed) for x in xs])
        frames = [summing.encode(xs[worker], agreed, seed=self.seed, worker=worker) for worker in self.present]
        return bytes(laconic.sums.add(*frames))


def sparse(*shape: int) -> Tensor:
    """A ramp with most entries zero."""
    x = ramp(*shape)
    return torch.where(x.abs() > 0.5, x, 0.0)


def few_rows(*shape: int) -> Tensor:
    """A ramp whose every eighth row is 16 times as large, so that the gaps between large entries differ much."""
    x = ramp(*shape)
    return x * torch.where(torch.arange(shape[0]) % 8 == 0, 16.0, 1.0)[:, None]


def few_columns(*shape: int) -> Tensor:
    """A ramp with large entries in some columns only, at no regular distance; a vector has 256 columns."""
    columns = ramp(min(shape[-1], 256)).abs() > 0.5
    return ramp(*shape) * torch.where(columns, 16.0, 1.0)[torch.arange(shape[-1]) % 256]


CASES = (
    Case("none", "none", lambda: ramp(5, 7)), Case("none-bf16", "none", lambda: ramp(5, 7, dtype=torch.bfloat16)),
    Case("none-fp64", "none", lambda: ramp(3, dtype=torch.float64)), Case("fp16", "fp16", lambda: ramp(33)),
    Case("bf16", "bf16", lambda: ramp(33)), Case("uniform", "uniform:5"),
    Case("uniform-constant", "uniform:8", lambda: torch.full((1000, 1000), 0.75)), Case("qsgd", "qsgd:4,bucket=128"),
    Case("qsgd-l2", "qsgd:3,bucket=128,norm=l2"), Case("qsgd-layer", "qsgd:3,bucket=0,norm=l2"),
    Case("qsgd-nearest", "qsgd:8,round=nearest"),
    Case("qsgd-fp16", "qsgd:4", lambda: ramp(9, 37, dtype=torch.float16)), Case("terngrad", "terngrad:128"),
    Case("sign", "sign:128"), Case("onebit", "onebit:128"), Case("topk-rice", "topk:0.02", lambda: ramp(30, 37)),
    Case("topk-bitmap", "topk:0.4"), Case("topk-all", "topk:1.0", lambda: ramp(11)),
    Case("topk-approx", "topk:0.05,approx=true"), Case("topk-chunk", "topk:0.05,chunk=128"),
    Case("topk-chunk-sign", "topk:0.02,chunk=64|sign:128", lambda: ramp(30, 37)),
    Case("topk-fp64", "topk:0.05", lambda: ramp(9, 37, dtype=torch.float64)), Case("randk", "randk:0.05"),
    Case("threshold", "threshold:0.6"), Case("topk-qsgd", "topk:0.3|qsgd:4", lambda: ramp(30, 37)),
    Case("randk-bf16", "randk:0.1,scale=false|bf16"),
    Case("threshold-sign", "threshold:0.3|sign:128", lambda: ramp(30, 37)),
    Case("zero", "qsgd:4", lambda: torch.zeros(512, 512)), Case("scalar", "qsgd:4", lambda: torch.tensor(-0.5)),
    Case("empty", "topk:0.01", lambda: torch.empty(3, 0, 2)), Case("wide", "none", lambda: torch.empty(0, 2**33)),
    Case("uniform-30", "uniform:30"), Case("adaptive", "adaptive:5.0"),
    Case("adaptive-sampled", "adaptive:3.0", lambda: ramp(40, 50)),
    Case("adaptive-integer", "adaptive:2.0,m=3,f=1.0,integer=true"), Case("adaptive-zero", "adaptive:4.0,zero=true"),
    Case("adaptive-tail", "adaptive:3.0,tail=0.02", lambda: ramp(30, 37)),
    Case("adaptive-constant", "adaptive:5.0|huffman", lambda: torch.full((1000, 1000), 0.75)),
    Case("adaptive-grad", "adaptive:3.0,by=grad", lambda: ramp(9, 37), gradient=lambda: 5 * ramp(3, 37)),
    Case("adaptive-huffman", "adaptive:3.0|huffman", lambda: ramp(60, 37)),
    Case("adaptive-rans", "adaptive:5.0,zero=true|rans"),
    Case("adaptive-tail-rans", "adaptive:3.0,tail=0.02|rans", lambda: ramp(30, 37)),
    Case("uniform-huffman", "uniform:10|huffman"), Case("uniform-huffman-auto", "uniform:5|huffman:auto"),
    Case("uniform-raw", "uniform:3|rans:auto", lambda: torch.arange(77) / 64 - 0.5),
    Case("uniform-streams", "uniform:1|huffman", lambda: ramp(256, 257)),
    Case("uniform-lanes", "uniform:2|rans", lambda: ramp(130, 127)),
    Case("uniform-chunks", "uniform:4|rans", lambda: torch.cat([torch.zeros(1 << 19), ramp(300)])),
    Case("qsgd-rans", "qsgd:4,bucket=128|rans:auto"), Case("terngrad-rans", "terngrad:128|rans"),
    Case("sign-huffman", "sign:128|huffman"), Case("onebit-rans", "onebit:128|rans"),
    Case("topk-qsgd-rans", "topk:0.3|qsgd:4|rans", lambda: ramp(30, 37)),
    Case("topk-adaptive-huffman", "topk:0.2|adaptive:5.0,zero=true|huffman", lambda: ramp(30, 37)),
    Case("shared", "shared:8", lambda: ramp(30, 37)), Case("shared-stochastic", "shared:3,round=stochastic"),
    Case("thc", "thc:4", lambda: ramp(30, 37)), Case("thc-stochastic", "thc:1,round=stochastic,rotation=5"),
    Case("powersgd", "powersgd:2"), Case("randk-mean", "randk:0.1|mean"), Case("union", "union", lambda: sparse(9, 37)),
    SumCase("sum-shared", "shared:8", lambda: ramp(30, 37)), SumCase("sum-thc", "thc:2", lambda: ramp(30, 37)),
    SumCase("sum-some", "thc:3,round=stochastic", lambda: ramp(9, 37), workers=40, present=(3, 39)),
    SumCase("sum-ring", "thc:6", lambda: ramp(30, 37), ring=True), SumCase("sum-randk-thc", "randk:0.4|thc:4"),
    SumCase("sum-randk", "randk:0.1"), SumCase("sum-union", "union", lambda: sparse(9, 37)),
    SumCase("sum-powersgd", "powersgd:2"), Case("uniform-deflate", "uniform:6|deflate"),
    Case("uniform-zstd", "uniform:10|zstd"),
    Case("topk-gaps", "topk:0.1,code=rans|sign", lambda: few_rows(64, 48)),
    Case("topk-gaps-constant", "topk:0.5,code=rans", lambda: torch.arange(600).fmod(2) - 0.25),
    Case("topk-ranks", "topk:0.015625,chunk=64,code=rank|sign", lambda: ramp(30, 37)),
    Case("topk-ranks-six", "topk:0.1,chunk=64,code=rank|sign", lambda: ramp(30, 37)),
    Case("topk-context", "topk:0.1,code=context|sign", lambda: few_rows(64, 48)),
    Case("topk-context-vector", "topk:0.05,code=context", lambda: few_columns(5000)),
    Case("topk-context-chunks", "topk:0.046875,chunk=64,code=context|sign", lambda: few_columns(90, 83)),
    Case("threshold-context", "threshold:4.0,code=context|sign", lambda: few_columns(90, 83)),
    Case("threshold-gaps", "threshold:0.9,code=rans|sign", lambda: few_rows(128, 80)),
    Case("bins", "bins:2,bucket=128"), Case("bins-1", "bins:1,bucket=128"),
    Case("bins-4", "bins:4,bucket=256"), Case("bins-huffman", "bins:3,bucket=128|huffman"),
    Case("topk-bins", "topk:0.3|bins:2", lambda: ramp(30, 37)),
)  # fmt: skip
BUNDLE = HERE / "bundle.bin"


def bundle() -> bytes:
    tensors = {"layer.weight": ramp(9, 37), "layer.bias": ramp(9), "ŝ": torch.zeros(2, 2), "": ramp(1)}
    return laconic.encode_bundle(tensors, "topk:0.1|qsgd:4", seed=7)


def digest(x: Tensor) -> str:
    flat = x.contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()


def digests() -> dict[str, str]:
    """What each frame decodes to, by name."""
    lines = DIGESTS.read_text().splitlines() if DIGESTS.exists() else []
    return {name: value for value, name in (line.split() for line in lines)}


def main() -> int:
    known = digests()
    for case in CASES:
        if case.path.exists():
            print(f"{case.path.name} is frozen: left alone")
            continue
        blob = case.encode()
        case.path.write_bytes(blob)
        known[case.name] = digest(laconic.decode(blob))
        print(f"{case.path.name} written, {len(blob)} bytes")
    if BUNDLE.exists():
        print(f"{BUNDLE.name} is frozen: left alone")
    else:
        BUNDLE.write_bytes(bundle())
        print(f"{BUNDLE.name} written")
    DIGESTS.write_text("".join(f"{known[name]}  {name}\n" for name in sorted(known)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
