"""``laconic train``."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.complete import DATA, METHODS, MODELS, MODES, SCHEMES, one_of, specs
from laconic.cli.output import examples, print_json, progress_bar, stdout_console
from laconic.cli.progress import Log, status
from laconic.cli.roles import Metrics, check_grpc, expose
from laconic.errors import ConfigError, FileError
from laconic.units import show_bytes

if TYPE_CHECKING:
    from laconic.cluster.job import Job
    from laconic.train.run import Config
    from laconic.train.task import Task

__all__ = ["EXAMPLES", "register", "train"]

EXAMPLES = (
    "laconic train --method 5 --explain",
    "laconic train --method laconic --iterations 20 --json",
    "laconic train --method 5 --workers 4 --run-dir run --prepare",
    "laconic train --method 4 --device auto --iterations 20",
    "laconic train --method 3 --layers subspace:0.1 --iterations 20",
    "laconic train --method 5 --tensorboard boards --metrics 127.0.0.1:9464",
)

TIMES = (
    ("compute_s", "computing"),
    ("encode_s", "encoding"),
    ("overlapped_s", "overlapped"),
    ("communication_s", "waiting"),
    ("total_s", "in all"),
)

CUSTOM = "custom"
"""The method of a run whose options are no method's."""


def train(
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="1, 2, 2w, 3, 4, 5, 6, adaptive, laconic, laconic-min or homomorphic.",
            show_default="1",
            autocompletion=one_of(*METHODS),
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", help="mlp, lenet5, vgg11, alexnet, resnet50 or gpt.", autocompletion=one_of(*MODELS)),
    ] = "mlp",
    data: Annotated[
        str,
        typer.Option("--data", help="digits (embedded), mnist, cifar10 or text.", autocompletion=one_of(*DATA)),
    ] = "digits",
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Where data sets lie; else $LACONIC_DATA.")
    ] = None,
    script: Annotated[
        str | None, typer.Option("--script", metavar="FILE.py:FUNCTION", help="A model of your own.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", help="How many workers.")] = 2,
    servers: Annotated[int, typer.Option("--servers", help="How many servers share the parameters.")] = 1,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the data; or give --iterations.")] = None,
    iterations: Annotated[int | None, typer.Option("--iterations", help="How many; by default three epochs.")] = None,
    batch: Annotated[int, typer.Option("--batch", help="Examples of a worker in an iteration.")] = 64,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 0.05,
    momentum: Annotated[float | None, typer.Option("--momentum", help="By default 0.9, or the method's.")] = None,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of the descent.")] = 0.0,
    schedule: Annotated[str, typer.Option("--schedule", help="constant or cosine.")] = "constant",
    warmup: Annotated[int, typer.Option("--warmup", help="Iterations that lead up to the learning rate.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Decides everything random.")] = 0,
    mode: Annotated[
        str, typer.Option("--mode", help="sync, async or bounded:S.", autocompletion=one_of(*MODES))
    ] = "sync",
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="SPEC", help="Channel of what workers send.", autocompletion=specs),
    ] = None,
    pull: Annotated[
        str | None, typer.Option("--pull", metavar="SPEC", help="Channel of what they get.", autocompletion=specs)
    ] = None,
    push_small: Annotated[
        str | None,
        typer.Option(
            "--push-small", metavar="SPEC", help="Channel of small tensors that workers send.", autocompletion=specs
        ),
    ] = None,
    pull_small: Annotated[
        str | None,
        typer.Option(
            "--pull-small", metavar="SPEC", help="Channel of small tensors that they get.", autocompletion=specs
        ),
    ] = None,
    bundled: Annotated[
        bool, typer.Option("--bundled/--layerwise", help="All tensors as one vector, or one by one.")
    ] = False,
    returns: Annotated[str | None, typer.Option("--returns", help="weights, gradients, delta or sum.")] = None,
    sends: Annotated[str | None, typer.Option("--sends", help="gradients, changes or weights.")] = None,
    every: Annotated[int | None, typer.Option("--every", help="Iterations between exchanges.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="SCHEME:RHO",
            help="Train in a compressed space: monarch:0.1, subspace:0.1, …",
            autocompletion=one_of(*SCHEMES),
        ),
    ] = None,
    layers_init: Annotated[
        str, typer.Option("--layers-init", help="fresh, or project for a script's trained model.")
    ] = "fresh",
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", metavar="RATE", help="With --layers: the link that the verdict is for.")
    ] = "1gbit",
    after: Annotated[str | None, typer.Option("--after", help="mean or best.")] = None,
    backup: Annotated[int, typer.Option("--backup-workers", help="Workers that a round does not wait for.")] = 0,
    discount: Annotated[
        bool,
        typer.Option("--discount", help="Without rounds: shorter steps for older gradients."),
    ] = False,
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", help="Iterations between checkpoints.")] = 20,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="The run's folder; by default a new one in runs/.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run-dir.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only write --run-dir, for laconic server and laconic worker.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only print the flags that the method stands for.")
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="Where workers train and encode: cpu, cuda, or auto.")
    ] = "cpu",
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write TensorBoard's event files here.")
    ] = None,
    metrics: Metrics = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a model with a parameter server and workers, each a process of its own on this host.

    A method is a set of options; each can be given by its flag, which then
    counts. For several hosts --prepare writes the run's folder: see
    laconic server --help. laconic watch shows a run while it goes on.
    """
    from laconic.cluster.job import Job
    from laconic.train.launch import launch
    from laconic.train.methods import METHODS, method_flags, method_options
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
    base: dict[str, Any] = {
        "workers": workers, "mode": mode, "lr": lr, "weight_decay": weight_decay, "backup": backup,
        "discount": discount, "checkpoint_every": checkpoint_every, "seed": seed,
    }  # fmt: skip
    job = Job(**base | options)
    config = Config(
        model=model, data=data, data_dir=str(data_dir) if data_dir else None, script=script, batch=batch,
        iterations=job.every, method=method or _name(job, base), schedule=schedule, warmup=warmup, job=job,
        servers=servers, bundled=bundled, layers=layers, layers_init=layers_init,
    )  # fmt: skip
    rate = parse_rate(bandwidth)
    if epochs is not None and iterations is not None:
        raise ConfigError("give --epochs or --iterations, not both")
    if (resume or prepare) and run_dir is None:
        raise ConfigError(f"--{'resume' if resume else 'prepare'} needs the --run-dir of the run")
    if resume and prepare:
        raise ConfigError("--prepare begins a run and --resume goes on with one: give one of them")
    folder = run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{config.method}"
    _check_folder(folder)
    config, task = _checked(config, epochs, iterations)
    if prepare:
        _prepare(config, folder, json)
        return
    check_grpc()
    with (
        expose([folder], metrics),
        _board(folder, tensorboard) as write_board,
        progress_bar("starting") as (bar, shown),
    ):
        log, raw = Log(), None if resume else _raw_nbytes(task) / job.every

        def tell(lines: list[dict[str, Any]]) -> None:
            write_board()
            line = status(lines, raw_nbytes=raw)
            log(line)
            done = min(one["iteration"] for one in lines)
            bar.update(shown, completed=done, total=config.iterations, description=line)

        (summary,) = launch({folder: config}, resume=resume, device=device, tell=tell)
        if config.layers is not None:
            bar.update(shown, description="measuring what layers gain")
            summary = summary | _verdict(config, summary, rate, folder)
    if json:
        print_json(summary | {"run_dir": str(folder)})
    else:
        _print(summary, folder)


@contextmanager
def _board(folder: Path, tensorboard: Path | None) -> Iterator[Callable[[], None]]:
    """Writes for TensorBoard what is new of the run, now and then, and all of it in the end."""
    if tensorboard is None:
        yield lambda: None
        return
    from laconic.watch.tensorboard import TensorBoard
    from laconic.watch.view import Watcher

    board, watcher, due = TensorBoard(tensorboard), Watcher(folder), 0.0

    def write() -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + 1.0
            board.show(watcher.look())

    try:
        yield write
    finally:
        board.show(watcher.look())
        board.close()


def _verdict(config: Config, summary: dict[str, Any], rate: float, folder: Path) -> dict[str, Any]:
    """Added to the run's summary, too."""
    from json import dumps

    from laconic.train.break_even import judge
    from laconic.train.run import SUMMARY, write_whole

    told = judge(config, summary, bandwidth=rate)
    write_whole(folder / SUMMARY, dumps(summary | told, indent=2))
    return told


def _name(job: Job, base: dict[str, Any]) -> str:
    """The method that a job spelled out by flags amounts to."""
    from laconic.cluster.job import Job
    from laconic.train.methods import METHODS, method_options

    for name in METHODS:
        try:
            if Job(**base | method_options(name, base["mode"])) == job:
                return name
        except ConfigError:  # not every method goes with every mode
            continue
    return CUSTOM


def _check_folder(folder: Path) -> None:
    """What would go wrong with it, in words, before anything starts."""
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise FileError(f"expected a folder for the run, {path} is a file: choose another --run-dir")
            if not os.access(path, os.W_OK | os.X_OK):
                raise FileError(f"cannot write to {path}: choose another --run-dir")
            return


def _checked(config: Config, epochs: int | None, iterations: int | None) -> tuple[Config, Task]:
    """As many iterations as were asked for, rounded up to whole exchanges; and what is trained.

    All that servers and workers make of the configuration is made here first: what is wrong with it is said once, and
    no process has started.
    """
    from laconic.train.data_shards import Shards

    task, job = config.task(), config.job
    shards = Shards(task.num_train, job.workers, config.batch, job.seed)
    if iterations is None:
        iterations = (3 if epochs is None else epochs) * shards.iterations_per_epoch
    if iterations < 1:
        raise ConfigError(f"expected at least one iteration, got {iterations}")
    config = replace(config, iterations=-(-iterations // job.every) * job.every)
    config.residents(task)
    return config, task


def _raw_nbytes(task: Task) -> int:
    """What an exchange of a worker takes when nothing is compressed."""
    return 2 * 4 * task.dense_numel


def _prepare(config: Config, folder: Path, json: bool) -> None:
    if (folder / "config.json").exists():
        raise FileError(f"{folder} holds a run already: choose another --run-dir")
    config.save(folder)
    if json:
        print_json({"run_dir": str(folder), "config": config.to_json()})
        return
    console = stdout_console()
    console.print(f"wrote {folder / 'config.json'}: copy it to every host, then there", markup=False, soft_wrap=True)
    console.print(f"  laconic server {folder} --host … --port … --certs …", markup=False, soft_wrap=True)
    console.print(
        f"  laconic worker {folder} --worker N --server host:port --certs …, N from 0 to {config.job.workers - 1}",
        markup=False,
        soft_wrap=True,
    )


def _print(summary: dict[str, Any], folder: Path) -> None:
    from rich.table import Table
    from rich.text import Text

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
    table = Table.grid("", "", padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(name, Text(value))  # specs are no markup
    console = stdout_console()
    console.print(table)
    if summary.get("rho_layers") is not None:
        from laconic.train.break_even import sentence

        console.print(sentence(summary), markup=False, soft_wrap=True)
    console.print(f"wrote {folder}", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command("train", epilog=examples(*EXAMPLES))(train)
