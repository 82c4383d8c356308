"""Metrics of a step are exact over micro-batches: sums and counts merge, never means of means."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from opd.losses import ReverseKL
from opd.metrics import (
    is_repetitive,
    logp_gaps,
    mismatch_metrics,
    outcome_metrics,
    rollout_metrics,
    statistics_metrics,
    values,
)
from opd.objective import Objective, Outcome
from opd.records import Example, Mean, MicroBatch, Prompt, Rollout
from opd.terms import Term
from tests.chunks import micro_batch
from tests.runs import opd, save_pair, training_lines


def outcome_of(loss: list[float], weights: list[float], entropy: list[float]) -> tuple[MicroBatch, Outcome]:
    """A micro-batch whose one term has the given values and weights, under a sampler that said log p = -1."""
    batch = micro_batch(
        torch.zeros(len(loss), dtype=torch.long),
        {"distill": torch.tensor(weights)},
        sampler_logp=torch.full((len(loss),), -1.0),
    )
    statistics = {"student/entropy": torch.tensor(entropy), "student/token_logp": torch.tensor(loss).neg()}
    return batch, Outcome({"distill": torch.tensor(loss)}, statistics)


OBJECTIVE = Objective([Term("distill", ReverseKL())], {"distill": 0.25}, vocab_size=4)


def test_means_count_tokens_not_micro_batches() -> None:
    """One token against three, token mean over 4: loss = (4 + 1 + 2 + 3) / 4 = 2.5, where the mean of the means would
    be (4 + 2) / 2 = 3; entropy = (8 + 0 + 0 + 0) / 4 = 2. The term's own weight 0.25 does not enter the logged loss."""
    outcomes = [outcome_of([4.0], [0.25], [8.0]), outcome_of([1.0, 2.0, 3.0], [0.25] * 3, [0.0] * 3)]
    found = outcome_metrics(outcomes, OBJECTIVE)
    assert found["loss/distill"].value == pytest.approx(2.5)
    assert found["student/entropy"] == Mean(8.0, 4.0)


def test_tokens_without_a_value_are_not_counted() -> None:
    """NaN stands where a teacher had no score: mean of (1, 3) = 2, and such a token's loss does not spoil the sum."""
    outcomes = [outcome_of([2.0, math.nan], [0.5, 0.0], [1.0, math.nan]), outcome_of([4.0], [0.5], [3.0])]
    found = outcome_metrics(outcomes, OBJECTIVE)
    assert found["student/entropy"] == Mean(4.0, 2.0)
    assert found["loss/distill"].value == pytest.approx(0.5 * 2.0 + 0.5 * 4.0)


def test_a_loss_that_is_not_finite_stays_so() -> None:
    """NaN on a token that counts must reach the guard before the step."""
    found = outcome_metrics([outcome_of([math.nan, 1.0], [0.5, 0.5], [1.0, 1.0])], OBJECTIVE)
    assert math.isnan(found["loss/distill"].value)


def test_the_mismatch_is_that_of_all_tokens() -> None:
    """Trainer log p = -loss, sampler -1: gaps of losses (1, 2, 4, 1) are 0, -1, -3, 0: mean |gap| = 1, and p95 lies at
    rank 0.95 * 3 = 2.85 of (0, 0, 1, 3): 1 + 0.85 * 2 = 2.7."""
    outcomes = [outcome_of([1.0], [0.25], [0.0]), outcome_of([2.0, 4.0, 1.0], [0.25] * 3, [0.0] * 3)]
    assert logp_gaps(outcomes).tolist() == [0.0, -1.0, -3.0, 0.0]
    found = mismatch_metrics(outcomes)
    assert found["mismatch/logp_diff_mean"].value == pytest.approx(1.0)
    assert found["mismatch/logp_diff_p95"].value == pytest.approx(2.7)


def test_micro_batches_without_tokens_have_no_metrics() -> None:
    empty = (micro_batch(torch.zeros(0, dtype=torch.long), {"distill": torch.zeros(0)}), Outcome({}, {}))
    assert mismatch_metrics([empty]) == {}
    assert statistics_metrics([empty]) == {}
    both = outcome_metrics([empty, outcome_of([3.0], [1.0], [2.0])], OBJECTIVE)
    assert both["loss/distill"].value == pytest.approx(3.0)
    assert both["student/entropy"] == Mean(2.0, 1.0)


def rollout(length: int, finish: str, text: str = "") -> Rollout:
    prompt = Prompt("0", "main", [3], Example("0"))
    return Rollout(prompt, 0, [4] * length, [-1.0] * length, text, finish, 0)


def test_rollouts_are_counted() -> None:
    """Lengths 2, 3, 7: sum 12 of 3, p95 at rank 0.95 * 2 = 1.9: 3 + 0.9 * 4 = 6.6; one stopped, one ran into the limit,
    one was aborted, one goes round in circles. An answer of 99 tokens that the data gave does not count.
    """
    sampled = [rollout(2, "stop"), rollout(3, "length", "ab" * 500), rollout(7, "aborted")]
    found = rollout_metrics([*sampled, rollout(99, "given")])
    assert values(found) == pytest.approx({
        "rollout/length": 4.0,
        "rollout/length_p95": 6.6,
        "rollout/length_max": 7.0,
        "rollout/stopped": 1 / 3,
        "rollout/truncated": 1 / 3,
        "rollout/aborted": 1 / 3,
        "rollout/repetitive": 1 / 3,
    })  # fmt: skip
    assert found["rollout/length"] == Mean(12.0, 3.0)
    assert rollout_metrics([rollout(99, "given")])["rollout/length"] == Mean(0.0, 0.0)
    assert values({"a": Mean(3.0, 2.0)}) == {"a": 1.5}


@pytest.mark.parametrize(("text", "repetitive"), [("", False), ("31415926535897932384", False), ("7" * 1000, True)])
def test_repetition_is_what_compresses(text: str, repetitive: bool) -> None:
    assert is_repetitive(text) is repetitive


def test_a_run_logs_the_same_whatever_the_micro_batches(tmp_path: Path) -> None:
    """The first update of the same run in one micro-batch and in one per row: metrics agree to fp32.

    The mismatch is left out: it is itself a rounding error.
    """
    pair = save_pair(tmp_path)
    found = []
    for number, tokens in enumerate((8192, 1)):
        run_dir = tmp_path / str(number)
        ended = opd(*pair.train(run_dir, "steps=1", "eval=none", f"engine.micro_batch_tokens={tokens}"))
        assert ended.code == 0, ended.err
        (line,) = training_lines(run_dir)
        found.append({name: value for name, value in line.items() if not name.startswith("mismatch/")})
    assert found[0].keys() == found[1].keys()
    assert {"loss/distill", "teacher/main/kl", "student/entropy", "grad_norm", "reward/mean"} <= found[0].keys()
    assert found[0] == pytest.approx(found[1], rel=2e-5)
