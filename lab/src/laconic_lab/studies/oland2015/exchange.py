"""Exchange after an epoch: the layers of every worker are quantized, and all workers continue from the decoded mean.

``exchange_packets`` encodes real frames and takes their mean, a run at a time. ``exchange_batched`` does the same
arithmetic on all runs at once and computes the frames' sizes from histograms; ``Comparison`` compares some of them with
real frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from laconic import aggregate
from laconic.codecs import codec
from laconic.frames import decode, encode
from laconic.kernels import cpu
from laconic.packet import TensorSpec
from laconic.wire import FramePlan
from laconic_lab.studies.oland2015 import quantizers
from laconic_lab.studies.oland2015.network import Networks
from laconic_lab.studies.oland2015.quantizers import Fitted, Linear
from laconic_lab.studies.oland2015.settings import LAYERS, Quantizer

__all__ = ["Comparison", "Traffic", "Watch", "exchange_batched", "exchange_packets"]

CHUNK = 1 << 26
"""Number of weights quantized at once: their symbols in int64 take twice the memory of the weights."""

FLOAT_BITS = 32
HEADER = 16
"""Bytes of the section with the range and levels of ``adaptive``."""


@dataclass
class Traffic:
    """Cost of one exchange, each [layers, runs].

    ``raw_bits`` is the mean over workers of ``log2(levels)``, ``whole_bits`` that of the next integers, and ``nbytes``
    a worker's frame.
    """

    raw_bits: Tensor
    whole_bits: Tensor
    nbytes: Tensor

    @classmethod
    def empty(cls, runs: int) -> Traffic:
        return cls(*(torch.zeros(len(LAYERS), runs, dtype=torch.float64) for _ in range(3)))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.raw_bits + other.raw_bits, self.whole_bits + other.whole_bits, self.nbytes + other.nbytes)

    def __truediv__(self, count: int) -> Traffic:
        return Traffic(self.raw_bits / count, self.whole_bits / count, self.nbytes / count)


@dataclass
class Watch:
    """Layers of some runs, as the measured worker sent them and as they were decoded."""

    runs: Sequence[int] = ()
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    decoded: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradient: dict[tuple[int, int], Tensor] = field(default_factory=dict)


def families(all_quantizers: Sequence[Quantizer]) -> Iterator[slice]:
    """Yield slices of consecutive runs that can be quantized together."""
    end = 0
    for _, group in groupby(all_quantizers, key=lambda q: q.family):
        begin, end = end, end + len(list(group))
        yield slice(begin, end)


def exchange_batched(
    networks: Networks, all_quantizers: Sequence[Quantizer], *, seed: int, measured: int,
    gradients: Tensor | None = None, watch: Watch | None = None,
) -> Traffic:  # fmt: skip
    """Quantize and average all layers of all runs.

    Args:
        networks: Networks whose weights are replaced.
        seed: Seed of the sampling, common to runs and workers.
        measured: The worker whose bytes are counted.
        gradients: [workers, layers, runs], for ``by=grad``.
        watch: Filled with the layers of its runs.
    """
    traffic, watch = Traffic.empty(networks.runs), watch or Watch()
    for i in range(len(LAYERS)):
        layers = [networks.layer(k, i) for k in range(networks.workers)]
        for runs in families(all_quantizers):
            family, chosen = all_quantizers[runs], [layer[runs] for layer in layers]
            fitted = [
                quantizers.fit(family, x, seed, None if gradients is None else gradients[k, i, runs])
                for k, x in enumerate(chosen)
            ]
            watched = {run: run - runs.start for run in watch.runs if runs.start <= run < runs.stop}
            sent = chosen[measured][list(watched.values())].cpu()
            apart = _apart(fitted[measured], chosen[measured])
            counts, decoded = _average(chosen, fitted, measured, list(watched.values()))
            for j, run in enumerate(watched):
                watch.sent[i, run], watch.decoded[i, run] = sent[j], decoded[j]
                if gradients is not None:
                    watch.gradient[i, run] = gradients[measured, i, run].cpu()
            traffic.raw_bits[i, runs], traffic.whole_bits[i, runs] = _bits(fitted)
            traffic.nbytes[i, runs] = _nbytes(family, i, fitted[measured], counts, apart)
    average_biases(networks)
    return traffic


def _average(
    layers: Sequence[Tensor], fitted: Sequence[Fitted], measured: int, watched: Sequence[int]
) -> tuple[Tensor | None, Tensor]:
    """Replace every layer by the mean of the decoded layers.

    Returns:
        [runs, bins] counts of the measured worker's symbols, and its decoded layers of the watched runs.
    """
    runs, n = layers[0].shape
    share = torch.full((), 1 / len(layers), device=layers[0].device)  # as ``aggregate.mean`` weighs packets
    unit = torch.ones((), dtype=torch.int32, device=layers[0].device)
    sender, watched_values = fitted[measured], []
    counts = unit.new_zeros(sender.table.numel()) if isinstance(sender, Linear) else None
    columns = max(1, CHUNK // runs)
    for begin in range(0, n, columns):
        chunks = [layer[:, begin : begin + columns] for layer in layers]
        mean = torch.zeros(chunks[0].shape, device=share.device)
        for k, chunk in enumerate(chunks):
            values, symbols = fitted[k].decode(chunk)
            if k == measured:
                watched_values.append(values[watched].cpu())
                if counts is not None and symbols is not None:
                    counts.scatter_add_(0, symbols.view(-1), unit.expand(symbols.numel()))
            mean.add_(values * share)
        for chunk in chunks:
            chunk.copy_(mean)
    return None if counts is None else counts.view(runs, -1), torch.cat(watched_values, 1)


def _bits(fitted: Sequence[Fitted]) -> tuple[Tensor, Tensor]:
    per_worker = [worker.levels.log2() for worker in fitted if worker.levels is not None]
    if not per_worker:
        return torch.tensor(FLOAT_BITS), torch.tensor(FLOAT_BITS)
    bits = torch.stack(per_worker)
    return bits.mean(0).cpu(), bits.ceil().mean(0).cpu()


def average_biases(networks: Networks) -> None:
    """Average the biases, which are sent in float32."""
    for per_worker in zip(*(networks.biases(k) for k in range(networks.workers)), strict=True):
        mean = torch.zeros_like(per_worker[0])
        for bias in per_worker:
            mean.add_(bias * (1 / networks.workers))
        for bias in per_worker:
            bias.copy_(mean)


def exchange_packets(
    networks: Networks, all_quantizers: Sequence[Quantizer], *, seed: int, gradients: Tensor | None = None
) -> Traffic:
    """Exchange the weights by real frames, a run at a time; bytes are the mean over all workers."""
    traffic = Traffic.empty(networks.runs)
    for run, quantizer in enumerate(all_quantizers):
        for i, shape in enumerate(LAYERS):
            layers = [networks.layer(k, i)[run] for k in range(networks.workers)]
            rms = [None if gradients is None else gradients[k, i, run] for k in range(networks.workers)]
            frames = [_frame(quantizer, x.reshape(shape), g, seed) for x, g in zip(layers, rms, strict=True)]
            fitted = [
                quantizers.fit([quantizer], x.unsqueeze(0), seed, None if g is None else g.view(1))
                for x, g in zip(layers, rms, strict=True)
            ]
            raw, whole = _bits(fitted)
            traffic.raw_bits[i, run], traffic.whole_bits[i, run] = raw.squeeze(), whole.squeeze()
            traffic.nbytes[i, run] = sum(map(len, frames)) / len(frames)
            mean = aggregate.mean(frames).to(networks.device)
            for x in layers:
                x.copy_(mean.view(-1))
    average_biases(networks)
    return traffic


def _frame(quantizer: Quantizer, x: Tensor, gradient: Tensor | None, seed: int) -> bytes | bytearray:
    # The codec takes the RMS of the gradient; that of one value is the value itself.
    given = gradient.cpu().view(1) if gradient is not None and quantizer.by == "grad" else None
    return encode(x.cpu(), quantizer.spec, seed=seed, gradient=given)


@dataclass
class Comparison:
    """Counts of real frames that were compared with computed ones, and of those that differ in values or in size."""

    packets: int = 0
    other_values: int = 0
    other_sizes: int = 0

    def compare(self, watch: Watch, all_quantizers: Sequence[Quantizer], traffic: Traffic, seed: int) -> None:
        for (i, run), sent in watch.sent.items():
            frame = _frame(all_quantizers[run], sent.reshape(LAYERS[i]), watch.gradient.get((i, run)), seed)
            self.packets += 1
            self.other_values += not torch.equal(decode(frame).view(-1), watch.decoded[i, run].reshape(-1))
            self.other_sizes += int(traffic.nbytes[i, run]) != len(frame)


def _apart(sender: Fitted, x: Tensor) -> list[Tensor] | None:
    """Return for each run the positions of values that are sent apart."""
    if not isinstance(sender, Linear) or sender.limit is None:
        return None
    beyond = x.abs() > sender.limit.unsqueeze(1)
    positions = beyond.nonzero()[:, 1].to(torch.int32).cpu()
    return list(torch.split(positions, beyond.sum(1).tolist()))


def _nbytes(
    family: Sequence[Quantizer], i: int, sender: Fitted, counts: Tensor | None, apart: Sequence[Tensor] | None
) -> Tensor:
    """Return the [runs] bytes of the frames that the measured worker would send."""
    if sender.levels is None or sender.low is None:
        return torch.full((len(family),), _plain_nbytes(family[0], i), dtype=torch.float64)
    coded = [0] * len(family) if counts is None else cpu.huffman_nbytes(counts.cpu().to(torch.int64)).tolist()
    constants, zeros = (sender.levels == 1).tolist(), (sender.low == 0).tolist()
    nbytes = []
    for run, (q, constant, zero) in enumerate(zip(family, constants, zeros, strict=True)):
        beyond = () if apart is None else _apart_nbytes(apart[run], i)
        if constant and not any(beyond):
            nbytes.append(_constant_nbytes(q, i, zero))
        elif counts is None:
            nbytes.append(_plain_nbytes(q, i))
        else:
            # The coded section is the last one, so that its bytes add up without padding.
            nbytes.append(_frame_nbytes(q, i, (HEADER, *beyond, 0)) + (0 if constant else coded[run]))
    return torch.tensor(nbytes, dtype=torch.float64)


def _apart_nbytes(positions: Tensor, i: int) -> tuple[int, int]:
    if not len(positions):
        return 0, 0
    rows, cols = LAYERS[i]
    return cpu.positions_plan(positions, rows * cols).nbytes, 4 * len(positions)


@lru_cache(maxsize=4096)
def _frame_nbytes(quantizer: Quantizer, i: int, sections: tuple[int, ...]) -> int:
    return FramePlan.of(codec(quantizer.spec).text, TensorSpec(LAYERS[i], torch.float32), sections).limit


@lru_cache
def _plain_nbytes(quantizer: Quantizer, i: int) -> int:
    """Return the size of frames that do not depend on the values."""
    rows, cols = LAYERS[i]
    return len(_frame(quantizer, torch.linspace(-1, 1, rows * cols).view(rows, cols), None, 0))


@lru_cache
def _constant_nbytes(quantizer: Quantizer, i: int, zero: bool) -> int:
    return len(_frame(quantizer, torch.full(LAYERS[i], 0.0 if zero else 1.0), torch.ones(()), 0))
