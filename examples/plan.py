"""From a profile of a machine to a plan: python examples/plan.py [PROFILE [MODEL]]

``laconic calibrate -o machine.json --model mlp`` writes a profile; ``cpu`` comes with laconic. The same without Python:
laconic plan --profile machine.json --model mlp --workers 4 --bandwidth 1gbit
"""

from __future__ import annotations

import sys

from laconic.plan import profile
from laconic.plan.advice import Load, advise
from laconic.plan.costs import Network, Work

CODECS = ("bf16", "qsgd:8", "qsgd:4", "topk:0.01|qsgd:4")


def main(name: str = "cpu", model: str = "resnet50") -> None:
    machine = profile.load(name)
    times = machine.models[model]
    load, work = Load.of_model(times), Work(times.step_s, ready=times.ready, spare=True)
    print(f"{model}: {load.numel:,} parameters, a step of {1e3 * times.step_s:.0f} ms, 4 workers and a server")
    print(f"{'link':>12}{'float32':>12}{'with codec':>12}{'speed-up':>10}  take")
    for rate, words in ((100e6, "100 Mbit/s"), (1e9, "1 Gbit/s"), (10e9, "10 Gbit/s"), (400e9, "400 Gbit/s")):
        advice = advise(load, work, Network(4, rate), machine, CODECS)
        plain = next(row for row in advice.rows if row.codec == "none")
        best = advice.row
        print(
            f"{words:>12}{plain.step.total_s:>10.2f} s{best.step.total_s:>10.2f} s{best.speedup_fp32:>9.2f}×  "
            f"{best.codec}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
