"""attach where a trainer makes the DDP module: Lightning, Hugging Face Accelerate and Trainer.

Each library is imported when its function is called. All of them look whether the hook was really called: Lightning
drops hooks on the CPU without a word, and a run that believes to be compressed and is not should not go on.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from laconic.collective.attachment import Attachment, attach
from laconic.errors import ConfigError, LaconicError

__all__ = ["Watch", "accelerate_handler", "attach_trainer", "lightning_callback"]


class Watch:
    """An attachment to be, and whether it is used."""

    def __init__(self, spec: str, options: Mapping[str, Any]) -> None:
        self.spec, self.options = spec, dict(options)
        self.attachment: Attachment | None = None
        self._saved: dict[str, Tensor] | None = None

    def begin(self, module: nn.Module) -> None:
        """The DDP module is there."""
        if self.attachment is None or self.attachment.module is not module:
            self.attachment = attach(module, self.spec, **self.options)
            if self._saved is not None:
                self.attachment.load_state_dict(self._saved)
                self._saved = None

    def stepped(self) -> None:
        """Gradients were exchanged, or should have been."""
        if self.attachment is None:
            raise LaconicError(
                f"{self.spec!r} was never attached: the trainer made no DDP module. Use its DDP strategy"
            )
        if self.attachment.hooked and not self.attachment.stats()["steps"]:
            raise LaconicError(
                f"{self.spec!r} is attached, but its hook was not called in the first step: gradients were exchanged "
                "some other way. Report how the trainer was set up"
            )

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.attachment is None else self.attachment.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Kept until there is an attachment."""
        if self.attachment is not None:
            self.attachment.load_state_dict(state)
        elif state:
            self._saved = dict(state)


def _library(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise ConfigError(f"{names[0]} is not installed: pip install {names[0].partition('.')[0]}")


def lightning_callback(spec: str, **options: Any) -> Any:
    """A Lightning callback that attaches the strategy's DDP module: ``Trainer(callbacks=[…], strategy="ddp")``.

    Args:
        spec: As in ``laconic.attach``.
        options: The same.
    """
    pytorch = _library("lightning.pytorch", "pytorch_lightning")

    class LaconicCallback(pytorch.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.watch = Watch(spec, options)

        @property
        def attachment(self) -> Attachment | None:
            return self.watch.attachment

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch.begin(trainer.strategy.model)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.watch.stepped()

        def state_dict(self) -> dict[str, Any]:
            return self.watch.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.watch.load_state_dict(state_dict)

    return LaconicCallback()


def accelerate_handler(spec: str, ddp: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """A handler for Accelerate: set ``accelerator.ddp_handler`` to it before ``prepare``; it attaches what is prepared.

    Args:
        spec: As in ``laconic.attach``.
        ddp: Arguments of ``DistributedDataParallel``, as in ``DistributedDataParallelKwargs``.
        options: Those of ``attach``.
    """
    utils = _library("accelerate.utils")

    made: list[Attachment] = []  # not in the handler: all that it holds becomes arguments of DDP

    class LaconicHandler(utils.DistributedDataParallelKwargs):  # type: ignore[misc, name-defined]
        @property
        def attachment(self) -> Attachment | None:
            return made[-1] if made else None

        def register_comm_hook(self, model: nn.Module) -> None:
            made.append(attach(model, spec, **options))

    return LaconicHandler(**(ddp or {}))


def attach_trainer(trainer: Any, spec: str, **options: Any) -> Watch:
    """Attach the DDP module that a transformers ``Trainer`` makes when it begins to train.

    Args:
        trainer: A ``transformers.Trainer``.
        spec: As in ``laconic.attach``.
        options: The same.
    """
    transformers = _library("transformers")
    watch = Watch(spec, options)

    class LaconicTrainerCallback(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch.begin(trainer.model_wrapped)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            watch.stepped()

    trainer.add_callback(LaconicTrainerCallback())
    return watch
