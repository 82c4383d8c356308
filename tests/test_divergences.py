"""Values from the definition, in probability space; gradients by autograd through a softmax in fp64.

p = (.5, .3, .15, .05), q = (.1, .6, .2, .1):  KL(p||q) = .5 ln 5 + .3 ln .5 + .15 ln .75 + .05 ln .5 = .518965;
KL(q||p) = .1 ln .2 + .6 ln 2 + .2 ln 4/3 + .1 ln 2 = .381796.
"""

from __future__ import annotations

from math import log

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd.losses import JSD, AdaptiveKL, AnalyticLoss, ForwardKL, ReverseKL, SkewForwardKL, SkewReverseKL, TotalVariation
from opd.records import Distribution, TokenChunk
from tests.chunks import chunk_of, logit_grad

P, Q = [0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.2, 0.1]
LOSSES = [
    ReverseKL(),
    ForwardKL(),
    *(JSD(beta) for beta in (0.0, 0.1, 0.5, 0.9, 1.0)),
    SkewForwardKL(0.1),
    SkewReverseKL(0.1),
    SkewReverseKL(0.7),
    TotalVariation(),
    AdaptiveKL(0.5),
]


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a.log() - b.log())).sum()


def reference(loss: AnalyticLoss, p: Tensor, q: Tensor) -> Tensor:
    if isinstance(loss, ReverseKL) or (isinstance(loss, JSD) and loss.beta == 1.0):
        return kl(p, q)
    if isinstance(loss, ForwardKL) or (isinstance(loss, JSD) and loss.beta == 0.0):
        return kl(q, p)
    if isinstance(loss, SkewForwardKL):
        return kl(q, loss.alpha * q + (1 - loss.alpha) * p)
    if isinstance(loss, SkewReverseKL):
        return kl(p, (1 - loss.alpha) * q + loss.alpha * p)
    if isinstance(loss, TotalVariation):
        return 0.5 * (p - q).abs().sum()
    if isinstance(loss, AdaptiveKL):
        order = q.argsort(descending=True)
        mass, head = 0.0, []
        for index in order.tolist():
            if mass < loss.mass:
                head.append(index)
            mass += q[index].item()
        gap = (p - q).abs().detach()
        share = (gap[head].sum() / gap.sum()).item() if gap.sum() > 0 else 0.5
        return share * kl(q, p) + (1 - share) * kl(p, q)
    m = loss.beta * q + (1 - loss.beta) * p
    return loss.beta * kl(q, m) + (1 - loss.beta) * kl(p, m)


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (ReverseKL(), 0.518965),
        (ForwardKL(), 0.381796),
        (JSD(0.5), 0.104300),
        (JSD(0.1), 0.034758),
        (JSD(0.9), 0.043837),
        (JSD(0.0), 0.381796),
        (JSD(1.0), 0.518965),
        (SkewForwardKL(0.1), 0.316859),
        (SkewReverseKL(0.1), 0.372479),
        (TotalVariation(), 0.4),
    ],
)
def test_known_values(loss: AnalyticLoss, value: float) -> None:
    assert loss(chunk_of(P, Q)).item() == pytest.approx(value, abs=1e-6)


def test_known_gradients() -> None:
    """Reverse: p (log p/q - KL); forward: p - q."""
    reverse = ReverseKL().value_and_grad(chunk_of(P, Q))[1][0]
    forward = ForwardKL().value_and_grad(chunk_of(P, Q))[1][0]
    assert reverse.tolist() == pytest.approx([0.545236, -0.363634, -0.120997, -0.060606], abs=1e-6)
    assert forward.tolist() == pytest.approx([0.4, -0.3, -0.05, -0.05], abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_value_and_gradient_match_the_definition(loss: AnalyticLoss, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    logits = st.lists(st.floats(-6, 6), min_size=size, max_size=size)
    p, q = (torch.softmax(torch.tensor(data.draw(logits), dtype=torch.float64), -1) for _ in range(2))
    assume(not isinstance(loss, TotalVariation) or (p - q).abs().min() > 1e-6)  # no slope where they touch
    assume(not isinstance(loss, AdaptiveKL) or q.sort().values.diff().min() > 1e-9)  # rounding would choose the head
    value, grad = loss.value_and_grad(chunk_of(p.tolist(), q.tolist()))
    assert value.item() == pytest.approx(reference(loss, p, q).item(), abs=1e-9)
    assert value.item() >= -1e-12
    expected = logit_grad(lambda student: reference(loss, student, q), p.tolist())
    assert torch.allclose(grad[0], expected, atol=1e-9)
    assert grad.sum().item() == pytest.approx(0.0, abs=1e-9)  # logits have a free constant


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_teacher_equal_to_student_is_a_fixed_point(loss: AnalyticLoss) -> None:
    value, grad = loss.value_and_grad(chunk_of(P, P))
    assert value.abs().item() < 1e-12
    assert grad.abs().max().item() < 1e-12


def test_jsd_scaled_limits_and_bound() -> None:
    assert (JSD(1e-4)(chunk_of(P, Q)) / 1e-4).item() == pytest.approx(0.381796, abs=1e-3)
    assert (JSD(1 - 1e-4)(chunk_of(P, Q)) / 1e-4).item() == pytest.approx(0.518965, abs=1e-3)
    assert JSD(0.5)(chunk_of([1 - 1e-9, 1e-9], [1e-9, 1 - 1e-9])).item() <= log(2)


def test_floor_bounds_the_teacher() -> None:
    """q = (1 - e^-9, e^-9) under a floor of -6: value .5 (ln .5 - ln q0) + .5 (ln .5 + 6)."""
    q0 = 1 - torch.tensor(-9.0).exp().item()
    value = ReverseKL(floor=-6.0)(chunk_of([0.5, 0.5], [q0, 1 - q0])).item()
    assert value == pytest.approx(0.5 * (log(0.5) - log(q0)) + 0.5 * (log(0.5) + 6.0), abs=1e-9)


def test_the_direction_is_not_swapped() -> None:
    """A student that covers too much pays under reverse KL where the teacher is small."""
    wide, narrow = [0.5, 0.5], [0.999, 0.001]
    assert ReverseKL()(chunk_of(wide, narrow)).item() > 2.5 > 0.7 > ForwardKL()(chunk_of(wide, narrow)).item()


@pytest.mark.parametrize("beta", [-0.1, 1.1])
def test_beta_outside_its_range_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        JSD(beta)


def test_extreme_logits_stay_finite() -> None:
    """Logits of 1e4 and a one-hot teacher: every value and gradient is finite."""
    student = torch.log_softmax(torch.tensor([[1e4, 0.0, -1e4]]), -1)
    teacher = torch.log_softmax(torch.tensor([[-1e4, 1e4, 0.0]]), -1).clamp(min=-1e4)
    first = student[:, 0]
    chunk = TokenChunk(
        Distribution(student), first, torch.tensor([0]), first, torch.zeros(1), Distribution(teacher)
    )
    for loss in LOSSES:
        value, grad = loss.value_and_grad(chunk)
        assert torch.isfinite(value).all()
        assert torch.isfinite(grad).all()
