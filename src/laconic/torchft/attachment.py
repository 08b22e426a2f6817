"""attach: one line that makes a torchft manager's all-reduces use a codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import parse
from laconic.collective.saved_state import saved_by_name
from laconic.errors import ConfigError, InputError
from laconic.policy import Policy
from laconic.torchft.group import CompressedGroup
from laconic.torchft.memory import Counts, ReplicaMemory
from laconic.torchft.naming import SlotNames, fragments_of, require_supported

__all__ = ["TorchftAttachment", "attach"]

STATE_KEY = "laconic"
"""Under which a healing replica receives the common memory, beside the model and the optimizer."""

_NEEDED = ("_pg", "allreduce", "current_step", "is_participating", "register_state_dict_fn", "should_commit")


class TorchftAttachment:
    """The compressed exchange of one torchft manager, returned by ``attach``, which describes the arguments."""

    def __init__(self, manager: Any, spec: str, policy: Policy, nonfinite: str) -> None:
        self.spec, self._manager = spec, manager
        self._counts, self._names = Counts(), SlotNames()
        self._memory = ReplicaMemory(spec, policy, nonfinite, self._counts)
        self._group = CompressedGroup(manager._pg, manager, self._memory, self._names)
        manager._pg = self._group
        should_commit: Callable[..., bool] = manager.should_commit

        def settled(*arguments: Any, **options: Any) -> bool:
            """Decide on the step as torchft does, and note the decision for the residuals."""
            error = self._group.drain()
            if error is not None:
                manager.report_error(error)
            committed = False
            try:
                committed = should_commit(*arguments, **options)
            finally:
                self._memory.end_attempt(committed)
                self._names.begin_step()
            return committed

        manager.should_commit = settled
        manager.allreduce = _with_future_for_ddp(manager.allreduce)
        manager.register_state_dict_fn(STATE_KEY, self._memory.load_common_state, self._memory.common_state)

    def __repr__(self) -> str:
        return f"TorchftAttachment({self.spec!r}, committed_steps={self._counts.committed_steps})"

    def name(self, source: Any) -> None:
        """Take slot names from a torchft DDP module or from the fragments of a DiLoCo; call it before the first step.

        Without names, slots are distinguished by their order, shape and dtype among the all-reduces of a step, which
        must then be the same in every step. Parts of DDP buckets are then not distinguished.
        """
        require_supported(source)
        if isinstance(source, DistributedDataParallel):
            self._names.use_ddp(source)
        for index, fragment in enumerate(fragments_of(source)):
            fragment.prepare_sync = self._named(f"fragment{index}", fragment, fragment.prepare_sync)

    def _named(self, prefix: str, fragment: Any, prepare_sync: Callable[[], None]) -> Callable[[], None]:
        parameters = [name for name, _ in fragment._model_fragment.named_parameters()]

        def named_prepare_sync() -> None:
            names = [] if fragment.use_bucketization else parameters
            with self._names.fragment(prefix, names):
                prepare_sync()
            self._group.begin()  # the fragment travels while the replica goes on training

        return named_prepare_sync

    def stats(self) -> dict[str, Any]:
        """Return this replica's counts, bytes and seconds so far.

        ``bytes_reduced``, ``bytes_sent`` and their sum ``wire_bytes`` are counted where tensors are handed to torchft's
        process group; ``uncompressed`` counts all-reduces that did not use the codec, by reason.
        """
        exchange = self._memory.exchange
        resets = self._counts.residual_resets + (0 if exchange is None else exchange.residual_resets)
        return self._counts.by_name() | {
            "spec": self.spec, "residual_resets": resets, "uncompressed": dict(self._group.uncompressed),
            "exempt": {} if exchange is None else dict(exchange.exempt),
        }  # fmt: skip

    def unsent(self) -> dict[str, Tensor]:
        """Return, by slot, what this replica has yet to add to the sums: a copy, for inspection between two steps."""
        return self._memory.unsent()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this replica's residuals, to be saved between two steps with the model and the manager's state.

        They fit any number of replicas. Each replica saves its own: healing never copies them from another one.
        """
        return self._memory.portable_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the residuals that this replica saved."""
        if not all("//" in key for key in saved_by_name(state)):
            raise InputError("expected the result of TorchftAttachment.state_dict")
        self._memory.load_portable_state(state)


def _with_future_for_ddp(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Let torchft's DDP survive the DDP buckets after the one that failed.

    Its hook reads ``_fut`` of every future. A manager that has noted an error returns a future without it, so the hook
    would raise (torchft 0.2).
    """

    def patched(*arguments: Any, **options: Any) -> Any:
        work = all_reduce(*arguments, **options)
        if type(work).__name__ == "_DummyWork":
            future = work.get_future()
            future._fut = future
        return work

    return patched


def attach(
    manager: Any, spec: str, names: Any = None, *, policy: Policy | Mapping[str, str] | None = None,
    nonfinite: str = "spread",
) -> TorchftAttachment:  # fmt: skip
    """Exchange what a torchft manager averages by a codec. Every replica calls it before its first step.

    It serves ``torchft.DistributedDataParallel``, ``torchft.local_sgd.DiLoCo`` and calls of ``Manager.allreduce``.
    Residuals stay with their replica: they survive a change of the quorum, wait while the replica is healed, and are
    put back when torchft discards a step.

    Args:
        manager: A ``torchft.Manager`` whose process group has the gloo backend (tensors may be on a GPU).
        spec: A codec or channel: ``ef|qsgd:4``, ``ef|thc:4``, ``qsgd:8``; ``none`` is plain torchft, bit for bit.
        names: The torchft DDP module, or the DiLoCo, that the manager serves: slots then have the names of parameters,
            for ``policy``, for the exemption of small tensors, and for codecs of matrices.
        policy: Codecs by name pattern; by default small and one-dimensional tensors are not compressed.
        nonfinite: What to do with a tensor if a value of some replica is not finite: ``spread`` (NaN on all replicas),
            ``skip`` (leave it out) or ``raise`` (torchft discards the step).
    """
    parse(spec)
    missing = [name for name in _NEEDED if not hasattr(manager, name)]
    if missing:
        raise ConfigError(f"expected a torchft.Manager, got {type(manager).__name__} without {missing[0]!r}")
    if isinstance(manager._pg, CompressedGroup):
        raise ConfigError("the manager is attached already: create another Manager to use another codec")
    backend = str(manager._pg.getBackendName())
    if "gloo" not in backend or "baby" in backend:
        raise ConfigError(
            f"laconic exchanges through torchft.ProcessGroupGloo, got a group with the backend {backend!r}: pass "
            "pg=ProcessGroupGloo(timeout=…) to the manager; its tensors may be on a GPU"
        )
    if getattr(manager, "_quorum_id", -1) != -1:
        raise ConfigError("the manager has taken steps already: attach before the first step")
    if names is not None:
        require_supported(names)
    if nonfinite not in ("spread", "skip", "raise"):
        raise ConfigError(f"nonfinite must be one of spread, skip, raise, got {nonfinite!r}")
    attachment = TorchftAttachment(manager, spec, Policy.of(policy), nonfinite)
    if names is not None:
        attachment.name(names)
    return attachment
