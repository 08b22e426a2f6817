"""Attachment: the compressed gradient exchange of one module, whatever torch shards or replicates it with.

What the attachments of DDP and FSDP2 share is here: the exchange with its group and thread, warm-up, checks, counts,
controls. ``DDPAttachment`` and ``FSDPAttachment`` add how gradients come and go.
"""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.codecs import parse
from laconic.collective.consistency import describe, differing, peer_failure_as_error, require_same_on_all_ranks
from laconic.collective.exchange import EXACT, Exchange, NamedTensors, encoding_error
from laconic.collective.executor import ExchangeThread
from laconic.collective.groups import group_of_same_ranks, release_group
from laconic.collective.optimizer_watch import OptimizerWatch
from laconic.collective.stats import ExchangeStats
from laconic.errors import ConfigError
from laconic.packet import TensorSpec
from laconic.policy import Policy
from laconic.residual_storage import ResidualStorage
from laconic.suitability import unremembered_bias

__all__ = ["AttachOptions", "Attachment", "StepStats", "as_real"]

log = logging.getLogger("laconic")

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class AttachOptions:
    """The arguments of ``attach`` that all kinds of modules take; ``attach`` describes them."""

    policy: Policy | Mapping[str, str] | None = None
    warmup_steps: int = 0
    check_every: int = 0
    error_every: int = 0
    nonfinite: str = "spread"
    timeout_s: float | None = None
    scaler: torch.amp.GradScaler | None = None
    storage: ResidualStorage | None = None

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "check_every", "error_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be a whole number from 0 on, got {value!r}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {self.timeout_s}")


@dataclass
class StepStats(ExchangeStats):
    """Counts of exchanges and steps, and of what is measured once a step."""

    steps: int = 0
    exposed_s: float = 0.0
    """How long backward waited for the exchange after its last gradients."""
    drifts: int = 0
    residual_resets: int = 0
    residual_rescales: int = 0
    errors: dict[str, float] = field(default_factory=dict)

    def add_exposed(self, since_s: float) -> None:
        self.exposed_s += time.perf_counter() - since_s


class Attachment(ABC):
    """The compressed exchange of one module, returned by ``attach``, which describes the arguments.

    Args:
        module: The module whose gradients are exchanged.
        spec: The codec or channel.
        options: What ``attach`` was called with.
        group: The ranks that exchange. A new group of the same ranks is made.
        shapes: Shapes of whole parameters by name, where ranks exchange shards of them.
    """

    def __init__(
        self, module: nn.Module, spec: str, options: AttachOptions, group: dist.ProcessGroup | None, *,
        shapes: Mapping[str, TensorSpec] | None = None,
    ) -> None:  # fmt: skip
        # A weak reference: DDP holds the hook where Python's garbage collector does not look, and the hook holds this.
        self._module = weakref.ref(module)
        self.spec = spec
        self.warmup_steps, self.check_every = options.warmup_steps, options.check_every
        self.error_every = options.error_every
        self._step_stats = stats = StepStats()
        with peer_failure_as_error(group, "waited for all ranks to call attach"):
            self._group = group_of_same_ranks(group, options.timeout_s, stats)
        # States and counts are also read after detach and destroy_process_group.
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._exchange = Exchange(
            spec, self._group, policy=options.policy, nonfinite=options.nonfinite, stats=stats, shapes=shapes,
            storage=options.storage,
        )  # fmt: skip
        self._scaler = options.scaler
        self._scale = None if options.scaler is None else options.scaler.get_scale()
        self._thread = ExchangeThread("laconic-exchange")
        self._stays_on: dict[torch.device, bool] = {}
        self._optimizers = OptimizerWatch(self._specs_of)

    def _require_same_arguments(self, **more: str) -> None:
        """Raise on all ranks if they call ``attach`` with different arguments or parameters."""
        exchange = self._exchange
        options = (self.warmup_steps, self.check_every, self.error_every, exchange.nonfinite, self._scaler is not None)
        settings = {"codec": self.spec, "policy": repr(exchange.policy), "options": repr(options), **more}
        settings |= describe(self._parameters())
        require_same_on_all_ranks("attach", settings, self._group, exchange.stats)

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"{type(self).__name__}({self.spec!r}, {state}, steps={self._step_stats.steps})"

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ConfigError("the module of this attachment no longer exists")
        return module

    @property
    @abstractmethod
    def attached(self) -> bool: ...

    @property
    def hooked(self) -> bool:
        """Whether torch calls this attachment in every step."""
        return self.attached

    @abstractmethod
    def serves(self, module: nn.Module) -> bool:
        """Whether this is the attachment of a module, or of the one that ``torch.compile`` or Fabric wraps."""

    @abstractmethod
    def _parameters(self) -> NamedParameters:
        """Return the parameters with the names that the user gave them."""

    @abstractmethod
    def _stop(self) -> None:
        """Let torch reduce gradients itself again."""

    @abstractmethod
    def _prepare(self, exchange: Exchange) -> None:
        """Do what an exchange needs before it is used."""

    def _require_allowed(self, spec: str) -> None:
        """Raise ``ConfigError`` if this kind of module cannot use a codec."""
        parse(spec)

    # ------------------------------------------------------------------------------------------- which codec is used

    def _specs_of(self, ids: Iterable[int]) -> set[str] | None:
        """Return how the gradients of those of these parameters that are attached were exchanged in the last step."""
        if self._module() is None or not self.attached:
            return None
        if self._exchange.exact or self._step_stats.steps <= self.warmup_steps:
            return None
        stepped = set(ids)
        return {
            self._spec_of(name, parameter)
            for name, parameter in self._parameters()
            if id(parameter) in stepped and parameter.requires_grad
        }

    def _spec_of(self, name: str, parameter: Tensor) -> str:
        if "sparse" in self._exchange.exempt.get(name, ""):
            return EXACT
        return self._exchange.choice(name, as_real(parameter)).spec

    def _warn_about_codec(self) -> None:
        self._warn_if_nothing_is_compressed()
        used = {self._spec_of(*each) for each in self._parameters() if each[1].requires_grad}
        for warning in filter(None, map(unremembered_bias, sorted(used))):
            log.warning("%s", warning)

    def _warn_if_nothing_is_compressed(self) -> None:
        trained = [(name, parameter) for name, parameter in self._parameters() if parameter.requires_grad]
        if self.spec != EXACT and trained and all(self._spec_of(*each) == EXACT for each in trained):
            largest = max(as_real(parameter).numel() for _, parameter in trained)
            log.warning(
                "%r compresses nothing: all %d trained parameters travel as %r, because the policy exempts them; the "
                "largest has %d values. Lower the limit, policy=laconic.Policy(min_numel=…), as for LoRA's small "
                "matrices, or attach 'none'", self.spec, len(trained), EXACT, largest,
            )  # fmt: skip

    # -------------------------------------------------------------------------------------------------------- a step

    def _due(self, every: int) -> bool:
        return every > 0 and self._step_stats.steps % every == 0

    def _submit(self, exchange: Callable[[], Tensor], flat: Tensor) -> torch.futures.Future[Tensor]:
        """Run an exchange on the thread of this attachment, on a GPU also on a stream of its own.

        If all parameters are exchanged without the host, the work is only launched, and no thread is needed. If one of
        them needs it, all use it: ranks could otherwise call NCCL in different orders.
        """
        if not flat.is_cuda:
            return self._thread.submit(exchange)
        if self._stays(flat.device):
            return self._thread.launch_on_stream(exchange, flat)
        return self._thread.submit_after_stream(exchange, [flat])

    def _stays(self, device: torch.device) -> bool:
        """Whether all parameters on a device are exchanged without the host."""
        stays = self._stays_on.get(device)
        if stays is None:
            trained = [each for each in self._parameters() if each[1].requires_grad]
            specs = {self._spec_of(*each) for each in trained}
            stays = self._stays_on[device] = self._exchange.stays_on(device, specs)
        return stays

    def _follow_gradient_scale(self) -> None:
        """Multiply residuals by what the gradient scaler multiplies its scale by: they wait in the old unit."""
        if self._scaler is None or self._scale is None:
            return
        scale = self._scaler.get_scale()
        if scale != self._scale and self._exchange.scale_residuals(scale / self._scale):
            self._step_stats.residual_rescales += 1
        self._scale = scale

    def _local_values(self) -> dict[str, Tensor]:
        """Return what this rank holds of each parameter. DTensors are not touched on the thread of the exchange."""
        with torch.no_grad():
            return {name: _local(parameter) for name, parameter in self._parameters()}

    def _check_drift(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        with peer_failure_as_error(self._group, "compared replicas"):
            differ = differing(parameters, self._group, stats=self._exchange.stats)
        if differ:
            self._step_stats.drifts += 1
            shown = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
            log.error(
                "step %d: replicas have drifted apart: %s are not the same on all ranks. Something changes them on one "
                "rank only; broadcast them, or restart from a checkpoint",
                step,
                shown,
            )

    def _measure_errors(self, groups: Mapping[str, NamedTensors]) -> None:
        for spec, tensors in groups.items():
            for name, x in tensors:
                error = encoding_error(x, spec, self._ranks)
                if error is not None:
                    self._step_stats.errors[name] = error

    # ------------------------------------------------------------------------------------------------------ controls

    def set(self, spec: str) -> None:
        """Use another codec from the next step on. All ranks call it between the same two steps.

        Different codecs raise ``ConfigError`` on all ranks and change nothing. Residuals are kept if both codecs store
        them in the same form; otherwise they are dropped, which is logged and counted.
        """
        if not self.attached:
            raise ConfigError("cannot set a codec: this attachment was detached")
        self._require_allowed(spec)
        before = self._exchange
        after = before.with_spec(spec)
        require_same_on_all_ranks("set", {"codec": spec}, self._group, before.stats)
        if not after.take_over(before):
            self._step_stats.residual_resets += 1
            log.warning("the codec changes from %r to %r: unsent residuals are dropped", before.spec, spec)
        self._prepare(after)
        self._exchange, self.spec = after, spec
        self._stays_on.clear()
        self._optimizers.forget()
        self._warn_about_codec()

    def detach(self) -> None:
        """Return to torch's own reduction of gradients. The module can then be attached again."""
        if self.attached:
            self._stop()
            self._thread.close()
            self._optimizers.close()
            if not self._thread.failed:
                release_group(self._group)

    def stats(self) -> dict[str, Any]:
        """Return this rank's counts, bytes and seconds so far, and each slot's relative squared encoding error.

        ``bytes_reduced``, ``bytes_sent`` and their sum ``wire_bytes`` are counted where tensors are handed to
        ``torch.distributed``; ``ring_bytes_estimate`` is a model. While DDP needs no hook (``none`` from the start),
        DDP's own all-reduces are not counted, and neither are FSDP's collectives inside a node.
        """
        self._exchange.settle()
        return self._step_stats.by_name() | {
            "spec": self.spec, "ring_bytes_estimate": self._step_stats.ring_bytes_estimate(self._ranks),
            "exempt": dict(self._exchange.exempt), "unsuited_optimizer_steps": self._optimizers.unsuited_steps,
            "unsuited_optimizers": dict(self._optimizers.unsuited), "residual_bytes": self._residual_nbytes,
        }  # fmt: skip

    @property
    def _residual_nbytes(self) -> int:
        return self._exchange.residual_nbytes

    # --------------------------------------------------------------------------------------------------------- state

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of the exchange by parameter name, to be saved with the model."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state."""


def as_real(parameter: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and others unchanged."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter


def _local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds."""
    to_local = getattr(parameter, "to_local", None)  # of a DTensor
    local: Tensor = parameter if to_local is None else to_local()
    return local.detach()
