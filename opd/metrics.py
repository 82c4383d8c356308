"""Metrics of a step: every one a `Mean` that merges exactly over micro-batches and ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import get_args

import numpy
import torch
from torch import Tensor

from opd import ranks
from opd.objective import Objective, Outcome
from opd.records import Finish, Mean, MicroBatch, Rollout

Outcomes = Sequence[tuple[MicroBatch, Outcome]]  # of every micro-batch of an update
MAX_LOG_RATIO = 20.0  # nats; larger ones count as this in means of ratios
POSITIONS = (0, 100, 500, 2000, inf)  # bounds of the parts of an answer, in tokens
CORRECT = 0.5  # a reward of at least this is the verdict "correct"


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
    stops = stop_metrics(outcomes, objective.stop_ids)
    return metrics | statistics_metrics(outcomes) | stops | mismatch_metrics(outcomes) | teacher_metrics(outcomes)


def statistics_metrics(outcomes: Outcomes) -> dict[str, Mean]:
    """The mean of every per-token statistic, of this rank."""
    metrics = {}
    for name in sorted({name for _, outcome in outcomes for name in outcome.statistics}):
        values = torch.cat([outcome.statistics[name].cpu() for _, outcome in outcomes if name in outcome.statistics])
        present = values[~values.isnan()].double()
        metrics[name] = Mean(present.sum().item(), float(len(present)))
    return metrics


def mismatch_metrics(outcomes: Outcomes) -> dict[str, Mean]:
    """How far sampler and trainer log-probs of the sampled tokens lie apart, exact over ranks (all must call).

    Of the gap log(student / sampler), whose exponential is rho: mean and p95 of its size, its standard deviation, the
    estimates k1 and k3 of KL(sampler || student) (nats), the chi-square divergence E[(rho - 1)^2], and the effective
    sample size (sum rho)^2 / sum rho^2 as a share of the tokens.
    """
    gaps = torch.cat(ranks.gather(logp_gaps(outcomes)))
    if len(gaps) == 0:
        return {}
    rho = gaps.clamp(max=MAX_LOG_RATIO).exp()
    found = {
        "logp_diff_mean": gaps.abs().mean().item(),
        "logp_diff_p95": _quantile(gaps.abs(), 0.95),
        "logp_diff_std": gaps.std(correction=0).item(),
        "k1": -gaps.mean().item(),
        "k3": (rho - 1.0 - gaps).mean().item(),
        "chi2": (rho - 1.0).square().mean().item(),
        "ess": (rho.mean().square() / rho.square().mean()).item(),
    }
    return {f"mismatch/{name}": of_all_ranks(value) for name, value in found.items()}


def logp_gaps(outcomes: Outcomes) -> Tensor:
    """Trainer minus sampler log-prob of every trainable token [N]."""
    parts = [
        outcome.statistics["student/token_logp"].cpu() - batch.tokens.sampler_logp
        for batch, outcome in outcomes
        if "student/token_logp" in outcome.statistics
    ]
    gaps = torch.cat(parts).double() if parts else torch.zeros(0, dtype=torch.float64)
    return gaps[~gaps.isnan()]  # a given answer has no sampler


def stop_metrics(outcomes: Outcomes, stop_ids: Sequence[int]) -> dict[str, Mean]:
    """`.../stop_mass_end`: the probability of stopping where the student did, on the last tokens of stopped answers."""
    totals: dict[str, Mean] = {}
    for batch, outcome in outcomes:
        fields = batch.tokens
        stopped = torch.isin(fields.token_ids, torch.tensor(stop_ids, dtype=torch.long)) & ~fields.sampler_logp.isnan()
        ends = places(batch)[2] & stopped
        for name, values in outcome.statistics.items():
            if name.endswith("/stop_mass"):
                known = values.cpu()[ends & ~values.cpu().isnan()].double()
                found = Mean(known.sum().item(), float(len(known)))
                totals[f"{name}_end"] = totals.get(f"{name}_end", Mean(0.0, 0.0)) + found
    return {name: mean for name, mean in totals.items() if mean.count}


def places(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Of every trainable token [N]: its row, its distance from the row's first one, whether it is the row's last."""
    width = batch.input_ids.shape[1]
    row, column = batch.tokens.predictor // width, batch.tokens.predictor % width
    first = torch.full((int(row.max()) + 1 if len(row) else 0,), width).scatter_reduce(0, row, column, "amin")
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]
    return row, column - first[row], last


def teacher_metrics(outcomes: Outcomes) -> dict[str, Mean]:
    """What each teacher makes of the sampled tokens, `teacher/<name>/delta_...`, exact over ranks (all must call).

    delta is the teacher's minus the student's log-prob of the sampled token (nats). Of all tokens: `std`, `abs` (the
    mean size), `p95` and `p99` of the size, `positive` (share above 0), and `abs_<from>_<to>` by distance from the
    row's first trainable token. `advantage_corr`: Pearson's, over tokens whose advantage is not 0. `correct`,
    `incorrect`: mean over rows by their verdict of a row's mean delta, and `auroc`, the probability that it is larger
    for a correct row than for an incorrect one (ties count half). What cannot be computed is left out.
    """
    local = {
        name: _deltas(outcomes, name)
        for name in dict.fromkeys(name for _, outcome in outcomes for name in outcome.statistics)
        if name.startswith("teacher/") and name.endswith("/delta")
    }
    parts = ranks.gather(local)
    metrics = {}
    for name in sorted({name for part in parts for name in part}):
        delta, advantage, position, row_delta, verdict = (
            torch.cat(column) for column in zip(*(part[name] for part in parts if name in part), strict=True)
        )
        found = _of_tokens(delta, advantage, position) | _of_rows(row_delta, verdict)
        metrics |= {f"{name}_{key}": of_all_ranks(value) for key, value in found.items()}
    return metrics


def _deltas(outcomes: Outcomes, name: str) -> tuple[Tensor, ...]:
    """delta, advantage and position [N] of the tokens that have one; mean delta and verdict [rows] of their rows."""
    columns: list[tuple[Tensor, ...]] = []
    for batch, outcome in outcomes:
        if name in outcome.statistics:
            delta = outcome.statistics[name].cpu().double()
            known = ~delta.isnan()
            row, position, _ = places(batch)
            rows, inside = row[known].unique(return_inverse=True)
            mean = torch.zeros(len(rows), dtype=torch.float64).scatter_reduce(
                0, inside, delta[known], "mean", include_self=False
            )
            verdicts = torch.tensor(batch.rewards, dtype=torch.float64)[rows] if batch.rewards else mean * torch.nan
            columns.append((delta[known], batch.tokens.advantages[known], position[known], mean, verdicts))
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))


def _of_tokens(delta: Tensor, advantage: Tensor, position: Tensor) -> dict[str, float]:
    if len(delta) == 0:
        return {}
    size = delta.abs()
    found = {
        "std": delta.std(correction=0).item(),
        "abs": size.mean().item(),
        "p95": _quantile(size, 0.95),
        "p99": _quantile(size, 0.99),
        "positive": (delta > 0).double().mean().item(),
    }
    for low, high in pairwise(POSITIONS):
        inside = (position >= low) & (position < high)
        if bool(inside.any()):
            found[f"abs_{low:g}_{high:g}"] = size[inside].mean().item()
    credited = advantage != 0
    pair = torch.stack([delta[credited], advantage[credited].double()])
    if len(pair[0]) > 1 and bool((pair.std(1) > 0).all()):
        found["advantage_corr"] = pair.corrcoef()[0, 1].item()
    return found


def _of_rows(delta: Tensor, verdict: Tensor) -> dict[str, float]:
    correct, incorrect = delta[verdict >= CORRECT], delta[verdict < CORRECT].sort().values
    found = {name: side.mean().item() for name, side in (("correct", correct), ("incorrect", incorrect)) if len(side)}
    if len(found) == 2:
        below, not_above = (torch.searchsorted(incorrect, correct, right=right).double() for right in (False, True))
        found["auroc"] = ((below + not_above) / 2 / len(incorrect)).mean().item()
    return found


def _quantile(values: Tensor, q: float) -> float:
    return float(numpy.quantile(values.numpy(), q))  # torch's own refuses more than 16 million values


def of_all_ranks(value: float) -> Mean:
    """A value that every rank has computed from all ranks' tokens: merging leaves it as it is."""
    share = 1.0 / ranks.world_size()
    return Mean(share * value, share)


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Mean]:
    """Length, ending and repetition of the sampled answers (all ranks must call)."""
    rollouts = [rollout for rollout in rollouts if rollout.finish != "given"]
    count, lengths = float(len(rollouts)), [len(rollout.token_ids) for rollout in rollouts]
    ended = {finish: Mean(float(sum(r.finish == finish for r in rollouts)), count) for finish in get_args(Finish)}
    everywhere = torch.tensor([length for part in ranks.gather(lengths) for length in part], dtype=torch.float64)
    spread = (
        {"length_p95": _quantile(everywhere, 0.95), "length_max": everywhere.max().item()} if len(everywhere) else {}
    )
    return {
        "rollout/length": Mean(float(sum(lengths)), count),
        **{f"rollout/{name}": of_all_ranks(value) for name, value in spread.items()},
        "rollout/stopped": ended["stop"],
        "rollout/truncated": ended["length"],
        "rollout/aborted": ended["aborted"],
        "rollout/repetitive": Mean(float(sum(is_repetitive(rollout.text) for rollout in rollouts)), count),
    }


def is_repetitive(text: str) -> bool:
    """Whether the last 10,000 characters compress more than tenfold: a text that goes round in circles (2604.08527)."""
    tail = text[-10_000:].encode()
    return len(tail) > 10 * len(zlib.compress(tail))


def values(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """Plain numbers, for loggers."""
    return {name: mean.value for name, mean in metrics.items()}
