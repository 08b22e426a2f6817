"""``laconic bench gpt``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.options import Json, option
from laconic.cli.output import check_writable, examples, print_stderr, progress_bar
from laconic.errors import ConfigError
from laconic_lab.cli.options import PacedSockets
from laconic_lab.cli.results import given, names, show_records

__all__ = ["EXAMPLES", "gpt", "register"]

EXAMPLES = (
    "laconic bench gpt --quick",
    "laconic bench gpt --records gpt.jsonl",
    "laconic bench gpt --ranks 2 --links 100mbit+50ms --methods ddp,fp16,laconic-sign --steps 64 --json",
)


def gpt(
    ranks: Annotated[str | None, option("Numbers of single-threaded processes.", "2,4", metavar="N,N,…")] = None,
    links: Annotated[
        str | None,
        option(
            "Rate+delay of each direction, or unshaped; none: losses alone.", "100mbit+50ms,20mbit+100ms",
            metavar="L,L,…",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        option(
            "Of ddp, fp16, powersgd, muon-ddp, muon-fp16, diloco, laconic-sign, laconic-topk, laconic-adamw, "
            "laconic-adamw-8, laconic-adamw-16, laconic-adamw-long, laconic-qsgd, laconic-thc; ddp is always "
            "included.",
            "all without muon-…", metavar="M,M,…",
        ),
    ] = None,
    steps: Annotated[int | None, option("Steps of each training.", "160")] = None,
    stretch: Annotated[
        float | None, option("Methods with local steps train so many times as long.", "2", metavar="X")
    ] = None,
    timed_steps: Annotated[int | None, option("Steps timed over a link where steps are alike.", "4")] = None,
    lr: Annotated[float | None, option("AdamW's learning rate, in all methods.", "0.001")] = None,
    muon_lr: Annotated[float | None, option("Muon's learning rate.", "0.02")] = None,
    width: Annotated[int | None, option("Of the GPT.", "192")] = None,
    layers: Annotated[int | None, option("Of the GPT.", "8")] = None,
    heads: Annotated[int | None, option("Of the GPT.", "6")] = None,
    context: Annotated[int | None, option("Bytes of a window.", "64")] = None,
    batch: Annotated[int | None, option("Windows per rank and step.", "2")] = None,
    eval_every: Annotated[int | None, option("Steps between evaluations, which are not timed.", "16")] = None,
    eval_windows: Annotated[int | None, option("Held-out windows of an evaluation.", "128")] = None,
    limit_s: Annotated[float | None, option("A method that takes longer counts as hung.", "3600")] = None,
    paced: PacedSockets = False,
    seed: Annotated[int, option("Seed of weights and windows.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, two ranks, no link, few steps.")] = False,
    records: Annotated[
        Path | None,
        option("Write Records after each method; what the file already holds is not measured again.",
               metavar="FILE.jsonl"),
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Train a GPT over slow links: time until plain DDP's loss.

    Ranks are processes with gloo. The loss by step is measured without a
    link, which does not change it; the time by step over each link, for some
    steps of each method, and for all steps of plain DDP and laconic over the
    first link. Local steps cost less, so methods with local steps take more
    of them. LocalSGD is compared with DDP first, and all ranks must end with
    the same bits. The text is the interpreter's standard library.
    """
    from laconic.records import read, write
    from laconic_lab.bench.gpt import GPTSettings, gpt_tables, run_gpt

    settings = GPTSettings().quick() if quick else GPTSettings()
    chosen = given(
        ranks=_numbers(ranks), links=names(links), methods=names(methods), steps=steps, stretch=stretch,
        timed_steps=timed_steps, lr=lr, muon_lr=muon_lr, width=width, layers=layers, heads=heads, context=context,
        batch=batch, eval_every=eval_every, eval_windows=eval_windows, limit_s=limit_s, paced=paced,
    )  # fmt: skip
    settings = replace(settings, seed=seed, **chosen)
    finished = []
    if records is not None:
        check_writable(records)
        finished = read(records) if records.exists() else []
    with progress_bar("gpt") as (bar, task):
        measured = run_gpt(
            settings,
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            finished=finished,
            save=lambda all_records: write(all_records, records) if records is not None else None,
        )
    if records is not None:
        print_stderr(f"{len(measured) - len(finished)} new Records, {len(measured)} in all, in {records}")
    show_records(measured, settings.command(), gpt_tables, json)


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in names(text))
    except ValueError:
        raise ConfigError(f"--ranks must be numbers separated by commas, such as 2,4, got {text!r}") from None


def register(app: typer.Typer) -> None:
    app.command("gpt", epilog=examples(*EXAMPLES))(gpt)
