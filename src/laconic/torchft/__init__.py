"""torchft: its all-reduces, for DDP and for DiLoCo's fragments, by any codec, while replicas come and go.

``attach(manager, spec)`` serves an existing ``torchft.Manager``. torchft itself is not imported here: install it with
``pip install 'laconic[torchft]'``.
"""

from __future__ import annotations

from laconic.torchft.attachment import TorchftAttachment, attach

__all__ = ["TorchftAttachment", "attach"]
