"""``laconic bench``: codecs by default, or one of its subcommands."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli import complete
from laconic.cli.help import Commands, HelpGroup
from laconic.cli.options import Json, option
from laconic.cli.output import check_writable, examples, print_json, progress_bar, stdout_console
from laconic.errors import ConfigError
from laconic_lab.cli import (
    bench_cluster,
    bench_collective,
    bench_ddp,
    bench_device,
    bench_fsdp,
    bench_gpt,
    bench_layers,
)
from laconic_lab.cli.results import write_records

if TYPE_CHECKING:
    from rich.table import Table

    from laconic_lab.bench import CodecResult, PeerResult, Rate, Report, Timing

__all__ = ["CODECS", "EXAMPLES", "bench", "register"]

CODECS = (
    "laconic bench --quick",
    "laconic bench qsgd:4 'topk:0.01|qsgd:4' --no-peers",
    "laconic bench sign --threads 2 --records sign.jsonl --json",
    "laconic bench --only coders --data weights --quick",
)
EXAMPLES = (
    *CODECS, *bench_cluster.EXAMPLES[:1], *bench_collective.EXAMPLES[:1], *bench_ddp.EXAMPLES[:1],
    *bench_fsdp.EXAMPLES[:1], *bench_gpt.EXAMPLES[:1], *bench_layers.EXAMPLES[1:],
)  # fmt: skip

DEFAULT = "codecs"
"""The subcommand that ``laconic bench`` runs when none is named."""

QUICK_NUMEL, QUICK_REPEAT = 1_000_000, 3

WIDE = 140
"""Width of the full table; narrower terminals get fewer columns."""

COLUMNS = ("bits per\nvalue", "encode\n× memcpy", "floor", "decode\n× memcpy", "floor")
MORE_COLUMNS = ("over bare\nkernel %", "add\n× memcpy", "to and from\nbytes ×", "1,000 values\nµs", "error²")
CODER_COLUMNS = ("bits per\nsymbol", "over\nentropy %", *COLUMNS[1:])
MORE_CODER_COLUMNS = ("two threads\n× one", "1,000 values\nµs", "error²")


def bench(
    # The names of subcommands are not valid codec specs.
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", help="Codec specs.", autocompletion=complete.specs),
    ] = None,
    numel: Annotated[int | None, option("Values of the tensor.", "25000000", min=1000)] = None,
    repeat: Annotated[int | None, option("Rounds per measurement.", "9", min=1)] = None,
    threads: Annotated[int, option("Threads of codecs and torch; memcpy uses one.", min=1)] = 1,
    seed: Annotated[int, option("Seed of the data and the codecs.")] = 0,
    device: Annotated[
        str, option("cpu, or cuda to time codecs on a GPU beside a device copy, with 2^28 values.")
    ] = "cpu",
    step: Annotated[
        str | None,
        option("With --device cuda: time a bf16 step of resnet50, gpt2, vit, … plain and attached.", metavar="MODEL"),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With --step: compile the model by torch.compile.")
    ] = False,
    accumulate: Annotated[int, option("With --step: backward passes per exchange.", min=1)] = 1,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="With --step: record exchanges as CUDA graphs.")
    ] = True,
    residuals: Annotated[
        str, option("With --step: how residuals are kept, fp32, bf16, pinned or bf16,pinned.", metavar="HOW")
    ] = "fp32",
    data: Annotated[
        list[str] | None, option("Data for entropy coders: gaussian, weights, grads.", metavar="NAME")
    ] = None,
    only: Annotated[
        str | None, option("Part of the default set: codecs or coders (entropy coders).", metavar="SET")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A million values and three rounds, for a quick look.")
    ] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also time the usual alternatives.")] = True,
    records: Annotated[Path | None, option("Write Records, one JSON object per line.", metavar="FILE.jsonl")] = None,
    json: Json = False,
) -> None:
    """Time codecs relative to memcpy, beside the usual alternatives.

    Every codec is checked first: its bytes against the reference, its error
    against the method's bound.
    """
    from laconic_lab.bench import Settings, run

    if device != "cpu":
        if only or data:
            raise ConfigError("--only and --data cannot be used with --device cuda: name the codecs")
        if step is not None:
            bench_device.bench_step(
                specs, device, step, repeat, seed, compiled, accumulate, graphs, residuals, records, json
            )
        else:
            bench_device.bench_device(specs, device, numel, repeat, seed, quick, records, json)
        return
    if step is not None:
        raise ConfigError("--step needs --device cuda; on a CPU use laconic bench layers")
    settings = Settings(
        numel=numel or (QUICK_NUMEL if quick else Settings.numel),
        repeat=repeat or (QUICK_REPEAT if quick else Settings.repeat),
        threads=threads,
        seed=seed,
        data=tuple(data or Settings.data),
    )
    if records is not None:
        check_writable(records)
    with progress_bar("bench") as (bar, task):
        report = run(
            _chosen(specs, only),
            settings,
            with_peers=peers,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    write_records(report.records(), records)
    if json:
        print_json(_json(report))
    else:
        _print(report)


def _chosen(specs: list[str] | None, only: str | None) -> Sequence[str]:
    from laconic_lab.bench import SETS, SPECS

    if only is None:
        return specs or SPECS
    if only not in SETS:
        raise ConfigError(f"--only must be {' or '.join(SETS)}, got {only!r}")
    if specs:
        raise ConfigError(f"--only {only} and the codec {specs[0]!r} exclude each other")
    return SETS[only]


def _json(report: Report) -> dict[str, Any]:
    from laconic.records import commit, machine, versions

    settings = report.settings
    return {
        "command": settings.command(report.specs), "numel": settings.numel, "threads": settings.threads,
        "repeat": settings.repeat, "seed": settings.seed, "data": list(settings.data), "machine": machine(),
        "versions": versions(), "commit": commit(), "memory": report.machine_values(),
        "codecs": [result.values() for result in report.codecs], "peers": [result.values() for result in report.peers],
        "notes": list(report.notes),
    }  # fmt: skip


def _print(report: Report) -> None:
    from laconic.records import machine, versions

    settings, console = report.settings, stdout_console()
    wide, judged = console.width >= WIDE, settings.judges()
    host, (slow, fast) = machine(), report.memcpy_quartiles_gb_per_s
    console.print(
        f"{host['cpu']} ({host['vector']}), torch {versions()['torch']}, {settings.numel:,} gaussian float32, "
        f"{settings.threads} thread{'s' if settings.threads > 1 else ''}, median of {settings.repeat} rounds",
        markup=False,
    )
    read, read_torch, write = (_speed(report.ceilings[name]) for name in ("read", "read_torch", "write"))
    console.print(
        f"memcpy {report.memcpy_gb_per_s:.1f} GB/s (quartiles {slow:.1f}-{fast:.1f}) = 1.00; on this machine a pass "
        f"that only reads runs at {read} (torch.aminmax {read_torch}), one that only writes at {write}"
    )
    coders = [result for result in report.codecs if result.rate]
    if len(coders) < len(report.codecs):
        console.print(_codec_table(report, judged, wide))
    if coders:
        console.print(_coder_table(report, judged, wide))
    console.print(
        "Speeds are multiples of memcpy's on the same payload. encode, decode: into preallocated buffers, header and "
        "checksums included"
        + (
            ", quartiles beside them; add: decode-accumulate; to and from bytes: laconic.encode and laconic.decode; "
            "error²: squared error over squared norm."
            if wide
            else f". {WIDE} columns show more, --json shows all."
        ),
        markup=False,
    )
    if coders:
        console.print(
            "Coders: ours take and return floats, stock coders symbols; bits include code tables, entropy is the "
            "zero-order entropy of the symbols; above 256 levels zlib and zstd get two bytes per symbol.",
            markup=False,
        )
    for name, note in {peer.name: peer.note for peer in report.peers if peer.note}.items():
        console.print(f"{name}: {note}.", markup=False)
    for note in report.notes:
        console.print(f"{note}.", markup=False)
    if not judged:
        console.print("Goals apply to one thread and 25,000,000 values and are not judged here.")


def _table(first: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _codec_table(report: Report, judged: bool, wide: bool) -> Table:
    table = _table("codec and\nits alternatives", (*COLUMNS, *(MORE_COLUMNS if wide else ())))
    for result in report.codecs:
        if result.rate is None:
            table.add_row(*_codec_cells(result, judged, wide))
            for peer in report.peers:
                if peer.of == result.spec:
                    table.add_row(*_peer_cells(peer, wide))
    for peer in report.peers:
        if peer.of is None:
            table.add_row(*_peer_cells(peer, wide))
    return table


def _coder_table(report: Report, judged: bool, wide: bool) -> Table:
    table = _table("entropy coders and\nstock coders", (*CODER_COLUMNS, *(MORE_CODER_COLUMNS if wide else ())))
    data = ""
    for result in report.codecs:
        if result.rate is None:
            continue
        if result.data != data:
            data = result.data
            table.add_section()
            table.add_row(f"[italic]{data}[/italic]")
        table.add_row(*_coder_cells(result, judged, wide))
        for peer in report.peers:
            if (peer.of, peer.data) == (result.spec, data) and peer.rate is not None:
                cells = _peer_cells(peer, wide)
                table.add_row(cells[0], *_rate_cells(peer.rate), *cells[2:6])
    return table


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
    times = result.timings
    cells = [f"[bold]{result.spec}[/bold]", f"{result.bits:.3f}", *_speed_cells(result, judged, wide)]
    if wide:
        cells += [
            f"{result.overhead('encode'):.0f} / {result.overhead('decode'):.0f}",
            _speed(times["accumulate"]),
            f"{_speed(times['encode_bytes'])} / {_speed(times['decode_bytes'])}",
            _small_cell(result),
            _error(result.error),
        ]
    return cells


def _coder_cells(result: CodecResult, judged: bool, wide: bool) -> list[str]:
    assert result.rate is not None
    cells = [f"[bold]{result.spec}[/bold]", *_rate_cells(result.rate), *_speed_cells(result, judged, wide)]
    if wide:
        scaling = [f"{value:.2f}" for value in map(result.scaling, ("encode", "decode")) if value is not None]
        cells += [" / ".join(scaling), _small_cell(result), _error(result.error)]
    return cells


def _rate_cells(rate: Rate) -> list[str]:
    return [f"{rate.bits:.3f}", "" if rate.overhead is None else f"{rate.overhead:.2f}"]


def _speed_cells(result: CodecResult, judged: bool, wide: bool) -> list[str]:
    cells = []
    for way, floor in zip(("encode", "decode"), result.floors, strict=True):
        cells += [_spread(result.timings[way], wide), _floor(result.timings[way], floor, judged)]
    return cells


def _small_cell(result: CodecResult) -> str:
    return f"{result.small_encode_us:.0f} / {result.small_decode_us:.0f}"


def _peer_cells(result: PeerResult, wide: bool) -> list[str]:
    times = result.timings
    cells = [
        f"{'  ' if result.of else ''}{result.name}", f"{result.bits:.3f}", _spread(times["encode"], wide), "",
        _spread(times["decode"], wide) if "decode" in times else "", "",
    ]  # fmt: skip
    if wide:
        small = [f"{value:.0f}" for value in (result.small_encode_us, result.small_decode_us) if value is not None]
        cells += ["", "", "", " / ".join(small), _error(result.error)]
    return cells


class _Benches(HelpGroup):
    """A group that treats ``laconic bench qsgd:4`` as ``laconic bench codecs qsgd:4``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            if (
                args
                and args[0].isidentifier()
                and args[0] not in (*complete.STAGES, *entry_points(group="laconic.codecs").names)
            ):
                raise ConfigError(
                    f"{args[0]!r} is neither a benchmark ({', '.join(self.commands)}) nor a codec spec such as qsgd:4: "
                    "see laconic bench --help and laconic codecs"
                )
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def _root() -> None:
    """Run benchmarks: codecs by default.

    laconic bench is short for laconic bench codecs, whose --help lists its
    options. The others: cluster (a server and its workers), collective (means
    over processes), ddp (steps of DistributedDataParallel), fsdp (sharded
    training on nodes), gpt (training over slow links), layers (compressed
    layers).
    """


def register(app: typer.Typer) -> None:
    group = Commands(cls=_Benches)
    group.callback()(_root)
    group.command(DEFAULT, epilog=examples(*CODECS))(bench)
    bench_cluster.register(group)
    bench_collective.register(group)
    bench_ddp.register(group)
    bench_fsdp.register(group)
    bench_gpt.register(group)
    bench_layers.register(group)
    app.add_typer(group, name="bench", epilog=examples(*EXAMPLES))
