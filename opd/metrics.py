"""Metrics of a step: every one a `Mean` that merges exactly over micro-batches and ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy
import torch

from opd import ranks
from opd.objective import Objective, Outcome
from opd.records import Mean, MicroBatch, Rollout

Outcomes = Sequence[tuple[MicroBatch, Outcome]]  # of every micro-batch of an update


def outcome_metrics(outcomes: Outcomes, objective: Objective) -> dict[str, Mean]:
    """Losses as trained (before the term's own weight), and the mean of every per-token statistic, of this rank."""
    metrics = {}
    for term in objective.terms:
        total = 0.0
        for batch, outcome in outcomes:
            weight = batch.term_weights[term.name]
            if term.name in outcome.values:  # a micro-batch without trainable tokens has none
                total += torch.where(weight != 0, weight * outcome.values[term.name].cpu(), 0.0).sum().item()
        metrics[f"loss/{term.name}"] = Mean(total, 1.0 / ranks.world_size())
    return metrics | statistics_metrics(outcomes) | mismatch_metrics(outcomes)


def statistics_metrics(outcomes: Outcomes) -> dict[str, Mean]:
    """The mean of every per-token statistic, of this rank."""
    metrics = {}
    for name in sorted({name for _, outcome in outcomes for name in outcome.statistics}):
        values = torch.cat([outcome.statistics[name].cpu() for _, outcome in outcomes if name in outcome.statistics])
        present = values[~values.isnan()].double()
        metrics[name] = Mean(present.sum().item(), float(len(present)))
    return metrics


def mismatch_metrics(outcomes: Outcomes) -> dict[str, Mean]:
    """How far sampler and trainer log-probs of the sampled tokens lie apart, exact over ranks (all must call)."""
    gaps = [gap for part in ranks.gather(logp_gaps(outcomes).abs().tolist()) for gap in part]
    if not gaps:
        return {}
    share = 1.0 / ranks.world_size()
    return {
        "mismatch/logp_diff_mean": Mean(share * sum(gaps) / len(gaps), share),
        "mismatch/logp_diff_p95": Mean(share * float(numpy.quantile(gaps, 0.95)), share),
    }


def logp_gaps(outcomes: Outcomes) -> torch.Tensor:
    """Trainer minus sampler log-prob of every trainable token [N]."""
    parts = [
        outcome.statistics["student/token_logp"].cpu() - batch.tokens.sampler_logp
        for batch, outcome in outcomes
        if "student/token_logp" in outcome.statistics
    ]
    gaps = torch.cat(parts).double() if parts else torch.zeros(0, dtype=torch.float64)
    return gaps[~gaps.isnan()]  # a given answer has no sampler


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Mean]:
    """Length, truncation and repetition of the sampled answers."""
    rollouts = [rollout for rollout in rollouts if rollout.finish != "given"]
    count = float(len(rollouts))
    return {
        "rollout/length": Mean(float(sum(len(rollout.token_ids) for rollout in rollouts)), count),
        "rollout/truncated": Mean(float(sum(rollout.finish == "length" for rollout in rollouts)), count),
        "rollout/aborted": Mean(float(sum(rollout.finish == "aborted" for rollout in rollouts)), count),
        "rollout/repetitive": Mean(float(sum(is_repetitive(rollout.text) for rollout in rollouts)), count),
    }


def is_repetitive(text: str) -> bool:
    """Whether the last 10,000 characters compress more than tenfold: a text that goes round in circles (2604.08527)."""
    tail = text[-10_000:].encode()
    return len(tail) > 10 * len(zlib.compress(tail))


def values(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """Plain numbers, for loggers."""
    return {name: mean.value for name, mean in metrics.items()}
