"""attach for trainers that make the DDP module themselves: Lightning, Hugging Face Accelerate and Trainer.

Each library is imported when its function is called. The callbacks verify in the first step that the hook was called:
Lightning drops hooks on the CPU silently, and a run must not continue uncompressed without notice.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from laconic.collective.attaching import attach
from laconic.collective.attachment import Attachment
from laconic.errors import ConfigError, LaconicError

__all__ = ["TrainerAttachment", "accelerate_handler", "attach_trainer", "lightning_callback"]


class TrainerAttachment:
    """Attaches a trainer's DDP module when it exists, and verifies that the hook is used."""

    def __init__(self, spec: str, options: Mapping[str, Any]) -> None:
        self.spec, self.options = spec, dict(options)
        self.attachment: Attachment | None = None
        self._saved: dict[str, Tensor] | None = None

    def begin(self, module: nn.Module) -> None:
        """Attach the DDP module. A second fit of a trainer may bring another one."""
        if self.attachment is None or not self.attachment.serves(module):
            self.attachment = attach(module, self.spec, **self.options)
            if self._saved is not None:
                self.attachment.load_state_dict(self._saved)
                self._saved = None

    def stepped(self) -> None:
        """Raise ``LaconicError`` if the step's gradients were not exchanged through the hook."""
        if self.attachment is None:
            raise LaconicError(f"{self.spec!r} was not attached: the trainer made no DDP module. Use its DDP strategy")
        if self.attachment.hooked and not self.attachment.stats()["steps"]:
            raise LaconicError(
                f"{self.spec!r} is attached, but its hook was not called in the first step: gradients were exchanged "
                "some other way. Report how the trainer was set up"
            )

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.attachment is None else self.attachment.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state, now or as soon as there is an attachment."""
        if self.attachment is not None:
            self.attachment.load_state_dict(state)
        elif state:
            self._saved = dict(state)


def library(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise ConfigError(f"{names[0]} is not installed: pip install {names[0].partition('.')[0]}")


def lightning_callback(spec: str, **options: Any) -> Any:
    """Return a Lightning callback that attaches the DDP module: ``Trainer(callbacks=[…], strategy="ddp")``.

    Args:
        spec: As in ``laconic.attach``.
        options: Options of ``laconic.attach``.
    """
    pytorch = library("lightning.pytorch", "pytorch_lightning")

    class LaconicCallback(pytorch.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._attached = TrainerAttachment(spec, options)

        @property
        def attachment(self) -> Attachment | None:
            return self._attached.attachment

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._attached.begin(trainer.strategy.model)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self._attached.stepped()

        def state_dict(self) -> dict[str, Any]:
            return self._attached.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._attached.load_state_dict(state_dict)

    return LaconicCallback()


def accelerate_handler(spec: str, ddp: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return an Accelerate handler that attaches prepared modules: ``Accelerator(kwargs_handlers=[…])``.

    Its attribute ``attachment`` is that of the module that was prepared last, or None.

    Args:
        spec: As in ``laconic.attach``.
        ddp: Arguments of ``DistributedDataParallel``, as in ``DistributedDataParallelKwargs``.
        options: Options of ``laconic.attach``.
    """
    utils = library("accelerate.utils")

    # Accelerate looks a handler's very class up, so methods are replaced in the instance instead of in a subclass. All
    # attributes of a handler would become arguments of DDP, but for to_kwargs.
    handler = utils.DistributedDataParallelKwargs(**(ddp or {}))
    arguments = handler.to_kwargs()

    def register_comm_hook(model: nn.Module) -> None:
        handler.attachment = attach(model, spec, **options)

    handler.attachment, handler.register_comm_hook, handler.to_kwargs = None, register_comm_hook, lambda: arguments
    return handler


def attach_trainer(trainer: Any, spec: str, **options: Any) -> TrainerAttachment:
    """Attach the DDP module that a transformers ``Trainer`` makes when training begins.

    Args:
        trainer: A ``transformers.Trainer``.
        spec: As in ``laconic.attach``.
        options: Options of ``laconic.attach``.
    """
    transformers = library("transformers")
    attached = TrainerAttachment(spec, options)

    class LaconicTrainerCallback(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            attached.begin(trainer.model_wrapped)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            attached.stepped()

    trainer.add_callback(LaconicTrainerCallback())
    return attached
