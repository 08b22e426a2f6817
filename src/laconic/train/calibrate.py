"""Measure a profile of this machine for ``laconic plan``: codecs, models, transport, processes and a link."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic import counters
from laconic.cluster.job import Job
from laconic.errors import ConfigError, LaconicError
from laconic.plan import calibration
from laconic.plan.background_load import OtherProcesses
from laconic.plan.link import measure_link
from laconic.plan.messages import Workload
from laconic.plan.processes import slowdown_factors
from laconic.plan.profile import MachineLoad, ModelTimes, Point, Profile, Transport
from laconic.plan.recommend import PlanRequest, recommend
from laconic.plan.transport import Exchange, fit_transport
from laconic.records import commit, machine, read, versions
from laconic.train import transport_tasks
from laconic.train.launch import launch
from laconic.train.models import MODELS, build_model
from laconic.train.run import RECORDS, Config, trainable
from laconic.train.task import cross_entropy

__all__ = ["BUSY_SHARE", "busy", "calibrate", "check_model", "measure_ranks", "measure_transport", "step_count"]

INPUT_SHAPES = {
    "mlp": (1, 28, 28), "lenet5": (1, 28, 28), "vgg11": (3, 32, 32), "alexnet": (3, 224, 224),
    "resnet50": (3, 224, 224), "vgg11fc": (3, 32, 32),
}  # fmt: skip
CLASSES = {"alexnet": 1000, "resnet50": 1000}
BATCHES = {"alexnet": 16, "resnet50": 4, "vgg11": 16, "vgg11fc": 16}
"""Examples of a step on a CPU, if not 64."""
SLOWEST_S = 1.0
"""A codec that takes longer for a model's gradient is not measured on it: its speed on other tensors is enough."""

BUSY_SHARE = 0.15
"""Share of all cores that other processes may use before a profile is marked as one of a busy machine."""
TRANSPORT_WORKERS = 2
"""Workers of the measured server, on this machine, over loopback with TLS."""
RANKS, RANKS_TIMEOUT_S = 2, 120.0
ALONE = "; ranks: one by NCCL, which exchanges with itself: the time between GPUs is not in it"
WARM_UP = 3

Notify = Callable[[str], None]
Measured = TypeVar("Measured")


def calibrate(
    name: str, *, models: Sequence[str] = (), codecs: Sequence[str] | None = None, batch: int | None = None,
    device: str = "cpu", threads: int = 1, processes: Sequence[int] = (), transport: bool = True,
    ranks: bool = True, peer: str | None = None, quick: bool = False, notify: Notify = lambda message: None,
) -> Profile:  # fmt: skip
    """Return the profile of this machine.

    Args:
        models: Models whose step is measured, and codecs on their gradients.
        codecs: Codecs to measure; a stock of 18 by default.
        batch: Examples of a model's step; 64 by default, fewer for large models.
        device: ``cpu`` or ``cuda``.
        processes: Numbers of processes whose mutual slowdown is measured.
        transport: Whether to measure exchanges of a parameter server and two workers on this machine.
        ranks: Whether to measure exchanges of two ranks of torch.distributed on this machine.
        peer: HOST:PORT of ``laconic calibrate --listen``, to measure the link to it.
        quick: Whether to measure fewer sizes and turns.
        notify: Called with the name of each step; see ``step_count``.
    """
    specs = list(dict.fromkeys(["none", "bf16", *codecs])) if codecs else list(calibration.STOCK)
    calibration.check_specs(specs)
    load_average, others = os.getloadavg()[0], OtherProcesses([os.getpid()])
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # The largest size does not fit into a cache; on a GPU the time of launches hides that of smaller ones.
        sizes = calibration.SIZES[:3] if quick else calibration.SIZES
        points = calibration.codec_points(
            specs, sizes=(*sizes, 1 << 25) if device == "cuda" and not quick else sizes, device=device,
            budget_s=0.15 if quick else 0.6, notify=notify,
        )  # fmt: skip
        times = {model: _model_times(model, batch, points, device, quick, notify) for model in models}
        profile = Profile(
            name, about=_about(device, threads, False), source="laconic calibrate", device=device, threads=threads,
            memory=_memory(device, max(processes, default=1)),
            codecs={spec: tuple(measured) for spec, measured in points.items()}, models=times, machine=machine(),
            versions=versions(), at=datetime.now(timezone.utc).isoformat(timespec="seconds"), commit=commit(),
        )  # fmt: skip
        if processes and device == "cpu":
            notify("processes")
            factors = slowdown_factors(processes, threads=threads, seconds=0.3 if quick else 1.0)
            profile = replace(profile, slowdown=factors)
        if transport:
            notify("transport")
            measured = _or_none("transport", lambda: measure_transport(profile, exchanges=12 if quick else 40))
            profile = replace(profile, transport=measured)
        if ranks:
            notify("ranks")
            by_way = _or_none("collective", lambda: measure_ranks(device, turns=10 if quick else 40))
            profile = replace(profile, collective=by_way or {}, about=_about(device, threads, bool(by_way)))
        if peer is not None:
            notify("link")
            profile = replace(profile, links=(measure_link(peer),))
    finally:
        torch.set_num_threads(threads_before)
    share = others.share()
    return replace(profile, load=MachineLoad(load_average, share, busy(load_average, share)))


def _or_none(field: str, measure: Callable[[], Measured]) -> Measured | None:
    """Return a measurement by other processes; if they fail, minutes of other measurements are not lost with it."""
    try:
        return measure()
    except LaconicError as error:
        message = f"the profile has no {field}, which `laconic plan` replaces: {error}"
        counters.count("calibration_incomplete", 1, message)
        return None


def step_count(models: Sequence[str], codecs: Sequence[str] | None) -> int:
    """Return how many times ``calibrate`` calls ``notify``, at most."""
    specs = len({"none", "bf16", *codecs}) if codecs else len(calibration.STOCK)
    return specs + len(models) * (1 + specs) + 4


def busy(load_average: float, other_processes: float | None) -> bool:
    """Return whether a machine was too busy for figures that are to hold for an idle one."""
    if other_processes is None:
        return load_average > 0.75 * (os.cpu_count() or 1)
    return other_processes > BUSY_SHARE


def check_model(name: str) -> None:
    if name not in MODELS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {name!r}")


def rank_count(device: str) -> int:
    """Return how many ranks are measured: two, but no more than there are GPUs, because NCCL needs one for each."""
    return RANKS if device == "cpu" else min(RANKS, torch.cuda.device_count())


def _about(device: str, threads: int, ranks: bool) -> str:
    """Describe the machine, and whether exchanges of ranks (if ``ranks``: they were measured) are those of one rank."""
    properties = machine()
    where = properties.get("gpu") if device == "cuda" else f"{properties['cores']} cores of {properties['cpu']}"
    alone = ranks and rank_count(device) == 1
    return f"{where}, {threads} thread{'s' * (threads != 1)} a process" + ALONE * alone


def _memory(device: str, processes: int) -> float | None:
    """Return the memory of the GPU, or what each of so many processes may have of the machine's."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    except (ValueError, OSError):
        return None


def _model_times(
    name: str, batch: int | None, codecs: Mapping[str, Sequence[Point]], device: str, quick: bool, notify: Notify
) -> ModelTimes:
    default = {"alexnet": 256}.get(name, 64) if device == "cuda" else BATCHES.get(name, 64)
    model = build_model(name, seed=0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    fast = [
        spec for spec, points in codecs.items() if points[-1].encode_s * numel / points[-1].numel < SLOWEST_S
    ]  # fmt: skip
    return calibration.model_times(
        model, _random_batch(name, batch or default), cross_entropy, fast, device=device, turns=3 if quick else 5,
        notify=notify,
    )  # fmt: skip


def _random_batch(name: str, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(256, (2, size, 128), generator=generator)
        return tokens[0], tokens[1]
    inputs = torch.randn(size, *INPUT_SHAPES[name], generator=generator)
    return inputs, torch.randint(CLASSES.get(name, 10), (size,), generator=generator)


def measure_transport(profile: Profile, *, exchanges: int = 40) -> Transport:
    """Measure exchanges of a real parameter server and two workers on this machine, and fit the transport to them.

    They use TLS, as servers and workers on different hosts do. Workers compute on the profile's device.

    Args:
        profile: Codec times and slowdown of this machine, by which the rest of an exchange is explained.
        exchanges: Number of exchanges of each of ``transport_tasks.TASKS``.
    """
    from laconic.cluster.certificates import new_job

    script = Path(transport_tasks.__file__).resolve()
    job = Job(workers=TRANSPORT_WORKERS, push="none", pull="none", returns="gradients", checkpoint_every=100_000)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            Path(folder) / task.__name__: Config(
                model=task.__name__, data="random", script=f"{script}:{task.__name__}", batch=transport_tasks.BATCH,
                iterations=WARM_UP + exchanges, method="", holdout=0.0, job=job,
            )
            for task in transport_tasks.TASKS
        }  # fmt: skip
        certs = Path(folder) / "certs"
        new_job(certs, name="calibration", hosts=["127.0.0.1"], workers=TRANSPORT_WORKERS, days=1)
        summaries = launch(runs, certs=certs, device=profile.device)
        measured = [
            _exchange(profile, config, _seconds(run_dir), summary)
            for (run_dir, config), summary in zip(runs.items(), summaries, strict=True)
        ]
    return fit_transport(measured)


def measure_ranks(device: str, *, turns: int = 40) -> dict[str, Transport]:
    """Return the times of exchanges of two ranks on this machine, by reduction: see ``laconic.collective.timing``.

    On a GPU they use NCCL, which needs a GPU for each rank: with one there is one rank, which exchanges with itself.
    """
    ranks = rank_count(device)
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        options = {"ranks": ranks, "store": str(Path(folder) / "store"), "turns": turns, "device": device}
        command = [sys.executable, "-m", "laconic.collective.timing"]
        processes = [
            subprocess.Popen([*command, json.dumps({"rank": rank, **options})], stdout=subprocess.PIPE, text=True,
                             env=environment)
            for rank in range(ranks)
        ]  # fmt: skip
        reason = "their error is above"
        try:
            out, _ = processes[0].communicate(timeout=RANKS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            out, reason = "", f"they took longer than {RANKS_TIMEOUT_S:g} s"
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    if not out:
        raise LaconicError(f"the exchanges of ranks could not be measured: {reason}")
    return {way: Transport(**times) for way, times in json.loads(out).items()}


def _seconds(run_dir: Path) -> float:
    """Return the seconds of an iteration: the lower quartile, because other processes only ever add to it."""
    track = next(record for record in read(run_dir / RECORDS) if record.kind == "train.track")
    times: list[float] = [after - before for before, after in pairwise(track.values["seconds"][WARM_UP - 1 :])]
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def _exchange(profile: Profile, config: Config, seconds: float, summary: Mapping[str, Any]) -> Exchange:
    slots = tuple((x.numel(), x.dim()) for x in trainable(config.task().model).values())
    workload = Workload(slots)
    request = PlanRequest(
        replace(profile, transport=Transport(0.0, 0.0, 0.0)), workload, summary["compute_s"] / config.iterations,
        workers=TRANSPORT_WORKERS, rate=1e15, codecs=["none"],
    )  # fmt: skip
    explained = recommend(request, break_even=False).rows[0].step.total_s
    return Exchange(len(slots), 2 * TRANSPORT_WORKERS * 4.0 * workload.numel, seconds, explained)
