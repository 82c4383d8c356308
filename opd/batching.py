"""Rollouts with their credit and teacher scores become padded micro-batches with exact global weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan

import torch
from torch import Tensor

from opd import ranks
from opd.losses import RowLoss
from opd.padding import pad, predictor_index, split_by_tokens
from opd.records import (
    Batch,
    FullVocab,
    MicroBatch,
    SomeTokens,
    TeacherPayload,
    TeacherScores,
    TokenFields,
    TokenRow,
    TopK,
)
from opd.rows import Row
from opd.terms import Term
from opd.token_statistics import student_beside
from opd.weighting import Facts

Factors = list[list[float]]  # per row, per trainable token


def make_batch(
    rows: Sequence[Row],
    terms: Sequence[Term],
    micro_batch_tokens: int,
    pad_id: int,
    facts: Facts = (),
    progress: float = 0.0,
) -> Batch:
    """This rank's rows as micro-batches of at most `micro_batch_tokens` padded tokens (a longer row stands alone).

    Term weights are divided by counts over all rows of all ranks, so the sum over micro-batches and ranks is the loss.
    All ranks get the same number of micro-batches; surplus ones are empty. Rows that the same teachers scored stand
    together, so that a teacher's head is needed once in a while, not all the time. `facts`: per row, what a forward
    pass without gradients found, for the terms that need it; `progress`: steps done / steps planned.
    """
    factors = {term.name: term_factors(rows, term, facts) for term in terms}
    counts = _global_counts(factors, terms)
    kinds = [" ".join(row.scorers) for row in rows]
    groups = split_by_tokens([len(row.token_ids) for row in rows], micro_batch_tokens, kinds)
    groups += [[]] * (max(ranks.gather(len(groups))) - len(groups))
    weights = {term.name: _weights(factors[term.name], term, counts[term.name]) for term in terms}
    seen = {
        term.name: [_row_value(row, term.loss, term, facts[i], progress) for i, row in enumerate(rows)]
        for term in terms
        if isinstance(term.loss, RowLoss) and "row_value" in term.loss.needs
    }
    return Batch(
        micro_batches=[_micro_batch(group, rows, weights, pad_id, facts, seen) for group in groups],
        order=groups,
        term_counts=counts,
    )


def trains(row: Row, term: Term) -> bool:
    """Whether the term applies: the row's stream names it, and the reward and scores that it needs exist."""
    return (
        term.name in row.terms
        and (not term.needs_advantage or row.credit.advantage is not None)
        and all(row.scores[teacher] is not None for teacher in term.teachers)
    )


def term_factors(rows: Sequence[Row], term: Term, facts: Facts) -> Factors:
    """Every trainable token's factor under the term: the product of its weighers', 0 where the term does not apply.

    Weighers see all rows of the term's streams and no others: a group is whole, and a share is of the term's tokens.
    """
    factors = [_where_scored(row, term) if trains(row, term) else [0.0] * len(row.trainable) for row in rows]
    seen = [index for index, row in enumerate(rows) if term.name in row.terms]
    for weigher in term.weigh.values():
        given = weigher.weigh([rows[index] for index in seen], [facts[index] for index in seen] if facts else ())
        for index, theirs in zip(seen, given, strict=True):
            factors[index] = [a * b for a, b in zip(factors[index], theirs, strict=True)]
    return factors


def _where_scored(row: Row, term: Term) -> list[float]:
    """1 for the trainable tokens that all of the term's teachers have scored."""
    known = [scores.present for name in term.teachers if (scores := row.scores[name]) is not None]
    masks = [present.tolist() for present in known if present is not None]
    return [float(all(mask[position] for mask in masks)) for position in row.trainable]


def _global_counts(factors: Mapping[str, Factors], terms: Sequence[Term]) -> dict[str, float]:
    """Each term's denominator over all ranks: tokens, rows, or rows times a constant; factor 0 does not count."""
    local = {}
    for term in terms:
        tokens = [sum(factor != 0 for factor in row) for row in factors[term.name]]
        local[term.name] = float(sum(tokens) if term.aggregation == "token_mean" else sum(map(bool, tokens)))
    scale = {term.name: term.constant_tokens if term.aggregation == "constant" else 1 for term in terms}
    return {name: count * scale[name] for name, count in ranks.sums(local).items()}


def _weights(factors: Factors, term: Term, count: float) -> Factors:
    """Each token's share of the term's global mean."""
    weights = []
    for row in factors:
        tokens = sum(factor != 0 for factor in row)
        each = 1.0 / count / (tokens if term.aggregation == "sequence_mean" else 1) if tokens else 0.0
        weights.append([factor * each for factor in row])
    return weights


def _micro_batch(
    group: Sequence[int],
    rows: Sequence[Row],
    weights: Mapping[str, Factors],
    pad_id: int,
    facts: Facts,
    row_values: Mapping[str, Sequence[Tensor]],
) -> MicroBatch:
    members = [rows[index] for index in group]
    ids, mask = pad([row.token_ids for row in members] or [[pad_id]], pad_id)
    return MicroBatch(
        input_ids=ids,
        attention_mask=mask if members else torch.ones_like(mask),
        tokens=replace(
            _fields(members, ids.shape[1], [_row_log_ratio(rows[index], facts, index) for index in group]),
            row_values={name: torch.cat([given[i] for i in group]) for name, given in row_values.items() if group},
            sampler_top=_joined(
                [len(row.trainable) for row in members],
                [top and top.at(row.trainable) for row in members for top in [row.rollout.sampler_top]],
            ),
        ),
        term_weights={
            name: torch.tensor([w for index in group for w in given[index]], dtype=torch.float32)
            for name, given in weights.items()
        },
        teachers={
            name: _payload(members, name) for name in dict.fromkeys(name for row in members for name in row.scorers)
        },
        rows=len(members),
        rewards=[nan if row.reward.value is None else row.reward.value for row in members],
    )


def _fields(rows: Sequence[Row], width: int, row_log_ratios: Sequence[float]) -> TokenFields:
    predictors: list[int] = []
    token_ids: list[int] = []
    sampler_logp: list[float] = []
    advantages: list[float] = []
    log_ratios: list[float] = []
    for number, row in enumerate(rows):
        for position in row.trainable:
            predictors.append(predictor_index(number, width, len(row.rollout.prompt.token_ids), position))
            token_ids.append(row.rollout.token_ids[position])
            sampler_logp.append(row.rollout.logp[position])
            advantages.append(row.credit.advantage or 0.0)
            log_ratios.append(row_log_ratios[number])
    return TokenFields(
        torch.tensor(predictors, dtype=torch.long),
        torch.tensor(token_ids, dtype=torch.long),
        torch.tensor(sampler_logp, dtype=torch.float32),
        torch.tensor(advantages, dtype=torch.float32),
        torch.tensor(log_ratios, dtype=torch.float32),
    )


def _row_value(row: Row, loss: RowLoss, term: Term, fact: Mapping[str, Tensor], progress: float) -> Tensor:
    """What the loss makes of the row [R]; NaN where nothing is known of it or its teacher has not scored it."""
    if not fact or not row.trainable:
        return torch.full((len(row.trainable),), torch.nan)
    unknown = torch.full_like(fact["student/token_logp"], torch.nan)
    teacher, reference = (
        None if name is None else fact.get(f"teacher/{name}/token_logp", unknown)
        for name in (term.teacher, term.reference)
    )
    student = student_beside(fact, term.teachers)
    sampler = torch.tensor([row.rollout.logp[position] for position in row.trainable])
    sampler += student - fact["student/token_logp"]  # as in `restricted`: a ratio of the two stays what it was
    return loss.of_row(TokenRow(student, sampler, teacher, reference, progress))


def _row_log_ratio(row: Row, facts: Facts, index: int) -> float:
    """Mean over the row's trainable tokens of student minus sampler log-prob; 0 without facts."""
    if not facts or not row.trainable:
        return 0.0
    sampler = torch.tensor([row.rollout.logp[position] for position in row.trainable])
    return (facts[index]["student/token_logp"] - sampler).mean().item()


def _payload(rows: Sequence[Row], name: str) -> TeacherPayload:
    """One teacher's scores of the rows' trainable tokens; what is missing takes shape and device of the others."""
    given = [(row.trainable, row.scores[name]) for row in rows]
    present = [_present(scores, trainable) for trainable, scores in given]
    like = next(scores for _, scores in given if scores is not None)
    if isinstance(like, FullVocab):
        width = like.hidden.shape[1]
        states = [s.hidden[t] if isinstance(s, FullVocab) else like.hidden.new_zeros(len(t), width) for t, s in given]
        return TeacherPayload(torch.cat(states), torch.cat(present), places=_places(given))
    some = [(t, scores if isinstance(scores, SomeTokens) else None) for t, scores in given]
    logp = [torch.zeros(len(t)) if scores is None else scores.token_logp[t] for t, scores in some]
    top = _joined([len(t) for t, _ in some], [scores and scores.top and scores.top.at(t) for t, scores in some])
    there = torch.cat(present)
    return TeacherPayload(None, there, torch.where(there, torch.cat(logp), 0.0), top)


def _places(given: Sequence[tuple[list[int], TeacherScores | None]]) -> Tensor | None:
    """Where a teacher with other tokens stands, of all rows [N]; None of one with the student's."""
    placed = [scores.places if isinstance(scores, FullVocab) else None for _, scores in given]
    if all(places is None for places in placed):
        return None
    none = (torch.zeros(len(trainable), dtype=torch.long) for trainable, _ in given)
    return torch.cat([n if p is None else p[t].cpu() for n, p, (t, _) in zip(none, placed, given, strict=True)])


def _present(scores: TeacherScores | None, trainable: list[int]) -> Tensor:
    if scores is None or scores.present is None:
        return torch.full((len(trainable),), scores is not None)
    return scores.present[trainable].cpu()


def _joined(lengths: Sequence[int], tops: Sequence[TopK | None]) -> TopK | None:
    """Likeliest tokens of consecutive rows [N, K]; empty places where one has none or fewer. None if all have none."""
    width = max((top.ids.shape[1] for top in tops if top is not None), default=0)
    if not width:
        return None
    ids = torch.zeros(sum(lengths), width, dtype=torch.long)
    logp = torch.full((sum(lengths), width), -torch.inf)
    for place, top in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), tops, strict=False):
        if top is not None:
            here = (slice(place, place + len(top.ids)), slice(top.ids.shape[1]))
            ids[here], logp[here] = top.ids, top.logp
    return TopK(ids, logp)
