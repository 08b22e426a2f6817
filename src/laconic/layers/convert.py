"""compress and expand: a model whose layers live in fewer numbers, and the dense one that computes the same."""

from __future__ import annotations

import copy
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from laconic import counters
from laconic.errors import ConfigError
from laconic.kernels import random
from laconic.layers.factored import LowRankConv2d, LowRankLinear, MonarchLinear
from laconic.layers.hashed import HashedLayer
from laconic.layers.schemes import DENSE, Hashed, LowRank, Monarch, Scheme, Subspace, parse_scheme
from laconic.layers.subspace import SubspaceLayer, Tiles
from laconic.layers.weightless import KINDS

__all__ = ["COMPRESSED", "INITS", "LayerPolicy", "Layout", "Slot", "compress", "dense_numel", "expand", "layout"]

log = logging.getLogger("laconic")

COMPRESSED = (LowRankConv2d, LowRankLinear, MonarchLinear, HashedLayer, SubspaceLayer)

INITS = ("project", "fresh")

MOST_BLOCKS = 16
FEW_BLOCKS, FAST_RHO = 4, 0.15
"""Monarch: with much to compute few blocks are faster, with little many lose less."""

LOST = 0.5
"""Of a weight's energy, from which on a projection says what it loses."""

PLACE = 521
"""Stream of the seed that the layers' own seeds come from."""


@dataclass(frozen=True)
class LayerPolicy:
    """Which weights are compressed, and how; what is not by default are those that cost the most accuracy for nothing.

    Args:
        rules: Pattern of a weight's name (``head.weight``) or its layer's (``conv*``) to a scheme, or ``dense``; the
            first that matches wins, over all that follows.
        min_numel: Weights with fewer entries stay dense.
        min_rank: Factors are never thinner.
        min_coordinates: Subspaces are never smaller.
        first_conv: Compress the first convolution, too.
        output: Compress the last layer, too.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    min_numel: int = 4096
    min_rank: int = 8
    min_coordinates: int = 256
    first_conv: bool = False
    output: bool = False

    def __post_init__(self) -> None:
        for name in ("min_numel", "min_rank", "min_coordinates"):
            if getattr(self, name) < (1 if name == "min_rank" else 0):
                raise ConfigError(f"policy: {name} is too small: {getattr(self, name)}")
        for spec in self.rules.values():
            if spec != DENSE:
                parse_scheme(spec)

    @classmethod
    def of(cls, policy: LayerPolicy | Mapping[str, str] | None) -> LayerPolicy:
        """A policy from itself, from rules alone, or the default one."""
        if isinstance(policy, LayerPolicy):
            return policy
        return cls(rules=dict(policy)) if policy else cls()

    def rule(self, layer: str) -> tuple[str, str] | None:
        """Pattern and spec that a layer's weight matches."""
        for pattern, spec in self.rules.items():
            if fnmatchcase(f"{layer}.weight", pattern) or fnmatchcase(layer, pattern):
                return pattern, spec
        return None


@dataclass(frozen=True)
class Slot:
    """What became of a tensor: its scheme, its entries before and after, and why it stayed dense where it did."""

    name: str
    scheme: str
    numel: int
    kept: int
    reason: str = ""


@dataclass(frozen=True)
class Layout:
    """What ``compress`` did, tensor by tensor."""

    scheme: str
    slots: tuple[Slot, ...]

    @property
    def rho(self) -> float:
        """Of all parameters that are trained: numbers now over numbers before."""
        return sum(slot.kept for slot in self.slots) / max(1, sum(slot.numel for slot in self.slots))

    @property
    def exempt(self) -> dict[str, str]:
        """Tensors that stayed dense, and why."""
        return {slot.name: slot.reason for slot in self.slots if slot.reason}

    def values(self) -> dict[str, Any]:
        """For a Record."""
        return {
            "layers": self.scheme,
            "rho": self.rho,
            "numel": sum(slot.numel for slot in self.slots),
            "numel_compressed": sum(slot.kept for slot in self.slots),
            "compressed": {slot.name: slot.scheme for slot in self.slots if not slot.reason},
            "exempt": self.exempt,
        }


def layout(model: nn.Module) -> Layout:
    """What ``compress`` did to make this model."""
    found = getattr(model, "_laconic_layout", None)
    if not isinstance(found, Layout):
        raise ConfigError("this model was not made by laconic.compress (or is a part of one that was)")
    return found


def dense_numel(model: nn.Module) -> int:
    """Numbers that are trained, or would be if the model had not been compressed."""
    found = getattr(model, "_laconic_layout", None)
    if isinstance(found, Layout):
        return sum(slot.numel for slot in found.slots)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def compress(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    rho: float | None = None,
    policy: LayerPolicy | Mapping[str, str] | None = None,
    init: str = "project",
    seed: int = 0,
    inplace: bool = False,
) -> nn.Module:
    """A model whose layers are trained in a compressed space.

    Its parameters are ordinary ones: optimizers, DDP, checkpoints and the parameter server take them as they are, and
    send and remember less. ``laconic.expand`` gives dense weights back.

    The first convolution, the output layer (the last with a weight), biases, norms and weights of less than 4,096
    entries stay dense, and factors have a rank of at least 8; ``laconic.layers.layout`` says what became of each.

    Args:
        model: Any; left as it is unless ``inplace``.
        scheme: ``monarch``, ``lowrank``, ``subspace`` or ``hashed``, with its rho and more: ``monarch:0.05,conv=0.2``,
            ``subspace:0.1,T=50``.
        rho: The fraction of entries that is left, where the scheme does not say it.
        policy: Exceptions by name, such as ``{"conv*": "lowrank:0.2", "fc2": "dense"}``, or a ``LayerPolicy``.
        init: ``project``: begin as near to the weights as the scheme can come, for a trained model. ``fresh``: draw new
            ones of the same variance, for a model that was never trained: what a projection of noise leaves is smaller
            than the noise was. (``subspace`` begins with the very weights either way.)
        seed: Of what is drawn; give the same on all workers.
        inplace: Change the model itself, which saves a copy.

    >>> import torch, laconic
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 10))
    >>> small = laconic.compress(model, "lowrank:0.1", init="fresh")
    >>> small[0], laconic.expand(small)[0]
    (LowRankLinear(512, 512, rank=25, bias=True), Linear(in_features=512, out_features=512, bias=True))
    """
    default, chosen = parse_scheme(scheme, rho=rho), LayerPolicy.of(policy)
    if init not in INITS:
        raise ConfigError(f"init must be {' or '.join(INITS)}, got {init!r}")
    if any(isinstance(module, COMPRESSED) for module in model.modules()):
        raise ConfigError("the model is compressed already: laconic.expand it first")
    made = model if inplace else copy.deepcopy(model)
    slots, planned = _plan(made, default, chosen)
    _refuse_tied(made, planned)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for name, (layer, build) in planned.items():
            new = build(init, _layer_seed(seed, name))
            new.train(layer.training)
            _tell_loss(name, layer, new, init)
            made = _put(made, layer, new)
    found = Layout(str(default), tuple(slots))
    made._laconic_layout = found  # type: ignore[assignment]
    _tell(found)
    return made


@torch.no_grad()
def expand(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """A dense model of plain torch layers that computes the same, to rounding."""
    made = model if inplace else copy.deepcopy(model)
    for layer in [module for module in made.modules() if isinstance(module, COMPRESSED)]:
        new = layer.dense()
        new.train(layer.training)
        made = _put(made, layer, new)
    if hasattr(made, "_laconic_layout"):
        del made._laconic_layout
    return made


# ----------------------------------------------------------------------------------------------------------- planning

Build = Callable[[str, int], nn.Module]


def _plan(
    model: nn.Module, default: Scheme, policy: LayerPolicy
) -> tuple[list[Slot], dict[str, tuple[nn.Module, Build]]]:
    """What becomes of every tensor that is trained, and how."""
    slots: list[Slot] = []
    planned: dict[str, tuple[nn.Module, Build]] = {}
    first, last = _ends(model)
    inside = {
        id(part) for owner in model.modules() if isinstance(owner, nn.MultiheadAttention) for part in owner.modules()
    }
    unused = dict(policy.rules)
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            slot, numel = f"{name}.{own}" if name else own, parameter.numel()
            if not parameter.requires_grad:
                continue  # neither sent nor stepped
            if own != "weight" or parameter.dim() < 2:
                slots.append(Slot(slot, DENSE, numel, numel, "is no matrix or kernel"))
                continue
            rule = policy.rule(name)
            if rule is not None:
                unused.pop(rule[0], None)
            scheme: Scheme | str = default if rule is None else rule[1]
            reason = "" if rule is None else _exception(rule)
            if scheme != DENSE and not reason:
                reason = _exempt(module, parameter, policy, asked=rule is not None, ends=(first, last), inside=inside)
            build: tuple[int, Build] | str = reason or _builder(module, parameter, parse_scheme(scheme), policy)
            if isinstance(build, str):
                slots.append(Slot(slot, DENSE, numel, numel, build))
                continue
            slots.append(Slot(slot, str(parse_scheme(scheme)), numel, build[0]))
            planned[name] = (module, build[1])
    if unused:
        raise ConfigError(f"policy: no weight matches {', '.join(map(repr, unused))}")
    if not planned:
        log.warning("compress %s: no weight is left to compress, the model stays dense", default)
    return slots, planned


def _exception(rule: tuple[str, str]) -> str:
    return f"matches {rule[0]!r}" if rule[1] == DENSE else ""


def _ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The first convolution and the last layer, in the order in which the model names them."""
    convolutions = [m for m in model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    layers = [m for m in model.modules() if isinstance(m, KINDS) and not isinstance(m, nn.Embedding)]
    return (convolutions[0] if convolutions else None), (layers[-1] if layers else None)


def _exempt(
    module: nn.Module,
    weight: Tensor,
    policy: LayerPolicy,
    *,
    asked: bool,
    ends: tuple[nn.Module | None, nn.Module | None],
    inside: set[int],
) -> str:
    """Why a weight stays dense. What a rule asked for is only refused where it cannot be done."""
    if type(module) not in KINDS:
        return f"belongs to a {type(module).__name__}, which does more than multiply"
    if id(module) in inside:
        return "is read by an attention that does not call its layer"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks on its layer"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "belongs to an embedding with max_norm or sparse gradients"
    if not weight.is_floating_point():
        return "has no floating-point values"
    if asked:
        return ""
    if module is ends[1] and not policy.output:
        return "is the output layer's"
    if module is ends[0] and not policy.first_conv:
        return "is the first convolution's"
    if weight.numel() < policy.min_numel:
        return f"has fewer than {policy.min_numel} entries"
    return ""


def _builder(module: nn.Module, weight: Tensor, scheme: Scheme, policy: LayerPolicy) -> tuple[int, Build] | str:
    """Numbers kept and how to build the layer, or why not."""
    if isinstance(scheme, Subspace):
        return _subspace(module, weight, scheme, policy)
    if isinstance(scheme, Hashed):
        buckets = max(policy.min_coordinates, int(scheme.rho * weight.numel()))
        return _smaller(weight, buckets, lambda init, seed: HashedLayer(module, buckets, seed, fresh=init == "fresh"))
    assert isinstance(scheme, (LowRank, Monarch))
    if isinstance(module, nn.Linear):
        rank = _rank(weight.shape, scheme.rho, policy)
        if isinstance(scheme, LowRank):
            return _low_rank(module, rank)
        return _monarch(module, rank, scheme)
    if type(module) is nn.Conv2d:
        return _low_rank_conv(module, scheme.rho if scheme.conv is None else scheme.conv, policy)
    return f"belongs to a {type(module).__name__}, which {scheme.name} has no form for"


def _rank(shape: torch.Size, rho: float, policy: LayerPolicy) -> int:
    outputs, inputs = shape[0], shape[1:].numel()
    return max(policy.min_rank, int(rho * outputs * inputs / (outputs + inputs)))


def _smaller(weight: Tensor, kept: int, build: Build) -> tuple[int, Build] | str:
    return (kept, build) if kept < weight.numel() else f"would not be smaller: {kept} numbers for {weight.numel()}"


def _subspace(module: nn.Module, weight: Tensor, scheme: Subspace, policy: LayerPolicy) -> tuple[int, Build] | str:
    kept = Tiles(weight.numel(), scheme.rho).coordinates
    if kept < policy.min_coordinates:
        return f"would have fewer than {policy.min_coordinates} coordinates"
    return _smaller(weight, kept, lambda _, seed: SubspaceLayer(module, scheme.rho, scheme.T, seed))


def _low_rank(layer: nn.Linear, rank: int) -> tuple[int, Build] | str:
    make = {"project": LowRankLinear.project, "fresh": LowRankLinear.fresh}
    kept = rank * sum(layer.weight.shape)
    return _smaller(layer.weight, kept, lambda init, _: make[init](layer.weight.detach(), layer.bias, rank))


def _monarch(layer: nn.Linear, rank: int, scheme: Monarch) -> tuple[int, Build] | str:
    outputs, inputs = layer.weight.shape
    blocks = scheme.blocks or _blocks(inputs, outputs, rank, scheme.rho)
    each = max(1, rank // blocks)
    make = {"project": MonarchLinear.project, "fresh": MonarchLinear.fresh}
    kept = blocks * each * blocks * (-(-inputs // blocks) + -(-outputs // blocks))
    return _smaller(layer.weight, kept, lambda init, _: make[init](layer.weight.detach(), layer.bias, blocks, each))


def _blocks(inputs: int, outputs: int, rank: int, rho: float) -> int:
    """Blocks along a side: a divisor of both where there is one."""
    common = gcd(inputs, outputs)
    candidates = [b for b in range(2, MOST_BLOCKS + 1) if common % b == 0 and b <= rank]
    candidates = candidates or [b for b in (2, 4, 8, 16) if b <= rank]
    wanted = FEW_BLOCKS if rho >= FAST_RHO else rank**0.5
    return min(candidates, key=lambda b: max(b / wanted, wanted / b), default=1)


def _low_rank_conv(layer: nn.Conv2d, rho: float, policy: LayerPolicy) -> tuple[int, Build] | str:
    groups, (outputs, inputs) = layer.groups, (layer.out_channels // layer.groups, layer.in_channels // layer.groups)
    entries = inputs * layer.weight.shape[2:].numel()
    rank = max(policy.min_rank, int(rho * outputs * entries / (outputs + entries)))
    if rank >= min(inputs, outputs):
        return f"has too few channels for a rank of {rank}"
    make = {"project": LowRankConv2d.project, "fresh": LowRankConv2d.fresh}
    return _smaller(layer.weight, groups * rank * (outputs + entries), lambda init, _: make[init](layer, rank))


def _refuse_tied(model: nn.Module, planned: Mapping[str, tuple[nn.Module, Build]]) -> None:
    """One tensor in two layers cannot become two."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{own}" if name else own)
    for layer, _ in planned.values():
        for parameter in layer.parameters(recurse=False):
            names = owners[id(parameter)]
            if len(names) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} are one tensor, which compression would make several of: untie them, or "
                    f"leave it dense by policy={{{names[0]!r}: 'dense', …}}"
                )


# ----------------------------------------------------------------------------------------------------------- replacing


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The new layer wherever the old one is; a layer may have several names."""
    if model is old:
        return new
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return model


def _layer_seed(seed: int, name: str) -> int:
    """Another for each layer, and the same on every machine."""
    return random.splitmix64(random.key(seed, PLACE) ^ zlib.crc32(name.encode()))


@torch.no_grad()
def _tell_loss(name: str, layer: nn.Module, new: nn.Module, init: str) -> None:
    if init == "fresh" or isinstance(new, SubspaceLayer):
        return
    before, after = layer.weight, new.weight
    assert isinstance(before, Tensor) and isinstance(after, Tensor)
    energy = float(before.float().square().sum())
    lost = float((before.float() - after.float()).square().sum()) / energy if energy else 0.0
    if lost > LOST:
        counters.count(
            "layers that lose most of a weight",
            1,
            f"{name}.weight loses {100 * lost:.0f} % of its energy by projection: if it was never trained, "
            "give init='fresh'",
        )


def _tell(found: Layout) -> None:
    reasons = Counter(found.exempt.values())
    done = [slot.name for slot in found.slots if not slot.reason]
    log.info(
        "compress %s: %d weights to %.4g of all parameters (%s)", found.scheme, len(done), found.rho, ", ".join(done)
    )
    for reason, count in reasons.items():
        names = [name for name, each in found.exempt.items() if each == reason]
        log.info("%d tensors stay dense: each %s (%s)", count, reason, ", ".join(names))
