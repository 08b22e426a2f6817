"""Task: model, data and loss of a training, and its evaluation. The seed determines everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from laconic.train.examples import Batch, ImageExamples, TextExamples, examples_of
from laconic.train.models import GPT, MODELS, build_model, seeded

__all__ = ["DATA", "Task", "build_task"]

DATA = ("digits", "mnist", "cifar10", "text")

HOLDOUT_STREAM = 303
"""Stream of the seed that selects the held-out examples."""

CHUNK = 128  # examples per evaluated batch
STATISTICS = 2048  # examples for the statistics of batch norm

Loss = Callable[[Tensor, Tensor], Tensor]


class Task:
    """A model, examples to train and test it with, and a loss.

    ``evaluate`` and ``judge`` depend on the model's parameters alone: the running statistics of batch norm, which
    workers do not exchange, are computed again from 2,048 training examples.

    Args:
        model: The model; batches are moved to the device of its parameters.
        train: Training set: two tensors (inputs, targets), a torch Dataset of pairs, or ``Examples``.
        test: Test set, of the same kinds.
        loss: Function of outputs and targets that returns the mean over the examples.
        holdout: Fraction of ``train`` that is used by ``judge`` only, in [0, 1).
        seed: Seed of the selection of held-out examples.
    """

    def __init__(
        self, name: str, model: nn.Module, train: object, test: object, loss: Loss, *, holdout: float = 0.05,
        seed: int = 0,
    ) -> None:  # fmt: skip
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
        order = shuffled(0, count, random.key(seed, HOLDOUT_STREAM))
        self._held, self._trained = order[:held].sort().values, order[held:].sort().values

    @property
    def loss_function(self) -> Loss:
        return self._loss

    @property
    def num_train(self) -> int:
        """Number of training examples without the held-out ones."""
        return len(self._trained)

    @property
    def num_test(self) -> int:
        return len(self._test)

    @property
    def dense_numel(self) -> int:
        """Number of parameters if no layer were compressed."""
        return dense_numel(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def batch(self, indices: Tensor) -> Batch:
        """Return training examples by their numbers (0 to ``num_train`` - 1), on the CPU."""
        return self._examples.take(self._trained[indices])

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of the model over a batch."""
        batch = batch.to(self.device)
        loss = self._loss(self.model(batch.inputs), batch.targets)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"the shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss of {self.name} must be a scalar tensor, the mean; got {got}")
        return loss

    def evaluate(self, most: int | None = None) -> dict[str, float]:
        """Return ``loss`` on the test set, and ``accuracy`` in per cent if targets are classes.

        Args:
            most: Use at most so many examples, spread evenly over the test set; by default all.
        """
        return self._means(self.measure(self.tested(most))[0])

    def judge(self) -> float:
        """Return the mean loss on the held-out examples, for choices that must not depend on the test set."""
        if not len(self._held):
            raise ConfigError("no examples are held out: set holdout above 0")
        return self._means(self.measure(self.held_out())[0])["loss"]

    def tested(self, most: int | None = None) -> Iterator[Batch]:
        """Yield the test examples in batches, on the CPU; ``most`` as for ``evaluate``."""
        count = len(self._test)
        step = 1 if most is None else -(-count // most)
        return (self._test.take(chunk) for chunk in _chunks(torch.arange(0, count, step)))

    def held_out(self) -> list[Batch]:
        """Return the held-out examples in batches, on the CPU."""
        return [self._examples.take(chunk) for chunk in _chunks(self._held)]

    def statistics(self) -> Iterator[Tensor]:
        """Yield the inputs from which the statistics of batch norm are computed, in batches."""
        count = self.num_statistics
        return (self.batch(chunk).inputs for chunk in _chunks(torch.arange(count) * self.num_train // max(1, count)))

    @torch.no_grad()
    def measure(self, *sets: Iterable[Batch], statistics: Iterable[Tensor] | None = None) -> Tensor:
        """Return a row of sums for each set of batches (float64): loss, correct answers, answers, examples.

        The rows are on the model's device, and nothing waits for it.

        Args:
            statistics: What ``statistics`` yields, where a caller keeps it on the device.
        """
        sums = torch.zeros(len(sets), 4, dtype=torch.float64, device=self.device)
        with self._evaluating(self.statistics() if statistics is None else statistics):
            for row, batches in zip(sums, sets, strict=True):
                for batch in batches:
                    inputs, targets = batch.to(self.device)
                    outputs = self.model(inputs)
                    row[0].add_(self._loss(outputs, targets).to(torch.float64) * len(inputs))
                    if not targets.is_floating_point() and targets.shape == outputs.shape[:-1]:
                        row[1].add_((outputs.argmax(-1) == targets).sum())
                        row[2].add_(targets.numel())
                    row[3].add_(len(inputs))
        return sums

    @staticmethod
    def _means(sums: Tensor) -> dict[str, float]:
        loss, correct, answers, count = sums.tolist()
        mean_loss = {"loss": loss / count}
        return {"accuracy": 100 * correct / answers} | mean_loss if answers else mean_loss

    @contextmanager
    def _evaluating(self, statistics: Iterable[Tensor]) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            self._refresh_batch_norm(statistics)
            yield
        finally:
            for module, training in modes:
                module.training = training

    @property
    def num_statistics(self) -> int:
        """Training examples that an evaluation reads for the statistics of batch norm; 0 without batch norm."""
        if not self._norms():
            return 0
        return min(STATISTICS, self.num_train) // CHUNK * CHUNK or self.num_train  # equal chunks have equal weights

    def _norms(self) -> list[_BatchNorm]:
        return [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    def _refresh_batch_norm(self, statistics: Iterable[Tensor]) -> None:
        """Compute the running statistics of batch norm for the current parameters."""
        norms = self._norms()
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.train()
            for number, inputs in enumerate(statistics, 1):
                for norm in norms:
                    norm.momentum = 1 / number  # the plain mean over all chunks
                self.model(inputs.to(self.device))
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
                norm.eval()


def build_task(
    model: str = "mlp", data: str = "digits", *, data_dir: Path | None = None, seed: int = 0, holdout: float = 0.05,
    script: str | None = None, layers: str | None = None, layers_init: str = "fresh",
) -> Task:  # fmt: skip
    """Build a task from a model of ``MODELS`` and a data set, or from a script.

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

    Torch's generator is seeded with ``seed`` while the function runs, so that each worker builds the same model. Other
    random sources, and later randomness in the model or the data sets (dropout, augmentation), are not seeded.

    Args:
        model: ``mlp``, ``lenet5``, ``vgg11``, ``vgg11fc``, ``resnet50`` or ``gpt``. (``alexnet`` needs a script.)
        data: ``digits``, ``mnist``, ``cifar10`` or ``text``; see ``data``.
        data_dir: Folder of the data set; see ``data``.
        seed: Seed of the initial weights and of the held-out examples.
        holdout: Fraction of the training set for ``judge``; a Task that a script returns has its own.
        script: A script, which replaces ``model`` and ``data``.
        layers: A scheme of ``laconic.compress`` for the model, such as ``monarch:0.1``.
        layers_init: ``fresh`` for a new model, ``project`` for a script's trained model.
    """
    task = _from_names(model, data, data_dir, seed, holdout) if script is None else _from_script(script, seed, holdout)
    if layers is not None:
        task.model = compress(task.model, layers, init=layers_init, seed=seed, inplace=True)
    return task


def _from_names(model: str, data: str, data_dir: Path | None, seed: int, holdout: float) -> Task:
    _check_fit(model, data)
    network = build_model(model, seed=seed, data=data)
    train, test = _text(network, data_dir) if data == "text" else ImageExamples.of(load(data, data_dir))
    return Task(f"{model}/{data}", network, train, test, cross_entropy, holdout=holdout, seed=seed)


def _text(model: nn.Module, data_dir: Path | None) -> tuple[TextExamples, TextExamples]:
    assert isinstance(model, GPT)
    text, context = load_text(data_dir), model.config.context
    train, test = TextExamples(text.train, context), TextExamples(text.test, context)
    if not len(test):
        raise ConfigError(f"the last tenth of the text is the test set and needs {context} bytes, got {len(text.test)}")
    return train, test


def _chunks(indices: Tensor) -> Iterator[Tensor]:
    return (indices[at : at + CHUNK] for at in range(0, len(indices), CHUNK))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all predictions: one per example, or one per byte of a text."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _check_fit(model: str, data: str) -> None:
    for what, name, names in (("model", model, tuple(MODELS)), ("data set", data, DATA)):
        if name not in names:
            raise ConfigError(f"unknown {what} {name!r}: use one of {', '.join(names)}")
    info = MODELS[model]
    if not info.data:
        raise ConfigError(f"model {model!r} takes {info.takes}, which no built-in data set has: use a script")
    if data not in info.data:
        others = " or ".join(name for name, other in MODELS.items() if data in other.data)
        raise ConfigError(
            f"model {model!r} takes {info.takes}: choose {' or '.join(info.data)} for data; {data!r} is for {others}"
        )


def _from_script(script: str, seed: int, holdout: float) -> Task:
    with seeded(seed):
        result = scripts.call(script)
    if isinstance(result, Task):
        return result
    if not (isinstance(result, tuple) and len(result) == 4):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ConfigError(f"script {script!r} must return (model, train, test, loss) or a laconic Task, got {got}")
    try:
        return Task(script, *result, holdout=holdout, seed=seed)
    except ConfigError as error:
        raise ConfigError(f"script {script!r}: {error}") from error
