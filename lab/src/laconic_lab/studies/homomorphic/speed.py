"""What compression costs a step: h of every scheme and rho, and what it takes to encode and decode."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from laconic.aggregate.homomorphic import Contributor
from laconic.layers import LayerPolicy, compress, layout, timings
from laconic.layers.step_time import MAX_VARIATION
from laconic.records import Record
from laconic.train.models import build_model
from laconic_lab.bench.layers import ALL, FC, SHAPES
from laconic_lab.studies.homomorphic.experiments import BITS, RHOS, SCHEMES, settings_of
from laconic_lab.studies.homomorphic.settings import scheme_text
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Counter, Progress

__all__ = ["CODEC_KIND", "STEP_KIND", "measure_all"]

STEP_KIND, CODEC_KIND = "homomorphic.step", "homomorphic.codec"

WIDE = "linear 4096-4096"
BATCHES = {WIDE: 64, "mlp": 128, "lenet5": 128, "vgg11": 128, "alexnet": 16}
GPU_BATCHES = {**BATCHES, WIDE: 256, "alexnet": 256}
"""On a GPU the paper's batch for AlexNet: with 16 images it would be waiting."""

CODED = 1 << 22
"""Values that a codec is timed with."""
TURNS = 7
BUDGET_S = 20.0


class Case(NamedTuple):
    """A model or layer, its scheme, and layers that have another."""

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


def cases() -> Iterator[Case]:
    for name in BATCHES:
        for scheme in SCHEMES:
            if (name, scheme) == ("vgg11", "monarch"):
                continue  # all of its layers are convolutions, where monarch is lowrank
            yield from (Case(name, f"{scheme}:{rho:g}") for rho in RHOS)
    yield Case("alexnet", FC)
    yield from (Case(one.model, one.layers, one.rules) for one in settings_of("products", ["vgg11"]) if one.layers)


def measure_all(device: torch.device, finished: RecordLog, progress: Progress | None) -> list[Record]:
    """Steps of all cases, and rounds of all codecs, on one device; on a CPU with one thread."""
    wanted: list[Case | str] = [*cases(), *(f"ef|{codec}:{bits}" for codec in ("thc", "shared") for bits in BITS)]
    keys = {json.dumps(["speed", device.type, one]): one for one in wanted}
    counter = Counter("speed", len(keys), progress)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for key, one in keys.items():
            if key not in finished:
                measured = _step(one, device) if isinstance(one, Case) else _codec(one, device)
                known = {"key": key, "part": "speed", "device": device.type}
                kind = STEP_KIND if isinstance(one, Case) else CODEC_KIND
                finished.add(Record(kind, known | measured, seed=0))
            counter.add(1)
    finally:
        torch.set_num_threads(before)
    return [finished.records[key] for key in keys]


def _step(case: Case, device: torch.device) -> dict[str, Any]:
    model, shape = case.build()
    small = compress(model, case.scheme, policy=case.policy, init="fresh", seed=0)
    batch = (BATCHES if device.type == "cpu" else GPU_BATCHES)[case.name]
    inputs = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    taken = timings(model.to(device), small.to(device), inputs, repeat=TURNS, budget_s=BUDGET_S)
    values = {
        "case": case.name,
        "scheme": scheme_text(case.scheme, case.rules),
        "batch": batch,
        **layout(small).values(),
        **taken.values(),
    }
    return values if taken.variation <= MAX_VARIATION else values | {"h": None}


def _codec(spec: str, device: torch.device) -> dict[str, Any]:
    """A worker's part of a round among four: probe and encode, then decode what came back."""
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
        if not turn:  # later ones send what this one leaves out
            error = float((out - x).norm() / x.norm())
            continue
        encoding.append(encoded - began)
        decoding.append(ended - encoded)
    return {
        "codec": spec,
        "values": CODED,
        "encode_s": statistics.median(encoding),
        "decode_s": statistics.median(decoding),
        "error": error,
    }


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.thread_time

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
