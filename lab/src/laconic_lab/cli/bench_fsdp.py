"""``laconic bench fsdp``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.options import Json, option
from laconic.cli.output import examples
from laconic_lab.cli.results import given, measure_and_show, names

__all__ = ["EXAMPLES", "fsdp", "register"]

EXAMPLES = (
    "laconic bench fsdp --quick",
    "laconic bench fsdp --records fsdp.jsonl",
    "laconic bench fsdp --ways 'hsdp,laconic ef|qsgd:4' --links 100mbit --loss-steps 0 --json",
)


def fsdp(
    ways: Annotated[
        str | None,
        option(
            "Of 'hsdp', 'laconic SPEC', both with ' muon' behind it, 'local STEPS SPEC', with optimizer=adamw, outer=, "
            "fragments= and rates= behind it; hsdp is always included.",
            "hsdp,laconic ef|qsgd:4,laconic ef|thc:4,local 20 ef|sign", metavar="W,W,…",
        ),
    ] = None,
    nodes: Annotated[int | None, option("Replicas, each on a host of its own.", "2")] = None,
    shards: Annotated[int | None, option("Ranks of a node.", "2")] = None,
    links: Annotated[
        str | None, option("Rates between nodes, or unshaped.", "unshaped,100mbit", metavar="L,L,…")
    ] = None,
    timed_steps: Annotated[int | None, option("Steps timed over a link; 0: none.", "4")] = None,
    loss_steps: Annotated[int | None, option("Steps of trainings whose losses are compared; 0: none.", "200")] = None,
    width: Annotated[int | None, option("Of the GPT.", "256")] = None,
    layers: Annotated[int | None, option("Of the GPT.", "6")] = None,
    heads: Annotated[int | None, option("Of the GPT.", "8")] = None,
    context: Annotated[int | None, option("Bytes of a window.", "32")] = None,
    batch: Annotated[int | None, option("Windows per rank and step.", "1")] = None,
    eval_every: Annotated[int | None, option("Steps between evaluations.", "20")] = None,
    eval_windows: Annotated[int | None, option("Held-out windows of an evaluation.", "128")] = None,
    limit_s: Annotated[float | None, option("A way that takes longer counts as hung.", "3600")] = None,
    seed: Annotated[int, option("Seed of weights and windows.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, no link, few steps.")] = False,
    records: Annotated[Path | None, option("Write Records.", metavar="FILE.jsonl")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Train a GPT by FSDP2 on nodes that a slow link connects.

    The model is sharded inside each node and replicated between nodes, by
    torch's HSDP, by laconic.attach, and by LocalSGD. Steps are timed over
    each link, which needs root; losses are compared without a link. All
    replicas must end with the same bits.
    """
    from laconic_lab.bench.fsdp import FSDPSettings, fsdp_tables, run_fsdp

    settings = FSDPSettings().quick() if quick else FSDPSettings()
    chosen = given(
        ways=names(ways), nodes=nodes, shards=shards, links=names(links),
        width=width, layers=layers, heads=heads, context=context, batch=batch,
        eval_every=eval_every, eval_windows=eval_windows, limit_s=limit_s,
    )  # fmt: skip
    counts = {"timed_steps": timed_steps, "loss_steps": loss_steps}
    chosen |= {name: count for name, count in counts.items() if count is not None}  # 0 is a choice
    settings = replace(settings, seed=seed, **chosen)
    measure_and_show("fsdp", settings, run_fsdp, fsdp_tables, records, json)


def register(app: typer.Typer) -> None:
    app.command("fsdp", epilog=examples(*EXAMPLES))(fsdp)
