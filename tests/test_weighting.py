"""Factors of tokens and rows, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log, nan
from typing import Any

import pytest
import torch

from opd import ranks
from opd.batching import make_batch, term_factors
from opd.losses import CrossEntropy, ReverseKL
from opd.records import Credit, Example, FullVocab, Prompt, Reward, Rollout
from opd.rows import Row
from opd.terms import Term
from opd.weighting import (
    ByCorrectness,
    ByPassRate,
    ByPerplexity,
    EarlyDisagreement,
    FirstTokens,
    TeacherConfidence,
    TopShare,
    Weigher,
    WithoutTokens,
    split_by_rows,
)

Fact = dict[str, torch.Tensor]
STUDENT, TEACHER = "student/token_logp", "teacher/main/token_logp"


def row(
    tokens: Sequence[int] = (4,), reward: float | None = None, group: str = "a", trainable: Sequence[bool] = ()
) -> Row:
    """One answer of the given ids."""
    prompt = Prompt(group, "main", [3], Example("x"))
    rollout = Rollout(prompt, 0, list(tokens), [-1.0] * len(tokens), "", "stop", 0, list(trainable))
    scores = {"main": FullVocab(torch.zeros(len(tokens), 2))}
    return Row(rollout, Reward(reward), Credit(None), scores, frozenset({"x"}))


def facts(**columns: Sequence[Sequence[float]]) -> list[Fact]:
    """Per row, the values of its tokens; `student_entropy` names student/entropy, `main_kl` teacher/main/kl."""
    names = {name: name.replace("main_", "teacher/main/").replace("student_", "student/") for name in columns}
    count = len(next(iter(columns.values())))
    return [{names[name]: torch.tensor(values[i]) for name, values in columns.items()} for i in range(count)]


def logp_of(perplexity: float, tokens: int = 2) -> list[float]:
    """Token log-probabilities whose perplexity is given: unequal ones of mean -log PPL."""
    return [-log(perplexity) + (0.1 if t % 2 else -0.1) for t in range(tokens)]


# ------------------------------------------------------------------------------------------------------------- windows


def test_first_tokens() -> None:
    assert FirstTokens(2).weigh([row([4, 5, 6]), row([4])], ()) == [[1.0, 1.0, 0.0], [1.0]]


def test_only_trainable_tokens_fill_the_window() -> None:
    """Of four tokens the first and the third are the student's: the window of one holds the first of them."""
    mine = row([4, 5, 6, 7], trainable=[True, False, True, False])
    assert FirstTokens(1).weigh([mine], ()) == [[1.0, 0.0]]


def test_tokens_are_left_out_at_their_first_occurrence_or_everywhere() -> None:
    rows = [row([7, 4, 7, 8, 7])]
    assert WithoutTokens([7, 8]).weigh(rows, ()) == [[0.0, 1.0, 1.0, 0.0, 1.0]]
    assert WithoutTokens([7, 8], first_only=False).weigh(rows, ()) == [[0.0, 1.0, 0.0, 0.0, 0.0]]
    assert WithoutTokens().weigh(rows, ()) == [[1.0] * 5]


# ------------------------------------------------------------------------------------------------------------- rewards


def test_correctness() -> None:
    rows = [row([4, 5], reward=1.0), row(reward=0.5), row(reward=0.4), row(reward=None)]
    assert ByCorrectness(right=0.2, wrong=0.7, unjudged=0.1).weigh(rows, ()) == [[0.2, 0.2], [0.2], [0.7], [0.1]]


@pytest.mark.parametrize(
    ("a", "b", "solved", "factor"),
    [
        (1.0, 1.0, [1, 0, 0, 0], 0.25 * 0.75),
        (2.0, 1.0, [1, 0, 0, 0], 0.25**2 * 0.75),
        (1.0, 1.0, [1, 1, 1, 1], 0.0),
        (1.0, 1.0, [0, 0, 0, 0], 0.0),
    ],
)
def test_pass_rate(a: float, b: float, solved: list[int], factor: float) -> None:
    """p^a (1 - p)^b; another group, half solved, and one without verdicts do not mix with it."""
    rows = [row(reward=float(r)) for r in solved] + [row(reward=float(r), group="b") for r in (1, 0)]
    rows.append(row([4, 5], group="c"))
    half = 0.5**a * 0.5**b
    expected = [factor] * 4 + [half] * 2 + [0.0, 0.0]
    assert [x for part in ByPassRate(a, b).weigh(rows, ()) for x in part] == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------- perplexity

PPL_T, PPL_S = (1.361, 1.755, 2.383), (1.2, 1.5, 2.0)


@pytest.mark.parametrize(
    ("of", "tau", "weights"),
    [
        ("teacher", 1.0, (0.426, 0.330, 0.243)),  # 1/PPL: .7348 + .5698 + .4196 = 1.7242
        ("teacher", 0.5, (0.519, 0.312, 0.169)),
        ("teacher", 2.0, (0.379, 0.334, 0.287)),
        ("student", 1.0, (0.255, 0.319, 0.426)),  # 1.2, 1.5, 2.0 over 4.7
    ],
)
def test_perplexity_shares(of: str, tau: float, weights: tuple[float, ...]) -> None:
    """The numbers of SCOPE; rows of different length, and a second group with a share of its own."""
    of_rows = PPL_T if of == "teacher" else PPL_S
    name = TEACHER if of == "teacher" else STUDENT
    rows = [row([4] * n) for n in (2, 4, 2)] + [row(group="b")]
    given = [{name: torch.tensor(logp_of(ppl, len(r.trainable)))} for ppl, r in zip(of_rows, rows[:3], strict=True)]
    found = ByPerplexity(of=of, tau=tau).weigh(rows, [*given, {name: torch.tensor([-3.0])}])
    assert [part[0] for part in found[:3]] == pytest.approx(weights, abs=1e-3)
    assert [len(part) for part in found] == [2, 4, 2, 1]
    assert found[3] == [1.0]


def test_perplexity_shares_of_one_side() -> None:
    """Right rows of PPL 1.2 and 2.0 share 1.2 / 3.2 and 2 / 3.2; the wrong and the unjudged row have none."""
    rows = [row(reward=r) for r in (1.0, 0.0, 1.0, None)]
    given = [{STUDENT: torch.tensor([-log(ppl)])} for ppl in (1.2, 1.5, 2.0, 9.0)]
    right = ByPerplexity(side="right").weigh(rows, given)
    assert [part[0] for part in right] == pytest.approx([0.375, 0.0, 0.625, 0.0])
    assert ByPerplexity(side="wrong").weigh(rows, given) == [[0.0], [1.0], [0.0], [0.0]]


def test_a_row_that_the_teacher_did_not_score_has_no_share_and_does_not_spoil_the_others() -> None:
    given = [{TEACHER: torch.tensor([value])} for value in (-1.0, nan, -1.0)]
    assert ByPerplexity(of="teacher").weigh([row(), row(), row()], given) == [[0.5], [0.0], [0.5]]


def test_a_row_scored_in_part_has_the_perplexity_of_that_part() -> None:
    """Means of -ln 2 over (-ln 4, 0), and of -ln 4 over its one score: 1/2 and 1/4, so shares of 2/3 and 1/3."""
    given = [{TEACHER: torch.tensor(values)} for values in ([-log(4), nan, 0.0], [nan, -log(4)])]
    found = ByPerplexity(of="teacher").weigh([row([4, 5, 6]), row([4, 5])], given)
    assert [x for part in found for x in part] == pytest.approx([2 / 3] * 3 + [1 / 3] * 2)


def test_a_perplexity_beyond_overflow() -> None:
    """exp(2000) overflows; the shares are those of exp(1000) : 1."""
    given = [{STUDENT: torch.tensor([value])} for value in (-2000.0, -1000.0)]
    assert ByPerplexity().weigh([row(), row()], given) == [[1.0], [0.0]]


def test_tau_must_be_positive() -> None:
    with pytest.raises(ValueError, match="tau=0"):
        ByPerplexity(tau=0.0)


# ----------------------------------------------------------------------------------------------------------- top share


def test_the_highest_entropies_of_the_whole_batch() -> None:
    """Half of six: .9, .8, .7, wherever they stand."""
    given = facts(student_entropy=[[0.9, 0.1, 0.8], [0.2, 0.7], [0.3]])
    assert TopShare(0.5).weigh([row()] * 3, given) == [[1.0, 0.0, 1.0], [0.0, 1.0], [0.0]]


def test_the_largest_divergences() -> None:
    """A token without a score is not ranked: half of (.5, .1, 2, .4) is two, half of all six would be three."""
    given = facts(student_entropy=[[0.0] * 6], main_kl=[[0.5, nan, 0.1, 2.0, nan, 0.4]])
    assert TopShare(0.5, "divergence").weigh([row()], given) == [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("score", ["divergence", "soft_or"])
def test_tokens_without_a_score_are_not_kept_however_large_the_share(score: str) -> None:
    """Of equal tokens all three that have a score stay; where none has one, none stays."""
    given = facts(student_entropy=[[2.0, 1.0, 0.0], [5.0, 1.0]], main_kl=[[0.1, 0.1, 0.1], [nan, nan]])
    assert TopShare(1.0, score).weigh([row()] * 2, given) == [[1.0, 1.0, 1.0], [0.0, 0.0]]
    assert TopShare(1.0, score).weigh([row()], given[1:]) == [[0.0, 0.0]]


def test_soft_or() -> None:
    """h = (0, 1, .5, 0, 0) and d = (0, 0, .5, .9, 1): h + d - h d = 0, 1, .75, .9, 1. Two of five stay."""
    given = facts(student_entropy=[[1.0, 3.0, 2.0], [1.0]], main_kl=[[0.0, 0.0, 0.5], [0.9]])
    given.append({"student/entropy": torch.tensor([1.0]), "teacher/main/kl": torch.tensor([1.0])})
    found = TopShare(0.4, "soft_or").weigh([row()] * 3, given)
    assert found == [[0.0, 1.0, 0.0], [0.0], [1.0]]


def test_at_least_one_token_stays() -> None:
    assert TopShare(0.01).weigh([row()], facts(student_entropy=[[0.1, 0.3, 0.2]])) == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("share", [0.0, 1.1, -0.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        TopShare(share)


@pytest.mark.parametrize("score", ["entropy", "divergence", "soft_or"])
def test_ranks_with_other_numbers_of_rows_meet_as_often(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that not all ranks join would wait for ever: their number must not follow from the rows."""
    calls: list[object] = []

    def gather(value: Any) -> list[Any]:
        calls.append(value)
        return [value]

    monkeypatch.setattr(ranks, "gather", gather)
    counts = []
    for rows in (1, 3):
        calls.clear()
        given = facts(student_entropy=[[0.1, 0.2]] * rows, main_kl=[[0.1, 0.2]] * rows)
        TopShare(0.5, score).weigh([row()] * rows, given)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


# ---------------------------------------------------------------------------------------------------- teachers' weights


def test_early_disagreement() -> None:
    """|A| = (1, 2, 3, 4), gamma 1/2: 1 + (1 - 0) / 2, 1 + (1 - .1) / 2, 1 + (1 - .3) / 2, 1 + (1 - .6) / 2."""
    given = [{STUDENT: torch.tensor([-1.0, -3.0, -5.0, -1.0]), TEACHER: torch.tensor([-2.0, -1.0, -2.0, -5.0])}]
    assert EarlyDisagreement(0.5).weigh([row()], given)[0] == pytest.approx([1.5, 1.45, 1.35, 1.2])


def test_early_disagreement_where_models_agree_or_scores_are_missing() -> None:
    same = {STUDENT: torch.tensor([-1.0, -1.0]), TEACHER: torch.tensor([-1.0, -1.0])}
    gone = {STUDENT: torch.tensor([-1.0, -1.0]), TEACHER: torch.tensor([nan, nan])}
    assert EarlyDisagreement(0.5).weigh([row(), row()], [same, gone]) == [[1.5, 1.5], [1.5, 1.5]]


def test_early_disagreement_with_a_teacher_of_other_tokens() -> None:
    """The student's -3 is -1 given a common token, the teacher's too: the first gap is 0, and the second all of it."""
    given = {STUDENT: torch.tensor([-3.0, -3.0, -2.0]), TEACHER: torch.tensor([-1.0, -2.0, nan])}
    given["teacher/main/student_token_logp"] = torch.tensor([-1.0, -1.0, nan])
    assert EarlyDisagreement(0.5).weigh([row()], [given])[0] == pytest.approx([1.5, 1.5, 1.0])


def test_teacher_confidence() -> None:
    """1 - H / 2 with 2 the largest entropy of the batch; an unscored token counts as the least sure."""
    given = facts(main_entropy=[[0.0, 1.0], [2.0], [nan]])
    assert TeacherConfidence().weigh([row()] * 3, given) == [[1.0, 0.5], [0.0], [0.0]]


def test_a_teacher_that_is_always_sure() -> None:
    assert TeacherConfidence().weigh([row()], facts(main_entropy=[[0.0, 0.0]])) == [[1.0, 1.0]]


# ---------------------------------------------------------------------------------------------------------- in a batch

NEED_FACTS: list[Weigher] = [
    ByPerplexity(), ByPerplexity(of="teacher"), TopShare(), TopShare(score="divergence"), TopShare(score="soft_or"),
    EarlyDisagreement(), TeacherConfidence(),
]  # fmt: skip


@pytest.mark.parametrize("weigher", NEED_FACTS, ids=str)
def test_a_row_without_trainable_tokens_has_no_factors(weigher: Weigher) -> None:
    """Nothing is known of a micro-batch without any trainable token: its rows have no facts at all."""
    found = {name: torch.tensor([0.5]) for name in (STUDENT, TEACHER, "student/entropy", "teacher/main/kl")}
    found["teacher/main/entropy"] = torch.tensor([0.5])
    rows = [row([4], trainable=[False]), row([4])]
    given = split_by_rows(rows, [[0], [1]], [{}, found])
    assert [len(part) for part in weigher.weigh(rows, given)] == [0, 1]
    assert weigher.weigh(rows[:1], given[:1]) == [[]]


def test_facts_return_to_their_rows() -> None:
    """Micro-batches hold rows 2, 0 and then 1, of 1, 2 and 3 tokens."""
    rows = [row([4, 5]), row([4, 5, 6]), row([4])]
    found = [{"x": torch.tensor([20.0, 0.0, 1.0])}, {"x": torch.tensor([10.0, 11.0, 12.0])}]
    assert [fact["x"].tolist() for fact in split_by_rows(rows, [[2, 0], [1]], found)] == [
        [0.0, 1.0], [10.0, 11.0, 12.0], [20.0],
    ]  # fmt: skip


def test_factors_multiply_and_zeros_leave_the_count() -> None:
    """Right rows count .5, wrong 2, of each the first token: weights .5 / 2 and 2 / 2; without the first, 0."""
    weigh = {"side": ByCorrectness(right=0.5, wrong=2.0), "start": FirstTokens(1)}
    term = Term("x", CrossEntropy(), weigh=weigh)
    rows = [row([4, 5], reward=1.0), row([4, 5, 6], reward=0.0)]
    assert term_factors(rows, term, ()) == [[0.5, 0.0], [2.0, 0.0, 0.0]]
    batch = make_batch(rows, [term], 1000, 0)
    assert batch.term_counts == {"x": 2.0}
    (micro_batch,) = batch.micro_batches
    assert micro_batch.term_weights["x"].tolist() == [1.0, 0.0, 0.0, 0.25, 0.0]  # the longer row stands first


def test_a_share_is_of_the_tokens_of_the_term_s_own_streams() -> None:
    """Half of (.1, .2), not of (.1, .2, .8, .9): the other stream's tokens are the likelier ones to be kept."""
    elsewhere = replace(row([4, 5]), terms=frozenset({"y"}))
    term = Term("x", CrossEntropy(), weigh={"top": TopShare(0.5)})
    given = facts(student_entropy=[[0.8, 0.9], [0.1, 0.2]])
    assert term_factors([elsewhere, row([4, 5])], term, given) == [[0.0, 0.0], [0.0, 1.0]]


def test_a_pass_rate_counts_siblings_whose_score_is_missing() -> None:
    """One right of two: 1/2 * 1/2, though the wrong one stays out of the term."""
    unscored = replace(row(reward=0.0), scores={"main": None})
    term = Term("x", ReverseKL(), teacher="main", weigh={"pass": ByPassRate()})
    assert term_factors([row(reward=1.0), unscored], term, ()) == [[0.25], [0.0]]


def test_a_missing_score_leaves_the_term_whatever_the_weigher_says() -> None:
    unscored = replace(row([4, 5]), scores={"main": None})
    term = Term("x", ReverseKL(), teacher="main", weigh={"ppl": ByPerplexity(of="teacher")})
    given = [{TEACHER: torch.tensor([nan, nan])}, {TEACHER: torch.tensor([-1.0])}]
    assert term_factors([unscored, row([4])], term, given) == [[0.0, 0.0], [1.0]]
