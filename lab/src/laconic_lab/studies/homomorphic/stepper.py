"""Runs whose gradients are summed while compressed; the layers of the model may be compressed, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Contributor, Sum
from laconic.cluster.homomorphic.server import pack_contribution
from laconic.cluster.homomorphic.worker import scale_frame
from laconic.errors import ConfigError
from laconic.frames import decode, encode
from laconic.kernels.sections import packed_int_count
from laconic.layers import SubspaceLayer, dense_numel, subspaces
from laconic.packet import TensorSpec
from laconic.policy import Policy
from laconic_lab.studies.homomorphic.computed import Round
from laconic_lab.studies.homomorphic.framed import FramedRound
from laconic_lab.studies.homomorphic.settings import Setting
from laconic_lab.studies.stepper import EpochEnd, GraphStepper, Source

__all__ = ["SummedStepper"]


def _is_small(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the server's policy gives a slot the codec of small tensors."""
    return bool(Policy().choose(name, TensorSpec(shape, torch.float32), "none").reason)


class SummedStepper(GraphStepper):
    """Sums the packed integers of all workers after every iteration; all workers take the same step.

    Args:
        samples: Number of exchanges, spread over the run, whose frames are made and compared.
        graph: Whether an iteration becomes a CUDA graph; by default on a GPU.
        computed: Whether sums are computed without frames; by default on a GPU.
    """

    setting: Setting

    def __init__(
        self, setting: Setting, seed: int, epochs: int, source: Source, *, samples: int = 4, graph: bool | None = None,
        computed: bool | None = None,
    ) -> None:  # fmt: skip
        self._computes = source.device.type != "cpu" if computed is None else computed
        if setting.at_renewal not in ("forget", "spend"):
            raise ConfigError(f"at_renewal must be forget or spend, got {setting.at_renewal!r}")
        super().__init__(setting, seed, epochs, source, samples=samples, graph=graph)

    def _order(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return large slots first, so that the slots of each codec are consecutive."""
        return sorted(shapes, key=lambda name: _is_small(name, shapes[name]))

    def _prepare(self) -> None:
        self._subspaces: dict[str, SubspaceLayer] = {
            f"{name}.z" if name else "z": layer for name, layer in subspaces(self.task.model)
        }
        self._spans = {}
        begin = 0
        for name, shape in self.slots.items():
            self._spans[name] = (begin, begin + torch.Size(shape).numel())
            begin = self._spans[name][1]
        self.dense_numel = dense_numel(self.task.model)
        self.renewals = 0
        self.rounds: list[Round | FramedRound] = []
        if self.setting.codec != "none":
            groups: tuple[dict[str, tuple[int, ...]], ...] = ({}, {})
            for name, shape in self.slots.items():
                groups[_is_small(name, shape)][name] = shape
            specs = (self.setting.codec, self.setting.small)
            self.rounds = [self._round(slots, spec) for slots, spec in zip(groups, specs, strict=True) if slots]
        self.push_nbytes, self.pull_nbytes = self._message_nbytes()

    def _round(self, slots: Mapping[str, tuple[int, ...]], spec: str) -> Round | FramedRound:
        if self._computes:
            return Round(slots, spec, self.job.workers, self.device, carry=self.setting.carry)
        return FramedRound(slots, spec, self.job.workers, carry=self.setting.carry)

    def summary(self) -> dict[str, Any]:
        dense = 4 * self.dense_numel
        return {
            "numel_dense": self.dense_numel, "numel": self.weights.numel(), "push_nbytes": self.push_nbytes,
            "pull_nbytes": self.pull_nbytes, "rho_layers": self.weights.numel() / self.dense_numel,
            "rho": self.push_nbytes / dense, "rho_pull": self.pull_nbytes / dense, "renewals": self.renewals,
        }  # fmt: skip

    def _iterate(self) -> None:
        rate = self._rate()
        self._gradients, _ = self._by_worker(lambda worker, flat: None)
        stacked = torch.stack(self._gradients)
        if self.rounds:
            begin, means = 0, []
            for group in self.rounds:
                means.append(group.mean(stacked[:, begin : begin + group.numel]))
                begin += group.numel
            self._mean = torch.cat(means)
        else:
            self._mean = stacked.mean(0)
        self._descend(self.weights, self.velocity, self._mean, rate)
        self._decay_origins(rate)
        self._iteration.add_(1)
        self._in_epoch.add_(1)

    @torch.no_grad()
    def _decay_origins(self, rate: Tensor) -> None:
        """Apply weight decay to the origins of subspaces, as the optimizer applies it to their coordinates."""
        if self.job.weight_decay and self._subspaces:
            kept = 1 - rate * (self.job.weight_decay / (1 - self.job.momentum))
            for layer in self._subspaces.values():
                layer.origin.mul_(kept)

    def _after_step(self) -> None:
        steps = self.done * self.per_epoch + self._count
        for name, layer in self._subspaces.items():
            if layer.every and steps % layer.every == 0:
                self._renew(name, layer, steps)

    @torch.no_grad()
    def _renew(self, name: str, layer: SubspaceLayer, steps: int) -> None:
        begin, end = self._spans[name]
        velocity = self.velocity[begin:end]
        if self.setting.at_renewal == "spend" and self.job.momentum:
            rate = self.schedule(min(steps, self.iterations - 1))
            self.weights[begin:end].sub_(velocity, alpha=rate * self.job.momentum / (1 - self.job.momentum))
        velocity.zero_()
        layer.advance(layer.every)
        for group in self.rounds:
            group.forget(name)
        self.renewals += 1

    def _mutable(self) -> list[Tensor]:
        origins = [layer.origin.detach() for layer in self._subspaces.values()]
        states = [x for group in self.rounds if isinstance(group, Round) for x in group.state()]
        return [*super()._mutable(), *origins, *states]

    def _message_nbytes(self) -> tuple[int, int]:
        """Return the bytes of a worker's message and of its reply, which do not depend on the values."""
        if not self.rounds:
            nbytes = sum(len(encode(torch.ones(shape), "none")) for shape in self.slots.values())
            return nbytes, nbytes
        pushed = pulled = 0
        for group in self.rounds:
            for name in group.slots:
                x = torch.randn(self.slots[name], generator=torch.Generator().manual_seed(0))
                members = self._contributors(group)
                agreed = members[0].summing.agree([member.probe(name, x) for member in members])
                total = Sum()
                for member in members:
                    total.add(frame := member.encode(name, agreed))
                pushed += len(pack_contribution(scale_frame(agreed), frame))
                pulled += len(pack_contribution(scale_frame(agreed), total.finish()))
        return pushed, pulled

    def _contributors(self, group: Round | FramedRound) -> list[Contributor]:
        return [Contributor(group.spec, workers=self.job.workers, worker=w) for w in range(self.job.workers)]

    def _compare(self, sequence: int, stage: int) -> None:
        if not self._computes or not self.rounds:
            self._run_stage(stage)
            return
        computed = [group for group in self.rounds if isinstance(group, Round)]
        before = [[x.clone() for x in group.state()] for group in computed]
        self._run_stage(stage)
        if self._stream is not None:
            self._stream.synchronize()
        gradients, mean = [x.cpu() for x in self._gradients], self._mean.cpu()
        for group, (residual, scales, first) in zip(computed, before, strict=True):
            members = self._contributors(group)
            for name, (block, blocks) in group.spans.items():
                begin, end = self._spans[name]
                size = packed_int_count(end - begin, group.rotated)
                if group.feedback:
                    for worker, member in enumerate(members):
                        kept = residual[worker, block : block + blocks].reshape(-1)[:size].cpu()
                        member.load_state_dict({f"{name}/residual": kept})
                summing = members[0].summing
                probes = [
                    member.probe(name, x[begin:end].view(self.slots[name]))
                    for member, x in zip(members, gradients, strict=True)
                ]
                agreed = summing.agree(probes)
                if group.carry and not bool(first):
                    agreed = summing.carry(scales[block : block + blocks].cpu())
                total = Sum()
                for member in members:
                    total.add(member.encode(name, agreed))
                self.curve.frames_compared += len(members)
                if not decode(total.finish()).view(-1).equal(mean[begin:end]):
                    self.curve.frames_other += len(members)

    def finish_epoch(self) -> EpochEnd:
        loss, rounds = self._mean_loss(), self._count * self.job.workers
        return self.task, loss, rounds * self.push_nbytes, rounds * self.pull_nbytes

    def state(self) -> dict[str, Tensor]:
        state = {"weights": self.weights, "velocity": self.velocity}
        state |= {f"origin/{name}": layer.origin.detach() for name, layer in self._subspaces.items()}
        for i, group in enumerate(self.rounds):
            state |= {f"round{i}/{name}": x for name, x in group.state_dict().items()}
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        self.weights.copy_(state["weights"])
        self.velocity.copy_(state["velocity"])
        steps = self.done * self.per_epoch
        for name, layer in self._subspaces.items():
            layer.origin.copy_(state[f"origin/{name}"])
            layer.go_to(steps // layer.every * layer.every if layer.every else 0)
        for i, group in enumerate(self.rounds):
            prefix = f"round{i}/"
            group.load_state_dict({name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)})
        self._iteration.fill_(steps)
