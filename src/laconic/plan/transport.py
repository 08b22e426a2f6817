"""Fit the transport of a parameter server to measured exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from laconic.plan.profile import Transport

__all__ = ["Exchange", "fit_transport"]


class Exchange(NamedTuple):
    """A measured exchange.

    Args:
        nbytes: Bytes that the server received and sent, of all workers.
        explained_s: Seconds that the planner predicts without transport: computation, encoding, adding, decoding.
    """

    slots: int
    nbytes: float
    seconds: float
    explained_s: float


def fit_transport(exchanges: Sequence[Exchange]) -> Transport:
    """Return the transport that explains the rest of the exchanges best.

    Relative errors are minimised by least squares. A coefficient that noise makes negative becomes 0, and the others
    are fitted again.

    >>> times = [Exchange(s, n, 0.01 + 0.001 * (s - 2) + 5e-9 * n, 0.0) for s, n in ((2, 0), (34, 0), (2, 1e7))]
    >>> transport = fit_transport(times)
    >>> round(transport.exchange_s, 6), round(transport.slot_s, 6), round(transport.byte_s * 1e9, 6)
    (0.01, 0.001, 5.0)
    """
    rest = torch.tensor([max(0.0, one.seconds - one.explained_s) for one in exchanges], dtype=torch.float64)
    terms = torch.tensor([[1.0, one.slots - 2, one.nbytes] for one in exchanges], dtype=torch.float64)
    weights = 1 / rest.clamp(min=1e-4)[:, None]
    scale = terms.abs().amax(0).clamp(min=1e-12)
    used = [0, 1, 2]
    fitted = torch.zeros(3, dtype=torch.float64)
    while used:
        columns = (terms / scale)[:, used] * weights
        solution = torch.linalg.lstsq(columns, rest[:, None] * weights, driver="gelsd").solution[:, 0]
        fitted.zero_()
        fitted[used] = solution / scale[used]
        negative = [place for place, value in zip(used, solution.tolist(), strict=True) if value < 0]
        if not negative:
            break
        used = [place for place in used if place not in negative]
    return Transport(*fitted.clamp(min=0.0).tolist())
