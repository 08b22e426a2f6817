"""Weights that stay dense and move in few directions, which all workers derive from a common seed.

A weight of d entries is cut into c = round(1 / rho) tiles of K; one coordinate moves one entry of every tile, up or
down by a sign for each 64 entries of a tile: ``w = origin + s ⊙ tile(z)``. The optimizer sees z only, so its memory,
the gradients and the messages are rho of the dense ones; forward and backward are those of the dense layer plus two
passes over the weight.

Every T steps the subspace is redrawn: the movement of z is added to the origin, z restarts at zero under new signs, and
so does the optimizer's momentum, which pointed along the old directions. The remaining steps of SGD's momentum are
taken before, all at once: dropping them would lose a tenth of the movement with T=100 and momentum 0.9. The entries
that share a coordinate never change, so second moments (Adam's) stay valid. After many renewals the weight has moved in
all directions.

Steps are counted where they are taken: a hook on torch's optimizers finds the layers whose z they update. Code that
updates z without an optimizer calls ``advance``.
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
from laconic.layers.functional import call_with_weight, with_parameters, without_parameters

__all__ = ["SIGN_BLOCK", "SubspaceLayer", "Tiles", "advance", "move_origin", "project_gradient", "subspaces"]

SIGN_BLOCK = 64
"""Neighbours that share a sign: enough for vector units, few enough that the tiles' interference averages out."""

BMM_MIN_TILES = 7
"""From this number of tiles on a CPU sums them by matrix products, which torch computes slowly for fewer."""

SIGNS = 501
"""Stream of the seed that signs come from."""

DIRECTIONS = ("momentum_buffer", "exp_avg")
"""Optimizer state that holds directions of past gradients. Magnitudes, such as Adam's second moments, stay valid."""


class Tiles:
    """The layout of d entries on K coordinates: ``rows`` tiles, the last of which may be incomplete.

    >>> tiles = Tiles(100_000, 0.1)
    >>> tiles.coordinates, tiles.rows, tiles.whole
    (10048, 10, 9)
    """

    def __init__(self, numel: int, rho: float) -> None:
        tiles = max(1, round(1 / rho))
        self.numel = numel
        self.coordinates = -(-numel // (tiles * SIGN_BLOCK)) * SIGN_BLOCK
        self.rows = -(-numel // self.coordinates)
        self.whole = numel // self.coordinates
        self.blocks = self.coordinates // SIGN_BLOCK

    def signs(self, seed: int, epoch: int, like: Tensor) -> Tensor:
        """Return [rows, blocks] of +1 and -1, the same on every device."""
        key = random.splitmix64(random.key(seed, SIGNS) ^ random.splitmix64(epoch))
        counter = torch.arange(self.rows * self.blocks, dtype=torch.int64, device=like.device)
        bits = random.hash32(counter, key) >> 16 & 1
        return (1 - 2 * bits).to(like.dtype).view(self.rows, self.blocks)


def move_origin(z: Tensor, origin: Tensor, signs: Tensor, whole: int, out: Tensor | None = None) -> Tensor:
    """Return ``origin + s ⊙ tile(z)``. Signs are exact factors, so every device computes the same bits."""
    flat, rows = origin.reshape(-1), z.view(-1, SIGN_BLOCK)
    result, cut = torch.empty_like(flat) if out is None else out.view(-1), whole * z.numel()
    if whole:
        shape = (whole, *rows.shape)
        torch.addcmul(flat[:cut].view(shape), signs[:whole, :, None], rows, out=result[:cut].view(shape))
    for begin, shape, blocks in _tail(flat.numel(), cut):
        end = begin + shape[0] * shape[1]
        sign, row = signs[whole, blocks, None], rows[blocks, : shape[1]]
        torch.addcmul(flat[begin:end].view(shape), sign, row, out=result[begin:end].view(shape))
    return result.view(origin.shape)


def _tail(numel: int, cut: int) -> Iterator[tuple[int, tuple[int, int], slice]]:
    """Yield begin, shape and blocks of the incomplete last tile: first its whole blocks, then the rest."""
    blocks, rest = divmod(numel - cut, SIGN_BLOCK)
    if blocks:
        yield cut, (blocks, SIGN_BLOCK), slice(0, blocks)
    if rest:
        yield numel - rest, (1, rest), slice(blocks, blocks + 1)


def project_gradient(gradient: Tensor, signs: Tensor, whole: int) -> Tensor:
    """Return the gradient of z: the signed sum over the entries of each coordinate."""
    flat = gradient.reshape(-1)
    cut = whole * signs.shape[1] * SIGN_BLOCK
    rows = flat[:cut].view(whole, -1, SIGN_BLOCK)
    if flat.device.type != "cpu" or torch.compiler.is_compiling():
        result = (rows * signs[:whole, :, None]).sum(0)
    elif whole >= BMM_MIN_TILES:
        weights = signs[:whole].to(flat.dtype).t().unsqueeze(1).contiguous()
        result = torch.bmm(weights, rows.transpose(0, 1)).squeeze(1)
    else:
        result = torch.zeros(signs.shape[1], SIGN_BLOCK, dtype=flat.dtype)
        for row, sign in zip(rows, signs, strict=False):  # in place: a product of the weight's size would cost more
            result.addcmul_(row, sign[:, None])
    for begin, shape, blocks in _tail(flat.numel(), cut):
        part = flat[begin : begin + shape[0] * shape[1]].view(shape)
        result[blocks, : shape[1]].addcmul_(part, signs[whole, blocks, None])
    return result.view(-1)


class _MovedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, origin: Tensor, signs: Tensor, whole: int) -> Tensor:
        ctx.save_for_backward(signs)
        ctx.whole = whole
        return move_origin(z, origin, signs, whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return project_gradient(gradient, ctx.saved_tensors[0], ctx.whole).view(1, -1), None, None, None


class _CachedWeight(_MovedWeight):
    """The moved weight, taken from a cache."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, cached: Tensor, signs: Tensor, whole: int) -> Tensor:
        ctx.save_for_backward(signs)
        ctx.whole = whole
        return cached.detach()


class SubspaceLayer(nn.Module):
    """A Linear, convolution or embedding whose weight moves in a subspace.

    ``origin`` is a parameter without a gradient: DDP broadcasts it once, at construction. ``state`` holds the seed and
    the number of steps; signs follow from both and are not saved.

    Args:
        layer: The dense layer, whose weight is the start.
        rho: Coordinates over entries.
        every: Steps between renewals; 0 never renews.
        seed: Decides the directions; the same on all workers, different for each layer.
    """

    origin: nn.Parameter
    z: nn.Parameter
    state: Tensor

    def __init__(self, layer: nn.Module, rho: float, every: int, seed: int) -> None:
        super().__init__()
        weight, bias = layer.weight, getattr(layer, "bias", None)
        assert isinstance(weight, Tensor)
        self.settings, self.every = without_parameters(layer), every
        self.tiles = Tiles(weight.numel(), rho)
        self.origin = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
        # Two dimensions, because a policy takes vectors for biases and does not compress them.
        self.z = nn.Parameter(weight.new_zeros(1, self.tiles.coordinates))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self.register_buffer("state", torch.tensor([seed & (2**62 - 1), 0], dtype=torch.int64, device=weight.device))
        self._signs: Tensor | None = None
        self._cached_weight: Tensor | None = None
        self._cached_z: Tensor | None = None
        self._cached_version: int | None = None
        """Version of the origin in the cached weight; None if something else has changed."""
        self._steps = 0
        self._derive_state()
        _register_step_hook()

    # ------------------------------------------------------------------------------------------------------- the layer

    @property
    def weight(self) -> Tensor:
        assert self._signs is not None
        if self.z.device.type != "cpu" or torch.compiler.is_compiling():
            weight: Tensor = _MovedWeight.apply(self.z, self.origin, self._signs, self.tiles.whole)  # type: ignore[no-untyped-call]
        else:
            weight = _CachedWeight.apply(self.z, self._update_cache(), self._signs, self.tiles.whole)  # type: ignore[no-untyped-call]
        return weight

    @torch.no_grad()
    def _update_cache(self) -> Tensor:
        """Return the weight in a tensor that is kept: on a CPU allocating one costs more than the computation.

        It is recomputed if z or the origin has changed. z is compared by value, because it may change without a new
        version.
        """
        assert self._signs is not None
        if self._cached_weight is None:
            self._cached_weight, self._cached_z = torch.empty_like(self.origin), None
        version, cached_z = self.origin._version, self._cached_z
        if self._cached_version != version or cached_z is None or not torch.equal(cached_z, self.z):
            move_origin(self.z, self.origin, self._signs, self.tiles.whole, out=self._cached_weight)
            cached_z = torch.empty_like(self.z) if cached_z is None else cached_z
            self._cached_z = cached_z.copy_(self.z.detach())
            self._cached_version = version
        return self._cached_weight

    def forward(self, x: Tensor) -> Tensor:
        return call_with_weight(self.settings, x, self.weight, self.bias)

    def dense(self) -> nn.Module:
        return with_parameters(self.settings, self.weight, self.bias)

    # ----------------------------------------------------------------------------------------------------------- steps

    @property
    def steps(self) -> int:
        return self._steps

    def due(self, steps: int = 1) -> bool:
        """Whether this many more steps redraw the subspace."""
        return bool(self.every) and (self._steps + steps) // self.every != self._steps // self.every

    @torch.no_grad()
    def advance(self, steps: int = 1, *, decay: float = 0.0) -> bool:
        """Count steps that z has taken; return whether this redrew the subspace.

        Args:
            decay: Fraction that weight decay took of z in them; the origin shrinks by the same.
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
        """Add the movement of z to the origin and draw new directions."""
        assert self._signs is not None
        self.origin.copy_(move_origin(self.z, self.origin, self._signs, self.tiles.whole))
        self.z.zero_()
        self._draw()

    @torch.no_grad()
    def go_to(self, steps: int) -> None:
        """Set the number of steps and draw their directions; origin and z are not changed."""
        self.state[1] = steps
        self._steps = steps
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        epoch = self._steps // self.every if self.every else 0
        signs = self.tiles.signs(self._seed, epoch, self.origin)
        if self._signs is not None and self._signs.device == signs.device and self._signs.dtype == signs.dtype:
            self._signs.copy_(signs)  # in place: a captured graph keeps using it
        else:
            self._signs = signs
        self._cached_version = None

    def _derive_state(self) -> None:
        """Recompute everything that follows from the tensors, after they may have been replaced."""
        _OWNERS[self.z] = weakref.ref(self)
        self._signs = self._cached_weight = None
        if self.state.device.type != "meta":
            self._seed, self._steps = self.state.tolist()
            self._draw()

    def _apply(self, fn: Any, recurse: bool = True) -> SubspaceLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._derive_state()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._derive_state()

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_signs", "_cached_weight", "_cached_z", "_cached_version")
        return self.__dict__ | dict.fromkeys(derived)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._derive_state()
        _register_step_hook()

    def extra_repr(self) -> str:
        return f"coordinates={self.tiles.coordinates} of {self.tiles.numel}, T={self.every}"


# ---------------------------------------------------------------------------------------------------------- optimizers

_OWNERS = WeakIdKeyDictionary()
"""The layer of each z."""

_step_hook: list[Any] = []


def subspaces(model: nn.Module) -> Iterator[tuple[str, SubspaceLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, SubspaceLayer):
            yield name, module


def advance(model: nn.Module, *, decay: float = 0.0) -> bool:
    """Count a step for every subspace of a model, for code that updates parameters without a torch optimizer.

    Returns:
        Whether any subspace was redrawn: directions in a momentum are then no longer valid.
    """
    renewed = [layer.advance(decay=decay) for _, layer in subspaces(model)]
    return any(renewed)


def _register_step_hook() -> None:
    if not _step_hook:
        _step_hook.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference = _OWNERS.get(parameter)  # type: ignore[no-untyped-call]
            layer = None if reference is None or parameter.grad is None else reference()
            if layer is None or layer.z is not parameter:
                continue
            if layer.due():
                _take_remaining_momentum_steps(parameter, optimizer, group)
            if layer.advance(decay=_decay(optimizer, group)):
                _zero_directions(optimizer.state.get(parameter, {}))


def _decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the fraction of a weight that weight decay takes in a step."""
    if not group.get("weight_decay"):
        return 0.0
    fraction = float(group["lr"]) * float(group["weight_decay"])
    if isinstance(optimizer, torch.optim.SGD):  # the momentum accumulates it
        return fraction / (1 - float(group["momentum"])) if not group["dampening"] else fraction
    if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
        return fraction
    counters.count(
        "subspace weight decay",
        1,
        f"{type(optimizer).__name__} divides weight decay by the gradients' size, which is unknown for weights in a "
        "subspace: it pulls them to their start, not to zero. Use AdamW or SGD",
    )
    return 0.0


@torch.no_grad()
def _take_remaining_momentum_steps(z: Tensor, optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Take all steps that SGD's momentum would still take. Adam's depend on future second moments and are dropped."""
    momentum = optimizer.state.get(z, {}).get("momentum_buffer")
    if isinstance(optimizer, torch.optim.SGD) and isinstance(momentum, Tensor) and not group.get("maximize"):
        m = float(group["momentum"])
        z.sub_(momentum, alpha=float(group["lr"]) * m / (1 - m))


@torch.no_grad()
def _zero_directions(state: dict[str, Any]) -> None:
    for name in DIRECTIONS:
        if isinstance(state.get(name), Tensor):
            state[name].zero_()
