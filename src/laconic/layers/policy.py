"""LayerPolicy: which weights are compressed, by which scheme, and why others stay dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from laconic.errors import ConfigError
from laconic.layers.functional import SUPPORTED
from laconic.layers.recurrent import RECURRENT
from laconic.layers.schemes import DENSE, parse_scheme

__all__ = ["LayerPolicy", "ModelStructure"]


@dataclass(frozen=True)
class LayerPolicy:
    """Which weights are compressed, and how. By default those stay dense that cost accuracy and save little.

    Args:
        rules: Pattern of a weight's name (``head.weight``) or its layer's (``conv*``) to a scheme, or ``dense``; the
            first that matches wins, over all other arguments.
        min_numel: Weights with fewer entries stay dense.
        min_rank: The smallest rank of factors.
        min_coordinates: The smallest number of coordinates of a subspace.
        first_conv: Also compress the first convolution.
        output: Also compress the last layer.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    min_numel: int = 4096
    min_rank: int = 8
    min_coordinates: int = 256
    first_conv: bool = False
    output: bool = False

    def __post_init__(self) -> None:
        for name, least in (("min_numel", 0), ("min_rank", 1), ("min_coordinates", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"policy: {name} must be at least {least}, got {getattr(self, name)}")
        for spec in self.rules.values():
            if spec != DENSE:
                parse_scheme(spec)

    @classmethod
    def of(cls, policy: LayerPolicy | Mapping[str, str] | None) -> LayerPolicy:
        """Return a policy from itself, from rules alone, or the default one."""
        if isinstance(policy, LayerPolicy):
            return policy
        return cls(rules=dict(policy)) if policy else cls()

    def rule(self, layer: str, attribute: str = "weight") -> tuple[str, str] | None:
        """Return the pattern and the spec that a layer's weight matches."""
        for pattern, spec in self.rules.items():
            if fnmatchcase(f"{layer}.{attribute}", pattern) or fnmatchcase(layer, pattern):
                return pattern, spec
        return None

    def reason_to_stay_dense(
        self, module: nn.Module, weight: Tensor, structure: ModelStructure, *, by_rule: bool
    ) -> str:
        """Return why a weight stays dense, or "". A rule's scheme is only rejected if it is impossible."""
        if type(module) not in (*SUPPORTED, *RECURRENT):
            return f"belongs to a {type(module).__name__}, which does more than multiply"
        if id(module) in structure.inside_attention:
            return "is read by an attention that does not call its layer"
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return "has hooks on its layer"
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
            return "belongs to an embedding with max_norm or sparse gradients"
        if not weight.is_floating_point():
            return "has no floating-point values"
        if by_rule:
            return ""
        if module is structure.output and not self.output:
            return "is the output layer's"
        if module is structure.first_conv and not self.first_conv:
            return "is the first convolution's"
        if weight.numel() < self.min_numel:
            return f"has fewer than {self.min_numel} entries"
        return ""


class ModelStructure:
    """The layers of a model that a policy treats differently, in the order in which the model names its layers."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        convolutions = [m for m in modules if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
        layers = [m for m in modules if isinstance(m, SUPPORTED) and not isinstance(m, nn.Embedding)]
        attentions = [m for m in modules if isinstance(m, nn.MultiheadAttention)]
        self.first_conv = convolutions[0] if convolutions else None
        self.output = layers[-1] if layers else None
        self.inside_attention = {id(part) for attention in attentions for part in attention.modules()}
