"""Task: what a worker trains, and how well it does. Everything follows from the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from laconic.errors import ConfigError
from laconic.kernels import random
from laconic.layers import compress, dense_numel
from laconic.train import script as scripts
from laconic.train.data import load, load_text
from laconic.train.data_shards import shuffled
from laconic.train.examples import Batch, Examples, ImageExamples, TextExamples, examples_of
from laconic.train.models import GPT, MODELS, build_model, seeded

__all__ = ["DATA", "Task", "build_task"]

DATA = ("digits", "mnist", "cifar10", "text")

HOLDOUT = 303
"""Stream of the seed that decides which examples are held out."""

CHUNK = 128  # examples that are evaluated at once
STATISTICS = 2048  # examples from which batch norm's statistics are taken

Loss = Callable[[Tensor, Tensor], Tensor]


class Task:
    """A model, examples to train and test it with, and a loss.

    ``evaluate`` and ``judge`` are functions of the model's parameters alone, in whichever process: where there is batch
    norm its running statistics, which workers do not exchange, are taken anew from 2,048 training examples.

    Args:
        name: Of the task, for people.
        model: Trained where it is: batches are moved to the device of its parameters.
        train: Two tensors (inputs, targets), a torch Dataset of pairs, or ``Examples``.
        test: The same.
        loss: Of outputs and targets, a mean over the examples.
        holdout: The fraction of ``train`` that ``judge`` looks at and nobody trains with, in [0, 1).
        seed: Decides which.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        train: object,
        test: object,
        loss: Loss,
        *,
        holdout: float = 0.05,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model must be a torch module, got {type(model).__name__}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("the model has no parameters to train")
        if not callable(loss):
            raise ConfigError(f"the loss must be a function of outputs and targets, got {type(loss).__name__}")
        if not 0 <= holdout < 1:
            raise ConfigError(f"holdout must be in [0, 1), got {holdout}")
        self.name, self.model, self._loss = name, model, loss
        self._examples, self._test = examples_of(train, "the training set"), examples_of(test, "the test set")
        count = len(self._examples)
        held = max(1, round(holdout * count)) if holdout else 0
        if held >= count:
            raise ConfigError(f"a holdout of {holdout} leaves nothing of {count} examples to train with")
        order = shuffled(0, count, random.key(seed, HOLDOUT))
        self._held, self._trained = order[:held].sort().values, order[held:].sort().values

    @property
    def loss_function(self) -> Loss:
        return self._loss

    @property
    def num_train(self) -> int:
        """Examples to train with, those held out not among them."""
        return len(self._trained)

    @property
    def num_test(self) -> int:
        return len(self._test)

    @property
    def dense_numel(self) -> int:
        """Numbers that would be exchanged if no layer were compressed."""
        return dense_numel(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def batch(self, indices: Tensor) -> Batch:
        """Inputs and targets, on the CPU, of training examples by their numbers (0 to ``num_train`` - 1)."""
        return self._examples.take(self._trained[indices])

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of the model over a batch."""
        batch = batch.to(self.device)
        loss = self._loss(self.model(batch.inputs), batch.targets)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"the shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss of {self.name} must be a tensor of one number, the mean; got {got}")
        return loss

    def evaluate(self) -> dict[str, float]:
        """``loss`` on the test set, and ``accuracy`` in per cent where targets are classes."""
        return self._measure(self._test, torch.arange(len(self._test)))

    def judge(self) -> float:
        """The mean loss on the examples held out of training: for choosing, where the test set must not be seen."""
        if not len(self._held):
            raise ConfigError("no examples are held out for a judge: set holdout above 0")
        return self._measure(self._examples, self._held)["loss"]

    @torch.no_grad()
    def _measure(self, examples: Examples, indices: Tensor) -> dict[str, float]:
        loss, right, answers = 0.0, 0, 0
        with self._evaluating():
            for some in _chunks(indices):
                inputs, targets = examples.take(some).to(self.device)
                outputs = self.model(inputs)
                loss += float(self._loss(outputs, targets)) * len(some)
                if not targets.is_floating_point() and targets.shape == outputs.shape[:-1]:
                    right += int((outputs.argmax(-1) == targets).sum())
                    answers += targets.numel()
        found = {"loss": loss / len(indices)}
        return {"accuracy": 100 * right / answers} | found if answers else found

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            self._settle()
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _settle(self) -> None:
        """Batch norm's running statistics, from the parameters as they are."""
        norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if not norms:
            return
        count = min(STATISTICS, self.num_train) // CHUNK * CHUNK or self.num_train  # chunks of one size count alike
        momenta = [norm.momentum for norm in norms]
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the plain mean over all chunks
                norm.train()
            for some in _chunks(torch.arange(count) * self.num_train // count):
                self.model(self.batch(some).inputs.to(self.device))
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
                norm.eval()


def build_task(
    model: str = "mlp",
    data: str = "digits",
    *,
    data_dir: Path | None = None,
    seed: int = 0,
    holdout: float = 0.05,
    script: str | None = None,
    layers: str | None = None,
    layers_init: str = "fresh",
) -> Task:
    """A model of ``MODELS`` and a data set that fits it, or what a script brings.

    A script is ``FILE.py:FUNCTION``. The function takes no arguments and returns (model, training set, test set, loss
    function), where a set is two tensors or a torch Dataset of pairs; or a ``Task``. Such as::

        # my.py, for build_task(script="my.py:build")
        import torch
        from torch import nn

        def build():
            x = torch.randn(1000, 20)
            y = (x.sum(1) > 0).long()
            model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
            return model, (x[:900], y[:900]), (x[900:], y[900:]), nn.functional.cross_entropy

    Torch's generator is at the start of ``seed`` while it runs, so that each worker builds the same model; randomness
    from elsewhere, and inside the model or the sets later (dropout, augmentation), is the script's own affair.

    Args:
        model: ``mlp``, ``lenet5``, ``vgg11`` or ``gpt``. (``alexnet`` and ``resnet50`` need a script with images.)
        data: ``digits``, ``mnist``, ``cifar10`` or ``text``; see ``data``.
        data_dir: Where files are, see ``data``.
        seed: Decides initial weights and which examples are held out.
        holdout: Fraction of the training set for ``judge``; a Task that a script returns has its own.
        script: ``model`` and ``data`` are not looked at then.
        layers: A scheme of ``laconic.compress`` for the model, such as ``monarch:0.1``.
        layers_init: How it begins: ``fresh`` for a new model, ``project`` for one that a script has trained.
    """
    task = _built(model, data, data_dir, seed, holdout) if script is None else _scripted(script, seed, holdout)
    if layers is not None:
        task.model = compress(task.model, layers, init=layers_init, seed=seed, inplace=True)
    return task


def _built(model: str, data: str, data_dir: Path | None, seed: int, holdout: float) -> Task:
    _check_fit(model, data)
    network = build_model(model, seed=seed)
    train, test = _text(network, data_dir) if data == "text" else ImageExamples.of(load(data, data_dir))
    return Task(f"{model}/{data}", network, train, test, cross_entropy, holdout=holdout, seed=seed)


def _text(model: nn.Module, data_dir: Path | None) -> tuple[TextExamples, TextExamples]:
    assert isinstance(model, GPT)
    text, context = load_text(data_dir), model.config.context
    train, test = TextExamples(text.train, context), TextExamples(text.test, context)
    if not len(test):
        raise ConfigError(f"the last tenth of a text is for the test, and {len(text.test)} bytes do not fill {context}")
    return train, test


def _chunks(indices: Tensor) -> Iterator[Tensor]:
    return (indices[at : at + CHUNK] for at in range(0, len(indices), CHUNK))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all answers: one an example, or one a place of a text."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _check_fit(model: str, data: str) -> None:
    for what, name, names in (("model", model, tuple(MODELS)), ("data set", data, DATA)):
        if name not in names:
            raise ConfigError(f"unknown {what} {name!r}: take one of {', '.join(names)}")
    info = MODELS[model]
    if not info.data:
        raise ConfigError(f"model {model!r} takes {info.takes}, which no data set here has: bring yours by a script")
    if data not in info.data:
        others = " or ".join(name for name, other in MODELS.items() if data in other.data)
        raise ConfigError(
            f"model {model!r} takes {info.takes}: choose {' or '.join(info.data)} for data; {data!r} is for {others}"
        )


def _scripted(script: str, seed: int, holdout: float) -> Task:
    with seeded(seed):
        found = scripts.call(script)
    if isinstance(found, Task):
        return found
    if not (isinstance(found, tuple) and len(found) == 4):
        got = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
        raise ConfigError(f"script {script!r} must return (model, train, test, loss) or a laconic Task, got {got}")
    try:
        return Task(script, *found, holdout=holdout, seed=seed)
    except ConfigError as error:
        raise ConfigError(f"script {script!r}: {error}") from error
