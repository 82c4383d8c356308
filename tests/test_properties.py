"""What must hold of every divergence, view and estimator of the catalogue, whatever the distributions.

Losses come from conf/loss with all their choices, and every view around every divergence: what is added there is
checked here, and what does not claim a property is named with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import log

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd.heads import Head
from opd.losses import (
    JSD,
    AdaptiveKL,
    AnalyticLoss,
    ForwardKL,
    Loss,
    OnTopK,
    ReverseKL,
    SampledKL,
    SampledReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    TotalVariation,
    Toward,
    TruncatedReverseKL,
)
from opd.losses.views import View
from opd.objective import LOGP_MIN, Objective, streamed_loss
from opd.records import Distribution, TokenChunk, TopK
from opd.terms import Term
from tests.catalogue import NAME, catalogue, choices, options
from tests.chunks import logit_grad, micro_batch
from tests.definitions import PROGRESS, Given, definition

V = 7
STOP_IDS = (1, 4)
INNER = [ReverseKL(), ForwardKL(), JSD(0.3), SkewForwardKL(0.1), SkewReverseKL(0.1), TotalVariation(), AdaptiveKL(0.5)]
F_DIVERGENCES = [loss for loss in INNER if not isinstance(loss, AdaptiveKL)]  # its weights change with the buckets
SUPPORTS = ["teacher", "student", "union", "intersection"]


def with_small_k(loss: Loss, k: int = 3) -> Loss:
    """The same loss with supports that leave something of V tokens out."""
    changes = {name: with_small_k(part, k) for name, part in vars(loss).items() if isinstance(part, AnalyticLoss)}
    return replace(loss, **changes, **({"k": k} if "k" in vars(loss) else {}))


def analytic() -> dict[str, AnalyticLoss]:
    """Options of conf/loss that know their gradient, with their choices, and every view around every divergence."""
    of_conf = [loss for term in options().values() for loss in (term.loss, *choices(term.loss))]
    views = [
        view for loss in of_conf if isinstance(loss, View) for view in (replace(loss, divergence=d) for d in INNER)
    ]
    losses = [
        with_small_k(loss) for loss in [*INNER, JSD(0.0), JSD(1.0), *of_conf, *views] if isinstance(loss, AnalyticLoss)
    ]
    return {str(loss): loss for loss in losses}


ANALYTIC = analytic()


@dataclass(frozen=True)
class Fixed:
    """A target that does not move with the student, as the objective holds it."""

    fixed: Tensor

    def logp(self, chunk: TokenChunk) -> Tensor:
        """What it was."""
        return self.fixed


def without(*words: str) -> list[str]:
    """Names of the losses in which none of the words is found."""
    return [name for name in ANALYTIC if not any(word in name for word in words)]


def row(*logits: float) -> Tensor:
    return torch.tensor([logits], dtype=torch.float64)


def chunk_of(z: Tensor, teacher: Tensor, reference: Tensor | None = None, token: int = 0, **more: Tensor) -> TokenChunk:
    """One token as the objective shows it, of logits [1, V] of student, teacher and reference; sampled on-policy."""
    student = Distribution(torch.log_softmax(z, -1)) if z.requires_grad else Distribution.of_logits(z)
    q = Distribution.of_logits(teacher, floor=LOGP_MIN)
    r = q if reference is None else Distribution.of_logits(reference, floor=LOGP_MIN)
    best = student.logp.detach().topk(3)
    return TokenChunk(
        student=student,
        token_logp=student.logp[:, token],
        token_ids=torch.tensor([token]),
        sampler_logp=more.get("sampler_logp", student.logp[:, token].detach()),
        advantages=more.get("advantages", z.new_ones(1)),
        teacher=q,
        teacher_token_logp=q.logp[:, token],
        reference=r,
        reference_token_logp=r.logp[:, token],
        row_log_ratio=z.new_zeros(1),
        row_value=z.new_zeros(1),
        sampler_top=TopK(best.indices, best.values),
        stop_ids=STOP_IDS,
        progress=PROGRESS,
    )


def logits(low: float = -5.0, high: float = 5.0) -> st.SearchStrategy[Tensor]:
    """Distinct ones, so that every top-k is one set."""
    numbers = st.floats(low, high).map(lambda x: round(x, 3))
    return st.lists(numbers, min_size=V, max_size=V, unique=True).map(lambda values: row(*values))


def grad_of(loss: object, chunk: TokenChunk, z: Tensor) -> Tensor:
    """Logit gradient [V] of a loss, analytic or a formula of the chunk made from z."""
    if isinstance(loss, AnalyticLoss):
        return loss.value_and_grad(chunk)[1][0]
    value = loss(chunk)
    return torch.autograd.grad(value.sum(), z)[0][0] if value.requires_grad else torch.zeros(V)


# -------------------------------------------------------------------------------------------- value and gradient


@pytest.mark.parametrize("name", ANALYTIC)
@given(z=logits(), teacher=logits(), reference=logits(), token=st.integers(0, V - 1))
@settings(max_examples=10, deadline=None)
def test_value_and_gradient_are_those_of_the_definition(
    name: str, z: Tensor, teacher: Tensor, reference: Tensor, token: int
) -> None:
    """The gradient against autograd through a softmax, of the formula in probability space."""
    loss = ANALYTIC[name]
    p, q, r = (torch.softmax(x[0], -1) for x in (z, teacher, reference))
    seen = Given(r, token, STOP_IDS)
    slope = lambda at: logit_grad(lambda student: definition(loss, student, q, seen), at.tolist())  # noqa: E731
    nudge = 1e-6 * torch.linspace(-1, 1, V).cos()
    assume(torch.allclose(slope(p * (1 + nudge)), slope(p * (1 - nudge)), atol=1e-3))  # no corner there, as |p - q| has
    value, grad = loss.value_and_grad(chunk_of(z, teacher, reference, token))
    assert value.item() == pytest.approx(definition(loss, p, q, seen).item(), rel=1e-8, abs=1e-8)
    assert torch.allclose(grad[0], slope(p), rtol=1e-6, atol=1e-7)
    assert abs(grad.sum().item()) < 1e-8  # logits have a free constant


@pytest.mark.parametrize("name", without("AdaptiveKL", "rest='sampled'"))
def test_gradient_is_the_slope_of_the_value(name: str) -> None:
    """Central differences of the loss's own values: (D(z + h) - D(z - h)) / 2h, to h^2 times a third derivative.

    Not of adaptive KL, which holds its weights constant, nor of a sampled rest, whose gradient is a score function's.
    """
    loss = ANALYTIC[name]
    z, teacher = row(1.2, -0.7, 0.3, 2.1, -1.9, 0.0, 0.8), row(0.1, 1.7, -1.1, 0.9, 0.4, -2.3, 1.3)
    reference = row(*range(V))
    frozen = loss
    if isinstance(loss, Toward):
        frozen = replace(loss, target=Fixed(loss.target.logp(chunk_of(z, teacher, reference))))
    grad = loss.value_and_grad(chunk_of(z, teacher, reference))[1][0]
    for place in range(V):
        step = torch.zeros(1, V, dtype=torch.float64)
        step[0, place] = 1e-5
        up, down = (frozen(chunk_of(z + h, teacher, reference)).item() for h in (step, -step))
        assert grad[place].item() == pytest.approx((up - down) / 2e-5, abs=1e-7)


# ------------------------------------------------------------------------------------- signs, bounds, fixed points

# What is no divergence from the teacher, and why. A loss that is not listed claims to be one.
SIGNED = {
    "floor=-": "the floored teacher is no distribution any more",
    "rest='sampled'": "only its mean is a divergence",
    "rest='raw'": "a part of a sum",
}
MOVED = {  # p = q is not where they rest
    "CrossEntropy": "it follows a text",
    "Veto": "its fixed point is a power of the teacher",
    "rest='sampled'": "only its mean has one",
    "rest='raw'": "it never has",
}
BLIND = ("renormalised", "Gated", "StopClass", "OnTopK", "Truncated")  # zero also where parts of p and q agree


@pytest.mark.parametrize("name", without(*SIGNED))
@given(z=logits(-9, 9), teacher=logits(-9, 9), reference=logits())
@settings(max_examples=10, deadline=None)
def test_never_negative(name: str, z: Tensor, teacher: Tensor, reference: Tensor) -> None:
    assert ANALYTIC[name](chunk_of(z, teacher, reference)).item() >= -1e-12


@pytest.mark.parametrize("name", without(*MOVED))
@given(z=logits(-9, 9), shift=st.floats(-50, 50))
@settings(max_examples=10, deadline=None)
def test_teacher_equal_to_student_is_a_fixed_point(name: str, z: Tensor, shift: float) -> None:
    """Value and gradient are zero, also where the logits differ by a constant; above the floor of -6, if there is one:
    logits within 1.5 have no log-probability below -3 - ln 7.
    """
    z = z / 6 if "floor=-" in name else z
    value, grad = ANALYTIC[name].value_and_grad(chunk_of(z, z + shift))
    assert abs(value.item()) < 1e-9
    assert grad.abs().max().item() < 1e-9


@pytest.mark.parametrize("name", without(*SIGNED, *MOVED, *BLIND, "Toward", "ULD"))
@given(z=logits(), teacher=logits())
@settings(max_examples=10, deadline=None)
def test_zero_only_where_they_are_equal(name: str, z: Tensor, teacher: Tensor) -> None:
    """By Pinsker no smaller than the square of the distance, up to the weight 0.05 of the flattest mixture here. Not
    ULD, which looks at ranks alone: a permuted teacher is its student's equal.
    """
    distance = (torch.softmax(z, -1) - torch.softmax(teacher, -1)).abs().sum().item() / 2
    assume(distance > 1e-3)
    assert ANALYTIC[name](chunk_of(z, teacher)).item() > 0.05 * distance**2


@given(z=logits(-40, 40), teacher=logits(-40, 40), weight=st.floats(0.02, 0.98))
@example(z=row(40, 0, 0, 0, 0, 0, 0), teacher=row(0, 40, 0, 0, 0, 0, 0), weight=0.5)
@settings(max_examples=100, deadline=None)
def test_bounds(z: Tensor, teacher: Tensor, weight: float) -> None:
    """JSD(b) <= H(b), ln 2 at b = 1/2; skew divergences <= -ln alpha; total variation <= 1."""
    chunk = chunk_of(z, teacher)
    entropy = -weight * log(weight) - (1 - weight) * log(1 - weight)
    assert JSD(weight)(chunk).item() <= entropy + 1e-12
    assert JSD(0.5)(chunk).item() <= log(2) + 1e-12
    assert SkewForwardKL(weight)(chunk).item() <= -log(weight) + 1e-12
    assert SkewReverseKL(weight)(chunk).item() <= -log(weight) + 1e-12
    assert TotalVariation()(chunk).item() <= 1 + 1e-12


@given(z=logits(), teacher=logits())
@settings(max_examples=50, deadline=None)
def test_the_ends_of_jsd_and_its_slopes_there(z: Tensor, teacher: Tensor) -> None:
    """JSD(b) / b -> forward and JSD(1 - b) / b -> reverse KL; the error is b times at most the other second moment."""
    chunk, small = chunk_of(z, teacher), 1e-7
    forward, reverse = ForwardKL()(chunk).item(), ReverseKL()(chunk).item()
    assert JSD(0.0)(chunk).item() == forward
    assert JSD(1.0)(chunk).item() == reverse
    assert JSD(small)(chunk).item() / small == pytest.approx(forward, abs=0.05)
    assert JSD(1 - small)(chunk).item() / small == pytest.approx(reverse, abs=0.05)


# ------------------------------------------------------------------------------------------------------ invariances


@pytest.mark.parametrize("name", ANALYTIC)
@given(z=logits(), teacher=logits(), shifts=st.tuples(st.floats(-300, 300), st.floats(-300, 300)), data=st.data())
@settings(max_examples=10, deadline=None)
def test_shifted_logits_and_renamed_tokens_change_nothing(
    name: str, z: Tensor, teacher: Tensor, shifts: tuple[float, float], data: st.DataObject
) -> None:
    """The gradient is permuted with the tokens."""
    loss, reference = ANALYTIC[name], z.flip(-1) / 2
    order = data.draw(st.permutations(range(V)))
    value, grad = loss.value_and_grad(chunk_of(z, teacher, reference, token=order[0]))
    renamed = chunk_of((z + shifts[0])[:, order], (teacher + shifts[1])[:, order], reference[:, order], token=0)
    ids = tuple(order.index(stop) for stop in STOP_IDS)
    value_too, grad_too = loss.value_and_grad(replace(renamed, stop_ids=ids))
    assert value_too.item() == pytest.approx(value.item(), rel=1e-9, abs=1e-9)
    assert torch.allclose(grad_too, grad[:, order], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("of", SUPPORTS)
@pytest.mark.parametrize("loss", F_DIVERGENCES, ids=str)
@given(z=logits(), teacher=logits())
@settings(max_examples=10, deadline=None)
def test_a_support_with_a_tail_grows_to_the_full_divergence(
    loss: AnalyticLoss, of: str, z: Tensor, teacher: Tensor
) -> None:
    """Splitting a bucket never takes divergence away; with all tokens kept it is the full one, gradient too."""
    chunk = chunk_of(z, teacher)
    parts = [OnTopK(loss, k, of).value_and_grad(chunk) for k in range(1, V + 1)]
    values, (full, grad) = [value.item() for value, _ in parts], loss.value_and_grad(chunk)
    assert all(b >= a - 1e-12 for a, b in pairwise(values))
    assert values[-1] == pytest.approx(full.item(), abs=1e-12)
    assert torch.allclose(parts[-1][1], grad, atol=1e-12)


# ---------------------------------------------------------------------------------------------- sampled estimators


def mean_over_tokens(loss: object, z: Tensor, teacher: Tensor, mu: Tensor | None = None) -> tuple[float, Tensor]:
    """Exact mean of value and logit gradient over tokens drawn from mu [V], the student itself by default."""
    chances = torch.softmax(z, -1)[0].detach() if mu is None else mu
    value, grad = 0.0, torch.zeros(V, dtype=torch.float64)
    for token, chance in enumerate(chances):
        leaf = z.clone().requires_grad_()
        drawn = chunk_of(leaf, teacher, token=token, sampler_logp=chances[token].log()[None])
        if isinstance(loss, AnalyticLoss):
            drawn = chunk_of(z, teacher, token=token)
        value += chance.item() * loss(drawn).sum().item()
        grad += chance * grad_of(loss, drawn, leaf)
    return value, grad


UNBIASED = [
    SampledKL("k2"), SampledKL("rho_k3"), SampledKL("k3_plus"), SampledReverseKL(), SampledReverseKL(ratio=False),
    SampledReverseKL(baseline="negative_kl"),
]  # fmt: skip


@pytest.mark.parametrize("loss", UNBIASED, ids=str)
@given(z=logits(-4, 4), teacher=logits(-4, 4))
@settings(max_examples=10, deadline=None)
def test_the_mean_gradient_is_that_of_the_reverse_kl(loss: object, z: Tensor, teacher: Tensor) -> None:
    """And the mean value its value, for those that claim it."""
    value, grad = ReverseKL().value_and_grad(chunk_of(z, teacher))
    mean, mean_grad = mean_over_tokens(loss, z, teacher)
    assert torch.allclose(mean_grad, grad[0], atol=1e-8)
    if loss in (SampledKL("rho_k3"), SampledKL("k3_plus"), SampledReverseKL()):
        assert mean == pytest.approx(value.item(), abs=1e-8)


@pytest.mark.parametrize("loss", [SampledKL("rho_k3"), SampledReverseKL()], ids=str)
@given(z=logits(-4, 4), teacher=logits(-4, 4), other=logits(-3, 3))
@settings(max_examples=10, deadline=None)
def test_samples_of_another_policy_are_corrected(loss: object, z: Tensor, teacher: Tensor, other: Tensor) -> None:
    mean = mean_over_tokens(loss, z, teacher, torch.softmax(other[0], -1))
    assert torch.allclose(mean[1], ReverseKL().value_and_grad(chunk_of(z, teacher))[1][0], atol=1e-8)


@pytest.mark.parametrize("of", SUPPORTS)
@given(z=logits(-4, 4), teacher=logits(-4, 4), k=st.integers(1, V))
@settings(max_examples=10, deadline=None)
def test_a_sampled_rest_completes_the_reverse_kl(of: str, z: Tensor, teacher: Tensor, k: int) -> None:
    value, grad = ReverseKL().value_and_grad(chunk_of(z, teacher))
    mean, mean_grad = mean_over_tokens(TruncatedReverseKL(k, of, "sampled"), z, teacher)
    assert mean == pytest.approx(value.item(), abs=1e-9)
    assert torch.allclose(mean_grad, grad[0], atol=1e-9)


POLICY = {name: term for name, term in options().items() if term.needs_advantage and term.teacher is None}


@pytest.mark.parametrize("name", POLICY)
@given(z=logits(-4, 4), rewards=logits(-3, 3))
@settings(max_examples=10, deadline=None)
def test_on_policy_every_surrogate_climbs_the_expected_advantage(name: str, z: Tensor, rewards: Tensor) -> None:
    """At rho = 1 the mean gradient is that of -sum_y p(y) A(y), whatever the clip, cap, gate or centre."""
    p = torch.softmax(z, -1)[0]
    grad = torch.zeros(V, dtype=torch.float64)
    for token, chance in enumerate(p):
        leaf = z.clone().requires_grad_()
        grad += chance * grad_of(POLICY[name].loss, chunk_of(leaf, z, token=token, advantages=rewards[:, token]), leaf)
    assert torch.allclose(grad, logit_grad(lambda student: -(student * rewards[0]).sum(), p.tolist()), atol=1e-8)


# --------------------------------------------------------------------------------------------------- extreme values

HUGE = torch.tensor([
    [1e4, -1e4, -1e4, -1e4, -1e4, -1e4, -1e4], [-1e4, 1e4, 0.0, 3.0, -1e4, 0.0, 1.0], [0.0] * V,
    [1e4, 1e4, -1e4, 0.0, 2.0, -3.0, 1e4], [1.2, -0.7, 0.3, 2.1, -1.9, 0.0, 0.8],
    [60.0, 0.0, -60.0, 0.0, 5.0, 0.0, 0.0],
])  # fmt: skip
EYE = Head(torch.eye(V))
BANNED = Head(torch.eye(V), torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0, -torch.inf, 0.0]))  # a teacher's


def streamed(term: Term, student: Tensor, teacher: Tensor, head: Head, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values [N] and gradient [N, V] in the logits by the trainer's pass, fp32, sampled by nearly the student."""
    term = replace(term, loss=with_small_k(term.loss), weigh={})
    own = torch.log_softmax(student, -1)
    advantages = torch.where(torch.arange(len(token_ids)) % 2 == 0, 1.0, -2.0)
    batch = micro_batch(
        token_ids, {NAME: torch.ones(len(token_ids))}, dict.fromkeys(term.teachers, teacher),
        sampler_logp=own.gather(-1, token_ids[:, None])[:, 0].clamp(min=-50.0), advantages=advantages,
    )  # fmt: skip
    best = own.topk(3)
    row_values = {NAME: torch.zeros(len(token_ids))}
    tokens = replace(batch.tokens, sampler_top=TopK(best.indices, best.values), row_values=row_values)
    goal = Objective([term], {NAME: 1.0}, V, progress=PROGRESS, stop_ids=STOP_IDS)
    hidden = student.clone().requires_grad_()
    heads = dict.fromkeys(term.teachers, head)
    loss, outcome = streamed_loss(hidden, EYE, replace(batch, tokens=tokens), heads, goal)
    loss.backward()
    return outcome.values[NAME], hidden.grad


def test_extreme_logits_and_banned_tokens_stay_finite() -> None:
    """Every term, every pair of logits up to 1e4, one-hot ones among them; the teacher bans tokens 2 and 5."""
    pairs = torch.cartesian_prod(torch.arange(len(HUGE)), torch.arange(len(HUGE)), torch.tensor([0, 2, 5]))
    for label, term in catalogue().items():
        value, grad = streamed(term, HUGE[pairs[:, 0]], HUGE[pairs[:, 1]], BANNED, pairs[:, 2])
        assert torch.isfinite(value).all(), label
        assert torch.isfinite(grad).all(), label


def test_teachers_equal_to_the_student_move_no_term() -> None:
    """Every term that compares the student with a teacher, sampled estimators per token; extreme logits too.

    A loss of the list of those that rest elsewhere is left out, and a policy gradient, which follows its advantage.
    """
    pairs = torch.cartesian_prod(torch.arange(len(HUGE)), torch.arange(V))
    pairs = pairs[torch.log_softmax(HUGE, -1)[pairs[:, 0], pairs[:, 1]] >= LOGP_MIN]  # the teacher's floor
    resting = {
        label: term
        for label, term in catalogue().items()
        if term.teacher and not term.needs_advantage and not any(word in str(term.loss) for word in (*MOVED, "floor=-"))
    }
    assert len(resting) > 40
    for label, term in resting.items():
        value, grad = streamed(term, HUGE[pairs[:, 0]], HUGE[pairs[:, 0]], EYE, pairs[:, 1])
        assert value.abs().max() < 1e-6, label
        assert grad.abs().max() < 1e-6, label


def test_log_probabilities_of_large_logits_are_exact() -> None:
    """Logits (1e4, 1e4, 0), where neighbours in fp32 lie 1e-3 apart: -ln 2 = -.6931472, and -1e4 for the third."""
    logp = Distribution.of_logits(torch.tensor([[1e4, 1e4, 0.0]])).logp[0]
    assert logp.tolist() == pytest.approx([-log(2), -log(2), -1e4 - log(2)], rel=1e-7)
