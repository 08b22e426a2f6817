"""The fields that the sections about benchmarks need, by kind of Record; studies declare their own.

A Record that lacks one of them is named on the page instead of drawn.
"""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = ["SCHEMAS"]


class StudyClaim(TypedDict):
    study: str
    key: str
    claim: str
    section: str
    relation: str
    claimed: float
    measured: float | None
    how: str
    verdict: str


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


class GptTraining(TypedDict):
    curve: list[list[float]]
    failed: None
    goal_loss: float
    link: str
    loss: float
    method: str
    ranks: int
    sent_nbytes: float
    title: str
    waiting_share: float


class GptLoss(TypedDict):
    curve: list[list[float]]
    failed: None
    method: str
    ranks: int


class FsdpStep(TypedDict):
    link: str
    node_nbytes_per_step: float | None
    nodes: int
    shards: int
    step_s: float
    step_speed_up: float
    title: str
    valid: bool
    way: str


class FsdpLoss(TypedDict):
    curve: list[list[float]]
    loss: float
    nodes: int
    shards: int
    title: str
    way: str


class ClusterRound(TypedDict):
    method: str
    rate: str
    received_nbytes_per_round: float
    round_s: float
    sent_nbytes_per_round: float
    speed_up: float | None
    workers: int


class _ServerMemory(TypedDict, total=False):
    rss_over_time: list[list[float]]


class ClusterLoad(_ServerMemory):
    clients: int


class CodecBenchmark(TypedDict):
    bits_per_value: float
    decode_x_memcpy: float
    encode_x_memcpy: float
    relative_squared_error: float | None
    spec: str


class PeerSpeeds(TypedDict, total=False):
    decode_x_memcpy: float | None
    encode_x_memcpy: float | None


class PeerBenchmark(PeerSpeeds):
    bits_per_value: float
    name: str
    relative_squared_error: float | None


class DeviceCodec(TypedDict):
    bits_per_value: float
    decode_x_copy: float
    encode_x_copy: float
    spec: str


class DeviceStep(TypedDict):
    attached_added_percent: float
    batch: int
    ddp_s: float
    model: str
    spec: str


class FaultScene(TypedDict):
    broken: str | None
    fault: str
    mode: str
    seconds: float


class FaultSoak(TypedDict):
    broken: str | None
    exchanges: int
    faults: int
    seconds: float


class FaultScenarios(TypedDict):
    broken: list[Any]
    count: int
    seconds: float


class FaultKills(TypedDict):
    broken: str | None
    killed: dict[str, int]


class ReplicaKills(TypedDict):
    broken: int
    differing_steps: int
    kills: int
    replicas: int
    seconds: float
    spec: str
    steps: int
    unbalanced_steps: int


class ReplicaStep(TypedDict):
    parameters: int
    spec: str
    step_s: float
    steps: int


SCHEMAS: dict[str, Any] = {
    "study.claim": StudyClaim, "bench.ddp": DdpStep | FailedBenchmark, "bench.ddp.train": DdpTraining | FailedBenchmark,
    "bench.gpt": GptTraining | FailedBenchmark, "bench.gpt.loss": GptLoss | FailedBenchmark,
    "bench.fsdp": FsdpStep, "bench.fsdp.loss": FsdpLoss, "bench.peer": PeerBenchmark,
    "bench.device.codec": DeviceCodec, "bench.device.step": DeviceStep,
    "cluster.round": ClusterRound, "cluster.load": ClusterLoad, "bench.codec": CodecBenchmark,
    "faults.scene": FaultScene, "faults.soak": FaultSoak, "faults.replicas": ReplicaKills,
    "faults.replica_step": ReplicaStep, "faults.scenarios": FaultScenarios, "faults.kills": FaultKills,
}  # fmt: skip
