"""muon: torch's Muon for the hidden matrices of a model and AdamW for everything else, chosen by module kind."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from laconic.errors import ConfigError

__all__ = ["ParameterSplit", "muon", "split_parameters"]

log = logging.getLogger("laconic")

Named = list[tuple[str, nn.Parameter]]


@dataclass
class ParameterSplit:
    """The trainable parameters of a model with their names, each in one list."""

    matrices: Named = field(default_factory=list)
    """Hidden weights of two dimensions."""
    embeddings: Named = field(default_factory=list)
    head: Named = field(default_factory=list)
    """Weight of the layer that computes the outputs, unless it is tied to an embedding."""
    others: Named = field(default_factory=list)
    """Vectors, single numbers, and weights of more than two dimensions."""

    def __str__(self) -> str:
        kinds = vars(self).items()
        return "; ".join(f"{kind}: {', '.join(name for name, _ in named) or 'none'}" for kind, named in kinds)


def split_parameters(model: nn.Module, *, head: str | Iterable[str] | None = None) -> ParameterSplit:
    """Return the trainable parameters of a model in four lists: hidden matrices, embeddings, head, others.

    Args:
        model: Any module. The weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` are embeddings.
        head: Names of the modules or parameters that compute the outputs, such as ``lm_head``. By default the head is
            the last ``nn.Linear`` with as many outputs as an embedding has rows, or none.
    """
    named = [(name.replace("_orig_mod.", "").removeprefix("module."), p) for name, p in model.named_parameters()]
    modules = [(name.replace("_orig_mod.", "").removeprefix("module."), m) for name, m in model.named_modules()]
    embeddings = {id(m.weight): m.num_embeddings for _, m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    heads = _given_heads([head] if isinstance(head, str) else list(head), named) if head is not None else None
    if heads is None:
        sizes = set(embeddings.values())
        linear = [m for _, m in modules if isinstance(m, nn.Linear) and m.out_features in sizes]
        heads = {id(linear[-1].weight)} if linear else set()
    split = ParameterSplit()
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:  # also a head that is tied to it
            split.embeddings.append((name, parameter))
        elif id(parameter) in heads:
            split.head.append((name, parameter))
        elif parameter.dim() == 2:
            split.matrices.append((name, parameter))
        else:
            split.others.append((name, parameter))
    return split


def _given_heads(heads: list[str], named: Named) -> set[int]:
    chosen = set()
    for head in heads:
        matching = [id(p) for name, p in named if name == head or name.startswith(f"{head}.")]
        if not matching:
            raise ConfigError(f"head must name a module or parameter of the model, got {head!r}")
        chosen |= set(matching)
    return chosen


def muon(
    model: nn.Module, lr: float = 0.02, *, adamw_lr: float = 1e-3, momentum: float = 0.95, nesterov: bool = True,
    weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), head: str | Iterable[str] | None = None,
) -> list[torch.optim.Optimizer]:  # fmt: skip
    """Return [Muon for the hidden matrices, AdamW for vectors, embeddings and head].

    The defaults are those of the study docs/studies/gpt.md. Which parameters go where is logged at level INFO.

    Args:
        model: The module whose trainable parameters the optimizers get.
        lr: Learning rate of Muon; torch multiplies it by sqrt(outputs / inputs) of a matrix where that is above 1.
        adamw_lr: Learning rate of AdamW.
        momentum: Of Muon.
        nesterov: Whether Muon's momentum is Nesterov's.
        weight_decay: Of both.
        betas: Of AdamW.
        head: See ``split_parameters``.

    >>> model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.Linear(64, 256))
    >>> [type(optimizer).__name__ for optimizer in muon(model)]  # doctest: +SKIP
    ['Muon', 'AdamW']
    """
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise ConfigError(
            f"muon needs torch.optim.Muon, which torch has from 2.9 on, and this is torch {torch.__version__}: "
            "upgrade torch, or use torch.optim.AdamW(model.parameters())"
        )
    split = split_parameters(model, head=head)
    if not split.matrices:
        raise ConfigError("the model has no hidden matrices for Muon: use torch.optim.AdamW(model.parameters())")
    log.info("muon: Muon gets the matrices, AdamW the rest. %s", split)
    matrices = [p for _, p in split.matrices]
    optimizers = [
        kind(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, adjust_lr_fn="original")
    ]
    rest = [p for _, p in (*split.embeddings, *split.head, *split.others)]
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=adamw_lr, betas=betas, weight_decay=weight_decay))
    return optimizers
