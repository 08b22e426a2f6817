"""attach: one line that makes a DistributedDataParallel module exchange its gradients compressed."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import parse
from laconic.collective.consistency import describe, differing, peer_failure_as_error, require_same_on_all_ranks
from laconic.collective.exchange import EXACT, Exchange, NamedTensors, encoding_error, rank_independent
from laconic.collective.executor import ExchangeThread
from laconic.collective.groups import group_of_same_ranks
from laconic.collective.hook import exact_mean, register_hook, switch_of
from laconic.collective.optimizer_watch import OptimizerWatch
from laconic.collective.stats import ExchangeStats
from laconic.errors import ConfigError, InputError
from laconic.packet import TensorSpec
from laconic.policy import Policy

__all__ = ["Attachment", "attach"]

log = logging.getLogger("laconic")

_FSDP = ("FullyShardedDataParallel", "FSDPModule")


@dataclass
class _StepStats:
    """Counts of steps, and of what is measured once a step."""

    steps: int = 0
    exposed_s: float = 0.0
    """How long backward waited for the exchange after its last DDP bucket."""
    drifts: int = 0
    residual_resets: int = 0
    residual_rescales: int = 0
    errors: dict[str, float] = field(default_factory=dict)

    def add_exposed(self, since_s: float) -> None:
        self.exposed_s += time.perf_counter() - since_s


class Attachment:
    """The compressed exchange of one DDP module, returned by ``attach``, which describes the arguments."""

    def __init__(
        self, module: DistributedDataParallel, spec: str, *, policy: Policy | Mapping[str, str] | None,
        warmup_steps: int, check_every: int, error_every: int, nonfinite: str, timeout_s: float,
        scaler: torch.amp.GradScaler | None,
    ) -> None:  # fmt: skip
        # A weak reference: DDP holds the hook where Python's garbage collector does not look, and the hook holds this.
        self._module = weakref.ref(module)
        self.spec = spec
        self.warmup_steps, self.check_every, self.error_every = warmup_steps, check_every, error_every
        self._names = {id(parameter): name for name, parameter in _named_parameters(module)}
        stats = ExchangeStats()
        with peer_failure_as_error(module.process_group, "waited for all ranks to call attach"):
            self._group = group_of_same_ranks(module.process_group, timeout_s, stats)
        self._ranks = dist.get_world_size(self._group)  # stats are also read after destroy_process_group
        self._exchange = Exchange(spec, self._group, policy=policy, nonfinite=nonfinite, stats=stats)
        self._switch = switch_of(module)
        self._scaler, self._scale = scaler, None if scaler is None else scaler.get_scale()
        options = repr((warmup_steps, check_every, error_every, nonfinite, scaler is not None))
        settings = {"codec": spec, "policy": repr(self._exchange.policy), "options": options}
        settings |= describe(_named_parameters(module))
        require_same_on_all_ranks("attach", settings, self._group, self._exchange.stats)
        self._register_hook_for(self._exchange)
        self._thread = ExchangeThread("laconic-exchange")
        self._streams: dict[torch.device, Any] = {}
        self._step_stats = _StepStats()
        self._optimizers = OptimizerWatch(self._specs_of)
        self._switch.target = self
        self._warn_if_nothing_is_compressed()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"Attachment({self.spec!r}, {state}, steps={self._step_stats.steps})"

    @property
    def module(self) -> DistributedDataParallel:
        module = self._module()
        if module is None:
            raise ConfigError("the DDP module of this attachment no longer exists")
        return module

    def serves(self, module: nn.Module) -> bool:
        """Whether this is the attachment of a DDP module, or of the one that ``torch.compile`` or Fabric wraps."""
        return self._module() is _ddp_of(module)

    @property
    def attached(self) -> bool:
        return self._switch.target is self

    @property
    def hooked(self) -> bool:
        """Whether DDP calls this attachment in every step; ``none`` needs no hook."""
        return self.attached and self._switch.registered

    def _register_hook_for(self, exchange: Exchange) -> None:
        # Without compression and checks no hook is needed: DDP alone computes the same mean, and faster.
        if not exchange.exact or self.check_every:
            register_hook(self.module)

    def _specs_of(self, ids: Iterable[int]) -> set[str] | None:
        """Return how the gradients of those of these parameters that are attached were exchanged in the last step."""
        module = self._module()
        if module is None or not self.attached or self._exchange.exact or self._step_stats.steps <= self.warmup_steps:
            return None
        stepped = set(ids)
        return {
            self._spec_of(name, parameter)
            for name, parameter in _named_parameters(module)
            if id(parameter) in stepped and parameter.requires_grad
        }

    def _spec_of(self, name: str, parameter: Tensor) -> str:
        if "sparse" in self._exchange.exempt.get(name, ""):
            return EXACT
        return self._exchange.policy.choose(name, TensorSpec.of(_as_real(parameter)), self.spec).spec

    def _warn_if_nothing_is_compressed(self) -> None:
        trained = [(name, parameter) for name, parameter in _named_parameters(self.module) if parameter.requires_grad]
        if self.spec != EXACT and trained and all(self._spec_of(*each) == EXACT for each in trained):
            largest = max(_as_real(parameter).numel() for _, parameter in trained)
            log.warning(
                "%r compresses nothing: all %d trained parameters travel as %r, because the policy exempts them; the "
                "largest has %d values. Lower the limit, policy=laconic.Policy(min_numel=…), as for LoRA's small "
                "matrices, or attach 'none'", self.spec, len(trained), EXACT, largest,
            )  # fmt: skip

    # --------------------------------------------------------------------------------------------------- DDP buckets

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of a DDP bucket. DDP calls it on all ranks in the same order, during backward."""
        step_stats, called_s = self._step_stats, time.perf_counter()
        step, flat = step_stats.steps, bucket.buffer()
        if bucket.index() == 0:
            self._follow_gradient_scale()
        if bucket.is_last():
            step_stats.steps += 1
        # Without a reference to self: the threads that move bytes keep it a little longer than DDP waits for them.
        on_done = partial(step_stats.add_exposed, called_s) if bucket.is_last() else None
        check = bucket.index() == 0 and self.check_every > 0 and step % self.check_every == 0
        measure = self.error_every > 0 and step % self.error_every == 0
        exact = step < self.warmup_steps or self._exchange.exact or flat.is_sparse
        if flat.is_sparse:  # of an embedding with sparse=True, in a DDP bucket of its own
            self._note_sparse(bucket)
        groups = {} if exact else self._exchange.group_by_spec(self._slots(bucket))
        exact = exact or set(groups) <= {EXACT}
        if exact and not check:
            return exact_mean(flat, self._switch.group, self._exchange.stats, on_done)

        def exchange() -> Tensor:
            if check:
                self._check_drift(step)
            if flat.is_sparse:
                with peer_failure_as_error(self._group, "averaged sparse gradients"):
                    return exact_mean(flat, self._group, self._exchange.stats, on_done).wait()
            if exact:
                self._exchange.mean_exactly([("", flat)])
            else:
                if measure:
                    self._measure_errors(groups)
                self._exchange.mean_by_spec(groups)
            if on_done is not None:
                on_done()
            return flat

        if not flat.is_cuda:
            return self._thread.submit(exchange)
        return self._submit_on_stream(exchange, flat)

    def _submit_on_stream(self, exchange: Callable[[], Tensor], flat: Tensor) -> torch.futures.Future[Tensor]:
        stream = self._streams.get(flat.device)
        if stream is None:
            stream = self._streams[flat.device] = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(flat.device))

        def task() -> Tensor:
            with torch.cuda.device(flat.device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                flat.record_stream(stream)
                result = exchange()
                stream.synchronize()  # the future is set on the host, which DDP's stream does not wait for
                return result

        return self._thread.submit(task, [flat.device])

    def _follow_gradient_scale(self) -> None:
        """Multiply residuals by what the gradient scaler multiplies its scale by: they wait in the old unit."""
        if self._scaler is None or self._scale is None:
            return
        scale = self._scaler.get_scale()
        if scale != self._scale and self._exchange.scale_residuals(scale / self._scale):
            self._step_stats.residual_rescales += 1
        self._scale = scale

    def _slots(self, bucket: GradBucket) -> list[tuple[str, Tensor]]:
        slots = []
        for parameter, gradient in zip(bucket.parameters(), _gradients(bucket), strict=True):
            slots.append((self._name_of(parameter), _in_memory_order(gradient)))
        return slots

    def _name_of(self, parameter: Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise InputError(
                f"a DDP bucket holds a parameter of shape {list(parameter.shape)} that was added to the module after "
                "attach: attach when the module is complete"
            )
        return name

    def _note_sparse(self, bucket: GradBucket) -> None:
        for name in map(self._name_of, bucket.parameters()):
            if name not in self._exchange.exempt and self.spec != EXACT:
                self._exchange.exempt[name] = f"{EXACT}: has sparse gradients"
                log.info("%r travels as %r instead of %r: it has sparse gradients", name, EXACT, self.spec)

    def _check_drift(self, step: int) -> None:
        parameters = {self._names[id(p)]: p for _, p in _named_parameters(self.module)}
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
        ranks = dist.get_world_size(self._group)
        for spec, tensors in groups.items():
            for name, x in tensors:
                error = encoding_error(x, spec, ranks)
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
        before = self._exchange
        after = Exchange(spec, self._group, policy=before.policy, nonfinite=before.nonfinite, stats=before.stats)
        require_same_on_all_ranks("set", {"codec": spec}, self._group, before.stats)
        if not after.take_over(before):
            self._step_stats.residual_resets += 1
            log.warning("the codec changes from %r to %r: unsent residuals are dropped", before.spec, spec)
        self._register_hook_for(after)
        self._exchange, self.spec = after, spec
        self._optimizers.forget()
        self._warn_if_nothing_is_compressed()

    def detach(self) -> None:
        """Return to DDP's own all-reduce. The module can then be attached again."""
        if self.attached:
            self._switch.target = None
            self._thread.close()
            self._optimizers.close()

    def stats(self) -> dict[str, Any]:
        """Return this rank's counts, bytes and seconds so far, and each slot's relative squared encoding error.

        ``bytes_reduced``, ``bytes_sent`` and their sum ``wire_bytes`` are counted where tensors are handed to
        ``torch.distributed``; ``ring_bytes_estimate`` is a model. While DDP needs no hook (``none`` from the start),
        DDP's own all-reduces are not counted.
        """
        stats, step_stats = self._exchange.stats, self._step_stats
        return {each.name: getattr(stats, each.name) for each in fields(ExchangeStats)} | {
            "spec": self.spec, "steps": step_stats.steps, "wire_bytes": stats.wire_bytes,
            "ring_bytes_estimate": stats.ring_bytes_estimate(self._ranks), "exposed_s": step_stats.exposed_s,
            "drifts": step_stats.drifts, "residual_resets": step_stats.residual_resets,
            "residual_rescales": step_stats.residual_rescales, "exempt": dict(self._exchange.exempt),
            "errors": dict(step_stats.errors), "unsuited_optimizer_steps": self._optimizers.unsuited_steps,
            "unsuited_optimizers": dict(self._optimizers.unsuited),
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's memory by parameter name. Each rank saves its own with the model."""
        world = torch.tensor([dist.get_rank(self._group), dist.get_world_size(self._group)])
        state = self._exchange.state_dict() | {"world": world, "steps": torch.tensor(self._step_stats.steps)}
        return state if self._scale is None else state | {"scale": torch.tensor(self._scale, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state. Residuals of another rank or number of ranks are dropped and logged."""
        if "world" not in state or "steps" not in state:
            raise InputError("expected the result of Attachment.state_dict: 'world' or 'steps' is missing")
        memory = {key: x for key, x in state.items() if key not in ("world", "steps", "scale")}
        ours = dist.get_rank(self._group), dist.get_world_size(self._group)
        saved = tuple(state["world"].tolist())
        if saved != ours:
            self._step_stats.residual_resets += 1
            log.warning("residuals were saved by rank %d of %d, this is rank %d of %d: they are reset", *saved, *ours)
            memory = rank_independent(memory)
        if not self._exchange.load_state_dict(memory):
            self._step_stats.residual_resets += 1
        self._step_stats.steps = int(state["steps"])
        if self._scale is not None and "scale" in state:
            self._scale = float(state["scale"])


def attach(
    module: nn.Module, spec: str, *, policy: Policy | Mapping[str, str] | None = None, warmup_steps: int = 0,
    check_every: int = 0, error_every: int = 0, nonfinite: str = "spread", timeout_s: float = 60.0,
    scaler: torch.amp.GradScaler | None = None,
) -> Attachment:  # fmt: skip
    """Exchange the gradients of a DistributedDataParallel module compressed. All ranks call it before backward.

    Codecs whose packets can be added (``shared``, ``thc``, ``powersgd``, ``randk``, ``union``) use one all-reduce; all
    others send shards to their owners and means back (``TwoShot``). DDP buckets are exchanged during backward.

    A codec that does not suit the optimizer (``ef|topk`` under AdamW; see ``laconic.suitability``) is logged once, with
    what to use instead, and counted in ``stats()["unsuited_optimizer_steps"]``.

    Args:
        module: A DDP module, also inside ``torch.compile``.
        spec: A codec or channel: ``ef|topk:0.01|qsgd:4``, ``ef|thc:4``, ``qsgd:4``; ``none`` is plain DDP, bit for bit
            (and has no hook, until ``set`` or ``check_every`` need one).
        policy: Codecs by parameter-name pattern; by default small and one-dimensional parameters are not compressed.
        warmup_steps: Number of first steps without compression.
        check_every: Number of steps between comparisons of the replicas' parameters, which log an error if they
            differ; 0: never.
        error_every: Number of steps between measurements of each slot's encoding error, for ``stats``; 0: never.
        nonfinite: What to do with a tensor if a value of some rank is not finite: ``spread`` (NaN on all ranks, as in
            plain DDP, so that a gradient scaler notices), ``skip`` (leave it out) or ``raise`` on all ranks.
        timeout_s: How long to wait for other ranks before the step fails.
        scaler: The gradient scaler of the training loop, if there is one. Residuals then follow its scale; without it
            they are added in the unit of the scale at which they arose.
    """
    ddp = _ddp_of(module)
    parse(spec)
    for name, value in (("warmup_steps", warmup_steps), ("check_every", check_every), ("error_every", error_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} must be a whole number from 0 on, got {value!r}")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be above 0, got {timeout_s}")
    if switch_of(ddp).target is not None:
        raise ConfigError("the DDP module is attached already: use set() of its Attachment to change the codec")
    return Attachment(
        ddp, spec, policy=policy, warmup_steps=warmup_steps, check_every=check_every, error_every=error_every,
        nonfinite=nonfinite, timeout_s=timeout_s, scaler=scaler,
    )  # fmt: skip


def _ddp_of(module: nn.Module) -> DistributedDataParallel:
    module = getattr(module, "_forward_module", module)  # the module that Lightning Fabric wraps
    inner = getattr(module, "_orig_mod", module)  # the module that torch.compile wraps
    if isinstance(inner, DistributedDataParallel):
        return inner
    parts = list(inner.modules()) if isinstance(inner, nn.Module) else []
    if {kind.__name__ for part in parts for kind in type(part).__mro__} & set(_FSDP):
        raise ConfigError("FSDP modules are not supported: use DistributedDataParallel")
    raise ConfigError(
        f"expected a DistributedDataParallel module, got {type(module).__name__}: wrap it first, "
        "DistributedDataParallel(model)"
    )


def _named_parameters(module: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with the names that the user gave them, without those of torch.compile."""
    return [(name.replace("_orig_mod.", ""), parameter) for name, parameter in module.module.named_parameters()]


def _gradients(bucket: GradBucket) -> list[Tensor]:
    """Return the gradients of a DDP bucket as views of its buffer; complex ones as pairs of real numbers."""
    parameters = bucket.parameters()
    if not any(parameter.is_complex() for parameter in parameters):
        return bucket.gradients()
    # DDP's own views cover the first half of a complex gradient only: the rest would not be exchanged.
    shapes = [_as_real(parameter).shape for parameter in parameters]
    parts = torch.split(bucket.buffer(), [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _as_real(parameter: Tensor) -> Tensor:
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter


def _in_memory_order(gradient: Tensor) -> Tensor:
    """Return a contiguous view of the gradient if there is one: its dimensions in the order of memory."""
    if gradient.is_contiguous():
        return gradient
    permuted = gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
    return permuted if permuted.is_contiguous() else gradient
