"""Which codecs of gradients an optimizer can bear, as measured.

Error feedback delivers a coordinate's gradient late and in bursts. Plain SGD only adds gradients up and does not
notice. Momentum repeats a burst in the steps after it, and Adam's second moment takes it for noise. Muon makes all
directions of a gradient equally long, also those in which the error of a coarse quantizer prevails. The same codecs do
far less harm to *updates*, which ``laconic.LocalSGD`` exchanges: the optimizer has then seen every gradient in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from laconic.codecs import parse
from laconic.codecs.memory import MomentumCorrection

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "NAMES", "VERDICTS", "Moments", "Verdict", "alternatives", "judge", "known_loss", "moments", "never_advised",
    "unremembered_bias", "verdict",
]  # fmt: skip

Moments = Literal["none", "momentum", "adam", "muon"]
"""What an optimizer makes of earlier gradients: nothing, their average, (also) that of their squares, or their average
made orthogonal."""

NAMES: Mapping[Moments, str] = {"none": "SGD", "momentum": "momentum", "adam": "Adam", "muon": "Muon"}
"""What a table calls each of them."""

Kind = Literal["dropped", "late", "scaled", "one bit", "low rank", "momentum", "few bits"]
"""What a codec does to a gradient: see ``_kinds``."""


class Verdict(NamedTuple):
    """Why a kind of codec does not suit an optimizer, and what follows."""

    cause: str
    effect: str
    loss: str
    """The effect in two words, for a column of a table."""


_DROPPED = Verdict(
    "it drops small gradients for good, so some weights hardly move", "models train far worse", "far worse"
)
_LATE = "error feedback delivers gradients late and in bursts, which "
_SCALED = Verdict(
    "it sends few gradients, enlarged, and such bursts stay in the moments", "models may train far worse",
    "perhaps far worse",
)  # fmt: skip
_COARSE = Verdict("Adam's moments magnify the error of so few bits", "transformers train somewhat worse", "worse")

VERDICTS: Mapping[tuple[Kind, Moments], Verdict] = {
    # `topk:0.001|qsgd:4` under AdamW: 3.60 nats beside DDP's 2.70 (character GPT, 363 k parameters, 2 ranks). With SGD:
    # method 5 of `laconic study kothari2021` loses 9 points of top-1.
    ("dropped", "none"): _DROPPED,
    ("dropped", "momentum"): _DROPPED,
    ("dropped", "adam"): _DROPPED,
    # `ef|topk:0.01|qsgd:4` under AdamW: 2.38 nats a byte beside 0.865 (byte-level GPT, 7.3 M parameters, 4 workers,
    # 2,000 steps). Best over learning rates (GPT of 2 layers, 2 ranks): AdamW 2.757 beside 2.115, with beta1 = 0 2.404;
    # SGD with momentum 0.9 2.756 beside 2.416, with momentum 0.5 2.470 and without 2.462 beside 2.460. LeNet-5 with
    # momentum 0.9 bears `ef|topk:0.05|qsgd:4` (results/ddp).
    ("late", "momentum"): Verdict(_LATE + "momentum repeats", "transformers train far worse", "far worse"),
    ("late", "adam"): Verdict(
        _LATE + "Adam's second moment takes for noise", "transformers train far worse", "far worse"
    ),
    # Not measured: `randk` without memory is unbiased, but its variance is that of the bursts above.
    ("scaled", "momentum"): _SCALED,
    ("scaled", "adam"): _SCALED,
    # AdamW: `sign` 2.756 and `ef|sign` 2.852 beside 2.701 (character GPT). Not measured with SGD and momentum.
    ("one bit", "adam"): _COARSE,
    # AdamW: `ef|powersgd:4` 2.771 beside 2.701, and 2.397 beside 2.115 (the GPTs above). With momentum 0.9 LeNet-5
    # bears it (results/ddp), as Vogels et al. 2019 found for larger networks.
    ("low rank", "adam"): Verdict(
        "a low rank leaves gradients for later steps", "transformers train somewhat worse", "worse"
    ),
    # Lin et al. 2018: the momentum before compression replaces that of the optimizer. Two of them multiply.
    ("momentum", "momentum"): Verdict(
        "the codec has momentum, too, so it is applied twice", "steps are too long", "worse"
    ),
    ("momentum", "adam"): Verdict("the codec's momentum enters the optimizer's moments", "models train worse", "worse"),
    # Muon: `ef|thc:4` +3.4 %, `thc:4` +4.8 %, `ef|thc:6` +1.1 %, `qsgd:8` +0.5 % of the loss of torch's HSDP, where
    # AdamW ends +0.6 % by `ef|thc:4`; Muon's updates by `ef|thc:4` in every step: +0.8 % (GPT of 0.87 M parameters, 2
    # nodes, 300 steps, results/bench/fsdp-loss.jsonl).
    ("few bits", "muon"): Verdict(
        "it makes all directions of a gradient equally long, also those in which the error of so few bits prevails",
        "transformers train worse", "worse",
    ),
}  # fmt: skip
"""Verdicts on gradients; what is not listed was measured to train well, or not measured. Muon has the verdicts of
momentum, too. Quantizers with 4 bits or more (`qsgd:4`, `ef|qsgd:4`, `ef|thc:4`) end within noise of plain DDP under
AdamW with two ranks; with four `ef|thc:4`, whose bits hold the sum of all, ended 1.3 % above
(results/bench/gpt.jsonl)."""

FEW_BITS = 6
"""Bits of a value below which Muon was seen to train worse."""

_ADAM = (
    "adam", "adagrad", "adadelta", "rmsprop", "adafactor", "lamb", "adan", "sophia", "prodigy", "shampoo", "soap",
    "novograd", "adabelief", "ranger",
)  # fmt: skip
_MOMENTUM = ("lion", "signum", "lars")
_ADAM_STATE = {"exp_avg_sq", "square_avg", "exp_inf", "max_exp_avg_sq", "second_moment"}
_MOMENTUM_STATE = {"exp_avg", "momentum_buffer", "momentum", "velocity"}


def moments(optimizer: Optimizer) -> Moments | None:
    """Return what an optimizer remembers of earlier gradients: by its class, its options, and its state after a step.

    None if it is unknown.
    """
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    if any("muon" in name for name in names):
        return "muon"
    if any(part in name for name in names for part in _ADAM):
        return "adam"
    if any(part in name for name in names for part in _MOMENTUM):
        return "momentum"
    groups: list[dict[str, Any]] = optimizer.param_groups
    if any(_positive(group.get("momentum")) for group in groups):
        return "momentum"
    if "sgd" in names or "asgd" in names:
        return "none"
    if any("betas" in group for group in groups):
        return "adam"
    state = {key for each in optimizer.state.values() if isinstance(each, dict) for key in each}
    if state & _ADAM_STATE:
        return "adam"
    return "momentum" if state & _MOMENTUM_STATE else None


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def judge(spec: str, memory: Moments) -> Verdict | None:
    """Return the verdict of the table on a spec; None if nothing is known against it."""
    same: tuple[Moments, ...] = ("momentum", "muon") if memory == "muon" else (memory,)
    return next((VERDICTS[kind, one] for kind in _kinds(spec) for one in same if (kind, one) in VERDICTS), None)


def alternatives(memory: Moments | None = None) -> tuple[str, ...]:
    """Return codecs of gradients that train well; without an optimizer's moments, with any optimizer.

    >>> alternatives("momentum"), alternatives("adam"), alternatives("muon")
    (('qsgd:4', 'ef|thc:4'), ('qsgd:4',), ('qsgd:8',))
    """
    if memory == "adam":  # with four ranks `ef|thc:4` was seen to end above plain DDP
        return ("qsgd:4",)
    return ("qsgd:8",) if memory in ("muon", None) else ("qsgd:4", "ef|thc:4")


def never_advised(spec: str, memory: Moments | None) -> str | None:
    """Return why gradients must not be exchanged by a spec, whatever was trained with it; None if they may.

    A selector without memory drops gradients for good, and Adam bears no sparse ones. Without a known optimizer, what
    no optimizer bears counts.

    >>> never_advised("topk:0.01", "none"), never_advised("ef|topk:0.01", "adam"), never_advised("ef|topk:0.01", None)
    ('drops small gradients for good', 'sparse gradients do not suit Adam', None)
    """
    kinds = set(_kinds(spec))
    if "dropped" in kinds:
        return "drops small gradients for good"
    if memory == "adam" and kinds & {"late", "scaled", "momentum"}:
        return "sparse gradients do not suit Adam"
    return None


def verdict(spec: str, optimizer: Optimizer | Moments) -> str | None:
    """Return why gradients exchanged by a spec do not suit an optimizer, and what to do; None if nothing is known.

    >>> verdict("qsgd:4", "adam")
    >>> verdict("topk:0.01", "none").split(". ")[1]
    "Attach 'ef|topk:0.01', which sends it later."
    """
    memory = optimizer if isinstance(optimizer, str) else moments(optimizer)
    harm = None if memory is None else judge(spec, memory)
    if memory is None or harm is None:
        return None
    subject = {
        "none": "gradients",
        "momentum": "an optimizer with momentum",
        "adam": "an optimizer with Adam's moments",
        "muon": "Muon",
    }
    advice = _advice(spec, optimizer, memory)
    return f"{spec!r} does not suit {subject[memory]}: {harm.cause}, and {harm.effect}. {advice}"


def unremembered_bias(spec: str) -> str | None:
    """Return a warning if a spec loses a part of every gradient for good: it is biased and has no error feedback.

    Casts and quantizers that only round to the nearest value are not meant.

    >>> unremembered_bias("ef|sign"), unremembered_bias("bf16"), unremembered_bias("qsgd:4")
    (None, None, None)
    >>> unremembered_bias("sign").split(":")[0]
    "'sign' is biased and has no error feedback"
    """
    stages, chain = parse(spec)
    drops = chain.selector is not None and chain.selector.is_biased
    if stages or not (drops or any(stage.biased is True for stage in chain.stages)):
        return None
    return (
        f"{spec!r} is biased and has no error feedback: what it leaves out of a gradient is lost for good. With plain "
        f"SGD attach 'ef|{spec}', which sends it later; with any optimizer {_either(alternatives())} is safe"
    )


def known_loss(spec: str, memory: Moments | None = None) -> str:
    """Return in a few words what the table says against gradients exchanged by a spec.

    Args:
        memory: Of the optimizer; None: of all, and the text names those that it is about.

    >>> known_loss("topk:0.01"), known_loss("ef|topk:0.01"), known_loss("qsgd:4")
    ('far worse', 'far worse (momentum, Adam, Muon)', 'worse (Muon)')
    >>> known_loss("ef|topk:0.01", "adam"), known_loss("ef|topk:0.01", "none")
    ('far worse', 'none known')
    """
    if memory is not None:
        against = judge(spec, memory)
        return "none known" if against is None else against.loss
    losses = {name: verdict.loss for memory, name in NAMES.items() if (verdict := judge(spec, memory)) is not None}
    if not losses:
        return "none known"
    loss = next(iter(losses.values()))  # a codec does the same to all of them
    return loss if len(losses) == len(NAMES) else f"{loss} ({', '.join(losses)})"


def _kinds(spec: str) -> Iterator[Kind]:
    """Yield what a codec does to gradients, the worst first."""
    stages, chain = parse(spec)
    selector = chain.selector
    if any(isinstance(stage, MomentumCorrection) for stage in stages):
        yield "momentum"  # its residual is late, too, but plain SGD bears that
    elif selector is not None and (selector.is_biased or selector.randomized):  # otherwise it drops zeros only
        yield "late" if stages else "dropped" if selector.is_biased else "scaled"
    names = {stage.name for stage in chain.stages}
    if names & {"sign", "onebit"}:
        yield "one bit"
    if "powersgd" in names:
        yield "low rank"
    if names & {"sign", "onebit", "terngrad"} or any(
        getattr(stage, "bits", FEW_BITS) < FEW_BITS for stage in chain.stages
    ):
        yield "few bits"


def _advice(spec: str, optimizer: Optimizer | Moments, memory: Moments) -> str:
    stages, _ = parse(spec)
    codec = spec.split("|", len(stages))[-1].strip()
    if memory == "none":
        return f"Attach 'ef|{codec}', which sends it later."
    is_sgd = not isinstance(optimizer, str) and "SGD" in {kind.__name__ for kind in type(optimizer).__mro__}
    if is_sgd and any(isinstance(stage, MomentumCorrection) for stage in stages):
        return "Set the optimizer's momentum to 0."
    local = f"laconic.LocalSGD(model, optimizer, every=1, codec='ef|{codec}', outer='mean')"
    ways = [f"exchange the optimizer's updates instead of gradients, by {local}"]
    if is_sgd:
        assert not isinstance(optimizer, str)
        momentum = max(group["momentum"] for group in optimizer.param_groups)
        ways.append(f"set the optimizer's momentum to 0 and attach 'momentum:{momentum:g}|{codec}'")
    ways.append(f"attach {_either(alternatives(memory))}")
    return "Either " + ", or ".join(ways) + "."


def _either(specs: tuple[str, ...]) -> str:
    return " or ".join(map(repr, specs))
