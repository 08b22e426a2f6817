"""Who sits at a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from laconic.channels import Channel
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.replies import RefusedError, Reply

__all__ = ["WorkerSession"]


@dataclass
class WorkerSession:
    """A worker's place: who sits there, and how far it is."""

    incarnation: int = -1
    clock: int = 0
    """Exchanges it has had answered."""
    reply: Reply | None = None
    """What it was answered last, where it could not be made again."""
    held: dict[str, Tensor] = field(default_factory=dict)
    """The weights it holds, where it is sent their changes and others hold others."""
    channel: Channel | None = None
    present: bool = False
    receiver: PushReceiver | None = None
    """Where its push arrives now."""
    asked: int = -1
    """Its last request to agree, by number."""
    answered: int = -1
    """The last one that came to an agreement."""
    lost: bool = False
    """Whether it was to begin with an empty memory."""

    def let_go(self, receiver: PushReceiver) -> None:
        """Nothing more arrives there."""
        if self.receiver is receiver:
            self.receiver = None

    def replaced(self, worker: int, incarnation: int) -> RefusedError:
        return RefusedError(
            "incarnation", f"worker {worker} of incarnation {incarnation} was replaced by {self.incarnation}"
        )
