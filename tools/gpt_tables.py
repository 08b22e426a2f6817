"""Tables about transformers: README's from ``laconic study gpt``, docs/transformers.md's from ``laconic bench gpt``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ddp_records import values_of
from page_blocks import RESULTS

from laconic.records import read
from laconic.tables import Table
from laconic.units import show_bytes
from laconic_lab.bench.gpt.methods import METHODS
from laconic_lab.bench.gpt.settings import show_link
from laconic_lab.studies import load_study
from laconic_lab.studies.gpt.results import ADAMW, MUON, Row
from laconic_lab.studies.gpt.tables import step_seconds

PARTS = ("large", "confirmation")
RATE, LATENCY_S = 100e6, 0.05


def time_table() -> str:
    """Return the time and the bytes of a GPT until plain DDP's loss, over each measured link."""
    trained = [one for one in values_of("bench/gpt.jsonl") if "link" in one and one["failed"] is None and one["valid"]]
    plain = {(one["ranks"], one["link"]): one for one in trained if one["method"] == "ddp"}
    rows = []
    for one in trained:
        base, seconds = plain[one["ranks"], one["link"]], one["reached_s"]
        ratio = base["sent_nbytes"] / one["sent_nbytes"]
        rows.append((
            f"{one['ranks']} ranks, {show_link(one['link'])}", one["title"], f"{one['loss']:.3f}",
            f"{seconds:,.0f} s" if seconds else "not reached",
            f"{base['reached_s'] / seconds:.1f}" if seconds else "", show_bytes(one["sent_nbytes"]),
            "1" if ratio < 1.5 else f"1/{ratio:,.0f}",
        ))  # fmt: skip
    columns = ("link", "training", "last loss", "plain DDP's loss after", "× plain DDP", "sent by a rank", "bytes")
    first = trained[0]
    return (
        f"{Table(columns, rows, 2).to_markdown()}\n\nA byte-level GPT of {first['numel'] / 1e6:.1f} M parameters, one "
        "seed; loss in nats a byte. Local steps train for more steps than DDP. Source: `laconic bench gpt` "
        "([how it is measured](gpt-benchmarks.md)); filled in by `make docs`."
    )


def gradients_table() -> str:
    """Return the last losses of a GPT whose gradients are exchanged in every step by codecs, seed by seed."""
    found = [
        record for record in read(RESULTS / "bench" / "gpt-gradients.jsonl") if record.kind == "bench.gpt.loss"
    ]  # fmt: skip
    losses: dict[str, dict[int, float]] = {}
    for record in found:
        losses.setdefault(record.values["method"], {})[record.seed or 0] = record.values["curve"][-1][1]
    plain, seeds = statistics.fmean(losses["ddp"].values()), sorted(losses["ddp"])
    rows = [
        (METHODS[name].title, *(f"{by_seed[seed]:.3f}" for seed in seeds), f"{statistics.fmean(by_seed.values()):.3f}",
         f"{100 * (statistics.fmean(by_seed.values()) / plain - 1):+.2f} %")
        for name, by_seed in losses.items()
    ]  # fmt: skip
    columns = ("training", *(f"seed {seed}" for seed in seeds), "mean", "beside plain DDP")
    first, spread = found[0].values, 100 * statistics.stdev(losses["ddp"].values()) / plain
    return (
        f"{Table(columns, rows, 1).to_markdown()}\n\nLoss in nats a byte after {first['curve'][-1][0]} steps: a "
        f"byte-level GPT of {first['numel'] / 1e6:.1f} M parameters, {first['ranks']} ranks. Plain DDP's standard "
        f"deviation over the seeds is {spread:.2f} %; smaller differences are chance. Source: `laconic bench gpt "
        "--links none --methods ddp,laconic-qsgd,laconic-thc`; filled in by `make docs`."
    )


def gpt_table() -> str:
    """Return the table and the sentence about its source."""
    results = load_study("gpt").load(RESULTS / "gpt")
    rows, trained = [], []
    for part in PARTS:
        plain = [row for row in (results.best(part, name) for name in (ADAMW, MUON)) if row is not None]
        trained.append(f"{plain[0].values['numel'] / 1e6:.0f} M: {plain[0].values['steps']:,}")
        for row in (*plain, *_best_of_ours(results.of(part))):
            values, beside = row.values, results.beside_adamw(row)
            rows.append((
                _training(row), f"{values['numel'] / 1e6:.0f} M", str(values["workers"]) if row.is_local else "any",
                f"{row.loss:.4f} ({len(row.runs)})", f"{beside:+.1f} %" if beside is not None else "",
                "1" if row.ratio == 1 else f"1/{row.ratio:,.0f}", f"{step_seconds(row, RATE, LATENCY_S):.3g}",
            ))  # fmt: skip
    columns = ("training", "parameters", "workers", "loss (seeds)", "beside AdamW", "bytes", "a step, s")
    source = (
        f"GPTs on Python sources, steps of 32,768 bytes ({'; '.join(trained)}) on an H200; validation loss in nats a "
        "byte. Bytes count both directions; float32 data parallelism is 1. The last column is the transmission of a "
        "step alone at 100 Mbit/s and 50 ms. Source: `laconic study gpt` ([the study](docs/studies/gpt.md)); filled in "
        "by `make docs`."
    )
    return f"{Table(columns, rows, 1).to_markdown()}\n\n{source}"


def _best_of_ours(rows: Sequence[Row]) -> list[Row]:
    """Return our settings that no other one of as many workers beats in both loss and bytes, in the order of bytes."""
    ours = sorted((row for row in rows if row.values["method"].startswith("laconic")), key=lambda row: row.ratio)
    return [
        row for row in ours
        if not any(
            other.values["workers"] == row.values["workers"] and other.loss < row.loss and other.ratio >= row.ratio
            for other in ours
        )
    ]  # fmt: skip


def _training(row: Row) -> str:
    values = row.values
    if not row.is_local:
        return str(values["method"])
    feedback = "ef" if values["decay"] == 1 else f"ef:{values['decay']:g}"
    method = f"`LocalSGD`, Muon, `every={values['every']}`, `{feedback}|{values['up']}`"
    return method if values["outer_lr"] == 1 else f"{method}, `outer=mean:{values['outer_lr']:g}`"
