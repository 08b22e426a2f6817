"""README's table of transformers, from the Records of ``laconic study gpt``."""

from __future__ import annotations

from page_blocks import RESULTS

from laconic.tables import Table
from laconic_lab.studies import load_study
from laconic_lab.studies.gpt.results import ADAMW, MUON
from laconic_lab.studies.gpt.tables import step_seconds

PART = "large"
RATE, LATENCY_S = 100e6, 0.05


def gpt_table() -> str:
    """Return the table and the sentence about its source."""
    results = load_study("gpt").load(RESULTS / "gpt")
    plain = [row for row in (results.best(PART, name) for name in (ADAMW, MUON)) if row is not None]
    ours = [row for row in results.of(PART) if row.values["method"].startswith("laconic")]
    rows = []
    for row in (*plain, *sorted(ours, key=lambda row: row.ratio)):
        values, beside = row.values, results.beside_adamw(row)
        method = values["method"]
        if row.is_local:
            method = (
                f"`LocalSGD`, Muon, `every={values['every']}`, `ef|{values['up']}`, `fragments={values['fragments']}`"
            )
        rows.append((
            method, str(values["workers"]) if row.is_local else "any", f"{row.loss:.4f} ({len(row.runs)})",
            f"{beside:+.1f} %" if beside is not None else "", "1" if row.ratio == 1 else f"1/{row.ratio:,.0f}",
            f"{step_seconds(row, RATE, LATENCY_S):.3g} s",
        ))  # fmt: skip
    columns = ("training", "workers", "loss (seeds)", "beside AdamW-DDP", "bytes", "sending, a step")
    first = plain[0].values
    source = (
        f"A GPT of {first['numel'] / 1e6:.0f} M parameters on Python sources, {first['steps']:,} steps of "
        f"{first['batch'] * 256:,} bytes on an H200; validation loss in nats a byte. Bytes count both directions; "
        "float32 data parallelism is 1. The last column is the time of transmission alone at 100 Mbit/s and 50 ms. "
        "Source: `laconic study gpt` ([the study](docs/studies/gpt.md)); filled in by `make docs`."
    )
    return f"{Table(columns, rows, 1).to_markdown()}\n\n{source}"
