"""``laconic lab faults``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli.options import Json, option
from laconic.cli.output import print_json, progress_bar, stdout_console
from laconic.errors import ConfigError, LaconicError
from laconic.units import show_bytes

if TYPE_CHECKING:
    from laconic_lab.faults import Outcome

__all__ = ["EXAMPLES", "faults"]

EXAMPLES = (
    "laconic lab faults --only worker-dies,bomb --modes sync", "laconic lab faults --list",
    "laconic lab faults --tier 3 --record tier3.jsonl",
)  # fmt: skip


def faults(
    only: Annotated[str | None, option("Names of faults, separated by commas.", "all", metavar="NAMES")] = None,
    modes: Annotated[str, option("Modes of the job, separated by commas.")] = "sync,async,bounded:2",
    repeat: Annotated[int, option("Repetitions of each fault.", metavar="N", min=1)] = 1,
    seconds: Annotated[
        float | None,
        typer.Option("--soak", metavar="S", help="Run one job for S seconds with repeated faults instead.", min=5),
    ] = None,
    every: Annotated[float, option("With --soak: seconds between faults.", metavar="S", min=1)] = 20.0,
    seed: Annotated[int, option("With --soak: seed that chooses the faults.")] = 0,
    tier: Annotated[
        int | None,
        option(
            "Run what is missing of a tier: scenarios, kills of checkpoints, a soak, mutated packets.", min=1, max=3
        ),
    ] = None,
    parts: Annotated[str, option("With --tier: parts, separated by commas.")] = "scenarios,kills,soak,idle,packets",
    jobs: Annotated[int, option("With --tier: pieces of mutated packets that run at once.", metavar="N", min=1)] = 1,
    limit: Annotated[
        float | None, option("With --tier: start no further piece after S seconds.", metavar="S", min=0)
    ] = None,
    case: Annotated[int | None, option("Run one scenario of the tiers, by its number.", metavar="N", min=0)] = None,
    names: Annotated[bool, typer.Option("--list", help="List the faults and exit.")] = False,
    record: Annotated[Path | None, option("Write Records here.", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Run a small job with a real server under every fault and check its invariants.

    Each push of the job writes to its own position, so that a lost, repeated
    or forged push shows at the end; docs/faults.md lists the invariants.
    Faults happen at a given step. Needs no root. The exit code is 1 if an
    invariant is violated.

    --tier 3 runs 1,120 scenarios in all modes and methods with seeds, kills
    2,000 runs while they write a checkpoint, soaks a server for half an hour,
    times steps beside idle calls, and reads 10 million mutated packets under
    sanitizers (in a checkout of the repository). It takes hours; interrupted,
    the same command continues from the Records in --record.
    """
    from laconic import records
    from laconic_lab.faults import DESCRIPTIONS, campaign

    if names:
        _list(json)
        return
    if seconds is not None:
        _soak(seconds, every, seed, record, json)
        return
    if tier is not None:
        _tier(tier, parts, jobs, limit, record or Path(f"faults-tier{tier}.jsonl"), json)
        return
    if case is not None:
        _case(case, json)
        return
    chosen = tuple(DESCRIPTIONS) if only is None else tuple(name.strip() for name in only.split(","))
    asked = tuple(mode.strip() for mode in modes.split(","))
    if not all(chosen) or not all(asked):
        raise ConfigError("--only and --modes must be names separated by commas")
    with _errors_only(), progress_bar("starting") as (bar, shown):
        total = len(chosen) * len(asked) * repeat

        def tell(outcome: Outcome) -> None:
            bar.update(shown, advance=1, total=total, description=f"{outcome.fault}, {outcome.mode}")

        outcomes = campaign(chosen, asked, repeat=repeat, tell=tell)
    if record is not None:
        records.write([records.Record("faults.scene", asdict(outcome)) for outcome in outcomes], record)
    broken = [outcome for outcome in outcomes if outcome.broken is not None]
    if json:
        print_json({"scenes": len(outcomes), "broken": len(broken), "outcomes": [asdict(one) for one in outcomes]})
    else:
        _print(outcomes, asked)
    if broken:
        raise LaconicError(
            f"{len(broken)} of {len(outcomes)} scenarios violated an invariant; the first: {broken[0].broken}"
        )


@contextmanager
def _errors_only() -> Iterator[None]:
    """Suppress warnings in the log; faults are expected here."""
    log = logging.getLogger("laconic")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _soak(seconds: float, every: float, seed: int, record: Path | None, json: bool) -> None:
    from laconic import records
    from laconic_lab.faults import soak

    with _errors_only(), progress_bar("starting") as (bar, shown):

        def tell(done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total, description=f"exchange {done}")

        run = soak(seconds, every=every, seed=seed, tell=tell)
    if record is not None:
        records.write([records.Record("faults.soak", asdict(run), seed=seed)], record)
    if json:
        print_json(asdict(run))
    else:
        print(f"{run.done} exchanges of 4 workers in {run.seconds:.0f} s with {run.faults} faults; memory "
              f"{show_bytes(run.rss[0])}, later {show_bytes(run.rss[1])}; open files {run.descriptors[0]}, later "
              f"{run.descriptors[1]}; threads {run.threads[0]}, later {run.threads[1]}")  # fmt: skip
    if run.broken is not None:
        raise LaconicError(run.broken)


def _tier(number: int, parts: str, jobs: int, limit: float | None, path: Path, json: bool) -> None:
    from rich.table import Table

    from laconic_lab.faults import TIERS, run_tier

    tier = TIERS[number]
    with _errors_only(), progress_bar("starting") as (bar, shown):

        def tell(part: str, done: int, goal: int) -> None:
            bar.update(shown, completed=done, total=goal, description=f"{part}: {done:,} of {goal:,}")

        asked = [part.strip() for part in parts.split(",")]
        summaries = run_tier(tier, path, asked, tell=tell, jobs=jobs, limit_s=limit)
    broken = [text for summary in summaries.values() for text in summary.broken]
    if json:
        print_json({"tier": number, "records": str(path), "parts": [asdict(one) for one in summaries.values()]})
    else:
        table = Table("part", "goal", "done", "broken", "broken before", "from", "to")
        for part, summary in summaries.items():
            table.add_row(part, f"{getattr(tier, part):,}", f"{summary.done:,}", str(len(summary.broken)),
                          str(len(summary.repeated)), summary.first or "", summary.last or "")  # fmt: skip
        stdout_console().print(table, markup=False)
    if broken:
        raise LaconicError(f"{len(broken)} pieces violated an invariant; the first: {broken[0]}; see {path}")


def _case(number: int, json: bool) -> None:
    from laconic_lab.faults import cases, run_case

    with _errors_only():
        outcome = run_case(cases(number + 1)[number])
    if json:
        print_json(asdict(outcome))
    else:
        print(f"{outcome.fault}, {outcome.mode}, method {outcome.method}, seed {outcome.seed}: "
              f"{outcome.broken or 'kept'}, {outcome.seconds:.1f} s")  # fmt: skip
    if outcome.broken is not None:
        raise LaconicError(outcome.broken)


def _list(json: bool) -> None:
    from laconic_lab.faults import DESCRIPTIONS

    if json:
        print_json({"faults": dict(DESCRIPTIONS)})
        return
    width = max(map(len, DESCRIPTIONS))
    for name, what in DESCRIPTIONS.items():
        print(f"{name:{width}}  {what}")


def _print(outcomes: list[Outcome], modes: tuple[str, ...]) -> None:
    from rich.table import Table

    from laconic_lab.faults import DESCRIPTIONS

    table = Table("fault", "what happens")
    for mode in modes:
        table.add_column(mode, justify="right")
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        row = []
        for mode in modes:
            mine = [one for one in outcomes if (one.fault, one.mode) == (name, mode)]
            kept = sum(one.broken is None for one in mine)
            longest = max((one.seconds for one in mine), default=0.0)
            row.append("" if not mine else f"kept, {longest:.1f} s" if kept == len(mine) else "BROKEN")
        table.add_row(name, DESCRIPTIONS[name], *row)
    stdout_console().print(table, markup=False)
