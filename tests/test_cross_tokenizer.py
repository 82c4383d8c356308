"""A teacher with other tokens: what it reads, where it has a score, and what the two models are compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from opd.batching import make_batch
from opd.demo.recipe import tokenizer as demo_tokenizer
from opd.heads import Head
from opd.losses import GOLD, JSD, ULD, Formula, ForwardKL, OnTopK, ReverseKL, SampledReverseKL
from opd.losses.protocol import needs
from opd.objective import Objective, streamed_loss
from opd.records import Distribution, Example, FullVocab, Prompt, Rollout, SomeTokens, TokenChunk
from opd.shared_vocabulary import Fold, Ranked, place
from opd.teachers import CrossTokenizerTeacher, GivesFullVocab, OwnTokens, SpanTeacher, Teacher
from opd.teachers.spans import shares
from opd.terms import Term
from opd.token_statistics import student_beside
from tests.chunks import chunk_of, micro_batch
from tests.composing import prepare, refusal, tiny_opd
from tests.rows import rollout as rollout_of
from tests.rows import row
from tests.runs import opd, training_lines
from tests.tiny import CHARACTERS, save_model, tokenizer
from tests.tokenizers_of_bytes import byte_fallback, byte_level

N, V, TV, H, TH = 19, 29, 23, 7, 5


# --------------------------------------------------------------------------------- the objective on shared tokens


def plain_reverse_kl(chunk: TokenChunk) -> Tensor:
    """By autograd on the block."""
    return (chunk.student_p * (chunk.student_logp - chunk.teacher_logp)).sum(-1)


def all_shared(chunk: TokenChunk) -> Tensor:
    """A formula with a gradient in every log-probability, however small the token's probability."""
    return -chunk.student_logp.clamp(min=-50.0).mul(chunk.teacher_p + 0.1).sum(-1)


class Problem:
    """A student of V tokens and a teacher of TV others, of which 14 are common; the teacher's ids are shuffled."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden, self.weight = torch.randn(N, H, generator=g), torch.randn(V, H, generator=g)
        self.teacher_hidden, self.teacher_weight = torch.randn(N, TH, generator=g), torch.randn(TV, TH, generator=g)
        self.ids = torch.full((TV,), -1)
        self.own, self.theirs = torch.randperm(V, generator=g)[:14], torch.randperm(TV, generator=g)[:14]
        self.ids[self.theirs] = self.own
        self.token_ids = self.own[torch.randint(0, 14, (N,), generator=g)]
        self.term_weight = torch.rand(N, generator=g) / N
        self.present = torch.ones(N, dtype=torch.bool)
        self.present[4] = False
        self.term_weight[4] = 0.0
        self.sampler_logp = -2 * torch.rand(N, generator=g) - 2

    def streamed(self, loss: Any, chunk: int = 8) -> tuple[Tensor, list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Loss, gradients in hidden and weight, values, statistics by the real pass."""
        leaves = [t.clone().requires_grad_() for t in (self.hidden, self.weight)]
        batch = micro_batch(
            self.token_ids, {"t": self.term_weight}, {"main": self.teacher_hidden}, sampler_logp=self.sampler_logp,
            present=self.present,
        )  # fmt: skip
        heads = {"main": Head(self.teacher_weight, onto=Fold(self.ids, V + 3)).narrowed(V)}
        goal = Objective([Term("t", loss, teacher="main")], {"t": 0.7}, V, 1.0, chunk)
        total, outcome = streamed_loss(leaves[0], Head(leaves[1], vocab_size=V), batch, heads, goal)
        total.backward()
        return total.detach(), [leaf.grad for leaf in leaves], dict(outcome.values), dict(outcome.statistics)

    def plain(self, loss: Any) -> tuple[Tensor, list[Tensor], Tensor]:
        """The same from the 14 common logits alone, in fp64 by autograd; tokens numbered by their place among them."""
        leaves = [t.double().requires_grad_() for t in (self.hidden, self.weight)]
        logits = leaves[0] @ leaves[1].T
        student = torch.log_softmax(logits[:, self.own], -1)
        q = torch.log_softmax((self.teacher_hidden @ self.teacher_weight.T).double()[:, self.theirs], -1)
        tokens = (self.token_ids[:, None] == self.own[None, :]).nonzero()[:, 1]
        mass = (logits[:, self.own].logsumexp(-1) - logits.logsumexp(-1)).detach()
        chunk = TokenChunk(
            Distribution(student), student.gather(-1, tokens[:, None])[:, 0], tokens,
            self.sampler_logp.double() - mass, torch.zeros(N, dtype=torch.float64), Distribution(q),
            q.gather(-1, tokens[:, None])[:, 0],
        )  # fmt: skip
        values = loss(chunk)
        total = (0.7 * self.term_weight.double() * values).sum()
        total.backward()
        return total.detach(), [leaf.grad for leaf in leaves], values.detach()


ANALYTIC = {
    "reverse": (ReverseKL(), plain_reverse_kl),
    "forward": (ForwardKL(), lambda c: (c.teacher_p * (c.teacher_logp - c.student_logp)).sum(-1)),
    "jsd": (JSD(1.0), plain_reverse_kl),
    "formula": (Formula(plain_reverse_kl, needs("full_vocab")), plain_reverse_kl),
    "sampled": (SampledReverseKL(), SampledReverseKL()),
    "sampled without ratio": (SampledReverseKL(ratio=False), SampledReverseKL(ratio=False)),
}


@pytest.mark.parametrize("name", ANALYTIC)
def test_the_loss_is_that_of_the_two_conditional_distributions(name: str) -> None:
    problem = Problem()
    ours, reference = ANALYTIC[name]
    total, grads, values, statistics = problem.streamed(ours)
    expected, expected_grads, expected_values = problem.plain(reference)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-7)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=1e-6)
    known = problem.present
    torch.testing.assert_close(values["t"][known].double(), expected_values[known], rtol=1e-4, atol=1e-5)
    assert values["t"][~known].isnan().all()
    kl = problem.plain(plain_reverse_kl)[2]
    torch.testing.assert_close(statistics["teacher/main/kl"][known].double(), kl[known], rtol=1e-4, atol=1e-5)


def test_the_same_model_of_fewer_tokens_is_the_same_model_to_whole_rows() -> None:
    """The teacher is the student, heard on 14 of its tokens: no token of a row disagrees, nor does its future."""
    problem = Problem()
    problem.teacher_hidden, problem.teacher_weight = problem.hidden, problem.weight
    problem.ids = torch.full((V,), -1)
    problem.ids[problem.own] = problem.own
    statistics = problem.streamed(SampledReverseKL(ratio=False))[3]
    whole_vocabulary = statistics["student/token_logp"] - statistics["teacher/main/token_logp"]
    assert bool((whole_vocabulary[problem.present] < -0.01).all())
    whole = row(rollout_of([3], problem.token_ids.tolist()), scores=FullVocab(problem.hidden, problem.present))
    for shape in ("none", "clip", "signed_log", "power"):
        term = Term("t", SampledReverseKL(shape=shape, gamma=1.0), teacher="main")
        (micro,) = make_batch([whole], [term], 64, 0, [statistics]).micro_batches
        torch.testing.assert_close(micro.tokens.row_values["t"], torch.zeros(N), rtol=0.0, atol=1e-5)
    student = student_beside(statistics, ["main"])
    gap = (statistics["teacher/main/token_logp"] - student)[problem.present]
    torch.testing.assert_close(gap, torch.zeros(N - 1), rtol=0.0, atol=1e-6)
    assert student[4] == statistics["student/token_logp"][4], "without a score it is the student's own"


@pytest.mark.parametrize("loss", [ReverseKL(), Formula(all_shared, needs("full_vocab")), OnTopK(ReverseKL(), k=5)])
def test_logits_outside_the_shared_set_get_no_gradient(loss: Any) -> None:
    problem = Problem()
    by_weight = problem.streamed(loss)[1][1]
    outside = torch.ones(V, dtype=torch.bool)
    outside[problem.own] = False
    assert torch.equal(by_weight[outside], torch.zeros_like(by_weight[outside]))
    assert (by_weight[problem.own].abs().sum(-1) > 0).all()


def test_shared_masses_are_those_before_renormalising() -> None:
    problem = Problem()
    statistics = problem.streamed(ReverseKL())[3]
    p = torch.softmax((problem.hidden @ problem.weight.T).double(), -1)[:, problem.own].sum(-1)
    q = torch.softmax((problem.teacher_hidden @ problem.teacher_weight.T).double(), -1)[:, problem.theirs].sum(-1)
    known = problem.present
    torch.testing.assert_close(
        statistics["teacher/main/student_shared_mass"][known].double(), p[known], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(statistics["teacher/main/shared_mass"][known].double(), q[known], rtol=1e-5, atol=1e-6)


def test_a_whole_permuted_vocabulary_changes_nothing() -> None:
    """Every token shared: loss and gradients are those of the same teacher with the student's ids."""
    g = torch.Generator().manual_seed(1)
    hidden, weight, states = (
        torch.randn(N, H, generator=g),
        torch.randn(V, H, generator=g),
        torch.randn(N, TH, generator=g),
    )
    theirs, order = torch.randn(V, TH, generator=g), torch.randperm(V, generator=g)
    batch = micro_batch(torch.randint(0, V, (N,), generator=g), {"t": torch.full((N,), 1 / N)}, {"main": states})
    results = []
    for head in (Head(theirs), Head(theirs[order], onto=Fold(order, V))):
        leaf = hidden.clone().requires_grad_()
        goal = Objective([Term("t", ReverseKL(), teacher="main")], {"t": 1.0}, V)
        total, _ = streamed_loss(leaf, Head(weight), batch, {"main": head}, goal)
        total.backward()
        results.append((total.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------ folding tokens together

TEACHER_TOKENS = ("a", "ab", "abc", "b", "c", "x")
FOLDED = torch.tensor([0, 0, 0, 1, 2, -1])  # onto a, b, c: each token begins with its first letter; x is nobody's
P = (0.1, 0.2, 0.3, 0.15, 0.05, 0.2)


def continuations(where: int) -> tuple[Tensor, Tensor]:
    """After the a of ab or abc: both go on with b; a itself is complete."""
    assert where == place(1, 1)
    return torch.tensor([1, 2, 0]), torch.tensor([1, 1, -1])


def test_the_mass_of_a_token_goes_to_the_one_it_begins_with() -> None:
    """q(a) = .1 + .2 + .3 = .6, q(b) = .15, q(c) = .05, shared .8. After a: .5 of .6 for b, and .1 of .6, that it ended
    there, for a and c together, shared out as the student has them, 3 to 1.
    """
    logits = torch.tensor([P, P], dtype=torch.float64).log() + 3.0
    found = Fold(FOLDED, 3, continuations)(logits, torch.tensor([0, place(1, 1)]))
    assert found.mass is not None and found.support is not None
    torch.testing.assert_close(found.mass, torch.tensor([0.8, 0.5 / 0.6], dtype=torch.float64))
    student = Distribution(torch.tensor([[0.6, 0.2, 0.2], [0.6, 0.2, 0.2]], dtype=torch.float64).log())
    expected = [[0.6 / 0.8, 0.15 / 0.8, 0.05 / 0.8], [0.1 / 0.6 * 0.75, 0.5 / 0.6, 0.1 / 0.6 * 0.25]]
    torch.testing.assert_close(found.beside(student).softmax(-1), torch.tensor(expected, dtype=torch.float64))
    assert found.support.all()


def skewed(p: Tensor, q: Tensor) -> Tensor:
    """.3 KL(q || m) + .7 KL(p || m), m = .3 q + .7 p."""
    m = 0.3 * q + 0.7 * p
    return (0.3 * q * (q / m).log() + 0.7 * p * (p / m).log()).sum(-1)


@pytest.mark.parametrize(
    ("loss", "plain"),
    [
        (ReverseKL(), lambda p, q: (p * (p / q).log()).sum(-1)),
        (ForwardKL(), lambda p, q: (q * (q / p).log()).sum(-1)),
        (JSD(0.3), skewed),
    ],
)
def test_the_rest_counts_as_one_token(loss: Any, plain: Any) -> None:
    """Value and gradient in logits are those of the two-way divergence between (p_b, p_a + p_c) and (5/6, 1/6)."""
    z = torch.tensor([[0.3, -0.2, 1.1]], dtype=torch.float64, requires_grad=True)
    p = torch.softmax(z, -1)
    value = plain(torch.stack([p[:, 1], p[:, 0] + p[:, 2]], -1), torch.tensor([[5 / 6, 1 / 6]], dtype=torch.float64))
    found = Fold(FOLDED, 3, continuations)(torch.tensor([P], dtype=torch.float64).log(), torch.tensor([place(1, 1)]))
    student = Distribution(torch.log_softmax(z.detach(), -1))
    token = torch.zeros(1, dtype=torch.float64)
    teacher = Distribution(found.beside(student).log_softmax(-1))
    mine, grad = loss.value_and_grad(TokenChunk(student, token, torch.tensor([1]), token, token, teacher))
    torch.testing.assert_close(mine, value.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(value.sum(), z)[0])


def test_ids_beyond_the_students_head_are_left_out() -> None:
    found = Fold(FOLDED, 3).narrowed(2)(torch.tensor([P]).log(), None)
    torch.testing.assert_close(found.logits.softmax(-1), torch.tensor([[0.6, 0.15]]) / 0.75)


def test_ranked_puts_the_rest_in_order() -> None:
    """Common: ids 1 and 2 of the student, .15 and .05. The rest .3 .2 .2 .1 takes the free ids 0 and 3, the largest."""
    found = Ranked(torch.tensor([-1, -1, -1, 1, 2, -1]), 4)(torch.tensor([P]).log(), None)
    torch.testing.assert_close(found.logits.exp(), torch.tensor([[0.3, 0.15, 0.05, 0.2]]))
    assert found.support is not None and found.support.tolist() == [[False, True, True, False]]
    assert not found.restricts


# --------------------------------------------------------------------------------------------------- stub teachers


class Stub:
    """A full-vocabulary teacher that notes what it was asked; its logits are its hidden states."""

    provides = needs("full_vocab")

    def __init__(self, tokens: PreTrainedTokenizerBase, logits: Tensor | None = None, max_len: int = 1000) -> None:
        self.tokens, self.logits, self.max_len = tokens, logits, max_len
        self.asked: list[Rollout] = []

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its own."""
        return self.tokens

    def start(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to close."""

    def head(self) -> Head:
        """The identity."""
        return Head(torch.eye(len(self.tokens)))

    def score(self, rollouts: Sequence[Rollout]) -> list[FullVocab | SomeTokens | None]:
        """The given logits [R, V'], or of token t at position t a 9, so that positions can be told apart."""
        self.asked += rollouts
        size = len(self.tokens)
        made = [9.0 * torch.eye(size)[r.token_ids] for r in rollouts]
        return [FullVocab(each if self.logits is None else self.logits[: len(each)]) for each in made]


class SampledStub(Stub):
    """Gives the sampled token's score alone."""

    provides = needs("sampled")

    def score(self, rollouts: Sequence[Rollout]) -> list[FullVocab | SomeTokens | None]:
        """-1 for every token."""
        return [SomeTokens(torch.full((len(r.token_ids),), -1.0)) for r in rollouts]


def rollout(
    student: PreTrainedTokenizerBase, text: str, *, prompt: Any = "1+1=", stop: bool = True, logp: float = -0.5
):
    """An answer in the student's ids, with its end token."""
    ids = student(text, add_special_tokens=False)["input_ids"] + ([student.eos_token_id] if stop else [])
    asked = Prompt("p", "main", student("1+1=")["input_ids"], Example(prompt))
    return Rollout(asked, 0, ids, [logp] * len(ids), text, "stop", 0)


def met(teacher: Any, student: PreTrainedTokenizerBase) -> Any:
    """The teacher after it has seen the student's tokenizer."""
    teacher.meet(student, [student.eos_token_id])
    return teacher


def test_the_teacher_gets_its_own_ids_of_text_and_template() -> None:
    """CASES 9: two vocabularies of one size; prompt and answer reach the teacher in ids that its tokenizer makes."""
    theirs = tokenizer(CHARACTERS[::-1])
    theirs.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}a="
    stub = Stub(theirs)
    chat = rollout(tokenizer(), "42", prompt=[{"role": "user", "content": "1+1"}])
    (scores,) = met(CrossTokenizerTeacher(stub), tokenizer()).score([chat])
    (asked,) = stub.asked
    assert asked.prompt.token_ids == theirs("<1+1>a=")["input_ids"]
    assert asked.token_ids == [*theirs("42")["input_ids"], theirs.eos_token_id]
    assert asked.token_ids != chat.token_ids
    assert scores.present.tolist() == [True] * 3
    assert scores.hidden.argmax(-1).tolist() == asked.token_ids, "each token has the state that predicts it"


def test_a_teacher_of_permuted_ids_is_refused_alone_and_taken_as_a_cross_tokenizer_teacher(tmp_path: Path) -> None:
    """CASES 9, from the configuration."""
    settings_ = tiny_opd(tmp_path)
    permuted = save_model(tmp_path / "permuted", order=CHARACTERS[::-1])
    message = refusal(*settings_, f"teacher.main.model={permuted}")
    assert message.startswith("teacher.main: its vocabulary is not the student's")
    assert message.endswith("lays one tokenizer over the other (opd.teachers.CrossTokenizerTeacher)")
    kept = [s for s in settings_ if not s.startswith(("+teacher@", "teacher.main"))]
    assert prepare(*kept, "+teacher@teacher.main=cross_tokenizer", f"teacher.main.inner.model={permuted}")


def test_shared_scores_only_single_tokens_that_both_have() -> None:
    """'the 数' in bytes: t h e ' ' and three bytes. The teacher's tokens: 'the' and ' 数', so only the end meets."""
    student, theirs = byte_level(vocab_size=258), byte_level(["the 数"] * 9, vocab_size=290, end="<stop>")
    teacher = met(CrossTokenizerTeacher(Stub(theirs)), student)
    (scores,) = teacher.score([rollout(student, "the 数")])
    assert scores.present.tolist() == [False] * 7 + [True]
    assert teacher.metrics()["coverage"].value == pytest.approx(1 / 8)
    assert teacher.metrics()["unaligned"].value == 0.0


def test_marginal_scores_wherever_the_teachers_token_covers_the_students() -> None:
    student, theirs = byte_level(vocab_size=258), byte_level(["the 数"] * 9, vocab_size=290, end="<stop>")
    asked = rollout(student, "the 数")
    teacher = met(CrossTokenizerTeacher(Stub(theirs), strategy="marginal"), student)
    (scores,) = teacher.score([asked])
    assert scores.present.tolist() == [True] * 8
    assert scores.places[[0, 3, 7]].tolist() == [0, 0, 0], "the begins, ' 数' begins, the end"
    assert (scores.places[[1, 2, 4, 5, 6]] > 0).all()
    head = teacher.head().narrowed(len(student))
    student_logp = Distribution(torch.zeros(8, len(student)).log_softmax(-1))
    logits = head.in_student_ids(scores.hidden, scores.places).beside(student_logp)
    assert logits.argmax(-1).tolist() == asked.token_ids, "a teacher that is sure of its tokens is sure of their bytes"
    (outside,) = met(CrossTokenizerTeacher(Stub(theirs), strategy="marginal", inside=False), student).score([asked])
    assert outside.present.tolist() == [True, False, False, True, False, False, False, True]


DEMO = (demo_tokenizer(), demo_tokenizer(pairs=True))


@settings(max_examples=20, deadline=None)
@given(pair=st.tuples(st.integers(0, 9), st.integers(0, 9)), seed=st.integers(0, 1000))
def test_marginals_multiply_to_the_teachers_probability(pair: tuple[int, int], seed: int) -> None:
    """Over pairs ab of digits: q(a) q(b | a) = p(ab) / p(all pairs) for a teacher that always writes pairs."""
    student, theirs = DEMO
    p = torch.randn(1, len(theirs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(3)
    singles = [theirs.get_vocab()[t] for t in theirs.get_vocab() if len(t) == 1]
    p[:, singles] = -torch.inf
    teacher = met(CrossTokenizerTeacher(Stub(theirs), strategy="marginal"), student)
    (scores,) = teacher.score([rollout(student, f"{pair[0]}{pair[1]}", stop=False)])
    onto = teacher.head().onto
    assert onto is not None
    unsure = Distribution(torch.zeros(2, len(student), dtype=torch.float64).log_softmax(-1))
    found = onto(p.expand(2, -1), scores.places).beside(unsure).log_softmax(-1)
    ids = [student.get_vocab()[str(digit)] for digit in pair]
    pairs = [i for t, i in theirs.get_vocab().items() if len(t) == 2]
    expected = p[0].log_softmax(-1)[theirs.get_vocab()[f"{pair[0]}{pair[1]}"]] - p[0].log_softmax(-1)[pairs].logsumexp(
        0
    )
    torch.testing.assert_close(found[0, ids[0]] + found[1, ids[1]], expected)


def test_a_cut_character_and_a_long_answer_have_no_score() -> None:
    student, theirs = byte_level(vocab_size=258), byte_level(vocab_size=300, end="<stop>")
    stub = Stub(theirs, max_len=40)
    teacher = met(CrossTokenizerTeacher(stub, strategy="ranked"), student)
    cut = rollout(student, "a😀", stop=False)
    cut = replace(cut, token_ids=cut.token_ids[:3], logp=cut.logp[:3])
    scores = teacher.score([cut, rollout(student, "z" * 60), rollout(student, "ab")])
    assert scores[0].present.tolist() == [True, False, False]
    assert scores[1] is None
    assert len(stub.asked) == 2
    metrics = teacher.metrics()
    assert metrics["cut"].value == pytest.approx(1 / 3)
    assert metrics["unread"].value == pytest.approx(1 / 3)
    assert metrics["unaligned"].sum == 2.0
    assert metrics["coverage"].sum == float(scores[0].present.sum() + scores[2].present.sum())


def test_an_answer_that_cannot_be_read_at_all_is_missing() -> None:
    student = byte_level(vocab_size=258)
    teacher = met(CrossTokenizerTeacher(Stub(byte_level(end="<stop>"))), student)
    half = rollout(student, "é", stop=False)
    assert teacher.score([replace(half, token_ids=half.token_ids[:1], logp=[-1.0])]) == [None]
    assert teacher.score([]) == []


def test_stop_tokens_of_the_teacher_add_up_at_the_students_end() -> None:
    """Its end and its <pad> both mean the end: .5 and .25 of its probability become the student's end token's .75."""
    student, theirs = byte_level(vocab_size=258), byte_level(vocab_size=258, end="<stop>")
    stops = ["<stop>", "<pad>"]
    p = torch.full((1, len(theirs)), 0.25 / (len(theirs) - 2))
    p[0, theirs.convert_tokens_to_ids(stops)] = torch.tensor([0.5, 0.25])
    teacher = met(CrossTokenizerTeacher(Stub(theirs, p.log()), stop_tokens=stops), student)
    (scores,) = teacher.score([rollout(student, "")])
    found = teacher.head().in_student_ids(scores.hidden, scores.places)
    assert found.logits.softmax(-1)[0, student.eos_token_id].item() == pytest.approx(0.75)
    assert found.mass is not None and found.mass.item() == pytest.approx(1.0)


def test_sentencepiece_and_byte_level_share_their_words() -> None:
    student, theirs = byte_level(vocab_size=600), byte_fallback(vocab_size=400)
    teacher = met(CrossTokenizerTeacher(Stub(theirs)), student)
    asked = rollout(student, "the lazy dog")
    (scores,) = teacher.score([asked])
    assert scores.present.any()
    logits = teacher.head().in_student_ids(scores.hidden, scores.places).logits
    assert logits[scores.present].argmax(-1).tolist() == torch.tensor(asked.token_ids)[scores.present].tolist()


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"special_tokens": {"<nope>": "<stop>"}}, "special_tokens: the student has no token '<nope>'"),
        ({"special_tokens": {"<pad>": "<nope>"}}, "special_tokens: the teacher has no token '<nope>'"),
        ({"stop_tokens": ["<nope>"]}, "stop_tokens: the teacher has no token '<nope>'"),
        ({"stop_tokens": []}, "stop_tokens: the teacher's tokenizer has no end token"),
    ],
)
def test_tokens_that_do_not_exist_are_refused(settings_: dict[str, Any], says: str) -> None:
    teacher = CrossTokenizerTeacher(Stub(byte_level(end="<stop>")), **settings_)
    with pytest.raises(ValueError, match=says):
        met(teacher, byte_level())


def test_a_chat_needs_the_teachers_template() -> None:
    theirs = byte_level(end="<stop>")
    theirs.chat_template = None
    teacher = met(CrossTokenizerTeacher(Stub(theirs)), byte_level())
    teacher.check_examples([Example("plain")])
    with pytest.raises(ValueError, match="inner: chat messages, but its tokenizer has no chat template"):
        teacher.check_examples([Example([{"role": "user", "content": "hi"}])])


def test_abilities() -> None:
    shared, ranked = (CrossTokenizerTeacher(Stub(tokenizer()), strategy=s) for s in ("shared", "ranked"))
    spans = SpanTeacher(Stub(tokenizer()))
    for teacher in (shared, ranked, spans):
        assert isinstance(teacher, Teacher) and isinstance(teacher, OwnTokens)
    assert isinstance(shared, GivesFullVocab) and not isinstance(spans, GivesFullVocab)
    assert (shared.provides, ranked.provides, spans.provides) == ({"full_vocab"}, {"ranked"}, {"sampled"})


def test_teachers_that_cannot_stand_inside_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inner \(SampledStub\): gives sampled, not the full vocabulary"):
        CrossTokenizerTeacher(SampledStub(tokenizer()))
    with pytest.raises(ValueError, match=r"inner \(CrossTokenizerTeacher\): speaks the student's tokens already"):
        SpanTeacher(CrossTokenizerTeacher(Stub(tokenizer())))


# ---------------------------------------------------------------------------------------------------------- spans


def test_a_span_is_shared_out_as_the_students_own() -> None:
    """METHODS §2.8: log p = (-.1, -.4), L_T = -1: log q = 2 log p, A = (-.1, -.4), sum L_T - L_S = -.5 (T15)."""
    targets = torch.tensor(shares([-0.1, -0.4], -1.0))
    torch.testing.assert_close(targets - torch.tensor([-0.1, -0.4]), torch.tensor([-0.1, -0.4]))
    assert shares([0.0, 0.0], -1.0) == [-0.5, -0.5], "a student that was certain has no shares: equal parts"
    assert shares([float("nan")] * 4, -1.0) == [-0.25] * 4


@pytest.mark.parametrize("kind", [Stub, SampledStub])
def test_span_scores_add_up_to_the_teachers_likelihood(kind: type[Stub]) -> None:
    """'the 数' in 3 + 4 bytes and the end; the teacher's three tokens score -1 each, or log-softmax of its 9."""
    student, theirs = byte_level(vocab_size=258), byte_level(["the 数"] * 9, vocab_size=290, end="<stop>")
    teacher = met(SpanTeacher(kind(theirs)), student)
    (scores,) = teacher.score([rollout(student, "the 数")])
    each = -1.0 if kind is SampledStub else -log(1 + (len(theirs) - 1) * 2.718281828**-9)
    assert scores.present.tolist() == [True] * 8
    sums = [scores.token_logp[:3].sum(), scores.token_logp[3:7].sum(), scores.token_logp[7]]
    torch.testing.assert_close(torch.stack(sums), torch.full((3,), each), rtol=1e-4, atol=1e-6)
    (short,) = met(SpanTeacher(kind(theirs), max_tokens=3), student).score([rollout(student, "the 数")])
    assert short.present.tolist() == [True] * 3 + [False] * 4 + [True]


# --------------------------------------------------------------------------------------------------- ULD and GOLD


def by_autograd(loss: Any, p: list[float], q: list[float]) -> Tensor:
    """Gradient in logits of the loss's value, by finite differences in fp64."""
    z, step = torch.tensor(p, dtype=torch.float64).log(), 1e-6

    def value(logits: Tensor) -> float:
        return loss(chunk_of(torch.softmax(logits, -1).tolist(), q)).item()

    moves = torch.eye(len(p), dtype=torch.float64) * step
    return torch.tensor([(value(z + move) - value(z - move)) / (2 * step) for move in moves], dtype=torch.float64)


def test_uld_is_blind_to_permutations() -> None:
    """T18: p = (.5, .3, .2), q a permutation of it: 0. q = (.2, .15, .65): .15 + .1 + .05 = .3."""
    p = [0.5, 0.3, 0.2]
    assert ULD()(chunk_of(p, [0.2, 0.5, 0.3])).item() == pytest.approx(0.0, abs=1e-12)
    assert ULD()(chunk_of(p, [0.2, 0.15, 0.65])).item() == pytest.approx(0.3)


@pytest.mark.parametrize("loss", [ULD(), GOLD(common_share=0.6), GOLD(beta=0.2)])
def test_gradients_of_ranked_losses(loss: Any) -> None:
    p, q = [0.4, 0.3, 0.2, 0.1], [0.15, 0.5, 0.05, 0.3]
    grad = loss.value_and_grad(chunk_of(p, q))[1][0]
    torch.testing.assert_close(grad, by_autograd(loss, p, q), rtol=1e-5, atol=1e-8)


def test_gold_joins_jsd_of_common_tokens_and_ranks_of_the_others() -> None:
    """Common: tokens 0 and 1. With m = (p + q) / 2: JSD part, written out; ranks (.2, .1) against (.3, .05): .15."""
    p, q = [0.4, 0.3, 0.2, 0.1], [0.15, 0.5, 0.05, 0.3]
    chunk = replace(chunk_of(p, q), support=torch.tensor([[True, True, False, False]]))
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    jsd = sum(0.5 * q[i] * log(q[i] / m[i]) + 0.5 * p[i] * log(p[i] / m[i]) for i in (0, 1))
    assert GOLD()(chunk).item() == pytest.approx(0.5 * jsd + 0.5 * 0.15)
    assert GOLD(common_share=1.0)(chunk).item() == pytest.approx(jsd)


# ------------------------------------------------------------------------------------------------- the real command


def permuted_copy(source: Path, folder: Path, order: str) -> Path:
    """The same model under other ids: embedding rows go with their characters."""
    save_model(folder, order=order, vocab_size=len(tokenizer()))
    model = AutoModelForCausalLM.from_pretrained(source)
    old = tokenizer().get_vocab()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(weight[[old[token] for token in tokenizer(order).convert_ids_to_tokens(range(len(weight)))]])
    model.save_pretrained(folder)
    return folder


SPECIALS = "# @package _global_\nteacher: {main: {special_tokens: {<pad>: <pad>, <unk>: <unk>}}}\n"


def test_a_permuted_teacher_trains_as_the_same_teacher(tmp_path: Path) -> None:
    """Two steps of the command under a teacher, and under its copy with other ids, every token shared; with GRPO."""
    rewarded = ["+loss@loss.grpo=grpo", "credit=grpo", "data.streams.main.samples=2", "eval.every=5"]
    student, teacher = (save_model(tmp_path / n, seed=s, vocab_size=len(tokenizer())) for s, n in enumerate("st"))
    parts = [*tiny_opd(tmp_path), *rewarded, f"student.model={student}"]
    ended = opd("train", *parts, f"teacher.main.model={teacher}", f"run_dir={tmp_path}/same")
    assert ended.code == 0, ended.err
    copy = permuted_copy(teacher, tmp_path / "permuted", CHARACTERS[::-1])
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "specials.yaml").write_text(SPECIALS)
    kept = [part for part in parts if not part.startswith(("+teacher@", "teacher.main"))]
    ended = opd(
        "train", "--config-dir", str(tmp_path / "conf"), "experiment=specials", *kept,
        "+teacher@teacher.main=cross_tokenizer", f"teacher.main.inner.model={copy}", f"run_dir={tmp_path}/cross",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    for mine, theirs in zip(training_lines(tmp_path / "cross"), training_lines(tmp_path / "same"), strict=True):
        for name in ("loss/distill", "loss/grpo", "grad_norm", "teacher/main/kl", "teacher/main/delta_abs"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
        assert mine["teacher/main/coverage"] == 1.0
        assert mine["teacher/main/unaligned"] == 0.0
        assert mine["teacher/main/shared_mass"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "changes",
    [
        ["teacher.main.strategy=marginal"],
        ["teacher.main.strategy=ranked", "loss@loss.distill=gold"],
        ["teacher@teacher.main=spans", "loss@loss.distill=sampled_reverse_kl"],
    ],
)
def test_two_steps_under_every_strategy_beside_a_teacher_of_the_same_tokens(changes: list[str], tmp_path: Path) -> None:
    teacher = save_model(tmp_path / "other", seed=3, order=CHARACTERS[::-1])
    settings_ = [s for s in tiny_opd(tmp_path) if not s.startswith(("+teacher@", "+loss@", "teacher.main"))]
    kind = next((c.partition("=")[2] for c in changes if c.startswith("teacher@")), "cross_tokenizer")
    loss = next((c.partition("=")[2] for c in changes if c.startswith("loss@")), "reverse_kl")
    ended = opd(
        "train", *settings_, f"+teacher@teacher.main={kind}", f"teacher.main.inner.model={teacher}",
        f"+loss@loss.distill={loss}", *(c for c in changes if "@" not in c),
        "+teacher@teacher.same=local", f"teacher.same.model={tmp_path}/teacher", "+loss@loss.anchor=reverse_kl",
        "loss.anchor.teacher=same", "eval.every=5",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = training_lines(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["loss/distill"] != 0.0 and line["loss/anchor"] > 0.0
        assert line["teacher/main/coverage"] == 1.0


def test_places_survive_batching_beside_rows_without_scores() -> None:
    """Three rows: places 7 and 0, no score, no places; rows with scores stand first, the longest of them ahead."""
    scored = row(rollout_of([3], [4, 5]), scores=FullVocab(torch.ones(2, TH), places=torch.tensor([7, 0])))
    plain = row(rollout_of([3], [4]), scores=FullVocab(torch.ones(1, TH)))
    batch = make_batch([row(rollout_of([3], [4, 5, 6])), plain, scored], [], 64, 0)
    (micro,) = batch.micro_batches
    assert batch.order == [[2, 1, 0]]
    assert micro.teachers["main"].places.tolist() == [7, 0, 0, 0, 0, 0]
    assert micro.teachers["main"].present.tolist() == [True] * 3 + [False] * 3


def test_two_steps_of_the_quickstart_with_another_tokenizer(tmp_path: Path) -> None:
    ended = opd(
        "train", "experiment=quickstart_cross_tokenizer", "sampler=hf", "logger=none", f"run_dir={tmp_path}/run",
        "steps=2", "data.train.size=64", "data.heldout.size=8", "data.streams.main.prompts=16", "eval.teacher=false",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    for line in training_lines(tmp_path / "run"):
        assert line["teacher/main/coverage"] > 0.9, "inside the pairs too: outside of them it would be at most 4 of 7"
        assert line["teacher/main/student_shared_mass"] > 0.95
        assert line["loss/distill"] > 0.0


@pytest.fixture
def across(tmp_path: Path) -> list[str]:
    """Overrides of a tiny distillation from a teacher of other ids."""
    teacher = save_model(tmp_path / "other", order=CHARACTERS[::-1])
    own = [s for s in tiny_opd(tmp_path) if not s.startswith(("+teacher@", "teacher.main"))]
    return [*own, "+teacher@teacher.main=cross_tokenizer", f"teacher.main.inner.model={teacher}"]


def test_a_loss_that_asks_whose_probabilities_they_are_is_refused_ranks(across: list[str]) -> None:
    message = refusal(*across, "teacher.main.strategy=ranked")
    assert message.startswith("loss.distill (ReverseKL) needs full_vocab scores; teacher.main (CrossTokenizerTeacher)")
    assert message.endswith("set teacher.main.strategy=shared (or marginal), or use loss gold or uld")


@pytest.mark.parametrize("strategy", ["shared", "marginal"])
def test_a_loss_of_ranks_is_refused_a_teacher_that_is_restricted_to_common_tokens(
    strategy: str, across: list[str]
) -> None:
    message = refusal(*across, "loss@loss.distill=gold", f"teacher.main.strategy={strategy}")
    assert message == (
        "loss.distill (GOLD) needs ranked scores; teacher.main (CrossTokenizerTeacher) provides full_vocab: set "
        "teacher.main.strategy=ranked, or use a loss that compares tokens by id"
    )
    assert prepare(*across, "loss@loss.distill=gold", "teacher.main.strategy=ranked")


def test_whole_rows_under_a_teacher_and_a_reference_of_other_supports(across: list[str]) -> None:
    future = ["+loss@loss.x=sampled_reverse_kl", "loss.x.gamma=1.0"]
    beyond = [*future, "loss.x.extrapolate=1.25", "loss.x.reference=start"]
    start = ["+teacher@teacher.start=self"]
    message = refusal(*across, *start, *beyond)
    assert message.startswith("loss.x (SampledReverseKL) looks at whole rows, where teacher.main (CrossTokenizerTea")
    assert message.endswith("use a loss of single tokens (gamma=0), or set loss.x.reference=null")
    assert prepare(*across, *future)
    assert prepare(*across, *start, *beyond, "loss.x.gamma=0")
