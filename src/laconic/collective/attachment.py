"""attach: one line that makes a DistributedDataParallel module exchange its gradients compressed."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import parse
from laconic.collective.consistency import describe, require_same_on_all_ranks
from laconic.collective.drift import differing
from laconic.collective.encoding_error import encoding_error
from laconic.collective.exchange import EXACT, Exchange, common, peer_failure_as_error
from laconic.collective.executor import ExchangeThread
from laconic.collective.hook import plain_mean, plug, switch_of
from laconic.collective.stats import ExchangeStats
from laconic.errors import ConfigError, InputError
from laconic.policy import Policy

__all__ = ["Attachment", "attach"]

log = logging.getLogger("laconic")

_FSDP = ("FullyShardedDataParallel", "FSDPModule")


@dataclass
class _Clock:
    """Steps, and how long backward had to wait for the exchange after its last bucket."""

    steps: int = 0
    exposed_s: float = 0.0
    drifts: int = 0
    resets: int = 0
    errors: dict[str, float] = field(default_factory=dict)

    def ended(self, called: float) -> None:
        self.exposed_s += time.perf_counter() - called


class Attachment:
    """What ``attach`` returns: the compressed exchange of one DDP module. See ``attach`` for the arguments."""

    def __init__(
        self,
        module: DistributedDataParallel,
        spec: str,
        *,
        policy: Policy | Mapping[str, str] | None,
        warmup_steps: int,
        check_every: int,
        error_every: int,
        nonfinite: str,
        timeout_s: float,
    ) -> None:
        # Weak: DDP holds the hook where Python's collector does not look, and the hook holds this.
        self._module = weakref.ref(module)
        self.spec = spec
        self.warmup_steps, self.check_every, self.error_every = warmup_steps, check_every, error_every
        self._names = {id(parameter): name for name, parameter in _named(module)}
        self._group = _own_group(module.process_group, timeout_s)
        self._exchange = Exchange(spec, self._group, policy=policy, nonfinite=nonfinite)
        self._switch = switch_of(module)
        options = repr((warmup_steps, check_every, error_every, nonfinite))
        plans = {"codec": spec, "policy": repr(self._exchange.policy), "options": options, **describe(_named(module))}
        require_same_on_all_ranks("attach", plans, self._group)
        self._plug_for(self._exchange)
        self._worker = ExchangeThread("laconic-exchange")
        self._streams: dict[torch.device, Any] = {}
        self._clock = _Clock()
        self._switch.to = self

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"Attachment({self.spec!r}, {state}, steps={self._clock.steps})"

    @property
    def module(self) -> DistributedDataParallel:
        module = self._module()
        if module is None:
            raise ConfigError("the DDP module of this attachment is gone")
        return module

    @property
    def attached(self) -> bool:
        return self._switch.to is self

    @property
    def hooked(self) -> bool:
        """Whether DDP calls this in every step; ``none`` needs no hook."""
        return self.attached and self._switch.plugged

    def _plug_for(self, exchange: Exchange) -> None:
        """``none`` needs no hook as long as there is nothing to check: DDP does the same by itself, and faster."""
        if not exchange.exact or self.check_every:
            plug(self.module)

    # -------------------------------------------------------------------------------------------------------- buckets

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Called by DDP for each bucket, on all ranks in the same order, while backward goes on."""
        clock, called = self._clock, time.perf_counter()
        step, first, last = clock.steps, bucket.index() == 0, bucket.is_last()
        if last:
            clock.steps += 1
        # Of the clock alone: the threads that move bytes keep it a little longer than DDP waits for them.
        ending = (lambda: clock.ended(called)) if last else None
        flat = bucket.buffer()
        check = first and self.check_every > 0 and step % self.check_every == 0
        measure = self.error_every > 0 and step % self.error_every == 0
        plainly = step < self.warmup_steps or self._exchange.exact
        slots = [] if plainly else self._slots(bucket)
        plainly = plainly or all(self._exchange.spec_of(name, x) == EXACT for name, x in slots)
        if plainly and not check:
            return plain_mean(flat, self._switch.group, self._exchange.ledger, ending)

        def exchange() -> Tensor:
            if check:
                self._check_drift(step)
            if measure and not plainly:
                self._measure(slots)
            if plainly:
                self._exchange.mean_exactly([("", flat)])
            else:
                self._exchange.mean(slots)
            if ending is not None:
                ending()
            return flat

        if not flat.is_cuda:
            return self._worker.submit(exchange)
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
                found = exchange()
                stream.synchronize()  # the future is set on the host, where DDP's stream does not look
                return found

        return self._worker.submit(task, [flat.device])

    def _slots(self, bucket: GradBucket) -> list[tuple[str, Tensor]]:
        slots = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(id(parameter))
            if name is None:
                raise InputError(
                    f"a bucket holds a parameter of shape {list(parameter.shape)} that the module did not have when it "
                    "was attached: attach after the module is complete"
                )
            slots.append((name, _as_it_lies(gradient)))
        return slots

    def _check_drift(self, step: int) -> None:
        with peer_failure_as_error(self._group, "compared replicas"):
            differ = differing({self._names[id(p)]: p for _, p in _named(self.module)}, self._group)
        if differ:
            self._clock.drifts += 1
            shown = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
            log.error(
                "step %d: replicas drifted apart: %s are not the same on all ranks. Something changes them on one rank "
                "alone; broadcast them, or restart from a checkpoint",
                step,
                shown,
            )

    def _measure(self, slots: list[tuple[str, Tensor]]) -> None:
        for name, x in slots:
            spec = self._exchange.spec_of(name, x)
            error = encoding_error(x, spec, dist.get_world_size(self._group))
            if error is not None:
                self._clock.errors[name] = error

    # ------------------------------------------------------------------------------------------------------- controls

    def set(self, spec: str) -> None:
        """Exchange by another codec from the next step on. All ranks call it between the same two steps.

        ``ConfigError`` on all of them, and nothing changes, when they ask for different ones. What the old one has not
        sent yet is carried over where both keep it in the same form, otherwise dropped, which is logged and counted.
        """
        self._alive("set a codec")
        before = self._exchange
        after = Exchange(spec, self._group, policy=before.policy, nonfinite=before.nonfinite, ledger=before.ledger)
        require_same_on_all_ranks("set", {"codec": spec}, self._group)
        if not after.take_over(before):
            self._clock.resets += 1
            log.warning("%r takes over from %r: what was not sent yet is dropped", spec, before.spec)
        self._plug_for(after)
        self._exchange, self.spec = after, spec

    def detach(self) -> None:
        """Let DDP's own all-reduce do it again. The module can then be attached anew."""
        if self.attached:
            self._switch.to = None
            self._worker.close()

    def _alive(self, what: str) -> None:
        if not self.attached:
            raise ConfigError(f"cannot {what}: this attachment was detached")

    def stats(self) -> dict[str, Any]:
        """What was exchanged so far, on this rank: counts, bytes, seconds, and each slot's relative squared error.

        All are 0 as long as DDP needs no hook, which is so with ``none`` from the beginning.
        """
        ledger, clock = self._exchange.ledger, self._clock
        counted = {each.name: getattr(ledger, each.name) for each in fields(ExchangeStats)}
        return counted | {
            "spec": self.spec,
            "steps": clock.steps,
            "wire_bytes": ledger.wire_bytes(dist.get_world_size(self._group)),
            "exposed_s": clock.exposed_s,
            "drifts": clock.drifts,
            "residual_resets": clock.resets,
            "exempt": dict(self._exchange.exempt),
            "errors": dict(clock.errors),
        }

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank remembers, by parameter name: save it with the model, on every rank its own."""
        world = torch.tensor([dist.get_rank(self._group), dist.get_world_size(self._group)])
        return self._exchange.state_dict() | {"world": world, "steps": torch.tensor(self._clock.steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved memory. Residuals of another rank, or number of ranks, are dropped, and said."""
        rest = {key: x for key, x in state.items() if key not in ("world", "steps")}
        if "world" not in state or "steps" not in state:
            raise InputError("expected what Attachment.state_dict gave: 'world' or 'steps' is missing")
        mine = [dist.get_rank(self._group), dist.get_world_size(self._group)]
        if state["world"].tolist() != mine:
            rank, size = state["world"].tolist()
            self._clock.resets += 1
            told = rank, size, *mine
            log.warning("the saved residuals are of rank %d of %d, this is rank %d of %d: they are reset", *told)
            rest = common(rest)
        if not self._exchange.load_state_dict(rest):
            self._clock.resets += 1
        self._clock.steps = int(state["steps"])


def attach(
    module: nn.Module,
    spec: str,
    *,
    policy: Policy | Mapping[str, str] | None = None,
    warmup_steps: int = 0,
    check_every: int = 0,
    error_every: int = 0,
    nonfinite: str = "spread",
    timeout_s: float = 60.0,
) -> Attachment:
    """Exchange the gradients of a DistributedDataParallel module compressed. All ranks call it, before backward.

    Codecs whose packets can be added (``shared``, ``thc``, ``powersgd``, ``randk``, ``union``) go by one all-reduce;
    all others to owners of shards and back (``TwoShot``). Buckets are exchanged while backward goes on.

    Args:
        module: A DDP module, also inside ``torch.compile``.
        spec: A codec or channel: ``ef|topk:0.01|qsgd:4``, ``ef|thc:4``, ``qsgd:4``; ``none`` is plain DDP, bit for bit
            (and has no hook, until ``set`` or ``check_every`` need one).
        policy: Codecs by parameter-name pattern; by default small and one-dimensional parameters go uncompressed.
        warmup_steps: Steps without compression, to begin with.
        check_every: Every so many steps compare the replicas' parameters, and log an error when they differ; 0: never.
        error_every: Every so many steps measure what one encoding loses of each slot, for ``stats``; 0: never.
        nonfinite: What becomes of a tensor when a value of some rank is not finite: ``spread`` (NaN on all ranks, as
            in plain DDP, so that a gradient scaler notices), ``skip`` (it is left out) or ``raise``, on all ranks.
        timeout_s: How long to wait for other ranks before the step fails.
    """
    ddp = _ddp_of(module)
    parse(spec)
    for name, value in (("warmup_steps", warmup_steps), ("check_every", check_every), ("error_every", error_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} must be a whole number from 0 on, got {value!r}")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be above 0, got {timeout_s}")
    if switch_of(ddp).to is not None:
        raise ConfigError("the DDP module is attached already: use set() of its Attachment to change the codec")
    return Attachment(
        ddp,
        spec,
        policy=policy,
        warmup_steps=warmup_steps,
        check_every=check_every,
        error_every=error_every,
        nonfinite=nonfinite,
        timeout_s=timeout_s,
    )


def _ddp_of(module: nn.Module) -> DistributedDataParallel:
    inner = getattr(module, "_orig_mod", module)  # what torch.compile wrapped
    if isinstance(inner, DistributedDataParallel):
        return inner
    parts = list(inner.modules()) if isinstance(inner, nn.Module) else []
    if {kind.__name__ for each in parts for kind in type(each).__mro__} & set(_FSDP):
        raise ConfigError("FSDP modules cannot be attached yet: use DistributedDataParallel")
    raise ConfigError(
        f"expected a DistributedDataParallel module, got {type(module).__name__}: wrap it first, "
        "DistributedDataParallel(model)"
    )


def _named(module: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the names that the user gave them."""
    return [(name.replace("_orig_mod.", ""), parameter) for name, parameter in module.module.named_parameters()]


def _own_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """The same ranks once more: what the exchange sends must not mix with what the training script sends meanwhile."""
    ranks = dist.get_process_group_ranks(group)
    backend = "nccl" if "nccl" in str(dist.get_backend(group)) else "gloo"
    found = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(found, dist.ProcessGroup)
    return found


def _as_it_lies(gradient: Tensor) -> Tensor:
    """The gradient as a contiguous view where there is one: dimensions in the order of memory (channels last)."""
    if gradient.is_contiguous():
        return gradient
    turned = gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
    return turned if turned.is_contiguous() else gradient
