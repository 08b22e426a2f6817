"""The settings of each experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from laconic.errors import ConfigError
from laconic.train.methods import METHODS, method_options
from laconic_lab.studies.kothari2021.settings import HYPER, Setting, setting_of

__all__ = ["EXPERIMENTS", "METHOD_NAMES", "MODES", "OURS", "PAPER", "SEEDS", "seeds_of", "settings_of"]

EXPERIMENTS = (
    "accuracy", "readings", "sizes", "rates", "ingredients", "frontier", "adaptive", "workers", "resnet50", "times",
    "whole", "unequal",
)  # fmt: skip

PAPER = ("1", "2", "2w", "3", "4", "5", "6")
OURS = ("laconic", "laconic-min", "adaptive")
METHOD_NAMES = (*PAPER, *OURS)

SEEDS = (0, 1, 2)

WORKER_COUNTS = (4, 8)
MODES = ("sync", "async", "bounded:4")


def seeds_of(experiment: str, setting: Setting, seeds: Sequence[int] | None) -> Sequence[int]:
    return seeds if seeds is not None else SEEDS if experiment in ("accuracy", "adaptive") else SEEDS[:1]


def settings_of(
    experiment: str, models: Sequence[str], methods: Sequence[str] | None, data: str | None
) -> Iterator[Setting]:
    """The settings of a part."""
    for model in models:
        if model not in HYPER:
            raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
    for method in methods or ():
        if method not in METHODS:
            raise ConfigError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
        if METHODS[method][1].get("returns") == "sum":
            raise ConfigError(f"method {method!r} is no method of this study: packets are summed without decoding")
    if experiment == "resnet50":
        yield from (
            replace(setting_of("vgg11", method), model="resnet50", data="random") for method in methods or METHOD_NAMES
        )
        return
    if experiment == "sizes":
        yield from (replace(one, data="random") for one in swept("vgg11fc"))
        return
    for model in models:
        if experiment in ("accuracy", "times"):
            yield from (setting_of(model, method, data=data) for method in methods or METHOD_NAMES)
        elif experiment in ("readings", "rates", "adaptive"):
            generate = {"readings": readings, "rates": rates, "adaptive": adaptive}[experiment]
            yield from (one for one in generate(model, data) if not methods or one.name.split(",")[0] in methods)
        elif experiment == "ingredients":
            yield from ingredients(model, data)
        elif experiment == "frontier":
            yield from frontier(model, data)
        elif experiment == "workers":
            yield from workers(methods, data)
            return
        else:
            raise ConfigError(f"unknown experiment {experiment!r}: expected one of {', '.join(EXPERIMENTS)}")


NORM_BITS = (4, 8)
SWEPT_BITS, SWEPT_KEEPS = (2, 4, 8), (0.01, 0.03, 0.1)


def readings(model: str, data: str | None) -> Iterator[Setting]:
    """Yield readings of what the paper leaves open: the norm of QSGD, its bits, the share of Top-k, and method 6.

    The paper's formula has one norm for each layer. It states neither s nor k. Its method 6 replaces all weights by
    those of the best worker, which is taken literally here; in ``accuracy`` the best worker's change is sent instead.
    """

    def by(method: str, name: str, codec: str, pull: bool = True) -> Setting:
        return setting_of(model, method, name=f"{method}, {name}", data=data, push=codec, pull=codec if pull else None)

    for bits in NORM_BITS:
        layer = f"qsgd:{bits},bucket=0,norm=l2"
        yield by("2", f"{bits} bits, a norm per layer", layer, pull=False)
        yield by("2w", f"{bits} bits, a norm per layer", layer)
        yield by("4", f"{bits} bits, a norm per layer", layer)
        yield by("5", f"1 %, {bits} bits, a norm per layer", f"topk:0.01|{layer}")
    yield by("2w", "4 bits, norms of 512", "qsgd:4,norm=l2")
    for bits in SWEPT_BITS:
        yield by("4", f"{bits} bits, norms of 512", f"qsgd:{bits},norm=l2")
        for keep in SWEPT_KEEPS:
            yield by("5", f"{100 * keep:g} %, {bits} bits, norms of 512", f"topk:{keep:g}|qsgd:{bits},norm=l2")
    yield setting_of(
        model, "6", name="6, the best worker's weights in float32", data=data, push=None, pull=None, sends="weights",
        returns="weights",
    )  # fmt: skip


def swept(model: str) -> Iterator[Setting]:
    """Yield methods 1, 4 and 6 with all swept shares of Top-k and bits, for their bytes; method 5's frames are 6's."""
    yield setting_of(model, "1", name="1")
    for bits in SWEPT_BITS:
        quantizer = f"qsgd:{bits},bucket=0,norm=l2"
        yield setting_of(model, "4", name=f"4, {bits} bits", push=quantizer, pull=quantizer)
        for keep in SWEPT_KEEPS:
            codec = f"topk:{keep:g}|{quantizer}"
            yield setting_of(model, "6", name=f"6, {100 * keep:g} %, {bits} bits", push=codec, pull=codec)
    yield setting_of(
        model, "6", name="6, the best worker's weights in float32", push=None, pull=None, sends="weights",
        returns="weights",
    )  # fmt: skip


RATE_FACTORS = (0.4, 1.0, 1.6, 2.5)
TUNED = ("1", "2", "4", "5", "6", "laconic", "laconic-min")


def rates(model: str, data: str | None) -> Iterator[Setting]:
    """Yield the paper's methods and ours at the same learning rates, so that each can have its best one."""
    for method in TUNED:
        for factor in RATE_FACTORS:
            lr = round(factor * HYPER[model].lr, 6)
            yield setting_of(model, method, name=f"{method}, rate {lr:g}", data=data, lr=lr)


ENTROPY_CODED = "adaptive:5.0,zero=true|huffman"


def adaptive(model: str, data: str | None) -> Iterator[Setting]:
    """Yield settings with either the codec or the local steps of ``adaptive``, and with its codec after Top-k."""

    def weights(name: str, codec: str | None) -> Setting:
        return setting_of(model, "adaptive", name=f"adaptive, {name}", data=data, push=codec, pull=codec)

    yield weights("weights every 20 iterations in float32", None)
    yield weights("weights every 20 iterations by the paper's rule", "adaptive:5.0|huffman")
    yield weights("weights every 20 iterations, zero is a level", ENTROPY_CODED)
    for values, codec in (("float32", None), ("4 bits", "qsgd:4"), ("levels by entropy", ENTROPY_CODED)):
        both = "|".join(["ef", "topk:0.01", *([codec] if codec else [])])
        yield setting_of(model, "5", name=f"5, 1 % with error feedback, {values}", data=data, push=both, pull=both)


FOUR_BITS = "qsgd:4,round=nearest"


def ingredients(model: str, data: str | None) -> Iterator[Setting]:
    """Yield ``laconic-min`` with one ingredient changed at a time."""
    base = setting_of(model, "laconic-min", data=data).options
    push, small = base["push"], base["push_small"]

    def changed(name: str, **options: object) -> Setting:
        return setting_of(model, "laconic-min", name=name, data=data, **options)

    def both(channel: str, small: str = small) -> dict[str, object]:
        return {"push": channel, "pull": channel, "push_small": small, "pull_small": small}

    yield changed("without error feedback", **both(_without_feedback(push), _without_feedback(small)))
    yield changed("without error feedback at the server", pull=_without_feedback(push))
    yield changed("4 bits a value", **both(_with_values(push, FOUR_BITS)))
    yield changed("4 bits a value, entropy-coded", **both(_with_values(push, f"{FOUR_BITS}|rans:auto")))
    yield changed("small tensors in float32", **both(push, "none"))
    yield changed("an epoch of warm-up at 20 %", warm=[[1, _with_keep(push, 0.2), _with_keep(push, 0.2)]])
    yield setting_of(
        model, "3", name="every iteration, without momentum correction", data=data,
        push="ef|topk:0.0012|sign", pull="ef|topk:0.0024|sign", push_small=small, pull_small=small,
    )  # fmt: skip
    yield each_iteration(model, data, "every iteration, with momentum correction", 0.0012, 0.0024, FOUR_BIT_SMALL)


def _without_feedback(spec: str) -> str:
    """Return the codec without error feedback."""
    return spec.removeprefix("ef|")


def _with_values(spec: str, values: str) -> str:
    """Return the codec with another value stage."""
    memory, selector, _ = spec.split("|", 2)
    return f"{memory}|{selector}|{values}"


def _with_keep(spec: str, keep: float) -> str:
    return "|".join(f"topk:{keep:g}" if stage.startswith("topk:") else stage for stage in spec.split("|"))


SIXTEEN_BIT_SMALL = {"push_small": "momentum:0.9|bf16", "pull_small": "ef|bf16"}
FOUR_BIT_SMALL = {"push_small": "momentum:0.9|qsgd:4,round=nearest", "pull_small": "ef|qsgd:4,round=nearest"}


def each_iteration(
    model: str, data: str | None, name: str, push: float, pull: float, small: dict[str, str], *warm: float
) -> Setting:
    """Return signs of the largest entries after every iteration, with momentum correction (Lin et al. 2018)."""
    channels = {"push": f"momentum:0.9|topk:{push:g}|sign", "pull": f"ef|topk:{pull:g}|sign"}
    first = [[1, _with_keep(channels["push"], keep), _with_keep(channels["pull"], keep)] for keep in warm]
    options: dict[str, object] = {**channels, **small, "momentum": 0.0, **({"warm": first} if warm else {})}
    return setting_of(model, "3", name=name, data=data, **options)


def frontier(model: str, data: str | None) -> Iterator[Setting]:
    """Yield settings with fewer entries, fewer exchanges, both and neither."""

    def changes(every: int, keep: float | None, **options: object) -> Setting:
        rate = f", rate {options['lr']}" if "lr" in options else ""
        values = "uncompressed" if keep is None else "signs of all" if keep == 1 else f"signs of {100 * keep:g} %"
        channel = "none" if keep is None else "ef|sign" if keep == 1 else f"ef|topk:{keep:g}|sign"
        small = "none" if keep is None else "ef|bf16"
        first = ", an epoch of 20 % first" if "warm" in options else ""
        name = f"changes of {every} iterations, {values}{rate}{first}"
        return setting_of(
            model, "6", name=name, data=data, after="mean", every=every,
            push=channel, pull=channel, push_small=small, pull_small=small, **options,
        )  # fmt: skip

    for every, keep in ((4, None), (8, None), (2, 0.03), (4, 0.06), (8, 0.04), (10, 0.04), (10, 1), (20, 0.1)):
        yield changes(every, keep)
    higher = round(1.6 * HYPER[model].lr, 6)
    for every, keep in ((2, 0.03), (8, 0.032), (16, 0.03), (20, 0.04)):
        yield changes(every, keep, lr=higher)
    first = [[1, "ef|topk:0.2|sign", "ef|topk:0.2|sign"]]
    for every in (10, 20):  # goals of 1/1,000 and 1/2,000: the first epoch costs a tenth of all bytes
        yield changes(every, 0.036, lr=higher, warm=first)
    yield setting_of(model, "1", name=f"method 1, rate {higher}", data=data, lr=higher)
    compressions = ((0.005, 0.01, SIXTEEN_BIT_SMALL), (0.0012, 0.0024, FOUR_BIT_SMALL))
    for push, pull, small in compressions:
        name = f"every iteration, signs of {100 * push:g} and {100 * pull:g} %"
        yield each_iteration(model, data, name, push, pull, small)
        yield each_iteration(model, data, f"{name}, two epochs of 5 and 1.25 % first", push, pull, small, 0.05, 0.0125)


def workers(methods: Sequence[str] | None, data: str | None) -> Iterator[Setting]:
    """Yield methods with four and eight workers in all modes.

    Without rounds the server replies with the change of the weights. Methods 6 and adaptive need rounds: they take the
    best of all workers, or the mean of their weights.
    """

    def changed(method: str, count: int, mode: str, **changes: Any) -> Setting:
        return setting_of("lenet5", method, data=data or "digits", workers=count, mode=mode, batch=32, **changes)

    for method in methods or METHOD_NAMES:
        for count in WORKER_COUNTS:
            for mode in MODES:
                options = setting_of("lenet5", method).options
                needs_rounds = options.get("after") == "best" or options.get("sends") == "weights"
                if mode == "sync" or (options.get("returns") == "weights" and not needs_rounds):
                    yield changed(method, count, mode)
                elif not needs_rounds:
                    pull = method_options(method, mode)["pull"]
                    yield changed(method, count, mode, returns="delta", pull=pull)
                    if count == WORKER_COUNTS[0] and mode == "async" and pull != options.get("pull", "none"):
                        yield changed(method, count, mode, returns="delta", name=f"{method}, changes by the same codec")
