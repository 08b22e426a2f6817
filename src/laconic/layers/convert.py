"""compress and expand: a model with compressed layers, and the dense model that computes the same."""

from __future__ import annotations

import copy
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic import counters
from laconic.errors import ConfigError
from laconic.kernels import random
from laconic.layers.factored import LowRankConv2d, LowRankLinear, MonarchLinear
from laconic.layers.hashed import HashedLayer
from laconic.layers.policy import LayerPolicy, ModelStructure
from laconic.layers.recurrent import RECURRENT, CompressedRecurrent, as_linear
from laconic.layers.replacements import Replacement, replacement_for
from laconic.layers.schemes import DENSE, Scheme, parse_scheme
from laconic.layers.subspace import SubspaceLayer

__all__ = ["COMPRESSED", "INITS", "Layout", "Slot", "compress", "dense_numel", "expand", "layout"]

log = logging.getLogger("laconic")

COMPRESSED = (CompressedRecurrent, LowRankConv2d, LowRankLinear, MonarchLinear, HashedLayer, SubspaceLayer)

INITS = ("project", "fresh")

MAX_LOST_ENERGY = 0.5
"""Fraction of a weight's energy; a projection that loses more is logged and counted."""

SEED_STREAM = 521
"""Stream of the seed that the layers' seeds come from."""


@dataclass(frozen=True)
class Slot:
    """One parameter: its scheme, its entries before and after, and why it stays dense if it does."""

    name: str
    scheme: str
    numel: int
    kept: int
    reason: str = ""


@dataclass(frozen=True)
class Layout:
    """What ``compress`` did, parameter by parameter."""

    scheme: str
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Trained numbers of the dense model."""
        return sum(slot.numel for slot in self.slots)

    @property
    def kept(self) -> int:
        """Trained numbers of the compressed model."""
        return sum(slot.kept for slot in self.slots)

    @property
    def rho(self) -> float:
        """Trained numbers after compression over those before."""
        return self.kept / max(1, self.numel)

    @property
    def exempt(self) -> dict[str, str]:
        """Parameters that stay dense, with the reason."""
        return {slot.name: slot.reason for slot in self.slots if slot.reason}

    def values(self) -> dict[str, Any]:
        """Return the fields of a Record."""
        return {
            "layers": self.scheme, "rho": self.rho, "numel": self.numel, "numel_compressed": self.kept,
            "compressed": {slot.name: slot.scheme for slot in self.slots if not slot.reason}, "exempt": self.exempt,
        }  # fmt: skip


def layout(model: nn.Module) -> Layout:
    """Return what ``compress`` did to make this model."""
    result = getattr(model, "_laconic_layout", None)
    if not isinstance(result, Layout):
        raise ConfigError("this model was not made by laconic.compress (or is a part of one that was)")
    return result


def dense_numel(model: nn.Module) -> int:
    """Return how many numbers are trained, or would be if the model were not compressed."""
    compressed = getattr(model, "_laconic_layout", None)
    if isinstance(compressed, Layout):
        return compressed.numel
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def compress(
    model: nn.Module, scheme: str | Scheme, *, rho: float | None = None,
    policy: LayerPolicy | Mapping[str, str] | None = None, init: str = "project", seed: int = 0, inplace: bool = False,
) -> nn.Module:  # fmt: skip
    """Return a model whose layers are trained in a compressed space.

    Its parameters are ordinary ones: optimizers, DDP, checkpoints and the parameter server need no change, and send and
    store less. ``laconic.expand`` returns dense weights.

    The first convolution, the output layer (the last with a weight), biases, norms and weights of fewer than 4,096
    entries stay dense, and factors have a rank of at least 8; ``laconic.layers.layout`` lists each parameter.

    Args:
        model: Any model; not modified unless ``inplace``.
        scheme: ``monarch``, ``lowrank``, ``subspace`` or ``hashed``, with its rho and options:
            ``monarch:0.05,conv=0.2``, ``subspace:0.1,T=50``.
        rho: The fraction of entries that is kept, if the scheme does not contain it.
        policy: Exceptions by name, such as ``{"conv*": "lowrank:0.2", "fc2": "dense"}``, or a ``LayerPolicy``.
        init: ``project``: start as close to the weights as the scheme allows, for a trained model. ``fresh``: draw new
            weights of the same variance, for an untrained model: a projection of noise is smaller than the noise.
            (``subspace`` starts with the given weights in both cases.)
        seed: Seed of everything that is drawn; the same on all workers.
        inplace: Modify the model, which saves a copy.

    >>> import torch, laconic
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 10))
    >>> small = laconic.compress(model, "lowrank:0.1", init="fresh")
    >>> small[0], laconic.expand(small)[0]
    (LowRankLinear(512, 512, rank=25, bias=True), Linear(in_features=512, out_features=512, bias=True))
    """
    default, policy = parse_scheme(scheme, rho=rho), LayerPolicy.of(policy)
    if init not in INITS:
        raise ConfigError(f"init must be {' or '.join(INITS)}, got {init!r}")
    if any(isinstance(module, COMPRESSED) for module in model.modules()):
        raise ConfigError("the model is compressed already: laconic.expand it first")
    result = model if inplace else copy.deepcopy(model)
    slots, planned = _plan(result, default, policy)
    _reject_tied(result, [layer for layer, _ in planned.values()])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for name, (layer, replacements) in planned.items():
            matrices = {}
            for attribute, replacement in replacements.items():
                place = name if attribute == "weight" else f"{name}.{attribute}"
                matrices[attribute] = replacement.build(init, _layer_seed(seed, place))
                if init == "project" and not isinstance(matrices[attribute], SubspaceLayer):
                    _warn_of_lost_energy(f"{name}.{attribute}", getattr(layer, attribute), matrices[attribute])
            new = CompressedRecurrent(layer, matrices) if isinstance(layer, nn.RNNBase) else matrices["weight"]
            new.train(layer.training)
            result = _replace(result, layer, new)
    result_layout = Layout(str(default), tuple(slots))
    result._laconic_layout = result_layout  # type: ignore[assignment]
    _log(result_layout)
    return result


@torch.no_grad()
def expand(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Return a dense model of plain torch layers that computes the same, up to rounding."""
    result = model if inplace else copy.deepcopy(model)
    for layer in [module for module in result.modules() if isinstance(module, COMPRESSED)]:
        new = layer.dense()
        new.train(layer.training)
        result = _replace(result, layer, new)
    if hasattr(result, "_laconic_layout"):
        del result._laconic_layout
    return result


Planned = dict[str, tuple[nn.Module, dict[str, Replacement]]]
"""Layers to replace by name, with the replacements of their matrices by attribute."""


def _plan(model: nn.Module, default: Scheme, policy: LayerPolicy) -> tuple[list[Slot], Planned]:
    """Return a slot for each trained parameter, and the layers to replace."""
    slots: list[Slot] = []
    planned: Planned = {}
    structure, unused_rules = ModelStructure(model), dict(policy.rules)
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            slot, numel = f"{name}.{attribute}" if name else attribute, parameter.numel()
            if not parameter.requires_grad:
                continue  # neither sent nor updated
            recurrent = type(module) in RECURRENT
            if parameter.dim() < 2 or not (attribute == "weight" or (recurrent and attribute.startswith("weight_"))):
                slots.append(Slot(slot, DENSE, numel, numel, "is no matrix or kernel"))
                continue
            rule = policy.rule(name, attribute)
            if rule is not None:
                unused_rules.pop(rule[0], None)
            if rule is not None and rule[1] == DENSE:
                slots.append(Slot(slot, DENSE, numel, numel, f"matches {rule[0]!r}"))
                continue
            scheme = default if rule is None else parse_scheme(rule[1])
            reason = policy.reason_to_stay_dense(module, parameter, structure, by_rule=rule is not None)
            layer = as_linear(parameter) if recurrent else module
            replacement = reason or replacement_for(layer, parameter, scheme, policy)
            if isinstance(replacement, str):
                slots.append(Slot(slot, DENSE, numel, numel, replacement))
                continue
            slots.append(Slot(slot, str(scheme), numel, replacement.kept))
            planned.setdefault(name, (module, {}))[1][attribute] = replacement
    if unused_rules:
        raise ConfigError(f"policy: no weight matches {', '.join(map(repr, unused_rules))}")
    if not planned:
        log.warning("compress %s: no weight is left to compress, the model stays dense", default)
    return slots, planned


def _reject_tied(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ``ConfigError`` if a parameter of these layers is shared: replacing it would untie it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{attribute}" if name else attribute)
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            names = owners[id(parameter)]
            if len(names) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} are one tensor, and compression would untie them: untie them before, or "
                    f"keep it dense with policy={{{names[0]!r}: 'dense', …}}"
                )


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put the new layer wherever the old one is, which may be under several names."""
    if model is old:
        return new
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return model


def _layer_seed(seed: int, name: str) -> int:
    """Return a seed that differs between layers and is the same on every machine."""
    return random.splitmix64(random.key(seed, SEED_STREAM) ^ zlib.crc32(name.encode()))


@torch.no_grad()
def _warn_of_lost_energy(slot: str, before: Tensor, new: nn.Module) -> None:
    after = new.weight
    assert isinstance(after, Tensor)
    energy = float(before.float().square().sum())
    lost = float((before.float() - after.float()).square().sum()) / energy if energy else 0.0
    if lost > MAX_LOST_ENERGY:
        counters.count(
            "layers that lose most of a weight",
            1,
            f"{slot} loses {100 * lost:.0f} % of its energy by projection: if it is untrained, use init='fresh'",
        )


def _log(result: Layout) -> None:
    compressed = [slot.name for slot in result.slots if not slot.reason]
    log.info(
        "compress %s: %d weights to %.4g of all parameters (%s)",
        result.scheme, len(compressed), result.rho, ", ".join(compressed),
    )  # fmt: skip
    for reason, count in Counter(result.exempt.values()).items():
        names = [name for name, other in result.exempt.items() if other == reason]
        log.info("%d tensors stay dense: each %s (%s)", count, reason, ", ".join(names))
