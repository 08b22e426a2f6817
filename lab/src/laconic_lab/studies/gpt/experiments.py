"""The settings of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from laconic_lab.studies.gpt.settings import LOCAL, Setting
from laconic_lab.studies.text_runs import select

__all__ = ["EXPERIMENTS", "SEEDS", "settings_of"]

SEEDS = {"large": (0, 1, 2)}
"""Seeds of an experiment; (0,) where none are given."""
ADAMW_LR, MUON_LR = 2e-3, 1e-3
"""The best of the rates tried in the experiment ``rates``."""
LONG_STEP: dict[str, Any] = {"lr": 0.7 * MUON_LR, "outer_lr": 1.8, "decay": 0.9}
"""Shorter local steps, a longer outer one, and residuals that fade: the best of ``at_equal_bytes`` every 64 steps."""
SHORT_INTERVAL: dict[str, Any] = {**LONG_STEP, "decay": 0.8, "fragments": 8}
"""The best of ``at_equal_bytes`` every 16 steps."""


def adamw(**changes: Any) -> Setting:
    return replace(Setting("AdamW-DDP", lr=ADAMW_LR), **changes)


def muon(**changes: Any) -> Setting:
    return replace(Setting("Muon-DDP", optimizer="muon", lr=MUON_LR), **changes)


def local(method: str, every: int, codec: str, down: str | None = None, **changes: Any) -> Setting:
    """Return Muon with local steps and one codec both ways, unless ``down`` is another one."""
    values = {"optimizer": "muon", "lr": MUON_LR, "every": every, "up": codec, "down": codec if down is None else down}
    return Setting(method, LOCAL, **{**values, **changes})


def streamed(every: int, codec: str = "sign", **changes: Any) -> Setting:
    """Return our recipe: Muon, fragments in turns, a plain mean, error feedback both ways."""
    return local(f"laconic, every {every}, {codec}", every, codec, **{"fragments": 4, **changes})


def baselines() -> Iterator[Setting]:
    """Yield published methods."""
    yield adamw()
    yield muon()
    yield adamw(method="1-bit Adam", exchange="onebit-adam")
    yield adamw(method="PowerSGD, rank 4", exchange="powersgd")
    yield adamw(method="DeMo", exchange="demo", lr=1e-3, weight_decay=0.0)
    yield adamw(method="ef|topk:0.01|sign on gradients", exchange="codec", up="topk:0.01|sign", down="topk:0.01|sign")
    yield _adamw_local("DiLoCo, every 20", 20, outer_lr=0.7, outer_momentum=0.9)
    stream = {"outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 4, "overlap": 2, "merge": "0.5"}
    yield _adamw_local("Streaming DiLoCo, every 20", 20, **stream)
    yield _adamw_local("AdamW, every 20, ef|sign", 20, up="sign", down="sign")
    sparse = "topk:0.015625,chunk=4096|bins:2"
    yield _adamw_local("SparseLoCo, every 20", 20, up=sparse, down=sparse, decay=0.95, gather=True)
    yield local("MuLoCo, every 20", 20, "none", outer_lr=0.7, outer_momentum=0.6)
    yield local("MuLoCo, every 50", 50, "none", outer_lr=0.7, outer_momentum=0.6)


def _adamw_local(method: str, every: int, **changes: Any) -> Setting:
    return adamw(method=method, exchange=LOCAL, every=every, **changes)


def frontier() -> Iterator[Setting]:
    """Yield all methods at 7 M parameters and 8 workers; published ones that use AdamW at half of its rate, too."""
    yield from baselines()
    for setting in baselines():
        if setting.optimizer == "adamw" and setting.exchange in (LOCAL, "onebit-adam"):
            yield replace(setting, lr=0.5 * ADAMW_LR)
    for every in (16, 32, 64, 128):
        yield streamed(every)
    for every, keep in ((20, 0.1), (20, 0.05), (40, 0.1)):
        yield streamed(every, f"topk:{keep},code=rans|sign")
    for keep in (0.0625, 0.03125):
        yield streamed(20, f"topk:{keep},chunk=64,code=rank|sign")
    for keep in (0.046875, 0.015625):  # 3 and 1 of 64 values
        yield streamed(1, f"topk:{keep},chunk=64,code=rank|sign", fragments=1)


def ablations() -> Iterator[Setting]:
    """Yield one change at a time from every 64 steps by signs; then changes that help, together."""
    base = streamed(64)
    yield base
    for changes in (
        {"final": 0.0}, {"pace": "rate"}, {"settle": 3}, {"momentum": 0.98}, {"averaged": 0.1}, {"fragments": 1},
        {"up": "none"}, {"down": "none"}, {"up": "topk:0.1|sign"}, {"down": "topk:0.1|sign"}, {"carry": 1.0},
        {"decay": 0.8}, {"outer_lr": 1.2}, {"outer_lr": 1.5}, {"outer_lr": 1.8},
        {"outer_lr": 0.7, "outer_momentum": 0.6},
        {"outer_lr": 0.7, "outer_momentum": 0.6, "outer_first": True}, {"up": "sign:512", "down": "sign:512"},
    ):  # fmt: skip
        yield replace(base, **changes)
    for merge in ("progress", "0.5"):
        yield streamed(64, overlap=8, merge=merge)
    yield adamw(final=0.0)
    yield muon(final=0.0)
    yield replace(base, final=0.0, pace="rate")
    yield replace(base, final=0.3)
    yield replace(base, final=0.3, outer_lr=1.5)
    yield replace(base, lr=MUON_LR / 2, outer_lr=2.0)
    yield from at_equal_bytes()


def at_equal_bytes() -> Iterator[Setting]:
    """Yield ways to spend about 1/2,000 of the bytes, and then about 1/500, beside signs every 64 or 16 steps."""
    factor: dict[str, Any] = {"outer_lr": 1.5}
    yield streamed(64, pace="late", **factor)
    for every, codec in (
        (37, "topk:0.1,code=rans|sign"), (49, "topk:0.15,code=rans|sign"), (69, "topk:0.25,code=rans|sign"),
        (22, "topk:0.05,code=rans|sign"), (74, "topk:0.015625,code=rans|sign + sign"), (93, "bins:2|rans"),
    ):  # fmt: skip
        yield streamed(every, codec, **factor)
    yield streamed(69, up="sign", down="topk:0.015625,code=rans|sign + sign", **factor)
    yield streamed(64, decay=0.9, **factor)
    yield streamed(64, lr=0.7 * MUON_LR, outer_lr=1.8)
    yield streamed(64, **LONG_STEP)
    yield streamed(64, fragments=12, **LONG_STEP)
    yield streamed(64, fragments=1, **factor)
    for exponent in (0.75, 1.0):
        yield streamed(64, outer_norm=exponent)
    yield streamed(64, outer_norm=0.5, outer_flat=0.5)
    yield streamed(16, outer_lr=1.3)
    yield streamed(16, outer_norm=1.0)
    yield streamed(9, "topk:0.1,code=rans|sign", outer_lr=1.3)
    yield streamed(18, "topk:0.25,code=rans|sign", outer_lr=1.3)
    yield streamed(16, **LONG_STEP)
    yield streamed(16, **{**LONG_STEP, "decay": 0.8})
    yield streamed(16, **{**LONG_STEP, "lr": 0.5 * MUON_LR, "outer_lr": 2.4})
    yield streamed(16, **{**LONG_STEP, "outer_lr": 1.5})
    yield streamed(30, "bins:2|rans", **LONG_STEP)
    yield streamed(18, "topk:0.25,code=rans|sign", **LONG_STEP)
    yield streamed(16, "none", **LONG_STEP)  # what local steps cost without a codec
    yield streamed(16, **SHORT_INTERVAL)
    for changes in (
        {"decay": 0.7}, {"momentum": 0.97}, {"outer_flat": 0.5}, {"outer_lr": 1.3, "outer_momentum": 0.3},
    ):  # fmt: skip
        yield streamed(16, **{**LONG_STEP, "decay": 0.8, **changes})


def workers() -> Iterator[Setting]:
    for count in (1, 2, 4, 8, 16):
        yield streamed(20, workers=count)
        yield streamed(64, workers=count)
    for codec in ("topk:0.1|sign", "sign"):
        for changes in ({}, {"gather": True}):
            yield streamed(20, codec, workers=16, **changes)
    long: tuple[dict[str, Any], ...] = ({}, {"gather": True}, {"down": "topk:0.015625,code=rans|sign + sign"})
    for changes in long:
        yield streamed(20, "sign", workers=16, **LONG_STEP, **changes)


def rates() -> Iterator[Setting]:
    for lr in (5e-4, 1e-3, 2e-3, 4e-3):
        yield adamw(lr=lr)
        yield muon(lr=lr)
        yield streamed(64, lr=lr)


def large() -> Iterator[Setting]:
    """Yield the claims at 30 M parameters, then the same with a plain mean."""
    size: dict[str, Any] = {"size": "30m", "batch": 128, "steps": 3000, "warmup": 150}
    yield adamw(**{**size, "lr": 1e-3})
    yield streamed(65, **LONG_STEP, **size)
    yield streamed(98, workers=4, **LONG_STEP, **size)
    yield muon(**size)
    yield streamed(16, **SHORT_INTERVAL, **size)
    yield streamed(64, workers=16, **LONG_STEP, **size)
    yield streamed(65, outer_lr=1.6, **size)
    yield adamw(**size)
    yield streamed(64, **size)
    yield streamed(96, workers=4, **size)


def confirmation() -> Iterator[Setting]:
    size: dict[str, Any] = {"size": "126m", "batch": 128, "steps": 2000, "warmup": 150}
    yield adamw(lr=1e-3, **size)
    yield streamed(65, **LONG_STEP, **size)


def positions() -> Iterator[Setting]:
    """Yield short trainings whose last changes are coded in many ways: with dense signs, then one of 64 values."""
    yield streamed(64, steps=640)
    yield _adamw_local("AdamW, every 64, sign", 64, up="sign", down="sign", fragments=4, steps=640)
    size: dict[str, Any] = {"fragments": 1, "workers": 4, "batch": 32, "steps": 640}
    sparse = "topk:0.015625|sign"
    yield streamed(20, sparse, **size)
    yield streamed(20, "topk:0.015625,chunk=64,code=rank|sign", **size)
    yield _adamw_local(f"AdamW, every 20, {sparse}", 20, up=sparse, down=sparse, **size)


_SETTINGS: dict[str, Callable[[], Iterator[Setting]]] = {
    "frontier": frontier, "ablations": ablations, "workers": workers, "rates": rates, "large": large,
    "confirmation": confirmation, "positions": positions,
}  # fmt: skip
EXPERIMENTS = tuple(_SETTINGS)


def settings_of(
    experiment: str, sizes: Sequence[str] | None = None, methods: Sequence[str] | None = None
) -> list[Setting]:
    """Return the settings of an experiment, for these sizes and methods with one of these texts in their names."""
    return select(_SETTINGS[experiment](), sizes, methods)
