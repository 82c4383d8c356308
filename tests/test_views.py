"""Divergences on supports, at temperatures, toward targets: values from the definition, gradients through a softmax.

p = (.5, .3, .15, .05), q = (.1, .6, .2, .1), teacher's top 2 = {1, 2}: P_S = .45, Q_S = .8.
tail: .3 ln .5 + .15 ln .75 + .55 ln(.55/.2) = .305284; renormalised: .017372; corrected: .098904; raw: -.251096.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd.losses import (
    GOLD,
    JSD,
    ULD,
    AnalyticLoss,
    AtTemperature,
    CrossEntropy,
    ForwardKL,
    GatedByEntropy,
    Geometric,
    OnTopK,
    ReverseKL,
    SampledKL,
    SampledReverseKL,
    StopClass,
    Toward,
    TruncatedReverseKL,
    Veto,
)
from opd.records import Distribution, TopK
from opd.schedules import Linear
from tests.chunks import chunk_of, logit_grad

P, Q = [0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.2, 0.1]
RAW = {"rest": "raw", "i_know_the_fixed_point_is_not_the_teacher": True}


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a.log() - b.log())).sum()


def tail(x: Tensor, members: list[int]) -> Tensor:
    rest = [i for i in range(len(x)) if i not in members]
    return torch.cat([x[members], x[rest].sum()[None]])


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (OnTopK(ReverseKL(), k=2), 0.305284),
        (OnTopK(ReverseKL(), k=2, rest="renormalised"), 0.017372),
        (TruncatedReverseKL(k=2), 0.098904),
        (TruncatedReverseKL(k=2, **RAW), -0.251096),
        (OnTopK(ReverseKL(), k=4), 0.518965),
        (OnTopK(ReverseKL(), k=99), 0.518965),
    ],
)
def test_known_values(loss: AnalyticLoss, value: float) -> None:
    assert loss(chunk_of(P, Q)).item() == pytest.approx(value, abs=1e-6)


def test_small_cases_with_one_token_of_support() -> None:
    """q = (.5, .3, .2), p = (.8, .15, .05): truncated forward .5 ln(.5/.8) = -.235; with tail .223; full .250.
    q = (.9, .06, .04), p = (.6, .3, .1): reverse truncated .6 ln(.6/.9) = -.243; full .331.
    """
    p, q = [0.8, 0.15, 0.05], [0.5, 0.3, 0.2]
    assert 0.5 * torch.tensor(0.5 / 0.8).log().item() == pytest.approx(-0.235, abs=1e-3)
    assert OnTopK(ForwardKL(), k=1)(chunk_of(p, q)).item() == pytest.approx(0.223, abs=1e-3)
    assert ForwardKL()(chunk_of(p, q)).item() == pytest.approx(0.250, abs=1e-3)
    p, q = [0.6, 0.3, 0.1], [0.9, 0.06, 0.04]
    assert TruncatedReverseKL(k=1, **RAW)(chunk_of(p, q)).item() == pytest.approx(-0.243, abs=1e-3)
    assert ReverseKL()(chunk_of(p, q)).item() == pytest.approx(0.331, abs=1e-3)


def test_known_gradients() -> None:
    """Corrected: p_v log(p_v/q_v) on S minus p times its sum, the same as the stop-gradient form."""
    corrected = TruncatedReverseKL(k=2).value_and_grad(chunk_of(P, Q))[1][0]
    assert corrected.tolist() == pytest.approx([0.125548, -0.132615, -0.005488, 0.012555], abs=1e-6)
    raw = TruncatedReverseKL(k=2, **RAW).value_and_grad(chunk_of(Q, Q))[1][0]
    assert raw.tolist() == pytest.approx([-0.08, 0.12, 0.04, -0.08], abs=1e-9)  # not zero


FIXED = [
    OnTopK(ReverseKL(), k=2),
    OnTopK(ForwardKL(), k=2, of="student"),
    OnTopK(JSD(0.5), k=2, of="union"),
    OnTopK(ReverseKL(), k=2, of="intersection"),
    OnTopK(ReverseKL(), k=2, rest="renormalised"),
    TruncatedReverseKL(k=2),
    AtTemperature(ReverseKL(), 2.0),
    StopClass(ReverseKL()),
]


@pytest.mark.parametrize("loss", FIXED, ids=str)
def test_teacher_equal_to_student_is_a_fixed_point(loss: AnalyticLoss) -> None:
    value, grad = loss.value_and_grad(replace(chunk_of(P, P), stop_ids=(1, 3)))
    assert value.abs().item() < 1e-9
    assert grad.abs().max().item() < 1e-9


def sets(p: Tensor, q: Tensor, k: int, of: str) -> list[int]:
    student, teacher = (set(x.topk(min(k, len(x))).indices.tolist()) for x in (p, q))
    either, both = student | teacher, student & teacher
    return sorted({"student": student, "teacher": teacher, "union": either, "intersection": both}[of])


@pytest.mark.parametrize("of", ["teacher", "student", "union", "intersection"])
@pytest.mark.parametrize("rest", ["tail", "renormalised"])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_supports_match_the_definition(of: str, rest: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(3, 10))
    logits = st.lists(st.floats(-4, 4), min_size=size, max_size=size, unique=True)
    p, q = (torch.softmax(torch.tensor(data.draw(logits), dtype=torch.float64), -1) for _ in range(2))
    k = data.draw(st.integers(1, size))
    members = sets(p, q, k, of)
    if not members and rest == "renormalised":
        return
    inner = data.draw(st.sampled_from([ReverseKL(), ForwardKL()]))

    def reference(student: Tensor) -> Tensor:
        if rest == "tail":
            a, b = tail(student, members), tail(q, members)
        else:
            a, b = student[members] / student[members].sum(), q[members] / q[members].sum()
        keep = b > 0
        return kl(a[keep], b[keep]) if isinstance(inner, ReverseKL) else kl(b[keep], a[keep])

    value, grad = OnTopK(inner, k, of, rest).value_and_grad(chunk_of(p.tolist(), q.tolist()))
    assert value.item() == pytest.approx(reference(p).item(), abs=1e-8)
    assert torch.allclose(grad[0], logit_grad(reference, p.tolist()), atol=1e-7)
    full = inner(chunk_of(p.tolist(), q.tolist())).item()
    assert rest == "renormalised" or value.item() <= full + 1e-9  # lumping never adds divergence


def test_renormalised_support_is_blind_outside() -> None:
    grad = OnTopK(ReverseKL(), k=2, rest="renormalised").value_and_grad(chunk_of(P, Q))[1][0]
    assert grad[0].item() == grad[3].item() == 0.0


def test_head_and_sampled_tail_are_unbiased() -> None:
    """Over all tokens the student may draw, value and gradient average to the full divergence's."""
    loss, full = TruncatedReverseKL(k=2, rest="sampled"), ReverseKL().value_and_grad(chunk_of(P, Q))
    scored = [torch.tensor([q], dtype=torch.float64).log() for q in Q]
    chunks = [replace(chunk_of(P, Q, token=token), teacher_token_logp=scored[token]) for token in range(4)]
    drawn = [loss.value_and_grad(chunk) for chunk in chunks]
    value = sum(p * value.item() for p, (value, _) in zip(P, drawn, strict=True))
    assert value == pytest.approx(full[0].item(), abs=1e-9)
    mean = sum(p * grad for p, (_, grad) in zip(P, drawn, strict=True))
    assert torch.allclose(mean, full[1], atol=1e-9)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize(
    "loss",
    [
        OnTopK(ReverseKL(), k=2), OnTopK(ForwardKL(), k=2), OnTopK(JSD(0.3), k=2, rest="renormalised"),
        TruncatedReverseKL(k=2), TruncatedReverseKL(k=2, rest="sampled"), TruncatedReverseKL(k=2, **RAW),
    ],
    ids=str,
)  # fmt: skip
def test_a_teacher_that_gives_its_likeliest_tokens_is_enough(loss: AnalyticLoss, order: list[int]) -> None:
    """Three of the four tokens in any order, k = 2: value and gradient as with the whole vocabulary."""
    assert "top_k" in loss.needs and "full_vocab" not in loss.needs
    q = torch.tensor([Q], dtype=torch.float64)
    best = q.topk(3)
    ids, logp = best.indices[:, order], best.values[:, order].log()
    whole = replace(chunk_of(P, Q, token=3), teacher_token_logp=q[:, 3].log())
    less = replace(whole, teacher=None, teacher_top=TopK(ids, logp))
    for mine, theirs in zip(loss.value_and_grad(less), loss.value_and_grad(whole), strict=True):
        torch.testing.assert_close(mine, theirs)
    empty = TopK(torch.cat([ids, ids[:, :1]], -1), torch.cat([logp, torch.full((1, 1), -torch.inf).double()], -1))
    less = replace(less, teacher_top=empty)
    for mine, theirs in zip(loss.value_and_grad(less), loss.value_and_grad(whole), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("of", ["student", "union", "intersection"])
def test_other_supports_need_the_whole_vocabulary(of: str) -> None:
    for loss in (OnTopK(ReverseKL(), of=of), TruncatedReverseKL(of=of)):
        assert "full_vocab" in loss.needs and "top_k" not in loss.needs


@pytest.mark.parametrize("view", [AtTemperature, StopClass, GatedByEntropy])
def test_a_view_outside_reads_the_whole_vocabulary(view: type[AnalyticLoss]) -> None:
    assert view(OnTopK(ReverseKL(), k=2)).needs == {"full_vocab"}


def test_raw_truncation_needs_an_explicit_word() -> None:
    with pytest.raises(ValueError, match="i_know_the_fixed_point_is_not_the_teacher"):
        TruncatedReverseKL(rest="raw")


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("loss", [ReverseKL(), ForwardKL(), JSD(0.3)])
def test_temperature_of_the_divergence(loss: AnalyticLoss, temperature: float) -> None:
    def at(x: Tensor) -> Tensor:
        return torch.softmax(x.log() / temperature, -1)

    def reference(student: Tensor) -> Tensor:
        a, b = at(student), at(torch.tensor(Q, dtype=torch.float64))
        if isinstance(loss, JSD):
            m = 0.3 * b + 0.7 * a
            return 0.3 * kl(b, m) + 0.7 * kl(a, m)
        return kl(a, b) if isinstance(loss, ReverseKL) else kl(b, a)

    value, grad = AtTemperature(loss, temperature).value_and_grad(chunk_of(P, Q))
    assert value.item() == pytest.approx(reference(torch.tensor(P, dtype=torch.float64)).item(), abs=1e-9)
    assert torch.allclose(grad[0], logit_grad(reference, P), atol=1e-9)


@pytest.mark.parametrize(
    ("lam", "target"),
    [
        (0.0, [0.2, 0.3, 0.5]),
        (0.5, [0.3391, 0.3217, 0.3391]),
        (1.0, [0.5, 0.3, 0.2]),
        (1.25, [0.578, 0.2758, 0.1462]),
        (2.0, [0.7669, 0.184, 0.0491]),
    ],
)
def test_geometric_target(lam: float, target: list[float]) -> None:
    """q^lam r^(1 - lam) of q = (.5, .3, .2), r = (.2, .3, .5)."""
    reference = Distribution(torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64).log())
    chunk = replace(chunk_of(P[:3], [0.5, 0.3, 0.2]), reference=reference)
    assert Geometric(lam).logp(chunk).exp()[0].tolist() == pytest.approx(target, abs=1e-4)
    loss = Toward(ReverseKL(), Geometric(lam))
    assert "reference" in loss.needs
    assert loss(chunk).item() == pytest.approx(ReverseKL()(
        replace(chunk, teacher=Distribution(torch.tensor([target], dtype=torch.float64).log()))
    ).item(), abs=1e-3)  # fmt: skip


@pytest.mark.parametrize(
    ("beta", "fixed"),
    [(0.3, [0.5707, 0.2751, 0.1542]), (0.5, [0.6579, 0.2368, 0.1053]), (0.8, [0.9191, 0.0715, 0.0094])],
)
def test_veto_fixed_point(beta: float, fixed: list[float]) -> None:
    """Where p = q^(1 / (1 - beta)) the target q p^beta is p itself: no gradient. The table has four digits."""
    exact = torch.softmax(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log() / (1 - beta), -1)
    assert exact.tolist() == pytest.approx(fixed, abs=1e-4)
    chunk = chunk_of(exact.tolist(), [0.5, 0.3, 0.2])
    assert Toward(ReverseKL(), Veto(beta)).value_and_grad(chunk)[1].abs().max().item() < 1e-9


def test_a_scheduled_parameter_follows_progress() -> None:
    loss = Toward(ReverseKL(), Veto(Linear(0.8, 0.0)))
    at_end = replace(chunk_of(P, Q), progress=1.0)
    assert loss(at_end).item() == pytest.approx(0.518965, abs=1e-6)
    assert loss(replace(at_end, progress=0.0)).item() != pytest.approx(0.518965, abs=1e-3)


def test_stop_ids_of_both_models_are_one_token() -> None:
    """Student stops with id 2, teacher with 3: apart the divergence is large, as one class (.5, .3, .2) it is zero."""
    p, q = [0.5, 0.3, 0.199, 0.001], [0.5, 0.3, 0.001, 0.199]
    chunk = replace(chunk_of(p, q), stop_ids=(2, 3))
    assert ReverseKL()(chunk).item() > 1.0
    assert StopClass(ReverseKL())(chunk).item() == pytest.approx(0.0, abs=1e-9)

    def reference(student: Tensor) -> Tensor:
        a, b = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.cat([student[:2], student[2:].sum()[None]])
        return kl(b, a)

    value, grad = StopClass(ReverseKL()).value_and_grad(replace(chunk_of(P, [0.2, 0.5, 0.1, 0.2]), stop_ids=(2, 3)))
    assert value.item() == pytest.approx(reference(torch.tensor(P, dtype=torch.float64)).item(), abs=1e-9)
    assert torch.allclose(grad[0], logit_grad(reference, P), atol=1e-9)


def test_gate_by_teacher_entropy() -> None:
    """H(q) = 1.0889 nats: inside a threshold of .8, outside one of 1.2."""
    assert GatedByEntropy(ForwardKL(), 0.8)(chunk_of(P, Q)).item() == pytest.approx(0.381796, abs=1e-6)
    value, grad = GatedByEntropy(ForwardKL(), 1.2).value_and_grad(chunk_of(P, Q))
    assert value.item() == 0.0
    assert not grad.any()


def test_views_nest() -> None:
    """Temperature inside a support of everything equals temperature alone."""
    nested = OnTopK(AtTemperature(ReverseKL(), 1.0), k=4)
    assert nested(chunk_of(P, Q)).item() == pytest.approx(0.518965, abs=1e-6)


def test_topk_and_tail_approach_the_full_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(50, generator=generator).double(), -1).tolist() for _ in range(2))
    values = [OnTopK(ReverseKL(), k)(chunk_of(p, q)).item() for k in (1, 5, 20, 40, 50)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(ReverseKL()(chunk_of(p, q)).item(), abs=1e-9)


def _finite(loss: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    student = torch.log_softmax(torch.tensor([[1e4, 0.0, -1e4, 3.0]]), -1)
    teacher = torch.log_softmax(torch.tensor([[-1e4, 1e4, 0.0, 3.0]]), -1).clamp(min=-1e4)
    chunk = replace(chunk_of(P, Q), student=Distribution(student), teacher=Distribution(teacher))
    return all(bool(torch.isfinite(t).all()) for t in loss(replace(chunk, stop_ids=(1, 2))))


@pytest.mark.parametrize("loss", FIXED, ids=str)
def test_extreme_logits_stay_finite(loss: AnalyticLoss) -> None:
    assert _finite(loss.value_and_grad)


def test_views_that_read_the_whole_vocabulary_stand_outside() -> None:
    for build in (
        lambda: OnTopK(StopClass(ReverseKL())),
        lambda: OnTopK(Toward(ReverseKL(), Veto())),
        lambda: StopClass(Toward(ReverseKL(), Geometric())),
        lambda: OnTopK(GatedByEntropy(StopClass(ReverseKL()))),
        lambda: AtTemperature(Toward(ReverseKL(), Geometric())),
        lambda: AtTemperature(StopClass(ReverseKL())),
        lambda: OnTopK(AtTemperature(StopClass(ReverseKL()))),
        lambda: AtTemperature(GatedByEntropy(ReverseKL())),
        lambda: OnTopK(GatedByEntropy(ReverseKL())),
        lambda: StopClass(GatedByEntropy(ReverseKL())),
        lambda: Toward(GatedByEntropy(ReverseKL()), Veto()),
    ):
        with pytest.raises(ValueError, match="the other way round"):
            build()
    assert GatedByEntropy(Toward(StopClass(AtTemperature(OnTopK(ReverseKL()))), Veto()))


CHANGING = {
    "temperature": AtTemperature,
    "stop": StopClass,
    "support": OnTopK,
    "target": lambda inner: Toward(inner, Veto()),
}


@pytest.mark.parametrize("view", CHANGING)
@pytest.mark.parametrize(
    ("inner", "asks"),
    [
        (CrossEntropy(), "a text"), (TruncatedReverseKL(k=2, of="student", rest="sampled"), "sampled"),
        (SampledKL(), "sampled"), (SampledReverseKL(), "sampled and sampler_logp"), (ULD(), "ranked"),
        (GOLD(), "ranked"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_divergence_of_two_distributions_has_no_views(view: str, inner: Any, asks: str) -> None:
    with pytest.raises(ValueError, match=rf"divergence: {type(inner).__name__} \(of {asks}\) is no divergence of two"):
        CHANGING[view](inner)


def test_a_gate_changes_nothing_that_a_loss_reads() -> None:
    """The teacher's entropy is 1.09 nats: above .8 the loss is the one inside, above 2 it is nothing."""
    chunk = chunk_of(P, Q, token=2)
    assert GatedByEntropy(CrossEntropy())(chunk).item() == CrossEntropy()(chunk).item() == pytest.approx(-log(0.15))
    assert GatedByEntropy(CrossEntropy(), threshold=2.0)(chunk).item() == 0.0


@pytest.mark.parametrize("inner", [OnTopK(ReverseKL()), AtTemperature(OnTopK(ReverseKL())), TruncatedReverseKL()])
def test_a_support_of_a_support_is_refused(inner: AnalyticLoss) -> None:
    with pytest.raises(ValueError, match=r"the likeliest of the likeliest tokens.*keep one of the two"):
        OnTopK(inner)


def test_stop_class_outside_a_support_of_everything_is_the_stop_class_alone() -> None:
    chunk = replace(chunk_of(P, Q), stop_ids=(1, 3))
    nested = StopClass(OnTopK(ReverseKL(), k=4)).value_and_grad(chunk)
    alone = StopClass(ReverseKL()).value_and_grad(chunk)
    assert nested[0].item() == pytest.approx(alone[0].item(), abs=1e-9)
    assert torch.allclose(nested[1], alone[1], atol=1e-9)
