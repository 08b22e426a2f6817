"""``laconic bench``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.output import examples, progress_bar, results, say, show_json
from laconic.errors import FileError

if TYPE_CHECKING:
    from laconic.bench import CodecResult, PeerResult, Report, Timing

__all__ = ["EXAMPLES", "bench", "register"]

EXAMPLES = (
    "laconic bench --quick",
    "laconic bench qsgd:4 'topk:0.01|qsgd:4' --no-peers",
    "laconic bench sign --threads 2 --records sign.jsonl --json",
)

QUICK_NUMEL, QUICK_REPEAT = 1_000_000, 3

WIDE = 140
"""Columns that the whole table needs; in fewer it leaves some of its own out rather than cut words."""

COLUMNS = ("bits per\nvalue", "encode\n× memcpy", "floor", "decode\n× memcpy", "floor")
MORE_COLUMNS = ("over bare\nkernel %", "add\n× memcpy", "to and from\nbytes ×", "1,000 values\nµs", "error²")


def bench(
    # Words that are no codec specs stay free for other benches (laconic bench ddp): the grammar refuses them by now.
    specs: Annotated[list[str] | None, typer.Argument(metavar="SPEC", help="Codecs; by default a set.")] = None,
    numel: Annotated[int | None, typer.Option(help="Values of the tensor.", min=1000, show_default="25000000")] = None,
    repeat: Annotated[int | None, typer.Option(help="Rounds per measurement.", min=1, show_default="9")] = None,
    threads: Annotated[int, typer.Option(help="Threads of codecs and torch; memcpy has one.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the data and the codecs.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A million values, three rounds: a look, no figures.")] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time what one would use instead, too.")] = True,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write Records, one JSON object a line.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time codecs against the same run's memcpy, and against what one would use instead.

    Every codec is checked first: its bytes against the reference, its error against the method's bound.
    """
    from laconic.bench import SPECS, Settings, run
    from laconic.records import write

    settings = Settings(
        numel=numel or (QUICK_NUMEL if quick else Settings.numel),
        repeat=repeat or (QUICK_REPEAT if quick else Settings.repeat),
        threads=threads,
        seed=seed,
    )
    if records is not None:
        _check_writable(records)
    with progress_bar("bench") as (bar, task):
        report = run(
            specs or SPECS,
            settings,
            with_peers=peers,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    if records is not None:
        write(report.records(), records)
        say(f"{len(report.records())} records written to {records}")
    if json:
        show_json(_json(report))
    else:
        _print(report)


def _check_writable(path: Path) -> None:
    """Said before minutes of work, not after."""
    if path.is_dir():
        raise FileError(f"expected a file for records, {path} is a folder: name a file in it")
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileError(f"cannot write records to {path}: {folder} is no folder that can be written to")


def _json(report: Report) -> dict[str, Any]:
    from laconic.records import commit, machine, versions

    settings = report.settings
    return {
        "command": settings.command(report.specs),
        "numel": settings.numel,
        "threads": settings.threads,
        "repeat": settings.repeat,
        "seed": settings.seed,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "memory": report.machine_values(),
        "codecs": [result.values() for result in report.codecs],
        "peers": [result.values() for result in report.peers],
    }


# --------------------------------------------------------------------------------------------------------------- text


def _print(report: Report) -> None:
    from rich import box
    from rich.table import Table

    from laconic.records import machine, versions

    settings, console = report.settings, results()
    wide, judged = console.width >= WIDE, settings.judges()
    found, (slow, fast) = machine(), report.memcpy_quartiles_gb_per_s
    console.print(
        f"{found['cpu']} ({found['vector']}), torch {versions()['torch']}, {settings.numel:,} gaussian float32, "
        f"{settings.threads} thread{'s' if settings.threads > 1 else ''}, median of {settings.repeat} rounds",
        markup=False,
    )
    read, read_torch, write = (_speed(report.ceilings[name]) for name in ("read", "read_torch", "write"))
    console.print(
        f"memcpy {report.memcpy_gb_per_s:.1f} GB/s (quartiles {slow:.1f}-{fast:.1f}) = 1.00; on this machine a pass "
        f"that only reads runs at {read} (torch.aminmax {read_torch}), one that only writes at {write}"
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("codec, and what\none would use instead", overflow="fold")
    for column in (*COLUMNS, *(MORE_COLUMNS if wide else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for result in report.codecs:
        table.add_row(*_codec_cells(result, judged, wide))
        for peer in report.peers:
            if peer.of == result.spec:
                table.add_row(*_peer_cells(peer, wide))
    for peer in report.peers:
        if peer.of is None:
            table.add_row(*_peer_cells(peer, wide))
    console.print(table)
    console.print(
        "Speeds are multiples of memcpy's on the same payload. encode, decode: into kept buffers, header and checksums "
        "included"
        + (
            ", quartiles beside them; add: decode-accumulate; to and from bytes: laconic.encode and laconic.decode as "
            "they stand; error²: "
            "squared error over squared norm."
            if wide
            else f". {WIDE} columns show more, --json shows all."
        ),
        markup=False,
    )
    for name, note in {peer.name: peer.note for peer in report.peers if peer.note}.items():
        console.print(f"{name}: {note}.", markup=False)
    if not judged:
        console.print("Floors are for one thread and 25,000,000 values, so none is judged here.")


def _speed(timing: Timing) -> str:
    return f"{timing.speed:.2f}" if timing.speed >= 0.0995 else f"{timing.speed:.2g}"


def _spread(timing: Timing, wide: bool) -> str:
    first, _, third = timing.speed_quartiles
    if not wide or timing.speed < 0.0995:
        return _speed(timing)
    return f"{_speed(timing)} [dim]{first:.2f}-{third:.2f}[/dim]"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}" if error >= 0.001 or not error else f"{error:.0e}"


def _floor(timing: Timing, floor: float | None, judged: bool) -> str:
    if floor is None:
        return ""
    if not judged:
        return f"{floor:g}"
    return f"[green]{floor:g} met[/green]" if timing.speed >= floor else f"[red]{floor:g} missed[/red]"


def _codec_cells(result: CodecResult, judged: bool, wide: bool) -> list[str]:
    times, floors = result.timings, result.floors
    cells = [
        f"[bold]{result.spec}[/bold]",
        f"{result.bits:.3f}",
        _spread(times["encode"], wide),
        _floor(times["encode"], floors[0], judged),
        _spread(times["decode"], wide),
        _floor(times["decode"], floors[1], judged),
    ]
    if wide:
        cells += [
            f"{result.overhead('encode'):.0f} / {result.overhead('decode'):.0f}",
            _speed(times["accumulate"]),
            f"{_speed(times['encode_bytes'])} / {_speed(times['decode_bytes'])}",
            f"{result.small_encode_us:.0f} / {result.small_decode_us:.0f}",
            _error(result.error),
        ]
    return cells


def _peer_cells(result: PeerResult, wide: bool) -> list[str]:
    times = result.timings
    cells = [
        f"{'  ' if result.of else ''}{result.name}",
        f"{result.bits:.3f}",
        _spread(times["encode"], wide),
        "",
        _spread(times["decode"], wide) if "decode" in times else "",
        "",
    ]
    if wide:
        small = [f"{value:.0f}" for value in (result.small_encode_us, result.small_decode_us) if value is not None]
        cells += ["", "", "", " / ".join(small), _error(result.error)]
    return cells


def register(app: typer.Typer) -> None:
    app.command("bench", epilog=examples(*EXAMPLES))(bench)
