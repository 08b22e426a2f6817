"""Which settings each experiment trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from laconic.errors import ConfigError
from laconic.studies.kothari2021.settings import HYPER, Setting, setting_of
from laconic.train.methods import METHODS

__all__ = ["METHOD_NAMES", "OURS", "PAPER", "PARTS", "SEEDS", "WORKER_METHODS", "seeds_of", "settings_of"]

PARTS = ("accuracy", "ingredients", "frontier", "workers", "resnet50")

PAPER = ("1", "2", "2w", "3", "4", "5", "6")
OURS = ("laconic", "laconic-min", "adaptive")
METHOD_NAMES = (*PAPER, *OURS)

SEEDS = (0, 1, 2)
THREE = ("1", "5", "laconic", "laconic-min")
"""Methods of three seeds; the others have one."""

WORKER_COUNTS = (4, 8)
MODES = ("sync", "async", "bounded:4")
WORKER_METHODS = ("1", "2", "5", "laconic")


def seeds_of(part: str, setting: Setting, seeds: Sequence[int] | None) -> Sequence[int]:
    if seeds is not None:
        return seeds
    return SEEDS if part == "accuracy" and setting.name in THREE else SEEDS[:1]


def settings_of(part: str, models: Sequence[str], methods: Sequence[str] | None, data: str | None) -> Iterator[Setting]:
    """The settings of a part."""
    for model in models:
        if model not in HYPER:
            raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
    for method in methods or ():
        if method not in METHODS:
            raise ConfigError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
        if METHODS[method][1].get("returns") == "sum":
            raise ConfigError(f"this study decodes what workers push, and nobody does so in method {method!r}")
    if part == "resnet50":
        yield from (
            replace(setting_of("vgg11", method), model="resnet50", data="random") for method in methods or METHOD_NAMES
        )
        return
    for model in models:
        if part == "accuracy":
            yield from (setting_of(model, method, data=data) for method in methods or METHOD_NAMES)
        elif part == "ingredients":
            yield from ingredients(model, data)
        elif part == "frontier":
            yield from frontier(model, data)
        elif part == "workers":
            yield from workers(methods, data)
            return
        else:
            raise ConfigError(f"unknown part {part!r}: expected one of {', '.join(PARTS)}")


FOUR_BITS = "qsgd:4,round=nearest|rans:auto"


def ingredients(model: str, data: str | None) -> Iterator[Setting]:
    """``laconic-min`` with one thing changed at a time."""
    base = setting_of(model, "laconic-min", data=data).options
    push, pull = base["push"], base["pull"]

    def changed(name: str, **options: object) -> Setting:
        return setting_of(model, "laconic-min", name=name, data=data, **options)

    yield changed(
        "without error feedback", momentum=0.9, **{name: _forgetful(base[name]) for name in CHANNELS}
    )  # fmt: skip
    yield changed(
        "without momentum correction", momentum=0.9,
        push=f"ef|{_forgetful(push)}", push_small=f"ef|{_forgetful(base['push_small'])}",
    )  # fmt: skip
    yield changed("4 bits a value", push=_valued(push, FOUR_BITS), pull=_valued(pull, FOUR_BITS))
    plain = FOUR_BITS.removesuffix("|rans:auto")
    yield changed("4 bits, without entropy coding", push=_valued(push, plain), pull=_valued(pull, plain))
    yield changed("small tensors in float32", push_small="momentum:0.9|none", pull_small="none")
    yield changed("small tensors sparse, too", push_small=push, pull_small=pull)
    yield changed("an epoch of warm-up at 1 %", warm=_warm(push, pull, 0.01))
    yield changed("two epochs of warm-up at 5 and 1.25 %", warm=_warm(push, pull, 0.05, 0.0125))


CHANNELS = ("push", "pull", "push_small", "pull_small")


def _forgetful(spec: str) -> str:
    """The codec without its memory."""
    return spec.removeprefix("momentum:0.9|").removeprefix("ef|")


def _valued(spec: str, values: str) -> str:
    """The same entries, their values coded otherwise."""
    memory, selector, _ = spec.split("|", 2)
    return f"{memory}|{selector}|{values}"


def _kept(spec: str, keep: float) -> str:
    return "|".join(f"topk:{keep:g}" if stage.startswith("topk:") else stage for stage in spec.split("|"))


def _warm(push: str, pull: str, *keeps: float) -> list[list[object]]:
    """An epoch each at these shares of entries."""
    return [[1, _kept(push, keep), _kept(pull, keep)] for keep in keeps]


def frontier(model: str, data: str | None) -> Iterator[Setting]:
    """Values of four bits at several shares of entries, fewer entries, and fewer exchanges."""
    sixteen = {"push_small": "momentum:0.9|bf16", "pull_small": "ef|bf16"}
    eight = {"push_small": "momentum:0.9|qsgd:8,round=nearest", "pull_small": "ef|qsgd:8,round=nearest"}
    four = {"push_small": "momentum:0.9|qsgd:4,round=nearest", "pull_small": "ef|qsgd:4,round=nearest"}

    def sparse(name: str, push: float, pull: float, small: dict[str, str], **options: object) -> Setting:
        own = {"push": f"momentum:0.9|topk:{push:g}|{FOUR_BITS}", "pull": f"ef|topk:{pull:g}|{FOUR_BITS}"}
        return setting_of(model, "laconic", name=name, data=data, **own, **small, **options)

    yield sparse("4 bits, keep 0.5 and 0.8 %", 0.005, 0.008, sixteen)
    yield sparse("4 bits, keep 0.3 and 0.5 %", 0.003, 0.005, sixteen)
    yield sparse("4 bits, keep 0.1 and 0.1 %", 0.001, 0.001, eight)
    yield sparse("4 bits, keep 0.1 and 0.2 %", 0.001, 0.002, four)
    push, pull = f"momentum:0.9|topk:0.01|{FOUR_BITS}", f"ef|topk:0.01|{FOUR_BITS}"
    name = "4 bits, keep 0.08 and 0.16 %, an epoch of 1 % first"
    yield sparse(name, 0.0008, 0.0016, four, warm=_warm(push, pull, 0.01))
    base = setting_of(model, "laconic-min", data=data).options
    for share in (0.003, 0.001):
        specs = {"push": _kept(base["push"], share), "pull": _kept(base["pull"], 2 * share)}
        warm = _warm(base["push"], base["pull"], 0.05, 0.0125)
        name = f"signs, keep {100 * share:g} and {200 * share:g} %, two epochs of 5 and 1.25 % first"
        yield setting_of(model, "laconic-min", name=name, data=data, warm=warm, **specs)
    for share in (0.0006, 0.0003):
        specs = {"push": _kept(base["push"], share), "pull": _kept(base["pull"], 2 * share)}
        yield setting_of(
            model, "laconic-min", name=f"signs, keep {100 * share:g} and {200 * share:g} %", data=data, **specs
        )
    for keep in (0.05, 0.02):
        spec = f"ef|topk:{keep:g}|sign"
        yield setting_of(
            model, "6", name=f"mean change of 20 steps, signs, keep {100 * keep:g} %", data=data, after="mean",
            push=spec, pull=spec, push_small="ef|bf16", pull_small="ef|bf16",
        )  # fmt: skip


def workers(methods: Sequence[str] | None, data: str | None) -> Iterator[Setting]:
    """Four and eight workers; where a mode sends no gradients back, the weights' change travels by the same codec."""
    for method in methods or WORKER_METHODS:
        for count in WORKER_COUNTS:
            for mode in MODES:
                base = setting_of("lenet5", method, data=data or "digits", workers=count, mode=mode, batch=32)
                gradients = base.options.get("returns") == "gradients"
                if mode != "sync" and (base.options.get("after") == "best" or base.options.get("every", 1) > 1):
                    continue
                changes = {"returns": "delta"} if mode != "sync" and gradients else {}
                yield setting_of("lenet5", method, data=data or "digits", workers=count, mode=mode, batch=32, **changes)
