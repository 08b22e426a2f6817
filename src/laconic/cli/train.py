"""``laconic train``."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.complete import DATA, METHODS, MODELS, MODES, OPTIMIZERS, SCHEMES, one_of, specs
from laconic.cli.options import Json, option
from laconic.cli.output import examples, loading, print_json, print_stderr, print_table, print_text, progress_bar
from laconic.cli.progress import ProgressLog, TimeLeft, progress_line
from laconic.cli.roles import check_grpc, serve_metrics
from laconic.cli.watch import event_files
from laconic.errors import ConfigError, FileError
from laconic.tables import Table
from laconic.units import show_bytes

if TYPE_CHECKING:
    from laconic.cluster.job import Job
    from laconic.train.run import Config

__all__ = ["EXAMPLES", "register", "train"]

EXAMPLES = (
    "laconic train --method 5 --explain",
    "laconic train --method laconic --iterations 20 --json",
    "laconic train --method 5 --workers 4 --run-dir run --prepare",
    "laconic train --method 4 --device auto --iterations 20",
    "laconic train --optimizer adamw --push qsgd:4 --iterations 20",
    "laconic train --method 3 --layers subspace:0.1 --iterations 20",
    "laconic train --method 5 --tensorboard boards --metrics 127.0.0.1:9464",
)

TIMES = (
    ("compute_s", "computing"), ("encode_s", "encoding"), ("overlapped_s", "overlapped"),
    ("communication_s", "waiting"), ("total_s", "total"),
)  # fmt: skip


_task = partial(option, rich_help_panel="Model and data")
_training = partial(option, rich_help_panel="Training")
_exchange = partial(option, rich_help_panel="What is exchanged")
_channel = partial(_exchange, metavar="SPEC", autocompletion=specs)
_processes = partial(option, rich_help_panel="Processes")
_run = partial(option, rich_help_panel="The run")


def train(
    model: Annotated[
        str, _task("mlp, lenet5, vgg11, alexnet, resnet50, vgg11fc or gpt.", autocompletion=one_of(*MODELS))
    ] = "mlp",
    data: Annotated[str, _task("digits (embedded), mnist, cifar10 or text.", autocompletion=one_of(*DATA))] = "digits",
    data_dir: Annotated[Path | None, _task("Folder of data sets.", "$LACONIC_DATA", metavar="DIR")] = None,
    script: Annotated[str | None, _task("Function that builds your own task.", metavar="FILE.py:FUNCTION")] = None,
    layers: Annotated[
        str | None,
        _task(
            "Train in a compressed space: monarch:0.1, lowrank:0.1, subspace:0.1 or hashed:0.1.",
            metavar="SCHEME:RHO",
            autocompletion=one_of(*SCHEMES),
        ),
    ] = None,
    layers_init: Annotated[str, _task("fresh, or project for a script's trained model.")] = "fresh",
    bandwidth: Annotated[
        str, _task("With --layers: the link for which the gain is computed.", metavar="RATE")
    ] = "1gbit",
    epochs: Annotated[int | None, _training("Passes over the data; or give --iterations.")] = None,
    iterations: Annotated[int | None, _training("Number of iterations.", "three epochs")] = None,
    batch: Annotated[int, _training("Examples per worker and iteration.")] = 64,
    optimizer: Annotated[
        str, _training("sgd, adamw, or muon (for matrices, adamw for the rest).", autocompletion=one_of(*OPTIMIZERS))
    ] = "sgd",
    lr: Annotated[float | None, _training("Learning rate.", "0.05 for sgd, else 0.001")] = None,
    momentum: Annotated[float | None, _training("Momentum of SGD.", "0.9, or the method's")] = None,
    weight_decay: Annotated[float, _training("Weight decay.")] = 0.0,
    schedule: Annotated[str, _training("constant or cosine.")] = "constant",
    warmup: Annotated[int, _training("Iterations until the full learning rate.")] = 0,
    seed: Annotated[int, _training("Seed of everything random.")] = 0,
    method: Annotated[
        str | None,
        _exchange(
            "1, 2, 2w, 3, 4, 5, 6, adaptive, laconic, laconic-min or homomorphic.", "1", autocompletion=one_of(*METHODS)
        ),
    ] = None,
    push: Annotated[str | None, _channel("Channel of what workers send.")] = None,
    pull: Annotated[str | None, _channel("Channel of what the server sends.")] = None,
    push_small: Annotated[str | None, _channel("--push for small tensors.")] = None,
    pull_small: Annotated[str | None, _channel("--pull for small tensors.")] = None,
    bundled: Annotated[
        bool, _exchange("Exchange all tensors as one vector, or one by one.", names=("--bundled/--layerwise",))
    ] = False,
    returns: Annotated[str | None, _exchange("weights, gradients, delta or sum.")] = None,
    sends: Annotated[str | None, _exchange("gradients, changes or weights.")] = None,
    every: Annotated[int | None, _exchange("Iterations between exchanges.")] = None,
    mode: Annotated[str, _exchange("sync, async or bounded:S.", autocompletion=one_of(*MODES))] = "sync",
    discount: Annotated[
        bool, _exchange("Modes async and bounded: shorter steps for stale gradients.", names=("--discount",))
    ] = False,
    after: Annotated[
        str | None, _exchange("mean or best; clipped, median or trimmed:K bound what one worker can do.")
    ] = None,
    workers: Annotated[int, _processes("Number of workers.")] = 2,
    servers: Annotated[int, _processes("Number of servers that share the parameters.")] = 1,
    backup: Annotated[int, _processes("Workers that a round does not wait for.", names=("--backup-workers",))] = 0,
    device: Annotated[str, _processes("Where workers train and encode: cpu, cuda or auto.")] = "cpu",
    run_dir: Annotated[Path | None, _run("The run's folder.", "a new one in runs/", metavar="DIR")] = None,
    checkpoint_every: Annotated[int, _run("Iterations between checkpoints.")] = 20,
    resume: Annotated[bool, _run("Continue the run in --run-dir.", names=("--resume",))] = False,
    prepare: Annotated[
        bool, _run("Only write --run-dir, for laconic server and laconic worker.", names=("--prepare",))
    ] = False,
    tensorboard: Annotated[Path | None, _run("Write TensorBoard's event files here.", metavar="DIR")] = None,
    metrics: Annotated[
        str | None, _run("Serve Prometheus metrics at /metrics; loopback only.", metavar="HOST:PORT")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Only print the method's flags.")] = False,
    json: Json = False,
) -> None:
    """Train a model with a parameter server and workers, each a process on this host.

    A method is a set of options; a flag overrides the method's value. For
    several hosts --prepare writes the run's folder: see laconic server --help.
    laconic watch shows a run while it trains.
    """
    with loading():
        from laconic.cluster.job import Job
        from laconic.train.launch import launch
        from laconic.train.methods import METHODS, method_flags, method_name, method_options
        from laconic.train.run import Config
        from laconic.units import parse_rate

    options = method_options(method or "1", mode)
    if explain:
        name = method or "1"
        if json:
            print_json({"method": name, "summary": METHODS[name][0], "flags": method_flags(name)})
        else:
            print(f"laconic train {shlex.join(method_flags(name))}  # {METHODS[name][0]}")
        return
    given: dict[str, Any] = {
        "push": push, "pull": pull, "push_small": push_small, "pull_small": pull_small, "returns": returns,
        "sends": sends, "every": every, "after": after, "momentum": momentum,
    }  # fmt: skip
    options |= {name: value for name, value in given.items() if value is not None}
    if optimizer != "sgd" and momentum is not None:
        raise ConfigError(f"--momentum is for --optimizer sgd, got {optimizer}")
    if lr is None:
        lr = 0.05 if optimizer == "sgd" else 0.001
    base: dict[str, Any] = {
        "workers": workers, "mode": mode, "optimizer": optimizer, "lr": lr, "weight_decay": weight_decay,
        "backup": backup, "discount": discount, "checkpoint_every": checkpoint_every, "seed": seed,
    }  # fmt: skip
    job = Job(**base | options)
    _warn_about_codec(job)
    config = Config(
        model=model, data=data, data_dir=str(data_dir) if data_dir else None, script=script, batch=batch,
        iterations=job.every, method=method or method_name(job, base), schedule=schedule, warmup=warmup, job=job,
        servers=servers, bundled=bundled, layers=layers, layers_init=layers_init,
    )  # fmt: skip
    rate = parse_rate(bandwidth)
    if epochs is not None and iterations is not None:
        raise ConfigError("give --epochs or --iterations, not both")
    if (resume or prepare) and run_dir is None:
        raise ConfigError(f"--{'resume' if resume else 'prepare'} needs the --run-dir of the run")
    if resume and prepare:
        raise ConfigError("--prepare begins a run and --resume continues one: give one of them")
    folder = run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{config.method}"
    _check_folder(folder)
    config = config.resolved(config.task(), epochs=epochs, iterations=iterations)
    if prepare:
        _prepare(config, folder, json)
        return
    check_grpc()
    with (
        serve_metrics([folder], metrics),
        _tensorboard(folder, tensorboard) as write_events,
        progress_bar("starting") as (bar, task),
    ):
        log, left = ProgressLog(), TimeLeft(config.iterations)

        def show(reports: list[dict[str, Any]]) -> None:
            write_events()
            line, done = progress_line(reports), min(report["iteration"] for report in reports)
            log(line + left(done))
            bar.update(task, completed=done, total=config.iterations, description=line)

        def show_start(awaited: str) -> None:
            log(awaited)
            bar.update(task, description=awaited)

        (summary,) = launch(
            {folder: config}, resume=resume, device=device, on_reports=show, on_start=show_start
        )  # fmt: skip
        if config.layers is not None:
            from laconic.train.break_even import measure_run

            bar.update(task, description="measuring the gain of the layers")
            summary = measure_run(folder, config, summary, bandwidth=rate)
    if json:
        print_json(summary | {"run_dir": str(folder)})
    else:
        _print(summary, folder)


def _warn_about_codec(job: Job) -> None:
    """Warn about gradients that AdamW and Muon were seen not to bear; SGD's methods are those of the study."""
    from laconic.plan import evidence
    from laconic.suitability import alternatives, judge

    memory = evidence.OPTIMIZERS[job.optimizer]
    harm = judge(job.push, memory) if job.optimizer != "sgd" else None
    if harm is not None:
        print_stderr(
            f"laconic: --push {job.push!r} does not suit {job.optimizer}: {harm.cause}, and {harm.effect}. Use "
            f"{' or '.join(alternatives(memory))}"
        )


@contextmanager
def _tensorboard(folder: Path, event_dir: Path | None) -> Iterator[Callable[[], None]]:
    """Return a function that writes TensorBoard's event files of a run, at most once a second and at the end."""
    from laconic.watch.view import Watcher

    watcher, next_write = Watcher(folder), 0.0
    with event_files(event_dir) as write_events:

        def write() -> None:
            nonlocal next_write
            if event_dir is not None and time.monotonic() >= next_write:
                next_write = time.monotonic() + 1.0
                write_events(watcher.view())

        try:
            yield write
        finally:
            next_write = 0.0
            write()


def _check_folder(folder: Path) -> None:
    """Raise ``FileError`` if the folder cannot be created or written to, before anything starts."""
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise FileError(f"expected a folder for the run, {path} is a file: choose another --run-dir")
            if not os.access(path, os.W_OK | os.X_OK):
                raise FileError(f"cannot write to {path}: choose another --run-dir")
            return


def _prepare(config: Config, folder: Path, json: bool) -> None:
    if (folder / "config.json").exists():
        raise FileError(f"{folder} holds a run already: choose another --run-dir")
    config.save(folder)
    if json:
        print_json({"run_dir": str(folder), "config": config.to_json()})
        return
    print_text(
        f"wrote {folder / 'config.json'}: copy it to every host, then run there",
        f"  laconic server {folder} --host … --port … --certs …",
        f"  laconic worker {folder} --worker N --server host:port --certs …, N from 0 to {config.job.workers - 1}",
    )


def _print(summary: dict[str, Any], folder: Path) -> None:
    rows = {"method": summary["method"], "push": summary["codec_push"], "pull": summary["codec_pull"]}
    if summary.get("layers") is not None:
        rows["layers"] = summary["layers"]
    if summary.get("accuracy") is not None:
        rows["accuracy"] = f"{summary['accuracy']:.2f} %"
    rows["bytes per iteration"] = show_bytes(summary["wire_bytes_per_iteration"])
    if summary.get("bytes_saved") is not None:
        rows["bytes saved"] = show_bytes(max(summary["bytes_saved"], 0))
    rows |= {name: f"{summary[key]:.2f} s" for key, name in TIMES if summary.get(key) is not None}
    if summary.get("restarts"):
        rows["restarts"] = str(summary["restarts"])
    print_table(Table(("", ""), list(rows.items()), text_columns=2))
    if summary.get("rho_layers") is not None:
        from laconic.train.break_even import describe

        print_text(describe(summary))
    print_text(f"wrote {folder}")


def register(app: typer.Typer) -> None:
    app.command("train", epilog=examples(*EXAMPLES))(train)
