"""The fields that the lab's sections of a report need, by kind of Record.

A Record that lacks one of them is named on the page instead of drawn.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from laconic.records import NOT_EMPTY, POSITIVE

__all__ = ["SCHEMAS"]

Count = Annotated[int, POSITIVE]
Series = Annotated[list[float], NOT_EMPTY]


class StudyClaim(TypedDict):
    study: str
    key: str
    claim: str
    section: str
    relation: str
    claimed: float
    measured: float | None
    verdict: str


class KothariRun(TypedDict):
    accuracy: Series
    iterations: Count
    mode: str
    model: str
    name: str
    part: str
    pull_bytes: list[float]
    push_bytes: list[float]
    seed: int
    workers: int


class KothariTime(TypedDict):
    apply_s: float
    communication_s: float
    compute_s: float
    iterations: Count
    link: str
    method: str
    model: str
    total_s: float
    valid: bool


class _OlandCurves(TypedDict, total=False):
    accuracy_by_epoch: list[float]
    coded_bits_by_epoch: list[float]
    raw_bits_by_epoch: list[float]


class OlandRun(_OlandCurves):
    codec: str
    coded_bits: Series
    coded_bits_by_layer: list[float]
    data: str
    l1: float
    lr: float
    part: str
    peak: Series
    raw_bits: Series
    runs: Count


class JangRun(TypedDict):
    codec: str
    engine: str
    measured_s: Annotated[float, POSITIVE]
    predicted_s: float
    rate: str
    workers: int


class JangTable1(TypedDict):
    compress_s: float
    compressed_nbytes: Count
    decompress_s: float
    nbytes: int
    way: str
    what: str


class JangKernels(TypedDict):
    device: str
    groups: dict[str, float]


class HomomorphicRun(TypedDict):
    accuracy: Series
    codec: str
    layers: str | None
    model: str
    part: str
    rho: float
    seed: int
    workers: int


class LayerStep(TypedDict):
    case: str
    device: str
    h: float | None
    rho: float
    scheme: str


class FailedBenchmark(TypedDict):
    failed: str


class DdpStep(TypedDict):
    exposed_s: float
    failed: None
    rate: str
    relative_squared_error: float | None
    sent_nbytes_per_step: float | None
    step_s: float
    step_speed_up: float | None
    way: str


class DdpTraining(TypedDict):
    curve: list[list[float]]
    failed: None
    model: str
    ranks: int
    rate: str
    sent_nbytes_per_step: float | None
    way: str


class ClusterRound(TypedDict):
    method: str
    rate: str
    received_nbytes_per_round: float
    round_s: float
    sent_nbytes_per_round: float
    speed_up: float | None
    workers: int


class ClusterLoad(TypedDict):
    clients: int
    rss_over_time: list[list[float]]


class CodecBenchmark(TypedDict):
    bits_per_value: float
    decode_x_memcpy: float
    encode_x_memcpy: float
    relative_squared_error: float | None
    spec: str


class FaultScene(TypedDict):
    broken: str | None
    fault: str
    mode: str
    seconds: float


SCHEMAS: dict[str, Any] = {
    "study.claim": StudyClaim,
    "kothari2021.run": KothariRun,
    "kothari2021.time": KothariTime,
    "study.oland2015": OlandRun,
    "jang2017.run": JangRun,
    "jang2017.table1": JangTable1,
    "jang2017.kernels": JangKernels,
    "homomorphic.run": HomomorphicRun,
    "homomorphic.step": LayerStep,
    "bench.layers": LayerStep,
    "bench.ddp": DdpStep | FailedBenchmark,
    "bench.ddp.train": DdpTraining | FailedBenchmark,
    "cluster.round": ClusterRound,
    "cluster.load": ClusterLoad,
    "bench.codec": CodecBenchmark,
    "faults.scene": FaultScene,
}
