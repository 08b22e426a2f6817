"""LocalSGD for trainers: Lightning, Hugging Face Accelerate and Trainer.

Each trainer starts ranks and gives each its own share of the data, as for DDP, but the module stays bare: ranks step
alone, and LocalSGD exchanges after every so many steps. The model is synchronized before a trainer tests or saves it.
Trainers save the optimizer of rank 0 only, so each rank writes its own beside their checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.collective.local import LocalSGD
from laconic.collective.rank_files import read_state, write_state
from laconic.collective.trainers import library
from laconic.errors import ConfigError

__all__ = ["TrainerLocalSGD", "accelerate_local", "lightning_local", "local_trainer"]

log = logging.getLogger("laconic")


class TrainerLocalSGD:
    """The LocalSGD of a trainer, made when training begins, and its files beside the trainer's checkpoints."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        if "weight_by" in self.options:
            raise ConfigError("weight_by needs the tokens of each step, which trainers do not tell: leave it out")
        self.local: LocalSGD | None = None
        self._synchronized_at = 0

    def begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make the LocalSGD. All ranks call it, with equal options."""
        if isinstance(model, DistributedDataParallel):
            raise ConfigError("the trainer wrapped the model in DistributedDataParallel before LocalSGD was set up")
        self.local = LocalSGD(model, list(optimizers), **self.options)
        self._synchronized_at = 0

    def after_step(self) -> None:
        """Count a step of the trainer's optimizers, and exchange if it is due."""
        assert self.local is not None, "begin was not called"
        self.local.after_step()

    def synchronize(self) -> None:
        """Set all ranks to the same model, unless they have taken no step since they were."""
        if self.local is not None and self.local.steps != self._synchronized_at:
            self._synchronized_at = self.local.steps
            self.local.synchronize()

    def finish(self) -> None:
        """Set all ranks to the same model for the last time."""
        if self.local is not None:
            self._synchronized_at = self.local.steps
            self.local.finish()

    def save(self, file: Path) -> None:
        """Write what this rank needs to continue beside the model: its LocalSGD and its optimizers."""
        assert self.local is not None, "begin was not called"
        optimizers = [optimizer.state_dict() for optimizer in self.local.optimizers]
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(file.name + ".new")
        write_state({"local": self.local.state_dict(), "optimizers": optimizers}, new)
        new.replace(file)

    def load(self, file: Path) -> None:
        """Continue from a saved file; without one, residuals start empty, which is logged."""
        assert self.local is not None, "begin was not called"
        if not file.exists():
            log.warning("%s does not exist: residuals start empty, and the optimizer with the trainer's state", file)
            return
        saved = read_state(file)
        for optimizer, state in zip(self.local.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.local.load_state_dict(saved["local"])
        self._synchronized_at = self.local.steps


def _rank_file(folder: Path, prefix: str = "") -> Path:
    return folder / f"{prefix}laconic-rank{dist.get_rank()}.safetensors"


# --------------------------------------------------------------------------------------------------------- transformers


def local_trainer(trainer: Any, **options: Any) -> TrainerLocalSGD:
    """Let a transformers ``Trainer`` train by LocalSGD. Call it before ``trainer.train()``.

    Args:
        trainer: A ``transformers.Trainer``.
        options: Options of ``laconic.LocalSGD``.
    """
    transformers = library("transformers")
    local = TrainerLocalSGD(options)
    _leave_models_bare(trainer.accelerator)
    train, resumed = trainer.train, [trainer.args.resume_from_checkpoint]

    def noting_train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        resumed[0] = resume_from_checkpoint or trainer.args.resume_from_checkpoint
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = noting_train  # callbacks do not receive the checkpoint that is resumed

    class LaconicLocalCallback(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            local.begin(trainer.model_wrapped, [_inner(trainer.optimizer)])
            if state.global_step:
                given = isinstance(resumed[0], (str, Path))  # True: the last one of the output folder
                local.load(_rank_file(Path(resumed[0]) if given else _checkpoint(trainer)))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            local.after_step()

        # The default callbacks, which come first, have decided here whether the model is tested or saved next. Training
        # may end by loading the best model, so on_train_end would be too late.
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_evaluate or control.should_save or control.should_training_stop:
                local.synchronize()

        on_epoch_end = on_step_end

        def on_save(self, *_: Any, **__: Any) -> None:
            local.save(_rank_file(_checkpoint(trainer)))

    trainer.add_callback(LaconicLocalCallback())
    return local


def _checkpoint(trainer: Any) -> Path:
    return Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{trainer.state.global_step}"


# ----------------------------------------------------------------------------------------------------------- Accelerate


def accelerate_local(
    accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *others: Any, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Prepare a model for LocalSGD with Accelerate; return the model, its LocalSGD, and the other prepared objects.

    Call ``step`` and ``zero_grad`` of the LocalSGD where you called those of the optimizer. Steps in which Accelerate
    accumulates gradients are not counted.

    Args:
        accelerator: An ``accelerate.Accelerator``.
        model: The bare module.
        optimizer: One optimizer or several.
        others: Data loaders and schedulers.
        options: Options of ``laconic.LocalSGD``.
    """
    _leave_models_bare(accelerator)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    prepared = accelerator.prepare(model, *optimizers, *others)
    count = len(optimizers)

    class AcceleratedLocalSGD(LocalSGD):
        def step(self, closure: Any = None, *, tokens: float | None = None) -> Any:
            result = None
            for each in self.optimizers:  # they do nothing while gradients accumulate, and scale gradients
                result = each.step(closure)
            if accelerator.sync_gradients:
                self.after_step(tokens=tokens)
            return result

    local = AcceleratedLocalSGD(prepared[0], list(prepared[1 : count + 1]), **options)
    return (prepared[0], local, *prepared[count + 1 :])


def _leave_models_bare(accelerator: Any) -> None:
    """Let an accelerator prepare models without DDP, as it does for evaluation: mixed precision, device, compile."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI"):
        raise ConfigError(f"LocalSGD needs plain data parallelism in Accelerate, got distributed_type={kind}")
    prepare = type(accelerator).prepare_model

    def prepare_bare(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True) -> Any:
        return prepare(accelerator, model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare_bare


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


# ------------------------------------------------------------------------------------------------------------ Lightning


def lightning_local(ddp: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return a Lightning strategy that trains by LocalSGD: ``Trainer(strategy=lightning_local(every=20, …))``.

    Its attribute ``local`` is the LocalSGD, once training has begun. With several optimizers a step is counted when the
    last of them steps.

    Args:
        ddp: Arguments of Lightning's ``DDPStrategy``, which starts the ranks.
        options: Options of ``laconic.LocalSGD``.
    """
    pytorch = library("lightning.pytorch", "pytorch_lightning")

    class LocalSGDStrategy(pytorch.strategies.DDPStrategy):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(**(ddp or {}))
            self._trained = TrainerLocalSGD(options)
            self._resumed: Path | None = None

        @property
        def local(self) -> LocalSGD | None:
            return self._trained.local

        def configure_ddp(self) -> None:
            """Leave the module bare."""

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            if trainer.state.fn == "fit":
                self._trained.begin(self.model, self.optimizers)

        def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().optimizer_step(optimizer, *args, **kwargs)
            if optimizer is self.optimizers[-1]:
                self._trained.after_step()
            return result

        def on_validation_start(self) -> None:
            self._trained.synchronize()
            super().on_validation_start()

        def on_train_end(self) -> None:
            self._trained.finish()
            super().on_train_end()

        def lightning_module_state_dict(self) -> dict[str, Any]:
            self._trained.synchronize()  # all ranks collect a checkpoint; rank 0 writes it
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            if "optimizer_states" in checkpoint and self.local is not None:
                self._trained.save(_beside(filepath))

        def remove_checkpoint(self, filepath: Any) -> None:
            super().remove_checkpoint(filepath)
            _beside(filepath).unlink(missing_ok=True)

        def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            self._resumed = Path(checkpoint_path)
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            super().load_optimizer_state_dict(checkpoint)  # that of rank 0
            if self._resumed is not None:
                self._trained.load(_beside(self._resumed))

    return LocalSGDStrategy()


def _beside(checkpoint: str | Path) -> Path:
    path = Path(checkpoint)
    return _rank_file(path.parent, f"{path.name}.")
