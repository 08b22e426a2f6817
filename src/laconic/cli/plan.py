"""``laconic plan``."""

from __future__ import annotations

import json as jsons
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli import complete
from laconic.cli.output import examples, print_json, print_stderr, stdout_console
from laconic.errors import ConfigError, FileError
from laconic.units import show_bytes

if TYPE_CHECKING:
    from laconic.plan.advice import Advice, Layers, Load
    from laconic.plan.costs import Network, Work
    from laconic.plan.profile import Profile

__all__ = ["EXAMPLES", "plan", "register"]

EXAMPLES = (
    "laconic plan --model vgg11 --workers 4 --bandwidth 100mbit",
    "laconic plan --params 25000000 --step-time 0.3 --workers 16 --bandwidth 1gbit --topology ring --json",
    "laconic plan --params 61100840 --step-time 0.6 --workers 16 --bandwidth 1gbit --every 200 --sweep workers",
    "laconic plan --model mlp --workers 4 --bandwidth 100gbit --codec qsgd:4 --rho 0.1 --h 0.2",
)

SWEEPS = ("workers", "bandwidth", "rho", "h")


@dataclass(frozen=True)
class _Case:
    """One question."""

    load: Load
    work: Work
    network: Network
    profile: Profile
    codecs: Sequence[str] | None
    processes: int
    memory: float | None
    layers: Layers | None

    def advice(self, tell: Any = print_stderr, *, limits: bool = True) -> Advice:
        from laconic.plan.advice import advise

        return advise(
            self.load, self.work, self.network, self.profile, self.codecs, processes=self.processes,
            memory=self.memory, layers=self.layers, limits=limits, tell=tell,
        )  # fmt: skip


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A model of the profile, with its own step time.",
            autocompletion=complete.one_of(*complete.MODELS),
        ),
    ] = None,
    params: Annotated[int | None, typer.Option(help="How many, if it is none of these.")] = None,
    step_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of one worker's iteration.", show_default="the profile's")
    ] = None,
    workers: Annotated[int, typer.Option(help="How many.")] = 2,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of each host's cable: 100mbit, 1gbit.", show_default="1gbit")
    ] = None,
    topology: Annotated[str, typer.Option(help="ps, ring or twoshot.")] = "ps",
    servers: Annotated[int, typer.Option(help="With ps: that share the parameters.")] = 1,
    latency: Annotated[str, typer.Option(metavar="TIME", help="Round trip between two hosts: 5ms.")] = "0",
    every: Annotated[int, typer.Option(help="Iterations between two exchanges.")] = 1,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="One to compare; may be repeated.",
            show_default="those of the profile",
            autocompletion=complete.specs,
        ),
    ] = None,
    rho: Annotated[
        float | None, typer.Option(help="With --h: layers compressed to this part of their numbers.")
    ] = None,
    h: Annotated[float | None, typer.Option("--h", help="A compressed model's step over the dense one's.")] = None,
    processes: Annotated[int, typer.Option(help="Workers on each machine, which share its cores.")] = 1,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A worker's: 16gib.", show_default="the profile's")
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="Of the machine: a file of laconic calibrate, or cpu, h200, jang2017.")
    ] = "cpu",
    sweep: Annotated[
        str | None, typer.Option(metavar="WHAT", help="Draw curves over workers, bandwidth, rho or h.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them into a file (needs matplotlib).")] = None,
    what_if: Annotated[
        Path | None,
        typer.Option(metavar="RUN_FOLDER", help="What other codecs would have done for a run of laconic train."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what an iteration takes with each codec, and which to take, if any.

    Times are modelled: codecs by a profile of the machine, cables by their rate.
    How well that fits real runs is in docs/planner.md. Accuracy is not looked at.
    """
    from laconic.plan import profile as profiles
    from laconic.plan.advice import Layers, Load, parse_memory
    from laconic.plan.costs import Network, Work
    from laconic.units import parse_rate, parse_time

    if sweep is not None and sweep not in SWEEPS:
        raise ConfigError(f"unknown sweep {sweep!r}: take one of {', '.join(SWEEPS)}")
    if plot is not None and sweep is None:
        raise ConfigError("--plot draws a --sweep: give both")
    if (rho is None) != (h is None) and sweep not in ("rho", "h"):
        raise ConfigError("layers have a size and a time: give --rho and --h together")
    machine = profiles.load(profile)
    rate = parse_rate(bandwidth or "1gbit")
    told: dict[str, Any] = {}
    if what_if is not None:
        if model is not None or params is not None or step_time is not None:
            raise ConfigError(
                "--what-if takes model and step time from the run: leave --model, --params, --step-time out"
            )
        told = _run(what_if)
        load, step_s, workers, every = Load(tuple(told["slots"])), told["step_s"], told["workers"], told["every"]
    elif model is not None:
        if params is not None:
            raise ConfigError("give --model or --params, not both")
        if model not in machine.models:
            known = ", ".join(machine.models) or "none"
            raise ConfigError(
                f"profile {machine.name} has no model {model!r} (it has {known}): give --params and --step-time, or "
                f"measure it by `laconic calibrate --model {model} -o FILE`"
            )
        load = Load.of_model(machine.models[model])
        step_s = machine.models[model].step_s if step_time is None else step_time
    elif params is not None:
        if step_time is None:
            raise ConfigError("--params needs --step-time, the seconds of one worker's iteration")
        load, step_s = Load.of_params(params), step_time
    else:
        raise ConfigError("what is trained? Give --model NAME, or --params N --step-time S, or --what-if RUN_FOLDER")
    if step_s <= 0:
        raise ConfigError(f"a step takes more than no time, got {step_s:g} s")
    work = Work(step_s, every, load.model.ready) if load.model else Work(step_s, every)
    work = replace(work, spare=machine.device == "cuda" or machine.machine.get("cores", 1) > processes)
    transport = machine.transport
    network = Network(
        workers, rate, topology, servers, round_trip_s=parse_time(latency),
        byte_s=transport.get("byte_s", 0.0) if topology == "ps" else 0.0,
        exchange_s=_exchange_s(transport, len(load.slots)) if topology == "ps" else 0.0,
    )  # fmt: skip
    room = parse_memory(memory) if memory is not None else None
    layers = (
        Layers(rho if rho is not None else 1.0, h if h is not None else 1.0)
        if rho or h or sweep in ("rho", "h")
        else None
    )
    case = _Case(load, work, network, machine, codec, processes, room, layers)
    if told and bandwidth is None:
        case = replace(case, network=_fitted(case, told))
    advice = case.advice()
    found = advice.values() | {"asked": _asked(case, machine, sweep)}
    if told:
        found["run"] = {key: value for key, value in told.items() if key != "slots"}
    curves = _curves(case, sweep) if sweep is not None else None
    if curves is not None:
        found["sweep"] = curves
    if json:
        print_json(found)
    else:
        _print(advice, case, told)
    if curves is not None:
        _draw(curves, plot, shown=not json)


def _exchange_s(transport: Mapping[str, float], slots: int) -> float:
    """Of an exchange of so many slots, whatever is in them; it was measured with two."""
    return transport.get("exchange_s", 0.0) + transport.get("slot_s", 0.0) * max(0, slots - 2)


def _asked(case: _Case, machine: Profile, sweep: str | None) -> dict[str, Any]:
    network = case.network
    return {
        "params": case.load.numel, "step_s": case.work.step_s, "workers": network.workers,
        "bandwidth_bit_s": network.rate, "topology": network.topology, "servers": network.servers,
        "round_trip_s": network.round_trip_s, "every": case.work.every, "processes": case.processes,
        "profile": machine.name, "sweep": sweep,
        "layers": None if case.layers is None else {"rho": case.layers.rho, "h": case.layers.h},
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- a run


def _run(folder: Path) -> dict[str, Any]:
    """What a run measured: the seconds of a worker's iteration, and what it spent on the rest."""
    from laconic.train.run import SUMMARY, Config, trainable

    config = Config.load(folder)
    try:
        summary = jsons.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{folder} has no {SUMMARY}: the run has not ended") from None
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {folder / SUMMARY}: {error}") from None
    model = config.task().model
    iterations = config.iterations
    return {
        "run": str(folder),
        "slots": [(x.numel(), x.dim()) for x in trainable(model).values()],
        "workers": config.job.workers,
        "every": config.job.every,
        "step_s": summary["compute_s"] / iterations,
        "codec": config.job.push,
        "method": config.method,
        "measured_step_s": summary["total_s"] / iterations,
        "measured_bytes_per_iteration": summary["wire_bytes_per_iteration"] / config.job.workers,
    }


def _fitted(case: _Case, told: dict[str, Any]) -> Network:
    """The network by which the run's own codec takes what the run took."""
    from laconic.plan.advice import FASTEST, SLOWEST

    def seconds(rate: float) -> float:
        at = replace(case, network=replace(case.network, rate=rate), codecs=[told["codec"]])
        return next(
            row for row in at.advice(lambda what: None, limits=False).rows if row.codec == told["codec"]
        ).step.total_s

    low, high = math.log(SLOWEST), math.log(FASTEST)
    if seconds(FASTEST) >= told["measured_step_s"]:
        print_stderr("laconic: the run took no longer than without a network: any rate fits it, 100 Gbit/s is taken")
        return replace(case.network, rate=1e11)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(math.exp(middle)) > told["measured_step_s"] else (low, middle)
    return replace(case.network, rate=math.exp(high))


# ------------------------------------------------------------------------------------------------------------ curves


def _curves(case: _Case, what: str) -> dict[str, Any]:
    """Speed-up over float32 of each codec; of layers alone where rho or h changes."""
    from laconic.plan.advice import Layers

    if what == "workers":
        xs: list[float] = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
        cases = [replace(case, network=replace(case.network, workers=int(x))) for x in xs]
    elif what == "bandwidth":
        xs = [10 ** (7 + i / 4) for i in range(17)]
        cases = [replace(case, network=replace(case.network, rate=x)) for x in xs]
    else:
        assert case.layers is not None
        xs = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0] if what == "rho" else [0.1 * i for i in range(1, 21)]
        cases = [
            replace(case, layers=Layers(x, case.layers.h) if what == "rho" else Layers(case.layers.rho, x)) for x in xs
        ]
    found: dict[str, list[float]] = {}
    for place, one in enumerate(cases):
        for row in one.advice(lambda what: None, limits=False).rows:
            if row.codec != "none":
                found.setdefault(row.codec, [math.nan] * len(xs))[place] = row.speedup_fp32
    found = {name: ys for name, ys in found.items() if not any(map(math.isnan, ys))}
    best = sorted(found, key=lambda name: -max(found[name]))[:6]
    return {"what": what, "x": xs, "speedup_fp32": {name: found[name] for name in best}}


def _draw(curves: dict[str, Any], plot: Path | None, shown: bool) -> None:
    from laconic.plan import curves as drawing

    labels = {"workers": "workers", "bandwidth": "bit/s of a cable", "rho": "rho of the layers", "h": "h of the layers"}
    options = {"x_label": labels[curves["what"]], "y_label": "times as fast as float32", "log_x": curves["what"] != "h"}
    if shown:
        stdout_console().print(drawing.text(curves["x"], curves["speedup_fp32"], **options), markup=False)
    if plot is not None:
        drawing.draw(plot, curves["x"], curves["speedup_fp32"], title="laconic plan", **options)
        print_stderr(f"{plot} written")


# ------------------------------------------------------------------------------------------------------------- tables


def _print(advice: Advice, case: _Case, told: dict[str, Any]) -> None:
    import rich.box
    from rich.table import Table

    from laconic.units import show_rate, show_time

    network = case.network
    title = (
        f"{case.load.numel:,} parameters, {network.workers} workers, {network.topology} at {show_rate(network.rate)}, "
        f"a step of {show_time(case.work.step_s)} alone"
    )
    table = Table(title=title, title_justify="left", box=rich.box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    columns = ("codec", "push", "pull", "iteration", "compute", "encode", "push", "add", "pull", "decode", "hidden",
               "over fp32", "over bf16", "pays below", "memory")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "codec" else "right")
    for row in sorted(advice.rows, key=lambda one: one.step.total_s):
        step, every = row.step, row.step.every
        even = row.break_even
        table.add_row(
            row.codec + (" *" if row.codec == advice.codec else ""),
            show_bytes(row.message.push), show_bytes(row.message.pull), show_time(step.total_s),
            *(show_time(x / every) for x in (
                step.compute_s, step.encode_s, step.push_s, step.aggregate_s, step.pull_s, step.decode_s,
                step.hidden_s)),
            f"{row.speedup_fp32:.2f}", f"{row.speedup_bf16:.2f}",
            "" if row.codec == "none" else "nowhere" if even is None else
            "everywhere" if math.isinf(even) else show_rate(even),
            show_bytes(row.memory) + ("" if row.fits else " (too much)"),
        )  # fmt: skip
    stdout_console().print(table, markup=False)
    for note in dict.fromkeys(f"{row.codec}: {row.step.note}" for row in advice.rows if row.step.note):
        stdout_console().print(note, markup=False, soft_wrap=True)
    if told:
        took = show_time(told["measured_step_s"])
        stdout_console().print(f"the run itself: {told['codec']} pushed, an iteration took {took}", markup=False)
    stdout_console().print(f"recommended: {advice.codec}: {advice.reason}", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(plan)
