"""Size and error of each codec on values with heavy tails: python examples/roundtrip.py"""

from __future__ import annotations

import torch

import laconic

SPECS = (
    "none",
    "bf16",
    "uniform:8",
    "qsgd:8",
    "qsgd:4",
    "qsgd:2",
    "terngrad",
    "sign",
    "onebit",
    "topk:0.01",
    "topk:0.01|qsgd:4",
    "randk:0.01",
)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1_000_000, generator=generator) * torch.rand(1_000_000, generator=generator) ** 4

    print(f"{x.numel():,} float32 values, {4 * x.numel():,} bytes; error = |x - decoded| / |x|, in norm\n")
    print(f"{'codec':20}{'bytes':>12}{'bits/value':>12}{'error':>9}  biased")
    for spec in SPECS:
        frame = laconic.encode(x, spec, seed=0)
        error = (x - laconic.decode(frame)).norm() / x.norm()
        biased = laconic.codec(spec).biased
        bias = "yes" if biased else "no"
        print(f"{spec:20}{len(frame):>12,}{8 * len(frame) / x.numel():>12.3f}{error:>9.4f}  {bias}")

    print("\nA large error need not hurt: unbiased noise averages out over workers and steps,")
    print("and with `ef` the error of a biased codec is sent later (examples/error_feedback.py).")


if __name__ == "__main__":
    main()
