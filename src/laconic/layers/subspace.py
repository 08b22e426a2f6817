"""Weights that stay dense and move in few directions, the same on all workers by a shared seed.

A weight of d entries is cut into c = round(1 / rho) tiles of K; one coordinate moves one entry of every tile, up or
down by a sign for each 64 entries of a tile: ``w = origin + s ⊙ tile(z)``. The optimizer sees z alone, so its memory,
the gradients and the messages are rho of the dense ones; forward and backward are those of the dense layer, and two
passes over the weight.

Every T steps the subspace is drawn anew: what z has moved goes into the origin, z begins at zero under other signs, and
so does the optimizer's momentum, which pointed along the old ones. The steps that SGD's momentum still meant are taken
before, all at once: dropping them would lose a tenth of the way with T=100 and momentum 0.9. Which entries share a
coordinate never changes, so second moments (Adam's) stay true. After many renewals the weight has moved in all
directions.

Steps are counted where they are taken: a hook on torch's optimizers finds the layers whose z they have. Whoever steps z
without one calls ``advance``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from laconic import counters
from laconic.kernels import random
from laconic.layers.weightless import applied, emptied, filled

__all__ = ["BLOCK", "SubspaceLayer", "Tiles", "advance", "collected", "placed", "subspaces"]

BLOCK = 64
"""Neighbours that share a sign: enough for vector units, few enough that what tiles do to each other averages out."""

MANY = 7
"""Tiles from which on a CPU sums them by matrix products: torch has a slow way for smaller ones."""

SIGNS = 501
"""Stream of the seed that signs come from."""

DIRECTIONS = ("momentum_buffer", "exp_avg")
"""What optimizers remember of past gradients' directions. Beside it they keep sizes, which renewal leaves alone."""


class Tiles:
    """How d entries lie on K coordinates: ``rows`` tiles, the last of which may be cut short.

    >>> tiles = Tiles(100_000, 0.1)
    >>> tiles.coordinates, tiles.rows, tiles.whole
    (10048, 10, 9)
    """

    def __init__(self, numel: int, rho: float) -> None:
        tiles = max(1, round(1 / rho))
        self.numel = numel
        self.coordinates = -(-numel // (tiles * BLOCK)) * BLOCK
        self.rows = -(-numel // self.coordinates)
        self.whole = numel // self.coordinates
        self.blocks = self.coordinates // BLOCK

    def signs(self, seed: int, epoch: int, like: Tensor) -> Tensor:
        """[rows, blocks] of +1 and -1: the same on every device."""
        key = random.splitmix64(random.key(seed, SIGNS) ^ random.splitmix64(epoch))
        counter = torch.arange(self.rows * self.blocks, dtype=torch.int64, device=like.device)
        bits = random.hash32(counter, key) >> 16 & 1
        return (1 - 2 * bits).to(like.dtype).view(self.rows, self.blocks)


def placed(z: Tensor, origin: Tensor, signs: Tensor, whole: int, out: Tensor | None = None) -> Tensor:
    """``origin + s ⊙ tile(z)``. Signs are exact factors: every device and order of work gives the same bits."""
    flat, rows = origin.reshape(-1), z.view(-1, BLOCK)
    found, cut = torch.empty_like(flat) if out is None else out.view(-1), whole * z.numel()
    if whole:
        shape = (whole, *rows.shape)
        torch.addcmul(flat[:cut].view(shape), signs[:whole, :, None], rows, out=found[:cut].view(shape))
    for begin, shape, blocks in _tail(flat.numel(), cut):
        end = begin + shape[0] * shape[1]
        sign, row = signs[whole, blocks, None], rows[blocks, : shape[1]]
        torch.addcmul(flat[begin:end].view(shape), sign, row, out=found[begin:end].view(shape))
    return found.view(origin.shape)


def _tail(numel: int, cut: int) -> Iterator[tuple[int, tuple[int, int], slice]]:
    """The last tile, cut short: its whole blocks, and what is left. Where, the shape, and which blocks."""
    blocks, rest = divmod(numel - cut, BLOCK)
    if blocks:
        yield cut, (blocks, BLOCK), slice(0, blocks)
    if rest:
        yield numel - rest, (1, rest), slice(blocks, blocks + 1)


def collected(gradient: Tensor, signs: Tensor, whole: int) -> Tensor:
    """The gradient of z: what each coordinate's entries ask for, summed with their signs."""
    flat = gradient.reshape(-1)
    cut = whole * signs.shape[1] * BLOCK
    rows = flat[:cut].view(whole, -1, BLOCK)
    if flat.device.type != "cpu" or torch.compiler.is_compiling():
        found = (rows * signs[:whole, :, None]).sum(0)
    elif whole >= MANY:
        weights = signs[:whole].to(flat.dtype).t().unsqueeze(1).contiguous()
        found = torch.bmm(weights, rows.transpose(0, 1)).squeeze(1)
    else:
        found = torch.zeros(signs.shape[1], BLOCK, dtype=flat.dtype)
        for row, sign in zip(rows, signs, strict=False):  # in place: a product of the weight's size would cost more
            found.addcmul_(row, sign[:, None])
    for begin, shape, blocks in _tail(flat.numel(), cut):
        part = flat[begin : begin + shape[0] * shape[1]].view(shape)
        found[blocks, : shape[1]].addcmul_(part, signs[whole, blocks, None])
    return found.view(-1)


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, origin: Tensor, signs: Tensor, whole: int) -> Tensor:
        ctx.save_for_backward(signs)
        ctx.whole = whole
        return placed(z, origin, signs, whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return collected(gradient, ctx.saved_tensors[0], ctx.whole).view(1, -1), None, None, None


class _Held(torch.autograd.Function):
    """The same where the weight is at hand."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, held: Tensor, signs: Tensor, whole: int) -> Tensor:
        ctx.save_for_backward(signs)
        ctx.whole = whole
        return held.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return collected(gradient, ctx.saved_tensors[0], ctx.whole).view(1, -1), None, None, None


class SubspaceLayer(nn.Module):
    """A Linear, convolution or embedding whose weight moves in a subspace.

    ``origin`` is a parameter that asks for no gradient: DDP sends it once, when it is built, and never again. ``state``
    holds the seed and the steps taken; signs follow from both and are not saved.

    Args:
        layer: The dense layer; its weight is where this one begins.
        rho: Coordinates over entries.
        every: Steps between renewals; 0 never renews.
        seed: Decides the directions; the same on all workers, another for each layer.
    """

    origin: nn.Parameter
    z: nn.Parameter
    state: Tensor

    def __init__(self, layer: nn.Module, rho: float, every: int, seed: int) -> None:
        super().__init__()
        weight, bias = layer.weight, getattr(layer, "bias", None)
        assert isinstance(weight, Tensor)
        self.frame, self.every = emptied(layer), every
        self.tiles = Tiles(weight.numel(), rho)
        self.origin = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
        # Two dimensions: a policy takes vectors for biases, and sends them as they are.
        self.z = nn.Parameter(weight.new_zeros(1, self.tiles.coordinates))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self.register_buffer("state", torch.tensor([seed & (2**62 - 1), 0], dtype=torch.int64, device=weight.device))
        self._signs: Tensor | None = None
        self._held: Tensor | None = None
        self._kept: Tensor | None = None
        self._applied: int | None = None
        """What is in ``_held``: z, and which version of the origin; None when something else has changed."""
        self._steps = 0
        self._settle()
        _follow_optimizers()

    # ------------------------------------------------------------------------------------------------------- the layer

    @property
    def weight(self) -> Tensor:
        assert self._signs is not None
        if self.z.device.type != "cpu" or torch.compiler.is_compiling():
            found: Tensor = _Placed.apply(self.z, self.origin, self._signs, self.tiles.whole)  # type: ignore[no-untyped-call]
        else:
            found = _Held.apply(self.z, self._resident(), self._signs, self.tiles.whole)  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def _resident(self) -> Tensor:
        """The weight in a tensor that is kept: on a CPU a fresh one of that size costs more than what is computed.

        It is written anew when z or the origin has changed. Values tell, since z may be changed behind torch's back.
        """
        assert self._signs is not None
        if self._held is None:
            self._held, self._kept = torch.empty_like(self.origin), None
        now = self.origin._version
        if self._applied != now or self._kept is None or not torch.equal(self._kept, self.z):
            placed(self.z, self.origin, self._signs, self.tiles.whole, out=self._held)
            kept = torch.empty_like(self.z) if self._kept is None else self._kept
            self._kept = kept.copy_(self.z.detach())
            self._applied = now
        return self._held

    def forward(self, x: Tensor) -> Tensor:
        return applied(self.frame, x, self.weight, self.bias)

    def dense(self) -> nn.Module:
        return filled(self.frame, self.weight, self.bias)

    # ----------------------------------------------------------------------------------------------------------- steps

    @property
    def steps(self) -> int:
        return self._steps

    def due(self, steps: int = 1) -> bool:
        """Whether so many steps more draw a new subspace."""
        return bool(self.every) and (self._steps + steps) // self.every != self._steps // self.every

    @torch.no_grad()
    def advance(self, steps: int = 1, *, decay: float = 0.0) -> bool:
        """Count steps that z has taken; True when that drew a new subspace.

        Args:
            steps: How many.
            decay: What they took of z by weight decay, as a fraction: as much is taken of the origin.
        """
        if decay:
            self.origin.mul_(1 - decay)
        due = self.due(steps)
        self._steps += steps
        self.state[1] += steps
        if due:
            self.renew()
        return due

    @torch.no_grad()
    def renew(self) -> None:
        """Take what z has moved into the origin, and draw the directions that belong to the steps counted."""
        assert self._signs is not None
        self.origin.copy_(placed(self.z, self.origin, self._signs, self.tiles.whole))
        self.z.zero_()
        self._draw()

    @torch.no_grad()
    def go_to(self, steps: int) -> None:
        """Be where that many steps were taken; origin and z are somebody else's affair."""
        self.state[1] = steps
        self._steps = steps
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        epoch = self._steps // self.every if self.every else 0
        signs = self.tiles.signs(self._seed, epoch, self.origin)
        if self._signs is not None and self._signs.device == signs.device and self._signs.dtype == signs.dtype:
            self._signs.copy_(signs)  # in place: a captured graph goes on with it
        else:
            self._signs = signs
        self._applied = None

    def _settle(self) -> None:
        """After anything that may have put other tensors in place."""
        _OWNERS[self.z] = weakref.ref(self)
        self._signs = self._held = None
        if self.state.device.type != "meta":
            self._seed, self._steps = self.state.tolist()
            self._draw()

    def _apply(self, fn: Any, recurse: bool = True) -> SubspaceLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._settle()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_signs": None,
            "_held": None,
            "_kept": None,
            "_applied": None,
        }  # all follow from the rest

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._settle()
        _follow_optimizers()

    def extra_repr(self) -> str:
        return f"coordinates={self.tiles.coordinates} of {self.tiles.numel}, T={self.every}"


# ---------------------------------------------------------------------------------------------------------- optimizers

_OWNERS = WeakIdKeyDictionary()
"""The layer of each z."""

_following: list[Any] = []


def subspaces(model: nn.Module) -> Iterator[tuple[str, SubspaceLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, SubspaceLayer):
            yield name, module


def advance(model: nn.Module, *, decay: float = 0.0) -> bool:
    """Count a step for every subspace of a model, for whoever steps parameters without an optimizer of torch's.

    Returns:
        Whether any was drawn anew: the directions in a momentum then mean nothing any more.
    """
    renewed = [layer.advance(decay=decay) for _, layer in subspaces(model)]
    return any(renewed)


def _follow_optimizers() -> None:
    if not _following:
        _following.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = _OWNERS.get(parameter)  # type: ignore[no-untyped-call]
            layer = None if found is None or parameter.grad is None else found()
            if layer is None or layer.z is not parameter:
                continue
            if layer.due():
                _spend_momentum(parameter, optimizer, group)
            if layer.advance(decay=_decay(optimizer, group)):
                _forget_directions(optimizer.state.get(parameter, {}))


def _decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """What a step takes of a weight by decay alone, as a fraction of it."""
    if not group.get("weight_decay"):
        return 0.0
    one = float(group["lr"]) * float(group["weight_decay"])
    if isinstance(optimizer, torch.optim.SGD):  # it goes through the momentum, which adds it up
        return one / (1 - float(group["momentum"])) if not group["dampening"] else one
    if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
        return one
    counters.count(
        "subspace weight decay",
        1,
        f"{type(optimizer).__name__} divides weight decay by the gradients' size, which is not known of weights in a "
        "subspace: there it pulls them to where they began, not to zero. Take AdamW or SGD",
    )
    return 0.0


@torch.no_grad()
def _spend_momentum(z: Tensor, optimizer: Optimizer, group: dict[str, Any]) -> None:
    """The steps that the momentum still means, at once. Adam's are of the size of its second moments: not foreseen."""
    momentum = optimizer.state.get(z, {}).get("momentum_buffer")
    if isinstance(optimizer, torch.optim.SGD) and isinstance(momentum, Tensor) and not group.get("maximize"):
        kept = float(group["momentum"])
        z.sub_(momentum, alpha=float(group["lr"]) * kept / (1 - kept))


@torch.no_grad()
def _forget_directions(state: dict[str, Any]) -> None:
    for name in DIRECTIONS:
        if isinstance(state.get(name), Tensor):
            state[name].zero_()
