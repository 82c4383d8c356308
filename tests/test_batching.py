"""Rows become micro-batches: what is counted, and that no split, order or mask changes loss and gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from opd.batching import make_batch
from opd.losses import Formula, OnTopK, ReverseKL
from opd.objective import Objective
from opd.padding import split_by_tokens
from opd.records import FullVocab, SomeTokens, TokenChunk, TopK
from opd.terms import Aggregation, Term
from tests.rows import (
    CONSTANT_WEIGHTS,
    TERMS,
    Setting,
    constant_terms,
    gradients,
    largest_difference,
    masked,
    rollout,
    row,
)
from tests.tiny import save_model

SPLITS = {40: [4], 20: [2, 2], 1: [1, 1, 1, 1], 30: [3, 1]}  # budget -> rows per micro-batch, of rows of 2, 10, 5, 3


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("models")
    return Setting.of(
        save_model(folder / "student", 0, hidden=16, layers=1), save_model(folder / "teacher", 1, hidden=24, layers=1)
    )


@pytest.fixture
def model(setting: Setting) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(setting.student)


@pytest.mark.parametrize("budget", SPLITS)
@pytest.mark.parametrize("names", [("distill",), ("reward",), ("distill", "reward")], ids="+".join)
def test_the_split_does_not_change_the_update(
    setting: Setting, model: nn.Module, budget: int, names: tuple[str, ...]
) -> None:
    """Answers of 1, 9, 4, 2 tokens at 2, 1, .5, 3 a token: (2 + 9 + 2 + 6) / 16 = 1.1875, and not 1.2167, the mean of
    the micro-batch means 11/10 and 8/6, nor 1.625, the mean of row means. Both terms: (0.5 + 2.0) * 1.1875.
    """
    constant = setting.constant()
    terms = [term for term in constant_terms() if term.name in names]
    goal = Objective(terms, CONSTANT_WEIGHTS, setting.vocab_size, chunk_tokens=3)
    _, whole, _ = gradients(model, constant.batch(terms=terms), goal, setting.heads())
    batch = constant.batch(terms=terms, budget=budget)
    loss, grads, metrics = gradients(model, batch, goal, setting.heads())
    assert [micro.rows for micro in batch.micro_batches] == SPLITS[budget]
    assert loss == pytest.approx(1.1875 * sum(CONSTANT_WEIGHTS[name] for name in names), abs=1e-5)
    for name in names:
        assert metrics[f"loss/{name}"].value == pytest.approx(1.1875, abs=1e-5)
    assert largest_difference(grads, whole) < 1e-6 * max(1.0, *(grad.abs().max().item() for grad in whole.values()))
    assert max(grad.abs().max().item() for grad in grads.values()) > 1e-2


@pytest.mark.parametrize("budget", SPLITS)
@pytest.mark.parametrize(("aggregation", "expected"), [("sequence_mean", 1.625), ("constant", 0.475)])
def test_other_ways_of_averaging_are_named(
    setting: Setting, model: nn.Module, budget: int, aggregation: Aggregation, expected: float
) -> None:
    """Mean of the row means (2 + 1 + .5 + 3) / 4 = 1.625; constant 10: (2 + 9 + 2 + 6) / (4 * 10) = .475."""
    constant, terms = setting.constant(), constant_terms(aggregation)
    goal = Objective(terms, CONSTANT_WEIGHTS, setting.vocab_size)
    loss, _, metrics = gradients(model, constant.batch(terms=terms, budget=budget), goal, setting.heads())
    assert metrics["loss/distill"].value == pytest.approx(expected, abs=1e-5)
    assert metrics["loss/reward"].value == pytest.approx(expected, abs=1e-5)
    assert loss == pytest.approx(2.5 * expected, abs=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("budget", [1000, 24, 1])
def test_order_and_budget_leave_loss_and_gradient_as_plain_torch_has_them(
    setting: Setting, model: nn.Module, budget: int, order: tuple[int, ...], aggregation: Aggregation
) -> None:
    """Every term type at once, rows without reward, without teacher score and with some tokens held constant."""
    rows = [setting.rows[i] for i in order]
    flags = [position % 3 != 1 for position in range(8)]
    rows = [replace(r, rollout=replace(r.rollout, trainable=flags[: len(r.rollout.token_ids)])) for r in rows]
    terms = [replace(term, aggregation=aggregation, constant_tokens=6) for term in TERMS.values()]
    reference = setting.plain_model()
    expected = setting.plain_loss(reference, rows, terms)
    expected.backward()
    batch = setting.batch(rows, terms, budget)
    loss, grads, _ = gradients(model, batch, setting.objective(terms), setting.heads())
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert largest_difference(grads, {name: p.grad for name, p in reference.named_parameters()}) < 1e-5


def test_a_micro_batch_without_trainable_tokens_adds_nothing(setting: Setting, model: nn.Module) -> None:
    """Each row is a micro-batch; masking two of them leaves the update of the others under their token count."""
    good = setting.rows[1:4]
    rows = [masked(setting.rows[0]), *good, masked(setting.rows[4])]
    alone, grads_alone, _ = gradients(model, setting.batch(good, budget=1), setting.objective(), setting.heads())
    batch = setting.batch(rows, budget=1)
    loss, grads, metrics = gradients(model, batch, setting.objective(), setting.heads())
    assert sorted(len(micro.tokens.token_ids) for micro in batch.micro_batches) == [0, 0, 1, 3, 8]
    assert batch.term_counts["kl"] == 12.0
    assert loss == pytest.approx(alone, abs=1e-6)
    assert largest_difference(grads, grads_alone) < 1e-6
    assert all(torch.tensor(mean.sum).isfinite() for mean in metrics.values())


def test_a_window_without_trainable_tokens_counts_nothing(setting: Setting) -> None:
    batch = setting.batch([masked(r) for r in setting.rows])
    assert set(batch.term_counts.values()) == {0.0}
    assert len(batch.micro_batches[0].tokens.token_ids) == 0


def test_a_row_leaves_only_the_terms_whose_signal_it_lacks(setting: Setting) -> None:
    """Answers of 5, 3, 1, 8, 4 tokens; row 2 is in `kl` alone, row 3 has no reward, row 4 no teacher score:
    kl 5 + 3 + 1 + 8 = 17 tokens, forward and jsd 16, pg 5 + 3 + 4 = 12.
    """
    batch = setting.batch(budget=1)
    assert batch.term_counts == {"kl": 17.0, "forward": 16.0, "jsd": 16.0, "pg": 12.0}
    by_tokens = {len(micro.tokens.token_ids): micro for micro in batch.micro_batches}
    assert by_tokens[8].term_weights["pg"].tolist() == [0.0] * 8
    assert by_tokens[8].term_weights["kl"].tolist() == pytest.approx([1 / 17] * 8)
    assert by_tokens[4].term_weights["kl"].tolist() == [0.0] * 4
    assert by_tokens[4].term_weights["pg"].tolist() == pytest.approx([1 / 12] * 4)
    assert by_tokens[1].term_weights["jsd"].tolist() == [0.0]
    assert "main" not in by_tokens[4].teachers
    assert by_tokens[8].teachers["main"].present.all()


def test_missing_scores_never_reach_the_loss(setting: Setting, model: nn.Module) -> None:
    """A row whose teacher has no score, in one micro-batch with rows that have one, under every teacher term."""
    terms = [TERMS["kl"], TERMS["jsd"]]
    loss, grads, metrics = gradients(
        model, setting.batch(setting.rows[:4], terms), setting.objective(terms), setting.heads()
    )
    loss_too, grads_too, metrics_too = gradients(
        model, setting.batch(setting.rows, terms), setting.objective(terms), setting.heads()
    )
    assert loss_too == pytest.approx(loss, abs=1e-6)
    assert largest_difference(grads_too, grads) < 1e-6
    assert metrics["teacher/main/kl"].count == metrics_too["teacher/main/kl"].count == 17.0
    assert metrics_too["student/entropy"].count == 21.0


def test_tokens_the_student_did_not_choose_are_context_only() -> None:
    """Prompt of 2, answer a b c d with b, c from a tool: a is predicted by column 1, d by column 4 of a row of 6."""
    sample = rollout([3, 4], [5, 6, 7, 8], logp=[-1.0, -2.0, -3.0, -4.0], trainable=[True, False, False, True])
    hidden = torch.arange(8.0).reshape(4, 2)
    made = row(sample, scores=FullVocab(hidden), advantage=0.5)
    micro = make_batch([made], list(TERMS.values()), 100, 0).micro_batches[0]
    assert micro.input_ids.tolist() == [[3, 4, 5, 6, 7, 8]]
    assert micro.tokens.predictor.tolist() == [1, 4]
    assert micro.tokens.token_ids.tolist() == [5, 8]
    assert micro.tokens.sampler_logp.tolist() == [-1.0, -4.0]
    assert micro.teachers["main"].hidden.tolist() == [[0.0, 1.0], [6.0, 7.0]]
    assert micro.term_weights["kl"].tolist() == [0.5, 0.5]


def test_missing_states_take_the_dtype_of_the_others() -> None:
    rows = [row(rollout([3], [4, 5])), row(rollout([3], [4]), scores=FullVocab(torch.ones(1, 2, dtype=torch.bfloat16)))]
    payload = make_batch(rows, [TERMS["kl"]], 100, 0).micro_batches[0].teachers["main"]
    assert payload.hidden.dtype == torch.bfloat16
    assert payload.present.tolist() == [True, False, False]
    assert payload.hidden.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def some(present: list[bool] | None, count: int = 3, k: int = 2) -> SomeTokens:
    """Scores -1, -2, -3 of `count` tokens, and the `k` likeliest."""
    top = TopK(torch.arange(k).repeat(count, 1), torch.full((count, k), -0.5))
    there = None if present is None else torch.tensor(present)
    return SomeTokens(-torch.arange(1.0, count + 1), top, there)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_token_without_a_score_leaves_the_term_and_its_count(aggregation: str) -> None:
    """Rows of 3 and 2 tokens of which the second and the first have no score: 3 tokens count, of 2 rows."""
    rows = [
        row(rollout([3], [4, 5, 6]), scores=some([True, False, True])),
        row(rollout([3], [4, 5]), scores=some([False, True], count=2, k=1)),
    ]
    term = Term("kl", OnTopK(ReverseKL(), k=2), teacher="main", aggregation=aggregation)
    batch = make_batch(rows, [term, TERMS["pg"]], 100, 0)
    micro = batch.micro_batches[0]
    assert batch.term_counts["kl"] == (3.0 if aggregation == "token_mean" else 2.0)
    shares = [1 / 3, 0, 1 / 3, 0, 1 / 3] if aggregation == "token_mean" else [1 / 4, 0, 1 / 4, 0, 1 / 2]
    assert micro.term_weights["kl"].tolist() == pytest.approx(shares)
    payload = micro.teachers["main"]
    assert payload.hidden is None
    assert payload.present.tolist() == [True, False, True, False, True]
    assert payload.token_logp.tolist() == [-1.0, 0.0, -3.0, 0.0, -2.0]
    assert payload.top.logp.tolist() == [[-0.5, -0.5]] * 3 + [[-0.5, -torch.inf]] * 2


def test_some_tokens_beside_a_row_without_scores() -> None:
    rows = [row(rollout([3], [4, 5, 6]), scores=some(None)), row(rollout([3], [4, 5]))]
    payload = make_batch(rows, [], 100, 0).micro_batches[0].teachers["main"]
    assert payload.present.tolist() == [True, True, True, False, False]
    assert payload.token_logp.tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0]
    assert payload.top.logp[3:].tolist() == [[-torch.inf, -torch.inf]] * 2


@pytest.mark.parametrize("budget", [1, 7, 12, 30, 1000])
def test_groups_stay_within_the_budget_and_a_longer_row_stands_alone(budget: int) -> None:
    lengths = [3, 12, 1, 7, 7, 2, 30, 5]
    groups = split_by_tokens(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[index] for index in group) * len(group) <= budget


def test_a_row_longer_than_the_budget_stands_alone() -> None:
    assert split_by_tokens([3, 30, 4], 12) == [[1], [2, 0]]


def test_no_rows_at_all_make_an_empty_batch() -> None:
    batch = make_batch([], list(TERMS.values()), 100, 0)
    assert batch.micro_batches == []
    assert set(batch.term_counts.values()) == {0.0}


def test_an_empty_answer_carries_no_weight() -> None:
    """A rollout that was aborted before its first token: it is not a row of any mean either."""
    rows = [row(rollout([3], []), advantage=1.0), row(rollout([3], [4, 5]), advantage=1.0)]
    term = replace(TERMS["pg"], aggregation="sequence_mean")
    batch = make_batch(rows, [term], 100, 0)
    assert batch.term_counts == {"pg": 1.0}
    assert batch.micro_batches[0].term_weights["pg"].tolist() == [0.5, 0.5]


def filled(chunk: TokenChunk) -> Tensor:
    """Infinite value and slope where a row has no advantage (its filler is 0)."""
    return chunk.token_logp / chunk.advantages + (chunk.student_logp[:, 0] / chunk.advantages).exp()


def test_a_users_formula_may_be_infinite_on_rows_that_it_does_not_train(setting: Setting, model: nn.Module) -> None:
    """Row 3 has no reward, so the term does not weigh it: nothing of it reaches loss or gradient."""
    terms = [TERMS["kl"], replace(TERMS["pg"], loss=Formula(filled, frozenset({"advantage"})))]
    rows = setting.rows[:2]
    weights = {"kl": 0.0, "pg": 1.0}
    goal = setting.objective(terms, weights)
    loss, grads, _ = gradients(model, setting.batch(rows, terms), goal, setting.heads())
    batch = setting.batch([*rows, setting.rows[3]], terms)
    loss_too, grads_too, metrics = gradients(model, batch, goal, setting.heads())
    assert loss_too == pytest.approx(loss, abs=1e-6)
    assert largest_difference(grads_too, grads) < 1e-6
    assert torch.tensor(metrics["loss/pg"].value).isfinite()
