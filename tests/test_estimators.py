"""Sampled-token estimators in exact expectation: average over the four tokens, each with its probability.

Reverse KL gradient (.545236, -.363634, -.120997, -.060606); E[k2] = .737859.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import Tensor

from opd.losses import CrossEntropy, ReverseKL, SampledKL, SampledReverseKL
from opd.records import Distribution, TokenChunk, TokenRow
from tests.chunks import chunk_of

P, Q = [0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.2, 0.1]
REVERSE = [0.545236, -0.363634, -0.120997, -0.060606]


def sampled(token: int, p: list[float] = P, mu: list[float] | None = None) -> tuple[TokenChunk, Tensor]:
    """One drawn token with its teacher score, and the logits it is differentiated in."""
    z = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    logp = torch.log_softmax(z, -1)
    chunk = replace(
        chunk_of(p, Q, token=token),
        student=Distribution(logp), token_logp=logp[:, token],
        sampler_logp=torch.tensor([log((mu or p)[token])], dtype=torch.float64),
        teacher_token_logp=torch.tensor([log(Q[token])], dtype=torch.float64),
    )  # fmt: skip
    return chunk, z


def expectation(loss: Callable[[TokenChunk], Tensor], mu: list[float] | None = None) -> tuple[float, Tensor]:
    """E over tokens drawn from mu (the student itself by default) of value and logit gradient."""
    value, grad = 0.0, torch.zeros(4, dtype=torch.float64)
    for token, weight in enumerate(mu or P):
        chunk, z = sampled(token, mu=mu)
        loss_value = loss(chunk)
        value += weight * loss_value.item()
        grad += weight * torch.autograd.grad(loss_value.sum(), z)[0][0]
    return value, grad


UNBIASED = [
    SampledKL("k2"),
    SampledKL("rho_k3"),
    SampledKL("k3_plus"),
    SampledReverseKL(),
    SampledReverseKL(ratio=False),
    SampledReverseKL(baseline="negative_kl"),
]


@pytest.mark.parametrize("loss", UNBIASED, ids=str)
def test_expected_gradient_is_that_of_the_reverse_kl(loss: Callable[[TokenChunk], Tensor]) -> None:
    assert expectation(loss)[1].tolist() == pytest.approx(REVERSE, abs=1e-6)


@pytest.mark.parametrize("loss", [SampledKL("rho_k3"), SampledReverseKL()], ids=str)
def test_off_policy_samples_are_corrected_by_the_ratio(loss: Callable[[TokenChunk], Tensor]) -> None:
    """Drawn from mu = (.25, .25, .25, .25)."""
    assert expectation(loss, mu=[0.25] * 4)[1].tolist() == pytest.approx(REVERSE, abs=1e-6)


def test_values() -> None:
    assert expectation(SampledKL("k2"))[0] == pytest.approx(0.737859, abs=1e-6)
    assert expectation(SampledKL("k3_plus"))[0] == pytest.approx(0.518965, abs=1e-6)
    assert expectation(SampledKL("rho_k3"))[0] == pytest.approx(0.518965, abs=1e-6)
    assert expectation(SampledReverseKL())[0] == pytest.approx(0.518965, abs=1e-6)  # -E[A rho]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_back_propagated_k1_and_k3_are_refused_with_the_reason(estimator: str) -> None:
    with pytest.raises(ValueError, match=r"expected gradient|forward KL"):
        SampledKL(estimator)


def test_what_the_refused_estimators_would_do() -> None:
    """k1: nothing; k3: the forward KL's gradient (.4, -.3, -.05, -.05)."""
    assert expectation(lambda c: c.token_logp - c.teacher_token_logp)[1].abs().max().item() < 1e-12
    k3 = expectation(lambda c: (c.teacher_token_logp - c.token_logp).exp() - 1 + c.token_logp - c.teacher_token_logp)
    assert k3[1].tolist() == pytest.approx([0.4, -0.3, -0.05, -0.05], abs=1e-9)


def test_a_constant_advantage_has_no_expected_gradient() -> None:
    assert expectation(lambda c: -3.0 * c.token_logp)[1].abs().max().item() < 1e-12


def test_the_full_vocabulary_is_less_noisy_than_the_sampled_token() -> None:
    """Trace of the gradient's covariance: .1788 for the plain advantage, .3033 with the -KL baseline."""

    def trace(loss: Callable[[TokenChunk], Tensor]) -> float:
        mean = torch.tensor(REVERSE, dtype=torch.float64)
        total = 0.0
        for token, weight in enumerate(P):
            chunk, z = sampled(token)
            total += weight * (torch.autograd.grad(loss(chunk).sum(), z)[0][0] - mean).square().sum().item()
        return total

    assert trace(SampledReverseKL()) == pytest.approx(0.178776, abs=1e-5)
    assert trace(SampledReverseKL(baseline="negative_kl")) == pytest.approx(0.303250, abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "advantage"),
    [
        (SampledReverseKL(), log(0.1 / 0.5)),
        (SampledReverseKL(shape="floor", low=-1.0), -1.0),
        (SampledReverseKL(shape="clip", low=-5.0, high=5.0), log(0.2)),
        (SampledReverseKL(shape="signed_log"), -log(1 - log(0.2))),
        (SampledReverseKL(shape="power", alpha=0.5), 0.1**0.5 - 0.5**0.5),
    ],
    ids=str,
)
def test_maps_on_the_log_ratio(loss: SampledReverseKL, advantage: float) -> None:
    assert loss.advantage(sampled(0)[0]).item() == pytest.approx(advantage, abs=1e-9)


def test_the_default_floor_is_that_of_reopold() -> None:
    assert SampledReverseKL().low == pytest.approx(-2.1972, abs=1e-4)


def test_extrapolation() -> None:
    """Teacher .5, reference .2, student at the reference: A = 1.25 ln 2.5 - 0 = 1.1454."""
    chunk, _ = sampled(0, p=[0.2, 0.3, 0.5, 1e-9])
    chunk = replace(
        chunk,
        teacher_token_logp=torch.tensor([log(0.5)], dtype=torch.float64),
        reference_token_logp=torch.tensor([log(0.2)], dtype=torch.float64),
    )
    assert SampledReverseKL(extrapolate=1.25).advantage(chunk).item() == pytest.approx(1.1454, abs=1e-4)
    assert "reference" in SampledReverseKL(extrapolate=1.25).needs
    assert "reference" not in SampledReverseKL().needs


def test_cross_entropy() -> None:
    assert CrossEntropy()(sampled(1)[0]).item() == pytest.approx(-log(0.3))


def test_equal_models_give_nothing() -> None:
    chunk, _ = sampled(1, p=Q)
    assert SampledKL("k2")(chunk).item() == pytest.approx(0.0, abs=1e-12)
    assert SampledReverseKL().advantage(chunk).item() == pytest.approx(0.0, abs=1e-12)
    assert ReverseKL()(chunk).item() == pytest.approx(0.0, abs=1e-12)


def test_a_token_the_student_all_but_excludes_stays_finite() -> None:
    chunk, _ = sampled(0)
    chunk = replace(chunk, token_logp=torch.tensor([-1e4], dtype=torch.float64), sampler_logp=torch.tensor([-1.0]))
    for loss in UNBIASED:
        assert torch.isfinite(loss(chunk)).all(), loss
    assert exp(20) < 1e9


# ---------------------------------------------------------------------------------------------------- discounted future


def row_of(gaps: list[float]) -> TokenRow:
    """A row whose log q - log p are `gaps`."""
    student = torch.full((len(gaps),), -2.0, dtype=torch.float64)
    return TokenRow(student, student, student + torch.tensor(gaps, dtype=torch.float64), None, 0.0)


@pytest.mark.parametrize(
    ("loss", "future"),
    [
        (SampledReverseKL(gamma=1.0), [5.0, 3.0, 4.0, 0.0]),
        (SampledReverseKL(gamma=0.5), [1.25, 0.5, 2.0, 0.0]),
        (SampledReverseKL(gamma=1.0, length_normalised=True), [5 / 3, 1.5, 4.0, 0.0]),
        (SampledReverseKL(gamma=1.0, shape="clip", low=-0.5, high=3.0), [4.5, 2.5, 3.0, 0.0]),
    ],
    ids=["sum", "discounted", "mean", "clipped"],
)
def test_the_future_of_a_row(loss: SampledReverseKL, future: list[float]) -> None:
    """Gaps 1, 2, -1, 4. At gamma .5: .5 * 4 = 2; .5 * (-1 + 2) = .5; .5 * (2 + .5) = 1.25."""
    assert loss.of_row(row_of([1.0, 2.0, -1.0, 4.0])).tolist() == pytest.approx(future)


def test_a_missing_score_has_no_part_in_the_future() -> None:
    row = row_of([1.0, float("nan"), 3.0])
    assert SampledReverseKL(gamma=1.0).of_row(row).tolist() == [3.0, 3.0, 0.0]


def test_the_future_joins_the_token_s_own_or_stands_alone() -> None:
    """Token 1 of P and Q: log .6 / .3 = ln 2; the row adds 5."""
    chunk = replace(sampled(1)[0], row_value=torch.tensor([5.0], dtype=torch.float64))
    assert SampledReverseKL(gamma=1.0).advantage(chunk).item() == pytest.approx(log(2) + 5)
    assert SampledReverseKL(gamma=1.0, own=False).advantage(chunk).item() == pytest.approx(5)


def test_undiscounted_rows_have_the_gradient_of_the_whole_answer_s_reverse_kl() -> None:
    """Answers of two tokens over three ids, the second's distribution depending on the first: exact enumeration of the
    nine answers against the gradient of sum_y p(y) log p(y) / q(y). One token's horizon has another gradient."""
    generator = torch.Generator().manual_seed(0)
    start, after = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3)))
    teacher = [torch.log_softmax(torch.randn(*s, generator=generator, dtype=torch.float64), -1) for s in ((3,), (3, 3))]
    leaves = [start.requires_grad_(), after.requires_grad_()]

    def logp(a: int, b: int) -> Tensor:
        return torch.stack([torch.log_softmax(leaves[0], -1)[a], torch.log_softmax(leaves[1], -1)[a, b]])

    answers = [(a, b) for a in range(3) for b in range(3)]
    whole = sum(
        logp(a, b).sum().exp() * (logp(a, b) - torch.stack([teacher[0][a], teacher[1][a, b]])).sum() for a, b in answers
    )
    expected = torch.autograd.grad(whole, leaves)

    def mean_gradient(loss: SampledReverseKL) -> list[Tensor]:
        total = torch.zeros((), dtype=torch.float64)
        for a, b in answers:
            mine, theirs = logp(a, b), torch.stack([teacher[0][a], teacher[1][a, b]])
            fixed = mine.detach()
            chunk = TokenChunk(
                Distribution(torch.zeros(2, 3)), mine, torch.tensor([a, b]), fixed, torch.zeros(2),
                teacher_token_logp=theirs, row_value=loss.of_row(TokenRow(fixed, fixed, theirs, None, 0.0)),
            )  # fmt: skip
            total = total + fixed.sum().exp() * loss(chunk).sum()
        return torch.autograd.grad(total, leaves)

    for mine, theirs in zip(mean_gradient(SampledReverseKL(gamma=1.0)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.allclose(mean_gradient(SampledReverseKL())[0], expected[0], atol=1e-3)


@pytest.mark.parametrize(("settings", "says"), [({"gamma": 1.5}, "gamma=1.5"), ({"own": False}, "own=false")])
def test_a_future_that_cannot_be(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SampledReverseKL(**settings)
