"""A loss term: a formula with its name, weight, teacher and way of averaging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from opd.losses import Loss
from opd.schedules import Constant, Schedule

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True)
class Term:
    """weight(progress) * sum_t w_t loss_t / N, with N counted over all ranks and micro-batches of the update.

    `aggregation`: `token_mean` (w = 1, N = tokens), `sequence_mean` (w = 1 / tokens of the row, N = rows; the mean of row
    means), `constant` (w = 1, N = rows * `constant_tokens`; Dr. GRPO, 2503.20783).
    """

    name: str
    loss: Loss
    weight: Schedule = field(default_factory=lambda: Constant(1.0))
    teacher: str | None = None
    aggregation: Aggregation = "token_mean"
    constant_tokens: int = 1

    @property
    def needs_advantage(self) -> bool:
        """Whether rows without a reward must stay out of this term."""
        return "advantage" in self.loss.needs
