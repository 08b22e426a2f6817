"""``laconic calibrate``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli import complete
from laconic.cli.options import option
from laconic.cli.output import check_writable, examples, print_json, print_stderr, print_table, print_text, progress_bar
from laconic.errors import ConfigError, LaconicError

if TYPE_CHECKING:
    from laconic.plan.profile import Profile

__all__ = ["EXAMPLES", "calibrate", "register"]

EXAMPLES = (
    "laconic calibrate -o machine.json --model mlp --codec qsgd:4 --quick",
    "laconic calibrate -o codecs.json --quick --json",
)


def calibrate(
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The profile to write.")],
    model: Annotated[
        list[str] | None, complete.model_option("A model to time, and codecs on its gradients; may be repeated.")
    ] = None,
    codec: Annotated[
        list[str] | None, complete.spec_option("A codec to time; may be repeated.", "a stock of 18")
    ] = None,
    batch: Annotated[int | None, option("Examples of a step.", "64; fewer for large models", min=1)] = None,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    threads: Annotated[int, option("Threads of torch on the CPU.", min=1)] = 1,
    processes: Annotated[
        str, option("Measure the slowdown of so many processes on this machine.", metavar="LIST")
    ] = "2,4",
    transport: Annotated[
        bool, typer.Option(help="Measure exchanges of a parameter server and two workers on this machine.")
    ] = True,
    ranks: Annotated[bool, typer.Option(help="Measure exchanges of two ranks of DDP on this machine.")] = True,
    peer: Annotated[
        str | None, option("Measure the link to a host that runs --listen.", False, metavar="HOST:PORT")
    ] = None,
    listen: Annotated[str | None, option("Only answer one --peer on another host.", metavar="ADDRESS")] = None,
    name: Annotated[str | None, option("Name of the profile.", "the file's", metavar="NAME")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and turns: for a first look.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
) -> None:
    """Measure this machine for laconic plan.

    Codecs at several sizes; with --model its step, when its gradients are
    ready, and codecs on them; how processes share the cores; exchanges of a
    parameter server and of ranks; with --peer a link. Takes about a minute. A
    machine that is busy meanwhile is marked in the profile.
    """
    from laconic.plan.calibration import check_device
    from laconic.plan.link import parse_peer
    from laconic.train import calibrate as calibration

    if listen is not None:
        _listen(listen)
        return
    check_device(device)
    check_writable(out)
    counts = _counts(processes)
    for one in model or []:
        calibration.check_model(one)
    if peer is not None:
        parse_peer(peer)
    if transport and (find_spec("grpc") is None or find_spec("cryptography") is None):
        print_stderr("laconic: the transport is not measured: it needs pip install 'laconic[cluster]'")
        transport = False
    with progress_bar("calibrating") as (bar, task):
        bar.update(task, total=calibration.step_count(model or [], codec))
        profile = calibration.calibrate(
            name or out.stem, models=model or [], codecs=codec, batch=batch, device=device, threads=threads,
            processes=counts, transport=transport, ranks=ranks, peer=peer, quick=quick,
            notify=lambda step: bar.update(task, description=step, advance=1),
        )  # fmt: skip
    profile.save(out)
    if json:
        print_json(profile.to_json())
    else:
        _print(profile)
    _warn(profile)
    if not json:
        print_stderr(f"{out} written: laconic plan --profile {out} …")


def _warn(profile: Profile) -> None:
    load = profile.load
    if load is not None and load.busy:
        share = "" if load.other_processes is None else f", other processes used {100 * load.other_processes:.0f} %"
        print_stderr(
            f"laconic: the machine was busy (load average {load.load_average:.1f} before{share}): the profile is "
            "marked as busy. Calibrate again on an idle machine"
        )


def _counts(text: str) -> list[int]:
    try:
        counts = [int(count) for count in text.split(",") if count.strip()]
    except ValueError:
        counts = [0]
    if any(count < 1 for count in counts):
        raise ConfigError(f"--processes must be whole numbers of at least 1, such as 2,4; got {text!r}")
    return counts


def _listen(address: str) -> None:
    from laconic.link_probe import serve

    print_stderr(
        f"laconic: on the other host: laconic calibrate --peer {address}:PORT -o FILE, with the port that follows"
    )
    try:
        received = serve(address)
    except OSError as error:
        raise LaconicError(f"cannot listen on {address}: {error.strerror or error}") from None
    sys.stdout.write(f"{received['goodput'] / 1e6:.1f} Mbit/s arrived\n")


def _print(profile: Profile) -> None:
    from laconic.tables import Table
    from laconic.units import show_rate, show_time

    rows = []
    for spec, points in profile.codecs.items():
        point = points[-1]
        speeds = (f"{4e-9 * point.numel / max(seconds, 1e-12):.3g}" for seconds in point.seconds)
        rows.append((spec, f"{point.numel:,}", f"{8 * point.nbytes / point.numel:.3g}", *speeds))
    title = f"{profile.name}: {profile.device}, {profile.threads} thread{'s' * (profile.threads != 1)}"
    columns = ("codec", "values", "bits a value", "encode GB/s", "decode GB/s", "add GB/s")
    print_table(Table(columns, rows, title=title))
    for name, model in profile.models.items():
        print_text(
            f"{name}: {model.numel:,} values, batch {model.batch}, a step {show_time(model.step_s)}, the first "
            f"gradient after {100 * model.ready[0][0]:.0f} % of it"
        )
    for count, factor in profile.slowdown.items():
        print_text(f"{count} processes at once: each takes {factor:.2f} times as long")
    if profile.transport is not None:
        transport = profile.transport
        print_text(
            f"transport: {show_time(transport.exchange_s)} an exchange, {show_time(transport.slot_s)} each further "
            f"slot, {1e9 * transport.byte_s:.3g} ns a byte"
        )
    for way, times in profile.collective.items():
        print_text(
            f"ranks, {way}: {show_time(times.exchange_s)} an exchange, {show_time(times.slot_s)} each further slot, "
            f"{1e9 * times.byte_s:.3g} ns a byte"
        )
    for link in profile.links:
        print_text(f"to {link['to']}: {show_rate(link['goodput'])}, round trip {show_time(link['round_trip'])}")


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(calibrate)
