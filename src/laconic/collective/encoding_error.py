"""What one encoding loses of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Summing
from laconic.aggregate.homomorphic.families import family_of
from laconic.codecs import parse
from laconic.errors import NonFiniteError

__all__ = ["encoding_error"]


def encoding_error(x: Tensor, spec: str, ranks: int) -> float | None:
    """Squared error of one encoding over the squared norm, without memory; None where x is not finite, or zero."""
    _, chain = parse(spec)
    values = x.detach().to(torch.float32).contiguous()
    norm = float(values.square().sum())
    if not norm > 0:
        return None
    try:
        if chain.summable and family_of(Summing(chain, ranks, ring=True).chain) is not None:
            summing = Summing(chain, ranks, ring=True)
            decoded = summing.chain.decode(summing.packet(values, summing.probe(values)))
        else:
            decoded = chain.decode(chain.encode(values))
    except NonFiniteError:
        return None
    return float((decoded - values).square().sum()) / norm
