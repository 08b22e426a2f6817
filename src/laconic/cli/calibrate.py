"""``laconic calibrate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli import complete
from laconic.cli.output import check_writable, examples, print_json, print_stderr, progress_bar, stdout_console
from laconic.errors import ConfigError, LaconicError

__all__ = ["EXAMPLES", "calibrate", "register"]

EXAMPLES = (
    "laconic calibrate -o machine.json --model mlp --codec qsgd:4 --quick",
    "laconic calibrate -o codecs.json --quick --json",
)

SHAPES = {"mlp": (1, 28, 28), "lenet5": (1, 28, 28), "vgg11": (3, 32, 32), "alexnet": (3, 224, 224),
          "resnet50": (3, 224, 224)}  # fmt: skip
CLASSES = {"alexnet": 1000, "resnet50": 1000}
SLOWEST_S = 1.0
"""A codec that takes longer for a model's gradient is not measured on it: its speed on other tensors tells enough."""
BATCHES = {"alexnet": 16, "resnet50": 4, "vgg11": 16}


def calibrate(
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The profile to write.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Time a step of it, and codecs on its own gradients; may be repeated.",
            autocompletion=complete.one_of(*complete.MODELS),
        ),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A codec to time; may be repeated.",
            show_default="a stock of 14",
            autocompletion=complete.specs,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Examples of a step.", min=1, show_default="64; less for large models")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Of torch, on the CPU.", min=1)] = 1,
    processes: Annotated[
        str, typer.Option(metavar="LIST", help="How much slower so many processes are that share the machine.")
    ] = "2,4",
    peer: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Measure the link to a host that runs --listen.", show_default=False),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Be the other end of a --peer, and nothing else.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the profile.", show_default="the file's")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and turns: for a first look.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
) -> None:
    """Measure what this machine does, for laconic plan.

    Codecs at several sizes; with --model a step of it, when its gradients are
    ready, and codecs on them; how processes share the cores; with --peer a link.
    Runs about half a minute, and wants an otherwise quiet machine.
    """
    from laconic.plan.calibration import check_device
    from laconic.plan.link import parse_peer

    if listen is not None:
        _listen(listen)
        return
    check_device(device)
    check_writable(out)
    counts = _counts(processes)
    for one in model or []:
        _known(one)
    if peer is not None:
        parse_peer(peer)
    load = os.getloadavg()[0]
    if load > 1.5:
        print_stderr(f"laconic: the load average is {load:.1f}: figures will be those of a busy machine")
    profile = measured(
        name or out.stem, model or [], codec, batch=batch, device=device, threads=threads, counts=counts, peer=peer,
        quick=quick,
    )  # fmt: skip
    profile.save(out)
    if json:
        print_json(profile.to_json())
    else:
        _print(profile)
        print_stderr(f"{out} written: laconic plan --profile {out} …")


def measured(
    name: str,
    models: list[str],
    codecs: list[str] | None,
    *,
    batch: int | None = None,
    device: str = "cpu",
    threads: int = 1,
    counts: list[int] | None = None,
    peer: str | None = None,
    quick: bool = False,
) -> Any:
    """The profile of this machine."""
    from datetime import datetime, timezone

    import torch

    from laconic.codecs import parse
    from laconic.plan import calibration
    from laconic.plan.link import measure_link
    from laconic.plan.profile import Profile
    from laconic.records import commit, machine, versions

    specs = list(dict.fromkeys(["none", "bf16", *codecs])) if codecs else list(calibration.STOCK)
    for spec in specs:
        if spec != calibration.GZIP:
            parse(spec)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    sizes = calibration.SIZES[:3] if quick else calibration.SIZES
    try:
        with progress_bar("calibrating") as (bar, task):
            steps = len(specs) + len(models) * (1 + len(specs)) + bool(counts)
            bar.update(task, total=steps)

            def tell(what: str) -> None:
                bar.update(task, description=what, advance=1)

            # The largest is for what does not fit into a cache; on a device launches hide what is smaller.
            found = calibration.codec_points(
                specs, sizes=(*sizes, 1 << 25) if device == "cuda" and not quick else sizes, device=device,
                budget_s=0.15 if quick else 0.6, tell=tell,
            )  # fmt: skip
            times = {one: _model(one, batch, found, device, tell, quick) for one in models}
            tell("processes")
            crowd = {}
            if counts and device == "cpu":
                crowd = calibration.crowd_factors(counts, threads=threads, seconds=0.3 if quick else 1.0)
    finally:
        torch.set_num_threads(before)
    return Profile(
        name,
        device=device,
        threads=threads,
        memory=_memory(device, max(counts or [1])),
        codecs={spec: tuple(points) for spec, points in found.items()},
        models=times,
        crowd=crowd,
        links=[measure_link(peer)] if peer else [],
        machine=machine() | {"load_average": os.getloadavg()[0]},
        versions=versions(),
        at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit(),
    )


def _model(name: str, batch: int | None, codecs: dict[str, list[Any]], device: str, tell: Any, quick: bool) -> Any:
    import torch

    from laconic.plan.calibration import model_times
    from laconic.train.models import build_model
    from laconic.train.task import cross_entropy

    size = batch or (
        256 if device == "cuda" and name == "alexnet" else 64 if device == "cuda" else BATCHES.get(name, 64)
    )
    generator = torch.Generator().manual_seed(0)
    if name == "gpt":
        inputs = torch.randint(256, (size, 128), generator=generator)
        targets = torch.randint(256, (size, 128), generator=generator)
    else:
        inputs = torch.randn(size, *SHAPES[name], generator=generator)
        targets = torch.randint(CLASSES.get(name, 10), (size,), generator=generator)
    model = build_model(name, seed=0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    specs = [spec for spec, found in codecs.items() if found[-1].encode_s * numel / found[-1].numel < SLOWEST_S]
    return model_times(
        model, (inputs, targets), cross_entropy, specs, device=device, turns=3 if quick else 5,
        tell=tell,
    )  # fmt: skip


def _known(name: str) -> None:
    from laconic.train.models import MODELS

    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}: take one of {', '.join(MODELS)}")


def _memory(device: str, processes: int) -> float | None:
    """Of the device; on the CPU what each of the processes may have."""
    import torch

    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    except (ValueError, OSError):
        return None


def _counts(text: str) -> list[int]:
    try:
        found = [int(one) for one in text.split(",") if one.strip()]
    except ValueError:
        found = [0]
    if any(one < 1 for one in found):
        raise ConfigError(f"processes are whole numbers from 1 on, such as 2,4; got {text!r}")
    return found


def _listen(address: str) -> None:
    import sys

    from laconic.link_probe import serve

    print_stderr(
        f"laconic: on the other host: laconic calibrate --peer {address}:PORT -o FILE, with the port that follows"
    )
    try:
        found = serve(address)
    except OSError as error:
        raise LaconicError(f"cannot listen on {address}: {error.strerror or error}") from None
    sys.stdout.write(f"{found['goodput'] / 1e6:.1f} Mbit/s arrived\n")


def _print(profile: Any) -> None:
    from rich.table import Table

    from laconic.units import show_rate, show_time

    table = Table(title=f"{profile.name}: {profile.device}, {profile.threads} thread(s)", title_justify="left")
    for column in ("codec", "values", "bits a value", "encode GB/s", "decode GB/s", "add GB/s"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for spec, points in profile.codecs.items():
        one = points[-1]
        speeds = (4e-9 * one.numel / max(s, 1e-12) for s in (one.encode_s, one.decode_s, one.add_s))
        table.add_row(spec, f"{one.numel:,}", f"{8 * one.nbytes / one.numel:.3g}", *(f"{s:.3g}" for s in speeds))
    stdout_console().print(table, markup=False)
    for name, model in profile.models.items():
        stdout_console().print(
            f"{name}: {model.numel:,} values, batch {model.batch}, a step {1e3 * model.step_s:.1f} ms, the first "
            f"gradient after {100 * model.ready[0][0]:.0f} % of it", markup=False,
        )  # fmt: skip
    for link in profile.links:
        stdout_console().print(
            f"to {link['to']}: {show_rate(link['goodput'])}, round trip {show_time(link['round_trip'])}"
        )
    for count, factor in profile.crowd.items():
        stdout_console().print(f"{count} processes at once: each takes {factor:.2f} times as long", markup=False)


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(calibrate)
