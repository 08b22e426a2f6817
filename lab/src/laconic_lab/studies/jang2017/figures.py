"""The paper's figures, with its settings and with measured ones; and the planner's word against real runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from laconic.plan import Training
from laconic.plan.jang2017 import ALEXNET, ALEXNET_EPOCHS, GZIP, NODES, WORKERS
from laconic_lab.studies.figures import draw_all
from laconic_lab.studies.jang2017.report import Results

__all__ = ["FIGURES", "draw"]

ALL = list(range(1, NODES + 1))


def draw(results: Results, folder: Path) -> list[Path]:
    """Every figure that the Records suffice for."""

    def painter(name: str) -> Callable[[Any], Any]:
        return lambda plt: FIGURES[name](plt, results)

    return draw_all({name: painter(name) for name in FIGURES if _can(name, results)}, folder)


def _can(name: str, results: Results) -> bool:
    needs = {"kernels": results.kernels, "runs": results.runs}
    return bool(needs.get(name, True))


def _panels(results: Results) -> list[tuple[str, Training]]:
    reader = results.reader()
    found = [("AlexNet, 200 iterations", ALEXNET)]
    return [*found, ("line reader, 20 iterations", reader)] if reader is not None else found


def _figure4(plt: Any, results: Results) -> Any:
    panels = _panels(results)
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3), squeeze=False)
    for ax, (title, training) in zip(axes[0], panels, strict=True):
        updates = [training.vanilla(m) for m in ALL]
        ax.plot(ALL, [one.compute for one in updates], label="T_cmt")
        ax.plot(ALL, [one.transfer for one in updates], label="T_inf")
        if training.crossover < NODES:
            ax.axvline(training.crossover, color="0.7", linestyle=":")
        ax.set(title=title, xlabel="workers", ylabel="seconds an update", yscale="log")
        ax.legend()
    return figure


def _figure5(plt: Any, results: Results) -> Any:
    figure, ax = plt.subplots(figsize=(5, 3))
    updates = [ALEXNET.naive(m, GZIP) for m in ALL]
    bottom = [0.0] * len(ALL)
    for name in ("compute", "transfer", "compress", "decompress"):
        heights = [getattr(one, name) for one in updates]
        ax.bar(ALL, heights, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    ax.plot(ALL, [ALEXNET.vanilla(m).total for m in ALL], color="black", label="vanilla")
    ax.set(title="AlexNet, gzip at every update (table 1's speeds)", xlabel="workers", ylabel="seconds an update")
    ax.legend()
    return figure


def _figure6(plt: Any, results: Results) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    curves = {
        "ideal": [ALEXNET.ideal(m) for m in ALL],
        "vanilla": [ALEXNET.vanilla(m) for m in ALL],
        "rho 0.2, h 1 (paper)": [ALEXNET.homomorphic(m, rho=0.2, h=1) for m in ALL],
        "rho 0.5, h 1 (paper)": [ALEXNET.homomorphic(m, rho=0.5, h=1) for m in ALL],
    }
    for name, updates in curves.items():
        left.plot(ALL, [ALEXNET.speed_up(one) for one in updates], linestyle="--", label=name)
    for one in results.layers:
        updates = [ALEXNET.homomorphic(m, rho=one.rho, h=one.h) for m in ALL]
        left.plot(ALL, [ALEXNET.speed_up(u) for u in updates], label=f"{one.scheme} (measured)")
    left.set(title="speed-up over one node", xlabel="workers")
    left.legend()
    hs = [1 + i / 10 for i in range(11)]
    for rho in (0.2, 0.5):
        right.plot(hs, [ALEXNET.homomorphic(WORKERS, rho=rho, h=h).total for h in hs], label=f"rho {rho}")
    right.axhline(ALEXNET.vanilla(WORKERS).total, color="0.4", linestyle=":", label="vanilla")
    for one in results.layers:
        right.plot(one.h, ALEXNET.homomorphic(WORKERS, rho=one.rho, h=one.h).total, "o", label=one.scheme)
    right.set(title="an update on 16 workers, s", xlabel="h")
    right.legend()
    return figure


def _figure7(plt: Any, results: Results) -> Any:
    figure, ax = plt.subplots(figsize=(5.5, 3.2))
    hours = 3600.0
    curves = {
        "vanilla": [ALEXNET.vanilla(m) for m in ALL],
        "gzip": [ALEXNET.naive(m, GZIP) for m in ALL],
        "h 1.3, rho 0.2 (paper)": [ALEXNET.homomorphic(m, rho=0.2, h=1.3) for m in ALL],
    }
    curves |= {
        f"{one.scheme} (measured)": [ALEXNET.homomorphic(m, rho=one.rho, h=one.h) for m in ALL]
        for one in results.layers
    }
    for name, updates in curves.items():
        ax.plot(ALL, [ALEXNET.total(one, ALEXNET_EPOCHS) / hours for one in updates], label=name)
    ax.set(title="AlexNet, 450,000 iterations", xlabel="workers", ylabel="hours", yscale="log")
    ax.legend()
    return figure


def _kernels(plt: Any, results: Results) -> Any:
    figure, ax = plt.subplots(figsize=(5.5, 1.2 + 0.5 * len(results.kernels)))
    devices = sorted(results.kernels)
    left = [0.0] * len(devices)
    for group in results.kernels[devices[0]]["groups"]:
        shares = [100 * results.kernels[device]["groups"][group] for device in devices]
        ax.barh(devices, shares, left=left, label=group)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    ax.set(title="where a step of AlexNet goes", xlabel="%")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _runs(plt: Any, results: Results) -> Any:
    figure, ax = plt.subplots(figsize=(4.6, 4.2))
    marks = {"none": "o", "fp16": "s", "qsgd:4": "^", "topk:0.01|qsgd:4": "v", "thc:4": "D",
             "adaptive:5.0|huffman": "P"}  # fmt: skip
    for codec in dict.fromkeys(run["codec"] for run in results.runs):
        mine = [run for run in results.runs if run["codec"] == codec]
        ax.scatter([run["measured_s"] for run in mine], [run["predicted_s"] for run in mine], s=22,
                   marker=marks.get(codec, "x"), label=codec)  # fmt: skip
    ends = [min(run["measured_s"] for run in results.runs) / 1.3, max(run["measured_s"] for run in results.runs) * 1.3]
    ax.plot(ends, ends, color="0.5")
    for factor in (0.9, 1.1):
        ax.plot(ends, [factor * one for one in ends], color="0.7", linestyle=":")
    ax.set(xscale="log", yscale="log", xlabel="measured, s an iteration", ylabel="predicted",
           title="the planner's word and real runs (dotted: 10 % off)")  # fmt: skip
    ax.legend()
    return figure


FIGURES: Mapping[str, Callable[[Any, Results], Any]] = {
    "figure4": _figure4,
    "figure5": _figure5,
    "figure6": _figure6,
    "figure7": _figure7,
    "kernels": _kernels,
    "runs": _runs,
}
