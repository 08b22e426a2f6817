"""Cost of compression: h of a step for every scheme and rho, and the times of encoding and decoding."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from laconic.aggregate.homomorphic import Contributor
from laconic.errors import ConfigError
from laconic.layers import LayerPolicy, compress, layout, timings
from laconic.layers.step_time import MAX_VARIATION
from laconic.records import Record
from laconic.train.models import build_model
from laconic_lab.bench.layers import ALL, FC, SHAPES
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.homomorphic.experiments import BITS, RHOS, SCHEMES, settings_of
from laconic_lab.studies.homomorphic.settings import scheme_text
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Counter, Progress, fast_products, single_thread

__all__ = ["CODEC_KIND", "STEP_KIND", "measure_all"]

STEP_KIND, CODEC_KIND = "homomorphic.step", "homomorphic.codec"

WIDE = "linear 4096-4096"
BATCHES = {WIDE: 64, "mlp": 128, "lenet5": 128, "vgg11": 128, "vgg11fc": 128, "alexnet": 16}
GPU_BATCHES = {**BATCHES, WIDE: 256, "alexnet": 256}
"""On a GPU AlexNet has the paper's batch: 16 images would leave it idle."""

CODED = 1 << 22
"""Number of values in the timing of a codec."""
TURNS = 7
BUDGET_S = 20.0


class Case(NamedTuple):
    """A model or layer, its scheme, and rules for layers with another scheme."""

    name: str
    scheme: str
    rules: tuple[tuple[str, str], ...] = ()

    @property
    def policy(self) -> LayerPolicy | dict[str, str] | None:
        return ALL if self.name == WIDE else dict(self.rules)

    def build(self) -> tuple[nn.Module, tuple[int, ...]]:
        if self.name == WIDE:
            return nn.Linear(4096, 4096), (4096,)
        return build_model(self.name, seed=0), SHAPES[self.name]


def cases(models: Sequence[str] | None = None) -> Iterator[Case]:
    """Yield the schemes of the given models and layers, by default of all."""
    for model in models or ():
        if model not in BATCHES:
            raise ConfigError(f"speed has no model or layer {model!r}: expected one of {', '.join(BATCHES)}")
    yield from (case for case in _all_cases() if models is None or case.name in models)


def _all_cases() -> Iterator[Case]:
    for name in BATCHES:
        if name == "vgg11fc":
            yield from (Case(name, one.layers) for one in settings_of("layers", [name]) if one.layers)
            continue
        for scheme in SCHEMES:
            if (name, scheme) == ("vgg11", "monarch"):
                continue  # all of its layers are convolutions, for which monarch equals lowrank
            yield from (Case(name, f"{scheme}:{rho:g}") for rho in RHOS)
    yield Case("alexnet", FC)
    yield from (Case(one.model, one.layers, one.rules) for one in settings_of("products", ["vgg11"]) if one.layers)


def measure_all(
    device: torch.device, finished: RecordLog, progress: Progress | None, models: Sequence[str] | None = None,
    deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Time the steps of all cases and the codecs on one device, with one thread, and return the Records.

    With ``models``, only their cases are timed, and no codecs. On a GPU products are in TF32, as in the trainings.
    """
    codecs = () if models else tuple(f"ef|{codec}:{bits}" for codec in ("thc", "shared") for bits in BITS)
    wanted: list[Case | str] = [*cases(models), *codecs]
    # On a GPU a step is one CUDA graph; earlier Records launched it kernel by kernel.
    launch = ["graph"] if device.type == "cuda" else []
    keys = {json.dumps(["speed", device.type, one, *launch]): one for one in wanted}
    counter = Counter("speed", len(keys), progress)
    with single_thread(), fast_products(device):
        for key, work in keys.items():
            if key not in finished:
                if deadline is not None:
                    deadline.check()
                measured = _step(work, device) if isinstance(work, Case) else _codec(work, device)
                known = {"key": key, "part": "speed", "device": device.type}
                kind = STEP_KIND if isinstance(work, Case) else CODEC_KIND
                finished.add(Record(kind, known | measured, seed=0))
            counter.add(1)
    return [finished.records[key] for key in keys]


def _step(case: Case, device: torch.device) -> dict[str, Any]:
    model, shape = case.build()
    small = compress(model, case.scheme, policy=case.policy, init="fresh", seed=0)
    batch = (BATCHES if device.type == "cpu" else GPU_BATCHES)[case.name]
    inputs = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    taken = timings(
        model.to(device), small.to(device), inputs, repeat=TURNS, budget_s=BUDGET_S, graph=device.type == "cuda"
    )
    values = {
        "case": case.name, "scheme": scheme_text(case.scheme, case.rules), "batch": batch, **layout(small).values(),
        **taken.values(),
    }  # fmt: skip
    return values if taken.variation <= MAX_VARIATION else values | {"h": None}


def _codec(spec: str, device: torch.device) -> dict[str, Any]:
    """Time one of four workers: probe and encode, then decode."""
    x = torch.randn(CODED, generator=torch.Generator().manual_seed(0)).to(device)
    member, out = Contributor(spec, workers=4), torch.empty_like(x)
    now = _clock(device)
    encoding, decoding, error = [], [], 0.0
    for turn in range(TURNS + 1):
        began = now()
        agreed = member.probe("x", x)
        packet = member.packet("x", agreed)
        encoded = now()
        member.chain.decode(packet, out=out)
        ended = now()
        if not turn:  # later turns also send the residual of this one
            error = float((out - x).norm() / x.norm())
            continue
        encoding.append(encoded - began)
        decoding.append(ended - encoded)
    return {
        "codec": spec, "values": CODED, "encode_s": statistics.median(encoding),
        "decode_s": statistics.median(decoding), "error": error,
    }  # fmt: skip


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.thread_time

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
