"""The table of docs/planner.md about training over the internet, computed by ``laconic.plan.internet``."""

from __future__ import annotations

from dataclasses import replace

from laconic.plan.internet import DATA_CENTRE, HOME, Fleet, LocalTraining, predict
from laconic.tables import Table

FLOPS = 8 * 1e15 * 0.4
"""Floating-point operations per second of a replica: 8 GPUs of 1 PFLOP/s, of which 40 % are used."""
MODELS = {"7 B": 7e9, "70 B": 70e9}
TOKENS_A_PARAMETER = 20
STEP_TOKENS = 2**19
SIGN_BITS = 1.03
"""Bits per value of ``sign``, with scales and headers."""
LINES = {"home": HOME, "data centre": DATA_CENTRE}
METHODS = {
    "every 64, `ef|sign`, two-shot": LocalTraining(64, STEP_TOKENS, SIGN_BITS),
    "the same, 4 fragments, overlap 8": LocalTraining(64, STEP_TOKENS, SIGN_BITS, fragments=4, overlap=8),
    "the same by time, 64 server shards": LocalTraining(
        64, STEP_TOKENS, SIGN_BITS, exchange="server", servers=64, fragments=4, overlap=8, by_time=True
    ),
    "every 30, 64 of 4,096 by 14 bits, gather": LocalTraining(30, STEP_TOKENS, 14 / 64, exchange="gather"),
}
REPLICAS = (10, 100, 1000, 10_000)


def table() -> str:
    """Return utilisation and days by model, line, method and number of replicas."""
    rows = []
    for model, params in MODELS.items():
        for line, values in LINES.items():
            for method, training in METHODS.items():
                cells = []
                for replicas in REPLICAS:
                    fleet = Fleet(
                        replicas, FLOPS / (6 * params), values, spread=0.2, stay_h=24.0, away_s=600.0,
                        regions=1 if replicas < 1000 else 10,
                    )  # fmt: skip
                    predicted = predict(params, TOKENS_A_PARAMETER * params, fleet, replace(training), rounds=60)
                    cells.append(f"{100 * predicted.utilisation:.0f} %, {predicted.days:.3g} d")
                rows.append((model, line, method, *cells))
    columns = ("model", "lines", "exchange", *(f"{count:,} replicas" for count in REPLICAS))
    return Table(columns, rows, 3).to_markdown()
