"""``laconic lab replicas``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.options import Json, option
from laconic.cli.output import print_json, progress_bar
from laconic.errors import ConfigError, LaconicError

__all__ = ["EXAMPLES", "replicas"]

EXAMPLES = (
    "laconic lab replicas --kills 30 --seconds 600",
    "laconic lab replicas --kills 0 --time plain,none,qsgd:4,ef|qsgd:4",
)


def replicas(
    kills: Annotated[int, option("How many times a replica is killed.", metavar="N", min=0)] = 30,
    seconds: Annotated[float, option("During how many seconds.", metavar="S", min=1)] = 600.0,
    count: Annotated[int, typer.Option("--replicas", metavar="N", help="How many replicas.", min=3)] = 3,
    spec: Annotated[str, option("The codec.", metavar="SPEC")] = "ef|topk:0.05|qsgd:4",
    timed: Annotated[
        str | None,
        typer.Option("--time", metavar="SPECS", help="Also time steps without kills; plain is torchft alone."),
    ] = None,
    time_seconds: Annotated[float, option("Seconds of each timing.", metavar="S", min=1)] = 20.0,
    seed: Annotated[int, option("Seed that chooses moments and victims.")] = 0,
    record: Annotated[Path | None, option("Write Records here.", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Kill replicas of a torchft training at random and check that nothing is lost.

    Replicas must have the same weights after every step, and in every step
    gradients plus residuals before must equal delivered sums plus residuals
    after. Needs torchft. The exit code is 1 if something does not hold.
    """
    from laconic import records
    from laconic_lab.faults.replica_kills import kill_replicas, time_steps

    if not kills and timed is None:
        raise ConfigError("--kills 0 needs --time: there is nothing to do")
    written, run, times = [], None, []
    with progress_bar("starting") as (bar, shown):
        if timed is not None:
            specs = [one.strip() for one in timed.split(",")]
            times = time_steps(specs, seconds=time_seconds, tell=lambda one: bar.update(shown, description=one))
            written += [records.Record("faults.replica_step", asdict(one), seed=seed) for one in times]
        if kills:

            def tell(killed: int, step: int) -> None:
                bar.update(shown, completed=killed, total=kills, description=f"step {step}")

            run = kill_replicas(kills, seconds, replicas=count, spec=spec, seed=seed, tell=tell)
            written.append(records.Record("faults.replicas", asdict(run), seed=seed))
    if record is not None:
        records.write(written, record)
    if json:
        print_json({"steps": [asdict(one) for one in times], "campaign": None if run is None else asdict(run)})
    else:
        for one in times:
            print(f"{one.spec:24} {1e3 * one.step_s:8.1f} ms a step, {one.parameters:,} parameters, 2 replicas")
        if run is not None:
            equal, continued = run.compared_steps - run.differing_steps, run.continued - run.broken
            print(f"{run.kills} kills in {run.seconds:.0f} s, {run.steps} steps, {run.quorums} quorums, "
                  f"{run.discarded} attempts discarded; weights equal after {equal} of {run.compared_steps} steps; "
                  f"residuals balance in {run.balanced_steps} steps, not in {run.unbalanced_steps}, and continue "
                  f"from {continued} of {run.continued} attempts")  # fmt: skip
    if run is not None and not run.kept:
        raise LaconicError(f"replicas differ, did not end, or lost residuals: {asdict(run)}")
