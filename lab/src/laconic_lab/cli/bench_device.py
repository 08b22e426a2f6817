"""``laconic bench --device cuda``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.output import check_writable, progress_bar, stdout_console
from laconic_lab.cli.results import measure, print_records, show_records, write_records

if TYPE_CHECKING:
    from laconic.records import Record
    from laconic_lab.bench.device import DeviceResult

__all__ = ["bench_device", "bench_step"]

QUICK_NUMEL, QUICK_REPEAT = 1 << 24, 5

COLUMNS = ("bits per\nvalue", "encode\n× copy", "decode\n× copy", "add\n× copy", "other\n× copy",
           "with sync\nencode / decode", "× plain torch\nencode / decode", "4 MB, µs\nencode / decode")  # fmt: skip


def bench_device(
    specs: list[str] | None, device: str, numel: int | None, repeat: int | None, seed: int, quick: bool,
    records: Path | None, json: bool,
) -> None:  # fmt: skip
    from laconic_lab.bench.device import SPECS, DeviceSettings, run_device

    settings = DeviceSettings(
        device=device,
        numel=numel or (QUICK_NUMEL if quick else DeviceSettings.numel),
        repeat=repeat or (QUICK_REPEAT if quick else DeviceSettings.repeat),
        seed=seed,
    )
    if records is not None:
        check_writable(records)
    with progress_bar("bench") as (bar, task):
        results, written = run_device(
            specs or SPECS,
            settings,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    write_records(written, records)
    if json:
        print_records(written, settings.command(specs or SPECS))
    else:
        _print(results, written[0])


def bench_step(
    specs: list[str] | None, device: str, model: str, repeat: int | None, seed: int, compiled: bool,
    accumulate: int, graphs: bool, residuals: str, records: Path | None, json: bool,
) -> None:  # fmt: skip
    from laconic.records import write
    from laconic_lab.bench.device_step import LIMITS, StepSettings, run_steps
    from laconic_lab.bench.device_tables import device_tables

    chosen = specs or [*LIMITS]
    settings = StepSettings(
        model=model, device=device, repeat=repeat or StepSettings.repeat, seed=seed, compiled=compiled,
        accumulate=accumulate, graphs=graphs, residuals=residuals,
    )  # fmt: skip

    def keep(measured: Sequence[Record]) -> None:
        if records is not None:
            write(measured, records)

    measured = measure("bench", records, lambda notify: run_steps(chosen, settings, tell=notify, keep=keep))
    show_records(measured, settings.command(chosen), device_tables, json)


def _print(results: list[DeviceResult], yardstick: Record) -> None:
    from rich import box
    from rich.table import Table

    console, values = stdout_console(), yardstick.values
    console.print(
        f"{yardstick.machine.get('gpu', 'no GPU')}, torch {yardstick.versions['torch']}, {values['numel']:,} gaussian "
        f"float32, median of {values['repeat']} rounds. Copy {values['copy_payload_gb_per_s']:,.0f} GB/s of payload = "
        f"1.00; cast to fp16 {values['cast_to_fp16_x_copy']:.2f}, to bf16 {values['cast_to_bf16_x_copy']:.2f}; a "
        f"launch takes {values['launch_floor_us']:.1f} µs",
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("codec", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result))
    console.print(table)
    console.print(
        "encode, decode: launches alone where sizes are fixed, else with host synchronisation; beside them the "
        "target. add: decode-accumulate. other: fb error feedback fused into encode, sum packed words added, carried "
        "top-k by an earlier threshold. Every codec's bytes were compared with the CPU's before timing.",
        markup=False,
    )


def _cells(result: DeviceResult) -> list[str]:
    others = [("fb", "feedback"), ("sum", "sum"), ("carried", "carried")]
    shown = [f"{short} {_speed(result, way)}" for short, way in others if way in result.timings]
    small = result.small_us
    return [
        f"[bold]{result.spec}[/bold]",
        f"{result.bits:.3f}",
        *(_speed(result, way) for way in ("encode", "decode", "accumulate")),
        "\n".join(shown),
        " / ".join(f"{result.timings[way].speed:.2f}" for way in ("encode", "decode")),
        " / ".join("" if up is None else f"{up:.1f}" for up in map(result.speed_up, ("encode", "decode"))),
        " / ".join(f"{small.get(f'{way}_launch', small[way]):.0f}" for way in ("encode", "decode")),
    ]


def _speed(result: DeviceResult, way: str) -> str:
    timing, floor = result.judged(way), result.floor(way)
    if timing is None:
        return ""
    if floor is None:
        return f"{timing.speed:.2f}"
    return f"{timing.speed:.2f} [{'green' if timing.speed >= floor else 'red'}]{floor:g}[/]"
