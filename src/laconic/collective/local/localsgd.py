"""LocalSGD: ranks train alone for some steps, then agree on a common model by a compressed exchange."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collective.consistency import describe, peer_failure_as_error, require_same_on_all_ranks
from laconic.collective.exchange import Exchange
from laconic.collective.groups import group_of_same_ranks, ranks_of
from laconic.collective.local import membership, state
from laconic.collective.local.fragments import Fragment, make_fragments
from laconic.collective.local.inside import ReplicaRanks
from laconic.collective.local.options import LocalOptions, as_optimizers
from laconic.collective.local.outer import Outer, OuterStep, advise_longer_mean, choose_outer
from laconic.collective.local.replica import Replica, values_of
from laconic.collective.local.rounds import LocalStats, PendingRound, Rounds
from laconic.collective.transport import broadcast_all
from laconic.errors import ConfigError, InputError
from laconic.policy import Policy
from laconic.residual_storage import ResidualStorage

__all__ = ["LocalSGD"]

log = logging.getLogger("laconic")


class LocalSGD:
    """Wraps a module and its optimizers: exchanges once in ``every`` steps, compressed.

    After ``every`` local steps each rank's change since the last exchange (a pseudo-gradient) is replaced by the mean
    over all ranks, which an outer optimizer applies to the last common model (Douillard et al. 2023, arXiv:2311.08105).
    All ranks continue with the same bits. Float buffers, such as those of batch norm, are averaged uncompressed.
    docs/local-sgd.md explains how to choose the arguments. All ranks must take the same number of steps.

    Args:
        model: The bare module; or a DDP module, or one with FSDP2's sharded parameters, whose ranks are not those of
            ``group``. Rank 0's parameters are sent to all.
        optimizer: Optimizer of the local steps, or a list of them, such as ``laconic.muon(model)``. Their state stays
            local. None: step them yourself and call ``after_step``.
        every: Local steps between exchanges of the same parameter; 1 exchanges the update of each step.
        codec: As in ``attach``: ``ef|topk:0.1|sign``, ``ef|thc:4``, ``none``, …
        outer: ``mean`` (plain averaging), ``mean:F`` (the mean times F), ``nesterov`` (DiLoCo: learning rate 0.7,
            momentum 0.9), ``muloco`` (0.7 and 0.6), or a function that returns an optimizer for a list of tensors.
            Default: ``mean`` if the codec is lossy, otherwise ``nesterov``.
        policy: Codecs by parameter-name pattern.
        group: The ranks that exchange, one of each replica; all ranks by default.
        nonfinite: As in ``attach``.
        fragments: Exchange the model in so many parts, one after the other, every ``every / fragments`` steps.
        overlap: Steps during which an exchange goes on beside training, before its result is applied.
        merge: Weight of a rank's own parameters when a result is applied; the global model has the rest. ``progress``
            adds all that the rank did since the exchange began to the global model. Default: 0.5 with ``overlap``,
            otherwise 0.
        weight_by: ``tokens`` weights the ranks' changes by the tokens given to ``step``; None weights them equally.
        clip: ``median`` scales a change whose norm exceeds the median over ranks down to it; None does not.
        average: ``all`` divides by the number of ranks; ``senders`` divides each value by the number of ranks whose
            selector sent it.
        continue_from: ``global`` model, or ``local``: the global model plus what this rank has not sent yet.
        timeout_s: How long an exchange waits for other ranks; by default the timeout of ``group``.
        residual_dtype, residual_device: As in ``attach``.

    >>> local = LocalSGD(model, laconic.muon(model), every=20, codec="ef|topk:0.1|sign")  # doctest: +SKIP
    >>> for batch in batches:                                                     # doctest: +SKIP
    ...     loss(model, batch).backward()
    ...     local.step()
    ...     local.zero_grad()
    >>> local.finish()                                                            # doctest: +SKIP
    """

    _step_supports_amp_scaling = True
    """torch's GradScaler then calls ``step`` in every case: a step that one rank skips must be counted on all."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, *,
        every: int = 20, codec: str = "none", outer: str | Outer | None = None,
        policy: Policy | Mapping[str, str] | None = None, group: dist.ProcessGroup | None = None,
        nonfinite: str = "raise", fragments: int = 1, overlap: int = 0, merge: float | str | None = None,
        weight_by: str | None = None, clip: str | None = None, average: str = "all", continue_from: str = "global",
        timeout_s: float | None = None, residual_dtype: torch.dtype = torch.float32,
        residual_device: str | torch.device | None = None,
    ) -> None:  # fmt: skip
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed has no process group yet: call init_process_group first")
        self.options = LocalOptions.of(
            every=every, codec=codec, fragments=fragments, overlap=overlap, merge=merge, weight_by=weight_by,
            clip=clip, average=average, continue_from=continue_from, timeout_s=timeout_s,
        )  # fmt: skip
        self.outer = choose_outer(outer, [codec, *Policy.of(policy).rules.values()])
        self.optimizers, self.optimizer, self.model = as_optimizers(optimizer), optimizer, model
        self._replica = Replica(model, group)
        if clip is not None and self._replica.sharded:
            raise ConfigError(
                "clip='median' needs the norm of whole changes, and FSDP2 ranks hold shards: leave clip out"
            )
        self.steps = self.residual_resets = self.skipped_steps = self.regroups = 0
        self._policy, self._nonfinite = policy, nonfinite
        self._storage = ResidualStorage.of(residual_dtype, residual_device)
        self._inside = self._share_inside()
        self._join(group)
        self._require_same_settings("LocalSGD")
        with torch.no_grad(), peer_failure_as_error(self.group, "received the first weights"):
            values = [x for _, x in self._replica.all_values()]
            broadcast_all(values, ranks_of(self.group)[0], self.group, self.exchange.stats)
        self._fragments = make_fragments(self._replica, fragments, every, self._outer_step)
        self._in_flight: PendingRound | None = None
        if self._rounds.rank == 0:
            advise_longer_mean(self.outer, self.optimizers, every, self._rounds.size)
        self._warn_about_foreign_parameters()

    def _share_inside(self) -> ReplicaRanks | None:
        """Return the ranks of this replica among which its exchange is divided, so that slow links carry it once.

        To continue from its residual a rank needs all of it, so then each rank exchanges everything.
        """
        group = self._replica.inner_group
        if group is None or dist.get_world_size(group) == 1 or self.options.continue_from == "local":
            return None
        with peer_failure_as_error(group, "made a process group of its replica"):
            return ReplicaRanks(group, self.options.timeout_s)

    def _join(self, group: dist.ProcessGroup | None, stats: LocalStats | None = None) -> None:
        """Exchange with the ranks of a group from now on."""
        own = self.options.overlap > 0 or self.options.timeout_s is not None
        stats = LocalStats() if stats is None else stats
        with peer_failure_as_error(group, "made a process group of its own"):
            self.group = group_of_same_ranks(group, self.options.timeout_s, stats) if own else group
        self.exchange = Exchange(
            self.options.codec, self.group, policy=self._policy, nonfinite=self._nonfinite,
            average=self.options.average, stats=stats, storage=self._storage,
        )  # fmt: skip
        self._rounds = Rounds(self.exchange, self.options, self._inside, stats)

    def _require_same_settings(self, call: str) -> None:
        outer = self.outer if isinstance(self.outer, str) else "a function"
        options = asdict(self.options) | {"outer": outer, "nonfinite": self._nonfinite}
        settings = {"codec": self.options.codec, "policy": repr(self.exchange.policy), "options": repr(options)}
        settings |= describe(self._replica.all_values())
        require_same_on_all_ranks(call, settings, self.group, self.exchange.stats)

    def _outer_step(self, names: list[str], anchors: list[Tensor]) -> OuterStep:
        return OuterStep(self.outer, names, anchors)

    def _warn_about_foreign_parameters(self) -> None:
        foreign = self._replica.foreign_parameters(self.optimizers)
        if foreign:
            log.warning(
                "the optimizer trains %d tensors that are not parameters of the model: they are not exchanged and will "
                "differ between ranks (counted in stats)", foreign
            )  # fmt: skip

    def __repr__(self) -> str:
        kinds = ", ".join(type(each).__name__ for each in self.optimizers)
        return f"LocalSGD({self.options.codec!r}, every={self.every}, optimizers=[{kinds}], steps={self.steps})"

    @property
    def every(self) -> int:
        return self.options.every

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all inner optimizers, for ``torch.amp.GradScaler``."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    # --------------------------------------------------------------------------------------------------------- steps

    def step(self, closure: Callable[[], float] | None = None, *, tokens: float | None = None) -> Any:
        """Take a local step, and exchange if it is due; return the result of the optimizer's step.

        Args:
            closure: As in torch; only with one optimizer.
            tokens: How many tokens (or examples) this rank's step used, with ``weight_by="tokens"``.
        """
        if not self.optimizers:
            raise ConfigError("LocalSGD was given no optimizer: step yours, then call after_step()")
        if closure is not None and len(self.optimizers) > 1:
            raise ConfigError(f"a closure needs one optimizer, LocalSGD has {len(self.optimizers)}: leave it out")
        self._check_tokens(tokens)
        self._replica.require_no_new_parameters(look_for_added=False)
        result = None
        if self._unscaled():
            if closure is not None:
                result = self.optimizers[0].step(closure)
            else:
                results = [optimizer.step() for optimizer in self.optimizers]
                result = results[0] if len(results) == 1 else None
        self._count_step(tokens)
        return result

    def after_step(self, *, tokens: float | None = None) -> None:
        """Count a step that the caller took with the optimizers, or skipped, and exchange if it is due."""
        self._check_tokens(tokens)
        self._replica.require_no_new_parameters(look_for_added=False)
        self._count_step(tokens)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def _unscaled(self) -> bool:
        """Divide gradients by the scale that GradScaler left here; False if it found values that are not finite."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and float(found_inf):
            self.skipped_steps += 1
            return False
        if scale is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, float(scale))
        return True

    def _check_tokens(self, tokens: float | None) -> None:
        if (tokens is None) != (self.options.weight_by is None):
            raise ConfigError(
                f"tokens must be given if and only if weight_by='tokens', got tokens={tokens!r} with "
                f"weight_by={self.options.weight_by!r}"
            )
        if tokens is not None and not 0 <= tokens < float("inf"):
            raise InputError(f"tokens must be a number from 0 on, got {tokens!r}")

    def _count_step(self, tokens: float | None) -> None:
        self.steps += 1
        for fragment in self._fragments:
            fragment.tokens += tokens or 0.0
        if self._in_flight is not None and self.steps >= self._in_flight.due:
            self._apply_in_flight()
        position = (self.steps - 1) % self.every + 1
        for fragment in self._fragments:
            if fragment.due == position:
                self._exchange(fragment, self.options.overlap, self.options.own_weight)

    # ----------------------------------------------------------------------------------------------------- exchanges

    @torch.no_grad()
    def _exchange(self, fragment: Fragment, overlap: int = 0, merge: float = 0.0) -> None:
        """Exchange a fragment now, or begin to, if its result is to be applied later."""
        self._replica.require_no_new_parameters(look_for_added=True)
        if self._rounds.size == 1 and self.outer == "mean":  # no detour through differences, which would round
            self._rounds.stats.exchanges += 1
            fragment.tokens, fragment.exchanged_at = 0.0, self.steps
            fragment.take_anchors_from_parameters()
            return
        last = fragment.index == len(self._fragments) - 1
        buffers = self._replica.float_buffers() if last else []
        overlap = overlap if self._rounds.size > 1 else 0
        pending = self._rounds.begin(fragment, buffers, self.steps + overlap, overlap=overlap > 0)
        fragment.exchanged_at = self.steps
        if overlap:
            self._in_flight = pending
        else:
            self._apply(pending, merge)

    def _apply_in_flight(self) -> None:
        pending, self._in_flight = self._in_flight, None
        if pending is not None:
            self._rounds.wait(pending)
            self._apply(pending, self.options.own_weight)

    def _drop_in_flight(self) -> None:
        pending, self._in_flight = self._in_flight, None
        if pending is not None:
            self._rounds.wait(pending)

    @torch.no_grad()
    def _apply(self, pending: PendingRound, merge: float) -> None:
        """Let the outer optimizer move the global model by the mean of the changes, and this rank's model to it."""
        fragment = pending.fragment
        self._replica.reshard()
        fragment.outer.apply(pending.changes)
        residual = self.exchange.residual if self.options.continue_from == "local" else None
        fragment.restore(merge, residual, starts=pending.starts)
        now = dict(self._replica.float_buffers()) if pending.buffers else {}
        for name, mean in pending.buffers:
            if name in pending.buffer_starts:
                now[name].add_(mean - pending.buffer_starts[name])
            elif merge:
                now[name].lerp_(mean, 1.0 - merge)
            elif now[name] is not mean:
                now[name].copy_(mean)
        stats = self.exchange.stats
        log.log(
            logging.INFO if self._rounds.stats.exchanges <= len(self._fragments) else logging.DEBUG,
            "LocalSGD: exchange %d, of %d parameters, was applied after step %d: %d bytes handed over so far, %.3f s "
            "waited", self._rounds.stats.exchanges, len(fragment.names), self.steps, stats.wire_bytes,
            self._rounds.stats.waited_s,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Exchange now and set all ranks to the global model. Call it before saving the model between exchanges.

        Exchanges that are under way are completed first. Fragments that were exchanged after this very step are not
        exchanged again.
        """
        self._apply_in_flight()
        for fragment in self._fragments:
            if not self.steps or fragment.exchanged_at != self.steps:
                self._exchange(fragment)
            fragment.restore()

    def finish(self) -> None:
        """Synchronize for the last time and end the thread: all ranks hold the global model, the same bits."""
        self.synchronize()
        self._rounds.close()

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """Let the module hold the global model in a ``with`` block, to evaluate it between exchanges; no exchange."""
        self._replica.reshard()
        kept = [[value.clone() for value in fragment.values()] for fragment in self._fragments]
        displaced = [fragment.displaced for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.restore()
        try:
            yield self.model
        finally:
            self._replica.reshard()
            for fragment, values, was_displaced in zip(self._fragments, kept, displaced, strict=True):
                torch._foreach_copy_(fragment.values(), values)
                fragment.displaced = was_displaced

    def include_new_parameters(self) -> list[str]:
        """Exchange parameters that are trained now and were not before. All ranks call it; returns their names.

        They continue from rank 0's values, as part of the last fragment.
        """
        self._apply_in_flight()
        new = self._replica.new_parameters()
        settings = {"parameters": repr([(name, list(x.shape), str(x.dtype)) for name, x in new])}
        require_same_on_all_ranks("include_new_parameters", settings, self.group, self.exchange.stats)
        fragment = self._fragments[-1]
        for name, parameter in new:
            with torch.no_grad(), peer_failure_as_error(self.group, f"received parameter {name}"):
                broadcast_all([values_of(parameter)], ranks_of(self.group)[0], self.group, self.exchange.stats)
            self._replica.include(name, parameter)
            fragment.names.append(name)
            fragment.parameters.append(parameter)
            fragment.anchors.append(values_of(parameter).clone())
            fragment.outer.add(name, fragment.anchors[-1])
            log.info("LocalSGD exchanges %r from now on", name)
        return [name for name, _ in new]

    def regroup(self, group: dist.ProcessGroup | None) -> None:
        """Continue with the ranks of another group, after ranks have joined or left. All ranks of it call it.

        The rank that has taken most steps (the first of several) sends the global model, the outer optimizer's memory
        and the number of steps to all. A rank that was in step with it keeps its own progress since the last exchange
        and its residuals; a new rank makes its LocalSGD with ``group`` a group of itself alone, and then calls this.
        """
        membership.regroup(self, group)

    # --------------------------------------------------------------------------------------------- counts and states

    def _residual_norms(self) -> dict[str, float]:
        if self._in_flight is not None:  # the thread changes residuals
            return {}
        named = [pair for f in self._fragments for pair in zip(f.names, f.anchors, strict=True)]
        residuals = ((name, self.exchange.residual(name, anchor)) for name, anchor in named)
        return {name: float(x.norm()) for name, x in residuals if x is not None}

    def stats(self, *, residual_norms: bool = True) -> dict[str, Any]:
        """Return this rank's counts, bytes and seconds so far.

        Bytes are counted where tensors are handed to ``torch.distributed``: ``bytes_sent`` and ``bytes_received`` in
        messages, ``bytes_reduced`` in all-reduces, ``bytes_broadcast`` of the first weights; ``wire_bytes`` is all that
        this rank hands over. ``ring_bytes_estimate`` is a model.

        Args:
            residual_norms: Compute the norm of what each slot has yet to send, which reads all residuals. There are
                none while an exchange is under way.
        """
        stats = self._rounds.stats
        return stats.by_name() | {
            "spec": self.options.codec, "steps": self.steps,
            "ring_bytes_estimate": stats.ring_bytes_estimate(self._rounds.size), "ranks": self._rounds.size,
            "outer": self.outer if isinstance(self.outer, str) else "a function",
            "optimizers": [type(each).__name__ for each in self.optimizers],
            "foreign_parameters": self._replica.foreign_parameters(self.optimizers),
            "bytes_inside": 0 if self._inside is None else self._inside.stats.wire_bytes,
            "fragments": len(self._fragments), "in_flight": self._in_flight is not None,
            "skipped_steps": self.skipped_steps, "regroups": self.regroups,
            "residual_resets": self.residual_resets + self.exchange.residual_resets,
            "residual_bytes": self.exchange.residual_nbytes,
            "residual_norms": self._residual_norms() if residual_norms else {},
            "exempt": dict(self.exchange.exempt),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory besides model and optimizers: residuals, outer optimizer, global model.

        It waits for an exchange that is under way and keeps its result, which a resumed run applies when it is due.
        """
        if self._in_flight is not None:
            self._rounds.wait(self._in_flight)
        return state.save(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state. Residuals of another rank or number of ranks are dropped and logged."""
        state.load(self, saved)
