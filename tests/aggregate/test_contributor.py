"""Contributor: error feedback of one worker's side of sums."""

from __future__ import annotations

import pytest
import torch
from sum_helpers import inputs

import laconic
import laws
from laconic import kernels, wire
from laconic.aggregate import homomorphic

WITH_SCALES = ["ef|thc:2", "ef|shared:4", "ef|thc:1", "ef|randk:0.3|thc:4"]


@pytest.mark.parametrize(
    "spec, carry", [(spec, False) for spec in (*WITH_SCALES, "ef|powersgd:2")] + [(spec, True) for spec in WITH_SCALES]
)
def test_sent_values_and_residuals_add_up_to_the_inputs(spec, carry):
    workers, shape = 3, (60, 50)
    senders = [laconic.Contributor(spec, workers=workers, worker=i) for i in range(workers)]
    put_in, came_out, scales = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), None
    for step in range(12):
        xs = [laws.normal(*shape, seed=50 * step + i) * (1 + i) for i in range(workers)]
        summing = senders[0].summing
        probes = [sender.probe("w", x, seed=step) for sender, x in zip(senders, xs, strict=True)]
        agreed = summing.agree(probes)
        frames = [sender.encode("w", agreed if scales is None else scales, seed=step) for sender in senders]
        if carry:
            scales = summing.carry(agreed)
        put_in += sum(xs).double() / workers
        answer = homomorphic.add(*frames)
        came_out += laconic.decode(answer).double()
        for sender in senders:
            sender.received("w", wire.unpack(answer))
    residuals = sum(_unrotated(spec, sender.residual("w")).double() for sender in senders)
    residual = residuals[: put_in.numel()].view(shape) / workers
    assert float((came_out + residual - put_in).abs().max()) < 1e-4
    assert float((came_out - put_in).norm() / put_in.norm()) < (1.0 if "randk" in spec or "powersgd" in spec else 0.6)


def _unrotated(spec, residual):
    if "randk" in spec or "thc" not in spec:
        return residual
    n = residual.numel()
    rows = kernels.reference.packed_ints.hadamard(residual.view(-1, 1024) * 2.0**-5)
    return rows.view(-1) * kernels.reference.packed_ints.rotation_signs(n, 0, residual.device)


def test_skipped_round_changes_nothing_but_a_count(caplog):
    senders = [laconic.Contributor("ef|thc:3", workers=2, worker=i) for i in range(2)]
    xs = inputs(2, 3000)

    def run_round(xs):
        agreed = senders[0].summing.agree([s.probe("w", x) for s, x in zip(senders, xs, strict=True)])
        if not senders[0].usable(agreed):
            for sender in senders:
                with pytest.raises(laconic.NonFiniteError):
                    sender.encode("w", agreed)
                sender.skip("w")
            return None
        return [sender.encode("w", agreed) for sender in senders]

    run_round(xs)
    before = [sender.residual("w").clone() for sender in senders]
    bad = xs[1].clone()
    bad[1234] = float("nan")
    assert run_round([xs[0], bad]) is None and run_round([bad / 0, xs[0]]) is None
    for sender, residual in zip(senders, before, strict=True):
        assert torch.equal(sender.residual("w"), residual) and sender.stats.skipped_nonfinite == 2
    assert sum("not finite" in record.message for record in caplog.records) == 2  # once for each contributor
    copy = laconic.Contributor("ef|thc:3", workers=2, worker=0)
    copy.load_state_dict(senders[0].state_dict())
    agreed = torch.full((3,), 2.0)
    for sender in (copy, senders[0]):
        sender.probe("w", xs[0])
    assert copy.encode("w", agreed) == senders[0].encode("w", agreed)
    senders[0].undo("w")
    assert torch.equal(senders[0].residual("w"), before[0])


def test_residual_of_another_size_is_reset(caplog):
    sender = laconic.Contributor("ef|shared:4", workers=1)
    sender.probe("w", torch.ones(10))
    sender.encode("w", torch.full((1,), 0.25))
    assert torch.equal(sender.residual("w"), torch.full((10,), 0.75))
    sender.probe("w", torch.ones(11))
    assert sender.stats.residual_resets == 1
    sender.encode("w", torch.ones(1))
    with pytest.raises(laconic.InputError, match="call probe first"):
        sender.encode("w", torch.ones(1))
