"""``laconic plan --stages``: the step time of a pipeline with each codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from laconic.cli.output import print_json, print_stderr, print_table, print_text
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.plan.profile import Profile

__all__ = ["print_pipeline"]


def print_pipeline(
    profile: Profile, *, stages: int, micro_batches: int, activations: int | None, step_s: float | None, rate: float,
    round_trip_s: float, schedule: str, codecs: Sequence[str] | None, json: bool,
) -> None:  # fmt: skip
    """Compare codecs for a pipeline, and print the table or JSON."""
    from laconic.plan.pipeline import CODECS, PipelineRequest, plan_pipeline
    from laconic.tables import Table
    from laconic.units import show_bytes, show_rate, show_time

    if activations is None or step_s is None:
        raise ConfigError(
            "--stages needs --activations, the values that a stage sends of a micro-batch (windows x length x width), "
            "and --step-time, the seconds that one stage computes in a step"
        )
    request = PipelineRequest(
        profile, stages, micro_batches, activations, step_s, rate, round_trip_s, schedule, codecs or CODECS
    )
    rows = plan_pipeline(request, notify=lambda line: print_stderr(f"laconic: {line}"))
    fastest = min(rows, key=lambda row: row.step_s)
    if json:
        print_json({
            "rows": [row.values() for row in rows],
            "recommendation": {"codec": fastest.codec, "speedup": fastest.speedup},
            "asked": {
                "stages": stages, "micro_batches": micro_batches, "activations": activations, "step_s": step_s,
                "bandwidth_bit_s": rate, "round_trip_s": round_trip_s, "schedule": schedule, "profile": profile.name,
            },
        })  # fmt: skip
        return
    title = (
        f"{stages} stages, {micro_batches} micro-batches of {activations:,} values, {schedule} at {show_rate(rate)}, "
        f"a stage computes {show_time(step_s)} a step"
    )
    columns = ("codec", "micro-batch, each way", "step", "over fp32", "waiting")
    cells = [
        (row.codec + " *" * (row is fastest), show_bytes(row.nbytes), show_time(row.step_s), f"{row.speedup:.2f}",
         f"{100 * row.waiting:.0f} %")
        for row in sorted(rows, key=lambda row: row.step_s)
    ]  # fmt: skip
    print_table(Table(columns, cells, title=title))
    print_text(
        f"recommended: {fastest.codec}: the fastest. Accuracy is not considered: see docs/pipeline.md", wrap=True
    )
