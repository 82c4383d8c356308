"""Rollouts with their credit and teacher scores become padded micro-batches with exact global weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opd import ranks
from opd.padding import pad, predictor_index, split_by_tokens
from opd.records import Batch, MicroBatch, TeacherPayload, TokenFields
from opd.rows import Row
from opd.terms import Term
from opd.weighting import Facts

Factors = list[list[float]]  # per row, per trainable token


def make_batch(
    rows: Sequence[Row],
    terms: Sequence[Term],
    teacher_widths: Mapping[str, int],
    micro_batch_tokens: int,
    pad_id: int,
    facts: Facts = (),
) -> Batch:
    """This rank's rows as micro-batches of at most `micro_batch_tokens` padded tokens (a longer row stands alone).

    Term weights are divided by counts over all rows of all ranks, so the sum over micro-batches and ranks is the loss.
    All ranks get the same number of micro-batches; surplus ones are empty. `teacher_widths`: teacher -> hidden size;
    `facts`: per row, what a forward pass without gradients found, for the terms that need it.
    """
    factors = {term.name: term_factors(rows, term, facts) for term in terms}
    counts = _global_counts(factors, terms)
    groups = split_by_tokens([len(row.token_ids) for row in rows], micro_batch_tokens)
    groups += [[]] * (max(ranks.gather(len(groups))) - len(groups))
    weights = {term.name: _weights(factors[term.name], term, counts[term.name]) for term in terms}
    return Batch(
        micro_batches=[_micro_batch(group, rows, weights, teacher_widths, pad_id, facts) for group in groups],
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
    factors = [[float(trains(row, term))] * len(row.trainable) for row in rows]
    seen = [index for index, row in enumerate(rows) if term.name in row.terms]
    for weigher in term.weigh.values():
        given = weigher.weigh([rows[index] for index in seen], [facts[index] for index in seen] if facts else ())
        for index, theirs in zip(seen, given, strict=True):
            factors[index] = [a * b for a, b in zip(factors[index], theirs, strict=True)]
    return factors


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
    teachers: Mapping[str, int],
    pad_id: int,
    facts: Facts,
) -> MicroBatch:
    members = [rows[index] for index in group]
    ids, mask = pad([row.token_ids for row in members] or [[pad_id]], pad_id)
    return MicroBatch(
        input_ids=ids,
        attention_mask=mask if members else torch.ones_like(mask),
        tokens=_fields(members, ids.shape[1], [_row_log_ratio(rows[index], facts, index) for index in group]),
        term_weights={
            name: torch.tensor([w for index in group for w in given[index]], dtype=torch.float32)
            for name, given in weights.items()
        },
        teachers={name: _payload(members, name, width) for name, width in teachers.items()},
        rows=len(members),
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


def _row_log_ratio(row: Row, facts: Facts, index: int) -> float:
    """Mean over the row's trainable tokens of student minus sampler log-prob; 0 without facts."""
    if not facts or not row.trainable:
        return 0.0
    sampler = torch.tensor([row.rollout.logp[position] for position in row.trainable])
    return (facts[index]["student/token_logp"] - sampler).mean().item()


def _payload(rows: Sequence[Row], name: str, width: int) -> TeacherPayload:
    given = [scores.hidden for row in rows if (scores := row.scores[name]) is not None]
    like = given[0] if given else torch.zeros(0, width)  # missing states take the device and dtype of the others
    hidden: list[Tensor] = [like.new_zeros(0, width)]
    present: list[bool] = []
    for row in rows:
        scores = row.scores[name]
        trainable = row.trainable
        present += [scores is not None] * len(trainable)
        hidden.append(like.new_zeros(len(trainable), width) if scores is None else scores.hidden[trainable])
    return TeacherPayload(torch.cat(hidden), torch.tensor(present, dtype=torch.bool))
