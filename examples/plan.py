"""From a profile of a machine to a plan: python examples/plan.py [PROFILE [MODEL [TOPOLOGY]]]

``laconic calibrate -o machine.json --model mlp`` writes a profile; ``cpu`` comes with laconic. Each line is what
laconic plan --profile PROFILE --model MODEL --topology TOPOLOGY --workers 4 --bandwidth RATE computes.
"""

from __future__ import annotations

import sys

from laconic.plan import PlanRequest, profile, recommend
from laconic.units import parse_rate, show_rate

RATES = ("100mbit", "1gbit", "10gbit", "400gbit")


def main(machine: str = "cpu", model: str = "resnet50", topology: str = "ps") -> None:
    times = profile.load(machine)
    print(f"{model} on {machine}: 4 workers, {topology}")
    print(f"{'link':>12}{'float32':>12}{'with codec':>12}{'speed-up':>10}  use")
    for rate in map(parse_rate, RATES):
        request = PlanRequest.for_model(times, model, workers=4, rate=rate, topology=topology)
        recommendation = recommend(request, notify=lambda line: print(line, file=sys.stderr))
        plain, best = recommendation.rows[0], recommendation.row
        # Only what has trained such models as well as float32 is recommended: recommendation.reason says which did.
        print(
            f"{show_rate(rate):>12}{1e3 * plain.step.total_s:>9.1f} ms{1e3 * best.step.total_s:>9.1f} ms"
            f"{best.speedup_fp32:>9.2f}×  {best.codec}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
