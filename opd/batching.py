"""Rollouts with their credit and teacher scores become padded micro-batches with exact global weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd import ranks
from opd.padding import pad, predictor_index, split_by_tokens
from opd.records import Batch, Credit, FullVocab, MicroBatch, Rollout, TeacherPayload, TokenFields
from opd.terms import Term


@dataclass(frozen=True)
class Row:
    """One rollout with all that is known of it. `terms`: names of the terms its stream trains under."""

    rollout: Rollout
    credit: Credit
    scores: Mapping[str, FullVocab | None]  # teacher name -> scores, None where missing
    terms: frozenset[str]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response, as they go through the model."""
        return self.rollout.prompt.token_ids + self.rollout.token_ids

    @property
    def trainable(self) -> list[int]:
        """Positions inside the response that the student chose."""
        flags = self.rollout.trainable or [True] * len(self.rollout.token_ids)
        return [position for position, flag in enumerate(flags) if flag]

    def trains(self, term: Term) -> bool:
        """Whether the term applies: its stream names it, and the reward or score that it needs exists."""
        return (
            term.name in self.terms
            and (not term.needs_advantage or self.credit.advantage is not None)
            and (term.teacher is None or self.scores[term.teacher] is not None)
        )


def make_batch(
    rows: Sequence[Row], terms: Sequence[Term], teacher_widths: Mapping[str, int], micro_batch_tokens: int, pad_id: int
) -> Batch:
    """This rank's rows as micro-batches of at most `micro_batch_tokens` padded tokens (a longer row stands alone).

    Term weights are divided by counts over all rows of all ranks, so the sum over micro-batches and ranks is the loss.
    All ranks get the same number of micro-batches; surplus ones are empty. `teacher_widths`: teacher -> hidden size.
    """
    counts = global_counts(rows, terms)
    groups = split_by_tokens([len(row.token_ids) for row in rows], micro_batch_tokens)
    most = max(ranks.gather(len(groups)))
    members = [[rows[i] for i in group] for group in groups] + [[] for _ in range(most - len(groups))]
    return Batch(
        micro_batches=[_micro_batch(group, terms, counts, teacher_widths, pad_id) for group in members],
        term_counts=counts,
        num_tokens=sum(len(row.trainable) for row in rows),
        min_version=min((row.rollout.version for row in rows), default=0),
    )


def global_counts(rows: Sequence[Row], terms: Sequence[Term]) -> dict[str, float]:
    """Each term's denominator over all ranks: tokens, rows, or rows times a constant."""
    local = {}
    for term in terms:
        tokens = [len(row.trainable) for row in rows if row.trains(term) and row.trainable]
        local[term.name] = float(sum(tokens) if term.aggregation == "token_mean" else len(tokens))
    scale = {term.name: term.constant_tokens if term.aggregation == "constant" else 1 for term in terms}
    return {name: count * scale[name] for name, count in ranks.sums(local).items()}


def _micro_batch(
    rows: Sequence[Row], terms: Sequence[Term], counts: Mapping[str, float], teachers: Mapping[str, int], pad_id: int
) -> MicroBatch:
    ids, mask = pad([row.token_ids for row in rows] or [[pad_id]], pad_id)
    predictors: list[int] = []
    token_ids: list[int] = []
    sampler_logp: list[float] = []
    advantages: list[float] = []
    for number, row in enumerate(rows):
        for position in row.trainable:
            predictors.append(predictor_index(number, ids.shape[1], len(row.rollout.prompt.token_ids), position))
            token_ids.append(row.rollout.token_ids[position])
            sampler_logp.append(row.rollout.logp[position])
            advantages.append(row.credit.advantage or 0.0)
    return MicroBatch(
        input_ids=ids,
        attention_mask=mask if rows else torch.ones_like(mask),
        tokens=TokenFields(
            torch.tensor(predictors, dtype=torch.long),
            torch.tensor(token_ids, dtype=torch.long),
            torch.tensor(sampler_logp, dtype=torch.float32),
            torch.tensor(advantages, dtype=torch.float32),
        ),
        term_weights={term.name: _weights(rows, term, counts[term.name]) for term in terms},
        teachers={name: _payload(rows, name, width) for name, width in teachers.items()},
        rows=len(rows),
    )


def _weights(rows: Sequence[Row], term: Term, count: float) -> Tensor:
    """[N]: each token's share of the term's global mean."""
    weights: list[float] = []
    for row in rows:
        tokens = len(row.trainable)
        each = 0.0
        if row.trains(term) and tokens:
            each = 1.0 / count / (tokens if term.aggregation == "sequence_mean" else 1)
        weights += [each] * tokens
    return torch.tensor(weights, dtype=torch.float32)


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
