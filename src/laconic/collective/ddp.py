"""DDPAttachment: a DistributedDataParallel module that exchanges its gradients compressed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from laconic.collective import ddp_steps
from laconic.collective.attachment import Attachment, AttachOptions, NamedParameters, as_real
from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.exchange import EXACT, Exchange, NamedTensors, rank_independent
from laconic.collective.hook import exact_mean, register_hook, switch_of
from laconic.collective.saved_state import saved_by_name, saved_count, saved_counts, saved_scale, saved_world
from laconic.errors import ConfigError, InputError, NonFiniteError

__all__ = ["DDPAttachment", "ddp_of_replicate", "unwrapped"]

log = logging.getLogger("laconic")


@dataclass(eq=False)
class _Bucket:
    """A DDP bucket."""

    key: tuple[int, ...]
    """Address and parameters, by which it is known again."""
    groups: Mapping[str, NamedTensors]
    steps: int = 0
    launch: Callable[[], None] | None = None
    """What launches the exchange of the tensors where they are; None if the host takes part, or in the first step."""
    done: torch.futures.Future[Tensor] | None = None
    """A future that has a result: of an exchange that was launched the stream of backward waits, and nobody else."""


class DDPAttachment(Attachment):
    """The compressed exchange of one DDP module, returned by ``attach``, which describes the arguments."""

    def __init__(
        self, module: DistributedDataParallel, spec: str, options: AttachOptions, names: Sequence[str] | None = None
    ) -> None:
        self._switch = switch_of(module)
        self._given_names = names
        if self._switch.target is not None:
            raise ConfigError("the DDP module is attached already: use set() of its Attachment to change the codec")
        super().__init__(module, spec, options, module.process_group)
        self._names = {id(parameter): name for name, parameter in self._parameters()}
        self._known_buckets: dict[int, _Bucket] = {}
        self._launches_only = False
        """Whether nothing is due in this step but exchanges, which may have been prepared."""
        self._errors: list[NonFiniteError] = []
        self._raises_later = False
        self._compared_states = False
        self._require_same_arguments()
        self._prepare(self._exchange)
        self._switch.target = self
        self._warn_about_codec()

    @property
    def module(self) -> DistributedDataParallel:
        module = self._module()
        if module is None:
            raise ConfigError("the DDP module of this attachment no longer exists")
        assert isinstance(module, DistributedDataParallel)
        return module

    def serves(self, module: nn.Module) -> bool:
        inner = unwrapped(module)
        composed = ddp_of_replicate(inner)
        return self._module() is (inner if composed is None else composed[0])

    @property
    def attached(self) -> bool:
        return self._switch.target is self

    @property
    def hooked(self) -> bool:
        """Whether DDP calls this attachment in every step; ``none`` needs no hook."""
        return self.attached and self._switch.registered

    def _parameters(self) -> NamedParameters:
        """Return parameters with the names that the user gave them, without those of torch.compile."""
        named = list(self.module.module.named_parameters())
        if self._given_names is not None:
            return [(name, parameter) for name, (_, parameter) in zip(self._given_names, named, strict=True)]
        return [(name.replace("_orig_mod.", ""), parameter) for name, parameter in named]

    def _prepare(self, exchange: Exchange) -> None:
        self._known_buckets.clear()
        # Without compression and checks no hook is needed: DDP alone computes the same mean, and faster.
        if not exchange.exact or self.check_every:
            register_hook(self.module)

    def _stop(self) -> None:
        self._switch.target = None

    # --------------------------------------------------------------------------------------------------- DDP buckets

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of a DDP bucket. DDP calls it on all ranks in the same order, during backward."""
        called_s, index, flat = time.perf_counter(), bucket.index(), bucket.buffer()
        if index == 0:
            self._follow_gradient_scale()
            self._launches_only = self._compared_states and not self._something_is_due()
        known = self._known_buckets.get(index)
        # The tensors of a known bucket keep its memory, so no other bucket has its address.
        if known is None or known.done is None or not self._launches_only or flat.data_ptr() != known.key[0]:
            return self._reduce(bucket, flat, called_s)
        assert known.launch is not None
        side = self._thread.side(flat.device)
        side.launch(known.launch)
        if bucket.is_last():
            side.join()  # what comes after backward sees the means of all buckets
            self._step_stats.steps += 1
            self._step_stats.add_exposed(called_s)
        return known.done

    def _something_is_due(self) -> bool:
        """Whether this step does more than exchange gradients, or does that in another way."""
        module = self.module
        return (
            self._step_stats.steps < self.warmup_steps
            or self._due(self.check_every)
            or self._due(self.error_every)
            or ddp_steps.divides_by_active_ranks(module)
            or ddp_steps.finds_unused_parameters(module)
        )

    def _reduce(self, bucket: GradBucket, flat: Tensor, called_s: float) -> torch.futures.Future[Tensor]:
        step_stats = self._step_stats
        step, last = step_stats.steps, bucket.is_last()
        if last:
            step_stats.steps += 1
            if self._launches_only and flat.is_cuda:
                self._thread.side(flat.device).join()  # exchanges of other buckets may only have been launched
        # Without a reference to self: the threads that move bytes keep it a little longer than DDP waits for them.
        on_done = partial(step_stats.add_exposed, called_s) if last else None
        check = bucket.index() == 0 and self.check_every > 0 and step % self.check_every == 0
        measure = self.error_every > 0 and step % self.error_every == 0
        exact = step < self.warmup_steps or self._exchange.exact or flat.is_sparse
        if flat.is_sparse:  # of an embedding with sparse=True, in a DDP bucket of its own
            self._note_sparse(bucket)
        known = None if exact else self._known(bucket, flat)
        groups: Mapping[str, NamedTensors] = {} if known is None else known.groups
        exact = exact or groups.keys() <= {EXACT}
        compare, self._compared_states = not self._compared_states, True
        module = self.module
        rescale, unused = ddp_steps.divides_by_active_ranks(module), ddp_steps.finds_unused_parameters(module)
        if exact and not (check or compare or rescale):
            return exact_mean(flat, self._switch.group, self._exchange.stats, on_done)
        if known is not None and not (check or compare or rescale or unused or measure):
            launch = self._launch_of(known, flat)
            if launch is not None:
                future = self._thread.launch_on_stream(launch, flat)
                if on_done is not None:
                    on_done()
                return future
        active = ddp_steps.in_backward()
        if bucket.index() == 0 and self._exchange.nonfinite == "raise":
            self._raises_later = ddp_steps.raise_after_backward(self._errors)
        stats = self._exchange.stats

        parameters = self._local_values() if check else {}

        def exchange() -> Tensor:
            if compare:
                state = rank_independent(self._exchange.state_dict())
                ddp_steps.require_same_memory(state, step, self._group, stats)
            if check:
                self._check_drift(step, parameters)
            if flat.is_sparse:
                with peer_failure_as_error(self._group, "averaged sparse gradients"):
                    return exact_mean(flat, self._group, stats, on_done).wait()
            if exact:
                self._exchange.mean_exactly([("", flat)])
            else:
                if measure:
                    self._measure_errors(groups)
                self._mean(ddp_steps.leave_out_unused(groups, self._group, stats) if unused else groups, flat)
            if rescale:
                ddp_steps.scale_to_active_ranks(flat, active, self._group, stats)
            if on_done is not None:
                on_done()
            return flat

        return self._submit(exchange, flat)

    def _mean(self, groups: Mapping[str, NamedTensors], flat: Tensor) -> None:
        try:
            self._exchange.mean_by_spec(groups)
        except NonFiniteError as error:
            if not self._raises_later:
                raise
            flat.fill_(float("nan"))
            self._errors.append(error)

    def _known(self, bucket: GradBucket, flat: Tensor) -> _Bucket:
        """Return the slots of a DDP bucket by spec; those of the step before, if DDP has not made new buckets."""
        index, key = bucket.index(), (flat.data_ptr(), *map(id, bucket.parameters()))
        known = self._known_buckets.get(index)
        if known is None or known.key != key:
            if index == 0 and known is not None:  # what was prepared for the former buckets holds their memory
                self._exchange.forget_places()
            known = self._known_buckets[index] = _Bucket(key, self._exchange.group_by_spec(self._slots(bucket)))
        return known

    def _launch_of(self, known: _Bucket, flat: Tensor) -> Callable[[], None] | None:
        """Return what launches the exchange of a DDP bucket; None if the host takes part, or in its first step."""
        if known.steps == 1 and flat.is_cuda and self._stays(flat.device):
            known.launch = self._exchange.prepare(known.groups)
            if known.launch is not None:
                known.done = torch.futures.Future()
                known.done.set_result(flat)
        known.steps += 1
        return known.launch

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

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's memory by parameter name. Each rank saves its own with the model."""
        state = self._exchange.state_dict() | {
            "world": torch.tensor([self._rank, self._ranks]), "steps": torch.tensor(self._step_stats.steps),
            "counts": self._exchange.stats.saved(),
        }  # fmt: skip
        return state if self._scale is None else state | {"scale": torch.tensor(self._scale, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state. Residuals of another rank or number of ranks are dropped and logged."""
        if not {"world", "steps"} <= set(saved_by_name(state)):
            raise InputError("expected the result of Attachment.state_dict: 'world' or 'steps' is missing")
        memory = {key: x for key, x in state.items() if key not in ("world", "steps", "scale", "counts")}
        ours = self._rank, self._ranks
        saved, steps, scale = saved_world(state), saved_count("steps", state["steps"]), saved_scale(state)
        counts = saved_counts(state)
        if saved != ours:
            self._step_stats.residual_resets += 1
            log.warning("residuals were saved by rank %d of %d, this is rank %d of %d: they are reset", *saved, *ours)
            memory = rank_independent(memory)
        if not self._exchange.load_state_dict(memory):
            self._step_stats.residual_resets += 1
        self._step_stats.steps = steps
        self._exchange.stats.load(counts)
        if self._scale is not None and scale is not None:
            self._scale = scale


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of Lightning Fabric and of ``torch.compile``."""
    module = getattr(module, "_forward_module", module)
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def ddp_of_replicate(module: nn.Module) -> tuple[DistributedDataParallel, list[str]] | None:
    """Return the DDP module, and the names of its parameters, of a module to which ``replicate`` was applied."""
    if not isinstance(module, nn.Module) or "replicate" not in (_get_registry(module) or {}):
        return None
    state: Any = replicate.state(module)
    if not hasattr(state, "_param_names"):  # of FSDP2's replicate
        return None
    if state._init_args:  # torch makes the DDP module in the first forward
        state.lazy_init()
    return state._ddp, list(state._param_names)


def _gradients(bucket: GradBucket) -> list[Tensor]:
    """Return the gradients of a DDP bucket as views of its buffer; complex ones as pairs of real numbers."""
    parameters = bucket.parameters()
    if not any(parameter.is_complex() for parameter in parameters):
        return bucket.gradients()
    # DDP's own views cover the first half of a complex gradient only: the rest would not be exchanged.
    shapes = [as_real(parameter).shape for parameter in parameters]
    parts = torch.split(bucket.buffer(), [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _in_memory_order(gradient: Tensor) -> Tensor:
    """Return a contiguous view of the gradient if there is one: its dimensions in the order of memory."""
    if gradient.is_contiguous():
        return gradient
    permuted = gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
    return permuted if permuted.is_contiguous() else gradient
