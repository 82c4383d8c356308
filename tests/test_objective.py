"""The streamed pass against a plain full-logit computation in fp64, and what must not change it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opd import objective as module
from opd.heads import Head
from opd.losses import JSD, TIS, CrossEntropy, Formula, ForwardKL, OnTopK, PPOClip, ReverseKL, SampledReverseKL
from opd.objective import Objective, streamed_loss
from opd.records import Distribution, MicroBatch, TeacherPayload, TokenChunk, TopK
from opd.terms import Term
from tests.chunks import micro_batch

N, V, H, TH = 23, 37, 8, 12


def plain_reverse_kl(chunk: TokenChunk) -> Tensor:
    """As a user would write it: differentiated by autograd on the block."""
    return (chunk.student_p * (chunk.student_logp - chunk.teacher_logp)).sum(-1)


def mixed(chunk: TokenChunk) -> Tensor:
    """Uses the whole distribution and the sampled token at once."""
    return chunk.token_logp * chunk.advantages + 0.5 * chunk.student_logp.square().mean(-1)


class Problem:
    """Random hidden states and heads; term weights as batching would make them, some zero."""

    def __init__(self, seed: int = 0, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(N, H, generator=g)
        self.weight = torch.randn(V, H, generator=g)
        self.bias = torch.randn(V, generator=g) if bias else None
        self.scale, self.softcap = scale, softcap
        self.teacher = Head(torch.randn(V + 3, TH, generator=g), vocab_size=V)
        ids = torch.randint(0, V, (N,), generator=g)
        kl, pg = torch.rand(N, generator=g) / N, torch.rand(N, generator=g) / N
        kl[3], pg[5] = 0.0, 0.0
        self.batch = micro_batch(
            ids, {"kl": kl, "pg": pg}, {"main": torch.randn(N, TH, generator=g)},
            sampler_logp=-3 * torch.rand(N, generator=g) - 2, advantages=torch.randn(N, generator=g),
        )  # fmt: skip

    def terms(self, loss: object, other: object | None = None) -> list[Term]:
        return [Term("kl", loss, teacher="main"), Term("pg", other or PPOClip())]

    def run(self, terms: list[Term], *, batch: MicroBatch | None = None, chunk: int = 7, temperature: float = 1.0):
        leaves = [t.clone().requires_grad_() for t in (self.hidden, self.weight)]
        bias = None if self.bias is None else self.bias.clone().requires_grad_()
        head = Head(leaves[1], bias, V, self.scale, self.softcap)
        goal = Objective(terms, {"kl": 0.7, "pg": 1.3}, V, temperature, chunk)
        loss, outcome = streamed_loss(leaves[0], head, batch or self.batch, {"main": self.teacher}, goal)
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in (*leaves, *([] if bias is None else [bias]))], outcome

    def plain(self, terms: list[Term], temperature: float = 1.0):
        """Loss and gradients by `plain_loss`."""
        leaves = [t.double().requires_grad_() for t in (self.hidden, self.weight)]
        bias = None if self.bias is None else self.bias.double().requires_grad_()
        total = self.plain_loss(terms, temperature, *leaves, bias)
        total.backward()
        return total.detach(), [leaf.grad for leaf in (*leaves, *([] if bias is None else [bias]))]

    def plain_loss(self, terms: list[Term], temperature: float, hidden: Tensor, weight: Tensor, bias: Tensor | None):
        """All logits at once, fp64, for autograd."""
        z = torch.nn.functional.linear(hidden, weight, bias) * self.scale
        z = z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)
        fields = self.batch.tokens
        q = torch.log_softmax((self.batch.teachers["main"].hidden @ self.teacher.weight[:V].T).double(), -1)
        logp = torch.log_softmax(z, -1)
        token_logp = torch.log_softmax(z / temperature, -1).gather(-1, fields.token_ids[:, None])[:, 0]
        chunk = TokenChunk(
            Distribution(logp), token_logp, fields.token_ids, fields.sampler_logp.double(), fields.advantages.double(),
            Distribution(q),
        )  # fmt: skip
        formulas = {
            ReverseKL: plain_reverse_kl,
            ForwardKL: lambda c: (c.teacher_logp.exp() * (c.teacher_logp - c.student_logp)).sum(-1),
            JSD: lambda c: jsd(c, 0.3),
            PPOClip: PPOClip(),
            Formula: None,
        }
        total = torch.zeros((), dtype=torch.float64)
        for term, weight in zip(terms, (0.7, 1.3), strict=True):
            value = (formulas[type(term.loss)] or term.loss)(chunk)
            total = total + weight * (self.batch.term_weights[term.name].double() * value).sum()
        return total


def jsd(chunk: TokenChunk, beta: float) -> Tensor:
    p, q = chunk.student_logp.exp(), chunk.teacher_logp.exp()
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)


HEADS = [{}, {"bias": True}, {"scale": 0.25}, {"softcap": 2.0}, {"bias": True, "scale": 0.5, "softcap": 3.0}]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize(
    "loss", [ReverseKL(), ForwardKL(), JSD(0.3), Formula(plain_reverse_kl)], ids=["reverse", "forward", "jsd", "user"]
)
def test_loss_and_gradients_equal_plain_code(loss: object, head: dict[str, object]) -> None:
    problem = Problem(**head)
    terms = problem.terms(loss)
    got, grads, _ = problem.run(terms)
    expected, expected_grads = problem.plain(terms)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert torch.allclose(mine.double(), theirs, atol=2e-6)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen base", "trained base"])
@pytest.mark.parametrize("head", [{}, {"bias": True, "scale": 0.5, "softcap": 3.0}], ids=str)
def test_an_adapted_head_equals_the_merged_one(head: dict[str, object], frozen: bool) -> None:
    """W + gain * B A in plain code; here the product is never made, and all five gradients follow."""
    problem, rank, gain = Problem(**head), 3, 1.5
    g = torch.Generator().manual_seed(9)
    down, up = torch.randn(rank, H, generator=g), torch.randn(V + 2, rank, generator=g)
    bias = None if problem.bias is None else torch.cat([problem.bias, torch.zeros(2)])
    padded = torch.cat([problem.weight, torch.randn(2, H, generator=g)])
    leaves = [t.clone().requires_grad_() for t in (problem.hidden, down, up)]
    weight = padded.clone().requires_grad_(not frozen)
    adapted = Head(weight, bias, V, problem.scale, problem.softcap, leaves[1], leaves[2], gain)
    terms = problem.terms(JSD(0.3))
    goal = Objective(terms, {"kl": 0.7, "pg": 1.3}, V, 1.0, 7)
    loss, _ = streamed_loss(leaves[0], adapted, problem.batch, {"main": problem.teacher}, goal)
    loss.backward()

    doubles = [t.double().requires_grad_() for t in (problem.hidden, down, up)]
    merged = padded.double() + gain * doubles[2] @ doubles[1]
    merged.retain_grad()
    plain_bias = None if problem.bias is None else problem.bias.double()
    expected = problem.plain_loss(terms, 1.0, doubles[0], merged[:V], plain_bias)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(leaves, doubles, strict=True):
        assert torch.allclose(mine.grad.double(), theirs.grad, atol=1e-5), (mine.grad, theirs.grad)
    if frozen:
        assert weight.grad is None
    else:
        assert torch.allclose(weight.grad.double(), merged.grad, atol=2e-6)


def test_a_formula_may_use_distribution_and_sampled_token_at_once() -> None:
    problem = Problem()
    terms = problem.terms(ReverseKL(), Formula(mixed))
    got, grads, _ = problem.run(terms)
    expected, expected_grads = problem.plain(terms)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(grads[0].double(), expected_grads[0], atol=2e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_token_log_probs_are_taken_at_the_sampling_temperature(temperature: float) -> None:
    problem = Problem()
    terms = problem.terms(ReverseKL())
    got, grads, _ = problem.run(terms, temperature=temperature)
    expected, expected_grads = problem.plain(terms, temperature)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(grads[0].double(), expected_grads[0], atol=2e-6)


def test_temperature_score_of_known_logits() -> None:
    """Logits (2, 1, 0) at T = .5: log softmax(4, 2, 0)[0] = -.1429, not -.4076 (T = 1) and not -.815 (score / T)."""
    batch = micro_batch(torch.tensor([0]), {"pg": torch.ones(1)})
    head = Head(torch.tensor([[2.0], [1.0], [0.0]]))
    goal = Objective([Term("pg", PPOClip())], {"pg": 1.0}, 3, temperature=0.5)
    _, outcome = streamed_loss(torch.ones(1, 1), head, batch, {}, goal)
    assert outcome.statistics["student/token_logp"].item() == pytest.approx(-0.1429, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 5, N, 1000])
def test_chunk_size_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem()
    terms = problem.terms(JSD(0.5))
    reference, grads, outcome = problem.run(terms, chunk=N)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 3 * V)  # blocks of three rows inside each chunk
    loss, other, outcome_too = problem.run(terms, chunk=chunk)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, other, strict=True))
    for name, values in outcome.statistics.items():
        assert torch.allclose(values, outcome_too.statistics[name], atol=1e-5, equal_nan=True), name


def test_row_order_changes_nothing() -> None:
    problem = Problem()
    terms = problem.terms(ReverseKL())
    loss, grads, _ = problem.run(terms)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    moved = Problem()
    moved.hidden = problem.hidden[order]
    fields = problem.batch.tokens
    moved.batch = micro_batch(
        fields.token_ids[order], {k: w[order] for k, w in problem.batch.term_weights.items()},
        {"main": problem.batch.teachers["main"].hidden[order]},
        sampler_logp=fields.sampler_logp[order], advantages=fields.advantages[order],
    )  # fmt: skip
    loss_too, grads_too, _ = moved.run(terms)
    assert loss_too.item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(grads_too[0], grads[0][order], atol=1e-6)
    assert torch.allclose(grads_too[1], grads[1], atol=1e-6)


@pytest.mark.parametrize("loss", [ReverseKL(), ForwardKL(), JSD(0.5), Formula(plain_reverse_kl)])
def test_scores_of_masked_tokens_never_reach_the_gradient(loss: object) -> None:
    """Student rows (1, 0, -1), (.5, .2, .1); teacher row 1 softmax(.3, .3, .1), row 2 all -inf and masked.

    Reverse KL: p = (.6652, .2447, .0900), q = (.3548, .3548, .2905); sum p log p/q = .2219.
    """
    student = torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.2, 0.1]])
    teacher = torch.tensor([[0.3, 0.3, 0.1], [-torch.inf] * 3])
    batch = micro_batch(torch.tensor([0, 0]), {"kl": torch.tensor([1.0, 0.0])}, {"main": teacher},
                        present=torch.tensor([True, False]))  # fmt: skip
    hidden = student.clone().requires_grad_()
    eye = Head(torch.eye(3))
    goal = Objective([Term("kl", loss, teacher="main")], {"kl": 1.0}, 3)
    value, outcome = streamed_loss(hidden, eye, batch, {"main": eye}, goal)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(hidden.grad).all()
    assert hidden.grad[1].tolist() == [0.0, 0.0, 0.0]
    assert outcome.statistics["teacher/main/kl"][1].isnan()
    if isinstance(loss, ReverseKL):
        assert value.item() == pytest.approx(0.2219, abs=1e-4)
        assert hidden.grad[0].tolist() == pytest.approx([0.2706, -0.1452, -0.1254], abs=1e-4)


def test_only_the_heads_that_a_chunk_needs_are_asked_for() -> None:
    """Rows under one teacher, then rows under another, then rows under none: 23 tokens in chunks of 4."""
    asked: list[str] = []

    class Noting(dict[str, Head]):
        def __getitem__(self, name: str) -> Head:
            asked.append(name)
            return super().__getitem__(name)

    problem = Problem()
    first, second = (torch.arange(N) < 8), (torch.arange(N) >= 8) & (torch.arange(N) < 16)
    scores = {"a": TeacherPayload(problem.batch.teachers["main"].hidden, first),
              "b": TeacherPayload(problem.batch.teachers["main"].hidden, second)}  # fmt: skip
    weights = {"a": first / 8, "b": second / 8, "pg": torch.ones(N) / N}
    batch = replace(problem.batch, teachers=scores, term_weights=weights)
    terms = [Term("a", ReverseKL(), teacher="a"), Term("b", JSD(0.5), teacher="b"), Term("pg", PPOClip())]
    goal = Objective(terms, {"a": 1.0, "b": 1.0, "pg": 1.0}, V, 1.0, 4)
    heads = Noting(a=problem.teacher, b=problem.teacher)
    _, outcome = streamed_loss(problem.hidden, Head(problem.weight, None, V), batch, heads, goal)
    assert asked == ["a", "a", "b", "b"]
    for name, there in (("a", first), ("b", second)):
        assert torch.equal(~outcome.values[name].isnan(), there)
        assert torch.equal(~outcome.statistics[f"teacher/{name}/kl"].isnan(), there)


def token_five(chunk: TokenChunk) -> Tensor:
    """A view of the chunk's own tensor."""
    return chunk.student_logp[:, 5]


@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_formula_may_return_a_view_of_what_it_was_given(chunk: int) -> None:
    """The logits' memory is used again for the gradient, after which a view would read that."""
    problem = Problem()
    terms = problem.terms(Formula(token_five))
    got, grads, outcome = problem.run(terms, chunk=chunk)
    expected, expected_grads = problem.plain(terms)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(grads[0].double(), expected_grads[0], atol=2e-6)
    logp = torch.log_softmax(problem.hidden @ problem.weight.T, -1)[:, 5]
    there = problem.batch.term_weights["kl"] != 0
    assert torch.allclose(outcome.values["kl"][there], logp[there], atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 1000])
def test_likeliest_tokens_beyond_the_vocabulary_join_the_tail(chunk: int) -> None:
    """A padded head may send ids that the student has not: as if they had not been sent."""
    problem = Problem()
    terms = [Term("kl", OnTopK(ReverseKL(), k=3), teacher="main"), Term("pg", PPOClip())]
    logp = torch.log_softmax(problem.teacher.logits(problem.batch.teachers["main"].hidden), -1)
    best, there = logp.topk(2), torch.ones(N, dtype=torch.bool)
    results = []
    for beyond, value in ((V + 9, -1.5), (0, -torch.inf)):
        ids = torch.cat([torch.full((N, 1), beyond), best.indices], -1)
        top = TopK(ids, torch.cat([torch.full((N, 1), value), best.values], -1))
        payload = TeacherPayload(None, there, torch.zeros(N), top)
        batch = replace(problem.batch, teachers={"main": payload})
        results.append(problem.run(terms, chunk=chunk, batch=batch))
    assert results[0][0].item() == results[1][0].item()
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_teacher_of_some_tokens_gives_the_same_as_one_of_all(chunk: int) -> None:
    """Top-5 and tail, and the sampled token's log-ratio: from log-probabilities that a server would send."""
    problem = Problem()
    terms = [Term("kl", OnTopK(ReverseKL(), k=5), teacher="main"), Term("pg", SampledReverseKL(), teacher="main")]
    whole, grads, outcome = problem.run(terms, chunk=chunk)
    states = problem.batch.teachers["main"].hidden
    logp = torch.log_softmax(problem.teacher.logits(states), -1)
    token_logp, best = logp.gather(-1, problem.batch.tokens.token_ids[:, None])[:, 0], logp.topk(8)
    payload = TeacherPayload(None, torch.ones(N, dtype=torch.bool), token_logp, TopK(best.indices, best.values))
    less, grads_too, outcome_too = problem.run(
        terms, chunk=chunk, batch=replace(problem.batch, teachers={"main": payload})
    )
    assert less.item() == pytest.approx(whole.item(), rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, grads_too, strict=True))
    delta = "teacher/main/delta"
    assert torch.allclose(outcome.statistics[delta], outcome_too.statistics[delta], atol=1e-5)
    assert torch.allclose(outcome_too.statistics["teacher/main/top_mass"], best.values.exp().sum(-1))
    assert "teacher/main/kl" not in outcome_too.statistics


def test_no_token_at_all_still_gives_gradients() -> None:
    """A rank without trainable tokens takes part in every collective: its gradients exist and are zero."""
    batch = micro_batch(torch.zeros(0, dtype=torch.long), {"kl": torch.zeros(0)}, {"main": torch.zeros(0, TH)},
                        present=torch.zeros(0, dtype=torch.bool))  # fmt: skip
    problem = Problem()
    loss, grads, _ = problem.run(problem.terms(ReverseKL())[:1], batch=batch)
    assert loss.item() == 0.0
    assert grads[0].shape == (N, H)
    assert not any(grad.any() for grad in grads)


def test_padded_vocabulary_is_cut_before_the_softmax() -> None:
    """Rows beyond the shared vocabulary may hold anything."""
    problem = Problem()
    terms = problem.terms(ReverseKL())
    loss, grads, _ = problem.run(terms)
    wide = replace(problem.teacher, weight=torch.cat([problem.teacher.weight[:V], torch.full((9, TH), 50.0)]))
    problem.teacher = wide
    loss_too, grads_too, _ = problem.run(terms)
    assert loss_too.item() == loss.item()
    assert torch.equal(grads[0], grads_too[0])


def test_statistics_come_from_the_same_pass() -> None:
    problem = Problem()
    _, _, outcome = problem.run(problem.terms(ReverseKL()))
    logp = torch.log_softmax(problem.hidden @ problem.weight.T, -1)
    q = torch.log_softmax(problem.batch.teachers["main"].hidden @ problem.teacher.weight[:V].T, -1)
    found = outcome.statistics
    assert torch.allclose(found["student/entropy"], -(logp.exp() * logp).sum(-1), atol=1e-5)
    assert torch.allclose(found["teacher/main/entropy"], -(q.exp() * q).sum(-1), atol=1e-5)
    assert torch.allclose(found["teacher/main/kl"], (logp.exp() * (logp - q)).sum(-1), atol=1e-5)
    top = [set(logp[i].topk(16).indices.tolist()) & set(q[i].topk(16).indices.tolist()) for i in range(N)]
    assert torch.allclose(found["teacher/main/overlap16"], torch.tensor([len(common) / 16 for common in top]))
    assert outcome.values["kl"][3].isnan()
    assert outcome.values["kl"].isnan().sum() == 1


def test_a_frozen_head_gets_no_gradient() -> None:
    problem = Problem()
    hidden = problem.hidden.clone().requires_grad_()
    goal = Objective(problem.terms(ReverseKL()), {"kl": 0.7, "pg": 1.3}, V)
    loss, _ = streamed_loss(hidden, Head(problem.weight), problem.batch, {"main": problem.teacher}, goal)
    loss.backward()
    assert torch.allclose(hidden.grad, problem.run(goal.terms)[1][0], atol=1e-6)
    assert problem.weight.grad is None


def test_bf16_weights_keep_fp32_statistics() -> None:
    """Against fp64 on the same bf16 values: bf16 keeps 8 bits, so gradients agree to about 1 %."""
    problem = Problem()
    problem.hidden, problem.weight = problem.hidden.bfloat16(), problem.weight.bfloat16()
    terms = problem.terms(ReverseKL())
    loss, grads, outcome = problem.run(terms)
    expected, expected_grads = problem.plain(terms)
    assert outcome.statistics["student/entropy"].dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    assert grads[1].dtype == torch.bfloat16
    error = (grads[0].double() - expected_grads[0]).norm() / expected_grads[0].norm()
    assert error < 0.02


def test_a_loss_of_the_wrong_shape_is_named() -> None:
    problem = Problem()
    terms = problem.terms(ReverseKL(), Formula(lambda chunk: chunk.token_logp.sum()))
    with pytest.raises(ValueError, match=r"loss\.pg.*one value per token"):
        problem.run(terms)


def test_a_factor_that_is_nan_on_unweighed_rows_reaches_nothing() -> None:
    """A given answer has no sampler's probability: TIS is NaN there, and the term does not weigh it."""
    problem = Problem()
    fields = problem.batch.tokens
    fields.sampler_logp[4] = torch.nan
    problem.batch.term_weights["kl"][4] = problem.batch.term_weights["pg"][4] = 0.0
    terms = [Term("kl", ReverseKL(), teacher="main", correction=TIS()), Term("pg", PPOClip())]
    loss, grads, outcome = problem.run(terms)
    assert torch.isfinite(loss)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert outcome.values["kl"][4].isnan()


def test_imitation_is_at_temperature_one_whatever_the_sampling() -> None:
    problem = Problem()
    terms = problem.terms(CrossEntropy())
    expected = Problem().run(terms)
    _, _, outcome = problem.run(terms, temperature=0.5)
    assert torch.allclose(outcome.values["kl"], expected[2].values["kl"], equal_nan=True)
    logp = torch.log_softmax(problem.hidden @ problem.weight.T, -1).gather(-1, problem.batch.tokens.token_ids[:, None])
    assert torch.allclose(outcome.values["kl"].nan_to_num(0.0), -logp[:, 0] * (problem.batch.term_weights["kl"] != 0))
