"""A run's status in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laconic.tables import printable
from laconic.units import show_bytes
from laconic.watch.status import WorkerStatus
from laconic.watch.view import View

__all__ = ["render", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {
    "computing": "green", "waiting": "cyan", "joining": "yellow", "lost": "bold red", "gone": "red", "done": "dim",
    "expected": "dim", "running": "green", "silent": "bold red", "stopped": "yellow", "failed": "bold red",
    "ended": "bold", "prepared": "yellow", "absent": "yellow",
}  # fmt: skip
PHASE_TEXTS = {
    "absent": "no run in this folder yet", "prepared": "prepared: its server has not started", "running": "running",
    "silent": "no sign of its server", "stopped": "stopped: continue with --resume", "failed": "failed",
    "ended": "ended",
}  # fmt: skip
PART_TEXTS = {
    "compute": "computing", "encode": "encoding", "communication": "waiting", "overlapped": "overlapped",
    "apply": "applying",
}  # fmt: skip
RECENT_FAULTS = 6
MAX_SPAN = 1e300


def render(view: View, *, width: int = 100) -> RenderableType:
    """Return all of a view for rich. Texts of the folder are shown as plain text, without markup or control codes."""
    parts: list[RenderableType] = [_title(view)]
    if view.phase not in ("absent", "prepared"):
        parts += [_progress(view, width), _figures(view, width)]
    if view.workers:
        parts.append(_workers(view))
    parts += _faults(view)
    parts += [Text(printable(note), style="yellow") for note in view.notes]
    if view.failure:
        parts.append(Text(printable(view.failure), style="bold red"))
    if view.summary is not None and view.phase == "ended":
        parts.append(_summary(view))
    return Group(*parts)


def _title(view: View) -> Text:
    config = view.config
    phase = PHASE_TEXTS[view.phase]
    if view.phase == "silent" and view.silent_s is not None:
        phase += f" for {view.silent_s:.0f} s"
    text = Text.assemble((printable(view.run), "bold"), "  ", (phase, COLOURS[view.phase]))
    words = [f"{config[key]}" for key in ("model", "data", "mode") if config.get(key)]
    if config.get("method"):
        words.insert(0, f"method {config['method']}")
    for key in ("push", "pull"):
        if config.get(key) not in (None, "none"):
            words.append(f"{key} {config[key]}")
    return text.append("\n" + printable(", ".join(words)), style="dim") if words else text


def _progress(view: View, width: int) -> Table:
    line = Table.grid(padding=(0, 1, 0, 0))
    left = f"{_seconds(view.left_s)} left" if view.left_s is not None and view.phase == "running" else ""
    bar = ProgressBar(total=max(1, view.iterations), completed=view.iteration, width=max(10, min(40, width - 50)))
    line.add_row(bar, f"{view.iteration:,} of {view.iterations:,}", _seconds(view.elapsed_s), Text(left, style="dim"))
    return line


def _figures(view: View, width: int) -> Padding:
    table = Table.grid(padding=(0, 2, 0, 0))
    losses = [point["loss"] for point in view.points if point["loss"] is not None]
    curve = sparkline(losses, max(10, min(60, width - 40)))
    table.add_row("loss", _number(view.loss), Text(curve, style="green"))
    if view.accuracies:
        last = view.accuracies[-1]
        sample = f"of {last['examples']} test examples, at iteration {last['iteration']:,}"
        table.add_row("accuracy", f"{last['accuracy']:.1f} %", sample)
    speed = f"{show_bytes(view.bytes_per_s)}/s" if view.bytes_per_s is not None else ""
    table.add_row("bytes", speed, f"in {show_bytes(view.received)}, out {show_bytes(view.sent)}")
    if view.raw:
        frames = view.raw - view.saved
        times = f", {view.raw / frames:.3g} times the {show_bytes(frames)} of frames" if frames > 0 < view.saved else ""
        table.add_row("float32", "", f"would have taken {show_bytes(view.raw)}{times}")
    if view.config.get("mode") != "sync":
        text = f"updates: mean {view.missed_mean:.2f}, at most {view.missed_most}"
        table.add_row("staleness", str(view.missed), text)
    if any(view.seconds.values()):
        seconds = ", ".join(f"{PART_TEXTS[part]} {seconds:.1f}" for part, seconds in view.seconds.items())
        table.add_row("seconds", "", f"{seconds}, of all workers")
    return Padding(table, (1, 0, 0, 0))


def _workers(view: View) -> Padding:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    stale = view.config.get("mode") != "sync"
    for name in ("worker", "state", "iteration", "loss", "sent", "received", "starts", "last message"):
        table.add_column(name, justify="left" if name in ("worker", "state") else "right")
    if stale:
        table.add_column("staleness", justify="right")
    for number, worker in enumerate(view.workers):
        cells: list[RenderableType] = [
            str(number), Text(worker.state, style=COLOURS[worker.state]), f"{worker.iteration:,}", _number(worker.loss),
            show_bytes(worker.bytes_sent), show_bytes(worker.bytes_received), str(worker.lives),
            _last_message(view, worker),
        ]  # fmt: skip
        table.add_row(*cells, *([f"{worker.missed} (≤ {worker.missed_most})"] if stale else []))
    return Padding(table, (1, 0, 0, 0))


def _last_message(view: View, worker: WorkerStatus) -> str:
    if worker.heard_at is None:
        return "never"
    return "" if view.over else f"{max(0.0, view.at - worker.heard_at):.0f} s ago"


def _faults(view: View) -> list[RenderableType]:
    if not view.faults:
        return []
    counts = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in sorted(view.faults.items()))
    lines = [Text.assemble("\n", ("faults ", "red"), printable(counts))]
    for fault in view.recent[-RECENT_FAULTS:]:
        age = f"{max(0.0, view.at - fault['at']):.0f} s ago  " if not view.over else ""
        lines.append(Text(f"  {age}{printable(fault['what'])}", style="dim"))
    return list(lines)


def _summary(view: View) -> Text:
    assert view.summary is not None
    words = []
    for key in ("accuracy", "loss", "wire_bytes_per_iteration", "restarts"):
        value = view.summary.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            words.append(f"{key.replace('_', ' ')} {value:.6g}")
    return Text("\n" + ", ".join(words), style="bold") if words else Text()


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values in ``width`` characters; each shows the last value of its part.

    >>> sparkline([4, 3, 2, 1], 4), sparkline([], 4), sparkline([1, 1], 4)
    ('█▆▃▁', '', '▁▁')
    """
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    sampled = [values[min(len(values) - 1, math.ceil((i + 1) * step) - 1)] for i in range(min(width, len(values)))]
    low, high = min(sampled), max(sampled)
    scale = 0.25 if high - low > MAX_SPAN else 1.0  # the difference of two finite numbers may be infinite
    low, span = low * scale, (high * scale - low * scale) or 1.0
    return "".join(BARS[round((value * scale - low) / span * (len(BARS) - 1))] for value in sampled)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
